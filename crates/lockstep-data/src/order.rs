//! The shuffled order of windows, and the assignment of samples to data-parallel replicas: two pure functions.
//!
//! The shuffle is a permutation that is computed per element and never stored. It is a Feistel network over the
//! smallest power of two that holds all windows, iterated until the result is a valid window (Black and Rogaway,
//! "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, section 3). Philox is its round function.

use std::ops::Range;

use lockstep_plan::random::{Philox, key_from_name, mix};

use crate::error::{DataError, Result};

/// Order in which the windows of a data set are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SampleOrder {
    /// Ascending, starting over in each epoch.
    Sequential,
    /// Every window once per epoch, in a permutation that depends on seed and epoch.
    Shuffle {
        /// Random seed of the run.
        seed: u64,
    },
}

impl SampleOrder {
    /// Returns the (epoch, window) of sample number `sample` in a data set of `windows` windows.
    ///
    /// # Panics
    /// If `windows` is zero.
    pub fn locate(self, sample: u64, windows: u64) -> (u64, u64) {
        let (epoch, index) = (sample / windows, sample % windows);
        match self {
            Self::Sequential => (epoch, index),
            Self::Shuffle { seed } => (epoch, permute(index, windows, seed, epoch)),
        }
    }

    /// Returns the order for one source of a blend. Different sources get independent permutations.
    pub(crate) fn of_source(self, source: u64) -> Self {
        match self {
            Self::Shuffle { seed } if source > 0 => {
                Self::Shuffle { seed: mix(seed ^ mix(source ^ key_from_name("lockstep/blend-source"))) }
            }
            order => order,
        }
    }
}

/// Number of Feistel rounds. Four are the proven minimum for a strong pseudo-random permutation (Luby and Rackoff,
/// 1988); small domains profit from more.
const FEISTEL_ROUNDS: u32 = 8;

/// Returns the image of `index` under the permutation of `0..size` that (`seed`, `epoch`) selects.
pub(crate) fn permute(index: u64, size: u64, seed: u64, epoch: u64) -> u64 {
    debug_assert!(index < size, "{index} is outside 0..{size}");
    let philox = Philox::new(mix(seed ^ key_from_name("lockstep/sample-order")));
    let bits = u64::BITS - (size - 1).leading_zeros();
    let mut value = index;
    loop {
        value = feistel(value, bits, philox, epoch);
        // The domain is less than twice the size, so fewer than two iterations are expected. The loop ends because the
        // cycle leads back to `index` itself.
        if value < size {
            return value;
        }
    }
}

/// Permutes the words of `bits` bits. The halves may differ by one bit: each round XORs a function of one half into the
/// other, which is invertible for any widths.
fn feistel(word: u64, bits: u32, philox: Philox, epoch: u64) -> u64 {
    let low_bits = bits / 2;
    let low_mask = (1_u64 << low_bits) - 1;
    let high_mask = (1_u64 << (bits - low_bits)) - 1;
    let (mut high, mut low) = (word >> low_bits, word & low_mask);
    for round in 0..FEISTEL_ROUNDS {
        let scramble =
            |half: u64| u64::from(philox.block([half as u32, round, epoch as u32, (epoch >> 32) as u32])[0]);
        if round % 2 == 0 {
            high ^= scramble(low) & high_mask;
        } else {
            low ^= scramble(high) & low_mask;
        }
    }
    (high << low_bits) | low
}

/// Position in the sample sequence, and its split over data-parallel replicas and micro-batches.
///
/// Step `k` consumes `global_batch` consecutive samples. Each replica takes a consecutive slice of them and cuts it
/// into micro-batches in ascending order. The ranges depend only on these fields, so a resume or a change of the mesh
/// needs no other state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleCursor {
    /// Samples consumed so far by all replicas together: the only state of a loader.
    pub samples_consumed: u64,
    /// Sequences per step over all replicas.
    pub global_batch: u64,
    /// Sequences per micro-batch of one replica.
    pub micro_batch: u64,
    /// Index of this data-parallel replica, below `replicas`.
    pub replica: u64,
    /// Number of data-parallel replicas.
    pub replicas: u64,
}

impl SampleCursor {
    /// Returns a cursor for a run with a single replica.
    ///
    /// # Errors
    /// If `global_batch` is not a positive multiple of `micro_batch`.
    pub fn single(samples_consumed: u64, global_batch: u64, micro_batch: u64) -> Result<Self> {
        let cursor = Self { samples_consumed, global_batch, micro_batch, replica: 0, replicas: 1 };
        cursor.validate()?;
        Ok(cursor)
    }

    /// Checks that the global batch splits evenly over replicas and micro-batches.
    ///
    /// # Errors
    /// If a count is zero, `replica` is not below `replicas`, or `global_batch` is not a multiple of `micro_batch` ×
    /// `replicas`.
    pub fn validate(&self) -> Result<()> {
        for (name, value) in [
            ("global_batch", self.global_batch),
            ("micro_batch", self.micro_batch),
            ("data-parallel replicas", self.replicas),
        ] {
            if value == 0 {
                return Err(DataError::out_of_range(name, 0, "1 or more"));
            }
        }
        if self.replica >= self.replicas {
            let allowed = format!("0 to {}", self.replicas - 1);
            return Err(DataError::out_of_range("data-parallel replica", self.replica, allowed));
        }
        let per_round = self.micro_batch.checked_mul(self.replicas);
        if per_round.is_none_or(|per_round| !self.global_batch.is_multiple_of(per_round)) {
            return Err(DataError::UnevenBatch {
                global_batch: self.global_batch,
                micro_batch: self.micro_batch,
                replicas: self.replicas,
            });
        }
        Ok(())
    }

    /// Returns the number of micro-batches that this replica reads per step: the gradient-accumulation steps.
    pub fn micro_batches_per_step(&self) -> u64 {
        self.global_batch / self.replicas / self.micro_batch
    }

    /// Returns the sample numbers of micro-batch `index` in the step `step` steps after the cursor.
    pub fn micro_batch_range(&self, step: u64, index: u64) -> Range<u64> {
        let start = self.samples_consumed
            + step * self.global_batch
            + self.replica * (self.global_batch / self.replicas)
            + index * self.micro_batch;
        start..start + self.micro_batch
    }

    /// Returns the sample ranges of this replica's micro-batches over `steps` steps, in the order of use.
    pub fn ranges(self, steps: u64) -> impl Iterator<Item = Range<u64>> + Send + 'static {
        (0..steps).flat_map(move |step| {
            (0..self.micro_batches_per_step()).map(move |index| self.micro_batch_range(step, index))
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn permutation(size: u64, seed: u64, epoch: u64) -> Vec<u64> {
        (0..size).map(|i| permute(i, size, seed, epoch)).collect()
    }

    fn assert_bijection(size: u64, seed: u64, epoch: u64) {
        let mut seen = permutation(size, seed, epoch);
        seen.sort_unstable();
        assert!(seen.iter().copied().eq(0..size), "size {size} seed {seed} epoch {epoch}: {seen:?}");
    }

    #[test]
    fn every_small_size_is_permuted_without_loss() {
        for size in 1..=300 {
            assert_bijection(size, 1, 0);
        }
        for size in [65_535, 65_536, 65_537, 99_991] {
            assert_bijection(size, 7, 3);
        }
    }

    proptest! {
        #[test]
        fn any_size_seed_and_epoch_is_permuted_without_loss(
            size in 1_u64..5_000, seed: u64, epoch: u64
        ) {
            assert_bijection(size, seed, epoch);
        }

        #[test]
        fn huge_sizes_stay_in_range_and_distinct(size in 1_u64 << 40..=u64::MAX, seed: u64, start: u64) {
            let start = start % (size - 100);
            let mut images: Vec<u64> = (start..start + 100).map(|i| permute(i, size, seed, 0)).collect();
            prop_assert!(images.iter().all(|&image| image < size));
            images.sort_unstable();
            images.dedup();
            prop_assert_eq!(images.len(), 100);
        }

        #[test]
        fn replicas_and_micro_batches_read_every_sample_of_a_step_once(
            consumed in 0_u64..1 << 40, micro in 1_u64..5, accumulation in 1_u64..5, replicas in 1_u64..5
        ) {
            let global_batch = micro * accumulation * replicas;
            let mut read = Vec::new();
            for replica in 0..replicas {
                let cursor =
                    SampleCursor { samples_consumed: consumed, global_batch, micro_batch: micro, replica, replicas };
                cursor.validate().unwrap();
                prop_assert_eq!(cursor.ranges(3).count() as u64, 3 * accumulation);
                read.extend(cursor.ranges(3).flatten());
            }
            read.sort_unstable();
            prop_assert!(read.iter().copied().eq(consumed..consumed + 3 * global_batch), "{read:?}");
        }
    }

    /// A random permutation has about one fixed point, as many adjacent pairs as by chance, and a rank correlation of
    /// (position, image) of 0 ± 1/sqrt(n).
    #[test]
    fn the_permutation_looks_shuffled() {
        for (size, epoch) in [(1_000_u64, 0), (1_024, 5), (10_007, 1)] {
            let order = permutation(size, 42, epoch);
            let fixed = order.iter().enumerate().filter(|&(i, &v)| i as u64 == v).count();
            assert!(fixed <= 8, "{fixed} fixed points among {size}");
            let neighbours = order.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) == 1).count();
            assert!(neighbours <= 14, "{neighbours} neighbours stay together among {size}");
            let mean = (size - 1) as f64 / 2.0;
            let covariance: f64 =
                order.iter().enumerate().map(|(i, &v)| (i as f64 - mean) * (v as f64 - mean)).sum();
            let variance: f64 = (0..size).map(|i| (i as f64 - mean).powi(2)).sum();
            let correlation = covariance / variance;
            assert!(correlation.abs() < 4.0 / (size as f64).sqrt(), "rank correlation {correlation}");
        }
    }

    /// Over many seeds, all six orders of three elements must occur about equally often.
    #[test]
    fn small_permutations_are_all_reached() {
        let mut counts = std::collections::BTreeMap::new();
        for seed in 0..6_000 {
            *counts.entry(permutation(3, seed, 0)).or_insert(0) += 1;
        }
        assert_eq!(counts.len(), 6, "{counts:?}");
        assert!(counts.values().all(|&count| (800..1_200).contains(&count)), "{counts:?}");
    }

    #[test]
    fn epochs_and_seeds_have_orders_of_their_own() {
        let first = permutation(100, 1, 0);
        assert_ne!(first, permutation(100, 1, 1));
        assert_ne!(first, permutation(100, 2, 0));
        assert_eq!(first, permutation(100, 1, 0));
    }

    #[test]
    fn sample_numbers_run_on_over_epochs() {
        assert_eq!(SampleOrder::Sequential.locate(0, 7), (0, 0));
        assert_eq!(SampleOrder::Sequential.locate(20, 7), (2, 6));
        let shuffle = SampleOrder::Shuffle { seed: 3 };
        let mut second_epoch: Vec<u64> = (7..14)
            .map(|sample| {
                let (epoch, window) = shuffle.locate(sample, 7);
                assert_eq!(epoch, 1);
                window
            })
            .collect();
        second_epoch.sort_unstable();
        assert_eq!(second_epoch, [0, 1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn a_batch_that_does_not_divide_is_refused_with_its_numbers() {
        let error = SampleCursor::single(0, 10, 4).unwrap_err().to_string();
        assert!(error.contains("10") && error.contains("micro_batch 4"), "{error}");
        let error = SampleCursor::single(0, 0, 4).unwrap_err().to_string();
        assert!(error.contains("global_batch is 0"), "{error}");
    }
}
