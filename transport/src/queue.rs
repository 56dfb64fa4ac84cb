//! The frames that wait on one lane to be sent, bounded by their bytes. Sending is cancel-safe: a frame is queued whole or not at all.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use crate::Frame;

/// A queue for one lane.
pub(crate) fn queue() -> (QueueSender, QueueReceiver) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let budget = Arc::new(Semaphore::new(BUDGET_BYTES as usize));
    (
        QueueSender { items: sender, budget: Arc::clone(&budget) },
        QueueReceiver { items: receiver, budget },
    )
}

/// The end that takes frames in.
#[derive(Debug)]
pub(crate) struct QueueSender {
    items: mpsc::UnboundedSender<Item>,
    budget: Arc<Semaphore>,
}

impl QueueSender {
    /// Queues a frame; waits while too many bytes are queued. False if the queue has ended.
    pub(crate) async fn push(&self, frame: Frame) -> bool {
        let cost = u32::try_from(frame.wire_bytes())
            .unwrap_or(BUDGET_BYTES)
            .saturating_add(FRAME_COST_BYTES);
        let Ok(permit) = Arc::clone(&self.budget).acquire_many_owned(cost.min(BUDGET_BYTES)).await
        else {
            return false;
        };
        self.items.send(Item::Frame(frame, permit)).is_ok()
    }

    /// Ends the queue after what is in it. The receiver of the pair hears when the peer has all of it, or nothing ever.
    pub(crate) fn finish(&self) -> oneshot::Receiver<()> {
        let (done, heard) = oneshot::channel();
        self.budget.close();
        // If nobody takes items any more, the pair ends unheard, which is what it says.
        let _ = self.items.send(Item::Finish(done));
        heard
    }

    /// Ends the queue at once for those who would push.
    pub(crate) fn end(&self) {
        self.budget.close();
    }
}

/// The end that gives them out, in order.
#[derive(Debug)]
pub(crate) struct QueueReceiver {
    items: mpsc::UnboundedReceiver<Item>,
    budget: Arc<Semaphore>,
}

impl QueueReceiver {
    /// The next item; `None` when all senders are gone. Cancel-safe.
    pub(crate) async fn pop(&mut self) -> Option<Item> {
        self.items.recv().await
    }
}

impl Drop for QueueReceiver {
    fn drop(&mut self) {
        // Wakes those who wait for room.
        self.budget.close();
    }
}

/// What stands in a queue.
#[derive(Debug)]
pub(crate) enum Item {
    /// A frame, and the room that it takes until it is dropped.
    Frame(Frame, OwnedSemaphorePermit),
    /// Nothing follows. To be answered when the peer has everything.
    Finish(oneshot::Sender<()>),
}

/// Enough to keep a stream busy while its writer is not scheduled. A larger frame waits until the queue is empty.
const BUDGET_BYTES: u32 = 8 << 20;

/// What a queued frame costs beside its bytes, so that empty frames are bounded too.
const FRAME_COST_BYTES: u32 = 128;
