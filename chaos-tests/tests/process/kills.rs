//! Workers killed by KILL at any moment of a step, fifty times and more.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use ripstop_chaos::process::{
    Cluster, Job, Line, Place, Signal, Traces, Writer, coordinator, play,
};

/// In which jobs, how often.
const JOBS: [(Place, u32, u32, u64); 3] = [
    // one agent with a coordinator of its own; workers, virtual ranks, kills
    (Place::Standalone, 5, 8, 17),
    // two agents with three coordinators; an odd number of virtual ranks
    (Place::Coordinators, 3, 7, 17),
    // fewer workers than before, more leaves for each
    (Place::Standalone, 4, 12, 17),
];
const STEPS: u64 = 320;
const LEAF_MS: u64 = 8;
/// What a kill waits for before it strikes; `""` is any moment.
const MOMENTS: [&str; 12] = [
    "",
    "leaf",
    "final",
    "applied",
    "",
    "world",
    "entered",
    "loaded",
    "restore",
    "stage",
    "recompute",
    "leaf",
];
/// Not every moment comes again soon; then any other must do.
const AIM: Duration = Duration::from_millis(800);

#[test]
fn a_kill_at_any_moment_never_changes_the_digest() -> anyhow::Result<()> {
    let seed = seed();
    eprintln!("RIPSTOP_CHAOS_SEED={seed} replays the choice of victims and moments");
    let mut chance = Chance(seed);
    let mut moments = BTreeMap::new();
    for (place, workers, virtual_ranks, kills) in JOBS {
        play(|cluster| {
            job(cluster, &mut chance, &mut moments, (place, workers, virtual_ranks, kills))
        })
        .with_context(|| format!("seed {seed}"))?;
    }
    let killed: u64 = moments.values().sum();
    eprintln!("{killed} kills, by what the victim had done last: {moments:?}");
    ensure!(killed >= 50, "only {killed} kills");
    ensure!(moments.len() >= 4, "all kills came at the same few moments: {moments:?}");
    Ok(())
}

fn job(
    cluster: &mut Cluster,
    chance: &mut Chance,
    moments: &mut BTreeMap<String, u64>,
    (place, workers, virtual_ranks, kills): (Place, u32, u32, u64),
) -> anyhow::Result<()> {
    let flags =
        ["--max-restarts", "100", "--checkpoint", "checkpoints", "--checkpoint-every", "300ms"];
    let job =
        Job::new(STEPS).with_leaf_ms(LEAF_MS).with_virtual_ranks(virtual_ranks).with_flags(&flags);
    let undisturbed = cluster.undisturbed(&job)?;
    let mut agents = Vec::new();
    if place == Place::Coordinators {
        cluster.start_coordinators(&[1, 2, 3])?;
        agents.push(cluster.start_agent(&job, place, workers)?);
    }
    agents.push(cluster.start_agent(&job, place, workers)?);
    let mut dead_leader = None;
    for kill in 1..=kills {
        let due = kill * STEPS * 4 / 5 / kills;
        cluster
            .wait(&format!("boundary {due}"), |traces| (traces.boundary() >= due).then_some(()))?;
        if let Some(leader) = dead_leader.take() {
            let command = cluster.coordinator_command(leader);
            cluster.start(&coordinator(leader), command)?;
        }
        if place == Place::Coordinators && kill % 5 == 0 {
            // The worker dies while there is nobody who could say so.
            dead_leader = cluster.traces().leader();
            dead_leader.map_or(Ok(()), |leader| cluster.kill(&coordinator(leader)))?;
        }
        let victim = strike(cluster, chance, moments, None)?;
        if chance.below(5) == 0 {
            strike(cluster, chance, moments, Some(victim))?;
        }
    }
    for agent in &agents {
        let said = cluster.said(agent)?;
        ensure!(said.code == 0, "{agent} ended with code {}", said.code);
        // Who was to print it may be among the killed.
        let printed = said.digest().unwrap_or(&undisturbed.digest);
        ensure!(printed == undisturbed.digest, "{agent} printed the digest {printed}");
    }
    cluster.check_states(&undisturbed)?;
    let finished = cluster.wait("word of the end", |t| t.finished_state().map(str::to_owned))?;
    ensure!(finished == undisturbed.digest, "finished with {finished}, not {}", undisturbed.digest);
    Ok(())
}

/// Kills one worker: at a moment of the seed's choice, or at once if one was killed just now.
fn strike(
    cluster: &mut Cluster,
    chance: &mut Chance,
    moments: &mut BTreeMap<String, u64>,
    just_killed: Option<u64>,
) -> anyhow::Result<u64> {
    let actor = if just_killed.is_some() { None } else { aim(cluster, chance)? };
    let victim = cluster.poll("a worker that can be killed", |cluster| {
        let mut alive = cluster.traces().alive();
        alive.retain(|node| Some(*node) != just_killed);
        if alive.is_empty() {
            return Ok(None);
        }
        let any = alive[chance.below(alive.len() as u64) as usize];
        // Mostly the one who did it, sometimes one who hears of it.
        let victim =
            actor.filter(|node| alive.contains(node) && chance.below(4) > 0).unwrap_or(any);
        Ok(cluster.signal_worker(victim, Signal::KILL)?.then_some(victim))
    })?;
    *moments.entry(last_event(cluster.traces(), victim)).or_default() += 1;
    Ok(victim)
}

/// Waits for a moment, and says whose it is.
fn aim(cluster: &mut Cluster, chance: &mut Chance) -> anyhow::Result<Option<u64>> {
    let moment = MOMENTS[chance.below(MOMENTS.len() as u64) as usize];
    let seen: BTreeMap<u64, usize> = counts(cluster.traces(), moment);
    let began = Instant::now();
    let delay = Duration::from_micros(chance.below(if moment.is_empty() { 60_000 } else { 9_000 }));
    let actor = cluster.poll(&format!("a worker to do this: {moment}"), |cluster| {
        let now = counts(cluster.traces(), moment);
        let newer = |node: &u64| now.get(node) > seen.get(node);
        let actor = cluster.traces().alive().into_iter().find(newer);
        let is_over = moment.is_empty() || actor.is_some() || began.elapsed() > AIM;
        Ok(is_over.then_some(actor))
    })?;
    let seen_at = Instant::now();
    cluster.poll("the moment", |_| Ok((seen_at.elapsed() >= delay).then_some(())))?;
    Ok(actor)
}

fn counts(traces: &Traces, event: &str) -> BTreeMap<u64, usize> {
    let count = |lines: &[Line]| lines.iter().filter(|l| l.event == event).count();
    traces.workers().map(|(node, lines)| (node, count(lines))).collect()
}

fn last_event(traces: &Traces, node: u64) -> String {
    let lines = traces.of(Writer::Worker(node));
    lines.last().map_or("nothing yet", |line| line.event.as_str()).to_owned()
}

fn seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let given = std::env::var("RIPSTOP_CHAOS_SEED").ok().and_then(|text| text.parse().ok());
    given.unwrap_or_else(|| now.map_or(1, |now| u64::from(now.subsec_nanos())))
}

/// Numbers that one seed decides (splitmix64).
struct Chance(u64);

impl Chance {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }
}
