//! A run on two hosts, which are network namespaces of this machine joined by a virtual cable: torchrun's own command line, and
//! the pairing code of node 0. Needs root and iproute2.

use std::io::Write;

use crate::namespaces::{Namespaces, ip};
use crate::workshop::{Started, Workshop};

const PROGRAM: &str = env!("CARGO_BIN_EXE_lockstep");
const RUN: [&str; 4] = ["--set", "train.global_batch=8", "--set", "train.micro_batch=1"];

/// Two hosts with an address each, joined by a cable.
struct Hosts(Namespaces);

/// Addresses of the two hosts, visible to them alone.
const ADDRESSES: [&str; 2] = ["10.213.97.1", "10.213.97.2"];

impl Hosts {
    /// Creates two hosts; `None` if this process may not.
    fn new() -> Option<Self> {
        let namespaces = Namespaces::new("machines")?;
        let [first, second] = &namespaces.names;
        let cable = format!(
            "link add eth0 netns {first} address 02:00:00:00:00:01 type veth peer name eth0 netns {second} \
             address 02:00:00:00:00:02"
        );
        let mut hosts = namespaces.names.iter().zip(ADDRESSES);
        let is_up = ip(&cable) && hosts.all(|(name, address)| Namespaces::bring_up(name, "eth0", address));
        is_up.then_some(Self(namespaces))
    }

    /// Starts `lockstep train run.toml` on a host, with torchrun's flags.
    fn start(&self, workshop: &Workshop, node: usize, more: &[&str]) -> Started {
        let node_rank = format!("--node_rank={node}");
        let endpoint = format!("--rdzv_endpoint={}:29500", ADDRESSES[0]);
        let line = [
            "netns",
            "exec",
            &self.0.names[node],
            PROGRAM,
            "train",
            "run.toml",
            "--nproc_per_node=4",
            "--nnodes=2",
            &node_rank,
            "--rdzv_id=12345",
            "--rdzv_backend=c10d",
            &endpoint,
        ];
        workshop.start("ip", &[&line[..], &RUN, more].concat())
    }
}

/// Returns the code that node 0 has printed.
fn code(run: &Started) -> Option<String> {
    let stderr = run.stderr();
    let line = stderr.lines().find_map(|line| line.strip_prefix("pairing code "))?;
    Some(line.trim().to_owned())
}

#[test]
fn torchruns_own_line_starts_two_hosts_with_a_pairing_code_and_the_bits_of_one_machine() {
    let Some(hosts) = Hosts::new() else {
        // Written directly, because the test harness hides the output of tests that pass.
        let _ =
            writeln!(std::io::stderr(), "SKIPPED: two hosts need root and iproute2 for network namespaces");
        return;
    };
    let workshop = Workshop::new();
    let saved = ["--set", "checkpoint.dir=hosts", "--set", "metrics.dir=hosts-records"];
    let mut first = hosts.start(&workshop, 0, &saved);
    first.wait_until("a pairing code", |run| code(run).is_some());
    let code = code(&first).unwrap();
    assert_eq!(code.chars().filter(|c| c.is_ascii_alphanumeric()).count(), 20, "100 bits: {code}");
    // A wrong code is rejected and does not keep the right machine out.
    let wrong = ["--pairing-code", "K7QX2-M4VTD-9RZPA-3WHNC"];
    hosts.start(&workshop, 1, &[&saved[..], &wrong].concat()).finish().refuses(2, &["secret"]);
    let second = hosts.start(&workshop, 1, &[&saved[..], &["--pairing-code", &code]].concat());
    let (first, second) = (first.finish().succeeds(), second.finish().succeeds());
    assert!(first.stderr.contains("8 ranks × 1 micro-batch of 1"), "{first:?}");
    assert_eq!(second.stderr, "", "the first rank speaks for all");
    let replicas = ["train", "run.toml", "--set", "parallel.data_parallel_replicate=8"];
    workshop.run(&[&replicas[..], &RUN].concat()).succeeds();
    let weights = |dir: &str| workshop.read(&format!("{dir}/step-00000004/rank-00000.safetensors"));
    assert!(weights("hosts") == weights("checkpoints"), "other weights than on one machine");
}
