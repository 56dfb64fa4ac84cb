//! The table of the faults, as text, and each fault in a sentence.

use super::report::Report;
use crate::rehearsal::measure::{Kind, Measured};
use crate::rehearsal::{duration, plural};

/// What the text output says at the end.
pub(super) fn text(report: &Report, page: &std::path::Path) -> String {
    let mut lines = table(&report.events);
    lines.push(String::new());
    lines.push(format!("with faults   {}", report.digest));
    lines.push(format!("undisturbed   {}", report.undisturbed_digest));
    lines.push(report.verdict());
    lines.push(format!("{:.0} s in all; the page is {}", report.wall_s, page.display()));
    lines.join("\n")
}

/// The names of the columns.
pub(super) const COLUMNS: [&str; 6] =
    ["event", "noticed after", "new world after", "step finished after", "recomputed", "recovery"];

/// The cells of one row, in the order of [`COLUMNS`].
pub(super) fn cells(measured: &Measured) -> [String; 6] {
    let time = |millis: Option<f64>| millis.map_or_else(|| "–".to_owned(), duration);
    let recomputed = match (measured.kind, measured.recomputed_leaves) {
        (Kind::All, _) => plural(measured.lost_steps, "step", "steps"),
        (_, Some(0)) => "nothing".to_owned(),
        (_, Some(leaves)) => plural(leaves, "leaf", "leaves"),
        (_, None) => "–".to_owned(),
    };
    [
        measured.kind.name().to_owned(),
        time(measured.detected_ms),
        time(measured.world_ms),
        time(measured.step_ms),
        recomputed,
        time(measured.recovery_ms),
    ]
}

/// What one fault cost, in words.
pub(super) fn sentence(measured: &Measured) -> String {
    let time = |millis: Option<f64>| millis.map_or_else(|| "?".to_owned(), duration);
    let (noticed, world, step) =
        (time(measured.detected_ms), time(measured.world_ms), time(measured.step_ms));
    match measured.kind {
        Kind::Kill | Kind::SilentHost => format!(
            "noticed after {noticed}, new world after {world}, step {} finished after {step} with {} computed again: recovery {}",
            measured.step,
            plural(measured.recomputed_leaves.unwrap_or(0), "leaf", "leaves"),
            time(measured.recovery_ms)
        ),
        Kind::Leader => format!(
            "a new leader after {noticed}; meanwhile {} finished, the one on its way after {step}",
            plural(measured.steps_meanwhile.unwrap_or(0), "step was", "steps were")
        ),
        Kind::Join => format!(
            "listed after {noticed}, a member after {world}, its first step {} finished after {step}",
            measured.step
        ),
        Kind::Drain => format!(
            "heard after {noticed}, handed over after {world}, left with code 75 after {}, {} computed twice",
            time(measured.left_ms),
            match measured.recomputed_leaves {
                Some(0) => "nothing was".to_owned(),
                leaves => plural(leaves.unwrap_or(0), "leaf was", "leaves were"),
            }
        ),
        Kind::All => format!(
            "noticed after {noticed}, new world after {world}, first step finished after {step}; {} lost since the checkpoint",
            plural(measured.lost_steps, "step was", "steps were")
        ),
    }
}

fn table(events: &[Measured]) -> Vec<String> {
    let mut rows = vec![COLUMNS.map(str::to_owned)];
    rows.extend(events.iter().map(cells));
    let width =
        |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; 6] = std::array::from_fn(width);
    let line = |row: &[String; 6]| {
        let mut line = format!("{:<width$}", row[0], width = widths[0]);
        for (cell, width) in row.iter().zip(widths).skip(1) {
            line.push_str(&format!("  {cell:>width$}"));
        }
        line
    };
    rows.iter().map(line).collect()
}
