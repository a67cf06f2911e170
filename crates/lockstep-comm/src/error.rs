//! Errors of this crate. An error that ends a run is the same on every rank, whichever rank detects it: it travels as words
//! in shared memory ([`CommError::to_words`]) or on the wire.

use std::{fmt, io, path::PathBuf};

use crate::{Kind, call::Call, tcp::Malformed};

/// Error of a collective, or of starting and joining ranks.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// Loss of a rank: its process ended, or no longer responds.
    #[error("rank {rank} was lost: it {cause}{}", during(.occasion))]
    PeerLost {
        /// Lost rank, as a rank of the world.
        rank: usize,
        /// Cause of the loss.
        cause: LossCause,
        /// The operation that this rank was waiting for; `None` if it was not waiting.
        occasion: Option<Occasion>,
    },
    /// Different operations called by ranks of a group. The group's order of operations is lost, so this ends the run.
    #[error("rank {rank} called {found} where rank {reference} called {}: operation {} of {}", occasion.call, occasion.sequence, occasion.group)]
    Mismatch {
        /// World rank whose call differs from the majority's.
        rank: usize,
        /// Call of that rank.
        found: Call,
        /// A world rank that made the majority's call.
        reference: usize,
        /// The operation, with the majority's call.
        occasion: Occasion,
    },
    /// Expiry of a deadline.
    #[error("rank {waiting} waited {waited_ms} ms for rank {rank}, which has not come to {occasion}")]
    TimedOut {
        /// World rank that has not come to the operation.
        rank: usize,
        /// World rank whose deadline expired.
        waiting: usize,
        /// Time in milliseconds that this rank was ready to wait.
        waited_ms: u64,
        /// The operation it was waiting for.
        occasion: Occasion,
    },
    /// A call that is invalid whatever the other ranks call.
    #[error("rank {rank} called {}, which is no valid operation: {problem}", occasion.call)]
    Misuse {
        /// World rank that made the call.
        rank: usize,
        /// Reason why the call is invalid.
        problem: Problem,
        /// The invalid call and its place in the order of operations.
        occasion: Occasion,
    },
    /// Deliberate end of the run.
    #[error("the run was stopped by {}", by.map_or("its launcher".to_owned(), |rank| format!("rank {rank}")))]
    Stopped {
        /// World rank that ended the run; `None` for the launcher.
        by: Option<usize>,
    },
    /// Failure of ranks to come together.
    #[error("cannot join the other ranks: {0}")]
    Join(JoinProblem),
    /// Failure of a system call.
    #[error("cannot {what}: {source}")]
    Io {
        /// Action that failed, after "cannot".
        what: &'static str,
        /// Error of the system.
        source: io::Error,
    },
}

/// Place of an event in the order of operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Occasion {
    /// The operation, as the reporting rank called it.
    pub call: Call,
    /// Number of the operation in its group, from 0; for `send` and `receive`, its number between the two ranks.
    pub sequence: u32,
    /// Group of the operation.
    pub group: GroupName,
}

impl fmt::Display for Occasion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, operation {} of {}", self.call, self.sequence, self.group)
    }
}

/// Identification of a group. Groups created by one partition share the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupName {
    /// 0 for the world, then numbers in the order of the partitions.
    pub index: u32,
    /// Lowest world rank in the group.
    pub first: u32,
    /// Number of ranks in the group.
    pub size: u32,
}

impl fmt::Display for GroupName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.index {
            0 => write!(f, "the group of all {} ranks", self.size),
            index => write!(f, "group {index} ({} ranks from rank {})", self.size, self.first),
        }
    }
}

/// Cause of the loss of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LossCause {
    /// End of its process for an unknown reason.
    Died,
    /// Death of its process by this signal.
    Signal(i32),
    /// Death of its process by the kernel's out-of-memory killer.
    OutOfMemory,
    /// Death of its process by SIGKILL; the system does not show whether the kernel ran out of memory.
    PerhapsOutOfMemory,
    /// End of its process with this exit code.
    Exit(i32),
    /// Departure while other ranks still depended on it.
    Left,
    /// A panic of the rank.
    Panicked,
    /// No sign of life from its process, which still exists, for this many milliseconds.
    Silent(u64),
    /// A connection that its end closed, or that broke.
    Disconnected,
    /// A message that no rank of this program sends.
    Malformed(Malformed),
    /// No acknowledgement of sent data for too long.
    Unreachable,
}

impl fmt::Display for LossCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Died => f.write_str("died"),
            Self::Signal(signal) => match signal_name(*signal) {
                Some(name) => write!(f, "was killed by signal {signal} ({name})"),
                None => write!(f, "was killed by signal {signal}"),
            },
            Self::OutOfMemory => f.write_str("was killed by the out-of-memory killer (signal 9)"),
            Self::PerhapsOutOfMemory => {
                f.write_str("was killed by signal 9 (SIGKILL), perhaps by the out-of-memory killer")
            }
            Self::Exit(code) => write!(f, "ended with exit code {code}"),
            Self::Left => f.write_str("left the run"),
            Self::Panicked => f.write_str("panicked"),
            Self::Silent(ms) => write!(f, "has not moved for {ms} ms"),
            Self::Disconnected => f.write_str("closed its connections without a word"),
            Self::Malformed(what) => write!(f, "sent what no rank of this program sends: {what}"),
            Self::Unreachable => f.write_str("cannot be reached any more"),
        }
    }
}

/// Returns the name of a signal that ends a process on Linux.
fn signal_name(signal: i32) -> Option<&'static str> {
    Some(match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL",
        5 => "SIGTRAP",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        11 => "SIGSEGV",
        13 => "SIGPIPE",
        14 => "SIGALRM",
        15 => "SIGTERM",
        24 => "SIGXCPU",
        25 => "SIGXFSZ",
        31 => "SIGSYS",
        _ => return None,
    })
}

/// Reason why a call is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The number of elements is not a multiple of the number of ranks.
    #[error("its elements cannot be divided evenly among the ranks")]
    Uneven,
    /// A buffer is longer or shorter than the operation needs.
    #[error("a buffer has another length than the operation needs")]
    Length,
    /// The block lengths are not one per rank, or their sum is not the buffer's length.
    #[error("the lengths of the blocks are not one for each rank, or do not add up to the buffer's")]
    Counts,
    /// Buffers have different element types.
    #[error("its buffers hold different types")]
    Types,
    /// Two buffers that must not share memory do.
    #[error("its buffers overlap")]
    Overlap,
    /// There is no such rank in the group.
    #[error("the group has no such rank")]
    Rank,
    /// A rank names itself as its peer.
    #[error("it is the calling rank itself")]
    Itself,
    /// A partition names a rank twice, or one that does not exist.
    #[error("a rank is named twice, or is not in the group")]
    Partition,
    /// The world has its maximum number of partitions already.
    #[error("there are {} partitions already", crate::MAX_PARTITIONS)]
    TooManyGroups,
}

impl Problem {
    const ALL: [Self; 9] = [
        Self::Uneven,
        Self::Length,
        Self::Counts,
        Self::Types,
        Self::Overlap,
        Self::Rank,
        Self::Itself,
        Self::Partition,
        Self::TooManyGroups,
    ];
}

/// Reason why ranks cannot come together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JoinProblem {
    /// The other end is not Lockstep, or another version of it.
    #[error("the other end speaks version {theirs}, this program {ours}")]
    Version {
        /// Protocol version of the other end; 0 if it does not speak the protocol at all.
        theirs: u32,
        /// Protocol version of this program.
        ours: u32,
    },
    /// The inherited descriptor is not a socket.
    #[error("{variable} = {value:?} is not a descriptor of a socket")]
    Descriptor {
        /// Name of the environment variable.
        variable: &'static str,
        /// Value of that variable.
        value: String,
    },
    /// A number is outside its allowed range.
    #[error("{what} {value} is not allowed: {allowed}")]
    OutOfRange {
        /// Name of the number.
        what: &'static str,
        /// Value of the number.
        value: usize,
        /// Allowed range, for the message.
        allowed: String,
    },
    /// The other end closed the connection.
    #[error("the launcher has gone")]
    HungUp,
    /// The two ends have different secrets, or one of them has none.
    #[error(
        "the other end has another secret than this one, or none: compare --secret-file, or --pairing-code, of both"
    )]
    Secret,
    /// The secret cannot be used.
    #[error("the secret in {path:?} cannot be used: {what}")]
    SecretFile {
        /// Path of the secret file.
        path: PathBuf,
        /// Reason, for the message.
        what: String,
    },
    /// The address where ranks meet is reachable from other machines, and the run has no secret.
    #[error(
        "{host} can be reached from other machines, and this run has no secret to keep strangers out: give the pairing code that node 0 prints (--pairing-code), or name the same file of 32 random bytes, which only you can read, on every machine (--secret-file, LOCKSTEP_SECRET_FILE)"
    )]
    NoSecret {
        /// Host where ranks meet.
        host: String,
    },
    /// Another run meets at this address.
    #[error("the other end belongs to another run (--rdzv-id)")]
    OtherRun,
    /// A connection broke or timed out.
    #[error("a connection failed: {0}")]
    Connection(io::ErrorKind),
    /// The address where ranks meet cannot be used.
    #[error("cannot meet at {address}: {what}")]
    Address {
        /// The address that was tried.
        address: String,
        /// Reason, for the message.
        what: String,
    },
    /// Some ranks or nodes did not come in time.
    #[error(
        "{} did not come within {waited_s} s: {}{}{turned_away}",
        list(what, missing),
        "are they running, and can they reach this machine?",
        if turned_away.is_empty() { "" } else { "; " }
    )]
    Missing {
        /// `rank` or `node`.
        what: &'static str,
        /// Numbers of the missing ranks or nodes.
        missing: Vec<usize>,
        /// Waiting time in seconds.
        waited_s: u64,
        /// Connections that were turned away meanwhile, worded for the message; empty if there were none.
        turned_away: String,
    },
    /// Two processes claim the same number.
    #[error("two processes say that they are {what} {number}")]
    Duplicate {
        /// `rank` or `node`.
        what: &'static str,
        /// Number that both claim.
        number: usize,
    },
    /// Ranks or nodes disagree on how many of them there are.
    #[error("{what} {number} was started as one of {theirs}, {what} 0 as one of {ours}")]
    OtherSize {
        /// `rank` or `node`.
        what: &'static str,
        /// Number of the one that disagrees with number 0.
        number: usize,
        /// Count that it expects.
        theirs: usize,
        /// Count that number 0 expects.
        ours: usize,
    },
    /// A rank was given another configuration than rank 0.
    #[error(
        "rank {rank} was started with other settings than rank 0: give all ranks the same file and the same --set"
    )]
    OtherPlan {
        /// World rank of the process.
        rank: usize,
    },
    /// MPI was started a second time in one process.
    #[error("MPI was started before")]
    Again,
}

/// Formats numbers as in `ranks 2, 5 and 7`.
fn list(what: &str, numbers: &[usize]) -> String {
    match numbers {
        [number] => format!("{what} {number}"),
        [numbers @ .., last] => {
            let numbers: Vec<String> = numbers.iter().map(usize::to_string).collect();
            format!("{what}s {} and {last}", numbers.join(", "))
        }
        [] => format!("no {what}"),
    }
}

/// Number of words of an encoded error, in shared memory and in messages.
pub const ERROR_WORDS: usize = 16;

impl CommError {
    /// Returns a function that turns an error of the system into [`CommError::Io`]; `what` is the action that failed.
    pub fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }

    /// Returns true if every rank learns of this error. A local failure is reported to the other ranks only as a stop.
    pub fn is_known_to_all(&self) -> bool {
        !matches!(self, Self::Join(_) | Self::Io { .. })
    }

    /// Returns a loss with `occasion` as the operation that this rank was waiting for; other errors unchanged.
    pub(crate) fn during(self, occasion: Option<Occasion>) -> Self {
        match self {
            Self::PeerLost { rank, cause, occasion: None } => Self::PeerLost { rank, cause, occasion },
            error => error,
        }
    }

    /// Returns a copy for another caller. Local errors become [`CommError::Stopped`], as they do for other ranks.
    pub(crate) fn copy(&self) -> Self {
        Self::from_words(self.to_words(0))
    }

    /// Returns the world rank that reports an error known to all ranks when there is no launcher to do so: a surviving
    /// rank that has seen it. `None` for local errors.
    pub fn teller(&self) -> Option<usize> {
        match self {
            Self::Mismatch { reference, .. } => Some(*reference),
            Self::TimedOut { waiting, .. } => Some(*waiting),
            Self::Misuse { rank, .. } => Some(*rank),
            Self::Stopped { by } => *by,
            Self::PeerLost { rank, .. } => Some(usize::from(*rank == 0)),
            Self::Join(_) | Self::Io { .. } => None,
        }
    }

    /// Encodes the error as words for other ranks. A local error is encoded as a stop by `own_rank`.
    pub fn to_words(&self, own_rank: usize) -> [u64; ERROR_WORDS] {
        let mut words = [0; ERROR_WORDS];
        let mut put = |kind: u64, numbers: [u64; 4], occasion: Option<&Occasion>, other: Option<Call>| {
            words[0] = kind;
            words[1..5].copy_from_slice(&numbers);
            if let Some(Occasion { call, sequence, group }) = occasion {
                words[5] = 1;
                words[6..9].copy_from_slice(&call.to_words());
                words[9] = u64::from(*sequence);
                words[10..13].copy_from_slice(&[group.index, group.first, group.size].map(u64::from));
            }
            if let Some(call) = other {
                words[13..16].copy_from_slice(&call.to_words());
            }
        };
        match self {
            Self::PeerLost { rank, cause, .. } => {
                let (code, value) = cause.to_numbers();
                put(1, [*rank as u64, code, value, 0], None, None);
            }
            Self::Mismatch { rank, found, reference, occasion } => {
                put(2, [*rank as u64, *reference as u64, 0, 0], Some(occasion), Some(*found));
            }
            Self::TimedOut { rank, waiting, waited_ms, occasion } => {
                put(3, [*rank as u64, *waiting as u64, *waited_ms, 0], Some(occasion), None);
            }
            Self::Misuse { rank, problem, occasion } => {
                let problem = Problem::ALL.iter().position(|other| other == problem).unwrap_or(0);
                put(4, [*rank as u64, problem as u64, 0, 0], Some(occasion), None);
            }
            Self::Stopped { by } => put(5, [by.map_or(0, |rank| rank as u64 + 1), 0, 0, 0], None, None),
            Self::Join(_) | Self::Io { .. } => put(5, [own_rank as u64 + 1, 0, 0, 0], None, None),
        }
        words
    }

    /// Decodes the error in `words`. Invalid words become a stop by the launcher.
    pub fn from_words(words: [u64; ERROR_WORDS]) -> Self {
        Self::decode(words).unwrap_or(Self::Stopped { by: None })
    }

    /// Decodes the error that a rank of a world of `ranks` sent; `None` if no rank sends such words.
    pub(crate) fn of_rank(words: [u64; ERROR_WORDS], ranks: usize) -> Option<Self> {
        let error = Self::decode(words)?;
        let named = match &error {
            Self::PeerLost { rank, .. } | Self::Misuse { rank, .. } => [*rank, 0],
            Self::Mismatch { rank, reference, .. } => [*rank, *reference],
            Self::TimedOut { rank, waiting, .. } => [*rank, *waiting],
            Self::Stopped { by } => [by.unwrap_or(0), 0],
            Self::Join(_) | Self::Io { .. } => return None,
        };
        named.iter().all(|rank| *rank < ranks).then_some(error)
    }

    fn decode(words: [u64; ERROR_WORDS]) -> Option<Self> {
        let call = |at: usize| Call::from_words([words[at], words[at + 1], words[at + 2]]);
        let occasion = || {
            let group =
                GroupName { index: words[10] as u32, first: words[11] as u32, size: words[12] as u32 };
            Some(Occasion { call: call(6)?, sequence: words[9] as u32, group })
        };
        let rank = words[1] as usize;
        Some(match words[0] {
            1 => Self::PeerLost { rank, cause: LossCause::from_numbers(words[2], words[3])?, occasion: None },
            2 => {
                Self::Mismatch { rank, found: call(13)?, reference: words[2] as usize, occasion: occasion()? }
            }
            3 => Self::TimedOut {
                rank,
                waiting: words[2] as usize,
                waited_ms: words[3],
                occasion: occasion()?,
            },
            4 => Self::Misuse { rank, problem: *Problem::ALL.get(words[2] as usize)?, occasion: occasion()? },
            5 => Self::Stopped { by: rank.checked_sub(1) },
            _ => return None,
        })
    }
}

impl LossCause {
    /// Encodes the cause as a code and a value, as it travels between processes.
    pub(crate) fn to_numbers(self) -> (u64, u64) {
        match self {
            Self::Died => (0, 0),
            Self::Signal(signal) => (1, signal as u64),
            Self::Exit(code) => (2, code as u64),
            Self::Left => (3, 0),
            Self::Panicked => (4, 0),
            Self::Silent(ms) => (5, ms),
            Self::Disconnected => (6, 0),
            Self::Malformed(what) => {
                (7, Malformed::ALL.iter().position(|other| *other == what).unwrap_or(0) as u64)
            }
            Self::Unreachable => (8, 0),
            Self::OutOfMemory => (9, 0),
            Self::PerhapsOutOfMemory => (10, 0),
        }
    }

    /// Decodes the numbers that [`Self::to_numbers`] returns; `None` if they are invalid.
    pub(crate) fn from_numbers(code: u64, value: u64) -> Option<Self> {
        Some(match code {
            0 => Self::Died,
            1 => Self::Signal(value as i32),
            2 => Self::Exit(value as i32),
            3 => Self::Left,
            4 => Self::Panicked,
            5 => Self::Silent(value),
            6 => Self::Disconnected,
            7 => Self::Malformed(*Malformed::ALL.get(value as usize)?),
            8 => Self::Unreachable,
            9 => Self::OutOfMemory,
            10 => Self::PerhapsOutOfMemory,
            _ => return None,
        })
    }
}

/// Formats ` (during ...)`; empty if there is no operation to name.
fn during(occasion: &Option<Occasion>) -> String {
    match occasion {
        Some(occasion) if occasion.call.kind != Kind::Partition => format!(" (during {occasion})"),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{NumberType, ReduceOp};

    #[test]
    fn an_error_reads_the_same_on_the_rank_that_it_was_sent_to() {
        let call = Call {
            elements: 7,
            number: NumberType::Bf16,
            op: Some(ReduceOp::Max),
            ..Call::bare(Kind::AllReduce)
        };
        let group = GroupName { index: 3, first: 1, size: 2 };
        let occasion = Occasion { call, sequence: 17, group };
        let mut errors = vec![
            CommError::Mismatch { rank: 3, found: Call::bare(Kind::Barrier), reference: 1, occasion },
            CommError::TimedOut { rank: 1, waiting: 3, waited_ms: 5000, occasion },
            CommError::Stopped { by: None },
            CommError::Stopped { by: Some(0) },
        ];
        let problems = Problem::ALL.map(|problem| CommError::Misuse { rank: 1, problem, occasion });
        errors.extend(problems);
        let causes = [
            LossCause::Died,
            LossCause::Signal(9),
            LossCause::Exit(-1),
            LossCause::Left,
            LossCause::Panicked,
            LossCause::Silent(5000),
            LossCause::Disconnected,
            LossCause::Malformed(Malformed::CheckSum),
            LossCause::Malformed(Malformed::Ending),
            LossCause::Unreachable,
            LossCause::OutOfMemory,
            LossCause::PerhapsOutOfMemory,
        ];
        errors.extend(causes.map(|cause| CommError::PeerLost { rank: 2, cause, occasion: None }));
        for error in errors {
            let arrived = CommError::from_words(error.to_words(0));
            assert_eq!(arrived.to_string(), error.to_string());
        }
        let local = CommError::Io { what: "map memory", source: io::ErrorKind::OutOfMemory.into() };
        assert!(matches!(CommError::from_words(local.to_words(4)), CommError::Stopped { by: Some(4) }));
    }

    #[test]
    fn words_without_sense_are_a_stop() {
        for words in [[0; ERROR_WORDS], [u64::MAX; ERROR_WORDS], [2; ERROR_WORDS], [4; ERROR_WORDS]] {
            let error = CommError::from_words(words);
            assert!(matches!(error, CommError::Stopped { .. }), "{error}");
        }
    }

    #[test]
    fn messages_name_rank_operation_number_size_and_group() {
        let call = Call {
            elements: 9,
            number: NumberType::F32,
            op: Some(ReduceOp::Sum),
            ..Call::bare(Kind::Reduce)
        };
        let occasion = Occasion { call, sequence: 4, group: GroupName { index: 0, first: 0, size: 2 } };
        let lost = CommError::PeerLost { rank: 1, cause: LossCause::Signal(9), occasion: Some(occasion) };
        assert_eq!(
            lost.to_string(),
            "rank 1 was lost: it was killed by signal 9 (SIGKILL) (during reduce(sum) of 9 f32, operation 4 of the group of all 2 ranks)"
        );
        let found = Call { elements: 8, ..call };
        let mismatch = CommError::Mismatch { rank: 1, found, reference: 0, occasion };
        assert_eq!(
            mismatch.to_string(),
            "rank 1 called reduce(sum) of 8 f32 where rank 0 called reduce(sum) of 9 f32: operation 4 of the group of all 2 ranks"
        );
    }
}
