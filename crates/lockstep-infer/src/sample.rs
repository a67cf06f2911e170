//! Sampling of the next token from logits: temperature, top-k and top-p. Random numbers are counter-based, so a seed
//! gives the same text on every run.

use lockstep_plan::random::Philox;

use crate::InferError;

/// Settings of sampling.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; 0 always takes the most likely token.
    pub temperature: f32,
    /// Number of most likely tokens to sample from; 0 means all.
    pub top_k: usize,
    /// Probability mass of the most likely tokens to sample from (nucleus sampling), in (0, 1].
    pub top_p: f32,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 0 }
    }
}

/// A sampler of tokens that counts its draws.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    drawn: u64,
    candidates: Vec<(f32, u32)>,
}

impl Sampler {
    /// Creates a sampler that has drawn nothing yet.
    ///
    /// # Errors
    /// If `temperature` is negative or not finite, or if `top_p` is not in (0, 1].
    pub fn new(sampling: Sampling) -> Result<Self, InferError> {
        let Sampling { temperature, top_p, .. } = sampling;
        let out_of_range = |name, value: f32, allowed| {
            Err(InferError::OutOfRange { name, value: value.to_string(), allowed })
        };
        if !(temperature.is_finite() && temperature >= 0.0) {
            return out_of_range("temperature", temperature, "0 or more");
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return out_of_range("top-p", top_p, "more than 0 and at most 1");
        }
        Ok(Self { sampling, drawn: 0, candidates: Vec::new() })
    }

    /// Draws the next token.
    ///
    /// # Panics
    /// If `logits` is empty.
    pub fn draw(&mut self, logits: &[f32]) -> u32 {
        let uniform = Philox::new(self.sampling.seed).uniform(self.drawn);
        self.drawn += 1;
        let candidates = &mut self.candidates;
        candidates.clear();
        candidates.extend(logits.iter().copied().zip(0..));
        // Most likely first; equal logits in the order of their ids.
        candidates.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let (highest, most_likely) = candidates[0];
        if self.sampling.temperature == 0.0 {
            return most_likely;
        }
        if self.sampling.top_k > 0 {
            candidates.truncate(self.sampling.top_k);
        }
        for (logit, _) in candidates.iter_mut() {
            *logit = ((*logit - highest) / self.sampling.temperature).exp();
        }
        // In f64, because in f32 the tail of a large vocabulary would be lost in the sum.
        let total =
            |candidates: &[(f32, u32)]| candidates.iter().map(|&(weight, _)| f64::from(weight)).sum::<f64>();
        if self.sampling.top_p < 1.0 {
            // The nucleus: the fewest tokens that reach `top_p`, at least one.
            let enough = f64::from(self.sampling.top_p) * total(candidates);
            let mut mass = 0.0;
            let last = candidates.iter().position(|&(weight, _)| {
                mass += f64::from(weight);
                mass >= enough
            });
            candidates.truncate(last.map_or(candidates.len(), |last| last + 1));
        }
        let mut left = uniform * total(candidates);
        for &(weight, id) in candidates.iter() {
            left -= f64::from(weight);
            if left < 0.0 {
                return id;
            }
        }
        most_likely
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(sampling: Sampling, logits: &[f32], count: usize) -> Vec<u32> {
        let mut sampler = Sampler::new(sampling).unwrap();
        (0..count).map(|_| sampler.draw(logits)).collect()
    }

    #[test]
    fn zero_temperature_takes_the_most_likely() {
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        assert_eq!(draws(sampling, &[0.1, 3.0, -1.0, 3.0], 3), [1, 1, 1]);
    }

    #[test]
    fn draws_follow_the_softmax() {
        let logits = [1.0_f32, 0.0, 2.0];
        let total: f32 = logits.iter().map(|logit| logit.exp()).sum();
        let drawn = draws(Sampling::default(), &logits, 20_000);
        for (id, logit) in logits.iter().enumerate() {
            let share = drawn.iter().filter(|&&d| d == id as u32).count() as f32 / 20_000.0;
            assert!((share - logit.exp() / total).abs() < 0.02, "token {id}: {share}");
        }
    }

    #[test]
    fn top_k_and_top_p_cut_the_tail() {
        let logits = [5.0, 4.9, 1.0, 0.0];
        let top_k = Sampling { top_k: 2, ..Sampling::default() };
        assert!(draws(top_k, &logits, 500).iter().all(|&id| id < 2));
        let top_p = Sampling { top_p: 0.4, ..Sampling::default() };
        assert!(draws(top_p, &logits, 500).iter().all(|&id| id == 0));
    }

    #[test]
    fn the_nucleus_ends_with_the_token_that_reaches_top_p() {
        // Probabilities of a half, a quarter and two eighths, exactly.
        let logits = [4.0_f32, 2.0, 1.0, 1.0].map(f32::ln);
        for (top_p, kept) in
            [(0.25, 1), (0.5, 1), (0.500_001, 2), (0.75, 2), (0.750_001, 3), (0.875, 3), (0.9, 4)]
        {
            let drawn = draws(Sampling { top_p, ..Sampling::default() }, &logits, 500);
            assert_eq!(drawn.iter().max(), Some(&(kept - 1)), "top_p {top_p}");
        }
    }

    #[test]
    fn the_tail_of_a_large_vocabulary_is_drawn_unless_it_is_cut() {
        // One token has half of the probability; each of the others has a millionth of the rest.
        let mut logits = vec![0.0_f32; 1_000_001];
        logits[0] = 1e6_f32.ln();
        let drawn = draws(Sampling::default(), &logits, 40);
        assert!(drawn.iter().any(|&id| id > 500_000), "{drawn:?}");
    }

    #[test]
    fn a_seed_gives_the_same_tokens_again() {
        let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.7).sin()).collect();
        let sampling = Sampling { seed: 7, ..Sampling::default() };
        assert_eq!(draws(sampling, &logits, 50), draws(sampling, &logits, 50));
        assert_ne!(draws(sampling, &logits, 50), draws(Sampling::default(), &logits, 50));
    }

    #[test]
    fn numbers_without_meaning_are_refused() {
        for sampling in [
            Sampling { temperature: -1.0, ..Sampling::default() },
            Sampling { temperature: f32::NAN, ..Sampling::default() },
            Sampling { top_p: 0.0, ..Sampling::default() },
            Sampling { top_p: 1.5, ..Sampling::default() },
        ] {
            assert!(Sampler::new(sampling).is_err(), "{sampling:?}");
        }
    }
}
