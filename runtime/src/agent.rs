//! The agent, `ripstop run`: one per host. It starts the workers, watches them, and tells the coordinators of a death at once.
//!
//! It joins the cluster by a token (or makes a cluster of its own with `standalone`), gets each worker a certificate, and ends with the
//! job's exit code. Workers end when it dies.

mod checks;
pub mod environment;
pub mod exit;
mod identities;
pub mod lines;
pub mod notices;
pub mod output;
pub mod signals;
pub mod spawn;
mod standing;
pub mod supervisor;
pub mod workers;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use membership::{Cause, ParticipantEvent, Standing, ToCoordinator};
use serde_json::json;
use tokio::sync::mpsc;
use transport::{CertificateAuthority, Identity};
use types::{JobId, NodeId, Timestamp, VirtualRanks};

use crate::client::Contact;
use crate::clock;
use crate::credentials;
use crate::drivers::control::{self, ControlConfig, ControlHandle};
use crate::drivers::coordinator::{CoordinatorConfig, CoordinatorHandle};
use crate::error::Error;
use crate::metrics::{AgentMetrics, Metrics};
use crate::settings::MemberBounds;
use crate::trace::Trace;

use environment::Placement;
use exit::{Exit, ExitCode, RequeueCode};
use identities::Identities;
use notices::{Notice, NoticeSetting};
use output::{Console, Output};
use signals::Signals;
use spawn::ProcessGroup;
use standing::StandingNotes;
use workers::{Command, Event, Workers};

/// What an agent is started with.
#[derive(Debug)]
pub struct AgentConfig {
    /// The job's name.
    pub job: JobId,
    /// The program and its arguments.
    pub program: OsString,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Workers on this host.
    pub workers: NonZeroU32,
    /// Hosts of the job, at most.
    pub hosts_max: u32,
    /// This host's place among them, a hint for the program.
    pub host_rank: u32,
    /// Members of the job.
    pub members: MemberBounds,
    /// The job's virtual ranks.
    pub virtual_ranks: VirtualRanks,
    /// Embeds a coordinator, and makes certificates.
    pub standalone: bool,
    /// Where the coordinators listen, unless standalone.
    pub coordinators: Vec<SocketAddr>,
    /// The join token, unless standalone.
    pub token: Option<String>,
    /// Where checkpoints go.
    pub checkpoint: Option<String>,
    /// How often.
    pub checkpoint_every: Duration,
    /// The one knob of time.
    pub recovery_target: Duration,
    /// How long coordinators may be silent where they are needed.
    pub coordinator_timeout: Duration,
    /// How long the job waits below its minimum of members; `None`: however long.
    pub min_timeout: Option<Duration>,
    /// The least time in one leaf, while others wait, that counts as a hang; `None`: from the recovery target.
    pub hang_timeout: Option<Duration>,
    /// The longest time outside of leaves while others wait; `None`: from the recovery target.
    pub pause_timeout: Option<Duration>,
    /// The address of this host that others reach it at.
    pub listen: IpAddr,
    /// Its name.
    pub host: String,
    /// Whether members of other numeric fingerprints are admitted.
    pub allow_mixed: bool,
    /// Whether blocks follow the measured leaf times of unequal members.
    pub evens_out: bool,
    /// How often each worker is started again.
    pub max_restarts: u32,
    /// How long workers may take to leave.
    pub grace: Duration,
    /// The exit code of leaving in good order.
    pub requeue: RequeueCode,
    /// What becomes of the workers' output.
    pub output: output::Config,
    /// Where HTTP listens, if at all.
    pub http: Option<SocketAddr>,
    /// Who knows when this host goes away.
    pub notices: Vec<NoticeSetting>,
    /// A folder for traces (one file a process).
    pub trace_dir: Option<PathBuf>,
}

/// The most workers of one agent: beyond, it is a slip of the hand.
pub const WORKERS_MAX: NonZeroU32 = NonZeroU32::new(1024).unwrap();

/// Runs the agent to its end.
///
/// # Errors
/// If it can't join: the token is refused, no coordinator answers, or a setting can't work.
pub fn run(config: AgentConfig) -> Result<ExitCode, Error> {
    checks::check(&config)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("ripstop-agent")
        .enable_all()
        .build()
        .map_err(|e| Error::Transport { context: "starting the agent", reason: e.to_string() })?;
    let folder = RunFolder::create(&config.job)?;
    let cluster = if config.standalone { Some(Embedded::start(&config)?) } else { None };
    let (coordinators, token) = match &cluster {
        Some(cluster) => (vec![cluster.coordinator.address()], cluster.token.clone()),
        None => (config.coordinators.clone(), config.token.clone().ok_or_else(no_token)?),
    };
    let code = runtime.block_on(async {
        let context = "listening to signals";
        let mut signals =
            Signals::listen().map_err(|e| Error::Transport { context, reason: e.to_string() })?;
        let identity = tokio::select! {
            identity = credentials::enrol(&token, &coordinators, config.coordinator_timeout) => identity?,
            // Nothing was started yet, so there is nothing to leave behind.
            signal = signals.next() => {
                tracing::info!(%signal, "leaving before joining");
                return Ok(ExitCode::of(Exit::Code(i32::from(ExitCode::REQUEUE)), config.requeue));
            }
        };
        if let Some(cluster) = &cluster {
            cluster.leave_contact(&folder)?;
        }
        Agent::start(config, coordinators, identity, &folder)?.run(signals).await
    });
    runtime.shutdown_timeout(Duration::from_millis(500));
    if let Some(cluster) = cluster {
        cluster.coordinator.stop()?;
    }
    code
}

fn no_token() -> Error {
    Error::Usage(
        "joining needs --token: make one by `ripstop certs token --dir DIR`, or use --standalone"
            .to_owned(),
    )
}

/// A coordinator inside of the agent, with an authority of its own.
struct Embedded {
    coordinator: CoordinatorHandle,
    operator: Identity,
    token: String,
    _data: tempfile_dir::TempDir,
}

impl Embedded {
    fn start(config: &AgentConfig) -> Result<Self, Error> {
        let reason = |e: transport::CertificateError| Error::Settings(e.to_string());
        let authority = CertificateAuthority::create().map_err(reason)?;
        let data = tempfile_dir::TempDir::create("coordinator")?;
        let listen = SocketAddr::new(config.listen, free_port(config.listen)?);
        let claims = transport::TokenClaims {
            id: transport::TokenId::random(),
            uses: 1,
            job: Some(config.job.clone()),
            role: transport::Role::Agent,
            valid_until_unix: None,
        };
        let token = authority.token(claims).secret_text().to_owned();
        let subject =
            transport::Subject { role: transport::Role::Operator, job: None, node: NodeId(0) };
        let operator = authority.identity(&subject, OPERATOR_CERTIFICATE).map_err(reason)?;
        let coordinator = CoordinatorHandle::start(CoordinatorConfig {
            id: 1,
            voters: BTreeMap::from([(1, listen)]),
            listen,
            data_dir: data.path().to_path_buf(),
            authority,
            recovery_target: config.recovery_target,
            http: None,
            http_token: None,
            trace: config.trace_dir.as_ref().map(|dir| dir.join("coordinator-1.ndjson")),
        })?;
        Ok(Self { coordinator, operator, token, _data: data })
    }

    /// Leaves word of where this cluster is, so that `ripstop status` on this host finds it.
    fn leave_contact(&self, folder: &RunFolder) -> Result<(), Error> {
        let identity = folder.path().join("operator.identity");
        self.operator.save(&identity).map_err(|e| Error::Settings(e.to_string()))?;
        Contact { coordinators: vec![self.coordinator.address()], identity }.save(folder.path())
    }
}

fn free_port(ip: IpAddr) -> Result<u16, Error> {
    let bound =
        std::net::UdpSocket::bind(SocketAddr::new(ip, 0)).and_then(|socket| socket.local_addr());
    bound
        .map(|address| address.port())
        .map_err(|e| Error::Settings(format!("--listen {ip} is no address of this host: {e}")))
}

struct Agent {
    config: AgentConfig,
    control: ControlHandle,
    events: mpsc::UnboundedReceiver<ParticipantEvent>,
    identities: Identities,
    environment: BTreeMap<String, String>,
    metrics: AgentMetrics,
    trace: Trace,
    ready: Arc<AtomicBool>,
    unacknowledged: BTreeSet<u64>,
    /// Workers that run here.
    running: BTreeSet<NodeId>,
    /// The question about the job that waits for its answer.
    asked: Option<u64>,
    standing: StandingNotes,
    /// The coordinators answered that there is no job of this name: its program never joined it.
    is_jobless: bool,
    /// A worker ended with 0.
    has_done: bool,
    /// Those that ended with 0 while nobody knows whether the job is finished.
    early: Vec<NodeId>,
    /// Those that are out by a verdict, and since when we know.
    evicted: BTreeMap<NodeId, Timestamp>,
}

impl Agent {
    fn start(
        config: AgentConfig,
        coordinators: Vec<SocketAddr>,
        identity: Arc<Identity>,
        folder: &RunFolder,
    ) -> Result<Self, Error> {
        let me = identity.subject().node;
        let (sender, events) = mpsc::unbounded_channel();
        let control = control::start(
            ControlConfig {
                coordinators: coordinators.clone(),
                identity: Arc::clone(&identity),
                recovery_target: config.recovery_target,
                join: None,
            },
            move |event| drop(sender.send(event)),
        )?;
        let trace = match &config.trace_dir {
            Some(dir) => Trace::open(&dir.join(format!("agent-{me}.ndjson")), me)
                .map_err(|e| Error::Settings(format!("--trace-dir {}: {e}", dir.display())))?,
            None => Trace::default(),
        };
        let metrics = Metrics::default();
        let counters = AgentMetrics::new(&metrics);
        let ready = Arc::new(AtomicBool::new(true));
        if let Some(at) = config.http {
            tokio::spawn(serve_http(at, metrics, Arc::clone(&ready)));
        }
        let environment = worker_environment(&config, &coordinators);
        let identities = Identities::new(
            control.clone(),
            config.job.clone(),
            identity.authority().clone(),
            folder.path(),
            (config.http, config.coordinator_timeout),
        );
        let unacknowledged = BTreeSet::new();
        Ok(Self {
            config,
            control,
            events,
            identities,
            environment,
            metrics: counters,
            trace,
            ready,
            unacknowledged,
            running: BTreeSet::new(),
            asked: None,
            standing: StandingNotes::default(),
            is_jobless: false,
            has_done: false,
            early: Vec::new(),
            evicted: BTreeMap::new(),
        })
    }

    async fn run(mut self, mut signals: Signals) -> Result<ExitCode, Error> {
        let context = "starting the workers";
        let output = Output::start(self.config.output.clone(), Console::own())
            .map_err(|e| Error::Transport { context, reason: e.to_string() })?;
        let (event_sender, mut worker_events) = mpsc::unbounded_channel();
        let (commands, received) = mpsc::channel(16);
        let workers =
            Workers::new(self.workers_config(), output, self.identities.clone(), event_sender)
                .map_err(|e| Error::Transport { context, reason: e.to_string() })?;
        let mut running = tokio::spawn(workers.run(received));
        let mut ask = tokio::time::interval(self.config.recovery_target.clamp(ASK_MIN, ASK_MAX));
        ask.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut notices = notices::watch(&self.config.notices);
        let mut is_released = false;
        let verdict = loop {
            if self.has_done && self.standing.is_finished() && !is_released {
                is_released = true;
                drop(commands.send(Command::Released(supervisor::Release::Finished)).await);
            }
            tokio::select! {
                biased;
                Some(event) = worker_events.recv() => self.note(&event).await,
                event = self.events.recv() => match event {
                    Some(event) => self.hear(event),
                    None => return Err(Error::Internal("the control thread ended")),
                },
                signal = signals.next() => drop(commands.send(Command::Signal(signal)).await),
                Some(notice) = notices.recv() => self.pass_on(notice, &commands).await,
                _ = ask.tick() => {
                    self.ask_job().await;
                    for node in self.overdue() {
                        drop(commands.send(Command::Kill { node }).await);
                    }
                }
                verdict = &mut running => break verdict.map_err(|_| Error::Internal("the supervisor panicked"))?,
            }
        };
        while let Ok(event) = worker_events.try_recv() {
            self.note(&event).await;
        }
        self.wait_for_acknowledgements().await;
        if verdict.has_done {
            self.learn_result().await;
        }
        let is_finished = self.standing.is_finished();
        let code = if is_finished { verdict.if_finished } else { verdict.otherwise };
        tracing::info!(%code, "all workers ended");
        self.ready.store(false, Ordering::Relaxed);
        self.control.close().await;
        Ok(code)
    }

    /// A notice makes the workers leave; what may happen some time is only told.
    async fn pass_on(&self, notice: Notice, commands: &mpsc::Sender<Command>) {
        let Notice { source, detail, time_left } = notice;
        self.metrics.notices.with_label_values(&[source]).inc();
        match time_left {
            Some(time_left) => {
                tracing::warn!(source, detail, ?time_left, "notice: this host goes away");
                let time_left = time_left.max(NOTICE_MIN);
                drop(commands.send(Command::Notice { time_left }).await);
            }
            None => {
                tracing::warn!(source, detail, "this host may go away soon: start another in time");
            }
        }
    }

    fn workers_config(&self) -> workers::Config {
        let config = &self.config;
        let supervisor = supervisor::Config::new(config.workers)
            .with_max_restarts(config.max_restarts)
            .with_grace(config.grace)
            .with_requeue(config.requeue);
        workers::Config {
            supervisor,
            program: config.program.clone(),
            arguments: config.arguments.clone(),
            directory: None,
            group: ProcessGroup::Own,
            placement: Placement {
                local_rank: 0,
                local_world_size: config.workers.get(),
                group_rank: config.host_rank,
                group_world_size: config.hosts_max,
                role: "default".to_owned(),
                master_address: config.listen.to_string(),
                master_port: 29500,
                run: config.job.to_string(),
                restarts: 0,
                max_restarts: config.max_restarts,
                error_file: None,
            },
            environment: self.environment.clone(),
            inherited: std::env::vars_os()
                .filter_map(|(name, _)| name.into_string().ok())
                .collect(),
        }
    }

    /// Tells the coordinators what became of a worker.
    async fn note(&mut self, event: &Event) {
        match event {
            Event::Started { slot, attempt, node, pid } => {
                self.metrics.workers.inc();
                self.running.insert(*node);
                if *attempt > 0 {
                    self.metrics.restarts.inc();
                }
                self.trace.event(
                    "started",
                    json!({"slot": slot.0, "worker": node, "pid": pid, "attempt": attempt}),
                );
            }
            // Said by who tried it.
            Event::StartFailed { .. } => {}
            Event::Draining { slot, node } => {
                tracing::info!(slot = slot.0, %node, "worker asked to leave");
            }
            Event::Exited { slot, node, exit, noticed_at } => {
                self.metrics.workers.dec();
                self.running.remove(node);
                self.evicted.remove(node);
                let cause = match exit {
                    Exit::Code(code) => Cause::Exited { code: *code },
                    Exit::Signal(signal) => Cause::Signalled { signal: *signal },
                };
                self.trace.event(
                    "exited",
                    json!({"slot": slot.0, "worker": node, "cause": cause.to_string(), "noticed_ns": noticed_at}),
                );
                let is_orderly = matches!(exit, Exit::Code(code) if *code == 0 || *code == i32::from(ExitCode::REQUEUE));
                if !is_orderly {
                    self.metrics.deaths.inc();
                }
                if *exit == Exit::Code(0) {
                    self.has_done = true;
                    self.early.push(*node);
                    // What is asked from here on is answered after the job's end, if that was it.
                    self.asked = None;
                    self.ask_job().await;
                }
                let lost = ToCoordinator::Lost { node: *node, cause, sequence: 0 };
                self.unacknowledged.extend(self.control.ask(lost).await);
            }
        }
    }

    /// Asks how the job is doing, and whether workers that run here were taken out of it without knowing it (stopped, or stuck).
    async fn ask_job(&mut self) {
        if self.asked.is_none() {
            let (job, nodes) = (self.config.job.clone(), self.running.iter().copied().collect());
            let question = ToCoordinator::AskJob { job, nodes, sequence: 0 };
            self.asked = self.control.ask(question).await;
        }
    }

    /// Workers that were taken out of the job and had their time to end by themselves.
    fn overdue(&mut self) -> Vec<NodeId> {
        let (now, grace) = (clock::now(), self.config.recovery_target * 5);
        let is_due = |since: &Timestamp| now.since(*since) >= grace.max(EVICTED_GRACE_MIN);
        let due: Vec<NodeId> =
            self.evicted.iter().filter(|(_, since)| is_due(since)).map(|(n, _)| *n).collect();
        for node in &due {
            self.evicted.remove(node);
            tracing::warn!(%node, "this worker was taken out of the job and does not end: it is killed");
        }
        due
    }

    fn hear(&mut self, event: ParticipantEvent) {
        match event {
            ParticipantEvent::JobNews { sequence, evicted, standing }
                if self.asked == Some(sequence) =>
            {
                self.asked = None;
                self.is_jobless = standing.is_none();
                let goes_on =
                    matches!(standing, Some(Standing::Running | Standing::Waiting { .. }));
                for node in std::mem::take(&mut self.early) {
                    if goes_on {
                        tracing::warn!(%node, "this worker ended with 0, but the job goes on; it is not started again");
                    }
                }
                match self.standing.hear(clock::now(), standing) {
                    Some(note) if note.is_warning => tracing::warn!("{}", note.text),
                    Some(note) => tracing::info!("{}", note.text),
                    None => {}
                }
                for (node, cause) in evicted {
                    if self.running.contains(&node) && !self.evicted.contains_key(&node) {
                        tracing::warn!(%node, %cause, "this worker was taken out of the job");
                        self.evicted.insert(node, clock::now());
                    }
                }
            }
            ParticipantEvent::Noted { sequence } => drop(self.unacknowledged.remove(&sequence)),
            ParticipantEvent::Enrolled { sequence, node, certificate } => {
                self.identities.handle_enrolled(sequence, node, certificate);
            }
            ParticipantEvent::Refused { code, reason } => {
                tracing::error!(code, %reason, "refused by the coordinators");
                self.identities.handle_refused(code, &reason);
            }
            ParticipantEvent::Unreachable { .. } => {
                self.ready.store(false, Ordering::Relaxed);
                tracing::warn!("no coordinator answers; training goes on, and the search too");
            }
            ParticipantEvent::Reachable => {
                self.ready.store(true, Ordering::Relaxed);
                tracing::info!("a coordinator answers again");
            }
            _ => {}
        }
    }

    /// The worker that would have printed the result may have died over it: the agent says it too.
    async fn learn_result(&mut self) {
        let heard = async {
            self.is_jobless = false;
            while !self.standing.is_finished() && !self.is_jobless {
                self.ask_job().await;
                match self.events.recv().await {
                    Some(event) => self.hear(event),
                    None => return,
                }
            }
        };
        if tokio::time::timeout(LAST_WORDS_DEADLINE, heard).await.is_err() {
            tracing::warn!(
                "no coordinator said what the job's result is: `ripstop events` shows it"
            );
        }
    }

    /// What died last must be known before nobody is left to tell it.
    async fn wait_for_acknowledgements(&mut self) {
        let all = async {
            while !self.unacknowledged.is_empty() {
                match self.events.recv().await {
                    Some(event) => self.hear(event),
                    None => return,
                }
            }
        };
        let _ = tokio::time::timeout(LAST_WORDS_DEADLINE, all).await;
    }
}

async fn serve_http(at: SocketAddr, metrics: Metrics, ready: Arc<AtomicBool>) {
    if let Err(error) = crate::http::serve(at, metrics, ready, None).await {
        tracing::error!(%error, "http can't be served");
    }
}

fn worker_environment(
    config: &AgentConfig,
    coordinators: &[SocketAddr],
) -> BTreeMap<String, String> {
    let list: Vec<String> = coordinators.iter().map(ToString::to_string).collect();
    let millis = |duration: Duration| format!("{}ms", duration.as_millis());
    let mut variables = BTreeMap::from([
        ("RIPSTOP_RUN_ID".to_owned(), config.job.to_string()),
        ("RIPSTOP_COORDINATORS".to_owned(), list.join(",")),
        ("RIPSTOP_VIRTUAL_RANKS".to_owned(), config.virtual_ranks.to_string()),
        ("RIPSTOP_MIN_MEMBERS".to_owned(), config.members.min.to_string()),
        ("RIPSTOP_EXPECTED_MEMBERS".to_owned(), config.members.expected.to_string()),
        ("RIPSTOP_MAX_MEMBERS".to_owned(), config.members.max.to_string()),
        ("RIPSTOP_CHECKPOINT_EVERY".to_owned(), millis(config.checkpoint_every)),
        ("RIPSTOP_RECOVERY_TARGET".to_owned(), millis(config.recovery_target)),
        ("RIPSTOP_COORDINATOR_TIMEOUT".to_owned(), millis(config.coordinator_timeout)),
        ("RIPSTOP_LISTEN".to_owned(), config.listen.to_string()),
        ("RIPSTOP_HOST".to_owned(), config.host.clone()),
    ]);
    let timeouts = [
        ("RIPSTOP_MIN_TIMEOUT", config.min_timeout),
        ("RIPSTOP_HANG_TIMEOUT", config.hang_timeout),
        ("RIPSTOP_PAUSE_TIMEOUT", config.pause_timeout),
    ];
    for (name, timeout) in timeouts {
        variables.extend(timeout.map(|timeout| (name.to_owned(), millis(timeout))));
    }
    if let Some(url) = &config.checkpoint {
        variables.insert("RIPSTOP_CHECKPOINT".to_owned(), url.clone());
    }
    if config.allow_mixed {
        variables.insert("RIPSTOP_ALLOW_MIXED".to_owned(), "1".to_owned());
    }
    if !config.evens_out {
        variables.insert("RIPSTOP_NO_EVEN".to_owned(), "1".to_owned());
    }
    if let Some(dir) = &config.trace_dir {
        variables.insert("RIPSTOP_TRACE_DIR".to_owned(), dir.display().to_string());
    }
    variables
}

/// The folder of one agent's secrets and of the word that it leaves for `ripstop status`.
#[derive(Debug)]
pub(crate) struct RunFolder(tempfile_dir::TempDir);

impl RunFolder {
    fn create(job: &JobId) -> Result<Self, Error> {
        tempfile_dir::TempDir::create(&format!("run-{job}")).map(Self)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

/// Folders that only this user can read, gone when they are dropped.
pub(crate) mod tempfile_dir {
    use std::os::unix::fs::DirBuilderExt;
    use std::path::{Path, PathBuf};

    use crate::error::Error;

    /// A folder with mode 0700 under [`root`].
    #[derive(Debug)]
    pub(crate) struct TempDir(PathBuf);

    /// Where this user's agents keep their folders.
    pub(crate) fn root() -> PathBuf {
        let uid = rustix::process::getuid().as_raw();
        std::env::temp_dir().join(format!("ripstop-{uid}"))
    }

    impl TempDir {
        pub(crate) fn create(name: &str) -> Result<Self, Error> {
            let path = root().join(format!("{name}-{}", std::process::id()));
            let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&path);
            made.map_err(|e| {
                Error::Settings(format!("{} can't be made: {e}; set TMPDIR", path.display()))
            })?;
            Ok(Self(path))
        }

        pub(crate) fn path(&self) -> &Path {
            &self.0
        }
    }

    impl Drop for TempDir {
        fn drop(&mut self) {
            if let Err(error) = std::fs::remove_dir_all(&self.0) {
                tracing::debug!(folder = %self.0.display(), %error, "a folder stays");
            }
        }
    }
}

const OPERATOR_CERTIFICATE: Duration = Duration::from_secs(30 * 24 * 3600);
/// How often the coordinators are asked at most.
const ASK_MIN: Duration = Duration::from_secs(1);
/// The longest pause between them.
const ASK_MAX: Duration = Duration::from_secs(5);
/// However late a notice comes: leaving in good order takes less, and dying takes nothing.
const NOTICE_MIN: Duration = Duration::from_secs(2);
/// How long an evicted worker has at least, to hear of it and to end.
const EVICTED_GRACE_MIN: Duration = Duration::from_secs(5);
const LAST_WORDS_DEADLINE: Duration = Duration::from_secs(2);
