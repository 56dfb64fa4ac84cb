use std::sync::Arc;

use types::{Address, Follower, Member, TreeNode, VirtualRanks};

use super::*;

const LINEAGE: Lineage = Lineage(1);
const TARGET: Duration = Duration::from_secs(1);

fn at(s: u64) -> Timestamp {
    Timestamp(s * 1_000_000_000)
}

/// What a node knows: members 1 and 2 (or more), node 9 follows.
struct Known {
    world: Arc<World>,
    known: BTreeMap<NodeId, Step>,
    applied: Option<Step>,
}

impl Known {
    fn of(members: &[u64]) -> Self {
        let address =
            Address { socket: "127.0.0.1:1".parse().unwrap(), certificate: Digest::default() };
        let v = VirtualRanks::try_from(8).unwrap();
        let member = |(place, id): (u32, &u64)| Member {
            node: NodeId(*id),
            address: address.clone(),
            host: String::new(),
            blocks: vec![TreeNode::leaf(types::VirtualRank(place))],
        };
        let world = World {
            generation: Generation(3),
            lineage: LINEAGE,
            virtual_ranks: v,
            from: None,
            held: false,
            start: None,
            members: (0..).zip(members).map(member).collect(),
            followers: vec![Follower { node: NodeId(9), address, host: String::new() }],
        };
        Self { world: Arc::new(world), known: BTreeMap::new(), applied: None }
    }

    fn with(mut self, node: u64, step: u64) -> Self {
        self.known.insert(NodeId(node), Step(step));
        self
    }

    fn held(mut self) -> Self {
        let mut world = World::clone(&self.world);
        world.held = true;
        world.generation = world.generation.next();
        self.world = Arc::new(world);
        self
    }

    fn standing(mut self, applied: u64) -> Self {
        self.applied = Some(Step(applied));
        self
    }

    fn view(&self) -> Boundaries<'_> {
        let highest = self.known.values().max().copied().unwrap_or_default();
        Boundaries { world: &self.world, applied: self.applied, known: &self.known, highest }
    }
}

fn copy(me: u64, pieces: u32) -> StateCopy {
    StateCopy::new(NodeId(me), pieces, Some(Step(100)), TARGET)
}

fn digests(pieces: u32) -> Vec<Digest> {
    (0..pieces).map(|piece| Digest::of(&piece.to_le_bytes())).collect()
}

fn whole() -> Digest {
    Digest::of(b"the state")
}

/// Requests among the actions: whom, which boundary, which pieces.
fn asked(copy: &mut StateCopy) -> Vec<(u64, u64, Vec<u32>)> {
    let mut asked = Vec::new();
    while let Some(action) = copy.poll_action() {
        if let CopyAction::Send(Envelope {
            node,
            frame: PeerFrame::StateRequest { boundary, pieces, .. },
        }) = action
        {
            asked.push((node.0, boundary.0, pieces));
        }
    }
    asked
}

fn actions(copy: &mut StateCopy) -> Vec<CopyAction> {
    std::iter::from_fn(|| copy.poll_action()).collect()
}

fn offer(copy: &mut StateCopy, from: u64, applied: u64, pieces: u32) {
    copy.handle_offer(at(1), NodeId(from), (LINEAGE, Step(applied), whole()), digests(pieces));
}

fn piece(copy: &mut StateCopy, from: u64, applied: u64, piece: u32) -> Verdict {
    let digest = Digest::of(&piece.to_le_bytes());
    copy.handle_piece(at(1), NodeId(from), (LINEAGE, Step(applied), piece), digest)
}

#[test]
fn each_member_gives_its_share_of_one_boundary_that_is_ahead() {
    let known = Known::of(&[1, 2]).with(1, 10).with(2, 9);
    let mut follower = copy(9, 5);
    follower.handle_turn(at(0), known.view(), true);
    assert_eq!(asked(&mut follower), [(1, 12, vec![0, 1]), (2, 12, vec![2, 3, 4])]);
    offer(&mut follower, 1, 12, 5);
    offer(&mut follower, 2, 12, 5);
    for number in [0, 1, 2, 3] {
        let from = if number < 2 { 1 } else { 2 };
        assert_eq!(piece(&mut follower, from, 12, number), Verdict::Keep);
    }
    assert_eq!(piece(&mut follower, 2, 12, 3), Verdict::Drop, "twice");
    assert_eq!(piece(&mut follower, 1, 12, 4), Verdict::Drop, "not its share");
    assert_eq!(piece(&mut follower, 2, 11, 4), Verdict::Drop, "another boundary");
    assert_eq!(actions(&mut follower), []);
    assert_eq!(piece(&mut follower, 2, 12, 4), Verdict::Keep);
    let complete = CopyAction::Complete { lineage: LINEAGE, applied: Step(12), digest: whole() };
    assert_eq!(actions(&mut follower), [complete]);
}

#[test]
fn a_member_copies_at_the_boundary_once_for_all_and_says_when_it_is_too_late() {
    let mut member = copy(1, 5);
    let mut known = Known::of(&[1, 2]).standing(11);
    let ask = |member: &mut StateCopy, boundary: u64, pieces: &[u32], known: &Known| {
        let pieces = pieces.iter().copied().collect();
        member.handle_request(NodeId(9), (LINEAGE, Step(boundary)), pieces, known.view());
    };
    ask(&mut member, 12, &[0, 1, 77], &known);
    assert_eq!(member.due(Step(11)), None);
    known = known.standing(12);
    member.handle_boundary(known.view());
    assert_eq!(member.due(Step(12)), Some(BTreeSet::from([0, 1])));
    assert_eq!(member.take_due(Step(12)).len(), 1);
    assert_eq!(member.due(Step(12)), None);
    ask(&mut member, 11, &[0], &known);
    let missed = PeerFrame::StateMissed { lineage: LINEAGE, boundary: Step(11), applied: Step(12) };
    let said = CopyAction::Send(Envelope { node: NodeId(9), frame: missed });
    assert_eq!(actions(&mut member), [said]);
    // A stranger, and one of another lineage, are not heard.
    member.handle_request(NodeId(5), (LINEAGE, Step(12)), BTreeSet::new(), known.view());
    member.handle_request(NodeId(9), (Lineage(2), Step(12)), BTreeSet::new(), known.view());
    assert_eq!((member.due(Step(12)), actions(&mut member)), (None, vec![]));
}

#[test]
fn who_missed_the_boundary_makes_the_next_round_go_farther_ahead() {
    let known = Known::of(&[1, 2]).with(1, 10).with(2, 10);
    let mut follower = copy(9, 2);
    follower.handle_turn(at(0), known.view(), true);
    assert!(asked(&mut follower).iter().all(|(_, boundary, _)| *boundary == 12));
    follower.handle_missed(NodeId(1), LINEAGE, Step(12), Step(20));
    assert_eq!(actions(&mut follower), [CopyAction::Discard]);
    follower.handle_turn(at(0), known.view(), true);
    assert!(asked(&mut follower).iter().all(|(_, boundary, _)| *boundary == 24));
    follower.handle_missed(NodeId(1), LINEAGE, Step(12), Step(50));
    assert_eq!(actions(&mut follower), [], "a word of a former round");
    follower.handle_missed(NodeId(1), LINEAGE, Step(24), Step(99));
    follower.handle_turn(at(0), known.view(), true);
    assert!(asked(&mut follower).iter().all(|(_, boundary, _)| *boundary == 100), "the end");
}

#[test]
fn a_bad_piece_drops_and_names_its_source() {
    let known = Known::of(&[1, 2]).with(1, 0);
    let mut follower = copy(9, 2);
    follower.handle_turn(at(0), known.view(), true);
    asked(&mut follower);
    offer(&mut follower, 2, 2, 2);
    let bad = (LINEAGE, Step(2), 1);
    assert_eq!(follower.handle_piece(at(1), NodeId(2), bad, whole()), Verdict::Drop);
    let said = actions(&mut follower);
    let is_named =
        |a: &CopyAction| matches!(a, CopyAction::Dropped { node, .. } if *node == NodeId(2));
    assert!(said.iter().any(is_named), "{said:?}");
    follower.handle_turn(at(1), known.view(), true);
    assert_eq!(asked(&mut follower), [(1, 2, vec![0, 1])]);
    // When nobody is left, all get another chance.
    follower.handle_nonsense(NodeId(1), LINEAGE, Step(2));
    follower.handle_turn(at(1), known.view(), true);
    assert_eq!(asked(&mut follower).len(), 2);
}

#[test]
fn of_different_states_the_one_of_most_members_is_copied() {
    let known = Known::of(&[1, 2, 3]).with(1, 0);
    let mut follower = copy(9, 3);
    follower.handle_turn(at(0), known.view(), true);
    asked(&mut follower);
    offer(&mut follower, 1, 2, 3);
    offer(&mut follower, 3, 2, 3);
    let other = (LINEAGE, Step(2), Digest::of(b"another"));
    follower.handle_offer(at(1), NodeId(2), other, digests(3));
    let said = actions(&mut follower);
    let is_named =
        |a: &CopyAction| matches!(a, CopyAction::Dropped { node, .. } if *node == NodeId(2));
    assert!(said.iter().any(is_named), "{said:?}");
    follower.handle_turn(at(1), known.view(), true);
    let sources: Vec<u64> = asked(&mut follower).iter().map(|(node, ..)| *node).collect();
    assert!(!sources.contains(&2) && sources.len() == 2, "{sources:?}");
}

#[test]
fn a_source_is_slow_only_from_its_turn_on() {
    let mut known = Known::of(&[1, 2]).with(1, 0).with(2, 0);
    let mut follower = copy(9, 2);
    follower.handle_turn(at(0), known.view(), true);
    assert_eq!(asked(&mut follower).len(), 2);
    // Steps may take as long as they like; the request is repeated meanwhile.
    follower.handle_turn(at(1000), known.view(), true);
    assert_eq!(asked(&mut follower).len(), 2);
    offer(&mut follower, 1, 2, 2);
    piece(&mut follower, 1, 2, 0);
    known = known.with(2, 3);
    follower.handle_turn(at(2000), known.view(), true);
    assert_eq!(actions(&mut follower).len(), 1, "asked once more");
    follower.handle_turn(at(2009), known.view(), true);
    let is_dropped = |a: &CopyAction| matches!(a, CopyAction::Dropped { .. });
    assert!(!actions(&mut follower).iter().any(is_dropped));
    follower.handle_turn(at(2010), known.view(), true);
    let said = actions(&mut follower);
    let is_named =
        |a: &CopyAction| matches!(a, CopyAction::Dropped { node, .. } if *node == NodeId(2));
    assert!(said.iter().any(is_named), "{said:?}");
}

#[test]
fn a_held_world_is_copied_where_it_stands() {
    let known = Known::of(&[1, 2]).with(1, 10).with(2, 9);
    let mut follower = copy(9, 2);
    follower.handle_turn(at(0), known.view(), true);
    asked(&mut follower);
    let known = known.held();
    follower.handle_turn(at(0), known.view(), true);
    assert!(asked(&mut follower).iter().all(|(_, boundary, _)| *boundary == 10));
    follower.handle_turn(at(0), known.view(), true);
    assert_eq!(asked(&mut follower), [], "the same world does not begin it again");
    // Nobody has told where the members stand, until one says that it is ahead.
    let known = Known::of(&[1, 2]).held();
    let mut follower = copy(9, 2);
    follower.handle_turn(at(0), known.view(), true);
    assert!(asked(&mut follower).iter().all(|(_, boundary, _)| *boundary == 0));
    follower.handle_missed(NodeId(2), LINEAGE, Step(0), Step(7));
    follower.handle_turn(at(0), known.view(), true);
    assert!(asked(&mut follower).iter().all(|(_, boundary, _)| *boundary == 7));
}

#[test]
fn a_source_that_is_gone_or_another_lineage_begins_it_again() {
    let known = Known::of(&[1, 2]).with(1, 10).with(2, 10);
    let mut follower = copy(9, 2);
    follower.handle_turn(at(0), known.view(), true);
    asked(&mut follower);
    let alone = Known::of(&[1]).with(1, 10);
    follower.handle_turn(at(0), alone.view(), true);
    assert_eq!(asked(&mut follower), [(1, 12, vec![0, 1])]);
    follower.handle_turn(at(0), alone.view(), false);
    assert_eq!(actions(&mut follower), [CopyAction::Discard], "wanted no longer");
}

#[test]
fn a_state_without_tensors_is_copied_by_its_outline() {
    let known = Known::of(&[1, 2]).with(1, 10);
    let mut follower = copy(9, 0);
    follower.handle_turn(at(0), known.view(), true);
    assert_eq!(asked(&mut follower), [(1, 12, vec![])]);
    offer(&mut follower, 1, 12, 0);
    assert!(matches!(actions(&mut follower)[..], [CopyAction::Complete { .. }]));
}

#[test]
fn what_a_lost_link_swallowed_is_asked_again() {
    let known = Known::of(&[1]).with(1, 10);
    let mut follower = copy(9, 2);
    follower.handle_turn(at(0), known.view(), true);
    asked(&mut follower);
    offer(&mut follower, 1, 12, 2);
    piece(&mut follower, 1, 12, 0);
    follower.handle_link_up(NodeId(1));
    assert_eq!(asked(&mut follower), [(1, 12, vec![1])]);
}

#[test]
fn a_copy_of_a_former_lineage_is_never_complete() {
    let known = Known::of(&[1]).with(1, 10);
    let mut follower = copy(9, 2);
    follower.handle_turn(at(0), known.view(), true);
    asked(&mut follower);
    offer(&mut follower, 1, 12, 2);
    piece(&mut follower, 1, 12, 0);
    let mut late = copy(9, 1);
    late.handle_turn(at(0), known.view(), true);
    asked(&mut late);
    offer(&mut late, 1, 12, 1);
    assert_eq!(piece(&mut late, 1, 12, 0), Verdict::Keep);
    for mut follower in [follower, late] {
        follower.handle_restart();
        piece(&mut follower, 1, 12, 1);
        let is_complete = |a: &CopyAction| matches!(a, CopyAction::Complete { .. });
        assert!(!actions(&mut follower).iter().any(is_complete));
    }
}
