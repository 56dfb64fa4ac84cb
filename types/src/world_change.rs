//! What is new in a world, for somebody who has the one before: its size is that of the change, not of the world.

use serde::{Deserialize, Serialize};

use crate::{Follower, Generation, Lineage, Member, NodeId, Start, Step, World};

/// The way from one world to a later one of the same job.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct WorldChange {
    /// The world that it builds on.
    pub base: Generation,
    /// The world that it leads to.
    pub generation: Generation,
    /// See [`World::lineage`].
    pub lineage: Lineage,
    /// See [`World::from`].
    pub from: Option<Step>,
    /// See [`World::held`].
    pub held: bool,
    /// See [`World::start`].
    pub start: Option<Start>,
    members: Vec<Edit<Member>>,
    followers: Vec<Edit<Follower>>,
}

/// A part of a list, in the order of the new one.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
enum Edit<T> {
    /// The next so many stay.
    Keep(u32),
    /// The next so many are gone.
    Drop(u32),
    /// One who is new here, or not the same as before.
    Put(T),
}

impl WorldChange {
    /// What leads from `base` to `world`.
    #[must_use]
    pub fn between(base: &World, world: &World) -> Self {
        Self {
            base: base.generation,
            generation: world.generation,
            lineage: world.lineage,
            from: world.from,
            held: world.held,
            start: world.start.clone(),
            members: edits(&base.members, &world.members, |member| member.node),
            followers: edits(&base.followers, &world.followers, |follower| follower.node),
        }
    }

    /// The new world.
    ///
    /// # Errors
    /// If `base` is not the world that this builds on, or what comes out is none.
    pub fn apply(&self, base: &World) -> Result<World, String> {
        if base.generation != self.base {
            return Err(format!(
                "a change of world {} can't be applied to world {}",
                self.base, base.generation
            ));
        }
        let world = World {
            generation: self.generation,
            lineage: self.lineage,
            virtual_ranks: base.virtual_ranks,
            from: self.from,
            held: self.held,
            start: self.start.clone(),
            members: apply(&self.members, &base.members)?,
            followers: apply(&self.followers, &base.followers)?,
        };
        world.check()?;
        Ok(world)
    }
}

/// The old list is walked once. Where the order differs, an element is dropped and put again.
fn edits<T: Clone + PartialEq>(old: &[T], new: &[T], node: impl Fn(&T) -> NodeId) -> Vec<Edit<T>> {
    let mut edits: Vec<Edit<T>> = Vec::new();
    let mut rest = old;
    // Where both lists are in one order, an element that is further on in the old one stands behind ones that are gone.
    let places: std::collections::BTreeMap<NodeId, usize> =
        old.iter().enumerate().map(|(place, element)| (node(element), place)).collect();
    for element in new {
        let done = old.len() - rest.len();
        let place = places.get(&node(element)).copied().filter(|place| *place >= done);
        match place.filter(|place| old[*place] == *element) {
            Some(place) => {
                drop_next(&mut edits, place - done);
                match edits.last_mut() {
                    Some(Edit::Keep(count)) => *count += 1,
                    _ => edits.push(Edit::Keep(1)),
                }
                rest = &old[place + 1..];
            }
            None => edits.push(Edit::Put(element.clone())),
        }
    }
    drop_next(&mut edits, rest.len());
    edits
}

fn drop_next<T>(edits: &mut Vec<Edit<T>>, count: usize) {
    if count > 0 {
        edits.push(Edit::Drop(u32::try_from(count).expect("at most 65,536 members")));
    }
}

fn apply<T: Clone>(edits: &[Edit<T>], mut old: &[T]) -> Result<Vec<T>, String> {
    let mut take = |count: u32| {
        let (taken, rest) = old
            .split_at_checked(count as usize)
            .ok_or_else(|| "a change keeps or drops more members than there were".to_owned())?;
        old = rest;
        Ok::<_, String>(taken)
    };
    let mut new = Vec::new();
    for edit in edits {
        match edit {
            Edit::Keep(count) => new.extend_from_slice(take(*count)?),
            Edit::Drop(count) => drop(take(*count)?),
            Edit::Put(element) => new.push(element.clone()),
        }
    }
    let left = old.len();
    if left > 0 {
        return Err(format!("a change says nothing of {left} members that there were"));
    }
    Ok(new)
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use proptest::prelude::*;

    use super::*;
    use crate::{Address, Block, Digest, VirtualRank, VirtualRanks, decode, encode};

    const V: u32 = 12;

    fn address(node: u64) -> Address {
        let socket = SocketAddr::from(([127, 0, 0, 1], u16::try_from(node).unwrap()));
        Address { socket, certificate: Digest([7; 32]) }
    }

    /// A world of `nodes`, in that order, the virtual ranks dealt out from `first` on.
    fn world(generation: u64, nodes: &[u64], followers: &[u64], first: usize) -> World {
        let blocks = |place: usize| {
            let served = (0..V).filter(|rank| (*rank as usize + first) % nodes.len() == place);
            served.map(|rank| Block::leaf(VirtualRank(rank))).collect()
        };
        let host = || "host".to_owned();
        let member = |(place, node): (usize, &u64)| Member {
            node: NodeId(*node),
            address: address(*node),
            host: host(),
            blocks: blocks(place),
        };
        let follower =
            |node: &u64| Follower { node: NodeId(*node), address: address(*node), host: host() };
        World {
            generation: Generation(generation),
            lineage: Lineage(1),
            virtual_ranks: VirtualRanks::new(V).unwrap(),
            from: generation.is_multiple_of(2).then_some(Step(generation)),
            held: generation.is_multiple_of(3),
            start: None,
            members: nodes.iter().enumerate().map(member).collect(),
            followers: followers.iter().map(follower).collect(),
        }
    }

    fn nodes() -> impl Strategy<Value = (Vec<u64>, Vec<u64>, usize)> {
        let all: Vec<u64> = (1..=20).collect();
        (Just(all).prop_shuffle(), 1..=12_usize, 0..=5_usize, 0..3_usize).prop_map(
            |(mut all, members, followers, first)| {
                let rest = all.split_off(members);
                (all, rest[..followers].to_vec(), first)
            },
        )
    }

    proptest! {
        #[test]
        fn a_change_leads_from_any_world_to_any_other(old in nodes(), new in nodes()) {
            let base = world(4, &old.0, &old.1, old.2);
            let next = world(9, &new.0, &new.1, new.2);
            let change = WorldChange::between(&base, &next);
            let change: WorldChange = decode(&encode(&change)).unwrap();
            prop_assert_eq!(change.apply(&base).unwrap(), next);
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(change) = decode::<WorldChange>(&bytes) {
                drop(change.apply(&world(4, &[1, 2, 3], &[4], 0)));
            }
        }
    }

    #[test]
    fn who_died_costs_as_many_bytes_as_are_changed() {
        let mut base = world(4, &(1..=12).collect::<Vec<_>>(), &[], 0);
        base.members.sort_by_key(|member| member.node);
        let mut next = base.clone();
        next.generation = Generation(5);
        let dead = next.members.remove(6);
        next.members[0].blocks.extend(dead.blocks);
        let bytes = encode(&WorldChange::between(&base, &next)).len();
        let whole = encode(&next).len();
        assert!(bytes * 5 < whole, "{bytes} of {whole} bytes");
        assert_eq!(WorldChange::between(&base, &next).apply(&base).unwrap(), next);
    }

    #[test]
    fn another_base_is_refused() {
        let [base, next] = [world(4, &[1, 2], &[], 0), world(5, &[1, 2, 3], &[], 0)];
        let change = WorldChange::between(&base, &next);
        assert!(change.apply(&next).unwrap_err().contains("can't be applied to world 5"));
        let fewer = World { members: base.members[..1].to_vec(), ..base.clone() };
        assert!(change.apply(&fewer).is_err());
    }
}
