//! When the next world of a job is due, and what it is to be.
//!
//! One per job, at the leader. Losses make a world after a short window, held if too few are left; everything else waits until the
//! newest world serves. It only proposes: the roster checks each plan against the log.
//! Deliberately not here: checkpoints (see `checkpointing`) and verdicts (see `detector`).

use std::collections::BTreeMap;

use types::{Block, Generation, NodeId, Start, Step, Timestamp, World};

use crate::allocation::allocate;
use crate::command::WorldPlan;
use crate::config::Timing;
use crate::evening::{Evened, Evening, Shares};
use crate::gathering::Gathering;
use crate::job::{Job, Stage};
use crate::message::Cause;
use crate::reports::Reports;

/// Forms the worlds of one job.
#[derive(Debug)]
pub struct Formation {
    timing: Timing,
    /// When the first of the losses was heard of that no world has taken up yet.
    loss_since: Option<Timestamp>,
    /// Who could be in a first world, and since when it is just these.
    candidates: Vec<NodeId>,
    quiet_since: Timestamp,
    gathering: Gathering,
    evening: Evening,
    /// The newest world that was looked at.
    generation: Generation,
    /// Since when all members are to leave while a successor is not level.
    succession_since: Option<Timestamp>,
    deadline: Option<Timestamp>,
}

/// What to do now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Make this world.
    Form(WorldPlan),
    /// These have handed everything over.
    Leave(Vec<NodeId>),
    /// All are to leave and nothing more can be saved.
    Stop,
}

impl Formation {
    /// Knows nothing yet.
    #[must_use]
    pub fn new(timing: Timing, now: Timestamp) -> Self {
        Self {
            timing,
            loss_since: None,
            candidates: Vec::new(),
            quiet_since: now,
            gathering: Gathering::default(),
            evening: Evening::default(),
            generation: Generation(0),
            succession_since: None,
            deadline: None,
        }
    }

    /// A loss was heard of; the window for others begins, though the log may not have it yet.
    pub fn handle_loss(&mut self, now: Timestamp) {
        self.loss_since.get_or_insert(now);
    }

    /// When to evaluate again, if nothing else happens.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        self.deadline
    }

    /// Looks at the job and says what is due. Not to be called while a verdict is on its way into the log.
    pub fn evaluate(&mut self, now: Timestamp, job: &Job, reports: &Reports) -> Option<Decision> {
        self.deadline = None;
        if job.stage() == Stage::Finished {
            return None;
        }
        let world =
            job.world().filter(|_| job.stage() == Stage::Running && !job.heirs().is_empty());
        let Some(world) = world else {
            return self.first_world(now, job);
        };
        self.candidates.clear();
        if std::mem::replace(&mut self.generation, world.generation) != world.generation {
            self.gathering.handle_world();
            self.evening.forget();
        }
        if has_loss(job, world, reports) {
            let due = *self.loss_since.get_or_insert(now) + Timing::LOSS_WINDOW;
            if now < due {
                self.deadline = Some(due);
                return None;
            }
            return Some(Decision::Form(self.after_loss(job, world, reports)));
        }
        self.loss_since = None;
        if !reports.is_in_effect(job) {
            return None;
        }
        let listed = |node: &NodeId| world.has_member(*node) || world.has_follower(*node);
        let free: Vec<NodeId> =
            job.nodes().keys().copied().filter(|n| job.is_draining(*n) && !listed(n)).collect();
        if !free.is_empty() {
            return Some(Decision::Leave(free));
        }
        self.planned(now, job, world, reports)
    }

    /// The first world of a job, or of a new lineage if nobody is left of the last.
    fn first_world(&mut self, now: Timestamp, job: &Job) -> Option<Decision> {
        self.loss_since = None;
        let (draining, candidates): (Vec<_>, Vec<_>) =
            job.nodes().keys().copied().partition(|node| job.is_draining(*node));
        if !draining.is_empty() {
            return Some(Decision::Leave(draining));
        }
        if candidates != self.candidates {
            self.candidates.clone_from(&candidates);
            self.quiet_since = now;
        }
        let spec = job.spec();
        let (count, min) = (candidates.len(), spec.min_members as usize);
        if count < min.max(1) {
            return None;
        }
        let due = self.quiet_since + self.timing.quiet();
        if count < spec.expected_members as usize && now < due {
            self.deadline = Some(due);
            return None;
        }
        let (members, followers) = candidates.split_at(count.min(capacity(job)));
        let (lineage, start) = job.restart(&candidates);
        Some(Decision::Form(WorldPlan {
            lineage,
            start: Some(start),
            ..plan(job, None, members, followers.to_vec())
        }))
    }

    /// Everybody of the newest world who lives, with level followers in the places of the dead; at once.
    fn after_loss(&self, job: &Job, world: &World, reports: &Reports) -> WorldPlan {
        let heirs = job.heirs();
        let mut members: Vec<NodeId> = world.nodes().filter(|node| job.is_living(*node)).collect();
        if !members.iter().any(|node| heirs.contains(node)) {
            // Only those are left who were to come: they can't go on without one who was there.
            members.splice(0..0, heirs);
            members.truncate(capacity(job));
        }
        let room = capacity(job).saturating_sub(members.len());
        members.extend(self.level_followers(job, world, reports).take(room));
        let followers = others(job, &members);
        plan(job, None, &members, followers)
    }

    /// What can wait until the newest world serves: joiners, level followers, drains.
    fn planned(
        &mut self,
        now: Timestamp,
        job: &Job,
        world: &World,
        reports: &Reports,
    ) -> Option<Decision> {
        let stay: Vec<NodeId> = world.nodes().filter(|node| !job.is_draining(*node)).collect();
        let mut next = stay.clone();
        let (mut is_gathering, mut is_joining) = (false, true);
        if reports.has_all(job) {
            let room = capacity(job).saturating_sub(stay.len());
            next.extend(self.level_followers(job, world, reports).take(room));
            let followers = world.followers.iter().filter(|f| !job.is_draining(f.node)).count();
            let (level, places) = (next.len() - stay.len(), followers.min(room));
            let waits_until = self.gathering.enter(now, self.timing, level, places);
            self.deadline = earlier(self.deadline, waits_until);
            (is_gathering, is_joining) = (waits_until.is_some(), places > 0);
        }
        if stay.is_empty() && !next.is_empty() {
            // A world without an heir would be a restart: the successors enter first, then the others leave.
            next.splice(0..0, world.nodes());
        }
        if next.is_empty() || next.len() > job.spec().virtual_ranks.count() as usize {
            return self.succession(now, job, world, reports);
        }
        let is_leaving = stay.len() < world.members.len();
        self.succession_since = None;
        let is_enough = stay.len() >= job.spec().min_members as usize;
        if is_gathering && is_enough && !world.held && !is_leaving {
            next.truncate(stay.len());
        }
        let can_resume = world.held && next.len() >= job.spec().min_members as usize;
        let is_promoting = next.len() > stay.len() && (!world.held || can_resume);
        if can_resume || (world.held && is_leaving) {
            // Nobody steps in a held world, so there is no step to plan for.
            let members = if can_resume || stay.is_empty() { next } else { stay };
            return Some(Decision::Form(plan(job, None, &members, others(job, &members))));
        }
        // The job needs more members than before.
        let is_short = !world.held && next.len() < job.spec().min_members as usize;
        if is_promoting || ((is_leaving || is_short) && reports.has_all(job)) {
            let from = Some(reports.ahead(job, self.timing));
            return Some(Decision::Form(plan(job, from, &next, others(job, &next))));
        }
        let members: Vec<NodeId> = world.nodes().collect();
        let followers = others(job, &members);
        let is_listed = |node: &NodeId| world.has_follower(*node);
        if followers.len() == world.followers.len() && followers.iter().all(is_listed) {
            if is_joining {
                self.evening.forget();
                return None;
            }
            return self.even_out(job, world, reports);
        }
        let unlisted = followers.iter().copied().filter(|node| !is_listed(node)).collect();
        let waits_until = self.gathering.list(now, self.timing, unlisted);
        self.deadline = earlier(self.deadline, waits_until);
        if waits_until.is_some() && !world.held {
            return None;
        }
        Some(Decision::Form(plan(job, None, &members, followers)))
    }

    /// Blocks follow the leaf times, while nothing else is due.
    fn even_out(&mut self, job: &Job, world: &World, reports: &Reports) -> Option<Decision> {
        let from = reports.ahead(job, self.timing);
        let is_over = job.spec().total_steps.is_some_and(|total| from >= total);
        let shares = Shares::of(job, world, reports);
        let shares = shares.filter(|_| job.spec().evens_out && !world.held && !is_over);
        let Some((boundary, shares)) = reports.lowest(job).zip(shares) else {
            self.evening.forget();
            return None;
        };
        let Evened { blocks, reason } = self.evening.look(boundary, &shares)?;
        let members: Vec<NodeId> = world.nodes().collect();
        let followers = world.followers.iter().map(|f| f.node).collect();
        let plan = plan_from(&blocks, job, Some(from), &members, followers);
        Some(Decision::Form(WorldPlan { evening: Some(reason), ..plan }))
    }

    /// All members are to leave, and nobody is level to take over.
    fn succession(
        &mut self,
        now: Timestamp,
        job: &Job,
        world: &World,
        reports: &Reports,
    ) -> Option<Decision> {
        let followers = others(job, &[]);
        if self.waits_for_successor(now, job) {
            let listed = followers.iter().all(|node| world.has_follower(*node));
            let members: Vec<NodeId> = world.nodes().collect();
            return (!listed).then(|| Decision::Form(plan(job, None, &members, followers)));
        }
        let highest = reports.highest(job);
        let stands = world.held || job.spec().total_steps == Some(highest);
        let needs_none = job.spec().checkpoint_every.is_none();
        (needs_none || (stands && job.is_saved_at(highest))).then_some(Decision::Stop)
    }

    /// Whether a drain of all members still waits for a joiner to become level.
    pub fn waits_for_successor(&mut self, now: Timestamp, job: &Job) -> bool {
        if others(job, &[]).is_empty() {
            return false;
        }
        let since = *self.succession_since.get_or_insert(now);
        let due = since + self.timing.successor();
        if now < due {
            self.deadline = Some(due);
        }
        now < due
    }

    fn level_followers(
        &self,
        job: &Job,
        world: &World,
        reports: &Reports,
    ) -> impl Iterator<Item = NodeId> {
        let followers = world.followers.iter().map(|f| f.node);
        let is_ready = move |node: &NodeId| {
            job.is_living(*node)
                && !job.is_draining(*node)
                && reports.is_level(job, *node, self.timing)
        };
        followers.filter(is_ready)
    }
}

/// Whether somebody is out whom the newest world lists, or who still serves until it does.
fn has_loss(job: &Job, world: &World, reports: &Reports) -> bool {
    let mut listed = world.nodes().chain(world.followers.iter().map(|f| f.node));
    if listed.any(|node| !job.is_living(node)) {
        return true;
    }
    if world.from.is_none() || reports.is_in_effect(job) {
        return false;
    }
    // Who left in good order did so after the world served.
    let is_lost = |node: NodeId| job.gone(node).is_some_and(|cause| cause != Cause::Left);
    let former = job.worlds().filter(|w| w.generation < world.generation).last();
    former.is_some_and(|former| former.nodes().any(is_lost))
}

fn earlier(a: Option<Timestamp>, b: Option<Timestamp>) -> Option<Timestamp> {
    a.into_iter().chain(b).min()
}

/// Most members of a world.
fn capacity(job: &Job) -> usize {
    (job.spec().max_members.min(job.spec().virtual_ranks.count())) as usize
}

/// Living workers that are not to leave and not among `members`.
fn others(job: &Job, members: &[NodeId]) -> Vec<NodeId> {
    job.nodes()
        .keys()
        .copied()
        .filter(|node| !job.is_draining(*node) && !members.contains(node))
        .collect()
}

/// The next world of the same lineage.
fn plan(job: &Job, from: Option<Step>, members: &[NodeId], followers: Vec<NodeId>) -> WorldPlan {
    let world = job.world().filter(|w| w.lineage == job.lineage());
    let former: BTreeMap<NodeId, _> =
        world.into_iter().flat_map(|w| &w.members).map(|m| (m.node, m.blocks.clone())).collect();
    plan_from(&former, job, from, members, followers)
}

/// The same with other blocks to start from.
fn plan_from(
    former: &BTreeMap<NodeId, Vec<Block>>,
    job: &Job,
    from: Option<Step>,
    members: &[NodeId],
    followers: Vec<NodeId>,
) -> WorldPlan {
    let mut blocks = allocate(job.spec().virtual_ranks, former, members);
    let start: Option<Start> = job.open_start().cloned();
    WorldPlan {
        generation: job.generation().next(),
        lineage: job.lineage(),
        from,
        held: members.len() < job.spec().min_members as usize,
        start,
        members: members
            .iter()
            .map(|node| (*node, blocks.remove(node).unwrap_or_default()))
            .collect(),
        followers,
        evening: None,
    }
}
