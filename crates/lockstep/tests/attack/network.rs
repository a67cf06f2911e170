//! Two hosts in network namespaces, joined by a simulated bad network: packets are delayed, reordered, lost or stopped. Needs
//! root, iproute2 and /dev/net/tun.
//!
//! Each host has a TUN device as its network interface. The packets that the kernel sends into it are read here and passed to the
//! other host's device later, or never. The TCP implementation under test is thus the kernel's own.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use lockstep_plan::random::Draws;
use rustix::process::Signal;
use tun_rs::{DeviceBuilder, SyncDevice};

use crate::namespaces::{Namespaces, ip};
use crate::plans::{PLANS, Plan, Run, undisturbed};
use crate::process::{children, send};
use crate::tries::{time_below, tries_at_a_time};
use crate::workshop::{Outcome, Started};

const ADDRESSES: [&str; 2] = ["10.213.98.1", "10.213.98.2"];
/// Largest packet of a TUN device.
const MTU: usize = 1500;
/// Steps of a run over a slow network.
const STEPS: &str = "8";
/// Four replicas, two on each host.
const PLAN: Plan = PLANS[3];

/// Treatment of packets.
#[derive(Debug, Clone, Copy)]
struct Weather {
    /// Delay in one direction, in milliseconds.
    delay_ms: usize,
    /// Maximum additional delay, drawn for each packet: packets are reordered.
    jitter_ms: usize,
    /// Lost packets per thousand.
    lost_permille: usize,
}

const WEATHERS: [Weather; 3] = [
    Weather { delay_ms: 5, jitter_ms: 20, lost_permille: 10 },
    Weather { delay_ms: 25, jitter_ms: 0, lost_permille: 20 },
    Weather { delay_ms: 100, jitter_ms: 30, lost_permille: 5 },
];

/// Number of devices that were created.
static DEVICES: AtomicUsize = AtomicUsize::new(0);

/// Two hosts and the network between them.
struct Hosts {
    namespaces: Namespaces,
    /// True while no packet is delivered.
    is_cut: Arc<AtomicBool>,
}

impl Hosts {
    /// Creates two hosts; `None` if this process may not.
    fn new(weather: Weather, seed: u64) -> Option<Self> {
        let namespaces = Namespaces::new(&format!("attack-{seed}"))?;
        let hosts = Self { namespaces, is_cut: Arc::new(AtomicBool::new(false)) };
        let mut devices = Vec::new();
        for (name, address) in hosts.namespaces.names.iter().zip(ADDRESSES) {
            // The device can still be read here after it has moved to another namespace. Interface names have at most 15 bytes.
            let number = DEVICES.fetch_add(1, Ordering::Relaxed);
            let interface = format!("ls{number}-{}", std::process::id());
            let device = DeviceBuilder::new().name(&interface).build_sync().ok()?;
            let is_up = ip(&format!("link set {interface} netns {name}"))
                && Namespaces::bring_up(name, &interface, address);
            if !is_up {
                return None;
            }
            devices.push(Arc::new(device));
        }
        for (from, to) in [(0, 1), (1, 0)] {
            let (packets, due) = channel();
            let (source, target) = (Arc::clone(&devices[from]), Arc::clone(&devices[to]));
            let is_cut = Arc::clone(&hosts.is_cut);
            let choice = Draws::new(seed * 2 + from as u64);
            // Both threads end when the namespaces, and with them the devices, are deleted.
            spawn(move || collect(&source, weather, choice, &is_cut, &packets));
            spawn(move || deliver(&target, &due));
        }
        Some(hosts)
    }

    /// Starts `lockstep train` on one of the hosts.
    fn start(&self, run: &Run, node: usize) -> Started {
        let endpoint = format!("{}:29500", ADDRESSES[0]);
        let node_rank = node.to_string();
        let exec = ["netns", "exec", &self.namespaces.names[node], env!("CARGO_BIN_EXE_lockstep")];
        let nodes = ["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", &node_rank];
        let meeting = ["--rdzv-endpoint", &endpoint, "--secret-file", "secret", "--steps", STEPS];
        run.workshop.start("ip", &[&exec[..], &run.plan.arguments(), &nodes, &meeting].concat())
    }
}

/// A packet, ordered by its time of arrival.
type Due = Reverse<(Instant, Vec<u8>)>;

/// Reads the packets that a host sends and draws their times of arrival.
fn collect(
    source: &SyncDevice,
    weather: Weather,
    mut choice: Draws,
    is_cut: &AtomicBool,
    packets: &Sender<Due>,
) {
    let mut packet = [0; MTU];
    while let Ok(bytes) = source.recv(&mut packet) {
        if is_cut.load(Ordering::Relaxed) || choice.below(1000) < weather.lost_permille {
            continue;
        }
        let delay = weather.delay_ms + choice.below(weather.jitter_ms + 1);
        let due = Instant::now() + Duration::from_millis(delay as u64);
        if packets.send(Reverse((due, packet[..bytes].to_vec()))).is_err() {
            return;
        }
    }
}

/// Delivers packets to the other host when they are due.
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
                // A deleted device ends the other thread, and with it this one.
                let _ = target.send(&packet);
            }
        }
    }
}

/// A fault in addition to the bad network.
#[derive(Debug, Clone, Copy)]
enum Event {
    Nothing,
    KillRank,
    CutCable,
}

/// Injects an event and waits for both launchers to end; returns the time that it took, and their outcomes.
fn after_event(
    event: Event,
    hosts: &Hosts,
    mut runs: [Started; 2],
    choice: &mut Draws,
) -> (Duration, [Outcome; 2]) {
    runs[0].wait_until("a first step", |run| run.stderr().contains("\nstep "));
    sleep(time_below(Duration::from_millis(500), choice));
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

fn attack(seed: u64, choice: &mut Draws) -> String {
    let weather = WEATHERS[seed as usize % WEATHERS.len()];
    let event = choice.of(&[Event::Nothing, Event::KillRank, Event::CutCable]);
    let (expected, _) = &*undisturbed(PLAN);
    let Some(hosts) = Hosts::new(weather, seed) else {
        // Written directly, because the test harness hides the output of tests that pass.
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
        // A launcher that had finished before does not notice.
        _ => {
            assert!(codes.iter().all(|code| matches!(code, Some(0 | 5))), "{event:?}, {weather:?}: {ended:?}")
        }
    }
    if is_lost && matches!(event, Event::CutCable) {
        // Heartbeats are missing for 5 s, and ranks have 2 s to end by themselves.
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
    // The tries share this run, and otherwise wait for most of their time.
    undisturbed(PLAN);
    tries_at_a_time(3, "bad_network", 3, Duration::from_secs(240), attack);
}
