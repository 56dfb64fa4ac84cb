//! Steps under fire: tables of single cases, and many seeded runs in which nearly everything goes wrong.

mod coordinator;
mod node;
mod rig;
mod simulation;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use collectives::Chunk;
use types::{Digest, Lineage, NodeId, Step, TreeNode};

use super::{NodeName, PeerFrame, Verdict};
use rig::Rig;
use simulation::{Summary, Trace};

#[test]
fn any_number_of_members_trains_to_the_same_bits() {
    let blocks: [&[&[(u32, u8)]]; 5] = [
        &[&[(0, 3)]],
        &[&[(0, 2)], &[(4, 1)]],
        &[&[(2, 1)], &[(4, 1)], &[(0, 1)]],
        &[&[(0, 1)], &[(2, 1)], &[(4, 0)], &[(5, 0)]],
        &[&[(0, 0), (3, 0)], &[(5, 0)], &[(2, 0)], &[(1, 0)], &[(4, 0)]],
    ];
    for blocks in blocks {
        let ids: Vec<u64> = (1..=blocks.len() as u64).collect();
        let mut rig = Rig::new(&ids, 6, 3);
        let members: Vec<_> = ids.iter().copied().zip(blocks.iter().copied()).collect();
        rig.world(None, &members, &[]);
        rig.run(6);
        rig.check_bits(6);
        for step in 0..6 {
            assert_eq!(ids.iter().map(|id| rig.leaves(*id, step)).sum::<usize>(), 6);
        }
        let finished: usize = rig.nodes.values().map(|n| n.finished.len()).sum();
        assert_eq!(finished, 18, "each chunk of each step is folded once");
    }
}

/// Members 1 to 3 of eight virtual ranks and three chunks; node 3 owns chunk 0, node 2 chunk 1 and node 1 chunk 2.
fn three() -> Rig {
    let mut rig = Rig::new(&[1, 2, 3], 8, 3);
    let owner = |chunk| collectives::owner(Chunk(chunk), &[NodeId(1), NodeId(2), NodeId(3)]).0;
    assert_eq!([owner(0), owner(1), owner(2)], [3, 2, 1]);
    rig.world(None, &[(1, &[(0, 2)]), (2, &[(4, 1)]), (3, &[(6, 1)])], &[]);
    rig.run(0);
    rig.limit = Step(6);
    rig
}

const WITHOUT_3: rig::Members<'static> = &[(1, &[(0, 2)]), (2, &[(4, 2)])];

#[test]
fn a_death_costs_the_leaves_of_the_dead_and_nothing_else() {
    let mut rig = three();
    assert!(rig.work(3));
    for _ in 0..4 {
        rig.work(1);
        rig.work(2);
    }
    rig.kill(3);
    rig.world(None, WITHOUT_3, &[]);
    rig.run(1);
    assert_eq!((rig.leaves(1, 0), rig.leaves(2, 0)), (4, 4));
    assert_eq!(rig.nodes[&2].cycle.counters().recomputed_leaves, 2);
    rig.run(6);
    rig.check_bits(6);
}

#[test]
fn what_the_owner_has_from_the_dead_is_not_computed_again() {
    let mut rig = Rig::new(&[1, 2, 3], 8, 1);
    rig.world(None, &[(1, &[(0, 2)]), (2, &[(4, 1)]), (3, &[(6, 1)])], &[]);
    rig.run(0);
    rig.limit = Step(6);
    for _ in 0..4 {
        assert!(rig.work(1));
    }
    rig.work(2);
    rig.kill(1);
    rig.world(None, &[(2, &[(4, 1), (0, 2)]), (3, &[(6, 1)])], &[]);
    rig.run(1);
    assert_eq!((rig.leaves(2, 0), rig.leaves(3, 0)), (2, 2));
    rig.run(6);
    rig.check_bits(6);
}

#[test]
fn what_the_dead_owner_had_is_given_again_from_what_the_others_kept() {
    let mut rig = three();
    // All that node 3 gives is at the owners of chunks 1 and 2; of its own chunk it has the others' nodes, and they keep them.
    rig.work(3);
    rig.work(3);
    rig.kill(3);
    rig.world(None, WITHOUT_3, &[]);
    rig.run(1);
    let held = |id: u64| rig.nodes[&id].finished.iter().map(|(_, c)| c.0).collect::<Vec<_>>();
    assert_eq!((rig.leaves(1, 0), rig.leaves(2, 0)), (4, 4), "chunk 0 needs leaves 6 and 7 again");
    let mut finished = [held(1), held(2)].concat();
    finished.sort_unstable();
    assert_eq!(finished, [0, 1, 2]);
    rig.run(6);
    rig.check_bits(6);
}

#[test]
fn a_final_that_one_survivor_has_is_fetched_and_not_folded_again() {
    let mut rig = three();
    rig.loses = |from, to, frame| from == 3 && to == 2 && matches!(frame, PeerFrame::Final(_));
    while rig.nodes[&3].finished.is_empty() {
        for id in 1..=3 {
            rig.work(id);
        }
    }
    rig.kill(3);
    rig.world(None, WITHOUT_3, &[]);
    rig.run(1);
    assert_eq!((rig.leaves(1, 0), rig.leaves(2, 0)), (4, 2), "nothing is computed again");
    let again = rig.nodes.values().flat_map(|n| &n.finished).filter(|(_, c)| *c == Chunk(0));
    assert_eq!(again.count(), 0);
    assert_eq!(rig.nodes[&1].cycle.counters().passed_finals, 1);
    rig.check_bits(1);
    rig.run(6);
    rig.check_bits(6);
}

#[test]
fn a_member_one_step_behind_fetches_what_the_dead_owner_had_spread() {
    let mut rig = three();
    rig.loses = |_, to, frame| to == 2 && matches!(frame, PeerFrame::Final(_));
    while rig.nodes[&1].cycle.applied() != Some(Step(1)) {
        for id in 1..=3 {
            rig.work(id);
        }
    }
    rig.loses = |_, _, _| false;
    assert_eq!(rig.nodes[&2].cycle.applied(), Some(Step(0)));
    rig.kill(3);
    rig.world(None, WITHOUT_3, &[]);
    rig.run(6);
    assert_eq!(rig.leaves(2, 0), 2);
    rig.check_bits(6);
}

#[test]
fn a_drained_member_serves_up_to_its_boundary() {
    let mut rig = three();
    rig.world(Some(2), WITHOUT_3, &[]);
    rig.run(6);
    assert_eq!([0, 1, 2].map(|step| rig.leaves(3, step)), [2, 2, 0]);
    for step in 0..6 {
        assert_eq!((1..=3).map(|id| rig.leaves(id, step)).sum::<usize>(), 8);
    }
    assert!(rig.nodes[&3].cycle.is_excluded());
    assert_eq!(rig.nodes[&3].cycle.applied(), Some(Step(2)));
    rig.kill(3);
    rig.check_bits(6);
}

#[test]
fn a_joiner_copies_the_state_follows_and_enters() {
    let mut rig = Rig::new(&[1, 2, 3], 8, 3);
    let two: rig::Members<'_> = &[(1, &[(0, 2)]), (2, &[(4, 2)])];
    rig.world(None, two, &[]);
    rig.run(1);
    rig.world(None, two, &[3]);
    rig.run(4);
    // It named a boundary ahead of the members, and has followed since.
    assert_eq!(rig.nodes[&3].cycle.digests().last().map(|d| d.0), Some(Step(3)));
    rig.world(Some(5), &[(1, &[(0, 2)]), (2, &[(4, 1)]), (3, &[(6, 1)])], &[]);
    rig.run(6);
    rig.check_bits(6);
    assert_eq!([4, 5].map(|step| rig.leaves(3, step)), [0, 2]);
    for step in 0..6 {
        assert_eq!((1..=3).map(|id| rig.leaves(id, step)).sum::<usize>(), 8);
    }
}

#[test]
fn who_is_out_offers_its_finals_under_the_world_that_it_served() {
    let mut rig = three();
    rig.loses = |from, _, frame| from == 3 && matches!(frame, PeerFrame::Final(_));
    while rig.nodes[&3].finished.is_empty() {
        for id in 1..=3 {
            rig.work(id);
        }
    }
    // Evicted, alive, and the only one that knows a final: the others have reported without it.
    rig.world(None, WITHOUT_3, &[]);
    rig.loses = |_, _, _| false;
    rig.node(3).handle_link_up(NodeId(1));
    let finals = rig.nodes[&3].outbox.iter().filter_map(|(_, frame, _)| match frame {
        PeerFrame::Final(name) => Some(name.generation.0),
        _ => None,
    });
    let generations: Vec<u64> = finals.collect();
    assert!(generations.contains(&1) && generations.iter().all(|g| *g == 1), "{generations:?}");
    rig.deliver();
    assert!(!rig.nodes[&1].finals.contains_key(&(Step(0), Chunk(0))), "it is refused");
    rig.kill(3);
    rig.run(6);
    rig.check_bits(6);
}

#[test]
fn an_early_node_of_somebody_evicted_gives_way_to_that_of_a_member() {
    let mut rig = three();
    let name = |state: &[u8]| NodeName {
        lineage: Lineage(1),
        step: Step(1),
        chunk: Chunk(2),
        node: TreeNode::new(4, 1).unwrap(),
        state: Digest::of(state),
    };
    let cycle = &mut rig.node(1).cycle;
    assert_eq!(cycle.handle_node(NodeId(9), name(b"another state")), Verdict::Keep);
    assert_eq!(cycle.handle_node(NodeId(2), name(b"the members' state")), Verdict::Keep);
    assert_eq!(cycle.handle_node(NodeId(9), name(b"another state")), Verdict::Drop);
    assert_eq!(cycle.handle_node(NodeId(2), name(b"the members' state")), Verdict::Drop);
}

#[test]
fn a_copy_from_a_member_that_was_ahead_and_died_does_not_make_level() {
    let mut rig = Rig::new(&[1, 2, 3], 8, 3);
    let two: rig::Members<'_> = &[(1, &[(0, 2)]), (2, &[(4, 2)])];
    rig.world(None, two, &[3]);
    rig.loses = |from, to, frame| match frame {
        PeerFrame::Final(_) => to != 1,
        PeerFrame::StateRequest { .. } => from == 3,
        _ => false,
    };
    while rig.nodes[&1].cycle.applied() != Some(Step(1)) {
        rig.work(1);
        rig.work(2);
    }
    // Node 3 has a copy at boundary 1, where node 2 is not.
    let (lineage, state) = rig.nodes[&1].state.clone().unwrap();
    rig.node(3).loaded(lineage, state);
    assert_eq!(rig.nodes[&3].cycle.applied(), Some(Step(1)));
    assert_eq!(rig.nodes[&3].cycle.digests().count(), 0);
    rig.kill(1);
    rig.loses = |_, _, _| false;
    rig.world(None, &[(2, &[(0, 3)])], &[3]);
    assert_eq!(rig.nodes[&3].cycle.applied(), None, "it takes another copy");
    rig.run(6);
    rig.check_bits(6);
}

#[test]
#[expect(clippy::print_stdout, reason = "how much happened, for whoever runs more seeds")]
fn a_step_survives_any_death_with_the_same_bits() {
    let read = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let (from, seeds) = (read("RIPSTOP_FROM").unwrap_or(0), read("RIPSTOP_SEEDS").unwrap_or(300));
    let mut total = Summary::default();
    let mut failed = Vec::new();
    for seed in from..from + seeds {
        match catch_unwind(|| simulation::run(seed, None)) {
            Ok(summary) => total.add(summary),
            Err(_) => failed.push(seed),
        }
    }
    println!("{total:?}");
    let reached = [total.worlds, total.crashes, total.evictions, total.restarts, total.joined];
    let reached = [&reached[..], &[total.drained, total.passed, total.recomputed]].concat();
    assert!(seeds < 300 || reached.iter().all(|count| *count > 100), "too tame: {total:?}");
    if let Some(seed) = failed.first() {
        // Once more, with a trace.
        let trace: Trace = Rc::new(RefCell::new(VecDeque::new()));
        let again = Rc::clone(&trace);
        let _ = catch_unwind(AssertUnwindSafe(|| simulation::run(*seed, Some(again))));
        let lines: Vec<String> = trace.borrow().iter().cloned().collect();
        panic!(
            "seeds {failed:?} fail; RIPSTOP_FROM={seed} RIPSTOP_SEEDS=1 repeats the first, which ended so:\n{}",
            lines.join("\n")
        );
    }
}
