//! Peers that die, cables that are pulled, many who come at once.

use std::net::Ipv6Addr;
use std::sync::Arc;
use std::time::Duration;

use ripstop_transport::{
    CertificateAuthority, Config, ConnectError, ConnectionError, Endpoint, EndpointError, Expect,
    Lane, MemoryNetwork, Role,
};
use types::NodeId;

use crate::networks::{DAY, Network, PATIENCE, frame, loopback, number, patient, worker};

#[test]
fn a_peer_that_dies_without_a_word_is_noticed_within_the_idle_timeout() {
    let config = Config::builder().recovery_target(Duration::from_millis(300)).build().unwrap();
    let authority = CertificateAuthority::create().unwrap();
    let runtime = || tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let (living, dying) = (runtime(), runtime());
    let bind = |node| {
        let identity = Arc::new(authority.identity(&worker(node), DAY).unwrap());
        Endpoint::bind(loopback(), identity, &config).unwrap()
    };
    let far = {
        let _inside = dying.enter();
        bind(2)
    };
    let address = far.local_addr();
    let accepting = dying.spawn(async move { (far.accept().await.unwrap(), far) });
    let (connection, _near) = living.block_on(async {
        let near = bind(1);
        (near.connect(address, &Expect::role(Role::Worker), PATIENCE).await.unwrap(), near)
    });
    let held = dying.block_on(accepting).unwrap();
    // With its runtime goes everything that could still send: the process is dead to its peers.
    dying.shutdown_background();
    let silent = ConnectionError::Silent { after: config.idle_timeout() };
    let error = living.block_on(async {
        tokio::time::timeout(PATIENCE, connection.recv()).await.unwrap().unwrap_err()
    });
    assert_eq!(error, silent);
    assert_eq!(living.block_on(connection.send(Lane::Control, frame(1, 0))), Err(silent));
    drop(held);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_address_is_silent_and_comes_back_or_is_lost() {
    let idle = Duration::from_millis(250);
    let network =
        MemoryNetwork::with_config(&Config::builder().recovery_target(idle / 5).build().unwrap());
    let (near, far) =
        (network.endpoint(worker(1), loopback()), network.endpoint(worker(2), loopback()));
    let address = far.local_addr();
    let expect = Expect::node(Role::Worker, NodeId(2));
    let connection = near.connect(address, &expect, PATIENCE).await.unwrap();
    let accepted = far.accept().await.unwrap();

    // Shorter than the idle timeout: as if nothing had been. (Healed at once, so a slow machine can't be late.)
    network.cut(address);
    connection.send(Lane::Control, frame(1, 0)).await.unwrap();
    network.heal(address);
    assert_eq!(number(&accepted.recv().await.unwrap().1), 1);

    network.cut(address);
    connection.send(Lane::Control, frame(2, 0)).await.unwrap();
    assert_eq!(accepted.recv().await, Err(ConnectionError::Silent { after: idle }));
    assert_eq!(connection.recv().await, Err(ConnectionError::Silent { after: idle }));
    let deadline = Duration::from_millis(20);
    assert_eq!(
        near.connect(address, &expect, deadline).await.unwrap_err(),
        ConnectError::Timeout { address, deadline }
    );

    // A dial that is under way when the cable is back goes through.
    let (dialled, ()) =
        tokio::join!(near.connect(address, &expect, PATIENCE), async { network.heal(address) });
    drop(dialled.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn many_who_come_at_once_all_get_in() {
    let network = Network::quic();
    let server = network.endpoint(&worker(0));
    let clients: Vec<_> = (1..=40).map(|node| network.endpoint(&worker(node))).collect();
    let expect = Expect::role(Role::Worker);
    let dials = clients.iter().map(|client| client.connect(server.local_addr(), &expect, PATIENCE));
    let connections = futures::future::join_all(dials).await;
    assert!(connections.iter().all(Result::is_ok), "{connections:?}");
    let mut met = Vec::new();
    while met.len() < clients.len() {
        met.push(server.accept().await.unwrap().peer().unwrap().node.0);
    }
    met.sort_unstable();
    assert_eq!(met, (1..=40).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_outlive_their_endpoint_which_takes_no_more() {
    let network = Network::quic();
    let (near, far, [near_end, far_end]) = network.connection().await;
    let address = far_end.local_addr();
    drop(far_end);
    near.send(Lane::Control, frame(1, 0)).await.unwrap();
    assert_eq!(number(&far.recv().await.unwrap().1), 1);
    assert!(
        near_end
            .connect(address, &Expect::role(Role::Worker), Duration::from_millis(50))
            .await
            .is_err()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn ipv6_and_ipv4_meet_on_one_socket_where_the_system_has_both() {
    let authority = CertificateAuthority::create().unwrap();
    let bind = |address, node| {
        let identity = Arc::new(authority.identity(&worker(node), DAY).unwrap());
        Endpoint::bind(address, identity, &patient())
    };
    let Ok(server) = bind((Ipv6Addr::UNSPECIFIED, 0).into(), 1) else { return };
    let port = server.local_addr().port();
    let expect = Expect::node(Role::Worker, NodeId(1));
    if let Ok(client) = bind((Ipv6Addr::LOCALHOST, 0).into(), 2) {
        let connection =
            client.connect((Ipv6Addr::LOCALHOST, port).into(), &expect, PATIENCE).await.unwrap();
        let accepted = server.accept().await.unwrap();
        assert_eq!(
            (connection.remote_address().ip(), accepted.remote_address().ip()),
            (Ipv6Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into())
        );
    }
    let client = bind(loopback(), 3).unwrap();
    let _connection =
        client.connect((loopback().ip(), port).into(), &expect, PATIENCE).await.unwrap();
    assert_eq!(server.accept().await.unwrap().remote_address(), client.local_addr());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_taken_address_is_named() {
    let network = Network::quic();
    let first = network.endpoint(&worker(1));
    let identity =
        Arc::new(CertificateAuthority::create().unwrap().identity(&worker(2), DAY).unwrap());
    let error = Endpoint::bind(first.local_addr(), identity, &patient()).unwrap_err();
    assert!(
        matches!(error, EndpointError::Bind { address, .. } if address == first.local_addr()),
        "{error}"
    );
}

#[test]
fn an_endpoint_outside_a_runtime_is_an_error_and_no_panic() {
    let identity =
        Arc::new(CertificateAuthority::create().unwrap().identity(&worker(2), DAY).unwrap());
    assert!(matches!(
        Endpoint::bind(loopback(), identity, &patient()),
        Err(EndpointError::NoRuntime)
    ));
}
