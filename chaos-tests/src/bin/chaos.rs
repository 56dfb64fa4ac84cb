//! Runs simulations: `chaos --seed N` replays one and shows how it went, `chaos --seeds N` runs many.

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use ripstop_chaos::plan::Plan;
use ripstop_chaos::sim::Sim;

/// Deterministic simulation of the whole system.
#[derive(Debug, Parser)]
struct Args {
    /// Replay this one seed.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Run so many seeds.
    #[arg(long, value_name = "N", default_value_t = 200)]
    seeds: u64,
    /// Begin with this seed.
    #[arg(long, value_name = "N", default_value_t = 0)]
    from: u64,
    /// Print one JSON document.
    #[arg(short = 'o', long, value_name = "FORMAT")]
    output: Option<String>,
}

#[expect(clippy::print_stdout, clippy::print_stderr, reason = "a command's data and talk")]
fn main() -> ExitCode {
    let args = Args::parse();
    let seeds = match args.seed {
        Some(seed) => seed..seed + 1,
        None => args.from..args.from + args.seeds,
    };
    let began = Instant::now();
    let (mut events, mut worlds, mut evened, mut checkpoints, mut virtual_s) = (0, 0, 0, 0, 0.0);
    let mut failed = Vec::new();
    for seed in seeds.clone() {
        let plan = Plan::draw(seed);
        if args.seed.is_some() {
            eprintln!("{plan:#?}");
        }
        let outcome = Sim::new(seed, plan, None).run();
        events += outcome.events;
        worlds += outcome.worlds;
        evened += outcome.evened;
        checkpoints += outcome.checkpoints;
        virtual_s += outcome.elapsed.as_secs_f64();
        if let Some((violation, newest)) = &outcome.failure {
            failed.push(seed);
            eprintln!(
                "seed {seed} fails: {violation}\nnewest events:\n  {}\nreplay: cargo xtask chaos --seed {seed}",
                newest.join("\n  ")
            );
        } else if args.seed.is_some() {
            eprintln!("seed {seed} holds: {} events, trace {}", outcome.events, outcome.trace);
        }
    }
    let wall = began.elapsed().as_secs_f64();
    let (rate, times) = (events as f64 / wall, virtual_s / wall);
    if args.output.as_deref() == Some("json") {
        println!(
            "{}",
            serde_json::json!({"seeds": seeds.end - seeds.start, "failed": failed, "events": events, "worlds": worlds, "evened": evened,
                "checkpoints": checkpoints, "virtual_s": virtual_s, "wall_s": wall, "events_per_s": rate, "times_real_time": times})
        );
    } else {
        println!(
            "{} seeds, {} failed; {events} events, {worlds} worlds ({evened} of them to even out), {checkpoints} checkpoints; {virtual_s:.0} s in {wall:.1} s: {times:.0} × real time, {rate:.0} events/s",
            seeds.end - seeds.start,
            failed.len()
        );
    }
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
