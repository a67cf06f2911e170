//! Beam search: the most likely texts of those that begin with the most likely beginnings, as `transformers` defines it.

use std::collections::HashMap;

use crate::{Batch, InferError, LoadedModel, NewTokens, SequenceId, sample::log_probabilities};

/// Settings of a beam search.
#[derive(Debug, Clone, PartialEq)]
pub struct BeamOptions {
    /// Number of texts that are continued at once, and of those that are returned.
    pub beams: usize,
    /// Largest number of tokens to generate.
    pub max_new_tokens: usize,
    /// Exponent of the number of tokens by which the log-probability of a text is divided: more than 0 prefers long texts.
    pub length_penalty: f32,
    /// True ends the search when there are as many complete texts as beams; false when, in addition, no beam at its present length
    /// would be better than the worst of them.
    pub early_stopping: bool,
    /// Tokens that complete a text.
    pub end: Vec<u32>,
}

impl BeamOptions {
    /// Checks that a prompt can be searched for.
    ///
    /// # Errors
    /// If the prompt is empty, its tokens and the new ones exceed the model's positions, or there are no beams.
    pub fn check(&self, model: &LoadedModel, prompt: &[u32]) -> Result<(), InferError> {
        if prompt.is_empty() {
            return Err(InferError::EmptyPrompt);
        }
        let allowed = model.config.max_position_embeddings();
        let tokens = prompt.len().saturating_add(self.max_new_tokens);
        if tokens > allowed {
            return Err(InferError::TooLong { tokens, allowed });
        }
        if self.beams == 0 {
            return Err(InferError::OutOfRange {
                name: "beams",
                value: "0".to_owned(),
                allowed: "1 or more",
            });
        }
        Ok(())
    }
}

/// A text that a beam search has found.
#[derive(Debug, Clone, PartialEq)]
pub struct Hypothesis {
    /// Generated tokens, with the one that completes the text.
    pub tokens: Vec<u32>,
    /// Log-probability of the tokens, divided by the power of their number.
    pub score: f32,
}

/// A text that is continued.
struct Beam {
    sequence: SequenceId,
    tokens: Vec<u32>,
    log_probability: f32,
}

/// A beam with one more token.
#[derive(Debug, Clone, Copy)]
struct Continuation {
    beam: usize,
    token: u32,
    log_probability: f32,
}

/// Returns the best continuations of a prompt, the best one first.
///
/// # Errors
/// As for [`BeamOptions::check`], or if memory runs out.
pub fn beam_search(
    model: &LoadedModel,
    prompt: &[u32],
    options: &BeamOptions,
) -> Result<Vec<Hypothesis>, InferError> {
    options.check(model, prompt)?;
    let BeamOptions { beams, max_new_tokens, .. } = *options;
    let tokens = prompt.len() + max_new_tokens;
    // While beams are copied, an old one and a new one have a last page of their own each.
    let mut batch = Batch::new(model, beams * (model.whole_pages(tokens) + model.page_tokens()))?;
    // The last token is not read.
    let sequence = batch.open((tokens - 1).max(prompt.len()));
    let mut logits = vec![batch.read_prompt(sequence, prompt)?.to_vec()];
    let mut running = vec![Beam { sequence, tokens: Vec::new(), log_probability: 0.0 }];
    let mut finished: Vec<Hypothesis> = Vec::new();
    for length in 1..=max_new_tokens {
        let is_last = length == max_new_tokens;
        let found = continuations(&running, &logits, options);
        let is_complete = |token: u32| is_last || options.end.contains(&token);
        let completed = found.iter().take(beams).filter(|found| is_complete(found.token));
        finished.extend(completed.map(|found| Hypothesis {
            tokens: [&running[found.beam].tokens[..], &[found.token]].concat(),
            score: found.log_probability / (length as f32).powf(options.length_penalty),
        }));
        // Stable: of equal scores, those that were found first stay.
        finished.sort_by(|a, b| b.score.total_cmp(&a.score));
        finished.truncate(beams);
        let goes_on = found.iter().filter(|found| !is_complete(found.token)).take(beams);
        let goes_on: Vec<Continuation> = goes_on.copied().collect();
        if is_last || goes_on.is_empty() || is_settled(&finished, goes_on[0], length, options) {
            break;
        }
        running = advance(&mut batch, running, &goes_on)?;
        let last: Vec<[u32; 1]> =
            running.iter().map(|beam| [beam.tokens.last().copied().unwrap_or_default()]).collect();
        let new: Vec<NewTokens<'_>> = running
            .iter()
            .zip(&last)
            .map(|(beam, ids)| NewTokens { sequence: beam.sequence, ids, wants_logits: true })
            .collect();
        logits = batch.read(&new)?.map(<[f32]>::to_vec).collect();
    }
    Ok(finished)
}

/// Returns the most likely continuations of all beams, enough of them for every beam to go on if each of the end tokens is among
/// them.
fn continuations(running: &[Beam], logits: &[Vec<f32>], options: &BeamOptions) -> Vec<Continuation> {
    let count = options.beams * (1 + options.end.len()).max(2);
    let order = |a: &Continuation, b: &Continuation| {
        b.log_probability.total_cmp(&a.log_probability).then(a.beam.cmp(&b.beam)).then(a.token.cmp(&b.token))
    };
    let mut best = Vec::new();
    for (beam, (running, logits)) in running.iter().zip(logits).enumerate() {
        let mut of_beam: Vec<Continuation> = log_probabilities(logits)
            .zip(0..)
            .map(|(log_probability, token)| Continuation {
                beam,
                token,
                log_probability: running.log_probability + log_probability,
            })
            .collect();
        if count < of_beam.len() {
            of_beam.select_nth_unstable_by(count, order);
            of_beam.truncate(count);
        }
        best.extend(of_beam);
    }
    best.sort_unstable_by(order);
    best.truncate(count);
    best
}

/// Returns true if no beam can lead to a text that is better than those which are complete.
fn is_settled(finished: &[Hypothesis], best: Continuation, length: usize, options: &BeamOptions) -> bool {
    let Some(worst) = finished.last().filter(|_| finished.len() == options.beams) else { return false };
    options.early_stopping
        || best.log_probability / (length as f32).powf(options.length_penalty) <= worst.score
}

/// Makes continuations the running beams: the last one of a beam takes its sequence over, the others get a copy.
fn advance(
    batch: &mut Batch<'_>,
    running: Vec<Beam>,
    goes_on: &[Continuation],
) -> Result<Vec<Beam>, InferError> {
    let mut uses: HashMap<usize, usize> = HashMap::new();
    goes_on.iter().for_each(|next| *uses.entry(next.beam).or_default() += 1);
    for (index, beam) in running.iter().enumerate() {
        if !uses.contains_key(&index) {
            batch.close(beam.sequence);
        }
    }
    goes_on
        .iter()
        .map(|next| {
            let Beam { sequence, ref tokens, .. } = running[next.beam];
            let left = uses.entry(next.beam).or_default();
            *left -= 1;
            let sequence = if *left == 0 { sequence } else { batch.fork(sequence)? };
            let tokens = [&tokens[..], &[next.token]].concat();
            Ok(Beam { sequence, tokens, log_probability: next.log_probability })
        })
        .collect()
}
