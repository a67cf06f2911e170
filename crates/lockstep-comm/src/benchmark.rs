//! Times operations in the manner of nccl-tests, and checks their results.
//!
//! Bandwidths are defined as in nccl-tests. `bytes` is the size of a rank's larger buffer. Algorithm bandwidth is `bytes`
//! divided by the time. Bus bandwidth multiplies it by the minimum traffic of a link per byte, so that it is comparable
//! to the hardware's peak.

use std::time::{Duration, Instant};

use lockstep_plan::MemoryCategory;
use lockstep_tensor::{Arena, Buffer};

use crate::{Collective, CommError, Deadline, Group, Kind, Number, NumberType, ReduceOp, Source, Target};

/// Description of the operation to time.
#[derive(Debug, Clone, Copy)]
pub struct Benchmark {
    /// Kind of the operation, one of [`Benchmark::KINDS`].
    pub kind: Kind,
    /// Element type: f32, bf16 or f16.
    pub number: NumberType,
    /// Size of a rank's larger buffer in bytes; rounded down to a whole number of elements per rank.
    pub bytes: usize,
    /// Location of the buffers.
    pub memory: BenchmarkMemory,
    /// Time for which the operation is repeated.
    pub time: Duration,
}

/// Location of a benchmark's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BenchmarkMemory {
    /// Shared arena of the rank, where gradients are.
    Shared,
    /// Private memory of the rank.
    Private,
}

/// Result of a benchmark.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Size of a rank's larger buffer in bytes.
    pub bytes: usize,
    /// Median time of all repetitions in microseconds, on the slowest rank.
    pub median_us: f64,
    /// Algorithm bandwidth in GB/s: bytes divided by time.
    pub algorithm_gbps: f64,
    /// Bus bandwidth in GB/s, as nccl-tests defines it.
    pub bus_gbps: f64,
    /// Number of elements with a wrong value, on all ranks.
    pub wrong: usize,
}

/// Deadline of each operation, which is longer than any takes.
const LIMIT: Duration = Duration::from_secs(60);
/// Number of untimed repetitions, in which memory is touched for the first time.
const WARM_UP: usize = 3;

impl Benchmark {
    /// Kinds of operations that can be timed.
    pub const KINDS: [Kind; 6] = [
        Kind::AllReduce,
        Kind::ReduceScatter,
        Kind::AllGather,
        Kind::AllToAll,
        Kind::Broadcast,
        Kind::Reduce,
    ];

    /// Times the operation. All ranks of the group must call it with the same values.
    ///
    /// # Errors
    /// As [`Group::run`].
    ///
    /// # Panics
    /// For an unsupported kind or element type, and if there is no memory for the buffers.
    pub fn run(&self, group: &Group) -> Result<Timing, CommError> {
        match self.number {
            NumberType::F32 => self.run_as::<f32>(group, |value| value),
            NumberType::Bf16 => self.run_as(group, half::bf16::from_f32),
            NumberType::F16 => self.run_as(group, half::f16::from_f32),
            other => panic!("benchmarks are of f32, bf16 and f16, not of {other}"),
        }
    }

    fn run_as<T: Number + PartialEq>(&self, group: &Group, make: fn(f32) -> T) -> Result<Timing, CommError> {
        let (rank, ranks) = (group.rank(), group.size());
        let block = self.bytes / size_of::<T>() / ranks;
        let arena = match self.memory {
            BenchmarkMemory::Shared => group.arena(&[MemoryCategory::Communication]),
            BenchmarkMemory::Private => Arena::new(),
        };
        let mut buffers = Buffers::new(&arena, block * ranks * size_of::<T>());
        let Buffers { first, second } = &mut buffers;
        let (first, second): (&mut [T], &mut [T]) =
            (elements(first, block * ranks), elements(second, block * ranks));
        first.iter_mut().enumerate().for_each(|(i, x)| *x = make(value(rank, i)));
        self.call(group, first, second, block)?;
        let wrong =
            self.count_wrong(rank, ranks, if self.is_in_place() { first } else { second }, block, make);
        let mut times_us = Vec::new();
        let mut repetitions = WARM_UP;
        while times_us.len() < repetitions {
            let begin = Instant::now();
            self.call(group, first, second, block)?;
            times_us.push(begin.elapsed().as_secs_f64() * 1e6);
            if times_us.len() == WARM_UP {
                // Rank 0 decides the number of repetitions, and all ranks start together.
                let often = self.time.as_secs_f64() * 1e6 / median(&mut times_us).max(0.1);
                let mut often = [(often as i64).clamp(5, 20_000)];
                group.broadcast(&mut often[..], 0, Deadline::after(LIMIT))?;
                group.barrier(Deadline::after(LIMIT))?;
                repetitions = WARM_UP + often[0] as usize;
            }
        }
        let mut sums = [wrong as i64];
        group.all_reduce(&mut sums[..], ReduceOp::Sum, Deadline::after(LIMIT))?;
        let mut slowest_ps = [(median(&mut times_us[WARM_UP..]) * 1e6) as i64];
        group.all_reduce(&mut slowest_ps[..], ReduceOp::Max, Deadline::after(LIMIT))?;
        let median_us = slowest_ps[0] as f64 / 1e6;
        let bytes = block * ranks * size_of::<T>();
        let algorithm_gbps = bytes as f64 / (median_us * 1e3);
        let bus_gbps = algorithm_gbps * self.bus_factor(ranks);
        Ok(Timing { bytes, median_us, algorithm_gbps, bus_gbps, wrong: sums[0] as usize })
    }

    fn call<T: Number>(
        &self,
        group: &Group,
        first: &mut [T],
        second: &mut [T],
        block: usize,
    ) -> Result<(), CommError> {
        let (start, op) = (group.rank() * block, ReduceOp::Sum);
        let mut collective = match self.kind {
            Kind::AllReduce => Collective::AllReduce { data: Target::from(first), op },
            Kind::Reduce => Collective::Reduce { data: Target::from(first), op, root: 0 },
            Kind::Broadcast => Collective::Broadcast { data: Target::from(first), root: 0 },
            Kind::ReduceScatter => {
                let output = Target::from(&mut second[start..start + block]);
                Collective::ReduceScatter { input: Source::from(&*first), output, op, counts: None }
            }
            Kind::AllGather => {
                let input = Source::from(&first[start..start + block]);
                Collective::AllGather { input, output: Target::from(second), counts: None }
            }
            Kind::AllToAll => Collective::AllToAll {
                input: Source::from(&*first),
                output: Target::from(second),
                counts: None,
            },
            other => panic!("no benchmark of {}", other.name()),
        };
        group.run(&mut collective, Deadline::after(LIMIT))
    }

    fn is_in_place(&self) -> bool {
        matches!(self.kind, Kind::AllReduce | Kind::Reduce | Kind::Broadcast)
    }

    /// Returns the number of wrong elements in the first call's result. Values are small integers, exact in every type.
    fn count_wrong<T: Number + PartialEq>(
        &self,
        rank: usize,
        ranks: usize,
        found: &[T],
        block: usize,
        make: fn(f32) -> T,
    ) -> usize {
        let sum = |i: usize| (0..ranks).map(|rank| value(rank, i)).sum::<f32>();
        let is_wrong = |i: &usize| {
            let expected = match self.kind {
                Kind::AllReduce => sum(*i),
                Kind::Reduce if rank == 0 => sum(*i),
                Kind::Reduce => value(rank, *i),
                Kind::Broadcast => value(0, *i),
                Kind::ReduceScatter if i / block != rank => return false,
                Kind::ReduceScatter => sum(*i),
                Kind::AllGather => value(i / block, *i),
                _ => value(i / block, rank * block + i % block),
            };
            found[*i] != make(expected)
        };
        (0..found.len()).filter(is_wrong).count()
    }

    /// Returns the minimum number of bytes that a link carries for each byte of the operation.
    fn bus_factor(&self, ranks: usize) -> f64 {
        let others = (ranks - 1) as f64 / ranks as f64;
        match self.kind {
            Kind::AllReduce => 2.0 * others,
            Kind::ReduceScatter | Kind::AllGather | Kind::AllToAll => others,
            _ => 1.0,
        }
    }
}

/// Returns the value of element `i` in a rank's input.
fn value(rank: usize, i: usize) -> f32 {
    ((i + 3 * rank) % 4) as f32
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

struct Buffers {
    first: Buffer,
    second: Buffer,
}

impl Buffers {
    fn new(arena: &Arena, bytes: usize) -> Self {
        let new = || {
            let buffer = arena.allocate_zeroed(bytes, MemoryCategory::Communication);
            buffer.unwrap_or_else(|error| panic!("no memory for a benchmark: {error}"))
        };
        Self { first: new(), second: new() }
    }
}

fn elements<T: Number>(buffer: &mut Buffer, count: usize) -> &mut [T] {
    &mut bytemuck::cast_slice_mut(buffer.bytes_mut())[..count]
}
