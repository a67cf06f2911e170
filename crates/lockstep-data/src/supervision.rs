//! Counts of the labels in windows, and of the samples dropped from a data set because they have none.

use std::ops::AddAssign;

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
