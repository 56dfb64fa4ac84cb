use types::{Attempt, Digest, Lineage, Remedy, Step};

use super::*;

fn job() -> JobId {
    JobId::new("demo").unwrap()
}

fn open(url: &str) -> Store {
    Store::open(url, &StoreOptions::default()).unwrap()
}

fn segment(bytes: &[u8]) -> ObjectKey {
    ObjectKey::segment(&job(), Attempt(1), Digest::of(bytes)).unwrap()
}

fn manifest(step: u64) -> ObjectKey {
    ObjectKey::manifest(&job(), Lineage(1), Step(step), Attempt(1)).unwrap()
}

/// A fresh store of each kind that needs no server.
fn with_each_store(test: impl AsyncFn(Store)) {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let nth = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("not/yet/there");
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        test(open(&format!("memory://each-{nth}"))).await;
        test(open(&format!("memory://each-{nth}-b/some/prefix/"))).await;
        test(open(path.to_str().unwrap())).await;
        test(open(&format!("file://{}/by-url", path.display()))).await;
    });
}

#[test]
fn what_is_put_is_read_listed_and_deleted() {
    with_each_store(async |store| {
        let (small, large) =
            (Bytes::from_static(b"small"), Bytes::from(vec![7; (READ_BYTES + 10) as usize]));
        for bytes in [&small, &large] {
            let key = segment(bytes);
            assert!(matches!(store.get(&key, 5).await, Err(StorageError::Missing { .. })));
            assert!(matches!(store.head(&key).await, Err(StorageError::Missing { .. })));
            store.put(&key, bytes.clone()).await.unwrap();
            store.put(&key, bytes.clone()).await.unwrap();
            assert_eq!(store.get(&key, bytes.len() as u64).await.unwrap(), bytes);
            assert_eq!(store.head(&key).await.unwrap(), bytes.len() as u64);
        }
        assert_eq!(store.create(&manifest(2), small.clone()).await.unwrap(), Created::Created);
        let listed = store.list(&Prefix::Attempt(job(), Attempt(1))).await.unwrap();
        let mut expected =
            [&small, &large].map(|b| Object { key: segment(b), bytes: b.len() as u64 });
        expected.sort_by_key(|object| object.key.to_string());
        assert_eq!(listed, expected);
        assert_eq!(store.list(&Prefix::Job(job())).await.unwrap().len(), 3);
        assert_eq!(store.list(&Prefix::Attempt(job(), Attempt(2))).await.unwrap(), []);
        assert_eq!(store.jobs().await.unwrap(), [job()]);
        store.delete(&segment(&small)).await.unwrap();
        store.delete(&segment(&small)).await.unwrap();
        assert!(matches!(store.get(&segment(&small), 5).await, Err(StorageError::Missing { .. })));
    });
}

#[test]
fn a_create_never_replaces_anything() {
    with_each_store(async |store| {
        let (first, second) = (Bytes::from_static(b"first"), Bytes::from_static(b"other"));
        assert_eq!(store.create(&manifest(1), first.clone()).await.unwrap(), Created::Created);
        assert_eq!(store.create(&manifest(1), first.clone()).await.unwrap(), Created::AlreadySame);
        assert_eq!(store.create(&manifest(1), second).await.unwrap(), Created::Conflict);
        assert_eq!(
            store.create(&manifest(1), Bytes::from_static(b"longer than that")).await.unwrap(),
            Created::Conflict
        );
        assert_eq!(store.create(&manifest(1), Bytes::new()).await.unwrap(), Created::Conflict);
        assert_eq!(store.get(&manifest(1), 5).await.unwrap(), first);
    });
}

#[test]
fn an_object_of_another_length_is_an_error() {
    with_each_store(async |store| {
        store.put(&manifest(1), Bytes::from_static(b"12345")).await.unwrap();
        store.put(&manifest(2), Bytes::new()).await.unwrap();
        for (key, expected, found) in
            [(1, 4, 5), (1, 6, 5), (1, 0, 5), (2, 3, 0), (1, READ_BYTES + 1, 5)]
        {
            match store.get(&manifest(key), expected).await {
                Err(StorageError::Length { expected: e, found: f, .. }) => {
                    assert_eq!((e, f), (expected, found));
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(store.get(&manifest(2), 0).await.unwrap(), Bytes::new());
        assert!(matches!(
            store.get_up_to(&manifest(1), 4).await,
            Err(StorageError::TooLong { .. })
        ));
        assert_eq!(store.get_up_to(&manifest(1), 5).await.unwrap(), "12345");
    });
}

#[test]
fn a_good_store_passes_the_probe_and_is_left_clean() {
    with_each_store(async |store| {
        store.probe(&job(), 1).await.unwrap();
        store.probe(&job(), 1).await.unwrap();
        assert_eq!(store.list(&Prefix::Job(job())).await.unwrap(), []);
    });
}

#[test]
fn a_bad_store_does_not_pass_the_probe() {
    with_each_store(async |store| {
        // Who loses writes, or says "stored" to more than one.
        let bad = store.with_faults(FaultPlan::new().always(Call::Create, Fault::Lost));
        assert!(matches!(bad.probe(&job(), 1).await, Err(StorageError::NotConformant { .. })));
        let bad = store.with_faults(FaultPlan::new().fail(Call::Create, 2, Fault::Lost));
        assert!(matches!(bad.probe(&job(), 2).await, Err(StorageError::NotConformant { .. })));
        let bad = store.with_faults(FaultPlan::new().fail(
            Call::Read,
            PROBE_CREATES as u64 - 1,
            Fault::Corrupt,
        ));
        assert!(matches!(bad.probe(&job(), 3).await, Err(StorageError::NotConformant { .. })));
        let gone = store.with_faults(FaultPlan::new().always(Call::List, Fault::Before));
        assert!(matches!(gone.probe(&job(), 4).await, Err(StorageError::Unavailable { .. })));
    });
}

#[test]
fn ambiguous_answers_to_a_create_are_resolved_by_reading_back() {
    let body = || Bytes::from_static(b"mine");
    with_each_store(async |store| {
        // (fault of the first create, what is there already, outcome)
        let table = [
            (Fault::After, None, Created::AlreadySame),
            (Fault::Before, None, Created::Created),
            (Fault::Exists, None, Created::Created),
            (Fault::Exists, Some("mine"), Created::AlreadySame),
            (Fault::Before, Some("theirs"), Created::Conflict),
            (Fault::After, Some("mine"), Created::AlreadySame),
        ];
        for (step, (fault, before, outcome)) in table.into_iter().enumerate() {
            let key = manifest(step as u64);
            if let Some(text) = before {
                store.put(&key, text.into()).await.unwrap();
            }
            let faulty = store.with_faults(FaultPlan::new().fail(Call::Create, 0, fault));
            assert_eq!(
                faulty.create(&key, body()).await.unwrap(),
                outcome,
                "{fault:?} over {before:?}"
            );
            assert_eq!(store.get_up_to(&key, 100).await.unwrap(), before.unwrap_or("mine"));
        }
    });
}

#[test]
fn a_create_that_cannot_be_resolved_is_an_error() {
    with_each_store(async |store| {
        let never = store.with_faults(FaultPlan::new().always(Call::Create, Fault::Before));
        let error = never.create(&manifest(1), "x".into()).await.unwrap_err();
        assert_eq!(error.remedy(), Remedy::Retry);
        let blind =
            FaultPlan::new().fail(Call::Create, 0, Fault::After).always(Call::Read, Fault::Before);
        let error = store.with_faults(blind).create(&manifest(2), "x".into()).await.unwrap_err();
        assert!(matches!(error, StorageError::Unavailable { .. }));
    });
}

#[test]
fn an_error_is_never_read_as_missing_or_empty() {
    with_each_store(async |store| {
        store.put(&manifest(1), "12345".into()).await.unwrap();
        for call in [Call::Read, Call::Head, Call::List] {
            let faulty = store.with_faults(FaultPlan::new().always(call, Fault::Before));
            let outcome = match call {
                Call::Read => faulty.get(&manifest(1), 5).await.map(|_| ()),
                Call::Head => faulty.head(&manifest(1)).await.map(|_| ()),
                _ => faulty.list(&Prefix::Job(job())).await.map(|_| ()),
            };
            assert!(matches!(outcome, Err(StorageError::Unavailable { .. })), "{call:?}");
        }
        let short = store.with_faults(FaultPlan::new().fail(Call::Read, 0, Fault::Short));
        assert!(matches!(
            short.get(&manifest(1), 5).await,
            Err(StorageError::Length { found: 4, .. })
        ));
    });
}

#[test]
fn stores_in_memory_are_shared_by_name() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        open("memory://shared/a").put(&manifest(1), "x".into()).await.unwrap();
        assert_eq!(open("memory://shared/a").head(&manifest(1)).await.unwrap(), 1);
        assert!(open("memory://shared/b").head(&manifest(1)).await.is_err());
        assert!(open("memory://shared").head(&manifest(1)).await.is_err());
        assert!(open("memory://other/a").head(&manifest(1)).await.is_err());
    });
}

#[test]
fn objects_that_are_not_ours_are_left_out_of_listings() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path().to_str().unwrap());
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        store.put(&manifest(1), "x".into()).await.unwrap();
        let folder = dir.path().join("demo/manifests");
        std::fs::write(folder.join("readme.txt"), "not ours").unwrap();
        std::fs::write(folder.join(format!("{}#1", "0".repeat(10))), "left by a crash").unwrap();
        assert_eq!(
            store.list(&Prefix::Job(job())).await.unwrap(),
            [Object { key: manifest(1), bytes: 1 }]
        );
    });
}

#[test]
fn a_url_that_cannot_be_used_says_what_to_change() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let under_file = file.join("store");
    let options = |pairs: &[(&str, &str)]| StoreOptions {
        settings: pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
        ..StoreOptions::default()
    };
    let keys = [("AWS_ACCESS_KEY_ID", "id"), ("AWS_SECRET_ACCESS_KEY", "key")];
    let http = [keys[0], keys[1], ("AWS_ENDPOINT_URL", "http://localhost:1")];
    type Settings<'a> = &'a [(&'a str, &'a str)];
    let table: Vec<(&str, Settings<'_>, &str)> = vec![
        ("", &[], "name a directory"),
        ("gs://bucket", &[], "unknown scheme \"gs\""),
        ("file://relative", &[], "file:///directory"),
        ("memory://", &[], "memory://name"),
        (under_file.to_str().unwrap(), &[], "can't create the directory"),
        (file.to_str().unwrap(), &[], "can't create the directory"),
        ("s3://", &keys, "lacks a bucket"),
        ("s3://id:key@bucket", &keys, "environment or the settings"),
        ("s3://bucket/a#1", &keys, "'#'"),
        ("s3://bucket/SlowDown", &keys, "choose another name"),
        ("s3://bucket/a//b", &keys, "can't be used"),
        ("s3://bucket", &keys[..1], "set both"),
        ("s3://bucket", &http, "AWS_ALLOW_HTTP"),
        ("s3://bucket", &[("AWS_ENDPOINT_URL", "https://localhost:1")], "no credentials"),
        ("s3://bucket", &[("AWS_EC2_METADATA_DISABLED", "true")], "no credentials"),
    ];
    for (url, settings, expected) in table {
        let error = Store::open(url, &options(settings)).unwrap_err().to_string();
        assert!(error.contains(expected), "{url}: {error}");
    }
    let settings = [keys[0], keys[1], ("AWS_PROFILE", "ignored"), ("AWS_REGION", "eu-west-1")];
    let store = Store::open("s3://bucket/prefix/", &options(&settings)).unwrap();
    assert_eq!(store.to_string(), "s3://bucket/prefix/");
    assert!(
        !format!("{store:?} {:?}", options(&settings)).contains("key\""),
        "values of settings are secrets"
    );
}

#[test]
fn the_futures_may_move_between_threads() {
    fn assert_send<T: Send>(_: T) {}
    let store = open("memory://send");
    assert_send(store.put(&manifest(1), Bytes::new()));
    assert_send(store.create(&manifest(1), Bytes::new()));
    assert_send(store.get(&manifest(1), 1));
    assert_send(store.list(&Prefix::Job(job())));
    assert_send(store.probe(&job(), 1));
}
