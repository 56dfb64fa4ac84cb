//! Whole checkpoints over stores that fail: written by any number, read by any number, old or new but never mixed.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use proptest::prelude::*;
use ripstop_storage::{
    Action, Call, Commit, Contents, CrashPoint, Fault, FaultPlan, Layout, Manifest, ObjectKey,
    Published, Receipt, SegmentIndex, Share, SharePlan, StorageError, Store, StoreOptions,
    TensorSpec, export, find, load, newest, publish, read_segment, restore, stage, state_digest,
    survey, upload,
};
use serde_json::json;
use types::{Attempt, DType, Digest, JobId, Lineage, NodeId, Remedy, Step, VirtualRanks};

type State = BTreeMap<String, Vec<u8>>;

fn job() -> JobId {
    JobId::new("demo").unwrap()
}

fn specs() -> Vec<TensorSpec> {
    let spec = |name: &str, dtype, shape: &[usize]| TensorSpec {
        name: name.into(),
        dtype,
        shape: shape.to_vec(),
    };
    vec![
        spec("model.weight", DType::F32, &[70, 61]),
        spec("model.bias", DType::F32, &[61]),
        spec("optimizer.step", DType::I64, &[]),
        spec("empty", DType::F32, &[0, 4]),
        spec("mask", DType::U8, &[5003]),
    ]
}

/// A state that differs with `salt` in every tensor.
fn state(salt: u64) -> State {
    let fill = |spec: &TensorSpec| {
        let mut bytes = vec![0; spec.bytes().unwrap()];
        blake3::Hasher::new()
            .update(&salt.to_le_bytes())
            .update(spec.name.as_bytes())
            .finalize_xof()
            .fill(&mut bytes);
        bytes
    };
    specs().iter().map(|spec| (spec.name.clone(), fill(spec))).collect()
}

fn extra(salt: u64) -> serde_json::Value {
    json!({ "scheduler": { "lr": 0.1 + salt as f64 }, "salt": salt })
}

fn layout() -> Arc<Layout> {
    Arc::new(Layout::new(specs(), 4096).unwrap())
}

fn memory() -> Store {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let url = format!("memory://checkpoint-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    Store::open(&url, &StoreOptions::default()).unwrap()
}

fn contents(attempt: u64, lineage: u64, step: u64, salt: u64) -> Contents {
    Contents {
        job: job(),
        lineage: Lineage(lineage),
        step: Step(step),
        attempt: Attempt(attempt),
        virtual_ranks: VirtualRanks::new(8).unwrap(),
        layout: layout(),
        extra: extra(salt),
    }
}

async fn upload_share(
    store: &Store,
    contents: &Contents,
    plan: &SharePlan,
    node: NodeId,
    salt: u64,
) -> Result<Receipt, StorageError> {
    let state = state(salt);
    let job = job();
    let digest = state_digest(contents.layout.tensors(), &contents.extra, &state)?;
    let share = Share {
        job: &job,
        plan,
        node,
        attempt: contents.attempt,
        lineage: contents.lineage,
        state: digest,
    };
    let staged = stage(&contents.layout, plan, node, &state)?;
    let expected: u64 = staged.iter().map(|(_, bytes)| bytes.len() as u64).sum();
    let mut done = 0;
    let receipt = upload(store, share, staged, &mut |bytes| done += bytes).await?;
    assert_eq!(done, expected);
    Ok(receipt)
}

/// The whole way of one checkpoint with `members` writers.
async fn save(
    store: &Store,
    contents: Contents,
    members: u64,
    salt: u64,
) -> Result<Published, StorageError> {
    let nodes: Vec<NodeId> = (1..=members).map(NodeId).collect();
    let plan = SharePlan::new(&contents.layout, &nodes);
    let mut commit = Commit::new(plan.clone(), contents.clone());
    for node in nodes {
        let receipt = upload_share(store, &contents, &plan, node, salt).await?;
        commit.handle_receipt(node, Receipt::decode(&receipt.encode()).unwrap());
    }
    match commit.poll_action() {
        Some(Action::Publish(manifest)) => publish(store, &manifest).await,
        other => panic!("{other:?}"),
    }
}

async fn restored(store: &Store, manifest: &Manifest) -> Result<State, StorageError> {
    let mut state: State = manifest
        .layout()
        .tensors()
        .iter()
        .map(|t| (t.name.clone(), vec![0; t.bytes().unwrap()]))
        .collect();
    restore(store, manifest, |name, at, bytes| {
        state.get_mut(name).unwrap()[at..at + bytes.len()].copy_from_slice(bytes);
    })
    .await?;
    let digest = state_digest(manifest.layout().tensors(), manifest.extra(), &state)?;
    assert_eq!(digest, manifest.state(), "what was restored is what was saved");
    Ok(state)
}

async fn newest_manifest(store: &Store) -> Option<Manifest> {
    let found = newest(store, &job()).await.unwrap()?;
    Some(load(store, &found.manifest, found.hash).await.unwrap())
}

/// Reads the striped shares of `readers` readers, each knowing only the manifest.
async fn restored_by(store: &Store, manifest: &Manifest, readers: u64) -> State {
    let nodes: Vec<NodeId> = (100..100 + readers).map(NodeId).collect();
    let plan = SharePlan::new(manifest.layout(), &nodes);
    let mut state: State = manifest
        .layout()
        .tensors()
        .iter()
        .map(|t| (t.name.clone(), vec![0; t.bytes().unwrap()]))
        .collect();
    for node in nodes {
        for index in plan.mine(node) {
            let bytes = read_segment(store, manifest, index).await.unwrap();
            let mut sink = |name: &str, at: usize, bytes: &[u8]| {
                state.get_mut(name).unwrap()[at..at + bytes.len()].copy_from_slice(bytes);
            };
            manifest.layout().scatter(index, &bytes, &mut sink).unwrap();
        }
    }
    state
}

#[tokio::test]
async fn any_number_restores_what_any_number_wrote() {
    for writers in 1..=5 {
        let store = memory();
        let published = save(&store, contents(1, 1, 10, 3), writers, 3).await.unwrap();
        assert_eq!(published.reference, Some(0));
        let manifest = newest_manifest(&store).await.unwrap();
        assert_eq!(manifest.hash(), published.hash);
        assert_eq!(restored(&store, &manifest).await.unwrap(), state(3));
        assert_eq!(manifest.extra(), &extra(3));
        for readers in 1..=5 {
            assert_eq!(restored_by(&store, &manifest, readers).await, state(3));
        }
    }
}

#[tokio::test]
async fn the_newest_is_that_of_the_newest_lineage_and_step() {
    let store = memory();
    assert_eq!(newest(&store, &job()).await.unwrap(), None);
    for (attempt, lineage, step) in [(1, 1, 900), (2, 2, 10), (3, 2, 9), (4, 1, 1000)] {
        let published =
            save(&store, contents(attempt, lineage, step, attempt), 2, attempt).await.unwrap();
        assert_eq!(published.reference, Some(attempt - 1));
    }
    let order: Vec<_> =
        find(&store, &job()).await.unwrap().iter().map(|f| (f.lineage.0, f.step.0)).collect();
    assert_eq!(order, [(2, 10), (2, 9), (1, 1000), (1, 900)]);
    assert_eq!(newest(&store, &job()).await.unwrap().unwrap().attempt, Attempt(2));
}

#[tokio::test]
async fn publishing_twice_changes_nothing() {
    let store = memory();
    let first = save(&store, contents(1, 1, 10, 3), 3, 3).await.unwrap();
    let again = save(&store, contents(1, 1, 10, 3), 3, 3).await.unwrap();
    assert_eq!(first, again);
}

#[tokio::test]
async fn a_zombie_cannot_overwrite() {
    let store = memory();
    let published = save(&store, contents(2, 2, 10, 1), 2, 1).await.unwrap();
    // The same attempt with other bytes: its manifest is refused, the one that is there stays whole.
    let error = save(&store, contents(2, 2, 10, 9), 2, 9).await.unwrap_err();
    assert!(
        matches!(&error, StorageError::Conflict { key } if *key == published.manifest.to_string()),
        "{error}"
    );
    assert_eq!(error.remedy(), Remedy::Stop);
    // An ended lineage's attempt goes elsewhere and comes after.
    save(&store, contents(1, 1, 99, 7), 2, 7).await.unwrap();
    let manifest = newest_manifest(&store).await.unwrap();
    assert_eq!(restored(&store, &manifest).await.unwrap(), state(1));
}

#[tokio::test]
async fn two_states_of_one_place_are_not_chosen_between() {
    let store = memory();
    save(&store, contents(1, 1, 10, 1), 1, 1).await.unwrap();
    save(&store, contents(2, 1, 10, 1), 2, 1).await.unwrap();
    assert_eq!(
        newest(&store, &job()).await.unwrap().unwrap().attempt,
        Attempt(2),
        "the same state twice is no question"
    );
    save(&store, contents(3, 1, 10, 2), 2, 2).await.unwrap();
    let error = newest(&store, &job()).await.unwrap_err();
    assert!(matches!(error, StorageError::Ambiguous { .. }), "{error}");
    save(&store, contents(4, 1, 11, 2), 2, 2).await.unwrap();
    assert_eq!(newest(&store, &job()).await.unwrap().unwrap().attempt, Attempt(4));
}

#[tokio::test]
async fn a_crash_at_any_call_of_a_save_leaves_old_or_new() {
    let counter = FaultPlan::new();
    save(&memory().with_faults(counter.clone()), contents(2, 1, 20, 2), 2, 2).await.unwrap();
    let calls = counter.calls();
    assert!(calls > 10);
    let (mut old, mut new) = (0, 0);
    for nth in 0..calls {
        for point in [CrashPoint::Before, CrashPoint::After] {
            let store = memory();
            save(&store, contents(1, 1, 10, 1), 2, 1).await.unwrap();
            let dying = store.with_faults(FaultPlan::new().crash_at(nth, point));
            let outcome = save(&dying, contents(2, 1, 20, 2), 2, 2).await;
            let manifest = newest_manifest(&store).await.unwrap();
            let found = restored(&store, &manifest).await.unwrap();
            match manifest.step() {
                Step(10) => {
                    assert_eq!(found, state(1));
                    assert!(outcome.is_err(), "what was said to be saved is there");
                    old += 1;
                }
                _ => {
                    assert_eq!(found, state(2));
                    assert_eq!(manifest.extra(), &extra(2));
                    new += 1;
                }
            }
            // Another member ends what the dead one began.
            save(&store, contents(2, 1, 20, 2), 3, 2).await.unwrap();
            assert_eq!(newest_manifest(&store).await.unwrap().step(), Step(20));
        }
    }
    assert!(old > 0 && new > 0, "{old} {new}");
}

#[tokio::test]
async fn a_missing_short_or_damaged_segment_is_named_and_refused() {
    let store = memory();
    save(&store, contents(1, 1, 10, 1), 2, 1).await.unwrap();
    save(&store, contents(2, 1, 20, 2), 2, 2).await.unwrap();
    let manifest = newest_manifest(&store).await.unwrap();
    let victim = manifest.layout().segments()[3].clone();
    let key = manifest.segment_key(victim.index).unwrap();
    let whole = store.get(&key, victim.bytes).await.unwrap();

    let mut flipped = whole.to_vec();
    flipped[100] ^= 4;
    store.put(&key, flipped.into()).await.unwrap();
    let error = restored(&store, &manifest).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("segment 3 of demo/manifests/") && text.contains("damaged"), "{text}");
    assert_eq!(error.remedy(), Remedy::Stop);

    // A wrong length or a gap is seen without reading: the older checkpoint is the newest whole one.
    store.put(&key, whole.slice(1..)).await.unwrap();
    assert!(
        restored(&store, &manifest)
            .await
            .unwrap_err()
            .to_string()
            .contains("4095 bytes instead of 4096")
    );
    assert_eq!(newest(&store, &job()).await.unwrap().unwrap().step, Step(10));
    store.delete(&key).await.unwrap();
    assert!(restored(&store, &manifest).await.unwrap_err().to_string().contains("has no object"));
    let survey = survey(&store, &job()).await.unwrap();
    assert_eq!(survey.found.len(), 1);
    assert_eq!(survey.damaged.len(), 1);
    assert!(
        survey.damaged[0].reason.contains("segment 3 is missing"),
        "{}",
        survey.damaged[0].reason
    );

    store.put(&key, whole).await.unwrap();
    assert_eq!(newest(&store, &job()).await.unwrap().unwrap().step, Step(20));
}

#[tokio::test]
async fn one_bad_read_is_read_again_and_no_bad_byte_gets_out() {
    let store = memory();
    save(&store, contents(1, 1, 10, 1), 2, 1).await.unwrap();
    let manifest = newest_manifest(&store).await.unwrap();
    for fault in [Fault::Corrupt, Fault::Short] {
        for nth in 0..manifest.layout().segments().len() as u64 {
            let faulty = store.with_faults(FaultPlan::new().fail(Call::Read, nth, fault));
            assert_eq!(restored(&faulty, &manifest).await.unwrap(), state(1));
        }
        let faulty = store.with_faults(FaultPlan::new().always(Call::Read, fault));
        let nothing = restore(&faulty, &manifest, |_, _, _| panic!("a bad byte got out")).await;
        assert!(matches!(nothing, Err(StorageError::Segment { .. })));
        let once = store.with_faults(FaultPlan::new().fail(Call::Read, 0, fault));
        assert_eq!(newest(&once, &job()).await.unwrap().unwrap().step, Step(10));
        let once = store.with_faults(FaultPlan::new().fail(Call::Read, 0, fault));
        load(&once, &manifest.key(), manifest.hash()).await.unwrap();
    }
}

#[tokio::test]
async fn an_unreachable_store_is_not_an_empty_one() {
    let store = memory();
    save(&store, contents(1, 1, 10, 1), 2, 1).await.unwrap();
    for call in [Call::List, Call::Read, Call::Head] {
        let faulty = store.with_faults(FaultPlan::new().always(call, Fault::Before));
        let error = newest(&faulty, &job()).await.unwrap_err();
        assert_eq!(error.remedy(), Remedy::Retry, "{call:?}");
    }
    // The second listing is that of the segments.
    let faulty = store.with_faults(FaultPlan::new().fail(Call::List, 1, Fault::Before));
    assert!(newest(&faulty, &job()).await.is_err());
}

#[tokio::test]
async fn manifests_that_are_not_what_they_should_be_are_refused() {
    let store = memory();
    let published = save(&store, contents(1, 1, 10, 1), 2, 1).await.unwrap();
    let error = load(&store, &published.manifest, Digest::of(b"another")).await.unwrap_err();
    assert!(matches!(error, StorageError::Corrupt { .. }), "{error}");
    let missing = ObjectKey::manifest(&job(), Lineage(1), Step(11), Attempt(1)).unwrap();
    assert!(matches!(
        load(&store, &missing, published.hash).await,
        Err(StorageError::Missing { .. })
    ));

    // A manifest under another's key, garbage, and nothing at all: newer by name, and passed over.
    let bytes = store.get_up_to(&published.manifest, 1 << 20).await.unwrap();
    for (step, content) in [(11, bytes), (12, Bytes::from_static(b"{}")), (13, Bytes::new())] {
        let key = ObjectKey::manifest(&job(), Lineage(1), Step(step), Attempt(1)).unwrap();
        store.put(&key, content).await.unwrap();
    }
    assert_eq!(newest(&store, &job()).await.unwrap().unwrap().step, Step(10));
    assert_eq!(survey(&store, &job()).await.unwrap().damaged.len(), 3);
}

#[tokio::test]
async fn a_lost_hint_does_not_fail_a_checkpoint() {
    let store = memory();
    // Creates: the manifest, then the hint; the second listing of this call is none.
    let faults = FaultPlan::new().always(Call::List, Fault::Before);
    let published = save(&store.with_faults(faults), contents(1, 1, 10, 1), 2, 1).await.unwrap();
    assert_eq!(published.reference, None);
    assert_eq!(newest_manifest(&store).await.unwrap().step(), Step(10));
    // A manifest that was said to be stored and isn't is noticed before anybody commits it.
    let faults = FaultPlan::new().fail(Call::Create, 0, Fault::Lost);
    let error = save(&store.with_faults(faults), contents(2, 1, 20, 2), 2, 2).await.unwrap_err();
    assert!(matches!(error, StorageError::Missing { .. }), "{error}");
}

#[tokio::test]
async fn exported_files_are_plain_safetensors() {
    let dir = tempfile::tempdir().unwrap();
    let store =
        Store::open(dir.path().join("store").to_str().unwrap(), &StoreOptions::default()).unwrap();
    save(&store, contents(1, 1, 10, 1), 3, 1).await.unwrap();
    let manifest = newest_manifest(&store).await.unwrap();
    let out = dir.path().join("out/deep");
    for _ in 0..2 {
        let exported = export(&store, &manifest, &out).await.unwrap();
        assert_eq!(exported.files.len(), 2);
        let bytes = std::fs::read(&exported.files[0]).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(tensors.len(), specs().len());
        for spec in specs() {
            let view = tensors.tensor(&spec.name).unwrap();
            assert_eq!((view.shape(), view.data()), (&*spec.shape, &*state(1)[&spec.name]));
        }
        let read: serde_json::Value =
            serde_json::from_slice(&std::fs::read(out.join("extra.json")).unwrap()).unwrap();
        assert_eq!(read, extra(1));
    }
    assert_eq!(std::fs::read_dir(&out).unwrap().count(), 2, "no temporary file stays");

    // A damaged segment leaves no file behind that looks whole.
    let broken = dir.path().join("broken");
    let key = manifest.segment_key(SegmentIndex(2)).unwrap();
    store.put(&key, Bytes::from(vec![0; 4096])).await.unwrap();
    let error = export(&store, &manifest, &broken).await.unwrap_err();
    assert!(error.to_string().contains("segment 2"), "{error}");
    assert_eq!(std::fs::read_dir(&broken).unwrap().count(), 0);
}

#[test]
fn the_futures_may_move_between_threads() {
    fn assert_send<T: Send>(_: T) {}
    let (store, job) = (memory(), job());
    let contents = contents(1, 1, 1, 1);
    let plan = SharePlan::new(&contents.layout, &[NodeId(1)]);
    let (node, attempt, lineage) = (NodeId(1), Attempt(1), Lineage(1));
    let share = Share { job: &job, plan: &plan, node, attempt, lineage, state: Digest::default() };
    assert_send(upload(&store, share, Vec::new(), &mut |_| ()));
    let hashes = vec![Digest::default(); contents.layout.segments().len()];
    let manifest = Manifest::new(contents, Digest::default(), hashes).unwrap();
    assert_send(publish(&store, &manifest));
    assert_send(newest(&store, &job));
    assert_send(survey(&store, &job));
    let key = manifest.key();
    assert_send(load(&store, &key, Digest::default()));
    assert_send(restore(&store, &manifest, |_, _, _| ()));
    assert_send(export(&store, &manifest, std::path::Path::new("x")));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn under_any_single_faults_a_save_is_old_or_new(
        faults in prop::collection::vec((0usize..6, 0u64..12, 0usize..5), 0..6),
        writers in 1u64..4,
    ) {
        const CALLS: [Call; 6] = [Call::Put, Call::Create, Call::Read, Call::Head, Call::List, Call::Delete];
        const FAULTS: [Fault; 5] = [Fault::Before, Fault::After, Fault::Exists, Fault::Corrupt, Fault::Short];
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let store = memory();
            save(&store, contents(1, 1, 10, 1), 2, 1).await.unwrap();
            let plan = faults.into_iter().fold(FaultPlan::new(), |plan, (call, nth, fault)| {
                plan.fail(CALLS[call], nth, FAULTS[fault])
            });
            let outcome = save(&store.with_faults(plan), contents(2, 1, 20, 2), writers, 2).await;
            let manifest = newest_manifest(&store).await.unwrap();
            let salt = if manifest.step() == Step(20) { 2 } else { 1 };
            assert_eq!(restored(&store, &manifest).await.unwrap(), state(salt));
            assert!(outcome.is_err() || salt == 2, "what was said to be saved is there");
        });
    }
}
