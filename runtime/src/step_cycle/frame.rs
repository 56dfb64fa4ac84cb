//! What members say to each other. The bytes of nodes and finals travel beside these heads, as the body of the same frame.

use std::collections::BTreeSet;
use std::sync::Arc;

use collectives::Chunk;
use serde::{Deserialize, Serialize};
use types::{Digest, Generation, Lineage, NodeId, Step, TreeNode, World};

/// How a member enters a world: what it has applied and what it holds. The world comes along, so that it spreads without coordinators.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Report {
    /// The world that it enters.
    pub world: Arc<World>,
    /// Its boundary: how many steps it has applied.
    pub applied: Step,
    /// The digest of its state there.
    pub state: Digest,
    /// The final chunks that it holds, by step.
    pub finals: Vec<(Step, BTreeSet<Chunk>)>,
    /// The nodes that it holds, by step and chunk.
    pub nodes: Vec<(Step, Chunk, BTreeSet<TreeNode>)>,
}

/// Names a node of the canonical tree, in whatever generation it was computed, and the state from which it was.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct NodeName {
    /// The lineage of the state.
    pub lineage: Lineage,
    /// The step.
    pub step: Step,
    /// The chunk.
    pub chunk: Chunk,
    /// The node.
    pub node: TreeNode,
    /// The digest of the state that it was computed from.
    pub state: Digest,
}

/// Names a final chunk, and who says so.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FinalName {
    /// The world in which it is passed on.
    pub generation: Generation,
    /// The lineage of the state.
    pub lineage: Lineage,
    /// The step.
    pub step: Step,
    /// The chunk.
    pub chunk: Chunk,
    /// The lowest boundary of all members that the sender knows.
    pub lowest: Step,
}

/// A frame between members.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum PeerFrame {
    /// The sender enters a world.
    Report(Box<Report>),
    /// A node for the owner of its chunk; its bytes are the body.
    Node(NodeName),
    /// A final chunk; its bytes are the body.
    Final(FinalName),
    /// The sender's boundary, and its state's digest there.
    Progress {
        /// The lineage.
        lineage: Lineage,
        /// The boundary.
        applied: Step,
        /// The digest of the state.
        state: Digest,
    },
    /// The sender lacks these final chunks.
    FinalRequest {
        /// The lineage.
        lineage: Lineage,
        /// The step.
        step: Step,
        /// The chunks.
        chunks: BTreeSet<Chunk>,
    },
    /// A follower asks for a share of the state at a boundary that is to come.
    StateRequest {
        /// The lineage that it follows.
        lineage: Lineage,
        /// The boundary.
        boundary: Step,
        /// The pieces.
        pieces: Vec<u32>,
    },
    /// A share of the state follows on the same lane. The body has what is not in pieces, and the digests of all pieces.
    StateOffer {
        /// The lineage.
        lineage: Lineage,
        /// The boundary.
        applied: Step,
        /// The digest of the state.
        state: Digest,
    },
    /// One piece of a state; its bytes are the body.
    StatePiece {
        /// The lineage.
        lineage: Lineage,
        /// The boundary.
        applied: Step,
        /// Its number, from 0.
        piece: u32,
    },
    /// The sender has left the boundary of which a share was asked.
    StateMissed {
        /// The lineage.
        lineage: Lineage,
        /// The boundary of the request.
        boundary: Step,
        /// Where the sender stands.
        applied: Step,
    },
}

/// A frame and where it came from or goes to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Envelope {
    /// The other side.
    pub node: NodeId,
    /// The frame.
    pub frame: PeerFrame,
}
