//! Which tokens of a window are labels, and what was left out of a data set because none of its tokens is one.

use std::ops::{AddAssign, Range};

use crate::tokens::Tokens;

/// What is trained on of data that has prompts, and what was left out.
///
/// A *sample* is a document with a prompt: a prompt with its completion, or a chat.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Supervision {
    /// The tokens that windows were cut from.
    pub tokens: u64,
    /// How many of them are a label of some window.
    pub labels: u64,
    /// How many samples there are; 0 where windows ignore the borders of documents.
    pub samples: u64,
    /// Samples that were left out because no token of theirs is an answer.
    pub without_answer: u64,
    /// Samples that were left out because their answer begins after the end of a window.
    pub answer_beyond: u64,
    /// Samples that are longer than a window, and end with it.
    pub truncated: u64,
    /// Windows that were left out because none of their tokens is a label.
    pub masked_windows: u64,
    /// The shortest window that holds some answer of the samples in `answer_beyond`; 0 if there are none.
    pub seq_len_for_one_more: u64,
}

impl Supervision {
    /// Whether anything was left out.
    pub fn is_complete(&self) -> bool {
        self.without_answer + self.answer_beyond + self.truncated + self.masked_windows == 0
    }
}

impl AddAssign for Supervision {
    fn add_assign(&mut self, other: Self) {
        self.tokens += other.tokens;
        self.labels += other.labels;
        self.samples += other.samples;
        self.without_answer += other.without_answer;
        self.answer_beyond += other.answer_beyond;
        self.truncated += other.truncated;
        self.masked_windows += other.masked_windows;
        let shortest = [self.seq_len_for_one_more, other.seq_len_for_one_more];
        self.seq_len_for_one_more = shortest.into_iter().filter(|&length| length > 0).min().unwrap_or(0);
    }
}

/// Whether the first token of a document is a label of the one before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Borders {
    /// It is: documents are one stream.
    Crossed,
    /// It is not: documents are kept apart.
    Kept,
}

/// The number of labels of the window `window`: of all its tokens but the first, those that are no context and, where
/// borders are kept, begin no document.
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
        // Empty documents begin where the next one does.
        starts.dedup();
        starts.retain(|start| !contexts.iter().any(|context| context.contains(start)));
    }
    predicted.end - predicted.start - read - starts.len() as u64
}

/// The first token of `document`, after its own first one, that is an answer.
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
