//! [`Talk`]: what the command says while it runs. In a terminal one live line below the events, else plain lines; always on stderr.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Says what goes on.
#[derive(Debug)]
pub(crate) struct Talk {
    bar: Option<ProgressBar>,
    unit: Unit,
    steps: u64,
    /// The tenth of the steps that was said last.
    tenth: u64,
    newest: String,
}

/// What is counted on the way to the end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Unit {
    Steps,
    Faults,
}

impl Talk {
    /// For a run of `steps`.
    pub(crate) fn of_steps(steps: u64) -> Self {
        Self::new(steps, Unit::Steps)
    }

    /// For a run that ends after so many faults.
    pub(crate) fn of_faults(faults: u64) -> Self {
        Self::new(faults, Unit::Faults)
    }

    fn new(steps: u64, unit: Unit) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(steps);
            let name = if unit == Unit::Steps { "step" } else { "fault" };
            let template = format!("{{bar:30.cyan/dim}} {name} {{pos}}/{{len}}  {{wide_msg}}");
            bar.set_style(
                ProgressStyle::with_template(&template)
                    .unwrap_or_else(|_| ProgressStyle::default_bar()),
            );
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        Self { bar, unit, steps, tenth: 0, newest: String::new() }
    }

    /// Says one line.
    #[expect(clippy::print_stderr, reason = "stderr is where a command talks")]
    pub(crate) fn say(&mut self, text: &str) {
        text.trim().clone_into(&mut self.newest);
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{text}")),
            None => eprintln!("{text}"),
        }
    }

    /// One more fault was overcome.
    pub(crate) fn count_fault(&mut self) {
        if let Some(bar) = self.bar.as_ref().filter(|_| self.unit == Unit::Faults) {
            bar.inc(1);
        }
    }

    /// Shows how far it is.
    pub(crate) fn show(&mut self, step: u64, loss: Option<f64>, members: usize) {
        let loss = loss.map_or_else(|| "-".to_owned(), |loss| format!("{loss:.3}"));
        let people =
            if members == 1 { "1 member".to_owned() } else { format!("{members} members") };
        match (&self.bar, self.unit) {
            (Some(bar), Unit::Steps) => {
                bar.set_position(step);
                return bar.set_message(format!("loss {loss}  {people}  {}", self.newest));
            }
            (Some(bar), Unit::Faults) => {
                return bar.set_message(format!("step {step}  {people}  {}", self.newest));
            }
            (None, Unit::Faults) => return,
            (None, Unit::Steps) => {}
        }
        let tenth = step * 10 / self.steps.max(1);
        if tenth != self.tenth {
            // After a restart it goes back, and that is worth a line too.
            self.tenth = tenth;
            let newest = std::mem::take(&mut self.newest);
            self.say(&format!("step {step}/{}  loss {loss}  {people}", self.steps));
            self.newest = newest;
        }
    }

    /// Begins again at step 0, for the second run.
    pub(crate) fn restart(&mut self) {
        self.tenth = 0;
        self.newest.clear();
        if let Some(bar) = &self.bar {
            bar.reset();
        }
    }

    /// Takes the live line away.
    pub(crate) fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}
