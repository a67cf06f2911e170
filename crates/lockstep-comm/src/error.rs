//! Errors of this crate. An error that ends a run is the same on every rank, whichever rank detects it: it travels as words
//! in shared memory ([`CommError::to_words`]) or on the wire.

use std::{fmt, io};

use crate::{Call, Deadline, JoinProblem, Kind, LossCause};

/// Error of a collective, or of starting and joining ranks.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// Loss of a rank: its process ended, or no longer responds.
    #[error("rank {rank} was lost: it {cause}{}", during(.context))]
    PeerLost {
        /// Lost rank, as a rank of the world.
        rank: usize,
        /// Cause of the loss.
        cause: LossCause,
        /// The operation that this rank was waiting for; `None` if it was not waiting.
        context: Option<OperationContext>,
    },
    /// Different operations called by ranks of a group. The group's order of operations is lost, so this ends the run.
    #[error("rank {rank} called {found} where rank {reference} called {}: operation {} of {}", context.call, context.sequence, context.group)]
    Mismatch {
        /// World rank whose call differs from the majority's.
        rank: usize,
        /// Call of that rank.
        found: Call,
        /// A world rank that made the majority's call.
        reference: usize,
        /// The operation, with the majority's call.
        context: OperationContext,
    },
    /// Expiry of a deadline.
    #[error("rank {waiting} waited {waited_ms} ms for rank {rank}, which has not come to {context}")]
    TimedOut {
        /// World rank that has not come to the operation.
        rank: usize,
        /// World rank whose deadline expired.
        waiting: usize,
        /// Time in milliseconds that this rank was ready to wait.
        waited_ms: u64,
        /// The operation it was waiting for.
        context: OperationContext,
    },
    /// A call that is invalid whatever the other ranks call.
    #[error("rank {rank} called {}, which is no valid operation: {problem}", context.call)]
    Misuse {
        /// World rank that made the call.
        rank: usize,
        /// Reason why the call is invalid.
        problem: Problem,
        /// The invalid call and its place in the order of operations.
        context: OperationContext,
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
pub struct OperationContext {
    /// The operation, as the reporting rank called it.
    pub call: Call,
    /// Number of the operation in its group, from 0; for `send` and `receive`, its number between the two ranks.
    pub sequence: u32,
    /// Group of the operation.
    pub group: GroupName,
}

impl fmt::Display for OperationContext {
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

    /// Returns the error of rank `waiting`, whose deadline has passed before rank `rank` came to the operation in `context`,
    /// or to anything in `group`.
    pub(crate) fn timed_out(
        waiting: usize,
        rank: usize,
        deadline: Deadline,
        context: Option<OperationContext>,
        group: GroupName,
    ) -> Self {
        let nothing = || OperationContext { call: Call::bare(Kind::Barrier), sequence: 0, group };
        let (waited_ms, context) = (deadline.limit().as_millis() as u64, context.unwrap_or_else(nothing));
        Self::TimedOut { rank, waiting, waited_ms, context }
    }

    /// Returns a loss with `context` as the operation that this rank was waiting for; other errors unchanged.
    pub(crate) fn during(self, context: Option<OperationContext>) -> Self {
        match self {
            Self::PeerLost { rank, cause, context: None } => Self::PeerLost { rank, cause, context },
            error => error,
        }
    }

    /// Returns `local` if this is the stop by which other ranks learn of that error of rank `own_rank`: only it has the
    /// details.
    pub(crate) fn or_local(self, local: Self, own_rank: usize) -> Self {
        if matches!(self, Self::Stopped { by: Some(rank) } if rank == own_rank) { local } else { self }
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
        let mut put =
            |kind: u64, numbers: [u64; 4], context: Option<&OperationContext>, other: Option<Call>| {
                words[0] = kind;
                words[1..5].copy_from_slice(&numbers);
                if let Some(OperationContext { call, sequence, group }) = context {
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
            Self::Mismatch { rank, found, reference, context } => {
                put(2, [*rank as u64, *reference as u64, 0, 0], Some(context), Some(*found));
            }
            Self::TimedOut { rank, waiting, waited_ms, context } => {
                put(3, [*rank as u64, *waiting as u64, *waited_ms, 0], Some(context), None);
            }
            Self::Misuse { rank, problem, context } => {
                let problem = Problem::ALL.iter().position(|other| other == problem).unwrap_or(0);
                put(4, [*rank as u64, problem as u64, 0, 0], Some(context), None);
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
        let context = || {
            let group =
                GroupName { index: words[10] as u32, first: words[11] as u32, size: words[12] as u32 };
            Some(OperationContext { call: call(6)?, sequence: words[9] as u32, group })
        };
        let rank = words[1] as usize;
        Some(match words[0] {
            1 => Self::PeerLost { rank, cause: LossCause::from_numbers(words[2], words[3])?, context: None },
            2 => Self::Mismatch { rank, found: call(13)?, reference: words[2] as usize, context: context()? },
            3 => {
                Self::TimedOut { rank, waiting: words[2] as usize, waited_ms: words[3], context: context()? }
            }
            4 => Self::Misuse { rank, problem: *Problem::ALL.get(words[2] as usize)?, context: context()? },
            5 => Self::Stopped { by: rank.checked_sub(1) },
            _ => return None,
        })
    }
}

/// Formats ` (during ...)`; empty if there is no operation to name.
fn during(context: &Option<OperationContext>) -> String {
    match context {
        Some(context) if context.call.kind != Kind::Partition => format!(" (during {context})"),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Malformed, NumberType, ReduceOp};

    #[test]
    fn an_error_reads_the_same_on_the_rank_that_it_was_sent_to() {
        let call = Call {
            elements: 7,
            number: NumberType::Bf16,
            op: Some(ReduceOp::Max),
            ..Call::bare(Kind::AllReduce)
        };
        let group = GroupName { index: 3, first: 1, size: 2 };
        let context = OperationContext { call, sequence: 17, group };
        let mut errors = vec![
            CommError::Mismatch { rank: 3, found: Call::bare(Kind::Barrier), reference: 1, context },
            CommError::TimedOut { rank: 1, waiting: 3, waited_ms: 5000, context },
            CommError::Stopped { by: None },
            CommError::Stopped { by: Some(0) },
        ];
        let problems = Problem::ALL.map(|problem| CommError::Misuse { rank: 1, problem, context });
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
        errors.extend(causes.map(|cause| CommError::PeerLost { rank: 2, cause, context: None }));
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
        let context =
            OperationContext { call, sequence: 4, group: GroupName { index: 0, first: 0, size: 2 } };
        let lost = CommError::PeerLost { rank: 1, cause: LossCause::Signal(9), context: Some(context) };
        assert_eq!(
            lost.to_string(),
            "rank 1 was lost: it was killed by signal 9 (SIGKILL) (during reduce(sum) of 9 f32, operation 4 of the group of all 2 ranks)"
        );
        let found = Call { elements: 8, ..call };
        let mismatch = CommError::Mismatch { rank: 1, found, reference: 0, context };
        assert_eq!(
            mismatch.to_string(),
            "rank 1 called reduce(sum) of 8 f32 where rank 0 called reduce(sum) of 9 f32: operation 4 of the group of all 2 ranks"
        );
    }
}
