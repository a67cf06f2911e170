//! `lockstep bench collectives`: the command starts itself once per rank; rank 0 prints.

use std::process::ExitCode;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use lockstep_comm::benchmark::{Benchmark, BenchmarkMemory, Timing};
use lockstep_comm::{Algorithm, CommError, Group, Kind, NumberType, TcpOptions, TransportKind};
use lockstep_config::human;
use lockstep_launch::interrupt::Interrupt;
use lockstep_launch::{JoinOptions, Pinning, started_group};
use serde_json::json;

use crate::exit::Failure;
use crate::output::say;
use crate::ranks;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Collective to time
    #[arg(long, value_enum, default_value_t = Operation::AllReduce)]
    op: Operation,
    /// Ranks on this machine
    #[arg(long, default_value_t = 2)]
    nproc_per_node: usize,
    /// Sizes of the larger buffer of a rank, such as 4KiB,1MiB,64MiB
    #[arg(long, value_delimiter = ',', value_parser = bytes, default_value = "4KiB,64KiB,1MiB,16MiB,64MiB")]
    sizes: Vec<usize>,
    /// Type of the elements
    #[arg(long, value_enum, default_value_t = Type::F32)]
    dtype: Type,
    /// Memory of the buffers: the ranks' shared arena, as for gradients, or private memory
    #[arg(long, value_enum, default_value_t = Memory::Shared)]
    memory: Memory,
    /// Seconds for each size
    #[arg(long, default_value_t = 0.5)]
    seconds: f64,
    /// Transport between ranks. Ranks that srun, mpirun or torchrun has started are joined by TCP
    #[arg(long, value_enum, default_value_t = Transport::Auto)]
    transport: Transport,
    /// Algorithm of all-reduces over TCP
    #[arg(long, default_value_t = Algorithm::Tree, value_parser = algorithms())]
    algorithm: Algorithm,
    /// TCP data connections between each pair of ranks
    #[arg(long, default_value_t = 2, value_name = "N")]
    connections: usize,
    /// Encrypt the TCP traffic
    #[arg(long)]
    encrypt: bool,
    /// Let ranks run on any core instead of pinning them to their share
    #[arg(long)]
    no_pinning: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Operation {
    AllReduce,
    ReduceScatter,
    AllGather,
    AllToAll,
    Broadcast,
    Reduce,
}

impl From<Operation> for Kind {
    fn from(operation: Operation) -> Self {
        match operation {
            Operation::AllReduce => Self::AllReduce,
            Operation::ReduceScatter => Self::ReduceScatter,
            Operation::AllGather => Self::AllGather,
            Operation::AllToAll => Self::AllToAll,
            Operation::Broadcast => Self::Broadcast,
            Operation::Reduce => Self::Reduce,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Type {
    F32,
    Bf16,
    F16,
}

impl From<Type> for NumberType {
    fn from(number: Type) -> Self {
        match number {
            Type::F32 => Self::F32,
            Type::Bf16 => Self::Bf16,
            Type::F16 => Self::F16,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Transport {
    Auto,
    Shared,
    Tcp,
    /// MPI, in a program built with the feature `mpi` and started by mpirun
    Mpi,
}

impl From<Transport> for TransportKind {
    fn from(transport: Transport) -> Self {
        match transport {
            Transport::Auto => Self::Auto,
            Transport::Shared => Self::SharedMemory,
            Transport::Tcp => Self::Tcp,
            Transport::Mpi => Self::Mpi,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Memory {
    Shared,
    Private,
}

impl From<Memory> for BenchmarkMemory {
    fn from(memory: Memory) -> Self {
        match memory {
            Memory::Shared => Self::Shared,
            Memory::Private => Self::Private,
        }
    }
}

fn algorithms() -> impl TypedValueParser<Value = Algorithm> {
    let named = |name: String| Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == name);
    PossibleValuesParser::new(Algorithm::ALL.map(Algorithm::name))
        .map(move |name| named(name).unwrap_or_default())
}

/// Parses a number of bytes with a unit: `4096`, `4KiB`, `64MiB`, `1GB`.
pub(crate) fn bytes(text: &str) -> Result<usize, String> {
    let bytes = human::read_bytes(text).and_then(|bytes| usize::try_from(bytes).ok());
    bytes.filter(|&bytes| bytes > 0).ok_or_else(|| {
        "allowed is a number of bytes from 1 on, with a unit or without: 4096, 64MiB, 1.5GB".to_owned()
    })
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    match started_group(arguments.join_options()).map_err(|error| ranks::told_by(error, 0))? {
        Some(group) => {
            let abort = |code: u8| group.abort(code.into());
            time(arguments, &group).map_err(|error| ranks::ended_by(error.into(), group.rank(), abort))?;
            Ok(ExitCode::SUCCESS)
        }
        None => launch(arguments),
    }
}

impl Arguments {
    fn join_options(&self) -> JoinOptions {
        let tcp = TcpOptions { streams: self.connections, encrypt: self.encrypt, ..TcpOptions::default() };
        JoinOptions { way: self.transport.into(), tcp, mpi: ranks::mpi() }
    }
}

/// Starts this command once per rank.
fn launch(arguments: &Arguments) -> Result<ExitCode, Failure> {
    if !(arguments.seconds > 0.0 && arguments.seconds <= 60.0) {
        return Err(Failure::configuration(format!("--seconds {}: allowed is 0 to 60", arguments.seconds)));
    }
    let pinning = if arguments.no_pinning { Pinning::Free } else { Pinning::Share };
    let start =
        ranks::Start { pinning, ..ranks::Start::here(arguments.nproc_per_node, arguments.transport.into())? };
    ranks::run(start, &Interrupt::default())
}

/// Runs the benchmark on one rank.
fn time(arguments: &Arguments, group: &Group) -> Result<(), CommError> {
    let group = &group.clone().with_algorithm(arguments.algorithm);
    let is_first = group.rank() == 0;
    let kind = Kind::from(arguments.op);
    let mut rows = Vec::new();
    if is_first && !arguments.json {
        say!("{:>12} {:>12} {:>14} {:>14} {:>7}", "bytes", "median us", "algbw GB/s", "busbw GB/s", "wrong");
    }
    for &bytes in &arguments.sizes {
        let number = arguments.dtype.into();
        let time = Duration::from_secs_f64(arguments.seconds);
        let benchmark = Benchmark { kind, number, bytes, memory: arguments.memory.into(), time };
        let Timing { bytes, median_us, algorithm_gbps, bus_gbps, wrong } = benchmark.run(group)?;
        rows.push(json!({
            "op": kind.name(), "bytes": bytes, "median_us": median_us, "algbw_GBps": algorithm_gbps,
            "busbw_GBps": bus_gbps, "wrong": wrong,
        }));
        if is_first && !arguments.json {
            say!("{bytes:>12} {median_us:>12.2} {algorithm_gbps:>14.3} {bus_gbps:>14.3} {wrong:>7}");
        }
    }
    if is_first && arguments.json {
        say!("{}", json!(rows));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn sizes_are_read_with_their_units() {
        let table =
            [("4096", 4096), ("4KiB", 4096), ("64MiB", 64 << 20), ("1 GiB", 1 << 30), ("16MB", 16_000_000)];
        for (text, expected) in table {
            assert_eq!(bytes(text), Ok(expected), "{text}");
        }
        for text in ["", "KiB", "4XB", "0", "-1", "99999999999GiB"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }
}
