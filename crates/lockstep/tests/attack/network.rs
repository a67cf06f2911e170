//! Two hosts that are network namespaces, joined by a bad network of our own: packets come late, overtake each other, are lost, or stop
//! coming. Needs root, iproute2 and /dev/net/tun.
//!
//! Each host has a TUN device as its cable. What the kernel sends into it is read here and handed to the other host's device later, or
//! never, so it is the kernel's own TCP that has to cope.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tun_rs::{DeviceBuilder, SyncDevice};

use crate::choice::{Choice, tries};
use crate::plans::{PLANS, Plan, Run, undisturbed};
use crate::process::{children, send};
use crate::workshop::{Outcome, Started};

const ADDRESSES: [&str; 2] = ["10.213.98.1", "10.213.98.2"];
const NAMES: [&str; 2] = ["a", "b"];
/// Largest packet of a TUN device.
const MTU: usize = 1500;
/// Steps of a run over a slow network.
const STEPS: &str = "8";
/// Four replicas, two on each host.
const PLAN: Plan = PLANS[3];

/// What happens to packets.
#[derive(Debug, Clone, Copy)]
struct Weather {
    /// Delay in one direction.
    delay_ms: u64,
    /// Up to so much more, differently for each packet: packets overtake each other.
    jitter_ms: u64,
    /// Packets of a thousand that are lost.
    lost: u64,
}

const WEATHERS: [Weather; 3] = [
    Weather { delay_ms: 5, jitter_ms: 20, lost: 10 },
    Weather { delay_ms: 25, jitter_ms: 0, lost: 20 },
    Weather { delay_ms: 100, jitter_ms: 30, lost: 5 },
];

/// Two hosts and the network between them; taken down when dropped.
struct Hosts {
    names: [String; 2],
    /// True while no packet arrives.
    is_cut: Arc<AtomicBool>,
}

impl Hosts {
    /// `None` where this process may not make any.
    fn new(weather: Weather, seed: u64) -> Option<Self> {
        let id = std::process::id();
        let hosts = Self {
            names: NAMES.map(|name| format!("lockstep-{id}-{seed}-{name}")),
            is_cut: Arc::new(AtomicBool::new(false)),
        };
        let mut devices = Vec::new();
        for (index, name) in hosts.names.iter().enumerate() {
            // A device goes on to be read here after it has moved to another namespace.
            let interface = format!("ls{}{id}", NAMES[index]);
            let device = DeviceBuilder::new().name(&interface).build_sync().ok()?;
            let commands = [
                format!("netns add {name}"),
                format!("link set {interface} netns {name}"),
                format!("-n {name} address add {}/24 dev {interface}", ADDRESSES[index]),
                format!("-n {name} link set lo up"),
                format!("-n {name} link set {interface} up"),
            ];
            if !commands.iter().all(|command| ip(command)) {
                return None;
            }
            devices.push(Arc::new(device));
        }
        for (from, to) in [(0, 1), (1, 0)] {
            let (packets, due) = channel();
            let (source, target) = (Arc::clone(&devices[from]), Arc::clone(&devices[to]));
            let is_cut = Arc::clone(&hosts.is_cut);
            let choice = Choice::of_seed(seed * 2 + from as u64);
            // Both end when the namespaces are deleted, and the devices with them.
            spawn(move || collect(&source, weather, choice, &is_cut, &packets));
            spawn(move || deliver(&target, &due));
        }
        Some(hosts)
    }

    /// `lockstep train` on one of the hosts.
    fn start(&self, run: &Run, node: usize) -> Started {
        let endpoint = format!("{}:29500", ADDRESSES[0]);
        let node_rank = node.to_string();
        let exec = ["netns", "exec", &self.names[node], env!("CARGO_BIN_EXE_lockstep")];
        let nodes = ["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", &node_rank];
        let meeting = ["--rdzv-endpoint", &endpoint, "--secret-file", "secret", "--steps", STEPS];
        run.workshop.start("ip", &[&exec[..], &run.plan.arguments(), &nodes, &meeting].concat())
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            ip(&format!("netns delete {name}"));
        }
    }
}

fn ip(command: &str) -> bool {
    let mut ip = Command::new("ip");
    ip.args(command.split_whitespace()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    ip.status().is_ok_and(|status| status.success())
}

/// A packet by the time at which it arrives.
type Due = Reverse<(Instant, Vec<u8>)>;

/// Reads what a host sends, and decides when it arrives.
fn collect(
    source: &SyncDevice,
    weather: Weather,
    mut choice: Choice,
    is_cut: &AtomicBool,
    packets: &Sender<Due>,
) {
    let mut packet = [0; MTU];
    while let Ok(bytes) = source.recv(&mut packet) {
        if is_cut.load(Ordering::Relaxed) || choice.below(1000) < weather.lost {
            continue;
        }
        let delay = weather.delay_ms + choice.below(weather.jitter_ms + 1);
        let due = Instant::now() + Duration::from_millis(delay);
        if packets.send(Reverse((due, packet[..bytes].to_vec()))).is_err() {
            return;
        }
    }
}

/// Hands packets to the other host when they are due.
fn deliver(target: &SyncDevice, packets: &Receiver<Due>) {
    let mut waiting = BinaryHeap::new();
    loop {
        let next = waiting.peek().map_or(Duration::from_secs(3600), |Reverse((due, _)): &Due| {
            due.saturating_duration_since(Instant::now())
        });
        match packets.recv_timeout(next) {
            Ok(packet) => waiting.push(packet),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        while waiting.peek().is_some_and(|Reverse((due, _))| *due <= Instant::now()) {
            if let Some(Reverse((_, packet))) = waiting.pop() {
                // A device that is gone ends the other thread, and with it this one.
                let _ = target.send(&packet);
            }
        }
    }
}

/// What happens to a run beside the weather.
#[derive(Debug, Clone, Copy)]
enum Event {
    Nothing,
    KillRank,
    CutCable,
}

/// How long the two launchers took to end after an event, and how they did.
fn after_event(
    event: Event,
    hosts: &Hosts,
    mut runs: [Started; 2],
    choice: &mut Choice,
) -> (Duration, [Outcome; 2]) {
    runs[0].wait_until("a first step", |run| run.stderr().contains("\nstep "));
    sleep(choice.up_to(Duration::from_millis(500)));
    let begin = Instant::now();
    match event {
        Event::Nothing => {}
        Event::KillRank => {
            // The processes of `ip netns exec` have become the launchers.
            let ranks = children(runs[1].child.id());
            if !ranks.is_empty() {
                send(choice.of(&ranks), Signal::KILL);
            }
        }
        Event::CutCable => hosts.is_cut.store(true, Ordering::Relaxed),
    }
    let ended = runs.map(|run| run.finish_within(Duration::from_secs(90)));
    (begin.elapsed(), ended)
}

fn attack(seed: u64, choice: &mut Choice) -> String {
    let weather = WEATHERS[seed as usize % WEATHERS.len()];
    let event = choice.of(&[Event::Nothing, Event::KillRank, Event::CutCable]);
    let (expected, _) = &*undisturbed(PLAN);
    let Some(hosts) = Hosts::new(weather, seed) else {
        // Past the harness, which shows nothing of a test that passes.
        let _ = writeln!(std::io::stderr(), "SKIPPED: two hosts need root, iproute2 and /dev/net/tun");
        return "skipped".to_owned();
    };
    let run = Run::new(PLAN);
    run.workshop.write("secret", "0123456789abcdef0123456789abcdef");
    fs::set_permissions(run.workshop.path("secret"), fs::Permissions::from_mode(0o600)).unwrap();
    let start = || [hosts.start(&run, 0), hosts.start(&run, 1)];
    let (took, ended) = after_event(event, &hosts, start(), choice);
    let codes = [ended[0].code, ended[1].code];
    let is_lost = codes != [Some(0); 2];
    match event {
        Event::Nothing => assert!(!is_lost, "{weather:?}: {ended:?}"),
        // One that was done before has not noticed.
        _ => {
            assert!(codes.iter().all(|code| matches!(code, Some(0 | 5))), "{event:?}, {weather:?}: {ended:?}")
        }
    }
    if is_lost && matches!(event, Event::CutCable) {
        // Silence of 5 s, and the 2 s that ranks have to end by themselves.
        assert!(took < Duration::from_secs(12), "{took:?} after {event:?}: {ended:?}");
        assert!(ended[0].stderr.contains("rank 2") || ended[0].stderr.contains("rank 3"), "{ended:?}");
    }
    hosts.is_cut.store(false, Ordering::Relaxed);
    if is_lost {
        for outcome in start().map(|run| run.finish_within(Duration::from_secs(90))) {
            assert_eq!(outcome.code, Some(0), "a refusal after {event:?}: {outcome:?}");
        }
    }
    let last: u64 = STEPS.parse().unwrap();
    assert_eq!(run.end().files[&last], expected.files[&last], "bits after {event:?}, {weather:?}");
    if is_lost {
        format!("{event:?}: ended within {:.1} s", took.as_secs_f64().ceil())
    } else {
        format!("{event:?}: done")
    }
}

#[test]
fn bad_network() {
    tries("bad_network", 3, Duration::from_secs(240), attack);
}
