//! Bugs that were found, each by a plan that once failed; the files in `regressions/` say what went wrong.

use std::path::Path;

use ripstop_chaos::plan::Plan;
use ripstop_chaos::sim::Sim;
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Regression {
    seed: u64,
    plan: Plan,
}

#[test]
fn what_once_failed_holds() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("regressions");
    let mut found = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let Regression { seed, plan } = toml::from_str(&text).unwrap();
        // The file's own seed, and some near it: chances shift as the code does.
        for seed in seed..seed + 20 {
            let outcome = Sim::new(seed, plan.clone(), None).run();
            if let Some((violation, newest)) = outcome.failure {
                panic!("{}, seed {seed}: {violation}\n  {}", path.display(), newest.join("\n  "));
            }
        }
        found += 1;
    }
    assert!(found > 0, "no regression was found");
}
