//! The frozen member list of one generation.

use std::fmt;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::{
    Block, Digest, Generation, Lineage, NodeId, Rank, Step, VirtualRank, VirtualRanks, WorldSize,
};

/// Where a member takes data connections, and the certificate that it must show there.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Address {
    /// UDP address of its data endpoint.
    pub socket: SocketAddr,
    /// SHA-256 of its certificate.
    pub certificate: Digest,
}

/// A member of a world.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Member {
    /// The process.
    pub node: NodeId,
    /// Where to reach it.
    pub address: Address,
    /// Name of its host, for locality and for people.
    pub host: String,
    /// The blocks of virtual ranks that it serves; at least one.
    pub blocks: Vec<Block>,
}

/// A node that follows the job level, without virtual ranks: a joiner before it enters, or a hot spare.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Follower {
    /// The process.
    pub node: NodeId,
    /// Where to reach it.
    pub address: Address,
    /// Name of its host.
    pub host: String,
}

/// Where the state of a new lineage comes from.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Origin {
    /// The program's own initial state.
    Initial,
    /// A committed checkpoint: the key of its manifest and the BLAKE3 of the manifest's bytes.
    Checkpoint {
        /// Key of the manifest object under the checkpoint URL.
        manifest: String,
        /// BLAKE3 of the manifest's bytes.
        hash: Digest,
    },
}

/// The state with which a lineage starts.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Start {
    /// Boundary of the state: the next step to compute.
    pub step: Step,
    /// Where it comes from.
    pub origin: Origin,
    /// Its digest, where the log knows it.
    pub digest: Option<Digest>,
}

/// The frozen member list of one **generation**. Committed by Raft before anybody sees it; numbered without gaps or reuse.
// Invariants (checked by `check`): members are in rank order without repeats, each has a block, and the blocks of all members tile the
// virtual ranks exactly once.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct World {
    /// Its number.
    pub generation: Generation,
    /// The lineage that it belongs to.
    pub lineage: Lineage,
    /// The job's fixed number of virtual ranks.
    pub virtual_ranks: VirtualRanks,
    /// `None`: a loss; it takes effect at once, in mid-step. `Some(step)`: a planned change; it serves from that step on.
    pub from: Option<Step>,
    /// A held world computes and folds nothing; its members only level their states.
    pub held: bool,
    /// For the first world of a lineage: the state to load before entering.
    pub start: Option<Start>,
    /// The members, in rank order.
    pub members: Vec<Member>,
    /// Those who follow and receive the final chunks.
    pub followers: Vec<Follower>,
}

impl World {
    /// How many members it has.
    ///
    /// # Panics
    /// If it has none, which `check` refuses.
    #[must_use]
    pub fn size(&self) -> WorldSize {
        u32::try_from(self.members.len())
            .ok()
            .and_then(WorldSize::new)
            .expect("a world has members")
    }

    /// The rank of a node, if it is a member.
    #[must_use]
    pub fn rank_of(&self, node: NodeId) -> Option<Rank> {
        let place = self.members.iter().position(|m| m.node == node)?;
        u32::try_from(place).ok().map(Rank)
    }

    /// The member with this node id.
    #[must_use]
    pub fn member(&self, node: NodeId) -> Option<&Member> {
        self.members.iter().find(|m| m.node == node)
    }

    /// Whether the node is a member.
    #[must_use]
    pub fn has_member(&self, node: NodeId) -> bool {
        self.member(node).is_some()
    }

    /// Whether the node is a follower.
    #[must_use]
    pub fn has_follower(&self, node: NodeId) -> bool {
        self.followers.iter().any(|f| f.node == node)
    }

    /// Node ids of the members, in rank order.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> {
        self.members.iter().map(|m| m.node)
    }

    /// Where to reach a member or follower.
    #[must_use]
    pub fn address(&self, node: NodeId) -> Option<&Address> {
        let member = self.members.iter().find(|m| m.node == node).map(|m| &m.address);
        member.or_else(|| self.followers.iter().find(|f| f.node == node).map(|f| &f.address))
    }

    /// The member that serves a virtual rank.
    #[must_use]
    pub fn server(&self, rank: VirtualRank) -> Option<NodeId> {
        let leaf = Block::leaf(rank);
        self.members.iter().find(|m| m.blocks.iter().any(|b| b.contains(leaf))).map(|m| m.node)
    }

    /// Checks the invariants.
    ///
    /// # Errors
    /// The first one that does not hold, in words.
    pub fn check(&self) -> Result<(), String> {
        if self.members.is_empty() {
            return Err(format!("world {} has no member", self.generation));
        }
        let mut served = vec![None; self.virtual_ranks.count() as usize];
        for (place, member) in self.members.iter().enumerate() {
            if self.members[..place].iter().any(|m| m.node == member.node) {
                return Err(format!("world {} lists node {} twice", self.generation, member.node));
            }
            if !member.blocks.iter().any(|b| !b.is_outside(self.virtual_ranks)) {
                return Err(format!(
                    "world {}: node {} serves no virtual rank",
                    self.generation, member.node
                ));
            }
            for rank in member.blocks.iter().flat_map(|b| b.leaves(self.virtual_ranks)) {
                if let Some(other) = served[rank.0 as usize].replace(member.node) {
                    return Err(format!(
                        "world {}: virtual rank {rank} is served by nodes {other} and {}",
                        self.generation, member.node
                    ));
                }
            }
        }
        if let Some(rank) = served.iter().position(Option::is_none) {
            return Err(format!("world {}: nobody serves virtual rank {rank}", self.generation));
        }
        if let Some(follower) = self.followers.iter().find(|f| self.has_member(f.node)) {
            return Err(format!(
                "world {}: node {} is member and follower",
                self.generation, follower.node
            ));
        }
        Ok(())
    }
}

impl fmt::Display for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "world {} (lineage {}", self.generation, self.lineage)?;
        if let Some(from) = self.from {
            write!(f, ", from step {from}")?;
        }
        if self.held {
            f.write_str(", held")?;
        }
        f.write_str(") [")?;
        for (place, member) in self.members.iter().enumerate() {
            write!(f, "{}{}", if place == 0 { "" } else { " " }, member.node)?;
        }
        f.write_str("]")?;
        for (place, follower) in self.followers.iter().enumerate() {
            write!(f, "{}{}", if place == 0 { " followers " } else { " " }, follower.node)?;
        }
        Ok(())
    }
}
