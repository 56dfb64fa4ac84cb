//! One job in the replicated state: its workers, worlds and checkpoints.
//!
//! It promises that generations neither repeat nor skip, that a world keeps an heir of what was entered before it or begins a new
//! lineage, and that a checkpoint commits at most once, of a living lineage, and newer than the one before.
//! Deliberately not here: when any of that should happen. See `formation`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use types::{
    Address, Attempt, Digest, Follower, Generation, Lineage, Member, NodeId, Origin, Start, Step,
    World,
};

use crate::command::{ReceiptRoot, WorldPlan};
use crate::message::{Cause, Fingerprint, FoundCheckpoint, Intent, JobSpec, Join, Standing};

/// One job. Changed by the roster only.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    spec: JobSpec,
    fingerprint: Fingerprint,
    is_mixed: bool,
    stage: Stage,
    /// The newest world of which it is known what the change cost.
    settled: Generation,
    /// What the last step led to.
    result: Option<(Step, Digest)>,
    nodes: BTreeMap<NodeId, Listed>,
    gone: BTreeMap<NodeId, Gone>,
    /// Nodes up to this one that are listed nowhere are gone, though it was forgotten why.
    gone_before: NodeId,
    /// The newest generation made; 0 for none.
    generation: Generation,
    /// The newest lineage; 0 for none.
    lineage: Lineage,
    /// The newest world that all are known to have entered, the one before it if it was planned, and all after it.
    worlds: BTreeMap<Generation, Arc<World>>,
    entered: Option<Generation>,
    attempt: Attempt,
    intent: Option<OpenIntent>,
    committed: Option<Committed>,
    abandoned: Option<(Attempt, String)>,
}

/// Who is out, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gone {
    /// Why.
    pub cause: Cause,
}

/// How far a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// Worlds are made.
    Running,
    /// All members left in good order; whoever joins restarts it.
    Stopped,
    /// All steps are done.
    Finished,
}

/// A living worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    /// Where to reach it.
    pub address: Address,
    /// Its host.
    pub host: String,
    /// The newest checkpoint that it found when it joined.
    pub found: Option<FoundCheckpoint>,
    /// Why it is to leave, if it is.
    pub draining: Option<String>,
}

/// A checkpoint on its way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenIntent {
    /// As the members got it.
    pub intent: Intent,
    /// Whether the job stops with it.
    pub is_last: bool,
    /// Who has put its part.
    pub receipts: BTreeMap<NodeId, ReceiptRoot>,
}

impl OpenIntent {
    /// Whether all members have put their part.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.intent.members.iter().all(|node| self.receipts.contains_key(node))
    }

    /// The digest of the state that all receipts so far name; `None` if there is none, or they differ.
    #[must_use]
    pub fn digest(&self) -> Option<Digest> {
        let mut states = self.receipts.values().map(|r| (r.lineage, r.digest));
        let first = states.next()?;
        (first.0 == self.intent.lineage && states.all(|state| state == first)).then_some(first.1)
    }
}

/// A checkpoint that is real.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Committed {
    /// Its attempt.
    pub attempt: Attempt,
    /// Its lineage.
    pub lineage: Lineage,
    /// Boundary of the state.
    pub step: Step,
    /// Key of the manifest.
    pub manifest: String,
    /// BLAKE3 of the manifest's bytes.
    pub hash: Digest,
    /// Digest of the state.
    pub digest: Digest,
}

impl Job {
    /// Most workers listed at a time: as many as there can be virtual ranks.
    pub const NODES_MAX: usize = 65_536;
    /// Most workers that are remembered after they went.
    const GONE_MAX: usize = 4096;
    /// Most worlds that are kept: many losses in a row, none of which is known to be entered.
    const WORLDS_MAX: usize = 16;

    pub(crate) fn new(join: &Join) -> Self {
        Self {
            spec: join.spec.clone(),
            fingerprint: join.fingerprint.clone(),
            is_mixed: false,
            stage: Stage::Running,
            settled: Generation(0),
            result: None,
            nodes: BTreeMap::new(),
            gone: BTreeMap::new(),
            gone_before: NodeId(0),
            generation: Generation(0),
            lineage: Lineage(0),
            worlds: BTreeMap::new(),
            entered: None,
            attempt: Attempt(0),
            intent: None,
            committed: None,
            abandoned: None,
        }
    }

    /// What it is.
    #[must_use]
    pub fn spec(&self) -> &JobSpec {
        &self.spec
    }

    /// Whether unequal fingerprints were admitted.
    #[must_use]
    pub fn is_mixed(&self) -> bool {
        self.is_mixed
    }

    /// How far it is.
    #[must_use]
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// How far it is, and what it waits for.
    #[must_use]
    pub fn standing(&self) -> Standing {
        let members = u32::try_from(self.nodes.len()).unwrap_or(u32::MAX);
        let is_waiting = self.world().is_none_or(|world| world.held) || self.heirs().is_empty();
        match (self.stage, self.result) {
            (Stage::Finished, Some((steps, digest))) => Standing::Finished { steps, digest },
            (Stage::Stopped, _) if members == 0 => Standing::Stopped,
            _ if is_waiting && members < self.spec.min_members => {
                Standing::Waiting { members, min: self.spec.min_members }
            }
            _ => Standing::Running,
        }
    }

    /// The living workers.
    #[must_use]
    pub fn nodes(&self) -> &BTreeMap<NodeId, Listed> {
        &self.nodes
    }

    /// Whether a worker is listed and not out.
    #[must_use]
    pub fn is_living(&self, node: NodeId) -> bool {
        self.nodes.contains_key(&node)
    }

    /// Whether a living worker is to leave.
    #[must_use]
    pub fn is_draining(&self, node: NodeId) -> bool {
        self.nodes.get(&node).is_some_and(|listed| listed.draining.is_some())
    }

    /// Why a worker is out.
    #[must_use]
    pub fn gone(&self, node: NodeId) -> Option<Cause> {
        let forgotten = node <= self.gone_before && !self.is_living(node);
        self.gone.get(&node).map(|gone| gone.cause).or(forgotten.then_some(Cause::Silent))
    }

    /// The newest generation; 0 before the first world.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// The newest lineage; 0 before the first world.
    #[must_use]
    pub fn lineage(&self) -> Lineage {
        self.lineage
    }

    /// The newest world.
    #[must_use]
    pub fn world(&self) -> Option<&Arc<World>> {
        self.worlds.get(&self.generation)
    }

    /// The worlds that may still be in use, oldest first.
    pub fn worlds(&self) -> impl Iterator<Item = &Arc<World>> {
        self.worlds.values()
    }

    /// The newest generation that all its members are known to have entered.
    #[must_use]
    pub fn entered(&self) -> Option<Generation> {
        self.entered
    }

    /// The checkpoint on its way.
    #[must_use]
    pub fn intent(&self) -> Option<&OpenIntent> {
        self.intent.as_ref()
    }

    /// The last attempt that was made.
    #[must_use]
    pub fn attempt(&self) -> Attempt {
        self.attempt
    }

    /// The newest real checkpoint.
    #[must_use]
    pub fn committed(&self) -> Option<&Committed> {
        self.committed.as_ref()
    }

    /// The newest attempt that was given up, and why.
    #[must_use]
    pub fn abandoned(&self) -> Option<&(Attempt, String)> {
        self.abandoned.as_ref()
    }

    /// Living members of the newest world of this lineage that all are known to have entered, or of its newest world if there is
    /// none: the next world must keep one of them, or it is a restart.
    #[must_use]
    pub fn heirs(&self) -> Vec<NodeId> {
        let of_lineage = |world: &&Arc<World>| world.lineage == self.lineage;
        let entered = self.entered.and_then(|g| self.worlds.get(&g)).filter(of_lineage);
        let base = entered.or_else(|| self.world());
        base.into_iter()
            .flat_map(|world| world.nodes())
            .filter(|node| self.is_living(*node))
            .collect()
    }

    /// The state that the current lineage began with, as long as nobody is known to have entered a world of it.
    #[must_use]
    pub fn open_start(&self) -> Option<&Start> {
        let is_entered = self
            .entered
            .and_then(|g| self.worlds.get(&g))
            .is_some_and(|w| w.lineage == self.lineage);
        self.world().filter(|_| !is_entered)?.start.as_ref()
    }

    /// Whether its newest committed checkpoint is that of the last boundary, or it needs none.
    #[must_use]
    pub fn is_saved_at(&self, step: Step) -> bool {
        let saved = |c: &Committed| c.lineage == self.lineage && c.step >= step;
        self.spec.checkpoint_every.is_none() || self.committed.as_ref().is_some_and(saved)
    }

    /// Where a restart begins: the newest committed checkpoint, else the newest that one of `nodes` found, else the program's own
    /// state; and the lineage of it, greater than any seen.
    #[must_use]
    pub fn restart(&self, nodes: &[NodeId]) -> (Lineage, Start) {
        let found = nodes.iter().filter_map(|node| self.nodes.get(node)?.found.as_ref());
        let found = found.max_by_key(|f| (f.lineage, f.step));
        let lineage = self.lineage.max(found.map_or(Lineage(0), |f| f.lineage)).next();
        let start = match (&self.committed, found) {
            (Some(c), _) => Start {
                step: c.step,
                origin: Origin::Checkpoint { manifest: c.manifest.clone(), hash: c.hash },
                digest: Some(c.digest),
            },
            (None, Some(f)) => Start {
                step: f.step,
                origin: Origin::Checkpoint { manifest: f.manifest.clone(), hash: f.hash },
                digest: Some(f.digest),
            },
            (None, None) => Start { step: Step(0), origin: Origin::Initial, digest: None },
        };
        (lineage, start)
    }

    /// Lists a worker. `Err`: the exit code and the reason of a refusal.
    pub(crate) fn join(&mut self, node: NodeId, join: &Join) -> Result<bool, (u8, String)> {
        if self.stage == Stage::Finished || self.gone(node).is_some() || self.is_living(node) {
            return Ok(false);
        }
        if let Some((key, ours, theirs)) = difference(&self.spec, &join.spec) {
            let job = &self.spec.job;
            return Err((
                INCOMPATIBLE,
                format!("job {job} has {key} {ours}, but this worker came with {theirs}"),
            ));
        }
        if let Some((key, ours, theirs)) = self.fingerprint.difference(&join.fingerprint) {
            if !join.allow_mixed {
                let reason = format!(
                    "fingerprint part {key} is {ours:?} in job {}, but {theirs:?} here: bits would differ; use equal versions and hardware, or --allow-mixed",
                    self.spec.job
                );
                return Err((INCOMPATIBLE, reason));
            }
            self.is_mixed = true;
        }
        if self.nodes.len() >= Self::NODES_MAX {
            return Err((
                USAGE,
                format!("job {} lists {} workers already", self.spec.job, self.nodes.len()),
            ));
        }
        if self.nodes.is_empty() {
            // A fleet that starts the job anew brings its own bounds.
            self.spec = join.spec.clone();
        }
        let Join { address, host, found, .. } = join.clone();
        self.nodes.insert(node, Listed { address, host, found, draining: None });
        Ok(true)
    }

    /// Takes workers off the list; returns who was on it, and the attempt that this ends.
    pub(crate) fn lose(
        &mut self,
        nodes: &[(NodeId, Cause)],
    ) -> (Vec<(NodeId, Cause)>, Option<Attempt>) {
        let mut lost = Vec::new();
        for (node, cause) in nodes {
            if self.nodes.remove(node).is_some() {
                self.gone.insert(*node, Gone { cause: *cause });
                lost.push((*node, *cause));
            }
        }
        while self.gone.len() > Self::GONE_MAX
            && let Some((node, _)) = self.gone.pop_first()
        {
            self.gone_before = self.gone_before.max(node);
        }
        let is_needed = |open: &OpenIntent| {
            let missing = |node: &NodeId| {
                open.intent.writer == *node
                    || (open.intent.members.contains(node) && !open.receipts.contains_key(node))
            };
            lost.iter().find(|(node, _)| missing(node)).map(|(node, _)| *node)
        };
        let ended = self.intent.as_ref().and_then(is_needed);
        let attempt = ended.and_then(|node| self.abandon(None, format!("node {node} is out")));
        (lost, attempt)
    }

    /// Notes who is to leave; returns those for whom it is news.
    pub(crate) fn drain(&mut self, nodes: &[NodeId], reason: &str) -> Vec<NodeId> {
        let mut news = Vec::new();
        if self.stage != Stage::Finished {
            for (node, listed) in &mut self.nodes {
                if (nodes.is_empty() || nodes.contains(node)) && listed.draining.is_none() {
                    listed.draining = Some(reason.to_owned());
                    news.push(*node);
                }
            }
        }
        news
    }

    /// Changes how many members it has. Returns who is to leave because there are too many: the last of the newest world.
    ///
    /// # Errors
    /// Which bound is wrong.
    pub(crate) fn scale(
        &mut self,
        min: Option<u32>,
        max: Option<u32>,
    ) -> Result<Vec<NodeId>, String> {
        if self.stage == Stage::Finished {
            return Err(format!("job {} is finished", self.spec.job));
        }
        let (min, max) =
            (min.unwrap_or(self.spec.min_members), max.unwrap_or(self.spec.max_members));
        let most = self.spec.virtual_ranks.count();
        if min == 0 || min > max {
            return Err(format!("give 1 <= min <= max, not {min} and {max}"));
        }
        if max > most && max != self.spec.max_members {
            return Err(format!("the job has {most} virtual ranks: at most so many members"));
        }
        let mut spec = self.spec.clone();
        (spec.min_members, spec.max_members) = (min, max);
        spec.expected_members = spec.expected_members.clamp(min, max);
        spec.check()?;
        self.spec = spec;
        let staying: Vec<NodeId> = self
            .world()
            .into_iter()
            .flat_map(|world| world.nodes())
            .filter(|node| self.is_living(*node) && !self.is_draining(*node))
            .collect();
        let surplus = staying.get(max as usize..).unwrap_or_default();
        let reason = format!("at most {max} members from now on");
        Ok(if surplus.is_empty() { Vec::new() } else { self.drain(surplus, &reason) })
    }

    /// Takes workers off the list that were to leave.
    pub(crate) fn leave(&mut self, nodes: &[NodeId]) -> (Vec<NodeId>, Option<Attempt>) {
        let leaving: Vec<_> =
            nodes.iter().filter(|n| self.is_draining(**n)).map(|n| (*n, Cause::Left)).collect();
        let (left, ended) = self.lose(&leaving);
        (left.into_iter().map(|(node, _)| node).collect(), ended)
    }

    /// Whether all living members of the newest world are to leave, and there is one.
    #[must_use]
    pub fn is_all_draining(&self) -> bool {
        let Some(world) = self.world().filter(|_| self.stage == Stage::Running) else {
            return false;
        };
        let mut living = world.nodes().filter(|node| self.is_living(*node)).peekable();
        living.peek().is_some() && living.all(|node| self.is_draining(node))
    }

    /// Stops it, if all its members are to leave.
    pub(crate) fn stop(&mut self) -> Option<Vec<NodeId>> {
        if !self.is_all_draining() {
            return None;
        }
        let draining: Vec<NodeId> =
            self.nodes.keys().copied().filter(|n| self.is_draining(*n)).collect();
        self.stage = Stage::Stopped;
        self.abandon(None, "the job stopped".to_owned());
        Some(self.leave(&draining).0)
    }

    /// Makes the next world.
    ///
    /// # Errors
    /// Which rule the plan would break.
    pub(crate) fn form_world(&mut self, plan: &WorldPlan) -> Result<Arc<World>, String> {
        self.check_plan(plan)?;
        let listed = |node: NodeId| {
            self.nodes.get(&node).ok_or_else(|| format!("node {node} is not listed, or out"))
        };
        let member = |(node, blocks): &(NodeId, Vec<_>)| {
            let Listed { address, host, .. } = listed(*node)?.clone();
            Ok::<_, String>(Member { node: *node, address, host, blocks: blocks.clone() })
        };
        let follower = |node: &NodeId| {
            let Listed { address, host, .. } = listed(*node)?.clone();
            Ok::<_, String>(Follower { node: *node, address, host })
        };
        let world = World {
            generation: plan.generation,
            lineage: plan.lineage,
            virtual_ranks: self.spec.virtual_ranks,
            from: plan.from,
            held: plan.held,
            start: plan.start.clone(),
            members: plan.members.iter().map(member).collect::<Result<_, _>>()?,
            followers: plan.followers.iter().map(follower).collect::<Result<_, _>>()?,
        };
        world.check()?;
        let world = Arc::new(world);
        if world.lineage != self.lineage {
            self.abandon(None, format!("lineage {} ended", self.lineage));
        }
        self.lineage = world.lineage;
        self.generation = world.generation;
        self.stage = Stage::Running;
        self.worlds.insert(world.generation, Arc::clone(&world));
        if self.worlds.len() > Self::WORLDS_MAX {
            let second = self.worlds.keys().nth(1).copied();
            self.worlds.remove(&second.unwrap_or_default());
        }
        Ok(world)
    }

    fn check_plan(&self, plan: &WorldPlan) -> Result<(), String> {
        if self.stage == Stage::Finished {
            return Err("the job is finished".to_owned());
        }
        if plan.generation != self.generation.next() {
            return Err(format!(
                "generation {} does not follow {}",
                plan.generation, self.generation
            ));
        }
        let followers: BTreeSet<_> = plan.followers.iter().collect();
        if followers.len() != plan.followers.len() {
            return Err("a follower is listed twice".to_owned());
        }
        // One who is to leave may stay until its successor has entered.
        let staying = plan.members.iter().filter(|(node, _)| !self.is_draining(*node)).count();
        if staying > self.spec.max_members as usize {
            return Err(format!("{staying} members; allowed are {}", self.spec.max_members));
        }
        let is_below_min = plan.members.len() < self.spec.min_members as usize;
        if is_below_min && !plan.held {
            return Err(format!("{} members are too few to go on", plan.members.len()));
        }
        let heirs = self.heirs();
        let keeps_heir = plan.members.iter().any(|(node, _)| heirs.contains(node));
        let is_running = self.stage == Stage::Running;
        if plan.lineage > self.lineage {
            if is_running && !heirs.is_empty() {
                return Err(format!(
                    "node {} still holds the state of lineage {}",
                    heirs[0], self.lineage
                ));
            }
            if plan.held || plan.from.is_some() || plan.start.is_none() {
                return Err(
                    "the first world of a lineage names its start, and takes effect at once"
                        .to_owned(),
                );
            }
            return Ok(());
        }
        if plan.lineage != self.lineage || !is_running || !keeps_heir {
            return Err(format!("no heir of lineage {} among its members", self.lineage));
        }
        if plan.from.is_some() && self.entered != Some(self.generation) {
            return Err(format!(
                "a planned change waits until all entered world {}",
                self.generation
            ));
        }
        if plan.start.as_ref() != self.open_start() {
            return Err(format!("lineage {} began with another state", self.lineage));
        }
        if plan.evening.is_some() { self.check_evening(plan) } else { Ok(()) }
    }

    /// Evening out is a planned change between two members, and changes nothing else.
    fn check_evening(&self, plan: &WorldPlan) -> Result<(), String> {
        let world = self.world().filter(|world| !world.held && !plan.held && plan.from.is_some());
        let world = world.ok_or("evening out is a planned change of a world that steps")?;
        let is_same = world.nodes().eq(plan.members.iter().map(|(node, _)| *node));
        let follows = world.followers.iter().map(|f| f.node).eq(plan.followers.iter().copied());
        let moved = world.members.iter().zip(&plan.members).filter(|(m, (_, b))| m.blocks != *b);
        if !is_same || !follows || moved.count() != 2 {
            return Err("evening out moves blocks between two members, nothing else".to_owned());
        }
        Ok(())
    }

    /// Notes that all members of a world entered it; false if that is no news.
    pub(crate) fn enter(&mut self, generation: Generation) -> bool {
        let is_of_lineage = self.worlds.get(&generation).is_some_and(|w| w.lineage == self.lineage);
        if !is_of_lineage || Some(generation) <= self.entered || self.stage != Stage::Running {
            return false;
        }
        self.entered = Some(generation);
        // The world before a planned one is in use until all have reached its first step, which the log does not know.
        let former = self.worlds.range(..generation).next_back().map(|(former, _)| *former);
        let is_planned = self.worlds[&generation].from.is_some();
        self.worlds = self.worlds.split_off(&former.filter(|_| is_planned).unwrap_or(generation));
        true
    }

    /// Notes that a world's first step is done; false if that is no news.
    pub(crate) fn settle(&mut self, generation: Generation) -> bool {
        let is_news = generation <= self.generation && generation > self.settled;
        if is_news {
            self.settled = generation;
        }
        is_news
    }

    /// The newest world of which it is known what the change cost.
    #[must_use]
    pub fn settled(&self) -> Generation {
        self.settled
    }

    /// Begins a checkpoint by the living members of the newest world.
    ///
    /// # Errors
    /// Which rule it would break.
    pub(crate) fn intend(
        &mut self,
        attempt: Attempt,
        step: Step,
        is_last: bool,
    ) -> Result<Intent, String> {
        let world = self
            .world()
            .filter(|w| self.stage == Stage::Running && self.entered == Some(w.generation));
        let world = world.ok_or("there is no world that all have entered")?;
        if self.intent.is_some() || attempt.0 != self.attempt.0 + 1 {
            return Err(format!(
                "attempt {attempt} does not follow {}, or that is open",
                self.attempt
            ));
        }
        if self.spec.checkpoint_every.is_none() {
            return Err("the job has no checkpoint store".to_owned());
        }
        if self.committed.as_ref().is_some_and(|c| (self.lineage, step) <= (c.lineage, c.step)) {
            return Err(format!("step {step} is not newer than the last checkpoint"));
        }
        let members: Vec<NodeId> = world.nodes().filter(|node| self.is_living(*node)).collect();
        if members.len() != world.members.len() {
            return Err("a member is out".to_owned());
        }
        let intent = Intent { attempt, lineage: self.lineage, step, writer: members[0], members };
        self.attempt = attempt;
        self.intent =
            Some(OpenIntent { intent: intent.clone(), is_last, receipts: BTreeMap::new() });
        Ok(intent)
    }

    /// Notes that a member put its part; false if that is no news.
    pub(crate) fn receipt(&mut self, attempt: Attempt, node: NodeId, receipt: ReceiptRoot) -> bool {
        let Some(open) = self.intent.as_mut().filter(|open| open.intent.attempt == attempt) else {
            return false;
        };
        if !open.intent.members.contains(&node) || open.receipts.contains_key(&node) {
            return false;
        }
        open.receipts.insert(node, receipt);
        true
    }

    /// Makes a checkpoint real. The flag says whether the job stopped with it; the nodes, who left thereby.
    ///
    /// # Errors
    /// Which rule it would break.
    pub(crate) fn commit(
        &mut self,
        attempt: Attempt,
        manifest: &str,
        hash: Digest,
    ) -> Result<(Committed, Option<Vec<NodeId>>), String> {
        let open = self.intent.as_ref().filter(|open| open.intent.attempt == attempt);
        let open = open.ok_or_else(|| format!("attempt {attempt} is not open"))?;
        if !open.is_complete() {
            return Err(format!("attempt {attempt} lacks receipts"));
        }
        let digest = open
            .digest()
            .ok_or_else(|| format!("the receipts of attempt {attempt} name different states"))?;
        let Intent { lineage, step, .. } = open.intent;
        if lineage != self.lineage {
            return Err(format!("lineage {lineage} ended"));
        }
        let is_last = open.is_last;
        let committed =
            Committed { attempt, lineage, step, manifest: manifest.to_owned(), hash, digest };
        self.committed = Some(committed.clone());
        self.intent = None;
        let stopped = if is_last { self.stop() } else { None };
        Ok((committed, stopped))
    }

    /// Gives up the open attempt, if it is this one (`None`: whichever).
    pub(crate) fn abandon(&mut self, attempt: Option<Attempt>, reason: String) -> Option<Attempt> {
        let open = self.intent.take_if(|open| attempt.is_none_or(|a| a == open.intent.attempt))?;
        self.abandoned = Some((open.intent.attempt, reason));
        Some(open.intent.attempt)
    }

    /// Ends it, if all its steps can be done.
    ///
    /// # Errors
    /// Which rule it would break.
    pub(crate) fn finish(&mut self, lineage: Lineage, digest: Digest) -> Result<Step, String> {
        let total = self.spec.total_steps.ok_or("the job has no last step")?;
        if self.stage != Stage::Running || lineage != self.lineage || self.entered.is_none() {
            return Err(format!("lineage {lineage} does not train"));
        }
        if !self.is_saved_at(total) {
            return Err(format!("there is no checkpoint at step {total}"));
        }
        self.abandon(None, "the job is finished".to_owned());
        self.stage = Stage::Finished;
        self.result = Some((total, digest));
        Ok(total)
    }
}

/// The first setting in which two specs differ of those that mean another job: its name and both values. How many members it may have
/// and how often it is saved are not among them: a job goes on with whatever fleet there is.
fn difference(ours: &JobSpec, theirs: &JobSpec) -> Option<(&'static str, String, String)> {
    let texts = |s: &JobSpec| {
        [
            ("virtual_ranks", s.virtual_ranks.to_string()),
            ("total_steps", s.total_steps.map_or("none".to_owned(), |n| n.to_string())),
            (
                "checkpoint",
                if s.checkpoint_every.is_some() { "a store" } else { "no store" }.to_owned(),
            ),
        ]
    };
    let pairs = texts(ours).into_iter().zip(texts(theirs));
    pairs.into_iter().find(|(a, b)| a.1 != b.1).map(|((key, a), (_, b))| (key, a, b))
}

/// Exit code of a wrong command line.
pub(crate) const USAGE: u8 = 64;
/// Exit code of what can't work together.
pub(crate) const INCOMPATIBLE: u8 = 76;
