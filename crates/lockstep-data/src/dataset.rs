//! A range of tokens cut into training windows, or a blend of several, and the micro-batches made of them.
//!
//! A window is up to `seq_len + 1` tokens: its inputs are all but the last, its labels all but the first. Neighbouring
//! windows share one token, so that each token but the very first is predicted exactly once. Sample `i` of a blend is a
//! pure function of the weights, the seed and `i`, as that of a single source is.

use std::{ops::Range, sync::Arc};

use crate::{
    batch::{IGNORE_LABEL, MicroBatch},
    blend::Blend,
    error::{DataError, Result},
    order::SampleOrder,
    packing::{Packing, Windows, keep_apart},
    supervision::Supervision,
    tokens::Tokens,
};

/// How a range of tokens is cut into windows and in which order they are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowOptions {
    /// Inputs (and labels) per window.
    pub seq_len: usize,
    /// The order of the windows.
    pub order: SampleOrder,
    /// What happens to the tokens after the last full window.
    pub tail: Tail,
    /// How documents are laid into windows.
    pub packing: Packing,
}

/// What happens to the tokens after the last full window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tail {
    /// They are left out: the way to train.
    Drop,
    /// They are a window too, padded with id 0 and masked labels, if at least one of them can be
    /// predicted: the way to evaluate.
    Pad,
}

/// Windows to draw samples from; cheap to clone.
#[derive(Debug, Clone)]
pub struct Dataset {
    sources: Arc<[Source]>,
    blend: Arc<Blend>,
    seq_len: usize,
}

/// The windows over one range of tokens.
#[derive(Debug, Clone)]
struct Source {
    tokens: Arc<Tokens>,
    range: Range<u64>,
    windows: Windows,
    supervision: Option<Supervision>,
    options: WindowOptions,
}

/// Where a sample is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Which source of a blend.
    pub source: usize,
    /// How often all its windows have been read before.
    pub epoch: u64,
    /// The window.
    pub window: u64,
}

impl Dataset {
    /// The windows of `range` of `tokens`. `what` names the set in messages: "the training set".
    ///
    /// # Errors
    /// [`DataError::TooFewTokens`] if there is no window; a `seq_len` of zero; a range beyond the tokens.
    pub fn new(tokens: Arc<Tokens>, range: Range<u64>, options: WindowOptions, what: &str) -> Result<Self> {
        if options.seq_len == 0 {
            return Err(DataError::OutOfRange {
                name: "seq_len",
                value: "0".into(),
                allowed: "1 or more".into(),
            });
        }
        if range.start > range.end || range.end > tokens.tokens() {
            return Err(DataError::OutOfRange {
                name: "token range",
                value: format!("{range:?}"),
                allowed: format!("within 0..{}", tokens.tokens()),
            });
        }
        let (windows, supervision) = Windows::new(&tokens, range.clone(), options);
        if windows.count() == 0 {
            if let Some(supervision) = supervision.filter(|supervision| !supervision.is_complete()) {
                let (what, seq_len) = (what.to_owned(), options.seq_len);
                return Err(DataError::NoAnswers { what, seq_len, supervision });
            }
            let is_padded = options.tail == Tail::Pad || options.packing == Packing::WholeDocuments;
            return Err(DataError::TooFewTokens {
                what: what.to_owned(),
                tokens: range.end - range.start,
                needed_tokens: if is_padded { 2 } else { options.seq_len as u64 + 1 },
                seq_len: options.seq_len,
            });
        }
        let source = Source { tokens, range, windows, supervision, options };
        Ok(Self { sources: [source].into(), blend: Blend::new(&[1.0]).into(), seq_len: options.seq_len })
    }

    /// Samples of several data sets, as often as their weights say: see [`Dataset::share`]. Each is read in an order
    /// of its own, and begins again when it is used up.
    ///
    /// # Errors
    /// No data set, weights that are not positive numbers, windows of different lengths.
    pub fn blend(parts: &[(Self, f64)]) -> Result<Self> {
        let out_of_range = |name, value, allowed: &str| {
            Err(DataError::OutOfRange { name, value, allowed: allowed.to_owned() })
        };
        let Some((first, _)) = parts.first() else {
            return out_of_range("the number of sources", "0".to_owned(), "1 or more");
        };
        let mut sources = Vec::new();
        let mut weights = Vec::new();
        for (part, weight) in parts {
            if !(weight.is_finite() && *weight > 0.0) {
                return out_of_range("the weight of a source", weight.to_string(), "a number above 0");
            }
            if part.seq_len != first.seq_len {
                return out_of_range("seq_len", part.seq_len.to_string(), &first.seq_len.to_string());
            }
            for (i, source) in part.sources.iter().enumerate() {
                let order = source.options.order.of_source(sources.len() as u64);
                sources.push(Source { options: WindowOptions { order, ..source.options }, ..source.clone() });
                weights.push(weight * part.share(i));
            }
        }
        let (blend, seq_len) = (Blend::new(&weights).into(), first.seq_len);
        Ok(Self { sources: sources.into(), blend, seq_len })
    }

    /// How many windows there are in all sources together: the samples of one epoch, where there is one source.
    pub fn windows(&self) -> u64 {
        self.sources.iter().map(|source| source.windows.count()).sum()
    }

    /// How many tokens the windows are cut from.
    pub fn tokens(&self) -> u64 {
        self.sources.iter().map(|source| source.range.end - source.range.start).sum()
    }

    /// What is predicted and what was left out; none where there are no prompts, so that every token counts.
    pub fn supervision(&self) -> Option<Supervision> {
        let parts = || self.sources.iter().map(|source| (source, source.supervision));
        parts().any(|(_, part)| part.is_some()).then(|| {
            let mut all = Supervision::default();
            for (source, part) in parts() {
                let tokens = source.range.end - source.range.start;
                let labels = tokens.saturating_sub(1);
                all += part.unwrap_or(Supervision { tokens, labels, ..Supervision::default() });
            }
            all
        })
    }

    /// Inputs per window.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// How many sources there are; one, unless this is a blend.
    pub fn sources(&self) -> usize {
        self.sources.len()
    }

    /// The share of all samples that come from `source`: after any number of them, the count is off by less than one.
    pub fn share(&self, source: usize) -> f64 {
        self.blend.share(source)
    }

    /// How often every window of `source` has been read after `samples` samples of the data set.
    pub fn epochs(&self, source: usize, samples: u64) -> f64 {
        samples as f64 * self.share(source) / self.sources[source].windows.count() as f64
    }

    /// The share of all positions in windows that hold a token, and not padding.
    pub fn filled(&self) -> f64 {
        let filled: u64 = self
            .sources
            .iter()
            .map(|source| match &source.windows {
                Windows::Even { range, count, seq_len } => {
                    (count * seq_len).min((range.end - range.start).saturating_sub(1))
                }
                Windows::Listed(windows) => {
                    windows.iter().map(|&(_, length)| u64::from(length).min(self.seq_len as u64)).sum()
                }
            })
            .sum();
        filled as f64 / (self.windows() * self.seq_len as u64) as f64
    }

    /// Where global sample number `sample` is found: a pure function, the same on all ranks.
    pub fn locate(&self, sample: u64) -> Place {
        let (source, index) = self.blend.locate(sample);
        let Source { windows, options, .. } = &self.sources[source];
        let (epoch, window) = options.order.locate(index, windows.count());
        Place { source, epoch, window }
    }

    /// Fills `batch` with the samples of a range, one row each. What `batch` held is forgotten and its
    /// memory used again: batches of one size cost no allocation after the first.
    ///
    /// # Errors
    /// [`DataError::TokenOutOfRange`] for an id that no embedding belongs to.
    pub fn fill(&self, samples: Range<u64>, batch: &mut MicroBatch) -> Result<()> {
        batch.clear(self.seq_len);
        for sample in samples {
            self.push_sample(sample, batch)?;
        }
        Ok(())
    }

    fn push_sample(&self, sample: u64, batch: &mut MicroBatch) -> Result<()> {
        let Place { source, window, .. } = self.locate(sample);
        let Source { tokens, windows, options, .. } = &self.sources[source];
        let (row, end) = (batch.ids.len(), batch.ids.len() + self.seq_len);
        let window = windows.tokens_of(window);
        tokens.read(window.clone(), &mut batch.ids)?;
        // An id fits in an i32: it was checked against a vocabulary that is below 2^31.
        batch.labels.extend(batch.ids[row + 1..].iter().map(|&id| id as i32));
        for context in tokens.contexts(window.start + 1..window.end) {
            let first = row + (context.start - window.start) as usize - 1;
            batch.labels[first..][..(context.end - context.start) as usize].fill(IGNORE_LABEL);
        }
        // The last token is a label only, except that a padded window has room for it as an input.
        batch.ids.resize(end, 0);
        batch.labels.resize(end, IGNORE_LABEL);
        batch.positions.extend(0..self.seq_len as u32);
        batch.document_starts.resize(end, 0);
        if options.packing != Packing::Stream {
            keep_apart(batch, tokens, window);
        }
        batch.sample_numbers.push(sample);
        batch.sequences += 1;
        Ok(())
    }
}

/// Cuts `tokens` tokens into a training range and, after it, the last `fraction` of them for validation.
/// nanoGPT's split is a fraction of 0.1.
///
/// # Errors
/// A fraction outside `0.0..1.0`.
pub fn split_validation(tokens: u64, fraction: f64) -> Result<(Range<u64>, Range<u64>)> {
    if !(0.0..1.0).contains(&fraction) {
        return Err(DataError::OutOfRange {
            name: "validation fraction",
            value: fraction.to_string(),
            allowed: "0 or more, and less than 1".into(),
        });
    }
    let border = (tokens as f64 * (1.0 - fraction)) as u64;
    Ok((0..border.min(tokens), border.min(tokens)..tokens))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_split_is_nanogpts() {
        // int(n * 0.9) for the 1,115,394 characters of its Shakespeare.
        assert_eq!(split_validation(1_115_394, 0.1).unwrap(), (0..1_003_854, 1_003_854..1_115_394));
        assert_eq!(split_validation(7, 0.0).unwrap(), (0..7, 7..7));
        for fraction in [-0.1, 1.0, f64::NAN] {
            assert!(split_validation(7, fraction).is_err(), "{fraction}");
        }
    }
}
