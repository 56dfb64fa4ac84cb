//! Wrong input: one clear line that says what to do, the right exit code, and nothing lost.

use anyhow::ensure;
use ripstop_chaos::process::{Job, Place, Said, coordinator, free_port, play};

/// A command line, its exit code, and what its line must say.
type Case<'a> = (&'a [&'a str], i32, &'a [&'a str]);

#[test]
fn wrong_flags_and_places_are_refused_with_one_clear_line() -> anyhow::Result<()> {
    play(|cluster| {
        std::fs::write(cluster.folder().join("empty.txt"), "")?;
        std::fs::write(cluster.folder().join("file"), "no folder")?;
        let cases: &[Case<'_>] = &[
            (&["run", "--bogus", "--", "true"], 64, &["--bogus"]),
            (&["run", "--standalone"], 64, &["PROGRAM"]),
            (&["run", "--", "true"], 64, &["--coordinators", "--standalone"]),
            (
                &["run", "--standalone", "--nproc-per-node", "0", "--", "true"],
                64,
                &["--nproc-per-node"],
            ),
            (&["run", "--standalone", "--nnodes", "3:1", "--", "true"], 64, &["MIN:MAX"]),
            (&["run", "--standalone", "--checkpoint-every", "5", "--", "true"], 64, &["500ms"]),
            (
                &["run", "--standalone", "--nproc-per-node", "99999", "--", "true"],
                64,
                &["--nproc-per-node", "1024"],
            ),
            (
                &["run", "--standalone", "--notice", "gcp", "--", "true"],
                64,
                &["--notice", "file:PATH"],
            ),
            (
                &["run", "--standalone", "--log-dir", "/proc/x", "--", "true"],
                78,
                &["--log-dir /proc/x"],
            ),
            (
                &["run", "--standalone", "--trace-dir", "file/x", "--", "true"],
                78,
                &["--trace-dir file/x"],
            ),
            (
                &["run", "--coordinators", "nowhere", "--token", "x", "--", "true"],
                78,
                &["host:port"],
            ),
            (&["run", "--coordinators", "127.0.0.1:1", "--", "true"], 64, &["ripstop certs token"]),
            (
                &["run", "--coordinators", "127.0.0.1:1", "--token", "rubbish", "--", "true"],
                78,
                &["token"],
            ),
            (
                &[
                    "run",
                    "--standalone",
                    "--virtual-ranks",
                    "2",
                    "--min-members",
                    "3",
                    "--",
                    "true",
                ],
                78,
                &["--min-members 3", "--virtual-ranks"],
            ),
            (
                &["run", "--standalone", "--checkpoint", "ftp://x/y", "--", "true"],
                78,
                &["ftp", "s3://"],
            ),
            (
                &["run", "--standalone", "--checkpoint", "file/inside", "--", "true"],
                78,
                &["file/inside"],
            ),
            (
                &["run", "--standalone", "--checkpoint", "memory://x", "--", "true"],
                78,
                &["memory://"],
            ),
            (
                &["run", "--standalone", "--listen", "203.0.113.1", "--", "true"],
                78,
                &["203.0.113.1"],
            ),
            (&["trainer", "--data", "missing.txt"], 78, &["missing.txt", "--data"]),
            (&["trainer", "--data", "empty.txt"], 78, &["empty.txt"]),
            (&["trainer", "--steps", "0"], 78, &["--steps"]),
            (&["trainer", "--width", "33"], 78, &["--width 33"]),
            (
                &["coordinator", "--data-dir", "c", "--certs", "ca", "--peers", "2=127.0.0.1:1"],
                78,
                &["--id 1"],
            ),
            (
                &[
                    "coordinator",
                    "--data-dir",
                    "c",
                    "--certs",
                    "ca",
                    "--peers",
                    "1=127.0.0.1:1,2=127.0.0.1:2",
                ],
                78,
                &["odd"],
            ),
            (&["coordinator", "--data-dir", "c", "--peers", "1=127.0.0.1:1"], 78, &["--certs"]),
            (
                &[
                    "coordinator",
                    "--data-dir",
                    "c",
                    "--certs",
                    "nowhere",
                    "--peers",
                    "1=127.0.0.1:1",
                ],
                78,
                &["nowhere"],
            ),
            (
                &[
                    "coordinator",
                    "--data-dir",
                    "file/c",
                    "--certs",
                    "ca",
                    "--peers",
                    "1=127.0.0.1:1",
                ],
                78,
                &["--data-dir file/c"],
            ),
            (
                &[
                    "coordinator",
                    "--data-dir",
                    "c",
                    "--certs",
                    "ca",
                    "--peers",
                    "1=127.0.0.1:1",
                    "--http",
                    "127.0.0.1:0",
                    "--http-token",
                    "empty.txt",
                ],
                78,
                &["--http-token empty.txt", "16", "urandom"],
            ),
            (&["certs", "init", "--dir", "ca"], 78, &["ca"]),
            (&["certs", "token", "--dir", "nowhere"], 78, &["nowhere"]),
            (&["checkpoint", "export", "nothing-here", "--out", "out"], 78, &["no such folder"]),
            (&["checkpoint", "ls", "nothing-here"], 78, &["no such folder"]),
            (&["checkpoint", "export", ".", "--out", "out"], 64, &["no checkpoint"]),
            (&["checkpoint", "export", ".", "--out", "ca"], 78, &["not empty", "--overwrite"]),
            (&["drain", "abc"], 64, &["ripstop status"]),
            (
                &["run", "--standalone", "--min-members", "3", "--max-members", "2", "--", "true"],
                64,
                &["--min-members 3", "--max-members 2"],
            ),
            (
                &["run", "--standalone", "--token", "x", "--", "true"],
                64,
                &["--standalone", "--token"],
            ),
            (&["status", "--coordinators", "127.0.0.1:1"], 64, &["--certs"]),
        ];
        for case in cases {
            let said = cluster.run(case.0)?;
            check(case, &said)?;
        }
        Ok(())
    })
}

#[test]
fn times_that_nothing_can_keep_are_refused_by_the_launcher() -> anyhow::Result<()> {
    play(|cluster| {
        let cases = [
            ("--checkpoint-every", "0s", "100ms"),
            ("--coordinator-timeout", "0s", "1s"),
            ("--recovery-target", "50ms", "100ms"),
            ("--recovery-target", "1h", "600s"),
            ("--min-timeout", "0s", "--recovery-target"),
            ("--hang-timeout", "10ms", "--recovery-target"),
            ("--pause-timeout", "900ms", "--recovery-target"),
        ];
        for (flag, value, word) in cases {
            let said = cluster.run(&["run", "--standalone", flag, value, "--", "true"])?;
            check(&(&[flag, value], 64, &[flag, word]), &said)?;
        }
        Ok(())
    })
}

#[test]
fn unreachable_coordinators_are_69_once_the_timeout_is_over() -> anyhow::Result<()> {
    play(|cluster| {
        let nobody = format!("127.0.0.1:{}", free_port()?);
        let token = cluster.run(&["certs", "token", "--dir", "ca"])?.out;
        let run: &[&str] = &[
            "run",
            "--coordinators",
            &nobody,
            "--token",
            token.trim(),
            "--coordinator-timeout",
            "2s",
            "--",
            "true",
        ];
        let status: &[&str] =
            &["status", "--coordinators", &nobody, "--certs", "ca", "--timeout", "2s"];
        for arguments in [run, status] {
            let said = cluster.run(arguments)?;
            check(&(arguments, 69, &["no coordinator answered", &nobody]), &said)?;
        }
        Ok(())
    })
}

#[test]
fn tokens_that_are_foreign_or_used_up_are_refused_and_the_right_one_still_works()
-> anyhow::Result<()> {
    play(|cluster| {
        cluster.start_coordinators(&[1, 2, 3])?;
        let list = cluster.coordinator_list();
        let join = |token: &str| -> Vec<String> {
            let words = [
                "run",
                "--coordinators",
                &list,
                "--token",
                token,
                "--run-id",
                "other",
                "--nproc-per-node",
                "1",
                "--max-restarts",
                "0",
                "--",
                "true",
            ];
            words.map(str::to_owned).to_vec()
        };
        ensure!(
            cluster.run(&["certs", "init", "--dir", "foreign"])?.code == 0,
            "no second authority"
        );
        let foreign = cluster.run(&["certs", "token", "--dir", "foreign"])?.out;
        let said = cluster.run(&join(foreign.trim()))?;
        check(&(&[], 78, &["another cluster", "ripstop certs token"]), &said)?;

        let token = cluster.run(&["certs", "token", "--dir", "ca", "--uses", "1"])?.out;
        let said = cluster.run(&join(token.trim()))?;
        ensure!(said.code == 0, "a good token: {said:?}");
        let said = cluster.run(&join(token.trim()))?;
        check(&(&[], 78, &["use", "ripstop certs token"]), &said)?;

        let bound = cluster.run(&["certs", "token", "--dir", "ca", "--job", "mine"])?.out;
        let said = cluster.run(&join(bound.trim()))?;
        check(&(&[], 78, &["mine"]), &said)?;
        let damaged = token.trim().replace(&token.trim()[20..24], "AAAA");
        let said = cluster.run(&join(&damaged))?;
        ensure!(said.code == 78, "a damaged token: {said:?}");
        Ok(())
    })
}

#[test]
fn a_coordinator_takes_no_folder_that_is_in_use_or_of_another_id() -> anyhow::Result<()> {
    play(|cluster| {
        cluster.start_coordinators(&[1, 2, 3])?;
        let peers: Vec<String> =
            cluster.peers().iter().map(|(id, at)| format!("{id}={at}")).collect();
        let peers = peers.join(",");
        let elsewhere = format!("127.0.0.1:{}", free_port()?);
        let start = |id: &str, folder: &str| -> Vec<String> {
            let words = [
                "coordinator",
                "--id",
                id,
                "--peers",
                &peers,
                "--data-dir",
                folder,
                "--certs",
                "ca",
                "--listen",
                &elsewhere,
            ];
            words.map(str::to_owned).to_vec()
        };
        let said = cluster.run(&start("1", "coordinator-1"))?;
        check(&(&[], 78, &["coordinator-1", "in use"]), &said)?;
        cluster.kill(&coordinator(2))?;
        let said = cluster.run(&start("3", "coordinator-2"))?;
        check(&(&[], 78, &["coordinator-2", "2", "3"]), &said)?;
        // Neither has changed anything there.
        let command = cluster.coordinator_command(2);
        cluster.start(&coordinator(2), command)?;
        let leader = cluster.traces().leader().unwrap_or(1);
        cluster.kill(&coordinator(if leader == 2 { 1 } else { leader }))?;
        let agent = cluster.start_agent(&Job::new(5), Place::Coordinators, 1)?;
        let said = cluster.said(&agent)?;
        ensure!(said.code == 0, "without a second coordinator there is no majority: {}", said.code);
        Ok(())
    })
}

#[test]
fn a_member_with_another_model_is_refused_with_76_and_the_job_goes_on() -> anyhow::Result<()> {
    play(|cluster| {
        let flags = ["--max-restarts", "0", "--expected-members", "2"];
        let job = Job::new(150).with_leaf_ms(15).with_flags(&flags);
        let undisturbed = cluster.undisturbed(&job)?;
        cluster.start_single_coordinator()?;
        let agent = cluster.start_agent(&job, Place::Coordinators, 2)?;
        cluster.wait("steps", |traces| (traces.boundary() >= 10).then_some(()))?;
        let text = cluster.folder().join("other.txt");
        std::fs::write(&text, "another text, long enough to take samples from. ".repeat(99))?;
        let others = [
            ("--width", "64", "--width"),
            ("--data", &text.to_string_lossy(), "data"),
            ("--seed", "2", "--seed"),
            ("--clip", "0.5", "--clip"),
        ];
        for (flag, value, part) in others {
            let other = job.clone().with_training(flag, value);
            let stranger = cluster.start_agent(&other, Place::Coordinators, 1)?;
            let said = cluster.said(&stranger)?;
            let line = worker_line(&said);
            ensure!(
                said.code == 76 && line.contains(part),
                "{flag} {value}: code {}, {line:?}\n{}",
                said.code,
                said.err
            );
        }
        let exits = cluster.traces().alive();
        ensure!(exits.len() == 2, "the members are {exits:?}");
        let said = cluster.said(&agent)?;
        cluster.check_end(&undisturbed, &said)
    })
}

#[test]
fn a_worker_that_can_never_start_is_not_tried_again() -> anyhow::Result<()> {
    play(|cluster| {
        std::fs::write(cluster.folder().join("empty.txt"), "")?;
        let program = std::env::current_exe()?;
        let ripstop = program
            .parent()
            .and_then(|p| p.parent())
            .map(|p| p.join("ripstop"))
            .unwrap_or_default();
        let ripstop = ripstop.to_string_lossy().into_owned();
        let cases: [(&[&str], i32, &str); 5] = [
            (&["no-such-program"], 127, "no-such-program"),
            (&["./empty.txt"], 126, "empty.txt"),
            (&[&ripstop, "trainer", "--data", "empty.txt"], 78, "empty.txt"),
            (&[&ripstop, "trainer", "--data", "missing.txt"], 78, "missing.txt"),
            (&[&ripstop, "trainer", "--virtual-ranks", "5"], 78, "--virtual-ranks 5"),
        ];
        for (program, code, word) in cases {
            cluster.renew_traces()?;
            let mut arguments =
                vec!["run", "--standalone", "--max-restarts", "3", "--log-format", "text", "--"];
            arguments.extend_from_slice(program);
            let said = cluster.run(&arguments)?;
            ensure!(said.code == code && said.err.contains(word), "{program:?}: {said:?}");
            let starts = said.err.matches("worker started").count();
            ensure!(starts <= 1, "{program:?} was started {starts} times");
        }
        Ok(())
    })
}

#[test]
fn without_permission_to_write_checkpoints_nothing_is_trained_in_vain() -> anyhow::Result<()> {
    play(|cluster| {
        // For root every folder can be written, so something stands where the folder must go.
        std::fs::write(cluster.folder().join("taken"), "")?;
        let job = Job::new(5).with_flags(&["--checkpoint", "taken"]);
        let agent = cluster.start_agent(&job, Place::Standalone, 1)?;
        let said = cluster.said(&agent)?;
        check(&(&[], 78, &["--checkpoint", "taken"]), &said)?;
        ensure!(cluster.traces().boundary() == 0, "steps were trained");
        Ok(())
    })
}

/// The one line for people, and the code.
fn check((arguments, code, words): &Case<'_>, said: &Said) -> anyhow::Result<()> {
    ensure!(said.code == *code, "{arguments:?}: code {}, not {code}: {said:?}", said.code);
    let is_talk = |line: &&str| line.starts_with("ripstop: ") || line.starts_with("error: ");
    let lines: Vec<&str> = said.err.lines().filter(is_talk).collect();
    ensure!(lines.len() == 1, "{arguments:?}: {} lines for people: {said:?}", lines.len());
    // clap lists what is missing below its first line.
    let text = if lines[0].starts_with("error: ") { said.err.as_str() } else { lines[0] };
    for word in *words {
        ensure!(text.contains(word), "{arguments:?}: nothing of {word:?} in {text:?}");
    }
    ensure!(!said.err.contains("panicked"), "{arguments:?}: {said:?}");
    Ok(())
}

/// What the worker itself told a person.
fn worker_line(said: &Said) -> &str {
    said.err.lines().find(|line| line.contains("ripstop: ")).unwrap_or("")
}

#[test]
fn the_table_finds_a_wrong_code_and_a_missing_word() {
    let said = Said { code: 78, out: String::new(), err: "ripstop: no such thing\n".to_owned() };
    assert!(check(&(&[], 78, &["no such"]), &said).is_ok());
    assert!(check(&(&[], 64, &["no such"]), &said).is_err());
    assert!(check(&(&[], 78, &["another"]), &said).is_err());
    let talkative = Said { err: "ripstop: a\nripstop: b\n".to_owned(), ..said };
    assert!(check(&(&[], 78, &["a"]), &talkative).is_err());
}
