//! The heartbeat thread of each rank, which also watches the other ranks. A process that ends without having left, or whose
//! heartbeat stops, ends the run on all ranks.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, pidfd_open},
};

use super::{layout::Status, segments::Segments};
use crate::{CommError, LossCause, stoppable_thread::StoppableThread};

/// Number of heartbeats within the time after which a silent rank counts as lost.
const BEATS: u32 = 20;
/// Heartbeat interval until all ranks have joined.
const WHILE_JOINING: Duration = Duration::from_millis(10);
/// Time for the launcher to report the cause of a process's end, which peers cannot see, before they report it themselves.
const LAUNCHER_TIME: Duration = Duration::from_millis(100);
/// Polling interval for the launcher's report.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Handle of the thread, which ends when the handle is dropped.
#[derive(Debug)]
pub(crate) struct Heartbeat {
    _thread: StoppableThread,
}

impl Heartbeat {
    /// Starts the heartbeat of `rank` and the monitoring of the others, which may be silent for `limit`.
    pub(crate) fn start(segments: &Segments, rank: usize, limit: Duration) -> io::Result<Self> {
        let peers = (0..segments.ranks()).filter(|peer| *peer != rank).map(Peer::new).collect();
        let monitor = Monitor { segments: segments.clone(), rank, limit, peers };
        let _thread = StoppableThread::spawn("lockstep-heart", move |stop| monitor.run(stop))?;
        Ok(Self { _thread })
    }
}

struct Monitor {
    segments: Segments,
    rank: usize,
    limit: Duration,
    peers: Vec<Peer>,
}

struct Peer {
    rank: usize,
    process: Process,
    beat: u32,
    /// Number of own heartbeats since the peer's counter changed.
    silence: u32,
}

/// State of the monitoring of a peer's process.
enum Process {
    /// The peer has not joined yet.
    Expected,
    /// The peer's pidfd, which reports its end.
    Watched(OwnedFd),
    /// Not monitored: the peer is a thread of this process, is in another PID namespace, or has ended.
    Unwatched,
}

impl Peer {
    fn new(rank: usize) -> Self {
        Self { rank, process: Process::Expected, beat: 0, silence: 0 }
    }
}

impl Monitor {
    fn run(mut self, stop: &OwnedFd) {
        loop {
            self.segments.header(self.rank).beat.fetch_add(1, Ordering::Relaxed);
            let mut ended = self.watch_new_peers();
            let is_joining = self.peers.iter().any(|peer| matches!(peer.process, Process::Expected));
            let interval = if is_joining { WHILE_JOINING } else { self.limit / BEATS };
            let Ok(dead) = self.sleep(stop, interval) else { return };
            ended.extend(dead);
            for rank in ended {
                if self.segments.status(rank) == Status::Here {
                    let begin = Instant::now();
                    while !self.segments.has_ended() && begin.elapsed() < LAUNCHER_TIME {
                        std::thread::sleep(POLL_INTERVAL);
                    }
                    self.report_loss(rank, LossCause::Died);
                }
            }
            if !is_joining {
                self.count_missed_beats();
            }
        }
    }

    /// Starts to monitor peers that have joined since the last call. Returns those whose processes are gone already.
    fn watch_new_peers(&mut self) -> Vec<usize> {
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

    /// Sleeps for at most `limit`. Returns the ranks whose processes have ended meanwhile; `Err` if the thread must stop.
    fn sleep(&mut self, stop: &OwnedFd, limit: Duration) -> Result<Vec<usize>, ()> {
        let timeout = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        let mut watched = Vec::new();
        let mut polled = vec![PollFd::new(stop, PollFlags::IN)];
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

    /// Counts the heartbeats that peers miss. The own heartbeat is the clock: if all ranks are paused together, none is late.
    fn count_missed_beats(&mut self) {
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
            self.report_loss(rank, LossCause::Silent(self.limit.as_millis() as u64));
        }
    }

    fn report_loss(&self, rank: usize, cause: LossCause) {
        let rank = self.segments.world_rank(rank);
        self.segments.end(&CommError::PeerLost { rank, cause, context: None }, self.rank);
    }
}
