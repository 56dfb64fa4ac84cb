//! Who is in the world: the rules of DESIGN §4.1, without Raft. It forms every world that they allow, as unkindly as they allow it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use types::{
    Address, Block, Digest, Follower, Generation, Lineage, Member, NodeId, Origin, Start, Step,
    VirtualRank, VirtualRanks, World,
};

use super::node::Rng;

/// What a worker says of itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Beat {
    pub(super) entered: Option<Generation>,
    pub(super) lineage: Lineage,
    pub(super) applied: Step,
    pub(super) digest: Digest,
    pub(super) is_following: bool,
}

/// The coordinators' leader, as the workers see it.
#[derive(Debug)]
pub(super) struct Coordinator {
    pub(super) worlds: Vec<Arc<World>>,
    pub(super) living: BTreeSet<NodeId>,
    pub(super) draining: BTreeSet<NodeId>,
    /// Drained, and free to go.
    pub(super) left: BTreeSet<NodeId>,
    pub(super) min_members: usize,
    pub(super) max_members: usize,
    pub(super) is_pausing: bool,
    /// The newest durable state: its boundary and digest.
    pub(super) checkpoint: Option<(Step, Digest)>,
    virtual_ranks: VirtualRanks,
    total: Step,
    entered: Option<Generation>,
    beats: BTreeMap<NodeId, Beat>,
    /// Survivors keep their blocks, or not: both must work.
    keeps_blocks: bool,
}

impl Coordinator {
    pub(super) fn new(virtual_ranks: VirtualRanks, total: Step, rng: &mut Rng) -> Self {
        let max_members = (rng.within(2, 6) as usize).min(virtual_ranks.count() as usize);
        Self {
            worlds: Vec::new(),
            living: BTreeSet::new(),
            draining: BTreeSet::new(),
            left: BTreeSet::new(),
            min_members: (rng.within(1, 2) as usize).min(max_members),
            max_members,
            is_pausing: false,
            checkpoint: None,
            virtual_ranks,
            total,
            entered: None,
            beats: BTreeMap::new(),
            keeps_blocks: rng.percent(70),
        }
    }

    pub(super) fn newest(&self) -> Option<&Arc<World>> {
        self.worlds.last()
    }

    pub(super) fn handle_beat(&mut self, node: NodeId, beat: Beat) {
        if !self.living.contains(&node) {
            return;
        }
        let known = beat.entered.and_then(|g| self.worlds.get(g.0 as usize - 1));
        if known.is_some_and(|w| Some(w.lineage) == self.newest().map(|w| w.lineage)) {
            self.entered = self.entered.max(beat.entered);
        }
        self.beats.insert(node, beat);
    }

    pub(super) fn handle_lost(&mut self, node: NodeId) {
        self.living.remove(&node);
        self.draining.remove(&node);
        self.beats.remove(&node);
    }

    /// Whether the newest world lists somebody who is gone, or one who still serves until it does.
    pub(super) fn has_loss(&self) -> bool {
        let Some(world) = self.newest() else { return false };
        let is_gone = |n: NodeId| !self.living.contains(&n);
        let listed = world.nodes().chain(world.followers.iter().map(|f| f.node));
        let former = self.worlds.iter().rev().nth(1);
        listed.into_iter().any(is_gone)
            || (world.from.is_some()
                && !self.is_in_effect()
                && former.is_some_and(|w| w.nodes().any(|n| is_gone(n) && !self.left.contains(&n))))
    }

    /// The next world, if one is due.
    pub(super) fn evaluate(&mut self, rng: &mut Rng) -> Option<Arc<World>> {
        let heirs = self.heirs();
        let Some(newest) = self.newest().cloned().filter(|_| !heirs.is_empty()) else {
            return self.first_world(rng);
        };
        if self.has_loss() {
            return Some(self.after_loss(&newest, &heirs, rng));
        }
        if !self.is_in_effect() {
            return None;
        }
        let listed = |n: &NodeId| newest.has_member(*n) || newest.has_follower(*n);
        let free: Vec<NodeId> = self
            .draining
            .iter()
            .copied()
            .filter(|n| !listed(n) && self.living.contains(n))
            .collect();
        for node in free {
            self.handle_lost(node);
            self.left.insert(node);
        }
        self.planned(&newest, rng)
    }

    fn first_world(&mut self, rng: &mut Rng) -> Option<Arc<World>> {
        let nodes: Vec<NodeId> = self.living.difference(&self.draining).copied().collect();
        if nodes.len() < self.min_members {
            return None;
        }
        let (members, followers) = nodes.split_at(nodes.len().min(self.max_members));
        let lineage = Lineage(self.newest().map_or(1, |w| w.lineage.0 + 1));
        let origin = match self.checkpoint {
            None => Origin::Initial,
            Some((_, hash)) => Origin::Checkpoint { manifest: "some".to_owned(), hash },
        };
        let step = self.checkpoint.map_or(Step(0), |c| c.0);
        let start = Start { step, origin, digest: self.checkpoint.map(|c| c.1) };
        self.entered = None;
        Some(self.form(
            Draft {
                lineage,
                from: None,
                members: members.to_vec(),
                followers: followers.to_vec(),
                start: Some(start),
            },
            rng,
        ))
    }

    fn after_loss(&mut self, newest: &World, heirs: &[NodeId], rng: &mut Rng) -> Arc<World> {
        let mut members: Vec<NodeId> = newest.nodes().filter(|n| self.living.contains(n)).collect();
        if !members.iter().any(|n| heirs.contains(n)) {
            members.splice(0..0, heirs.iter().copied());
            members.truncate(self.max_members.max(1));
        }
        if rng.percent(60) {
            let level: Vec<NodeId> = self.level_followers(newest, &members);
            members.extend(level);
            members.truncate(self.max_members.max(1));
        }
        let followers = self.others(&members);
        let start = self.open_start();
        self.form(Draft { lineage: newest.lineage, from: None, members, followers, start }, rng)
    }

    fn planned(&mut self, newest: &World, rng: &mut Rng) -> Option<Arc<World>> {
        let stay: Vec<NodeId> = newest.nodes().filter(|n| !self.draining.contains(n)).collect();
        let mut next = stay.clone();
        next.extend(self.level_followers(newest, &newest.nodes().collect::<Vec<_>>()));
        next.truncate(self.max_members);
        if stay.is_empty() && !next.is_empty() {
            next.splice(0..0, newest.nodes());
            next.truncate(self.virtual_ranks.count() as usize);
        }
        let start = self.open_start();
        let lineage = newest.lineage;
        if newest.held {
            let can_resume = !self.is_pausing && next.len() >= self.min_members;
            if can_resume {
                let followers = self.others(&next);
                return Some(
                    self.form(Draft { lineage, from: None, members: next, followers, start }, rng),
                );
            }
        } else if self.is_pausing {
            let members: Vec<NodeId> = newest.nodes().collect();
            let followers = self.others(&members);
            return Some(self.form(Draft { lineage, from: None, members, followers, start }, rng));
        } else if next.len() != newest.members.len() || stay.len() < newest.members.len() {
            let is_same = next.iter().copied().eq(newest.nodes());
            if !next.is_empty() && !is_same {
                let highest = self.highest(&newest.nodes().collect::<Vec<_>>(), lineage);
                let from = Step((highest.0 + 2).min(self.total.0.max(highest.0)));
                let followers = self.others(&next);
                return Some(self.form(
                    Draft { lineage, from: Some(from), members: next, followers, start },
                    rng,
                ));
            }
        }
        let members: Vec<NodeId> = newest.nodes().collect();
        let followers = self.others(&members);
        let is_listed = |n: &NodeId| newest.has_follower(*n);
        if followers.len() == newest.followers.len() && followers.iter().all(is_listed) {
            return None;
        }
        Some(self.form(Draft { lineage, from: None, members, followers, start }, rng))
    }

    fn form(&mut self, draft: Draft, rng: &mut Rng) -> Arc<World> {
        let Draft { lineage, from, members, followers, start } = draft;
        let address =
            Address { socket: ([127, 0, 0, 1], 1).into(), certificate: Digest::default() };
        let mut shares = self.allocate(&members, rng);
        let member = |node: &NodeId| Member {
            node: *node,
            address: address.clone(),
            host: String::new(),
            blocks: shares.remove(node).unwrap_or_default(),
        };
        let world = World {
            generation: Generation(self.worlds.len() as u64 + 1),
            lineage,
            virtual_ranks: self.virtual_ranks,
            from,
            held: self.is_pausing || members.len() < self.min_members,
            start,
            members: members.iter().map(member).collect(),
            followers: followers
                .iter()
                .map(|node| Follower { node: *node, address: address.clone(), host: String::new() })
                .collect(),
        };
        world.check().unwrap();
        let world = Arc::new(world);
        self.worlds.push(Arc::clone(&world));
        world
    }

    /// Leaf by leaf, as unevenly as it comes, but at least one each; whole nodes are joined to blocks.
    fn allocate(&self, members: &[NodeId], rng: &mut Rng) -> BTreeMap<NodeId, Vec<Block>> {
        let v = self.virtual_ranks;
        let former = self.newest().filter(|_| self.keeps_blocks);
        let mut server: BTreeMap<VirtualRank, NodeId> = BTreeMap::new();
        for rank in v.iter() {
            let kept = former.and_then(|w| w.server(rank)).filter(|n| members.contains(n));
            let random = rng.pick(members).expect("there are members");
            server.insert(rank, kept.unwrap_or(random));
        }
        for node in members {
            while !server.values().any(|n| n == node) {
                let rank = VirtualRank(rng.below(u64::from(v.count())) as u32);
                let owner = server[&rank];
                if server.values().filter(|n| **n == owner).count() > 1 {
                    server.insert(rank, *node);
                }
            }
        }
        let mut shares: BTreeMap<NodeId, Vec<Block>> = BTreeMap::new();
        collect(v.root(), v, &server, &mut shares);
        shares
    }

    fn heirs(&self) -> Vec<NodeId> {
        let entered = self.entered.and_then(|g| self.worlds.get(g.0 as usize - 1));
        let base = entered.or(self.worlds.last());
        base.into_iter().flat_map(|w| w.nodes()).filter(|n| self.living.contains(n)).collect()
    }

    fn open_start(&self) -> Option<Start> {
        self.newest().filter(|_| self.entered.is_none())?.start.clone()
    }

    fn is_in_effect(&self) -> bool {
        let Some(world) = self.newest().filter(|w| self.entered == Some(w.generation)) else {
            return false;
        };
        let reached = |from: Step| {
            let boundary = |n: NodeId| self.beats.get(&n).filter(|b| b.lineage == world.lineage);
            world.nodes().all(|n| boundary(n).is_some_and(|b| b.applied >= from))
        };
        world.from.is_none_or(reached)
    }

    fn highest(&self, members: &[NodeId], lineage: Lineage) -> Step {
        let boundary =
            |n: &NodeId| self.beats.get(n).filter(|b| b.lineage == lineage).map(|b| b.applied);
        members.iter().filter_map(boundary).max().unwrap_or(Step(0))
    }

    /// Followers that are about as far as those whom they would join; never further: nobody of these could catch up.
    fn level_followers(&self, world: &World, members: &[NodeId]) -> Vec<NodeId> {
        let slack = if world.held { 0 } else { 2 };
        let highest = self.highest(members, world.lineage);
        let is_level = |n: &NodeId| {
            self.living.contains(n)
                && !self.draining.contains(n)
                && self.beats.get(n).is_some_and(|b| {
                    b.is_following
                        && b.lineage == world.lineage
                        && b.applied.0 + slack >= highest.0
                        && b.applied <= highest
                })
        };
        world.followers.iter().map(|f| f.node).filter(is_level).collect()
    }

    /// Followers of a held world that are ahead of all its members: these never get there, so the followers are of no use.
    pub(super) fn astray(&self) -> Vec<NodeId> {
        let Some(world) = self.newest().filter(|w| w.held && self.is_in_effect()) else {
            return Vec::new();
        };
        let highest = self.highest(&world.nodes().collect::<Vec<_>>(), world.lineage);
        let beat = |n: &NodeId| self.beats.get(n).filter(|b| b.lineage == world.lineage);
        let is_ahead = |n: &NodeId| beat(n).is_some_and(|b| b.applied > highest);
        world.followers.iter().map(|f| f.node).filter(is_ahead).collect()
    }

    fn others(&self, members: &[NodeId]) -> Vec<NodeId> {
        let living = self.living.difference(&self.draining).copied();
        living.filter(|n| !members.contains(n)).collect()
    }

    /// The boundary and digest that all members of the newest world stand at or have passed together.
    pub(super) fn agreed(&self) -> Option<(Step, Digest)> {
        let world = self.newest()?;
        let beats: Option<Vec<Beat>> = world
            .nodes()
            .map(|n| self.beats.get(&n).copied().filter(|b| b.lineage == world.lineage))
            .collect();
        let beats = beats?;
        let first = beats.first()?;
        beats.iter().all(|b| b.applied == first.applied).then_some((first.applied, first.digest))
    }
}

/// What the next world is to be.
struct Draft {
    lineage: Lineage,
    from: Option<Step>,
    members: Vec<NodeId>,
    followers: Vec<NodeId>,
    start: Option<Start>,
}

fn collect(
    node: Block,
    v: VirtualRanks,
    server: &BTreeMap<VirtualRank, NodeId>,
    shares: &mut BTreeMap<NodeId, Vec<Block>>,
) {
    if node.is_outside(v) {
        return;
    }
    let servers: BTreeSet<NodeId> = node.leaves(v).map(|r| server[&r]).collect();
    match (servers.first(), node.children()) {
        (Some(one), _) if servers.len() == 1 => {
            shares.entry(*one).or_default().push(node.canonical(v));
        }
        (_, Some((left, right))) => {
            collect(left, v, server, shares);
            collect(right, v, server, shares);
        }
        _ => unreachable!("a leaf has one server"),
    }
}
