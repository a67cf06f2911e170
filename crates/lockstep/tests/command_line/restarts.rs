//! Ranks and whole machines that are killed and restarted: nobody repeats the command, and the run ends with the bits of an
//! undisturbed one.

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use lockstep_plan::random::Draws;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::workshop::{Outcome, Started, Workshop};

const PROGRAM: &str = env!("CARGO_BIN_EXE_lockstep");
/// Time limit on a run with faults.
const LIMIT: Duration = Duration::from_secs(240);
/// Limit on the median time from a kill to the next step, on an idle machine.
const BACK: Duration = Duration::from_millis(1500);

/// Returns the number of tries from the environment, if it is set.
fn seeds() -> Option<u64> {
    std::env::var("LOCKSTEP_SEEDS").ok().and_then(|text| text.parse().ok())
}

/// Splits arguments such as `a --set b --set c`.
fn arguments(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

/// Returns the ranks of a launcher.
fn ranks_of(launcher: u32) -> Vec<Pid> {
    let children = std::fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children"));
    let children = children.unwrap_or_default();
    children.split_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect()
}

/// Returns the digests of the files in a run's last checkpoint.
fn digests(workshop: &Workshop, dir: &str, step: u64) -> Value {
    let manifest = workshop.read(&format!("{dir}/step-{step:08}/manifest.json"));
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    assert!(!manifest["files"].is_null(), "{manifest}");
    manifest["files"].clone()
}

/// Returns step and loss of each step's row.
fn rows(workshop: &Workshop, dir: &str) -> Vec<(u64, f64)> {
    let text = String::from_utf8(workshop.read(&format!("{dir}/metrics.jsonl"))).unwrap();
    let rows = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    rows.filter_map(|row| Some((row["step"].as_u64()?, row["loss"].as_f64()?))).collect()
}

/// Returns the number of output lines about saves and steps.
fn signs_of_life(run: &Started) -> usize {
    run.stderr().lines().filter(|line| line.contains("  loss ") || line.starts_with("saved ")).count()
}

/// Kills a random rank of `run` every `period`, drawn from `seed`, until the run ends. Returns its outcome, and the time from
/// each kill to the next step.
fn kill_ranks(mut run: Started, seed: u64, period: Duration) -> (Outcome, Vec<Duration>) {
    let (begin, mut choice, mut back) = (Instant::now(), Draws::new(seed), Vec::new());
    let launcher = run.child.id();
    let mut next = Instant::now() + period;
    while run.child.try_wait().unwrap().is_none() {
        assert!(begin.elapsed() < LIMIT, "seed {seed}: not done within {LIMIT:?}: {}", run.stderr());
        std::thread::sleep(Duration::from_millis(5));
        let ranks = ranks_of(launcher);
        if Instant::now() < next || ranks.is_empty() {
            continue;
        }
        let victim = choice.of(&ranks);
        // The process may have ended just now.
        if kill_process(victim, Signal::KILL).is_err() {
            continue;
        }
        let killed = Instant::now();
        next = killed + period;
        let before = signs_of_life(&run);
        while killed.elapsed() < LIMIT && run.child.try_wait().unwrap().is_none() {
            let is_new = ranks_of(launcher).iter().all(|rank| !ranks.contains(rank));
            if is_new && signs_of_life(&run) > before {
                back.push(killed.elapsed());
                // On a busy machine the run gets some time to train at all.
                next = next.max(Instant::now() + period / 2);
                break;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    (run.finish(), back)
}

#[test]
fn a_run_whose_ranks_are_killed_again_and_again_ends_with_the_bits_of_an_undisturbed_one() {
    let workshop = Workshop::new();
    // The whole test, or a part that takes some seconds.
    let (tries, steps, period) = match seeds() {
        Some(tries) => (tries, 400, Duration::from_secs(3)),
        None => (1, 150, Duration::from_secs(1)),
    };
    let size = "train run.toml --nproc-per-node 4 --set train.global_batch=64 --set train.micro_batch=4 --set train.seq_len=64 \
                --set checkpoint.every=5 --set train.log_every=1";
    let steps_of = format!("--steps {steps}");
    let run = |dir: &str, more: &str| {
        let own = format!("{size} {steps_of} --set checkpoint.dir={dir} --set metrics.dir={dir}-runs {more}");
        workshop.start(PROGRAM, &arguments(&own))
    };
    run("calm", "").finish_within(LIMIT).succeeds();
    let (calm, calm_rows) = (digests(&workshop, "calm", steps), rows(&workshop, "calm-runs"));
    let (mut all, mut kills) = (Vec::new(), 0);
    for seed in 0..tries {
        let dir = format!("chaos-{seed}");
        let (outcome, back) =
            kill_ranks(run(&dir, "--max-restarts 1000 --set elastic.max_futile_restarts=1000"), seed, period);
        let outcome = outcome.succeeds();
        assert!(outcome.stderr.contains("was killed by signal 9 (SIGKILL)"), "seed {seed}: {outcome:?}");
        assert_eq!(digests(&workshop, &dir, steps), calm, "seed {seed}: other weights: {outcome:?}");
        let found = rows(&workshop, &format!("{dir}-runs"));
        assert!(found == calm_rows, "seed {seed}: other rows: {found:?}, undisturbed {calm_rows:?}");
        let restarts = String::from_utf8(workshop.read(&format!("{dir}-runs/restarts.jsonl"))).unwrap();
        assert_eq!(restarts.lines().count(), outcome.stderr.matches("; restart ").count(), "seed {seed}");
        kills += restarts.lines().count();
        all.extend(back);
    }
    all.sort_unstable();
    assert!(kills > 0 && !all.is_empty(), "no kill of {kills} was seen to be mended");
    let median = all[all.len() / 2];
    #[expect(clippy::print_stderr, reason = "the figures of a test that measures")]
    {
        eprintln!("{kills} restarts; back in training after {median:?} (median), {:?} (longest)", all.last());
    }
    let limit = BACK.mul_f64(load().max(1.0));
    assert!(median < limit, "back in training after {all:?}, allowed {limit:?} at this load");
}

/// Returns the number of runnable processes per core.
fn load() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load: f64 = text.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0);
    load / std::thread::available_parallelism().map_or(1.0, |cores| cores.get() as f64)
}

/// A run that always fails shortly after its start.
const HOPELESS: &str =
    "train run.toml --nproc-per-node 2 --steps 1000 --set optimizer.lr=1000000 --set checkpoint.every=0";

#[test]
fn a_run_that_cannot_go_on_gives_up_and_says_why() {
    let workshop = Workshop::new();
    let run = |more: &str| workshop.run(&arguments(&format!("{HOPELESS} {more}")));
    let outcome = run("--max-restarts 2");
    assert_eq!(outcome.stderr.matches("; restart ").count(), 2, "{outcome:?}");
    assert!(outcome.stderr.contains("all 2 restarts are used up"), "{outcome:?}");
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    let outcome = run("--set elastic.max_restarts=50 --set elastic.max_futile_restarts=3");
    assert_eq!(outcome.stderr.matches("; restart ").count(), 3, "{outcome:?}");
    assert!(
        outcome.stderr.contains("3 restarts in a row (elastic.max_futile_restarts) have brought no new"),
        "{outcome:?}"
    );
    // Failures that a restart cannot fix cause none; the flag overrides the file.
    let outcome = run("--max-restarts 3 --set data.train=['none.txt']");
    assert_eq!((outcome.code, outcome.stderr.matches("; restart ").count()), (Some(2), 0), "{outcome:?}");
    let outcome = run("--set elastic.max_restarts=3 --max-restarts 0");
    assert_eq!((outcome.code, outcome.stderr.matches("; restart ").count()), (Some(1), 0), "{outcome:?}");
    run("--set elastic.max_restarts=3 --resume never").refuses(2, &["--resume", "--max-restarts 0"]);
}

#[test]
fn a_signal_during_the_pause_before_a_restart_ends_the_run_with_75() {
    for signal in [Signal::TERM, Signal::INT] {
        let workshop = Workshop::new();
        let line = format!("{HOPELESS} --max-restarts 100 --set elastic.max_futile_restarts=100");
        let mut run = workshop.start(PROGRAM, &arguments(&line));
        // The pauses have grown to a second and more by then.
        run.wait_until("long pauses", |run| run.stderr().contains("; restart 7 of 100"));
        let begin = Instant::now();
        kill_process(Pid::from_raw(run.child.id() as i32).unwrap(), signal).unwrap();
        let outcome = run.finish();
        assert_eq!(outcome.code, Some(75), "{outcome:?}");
        assert!(outcome.stderr.contains("error: interrupted before"), "{outcome:?}");
        assert!(outcome.stderr.contains("no checkpoint was saved"), "{outcome:?}");
        assert!(begin.elapsed() < Duration::from_millis(700), "{signal:?}: {:?}", begin.elapsed());
    }
}

#[test]
fn a_signal_at_any_time_of_a_start_ends_the_run_with_75() {
    let workshop = Workshop::new();
    let mut choice = Draws::new(7);
    for number in 0..seeds().unwrap_or(8) {
        let line = format!(
            "train run.toml --nproc-per-node 3 --set train.global_batch=6 --steps 1000000 --set checkpoint.dir=c{number} \
             --set metrics.dir=m{number}"
        );
        let mut run = workshop.start(PROGRAM, &arguments(&line));
        // The launcher installs its handlers before it starts a rank.
        run.wait_until("a rank", |run| !ranks_of(run.child.id()).is_empty());
        std::thread::sleep(Duration::from_micros(choice.below(60_000) as u64));
        kill_process(Pid::from_raw(run.child.id() as i32).unwrap(), Signal::TERM).unwrap();
        let outcome = run.finish();
        assert_eq!(outcome.code, Some(75), "try {number}: {outcome:?}");
    }
}

#[test]
fn the_same_command_right_after_a_kill_waits_for_the_lock_of_the_dying() {
    let workshop = Workshop::new();
    let line = "train run.toml --nproc-per-node 2 --steps 1000000 --set checkpoint.every=20";
    for number in 0..5 {
        let mut run = workshop.start(PROGRAM, &arguments(line));
        run.wait_until("a step", |run| run.stderr().contains("\nstep "));
        run.child.kill().unwrap();
        let mut again = workshop.start(PROGRAM, &arguments(line));
        run.child.wait().unwrap();
        again.wait_until("a step", |run| run.stderr().contains("\nstep "));
        kill_process(Pid::from_raw(again.child.id() as i32).unwrap(), Signal::TERM).unwrap();
        let outcome = again.finish();
        assert_eq!(outcome.code, Some(75), "try {number}: {outcome:?}");
    }
}

#[test]
fn the_launcher_writes_the_report_of_a_first_rank_that_was_killed() {
    let workshop = Workshop::new();
    let line = "train run.toml --nproc-per-node 2 --steps 1000000 --set train.log_every=1";
    let mut run = workshop.start(PROGRAM, &arguments(line));
    run.wait_until("a step", |run| run.stderr().contains("loss "));
    kill_process(ranks_of(run.child.id())[0], Signal::KILL).unwrap();
    let outcome = run.finish();
    assert_eq!(outcome.code, Some(5), "{outcome:?}");
    for line in ["\nended      rank 0 was killed by signal 9 (SIGKILL)", "\nreport     runs/report.html"] {
        assert_eq!(outcome.stderr.matches(line).count(), 1, "{line}: {outcome:?}");
    }
    assert!(workshop.path("runs/report.html").is_file());
}

/// Runs over two machines, both of which are this one.
struct Cluster {
    workshop: Workshop,
    port: u16,
}

impl Cluster {
    fn new() -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Self { workshop: Workshop::new(), port }
    }

    fn node(&self, node: usize, steps: u64, more: &str) -> Started {
        let line = format!(
            "train run.toml --nnodes 2 --node-rank {node} --rdzv-endpoint 127.0.0.1:{} --nproc-per-node 2 --steps {steps} \
             --set train.global_batch=32 --set train.micro_batch=4 --set train.seq_len=64 --set checkpoint.every=5 \
             --set train.log_every=1 --log-dir logs-{node} {more}",
            self.port
        );
        self.workshop.start(PROGRAM, &arguments(&line))
    }
}

/// Waits until the run of node 0 shows new steps.
fn makes_steps(first: &mut Started, what: &str) {
    let before = signs_of_life(first);
    first.wait_until(what, |run| signs_of_life(run) > before + 2);
}

#[test]
fn machines_that_lose_ranks_or_launchers_meet_again_and_end_with_the_same_bits() {
    let steps = 300;
    let cluster = Cluster::new();
    let calm = "--set checkpoint.dir=calm --set metrics.dir=calm-runs";
    let both = [0, 1].map(|node| cluster.node(node, steps, calm));
    both.into_iter().for_each(|run| drop(run.finish_within(LIMIT).succeeds()));
    let more = "--max-restarts 20 --set checkpoint.dir=chaos --set metrics.dir=chaos-runs";
    let mut first = cluster.node(0, steps, more);
    let mut second = cluster.node(1, steps, more);
    makes_steps(&mut first, "steps at first");
    // Kills a rank of each machine.
    for launcher in [first.child.id(), second.child.id()] {
        let ranks = ranks_of(launcher);
        kill_process(ranks[1], Signal::KILL).unwrap();
        makes_steps(&mut first, "steps after the loss of a rank");
    }
    // Kills a machine: its launcher, and with it all of its ranks.
    second.child.kill().unwrap();
    second.child.wait().unwrap();
    let mut second = cluster.node(1, steps, more);
    makes_steps(&mut first, "steps after the loss of a launcher");
    // Kills the machine that hosts the rendezvous.
    first.child.kill().unwrap();
    first.child.wait().unwrap();
    let said = first.stderr();
    let mut first = cluster.node(0, steps, more);
    first.wait_until("steps of a new first launcher", |run| signs_of_life(run) > 2);
    let attempts: BTreeSet<u32> = ranks_of(second.child.id()).iter().map(|rank| attempt_of(*rank)).collect();
    assert!(second.child.try_wait().unwrap().is_none(), "it has ended: {}", second.stderr());
    let first = first.finish_within(LIMIT).succeeds();
    let second = second.finish_within(LIMIT).succeeds();
    assert_eq!(attempts, BTreeSet::from([4]), "two ranks, a launcher, another: {first:?}, {second:?}");
    assert!(said.contains("was lost: it was killed by signal 9 (SIGKILL)"), "{said}");
    let found = digests(&cluster.workshop, "chaos", steps);
    assert_eq!(found, digests(&cluster.workshop, "calm", steps), "{first:?}, {second:?}");
    let (found, calm) = (rows(&cluster.workshop, "chaos-runs"), rows(&cluster.workshop, "calm-runs"));
    assert!(found == calm, "{found:?}, undisturbed {calm:?}");
}

/// Reads `TORCHELASTIC_RESTART_COUNT` of a rank.
fn attempt_of(rank: Pid) -> u32 {
    let bytes = std::fs::read(format!("/proc/{}/environ", rank.as_raw_nonzero())).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let count = text.split('\0').find_map(|pair| pair.strip_prefix("TORCHELASTIC_RESTART_COUNT="));
    count.map_or(0, |count| count.parse().unwrap())
}

#[test]
fn a_machine_that_does_not_come_back_is_waited_for_until_the_deadline() {
    let cluster = Cluster::new();
    let more = "--max-restarts 3 --rdzv-conf join_timeout=20 --set elastic.rejoin_timeout_s=20";
    let mut first = cluster.node(0, 100_000, more);
    let mut second = cluster.node(1, 100_000, more);
    makes_steps(&mut first, "steps");
    second.child.kill().unwrap();
    second.child.wait().unwrap();
    first.wait_until("a wait", |run| run.stderr().contains("; restart 1 of 3"));
    // A launcher that ends for good informs those that wait for it.
    let misfit = cluster.node(1, 100_000, "--max-restarts 4").finish();
    let first = first.finish();
    for outcome in [&misfit, &first] {
        assert_eq!(outcome.code, Some(2), "{misfit:?}, {first:?}");
        assert!(outcome.stderr.contains("give all machines the same"), "{misfit:?}, {first:?}");
    }
    let mut first = cluster.node(0, 100_000, "--max-restarts 3 --rdzv-conf join_timeout=3");
    let mut second = cluster.node(1, 100_000, "--max-restarts 3 --rdzv-conf join_timeout=3");
    first.wait_until("a checkpoint", |run| run.stderr().contains("\nsaved "));
    second.child.kill().unwrap();
    second.child.wait().unwrap();
    let outcome = first.finish();
    assert_eq!(outcome.code, Some(5), "{outcome:?}");
    assert!(outcome.stderr.contains("node 1 did not come within 3 s"), "{outcome:?}");
    assert!(outcome.stderr.contains("the same command goes on from checkpoints/step-"), "{outcome:?}");
}

#[test]
fn the_first_failure_on_one_machine_that_no_restart_mends_ends_the_others_at_once() {
    let cluster = Cluster::new();
    let more = "--max-restarts 3 --set elastic.max_futile_restarts=1 --set optimizer.lr=1000000";
    let runs = [0, 1].map(|node| cluster.node(node, 1000, more));
    let begin = Instant::now();
    let [first, second] = runs.map(Started::finish);
    assert!(first.stderr.contains("restarts in a row"), "{first:?}, {second:?}");
    for outcome in [&first, &second] {
        assert!(matches!(outcome.code, Some(1 | 5)), "{first:?}, {second:?}");
    }
    assert!(begin.elapsed() < Duration::from_secs(25), "{:?}: {first:?}, {second:?}", begin.elapsed());
}
