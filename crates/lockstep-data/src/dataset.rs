//! Windows over a range of tokens, or over a blend of several sources, and the micro-batches made of them.
//!
//! A window has up to `seq_len + 1` tokens: its inputs are all but the last, its labels all but the first. Adjacent
//! windows share one token, so that each token but the very first is predicted exactly once. Sample `i` is a pure
//! function of the seed and `i`, and for a blend also of the weights.

use std::{ops::Range, sync::Arc};

use crate::{
    batch::{IGNORE_LABEL, MicroBatch},
    blend::Blend,
    error::{DataError, Result},
    packing::{Packing, Tail, WindowOptions, Windows, separate_documents},
    supervision::Supervision,
    tokens::Tokens,
};

/// Windows from which samples are drawn: one source or a blend. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Dataset {
    sources: Arc<[Source]>,
    blend: Arc<Blend>,
    seq_len: usize,
}

/// Windows over one range of tokens.
#[derive(Debug, Clone)]
struct Source {
    tokens: Arc<Tokens>,
    range: Range<u64>,
    windows: Windows,
    supervision: Option<Supervision>,
    options: WindowOptions,
}

/// Location of a sample in the data set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleOrigin {
    /// Index of the source in the blend; 0 without a blend.
    pub source: usize,
    /// Number of complete passes over the source before this sample.
    pub epoch: u64,
    /// Index of the window in the source.
    pub window: u64,
}

impl Dataset {
    /// Cuts `range` of `tokens` into windows. `what` names the data set in messages, such as "the training set".
    ///
    /// # Errors
    /// If `range` holds too few tokens for a window, no window has a label, `seq_len` is zero, or `range` exceeds the
    /// tokens.
    pub fn new(tokens: Arc<Tokens>, range: Range<u64>, options: WindowOptions, what: &str) -> Result<Self> {
        if options.seq_len == 0 {
            return Err(DataError::out_of_range("seq_len", 0, "1 or more"));
        }
        if range.start > range.end || range.end > tokens.tokens() {
            let allowed = format!("within 0..{}", tokens.tokens());
            return Err(DataError::out_of_range("token range", format!("{range:?}"), allowed));
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

    /// Blends several data sets in proportion to their weights: see [`Dataset::share`]. Each source has its own sample
    /// order and starts over when all its windows have been read.
    ///
    /// # Errors
    /// If there is no data set, a weight is not a positive number, or the window lengths differ.
    pub fn blend(parts: &[(Self, f64)]) -> Result<Self> {
        let Some((first, _)) = parts.first() else {
            return Err(DataError::out_of_range("the number of sources", 0, "1 or more"));
        };
        let mut sources = Vec::new();
        let mut weights = Vec::new();
        for (part, weight) in parts {
            if !(weight.is_finite() && *weight > 0.0) {
                return Err(DataError::out_of_range("the weight of a source", weight, "a number above 0"));
            }
            if part.seq_len != first.seq_len {
                return Err(DataError::out_of_range("seq_len", part.seq_len, first.seq_len.to_string()));
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

    /// Returns the total number of windows over all sources. With a single source these are the samples of one epoch.
    pub fn windows(&self) -> u64 {
        self.sources.iter().map(|source| source.windows.count()).sum()
    }

    /// Returns the number of tokens that the windows are cut from.
    pub fn tokens(&self) -> u64 {
        self.sources.iter().map(|source| source.range.end - source.range.start).sum()
    }

    /// Returns which tokens are predicted and which were dropped. `None` if there are no prompts, so that every token
    /// is predicted.
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

    /// Returns the number of inputs per window.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Returns the number of sources; 1 without a blend.
    pub fn sources(&self) -> usize {
        self.sources.len()
    }

    /// Returns the fraction of all samples that come from `source`. After any number of samples, the count of a source
    /// differs from its share by less than one.
    pub fn share(&self, source: usize) -> f64 {
        self.blend.share(source)
    }

    /// Returns the number of epochs of `source` that the first `samples` samples of the data set cover.
    pub fn epochs(&self, source: usize, samples: u64) -> f64 {
        samples as f64 * self.share(source) / self.sources[source].windows.count() as f64
    }

    /// Returns the fraction of window positions that hold a token instead of padding, in (0, 1].
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

    /// Returns the location of global sample number `sample`: a pure function, equal on all ranks.
    pub fn locate(&self, sample: u64) -> SampleOrigin {
        let (source, index) = self.blend.locate(sample);
        let Source { windows, options, .. } = &self.sources[source];
        let (epoch, window) = options.order.locate(index, windows.count());
        SampleOrigin { source, epoch, window }
    }

    /// Fills `batch` with a range of samples, one row each. Overwrites the contents of `batch` and reuses its memory:
    /// batches of one size allocate nothing after the first.
    ///
    /// # Errors
    /// If an id is beyond the vocabulary.
    pub fn fill(&self, samples: Range<u64>, batch: &mut MicroBatch) -> Result<()> {
        batch.clear(self.seq_len);
        for sample in samples {
            self.push_sample(sample, batch)?;
        }
        Ok(())
    }

    fn push_sample(&self, sample: u64, batch: &mut MicroBatch) -> Result<()> {
        let SampleOrigin { source, window, .. } = self.locate(sample);
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
        // The last token is only a label. A padded window is shorter and has room for it as an input.
        batch.ids.resize(end, 0);
        batch.labels.resize(end, IGNORE_LABEL);
        batch.positions.extend(0..self.seq_len as u32);
        batch.document_starts.resize(end, 0);
        if options.packing != Packing::Stream {
            separate_documents(batch, tokens, window);
        }
        batch.sample_numbers.push(sample);
        batch.sequences += 1;
        Ok(())
    }
}

/// Splits `tokens` tokens into a training range and, after it, a validation range with the last `fraction` of them.
/// nanoGPT uses a fraction of 0.1.
///
/// # Errors
/// If `fraction` is outside `0.0..1.0`.
pub fn split_validation(tokens: u64, fraction: f64) -> Result<(Range<u64>, Range<u64>)> {
    if !(0.0..1.0).contains(&fraction) {
        let allowed = "0 or more, and less than 1";
        return Err(DataError::out_of_range("validation fraction", fraction, allowed));
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
