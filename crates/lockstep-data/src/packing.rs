//! Windows over a range of tokens: how documents are packed into them, and the masking that separates documents within a
//! window.
//!
//! A window has up to `seq_len + 1` tokens. Its labels are all but the first token, without those that are masked.

use std::{ops::Range, sync::Arc};

use crate::{
    batch::{IGNORE_LABEL, MicroBatch},
    order::SampleOrder,
    supervision::Supervision,
    tokens::Tokens,
};

/// Method of packing documents into windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Packing {
    /// Concatenated and cut at every window end. A token attends to everything before it in its window.
    #[default]
    Stream,
    /// Concatenated as in [`Stream`](Self::Stream), but documents are separated: a token attends only to its own
    /// document, positions restart at 0 in each document, and the first token of a document is never a label.
    Documents,
    /// Separated as in [`Documents`](Self::Documents), and not cut where possible. A window takes documents as long as
    /// the next one fits; the rest of it is padding. Only documents longer than a window are cut: text into several
    /// windows, a sample (a document with a prompt) at the end of its window.
    WholeDocuments,
}

/// Options for cutting a range of tokens into windows and ordering them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowOptions {
    /// Inputs (and labels) per window.
    pub seq_len: usize,
    /// Order in which windows are read.
    pub order: SampleOrder,
    /// Treatment of the tokens after the last full window.
    pub tail: Tail,
    /// Packing of documents into windows.
    pub packing: Packing,
}

/// Treatment of the tokens after the last full window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tail {
    /// Dropped, as usual in training.
    Drop,
    /// Kept as a window that is padded with id 0 and masked labels, if at least one of its tokens can be predicted; as
    /// usual in evaluation.
    Pad,
}

/// Windows over a range of tokens.
#[derive(Debug, Clone)]
pub(crate) enum Windows {
    /// Equal windows: window `w` begins `w * seq_len` tokens after the start of the range.
    Even { range: Range<u64>, seq_len: u64, count: u64 },
    /// First token and length of each window.
    Listed(Arc<[(u64, u32)]>),
}

impl Windows {
    /// Packs the documents in `range` into windows of at most `seq_len + 1` tokens. The last token of a window is only
    /// a label, and may be the first input of the next window. If there are prompts, windows without a label are
    /// dropped.
    pub(crate) fn new(
        tokens: &Tokens,
        range: Range<u64>,
        options: WindowOptions,
    ) -> (Self, Option<Supervision>) {
        let seq_len = options.seq_len as u64;
        if options.packing == Packing::WholeDocuments {
            let (windows, supervision) = WholeDocuments::new(tokens, seq_len).pack(range);
            let has_samples = supervision.samples > 0;
            let windows = Self::Listed(windows.into());
            return (windows, has_samples.then_some(supervision));
        }
        let predictable = (range.end - range.start).saturating_sub(1);
        let count = match options.tail {
            Tail::Drop => predictable / seq_len,
            Tail::Pad => predictable.div_ceil(seq_len),
        };
        let even = Self::Even { range: range.clone(), seq_len, count };
        if tokens.contexts(range).next().is_none() {
            return (even, None);
        }
        let borders = match options.packing {
            Packing::Stream => DocumentBoundaries::Ignored,
            Packing::Documents | Packing::WholeDocuments => DocumentBoundaries::Respected,
        };
        even.without_masked(tokens, borders)
    }

    /// Drops the windows without a label.
    fn without_masked(self, tokens: &Tokens, borders: DocumentBoundaries) -> (Self, Option<Supervision>) {
        let Self::Even { ref range, count, .. } = self else { return (self, None) };
        let mut supervision = Supervision { tokens: range.end - range.start, ..Supervision::default() };
        let mut kept = Vec::new();
        for window in (0..count).map(|window| self.tokens_of(window)) {
            let labels = labels_in(tokens, window.clone(), borders);
            supervision.labels += labels;
            if labels > 0 {
                kept.push((window.start, (window.end - window.start) as u32));
            }
        }
        supervision.masked_windows = count - kept.len() as u64;
        let windows = if supervision.masked_windows == 0 { self } else { Self::Listed(kept.into()) };
        (windows, Some(supervision))
    }

    pub(crate) fn count(&self) -> u64 {
        match self {
            Self::Even { count, .. } => *count,
            Self::Listed(windows) => windows.len() as u64,
        }
    }

    /// Returns the token range of a window.
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

/// Builder of the windows of [`Packing::WholeDocuments`].
struct WholeDocuments<'a> {
    tokens: &'a Tokens,
    /// Maximum tokens per window.
    longest: u64,
    windows: Vec<(u64, u32)>,
    /// Token range of the window that may still grow.
    open: Range<u64>,
    supervision: Supervision,
}

impl<'a> WholeDocuments<'a> {
    fn new(tokens: &'a Tokens, seq_len: u64) -> Self {
        let supervision = Supervision::default();
        Self { tokens, longest: seq_len + 1, windows: Vec::new(), open: 0..0, supervision }
    }

    fn pack(mut self, range: Range<u64>) -> (Vec<(u64, u32)>, Supervision) {
        self.supervision.tokens = range.end - range.start;
        self.open = range.start..range.start;
        let mut start = range.start;
        let starts = self.tokens.document_starts(range.start + 1..range.end);
        for end in starts.chain(std::iter::once(range.end)) {
            let document = start..end;
            if self.tokens.contexts(document.clone()).next().is_some() {
                self.add_sample(document);
            } else {
                self.add_text(document);
            }
            start = end;
        }
        self.close();
        (self.windows, self.supervision)
    }

    /// Adds a document without a prompt. A document longer than a window is cut into several.
    fn add_text(&mut self, text: Range<u64>) {
        if text.end - self.open.start > self.longest {
            self.close();
            self.open = text.start..text.start;
        }
        while text.end - self.open.start > self.longest {
            self.push(self.open.start..self.open.start + self.longest);
            self.open.start += self.longest - 1;
        }
        // The last token of a cut document may have been predicted in the previous window already.
        let is_used_up = text.end - self.open.start == 1 && text.start < self.open.start;
        self.open = if is_used_up { text.end..text.end } else { self.open.start..text.end };
    }

    /// Adds a document with a prompt. An answer without its prompt is useless, so a long sample is truncated at the end
    /// of its window. A sample without a label is dropped.
    fn add_sample(&mut self, sample: Range<u64>) {
        self.supervision.samples += 1;
        let whole = sample.clone();
        let end = sample.end.min(sample.start + self.longest);
        match first_answer(self.tokens, whole) {
            None => self.supervision.without_answer += 1,
            Some(first) if first >= end => {
                let seq_len_for_one_more = first - sample.start;
                let none = Supervision::default();
                self.supervision += Supervision { answer_out_of_window: 1, seq_len_for_one_more, ..none };
            }
            Some(_) if end < sample.end => {
                self.supervision.truncated += 1;
                self.close();
                self.push(sample.start..end);
                self.open = sample.end..sample.end;
                return;
            }
            Some(_) => return self.add_text(sample),
        }
        self.close();
        self.open = sample.end..sample.end;
    }

    fn close(&mut self) {
        self.push(self.open.clone());
    }

    /// Appends a window. A window of a single token predicts nothing and is dropped.
    fn push(&mut self, window: Range<u64>) {
        if window.end - window.start > 1 {
            self.supervision.labels += labels_in(self.tokens, window.clone(), DocumentBoundaries::Respected);
            self.windows.push((window.start, (window.end - window.start) as u32));
        }
    }
}

/// Treatment of document boundaries in labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DocumentBoundaries {
    /// Ignored: the first token of a document is a label of the document before it.
    Ignored,
    /// Respected: the first token of a document is never a label.
    Respected,
}

/// Returns the number of labels of `window`: of all its tokens but the first, those that are not masked and, if
/// boundaries are kept, do not begin a document.
fn labels_in(tokens: &Tokens, window: Range<u64>, borders: DocumentBoundaries) -> u64 {
    let predicted = window.start + 1..window.end;
    if predicted.is_empty() {
        return 0;
    }
    let contexts: Vec<Range<u64>> = tokens.contexts(predicted.clone()).collect();
    let read: u64 = contexts.iter().map(|context| context.end - context.start).sum();
    let mut starts = Vec::new();
    if borders == DocumentBoundaries::Respected {
        starts.extend(tokens.document_starts(predicted.clone()));
        // An empty document has the same start as the next one.
        starts.dedup();
        starts.retain(|start| !contexts.iter().any(|context| context.contains(start)));
    }
    predicted.end - predicted.start - read - starts.len() as u64
}

/// Returns the first token of `document`, other than its very first, that belongs to an answer.
fn first_answer(tokens: &Tokens, document: Range<u64>) -> Option<u64> {
    let mut first = document.start + 1;
    for context in tokens.contexts(first..document.end) {
        if context.start > first {
            break;
        }
        first = context.end;
    }
    (first < document.end).then_some(first)
}

/// Separates the documents in the last row of `batch`. The row holds the tokens of `window` and then padding, which
/// counts as a separate document.
pub(crate) fn separate_documents(batch: &mut MicroBatch, tokens: &Tokens, window: Range<u64>) {
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
    // Positions inside a document are still zero here.
    let mut start = 0;
    for (at, begin) in begins.iter_mut().enumerate() {
        start = start.max(*begin);
        *begin = start;
        batch.positions[row + at] = at as u32 - start;
    }
}
