//! All-reduce algorithms for networks, and the order of additions of each.

use std::{fmt, ops::Range};

use crate::blocks::Blocks;

/// All-reduce algorithm between ranks that do not share memory. Only [`Algorithm::Tree`] keeps the order of additions of all
/// other transports and group sizes. The others give every rank the same bits, but different bits from the tree's. The plan
/// names the algorithm; there is no automatic choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Algorithm {
    /// Every rank reduces its shard of all ranks' data in the order of the fixed tree. Sends as few bytes as a ring.
    #[default]
    Tree,
    /// Ring: each rank talks to its neighbours only. For networks that suffer from many simultaneous pairs.
    Ring,
    /// lg P exchanges of the whole buffer. For small messages on networks of high latency.
    RecursiveDoubling,
    /// Recursive halving, then doubling (Rabenseifner): 2 lg P steps, as few bytes as a ring.
    Rabenseifner,
}

impl Algorithm {
    /// All algorithms; the index is the algorithm's code.
    pub const ALL: [Self; 4] = [Self::Tree, Self::Ring, Self::RecursiveDoubling, Self::Rabenseifner];

    /// Returns `tree`, `ring`, `recursive_doubling` or `rabenseifner`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tree => "tree",
            Self::Ring => "ring",
            Self::RecursiveDoubling => "recursive_doubling",
            Self::Rabenseifner => "rabenseifner",
        }
    }

    /// Returns true if additions follow the fixed tree, whatever the number of ranks and the transport.
    pub const fn keeps_order(self) -> bool {
        matches!(self, Self::Tree)
    }

    /// Returns the algorithm's code for a call's `detail`, so that ranks with different plans detect the mismatch.
    pub(crate) fn detail(self) -> u64 {
        Self::ALL.iter().position(|algorithm| *algorithm == self).unwrap_or(0) as u64
    }

    /// Returns the algorithm with this code; `None` if there is none.
    pub(crate) fn from_detail(detail: u64) -> Option<Self> {
        Self::ALL.get(usize::try_from(detail).ok()?).copied()
    }

    /// Returns the steps of `rank` of `ranks` for an all-reduce of `elements`; empty for the tree, which needs no steps.
    pub(crate) fn steps(self, rank: usize, ranks: usize, elements: usize) -> Vec<Step> {
        match self {
            Self::Tree => Vec::new(),
            Self::Ring => ring(rank, ranks, elements),
            Self::RecursiveDoubling => {
                folded(rank, ranks, elements, |rank, power| doubling(rank, power, elements))
            }
            Self::Rabenseifner => folded(rank, ranks, elements, |rank, power| halving(rank, power, elements)),
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One step: a send to one rank and, at the same time, a receive from one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) send: Option<(usize, Range<usize>)>,
    pub(crate) receive: Option<(usize, Range<usize>, Merge)>,
}

/// Treatment of received elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Merge {
    /// Reduce them with the local elements.
    Reduce,
    /// Replace the local elements with them.
    Replace,
}

/// Reduce-scatter, then all-gather. Step s of the first sends the partial sum of block r - s; after it rank r holds the whole
/// sum of block r + 1. The second passes whole sums on.
fn ring(rank: usize, ranks: usize, elements: usize) -> Vec<Step> {
    let blocks = Blocks::shares(elements, ranks);
    let (next, last) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let block = |back: usize| blocks.range((rank + 2 * ranks - back) % ranks);
    let first = (0..ranks - 1).map(|step| (block(step), block(step + 1), Merge::Reduce));
    let second = (0..ranks - 1).map(|step| (block(step + ranks - 1), block(step), Merge::Replace));
    let step =
        |(sent, received, merge)| Step { send: Some((next, sent)), receive: Some((last, received, merge)) };
    first.chain(second).map(step).collect()
}

/// Steps of the largest power of two of ranks. Each rank beyond it first adds its data to a partner below, and receives the
/// result from it at the end.
fn folded(
    rank: usize,
    ranks: usize,
    elements: usize,
    steps: impl Fn(usize, usize) -> Vec<Step>,
) -> Vec<Step> {
    let power = 1 << ranks.ilog2();
    let all = 0..elements;
    if rank >= power {
        let partner = rank - power;
        return vec![
            Step { send: Some((partner, all.clone())), receive: None },
            Step { send: None, receive: Some((partner, all, Merge::Replace)) },
        ];
    }
    let partner = Some(rank + power).filter(|partner| *partner < ranks);
    let before =
        partner.map(|partner| Step { send: None, receive: Some((partner, all.clone(), Merge::Reduce)) });
    let after = partner.map(|partner| Step { send: Some((partner, all.clone())), receive: None });
    before.into_iter().chain(steps(rank, power)).chain(after).collect()
}

fn doubling(rank: usize, ranks: usize, elements: usize) -> Vec<Step> {
    let step = |level: u32| {
        let partner = rank ^ 1 << level;
        Step { send: Some((partner, 0..elements)), receive: Some((partner, 0..elements, Merge::Reduce)) }
    };
    (0..ranks.ilog2()).map(step).collect()
}

fn halving(rank: usize, ranks: usize, elements: usize) -> Vec<Step> {
    let (mut own, mut steps, mut siblings) = (0..elements, Vec::new(), Vec::new());
    for level in (0..ranks.ilog2()).rev() {
        let partner = rank ^ 1 << level;
        let middle = own.start + own.len() / 2;
        let (low, high) = (own.start..middle, middle..own.end);
        let (kept, sent) = if rank < partner { (low, high) } else { (high, low) };
        let receive = Some((partner, kept.clone(), Merge::Reduce));
        steps.push(Step { send: Some((partner, sent.clone())), receive });
        siblings.push((partner, kept.clone(), sent));
        own = kept;
    }
    let back = siblings.into_iter().rev().map(|(partner, kept, sent)| Step {
        send: Some((partner, kept)),
        receive: Some((partner, sent, Merge::Replace)),
    });
    steps.extend(back);
    steps
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    /// Runs all ranks' steps with mailboxes between them. Element i of rank r starts as the set {r}.
    fn run(algorithm: Algorithm, ranks: usize, elements: usize) -> Vec<Vec<u64>> {
        let mut data: Vec<Vec<u64>> = (0..ranks).map(|rank| vec![1 << rank; elements]).collect();
        let mut steps: Vec<VecDeque<Step>> =
            (0..ranks).map(|rank| algorithm.steps(rank, ranks, elements).into()).collect();
        let mut mail: Vec<VecDeque<(Range<usize>, Vec<u64>)>> = vec![VecDeque::new(); ranks * ranks];
        let mut has_sent = vec![false; ranks];
        loop {
            let mut has_moved = false;
            for rank in 0..ranks {
                let Some(step) = steps[rank].front().cloned() else { continue };
                if !has_sent[rank]
                    && let Some((to, range)) = &step.send
                {
                    mail[rank * ranks + to].push_back((range.clone(), data[rank][range.clone()].to_vec()));
                }
                has_sent[rank] = true;
                if let Some((from, range, merge)) = &step.receive {
                    let Some((sent, values)) = mail[from * ranks + rank].pop_front() else { continue };
                    assert_eq!(&sent, range, "{algorithm} on {ranks}: rank {rank} from {from}");
                    for (own, value) in data[rank][range.clone()].iter_mut().zip(values) {
                        assert!(*merge == Merge::Replace || *own & value == 0, "{algorithm}: added twice");
                        *own = if *merge == Merge::Replace { value } else { *own | value };
                    }
                }
                (has_sent[rank], has_moved) = (false, true);
                steps[rank].pop_front();
            }
            if !has_moved {
                break;
            }
        }
        assert!(
            steps.iter().all(VecDeque::is_empty),
            "{algorithm} on {ranks} ranks: somebody waits for ever"
        );
        assert!(
            mail.iter().all(VecDeque::is_empty),
            "{algorithm} on {ranks} ranks: something was not received"
        );
        data
    }

    proptest! {
        #[test]
        fn every_rank_ends_with_every_rank_s_data_once(ranks in 2_usize..14, elements in 0_usize..300) {
            for algorithm in Algorithm::ALL.into_iter().skip(1) {
                for (rank, data) in run(algorithm, ranks, elements).into_iter().enumerate() {
                    prop_assert!(data.iter().all(|set| *set == (1 << ranks) - 1), "{} rank {}", algorithm, rank);
                }
            }
        }

        #[test]
        fn ring_and_rabenseifner_send_no_more_than_they_must(power in 1_u32..5) {
            let (ranks, elements) = (1_usize << power, 64 * 64);
            for algorithm in [Algorithm::Ring, Algorithm::Rabenseifner] {
                for rank in 0..ranks {
                    let steps = algorithm.steps(rank, ranks, elements);
                    let sent: usize = steps.iter().filter_map(|step| step.send.as_ref()).map(|(_, range)| range.len()).sum();
                    prop_assert_eq!(sent, 2 * elements * (ranks - 1) / ranks);
                }
            }
        }
    }
}
