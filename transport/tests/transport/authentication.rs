//! Who gets in, over QUIC.

use std::sync::Arc;

use ripstop_transport::{
    CertificateAuthority, ConnectError, CsrKey, Endpoint, Expect, Lane, Role, TokenClaims, TokenId,
};
use types::{Digest, NodeId, Remedy};

use crate::networks::{
    DAY, Network, PATIENCE, coordinator, enrolling, frame, loopback, number, patient, worker,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_another_cluster_is_refused_and_named() {
    let (here, there) = (Network::quic(), Network::quic());
    let (client, server) = (here.endpoint(&worker(1)), there.endpoint(&coordinator()));
    let address = server.local_addr();
    let error =
        client.connect(address, &Expect::role(Role::Coordinator), PATIENCE).await.unwrap_err();
    assert_eq!((error.clone(), error.remedy()), (ConnectError::Foreign { address }, Remedy::Stop));
    assert!(
        error.to_string().contains("the peer's certificate is not signed by this cluster's CA"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn enrolment_refuses_another_cas_coordinator() {
    let network = Network::quic();
    let server = network.endpoint(&coordinator());
    let host = Endpoint::bind_enrolling(loopback(), Digest([7; 32])).unwrap();
    let address = server.local_addr();
    let error = host.connect_enrol(address, PATIENCE).await.unwrap_err();
    assert_eq!(error, ConnectError::Foreign { address });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_plays_the_coordinator_gets_no_token() {
    let authority = CertificateAuthority::create().unwrap();
    let identity = Arc::new(authority.identity(&worker(1), DAY).unwrap());
    let impostor = Endpoint::bind(loopback(), identity, &enrolling()).unwrap();
    let host = Endpoint::bind_enrolling(loopback(), authority.fingerprint()).unwrap();
    let error = host.connect_enrol(impostor.local_addr(), PATIENCE).await.unwrap_err();
    assert!(matches!(error, ConnectError::WrongPeer { .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_with_a_token_gets_a_certificate_and_comes_back_with_it() {
    let authority = CertificateAuthority::create().unwrap();
    let identity = Arc::new(authority.identity(&coordinator(), DAY).unwrap());
    let server = Endpoint::bind(loopback(), identity, &enrolling()).unwrap();
    let claims = TokenClaims {
        id: TokenId::random(),
        uses: 1,
        job: None,
        role: Role::Agent,
        valid_until_unix: None,
    };
    let token = authority.token(claims);

    let joining = async {
        let host = Endpoint::bind_enrolling(loopback(), token.authority()).unwrap();
        let connection = host.connect_enrol(server.local_addr(), PATIENCE).await.unwrap();
        let (request, key) = CsrKey::generate().unwrap();
        let mut ask = frame(1, 0);
        (ask.head, ask.body) = (token.secret_text().to_owned().into(), request);
        connection.send(Lane::Control, ask).await.unwrap();
        let (_, answer) = connection.recv().await.unwrap();
        Arc::new(key.into_identity(answer.head, answer.body).unwrap())
    };
    let enrolling = async {
        let connection = server.accept().await.unwrap();
        let (_, ask) = connection.recv().await.unwrap();
        let claims = authority.check_token(std::str::from_utf8(&ask.head).unwrap(), 0).unwrap();
        let subject =
            ripstop_transport::Subject { role: claims.role, job: claims.job, node: NodeId(12) };
        let certificate = authority.issue(&subject, &ask.body, DAY).unwrap();
        let mut answer = frame(0, 0);
        (answer.head, answer.body) = (certificate, authority.certificate().clone());
        connection.send(Lane::Control, answer).await.unwrap();
        connection.closed().await;
    };
    let (identity, ()) = tokio::join!(joining, enrolling);

    let agent = Endpoint::bind(loopback(), identity, &patient()).unwrap();
    let connection = agent
        .connect(server.local_addr(), &Expect::node(Role::Coordinator, NodeId(100)), PATIENCE)
        .await
        .unwrap();
    let accepted = server.accept().await.unwrap();
    assert_eq!(accepted.peer().map(ToString::to_string).as_deref(), Some("ripstop://_/agent/12"));
    connection.send(Lane::Control, frame(5, 0)).await.unwrap();
    assert_eq!(number(&accepted.recv().await.unwrap().1), 5);
}
