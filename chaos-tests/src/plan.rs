//! [`Plan`]: which faults happen when, and how the world looks; drawn from a seed.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::seed::Rng;

/// A fault. Which worker it meets is drawn when it happens, among those alive.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// A worker is killed; its agent says so, or nobody does.
    KillWorker {
        /// Whether an agent saw it.
        is_seen: bool,
    },
    /// Two workers are killed at once.
    KillTwo,
    /// All workers are killed.
    KillAll,
    /// A worker is stopped for a while, and comes back.
    Freeze {
        /// For how long.
        ms: u64,
    },
    /// A worker's program hangs for good, while its heartbeats go on.
    Hang,
    /// A worker is asked to leave.
    Drain,
    /// A worker joins.
    Join,
    /// An operator changes how many members there may be; taken back once the faults are over.
    Scale {
        /// The least.
        min: u32,
        /// The most.
        max: u32,
    },
    /// An operator asks for a checkpoint.
    Save,
    /// A coordinator is killed, and started again from its disk.
    KillCoordinator {
        /// When it comes back.
        down_ms: u64,
    },
    /// A coordinator loses its disk, comes back with an empty one, and is replaced by an operator's word, unless another one did before.
    LoseDisk {
        /// When it comes back.
        down_ms: u64,
    },
    /// Two coordinators do not hear each other.
    CutCoordinators {
        /// For how long.
        ms: u64,
    },
    /// The link between two workers breaks, with what is on it.
    BreakLink {
        /// For how long.
        ms: u64,
    },
    /// A worker loses its coordinators, and not its peers: it goes on training, and is taken for dead.
    CutControl {
        /// For how long.
        ms: u64,
    },
    /// The coordinators' disks are slow.
    SlowDisks {
        /// For how long.
        ms: u64,
    },
    /// The store fails.
    StoreFails {
        /// For how long.
        ms: u64,
    },
}

/// A fault and its time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Due {
    /// Milliseconds after the workers started.
    pub at_ms: u64,
    /// What happens then.
    pub fault: Fault,
}

/// The shape of a run and its faults.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Raft voters.
    pub coordinators: u64,
    /// Workers at the start.
    pub workers: u64,
    /// Fewer, and the job waits.
    pub min_members: u32,
    /// The job's virtual ranks.
    pub virtual_ranks: u32,
    /// Chunks of the gradient, the report chunk among them.
    pub chunks: u32,
    /// Steps of the job.
    pub steps: u64,
    /// Whether it has a checkpoint store.
    pub has_store: bool,
    /// Whether leaves take some workers longer than others.
    #[serde(default)]
    pub is_uneven: bool,
    /// Faults, in order of time.
    #[serde(default)]
    pub faults: Vec<Due>,
}

impl Plan {
    /// Draws a plan: a fifth of all seeds have no fault (false alarms show there), a fifth a single one (so that none masks another).
    #[must_use]
    pub fn draw(seed: u64) -> Self {
        let mut rng = Rng::stream(seed, "plan");
        let workers = rng.within(1, 5);
        // With fewer virtual ranks than workers, the others are hot spares.
        let virtual_ranks = if rng.percent(20) {
            rng.within(1, workers) as u32
        } else {
            rng.within(workers + 1, 12) as u32
        };
        let has_store = rng.percent(75);
        let count = match rng.below(5) {
            0 => 0,
            1 => 1,
            _ => rng.within(2, 9),
        };
        let mut faults: Vec<Due> = (0..count)
            .map(|_| Due { at_ms: rng.within(100, 6000), fault: Self::fault(&mut rng) })
            .collect();
        faults.sort_by_key(|due| due.at_ms);
        Self {
            coordinators: if rng.percent(70) { 3 } else { 1 },
            workers,
            min_members: rng.within(1, u64::from(virtual_ranks).min(workers).min(2)) as u32,
            virtual_ranks,
            chunks: rng.within(1, 4) as u32,
            steps: rng.within(8, 40),
            has_store,
            is_uneven: rng.percent(50),
            faults,
        }
    }

    /// When the last fault happens, after the workers started.
    #[must_use]
    pub fn last(&self) -> Duration {
        Duration::from_millis(self.faults.last().map_or(0, |due| due.at_ms))
    }

    fn fault(rng: &mut Rng) -> Fault {
        match rng.below(100) {
            0..19 => Fault::KillWorker { is_seen: rng.percent(75) },
            19..22 => Fault::Hang,
            22..25 => Fault::BreakLink { ms: rng.within(500, 20_000) },
            25..33 => Fault::KillTwo,
            33..38 => Fault::KillAll,
            38..48 => Fault::Freeze { ms: rng.within(20, 2500) },
            48..56 => Fault::Drain,
            56..66 => Fault::Join,
            66..70 => {
                let max = rng.within(1, 4) as u32;
                Fault::Scale { min: rng.within(1, u64::from(max)) as u32, max }
            }
            70..72 => Fault::Save,
            72..80 => Fault::KillCoordinator { down_ms: rng.within(50, 3000) },
            80..82 => Fault::LoseDisk { down_ms: rng.within(50, 3000) },
            82..87 => Fault::CutCoordinators { ms: rng.within(50, 2500) },
            87..92 => Fault::BreakLink { ms: rng.within(5, 800) },
            92..95 => Fault::CutControl { ms: rng.within(50, 3000) },
            95..98 => Fault::SlowDisks { ms: rng.within(300, 4000) },
            _ => Fault::StoreFails { ms: rng.within(50, 3000) },
        }
    }
}
