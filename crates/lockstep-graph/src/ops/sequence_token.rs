//! One token of each sequence: the input of heads that classify sequences.

use lockstep_comm::CommError;
use lockstep_plan::DType;
use lockstep_tensor::View;

use crate::{
    block::Value,
    facts::Facts,
    op::Op,
    placement::{Placement, Redistribute},
    recorder::Recorder,
    replay::{InputGradients, Run},
};

/// The token of each sequence that a head reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SequenceToken {
    /// The first token: a class token.
    First,
    /// The token whose index in its sequence a named input gives, u32 `[]` per sequence. An index beyond the sequence gives NaN.
    At(Value),
}

impl Recorder {
    /// Records one token of each sequence of `x [tokens, columns]`: `[sequences, columns]`, replicated.
    ///
    /// # Panics
    /// If ranks hold parts of the columns or of the sequences, or the input of indices is no u32 per sequence.
    #[track_caller]
    pub fn token_of_each_sequence(&mut self, x: Value, token: SequenceToken) -> Value {
        assert_eq!(self.context.ranks, 1, "the ranks of a context-parallel group hold parts of a sequence");
        let x = match self.placement(x) {
            Placement::ShardTokens => {
                self.exchange(x, Redistribute::AllGatherReplicated, Placement::Replicate)
            }
            Placement::Replicate => x,
            _ => panic!("no token of each sequence is taken of {}", self.describe(x)),
        };
        let sequences = self.shape.sequences;
        if let SequenceToken::At(indices) = token {
            let info = self.values[indices.0];
            let is_index = (info.rows, info.columns, info.dtype) == (sequences, 1, DType::U32);
            assert!(
                is_index,
                "{} {} is no u32 for each of {sequences} sequences",
                info.dtype,
                self.describe(indices)
            );
        }
        let y = self.value_like(x, self.columns(x));
        self.values[y.0].rows = sequences;
        self.push(TokenOfEachSequence { token, seq_len: self.shape.seq_len, x, y });
        y
    }
}

#[derive(Debug)]
struct TokenOfEachSequence {
    token: SequenceToken,
    seq_len: usize,
    x: Value,
    y: Value,
}

impl TokenOfEachSequence {
    /// Returns tokens as `[sequences, seq_len, columns]`.
    fn sequences<'r>(&self, view: View<'r>) -> View<'r> {
        let (tokens, columns) = view.shape().as_matrix();
        view.reshape([tokens / self.seq_len, self.seq_len, columns])
    }
}

impl Op for TokenOfEachSequence {
    fn facts(&self) -> Facts {
        let indices = match self.token {
            SequenceToken::First => vec![],
            SequenceToken::At(indices) => vec![indices],
        };
        Facts {
            tables: indices.clone(),
            saved_for_inputs: indices,
            accumulates: true,
            ..Facts::of("token of each sequence", [self.x], [self.y])
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let (x, y) = (self.sequences(run.value(self.x)), run.value(self.y));
        match self.token {
            SequenceToken::First => run.queue().select_row(x, 0, y),
            SequenceToken::At(indices) => run.queue().select_rows(x, run.flat(indices), y),
        }
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        let (target, write) = (self.sequences(dx.view(0)), dx.write(0));
        match self.token {
            SequenceToken::First => run.queue().select_row_backward(dy, 0, target, write),
            SequenceToken::At(indices) => {
                run.queue().select_rows_backward(dy, run.flat(indices), target, write);
            }
        }
        Ok(())
    }
}
