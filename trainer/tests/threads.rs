//! The bits of a run do not depend on how many threads computed it.

#![expect(clippy::unwrap_used, reason = "a test, also where it has functions of its own")]

use std::process::Command;

use ripstop_trainer::{Corpus, TrainerConfig, probe_digest, train_alone};
use types::VirtualRanks;

/// The test runs itself as a child process, because a process settles its number of threads once.
#[test]
#[expect(clippy::print_stdout, reason = "the child hands its digest over on stdout")]
fn the_number_of_threads_changes_no_bit() {
    if std::env::var_os(CHILD).is_some() {
        println!("{MARK}{}", compute());
        return;
    }
    let digests: Vec<String> = ["1", "2", "4"].into_iter().map(digest_with_threads).collect();
    assert!(digests.iter().all(|digest| *digest == digests[0]), "{digests:?}");
}

fn digest_with_threads(threads: &str) -> String {
    let program = std::env::current_exe().unwrap();
    let output = Command::new(program)
        .args(["--exact", "the_number_of_threads_changes_no_bit", "--nocapture"])
        .env(CHILD, "1")
        .env("RAYON_NUM_THREADS", threads)
        .env_remove("CANDLE_NUM_THREADS")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let (_, digest) = text.split_once(MARK).unwrap_or_else(|| panic!("no digest in {text}"));
    digest.split_whitespace().next().unwrap().to_owned()
}

/// A few steps of the default model, a leaf whose products are long enough for threads and cache splits, and odd shapes.
fn compute() -> String {
    let config = TrainerConfig { steps: 3, ..TrainerConfig::default() };
    let corpus = Corpus::load(&config).unwrap();
    let outcome = train_alone(&config, &corpus, VirtualRanks::new(3).unwrap()).unwrap();
    let large =
        TrainerConfig { layers: 1, width: 192, context: 160, batch: 8, ..TrainerConfig::default() };
    let odd = TrainerConfig {
        layers: 1,
        width: 57,
        heads: 3,
        context: 37,
        batch: 7,
        ..TrainerConfig::default()
    };
    let digests =
        [outcome.state.digest(), probe_digest(&large).unwrap(), probe_digest(&odd).unwrap()];
    digests.map(|digest| digest.to_string()).join("-")
}

const CHILD: &str = "RIPSTOP_TRAINER_TEST_CHILD";
const MARK: &str = "digest=";
