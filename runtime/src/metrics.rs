//! The metrics, by the prometheus crate: the only file that knows it.

use prometheus::{
    Encoder, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry, TextEncoder,
};

use crate::drivers::buffers::Buffers;
use crate::step_cycle::StepCycle;

/// A registry whose text can be served.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    registry: Registry,
}

impl Metrics {
    /// The exposition text.
    #[must_use]
    pub fn text(&self) -> String {
        let mut out = Vec::new();
        if let Err(error) = TextEncoder::new().encode(&self.registry.gather(), &mut out) {
            tracing::warn!(%error, "metrics can't be encoded");
        }
        String::from_utf8_lossy(&out).into_owned()
    }

    fn counter(&self, name: &str, help: &str) -> IntCounter {
        let metric =
            IntCounter::new(format!("ripstop_{name}"), help).expect("names in this file are valid");
        self.register(metric.clone());
        metric
    }

    fn gauge(&self, name: &str, help: &str) -> IntGauge {
        let metric =
            IntGauge::new(format!("ripstop_{name}"), help).expect("names in this file are valid");
        self.register(metric.clone());
        metric
    }

    fn gauges(&self, name: &str, help: &str, label: &str) -> IntGaugeVec {
        let metric = IntGaugeVec::new(Opts::new(format!("ripstop_{name}"), help), &[label])
            .expect("names in this file are valid");
        self.register(metric.clone());
        metric
    }

    fn counters(&self, name: &str, help: &str, label: &str) -> IntCounterVec {
        let metric = IntCounterVec::new(Opts::new(format!("ripstop_{name}"), help), &[label])
            .expect("names in this file are valid");
        self.register(metric.clone());
        metric
    }

    fn histogram(&self, name: &str, help: &str) -> Histogram {
        let options =
            HistogramOpts::new(format!("ripstop_{name}"), help).buckets(seconds_buckets());
        let metric = Histogram::with_opts(options).expect("names in this file are valid");
        self.register(metric.clone());
        metric
    }

    fn histograms(&self, name: &str, help: &str, label: &str) -> HistogramVec {
        let options =
            HistogramOpts::new(format!("ripstop_{name}"), help).buckets(seconds_buckets());
        let metric = HistogramVec::new(options, &[label]).expect("names in this file are valid");
        self.register(metric.clone());
        metric
    }

    fn register(&self, metric: impl prometheus::core::Collector + 'static) {
        self.registry.register(Box::new(metric)).expect("each name is registered once");
    }
}

/// From 1 ms to a minute, about three a decade.
fn seconds_buckets() -> Vec<f64> {
    vec![0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0]
}

/// What a worker counts.
#[derive(Clone, Debug)]
pub(crate) struct WorkerMetrics {
    pub(crate) generation: IntGauge,
    pub(crate) members: IntGauge,
    pub(crate) steps: IntCounter,
    pub(crate) leaves: IntCounter,
    pub(crate) recomputed: IntGauge,
    pub(crate) dropped_frames: IntGauge,
    pub(crate) sent_bytes: IntCounter,
    pub(crate) retained_bytes: IntGauge,
    pub(crate) step_seconds: Histogram,
    pub(crate) checkpoint_step: IntGauge,
    pub(crate) checkpoint_bytes: IntCounter,
    pub(crate) checkpoint_failures: IntCounter,
    pub(crate) divergences: IntCounter,
}

impl WorkerMetrics {
    pub(crate) fn new(metrics: &Metrics) -> Self {
        Self {
            generation: metrics.gauge("membership_generation", "number of the present world"),
            members: metrics.gauge("members", "members of the present world"),
            steps: metrics.counter("steps_total", "steps applied by this process"),
            leaves: metrics.counter("leaves_total", "leaves contributed by this process"),
            recomputed: metrics.gauge(
                "leaves_recomputed_total",
                "leaves computed here because a change lost or moved them",
            ),
            dropped_frames: metrics
                .gauge("frames_dropped_total", "frames of ended worlds, late or double"),
            sent_bytes: metrics.counter("collective_bytes_total", "bytes of nodes and finals sent"),
            retained_bytes: metrics.gauge("retained_bytes", "bytes of nodes and finals held"),
            step_seconds: metrics
                .histogram("step_duration_seconds", "from the begin of a step to its application"),
            checkpoint_step: metrics
                .gauge("checkpoint_step", "boundary of the newest committed checkpoint"),
            checkpoint_bytes: metrics
                .counter("checkpoint_bytes_total", "bytes of checkpoints stored by this process"),
            checkpoint_failures: metrics
                .counter("checkpoint_failures_total", "checkpoint attempts that failed here"),
            divergences: metrics
                .counter("state_divergence_total", "differences of state seen; page someone"),
        }
    }

    /// Copies what the machine counted.
    pub(crate) fn follow(&self, cycle: &StepCycle, buffers: &Buffers) {
        let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        self.members.set(cycle.world().map_or(0, |w| i64::from(w.size().members())));
        self.dropped_frames.set(number(cycle.counters().dropped_frames));
        self.retained_bytes.set(number(buffers.bytes() as u64));
    }
}

/// What a coordinator counts.
#[derive(Clone, Debug)]
pub(crate) struct CoordinatorMetrics {
    pub(crate) term: IntGauge,
    pub(crate) is_leader: IntGauge,
    pub(crate) commit_index: IntGauge,
    pub(crate) connections: IntGauge,
    pub(crate) events: IntCounterVec,
    pub(crate) members: IntGaugeVec,
    pub(crate) generation: IntGaugeVec,
    pub(crate) fsync_seconds: HistogramVec,
}

impl CoordinatorMetrics {
    pub(crate) fn new(metrics: &Metrics) -> Self {
        Self {
            term: metrics.gauge("raft_term", "raft's term"),
            is_leader: metrics.gauge("raft_is_leader", "1 on the leader"),
            commit_index: metrics.gauge("raft_commit_index", "raft's commit index"),
            connections: metrics.gauge("connections", "open control connections"),
            events: metrics.counters("events_total", "events of the log by kind", "kind"),
            members: metrics.gauges("job_members", "members of a job's present world", "job"),
            generation: metrics.gauges("job_generation", "number of a job's present world", "job"),
            fsync_seconds: metrics.histograms(
                "raft_fsync_seconds",
                "time to make a log write durable",
                "kind",
            ),
        }
    }
}

/// What an agent counts.
#[derive(Clone, Debug)]
pub(crate) struct AgentMetrics {
    pub(crate) workers: IntGauge,
    pub(crate) restarts: IntCounter,
    pub(crate) deaths: IntCounter,
    pub(crate) notices: IntCounterVec,
}

impl AgentMetrics {
    pub(crate) fn new(metrics: &Metrics) -> Self {
        Self {
            workers: metrics.gauge("agent_workers", "workers alive on this host"),
            restarts: metrics.counter("agent_restarts_total", "workers started again"),
            deaths: metrics.counter(
                "agent_worker_deaths_total",
                "workers that ended otherwise than by finishing",
            ),
            notices: metrics.counters(
                "preemption_notices_total",
                "notices that this host goes away, or may",
                "source",
            ),
        }
    }
}
