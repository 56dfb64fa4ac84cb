use std::collections::BTreeMap;
use std::time::Duration;

use types::{Address, Digest, JobId, Lineage, VirtualRanks};

use super::*;
use crate::message::{Cause, Fingerprint, JobSpec, Phase};

const START: Timestamp = Timestamp(1_000_000_000);

fn at(ms: u64) -> Timestamp {
    START + Duration::from_millis(ms)
}

fn address(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

fn join() -> Join {
    Join {
        spec: JobSpec {
            job: JobId::new("demo").unwrap(),
            virtual_ranks: VirtualRanks::new(8).unwrap(),
            min_members: 1,
            min_timeout: None,
            expected_members: 2,
            max_members: 4,
            total_steps: None,
            checkpoint_every: None,
            hang_timeout: None,
            pause_timeout: None,
            evens_out: true,
        },
        address: Address { socket: address(9), certificate: Digest::default() },
        host: "host".to_owned(),
        fingerprint: Fingerprint(BTreeMap::new()),
        allow_mixed: false,
        found: None,
    }
}

fn heartbeat() -> Heartbeat {
    Heartbeat { phase: Phase::Joining, ..Heartbeat::default() }
}

fn participant(join: Option<Join>) -> Participant {
    let timing = Timing::new(Duration::from_secs(1)).unwrap();
    Participant::new(timing, vec![address(1), address(2), address(3)], join, START).unwrap()
}

fn drain(participant: &mut Participant) -> Vec<ParticipantAction> {
    std::iter::from_fn(|| participant.poll_action()).collect()
}

/// The connection asked for last, and where to.
fn dialed(actions: &[ParticipantAction]) -> (ConnectionKey, u16) {
    let connect = |action: &ParticipantAction| match action {
        ParticipantAction::Connect { key, address } => Some((*key, address.port())),
        _ => None,
    };
    actions.iter().rev().find_map(connect).expect("a connection was asked for")
}

fn sent(actions: &[ParticipantAction]) -> Vec<ToCoordinator> {
    let message = |action: &ParticipantAction| match action {
        ParticipantAction::Send { message, .. } => Some(message.clone()),
        _ => None,
    };
    actions.iter().filter_map(message).collect()
}

fn events(actions: &[ParticipantAction]) -> Vec<ParticipantEvent> {
    let event = |action: &ParticipantAction| match action {
        ParticipantAction::Event(event) => Some(event.clone()),
        _ => None,
    };
    actions.iter().filter_map(event).collect()
}

fn run_to(participant: &mut Participant, until: Timestamp) {
    while let Some(due) = participant.poll_timeout().filter(|due| *due <= until) {
        participant.handle_timeout(due);
    }
    participant.handle_timeout(until);
}

fn led(participant: &mut Participant, now: Timestamp) -> ConnectionKey {
    let (key, _) = dialed(&drain(participant));
    participant.handle_connected(now, key);
    participant.handle_message(now, key, FromCoordinator::Leading { term: Term(1) });
    key
}

#[test]
fn it_follows_the_leader_and_says_join_there() {
    let mut worker = participant(Some(join()));
    let (first, port) = dialed(&drain(&mut worker));
    assert_eq!(port, 1);
    worker.handle_connected(at(1), first);
    assert!(matches!(sent(&drain(&mut worker))[..], [ToCoordinator::Join(_)]));
    worker.handle_message(at(2), first, FromCoordinator::NotLeader { leader: Some(address(3)) });
    let (second, port) = dialed(&drain(&mut worker));
    assert_eq!(port, 3);
    worker.handle_connected(at(3), second);
    assert!(matches!(sent(&drain(&mut worker))[..], [ToCoordinator::Join(_)]));
    // What the first still says is late, and dropped.
    worker.handle_message(at(4), first, FromCoordinator::Joined { node: NodeId(9) });
    worker.handle_message(at(4), second, FromCoordinator::Joined { node: NodeId(7) });
    worker.handle_message(at(5), second, FromCoordinator::Joined { node: NodeId(7) });
    assert_eq!(events(&drain(&mut worker)), [ParticipantEvent::Joined { node: NodeId(7) }]);
}

#[test]
fn it_asks_around_and_pauses_after_each_round() {
    let mut worker = participant(Some(join()));
    let mut ports = Vec::new();
    for round in 0..7u64 {
        let actions = drain(&mut worker);
        if !actions.iter().any(|a| matches!(a, ParticipantAction::Connect { .. })) {
            let due = worker.poll_timeout().unwrap();
            assert!(due > at(round), "a pause");
            worker.handle_timeout(due);
            ports.push(0);
            continue;
        }
        let (key, port) = dialed(&actions);
        ports.push(port);
        worker.handle_disconnected(at(round), key);
    }
    assert_eq!(ports, [1, 2, 3, 0, 1, 2, 3]);
}

#[test]
fn two_that_point_at_each_other_do_not_spin_it() {
    let mut worker = participant(Some(join()));
    let mut dials = 0;
    for _ in 0..100 {
        let actions = drain(&mut worker);
        if !actions.iter().any(|a| matches!(a, ParticipantAction::Connect { .. })) {
            break;
        }
        let (key, port) = dialed(&actions);
        dials += 1;
        worker.handle_connected(at(1), key);
        let other = if port == 1 { 2 } else { 1 };
        worker.handle_message(
            at(1),
            key,
            FromCoordinator::NotLeader { leader: Some(address(other)) },
        );
    }
    assert!(dials <= 12, "{dials} dials without a pause");
}

#[test]
fn requests_are_said_again_until_answered() {
    let mut agent = participant(None);
    let key = led(&mut agent, at(0));
    drain(&mut agent);
    let lost =
        ToCoordinator::Lost { node: NodeId(5), cause: Cause::Signalled { signal: 9 }, sequence: 0 };
    let sequence = agent.request(at(10), lost.clone()).unwrap();
    let said = lost.with_sequence(sequence);
    assert_eq!(sent(&drain(&mut agent)), std::slice::from_ref(&said));
    // The connection breaks before the answer: the next leader hears it.
    agent.handle_disconnected(at(20), key);
    let key = {
        let (key, _) = dialed(&drain(&mut agent));
        agent.handle_connected(at(30), key);
        key
    };
    assert_eq!(sent(&drain(&mut agent)), std::slice::from_ref(&said));
    agent.handle_message(at(40), key, FromCoordinator::Leading { term: Term(2) });
    drain(&mut agent);
    // A new term on the same connection, too.
    agent.handle_message(at(50), key, FromCoordinator::Leading { term: Term(3) });
    assert_eq!(sent(&drain(&mut agent)), [said]);
    agent.handle_message(at(60), key, FromCoordinator::Noted { sequence });
    agent.handle_message(at(61), key, FromCoordinator::Noted { sequence });
    assert_eq!(events(&drain(&mut agent)), [ParticipantEvent::Noted { sequence }]);
    assert_eq!(agent.outstanding(), 0);
    run_to(&mut agent, at(5_000));
    assert!(drain(&mut agent).is_empty(), "an agent with nothing to say keeps its connection");
}

#[test]
fn a_receipt_is_dropped_when_its_attempt_ends() {
    let mut worker = participant(Some(join()));
    let key = led(&mut worker, at(0));
    let receipt = ToCoordinator::Receipt {
        attempt: Attempt(4),
        lineage: Lineage(1),
        digest: Digest::default(),
        root: Digest::default(),
        segments: Bytes::new(),
    };
    worker.request(at(1), receipt).unwrap();
    assert_eq!(worker.outstanding(), 1);
    let abandoned = FromCoordinator::Abandoned { attempt: Attempt(4), reason: "lost".to_owned() };
    worker.handle_message(at(2), key, abandoned.clone());
    worker.handle_message(at(3), key, abandoned);
    assert_eq!(worker.outstanding(), 0);
    let abandoned = |e: &ParticipantEvent| matches!(e, ParticipantEvent::Abandoned { .. });
    assert_eq!(events(&drain(&mut worker)).iter().filter(|e| abandoned(e)).count(), 1);
}

#[test]
fn a_leader_that_falls_silent_is_left_and_unreachable_is_said_once() {
    let mut worker = participant(Some(join()));
    worker.set_heartbeat(at(0), heartbeat());
    let key = led(&mut worker, at(0));
    worker.handle_message(at(1), key, FromCoordinator::Joined { node: NodeId(1) });
    drain(&mut worker);
    run_to(&mut worker, at(950));
    let beats = sent(&drain(&mut worker));
    assert_eq!(beats.iter().filter(|m| matches!(m, ToCoordinator::Heartbeat(_))).count(), 9);
    run_to(&mut worker, at(1_010));
    let actions = drain(&mut worker);
    assert!(actions.contains(&ParticipantAction::Disconnect { key }));
    dialed(&actions);
    run_to(&mut worker, at(6_000));
    let unreachable = ParticipantEvent::Unreachable { since: at(1_001) };
    let actions = drain(&mut worker);
    assert_eq!(events(&actions), [unreachable]);
    let (key, _) = dialed(&actions);
    if worker.link.key() != Some(key) {
        let due = worker.poll_timeout().unwrap();
        worker.handle_timeout(due);
    }
    let key = worker.link.key().unwrap();
    worker.handle_connected(at(6_100), key);
    assert!(sent(&drain(&mut worker)).iter().any(|m| matches!(m, ToCoordinator::Join(_))));
    worker.handle_message(at(6_101), key, FromCoordinator::Leading { term: Term(2) });
    assert_eq!(events(&drain(&mut worker)), [ParticipantEvent::Reachable]);
}
