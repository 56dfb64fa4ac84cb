//! One suite for both kinds of network.

use std::future::Future;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use ripstop_transport::{
    ConnectError, Connection, ConnectionError, Expect, Frame, Lane, MAX_BODY_BYTES, Role,
};
use types::{Digest, JobId, NodeId, Remedy};

use crate::networks::{Network, PATIENCE, coordinator, frame, number, worker};

macro_rules! on_both_networks {
    ($($(#[$meta:meta])* async fn $name:ident($network:ident) $body:block)*) => {
        mod over_quic { $(
            #[tokio::test(flavor = "multi_thread")]
            async fn $name() { super::$name(&super::Network::quic()).await }
        )* }
        mod in_memory { $(
            #[tokio::test(flavor = "multi_thread")]
            async fn $name() { super::$name(&super::Network::memory()).await }
        )* }
        $($(#[$meta])* async fn $name($network: &Network) $body)*
    };
}

const MIB: usize = 1 << 20;

async fn send_all(connection: &Connection, lane: Lane, frames: &[Frame]) {
    for frame in frames {
        connection.send(lane, frame.clone()).await.unwrap();
    }
}

async fn receive(connection: &Connection, count: usize) -> [Vec<Frame>; 2] {
    let mut frames = [Vec::new(), Vec::new()];
    for _ in 0..count {
        let (lane, frame) = connection.recv().await.unwrap();
        frames[lane as usize].push(frame);
    }
    frames
}

/// Polls once.
async fn poll_once<T>(future: impl Future<Output = T>) -> Poll<T> {
    let mut future = pin!(future);
    std::future::poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await
}

on_both_networks! {
    async fn frames_arrive_whole_and_in_order_on_both_lanes_and_both_ways(network) {
        let (near, far, _endpoints) = network.connection().await;
        let control: Vec<_> = (0..200).map(|i| frame(i, i as usize % 50)).collect();
        let bulk: Vec<_> = [MIB, 0, 20 * MIB, 1, 3 * MIB, 70_000].into_iter().zip(1000..).map(|(size, i)| frame(i, size)).collect();
        let count = control.len() + bulk.len();
        let ((), (), (), (), at_far, at_near) = tokio::join!(
            send_all(&near, Lane::Control, &control), send_all(&near, Lane::Bulk, &bulk),
            send_all(&far, Lane::Control, &control), send_all(&far, Lane::Bulk, &bulk),
            receive(&far, count), receive(&near, count),
        );
        assert!(at_far == [control.clone(), bulk.clone()]);
        assert!(at_near == [control, bulk]);
    }

    async fn a_dropped_recv_loses_nothing(network) {
        let (near, far, _endpoints) = network.connection().await;
        let frames: Vec<_> = (0..60).map(|i| frame(i, 100_000)).collect();
        let receive = async {
            let mut got = Vec::new();
            while got.len() < frames.len() {
                match poll_once(far.recv()).await {
                    Poll::Ready(received) => got.push(received.unwrap().1),
                    Poll::Pending => tokio::task::yield_now().await,
                }
            }
            got
        };
        let ((), got) = tokio::join!(send_all(&near, Lane::Bulk, &frames), receive);
        assert!(got == frames);
    }

    async fn a_dropped_send_leaves_no_half_frame(network) {
        let (near, far, _endpoints) = network.connection().await;
        let mut sent = Vec::new();
        // Nobody reads: in the end the lane is full and sends are dropped while they wait.
        let mut dropped = 0;
        for i in 0.. {
            match poll_once(near.send(Lane::Bulk, frame(i, MIB))).await {
                Poll::Ready(result) => { result.unwrap(); sent.push(i); }
                Poll::Pending => dropped += 1,
            }
            if dropped == 10 { break }
            tokio::task::yield_now().await;
        }
        sent.push(u32::MAX);
        let receive = async {
            let mut got = Vec::new();
            while got.last() != Some(&u32::MAX) {
                let (_, received) = far.recv().await.unwrap();
                assert!(received == frame(number(&received), received.body.len()));
                got.push(number(&received));
            }
            got
        };
        let (last, got) = tokio::join!(near.send(Lane::Bulk, frame(u32::MAX, 0)), receive);
        last.unwrap();
        assert_eq!(got, sent);
    }

    async fn a_full_bulk_lane_does_not_hold_up_control(network) {
        let (near, far, _endpoints) = network.connection().await;
        // Far more than any queue and window holds.
        let bulk = vec![frame(0, MIB); 200];
        let mut waiting = pin!(send_all(&near, Lane::Bulk, &bulk));
        let control = async {
            for i in 0..100 {
                near.send(Lane::Control, frame(i, 10)).await.unwrap();
            }
            let mut next = 0;
            while next < 100 {
                let (lane, received) = far.recv().await.unwrap();
                if lane == Lane::Control {
                    assert_eq!(number(&received), next);
                    next += 1;
                }
            }
        };
        assert!(poll_once(&mut waiting).await.is_pending());
        tokio::select! {
            biased;
            () = control => {}
            () = waiting => panic!("200 MiB passed before 100 small frames"),
        }
    }

    async fn finish_delivers_everything_before_a_close(network) {
        let (near, far, _endpoints) = network.connection().await;
        send_all(&near, Lane::Bulk, &(0..5).map(|i| frame(i, MIB)).collect::<Vec<_>>()).await;
        send_all(&near, Lane::Control, &(0..5).map(|i| frame(i, 10)).collect::<Vec<_>>()).await;
        near.finish(PATIENCE).await.unwrap();
        assert_eq!(near.send(Lane::Control, frame(9, 0)).await, Err(ConnectionError::ClosedHere));
        near.close(3, "done");
        assert_eq!(far.closed().await, ConnectionError::ClosedByPeer { code: 3, reason: "done".to_owned() });
        let [control, bulk] = receive(&far, 10).await;
        assert_eq!((control.len(), bulk.len()), (5, 5));
        assert!(bulk[4] == frame(4, MIB));
        assert!(far.recv().await.is_err());
    }

    async fn one_who_has_finished_still_receives(network) {
        let (near, far, _endpoints) = network.connection().await;
        near.send(Lane::Control, frame(1, 0)).await.unwrap();
        near.finish(PATIENCE).await.unwrap();
        assert_eq!(number(&far.recv().await.unwrap().1), 1);
        assert_eq!(far.recv().await, Err(ConnectionError::Finished));
        far.send(Lane::Control, frame(2, 0)).await.unwrap();
        assert_eq!(number(&near.recv().await.unwrap().1), 2);
    }

    async fn a_close_is_told_with_its_code_and_reason(network) {
        let (near, far, _endpoints) = network.connection().await;
        near.close(42, "generation 7 ended");
        near.close(43, "too late");
        let told = ConnectionError::ClosedByPeer { code: 42, reason: "generation 7 ended".to_owned() };
        assert_eq!(far.recv().await, Err(told.clone()));
        assert_eq!(far.closed().await, told);
        assert_eq!(far.send(Lane::Bulk, frame(1, 1)).await, Err(told.clone()));
        assert_eq!(near.recv().await, Err(ConnectionError::ClosedHere));
        assert_eq!(near.closed().await, ConnectionError::ClosedHere);
        assert_eq!(told.remedy(), Remedy::Regroup);
    }

    async fn a_close_is_told_under_full_load(network) {
        for _ in 0..5 {
            let (near, far, _endpoints) = network.connection().await;
            let chunk = frame(0, MIB);
            let sender = near.clone();
            let sending = tokio::spawn(async move {
                loop {
                    if let Err(error) = sender.send(Lane::Bulk, chunk.clone()).await { break error }
                }
            });
            for _ in 0..20 {
                far.recv().await.unwrap();
            }
            near.close(42, "generation 7 ended");
            let told = ConnectionError::ClosedByPeer { code: 42, reason: "generation 7 ended".to_owned() };
            assert_eq!(far.closed().await, told);
            assert_eq!(sending.await.unwrap(), ConnectionError::ClosedHere);
        }
    }

    async fn dropping_the_last_clone_closes(network) {
        let (near, far, _endpoints) = network.connection().await;
        let clone = near.clone();
        assert_eq!(clone.id(), near.id());
        assert_ne!(far.id(), near.id());
        drop(near);
        clone.send(Lane::Control, frame(1, 0)).await.unwrap();
        far.recv().await.unwrap();
        drop(clone);
        assert!(matches!(far.closed().await, ConnectionError::ClosedByPeer { code: 0, .. }));
    }

    async fn a_frame_over_the_limit_is_refused_and_the_connection_goes_on(network) {
        let (near, far, _endpoints) = network.connection().await;
        let large = Frame { head: Bytes::new(), body: Bytes::from(vec![0; MAX_BODY_BYTES + 1]) };
        let error = near.send(Lane::Bulk, large).await.unwrap_err();
        assert!(matches!(error, ConnectionError::TooLarge { .. }), "{error}");
        near.send(Lane::Bulk, frame(1, 1)).await.unwrap();
        assert_eq!(number(&far.recv().await.unwrap().1), 1);
    }

    async fn each_side_knows_who_the_other_is(network) {
        let (near, far, [near_end, far_end]) = network.connection().await;
        assert_eq!((near.peer(), far.peer()), (Some(&worker(2)), Some(&worker(1))));
        assert_eq!((Some(near.certificate()), Some(far.certificate())), (far_end.certificate(), near_end.certificate()));
        assert_eq!((near.remote_address(), far.remote_address()), (far_end.local_addr(), near_end.local_addr()));
        assert_eq!(near_end.subject(), Some(&worker(1)));
    }

    async fn anyone_but_the_expected_peer_is_refused_by_name(network) {
        let (near, far) = (network.endpoint(&worker(1)), network.endpoint(&worker(2)));
        let certificate = far.certificate();
        for (expect, named) in [
            (Expect::node(Role::Worker, NodeId(3)), "worker 3"),
            (Expect::role(Role::Coordinator), "coordinator"),
            (Expect { certificate: Some(Digest::default()), ..Expect::role(Role::Worker) }, "certificate 000000000000"),
        ] {
            let error = near.connect(far.local_addr(), &expect, PATIENCE).await.unwrap_err();
            let text = error.to_string();
            assert!(matches!(error, ConnectError::WrongPeer { .. }), "{text}");
            assert!(text.contains(named) && text.contains("ripstop://demo/worker/2"), "{text}");
        }
        let expect = Expect { certificate, ..Expect::node(Role::Worker, NodeId(2)) };
        drop(near.connect(far.local_addr(), &expect, PATIENCE).await.unwrap());
    }

    async fn members_of_different_jobs_do_not_connect_but_coordinators_serve_all(network) {
        let mut stranger = worker(1);
        stranger.job = Some(JobId::new("other").unwrap());
        let (near, far) = (network.endpoint(&stranger), network.endpoint(&worker(2)));
        assert!(near.connect(far.local_addr(), &Expect::role(Role::Worker), PATIENCE).await.is_err());
        let shared = network.endpoint(&coordinator());
        for end in [near, far] {
            let _connection = end.connect(shared.local_addr(), &Expect::role(Role::Coordinator), PATIENCE).await.unwrap();
            assert_eq!(shared.accept().await.unwrap().peer(), end.subject());
        }
    }

    async fn one_without_a_certificate_can_enrol_and_nothing_else(network) {
        let (host, server) = (network.enrolling_endpoint(), network.endpoint(&coordinator()));
        let refused = host.connect(server.local_addr(), &Expect::role(Role::Coordinator), PATIENCE).await.unwrap_err();
        assert!(matches!(refused, ConnectError::Unsuited { .. }), "{refused}");
        let connection = host.connect_enrol(server.local_addr(), PATIENCE).await.unwrap();
        let accepted = server.accept().await.unwrap();
        assert_eq!((connection.peer(), accepted.peer()), (Some(&coordinator()), None));
        assert_eq!(accepted.certificate(), Digest::default());
        connection.send(Lane::Control, frame(1, 0)).await.unwrap();
        assert_eq!(number(&accepted.recv().await.unwrap().1), 1);
        let member = network.endpoint(&worker(1));
        assert!(host.connect_enrol(member.local_addr(), PATIENCE).await.is_err());
        assert!(member.connect_enrol(server.local_addr(), PATIENCE).await.is_err());
    }

    async fn a_closed_endpoint_ends_its_connections_and_accepts_none(network) {
        let (near, far, [near_end, far_end]) = network.connection().await;
        far_end.close(9, "shutting down");
        assert_eq!(near.closed().await, ConnectionError::ClosedByPeer { code: 9, reason: "shutting down".to_owned() });
        assert!(far.closed().await == ConnectionError::ClosedHere);
        assert!(far_end.accept().await.is_none());
        far_end.wait_idle(PATIENCE).await;
        let error = far_end.connect(near_end.local_addr(), &Expect::role(Role::Worker), PATIENCE).await.unwrap_err();
        assert_eq!(error, ConnectError::Closed);
    }

    async fn nobody_at_the_address_is_a_timeout(network) {
        let (near, far) = (network.endpoint(&worker(1)), network.endpoint(&worker(2)));
        let address = far.local_addr();
        far.close(0, "");
        far.wait_idle(PATIENCE).await;
        drop(far);
        let deadline = Duration::from_millis(50);
        let error = near.connect(address, &Expect::role(Role::Worker), deadline).await.unwrap_err();
        assert_eq!((error.clone(), error.remedy()), (ConnectError::Timeout { address, deadline }, Remedy::Retry));
    }
}
