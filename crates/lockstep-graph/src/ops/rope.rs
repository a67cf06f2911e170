//! Rotary position embedding of each head (Su et al., 2021).

use lockstep_comm::CommError;
use lockstep_tensor::{Rotation, View};

use crate::{
    block::{TokenRange, Value},
    facts::Facts,
    op::Op,
    placement::Placement,
    recorder::Recorder,
    replay::{InputGradients, Run, split_heads},
};

/// The elements of a head that a rotary embedding rotates together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RotaryPairs {
    /// Elements `i` and `i + head_dim / 2`: the half-split form.
    Halves,
    /// Elements `2i` and `2i + 1`: the interleaved form.
    Neighbours,
}

#[derive(Debug)]
struct Rope {
    x: Value,
    head_dim: usize,
    /// Inverse frequencies, a constant.
    frequencies: Value,
    pairs: RotaryPairs,
    /// The tokens of the local rows.
    tokens: TokenRange,
    y: Value,
}

impl Recorder {
    /// Records rotary position embedding of the first `2n` elements of each head for `n` inverse frequencies, in the
    /// half-split form; the other elements stay as they are.
    #[track_caller]
    pub fn rope(&mut self, x: Value, head_dim: usize, frequencies: Value) -> Value {
        self.rope_in_pairs(x, head_dim, frequencies, RotaryPairs::Halves)
    }

    /// Records rotary position embedding as [`Recorder::rope`] does, in the half-split or the interleaved form.
    ///
    /// # Panics
    /// If the columns are no whole heads, a head has less than two elements for each frequency, or the value is sharded
    /// by tokens.
    #[track_caller]
    pub fn rope_in_pairs(
        &mut self,
        x: Value,
        head_dim: usize,
        frequencies: Value,
        pairs: RotaryPairs,
    ) -> Value {
        let (columns, rotated) = (self.columns(x), 2 * self.columns(frequencies));
        let fits = columns.is_multiple_of(head_dim) && rotated <= head_dim;
        assert!(
            fits,
            "rotary embedding: heads of {head_dim} in {}, {rotated} elements rotated",
            self.describe(x)
        );
        self.expect_placement(x, |placement| placement != Placement::ShardTokens, "rotary embedding");
        let y = self.same_shape(x);
        let tokens = self.tokens_of(self.placement(x));
        self.push(Rope { x, head_dim, frequencies, pairs, tokens, y });
        y
    }
}

impl Rope {
    fn rotate(&self, run: &Run<'_>, x: View<'_>, rotation: Rotation, y: View<'_>) {
        let (batch, head_dim) = (&run.replay().batch, self.head_dim);
        let positions = batch.positions.rows(self.tokens.first..self.tokens.first + self.tokens.len);
        let frequencies = run.flat(self.frequencies);
        let heads = x.shape().as_matrix().1 / head_dim;
        let (x, y) = (split_heads(x, heads, head_dim), split_heads(y, heads, head_dim));
        match self.pairs {
            RotaryPairs::Halves => run.queue().rope(x, positions, frequencies, rotation, y),
            RotaryPairs::Neighbours => {
                run.queue().rope_interleaved(x, positions, frequencies, rotation, y);
            }
        }
    }
}

impl Op for Rope {
    fn facts(&self) -> Facts {
        Facts { vector_flops: [3, 3, 0], ..Facts::in_place("RoPE", self.x, self.y) }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        self.rotate(run, run.value(self.x), Rotation::Forward, run.value(self.y));
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        self.rotate(run, dy, Rotation::Backward, dx.view(0));
        Ok(())
    }
}
