//! The store over the real protocol of S3: requests are signed, sent, parsed and answered by a server on loopback.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::TokioIo;
use ripstop_storage::{
    Contents, Created, Layout, Manifest, Object, ObjectKey, Prefix, StorageError, Store,
    StoreOptions, newest, publish,
};
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use serde_json::json;
use tokio::net::TcpListener;
use types::{Attempt, Digest, JobId, Lineage, Remedy, Step, VirtualRanks};

/// A server with one bucket, `bucket`; it lives as long as the test's runtime. It takes one request at a time: by itself it only
/// looks before it writes, so that several creates at once could win.
async fn server(root: &Path) -> String {
    std::fs::create_dir_all(root.join("bucket")).unwrap();
    let mut builder = S3ServiceBuilder::new(s3s_fs::FileSystem::new(root).unwrap());
    builder.set_auth(SimpleAuth::from_single("id", "secret"));
    let service = Arc::new((builder.build(), tokio::sync::Mutex::new(())));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let service = Arc::clone(&service);
            let one_by_one = service_fn(move |request| {
                let service = Arc::clone(&service);
                async move {
                    let _turn = service.1.lock().await;
                    Service::call(&service.0, request).await
                }
            });
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(socket), one_by_one));
        }
    });
    format!("http://{address}")
}

fn open(url: &str, endpoint: &str, secret: &str) -> Store {
    let settings = [
        ("AWS_ENDPOINT_URL", endpoint),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_ACCESS_KEY_ID", "id"),
        ("AWS_SECRET_ACCESS_KEY", secret),
    ];
    let settings: BTreeMap<String, String> =
        settings.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
    let options = StoreOptions { settings, segment_bytes: 4096, patience: Duration::from_secs(60) };
    Store::open(url, &options).unwrap()
}

fn job() -> JobId {
    JobId::new("demo").unwrap()
}

fn manifest(step: u64) -> ObjectKey {
    ObjectKey::manifest(&job(), Lineage(1), Step(step), Attempt(1)).unwrap()
}

#[tokio::test]
async fn an_s3_server_holds_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let endpoint = server(dir.path()).await;
    for url in ["s3://bucket", "s3://bucket/some/prefix/"] {
        let store = open(url, &endpoint, "secret");
        store.probe(&job(), 7).await.unwrap();

        let bytes = Bytes::from(vec![5; (16 << 20) + 3]);
        let key = ObjectKey::segment(&job(), Attempt(1), Digest::of(&bytes)).unwrap();
        assert!(matches!(store.get(&key, 5).await, Err(StorageError::Missing { .. })));
        store.put(&key, bytes.clone()).await.unwrap();
        store.put(&key, bytes.clone()).await.unwrap();
        assert_eq!(store.get(&key, bytes.len() as u64).await.unwrap(), bytes);
        assert!(matches!(
            store.get(&key, bytes.len() as u64 - 1).await,
            Err(StorageError::Length { .. })
        ));
        assert!(matches!(
            store.get(&key, bytes.len() as u64 + 1).await,
            Err(StorageError::Length { .. })
        ));

        assert_eq!(store.create(&manifest(1), "first".into()).await.unwrap(), Created::Created);
        assert_eq!(store.create(&manifest(1), "first".into()).await.unwrap(), Created::AlreadySame);
        assert_eq!(store.create(&manifest(1), "other".into()).await.unwrap(), Created::Conflict);
        assert_eq!(
            store.create(&manifest(1), "of another length".into()).await.unwrap(),
            Created::Conflict
        );
        assert_eq!(store.get(&manifest(1), 5).await.unwrap(), "first");

        assert_eq!(
            store.list(&Prefix::Job(job())).await.unwrap(),
            [
                Object { key: key.clone(), bytes: bytes.len() as u64 },
                Object { key: manifest(1), bytes: 5 }
            ]
        );
        assert_eq!(store.list(&Prefix::References(job())).await.unwrap(), []);
        for key in [&key, &manifest(1)] {
            store.delete(key).await.unwrap();
            assert!(matches!(store.head(key).await, Err(StorageError::Missing { .. })));
        }
    }
}

#[tokio::test]
async fn a_checkpoint_is_published_and_found_on_an_s3_server() {
    let dir = tempfile::tempdir().unwrap();
    let store = open("s3://bucket/p", &server(dir.path()).await, "secret");
    let layout = Arc::new(Layout::new(Vec::new(), 4096).unwrap());
    let segment = layout.fill(layout.segments()[0].index, &BTreeMap::new()).unwrap();
    let hash = Digest::of(&segment);
    let contents = Contents {
        job: job(),
        lineage: Lineage(1),
        step: Step(5),
        attempt: Attempt(1),
        virtual_ranks: VirtualRanks::new(4).unwrap(),
        layout,
        extra: json!({ "lr": 0.1 }),
    };
    store.put(&ObjectKey::segment(&job(), Attempt(1), hash).unwrap(), segment).await.unwrap();
    let manifest = Manifest::new(contents, Digest::of(b"state"), vec![hash]).unwrap();
    assert_eq!(newest(&store, &job()).await.unwrap(), None);
    let published = publish(&store, &manifest).await.unwrap();
    assert_eq!(publish(&store, &manifest).await.unwrap(), published);
    assert_eq!(newest(&store, &job()).await.unwrap().unwrap().hash, published.hash);
    assert_eq!(store.jobs().await.unwrap(), [job()]);
}

#[tokio::test]
async fn what_is_wrong_with_an_s3_server_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let endpoint = server(dir.path()).await;
    // Lists only: this server makes a missing bucket when something is put into it.
    let error = newest(&open("s3://nobody", &endpoint, "secret"), &job()).await.unwrap_err();
    assert!(matches!(error, StorageError::NoBucket { .. }), "{error}");
    let wrong_key = open("s3://bucket", &endpoint, "wrong");
    for error in [
        wrong_key.list(&Prefix::Job(job())).await.unwrap_err(),
        wrong_key.create(&manifest(1), "x".into()).await.unwrap_err(),
        wrong_key.get(&manifest(1), 1).await.unwrap_err(),
    ] {
        assert!(matches!(error, StorageError::Denied { .. }), "{error}");
        assert_eq!(error.remedy(), Remedy::Stop);
    }
}

#[tokio::test]
async fn a_server_that_is_not_there_is_an_error_to_retry() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let settings = [
        ("aws_endpoint_url", endpoint.as_str()),
        ("aws_allow_http", "true"),
        ("aws_access_key_id", "id"),
        ("aws_secret_access_key", "x"),
    ];
    let settings = settings.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
    let options = StoreOptions { settings, patience: Duration::ZERO, ..StoreOptions::default() };
    let store = Store::open("s3://bucket", &options).unwrap();
    for error in [
        newest(&store, &job()).await.unwrap_err(),
        store.create(&manifest(1), "x".into()).await.unwrap_err(),
        store.head(&manifest(1)).await.unwrap_err(),
    ] {
        assert_eq!(error.remedy(), Remedy::Retry, "{error}");
    }
}
