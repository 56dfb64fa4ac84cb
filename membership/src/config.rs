//! Settings of a coordinator and of a participant, and every duration that derives from the recovery target.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

/// What a [`Coordinator`](crate::Coordinator) needs to know; made by [`Config::builder`].
#[derive(Clone, Debug)]
pub struct Config {
    id: u64,
    voters: BTreeMap<u64, SocketAddr>,
    timing: Timing,
    seed: u64,
    disk: u128,
}

impl Config {
    /// Starts a configuration of the coordinator `id` among all `voters`, itself included, and where they listen.
    pub fn builder(id: u64, voters: BTreeMap<u64, SocketAddr>) -> ConfigBuilder {
        let disk = u128::from(id);
        ConfigBuilder { id, voters, recovery_target: Timing::DEFAULT_TARGET, seed: id, disk }
    }

    /// This coordinator.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// All coordinators and where they listen.
    #[must_use]
    pub fn voters(&self) -> &BTreeMap<u64, SocketAddr> {
        &self.voters
    }

    /// The durations.
    #[must_use]
    pub fn timing(&self) -> Timing {
        self.timing
    }

    /// Decides every chance.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Names the disk that its log is on.
    #[must_use]
    pub fn disk(&self) -> u128 {
        self.disk
    }
}

/// Collects a [`Config`].
#[derive(Clone, Debug)]
#[must_use]
pub struct ConfigBuilder {
    id: u64,
    voters: BTreeMap<u64, SocketAddr>,
    recovery_target: Duration,
    seed: u64,
    disk: u128,
}

impl ConfigBuilder {
    /// Default 1 s; all durations derive from it. Too small: busy hosts are taken for dead. Too large: dead ones are noticed late.
    pub fn recovery_target(mut self, target: Duration) -> Self {
        self.recovery_target = target;
        self
    }

    /// Default: the id. Decides the election timeouts.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Default: the id. The random name of the log: another one under the same id is a coordinator that lost its disk.
    pub fn disk(mut self, disk: u128) -> Self {
        self.disk = disk;
        self
    }

    /// Checks it.
    ///
    /// # Errors
    /// The first setting that can't work.
    pub fn build(self) -> Result<Config, ConfigError> {
        let Self { id, voters, recovery_target, seed, disk } = self;
        if id == 0 || voters.contains_key(&0) {
            return Err(ConfigError::ZeroId);
        }
        if let Some(id) = voters.keys().copied().find(|id| *id > COORDINATOR_ID_MAX) {
            return Err(ConfigError::LargeId { id });
        }
        if !voters.contains_key(&id) {
            return Err(ConfigError::NotAVoter { id });
        }
        if !matches!(voters.len(), 1 | 3 | 5 | 7) {
            return Err(ConfigError::Voters { count: voters.len() });
        }
        Ok(Config { id, voters, timing: Timing::new(recovery_target)?, seed, disk })
    }
}

/// Every duration of the control plane, derived from the recovery target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    target: Duration,
}

impl Timing {
    /// The recovery target where nobody says otherwise.
    pub const DEFAULT_TARGET: Duration = Duration::from_secs(1);
    /// Below it the loss window no longer fits into a change of the world (a quarter of the target).
    pub const TARGET_MIN: Duration = Duration::from_millis(100);
    /// Above it nobody would wait.
    pub const TARGET_MAX: Duration = Duration::from_secs(600);
    /// Shortest silence of a leader before an election, in ticks; consensus draws up to 5/3 of it, so 12 to 20.
    pub const ELECTION_TICKS: usize = 12;
    /// Ticks between a leader's heartbeats to other coordinators.
    pub const HEARTBEAT_TICKS: usize = 3;
    /// Losses closer together than this make one world: a host's processes die together.
    pub const LOSS_WINDOW: Duration = Duration::from_millis(20);

    /// Checks that the durations nest.
    ///
    /// # Errors
    /// If the target lies outside of [`Self::TARGET_MIN`] to [`Self::TARGET_MAX`].
    pub fn new(recovery_target: Duration) -> Result<Self, ConfigError> {
        if !(Self::TARGET_MIN..=Self::TARGET_MAX).contains(&recovery_target) {
            return Err(ConfigError::Target { target: recovery_target });
        }
        Ok(Self { target: recovery_target })
    }

    /// The recovery target itself.
    #[must_use]
    pub fn target(self) -> Duration {
        self.target
    }

    /// Between two heartbeats of a worker.
    #[must_use]
    pub fn heartbeat(self) -> Duration {
        self.target / 10
    }

    /// Silence after which a worker is lost.
    #[must_use]
    pub fn suspicion(self) -> Duration {
        self.target / 2
    }

    /// The least time in one leaf, while others wait, that counts as a hang: longer than a compiler's or a file system's hiccup.
    #[must_use]
    pub fn hang(self) -> Duration {
        self.target * 30
    }

    /// The longest time that others wait for a member outside of leaves: it loads, evaluates, or compiles its first leaf.
    #[must_use]
    pub fn pause(self) -> Duration {
        self.target * 600
    }

    /// What a worker gets to find a new leader before its silence counts.
    #[must_use]
    pub fn grace(self) -> Duration {
        self.target * 3
    }

    /// Raft's tick.
    #[must_use]
    pub fn tick(self) -> Duration {
        self.target / 40
    }

    /// A pause of the coordinator's own loop after which silence of others proves nothing.
    #[must_use]
    pub fn stall(self) -> Duration {
        self.target / 8
    }

    /// Without a new joiner for this long, the minimum of members is enough for a first world.
    #[must_use]
    pub fn quiet(self) -> Duration {
        self.target / 2
    }

    /// Without a new joiner for this long, those that came are listed together; see `gathering`.
    #[must_use]
    pub fn gather(self) -> Duration {
        self.target / 4
    }

    /// Between two pushes of the same world to the same member, and two sendings of an unanswered request.
    #[must_use]
    pub fn resend(self) -> Duration {
        self.target / 2
    }

    /// Silence after which a leader is left for another coordinator. Longer than a slow disk makes it wait; steps need no leader.
    #[must_use]
    pub fn leader_silence(self) -> Duration {
        self.target
    }

    /// How long one try to connect may take: a handshake on a busy host.
    #[must_use]
    pub fn dial(self) -> Duration {
        self.target / 2
    }

    /// Shortest pause after all coordinators were tried in vain.
    #[must_use]
    pub fn backoff_min(self) -> Duration {
        self.target / 20
    }

    /// Longest pause after all coordinators were tried in vain.
    #[must_use]
    pub fn backoff_max(self) -> Duration {
        self.target / 2
    }

    /// How long a drain of all members waits for a joiner that is not level yet.
    #[must_use]
    pub fn successor(self) -> Duration {
        self.target * 5
    }
}

/// A setting that can't work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Raft keeps 0 for nobody.
    #[error("coordinator ids begin at 1: 0 means nobody")]
    ZeroId,
    /// Greater ids are those of workers and agents.
    #[error("coordinator id {id}: allowed are 1 to {COORDINATOR_ID_MAX}")]
    LargeId {
        /// The id.
        id: u64,
    },
    /// This coordinator is missing in the list.
    #[error("coordinator {id} is not among the voters: list its own address too")]
    NotAVoter {
        /// This coordinator.
        id: u64,
    },
    /// Even numbers only add a way to fail.
    #[error("{count} coordinators: use 1, 3, 5 or 7")]
    Voters {
        /// How many were listed.
        count: usize,
    },
    /// The durations would not nest.
    #[error(
        "recovery target of {target:?}: allowed are {:?} to {:?}",
        Timing::TARGET_MIN,
        Timing::TARGET_MAX
    )]
    Target {
        /// What was asked for.
        target: Duration,
    },
    /// Nobody to connect to.
    #[error("no coordinator address: give at least one")]
    NoCoordinator,
}

/// Coordinators' ids are node ids too, so they must stay below those that the roster allocates.
pub(crate) const COORDINATOR_ID_MAX: u64 = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_cannot_work_are_refused() {
        let voters = |ids: &[u64]| -> BTreeMap<u64, SocketAddr> {
            ids.iter().map(|id| (*id, SocketAddr::from(([127, 0, 0, 1], 1)))).collect()
        };
        let refused = |id, ids: &[u64]| Config::builder(id, voters(ids)).build().unwrap_err();
        assert_eq!(refused(1, &[]), ConfigError::NotAVoter { id: 1 });
        assert_eq!(refused(0, &[0]), ConfigError::ZeroId);
        assert_eq!(refused(1, &[1, 2]), ConfigError::Voters { count: 2 });
        assert_eq!(refused(1, &[1, 2, 101]), ConfigError::LargeId { id: 101 });
        let builder = Config::builder(1, voters(&[1]));
        assert!(builder.clone().recovery_target(Duration::from_millis(50)).build().is_err());
        assert!(builder.build().is_ok());
    }

    #[test]
    fn durations_nest() {
        let timing = Timing::new(Timing::TARGET_MIN).unwrap();
        assert!(Timing::LOSS_WINDOW <= timing.target() / 4);
        assert!(timing.heartbeat() * 4 < timing.suspicion());
        assert!(timing.leader_silence() + timing.dial() * 3 < timing.grace());
        assert!(timing.stall() < timing.suspicion());
    }
}
