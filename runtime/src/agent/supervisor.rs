//! Decides when an agent starts its workers, starts them again, passes a signal on, kills them, and what it exits with.
//!
//! Promises: nobody is restarted because another one died; a worker is restarted at most as often as its budget allows; once
//! told to leave, nothing is started any more, and the end comes at the latest [`KILL_LIMIT`] after the grace period, whatever the
//! workers do. Deliberately not here: processes, pipes and clocks; `Workers` carries those.

use std::collections::VecDeque;
use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

use types::{NodeId, Timestamp};

use super::exit::{Exit, ExitCode, RequeueCode};
use super::signals::Signal;

/// The machine that supervises the workers of one agent.
#[derive(Debug)]
pub struct Supervisor {
    config: Config,
    workers: Vec<Worker>,
    actions: VecDeque<Action>,
    /// What ended slots ended with, in order of time.
    outcomes: Vec<Outcome>,
    stage: Stage,
    /// The job is finished according to the coordinators.
    is_finished: bool,
    signals: u32,
    /// What a worker that we kill counts as: 130 after INT, else 143.
    forced: ExitCode,
    /// A second signal came: `forced` is the agent's code, unless the job is done.
    is_forced: bool,
    dropped: u64,
}

impl Supervisor {
    /// Starts all slots.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let slots = config.slots.get();
        let worker =
            Worker { attempt: 0, restarts_spent: 0, quick_crashes: 0, phase: Phase::Starting };
        Self {
            config,
            workers: vec![worker; slots as usize],
            actions: (0..slots)
                .map(|slot| Action::Start { slot: Slot(slot), attempt: 0 })
                .collect(),
            outcomes: Vec::new(),
            stage: Stage::Working,
            is_finished: false,
            signals: 0,
            forced: ExitCode::Terminated,
            is_forced: false,
            dropped: 0,
        }
    }

    /// The worker of `attempt` runs, as `node`.
    pub fn handle_started(&mut self, now: Timestamp, slot: Slot, attempt: u32, node: NodeId) {
        let Some(worker) = self.starting(slot, attempt) else { return };
        worker.phase = Phase::Running { node, since: now };
        match self.stage {
            Stage::Working => {}
            // Of a finished job it hears from the coordinators.
            Stage::Leaving { .. } if self.is_finished && self.signals == 0 => {}
            Stage::Leaving { .. } => self.forward(slot, node),
            Stage::Killing { .. } => self.actions.push_back(Action::KillAll),
            Stage::Ended => {}
        }
    }

    /// The worker of `attempt` could not be started.
    pub fn handle_start_failed(
        &mut self,
        now: Timestamp,
        slot: Slot,
        attempt: u32,
        failure: StartFailure,
    ) {
        if self.starting(slot, attempt).is_none() {
            return;
        }
        match failure {
            StartFailure::Permanent(code) => self.end(slot, Outcome { code, is_exit: false }),
            StartFailure::Crash(exit) => {
                let code = ExitCode::of(exit, self.config.requeue);
                if self.stage == Stage::Working {
                    self.conclude(now, slot, Outcome { code, is_exit: false }, Duration::ZERO);
                } else if Fate::of(code) == Fate::Permanent {
                    self.end(slot, Outcome { code, is_exit: false });
                } else {
                    self.cancel(slot);
                }
            }
        }
        self.check_end();
    }

    /// The start of `attempt` was given up, as asked for by [`Action::Cancel`].
    pub fn handle_cancelled(&mut self, slot: Slot, attempt: u32) {
        if self.starting(slot, attempt).is_some() {
            self.cancel(slot);
            self.check_end();
        }
    }

    /// `node` ended. Its id says which slot and which attempt that was.
    pub fn handle_exit(&mut self, now: Timestamp, node: NodeId, exit: Exit) {
        let running = self.workers.iter().zip(0..).find_map(|(worker, slot)| match worker.phase {
            Phase::Running { node: found, since } if found == node => Some((Slot(slot), since)),
            _ => None,
        });
        let Some((slot, since)) = running else {
            self.dropped += 1;
            return;
        };
        self.actions.push_back(Action::Report { slot, node, exit, at: now });
        let is_killed =
            matches!(self.stage, Stage::Killing { .. }) && exit == Exit::Signal(SIGKILL);
        // Asked to leave before it could take the signal as a wish: it had joined nothing yet.
        let is_asked = matches!(self.stage, Stage::Leaving { deadline: Some(_) })
            && exit == Exit::Signal(SIGTERM);
        let code = match exit {
            _ if is_killed => self.forced,
            _ if is_asked => ExitCode::Requeue(self.config.requeue),
            exit => ExitCode::of(exit, self.config.requeue),
        };
        let outcome = Outcome { code, is_exit: matches!(exit, Exit::Code(_)) };
        self.conclude(now, slot, outcome, now.since(since));
        self.check_end();
    }

    /// A signal to the agent: the first asks the workers to leave in good order, the second kills them.
    pub fn handle_signal(&mut self, now: Timestamp, signal: Signal) {
        if self.stage == Stage::Ended {
            return;
        }
        self.signals = self.signals.saturating_add(1);
        self.forced =
            if signal == Signal::Interrupt { ExitCode::Interrupted } else { ExitCode::Terminated };
        if self.signals == 1 {
            self.leave(now, self.config.grace);
        } else if !self.is_forced {
            self.is_forced = true;
            self.kill(now);
        }
        self.check_end();
    }

    /// A notice that this host goes away: as a first signal, with the time it leaves us (at most the grace period).
    pub fn handle_notice(&mut self, now: Timestamp, time_left: Duration) {
        if self.stage == Stage::Ended {
            return;
        }
        self.leave(now, time_left.min(self.config.grace));
        self.check_end();
    }

    /// The coordinators say that there is no more to do.
    pub fn handle_released(&mut self, now: Timestamp, release: Release) {
        match (release, self.stage) {
            (_, Stage::Ended) => return,
            (Release::Finished, Stage::Working) => {
                self.is_finished = true;
                // No deadline: a program may evaluate or export for hours after its last step.
                self.stage = Stage::Leaving { deadline: None };
                self.stop_starting();
            }
            (Release::Finished, _) => self.is_finished = true,
            (Release::Stopped, Stage::Working) => {
                // The workers hear it from the coordinators too: no signal, only the deadline.
                self.stage = Stage::Leaving { deadline: Some(now + self.config.grace) };
                self.stop_starting();
            }
            (Release::Stopped, _) => {}
        }
        self.check_end();
    }

    /// Time has come to [`Self::poll_timeout`].
    pub fn handle_timeout(&mut self, now: Timestamp) {
        match self.stage {
            Stage::Working => {
                for (worker, slot) in self.workers.iter_mut().zip(0..) {
                    if matches!(worker.phase, Phase::Waiting { until } if until <= now) {
                        worker.attempt += 1;
                        worker.phase = Phase::Starting;
                        self.actions
                            .push_back(Action::Start { slot: Slot(slot), attempt: worker.attempt });
                    }
                }
            }
            Stage::Leaving { deadline: Some(deadline) } if deadline <= now => self.kill(now),
            Stage::Killing { until } if until <= now => {
                for slot in (0..self.config.slots.get()).map(Slot) {
                    if !matches!(self.workers[slot.0 as usize].phase, Phase::Ended) {
                        self.end(slot, Outcome { code: self.forced, is_exit: false });
                    }
                }
            }
            Stage::Leaving { .. } | Stage::Killing { .. } | Stage::Ended => {}
        }
        self.check_end();
    }

    /// When to call [`Self::handle_timeout`].
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        match self.stage {
            Stage::Working => self
                .workers
                .iter()
                .filter_map(|worker| match worker.phase {
                    Phase::Waiting { until } => Some(until),
                    _ => None,
                })
                .min(),
            Stage::Leaving { deadline } => deadline,
            Stage::Killing { until } => Some(until),
            Stage::Ended => None,
        }
    }

    /// What to do next, until `None`. [`Action::Finished`] is the last one.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// How many inputs came late or twice and were dropped.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    fn starting(&mut self, slot: Slot, attempt: u32) -> Option<&mut Worker> {
        let worker = self.workers.get_mut(slot.0 as usize);
        let worker =
            worker.filter(|worker| worker.phase == Phase::Starting && worker.attempt == attempt);
        if worker.is_none() {
            self.dropped += 1;
        }
        worker
    }

    /// Restarts the worker that ended after running for `healthy`, or ends its slot.
    fn conclude(&mut self, now: Timestamp, slot: Slot, outcome: Outcome, healthy: Duration) {
        let config = &self.config;
        let worker = &mut self.workers[slot.0 as usize];
        worker.heal(healthy, config.heal_after);
        let may_restart = self.stage == Stage::Working
            && Fate::of(outcome.code) == Fate::Crashed
            && worker.restarts_spent < config.max_restarts;
        if !may_restart {
            self.end(slot, outcome);
            return;
        }
        worker.restarts_spent += 1;
        if healthy >= HEALTHY_AFTER {
            worker.quick_crashes = 0;
        }
        worker.phase = Phase::Waiting { until: now + backoff(worker.quick_crashes) };
        worker.quick_crashes = worker.quick_crashes.saturating_add(1);
        self.handle_timeout(now);
    }

    fn end(&mut self, slot: Slot, outcome: Outcome) {
        self.workers[slot.0 as usize].phase = Phase::Ended;
        self.outcomes.push(outcome);
    }

    /// Ends a slot that has no process, because we leave: nothing of it is in the world, so that is good order.
    fn cancel(&mut self, slot: Slot) {
        let code =
            if self.is_finished { ExitCode::Done } else { ExitCode::Requeue(self.config.requeue) };
        self.end(slot, Outcome { code, is_exit: false });
    }

    /// Asks all to leave within `time`; called again it only brings the deadline forward.
    fn leave(&mut self, now: Timestamp, time: Duration) {
        let deadline = now + time;
        match self.stage {
            Stage::Working => {}
            Stage::Leaving { deadline: Some(former) } => {
                self.stage = Stage::Leaving { deadline: Some(former.min(deadline)) };
                return;
            }
            // The job is finished, and now the time for what comes after is limited.
            Stage::Leaving { deadline: None } => {}
            Stage::Killing { .. } | Stage::Ended => return,
        }
        self.stage = Stage::Leaving { deadline: Some(deadline) };
        for (slot, node) in self.running() {
            self.forward(slot, node);
        }
        self.stop_starting();
    }

    fn forward(&mut self, slot: Slot, node: NodeId) {
        self.actions.push_back(Action::Forward { slot, node, signal: Signal::Terminate });
    }

    fn kill(&mut self, now: Timestamp) {
        self.stop_starting();
        self.stage = Stage::Killing { until: now + KILL_LIMIT };
        self.actions.push_back(Action::KillAll);
    }

    fn stop_starting(&mut self) {
        for slot in (0..self.config.slots.get()).map(Slot) {
            let worker = &self.workers[slot.0 as usize];
            match worker.phase {
                Phase::Waiting { .. } => self.cancel(slot),
                Phase::Starting => {
                    self.actions.push_back(Action::Cancel { slot, attempt: worker.attempt });
                }
                Phase::Running { .. } | Phase::Ended => {}
            }
        }
    }

    fn running(&self) -> Vec<(Slot, NodeId)> {
        let running =
            self.workers.iter().zip(0..).filter_map(|(worker, slot)| match worker.phase {
                Phase::Running { node, .. } => Some((Slot(slot), node)),
                _ => None,
            });
        running.collect()
    }

    fn check_end(&mut self) {
        if self.stage != Stage::Ended
            && self.workers.iter().all(|worker| worker.phase == Phase::Ended)
        {
            self.stage = Stage::Ended;
            self.actions.push_back(Action::Finished(self.verdict()));
        }
    }

    fn verdict(&self) -> Verdict {
        let codes = || self.outcomes.iter().map(|outcome| outcome.code);
        let is_done = |outcome: &Outcome| outcome.code == ExitCode::Done;
        let has_done = self.outcomes.iter().any(|o| o.is_exit && is_done(o));
        // What a program says itself after the job's end counts (its export failed); being killed does not.
        let is_said =
            |outcome: &&Outcome| outcome.is_exit && Fate::of(outcome.code) == Fate::Crashed;
        let said =
            self.outcomes.iter().find(is_said).filter(|_| !self.outcomes.iter().any(is_done));
        let if_finished = said.map_or(ExitCode::Done, |outcome| outcome.code);
        let worst = codes().filter(|code| *code != ExitCode::Done).min_by_key(|c| Fate::of(*c));
        let otherwise = match worst {
            _ if self.is_finished => if_finished,
            Some(_) if self.is_forced => self.forced,
            Some(code) => code,
            None => ExitCode::Done,
        };
        Verdict { if_finished, otherwise, has_done }
    }
}

/// What the agent exits with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Verdict {
    /// If the job is finished: 0 if anybody here ended with 0, whoever died on the way, or if nobody says otherwise.
    pub if_finished: ExitCode,
    /// If it is not, or if the workers have no job of ours: forced, if it was; else left in good order if anybody did; else the most telling
    /// failure, the first of its kind; 0 if all ended with 0.
    pub otherwise: ExitCode,
    /// A worker ended with 0, as those do that have seen the job finish.
    pub has_done: bool,
}

/// How an agent treats its workers. All have defaults; every combination is valid.
#[derive(Clone, Debug)]
pub struct Config {
    slots: NonZeroU32,
    max_restarts: u32,
    heal_after: Duration,
    grace: Duration,
    requeue: RequeueCode,
}

impl Config {
    /// `slots` workers, everything else as by default.
    #[must_use]
    pub fn new(slots: NonZeroU32) -> Self {
        Self {
            slots,
            max_restarts: 3,
            heal_after: Duration::from_mins(10),
            grace: Duration::from_secs(30),
            requeue: RequeueCode::default(),
        }
    }

    /// How often each worker may be restarted; default 3. Too few: a flaky host ends the job; too many: it comes and goes for long.
    #[must_use]
    pub fn with_max_restarts(mut self, max_restarts: u32) -> Self {
        self.max_restarts = max_restarts;
        self
    }

    /// After how long a run without a crash a restart is given back; default 10 min. Too short: a crash that comes back is never
    /// final; too long: a job of weeks ends by unrelated crashes. Zero is never.
    #[must_use]
    pub fn with_heal_after(mut self, heal_after: Duration) -> Self {
        self.heal_after = heal_after;
        self
    }

    /// How long workers may take to leave when asked to; default 30 s, as schedulers give. Too short: they are killed in mid-step, as
    /// if they had crashed; too long: the scheduler kills first.
    #[must_use]
    pub fn with_grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// The code that says "left in good order"; default 75.
    #[must_use]
    pub fn with_requeue(mut self, requeue: RequeueCode) -> Self {
        self.requeue = requeue;
        self
    }

    /// The number of workers.
    #[must_use]
    pub fn slots(&self) -> NonZeroU32 {
        self.slots
    }

    /// How often each worker may be restarted.
    #[must_use]
    pub fn max_restarts(&self) -> u32 {
        self.max_restarts
    }
}

/// What the shell does for the machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Start a worker; answer with `handle_started` or `handle_start_failed`.
    Start {
        /// Where.
        slot: Slot,
        /// Which attempt, from 0.
        attempt: u32,
    },
    /// Give a start up if it has no process yet (`handle_cancelled`), else go on with it.
    Cancel {
        /// Where.
        slot: Slot,
        /// Which attempt.
        attempt: u32,
    },
    /// Tell the coordinators that a node ended.
    Report {
        /// Where it ran.
        slot: Slot,
        /// Who.
        node: NodeId,
        /// How.
        exit: Exit,
        /// When that was noticed.
        at: Timestamp,
    },
    /// Ask a worker to leave.
    Forward {
        /// Where it runs.
        slot: Slot,
        /// Who.
        node: NodeId,
        /// By which signal.
        signal: Signal,
    },
    /// Kill every process there is.
    KillAll,
    /// All have ended: exit. Nothing follows.
    Finished(Verdict),
}

/// Why a worker could not be started.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StartFailure {
    /// As if it had started and ended so.
    Crash(Exit),
    /// It will never start: the slot ends with this code.
    Permanent(ExitCode),
}

/// Why the coordinators release an agent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Release {
    /// The job is finished.
    Finished,
    /// The job was stopped, or all members of this agent drained.
    Stopped,
}

/// The place of a worker on its host, from 0; torchrun's local rank.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Slot(pub u32);

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[derive(Clone, Debug)]
struct Worker {
    attempt: u32,
    // Invariant: at most the budget.
    restarts_spent: u32,
    quick_crashes: u32,
    phase: Phase,
}

impl Worker {
    fn heal(&mut self, healthy: Duration, heal_after: Duration) {
        let healed = healthy.as_nanos().checked_div(heal_after.as_nanos()).unwrap_or(0);
        self.restarts_spent =
            self.restarts_spent.saturating_sub(u32::try_from(healed).unwrap_or(u32::MAX));
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Waiting { until: Timestamp },
    Starting,
    Running { node: NodeId, since: Timestamp },
    Ended,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Working,
    /// Nothing is started any more.
    Leaving {
        deadline: Option<Timestamp>,
    },
    Killing {
        until: Timestamp,
    },
    Ended,
}

#[derive(Clone, Copy, Debug)]
struct Outcome {
    code: ExitCode,
    /// The program chose this code itself.
    is_exit: bool,
}

/// What an exit code of a worker means for its slot; in the order in which they decide the agent's code.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Fate {
    Finished,
    Left,
    /// Trying again can't help.
    Permanent,
    /// Trying again may help.
    Crashed,
    /// Trying again may help, elsewhere.
    Elsewhere,
}

impl Fate {
    fn of(code: ExitCode) -> Self {
        match code {
            ExitCode::Done => Self::Finished,
            ExitCode::Requeue(_) => Self::Left,
            ExitCode::Usage | ExitCode::Incompatible | ExitCode::Configuration => Self::Permanent,
            ExitCode::Unavailable | ExitCode::BadNode => Self::Elsewhere,
            ExitCode::Bug
            | ExitCode::Interrupted
            | ExitCode::Terminated
            | ExitCode::Program(_)
            | ExitCode::Signalled(_) => Self::Crashed,
        }
    }
}

/// The wait before a restart after `crashes` quick crashes in a row before this one: none at first, so that a single death costs
/// nothing, then doubling.
fn backoff(crashes: u32) -> Duration {
    match crashes {
        0 => Duration::ZERO,
        1..=5 => BACKOFF * (1 << (crashes - 1)),
        _ => BACKOFF_MAX,
    }
    .min(BACKOFF_MAX)
}

/// How long killed processes may take to go. Only one stuck in the kernel (a dead file server or driver) takes that long, and
/// nothing we can do ends it.
pub const KILL_LIMIT: Duration = Duration::from_secs(20);

/// A run this long ends a row of quick crashes: longer than any start-up that fails at the same place each time.
const HEALTHY_AFTER: Duration = Duration::from_secs(30);

/// The wait after the second quick crash.
const BACKOFF: Duration = Duration::from_millis(500);

/// The longest wait: a host that comes back is not kept out for long.
const BACKOFF_MAX: Duration = Duration::from_secs(10);

/// The number of TERM, by which workers are asked to leave.
const SIGTERM: i32 = rustix::process::Signal::TERM.as_raw();

/// The number of KILL.
const SIGKILL: i32 = rustix::process::Signal::KILL.as_raw();

#[cfg(test)]
mod tests;
