//! What the leader knows of a job's workers from their heartbeats. Lost with the leader, and soon told again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use types::{Digest, Generation, Lineage, NodeId, Step, Timestamp, World};

use crate::config::Timing;
use crate::job::Job;
use crate::message::{Change, Heartbeat, Phase};

/// The newest heartbeat of each worker of one job, and what follows from them together.
#[derive(Debug, Default)]
pub struct Reports {
    newest: BTreeMap<NodeId, Heartbeat>,
    /// Digests by boundary, of the current lineage, until all members named theirs.
    states: BTreeMap<Step, BTreeMap<NodeId, Digest>>,
    lineage: Lineage,
    /// The newest worlds, of which it may still be told what the change cost.
    worlds: BTreeMap<Generation, Arc<World>>,
    /// The highest boundary seen, and when it was first seen.
    front: Option<(Timestamp, Step)>,
    steps_per_second: f64,
}

impl Reports {
    /// Worlds that may follow one another before anything is summed in them.
    const WORLDS_MAX: usize = 8;
    /// Boundaries that are kept for comparing; the members are at most one step apart.
    const STATES_MAX: usize = 32;

    /// Notes a heartbeat of a living worker.
    pub fn handle_heartbeat(
        &mut self,
        now: Timestamp,
        node: NodeId,
        mut heartbeat: Heartbeat,
        job: &Job,
    ) {
        heartbeat.applied.truncate(Heartbeat::APPLIED_MAX);
        heartbeat.changes.truncate(Heartbeat::CHANGES_MAX);
        if let Some(world) = job.world().filter(|w| !self.worlds.contains_key(&w.generation)) {
            self.worlds.insert(world.generation, Arc::clone(world));
            if self.worlds.len() > Self::WORLDS_MAX {
                self.worlds.pop_first();
            }
        }
        if self.lineage != job.lineage() {
            self.lineage = job.lineage();
            self.states.clear();
            self.front = None;
            self.steps_per_second = 0.0;
        }
        if heartbeat.lineage == self.lineage {
            for (step, digest) in &heartbeat.applied {
                self.states.entry(*step).or_default().insert(node, *digest);
            }
            while self.states.len() > Self::STATES_MAX {
                self.states.pop_first();
            }
            if let Some(step) =
                heartbeat.boundary().filter(|_| job.world().is_some_and(|w| w.has_member(node)))
            {
                self.measure(now, step);
            }
        }
        self.newest.insert(node, heartbeat);
    }

    /// Forgets a worker.
    pub fn handle_gone(&mut self, node: NodeId) {
        self.newest.remove(&node);
        for digests in self.states.values_mut() {
            digests.remove(&node);
        }
    }

    /// The newest heartbeat of a worker.
    #[must_use]
    pub fn newest(&self, node: NodeId) -> Option<&Heartbeat> {
        self.newest.get(&node)
    }

    /// The boundary that a worker reported in the current lineage.
    #[must_use]
    pub fn boundary(&self, job: &Job, node: NodeId) -> Option<Step> {
        self.newest.get(&node).filter(|h| h.lineage == job.lineage())?.boundary()
    }

    /// How long a leaf takes a worker in the current lineage.
    #[must_use]
    pub fn leaf_time(&self, job: &Job, node: NodeId) -> Option<Duration> {
        self.newest.get(&node).filter(|h| h.lineage == job.lineage())?.leaf_time
    }

    /// The newest generation that a worker knows all to have entered.
    #[must_use]
    pub fn entered(&self, node: NodeId) -> Option<Generation> {
        self.newest.get(&node)?.entered
    }

    /// Whether all living members of the newest world have reported to this leader.
    #[must_use]
    pub fn has_all(&self, job: &Job) -> bool {
        let heard = |node: &NodeId| self.newest.contains_key(node);
        job.world()
            .is_some_and(|w| w.nodes().filter(|n| job.is_living(*n)).all(|node| heard(&node)))
    }

    /// What the change to a world cost, once all its members that live have done their first step in it; of those after `after` the oldest.
    #[must_use]
    pub fn cost(&self, job: &Job, after: Generation) -> Option<Change> {
        let of_member = |generation: Generation, node: NodeId| {
            let changes = &self.newest.get(&node)?.changes;
            changes.iter().find(|change| change.generation == generation).map(|change| change.cost)
        };
        self.worlds.range(after.next()..).find_map(|(generation, world)| {
            let mut living = world.nodes().filter(|node| job.is_living(*node)).peekable();
            living.peek()?;
            let costs = living.map(|node| of_member(*generation, node));
            let cost = costs.reduce(|all, one| Some(all?.join(one?)))??;
            Some(Change { generation: *generation, cost })
        })
    }

    /// The highest boundary of the newest world's living members; that of the lineage's start if none reported one.
    #[must_use]
    pub fn highest(&self, job: &Job) -> Step {
        let start = job.worlds().find_map(|w| w.start.as_ref()).map_or(Step(0), |start| start.step);
        self.boundaries(job).flatten().max().unwrap_or(start)
    }

    /// The lowest boundary of the newest world's living members; `None` if one reported none.
    #[must_use]
    pub fn lowest(&self, job: &Job) -> Option<Step> {
        self.boundaries(job)
            .try_fold(Step(u64::MAX), |lowest, boundary| Some(lowest.min(boundary?)))
    }

    /// Whether the newest world serves: all have entered it, and all have reached its first step.
    #[must_use]
    pub fn is_in_effect(&self, job: &Job) -> bool {
        let Some(world) = job.world().filter(|w| job.entered() == Some(w.generation)) else {
            return false;
        };
        world.from.is_none_or(|from| self.lowest(job).is_some_and(|lowest| lowest >= from))
    }

    /// How many steps ahead of the highest boundary a change must lie, for all to hear of it before they get there.
    #[must_use]
    pub fn lead(&self, timing: Timing) -> u64 {
        let seconds = timing.heartbeat().as_secs_f64() * 2.0;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "not negative, and a cast saturates"
        )]
        let steps = (self.steps_per_second * seconds).ceil() as u64;
        steps.saturating_add(1).clamp(2, LEAD_MAX)
    }

    /// A boundary just ahead of all, but not past the last one.
    #[must_use]
    pub fn ahead(&self, job: &Job, timing: Timing) -> Step {
        let highest = self.highest(job);
        if job.world().is_some_and(|w| w.held) {
            return highest;
        }
        let ahead = Step(highest.0.saturating_add(self.lead(timing)));
        job.spec().total_steps.map_or(ahead, |total| ahead.min(total.max(highest)))
    }

    /// Whether a follower has the state, and is about as far as the members.
    #[must_use]
    pub fn is_level(&self, job: &Job, node: NodeId, timing: Timing) -> bool {
        let is_following = self.newest.get(&node).is_some_and(|h| h.phase == Phase::Following);
        let highest = self.highest(job);
        // In a held world nobody gets on, and nothing would help a follower that is behind.
        let slack = if job.world().is_some_and(|w| w.held) { 0 } else { self.lead(timing) };
        is_following
            && !self.is_cut_off(job, node)
            && self.boundary(job, node).is_some_and(|at| at.0.saturating_add(slack) >= highest.0)
    }

    /// Whether a follower and a member of the newest world can't reach each other: in the world it would hold all up.
    fn is_cut_off(&self, job: &Job, node: NodeId) -> bool {
        let names =
            |a: NodeId, b: NodeId| self.newest.get(&a).is_some_and(|h| h.cut_off.contains(&b));
        let mut members = job.world().into_iter().flat_map(|world| world.nodes());
        members.any(|member| names(member, node) || names(node, member))
    }

    /// The one digest of all members of the newest world at a boundary that all have reached, and none has passed.
    #[must_use]
    pub fn agreed(&self, job: &Job, step: Step) -> Option<Digest> {
        let world = job.world()?;
        let digest = |node: NodeId| {
            let heartbeat = self.newest.get(&node).filter(|h| h.lineage == job.lineage())?;
            heartbeat.applied.iter().max().filter(|(at, _)| *at == step).map(|(_, digest)| *digest)
        };
        let mut digests = world.nodes().map(digest);
        let first = digests.next()??;
        digests.all(|other| other == Some(first)).then_some(first)
    }

    /// Whose state differs from that of most members, where all have named theirs. A tie is won by the lowest rank.
    pub fn poll_diverged(&mut self, job: &Job) -> Option<Divergence> {
        let world = job.world().filter(|_| job.lineage() == self.lineage)?;
        let ready = |digests: &BTreeMap<NodeId, Digest>| {
            world.nodes().all(|node| digests.contains_key(&node))
        };
        while let Some(step) = self.states.iter().find(|(_, d)| ready(d)).map(|(step, _)| *step) {
            // Compared once; what a late follower says of it is compared at a later boundary.
            let digests = self.states.remove(&step).unwrap_or_default();
            if let Some(divergence) = compare(world, step, &digests) {
                return Some(divergence);
            }
        }
        None
    }

    fn boundaries(&self, job: &Job) -> impl Iterator<Item = Option<Step>> {
        let members = job.world().into_iter().flat_map(|world| world.nodes());
        members.filter(|node| job.is_living(*node)).map(|node| self.boundary(job, node))
    }

    fn measure(&mut self, now: Timestamp, step: Step) {
        let Some((since, front)) = self.front else {
            self.front = Some((now, step));
            return;
        };
        let elapsed = now.since(since);
        if step <= front || elapsed < MEASURE_MIN {
            return;
        }
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let rate = (step.0 - front.0) as f64 / elapsed.as_secs_f64();
        self.steps_per_second = if self.steps_per_second > 0.0 {
            f64::midpoint(self.steps_per_second, rate)
        } else {
            rate
        };
        self.front = Some((now, step));
    }
}

/// Members with a state of their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Divergence {
    /// Where.
    pub step: Step,
    /// Who, in rank order; followers last.
    pub nodes: Vec<NodeId>,
    /// What it says, with both digests.
    pub detail: String,
}

fn compare(world: &World, step: Step, digests: &BTreeMap<NodeId, Digest>) -> Option<Divergence> {
    let mut votes: Vec<(Digest, usize)> = Vec::new();
    for digest in world.nodes().filter_map(|node| digests.get(&node)) {
        match votes.iter_mut().find(|(other, _)| other == digest) {
            Some((_, count)) => *count += 1,
            None => votes.push((*digest, 1)),
        }
    }
    // The first of the greatest: digests stand in the order of the lowest rank that has them.
    let most = votes.iter().map(|(_, count)| *count).max()?;
    let (kept, _) = *votes.iter().find(|(_, count)| *count == most)?;
    let listed = world.nodes().chain(world.followers.iter().map(|f| f.node));
    let other = |node: &NodeId| digests.get(node).is_some_and(|digest| *digest != kept);
    let nodes: Vec<NodeId> = listed.filter(other).collect();
    let digest = digests.get(nodes.first()?)?;
    let detail = format!("{digest:#} at step {step}, where most have {kept:#}");
    Some(Divergence { step, nodes, detail })
}

/// Shorter intervals measure the jitter of heartbeats.
const MEASURE_MIN: Duration = Duration::from_millis(20);
/// A job that is faster than this many steps in two heartbeats goes past its changes, and takes them in mid-step.
const LEAD_MAX: u64 = 1 << 20;
