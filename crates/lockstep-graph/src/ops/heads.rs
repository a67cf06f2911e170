//! Changes of the width of heads: the concatenation of two values head by head, and heads that are truncated or
//! zero-padded.

use lockstep_comm::CommError;
use lockstep_tensor::View;

use crate::{
    block::Value,
    facts::Facts,
    op::Op,
    placement::Placement,
    recorder::Recorder,
    replay::{InputGradients, Run},
};

/// Concatenation of the elements of each head: those of `own`, then those of `tail`.
#[derive(Debug)]
struct JoinHeads {
    own: Value,
    tail: Value,
    heads: usize,
    /// Number of heads of `tail`: `heads`, or 1 that all heads share.
    tails: usize,
    y: Value,
}

/// Each head truncated or zero-padded to the width of `y`.
#[derive(Debug)]
struct ResizeHeads {
    x: Value,
    heads: usize,
    y: Value,
}

impl Recorder {
    /// Records the concatenation of each head of `own` with its head of `tail`, or with the only one.
    ///
    /// # Panics
    /// If the two are not sharded alike, or if a single tail for sharded heads is itself partial or sharded by columns.
    #[track_caller]
    pub fn join_heads(&mut self, own: Value, tail: Value, heads: usize, tails: usize) -> Value {
        let is_split = matches!(self.placement(own), Placement::ShardColumns { .. });
        let tail = if tails == 1 && is_split { self.partial_gradient(tail) } else { tail };
        let fits = tails == 1 || self.placement(own) == self.placement(tail);
        assert!(fits, "join heads of {} with tails of {}", self.describe(own), self.describe(tail));
        let y = self.value_like(own, self.columns(own) + self.columns(tail) * heads / tails);
        let held = heads * self.values[own.0].columns / self.columns(own);
        let tails = if tails == 1 { 1 } else { held };
        self.push(JoinHeads { own, tail, heads: held, tails, y });
        y
    }

    /// Records each head truncated or zero-padded to `width` elements.
    ///
    /// # Panics
    /// If the columns are no whole heads.
    #[track_caller]
    pub fn resize_heads(&mut self, x: Value, heads: usize, width: usize) -> Value {
        let fits = self.columns(x).is_multiple_of(heads);
        assert!(fits, "resize heads: {heads} heads in {}", self.describe(x));
        let y = self.value_like(x, heads * width);
        let heads = heads * self.values[x.0].columns / self.columns(x);
        self.push(ResizeHeads { x, heads, y });
        y
    }
}

impl Op for JoinHeads {
    fn facts(&self) -> Facts {
        Facts::of("join heads", [self.own, self.tail], [self.y])
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let [own, y] = [self.own, self.y].map(|value| in_heads(run.value(value), self.heads));
        run.queue().join_heads(own, in_heads(run.value(self.tail), self.tails), y);
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        let (down, dtail) = (in_heads(dx.view(0), self.heads), in_heads(dx.view(1), self.tails));
        run.queue().join_heads_backward(in_heads(dy, self.heads), down, dtail);
        Ok(())
    }
}

impl Op for ResizeHeads {
    fn facts(&self) -> Facts {
        Facts::of("resize heads", [self.x], [self.y])
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let [x, y] = [self.x, self.y].map(|value| in_heads(run.value(value), self.heads));
        run.queue().resize_heads(x, y);
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        run.queue().resize_heads(in_heads(dy, self.heads), in_heads(dx.view(0), self.heads));
        Ok(())
    }
}

/// Reshapes a value to `[rows, heads, columns / heads]`.
fn in_heads(view: View<'_>, heads: usize) -> View<'_> {
    let (rows, columns) = view.shape().as_matrix();
    view.reshape([rows, heads, columns / heads])
}
