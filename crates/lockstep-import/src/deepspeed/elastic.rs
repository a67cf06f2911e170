//! The global batch size of DeepSpeed's elasticity, chosen so that as many rank counts as possible divide it.

use super::DeepSpeed;
use crate::document::Node;
use crate::draft::Read;

/// Highly composite numbers: the multiples that DeepSpeed tries.
const COMPOSITES: [u64; 38] = [
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120,
    20160, 25200, 27720, 45360, 50400, 55440, 83160, 110_880, 166_320, 221_760, 277_200, 332_640, 498_960,
    554_400, 665_280, 720_720,
];

/// Settings of `elasticity`.
#[derive(Debug, Clone)]
struct Elasticity {
    max_batch: u64,
    micro_batches: Vec<u64>,
    ranks: std::ops::RangeInclusive<u64>,
    prefers_larger: bool,
}

impl Elasticity {
    /// Returns the rank counts among which a batch divides evenly.
    fn valid_ranks(&self, batch: u64) -> Vec<u64> {
        let shares = self
            .micro_batches
            .iter()
            .filter(|micro| batch.is_multiple_of(**micro))
            .map(|micro| batch / micro);
        let shares: Vec<u64> = shares.collect();
        let most = shares.iter().copied().max().unwrap_or(0).min(*self.ranks.end());
        (*self.ranks.start()..=most)
            .filter(|ranks| shares.iter().any(|share| share.is_multiple_of(*ranks)))
            .collect()
    }

    /// Returns the batch size that the most rank counts divide; `None` if no batch fits.
    fn batch(&self) -> Option<u64> {
        let multiple = self.micro_batches.iter().copied().try_fold(1, least_common_multiple);
        let bases = self.micro_batches.iter().copied().chain(multiple).filter(|base| *base <= self.max_batch);
        let candidates = bases.map(|base| {
            let most = self.max_batch / base;
            base * COMPOSITES.iter().rev().copied().find(|number| *number <= most).unwrap_or(1)
        });
        let preference = |batch: u64| if self.prefers_larger { batch } else { u64::MAX - batch };
        candidates.max_by_key(|batch| (self.valid_ranks(*batch).len(), preference(*batch)))
    }
}

fn least_common_multiple(a: u64, b: u64) -> Option<u64> {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x).checked_mul(b)
}

impl DeepSpeed<'_, '_> {
    /// Sets the batch by `elasticity`; returns true if elasticity is enabled.
    pub(super) fn elastic(&mut self) -> bool {
        let key = |name: &str| format!("elasticity.{name}");
        let enabled = self.fields.flag(&key("enabled"));
        let integer = |name: &str, default| {
            self.fields.integer(&key(name)).map_or(default, |read: Read<u64>| read.value)
        };
        let max_batch = integer("max_train_batch_size", 2000);
        let ranks = integer("min_gpus", 1).max(1)..=integer("max_gpus", 10_000).min(1 << 20);
        let prefers_larger = self.fields.flag(&key("prefer_larger_batch")).is_none_or(|read| read.value);
        self.fields.number(&key("version"));
        let micro_batches = self.micro_batches(&key("micro_batch_sizes"));
        let Some(enabled) = enabled.filter(|read| read.value) else { return false };
        for key in ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"] {
            if self.fields.integer(key).is_some() {
                self.fields.refuse(key, "is given, and elasticity chooses the batch", "one of the two");
            }
        }
        let elasticity = Elasticity { max_batch, micro_batches, ranks, prefers_larger };
        let Some(batch) = elasticity.batch().filter(|_| max_batch <= 1 << 20) else {
            self.fields.refuse(
                &enabled.key,
                "no batch fits",
                "max_train_batch_size of a million at most, and no less than a micro batch",
            );
            return true;
        };
        let valid = elasticity.valid_ranks(batch);
        self.import.derived(
            "train.global_batch",
            batch,
            format!("{} numbers of ranks divide it, from {:?}", valid.len(), elasticity.ranks),
        );
        if let Some(ranks) = self.options.ranks.map(|ranks| ranks as u64) {
            let micro = elasticity
                .micro_batches
                .iter()
                .copied()
                .filter(|micro| batch.is_multiple_of(micro * ranks))
                .max();
            match micro {
                Some(micro) => self.import.derived(
                    "train.micro_batch",
                    micro,
                    format!("the largest that {ranks} ranks can take"),
                ),
                None => {
                    let near: Vec<String> = valid.iter().take(12).map(u64::to_string).collect();
                    self.fields.refuse(
                        &enabled.key,
                        format!("{ranks} ranks cannot share {batch} sequences"),
                        format!("{} ... ranks", near.join(", ")),
                    );
                }
            }
        }
        true
    }

    fn micro_batches(&self, key: &str) -> Vec<u64> {
        self.fields.mark(key);
        let field = self.fields.keys().find(|(name, _)| *name == key);
        let sizes = match field {
            None => return vec![2, 4, 6],
            Some((_, field)) => match &field.node {
                Node::List(items) => {
                    items.iter().map(|item| item.integer().filter(|size| *size > 0)).collect()
                }
                _ => None,
            },
        };
        sizes.filter(|sizes: &Vec<u64>| !sizes.is_empty() && sizes.len() <= 64).unwrap_or_else(|| {
            self.fields.refuse(key, "is no list of sizes", "[2, 4, 6], each 1 or more");
            vec![1]
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_those_that_deepspeed_computes() {
        for (micro_batches, max_batch, ranks, batch, counts) in
            [(vec![2, 4, 6], 2000, 1..=10_000, 1680, 32), (vec![8, 12, 16, 17], 10_000, 32..=1500, 9792, 23)]
        {
            let elasticity = Elasticity { max_batch, micro_batches, ranks, prefers_larger: true };
            assert_eq!(elasticity.batch(), Some(batch));
            assert_eq!(elasticity.valid_ranks(batch).len(), counts);
        }
    }
}
