use std::io;
use std::net::{Ipv4Addr, UdpSocket};

use bytes::{Bytes, BytesMut};
use quinn::AsyncUdpSocket as _;
use quinn::udp::Transmit;
use types::NodeId;

use super::*;
use crate::{CertificateAuthority, CsrKey, Endpoint, MAX_BODY_BYTES};

const DAY: Duration = Duration::from_secs(86_400);
/// Far beyond what a loaded machine needs; no test waits for it.
const PATIENCE: Duration = Duration::from_secs(60);

fn loopback() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

fn subject(role: Role, node: u64) -> Subject {
    Subject { role, job: None, node: NodeId(node) }
}

fn endpoint(authority: &CertificateAuthority, role: Role, config: &Config) -> Endpoint {
    let identity = authority.identity(&subject(role, 1), DAY).unwrap();
    Endpoint::bind(loopback(), Arc::new(identity), config).unwrap()
}

fn patient() -> Config {
    Config::builder().recovery_target(Duration::from_secs(12)).build().unwrap()
}

/// A client that says to TLS what it likes.
fn raw_client(tls: rustls::ClientConfig) -> QuicEndpoint {
    QuicEndpoint::open(loopback(), tls, None, &patient(), Arc::default()).unwrap()
}

/// A raw client with a good certificate, and the connection after the handshake of TLS.
async fn raw_connection(
    authority: &CertificateAuthority,
    server: &Endpoint,
) -> (QuicEndpoint, quinn::Connection) {
    let identity = authority.identity(&subject(Role::Worker, 7), DAY).unwrap();
    let client = raw_client(tls::client(&identity).unwrap());
    let connecting = client
        .quic
        .connect_with(client.client.clone(), server.local_addr(), tls::SERVER_NAME)
        .unwrap();
    let connection = connecting.await.unwrap();
    (client, connection)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claimed_body_over_the_limit_ends_the_connection_before_it_is_allocated() {
    let authority = CertificateAuthority::create().unwrap();
    let server = endpoint(&authority, Role::Worker, &patient());
    let (_client, raw) = raw_connection(&authority, &server).await;
    let Established { mut outgoing, incoming: _incoming, .. } =
        establish(&raw, &Arena::private()).await.unwrap();
    let accepted = server.accept().await.unwrap();
    outgoing[1].write_all(&[0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]).await.unwrap();
    let error = accepted.recv().await.unwrap_err();
    let reason = format!("frame body of 4294967295 bytes, allowed are {MAX_BODY_BYTES}");
    assert_eq!(error, ConnectionError::Protocol { reason: reason.clone() });
    assert_eq!(accepted.closed().await, error);
    let quinn::ConnectionError::ApplicationClosed(close) = raw.closed().await else {
        panic!("not told why")
    };
    assert_eq!((close.error_code, printable(&close.reason)), (Refusal::Protocol.code(), reason));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lane_that_ends_inside_a_frame_breaks_the_protocol() {
    let authority = CertificateAuthority::create().unwrap();
    let server = endpoint(&authority, Role::Worker, &patient());
    let (_client, raw) = raw_connection(&authority, &server).await;
    let Established { mut outgoing, incoming: _incoming, .. } =
        establish(&raw, &Arena::private()).await.unwrap();
    let accepted = server.accept().await.unwrap();
    outgoing[0].write_all(&[5, 0, 0, 0, 0, 0, 0, 0, 1]).await.unwrap();
    outgoing[0].finish().unwrap();
    assert!(matches!(accepted.recv().await, Err(ConnectionError::Protocol { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_lanes_are_refused_and_the_endpoint_goes_on() {
    let authority = CertificateAuthority::create().unwrap();
    let server = endpoint(&authority, Role::Worker, &patient());
    let (_client, raw) = raw_connection(&authority, &server).await;
    let mut stream = raw.open_uni().await.unwrap();
    stream.write_all(&[9]).await.unwrap();
    let quinn::ConnectionError::ApplicationClosed(close) = raw.closed().await else {
        panic!("not told why")
    };
    assert_eq!(close.error_code, Refusal::Protocol.code());
    let (_client, raw) = raw_connection(&authority, &server).await;
    establish(&raw, &Arena::private()).await.unwrap();
    assert!(server.accept().await.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_with_a_foreign_certificate_is_refused_and_told() {
    let (here, there) =
        (CertificateAuthority::create().unwrap(), CertificateAuthority::create().unwrap());
    let server = endpoint(&here, Role::Coordinator, &patient());
    let (request, key) = CsrKey::generate().unwrap();
    let certificate = there.issue(&subject(Role::Worker, 7), &request, DAY).unwrap();
    let intruder = key.forge(certificate, here.certificate().clone());
    let client = Endpoint::bind(loopback(), Arc::new(intruder), &patient()).unwrap();
    let address = server.local_addr();
    let refused = client.connect(address, &Expect::role(Role::Coordinator), PATIENCE).await;
    assert_eq!(refused.unwrap_err(), ConnectError::ForeignHere { address });
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_certificate_is_refused_and_named() {
    let authority = CertificateAuthority::create().unwrap();
    let server = endpoint(&authority, Role::Coordinator, &patient());
    let (request, key) = CsrKey::generate().unwrap();
    let certificate = authority.issue(&subject(Role::Worker, 7), &request, Duration::ZERO).unwrap();
    // A certificate is good until the end of its last second.
    while tls::check_issued(&certificate, authority.certificate()).is_ok() {
        tokio::task::yield_now().await;
    }
    let expired = Arc::new(key.forge(certificate, authority.certificate().clone()));
    let late = Endpoint::bind(loopback(), Arc::clone(&expired), &patient()).unwrap();
    let refused = late
        .connect(server.local_addr(), &Expect::role(Role::Coordinator), PATIENCE)
        .await
        .unwrap_err();
    assert_eq!(refused, ConnectError::Expired { address: server.local_addr(), owner: "our" });
    let refused =
        server.connect(late.local_addr(), &Expect::role(Role::Worker), PATIENCE).await.unwrap_err();
    assert_eq!(refused, ConnectError::Expired { address: late.local_addr(), owner: "the peer's" });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_without_a_certificate_gets_nothing_but_enrolment() {
    let authority = CertificateAuthority::create().unwrap();
    let config = Config::builder()
        .recovery_target(Duration::from_secs(12))
        .accept_enrolment()
        .build()
        .unwrap();
    let server = endpoint(&authority, Role::Coordinator, &config);
    let mut tls = tls::enrolling_client(authority.fingerprint()).unwrap();
    tls.alpn_protocols = vec![tls::alpn()];
    let refused =
        raw_client(tls).dial(server.local_addr(), &Expect::role(Role::Coordinator), PATIENCE).await;
    let ConnectError::Refused { reason, .. } = refused.unwrap_err() else {
        panic!("not refused by name")
    };
    assert!(reason.contains("a certificate is needed"), "{reason}");
    // Where no enrolments are taken, TLS itself refuses.
    let server = endpoint(&authority, Role::Coordinator, &patient());
    let mut tls = tls::enrolling_client(authority.fingerprint()).unwrap();
    tls.alpn_protocols = vec![tls::alpn()];
    assert!(
        raw_client(tls)
            .dial(server.local_addr(), &Expect::role(Role::Coordinator), PATIENCE)
            .await
            .is_err()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn another_version_is_refused_by_that_name() {
    let authority = CertificateAuthority::create().unwrap();
    let server = endpoint(&authority, Role::Coordinator, &patient());
    let mut tls =
        tls::client(&authority.identity(&subject(Role::Worker, 7), DAY).unwrap()).unwrap();
    tls.alpn_protocols = vec![b"ripstop/999".to_vec()];
    let address = server.local_addr();
    let refused = raw_client(tls)
        .dial(address, &Expect::role(Role::Coordinator), PATIENCE)
        .await
        .unwrap_err();
    assert!(matches!(refused, ConnectError::Version { .. }), "{refused}");
    assert_eq!(refused.remedy(), types::Remedy::Stop);
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_does_not_end_an_endpoint() {
    let authority = CertificateAuthority::create().unwrap();
    let server = endpoint(&authority, Role::Coordinator, &patient());
    let noise = UdpSocket::bind(loopback()).unwrap();
    for length in [0, 1, 20, 1200, 1500, 9000] {
        for first in [0x00, 0x40, 0xc0, 0xff] {
            let mut bytes = BytesMut::zeroed(length);
            bytes.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 31) as u8 ^ first);
            noise.send_to(&bytes, server.local_addr()).unwrap();
        }
    }
    drop(noise);
    let client = endpoint(&authority, Role::Worker, &patient());
    drop(
        client
            .connect(server.local_addr(), &Expect::role(Role::Coordinator), PATIENCE)
            .await
            .unwrap(),
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_larger_than_a_udp_packet_is_split_and_errors_are_swallowed() {
    let receiver = UdpSocket::bind(loopback()).unwrap();
    receiver.set_read_timeout(Some(PATIENCE)).unwrap();
    let socket = Arc::new(
        Socket::new(open_socket(loopback()).unwrap(), &Config::default(), Arc::default()).unwrap(),
    );
    let contents: Vec<u8> = (0..10 * 8972 - 100_usize).map(|i| i as u8).collect();
    let batch = Transmit {
        destination: receiver.local_addr().unwrap(),
        ecn: None,
        contents: &contents,
        segment_size: Some(8972),
        src_ip: None,
    };
    let send = async |transmit: &Transmit<'_>| {
        let mut poller = Arc::clone(&socket).create_io_poller();
        while let Err(error) = socket.try_send(transmit) {
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
            std::future::poll_fn(|cx| poller.as_mut().poll_writable(cx)).await.unwrap();
        }
    };
    send(&batch).await;
    let mut got = Vec::new();
    let mut buffer = vec![0; 65_536];
    while got.len() < contents.len() {
        let length = receiver.recv(&mut buffer).unwrap();
        assert!(length <= 8972);
        got.extend_from_slice(&buffer[..length]);
    }
    assert!(got == contents);
    // One packet of 70,000 bytes can't be sent by any socket.
    send(&Transmit { contents: &vec![0; 70_000], segment_size: None, ..batch }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn packets_grow_to_the_largest_that_the_path_carries() {
    let authority = CertificateAuthority::create().unwrap();
    let server = endpoint(&authority, Role::Worker, &patient());
    let (_client, raw) = raw_connection(&authority, &server).await;
    let Established { mut outgoing, incoming: _incoming, .. } =
        establish(&raw, &Arena::private()).await.unwrap();
    let accepted = server.accept().await.unwrap();
    let frame = Frame { head: Bytes::new(), body: Bytes::from(vec![1; 1 << 20]) };
    while raw.stats().path.current_mtu < 8900 {
        let prefix = frame.prefix().unwrap();
        outgoing[1].write_all_chunks(&mut [prefix, frame.body.clone()]).await.unwrap();
        assert_eq!(accepted.recv().await.unwrap(), (Lane::Bulk, frame.clone()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_in_shared_memory_is_read_where_it_lies_only_if_both_sides_share() {
    let authority = CertificateAuthority::create().unwrap();
    let sharing =
        Config::builder().recovery_target(Duration::from_secs(12)).share_memory().build().unwrap();
    for (far_config, is_shared) in [(&sharing, true), (&patient(), false)] {
        let near = endpoint(&authority, Role::Worker, &sharing);
        let far = endpoint(&authority, Role::Worker, far_config);
        let expect = Expect::role(Role::Worker);
        let connection = near.connect(far.local_addr(), &expect, PATIENCE).await.unwrap();
        let accepted = far.accept().await.unwrap();
        assert_eq!((connection.shares_memory(), accepted.shares_memory()), (is_shared, is_shared));
        let mut body = near.arena().allocate(1 << 20);
        body.fill(7);
        let frame = Frame { head: Bytes::from_static(b"head"), body: body.freeze() };
        let before = near.sent_wire_bytes();
        connection.send(Lane::Bulk, frame.clone()).await.unwrap();
        let (_, received) = accepted.recv().await.unwrap();
        assert_eq!(received, frame);
        let sent = near.sent_wire_bytes() - before;
        assert_eq!(sent < 1 << 19, is_shared, "{sent} bytes went by the wire");
        // What lies elsewhere is sent as it is.
        let other = Frame { head: Bytes::new(), body: Bytes::from(vec![9; 1 << 20]) };
        connection.send(Lane::Bulk, other.clone()).await.unwrap();
        assert_eq!(accepted.recv().await.unwrap().1, other);
    }
}
