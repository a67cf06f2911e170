//! Counts of the labels in windows, and of the samples dropped from a data set because they have none.

use std::ops::{AddAssign, Range};

use crate::tokens::Tokens;

/// Counts of supervised tokens and of dropped samples in a data set with prompts.
///
/// A *sample* is a document with a prompt: a prompt with its completion, or a chat.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Supervision {
    /// Number of tokens that the windows were cut from.
    pub tokens: u64,
    /// Number of tokens that are a label of some window.
    pub labels: u64,
    /// Number of samples; 0 where windows ignore document boundaries.
    pub samples: u64,
    /// Samples dropped because none of their tokens belongs to an answer.
    pub without_answer: u64,
    /// Samples dropped because their answer begins beyond the end of a window.
    pub answer_out_of_window: u64,
    /// Samples longer than a window, truncated at its end.
    pub truncated: u64,
    /// Windows dropped because all their labels are masked.
    pub masked_windows: u64,
    /// Smallest `seq_len` at which one of the samples in `answer_out_of_window` has a label; 0 if there are none.
    pub seq_len_for_one_more: u64,
}

impl Supervision {
    /// Returns true if no sample or window was dropped or truncated.
    pub fn is_complete(&self) -> bool {
        self.without_answer + self.answer_out_of_window + self.truncated + self.masked_windows == 0
    }
}

impl AddAssign for Supervision {
    fn add_assign(&mut self, other: Self) {
        self.tokens += other.tokens;
        self.labels += other.labels;
        self.samples += other.samples;
        self.without_answer += other.without_answer;
        self.answer_out_of_window += other.answer_out_of_window;
        self.truncated += other.truncated;
        self.masked_windows += other.masked_windows;
        let shortest = [self.seq_len_for_one_more, other.seq_len_for_one_more];
        self.seq_len_for_one_more = shortest.into_iter().filter(|&length| length > 0).min().unwrap_or(0);
    }
}

/// Treatment of document boundaries in labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Borders {
    /// Ignored: the first token of a document is a label of the document before it.
    Crossed,
    /// Respected: the first token of a document is never a label.
    Kept,
}

/// Returns the number of labels of `window`: of all its tokens but the first, those that are not masked and, if
/// boundaries are kept, do not begin a document.
pub(crate) fn labels_in(tokens: &Tokens, window: Range<u64>, borders: Borders) -> u64 {
    let predicted = window.start + 1..window.end;
    if predicted.is_empty() {
        return 0;
    }
    let contexts: Vec<Range<u64>> = tokens.contexts(predicted.clone()).collect();
    let read: u64 = contexts.iter().map(|context| context.end - context.start).sum();
    let mut starts = Vec::new();
    if borders == Borders::Kept {
        starts.extend(tokens.document_starts(predicted.clone()));
        // An empty document has the same start as the next one.
        starts.dedup();
        starts.retain(|start| !contexts.iter().any(|context| context.contains(start)));
    }
    predicted.end - predicted.start - read - starts.len() as u64
}

/// Returns the first token of `document`, other than its very first, that belongs to an answer.
pub(crate) fn first_answer(tokens: &Tokens, document: Range<u64>) -> Option<u64> {
    let mut first = document.start + 1;
    for context in tokens.contexts(first..document.end) {
        if context.start > first {
            break;
        }
        first = context.end;
    }
    (first < document.end).then_some(first)
}
