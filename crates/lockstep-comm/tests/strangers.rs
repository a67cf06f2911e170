//! Tests of strangers at the rendezvous: floods of connections, slow clients, garbage, scans, and processes of another
//! user. The ranks must meet all the same, and rank 0 must report the connections it rejected.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

use std::{
    env, fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use lockstep_comm::{
    CommError, Deadline, JoinProblem, ReduceOp, Rejections, RendezvousEndpoint, Secret, TcpOptions,
    join_by_address,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Environment variable with the attack of a process of another user.
const STRANGER: &str = "LOCKSTEP_TEST_STRANGER";
/// Environment variable with the port of the attacked ranks.
const PORT: &str = "LOCKSTEP_TEST_PORT";
/// User id of `nobody`.
const NOBODY: u32 = 65534;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

fn listener() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

fn rendezvous(port: u16, secret: Option<Secret>) -> RendezvousEndpoint {
    RendezvousEndpoint {
        host: "127.0.0.1".to_owned(),
        port,
        run: "strangers".to_owned(),
        secret,
        ..RendezvousEndpoint::default()
    }
}

fn some_secret() -> Option<Secret> {
    Some(Secret::of(b"0123456789abcdef"))
}

/// Raises this process's limit of descriptors to the maximum, and returns it.
fn descriptors() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.unwrap_or(1 << 20);
    setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum: limit.maximum }).unwrap();
    most as usize
}

/// Joins as one of `ranks` and checks an all-reduce.
fn join_and_sum(rank: usize, ranks: usize, rendezvous: RendezvousEndpoint) {
    let group = join_by_address(rank, ranks, rendezvous, TcpOptions::default(), soon()).unwrap();
    let mut sum = [rank as i64; 3];
    group.all_reduce(&mut sum[..], ReduceOp::Sum, soon()).unwrap();
    assert_eq!(sum, [(ranks * (ranks - 1) / 2) as i64; 3]);
}

/// Lets three ranks meet while `stranger` attacks the port; at least `strangers` connections of its are there before
/// the last two ranks come. Returns the time that those took, and rank 0's rejections.
fn meet_among(
    strangers: usize,
    stranger: impl Fn(u16, &AtomicBool, &AtomicUsize) + Sync,
) -> (Duration, Rejections) {
    let (listener, port) = listener();
    let (stop, ready) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        let first = RendezvousEndpoint { listener: Some(listener), ..rendezvous(port, some_secret()) };
        let rejections = first.rejections.clone();
        let first = scope.spawn(move || join_and_sum(0, 3, first));
        let (stranger, stop_ref, ready_ref) = (&stranger, &stop, &ready);
        let threads: Vec<_> =
            (0..8).map(|_| scope.spawn(move || stranger(port, stop_ref, ready_ref))).collect();
        let begin = Instant::now();
        while ready.load(Ordering::Relaxed) < strangers && begin.elapsed() < Duration::from_secs(30) {
            thread::sleep(Duration::from_millis(2));
        }
        let begin = Instant::now();
        let others: Vec<_> = (1..3)
            .map(|rank| scope.spawn(move || join_and_sum(rank, 3, rendezvous(port, some_secret()))))
            .collect();
        let all = others.into_iter().chain([first]).map(|rank| rank.join());
        let all: Vec<_> = all.collect();
        let elapsed = begin.elapsed();
        stop.store(true, Ordering::Relaxed);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        all.into_iter().for_each(|rank| rank.unwrap());
        (elapsed, rejections)
    })
}

/// Prints the measurement, and checks that joining was fast and at least `at_least` connections were rejected.
#[expect(clippy::print_stderr, reason = "the figures of a measurement")]
fn judge(what: &str, (elapsed, rejections): (Duration, Rejections), at_least: u64) {
    eprintln!("{what}: all joined after {elapsed:?}; {rejections}");
    assert!(elapsed < Duration::from_secs(3), "{what}: {elapsed:?}");
    assert!(rejections.count() >= at_least, "{what}: {} counted", rejections.count());
    if at_least > 0 {
        assert!(rejections.to_string().contains("from 127.0.0.1: "), "{what}: {rejections}");
    }
}

/// Returns an attack that opens its part of `count` connections, and holds them until `stop` is set.
fn hold(count: usize) -> impl Fn(u16, &AtomicBool, &AtomicUsize) + Sync {
    move |port, stop, ready| {
        let mut held = Vec::new();
        for _ in 0..count.div_ceil(8) {
            held.extend(TcpStream::connect(("127.0.0.1", port)));
            ready.fetch_add(1, Ordering::Relaxed);
        }
        while !stop.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn idle_connections_keep_nobody_out() {
    let most = descriptors();
    for count in [66, 500, 5000] {
        // Descriptors of the test's ends and of rank 0's.
        if most < count + 2000 {
            #[expect(clippy::print_stderr, reason = "a part that this machine cannot run is said")]
            {
                eprintln!("{count} idle connections: not tried, only {most} descriptors here");
            }
            continue;
        }
        let at_least = (count as u64).saturating_sub(400);
        judge(&format!("{count} idle connections"), meet_among(count, hold(count)), at_least);
    }
}

#[test]
fn many_ranks_behind_one_address_are_no_flood() {
    if descriptors() < 8000 {
        #[expect(clippy::print_stderr, reason = "a part that this machine cannot run is said")]
        {
            eprintln!("not tried: too few descriptors here");
        }
        return;
    }
    let ranks = 24;
    let (listener, port) = listener();
    let first = RendezvousEndpoint { listener: Some(listener), ..rendezvous(port, some_secret()) };
    let (rejections, mut strangers) = (first.rejections.clone(), Vec::new());
    thread::scope(|scope| {
        scope.spawn(move || join_and_sum(0, ranks, first));
        // The strangers connect from the ranks' own address.
        strangers.extend((0..500).flat_map(|_| TcpStream::connect(("127.0.0.1", port))));
        for rank in 1..ranks {
            scope.spawn(move || join_and_sum(rank, ranks, rendezvous(port, some_secret())));
        }
    });
    // There is room for them in addition to the 23 x 4 connections of the ranks, so none was dropped.
    assert_eq!(rejections.count(), 0, "{rejections}");
}

#[test]
fn idle_connections_after_the_rendezvous_are_few() {
    const FLOOD: usize = 700;
    if descriptors() < 4000 {
        #[expect(clippy::print_stderr, reason = "a part that this machine cannot run is said")]
        {
            eprintln!("not tried: too few descriptors here");
        }
        return;
    }
    // Not all ranks are connected from the start, so rank 0 listens during the whole run.
    let (ranks, options) = (12, TcpOptions { streams: 1, neighbours: 1, ..TcpOptions::default() });
    let (listener, port) = listener();
    let first = RendezvousEndpoint { listener: Some(listener), ..rendezvous(port, some_secret()) };
    let rejections = first.rejections.clone();
    let (all_are_there, mut first) = (std::sync::Barrier::new(ranks + 1), Some(first));
    thread::scope(|scope| {
        for rank in 0..ranks {
            let (all_are_there, endpoint) = (&all_are_there, first.take());
            scope.spawn(move || {
                let endpoint = endpoint.unwrap_or_else(|| rendezvous(port, some_secret()));
                let group = join_by_address(rank, ranks, endpoint, options, soon()).unwrap();
                all_are_there.wait();
                all_are_there.wait();
                group.barrier(soon()).unwrap();
            });
        }
        all_are_there.wait();
        let begin = Instant::now();
        let held: Vec<_> = (0..FLOOD).flat_map(|_| TcpStream::connect(("127.0.0.1", port))).collect();
        // Idle connections are dropped after 5 s in any case.
        while rejections.count() < 500 && begin.elapsed() < Duration::from_secs(4) {
            thread::sleep(Duration::from_millis(5));
        }
        let dropped = rejections.count();
        all_are_there.wait();
        assert_eq!(held.len(), FLOOD);
        assert!(dropped >= 500, "{dropped} of {FLOOD} dropped after {:?}: {rejections}", begin.elapsed());
    });
}

#[test]
fn a_flood_that_goes_on_keeps_nobody_out() {
    descriptors();
    let flood = |port: u16, stop: &AtomicBool, ready: &AtomicUsize| {
        let mut held = std::collections::VecDeque::new();
        while !stop.load(Ordering::Relaxed) {
            held.extend(TcpStream::connect(("127.0.0.1", port)));
            ready.fetch_add(1, Ordering::Relaxed);
            if held.len() > 500 {
                held.pop_front();
            }
        }
    };
    judge("a flood of new connections", meet_among(1000, flood), 500);
}

#[test]
fn slow_and_senseless_senders_keep_nobody_out() {
    descriptors();
    let slow = |port: u16, stop: &AtomicBool, ready: &AtomicUsize| {
        let mut held: Vec<TcpStream> =
            (0..25).flat_map(|_| TcpStream::connect(("127.0.0.1", port))).collect();
        ready.fetch_add(held.len(), Ordering::Relaxed);
        // The beginning of a greeting, at one byte per 100 ms.
        for byte in b"LOCKSTEP\x04\0\0\0\x02\0\0\0".iter().cycle() {
            held.retain_mut(|stream| stream.write_all(&[*byte]).is_ok());
            let begin = Instant::now();
            while begin.elapsed() < Duration::from_millis(100) {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                thread::sleep(Duration::from_millis(5));
            }
        }
    };
    judge("200 connections that send a byte each 100 ms", meet_among(200, slow), 0);
    let senseless = |port: u16, stop: &AtomicBool, ready: &AtomicUsize| {
        let what: [&[u8]; 4] = [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", &[0xff; 4096], b"LOCKSTEP", &[0; 112]];
        let mut answer = [0; 256];
        for bytes in what.iter().cycle() {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else { continue };
            let _ = stream.write_all(bytes);
            ready.fetch_add(1, Ordering::Relaxed);
            if bytes.len() != 8 {
                // The server closes the connection immediately.
                let _ = stream.set_read_timeout(Some(Duration::from_secs(2)));
                assert_eq!(stream.read(&mut answer).unwrap_or(0), 0, "garbage is answered");
            }
        }
    };
    judge("garbage", meet_among(100, senseless), 50);
    let scan = |port: u16, stop: &AtomicBool, ready: &AtomicUsize| {
        while !stop.load(Ordering::Relaxed) {
            drop(TcpStream::connect(("127.0.0.1", port)));
            ready.fetch_add(1, Ordering::Relaxed);
        }
    };
    judge("a port scan", meet_among(100, scan), 50);
}

#[test]
fn who_does_not_come_is_told_together_with_those_who_were_turned_away() {
    let (listener, port) = listener();
    let first = RendezvousEndpoint { listener: Some(listener), ..rendezvous(port, some_secret()) };
    let result = thread::scope(|scope| {
        // Longer than a connection without a greeting is held.
        let limit = Deadline::after(Duration::from_millis(6000));
        let first = scope.spawn(move || join_by_address(0, 2, first, TcpOptions::default(), limit));
        for _ in 0..20 {
            TcpStream::connect(("127.0.0.1", port)).unwrap().write_all(b"SSH-2.0-x").unwrap();
        }
        let mut slow = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let _idle = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let _ = b"LOCKSTEP".iter().try_for_each(|byte| {
            thread::sleep(Duration::from_millis(100));
            slow.write_all(&[*byte])
        });
        first.join().unwrap()
    });
    let Err(CommError::Join(problem @ JoinProblem::Missing { .. })) = result else { panic!("{result:?}") };
    let text = problem.to_string();
    assert!(text.contains("rank 1 did not come"), "{text}");
    assert!(text.contains("2 connections from 127.0.0.1: no greeting within 5 s"), "{text}");
    assert!(
        text.contains("turned away 20 connections from 127.0.0.1: it does not speak this protocol"),
        "{text}"
    );
}

#[test]
fn a_rank_waits_for_the_first_one_through_listeners_that_hang_up_on_it() {
    let (other, port) = listener();
    thread::scope(|scope| {
        let second = scope.spawn(move || join_and_sum(1, 2, rendezvous(port, some_secret())));
        // Acts like a door without room.
        for _ in 0..5 {
            drop(other.accept().unwrap());
        }
        let first = RendezvousEndpoint { listener: Some(other), ..rendezvous(port, some_secret()) };
        join_and_sum(0, 2, first);
        second.join().unwrap();
    });
}

/// Entry point of a process of another user; does nothing in the test process.
#[test]
fn a_stranger() {
    let (Some(role), Some(port)) = (env::var_os(STRANGER), env::var(PORT).ok()) else { return };
    let port: u16 = port.parse().unwrap();
    let limit = |ms| Deadline::after(Duration::from_millis(ms));
    let options = TcpOptions::default();
    let code = match role.to_str().unwrap() {
        // Asks for the secret as a rank does.
        "ask" => join_by_address(1, 2, rendezvous(port, None), options, limit(700)).map_or(0, |_| 1),
        // Takes the place of rank 0.
        "squat" => join_by_address(0, 2, rendezvous(port, None), options, limit(20_000)).map_or(0, |_| 1),
        // Tries secrets that are easy to guess.
        "guess" => {
            let come = |secret: &[u8]| {
                let found = rendezvous(port, Some(Secret::of(secret)));
                join_by_address(1, 2, found, options, limit(700)).is_ok()
            };
            i32::from([&b""[..], b"strangers", &[0; 32]].iter().any(|secret| come(secret)))
        }
        role => panic!("no such role: {role}"),
    };
    std::process::exit(code);
}

/// Copy of this test program that any user may run.
struct Program(PathBuf);

impl Program {
    /// Copies the program; `None` if this user cannot start processes of another user.
    fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            #[expect(clippy::print_stderr, reason = "a part that this machine cannot run is said")]
            {
                eprintln!("not tried: only root can start a process of another user");
            }
            return None;
        }
        static COPIES: AtomicUsize = AtomicUsize::new(0);
        let copy = COPIES.fetch_add(1, Ordering::Relaxed);
        let dir = env::temp_dir().join(format!("lockstep-strangers-{}-{copy}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        fs::copy(env::current_exe().unwrap(), dir.join("program")).unwrap();
        for path in [dir.clone(), dir.join("program")] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        Some(Self(dir))
    }

    fn start(&self, role: &str, port: u16) -> Child {
        let mut command = Command::new(self.0.join("program"));
        command.args(["--exact", "a_stranger", "--nocapture"]).current_dir("/");
        command.env(STRANGER, role).env(PORT, port.to_string()).uid(NOBODY).gid(NOBODY);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns true if a process holds the name under which the ranks of `port` first look for each other.
fn name_is_held(port: u16) -> bool {
    let digest = blake3::Hasher::new().update(&port.to_le_bytes()).update(b"strangers").finalize();
    let name = format!("@lockstep-{}", &digest.to_hex()[..32]);
    let list = fs::read(Path::new("/proc/net/unix")).unwrap();
    String::from_utf8_lossy(&list).lines().any(|line| line.ends_with(&name))
}

#[test]
fn a_process_of_another_user_cannot_join_or_end_ranks_that_have_no_secret() {
    let Some(program) = Program::new() else { return };
    for role in ["ask", "guess"] {
        let (listener, port) = listener();
        thread::scope(|scope| {
            let first = RendezvousEndpoint { listener: Some(listener), ..rendezvous(port, None) };
            let rejections = first.rejections.clone();
            let first = scope.spawn(move || join_and_sum(0, 2, first));
            let mut stranger = program.start(role, port);
            let status = stranger.wait().unwrap();
            assert_eq!(status.code(), Some(0), "{role}: it has joined");
            // The stranger has not ended the rendezvous either.
            join_and_sum(1, 2, rendezvous(port, None));
            first.join().unwrap();
            if role == "guess" {
                assert!(rejections.to_string().contains("another secret"), "{rejections}");
            }
        });
    }
}

#[test]
fn a_process_of_another_user_cannot_take_the_place_where_ranks_without_a_secret_meet() {
    let Some(program) = Program::new() else { return };
    let (listener, port) = listener();
    drop(listener);
    let mut stranger = program.start("squat", port);
    let begin = Instant::now();
    while !name_is_held(port) {
        assert!(begin.elapsed() < Duration::from_secs(10), "the stranger does not listen");
        thread::sleep(Duration::from_millis(5));
    }
    let begin = Instant::now();
    thread::scope(|scope| {
        for rank in 0..2 {
            scope.spawn(move || join_and_sum(rank, 2, rendezvous(port, None)));
        }
    });
    let elapsed = begin.elapsed();
    // The stranger still waits: no rank has connected to it.
    assert!(stranger.try_wait().unwrap().is_none(), "the stranger has ended");
    stranger.kill().unwrap();
    stranger.wait().unwrap();
    assert!(elapsed < Duration::from_secs(3), "{elapsed:?}");
}
