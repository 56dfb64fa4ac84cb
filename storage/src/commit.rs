//! When a checkpoint's manifest may be written: once every member of the plan has said, with one state digest, that exactly its
//! share is stored. Sets and hashes decide, never counts.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use types::{Attempt, Digest, Lineage, NodeId, WireError};

use crate::{Contents, Manifest, SegmentIndex, SharePlan};

/// Collects the receipts of one attempt and says when, and with which manifest, it may be published.
#[derive(Clone, Debug)]
pub struct Commit {
    plan: SharePlan,
    contents: Contents,
    receipts: BTreeMap<NodeId, Receipt>,
    refusal: Option<Refusal>,
    is_decided: bool,
    dropped: u64,
}

impl Commit {
    /// Waits for the receipts of all members of `plan`.
    #[must_use]
    pub fn new(plan: SharePlan, contents: Contents) -> Self {
        Self {
            plan,
            contents,
            receipts: BTreeMap::new(),
            refusal: None,
            is_decided: false,
            dropped: 0,
        }
    }

    /// A receipt came, from the node that `node` was proved to be. What is of another attempt or lineage, from a stranger, a
    /// repetition, or too late is counted and dropped.
    pub fn handle_receipt(&mut self, node: NodeId, receipt: Receipt) {
        let is_mine =
            receipt.attempt == self.contents.attempt && receipt.lineage == self.contents.lineage;
        let is_known = self.receipts.get(&node) == Some(&receipt);
        let is_over = self.is_decided || self.refusal.is_some();
        if !is_mine || is_known || is_over || receipt.node != node || !self.plan.has_member(node) {
            self.dropped += 1;
            return;
        }
        self.refusal = self.refusal_of(node, &receipt);
        if self.refusal.is_none() {
            self.receipts.insert(node, receipt);
        }
    }

    /// What to do now; each answer comes once. After it the attempt is over.
    pub fn poll_action(&mut self) -> Option<Action> {
        if self.is_decided || (self.refusal.is_none() && self.missing().next().is_some()) {
            return None;
        }
        self.is_decided = true;
        Some(match self.refusal.clone() {
            Some(refusal) => Action::Refuse(refusal),
            None => self.manifest(),
        })
    }

    /// The members whose receipts are still missing.
    pub fn missing(&self) -> impl Iterator<Item = NodeId> {
        self.plan.members().filter(|node| !self.receipts.contains_key(node))
    }

    /// How many receipts were dropped as foreign, repeated or late.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    fn refusal_of(&self, node: NodeId, receipt: &Receipt) -> Option<Refusal> {
        if self.receipts.contains_key(&node) {
            return Some(Refusal::Contradiction { node });
        }
        if receipt.plan != self.plan.digest() {
            return Some(Refusal::OtherPlan { node });
        }
        if let Some((other, first)) = self.receipts.iter().find(|(_, r)| r.state != receipt.state) {
            return Some(Refusal::OtherState {
                node,
                state: receipt.state,
                other: *other,
                other_state: first.state,
            });
        }
        let expected = self
            .plan
            .mine(node)
            .map(|index| (index, self.contents.layout.segment(index).map(|s| s.bytes)));
        let found = receipt.segments.iter().map(|(index, _, bytes)| (*index, Some(*bytes)));
        if !expected.eq(found) {
            return Some(Refusal::OtherSegments { node });
        }
        None
    }

    fn manifest(&self) -> Action {
        let state = self.receipts.values().next().expect("a plan has members").state;
        let mut hashes: Vec<(SegmentIndex, Digest)> = self
            .receipts
            .values()
            .flat_map(|r| r.segments.iter().map(|(index, hash, _)| (*index, *hash)))
            .collect();
        hashes.sort_unstable_by_key(|(index, _)| *index);
        let hashes = hashes.into_iter().map(|(_, hash)| hash).collect();
        match Manifest::new(self.contents.clone(), state, hashes) {
            Ok(manifest) => Action::Publish(Box::new(manifest)),
            Err(error) => Action::Refuse(Refusal::Manifest { reason: error.to_string() }),
        }
    }
}

/// What the driver of a [`Commit`] must do.
#[derive(Clone, PartialEq, Debug)]
pub enum Action {
    /// Write this manifest, then propose the commit.
    Publish(Box<Manifest>),
    /// Give the attempt up. What was uploaded is garbage; the checkpoint before stands.
    Refuse(Refusal),
}

/// Why an attempt can't be committed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Two members hold different states.
    #[error(
        "node {node} holds state {state:#}, node {other} holds {other_state:#}: the members have diverged"
    )]
    OtherState {
        /// Who differs.
        node: NodeId,
        /// Its state.
        state: Digest,
        /// A member that reported earlier.
        other: NodeId,
        /// That member's state.
        other_state: Digest,
    },
    /// A member laid the state out or shared it otherwise.
    #[error("node {node} followed another plan: its tensors, segment size or members differ")]
    OtherPlan {
        /// Who differs.
        node: NodeId,
    },
    /// A receipt doesn't name exactly the member's share.
    #[error("the receipt of node {node} does not name exactly its share of the segments")]
    OtherSegments {
        /// Whose receipt.
        node: NodeId,
    },
    /// A member sent two different receipts.
    #[error("node {node} sent two different receipts for one attempt")]
    Contradiction {
        /// Who.
        node: NodeId,
    },
    /// The manifest can't be made.
    #[error("the manifest can't be made: {reason}")]
    Manifest {
        /// Why.
        reason: String,
    },
}

/// A member's word that its share is stored.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Receipt {
    /// The try at writing the checkpoint.
    pub attempt: Attempt,
    /// Who stored.
    pub node: NodeId,
    /// Digest of the plan that it followed.
    pub plan: Digest,
    /// Digest of the whole state that it holds.
    pub state: Digest,
    /// The lineage in which it stands.
    pub lineage: Lineage,
    /// What it stored: segment, BLAKE3, bytes; in order of the index.
    pub segments: Vec<(SegmentIndex, Digest, u64)>,
}

impl Receipt {
    /// One digest over all of it: what the log carries.
    #[must_use]
    pub fn root(&self) -> Digest {
        Digest::of(&self.encode())
    }

    /// The bytes to send.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        types::encode(self)
    }

    /// Reads a receipt.
    ///
    /// # Errors
    /// If the bytes are no receipt.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        types::decode(bytes)
    }
}

#[cfg(test)]
mod tests;
