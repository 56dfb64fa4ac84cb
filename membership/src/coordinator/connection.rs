//! One peer's connection: what it was told, and what it has still to hear.
//!
//! Telling is by level, not by edge: whatever happened, `sync` compares what the roster says with what this connection was told.

use std::sync::Arc;

use types::{Attempt, Generation, JobId, NodeId, Timestamp, World, WorldChange};

use crate::coordinator::Coordinator;
use crate::coordinator::watch::JobWatch;
use crate::job::{Job, Stage};
use crate::message::{Cause, FromCoordinator, Release};
use crate::peer::{ConnectionKey, Peer, Role};

/// A connection at this coordinator.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) peer: Peer,
    /// The job that it asked to join.
    pub(super) job: Option<JobId>,
    pub(super) told: Told,
}

/// What it was told on this connection.
#[derive(Debug, Default)]
pub(super) struct Told {
    pub(super) is_joined: bool,
    pub(super) is_released: bool,
    world: Option<Arc<World>>,
    world_at: Timestamp,
    intent: Attempt,
    publish: Attempt,
    ended: Attempt,
}

/// The newest change, ready for all who are told it.
#[derive(Debug, Default)]
pub(super) struct Changes(Option<(Arc<World>, Arc<World>, Arc<WorldChange>)>);

impl Changes {
    /// Tells a world to one who has `base`, by what is new in it.
    fn message(&mut self, base: Option<&Arc<World>>, world: &Arc<World>) -> FromCoordinator {
        let Some(base) = base else { return FromCoordinator::World(Arc::clone(world)) };
        if let Some((from, to, change)) = &self.0
            && Arc::ptr_eq(from, base)
            && Arc::ptr_eq(to, world)
        {
            return FromCoordinator::WorldChange(Arc::clone(change));
        }
        let change = Arc::new(WorldChange::between(base, world));
        self.0 = Some((Arc::clone(base), Arc::clone(world), Arc::clone(&change)));
        FromCoordinator::WorldChange(change)
    }
}

impl Connection {
    pub(super) fn new(peer: Peer) -> Self {
        Self { peer, job: None, told: Told::default() }
    }
}

impl Coordinator {
    /// Tells a worker what it has not heard on this connection.
    pub(super) fn sync(&mut self, key: ConnectionKey) {
        let now = self.now;
        let Some(connection) =
            self.connections.get_mut(&key).filter(|c| c.peer.role == Role::Worker)
        else {
            return;
        };
        let node = connection.peer.node;
        let job = match &connection.job {
            Some(job) => self.roster.job(job),
            None => self.roster.job_of(node),
        };
        let Some(job) = job else { return };
        connection.job = Some(job.spec().job.clone());
        let told = &mut connection.told;
        let mut messages = Vec::new();
        if job.is_living(node) && !told.is_joined {
            told.is_joined = true;
            messages.push(FromCoordinator::Joined { node });
        }
        if job.is_living(node) && job.stage() != Stage::Finished {
            let listing = |w: &&Arc<World>| w.has_member(node) || w.has_follower(node);
            let first = job.worlds().find(listing).map(|w| w.generation);
            let known = told.world.as_ref().map_or(Generation(0), |world| world.generation);
            let news = job
                .worlds()
                .filter(|w| w.generation > known && first.is_some_and(|f| w.generation >= f));
            for world in news {
                let base = told.world.replace(Arc::clone(world));
                told.world_at = now;
                messages.push(self.changes.message(base.as_ref(), world));
            }
        }
        if job.is_living(node) {
            let leading = self.leading.as_ref().and_then(|l| l.jobs.get(&job.spec().job));
            messages.extend(checkpoint_news(job, told, node, leading));
        }
        if let Some(release) = release(job, node).filter(|_| !told.is_released) {
            told.is_released = true;
            messages.push(FromCoordinator::Released(release));
        }
        messages.into_iter().for_each(|message| self.send(key, message));
    }

    /// Tells the worlds again to one who seems not to have them.
    pub(super) fn resend_worlds(
        &mut self,
        key: ConnectionKey,
        entered: Option<Generation>,
        newest: Generation,
    ) {
        let now = self.now;
        let Some(connection) = self.connections.get_mut(&key) else { return };
        let told = &mut connection.told;
        if entered < Some(newest) && newest.0 > 0 && now >= told.world_at + self.timing.resend() {
            told.world = None;
            self.sync(key);
        }
    }
}

fn checkpoint_news(
    job: &Job,
    told: &mut Told,
    node: NodeId,
    watch: Option<&JobWatch>,
) -> Vec<FromCoordinator> {
    let mut messages = Vec::new();
    if let Some((attempt, reason)) = job.abandoned().filter(|(attempt, _)| *attempt > told.ended) {
        told.ended = *attempt;
        messages.push(FromCoordinator::Abandoned { attempt: *attempt, reason: reason.clone() });
    }
    if let Some(committed) = job.committed().filter(|c| c.attempt > told.ended) {
        told.ended = committed.attempt;
        messages.push(FromCoordinator::Committed {
            attempt: committed.attempt,
            step: committed.step,
            manifest: committed.manifest.clone(),
        });
    }
    let open =
        job.intent().map(|open| &open.intent).filter(|intent| intent.members.contains(&node));
    if let Some(intent) = open.filter(|intent| intent.attempt > told.intent) {
        told.intent = intent.attempt;
        messages.push(FromCoordinator::Intent(intent.clone()));
    }
    let to_publish = open.filter(|intent| intent.writer == node && intent.attempt > told.publish);
    if let Some(intent) = to_publish
        && let Some(receipts) = watch.and_then(|watch| watch.checkpointing.receipts(job))
    {
        told.publish = intent.attempt;
        messages.push(FromCoordinator::Publish { attempt: intent.attempt, receipts });
    }
    messages
}

/// Whether a node may go, and why.
fn release(job: &Job, node: NodeId) -> Option<Release> {
    match job.gone(node) {
        Some(Cause::Left) => Some(Release::Drained),
        Some(_) if job.stage() == Stage::Finished => Some(Release::Finished),
        Some(cause) => Some(Release::Evicted { reason: cause.to_string() }),
        None => (job.stage() == Stage::Finished).then_some(Release::Finished),
    }
}
