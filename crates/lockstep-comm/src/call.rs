//! The description of one operation, on which all ranks of a group must agree before any of them touches data.
//!
//! It fits into three words, which every rank publishes when it enters an operation. Every rank compares all of them, so
//! that each reaches the same verdict and can name the rank that disagrees.

use std::fmt;

use crate::{Algorithm, NumberType, ReduceOp};

/// Kind of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Barrier: no rank returns before all have called it.
    Barrier,
    /// Broadcast of one rank's data to all ranks.
    Broadcast,
    /// Reduction of all ranks' data to one rank.
    Reduce,
    /// Reduction of all ranks' data to all ranks.
    AllReduce,
    /// Reduction of all ranks' data, one block of the result to each rank.
    ReduceScatter,
    /// Concatenation of every rank's block on all ranks.
    AllGather,
    /// Exchange in which every rank sends one block to each rank.
    AllToAll,
    /// Distribution of one rank's data, one block to each rank.
    Scatter,
    /// Concatenation of every rank's block on one rank.
    Gather,
    /// Point-to-point send to one other rank.
    Send,
    /// Point-to-point receive from one other rank.
    Receive,
    /// Creation of subgroups of the world.
    Partition,
}

impl Kind {
    /// All kinds; the index is the operation's code in shared memory and on the wire.
    pub const ALL: [Self; 12] = [
        Self::Barrier,
        Self::Broadcast,
        Self::Reduce,
        Self::AllReduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::AllToAll,
        Self::Scatter,
        Self::Gather,
        Self::Send,
        Self::Receive,
        Self::Partition,
    ];

    /// Returns the name, such as `all_reduce`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Barrier => "barrier",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::AllToAll => "all_to_all",
            Self::Scatter => "scatter",
            Self::Gather => "gather",
            Self::Send => "send",
            Self::Receive => "receive",
            Self::Partition => "partition",
        }
    }
}

/// One operation, described by the values that must agree on all ranks of its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// Kind of the operation.
    pub kind: Kind,
    /// Element type of the data.
    pub number: NumberType,
    /// Reduction operator, for reductions.
    pub op: Option<ReduceOp>,
    /// The root, or the peer of a `send` or `receive`, as a rank of the group.
    pub root: Option<usize>,
    /// Number of elements that all ranks must agree on: of the data of a broadcast, reduction or message; of all blocks together where
    /// data is scattered or gathered; 0 for an all-to-all with uneven blocks.
    pub elements: usize,
    /// Hash of everything else that must agree, such as the lengths of uneven blocks; 0 if there is nothing.
    pub detail: u64,
}

impl Call {
    /// Creates a call without data.
    pub(crate) const fn bare(kind: Kind) -> Self {
        Self { kind, number: NumberType::U8, op: None, root: None, elements: 0, detail: 0 }
    }

    /// Returns the algorithm of an all-reduce; `None` for other operations.
    pub(crate) fn algorithm(&self) -> Option<Algorithm> {
        if self.kind == Kind::AllReduce { Algorithm::from_detail(self.detail) } else { None }
    }

    /// Encodes the call losslessly in three words.
    pub fn to_words(self) -> [u64; 3] {
        let position = |found: Option<usize>| found.map_or(0, |position| position as u64 + 1);
        let kind = position(Kind::ALL.iter().position(|kind| *kind == self.kind));
        let number = position(NumberType::ALL.iter().position(|number| *number == self.number));
        let op = position(self.op.and_then(|op| ReduceOp::ALL.iter().position(|other| *other == op)));
        let root = position(self.root);
        [kind | number << 8 | op << 16 | root << 32, self.elements as u64, self.detail]
    }

    /// Decodes the call in `words`; `None` if no call encodes to them.
    pub fn from_words(words: [u64; 3]) -> Option<Self> {
        let [head, elements, detail] = words;
        let byte = |shift: u32| usize::from((head >> shift) as u8);
        let optional = |code: usize| code.checked_sub(1);
        let op = match optional(byte(16)) {
            Some(position) => Some(*ReduceOp::ALL.get(position)?),
            None => None,
        };
        Some(Self {
            kind: *Kind::ALL.get(optional(byte(0))?)?,
            number: *NumberType::ALL.get(optional(byte(8))?)?,
            op,
            root: optional((head >> 32) as usize),
            elements: usize::try_from(elements).ok()?,
            detail,
        })
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.name())?;
        if let Some(op) = self.op {
            write!(f, "({})", op.name())?;
        }
        if !matches!(self.kind, Kind::Barrier | Kind::Partition) {
            write!(f, " of {} {}", self.elements, self.number)?;
        }
        match (self.kind, self.root) {
            (Kind::Broadcast | Kind::Scatter | Kind::Receive, Some(root)) => write!(f, " from rank {root}")?,
            (_, Some(root)) => write!(f, " to rank {root}")?,
            _ => {}
        }
        match self.algorithm() {
            Some(algorithm) if self.detail != 0 => write!(f, " by {algorithm}"),
            None if self.detail != 0 => write!(f, " in parts #{:04x}", self.detail as u16),
            _ => Ok(()),
        }
    }
}

/// Hashes `words` for [`Call::detail`] (FNV-1a); never returns 0.
pub(crate) fn hash(words: impl IntoIterator<Item = usize>) -> u64 {
    let step = |hash: u64, word: usize| {
        (word as u64)
            .to_le_bytes()
            .iter()
            .fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
    };
    words.into_iter().fold(0xcbf2_9ce4_8422_2325, step).max(1)
}

/// Returns the first rank whose call differs from the majority's, and the first rank that made the majority's call. `None`
/// if all agree. On a tie, the call of the lower rank counts as the majority's.
pub(crate) fn odd_one_out(calls: &[[u64; 3]]) -> Option<(usize, usize)> {
    if calls.iter().all(|call| *call == calls[0]) {
        return None;
    }
    let votes = |call: &[u64; 3]| calls.iter().filter(|other| *other == call).count();
    let most = calls.iter().map(votes).max()?;
    let reference = calls.iter().position(|call| votes(call) == most)?;
    let odd = calls.iter().position(|call| *call != calls[reference])?;
    Some((odd, reference))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_survives_the_way_through_three_words() {
        for kind in Kind::ALL {
            for number in NumberType::ALL {
                for op in [None, Some(ReduceOp::Sum), Some(ReduceOp::Max), Some(ReduceOp::Min)] {
                    for root in [None, Some(0), Some(63)] {
                        let call = Call { kind, number, op, root, elements: usize::MAX - 3, detail: 1 << 63 };
                        assert_eq!(Call::from_words(call.to_words()), Some(call));
                    }
                }
            }
        }
        for words in
            [[0; 3], [u64::MAX; 3], [13, 0, 0], [1, 0, 0], [1 | 8 << 8, 0, 0], [1 | 1 << 8 | 4 << 16, 0, 0]]
        {
            assert_eq!(Call::from_words(words), None, "{words:?}");
        }
    }

    #[test]
    fn a_call_reads_like_a_sentence() {
        let call = Call { elements: 1024, number: NumberType::F32, ..Call::bare(Kind::AllReduce) };
        let cases = [
            (Call { op: Some(ReduceOp::Sum), ..call }, "all_reduce(sum) of 1024 f32"),
            (Call { kind: Kind::Broadcast, root: Some(2), ..call }, "broadcast of 1024 f32 from rank 2"),
            (Call { kind: Kind::Send, root: Some(1), ..call }, "send of 1024 f32 to rank 1"),
            (Call { kind: Kind::AllGather, detail: 0xabcd, ..call }, "all_gather of 1024 f32 in parts #abcd"),
            (Call::bare(Kind::Barrier), "barrier"),
        ];
        for (call, text) in cases {
            assert_eq!(call.to_string(), text);
        }
    }

    #[test]
    fn the_minority_is_the_odd_one_and_rank_0_decides_a_tie() {
        type Row = (&'static [u64], Option<(usize, usize)>);
        let table: [Row; 8] = [
            (&[1], None),
            (&[1, 1, 1], None),
            (&[1, 2], Some((1, 0))),
            (&[1, 2, 2], Some((0, 1))),
            (&[2, 2, 1], Some((2, 0))),
            (&[1, 2, 1, 2], Some((1, 0))),
            (&[3, 1, 2], Some((1, 0))),
            (&[3, 1, 1, 2], Some((0, 1))),
        ];
        for (calls, expected) in table {
            let calls: Vec<[u64; 3]> = calls.iter().map(|call| [*call, 0, 0]).collect();
            assert_eq!(odd_one_out(&calls), expected, "{calls:?}");
        }
    }
}
