//! A thread of each rank that shows the others that it moves, and watches them: a process that ends without having left, or
//! does not move any more, ends the run for all.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, atomic::Ordering},
    thread::{Builder, JoinHandle},
    time::{Duration, Instant},
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    process::{Pid, PidfdFlags, pidfd_open},
};

use super::{layout::Status, segments::Segments};
use crate::{CommError, LossCause};

/// Beats in the time after which a silent rank counts as lost.
const BEATS: u32 = 20;
/// Between two looks as long as not everybody is here.
const WHILE_JOINING: Duration = Duration::from_millis(10);
/// Time for a launcher to tell how a process ended, which its peers cannot see, before they say that it did.
const LAUNCHERS_TURN: Duration = Duration::from_millis(100);
/// Pause between two looks at the verdict.
const LOOK: Duration = Duration::from_millis(5);

/// The thread; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Heart {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Heart {
    /// Starts to beat for `rank`, and to watch the others, which may be silent for `limit`.
    pub(crate) fn start(segments: &Segments, rank: usize, limit: Duration) -> io::Result<Self> {
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let watch = Watch {
            segments: segments.clone(),
            rank,
            limit,
            peers: (0..segments.ranks()).filter(|peer| *peer != rank).map(Peer::new).collect(),
            stop: Arc::clone(&stop),
        };
        let thread = Builder::new().name("lockstep-heart".to_owned()).spawn(move || watch.run())?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Heart {
    fn drop(&mut self) {
        // An event counter at its limit would refuse; this one is written once.
        let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Watch {
    segments: Segments,
    rank: usize,
    limit: Duration,
    peers: Vec<Peer>,
    stop: Arc<OwnedFd>,
}

struct Peer {
    rank: usize,
    process: Process,
    beat: u32,
    /// Own beats since it changed.
    silence: u32,
}

/// What is known of a peer's process.
enum Process {
    /// It is not here yet.
    Expected,
    /// Its end can be watched for.
    Watched(OwnedFd),
    /// It cannot, or need not: it is this very process, or in another PID namespace, or has ended.
    Unwatched,
}

impl Peer {
    fn new(rank: usize) -> Self {
        Self { rank, process: Process::Expected, beat: 0, silence: 0 }
    }
}

impl Watch {
    fn run(mut self) {
        loop {
            self.segments.header(self.rank).beat.fetch_add(1, Ordering::Relaxed);
            let mut ended = self.meet_peers();
            let is_joining = self.peers.iter().any(|peer| matches!(peer.process, Process::Expected));
            let interval = if is_joining { WHILE_JOINING } else { self.limit / BEATS };
            let Ok(dead) = self.sleep(interval) else { return };
            ended.extend(dead);
            for rank in ended {
                if self.segments.status(rank) == Status::Here {
                    let begin = Instant::now();
                    while !self.segments.has_ended() && begin.elapsed() < LAUNCHERS_TURN {
                        std::thread::sleep(LOOK);
                    }
                    self.lost(rank, LossCause::Died);
                }
            }
            if !is_joining {
                self.listen();
            }
        }
    }

    /// Starts to watch those who have come since; returns those who are gone already.
    fn meet_peers(&mut self) -> Vec<usize> {
        let mut gone = Vec::new();
        let own = self.segments.header(self.rank);
        for peer in &mut self.peers {
            if !matches!(peer.process, Process::Expected) || self.segments.status(peer.rank) == Status::Absent
            {
                continue;
            }
            peer.process = Process::Unwatched;
            let header = self.segments.header(peer.rank);
            let pid = header.pid.load(Ordering::Relaxed);
            let is_near =
                header.pid_namespace.load(Ordering::Relaxed) == own.pid_namespace.load(Ordering::Relaxed);
            if !is_near || pid == own.pid.load(Ordering::Relaxed) {
                continue;
            }
            match Pid::from_raw(pid as i32).map(|pid| pidfd_open(pid, PidfdFlags::empty())) {
                Some(Ok(process)) => peer.process = Process::Watched(process),
                Some(Err(rustix::io::Errno::SRCH)) => gone.push(peer.rank),
                _ => {}
            }
        }
        gone
    }

    /// Sleeps; returns earlier with the ranks whose processes have ended. An error is the end.
    fn sleep(&mut self, limit: Duration) -> Result<Vec<usize>, ()> {
        let timeout = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        let mut watched = Vec::new();
        let mut polled = vec![PollFd::from_borrowed_fd(self.stop.as_fd(), PollFlags::IN)];
        for (index, peer) in self.peers.iter().enumerate() {
            if let Process::Watched(process) = &peer.process {
                polled.push(PollFd::from_borrowed_fd(process.as_fd(), PollFlags::IN));
                watched.push(index);
            }
        }
        if poll(&mut polled, Some(&timeout)).is_err() {
            return Ok(Vec::new());
        }
        let happened: Vec<bool> = polled.iter().map(|polled| !polled.revents().is_empty()).collect();
        if happened[0] {
            return Err(());
        }
        let dead: Vec<usize> = watched
            .into_iter()
            .zip(&happened[1..])
            .filter(|(_, dead)| **dead)
            .map(|(index, _)| index)
            .collect();
        for index in &dead {
            self.peers[*index].process = Process::Unwatched;
        }
        Ok(dead.into_iter().map(|index| self.peers[index].rank).collect())
    }

    /// Counts the beats that peers miss. Time is told by own beats: if all were stopped together, nobody is late.
    fn listen(&mut self) {
        let mut silent = None;
        for peer in &mut self.peers {
            let beat = self.segments.header(peer.rank).beat.load(Ordering::Relaxed);
            peer.silence = if beat == peer.beat { peer.silence + 1 } else { 0 };
            peer.beat = beat;
            if peer.silence >= BEATS && self.segments.status(peer.rank) == Status::Here {
                silent.get_or_insert(peer.rank);
            }
        }
        if let Some(rank) = silent {
            self.lost(rank, LossCause::Silent(self.limit.as_millis() as u64));
        }
    }

    fn lost(&self, rank: usize, cause: LossCause) {
        let rank = self.segments.world_rank(rank);
        self.segments.end(&CommError::PeerLost { rank, cause, occasion: None }, self.rank);
    }
}
