//! Signals that ask a worker to leave in good order; a second one ends it at once.

use std::sync::mpsc::Sender;

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use crate::drivers::engine::Input;

/// Turns the first TERM, INT, USR1 or USR2 into the wish to leave; the second TERM or INT ends the process with 128 + its number.
pub(crate) fn forward(engine: Sender<Input>) {
    let signals = Signals::new([SIGTERM, SIGINT, SIGUSR1, SIGUSR2]);
    let spawned = signals.and_then(|mut signals| {
        std::thread::Builder::new().name("ripstop-signals".to_owned()).spawn(move || {
            let mut seen = 0;
            for signal in signals.forever() {
                seen += 1;
                let is_final = seen > 1 && (signal == SIGTERM || signal == SIGINT);
                if is_final || engine.send(Input::LeaveSignal { name: name(signal) }).is_err() {
                    std::process::exit(128 + signal);
                }
            }
        })
    });
    if let Err(error) = spawned {
        tracing::warn!(%error, "signals can't be taken: TERM will end this process at once");
    }
}

fn name(signal: i32) -> &'static str {
    match signal {
        SIGTERM => "TERM",
        SIGINT => "INT",
        SIGUSR1 => "USR1",
        _ => "USR2",
    }
}
