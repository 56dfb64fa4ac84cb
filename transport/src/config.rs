//! How an endpoint behaves: its time limits, packet sizes, windows, and whether it takes enrolments.

use std::time::Duration;

/// The checked settings of an endpoint.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    recovery_target: Duration,
    max_mtu: u16,
    stream_window_bytes: u32,
    connection_window_bytes: u32,
    send_window_bytes: u32,
    accepts_enrolment: bool,
    shares_memory: bool,
}

impl Config {
    /// Starts from the defaults.
    pub fn builder() -> ConfigBuilder {
        ConfigBuilder { config: Self::default() }
    }

    /// A silent peer is given up after this long.
    #[must_use]
    pub fn idle_timeout(&self) -> Duration {
        self.recovery_target * 5
    }

    /// A connection without traffic sends a sign of life this often.
    #[must_use]
    pub fn keep_alive(&self) -> Duration {
        (self.recovery_target / 10).max(MIN_KEEP_ALIVE)
    }

    pub(crate) fn max_mtu(&self) -> u16 {
        self.max_mtu
    }

    pub(crate) fn stream_window_bytes(&self) -> u32 {
        self.stream_window_bytes
    }

    pub(crate) fn connection_window_bytes(&self) -> u32 {
        self.connection_window_bytes
    }

    pub(crate) fn send_window_bytes(&self) -> u32 {
        self.send_window_bytes
    }

    pub(crate) fn shares_memory(&self) -> bool {
        self.shares_memory
    }

    pub(crate) fn accepts_enrolment(&self) -> bool {
        self.accepts_enrolment
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            recovery_target: Duration::from_secs(1),
            max_mtu: 8972,
            stream_window_bytes: 8 << 20,
            connection_window_bytes: 32 << 20,
            send_window_bytes: 16 << 20,
            accepts_enrolment: false,
            shares_memory: false,
        }
    }
}

/// Makes a [`Config`].
#[derive(Clone, Debug)]
#[must_use]
pub struct ConfigBuilder {
    config: Config,
}

impl ConfigBuilder {
    /// The job's recovery target, default 1 s. Idle timeout is five times it, the sign of life a tenth (at least 50 ms). Too small:
    /// a stall of the machine looks like a death. Too large: a dead peer is noticed late.
    pub fn recovery_target(mut self, target: Duration) -> Self {
        self.config.recovery_target = target;
        self
    }

    /// Largest UDP payload that is tried, default 8,972 (a jumbo frame); 1,200 to 16,000. Paths that carry less are found out by
    /// probing. Too small: more packets, less bandwidth. Too large: the first probes are wasted.
    pub fn max_mtu(mut self, bytes: u16) -> Self {
        self.config.max_mtu = bytes;
        self
    }

    /// How many bytes a peer may send ahead of the reader, for one lane and for the connection; defaults 8 MiB and 32 MiB. Too small:
    /// long paths stand still. Too large: a slow reader costs memory.
    pub fn receive_windows(mut self, lane_bytes: u32, connection_bytes: u32) -> Self {
        self.config.stream_window_bytes = lane_bytes;
        self.config.connection_window_bytes = connection_bytes;
        self
    }

    /// How many bytes may wait for the peer's acknowledgement, default 16 MiB.
    pub fn send_window(mut self, bytes: u32) -> Self {
        self.config.send_window_bytes = bytes;
        self
    }

    /// Also takes clients without a certificate, which want one. For coordinators.
    pub fn accept_enrolment(mut self) -> Self {
        self.config.accepts_enrolment = true;
        self
    }

    /// Bodies of frames that lie in the endpoint's [`Arena`](crate::Arena) are read by peers on this host where they lie, instead of
    /// being sent, if both sides say so. By default they are sent.
    pub fn share_memory(mut self) -> Self {
        self.config.shares_memory = true;
        self
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// Says which setting is out of its range.
    pub fn build(self) -> Result<Config, ConfigError> {
        let config = self.config;
        let refuse = |reason: String| Err(ConfigError { reason });
        if !(MIN_RECOVERY_TARGET..=MAX_RECOVERY_TARGET).contains(&config.recovery_target) {
            return refuse(format!(
                "recovery target is {:?}; allowed are {MIN_RECOVERY_TARGET:?} to {MAX_RECOVERY_TARGET:?}",
                config.recovery_target
            ));
        }
        if !(MIN_MTU..=MAX_MTU).contains(&config.max_mtu) {
            return refuse(format!(
                "largest UDP payload is {}; allowed are {MIN_MTU} to {MAX_MTU}",
                config.max_mtu
            ));
        }
        for (name, bytes) in [
            ("lane window", config.stream_window_bytes),
            ("connection window", config.connection_window_bytes),
            ("send window", config.send_window_bytes),
        ] {
            if !(MIN_WINDOW_BYTES..=MAX_WINDOW_BYTES).contains(&bytes) {
                return refuse(format!(
                    "{name} is {bytes}; allowed are {MIN_WINDOW_BYTES} to {MAX_WINDOW_BYTES}"
                ));
            }
        }
        if config.connection_window_bytes / 2 < config.stream_window_bytes {
            return refuse(
                "the connection window must hold two lane windows, or bulk would hold up control"
                    .to_owned(),
            );
        }
        Ok(config)
    }
}

/// A setting out of its range.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("transport settings: {reason}")]
pub struct ConfigError {
    reason: String,
}

/// Below this, one time slice of a loaded machine would be a death.
const MIN_KEEP_ALIVE: Duration = Duration::from_millis(50);
const MIN_RECOVERY_TARGET: Duration = Duration::from_millis(50);
const MAX_RECOVERY_TARGET: Duration = Duration::from_secs(600);
/// QUIC needs 1,200.
const MIN_MTU: u16 = 1200;
const MAX_MTU: u16 = 16_000;
const MIN_WINDOW_BYTES: u32 = 64 << 10;
const MAX_WINDOW_BYTES: u32 = 1 << 30;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_out_of_range_are_refused_by_name() {
        assert_eq!(Config::builder().build(), Ok(Config::default()));
        let small = Config::builder().max_mtu(500).build().unwrap_err();
        assert!(small.to_string().contains("UDP payload is 500"), "{small}");
        assert!(Config::builder().recovery_target(Duration::ZERO).build().is_err());
        assert!(Config::builder().receive_windows(8 << 20, 8 << 20).build().is_err());
        assert!(Config::builder().send_window(0).build().is_err());
    }

    #[test]
    fn time_limits_derive_from_the_recovery_target() {
        let config = Config::builder().recovery_target(Duration::from_millis(200)).build().unwrap();
        assert_eq!(
            (config.idle_timeout(), config.keep_alive()),
            (Duration::from_secs(1), Duration::from_millis(50))
        );
    }
}
