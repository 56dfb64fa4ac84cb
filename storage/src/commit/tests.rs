use std::sync::Arc;

use proptest::prelude::*;
use serde_json::json;
use types::{DType, JobId, Step, VirtualRanks};

use super::*;
use crate::{Layout, TensorSpec};

fn plan_and_contents(members: u64) -> (SharePlan, Contents) {
    let spec = TensorSpec { name: "t".into(), dtype: DType::U8, shape: vec![30_000] };
    let layout = Arc::new(Layout::new(vec![spec], 4096).unwrap());
    let nodes: Vec<NodeId> = (1..=members).map(NodeId).collect();
    let plan = SharePlan::new(&layout, &nodes);
    let contents = Contents {
        job: JobId::new("demo").unwrap(),
        lineage: Lineage(1),
        step: Step(10),
        attempt: Attempt(5),
        virtual_ranks: VirtualRanks::new(8).unwrap(),
        layout,
        extra: json!({}),
    };
    (plan, contents)
}

fn commit(members: u64) -> Commit {
    let (plan, contents) = plan_and_contents(members);
    Commit::new(plan, contents)
}

fn receipt(commit: &Commit, node: NodeId) -> Receipt {
    let segments = commit.plan.mine(node).map(|index| {
        let bytes = commit.contents.layout.segment(index).unwrap().bytes;
        (index, Digest::of(&index.0.to_le_bytes()), bytes)
    });
    Receipt {
        attempt: Attempt(5),
        node,
        plan: commit.plan.digest(),
        state: Digest::of(b"state"),
        lineage: Lineage(1),
        segments: segments.collect(),
    }
}

#[test]
fn the_manifest_waits_for_every_receipt_and_comes_once() {
    let mut commit = commit(3);
    for node in [NodeId(3), NodeId(1)] {
        commit.handle_receipt(node, receipt(&commit, node));
        assert_eq!(commit.poll_action(), None);
    }
    assert_eq!(commit.missing().collect::<Vec<_>>(), [NodeId(2)]);
    commit.handle_receipt(NodeId(2), receipt(&commit, NodeId(2)));
    let Some(Action::Publish(manifest)) = commit.poll_action() else {
        panic!("all receipts are there")
    };
    assert_eq!(manifest.state(), Digest::of(b"state"));
    for segment in manifest.layout().segments() {
        assert_eq!(
            manifest.segment_hash(segment.index),
            Some(Digest::of(&segment.index.0.to_le_bytes()))
        );
    }
    assert_eq!(commit.poll_action(), None);
    assert_eq!(commit.dropped(), 0);
}

#[test]
fn a_member_without_segments_must_still_say_that_its_state_is_the_same() {
    let mut commit = commit(40);
    let nodes: Vec<NodeId> = commit.missing().collect();
    let (idle, busy): (Vec<NodeId>, Vec<NodeId>) =
        nodes.into_iter().partition(|n| commit.plan.mine(*n).count() == 0);
    assert!(!idle.is_empty());
    for node in busy.into_iter().chain(idle) {
        assert_eq!(commit.poll_action(), None);
        commit.handle_receipt(node, receipt(&commit, node));
    }
    assert!(matches!(commit.poll_action(), Some(Action::Publish(_))));
}

#[test]
fn foreign_repeated_and_late_receipts_are_dropped() {
    let mut commit = commit(2);
    let good = receipt(&commit, NodeId(1));
    commit.handle_receipt(NodeId(1), Receipt { attempt: Attempt(4), ..good.clone() });
    commit.handle_receipt(NodeId(1), Receipt { lineage: Lineage(0), ..good.clone() });
    commit.handle_receipt(NodeId(2), good.clone());
    commit.handle_receipt(NodeId(9), Receipt { node: NodeId(9), ..good.clone() });
    assert_eq!(commit.dropped(), 4);
    commit.handle_receipt(NodeId(1), good.clone());
    commit.handle_receipt(NodeId(1), good);
    assert_eq!(commit.dropped(), 5);
    commit.handle_receipt(NodeId(2), receipt(&commit, NodeId(2)));
    assert!(matches!(commit.poll_action(), Some(Action::Publish(_))));
    commit.handle_receipt(NodeId(2), receipt(&commit, NodeId(2)));
    assert_eq!(commit.dropped(), 6);
    assert_eq!(commit.poll_action(), None);
}

#[test]
fn receipts_that_disagree_refuse_the_attempt() {
    let base = commit(2);
    let good = receipt(&base, NodeId(2));
    let mut lacking = good.clone();
    lacking.segments.pop();
    let mut short = good.clone();
    short.segments[0].2 -= 1;
    let mut doubled = good.clone();
    doubled.segments.push(good.segments[0]);
    let other_state = Digest::of(b"diverged");
    let table = [
        (
            Receipt { state: other_state, ..good.clone() },
            Refusal::OtherState {
                node: NodeId(2),
                state: other_state,
                other: NodeId(1),
                other_state: good.state,
            },
        ),
        (Receipt { plan: other_state, ..good.clone() }, Refusal::OtherPlan { node: NodeId(2) }),
        (lacking, Refusal::OtherSegments { node: NodeId(2) }),
        (short, Refusal::OtherSegments { node: NodeId(2) }),
        (doubled, Refusal::OtherSegments { node: NodeId(2) }),
    ];
    for (bad, refusal) in table {
        let mut commit = base.clone();
        commit.handle_receipt(NodeId(1), receipt(&commit, NodeId(1)));
        commit.handle_receipt(NodeId(2), bad);
        commit.handle_receipt(NodeId(2), good.clone());
        assert_eq!(commit.poll_action(), Some(Action::Refuse(refusal)));
        assert_eq!(commit.poll_action(), None);
    }
    let mut commit = base;
    let first = receipt(&commit, NodeId(1));
    let mut second = first.clone();
    second.segments[0].1 = Digest::of(b"other bytes");
    commit.handle_receipt(NodeId(1), first);
    commit.handle_receipt(NodeId(1), second);
    assert_eq!(
        commit.poll_action(),
        Some(Action::Refuse(Refusal::Contradiction { node: NodeId(1) }))
    );
}

#[test]
fn receipts_come_back_equal() {
    let receipt = receipt(&commit(2), NodeId(2));
    assert_eq!(Receipt::decode(&receipt.encode()).unwrap(), receipt);
    assert_ne!(receipt.root(), Receipt { attempt: Attempt(6), ..receipt }.root());
}

proptest! {
    #[test]
    fn in_any_order_with_any_repetition_one_manifest_comes(members in 1u64..6, noise in prop::collection::vec((1u64..8, 0u8..3), 0..30)) {
        let mut commit = commit(members);
        let receipts: Vec<_> = (1..=members).map(|n| receipt(&commit, NodeId(n))).collect();
        let mut manifests = Vec::new();
        let mut good = std::collections::BTreeSet::new();
        let order = noise.into_iter().chain((1..=members).map(|n| (n, 0)));
        for (n, kind) in order {
            let mut receipt = receipts[(n % members) as usize].clone();
            match kind {
                0 => drop(good.insert(receipt.node)),
                1 => receipt.attempt = Attempt(n),
                _ => receipt.lineage = Lineage(n + 1),
            }
            let is_foreign = kind == 1 && n != 5 || kind == 2;
            if kind == 1 && !is_foreign {
                good.insert(receipt.node);
            }
            commit.handle_receipt(receipt.node, receipt);
            while let Some(action) = commit.poll_action() {
                let Action::Publish(manifest) = action else { panic!("nothing disagrees") };
                prop_assert_eq!(good.len() as u64, members);
                manifests.push(manifest.encode());
            }
        }
        prop_assert_eq!(manifests.len(), 1);
        let mut in_order = self::commit(members);
        for receipt in receipts {
            in_order.handle_receipt(receipt.node, receipt);
        }
        let Some(Action::Publish(manifest)) = in_order.poll_action() else { panic!("all are there") };
        prop_assert_eq!(&manifest.encode(), &manifests[0]);
    }

    #[test]
    fn any_bytes_are_no_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(receipt) = Receipt::decode(&bytes) {
            prop_assert_eq!(Receipt::decode(&receipt.encode()).unwrap(), receipt);
        }
    }
}
