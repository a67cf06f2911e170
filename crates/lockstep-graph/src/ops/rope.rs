//! Rotary position embedding of each head (Su et al., 2021).

use std::{iter::from_fn, ops::Range};

use lockstep_comm::CommError;
use lockstep_tensor::{Rotary, Rotation, View};

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

/// Settings of a rotary embedding.
#[derive(Debug, Clone, Copy)]
pub struct RotaryEmbedding {
    /// Inverse frequencies, a constant.
    pub frequencies: Value,
    /// Inverse frequencies of the rows in [`Batch::long_rows`](crate::Batch::long_rows), if they differ: a constant of the same length.
    pub long_frequencies: Option<Value>,
    /// Elements that rotate together.
    pub pairs: RotaryPairs,
    /// Factor on the rotated elements.
    pub amplitude: f32,
}

impl RotaryEmbedding {
    /// Creates an embedding in the half-split form that keeps the lengths of pairs.
    pub fn new(frequencies: Value) -> Self {
        Self { frequencies, long_frequencies: None, pairs: RotaryPairs::Halves, amplitude: 1.0 }
    }
}

#[derive(Debug)]
struct Rope {
    x: Value,
    head_dim: usize,
    embedding: RotaryEmbedding,
    /// The tokens of the local rows.
    tokens: TokenRange,
    y: Value,
}

impl Recorder {
    /// Records rotary position embedding of the first `2n` elements of each head for `n` inverse frequencies, in the
    /// half-split form; the other elements stay as they are.
    #[track_caller]
    pub fn rope(&mut self, x: Value, head_dim: usize, frequencies: Value) -> Value {
        self.rotary(x, head_dim, RotaryEmbedding::new(frequencies))
    }

    /// Records rotary position embedding as [`Recorder::rope`] does, with more settings.
    ///
    /// # Panics
    /// If the columns are no whole heads, a head has less than two elements for each frequency, or the value is sharded
    /// by tokens.
    #[track_caller]
    pub fn rotary(&mut self, x: Value, head_dim: usize, embedding: RotaryEmbedding) -> Value {
        let (columns, rotated) = (self.columns(x), 2 * self.columns(embedding.frequencies));
        let fits = columns.is_multiple_of(head_dim) && rotated <= head_dim;
        assert!(
            fits,
            "rotary embedding: heads of {head_dim} in {}, {rotated} elements rotated",
            self.describe(x)
        );
        self.expect_placement(x, |placement| placement != Placement::ShardTokens, "rotary embedding");
        let y = self.same_shape(x);
        let tokens = self.tokens_of(self.placement(x));
        self.push(Rope { x, head_dim, embedding, tokens, y });
        y
    }
}

impl Rope {
    fn rotate(&self, run: &Run<'_>, x: View<'_>, rotation: Rotation, y: View<'_>) {
        let (batch, head_dim, embedding) = (&run.replay().batch, self.head_dim, self.embedding);
        let heads = x.shape().as_matrix().1 / head_dim;
        let (x, y) = (split_heads(x, heads, head_dim), split_heads(y, heads, head_dim));
        let (first, tokens) = (self.tokens.first, self.tokens.first..self.tokens.first + self.tokens.len);
        let long = embedding.long_frequencies.map_or(&[][..], |_| batch.long_rows);
        for (rows, is_long) in parts(tokens, long) {
            let frequencies = embedding.long_frequencies.filter(|_| is_long).unwrap_or(embedding.frequencies);
            let rotary = Rotary {
                positions: batch.positions.rows(rows.clone()),
                inverse_frequencies: run.flat(frequencies),
                amplitude: embedding.amplitude,
            };
            let [x, y] = [x, y].map(|heads| heads.rows(rows.start - first..rows.end - first));
            match embedding.pairs {
                RotaryPairs::Halves => run.queue().rope(x, rotary, rotation, y),
                RotaryPairs::Neighbours => run.queue().rope_interleaved(x, rotary, rotation, y),
            }
        }
    }
}

/// Splits rows into ranges that are in one of the ascending ranges `long`, and ranges that are in none.
fn parts(mut rows: Range<usize>, long: &[Range<usize>]) -> impl Iterator<Item = (Range<usize>, bool)> {
    let (first, last) = (rows.start, rows.end);
    let clipped = move |range: &Range<usize>| range.start.max(first)..range.end.min(last);
    let mut long = long.iter().map(clipped).filter(|range| !range.is_empty()).peekable();
    from_fn(move || {
        let (end, is_long) = match long.peek() {
            Some(range) if range.start == rows.start => (range.end, true),
            Some(range) => (range.start, false),
            None => (rows.end, false),
        };
        let _ = long.next_if(|_| is_long);
        let part = std::mem::replace(&mut rows.start, end)..end;
        (!part.is_empty()).then_some((part, is_long))
    })
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

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use super::*;

    #[test]
    fn rows_are_split_where_long_sequences_begin_and_end() {
        let found = |rows, long: &[Range<usize>]| parts(rows, long).collect::<Vec<_>>();
        assert_eq!(found(2..9, &[]), [(2..9, false)]);
        assert_eq!(found(2..9, from_ref(&(0..usize::MAX))), [(2..9, true)]);
        assert_eq!(
            found(2..9, &[0..3, 5..7, 9..12]),
            [(2..3, true), (3..5, false), (5..7, true), (7..9, false)]
        );
        assert_eq!(found(4..4, from_ref(&(0..9))), []);
    }
}
