//! Logs on stderr: for people on a terminal, JSON lines otherwise unless asked; filtered by `RIPSTOP_LOG`.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// How log lines look.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LogFormat {
    /// Text on a terminal, JSON lines otherwise.
    #[default]
    Auto,
    /// Text.
    Text,
    /// JSON lines.
    Json,
}

/// Starts logging, once a process. `level` is the filter if `RIPSTOP_LOG` is not set.
pub fn start(format: LogFormat, level: &str) {
    let filter = EnvFilter::try_from_env("RIPSTOP_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false);
    let is_json = match format {
        LogFormat::Auto => !std::io::stderr().is_terminal(),
        LogFormat::Text => false,
        LogFormat::Json => true,
    };
    // A second start is no error: tests and embedders may have been first.
    let _ = if is_json {
        builder.json().try_init()
    } else {
        builder.with_ansi(std::io::stderr().is_terminal()).try_init()
    };
}
