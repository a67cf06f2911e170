//! How documents are laid into windows, and what keeps them apart there.

use std::{ops::Range, sync::Arc};

use crate::{
    batch::{IGNORE_LABEL, MicroBatch},
    dataset::{Tail, WindowOptions},
    tokens::Tokens,
};

/// How documents are laid into windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Packing {
    /// One after another, cut wherever a window ends; a token sees whatever comes before it in its window.
    #[default]
    Stream,
    /// As [`Stream`](Self::Stream), but documents are kept apart: a token sees only its own, positions begin at 0 with
    /// each, and the first token of a document is the label of none.
    Documents,
    /// Kept apart as [`Documents`](Self::Documents) are, and not cut where that can be avoided: a window takes
    /// documents as long as the next one fits, and what is left of it is padding. Only what is longer than a window is
    /// cut.
    WholeDocuments,
}

/// The windows over a range of tokens.
#[derive(Debug, Clone)]
pub(crate) enum Windows {
    /// Window `w` begins `w * seq_len` tokens after the start of the range.
    Even { range: Range<u64>, seq_len: u64, count: u64 },
    /// First token and length of each.
    Listed(Arc<[(u64, u32)]>),
}

impl Windows {
    /// Lays the documents in `range` into windows of at most `seq_len + 1` tokens. The last token of a window is a
    /// label only, and may be the first of the next one's inputs.
    pub(crate) fn new(tokens: &Tokens, range: Range<u64>, options: WindowOptions) -> Self {
        let seq_len = options.seq_len as u64;
        if options.packing == Packing::WholeDocuments {
            return Self::Listed(whole_documents(tokens, range, seq_len).into());
        }
        let predictable = (range.end - range.start).saturating_sub(1);
        let count = match options.tail {
            Tail::Drop => predictable / seq_len,
            Tail::Pad => predictable.div_ceil(seq_len),
        };
        Self::Even { range, seq_len, count }
    }

    pub(crate) fn count(&self) -> u64 {
        match self {
            Self::Even { count, .. } => *count,
            Self::Listed(windows) => windows.len() as u64,
        }
    }

    /// The tokens of a window.
    pub(crate) fn tokens_of(&self, window: u64) -> Range<u64> {
        match self {
            Self::Even { range, seq_len, .. } => {
                let start = range.start + window * seq_len;
                start..range.end.min(start + seq_len + 1)
            }
            Self::Listed(windows) => {
                let (start, length) = windows[window as usize];
                start..start + u64::from(length)
            }
        }
    }
}

fn whole_documents(tokens: &Tokens, range: Range<u64>, seq_len: u64) -> Vec<(u64, u32)> {
    let mut windows = Vec::new();
    let mut push = |window: &Range<u64>| {
        // A token alone predicts nothing.
        if window.end - window.start > 1 {
            windows.push((window.start, (window.end - window.start) as u32));
        }
    };
    let mut open = range.start..range.start;
    let mut start = range.start;
    let borders = tokens.document_starts(range.start + 1..range.end).chain(std::iter::once(range.end));
    for end in borders {
        if end - open.start > seq_len + 1 {
            push(&open);
            open = start..start;
        }
        while end - open.start > seq_len + 1 {
            push(&(open.start..open.start + seq_len + 1));
            open.start += seq_len;
        }
        // Of a document that was cut, the last token may have been predicted already.
        open = if end - open.start == 1 && start < open.start { end..end } else { open.start..end };
        start = end;
    }
    push(&open);
    windows
}

/// Keeps the documents of the newest row of `batch` apart. The row holds the tokens of `window` and, after them,
/// padding, which is a document of its own.
pub(crate) fn keep_apart(batch: &mut MicroBatch, tokens: &Tokens, window: Range<u64>) {
    let (row, seq_len) = (batch.labels.len() - batch.seq_len, batch.seq_len);
    let padding = (window.end - window.start) as usize;
    let begins = &mut batch.document_starts[row..];
    for start in tokens.document_starts(window.start + 1..window.end) {
        let start = (start - window.start) as usize;
        batch.labels[row + start - 1] = IGNORE_LABEL;
        if start < seq_len {
            begins[start] = start as u32;
        }
    }
    if padding < seq_len {
        begins[padding] = padding as u32;
    }
    // Where no document begins there is a zero still.
    let mut start = 0;
    for (at, begin) in begins.iter_mut().enumerate() {
        start = start.max(*begin);
        *begin = start;
        batch.positions[row + at] = at as u32 - start;
    }
}
