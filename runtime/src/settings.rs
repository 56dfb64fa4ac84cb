//! [`Settings`]: the only place where the environment is read. Flags over environment over defaults.
//!
//! Workers under `ripstop run` find everything in `RIPSTOP_*` variables; a program adds what only it knows (how many steps, which data).

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use membership::Timing;
use storage::{Store, StoreOptions};
use types::{JobId, Step, VirtualRanks};

use crate::error::Error;

/// What a session needs to know.
#[derive(Clone, Debug)]
pub struct Settings {
    pub(crate) job: JobId,
    /// Empty: this process trains alone, without coordinators.
    pub(crate) coordinators: Vec<SocketAddr>,
    pub(crate) identity: Option<PathBuf>,
    pub(crate) virtual_ranks: VirtualRanks,
    pub(crate) members: MemberBounds,
    pub(crate) total_steps: Option<Step>,
    pub(crate) checkpoint: Option<String>,
    pub(crate) checkpoint_every: Duration,
    pub(crate) recovery_target: Duration,
    pub(crate) coordinator_timeout: Duration,
    pub(crate) min_timeout: Option<Duration>,
    pub(crate) hang_timeout: Option<Duration>,
    pub(crate) pause_timeout: Option<Duration>,
    pub(crate) listen: IpAddr,
    pub(crate) host: String,
    pub(crate) allow_mixed: bool,
    pub(crate) evens_out: bool,
    pub(crate) trace_dir: Option<PathBuf>,
    pub(crate) http: Option<SocketAddr>,
    pub(crate) fingerprint: BTreeMap<String, String>,
    pub(crate) chunk_bytes: usize,
    pub(crate) handles_signals: bool,
}

/// How many members a job has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemberBounds {
    /// With fewer the job waits, its state in memory.
    pub min: u32,
    /// When so many have joined, the first world forms without waiting for more.
    pub expected: u32,
    /// More are hot spares.
    pub max: u32,
}

/// Default number of virtual ranks.
pub const VIRTUAL_RANKS_DEFAULT: u32 = 8;
/// Default recovery target, the one knob of time.
pub const RECOVERY_TARGET_DEFAULT: Duration = Duration::from_secs(1);
/// Default time between checkpoints.
pub const CHECKPOINT_EVERY_DEFAULT: Duration = Duration::from_secs(30);
/// Least time between checkpoints: each commit is an entry in the coordinators' log.
pub const CHECKPOINT_EVERY_MIN: Duration = Duration::from_millis(100);
/// Default wait for coordinators, before joining and when a change of members needs one.
pub const COORDINATOR_TIMEOUT_DEFAULT: Duration = Duration::from_secs(60);
/// Default size of a chunk of the gradient: large enough to amortise a frame, small enough to spread owners.
pub const CHUNK_BYTES_DEFAULT: usize = 256 << 10;

impl Settings {
    /// Settings of a job that trains alone in this process.
    ///
    /// # Errors
    /// If the job's name is not allowed.
    pub fn alone(job: &str) -> Result<Self, Error> {
        let virtual_ranks = VirtualRanks::new(VIRTUAL_RANKS_DEFAULT)
            .ok_or(Error::Internal("default virtual ranks"))?;
        Ok(Self {
            job: JobId::new(job).map_err(Error::Settings)?,
            coordinators: Vec::new(),
            identity: None,
            virtual_ranks,
            members: MemberBounds { min: 1, expected: 1, max: 1 },
            total_steps: None,
            checkpoint: None,
            checkpoint_every: CHECKPOINT_EVERY_DEFAULT,
            recovery_target: RECOVERY_TARGET_DEFAULT,
            coordinator_timeout: COORDINATOR_TIMEOUT_DEFAULT,
            min_timeout: None,
            hang_timeout: None,
            pause_timeout: None,
            listen: IpAddr::V4(Ipv4Addr::LOCALHOST),
            host: host_name(),
            allow_mixed: false,
            evens_out: true,
            trace_dir: None,
            http: None,
            fingerprint: BTreeMap::new(),
            chunk_bytes: CHUNK_BYTES_DEFAULT,
            handles_signals: true,
        })
    }

    /// Settings from `RIPSTOP_*`, as `ripstop run` sets them; alone if there are none.
    ///
    /// # Errors
    /// If a variable can't be understood: it names the variable, its value and what is allowed.
    pub fn from_env() -> Result<Self, Error> {
        Self::from_variables(&|name| std::env::var(name).ok())
    }

    pub(crate) fn from_variables(read: &dyn Fn(&str) -> Option<String>) -> Result<Self, Error> {
        let value = |name: &str| read(name).filter(|v| !v.is_empty());
        let mut settings = Self::alone(value("RIPSTOP_RUN_ID").as_deref().unwrap_or("default"))?;
        if let Some(list) = value("RIPSTOP_COORDINATORS") {
            settings.coordinators = parse_addresses(&list)?;
        }
        settings.identity = value("RIPSTOP_IDENTITY").map(PathBuf::from);
        if let Some(count) = number(&value, "RIPSTOP_VIRTUAL_RANKS")? {
            settings = settings.virtual_ranks(count)?;
        }
        let bounds = &mut settings.members;
        bounds.min = number(&value, "RIPSTOP_MIN_MEMBERS")?.unwrap_or(bounds.min);
        bounds.expected =
            number(&value, "RIPSTOP_EXPECTED_MEMBERS")?.unwrap_or(bounds.expected.max(bounds.min));
        bounds.max =
            number(&value, "RIPSTOP_MAX_MEMBERS")?.unwrap_or(bounds.max.max(bounds.expected));
        settings.checkpoint = value("RIPSTOP_CHECKPOINT");
        let durations: [(&str, &mut Duration); 3] = [
            ("RIPSTOP_CHECKPOINT_EVERY", &mut settings.checkpoint_every),
            ("RIPSTOP_RECOVERY_TARGET", &mut settings.recovery_target),
            ("RIPSTOP_COORDINATOR_TIMEOUT", &mut settings.coordinator_timeout),
        ];
        for (name, duration) in durations {
            if let Some(text) = value(name) {
                *duration =
                    parse_duration(&text).map_err(|e| Error::Settings(format!("{name}: {e}")))?;
            }
        }
        let timeouts: [(&str, &mut Option<Duration>); 3] = [
            ("RIPSTOP_MIN_TIMEOUT", &mut settings.min_timeout),
            ("RIPSTOP_HANG_TIMEOUT", &mut settings.hang_timeout),
            ("RIPSTOP_PAUSE_TIMEOUT", &mut settings.pause_timeout),
        ];
        for (name, timeout) in timeouts {
            if let Some(text) = value(name) {
                let duration =
                    parse_duration(&text).map_err(|e| Error::Settings(format!("{name}: {e}")))?;
                *timeout = Some(duration);
            }
        }
        if let Some(ip) = value("RIPSTOP_LISTEN") {
            settings.listen = ip
                .parse()
                .map_err(|_| Error::Settings(format!("RIPSTOP_LISTEN={ip} is no IP address")))?;
        }
        settings.host = value("RIPSTOP_HOST").unwrap_or(settings.host);
        settings.allow_mixed =
            value("RIPSTOP_ALLOW_MIXED").is_some_and(|v| v == "1" || v == "true");
        settings.evens_out = value("RIPSTOP_NO_EVEN").is_none_or(|v| v != "1" && v != "true");
        settings.trace_dir = value("RIPSTOP_TRACE_DIR").map(PathBuf::from);
        if let Some(at) = value("RIPSTOP_HTTP") {
            let at = at
                .parse()
                .map_err(|_| Error::Settings(format!("RIPSTOP_HTTP={at} is no IP:PORT")))?;
            settings.http = Some(at);
        }
        if let Some(bytes) = number(&value, "RIPSTOP_CHUNK_BYTES")? {
            settings.chunk_bytes = bytes as usize;
        }
        settings.checked()
    }

    /// Sets the number of virtual ranks, `V`: what training means. It can't change during a job.
    ///
    /// # Errors
    /// If it is not 1 to 65,536.
    pub fn virtual_ranks(mut self, count: u32) -> Result<Self, Error> {
        self.virtual_ranks = VirtualRanks::try_from(count).map_err(Error::Settings)?;
        Ok(self)
    }

    /// Sets after how many steps training is complete.
    #[must_use]
    pub fn total_steps(mut self, steps: u64) -> Self {
        self.total_steps = Some(Step(steps));
        self
    }

    /// Adds a part to the numeric fingerprint: whatever must be equal on all members for the bits to be equal (seed, digest of the
    /// data, a probe). Members that differ are refused, and told in which part.
    #[must_use]
    pub fn fingerprint(mut self, part: &str, value: impl ToString) -> Self {
        self.fingerprint.insert(part.to_owned(), value.to_string());
        self
    }

    /// Leaves TERM, USR1 and USR2 to the program; by default the session takes them as the wish to leave in good order.
    #[must_use]
    pub fn without_signals(mut self) -> Self {
        self.handles_signals = false;
        self
    }

    /// Whether this process trains alone, without coordinators.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        self.coordinators.is_empty()
    }

    /// The job's number of virtual ranks.
    #[must_use]
    pub fn virtual_rank_count(&self) -> VirtualRanks {
        self.virtual_ranks
    }

    fn checked(self) -> Result<Self, Error> {
        let MemberBounds { min, expected, max } = self.members;
        let v = self.virtual_ranks.count();
        let wrong = |text: String| Err(Error::Settings(text));
        if min == 0 || min > expected || expected > max {
            return wrong(format!(
                "members must nest as 1 <= min <= expected <= max, not {min}, {expected}, {max}"
            ));
        }
        if min > v {
            return wrong(format!(
                "{min} members need at least {min} virtual ranks, but there are {v}: raise --virtual-ranks"
            ));
        }
        if !(Timing::TARGET_MIN..=Timing::TARGET_MAX).contains(&self.recovery_target) {
            return wrong(format!(
                "recovery_target is {:?}; allowed are {:?} to {:?}",
                self.recovery_target,
                Timing::TARGET_MIN,
                Timing::TARGET_MAX
            ));
        }
        if self.checkpoint_every < CHECKPOINT_EVERY_MIN {
            return wrong(format!(
                "checkpoint_every is {:?}; allowed are {CHECKPOINT_EVERY_MIN:?} and more",
                self.checkpoint_every
            ));
        }
        if !(1024..=32 << 20).contains(&self.chunk_bytes) {
            return wrong(format!(
                "chunk_bytes is {}; allowed are 1024 to 33554432",
                self.chunk_bytes
            ));
        }
        if !self.coordinators.is_empty() && self.identity.is_none() {
            return wrong(
                "RIPSTOP_COORDINATORS is set but RIPSTOP_IDENTITY is not: start the program by `ripstop run`".to_owned(),
            );
        }
        Ok(self)
    }
}

/// A time that follows from the recovery target.
#[derive(Clone, Copy, Debug)]
pub struct Derived {
    /// Its name.
    pub name: &'static str,
    /// How long it is.
    pub time: Duration,
    /// What it is for.
    pub meaning: &'static str,
}

/// Every time that follows from the recovery target.
///
/// # Errors
/// If the target is out of bounds.
pub fn derived(recovery_target: Duration) -> Result<Vec<Derived>, String> {
    let timing = Timing::new(recovery_target).map_err(|e| e.to_string())?;
    let row = |name, time, meaning| Derived { name, time, meaning };
    Ok(vec![
        row("recovery_target", timing.target(), "a loss is overcome within this"),
        row("heartbeat", timing.heartbeat(), "between two heartbeats of a worker"),
        row("suspicion", timing.suspicion(), "silence after which a worker is lost"),
        row("loss_window", Timing::LOSS_WINDOW, "losses closer together make one new world"),
        row(
            "stall",
            timing.stall(),
            "a pause of a coordinator's own after which silence proves nothing",
        ),
        row("grace", timing.grace(), "what a worker gets to find a new leader"),
        row(
            "leader_silence",
            timing.leader_silence(),
            "silence after which a worker tries another coordinator",
        ),
        row("raft_tick", timing.tick(), "Raft's tick"),
        row(
            "raft_heartbeat",
            timing.tick() * HEARTBEAT_TICKS,
            "between two heartbeats of the leader",
        ),
        row(
            "raft_election",
            timing.tick() * ELECTION_TICKS,
            "the shortest silence of a leader before an election",
        ),
        row("dial", timing.dial(), "one try to connect"),
        row(
            "backoff_min",
            timing.backoff_min(),
            "the first pause after all coordinators were tried in vain",
        ),
        row("backoff_max", timing.backoff_max(), "the longest of these pauses"),
        row("resend", timing.resend(), "before an unanswered request is sent again"),
        row(
            "quiet",
            timing.quiet(),
            "without a new joiner, before the minimum of members forms a first world",
        ),
        row("gather", timing.gather(), "without a new joiner, before those that came are listed"),
        row(
            "successor",
            timing.successor(),
            "a drain of all members waits so long for a joiner to take over",
        ),
        row(
            "hang_timeout",
            timing.hang(),
            "the least time in one leaf that counts as a hang, while others wait",
        ),
        row(
            "pause_timeout",
            timing.pause(),
            "the longest time outside of leaves, while others wait",
        ),
    ])
}

const HEARTBEAT_TICKS: u32 = Timing::HEARTBEAT_TICKS as u32;
const ELECTION_TICKS: u32 = Timing::ELECTION_TICKS as u32;

/// Opens the checkpoint store of a URL, with the credentials of the environment (`AWS_*`).
///
/// # Errors
/// If the URL is not understood, or its place can't be used.
pub fn open_store(url: &str) -> Result<Store, Error> {
    store(url).map_err(|e| Error::Settings(format!("--checkpoint {url}: {e}")))
}

/// The store of a URL.
pub(crate) fn store(url: &str) -> Result<Store, storage::StorageError> {
    let variables = std::env::vars().filter(|(name, _)| name.starts_with("AWS_"));
    let options = StoreOptions { settings: variables.collect(), ..StoreOptions::default() };
    Store::open(url, &options)
}

/// The name of this host.
#[must_use]
pub fn host_name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if name.is_empty() { "localhost".to_owned() } else { name }
}

/// Reads `"5s"`, `"500ms"`, `"2m"`, `"1h"`.
///
/// # Errors
/// What is allowed, if the text is something else.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let unit_at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let factor = match unit {
        "ms" => 0.001,
        "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => {
            return Err(format!(
                "{text:?} is no duration: write a number and a unit, as 500ms, 5s, 2m or 1h"
            ));
        }
    };
    let number: f64 =
        number.parse().map_err(|_| format!("{text:?} is no duration: {number:?} is no number"))?;
    Duration::try_from_secs_f64(number * factor)
        .map_err(|e| format!("{text:?} is no duration: {e}"))
}

/// Reads a comma-separated list of `host:port`.
///
/// # Errors
/// If one of them is no address, or its name is unknown.
pub fn parse_addresses(list: &str) -> Result<Vec<SocketAddr>, Error> {
    use std::net::ToSocketAddrs;
    let mut addresses = Vec::new();
    for item in list.split(',').map(str::trim).filter(|item| !item.is_empty()) {
        let mut found = item.to_socket_addrs().map_err(|e| {
            Error::Settings(format!(
                "coordinator address {item:?}: {e}; write host:port, as 10.0.0.5:29700"
            ))
        })?;
        addresses.extend(found.next());
    }
    if addresses.is_empty() {
        return Err(Error::Settings(format!(
            "no coordinator address in {list:?}; write host:port, comma-separated"
        )));
    }
    Ok(addresses)
}

fn number(value: &dyn Fn(&str) -> Option<String>, name: &str) -> Result<Option<u32>, Error> {
    let Some(text) = value(name) else { return Ok(None) };
    text.parse().map(Some).map_err(|_| Error::Settings(format!("{name}={text} is no whole number")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Settings, Error> {
        let map: BTreeMap<String, String> =
            pairs.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
        Settings::from_variables(&|name| map.get(name).cloned())
    }

    #[test]
    fn without_variables_it_trains_alone() {
        let settings = read(&[]).unwrap();
        assert!(settings.coordinators.is_empty());
        assert_eq!(settings.members, MemberBounds { min: 1, expected: 1, max: 1 });
    }

    #[test]
    fn wrong_values_name_the_variable_and_what_is_allowed() {
        for (name, value, word) in [
            ("RIPSTOP_VIRTUAL_RANKS", "0", "virtual ranks"),
            ("RIPSTOP_MIN_MEMBERS", "x", "RIPSTOP_MIN_MEMBERS"),
            ("RIPSTOP_MIN_MEMBERS", "9", "raise --virtual-ranks"),
            ("RIPSTOP_RECOVERY_TARGET", "5", "500ms"),
            ("RIPSTOP_COORDINATORS", "nohost", "host:port"),
            ("RIPSTOP_COORDINATORS", "127.0.0.1:1", "RIPSTOP_IDENTITY"),
            ("RIPSTOP_LISTEN", "somewhere", "IP address"),
        ] {
            let error = read(&[(name, value)]).unwrap_err();
            assert!(error.to_string().contains(word), "{name}={value}: {error}");
            assert_eq!(error.exit_code(), 78);
        }
    }

    #[test]
    fn durations_need_units() {
        assert_eq!(parse_duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_duration("2m"), Ok(Duration::from_secs(120)));
        for bad in ["", "5", "s", "-1s", "1 s", "1e999s", "..s"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }
}
