//! The global order of samples: sample number -> (epoch, index in the data set), a pure function on every rank.
//!
//! Permutations are those of text ([`SampleOrder`]). An epoch may end short or padded, as PyTorch's
//! `DistributedSampler` does, so that it is a whole number of batches.

use std::ops::Range;

use crate::{
    error::{DataError, Result},
    order::{SampleOrder, permute},
};

/// Order within an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shuffle {
    /// One order for the whole data set.
    Whole(SampleOrder),
    /// Permutation within consecutive blocks of `window` samples; the blocks stay in order. For data sets that are read
    /// in sequence, or whose shards are far away: at most two blocks are in use at a time.
    Window {
        /// Random seed of the run.
        seed: u64,
        /// Samples per block, 1 or more.
        window: u64,
    },
}

impl From<SampleOrder> for Shuffle {
    fn from(order: SampleOrder) -> Self {
        Self::Whole(order)
    }
}

/// End of an epoch whose samples are not a multiple of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EpochEnd {
    /// The next epoch begins within the batch, as for text: each sample is read once per epoch.
    #[default]
    Continue,
    /// The last samples of the order are dropped: `drop_last = True`.
    Drop {
        /// Number of which the epoch is a multiple: the global batch, or the number of replicas.
        multiple: u64,
    },
    /// The first samples of the order are repeated: `DistributedSampler` with `drop_last = False`.
    Pad {
        /// Number of which the epoch is a multiple: the global batch, or the number of replicas.
        multiple: u64,
    },
}

/// Location of a sample number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SamplePlace {
    /// Global sample number; grows over epochs.
    pub sample: u64,
    /// Epoch, from 0.
    pub epoch: u64,
    /// Index in the data set.
    pub index: u64,
}

/// Infinite sequence of samples: epoch after epoch of a data set.
///
/// The only state of a run is the number of samples consumed: sample number `n` is the same on every rank, with any
/// number of ranks, and after a resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleSequence {
    shuffle: Shuffle,
    samples: u64,
    /// Samples that an epoch reads, padded or dropped.
    epoch_samples: u64,
}

impl SampleSequence {
    /// Creates the sequence of a data set of `samples` samples.
    ///
    /// # Errors
    /// If there is no sample, a window or a multiple is 0, or an epoch has fewer samples than the multiple to which it is
    /// cut.
    pub fn new(shuffle: impl Into<Shuffle>, samples: u64, end: EpochEnd) -> Result<Self> {
        let shuffle = shuffle.into();
        if samples == 0 {
            return Err(DataError::out_of_range("the number of samples", 0, "1 or more"));
        }
        if matches!(shuffle, Shuffle::Window { window: 0, .. }) {
            return Err(DataError::out_of_range("the shuffle window", 0, "1 or more"));
        }
        let epoch_samples = match end {
            EpochEnd::Continue => samples,
            EpochEnd::Drop { multiple: 0 } | EpochEnd::Pad { multiple: 0 } => {
                return Err(DataError::out_of_range("the multiple of an epoch", 0, "1 or more"));
            }
            EpochEnd::Drop { multiple } => samples - samples % multiple,
            EpochEnd::Pad { multiple } => samples.next_multiple_of(multiple),
        };
        if epoch_samples == 0 {
            let allowed = "at least one batch, as the last incomplete one is dropped";
            return Err(DataError::out_of_range("the number of samples", samples, allowed));
        }
        Ok(Self { shuffle, samples, epoch_samples })
    }

    /// Returns the number of samples of the data set.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Returns the samples of one epoch, the padded included and the dropped excepted.
    pub fn epoch_samples(&self) -> u64 {
        self.epoch_samples
    }

    /// Returns the place of sample number `sample`.
    pub fn locate(&self, sample: u64) -> SamplePlace {
        let (epoch, position) = (sample / self.epoch_samples, sample % self.epoch_samples);
        SamplePlace { sample, epoch, index: self.index_at(epoch, position % self.samples) }
    }

    /// Returns the index at a position of the order of an epoch.
    fn index_at(&self, epoch: u64, position: u64) -> u64 {
        match self.shuffle {
            Shuffle::Whole(SampleOrder::Sequential) => position,
            Shuffle::Whole(SampleOrder::Shuffle { seed }) => permute(position, self.samples, seed, epoch),
            Shuffle::Window { seed, window } => {
                let start = position - position % window;
                let size = window.min(self.samples - start);
                // Blocks of equal size would otherwise have the same permutation.
                let seed = seed ^ lockstep_plan::random::mix(start);
                start + permute(position - start, size, seed, epoch)
            }
        }
    }

    /// Returns the indexes that PyTorch's `DistributedSampler` would give replica `replica` in an epoch: every
    /// `replicas`-th position of the order. An engine that splits each global batch by
    /// [`SampleCursor`](crate::SampleCursor) gives a replica a consecutive slice instead; both read the same global
    /// batches.
    ///
    /// # Errors
    /// If `replica` is not below `replicas`, or the epoch is not a multiple of `replicas` (see [`EpochEnd`]).
    pub fn replica_indexes(
        &self,
        epoch: u64,
        replica: u64,
        replicas: u64,
    ) -> Result<impl Iterator<Item = u64> + use<>> {
        if replica >= replicas {
            let allowed = format!("below the number of replicas, {replicas}");
            return Err(DataError::out_of_range("data-parallel replica", replica, allowed));
        }
        if !self.epoch_samples.is_multiple_of(replicas) {
            let allowed = format!("a multiple of {replicas} replicas; EpochEnd::Pad or ::Drop makes it one");
            return Err(DataError::out_of_range(
                "the number of samples in an epoch",
                self.epoch_samples,
                allowed,
            ));
        }
        let sequence = *self;
        Ok((0..self.epoch_samples / replicas)
            .map(move |i| sequence.locate(epoch * sequence.epoch_samples + i * replicas + replica).index))
    }
}

/// Returns the ranges of sample numbers that read a data set once: batches of `batch` samples, the last one shorter. For
/// an evaluation with [`SampleOrder::Sequential`].
pub fn one_epoch(samples: u64, batch: u64) -> impl Iterator<Item = Range<u64>> + Send {
    let batch = batch.max(1);
    (0..samples.div_ceil(batch)).map(move |i| i * batch..((i + 1) * batch).min(samples))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sequence(shuffle: impl Into<Shuffle>, samples: u64, end: EpochEnd) -> SampleSequence {
        SampleSequence::new(shuffle, samples, end).unwrap()
    }

    fn shuffles() -> impl Strategy<Value = Shuffle> {
        prop_oneof![
            Just(Shuffle::Whole(SampleOrder::Sequential)),
            any::<u64>().prop_map(|seed| Shuffle::Whole(SampleOrder::Shuffle { seed })),
            (any::<u64>(), 1_u64..50).prop_map(|(seed, window)| Shuffle::Window { seed, window }),
        ]
    }

    proptest! {
        #[test]
        fn an_epoch_reads_each_sample_once(shuffle in shuffles(), samples in 1_u64..200, epoch in 0_u64..5) {
            let sequence = sequence(shuffle, samples, EpochEnd::Continue);
            let mut read: Vec<u64> =
                (epoch * samples..(epoch + 1) * samples).map(|n| sequence.locate(n).index).collect();
            if let Shuffle::Window { window, .. } = shuffle {
                for (position, &index) in read.iter().enumerate() {
                    prop_assert_eq!(position as u64 / window, index / window);
                }
            }
            read.sort_unstable();
            prop_assert!(read.iter().copied().eq(0..samples), "{:?}", read);
        }

        /// The replicas of `DistributedSampler` together read an epoch; the samples of a step do not depend on how many
        /// there are.
        #[test]
        fn replicas_read_the_epoch_of_the_sequence(
            shuffle in shuffles(), samples in 1_u64..100, replicas in 1_u64..6, epoch in 0_u64..3
        ) {
            let padded = sequence(shuffle, samples, EpochEnd::Pad { multiple: replicas });
            let mut of_replicas: Vec<Vec<u64>> = (0..replicas)
                .map(|replica| padded.replica_indexes(epoch, replica, replicas).unwrap().collect())
                .collect();
            let per_replica = samples.div_ceil(replicas);
            prop_assert!(of_replicas.iter().all(|indexes| indexes.len() as u64 == per_replica));
            let plain = sequence(shuffle, samples, EpochEnd::Continue);
            for position in 0..per_replica * replicas {
                let index = of_replicas[(position % replicas) as usize].remove(0);
                // The head of the order is repeated.
                prop_assert_eq!(index, plain.locate(epoch * samples + position % samples).index);
            }
        }

        #[test]
        fn a_dropped_end_is_the_end_of_the_order(shuffle in shuffles(), samples in 10_u64..100, multiple in 1_u64..10) {
            let dropped = sequence(shuffle, samples, EpochEnd::Drop { multiple });
            let kept = samples / multiple * multiple;
            prop_assert_eq!(dropped.epoch_samples(), kept);
            let plain = sequence(shuffle, samples, EpochEnd::Continue);
            for n in 0..3 * kept {
                let place = dropped.locate(n);
                prop_assert_eq!(place.epoch, n / kept);
                prop_assert_eq!(place.index, plain.locate(place.epoch * samples + n % kept).index);
            }
        }
    }

    #[test]
    fn blocks_of_a_window_have_orders_of_their_own() {
        let sequence = sequence(Shuffle::Window { seed: 1, window: 50 }, 100, EpochEnd::Continue);
        let block = |start: u64| (0..50).map(|i| sequence.locate(start + i).index % 50).collect::<Vec<_>>();
        assert_ne!(block(0), block(50));
        assert_ne!(block(0), block(100), "another epoch");
    }

    #[test]
    fn impossible_sequences_are_refused() {
        for (shuffle, samples, end, part) in [
            (Shuffle::Whole(SampleOrder::Sequential), 0, EpochEnd::Continue, "number of samples is 0"),
            (Shuffle::Window { seed: 0, window: 0 }, 5, EpochEnd::Continue, "window is 0"),
            (
                Shuffle::Whole(SampleOrder::Sequential),
                5,
                EpochEnd::Pad { multiple: 0 },
                "multiple of an epoch is 0",
            ),
            (
                Shuffle::Whole(SampleOrder::Sequential),
                5,
                EpochEnd::Drop { multiple: 6 },
                "is 5; allowed: at least one",
            ),
        ] {
            let error = SampleSequence::new(shuffle, samples, end).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        let odd = sequence(SampleOrder::Sequential, 5, EpochEnd::Continue);
        assert!(odd.replica_indexes(0, 0, 2).is_err() && odd.replica_indexes(0, 5, 5).is_err());
    }

    #[test]
    fn one_epoch_ends_with_a_shorter_batch() {
        assert!(one_epoch(7, 3).eq([0..3, 3..6, 6..7]));
        assert_eq!(one_epoch(0, 3).count(), 0);
    }
}
