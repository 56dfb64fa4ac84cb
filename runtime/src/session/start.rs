//! How a session starts: endpoints, threads, and what the coordinators are told of this process.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use collectives::ChunkLayout;
use membership::{Fingerprint, FoundCheckpoint, JobSpec, Join};
use storage::{Layout, ObjectKey, StatePieces, Store, TensorSpec};
use tokio::sync::mpsc;
use transport::{Arena, Endpoint, Identity};
use types::{
    Address, Block, Digest, Generation, Lineage, Member, NodeId, Origin, PROTOCOL_VERSION, Start,
    Step, VirtualRanks, World,
};

use super::Running;
use crate::drivers::control::{self, ControlConfig, ControlHandle};
use crate::drivers::engine::{Engine, Input, Parts};
use crate::drivers::peers::{self, PeersHandle};
use crate::error::Error;
use crate::metrics::{Metrics, WorkerMetrics};
use crate::settings::Settings;
use crate::state::State;
use crate::trace::Trace;
use crate::{credentials, signals};

/// Starts the engine, and with coordinators also the data plane and the control thread.
pub(super) async fn start<S: State + ?Sized>(
    settings: &Settings,
    state: &S,
) -> Result<Running, Error> {
    let specs = state.tensors();
    let layout = Layout::new(specs.clone(), segment_bytes(&specs))
        .map_err(|e| Error::Usage(format!("the state's tensors can't be laid out: {e}")))?;
    let chunks = ChunkLayout::new(state.gradient_elements(), settings.chunk_bytes)
        .map_err(|e| Error::Usage(format!("the gradient can't be cut: {e}")))?;
    let background = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(BACKGROUND_THREADS)
        .thread_name("ripstop-io")
        .enable_all()
        .build()
        .map_err(|e| Error::Transport {
            context: "starting the i/o threads",
            reason: e.to_string(),
        })?;
    let pieces = Arc::new(StatePieces::new(specs));
    let (sender, inputs) = std::sync::mpsc::channel();
    let (orders_in, orders) = mpsc::unbounded_channel();
    let layout = Arc::new(layout);
    let seeds = Seeds { settings, layout: &layout, background: &background, sender: &sender };
    let connected =
        if settings.coordinators.is_empty() { None } else { Some(connect(&seeds, &chunks).await?) };
    let (me, peers, control, store) = match connected {
        Some(c) => (c.me, Some(c.peers), Some(c.control), c.store),
        None => (NodeId(0), None, None, None),
    };
    let arena = peers.as_ref().map_or_else(Arena::private, PeersHandle::arena);
    if peers.is_none() {
        if settings.checkpoint.is_some() {
            tracing::warn!(
                "checkpoints need a coordinator: start this program by `ripstop run --standalone`"
            );
        }
        let world = world_of_one(me, settings);
        sender.send(Input::Alone(world)).map_err(|_| Error::Internal("the engine ended"))?;
    }
    let trace = match &settings.trace_dir {
        Some(dir) => Trace::open(&dir.join(format!("worker-{me}.ndjson")), me).map_err(|e| {
            Error::Settings(format!("no trace can be written in {}: {e}", dir.display()))
        })?,
        None => Trace::default(),
    };
    let metrics = Metrics::default();
    if let Some(at) = settings.http {
        let (served, ready) = (metrics.clone(), Arc::new(AtomicBool::new(true)));
        // A port that is taken must not end training: the metrics are missing then, and it is said.
        drop(background.spawn(async move {
            if let Err(error) = crate::http::serve(at, served, ready, None).await {
                tracing::warn!(%error, "metrics are not served");
            }
        }));
    }
    let parts = Parts {
        me,
        settings: settings.clone(),
        chunks,
        arena: arena.clone(),
        layout: Arc::clone(&layout),
        pieces: Arc::clone(&pieces),
        store: store.clone(),
        peers: peers.clone(),
        control: control.clone(),
        background: background.handle().clone(),
        inputs,
        sender: sender.clone(),
        orders: orders_in,
        trace: trace.clone(),
        metrics: WorkerMetrics::new(&metrics),
    };
    if settings.handles_signals {
        signals::forward(sender.clone());
    }
    std::thread::Builder::new()
        .name("ripstop-engine".to_owned())
        .spawn(move || Engine::run(parts))
        .map_err(|e| Error::Transport { context: "starting the engine", reason: e.to_string() })?;
    Ok(Running {
        engine: sender,
        orders,
        layout,
        pieces,
        store,
        virtual_ranks: settings.virtual_ranks,
        peers,
        arena,
        control,
        background: Some(background),
        trace,
        stands: None,
        digest: None,
        handed_out: None,
        first_digest_at: None,
    })
}

struct Seeds<'a> {
    settings: &'a Settings,
    layout: &'a Layout,
    background: &'a tokio::runtime::Runtime,
    sender: &'a std::sync::mpsc::Sender<Input>,
}

struct Connected {
    me: NodeId,
    peers: PeersHandle,
    control: ControlHandle,
    store: Option<Store>,
}

async fn connect(seeds: &Seeds<'_>, chunks: &ChunkLayout) -> Result<Connected, Error> {
    let settings = seeds.settings;
    let path =
        settings.identity.as_ref().ok_or(Error::Internal("checked settings have an identity"))?;
    let identity = Identity::load(path).map_err(|e| {
        Error::Settings(format!("the identity {} can't be read: {e}", path.display()))
    })?;
    let identity = Arc::new(identity);
    let me = identity.subject().node;
    let store = match &settings.checkpoint {
        Some(url) => Some(crate::settings::open_store(url)?),
        None => None,
    };
    let found = match store.clone() {
        Some(store) => find_checkpoint(seeds, store).await?,
        None => None,
    };
    let config = credentials::endpoint_config(settings.recovery_target)?;
    let data = {
        let (identity, address) = (Arc::clone(&identity), SocketAddr::new(settings.listen, 0));
        let bound =
            seeds.background.spawn(async move { Endpoint::bind(address, identity, &config) }).await;
        bound.map_err(|_| Error::Internal("binding panicked"))?.map_err(|e| Error::Transport {
            context: "opening the data endpoint",
            reason: format!("{e}; set RIPSTOP_LISTEN to an address of this host"),
        })?
    };
    let address = Address { socket: data.local_addr(), certificate: identity.fingerprint() };
    let peers = {
        let _in_runtime = seeds.background.enter();
        peers::start(me, settings.job.clone(), data, settings.recovery_target, seeds.sender.clone())
    };
    let join = Join {
        spec: job_spec(settings),
        address,
        host: settings.host.clone(),
        fingerprint: fingerprint(settings, seeds.layout, chunks),
        allow_mixed: settings.allow_mixed,
        found,
    };
    let sender = seeds.sender.clone();
    let config = ControlConfig {
        coordinators: settings.coordinators.clone(),
        identity,
        recovery_target: settings.recovery_target,
        join: Some(join),
    };
    let control = control::start(config, move |event| drop(sender.send(Input::Control(event))))?;
    Ok(Connected { me, peers, control, store })
}

fn job_spec(settings: &Settings) -> JobSpec {
    JobSpec {
        job: settings.job.clone(),
        virtual_ranks: settings.virtual_ranks,
        min_members: settings.members.min,
        min_timeout: settings.min_timeout,
        expected_members: settings.members.expected,
        max_members: settings.members.max,
        total_steps: settings.total_steps,
        checkpoint_every: settings.checkpoint.as_ref().map(|_| settings.checkpoint_every),
        hang_timeout: settings.hang_timeout,
        pause_timeout: settings.pause_timeout,
        evens_out: settings.evens_out,
    }
}

/// What must be equal on all members for the bits to be equal.
fn fingerprint(settings: &Settings, layout: &Layout, chunks: &ChunkLayout) -> Fingerprint {
    let mut parts: BTreeMap<String, String> = settings.fingerprint.clone();
    parts.insert("virtual_ranks".into(), settings.virtual_ranks.to_string());
    parts.insert(
        "ripstop".into(),
        format!("{} protocol {PROTOCOL_VERSION}", env!("CARGO_PKG_VERSION")),
    );
    parts.insert("state".into(), layout.digest().to_string());
    parts.insert(
        "gradient".into(),
        format!("{} elements in {} chunks", chunks.elements(), chunks.chunks()),
    );
    parts.insert("probe".into(), probe().to_string());
    Fingerprint(parts)
}

/// The digest of a fixed sum: shows a machine whose arithmetic differs.
fn probe() -> Digest {
    let mut bytes = Vec::new();
    let mut value = 1.0_f32;
    for i in 1..=1000_u16 {
        value = (value * 1.000_1 + 1.0 / f32::from(i)).sqrt();
        bytes.extend(value.to_le_bytes());
    }
    Digest::of(&bytes)
}

async fn find_checkpoint(
    seeds: &Seeds<'_>,
    store: Store,
) -> Result<Option<FoundCheckpoint>, Error> {
    let job = seeds.settings.job.clone();
    let found = seeds.background.spawn(async move { storage::newest(&store, &job).await }).await;
    let found = found.map_err(|_| Error::Internal("looking for checkpoints panicked"))?;
    // An error from the store is never read as "there is none": that would start the job over.
    let found =
        found.map_err(|e| Error::Settings(format!("the checkpoint store can't be read: {e}")))?;
    Ok(found.map(|f| FoundCheckpoint {
        lineage: f.lineage,
        step: f.step,
        manifest: f.manifest.to_string(),
        hash: f.hash,
        digest: f.state,
    }))
}

/// Loads a committed checkpoint into the state; every segment is verified before its bytes are used.
pub(super) async fn load_checkpoint<S: State + ?Sized>(
    layout: &Arc<Layout>,
    store: &Store,
    (manifest, hash, virtual_ranks): (&str, Digest, VirtualRanks),
    state: &mut S,
) -> Result<(), LoadError> {
    let key: ObjectKey =
        manifest.parse().map_err(|e| LoadError::Damaged(format!("manifest {manifest}: {e}")))?;
    let manifest =
        storage::load(store, &key, hash).await.map_err(|e| LoadError::Damaged(e.to_string()))?;
    if manifest.layout().tensors() != layout.tensors() {
        return Err(LoadError::Incompatible(format!(
            "checkpoint {key} holds other tensors than this program: give the flags that it was trained with, or another --run-id"
        )));
    }
    let (theirs, ours) = (manifest.virtual_ranks(), virtual_ranks);
    if theirs != ours {
        return Err(LoadError::Incompatible(format!(
            "checkpoint {key} was trained with {theirs} virtual ranks, not {ours}: give --virtual-ranks {theirs}, or another --run-id"
        )));
    }
    for segment in manifest.layout().segments() {
        let bytes = storage::read_segment(store, &manifest, segment.index)
            .await
            .map_err(|e| LoadError::Damaged(e.to_string()))?;
        let sink = &mut |name: &str, offset: usize, bytes: &[u8]| state.load(name, offset, bytes);
        manifest
            .layout()
            .scatter(segment.index, &bytes, sink)
            .map_err(|e| LoadError::Damaged(e.to_string()))?;
    }
    state.set_extra(manifest.extra().clone()).map_err(LoadError::Incompatible)
}

/// Why a checkpoint can't be loaded.
#[derive(Debug)]
pub(super) enum LoadError {
    /// It is of another job than this program would train.
    Incompatible(String),
    /// It, or the way to it, is damaged.
    Damaged(String),
}

/// Small states are cut finer, so that every member has a share to write.
fn segment_bytes(specs: &[TensorSpec]) -> u64 {
    let total: usize = specs.iter().filter_map(TensorSpec::bytes).sum();
    let share = (total as u64 / SEGMENTS_WANTED).next_power_of_two();
    share.clamp(SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX)
}

fn world_of_one(me: NodeId, settings: &Settings) -> Arc<World> {
    let address =
        Address { socket: SocketAddr::new(settings.listen, 0), certificate: Digest::default() };
    let root: Block = settings.virtual_ranks.root();
    Arc::new(World {
        generation: Generation(1),
        lineage: Lineage(1),
        virtual_ranks: settings.virtual_ranks,
        from: None,
        held: false,
        start: Some(Start { step: Step(0), origin: Origin::Initial, digest: None }),
        members: vec![Member {
            node: me,
            address,
            host: settings.host.clone(),
            blocks: vec![root],
        }],
        followers: Vec::new(),
    })
}

const BACKGROUND_THREADS: usize = 2;
/// So many segments give 16 members two shares each; larger states get segments of at most 64 MiB.
const SEGMENTS_WANTED: u64 = 32;
const SEGMENT_BYTES_MIN: u64 = 64 << 10;
const SEGMENT_BYTES_MAX: u64 = 64 << 20;
