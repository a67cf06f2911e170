//! A range of a token file cut into training windows, and the micro-batches made of them.
//!
//! Window `w` is the `seq_len + 1` tokens from `w * seq_len` on: its inputs are all but the last, its
//! labels all but the first. Neighbouring windows share one token, so that each token but the very first
//! is predicted exactly once.

use std::{ops::Range, sync::Arc};

use crate::{
    batch::{IGNORE_LABEL, MicroBatch},
    error::{DataError, Result},
    order::SampleOrder,
    token_file::TokenFile,
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

/// Windows over a range of a token file; cheap to clone.
#[derive(Debug, Clone)]
pub struct Dataset {
    tokens: Arc<TokenFile>,
    range: Range<u64>,
    options: WindowOptions,
    windows: u64,
}

impl Dataset {
    /// The windows of `range` of `tokens`. `what` names the set in messages: "the training set".
    ///
    /// # Errors
    /// [`DataError::TooFewTokens`] if there is no window; a `seq_len` of zero; a range beyond the file.
    pub fn new(
        tokens: Arc<TokenFile>,
        range: Range<u64>,
        options: WindowOptions,
        what: &str,
    ) -> Result<Self> {
        let seq_len = options.seq_len as u64;
        if seq_len == 0 {
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
        let count = range.end - range.start;
        let predictable = count.saturating_sub(1);
        let (windows, needed_tokens) = match options.tail {
            Tail::Drop => (predictable / seq_len, seq_len + 1),
            Tail::Pad => (predictable.div_ceil(seq_len), 2),
        };
        if windows == 0 {
            return Err(DataError::TooFewTokens {
                what: what.to_owned(),
                tokens: count,
                needed_tokens,
                seq_len: options.seq_len,
            });
        }
        Ok(Self { tokens, range, options, windows })
    }

    /// How many windows there are: the samples of one epoch.
    pub fn windows(&self) -> u64 {
        self.windows
    }

    /// How many tokens the windows are cut from.
    pub fn tokens(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Inputs per window.
    pub fn seq_len(&self) -> usize {
        self.options.seq_len
    }

    /// The (epoch, window) that global sample number `sample` is: a pure function, the same on all ranks.
    pub fn locate(&self, sample: u64) -> (u64, u64) {
        self.options.order.locate(sample, self.windows)
    }

    /// Fills `batch` with the samples of a range, one row each. What `batch` held is forgotten and its
    /// memory used again: batches of one size cost no allocation after the first.
    ///
    /// # Errors
    /// [`DataError::BadTokenFile`] if the file turns out to be damaged.
    pub fn fill(&self, samples: Range<u64>, batch: &mut MicroBatch) -> Result<()> {
        batch.clear(self.options.seq_len);
        for sample in samples {
            self.push_sample(sample, batch)?;
        }
        Ok(())
    }

    fn push_sample(&self, sample: u64, batch: &mut MicroBatch) -> Result<()> {
        let seq_len = self.options.seq_len;
        let (_, window) = self.locate(sample);
        let start = self.range.start + window * seq_len as u64;
        let end = self.range.end.min(start + seq_len as u64 + 1);

        let row = batch.ids.len();
        self.tokens.read(start..end, &mut batch.ids)?;
        // An id fits in an i32: `TokenFile` checks it against a vocabulary that is below 2^31.
        batch.labels.extend(batch.ids[row + 1..].iter().map(|&id| id as i32));
        // The last token is a label only, except that a padded window has room for it as an input.
        batch.ids.truncate(row + seq_len);
        batch.ids.resize(row + seq_len, 0);
        batch.labels.resize(row + seq_len, IGNORE_LABEL);
        batch.positions.extend(0..seq_len as u32);
        batch.document_starts.resize(row + seq_len, 0);
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
