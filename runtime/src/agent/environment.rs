//! The environment of a worker: what a script written for torchrun looks for, and ours.
//!
//! Pure: what the user has set comes in as a set of names. Deliberately not here: the process environment itself (a worker
//! inherits it), and the values of the `RIPSTOP_` variables, which the caller brings.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::PathBuf;

/// Where a worker stands among the others, in torchrun's words.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Placement {
    /// The worker's slot on this host; picks the GPU in nearly every script.
    pub local_rank: u32,
    /// Workers on this host.
    pub local_world_size: u32,
    /// This host's number.
    pub group_rank: u32,
    /// Number of hosts; with a range of hosts, the most.
    pub group_world_size: u32,
    /// The role's name; torchrun's default is `default`.
    pub role: String,
    /// Where rank 0 would listen for `torch.distributed`.
    pub master_address: String,
    /// The port there.
    pub master_port: u16,
    /// The job's name.
    pub run: String,
    /// How often this worker has been started before.
    pub restarts: u32,
    /// How often it may be started again.
    pub max_restarts: u32,
    /// Where the worker writes what went wrong, if anywhere.
    pub error_file: Option<PathBuf>,
}

impl Placement {
    /// The variables to set on top of the inherited ones. `inherited` holds the names that the user has set: a few of ours are
    /// only defaults and leave those alone. `extra` (the `RIPSTOP_` variables) wins over everything.
    ///
    /// `RANK` and `WORLD_SIZE` are hints, right while every host runs the same number of workers: the session knows the world.
    #[must_use]
    pub fn environment(
        &self,
        inherited: &BTreeSet<String>,
        extra: &BTreeMap<String, String>,
    ) -> BTreeMap<OsString, OsString> {
        let rank = u64::from(self.group_rank) * u64::from(self.local_world_size)
            + u64::from(self.local_rank);
        let world_size = u64::from(self.group_world_size) * u64::from(self.local_world_size);
        let mut variables: BTreeMap<OsString, OsString> = BTreeMap::new();
        let mut set = |name: &str, value: String| {
            variables.insert(name.into(), value.into());
        };
        set("RANK", rank.to_string());
        set("WORLD_SIZE", world_size.to_string());
        set("LOCAL_RANK", self.local_rank.to_string());
        set("LOCAL_WORLD_SIZE", self.local_world_size.to_string());
        set("GROUP_RANK", self.group_rank.to_string());
        set("GROUP_WORLD_SIZE", self.group_world_size.to_string());
        set("ROLE_NAME", self.role.clone());
        set("ROLE_RANK", rank.to_string());
        set("ROLE_WORLD_SIZE", world_size.to_string());
        set("MASTER_ADDR", self.master_address.clone());
        set("MASTER_PORT", self.master_port.to_string());
        set("TORCHELASTIC_RESTART_COUNT", self.restarts.to_string());
        set("TORCHELASTIC_MAX_RESTARTS", self.max_restarts.to_string());
        set("TORCHELASTIC_RUN_ID", self.run.clone());
        for (name, value) in DEFAULTS {
            if !inherited.contains(*name) {
                set(name, (*value).to_owned());
            }
        }
        for (name, value) in extra {
            set(name, value.clone());
        }
        if let Some(path) = &self.error_file {
            variables.insert("TORCHELASTIC_ERROR_FILE".into(), path.clone().into_os_string());
        }
        variables
    }
}

/// Set unless the user has: one thread per worker for numeric libraries, since several workers share a host and the order of
/// additions must not depend on its cores; and unbuffered Python output, so that the last lines of a killed worker are not lost.
const DEFAULTS: &[(&str, &str)] =
    &[("OMP_NUM_THREADS", "1"), ("RAYON_NUM_THREADS", "1"), ("PYTHONUNBUFFERED", "1")];

#[cfg(test)]
mod tests {
    use super::*;

    fn placement() -> Placement {
        Placement {
            local_rank: 1,
            local_world_size: 4,
            group_rank: 2,
            group_world_size: 3,
            role: "default".to_owned(),
            master_address: "10.0.0.1".to_owned(),
            master_port: 29500,
            run: "demo".to_owned(),
            restarts: 2,
            max_restarts: 3,
            error_file: Some("/logs/attempt_2/1/error.json".into()),
        }
    }

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_worker_finds_all_that_torchrun_would_set() {
        let found = placement().environment(&BTreeSet::new(), &BTreeMap::new());
        let expected = [
            ("GROUP_RANK", "2"),
            ("GROUP_WORLD_SIZE", "3"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("MASTER_ADDR", "10.0.0.1"),
            ("MASTER_PORT", "29500"),
            ("OMP_NUM_THREADS", "1"),
            ("PYTHONUNBUFFERED", "1"),
            ("RANK", "9"),
            ("RAYON_NUM_THREADS", "1"),
            ("ROLE_NAME", "default"),
            ("ROLE_RANK", "9"),
            ("ROLE_WORLD_SIZE", "12"),
            ("TORCHELASTIC_ERROR_FILE", "/logs/attempt_2/1/error.json"),
            ("TORCHELASTIC_MAX_RESTARTS", "3"),
            ("TORCHELASTIC_RESTART_COUNT", "2"),
            ("TORCHELASTIC_RUN_ID", "demo"),
            ("WORLD_SIZE", "12"),
        ];
        let found: Vec<_> = found
            .iter()
            .map(|(name, value)| (name.to_str().unwrap(), value.to_str().unwrap()))
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn what_the_user_has_set_is_left_alone_where_ours_is_a_default() {
        let inherited =
            names(&["OMP_NUM_THREADS", "RAYON_NUM_THREADS", "PYTHONUNBUFFERED", "RANK"]);
        let found = placement().environment(&inherited, &BTreeMap::new());
        for name in ["OMP_NUM_THREADS", "RAYON_NUM_THREADS", "PYTHONUNBUFFERED"] {
            assert!(!found.contains_key(&OsString::from(name)), "{name}");
        }
        assert_eq!(found[&OsString::from("RANK")], "9");
    }

    #[test]
    fn the_callers_variables_win() {
        let extra = BTreeMap::from([
            ("RIPSTOP_RUN_ID".to_owned(), "demo".to_owned()),
            ("OMP_NUM_THREADS".to_owned(), "4".to_owned()),
        ]);
        let found = placement().environment(&BTreeSet::new(), &extra);
        assert_eq!(found[&OsString::from("RIPSTOP_RUN_ID")], "demo");
        assert_eq!(found[&OsString::from("OMP_NUM_THREADS")], "4");
    }

    #[test]
    fn without_a_log_folder_there_is_no_error_file() {
        let found = Placement { error_file: None, ..placement() }
            .environment(&BTreeSet::new(), &BTreeMap::new());
        assert!(!found.contains_key(&OsString::from("TORCHELASTIC_ERROR_FILE")));
    }

    #[test]
    fn large_sizes_do_not_overflow() {
        let large = Placement { group_rank: u32::MAX, local_world_size: u32::MAX, ..placement() };
        assert!(
            large
                .environment(&BTreeSet::new(), &BTreeMap::new())
                .contains_key(&OsString::from("RANK"))
        );
    }
}
