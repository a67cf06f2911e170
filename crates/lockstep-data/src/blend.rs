//! The source of each sample of a blend: a fixed pattern that follows the weights at every prefix.
//!
//! Sources take draws_per_period in a pattern that repeats. It is the chairman assignment of Tijdeman ("The chairman assignment
//! problem", Discrete Mathematics 32, 1980): after any number of samples, the count of each of n sources differs from
//! its weighted share by at most 1 - 1/(2n - 2) samples. (Megatron draws the source that is furthest behind, which has
//! no such bound, and keeps the pattern of the whole run in memory.)

/// Longest pattern, in samples.
const LONGEST_PERIOD: u64 = 1 << 20;

/// Repeating sequence of sources in the proportions of their weights.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Blend {
    period: Vec<Draw>,
    /// Number of draws_per_period of each source in one period.
    draws_per_period: Vec<u64>,
}

/// One sample of the period.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Draw {
    source: u32,
    /// Number of draws_per_period of the same source earlier in the period.
    earlier: u32,
}

impl Blend {
    /// Builds the pattern for sources with these weights, all of them positive and finite. Only their ratios matter.
    /// The ratios are exact if the weights have at most six decimals and the pattern has at most [`LONGEST_PERIOD`]
    /// samples. Otherwise they are accurate to about a millionth.
    pub(crate) fn new(weights: &[f64]) -> Self {
        let draws_per_period = whole_turns(weights);
        let mut period = Vec::new();
        let mut taken = vec![0_u64; draws_per_period.len()];
        for number in 1..=draws_per_period.iter().sum::<u64>() {
            let source = next_source(&draws_per_period, &taken, number);
            period.push(Draw { source: source as u32, earlier: taken[source] as u32 });
            taken[source] += 1;
        }
        Self { period, draws_per_period }
    }

    /// Returns the source of `sample`, and the number of earlier samples from that source.
    pub(crate) fn locate(&self, sample: u64) -> (usize, u64) {
        let length = self.period.len() as u64;
        let Draw { source, earlier } = self.period[(sample % length) as usize];
        let source = source as usize;
        (source, sample / length * self.draws_per_period[source] + u64::from(earlier))
    }

    /// Returns the fraction of all samples that come from `source`, in (0, 1].
    pub(crate) fn share(&self, source: usize) -> f64 {
        self.draws_per_period[source] as f64 / self.period.len() as f64
    }
}

/// Returns positive integers in the ratios of `weights`. Their sum exceeds [`LONGEST_PERIOD`] slightly at most.
fn whole_turns(weights: &[f64]) -> Vec<u64> {
    let total: f64 = weights.iter().sum();
    for decimals in 0..=6 {
        let scaled = || weights.iter().map(|weight| weight * 10_f64.powi(decimals));
        let is_whole = |value: f64| value >= 1.0 && (value - value.round()).abs() < 1e-9 * value;
        if scaled().all(is_whole) && scaled().sum::<f64>() < 1e15 {
            let divisor = scaled().map(|value| value.round() as u64).fold(0, greatest_common_divisor);
            let draws_per_period: Vec<u64> = scaled().map(|value| value.round() as u64 / divisor).collect();
            if draws_per_period.iter().sum::<u64>() <= LONGEST_PERIOD {
                return draws_per_period;
            }
        }
    }
    weights.iter().map(|weight| ((weight / total * LONGEST_PERIOD as f64).round() as u64).max(1)).collect()
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// Returns the source of sample `number`: the one with the earliest deadline among those that would not get too far
/// ahead. All quantities are integers, scaled by the length of the period times 2n - 2.
fn next_source(draws_per_period: &[u64], taken: &[u64], number: u64) -> usize {
    let length: u64 = draws_per_period.iter().sum();
    let spread = (2 * draws_per_period.len() as i128 - 2).max(1);
    let behind = |source: usize| {
        spread
            * (i128::from(draws_per_period[source]) * i128::from(number)
                - i128::from(length) * i128::from(taken[source]))
    };
    // Time until the source would be too far behind, times its weight.
    let slack = |source: usize| i128::from(length) * (spread - 1) - behind(source);
    let may_be_drawn = |&source: &usize| behind(source) >= i128::from(length);
    let sooner = |a: &usize, b: &usize| {
        (slack(*a) * i128::from(draws_per_period[*b])).cmp(&(slack(*b) * i128::from(draws_per_period[*a])))
    };
    (0..draws_per_period.len()).filter(may_be_drawn).min_by(sooner).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn every_prefix_has_the_proportions_asked_for_within_one_sample(
            weights in prop::collection::vec(1_u32..1000, 1..9), periods in 1_u64..3
        ) {
            let weights: Vec<f64> = weights.into_iter().map(|weight| f64::from(weight) / 1000.0).collect();
            let blend = Blend::new(&weights);
            let total: f64 = weights.iter().sum();
            let bound = (1.0 - 1.0 / (2.0 * weights.len() as f64 - 2.0)).max(0.0) + 1e-6;
            let mut drawn = vec![0_u64; weights.len()];
            for sample in 0..periods * blend.period.len() as u64 {
                let (source, index) = blend.locate(sample);
                prop_assert_eq!(index, drawn[source], "samples of a source come in their order");
                drawn[source] += 1;
                for (source, weight) in weights.iter().enumerate() {
                    let error = (weight / total * (sample + 1) as f64 - drawn[source] as f64).abs();
                    prop_assert!(error <= bound, "source {} is off by {} after {}", source, error, sample + 1);
                }
            }
        }
    }

    #[test]
    fn decimal_weights_are_kept_exactly_and_the_pattern_is_short() {
        for (weights, draws_per_period) in [
            (&[0.3, 0.7][..], &[3, 7][..]),
            (&[1.0 - 0.1 - 0.2, 0.1, 0.2], &[7, 1, 2]),
            (&[1.0], &[1]),
            (&[5.0, 10.0], &[1, 2]),
            (&[1e-6, 0.999_999], &[1, 999_999]),
        ] {
            assert_eq!(Blend::new(weights).draws_per_period, draws_per_period, "{weights:?}");
        }
    }

    #[test]
    fn weights_that_are_no_short_fractions_are_close() {
        let weights = [123_456_789.0, 987_654_321.5, 0.001];
        let blend = Blend::new(&weights);
        let total: f64 = weights.iter().sum();
        for (source, weight) in weights.iter().enumerate() {
            assert!((blend.share(source) - weight / total).abs() < 2e-6, "{source}: {}", blend.share(source));
        }
    }
}
