//! [`LogWriter`]: the thread that writes a coordinator's log.
//!
//! A disk may take seconds where it is shared. On this thread nobody waits for it: the coordinator's own thread goes on hearing members and
//! keeping its followers, and only what a write promises waits until the write is done. Deliberately not here: what is written, and in
//! which order (the machine asks for one write at a time).

use std::sync::mpsc::Sender;
use std::time::Duration;

use membership::LogWrite;

use crate::clock;
use crate::durable_log::{DurableLog, DurableLogError};

/// A log that is written in the background.
#[derive(Debug)]
pub(super) struct LogWriter {
    writes: Option<Sender<Write>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

#[derive(Debug)]
struct Write {
    number: u64,
    write: LogWrite,
    sync: bool,
}

/// A write that was done, or could not be.
#[derive(Debug)]
pub(super) struct Written {
    pub(super) number: u64,
    pub(super) sync: bool,
    pub(super) took: Duration,
    pub(super) result: Result<(), DurableLogError>,
}

impl LogWriter {
    /// Starts the thread; `done` hears of each write. After one that failed no other is tried.
    pub(super) fn start(
        mut log: DurableLog,
        done: impl Fn(Written) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (writes, received) = std::sync::mpsc::channel::<Write>();
        let thread =
            std::thread::Builder::new().name("ripstop-log".to_owned()).spawn(move || {
                for Write { number, write, sync } in received {
                    let began = clock::now();
                    let result = log.append(&write, sync);
                    let is_failed = result.is_err();
                    done(Written { number, sync, took: clock::now().since(began), result });
                    if is_failed {
                        return;
                    }
                }
            })?;
        Ok(Self { writes: Some(writes), thread: Some(thread) })
    }

    /// Writes, later.
    pub(super) fn write(&self, number: u64, write: LogWrite, sync: bool) {
        if let Some(writes) = &self.writes {
            // If the thread has ended, `done` said why.
            let _ = writes.send(Write { number, write, sync });
        }
    }
}

impl Drop for LogWriter {
    /// Waits for what is being written: who opens the log next must find it closed.
    fn drop(&mut self) {
        self.writes = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
