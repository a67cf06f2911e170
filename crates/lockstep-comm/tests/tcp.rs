//! Tests of the TCP transport's own features: rendezvous, authentication, all-reduce algorithms, and broken links.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

#[path = "common/tcp.rs"]
mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{in_tcp_world, soon};
use lockstep_comm::{
    Algorithm, Collective, CommError, Deadline, Group, JoinProblem, LentBuffer, LossCause, ReduceOp,
    RendezvousEndpoint, Secret, TcpOptions, join_by_address,
};
use lockstep_plan::{DType, MemoryCategory};
use lockstep_tensor::Arena;

/// Returns a listener on an unused port, and the port.
fn listener() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

fn rendezvous(port: u16) -> RendezvousEndpoint {
    let run = "a test".to_owned();
    RendezvousEndpoint { host: "127.0.0.1".to_owned(), port, run, ..RendezvousEndpoint::default() }
}

fn some_secret() -> Option<Secret> {
    Some(Secret::of(b"0123456789abcdef"))
}

/// Participant of a rendezvous.
struct Comer {
    rank: usize,
    ranks: usize,
    secret: &'static str,
    run: &'static str,
    settings: [u8; 32],
    encrypt: bool,
}

const COMER: Comer =
    Comer { rank: 0, ranks: 2, secret: "0123456789abcdef", run: "a test", settings: [0; 32], encrypt: false };

/// Returns the results of all participants of one rendezvous.
fn meet(comers: Vec<Comer>, limit: Duration) -> Vec<Result<usize, JoinProblem>> {
    let (listener, port) = listener();
    let mut listener = Some(listener);
    thread::scope(|scope| {
        let come = |comer: Comer| {
            let listener = if comer.rank == 0 { listener.take() } else { None };
            let (run, secret) = (comer.run.to_owned(), Some(Secret::of(comer.secret.as_bytes())));
            let rendezvous = RendezvousEndpoint {
                host: "127.0.0.1".to_owned(),
                port,
                listener,
                run,
                secret,
                ..RendezvousEndpoint::default()
            };
            let Comer { settings, encrypt, .. } = comer;
            let options = TcpOptions { settings, encrypt, ..TcpOptions::default() };
            scope.spawn(move || {
                match join_by_address(comer.rank, comer.ranks, rendezvous, options, Deadline::after(limit)) {
                    Ok(group) => Ok(group.rank()),
                    Err(CommError::Join(problem)) => Err(problem),
                    Err(error) => panic!("{error}"),
                }
            })
        };
        let threads: Vec<_> = comers.into_iter().map(come).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn all_who_come_are_told_why_it_cannot_be() {
    let limit = Duration::from_secs(20);
    let told = meet(vec![COMER, Comer { rank: 1, ..COMER }], limit);
    assert_eq!(told, [Ok(0), Ok(1)]);
    let three = [0, 1, 1].map(|rank| Comer { rank, ranks: 3, ..COMER });
    let duplicate = || Err(JoinProblem::Duplicate { what: "rank", number: 1 });
    assert_eq!(meet(three.into(), limit), [duplicate(), duplicate(), duplicate()]);
    let other_size = || Err(JoinProblem::OtherSize { what: "rank", number: 1, theirs: 3, ours: 2 });
    assert_eq!(meet(vec![COMER, Comer { rank: 1, ranks: 3, ..COMER }], limit), [other_size(), other_size()]);
    let other_settings = Comer { rank: 1, settings: [1; 32], ..COMER };
    let other_plan = || Err(JoinProblem::OtherPlan { rank: 1 });
    assert_eq!(meet(vec![COMER, other_settings], limit), [other_plan(), other_plan()]);
    let sealed = Comer { rank: 1, encrypt: true, ..COMER };
    assert_eq!(meet(vec![COMER, sealed], limit), [other_plan(), other_plan()]);
}

#[test]
fn strangers_are_turned_away_and_whoever_does_not_come_is_named() {
    let limit = Duration::from_millis(700);
    let missing = |rejections: &str| {
        let rejections = rejections.to_owned();
        Err(JoinProblem::Missing { what: "rank", missing: vec![1], waited_s: 0, rejections })
    };
    let told = meet(vec![COMER, Comer { rank: 1, secret: "0123456789abcdeF", ..COMER }], limit);
    let stranger = "turned away 1 connection from 127.0.0.1: another secret, or none";
    assert_eq!(told, [missing(stranger), Err(JoinProblem::Secret)]);
    let told = meet(vec![COMER, Comer { rank: 1, run: "another test", ..COMER }], limit);
    let other = "turned away 1 connection from 127.0.0.1: it belongs to another run (--rdzv-id)";
    assert_eq!(told, [missing(other), Err(JoinProblem::OtherRun)]);
    let told = meet(vec![COMER], limit);
    assert_eq!(told, [missing("")]);
    let text = missing(stranger).unwrap_err().to_string();
    assert!(text.contains("rank 1 did not come") && text.ends_with(stranger), "{text}");
}

#[test]
fn a_place_that_cannot_be_used_is_named() {
    let problem = |rendezvous: RendezvousEndpoint, rank: usize| {
        let deadline = Deadline::after(Duration::from_millis(400));
        join_by_address(rank, 2, rendezvous, TcpOptions::default(), deadline).unwrap_err().to_string()
    };
    let (_listener, port) = listener();
    let text = problem(RendezvousEndpoint { secret: some_secret(), ..rendezvous(port) }, 0);
    assert!(text.contains(&format!("127.0.0.1:{port}")) && text.contains("port is taken"), "{text}");
    let (listener, port) = self::listener();
    drop(listener);
    for secret in [None, some_secret()] {
        let text = problem(RendezvousEndpoint { secret, ..rendezvous(port) }, 1);
        assert!(text.contains(&format!("127.0.0.1:{port}: no answer")), "{text}");
    }
    let text = problem(RendezvousEndpoint { host: "no-such-host.invalid".to_owned(), ..rendezvous(port) }, 1);
    assert!(text.contains("no secret") && text.contains("LOCKSTEP_SECRET_FILE"), "{text}");
    let secret = some_secret();
    let text = problem(
        RendezvousEndpoint { host: "no-such-host.invalid".to_owned(), secret, ..rendezvous(port) },
        1,
    );
    assert!(text.contains("no-such-host.invalid"), "{text}");
    let text = problem(rendezvous(port), 2);
    assert!(text.contains("rank 2") && text.contains("below the number of ranks, 2"), "{text}");
}

#[test]
fn a_port_scan_and_slow_strangers_do_not_keep_ranks_from_meeting() {
    let (listener, port) = listener();
    let stop = Arc::new(AtomicBool::new(false));
    let strangers: Vec<_> = (0..4_u8)
        .map(|kind| {
            let stop = Arc::clone(&stop);
            thread::spawn(move || {
                let mut held = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else { break };
                    match kind {
                        0 => drop(stream),
                        1 => drop(stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")),
                        2 => drop(stream.write_all(&[0xff; 4096])),
                        _ if held.len() < 20 => held.push(stream),
                        _ => {}
                    }
                    thread::sleep(Duration::from_millis(3));
                }
            })
        })
        .collect();
    thread::sleep(Duration::from_millis(50));
    let begin = Instant::now();
    thread::scope(|scope| {
        for rank in 0..3 {
            let listener = (rank == 0).then(|| listener.try_clone().unwrap());
            scope.spawn(move || {
                let rendezvous = RendezvousEndpoint { listener, ..rendezvous(port) };
                let group = join_by_address(rank, 3, rendezvous, TcpOptions::default(), soon()).unwrap();
                let mut sum = [rank as i64; 3];
                group.all_reduce(&mut sum[..], ReduceOp::Sum, soon()).unwrap();
                assert_eq!(sum, [3; 3]);
            });
        }
    });
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    stop.store(true, Ordering::Relaxed);
    drop(listener);
    strangers.into_iter().for_each(|stranger| stranger.join().unwrap());
}

#[test]
fn every_algorithm_sums_and_all_ranks_have_the_same_bits() {
    for ranks in 2..6 {
        in_tcp_world(ranks, |group| {
            for algorithm in Algorithm::ALL {
                let group = group.clone().with_algorithm(algorithm);
                for elements in [7, 10_000, 700_001] {
                    let value = |rank: usize, i: usize| ((rank * 7919 + i * 31) % 1000) as f32 / 7.0 - 50.0;
                    let mut data: Vec<f32> = (0..elements).map(|i| value(group.rank(), i)).collect();
                    group.all_reduce(&mut data[..], ReduceOp::Sum, soon()).unwrap();
                    for (i, found) in data.iter().enumerate() {
                        let expected: f32 = (0..ranks).map(|rank| value(rank, i)).sum();
                        assert!(
                            (found - expected).abs() < 1e-3,
                            "{algorithm} {ranks}: {i}: {found} {expected}"
                        );
                    }
                    let mut all = vec![0.0_f32; elements * ranks];
                    group.all_gather(&data[..], &mut all[..], soon()).unwrap();
                    let bits = |data: &[f32]| data.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    for other in all.chunks_exact(elements) {
                        assert_eq!(bits(other), bits(&data), "{algorithm} on {ranks} ranks");
                    }
                }
            }
        });
    }
}

#[test]
fn ranks_with_unlike_algorithms_find_out() {
    in_tcp_world(2, |group| {
        let algorithm = if group.rank() == 0 { Algorithm::Ring } else { Algorithm::Tree };
        let group = group.clone().with_algorithm(algorithm);
        let error = group.all_reduce(&mut vec![0.0_f32; 100_000][..], ReduceOp::Sum, soon()).unwrap_err();
        assert!(error.to_string().contains("all_reduce(sum) of 100000 f32 by ring"), "{error}");
    });
}

/// Starts a proxy that forwards connections to `port`, each direction by a call of `pass` on a thread. Returns its port.
fn forward(port: u16, pass: impl Fn(TcpStream, TcpStream) + Clone + Send + 'static) -> u16 {
    let (listener, own) = listener();
    thread::spawn(move || {
        while let Ok((near, _)) = listener.accept() {
            let Ok(far) = TcpStream::connect(("127.0.0.1", port)) else { continue };
            for (from, to) in [
                (near.try_clone().unwrap(), far.try_clone().unwrap()),
                (far.try_clone().unwrap(), near.try_clone().unwrap()),
            ] {
                let pass = pass.clone();
                thread::spawn(move || pass(from, to));
            }
        }
    });
    own
}

/// Starts a proxy that forwards connections to `port` until `drops` is set, and then discards every byte. Returns its port.
fn proxy(port: u16, drops: Arc<AtomicBool>) -> u16 {
    forward(port, move |mut from, mut to| {
        let mut bytes = [0; 65536];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            if !drops.load(Ordering::Relaxed) && to.write_all(&bytes[..count]).is_err() {
                break;
            }
        }
        while drops.load(Ordering::Relaxed) {
            // Not even the end of the connection is forwarded.
            thread::sleep(Duration::from_millis(20));
        }
        let _ = to.shutdown(std::net::Shutdown::Write);
    })
}

#[test]
fn a_link_that_swallows_everything_is_known_within_the_time_of_silence() {
    let (listener, port) = listener();
    let drops = Arc::new(AtomicBool::new(false));
    let silence = Duration::from_millis(800);
    let detour = proxy(port, Arc::clone(&drops));
    let both = std::sync::Barrier::new(2);
    let work = |group: Result<Group, CommError>, drops: &AtomicBool| {
        let group = group.unwrap();
        group.all_reduce(&mut vec![1.0_f32; 100_000][..], ReduceOp::Sum, soon()).unwrap();
        both.wait();
        drops.store(true, Ordering::Relaxed);
        let begin = Instant::now();
        let error = group.all_reduce(&mut vec![1.0_f32; 100_000][..], ReduceOp::Sum, soon()).unwrap_err();
        (error, begin.elapsed())
    };
    let results = thread::scope(|scope| {
        let options = TcpOptions { silence, ..TcpOptions::default() };
        let (drops, work) = (&drops, &work);
        // Rank 1 reaches rank 0 through the proxy only.
        let threads = [(0, port), (1, detour)].map(|(rank, port)| {
            let listener = (rank == 0).then(|| listener.try_clone().unwrap());
            let rendezvous = RendezvousEndpoint { listener, secret: some_secret(), ..rendezvous(port) };
            scope.spawn(move || work(join_by_address(rank, 2, rendezvous, options, soon()), drops))
        });
        threads.map(|thread| thread.join().unwrap())
    });
    for (rank, (error, elapsed)) in results.into_iter().enumerate() {
        let CommError::PeerLost { rank: lost, cause: LossCause::Silent(800), context: Some(_) } = error
        else {
            panic!("rank {rank}: {error}")
        };
        assert_eq!(lost, 1 - rank);
        assert!(elapsed < silence * 3, "{elapsed:?}");
    }
}

/// Time that [`unordered_proxy`] holds bytes back.
const HELD: Duration = Duration::from_millis(700);

/// Starts a proxy that forwards connections to `port`. Once `holds` is set, bytes are forwarded `HELD` later, but the ends of
/// connections at once: the order of a network that loses packets, where each connection has its own. Returns its port.
fn unordered_proxy(port: u16, holds: Arc<AtomicBool>) -> u16 {
    forward(port, move |mut from, mut to| {
        let mut bytes = [0; 65536];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            if holds.load(Ordering::Relaxed) {
                thread::sleep(HELD);
            }
            if to.write_all(&bytes[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(std::net::Shutdown::Write);
    })
}

#[test]
fn a_farewell_that_arrives_after_the_end_of_other_connections_is_no_loss() {
    let (listener, port) = listener();
    let holds = Arc::new(AtomicBool::new(false));
    // Heartbeats are sent, and closed connections looked at, every 100 ms.
    let options = TcpOptions { silence: Duration::from_secs(2), ..TcpOptions::default() };
    let detour = unordered_proxy(port, Arc::clone(&holds));
    let join = |rank, port| {
        let listener = (rank == 0).then(|| listener.try_clone().unwrap());
        let rendezvous = RendezvousEndpoint { listener, secret: some_secret(), ..rendezvous(port) };
        let group = join_by_address(rank, 2, rendezvous, options, soon()).unwrap();
        group.all_reduce(&mut vec![1.0_f32; 100_000][..], ReduceOp::Sum, soon()).unwrap();
        group
    };
    let error = thread::scope(|scope| {
        let (join, holds) = (&join, &holds);
        scope.spawn(move || {
            let group = join(1, detour);
            holds.store(true, Ordering::Relaxed);
            drop(group);
        });
        let group = join(0, port);
        thread::sleep(2 * HELD);
        group.all_reduce(&mut vec![1.0_f32; 100_000][..], ReduceOp::Sum, soon()).unwrap_err()
    });
    assert!(matches!(error, CommError::PeerLost { rank: 1, cause: LossCause::Left, .. }), "{error}");
}

#[test]
fn ranks_find_the_first_one_at_the_next_port_where_something_else_has_the_first() {
    // A listener that accepts connections and sends nothing.
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port();
    let free = {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().port()
    };
    thread::scope(|scope| {
        for rank in 0..2 {
            let (fallback_ports, secret) = (vec![port, free], some_secret());
            let rendezvous = RendezvousEndpoint { fallback_ports, secret, ..rendezvous(port) };
            scope.spawn(move || {
                let group = join_by_address(rank, 2, rendezvous, TcpOptions::default(), soon()).unwrap();
                group.barrier(soon()).unwrap();
            });
        }
    });
}

#[test]
fn a_send_that_cannot_start_names_its_own_number_and_the_rank_that_does_not_receive() {
    const AHEAD: usize = 4;
    const BYTES: usize = 8 << 20;
    let done = std::sync::Barrier::new(2);
    in_tcp_world(2, |group| {
        (0..3).for_each(|_| group.barrier(soon()).unwrap());
        if group.rank() == 0 {
            let arena = Arena::new();
            let mut buffers: Vec<_> =
                (0..=AHEAD).map(|_| arena.allocate(BYTES, MemoryCategory::Communication).unwrap()).collect();
            let started = buffers.iter_mut().map(|buffer| {
                let input = LentBuffer::new(buffer.lend(0..BYTES), DType::U8);
                group.start(Collective::Send { input, to: 1 }, Deadline::after(Duration::from_millis(300)))
            });
            let started: Vec<_> = started.collect();
            let error = started.into_iter().find_map(Result::err).expect("the last send has no room");
            let CommError::TimedOut { rank: 1, waiting: 0, context, .. } = &error else { panic!("{error}") };
            assert_eq!(context.sequence as usize, AHEAD, "{error}");
        }
        done.wait();
    });
}
