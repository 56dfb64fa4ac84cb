//! Hosts with addresses of their own: network namespaces, joined by a third one in which the coordinators live and which forwards.

use std::net::IpAddr;
use std::process::Command;

use anyhow::{Context, bail, ensure};
use ripstop_chaos::process::{Cluster, Job, Place, Signal, Traces, Undisturbed, coordinator, play};

#[test]
fn hosts_with_addresses_of_their_own_lose_a_worker_and_keep_the_digest() -> anyhow::Result<()> {
    on_two_hosts(1, |cluster, network| {
        let job = Job::new(150).with_leaf_ms(10).with_flags(&["--expected-members", "4"]);
        let undisturbed = cluster.undisturbed(&job)?;
        let world = start(cluster, network, &job)?;
        let victim = world[3];
        ensure!(cluster.signal_worker(victim, Signal::KILL)?, "worker {victim} was gone already");
        cluster.wait("a new member in its place", |traces| {
            let full = |(_, nodes): &(u64, &[u64])| nodes.len() == 4 && !nodes.contains(&victim);
            traces.settled_world().filter(full).map(drop)
        })?;
        end(cluster, &undisturbed)
    })
}

#[test]
fn of_hosts_that_only_reach_the_coordinators_one_goes_on_and_the_other_comes_back()
-> anyhow::Result<()> {
    on_two_hosts(2, |cluster, network| {
        let job = Job::new(300).with_leaf_ms(20).with_flags(&["--expected-members", "4"]);
        let undisturbed = cluster.undisturbed(&job)?;
        let world = start(cluster, network, &job)?;
        network.forward(false)?;
        let kept = &world[..2];
        let at = cluster.wait("the higher ranks' host to be left out", |traces| {
            traces.settled_world().filter(|(_, nodes)| *nodes == kept)?;
            Some(traces.boundary())
        })?;
        cluster
            .wait("the others to go on", |traces| (traces.boundary() >= at + 20).then_some(()))?;
        let is_alone = cluster.traces().settled_world().is_some_and(|(_, nodes)| nodes == kept);
        ensure!(is_alone, "somebody entered who can't reach the others");
        network.forward(true)?;
        cluster.wait("the left-out host's new workers", |traces| {
            traces.settled_world().filter(|(_, nodes)| nodes.len() == 4).map(drop)
        })?;
        end(cluster, &undisturbed)
    })
}

/// `number` tells the networks of tests apart that run at once.
fn on_two_hosts(
    number: u8,
    body: impl FnOnce(&mut Cluster, &Network) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    if let Some(reason) = cannot(number) {
        if std::env::var_os("CI").is_some_and(|ci| ci == "true") {
            bail!("{reason}");
        }
        eprintln!("not run: {reason}");
        return Ok(());
    }
    play(|cluster| {
        let network = Network::make(number)?;
        cluster.place_coordinators(&[network.router; 3])?;
        body(cluster, &network)
    })
}

/// Starts everything; returns the members in rank order, those of one host first.
fn start(cluster: &mut Cluster, network: &Network, job: &Job) -> anyhow::Result<Vec<u64>> {
    for id in 1..=3 {
        let command = inside(&network.names[0], &cluster.coordinator_command(id));
        cluster.start(&coordinator(id), command)?;
    }
    cluster.wait("a leader of the coordinators", Traces::leader)?;
    for (name, agent) in network.names[1..].iter().zip(AGENTS) {
        let command = cluster.agent_command(job, Place::Coordinators, 2)?;
        cluster.start(agent, inside(name, &command))?;
    }
    let world = cluster.wait("a world over both hosts, and steps in it", |traces| {
        let world =
            traces.settled_world().filter(|(_, nodes)| nodes.len() == 4 && traces.boundary() >= 20);
        world.map(|(_, nodes)| nodes.to_vec())
    })?;
    let mut agents: Vec<u64> =
        world.iter().filter_map(|node| cluster.traces().start_of(*node)).map(|s| s.agent).collect();
    agents.sort_unstable();
    ensure!(
        agents[0] == agents[1] && agents[1] != agents[2] && agents[2] == agents[3],
        "members of agents {agents:?}"
    );
    Ok(world)
}

fn end(cluster: &mut Cluster, undisturbed: &Undisturbed) -> anyhow::Result<()> {
    let mut digests = Vec::new();
    for agent in AGENTS {
        let said = cluster.said(agent)?;
        ensure!(said.code == 0, "{agent} ended with code {}", said.code);
        digests.extend(said.digest().is_some().then_some(said));
    }
    cluster.check_end(undisturbed, digests.first().context("nobody printed a digest")?)
}

const AGENTS: [&str; 2] = ["agent-a", "agent-b"];

/// Why there can be no namespaces here.
fn cannot(number: u8) -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("network namespaces need root".to_owned());
    }
    let version = Command::new("ip").arg("-V").output();
    if !version.is_ok_and(|output| output.status.success()) {
        return Some("the program ip is missing: install the package iproute2".to_owned());
    }
    // Root in a container may lack the right to.
    let probe = format!("ripstop-{}-{number}-probe", std::process::id());
    let tried = ip(&["netns", "add", &probe]).and_then(|()| ip(&["netns", "delete", &probe]));
    tried.err().map(|error| format!("no network namespace can be made: {error:#}"))
}

/// Runs a command in a namespace.
fn inside(namespace: &str, command: &Command) -> Command {
    let mut outer = Command::new("ip");
    outer.args(["netns", "exec", namespace]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => outer.env(name, value),
            None => outer.env_remove(name),
        };
    }
    if let Some(folder) = command.get_current_dir() {
        outer.current_dir(folder);
    }
    outer
}

/// Three namespaces: the router's, and a host on either side of it. They go when this is dropped.
struct Network {
    names: Vec<String>,
    /// The router's address.
    router: IpAddr,
}

impl Network {
    fn make(number: u8) -> anyhow::Result<Self> {
        let process = std::process::id();
        let names = ["router", "a", "b"].map(|name| format!("ripstop-{process}-{number}-{name}"));
        let mut network = Self { names: Vec::new(), router: "10.77.1.1".parse()? };
        for name in names {
            ip(&["netns", "add", &name])?;
            network.names.push(name);
        }
        let [router, hosts @ ..] = network.names.as_slice() else { bail!("three names") };
        ip(&["-n", router, "link", "set", "lo", "up"])?;
        for (number, host) in (1..).zip(hosts) {
            let inner = format!("to-{number}");
            ip(&[
                "-n", router, "link", "add", &inner, "type", "veth", "peer", "name", "net0",
                "netns", host,
            ])?;
            ip(&["-n", router, "address", "add", &format!("10.77.{number}.1/24"), "dev", &inner])?;
            ip(&["-n", router, "link", "set", &inner, "up"])?;
            ip(&["-n", host, "address", "add", &format!("10.77.{number}.2/24"), "dev", "net0"])?;
            ip(&["-n", host, "link", "set", "net0", "up"])?;
            // What a host sends to its own address goes through here too.
            ip(&["-n", host, "link", "set", "lo", "up"])?;
            ip(&["-n", host, "route", "add", "default", "via", &format!("10.77.{number}.1")])?;
        }
        network.forward(true)?;
        Ok(network)
    }

    /// Whether the two hosts reach each other; both reach the router.
    fn forward(&self, on: bool) -> anyhow::Result<()> {
        let set = format!("echo {} > /proc/sys/net/ipv4/ip_forward", u8::from(on));
        ip(&["netns", "exec", &self.names[0], "sh", "-c", &set])
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in &self.names {
            if let Err(error) = ip(&["netns", "delete", name]) {
                eprintln!("{error:#}");
            }
        }
    }
}

fn ip(arguments: &[&str]) -> anyhow::Result<()> {
    let output = Command::new("ip").args(arguments).output().context("starting ip")?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "ip {}: {}", arguments.join(" "), error.trim());
    Ok(())
}
