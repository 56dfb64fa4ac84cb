//! [`Talk`]: what the demo says while it runs. In a terminal one live line below the events, else plain lines; always on stderr.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Says what goes on.
#[derive(Debug)]
pub(super) struct Talk {
    bar: Option<ProgressBar>,
    steps: u64,
    /// The tenth of the steps that was said last.
    tenth: u64,
    newest: String,
}

impl Talk {
    /// For a run of `steps`.
    pub(super) fn new(steps: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(steps);
            let template = "{bar:30.cyan/dim} step {pos}/{len}  {wide_msg}";
            bar.set_style(
                ProgressStyle::with_template(template)
                    .unwrap_or_else(|_| ProgressStyle::default_bar()),
            );
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        Self { bar, steps, tenth: 0, newest: String::new() }
    }

    /// Says one line.
    #[expect(clippy::print_stderr, reason = "stderr is where a command talks")]
    pub(super) fn say(&mut self, text: &str) {
        text.trim().clone_into(&mut self.newest);
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{text}")),
            None => eprintln!("{text}"),
        }
    }

    /// Shows how far it is.
    pub(super) fn show(&mut self, step: u64, loss: Option<f64>, members: usize) {
        let loss = loss.map_or_else(|| "-".to_owned(), |loss| format!("{loss:.3}"));
        let people =
            if members == 1 { "1 member".to_owned() } else { format!("{members} members") };
        if let Some(bar) = &self.bar {
            bar.set_position(step);
            bar.set_message(format!("loss {loss}  {people}  {}", self.newest));
            return;
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
    pub(super) fn restart(&mut self) {
        self.tenth = 0;
        self.newest.clear();
        if let Some(bar) = &self.bar {
            bar.reset();
        }
    }

    /// Takes the live line away.
    pub(super) fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}
