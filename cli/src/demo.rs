//! `ripstop demo`: a job that loses workers, a leader and everything, beside the same job undisturbed.
//!
//! All processes are real ones of this program, on loopback. `scenario` does the faults, `measure` says from the traces what each of them
//! cost, `report` compares both runs, `table` and `page` show it.

mod chart;
mod page;
mod report;
mod scenario;
mod table;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::Args;
use ripstop::agent::exit::Exit;
use ripstop::agent::signals::Signal;
use ripstop::clock;

use crate::OutputFormat;
use crate::rehearsal::cluster::{Cluster, Plan};
use crate::rehearsal::progress::Talk;
use crate::rehearsal::trace::TraceReader;
use crate::rehearsal::{Ended, until_signal};
use report::Report;
use scenario::Scenario;

/// See it happen: three coordinators, two agents and four workers on this machine; a worker is killed in mid-step, then the leader of the
/// coordinators; a worker joins, one is drained, and at last all are killed and the job goes on from its checkpoint. Then the same job
/// runs undisturbed, and the digests are compared: exit code 0 if they are equal, else 1.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Number of steps of the job
    #[arg(long, value_name = "N", default_value_t = STEPS, value_parser = clap::value_parser!(u64).range(scenario::STEPS_MIN..=100_000))]
    steps: u64,
    /// Where to write the page that shows the run
    #[arg(long, value_name = "FILE", default_value = "ripstop-demo.html")]
    html: PathBuf,
    /// Keep logs, traces and checkpoints in this new or empty folder
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
}

pub(crate) fn run(args: DemoArgs, output: OutputFormat) -> anyhow::Result<ExitCode> {
    let page = std::path::absolute(&args.html)?;
    if page.is_dir() || !page.parent().is_some_and(Path::is_dir) {
        return Err(usage(format!(
            "--html {}: give a file in a folder that exists",
            args.html.display()
        )));
    }
    let folder = Folder::make(args.keep.as_deref())?;
    let mut talk = Talk::of_steps(args.steps);
    let ended = crate::block_on(until_signal(demo(folder.path(), args.steps, &mut talk)))?;
    talk.end();
    match ended {
        Ended::Signal(signal) => {
            crate::complain(&format!("ended by {signal}; all processes of the demo were killed"));
            Ok(ExitCode::from(if signal == Signal::Interrupt { 130 } else { 143 }))
        }
        Ended::Itself(Err(error)) => {
            let kept = folder.keep();
            Err(anyhow!("{error:#}; logs and traces are in {}", kept.display()))
        }
        Ended::Itself(Ok(report)) => {
            std::fs::write(&page, page::html(&report))
                .with_context(|| format!("writing {}", page.display()))?;
            match output {
                OutputFormat::Text => crate::print(&table::text(&report, &args.html)),
                OutputFormat::Json => crate::print(&serde_json::to_string_pretty(&report)?),
            }
            if !report.equal {
                crate::complain(&format!("logs and traces are in {}", folder.keep().display()));
            }
            Ok(if report.equal { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
    }
}

/// Both runs.
async fn demo(folder: &Path, steps: u64, talk: &mut Talk) -> anyhow::Result<Report> {
    let began = clock::now();
    let mut cluster = Cluster::prepare(folder, Plan::demo(steps))?;
    let played = Scenario::new(&mut cluster, talk, steps).play().await?;
    let took = clock::now().since(began);
    talk.say(&format!(
        "the job is finished, after {:.0} s; the same job again, undisturbed, with one worker",
        took.as_secs_f64()
    ));
    talk.restart();
    let undisturbed = train_undisturbed(&mut cluster, talk).await?;
    Report::new(played, undisturbed.history(), steps, clock::now().since(began))
}

/// The same training in one process.
async fn train_undisturbed(cluster: &mut Cluster, talk: &mut Talk) -> anyhow::Result<TraceReader> {
    let mut reader = TraceReader::new(&cluster.undisturbed_folder());
    let process = cluster.start_undisturbed().await?;
    let (mut boundary, mut moved_at) = (types::Step(0), clock::now());
    loop {
        let ended = process.reap().context("looking after the undisturbed run")?;
        reader.find_files()?;
        reader.read()?;
        match ended {
            Some(Exit::Code(0)) => return Ok(reader),
            Some(exit) => bail!("the undisturbed run {exit}; see logs/undisturbed.log"),
            None => {}
        }
        let history = reader.history();
        talk.show(history.boundary().0, history.newest_loss(), 1);
        if history.boundary() != boundary {
            (boundary, moved_at) = (history.boundary(), clock::now());
        }
        if clock::now().since(moved_at) > PATIENCE {
            process.kill()?;
            bail!("the undisturbed run stands still at step {boundary}; see logs/undisturbed.log");
        }
        // Rarely, since it takes time from the run itself.
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn usage(text: String) -> anyhow::Error {
    ripstop::Error::Usage(text).into()
}

/// Where the demo works: a folder of the user's, which stays, or a temporary one.
#[derive(Debug)]
enum Folder {
    Kept(PathBuf),
    Temporary(tempfile::TempDir),
}

impl Folder {
    fn make(keep: Option<&Path>) -> anyhow::Result<Self> {
        let Some(path) = keep else {
            let made = tempfile::Builder::new().prefix("ripstop-demo-").tempdir();
            return made
                .map(Self::Temporary)
                .context("making a temporary folder; set TMPDIR to one that can be written");
        };
        std::fs::create_dir_all(path).with_context(|| format!("--keep {}", path.display()))?;
        let path = path.canonicalize().with_context(|| format!("--keep {}", path.display()))?;
        if std::fs::read_dir(&path)
            .with_context(|| format!("--keep {}", path.display()))?
            .next()
            .is_some()
        {
            return Err(usage(format!(
                "--keep {}: it is not empty, and what is there might be taken for this run's; give a new folder",
                path.display()
            )));
        }
        Ok(Self::Kept(path))
    }

    fn path(&self) -> &Path {
        match self {
            Self::Kept(path) => path,
            Self::Temporary(folder) => folder.path(),
        }
    }

    /// Leaves it where it is.
    fn keep(self) -> PathBuf {
        match self {
            Self::Kept(path) => path,
            Self::Temporary(folder) => folder.keep(),
        }
    }
}

/// Enough for five faults with quiet steps between them; some 20 s of training on two cores.
const STEPS: u64 = 120;
/// Without a step for so long, the undisturbed run hangs.
const PATIENCE: Duration = Duration::from_secs(60);
