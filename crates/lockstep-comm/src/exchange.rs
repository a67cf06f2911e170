//! Operations that only move data, described as a table of copies between ranks.
//!
//! Every rank offers one stream, a range of its memory. Every rank pulls at most one piece from each stream into its target.
//! Broadcast, scatter, gather, all-gather and all-to-all differ only in these pieces.

use crate::blocks::Blocks;

/// A data-movement operation, with lengths in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exchange {
    /// Broadcast of the root's data to all ranks.
    Broadcast {
        /// Root, as a rank of the group.
        root: usize,
        /// Length of the data in bytes.
        bytes: usize,
    },
    /// Concatenation of every rank's block on all ranks.
    AllGather(Blocks),
    /// Concatenation of every rank's block on the root.
    Gather {
        /// Root, as a rank of the group.
        root: usize,
        /// Blocks of the ranks, in bytes.
        blocks: Blocks,
    },
    /// Distribution of the root's data, one block to each rank.
    Scatter {
        /// Root, as a rank of the group.
        root: usize,
        /// Blocks of the ranks, in bytes.
        blocks: Blocks,
    },
    /// One block from every rank to each rank.
    AllToAll(Matrix),
}

/// Number of bytes that each rank sends to each other rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Matrix {
    /// Equal blocks of `bytes` bytes.
    Even {
        /// Length of a block in bytes.
        bytes: usize,
        /// Number of ranks.
        ranks: usize,
    },
    /// Uneven blocks, in row-major order with one row per sender.
    Uneven {
        /// Lengths in bytes.
        sends: Vec<usize>,
        /// Number of ranks.
        ranks: usize,
    },
    /// Uneven blocks as one rank of a large group knows them: those that it sends and those that it receives.
    Own {
        /// Rank that knows them.
        rank: usize,
        /// Blocks that `rank` sends, in bytes.
        sends: Blocks,
        /// Blocks that `rank` receives, in bytes.
        receives: Blocks,
    },
}

/// A copy: bytes that one rank pulls from the stream of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Offset in the other rank's stream, in bytes.
    pub from: usize,
    /// Offset in the target, in bytes.
    pub to: usize,
    /// Length in bytes; 0 for no copy.
    pub bytes: usize,
}

impl Exchange {
    /// Returns an all-to-all with uneven blocks as rank `rank` knows it, which sends and receives blocks of these lengths in
    /// bytes.
    pub fn of_own_blocks(rank: usize, sends: &[usize], receives: &[usize]) -> Self {
        let blocks =
            |lengths| Blocks::of_lengths(lengths).expect("the lengths are those of buffers in memory");
        Self::AllToAll(Matrix::Own { rank, sends: blocks(sends), receives: blocks(receives) })
    }

    /// Returns the length in bytes of the stream that `rank` offers.
    pub(crate) fn stream(&self, rank: usize) -> usize {
        match self {
            Self::Broadcast { root, bytes } => {
                if rank == *root {
                    *bytes
                } else {
                    0
                }
            }
            Self::AllGather(blocks) => blocks.range(rank).len(),
            Self::Gather { blocks, .. } => blocks.range(rank).len(),
            Self::Scatter { root, blocks } => {
                if rank == *root {
                    blocks.total()
                } else {
                    0
                }
            }
            Self::AllToAll(Matrix::Even { bytes, ranks }) => bytes * ranks,
            Self::AllToAll(Matrix::Uneven { sends, ranks }) => {
                sends[rank * ranks..(rank + 1) * ranks].iter().sum()
            }
            Self::AllToAll(Matrix::Own { rank: own, sends, .. }) => {
                if rank == *own {
                    sends.total()
                } else {
                    0
                }
            }
        }
    }

    /// Returns the piece that `rank` pulls from the stream of `from`, which may be itself.
    pub fn piece(&self, rank: usize, from: usize) -> Piece {
        let none = Piece { from: 0, to: 0, bytes: 0 };
        match self {
            Self::Broadcast { root, bytes } if from == *root => Piece { bytes: *bytes, ..none },
            Self::AllGather(blocks) => {
                let range = blocks.range(from);
                Piece { from: 0, to: range.start, bytes: range.len() }
            }
            Self::Gather { root, blocks } if rank == *root => {
                let range = blocks.range(from);
                Piece { from: 0, to: range.start, bytes: range.len() }
            }
            Self::Scatter { root, blocks } if from == *root => {
                let range = blocks.range(rank);
                Piece { from: range.start, to: 0, bytes: range.len() }
            }
            Self::AllToAll(Matrix::Even { bytes, .. }) => {
                Piece { from: rank * bytes, to: from * bytes, bytes: *bytes }
            }
            Self::AllToAll(Matrix::Uneven { sends, ranks }) => Piece {
                from: sends[from * ranks..from * ranks + rank].iter().sum(),
                to: (0..from).map(|sender| sends[sender * ranks + rank]).sum(),
                bytes: sends[from * ranks + rank],
            },
            // The offsets in the streams and targets of other ranks are not known, nor needed.
            Self::AllToAll(Matrix::Own { rank: own, sends, receives }) => {
                let to = if rank == *own { receives.range(from) } else { 0..0 };
                let source = if from == *own { sends.range(rank) } else { 0..to.len() };
                Piece { from: source.start, to: to.start, bytes: source.len() }
            }
            _ => none,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns one exchange of each kind.
    fn exchanges(ranks: usize, lengths: &[usize], root: usize) -> Vec<Exchange> {
        let blocks = Blocks::of_lengths(&lengths[..ranks]).unwrap();
        let sends = lengths.iter().cycle().take(ranks * ranks).copied().collect();
        vec![
            Exchange::Broadcast { root, bytes: lengths[0] },
            Exchange::AllGather(blocks.clone()),
            Exchange::Gather { root, blocks: blocks.clone() },
            Exchange::Scatter { root, blocks },
            Exchange::AllToAll(Matrix::Even { bytes: lengths[0], ranks }),
            Exchange::AllToAll(Matrix::Uneven { sends, ranks }),
        ]
    }

    proptest! {
        #[test]
        fn pieces_lie_in_their_streams_and_fill_their_targets_without_a_gap(
            ranks in 1_usize..7, root in 0_usize..7, lengths in proptest::collection::vec(0_usize..20, 7..12)
        ) {
            for exchange in exchanges(ranks, &lengths, root % ranks) {
                for rank in 0..ranks {
                    let mut pieces: Vec<Piece> = (0..ranks).map(|from| exchange.piece(rank, from)).collect();
                    for (from, piece) in pieces.iter().enumerate() {
                        prop_assert!(piece.from + piece.bytes <= exchange.stream(from), "{:?}", exchange);
                    }
                    pieces.retain(|piece| piece.bytes > 0);
                    pieces.sort_by_key(|piece| piece.to);
                    let mut end = 0;
                    for piece in pieces {
                        prop_assert_eq!(piece.to, end);
                        end += piece.bytes;
                    }
                    let all = (0..ranks).map(|from| exchange.piece(rank, from).bytes).sum::<usize>();
                    prop_assert_eq!(end, all);
                }
            }
        }

        #[test]
        fn all_of_a_scattered_or_exchanged_stream_is_pulled_once(
            ranks in 1_usize..7, root in 0_usize..7, lengths in proptest::collection::vec(0_usize..20, 7..12)
        ) {
            for exchange in exchanges(ranks, &lengths, root % ranks) {
                if !matches!(exchange, Exchange::Scatter { .. } | Exchange::AllToAll(_)) {
                    continue;
                }
                for from in 0..ranks {
                    let mut end = 0;
                    for rank in 0..ranks {
                        let piece = exchange.piece(rank, from);
                        prop_assert!(piece.bytes == 0 || piece.from == end);
                        end += piece.bytes;
                    }
                    prop_assert_eq!(end, exchange.stream(from));
                }
            }
        }
    }
}
