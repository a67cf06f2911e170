//! Tests of ranks as processes: the launcher starts this same test program again, with [`a_rank`] as the only test.
//!
//! Each rank writes a report to a file: the time at which its work ended, on the clock that all processes share, and
//! its result.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{env, fs};

use lockstep_comm::{
    Collective, CommError, Deadline, Group, LentBuffer, LossCause, NodeInfo, NodePlacement, ReduceOp,
    RendezvousEndpoint, TcpOptions, WorldOptions, join_nodes,
};
use lockstep_launch::{
    Agent, Elastic, Failure, JoinOptions, Launch, LaunchError, Output, Pinning, RunOutcome,
    join_from_environment,
};
use lockstep_plan::random::Draws;
use lockstep_plan::{DType, MemoryCategory};
use lockstep_tensor::Buffer;
use rustix::process::{Pid, Signal, kill_process};
use rustix::time::{ClockId, clock_gettime};

/// Environment variable with the role of a rank, which selects its work.
const ROLE: &str = "LOCKSTEP_TEST_ROLE";
/// Environment variable with the directory of the reports.
const REPORTS: &str = "LOCKSTEP_TEST_REPORTS";
/// Environment variable with the silence limit, in milliseconds, for ranks of other nodes.
const SILENCE_MS: &str = "LOCKSTEP_TEST_SILENCE_MS";
/// Environment variable with the role for which [`a_launcher`] starts ranks.
const LAUNCHED: &str = "LOCKSTEP_TEST_LAUNCHED";

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

/// Entry point of each rank; does nothing in the launching process.
#[test]
fn a_rank() {
    let (Some(role), Some(reports)) = (env::var_os(ROLE), env::var_os(REPORTS)) else { return };
    // The rank may end while the last one is still joining; that must be reported in the same way.
    let result = join_from_environment(options(), soon())
        .and_then(|group| Ok(play(role.to_str().unwrap(), &group.unwrap())?));
    let text = result.as_ref().err().map_or("done".to_owned(), LaunchError::to_string);
    let report = Path::new(&reports).join(env::var("RANK").unwrap());
    fs::write(report, format!("{} {text}", now_us())).unwrap();
    std::process::exit(if result.is_ok() { 0 } else { 1 });
}

fn options() -> JoinOptions {
    let silence =
        env::var(SILENCE_MS).ok().and_then(|text| text.parse().ok()).map_or(SILENCE, Duration::from_millis);
    JoinOptions { tcp: TcpOptions { silence, ..TcpOptions::default() }, ..JoinOptions::default() }
}

fn play(role: &str, group: &Group) -> Result<(), CommError> {
    if let Some(seed) = role.strip_prefix("random ") {
        return work_at_random(group, seed.parse().unwrap());
    }
    match role {
        "sum" => sum_once(group),
        "work" => work(group, usize::MAX),
        "skip" => work(group, 3),
        "exit" if group.rank() == 1 => std::process::exit(7),
        "exit" => group.barrier(soon()),
        "speak" => speak(group),
        role => panic!("no such role: {role}"),
    }
}

fn now_us() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000
}

fn sum_once(group: &Group) -> Result<(), CommError> {
    let arena = group.arena(&[MemoryCategory::Gradients]);
    for elements in [10, 300_000] {
        let mut buffer = arena.allocate_zeroed(elements * 4, MemoryCategory::Gradients).unwrap();
        let floats = &mut buffer.elements_mut::<f32>()[..elements];
        floats.iter_mut().enumerate().for_each(|(i, x)| *x = (i + group.rank()) as f32);
        group.all_reduce(&mut *floats, ReduceOp::Sum, soon())?;
        let (ranks, rest) = (group.size(), group.size() * (group.size() - 1) / 2);
        assert!(floats.iter().enumerate().all(|(i, x)| *x == (i * ranks + rest) as f32));
    }
    // Several all-reduces in flight, of numbers whose sum depends on the order of additions.
    let value = |rank: usize, i: usize| {
        let bits = (rank * 7919 + i + 1).wrapping_mul(0x9e37_79b9) as u32;
        (bits as f32 / 4e9 - 0.5) * [1.0, 1e6, 1e-6][bits as usize % 3]
    };
    let elements = 50_000;
    let lent = |round: usize| {
        let mut buffer = arena.allocate_zeroed(elements * 4, MemoryCategory::Gradients).unwrap();
        for (i, x) in buffer.elements_mut::<f32>()[..elements].iter_mut().enumerate() {
            *x = value(group.rank(), i + round);
        }
        buffer
    };
    let mut buffers: Vec<_> = (0..12).map(lent).collect();
    let start = |buffer: &mut Buffer| {
        let data = LentBuffer::new(buffer.lend(0..elements * 4), DType::F32);
        group.start(Collective::AllReduce { data, op: ReduceOp::Sum }, soon())
    };
    let pending = buffers.iter_mut().map(start).collect::<Result<Vec<_>, _>>()?;
    for pending in pending {
        drop(pending.wait(soon())?);
    }
    for (round, buffer) in buffers.iter_mut().enumerate() {
        for (i, x) in buffer.elements_mut::<f32>()[..elements].iter().enumerate() {
            let values: Vec<f32> = (0..group.size()).map(|rank| value(rank, i + round)).collect();
            assert_eq!(x.to_bits(), tree(&values).to_bits(), "element {i} of sum {round}");
        }
    }
    group.barrier(soon())
}

/// Returns the sum of `values` in the order of the tree.
fn tree(values: &[f32]) -> f32 {
    match values {
        [value] => *value,
        _ => {
            let (left, right) = values.split_at(1 << (values.len() - 1).ilog2());
            tree(left) + tree(right)
        }
    }
}

/// Runs operations of all sizes, over and over; rank 1 skips operation number `skipped`.
fn work(group: &Group, skipped: usize) -> Result<(), CommError> {
    let arena = group.arena(&[MemoryCategory::Gradients]);
    let mut shared = arena.allocate_zeroed(4 << 20, MemoryCategory::Gradients).unwrap();
    let mut private = vec![0.0_f32; 1 << 20];
    for round in 0.. {
        let elements = [10, 1 << 20, 3000, 100_000][round % 4];
        if group.rank() == 1 && round == skipped {
            continue;
        }
        let deadline = Deadline::after(Duration::from_secs(20));
        if round % 8 < 4 {
            group.all_reduce(&mut private[..elements], ReduceOp::Max, deadline)?;
        } else {
            group.all_reduce(&mut shared.elements_mut::<f32>()[..elements], ReduceOp::Max, deadline)?;
        }
    }
    Ok(())
}

/// Runs operations of all kinds and sizes, in shared and private memory, until one fails.
fn work_at_random(group: &Group, seed: u64) -> Result<(), CommError> {
    let (ranks, rank, op) = (group.size(), group.rank(), ReduceOp::Max);
    let mut random = Draws::new(seed);
    let arena = group.arena(&[MemoryCategory::Gradients]);
    let buffer = || arena.allocate_zeroed(1 << 20, MemoryCategory::Gradients).unwrap();
    let (mut shared, mut lent) = (buffer(), buffer());
    let (mut private, mut output) = (vec![0.0_f32; 1 << 18], vec![0.0_f32; 1 << 18]);
    loop {
        let block = [1, 100, 3000, 30_000][random.below(4)];
        let (root, all) = (random.below(ranks), block * ranks);
        let data = if random.below(2) == 0 { &mut private[..] } else { shared.elements_mut::<f32>() };
        let (data, output) = (&mut data[..all], &mut output[..all]);
        match random.below(9) {
            0 => group.barrier(soon())?,
            1 => group.broadcast(data, root, soon())?,
            2 => group.reduce(data, op, root, soon())?,
            3 => group.all_reduce(data, op, soon())?,
            4 => group.reduce_scatter(&*data, &mut output[..block], op, soon())?,
            5 => group.all_gather(&data[..block], output, soon())?,
            6 => group.all_to_all(&*data, output, soon())?,
            // A message between two ranks, while the others go on.
            7 if rank == root => group.send(&*data, (root + 1) % ranks, soon())?,
            7 if rank == (root + 1) % ranks => group.receive(data, root, soon())?,
            7 => {}
            _ => {
                let sum = LentBuffer::new(lent.lend(0..all * 4), DType::F32);
                let started = group.start(Collective::AllReduce { data: sum, op }, soon())?;
                group.all_gather(&data[..block], output, soon())?;
                started.wait(soon())?;
            }
        }
    }
}

/// Prints on all ranks; rank 1 dies in the middle of a line.
fn speak(group: &Group) -> Result<(), CommError> {
    let rank = group.rank();
    println!("rank {rank} says\ntwo lines");
    group.barrier(soon())?;
    if rank == 1 {
        eprint!("the last of rank 1");
        rustix::process::kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
    }
    group.barrier(soon())
}

/// Running ranks, and the directory of their reports.
struct Run {
    agent: Agent,
    first_rank: usize,
    reports: PathBuf,
}

/// Creates a directory for reports.
fn reports() -> PathBuf {
    static RUNS: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let run = RUNS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let reports = env::temp_dir().join(format!("lockstep-comm-{}-{run}", std::process::id()));
    fs::create_dir_all(&reports).unwrap();
    reports
}

impl Run {
    fn start(role: &str, ranks: usize, silence: Duration) -> Self {
        Self::start_with(role, ranks, silence, Output::Labelled)
    }

    fn start_with(role: &str, ranks: usize, silence: Duration, output: Output) -> Self {
        Self::start_at(NodePlacement::alone(ranks), role, ranks, silence, output, reports())
    }

    /// Starts ranks of several nodes, all of which are this machine.
    fn start_on_nodes(role: &str, nodes: &[usize], silence: Duration) -> Vec<Self> {
        let (listener, reports) = (TcpListener::bind("127.0.0.1:0").unwrap(), reports());
        let port = listener.local_addr().unwrap().port();
        let placements: Vec<NodePlacement> = std::thread::scope(|scope| {
            let meet = |(node, ranks): (usize, &usize)| {
                let listener = (node == 0).then(|| listener.try_clone().unwrap());
                let run = format!("nodes on port {port}");
                let endpoint = RendezvousEndpoint {
                    host: "127.0.0.1".to_owned(),
                    port,
                    listener,
                    run,
                    ..RendezvousEndpoint::default()
                };
                let (ranks, count) = (*ranks, nodes.len());
                // The last two nodes take the free numbers, in order of arrival.
                let node = (node == 0 || node + 2 < count).then_some(node);
                scope.spawn(move || {
                    join_nodes(endpoint, node, count, NodeInfo::first(ranks), soon()).unwrap().placement
                })
            };
            let threads: Vec<_> = nodes.iter().enumerate().map(meet).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let start = |(placement, ranks): (NodePlacement, &usize)| {
            Self::start_at(placement, role, *ranks, silence, Output::Labelled, reports.clone())
        };
        placements.into_iter().zip(nodes).map(start).collect()
    }

    fn start_at(
        placement: NodePlacement,
        role: &str,
        ranks: usize,
        silence: Duration,
        output: Output,
        reports: PathBuf,
    ) -> Self {
        let first_rank = placement.first_rank;
        let launch = Launch {
            program: env::current_exe().unwrap(),
            arguments: ["--exact", "a_rank", "--nocapture"].map(Into::into).to_vec(),
            environment: vec![
                (ROLE.into(), role.into()),
                (REPORTS.into(), reports.clone().into()),
                (SILENCE_MS.into(), silence.as_millis().to_string().into()),
            ],
            ranks,
            placement,
            options: WorldOptions { arena_bytes: 1 << 30, silence, ..WorldOptions::default() },
            pinning: Pinning::Free,
            output,
            elastic: Elastic::default(),
            success_codes: vec![0],
        };
        Self { agent: launch.start().unwrap(), first_rank, reports }
    }

    /// Waits until every rank has carried out `operations` operations.
    fn wait_for_operations(&mut self, operations: usize) {
        let begin = Instant::now();
        for rank in 0..self.agent.pids().len() {
            while self
                .agent
                .world()
                .recorded(rank)
                .last()
                .is_none_or(|last| (last.number as usize) < operations)
            {
                assert!(begin.elapsed() < Duration::from_secs(60), "rank {rank} does nothing");
                assert!(self.agent.watch(Duration::from_millis(1)).unwrap().is_none(), "the run ended");
            }
        }
    }

    fn signal(&self, rank: usize, signal: Signal) -> u64 {
        kill_process(Pid::from_raw(self.agent.pids()[rank] as i32).unwrap(), signal).unwrap();
        now_us()
    }

    fn end(&mut self) -> RunOutcome {
        let begin = Instant::now();
        loop {
            if let Some(ended) = self.agent.watch(Duration::from_millis(100)).unwrap() {
                return ended;
            }
            assert!(begin.elapsed() < Duration::from_secs(60), "the run does not end");
        }
    }

    fn failure(&mut self) -> Failure {
        match self.end() {
            RunOutcome::Failed(failure) => failure,
            RunOutcome::Succeeded(_) => panic!("the run ended well"),
        }
    }

    /// Returns each rank's report and its time; `None` for ranks that were killed.
    fn reports(&self) -> Vec<Option<(u64, String)>> {
        let read = |rank: usize| {
            let report = self.reports.join((self.first_rank + rank).to_string());
            let text = fs::read_to_string(report).ok()?;
            let (time, text) = text.split_once(' ')?;
            Some((time.parse().ok()?, text.to_owned()))
        };
        (0..self.agent.pids().len()).map(read).collect()
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.reports);
    }
}

const SILENCE: Duration = Duration::from_secs(5);

#[test]
fn processes_sum_as_threads_do_and_leave_nothing_behind() {
    for ranks in [1, 2, 4] {
        let mut run = Run::start("sum", ranks, SILENCE);
        assert!(matches!(run.end(), RunOutcome::Succeeded(0)));
        assert!(run.reports().into_iter().all(|report| report.is_some_and(|(_, text)| text == "done")));
    }
    let names = fs::read_dir("/dev/shm").map_or(0, |files| {
        files
            .filter(|file| {
                file.as_ref().is_ok_and(|file| file.file_name().to_string_lossy().contains("lockstep"))
            })
            .count()
    });
    assert_eq!(names, 0, "files in /dev/shm");
}

/// Returns the inodes of shared-memory files that a process has mapped or holds open.
fn shared_files(pid: &str) -> BTreeSet<u64> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let mapped = maps.lines().filter(|line| line.contains("memfd:lockstep"));
    let mapped = mapped.map(|line| line.split_whitespace().nth(4).unwrap().parse().unwrap());
    let open = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().filter_map(|file| file.ok());
    let is_shared = |file: &PathBuf| {
        fs::read_link(file).is_ok_and(|name| name.to_string_lossy().contains("memfd:lockstep"))
    };
    let open = open.map(|file| file.path()).filter(is_shared);
    let open = open.filter_map(|file| Some(fs::metadata(file).ok()?.ino()));
    mapped.chain(open).collect()
}

/// Returns the number of repetitions; `cargo xtask soak` sets a larger one.
fn deaths() -> u64 {
    env::var("LOCKSTEP_SEEDS").map_or(50, |seeds| seeds.parse().expect("LOCKSTEP_SEEDS is a number"))
}

#[test]
fn a_rank_that_dies_at_any_time_is_known_to_all_others_within_200_ms_and_leaves_nothing() {
    let mut delays_ms = Vec::new();
    for seed in 0..deaths() {
        let mut random = Draws::new(!seed);
        let ranks = 2 + random.below(7);
        let (victim, operations) = (random.below(ranks), random.below(60));
        let mut run = Run::start(&format!("random {seed}"), ranks, SILENCE);
        run.wait_for_operations(operations);
        std::thread::sleep(Duration::from_micros(random.below(5000) as u64));
        let pids = run.agent.pids();
        let shared = shared_files(&pids[victim].to_string());
        let (way, number) = [(Signal::KILL, 9), (Signal::ABORT, 6)][random.below(2)];
        let killed_us = run.signal(victim, way);
        let failure = run.failure();
        let found = (failure.rank, failure.cause);
        assert_eq!(found, (victim, LossCause::Signal(number)), "seed {seed}: {failure}");
        for (rank, report) in run.reports().into_iter().enumerate().filter(|(rank, _)| *rank != victim) {
            let (time_us, text) = report.unwrap_or_else(|| panic!("seed {seed}: rank {rank} said nothing"));
            assert!(text.starts_with(&format!("rank {victim} was lost")), "seed {seed}, rank {rank}: {text}");
            delays_ms.push(time_us.saturating_sub(killed_us) / 1000);
        }
        drop(run);
        let left = pids.iter().filter(|pid| Path::new(&format!("/proc/{pid}")).exists()).count();
        let own = shared_files("self");
        let left = (left, shared.iter().filter(|file| own.contains(file)).count());
        assert_eq!(left, (0, 0), "seed {seed}: processes and shared memory that are left");
    }
    delays_ms.sort_unstable();
    let (median, most) = (delays_ms[delays_ms.len() / 2], delays_ms[delays_ms.len() - 1]);
    println!("{} survivors knew after {median} ms (median), {most} ms (most)", delays_ms.len());
    // Other tests may load the machine, so the maximum has slack; a real regression shows in the median.
    assert!(median < 200 && most < 2000, "{delays_ms:?} ms");
}

#[test]
fn a_stopped_rank_is_known_to_be_silent() {
    let silence = Duration::from_millis(600);
    let mut run = Run::start("work", 3, silence);
    run.wait_for_operations(5);
    let stopped_us = run.signal(2, Signal::STOP);
    let failure = run.failure();
    let lost = matches!(failure.error, CommError::PeerLost { rank: 2, cause: LossCause::Silent(600), .. });
    assert!(lost, "{failure}");
    for (time_us, text) in run.reports().into_iter().take(2).map(Option::unwrap) {
        assert!(text.starts_with("rank 2 was lost: it has not moved for 600 ms"), "{text}");
        assert!(time_us - stopped_us < 3_000_000, "{} us", time_us - stopped_us);
    }
}

#[test]
fn ranks_of_several_nodes_sum_as_those_of_one_do() {
    for nodes in [&[1, 1][..], &[2, 2], &[1, 2, 1], &[2, 2, 2], &[4, 4]] {
        let mut runs = Run::start_on_nodes("sum", nodes, SILENCE);
        for run in &mut runs {
            assert!(matches!(run.end(), RunOutcome::Succeeded(0)), "{nodes:?}");
            assert!(run.reports().into_iter().all(|report| report.is_some_and(|(_, text)| text == "done")));
        }
    }
}

#[test]
fn a_rank_that_is_killed_on_another_node_is_known_to_all_within_a_second() {
    let mut delays_ms = Vec::new();
    for seed in 0..4_usize {
        let mut runs = Run::start_on_nodes("work", &[2, 2], SILENCE);
        runs.iter_mut().for_each(|run| run.wait_for_operations(2 + seed * 3));
        // Nodes are numbered in order of arrival: the ranks of `runs[n]` need not be those of node n.
        let (node, local) = (seed % 2, seed / 2);
        let victim = runs[node].first_rank + local;
        let killed_us = runs[node].signal(local, Signal::KILL);
        for run in &mut runs {
            let failure = run.failure();
            // One thread watches the launchers in turn, so the reported cause may be the peers' observation.
            let lost = matches!(failure.error, CommError::PeerLost { rank, .. } if rank == victim);
            assert!(lost, "{failure}, not rank {victim}");
            for (rank, report) in run.reports().into_iter().enumerate() {
                let rank = run.first_rank + rank;
                let Some((time_us, text)) = report else {
                    assert_eq!(rank, victim, "rank {rank} said nothing");
                    continue;
                };
                let expected = format!("rank {victim} was lost: it");
                assert!(text.starts_with(&expected), "rank {rank}: {text}");
                delays_ms.push(time_us.saturating_sub(killed_us) / 1000);
            }
        }
    }
    delays_ms.sort_unstable();
    assert!(
        delays_ms[delays_ms.len() / 2] < 1000 && delays_ms[delays_ms.len() - 1] < 3000,
        "{delays_ms:?} ms"
    );
}

#[test]
fn a_rank_that_is_stopped_on_another_node_is_known_to_be_silent() {
    let silence = Duration::from_millis(600);
    let mut runs = Run::start_on_nodes("work", &[1, 1], silence);
    runs.iter_mut().for_each(|run| run.wait_for_operations(5));
    let stopped_us = runs[1].signal(0, Signal::STOP);
    let victim = runs[1].first_rank;
    let failure = runs[0].failure();
    let lost = matches!(failure.error, CommError::PeerLost { rank, cause: LossCause::Silent(600), .. } if rank == victim);
    assert!(lost, "{failure}");
    let (time_us, _) = runs[0].reports()[0].clone().unwrap();
    assert!(time_us - stopped_us < 3_000_000, "{} us", time_us - stopped_us);
}

#[test]
fn a_rank_that_skips_an_operation_is_named_by_all() {
    let mut run = Run::start("skip", 3, SILENCE);
    let failure = run.failure();
    assert!(matches!(failure.error, CommError::Mismatch { rank: 1, .. }), "{failure}");
    for (_, text) in run.reports().into_iter().map(Option::unwrap) {
        assert_eq!(
            text,
            "rank 1 called all_reduce(max) of 10 f32 where rank 0 called all_reduce(max) of 100000 f32: \
             operation 4 of the group of all 3 ranks"
        );
    }
}

#[test]
fn a_rank_that_exits_without_leaving_is_reported_with_its_code() {
    let mut run = Run::start("exit", 2, SILENCE);
    let failure = run.failure();
    assert_eq!((failure.rank, failure.cause), (1, LossCause::Exit(7)), "{failure}");
    let (_, text) = run.reports()[0].clone().unwrap();
    assert!(text.starts_with("rank 1 was lost: it ended with exit code 7 (during barrier"), "{text}");
}

#[test]
fn ranks_die_with_their_agent() {
    let mut run = Run::start("work", 2, SILENCE);
    run.wait_for_operations(2);
    let pids = run.agent.pids();
    drop(run);
    for pid in pids {
        let is_there = Path::new(&format!("/proc/{pid}/stat")).exists();
        assert!(!is_there, "process {pid} is still there");
    }
}

/// Launcher process that [`ranks_speak_in_whole_lines_that_say_whose_they_are`] observes.
#[test]
fn a_launcher() {
    let Some(role) = env::var_os(LAUNCHED) else { return };
    let _ = Run::start(role.to_str().unwrap(), 3, SILENCE).end();
}

#[test]
fn ranks_speak_in_whole_lines_that_say_whose_they_are() {
    let mut launcher = std::process::Command::new(env::current_exe().unwrap());
    launcher.args(["--exact", "a_launcher", "--nocapture"]).env(LAUNCHED, "speak");
    let printed = launcher.output().unwrap();
    let (out, err) = [printed.stdout, printed.stderr].map(|text| String::from_utf8(text).unwrap()).into();
    for line in
        ["rank 0 says\ntwo lines\n", "[rank 1] rank 1 says\n[rank 1] two lines\n", "[rank 2] two lines\n"]
    {
        assert!(out.contains(line), "{line:?} in {out}");
    }
    assert!(err.contains("[rank 1] the last of rank 1\n"), "{err}");
}

#[test]
fn what_ranks_print_is_kept_in_files_that_a_failure_names() {
    let logs = tempfile::tempdir().unwrap();
    for times in 1..=2 {
        let mut run = Run::start_with("speak", 3, SILENCE, Output::Files(logs.path().join("logs")));
        let failure = run.failure();
        assert_eq!((failure.rank, failure.cause), (1, LossCause::Signal(9)), "{failure}");
        assert_eq!(fs::read_to_string(failure.log.unwrap()).unwrap(), "the last of rank 1".repeat(times));
        for rank in 0..3 {
            let out = fs::read_to_string(logs.path().join(format!("logs/rank-{rank:05}.out"))).unwrap();
            let said = format!("rank {rank} says\ntwo lines\n");
            assert_eq!(out.matches(&said).count(), times, "{out}");
        }
    }
    let in_the_way = logs.path().join("file");
    fs::write(&in_the_way, "").unwrap();
    let launch = Launch {
        program: env::current_exe().unwrap(),
        arguments: vec!["--list".into()],
        environment: Vec::new(),
        ranks: 2,
        placement: NodePlacement::alone(2),
        options: WorldOptions::default(),
        pinning: Pinning::Free,
        output: Output::Files(in_the_way),
        elastic: Elastic::default(),
        success_codes: vec![0],
    };
    let error = launch.start().unwrap_err().to_string();
    assert!(error.contains("file/rank-00000.out"), "{error}");
}
