//! The status document.

use types::{Generation, Lineage};

use crate::coordinator::Coordinator;
use crate::coordinator::watch::JobWatch;
use crate::job::{Job, Stage};
use crate::message::{
    CheckpointStatus, ClusterStatus, CoordinatorStatus, JobStatus, MemberStatus, Phase,
    describe_blocks,
};

impl Coordinator {
    /// How things stand. Only a leader knows what workers reported; others leave that out.
    #[must_use]
    pub fn status(&self) -> ClusterStatus {
        let leader = self.leader();
        let coordinators = self.config.voters().iter().map(|(id, address)| CoordinatorStatus {
            id: *id,
            address: *address,
            is_leader: leader == Some(*id),
        });
        let watch = |job: &Job| self.leading.as_ref().and_then(|l| l.jobs.get(&job.spec().job));
        let jobs = self.roster.jobs().values().map(|job| job_status(job, watch(job)));
        ClusterStatus {
            coordinators: coordinators.collect(),
            term: self.term(),
            jobs: jobs.collect(),
        }
    }
}

fn job_status(job: &Job, watch: Option<&JobWatch>) -> JobStatus {
    let world = job.world();
    let spec = job.spec();
    let member = |node: &types::NodeId| {
        let listed = &job.nodes()[node];
        let heartbeat = watch.and_then(|w| w.reports.newest(*node));
        let state = match heartbeat.map_or(Phase::Joining, |h| h.phase) {
            _ if listed.draining.is_some() => "draining",
            Phase::Joining => "joining",
            Phase::Syncing => "syncing",
            Phase::Following => "following",
            Phase::Active => "active",
            Phase::Leaving => "leaving",
        };
        let blocks =
            world.and_then(|w| w.member(*node)).map(|m| m.blocks.as_slice()).unwrap_or_default();
        MemberStatus {
            node: *node,
            rank: world.and_then(|w| w.rank_of(*node)),
            host: listed.host.clone(),
            state: state.to_owned(),
            applied: watch.and_then(|w| w.reports.boundary(job, *node)),
            blocks: describe_blocks(blocks, spec.virtual_ranks),
        }
    };
    let checkpoint = job.committed().map(|c| CheckpointStatus {
        step: c.step,
        attempt: c.attempt,
        lineage: c.lineage,
        manifest: c.manifest.clone(),
    });
    JobStatus {
        job: spec.job.clone(),
        state: state(job, watch).to_owned(),
        generation: Some(job.generation()).filter(|g| *g > Generation(0)),
        lineage: Some(job.lineage()).filter(|l| *l > Lineage(0)),
        step: match job.stage() {
            Stage::Finished => spec.total_steps,
            Stage::Running | Stage::Stopped => {
                let reported = watch.filter(|_| world.is_some()).map(|w| w.reports.highest(job));
                reported.max(job.committed().map(|c| c.step))
            }
        },
        virtual_ranks: spec.virtual_ranks.count(),
        min_members: spec.min_members,
        max_members: spec.max_members,
        members: job.nodes().keys().map(member).collect(),
        has_store: spec.checkpoint_every.is_some(),
        checkpoint,
        mixed: job.is_mixed(),
    }
}

fn state(job: &Job, watch: Option<&JobWatch>) -> &'static str {
    let is_enough = job.nodes().len() >= job.spec().min_members as usize;
    match job.stage() {
        Stage::Finished => "finished",
        Stage::Stopped if job.nodes().is_empty() => "stopped",
        _ if !is_enough && (job.generation() == Generation(0) || job.heirs().is_empty()) => {
            "waiting"
        }
        Stage::Stopped => "forming",
        Stage::Running if job.heirs().is_empty() => "forming",
        Stage::Running if job.world().is_some_and(|w| w.held) => "below_min",
        Stage::Running if job.entered() != Some(job.generation()) => "forming",
        Stage::Running if job.is_all_draining() => "finishing",
        Stage::Running => {
            let highest = watch.map(|w| w.reports.highest(job));
            let is_at_end =
                job.spec().total_steps.is_some_and(|total| highest.is_some_and(|h| h >= total));
            if is_at_end { "finishing" } else { "training" }
        }
    }
}
