//! Fault tests with a rank that knows the secret and sends invalid data to honest ranks. Each honest rank must end in time with
//! an error that names the rogue rank, and nothing may panic.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use lockstep_plan::random::Draws;

use super::{
    frame::{Channel, ENDING_BYTES, FRAME_BYTES, HEADER_BYTES, Header, Key, Kind, seal_frames},
    join::gather,
    operation::Running,
    rendezvous::RendezvousEndpoint,
    transport::Joined,
    wire::Connection,
};
use crate::{
    Call, Collective, CommError, Deadline, Group, Kind as Operation, LossCause, Malformed, ReduceOp, Source,
    Target, TcpOptions, join_by_address, task::Task,
};

/// Maximum time for a survivor to end.
const LIMIT: Duration = Duration::from_secs(8);
const SILENCE: Duration = Duration::from_secs(1);
/// Number of elements of the first operation, whose data comes with its announcement, and of the second, whose data does not.
const ELEMENTS: [usize; 2] = [10, 700_000];

fn bytes(random: &mut Draws, count: usize) -> Vec<u8> {
    (0..count).map(|_| random.below(256) as u8).collect()
}

/// Error with which survivors must end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expected {
    /// Loss of the rogue rank by exactly this cause.
    Malformed(Malformed),
    /// Any error that names the rogue rank, because the fault resembles a dead or mismatching rank.
    Named,
}

/// Faults, and the errors that survivors must report.
const FAULTS: [(&str, Expected); 16] = [
    ("bytes at random", Expected::Malformed(Malformed::CheckSum)),
    ("a flipped bit in a header", Expected::Malformed(Malformed::CheckSum)),
    ("a flipped bit in the bytes", Expected::Malformed(Malformed::CheckSum)),
    ("a length beyond every frame", Expected::Malformed(Malformed::Length)),
    ("a length beyond its kind", Expected::Malformed(Malformed::Length)),
    ("a kind that there is not", Expected::Malformed(Malformed::Kind)),
    ("an operation long past or far ahead", Expected::Malformed(Malformed::Operation)),
    ("a group that there is not", Expected::Malformed(Malformed::Operation)),
    ("an announcement twice", Expected::Malformed(Malformed::Operation)),
    ("a call without sense", Expected::Malformed(Malformed::Call)),
    ("data of another size than the call", Expected::Malformed(Malformed::Call)),
    ("an end without a reason", Expected::Malformed(Malformed::Ending)),
    ("more data than the piece has, on two connections", Expected::Malformed(Malformed::Range)),
    ("a truncated frame", Expected::Named),
    ("another operation", Expected::Named),
    ("frames of any kind with numbers at random", Expected::Named),
];

/// Returns the operation that all ranks call first, or second.
fn task(rank: usize, ranks: usize, which: usize, data: &mut [f32]) -> Task {
    let data = (&mut data[..ELEMENTS[which]]).into();
    let collective: Collective<Source<'_>, Target<'_>> = Collective::AllReduce { data, op: ReduceOp::Sum };
    Task::new(&collective, rank, ranks).map_err(|(call, _)| call.to_string()).unwrap()
}

fn key(sequence: u32) -> Key {
    Key { group: 0, channel: Channel::Collective, sequence }
}

fn frame(kind: Kind, key: Key, bytes: &[u8]) -> Vec<u8> {
    [&Header::of(kind, key, bytes).encode()[..], bytes].concat()
}

/// Bytes for the control connection, and for two data connections.
type Sent = [Vec<u8>; 3];

/// Returns the bytes of a fault, after valid announcements of both operations where it needs them.
fn fault(which: usize, rank: usize, ranks: usize, random: &mut Draws) -> Sent {
    let mut data = vec![1.0_f32; ELEMENTS[1]];
    let tasks = [0, 1].map(|which| task(rank, ranks, which, &mut data));
    let call = |which: usize| Kind::Announce(tasks[which].call.to_words());
    let small = Running::eager(&tasks[0]);
    let first = frame(call(0), key(0), &small);
    let both = [&first[..], &frame(call(1), key(1), &[])].concat();
    let sealed = |mut bytes: Vec<u8>, at: usize, with: &[u8]| {
        bytes[at..at + with.len()].copy_from_slice(with);
        seal_frames(&bytes)
    };
    let control = |bytes: Vec<u8>| [bytes, Vec::new(), Vec::new()];
    match which {
        0 => control([first, bytes(random, 200)].concat()),
        1 => {
            let mut bytes = first;
            bytes[random.below(HEADER_BYTES)] ^= 1 << random.below(8);
            control(bytes)
        }
        2 => {
            let mut bytes = first;
            bytes[HEADER_BYTES + random.below(small.len())] ^= 1 << random.below(8);
            control(bytes)
        }
        3 => {
            let length = (FRAME_BYTES + 1 + random.below(1 << 30)) as u32;
            control(sealed(frame(Kind::Direct { offset: 0 }, key(0), &[1]), 48, &length.to_le_bytes()))
        }
        4 => control(frame(Kind::Beat, key(0), &bytes(random, 3))),
        5 => control(sealed(first, 0, &[7 + random.below(200) as u8])),
        6 => {
            let sequence = [u32::MAX, 1000, 1 << 31][random.below(3)];
            control(frame(call(0), key(sequence), &small))
        }
        7 => {
            let group = [2, 63, u32::MAX][random.below(3)];
            control(frame(call(0), Key { group, ..key(0) }, &small))
        }
        8 => control([frame(call(1), key(1), &[]), frame(call(1), key(1), &[]), both].concat()),
        9 => control(frame(Kind::Announce([u64::MAX, 1, random.below(9) as u64]), key(0), &small)),
        10 => control(frame(call(0), key(0), &small[..random.below(small.len())])),
        11 => control(frame(Kind::Ending, key(0), &[0xee; ENDING_BYTES])),
        12 => {
            // The first part of the rogue's data for the receiver, begun on one connection and sent again on another.
            let part = |bytes: usize| frame(Kind::Chunk { index: 0, offset: 0 }, key(1), &vec![1; bytes]);
            let begun = part(FRAME_BYTES)[..HEADER_BYTES + 100].to_vec();
            let many = (0..5).flat_map(|_| part(FRAME_BYTES)).collect();
            [both, begun, many]
        }
        13 => {
            let end = 1 + random.below(first.len() - 1);
            control(first[..end].to_vec())
        }
        14 => {
            let other = Call { elements: 11, ..tasks[0].call };
            control(frame(Kind::Announce(other.to_words()), key(0), &small))
        }
        _ => [both, any_frames(random), any_frames(random)],
    }
}

/// Returns valid frames with random contents.
fn any_frames(random: &mut Draws) -> Vec<u8> {
    let one = |_| {
        let offset = [0, 4, 1 << 20, u64::MAX][random.below(4)];
        let index = [0, 1, 2, 3, u32::MAX][random.below(5)];
        let (kind, most) = match random.below(5) {
            0 | 1 => (Kind::Chunk { index, offset }, 3000),
            2 => (Kind::Direct { offset }, 3000),
            3 => (Kind::Turn { index }, 0),
            _ => (Kind::Beat, 0),
        };
        let channel =
            [Channel::Collective, Channel::Send, Channel::Receive][random.below(8).saturating_sub(5)];
        let sequence = [1, 1, 1, 0, 2, u32::MAX][random.below(6)];
        let bytes = vec![3; if most == 0 { 0 } else { 1 + random.below(most) }];
        frame(kind, Key { group: 0, channel, sequence }, &bytes)
    };
    (0..20).flat_map(one).collect()
}

/// Runs a survivor: repeats the two operations until an error, and returns it.
fn work(rank: usize, ranks: usize, rendezvous: RendezvousEndpoint) -> CommError {
    let options = TcpOptions { silence: SILENCE, ..TcpOptions::default() };
    let group = join_by_address(rank, ranks, rendezvous, options, Deadline::after(LIMIT)).unwrap();
    let mut data = vec![1.0_f32; ELEMENTS[1]];
    loop {
        for elements in ELEMENTS {
            let deadline = Deadline::after(LIMIT);
            if let Err(error) = group.all_reduce(&mut data[..elements], ReduceOp::Sum, deadline) {
                return error;
            }
        }
    }
}

/// Runs the rogue rank: joins, sends its bytes to every other rank, and receives until all have hung up. It sends data once the
/// receiver has announced the second operation; earlier, the data would belong to no operation.
fn misbehave(rank: usize, ranks: usize, mut rendezvous: RendezvousEndpoint, sent: &Sent, closes: bool) {
    let (options, deadline) = (TcpOptions::default(), Deadline::after(LIMIT));
    let joined = gather(rank, ranks, &mut rendezvous, options, (rank, 0), |_, _| {}, deadline).unwrap();
    let socket_of = |connection: Connection| connection.socket;
    let sockets: Vec<Vec<TcpStream>> =
        joined.links.into_values().map(|all| all.into_iter().map(socket_of).collect()).collect();
    thread::scope(|scope| {
        for sockets in &sockets {
            let (announce, announced) = mpsc::channel();
            let mut announce = Some(announce);
            scope.spawn(move || {
                let _ = { &sockets[0] }.write_all(&sent[0]);
                hear_out(&sockets[0], closes, &mut announce);
            });
            scope.spawn(move || {
                // The end of the connection counts as well.
                let _ = announced.recv_timeout(LIMIT);
                for (stream, bytes) in sockets.iter().zip(sent).skip(1) {
                    // A survivor that has already ended accepts no more.
                    let _ = { stream }.write_all(bytes);
                }
                sockets[1..].iter().for_each(|stream| hear_out(stream, closes, &mut None));
            });
        }
    });
}

/// Receives frames until the other end hangs up, and signals the announcement of the second operation.
fn hear_out(mut stream: &TcpStream, closes: bool, announce: &mut Option<mpsc::Sender<()>>) {
    if closes {
        let _ = stream.shutdown(Shutdown::Write);
    }
    let _ = stream.set_read_timeout(Some(LIMIT));
    let mut header = [0; HEADER_BYTES];
    while stream.read_exact(&mut header).is_ok() {
        let header = Header::decode(&header).unwrap();
        if matches!(header.kind, Kind::Announce(_)) && header.key.sequence == 1 {
            *announce = None;
        }
        let mut bytes = vec![0; header.bytes as usize];
        if stream.read_exact(&mut bytes).is_err() {
            return;
        }
    }
}

fn names(error: &CommError, rogue: usize) -> bool {
    match error {
        CommError::PeerLost { rank, .. } | CommError::TimedOut { rank, .. } => *rank == rogue,
        CommError::Mismatch { rank, reference, .. } => [*rank, *reference].contains(&rogue),
        _ => false,
    }
}

#[test]
fn whatever_a_rank_sends_that_knows_the_secret_it_is_named_by_all_others() {
    let seeds = std::env::var("LOCKSTEP_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(32);
    for seed in 0..seeds {
        let mut random = Draws::new(seed);
        let which = seed as usize % FAULTS.len();
        let (name, expected) = FAULTS[which];
        let ranks = 2 + random.below(3);
        let rogue = random.below(ranks);
        let sent = fault(which, rogue, ranks, &mut random);
        // A rank that falls silent or closes its connections is lost as well.
        let closes = expected == Expected::Named && random.below(2) == 0 || which == 13;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let begin = Instant::now();
        let errors: Vec<(usize, CommError)> = thread::scope(|scope| {
            let rendezvous = |rank: usize| {
                let listener = (rank == 0).then(|| listener.try_clone().unwrap());
                let run = format!("rogue on port {port}");
                RendezvousEndpoint {
                    host: "127.0.0.1".to_owned(),
                    port,
                    listener,
                    run,
                    ..RendezvousEndpoint::default()
                }
            };
            let (meeting_of_rogue, sent) = (rendezvous(rogue), &sent);
            scope.spawn(move || misbehave(rogue, ranks, meeting_of_rogue, sent, closes));
            let honest: Vec<_> = (0..ranks)
                .filter(|rank| *rank != rogue)
                .map(|rank| {
                    let rendezvous = rendezvous(rank);
                    (rank, scope.spawn(move || work(rank, ranks, rendezvous)))
                })
                .collect();
            honest.into_iter().map(|(rank, thread)| (rank, thread.join().unwrap())).collect()
        });
        let elapsed = begin.elapsed();
        for (rank, error) in errors {
            let at = format!(
                "seed {seed}: {name}, rank {rogue} of {ranks}; rank {rank} ended after {elapsed:?} by: {error}"
            );
            assert!(names(&error, rogue), "{at}");
            if let Expected::Malformed(what) = expected {
                let is_it = matches!(error, CommError::PeerLost { cause: LossCause::Malformed(found), .. } if found == what);
                assert!(is_it, "{at}; expected {what:?}");
            }
            assert!(elapsed < LIMIT, "{at}");
        }
    }
}

/// Runs a world with few neighbours. Rank `rogue` meets the others, does `misbehave`, and keeps what that returns until they
/// have ended. Returns the error with which `work` ends on each other rank, and the time that it took.
fn in_world_with_rogue<K>(
    ranks: usize,
    rogue: usize,
    silence: Duration,
    misbehave: impl FnOnce(Joined) -> K + Send,
    work: impl Fn(&Group) -> Result<(), CommError> + Sync,
) -> Vec<(usize, CommError, Duration)> {
    let options = TcpOptions { streams: 1, silence, neighbours: 1, ..TcpOptions::default() };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let deadline = Deadline::after(Duration::from_secs(30));
    let rendezvous = |rank: usize| RendezvousEndpoint {
        host: "127.0.0.1".to_owned(),
        port,
        listener: (rank == 0).then(|| listener.try_clone().unwrap()),
        run: format!("rogue on port {port}"),
        ..RendezvousEndpoint::default()
    };
    let (all_have_ended, ended) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let (mut rendezvous_of_rogue, work) = (rendezvous(rogue), &work);
        scope.spawn(move || {
            let rendezvous = &mut rendezvous_of_rogue;
            let joined = gather(rogue, ranks, rendezvous, options, (rogue, 0), |_, _| {}, deadline).unwrap();
            let kept = misbehave(joined);
            let _ = ended.recv();
            drop(kept);
        });
        let run = |rank: usize| {
            let rendezvous = rendezvous(rank);
            scope.spawn(move || {
                let group = join_by_address(rank, ranks, rendezvous, options, deadline).unwrap();
                let begin = Instant::now();
                (rank, work(&group).unwrap_err(), begin.elapsed())
            })
        };
        let honest: Vec<_> = (0..ranks).filter(|rank| *rank != rogue).map(run).collect();
        let errors = honest.into_iter().map(|thread| thread.join().unwrap()).collect();
        drop(all_have_ended);
        errors
    })
}

/// Checks that all ranks have ended within `limit` by the loss of rank `rogue`, for a cause that `is_expected` accepts.
fn check_loss(
    errors: &[(usize, CommError, Duration)],
    rogue: usize,
    limit: Duration,
    is_expected: impl Fn(LossCause) -> bool,
) {
    for (rank, error, elapsed) in errors {
        let at = format!("rank {rank} ended after {elapsed:?} by: {error}");
        let CommError::PeerLost { rank: lost, cause, .. } = error else { panic!("{at}") };
        assert!(*lost == rogue && is_expected(*cause), "{at}");
        assert!(*elapsed < limit, "{at}");
    }
}

/// Number of ranks of a world whose members agree along a tree, and the rank that is lost.
const MANY: usize = 67;
const LOST: usize = 40;

/// Waits for rank [`LOST`], as a rank that was never connected to it or as a member of the world.
fn wait_for_lost(group: &Group) -> Result<(), CommError> {
    let deadline = Deadline::after(Duration::from_secs(30));
    if group.rank() == 20 {
        return group.receive(&mut [0_u8][..], LOST, deadline);
    }
    group.barrier(deadline)
}

#[test]
fn a_rank_that_falls_silent_is_named_by_ranks_that_were_never_connected_to_it() {
    // Long enough for the beats of many ranks on a loaded machine.
    let silence = Duration::from_secs(3);
    let errors = in_world_with_rogue(MANY, LOST, silence, |joined| joined, wait_for_lost);
    check_loss(&errors, LOST, silence * 3, |cause| cause == LossCause::Silent(3000));
}

#[test]
fn a_rank_whose_sockets_close_is_named_by_ranks_that_were_never_connected_to_it() {
    let silence = Duration::from_secs(20);
    let errors = in_world_with_rogue(MANY, LOST, silence, drop, wait_for_lost);
    check_loss(&errors, LOST, Duration::from_secs(5), |cause| cause == LossCause::Disconnected);
}

#[test]
fn a_rank_that_asks_for_a_connection_and_cannot_be_connected_to_is_named_by_all_others() {
    const ROGUE: usize = 1;
    let knock_behind_a_closed_port = |joined: Joined| {
        let Joined { mesh, acceptor, links, .. } = joined;
        drop(acceptor);
        mesh.knock(ROGUE + 3, Deadline::after(LIMIT)).unwrap();
        links
    };
    let wait_for_another = |group: &Group| {
        let next = (group.rank() + 1) % group.size();
        let from = if next == ROGUE { group.size() - 1 } else { next };
        group.receive(&mut [0_u8][..], from, Deadline::after(Duration::from_secs(30)))
    };
    let silence = Duration::from_secs(20);
    let errors = in_world_with_rogue(12, ROGUE, silence, knock_behind_a_closed_port, wait_for_another);
    check_loss(&errors, ROGUE, Duration::from_secs(5), |cause| cause == LossCause::Disconnected);
}

#[test]
fn an_operation_that_a_rank_calls_alike_is_what_the_rogue_announces() {
    let mut data = vec![0.0; ELEMENTS[1]];
    let found = task(0, 2, 0, &mut data).call;
    assert_eq!((found.kind, found.elements), (Operation::AllReduce, ELEMENTS[0]));
}
