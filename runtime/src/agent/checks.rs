//! What of a command line can't work, said before anything starts: each in one line that names the flag and what to give instead.

use std::path::Path;
use std::time::Duration;

use membership::Timing;
use transport::JoinToken;
use types::JobId;

use super::AgentConfig;
use crate::error::Error;
use crate::settings::CHECKPOINT_EVERY_MIN;

/// What can't work is refused before anything starts, and before a use of the token is spent.
pub(super) fn check(config: &AgentConfig) -> Result<(), Error> {
    if config.checkpoint.as_deref().is_some_and(|url| url.starts_with("memory:")) {
        return Err(Error::Settings(
            "--checkpoint memory:// lives in one process, and workers are several: use a directory or s3://bucket/prefix".to_owned(),
        ));
    }
    if let Some(url) = &config.checkpoint {
        crate::settings::open_store(url)?;
    }
    if config.members.min > config.virtual_ranks.count() {
        return Err(Error::Settings(format!(
            "--min-members {} needs at least as many --virtual-ranks, not {}",
            config.members.min, config.virtual_ranks
        )));
    }
    check_durations(config)?;
    let folders =
        [("--log-dir", config.output.log_folder()), ("--trace-dir", config.trace_dir.as_deref())];
    for (flag, folder) in folders {
        folder.map_or(Ok(()), |folder| check_folder(flag, folder))?;
    }
    config.token.as_deref().map_or(Ok(()), |token| check_token(token, &config.job))
}

/// Times that would take members out of the job that do nothing wrong, or that nothing can keep.
fn check_durations(config: &AgentConfig) -> Result<(), Error> {
    let (target, target_flag) = (config.recovery_target, "--recovery-target");
    let refuse = |flag: &str, value: Duration, allowed: String| {
        Err(Error::Usage(format!("{flag} {value:?}: give {allowed}")))
    };
    if !(Timing::TARGET_MIN..=Timing::TARGET_MAX).contains(&target) {
        let allowed = format!("{:?} to {:?}", Timing::TARGET_MIN, Timing::TARGET_MAX);
        return refuse(target_flag, target, allowed);
    }
    let least = |flag, value: Option<Duration>, least: Duration| match value {
        Some(value) if value < least => refuse(flag, value, format!("{least:?} or more")),
        _ => Ok(()),
    };
    least("--checkpoint-every", Some(config.checkpoint_every), CHECKPOINT_EVERY_MIN)?;
    least("--coordinator-timeout", Some(config.coordinator_timeout), COORDINATOR_TIMEOUT_MIN)?;
    let timeouts = [
        ("--min-timeout", config.min_timeout),
        ("--hang-timeout", config.hang_timeout),
        ("--pause-timeout", config.pause_timeout),
    ];
    for (flag, timeout) in timeouts {
        match timeout {
            Some(timeout) if timeout < target => {
                let allowed = format!(
                    "{target:?} ({target_flag}) or more: members need so long to notice a loss"
                );
                return refuse(flag, timeout, allowed);
            }
            _ => {}
        }
    }
    Ok(())
}

/// Whether files can be written into a folder that a flag names; it is made if it is not there.
fn check_folder(flag: &str, folder: &Path) -> Result<(), Error> {
    let probe = || {
        std::fs::create_dir_all(folder)?;
        let file = folder.join(format!(".ripstop-{}", std::process::id()));
        std::fs::write(&file, "")?;
        std::fs::remove_file(&file)
    };
    probe().map_err(|e| {
        Error::Settings(format!(
            "{flag} {}: {e}; give a folder that can be written",
            folder.display()
        ))
    })
}

/// What the token itself says.
fn check_token(token: &str, job: &JobId) -> Result<(), Error> {
    let token: JoinToken =
        token.parse().map_err(|e| Error::Settings(format!("the join token is wrong: {e}")))?;
    match &token.claims().job {
        Some(bound) if bound != job => Err(Error::Settings(format!(
            "the join token is for job {bound}, not {job}: give --run-id {bound}, or make another by `ripstop certs token --dir DIR`"
        ))),
        _ => Ok(()),
    }
}

/// Below it a coordinator that is there, but busy, would count as unreachable.
const COORDINATOR_TIMEOUT_MIN: Duration = Duration::from_secs(1);
