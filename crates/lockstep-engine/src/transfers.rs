//! Transfers between this rank's memory, other ranks and a disk: a queue of asynchronous jobs, each begun early and
//! finished before its memory is used.
//!
//! ```text
//! begin(tag, job)    the job's memory is lent: links or the disk work while kernels compute
//! finish(which)      the loans of the jobs with these tags are over; the time of the wait is exposed
//! ```
//!
//! A job is a collective, a read or a write, identified by a tag of its owner. Quantized data is encoded before
//! [`Transfers::begin`] and decoded after [`Transfers::finish`].

use std::collections::VecDeque;
use std::ops::Add;
use std::time::{Duration, Instant};

use lockstep_comm::{Collective, Deadline, Group, LentBuffer, Pending};
use lockstep_tensor::{DiskQueue, DiskTraffic, Loan, Ticket};

use crate::EngineError;

/// A job for a queue of transfers.
pub(crate) enum Job<'a> {
    /// A collective of a group.
    Collective {
        group: &'a Group,
        collective: Collective<LentBuffer, LentBuffer>,
        /// Size of the full data in bytes: each rank has all of it before or after the collective.
        bytes: usize,
    },
    /// A read of the file, from an offset on.
    Read(u64, Loan),
    /// A write to the file, from an offset on.
    Write(u64, Loan),
}

/// Jobs in flight, oldest first, and the traffic of all jobs.
#[derive(Debug)]
pub(crate) struct Transfers<Tag> {
    in_flight: VecDeque<(Tag, InFlight)>,
    disk: Option<DiskQueue>,
    /// Timeout of a wait for one job.
    limit: Duration,
    traffic: Traffic,
    /// End of the time that background collectives have been booked for; avoids counting overlapping ones twice.
    counted_until: Option<Instant>,
}

#[derive(Debug)]
enum InFlight {
    Collective { begun: Instant, is_in_background: bool, pending: Pending },
    Disk(Ticket),
}

/// Bytes and times of collectives.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Traffic {
    /// Bytes that this rank sent, counted for the bandwidth-optimal algorithm: 2 (P-1)/P S for an all-reduce of S bytes
    /// over P ranks.
    pub bytes: u64,
    /// Time in which this rank worked on collectives. For background collectives, in which compute threads take no
    /// part, the time in which they were in flight.
    pub busy: Duration,
    /// Exposed communication: the part of `busy` that does not overlap with compute.
    pub exposed: Duration,
}

impl Add for Traffic {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            bytes: self.bytes + other.bytes,
            busy: self.busy + other.busy,
            exposed: self.exposed + other.exposed,
        }
    }
}

impl<Tag> Transfers<Tag> {
    /// Returns a queue without a disk, with room reserved for `capacity` jobs in flight. `limit` is the timeout of a
    /// wait for one job.
    pub(crate) fn new(limit: Duration, capacity: usize) -> Self {
        let (traffic, counted_until) = (Traffic::default(), None);
        Self { in_flight: VecDeque::with_capacity(capacity), disk: None, limit, traffic, counted_until }
    }

    /// Returns the queue with a disk, for reads and writes of a file.
    pub(crate) fn with_disk(self, disk: DiskQueue) -> Self {
        Self { disk: Some(disk), ..self }
    }

    /// Begins a job.
    ///
    /// # Errors
    /// If another rank is lost.
    ///
    /// # Panics
    /// If the job is a read or write and the queue has no disk.
    #[track_caller]
    pub(crate) fn begin(&mut self, tag: Tag, job: Job<'_>) -> Result<(), EngineError> {
        let job = match job {
            Job::Read(offset, into) => InFlight::Disk(self.disk().read(offset, into)),
            Job::Write(offset, from) => InFlight::Disk(self.disk().write(offset, from)),
            Job::Collective { group, collective, bytes } => {
                let passes = if matches!(collective, Collective::AllReduce { .. }) { 2 } else { 1 };
                self.traffic.bytes += bytes_sent(group, passes, bytes);
                let (begun, is_in_background) = (Instant::now(), group.is_in_background());
                let pending = group.start(collective, Deadline::after(self.limit))?;
                group.progress()?;
                if !is_in_background {
                    self.traffic.busy += begun.elapsed();
                }
                InFlight::Collective { begun, is_in_background, pending }
            }
        };
        self.in_flight.push_back((tag, job));
        Ok(())
    }

    /// Returns true if a job whose tag `which` accepts is in flight.
    pub(crate) fn has(&self, which: impl Fn(&Tag) -> bool) -> bool {
        self.in_flight.iter().any(|(tag, _)| which(tag))
    }

    /// Waits for the jobs whose tags `which` accepts, oldest first.
    ///
    /// # Errors
    /// If another rank or the disk fails or does not answer in time.
    pub(crate) fn finish(&mut self, which: impl Fn(&Tag) -> bool) -> Result<(), EngineError> {
        let limit = self.limit;
        while let Some(index) = self.in_flight.iter().position(|(tag, _)| which(tag))
            && let Some((_, job)) = self.in_flight.remove(index)
        {
            match job {
                InFlight::Disk(ticket) => self.disk().wait(ticket, limit)?,
                InFlight::Collective { begun, is_in_background, pending } => {
                    let begin = Instant::now();
                    let (_, done) = pending.wait_with_time(Deadline::after(limit))?;
                    let end = if done > begin { Instant::now() } else { done };
                    let waited = end.saturating_duration_since(begin);
                    self.traffic.exposed += waited;
                    if is_in_background {
                        let from = self.counted_until.map_or(begun, |until| begun.max(until));
                        self.traffic.busy += end.saturating_duration_since(from);
                        self.counted_until = Some(from.max(end));
                    } else {
                        self.traffic.busy += waited;
                    }
                }
            }
        }
        Ok(())
    }

    /// Books a blocking collective that took `elapsed`, all of it exposed.
    pub(crate) fn book(&mut self, bytes: u64, elapsed: Duration) {
        self.traffic = self.traffic + Traffic { bytes, busy: elapsed, exposed: elapsed };
    }

    /// Returns the traffic of collectives since the last call.
    pub(crate) fn take_traffic(&mut self) -> Traffic {
        std::mem::take(&mut self.traffic)
    }

    /// Returns the disk traffic since the last call.
    pub(crate) fn take_disk_traffic(&mut self) -> DiskTraffic {
        self.disk.as_mut().map_or_else(DiskTraffic::default, DiskQueue::take_traffic)
    }

    /// Returns the bytes of the file; 0 without one.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.disk.as_ref().and_then(DiskQueue::file).map_or(0, |file| file.len_bytes())
    }

    /// Returns the queue with a faulty disk.
    #[cfg(test)]
    pub(crate) fn faulty_disk(self, trouble: crate::faulty_disk::DiskFaults) -> Self {
        Self { disk: self.disk.map(|disk| trouble.of(disk)), ..self }
    }

    fn disk(&mut self) -> &mut DiskQueue {
        self.disk.as_mut().expect("a queue for jobs of a disk has one")
    }
}

/// Returns the bytes that a rank of `group` sends in a collective over `bytes` with the bandwidth-optimal algorithm.
/// `passes` is 1 for an all-gather or reduce-scatter, 2 for an all-reduce.
pub(crate) fn bytes_sent(group: &Group, passes: u64, bytes: usize) -> u64 {
    let (ranks, bytes) = (group.size() as u64, bytes as u64);
    passes * (ranks - 1) * bytes / ranks
}

#[cfg(test)]
mod tests {
    use std::thread;

    use lockstep_comm::{ReduceOp, World, WorldOptions};
    use lockstep_plan::{DType, MemoryCategory};

    use super::*;

    #[test]
    fn jobs_are_finished_by_their_tags_and_booked_with_the_bytes_of_the_best_algorithm() {
        const RANKS: usize = 3;
        const ELEMENTS: usize = 6;
        let run = |group: Group| {
            let arena = group.arena(&[MemoryCategory::Communication]);
            let bytes = ELEMENTS * size_of::<f32>();
            let mut buffers =
                [0, 1].map(|_| arena.allocate_zeroed(bytes, MemoryCategory::Communication).unwrap());
            let own = 2 * group.rank()..2 * group.rank() + 2;
            buffers[0].view(DType::F32, 0, [ELEMENTS]).copy_from(&[1.0_f32; ELEMENTS]);
            let of_rank = buffers[1].view(DType::F32, own.start * size_of::<f32>(), [own.len()]);
            of_rank.copy_from(&[group.rank() as f32; 2]);
            let mut transfers = Transfers::new(Duration::from_secs(60), 2);
            let data = LentBuffer::new(buffers[0].lend(0..bytes), DType::F32);
            let sum = Collective::AllReduce { data, op: ReduceOp::Sum };
            transfers.begin("sum", Job::Collective { group: &group, collective: sum, bytes }).unwrap();
            let data = LentBuffer::new(buffers[1].lend(0..bytes), DType::F32);
            let gather = Collective::AllGatherInPlace { data, counts: None };
            transfers.begin("gather", Job::Collective { group: &group, collective: gather, bytes }).unwrap();
            transfers.finish(|tag| *tag == "sum").unwrap();
            assert!(!transfers.has(|tag| *tag == "sum") && transfers.has(|tag| *tag == "gather"));
            assert_eq!(buffers[0].view(DType::F32, 0, [ELEMENTS]).to_vec::<f32>(), [3.0; ELEMENTS]);
            transfers.finish(|_| true).unwrap();
            let gathered = buffers[1].view(DType::F32, 0, [ELEMENTS]).to_vec::<f32>();
            assert_eq!(gathered, [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]);
            let Traffic { bytes: sent, busy, exposed } = transfers.take_traffic();
            assert_eq!(sent as usize, (2 * 2 * bytes) / RANKS + (2 * bytes) / RANKS);
            assert!(exposed <= busy, "{exposed:?} of {busy:?}");
        };
        let groups =
            World::in_process(RANKS, WorldOptions { arena_bytes: 1 << 24, ..WorldOptions::default() });
        thread::scope(|scope| {
            for group in groups.unwrap() {
                let run = &run;
                scope.spawn(move || run(group));
            }
        });
    }
}
