//! Sampling of the next token from logits: penalties and biases, temperature, min-p, top-k and top-p, in this order (that of vLLM).
//! Random numbers are counter-based, so a seed gives the same text on every run and beside any other requests.

use std::{
    cmp::Ordering,
    collections::{HashMap, HashSet},
};

use lockstep_plan::random::Philox;

use crate::InferError;

/// Settings of sampling.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; 0 always takes the most likely token.
    pub temperature: f32,
    /// Number of most likely tokens to sample from; 0 means all. Of equal logits at the border, the lowest ids count.
    pub top_k: usize,
    /// Probability mass of the most likely tokens to sample from (nucleus sampling), in (0, 1].
    pub top_p: f32,
    /// Least probability of a token, as a factor on that of the most likely one, in [0, 1].
    pub min_p: f32,
    /// Divisor of positive logits, and factor on negative ones, of tokens in the prompt or the output; 1 for none.
    pub repetition_penalty: f32,
    /// Subtracted from a token's logit for each of its occurrences in the output.
    pub frequency_penalty: f32,
    /// Subtracted from the logit of each token that occurs in the output.
    pub presence_penalty: f32,
    /// Added to the logits of tokens, by id.
    pub logit_bias: Vec<(u32, f32)>,
    /// Number of most likely tokens whose log-probabilities are reported with each token; `None` reports none at all.
    pub logprobs: Option<usize>,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            logprobs: None,
            seed: 0,
        }
    }
}

impl Sampling {
    /// Returns the settings that always take the most likely token.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Checks the range of each setting.
    ///
    /// # Errors
    /// If one is out of range.
    pub fn check(&self) -> Result<(), InferError> {
        let Self { temperature, top_p, min_p, repetition_penalty, .. } = *self;
        let ranges = [
            ("temperature", temperature, temperature >= 0.0, "0 or more"),
            ("top-p", top_p, top_p > 0.0 && top_p <= 1.0, "more than 0 and at most 1"),
            ("min-p", min_p, (0.0..=1.0).contains(&min_p), "0 to 1"),
            ("repetition-penalty", repetition_penalty, repetition_penalty > 0.0, "more than 0"),
            ("frequency-penalty", self.frequency_penalty, true, "a finite number"),
            ("presence-penalty", self.presence_penalty, true, "a finite number"),
        ];
        let biases = self.logit_bias.iter().map(|&(_, bias)| ("logit-bias", bias, true, "a finite number"));
        for (name, value, is_in_range, allowed) in ranges.into_iter().chain(biases) {
            if !(value.is_finite() && is_in_range) {
                return Err(InferError::OutOfRange { name, value: value.to_string(), allowed });
            }
        }
        Ok(())
    }

    fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.frequency_penalty != 0.0 || self.presence_penalty != 0.0
    }
}

/// A token that was drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct Drawn {
    /// The token's id.
    pub id: u32,
    /// Its log-probability, in nats, before penalties and temperature; `None` unless [`Sampling::logprobs`] asks for it.
    pub logprob: Option<f32>,
    /// The most likely tokens, as many as [`Sampling::logprobs`] asks for, most likely first.
    pub top_logprobs: Vec<TokenLogprob>,
}

/// A token with its log-probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogprob {
    /// The token's id.
    pub id: u32,
    /// The log-probability in nats.
    pub logprob: f32,
}

/// A sampler of one text: it counts its draws and remembers the tokens.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    drawn: u64,
    prompt: HashSet<u32>,
    /// Occurrences of each token in the output.
    output: HashMap<u32, u32>,
    /// Logits after penalties and biases.
    adjusted: Vec<f32>,
    candidates: Vec<Candidate>,
}

/// A token with its logit.
type Candidate = (f32, u32);

/// Orders candidates from the most likely one on; equal logits by their ids.
fn by_likelihood(a: &Candidate, b: &Candidate) -> Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

impl Sampler {
    /// Creates a sampler for the text that follows `prompt`.
    ///
    /// # Errors
    /// As [`Sampling::check`].
    pub fn new(sampling: Sampling, prompt: &[u32]) -> Result<Self, InferError> {
        sampling.check()?;
        let is_needed = sampling.repetition_penalty != 1.0;
        let prompt = if is_needed { prompt.iter().copied().collect() } else { HashSet::new() };
        let (adjusted, candidates) = (Vec::new(), Vec::new());
        Ok(Self { sampling, drawn: 0, prompt, output: HashMap::new(), adjusted, candidates })
    }

    /// Draws the next token.
    ///
    /// # Panics
    /// If `logits` is empty.
    pub fn draw(&mut self, logits: &[f32]) -> Drawn {
        let uniform = Philox::new(self.sampling.seed).uniform(self.drawn);
        self.drawn += 1;
        let adjusted = self.adjust(logits);
        let logits_drawn_from = if adjusted { &self.adjusted } else { logits };
        let id = choose(&self.sampling, uniform, logits_drawn_from, &mut self.candidates);
        if self.sampling.has_penalties() {
            *self.output.entry(id).or_default() += 1;
        }
        match self.sampling.logprobs {
            None => Drawn { id, logprob: None, top_logprobs: Vec::new() },
            Some(count) => self.with_logprobs(id, logits, count),
        }
    }

    /// Computes the logits after biases and penalties. Returns false if there are none.
    fn adjust(&mut self, logits: &[f32]) -> bool {
        let Sampling { repetition_penalty, frequency_penalty, presence_penalty, .. } = self.sampling;
        if self.sampling.logit_bias.is_empty() && !self.sampling.has_penalties() {
            return false;
        }
        self.adjusted.clear();
        self.adjusted.extend_from_slice(logits);
        for &(id, bias) in &self.sampling.logit_bias {
            if let Some(logit) = self.adjusted.get_mut(id as usize) {
                *logit += bias;
            }
        }
        if repetition_penalty != 1.0 {
            let only_in_output = self.output.keys().filter(|id| !self.prompt.contains(id));
            for &id in self.prompt.iter().chain(only_in_output) {
                if let Some(logit) = self.adjusted.get_mut(id as usize) {
                    *logit =
                        if *logit > 0.0 { *logit / repetition_penalty } else { *logit * repetition_penalty };
                }
            }
        }
        for (&id, &count) in &self.output {
            if let Some(logit) = self.adjusted.get_mut(id as usize) {
                *logit -= frequency_penalty * count as f32 + presence_penalty;
            }
        }
        true
    }

    fn with_logprobs(&mut self, id: u32, logits: &[f32], count: usize) -> Drawn {
        let log_total = log_sum_exp(logits);
        let logprob = |logit: f32| (f64::from(logit) - log_total) as f32;
        self.candidates.clear();
        self.candidates.extend(logits.iter().copied().zip(0..));
        let mut ranked = Ranked { candidates: &mut self.candidates, sorted: 0 };
        let top = (0..count.min(logits.len())).map(|rank| ranked.get(rank));
        let top_logprobs = top.map(|(logit, id)| TokenLogprob { id, logprob: logprob(logit) }).collect();
        Drawn { id, logprob: Some(logprob(logits[id as usize])), top_logprobs }
    }
}

/// Returns the logarithm of the sum of the exponentials of logits.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|&logit| f64::from(logit - highest).exp()).sum();
    f64::from(highest) + total.ln()
}

/// Returns the log-probabilities of all tokens, in nats.
pub(crate) fn log_probabilities(logits: &[f32]) -> impl Iterator<Item = f32> {
    let log_total = log_sum_exp(logits);
    logits.iter().map(move |&logit| (f64::from(logit) - log_total) as f32)
}

/// Draws a token with a number that is uniform in [0, 1).
fn choose(sampling: &Sampling, uniform: f64, logits: &[f32], candidates: &mut Vec<Candidate>) -> u32 {
    let Sampling { temperature, top_k, top_p, min_p, .. } = *sampling;
    let all = || logits.iter().copied().zip(0..);
    let (highest, most_likely) = all().min_by(by_likelihood).expect("a vocabulary has tokens");
    if temperature == 0.0 {
        return most_likely;
    }
    let weight = |logit: f32| f64::from(((logit - highest) / temperature).exp());
    candidates.clear();
    candidates.extend(all());
    if min_p > 0.0 {
        candidates.retain(|&(logit, _)| weight(logit) >= f64::from(min_p));
    }
    if top_k > 0 && top_k < candidates.len() {
        candidates.select_nth_unstable_by(top_k - 1, by_likelihood);
        candidates.truncate(top_k);
    }
    // In f64, because in f32 the tail of a large vocabulary would be lost in the sum.
    let total = candidates.iter().map(|&(logit, _)| weight(logit)).sum::<f64>();
    let all = candidates.len();
    let mut ranked = Ranked { candidates, sorted: 0 };
    let (total, len) = if top_p < 1.0 {
        // The nucleus: the fewest tokens that reach `top_p`, at least one.
        let mut mass = 0.0;
        let last = (0..all).find(|&rank| {
            mass += weight(ranked.get(rank).0);
            mass >= f64::from(top_p) * total
        });
        (mass, last.map_or(all, |last| last + 1))
    } else {
        (total, all)
    };
    let mut left = uniform * total;
    for rank in 0..len {
        let (logit, id) = ranked.get(rank);
        left -= weight(logit);
        if left < 0.0 {
            return id;
        }
    }
    most_likely
}

/// Candidates that are sorted as far as they are read: most draws need few of a large vocabulary.
struct Ranked<'a> {
    candidates: &'a mut [Candidate],
    sorted: usize,
}

impl Ranked<'_> {
    /// Returns the candidate with `rank` more likely ones.
    fn get(&mut self, rank: usize) -> Candidate {
        if rank >= self.sorted {
            let end = (rank + 1).max(4 * self.sorted).max(64).min(self.candidates.len());
            let rest = &mut self.candidates[self.sorted..];
            if end - self.sorted < rest.len() {
                rest.select_nth_unstable_by(end - self.sorted, by_likelihood);
            }
            self.candidates[self.sorted..end].sort_unstable_by(by_likelihood);
            self.sorted = end;
        }
        self.candidates[rank]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(sampling: Sampling, logits: &[f32], count: usize) -> Vec<u32> {
        let mut sampler = Sampler::new(sampling, &[]).unwrap();
        (0..count).map(|_| sampler.draw(logits).id).collect()
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
        let drawn = draws(Sampling::default(), &logits, 10);
        assert!(drawn.iter().any(|&id| id > 500_000), "{drawn:?}");
    }

    #[test]
    fn a_seed_gives_the_same_tokens_again() {
        let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.7).sin()).collect();
        let sampling = Sampling { seed: 7, ..Sampling::default() };
        assert_eq!(draws(sampling.clone(), &logits, 50), draws(sampling.clone(), &logits, 50));
        assert_ne!(draws(sampling, &logits, 50), draws(Sampling::default(), &logits, 50));
    }

    #[test]
    fn numbers_without_meaning_are_refused() {
        for sampling in [
            Sampling { temperature: -1.0, ..Sampling::default() },
            Sampling { temperature: f32::NAN, ..Sampling::default() },
            Sampling { top_p: 0.0, ..Sampling::default() },
            Sampling { top_p: 1.5, ..Sampling::default() },
            Sampling { min_p: -0.1, ..Sampling::default() },
            Sampling { repetition_penalty: 0.0, ..Sampling::default() },
            Sampling { frequency_penalty: f32::INFINITY, ..Sampling::default() },
            Sampling { logit_bias: vec![(3, f32::NAN)], ..Sampling::default() },
        ] {
            assert!(sampling.check().is_err(), "{sampling:?}");
        }
    }

    /// Sorts everything first, as the definitions of top-k and top-p read.
    fn choose_by_sorting(sampling: &Sampling, uniform: f64, logits: &[f32]) -> u32 {
        let mut sorted: Vec<Candidate> = logits.iter().copied().zip(0..).collect();
        sorted.sort_by(by_likelihood);
        let highest = sorted[0].0;
        let weight = |logit: f32| f64::from(((logit - highest) / sampling.temperature).exp());
        sorted.retain(|&(logit, _)| weight(logit) >= f64::from(sampling.min_p));
        if sampling.top_k > 0 {
            sorted.truncate(sampling.top_k);
        }
        let total: f64 = sorted.iter().map(|&(logit, _)| weight(logit)).sum();
        let mut mass = 0.0;
        let reached = sorted.iter().position(|&(logit, _)| {
            mass += weight(logit);
            mass >= f64::from(sampling.top_p) * total
        });
        sorted.truncate(reached.map_or(sorted.len(), |last| last + 1));
        let mut left = uniform * sorted.iter().map(|&(logit, _)| weight(logit)).sum::<f64>();
        let chosen = sorted.iter().find(|&&(logit, _)| {
            left -= weight(logit);
            left < 0.0
        });
        chosen.map_or(sorted[0].1, |&(_, id)| id)
    }

    #[test]
    fn a_partial_sort_draws_as_a_full_one() {
        let random = Philox::new(1);
        let logits: Vec<f32> = (0..3000).map(|at| (random.uniform(at) * 9.0) as f32).collect();
        let mut candidates = Vec::new();
        for (draw, top_k) in (3000_u64..3600).zip([0, 1, 3, 100, 5000].into_iter().cycle()) {
            let sampling = Sampling {
                temperature: [0.5, 1.0, 3.0][draw as usize % 3],
                top_k,
                top_p: [1.0, 0.9, 0.3, 0.999][draw as usize % 4],
                min_p: [0.0, 0.05, 0.5][draw as usize / 3 % 3],
                ..Sampling::default()
            };
            let uniform = random.uniform(draw);
            let found = choose(&sampling, uniform, &logits, &mut candidates);
            assert_eq!(found, choose_by_sorting(&sampling, uniform, &logits), "{sampling:?}, {uniform}");
        }
    }

    #[test]
    fn min_p_drops_what_is_much_less_likely_than_the_best() {
        // Probabilities of a half, a quarter and two eighths.
        let logits = [4.0_f32, 2.0, 1.0, 1.0].map(f32::ln);
        for (min_p, kept) in [(0.0, 4), (0.2, 4), (0.3, 2), (0.6, 1), (1.0, 1)] {
            let drawn = draws(Sampling { min_p, ..Sampling::default() }, &logits, 500);
            assert_eq!(drawn.iter().max(), Some(&(kept - 1)), "min_p {min_p}");
        }
    }

    #[test]
    fn penalties_and_biases_change_the_logits_as_their_formulas_say() {
        let greedy = Sampling::greedy();
        // Token 0 is in the prompt: 3 / 2 and 2 are compared, then -1 · 2 and -1.5.
        let repetition = Sampling { repetition_penalty: 2.0, ..greedy.clone() };
        let mut sampler = Sampler::new(repetition.clone(), &[0]).unwrap();
        assert_eq!(sampler.draw(&[3.0, 2.0]).id, 1);
        let mut sampler = Sampler::new(repetition, &[0]).unwrap();
        assert_eq!(sampler.draw(&[-1.0, -1.5]).id, 1);
        // Only the output counts: 3, 2, 1 after the draws of token 0.
        let frequency = Sampling { frequency_penalty: 1.0, ..greedy.clone() };
        let mut sampler = Sampler::new(frequency, &[0]).unwrap();
        let drawn: Vec<u32> = (0..4).map(|_| sampler.draw(&[3.0, 1.5]).id).collect();
        assert_eq!(drawn, [0, 0, 1, 0]);
        let presence = Sampling { presence_penalty: 1.0, ..greedy.clone() };
        let mut sampler = Sampler::new(presence, &[]).unwrap();
        let drawn: Vec<u32> = (0..3).map(|_| sampler.draw(&[3.0, 1.5]).id).collect();
        assert_eq!(drawn, [0, 0, 0], "a presence counts once");
        let bias = Sampling { logit_bias: vec![(0, -100.0), (9, 1.0)], ..greedy };
        assert_eq!(draws(bias, &[3.0, 1.5], 2), [1, 1]);
    }

    #[test]
    fn logprobs_are_those_of_the_unchanged_logits() {
        let sampling = Sampling {
            logprobs: Some(2),
            logit_bias: vec![(2, 100.0)],
            temperature: 0.5,
            ..Sampling::default()
        };
        let drawn = Sampler::new(sampling, &[]).unwrap().draw(&[4.0_f32, 2.0, 1.0, 1.0].map(f32::ln));
        assert_eq!(drawn.id, 2);
        let close = |found: f32, probability: f32| (found - probability.ln()).abs() < 1e-6;
        assert!(drawn.logprob.is_some_and(|logprob| close(logprob, 0.125)), "{drawn:?}");
        let [first, second] = drawn.top_logprobs[..] else { panic!("{drawn:?}") };
        assert_eq!((first.id, second.id), (0, 1));
        assert!(close(first.logprob, 0.5) && close(second.logprob, 0.25), "{drawn:?}");
    }
}
