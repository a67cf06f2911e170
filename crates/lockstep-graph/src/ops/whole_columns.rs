//! Columns of a tensor-parallel group gathered for an operation on whole rows, and split again: a norm over all heads of
//! queries or keys.
//!
//! Every rank computes the operation on all columns, so values and gradients in between are replicated. Collectives
//! exchange contiguous rows; a transpose of blocks orders them by column.

use lockstep_comm::CommError;
use lockstep_plan::work::{Collective, Pass, Peers as Ranks};
use lockstep_tensor::View;

use crate::{
    block::Value,
    facts::Facts,
    op::Op,
    placement::Placement,
    recorder::Recorder,
    replay::{InputGradients, Run},
    work_context::{Work, WorkContext},
};

/// Direction of the forward; the backward goes the other way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    /// From this rank's columns to all.
    Gather,
    /// From all columns to this rank's.
    Slice,
}

#[derive(Debug)]
struct WholeColumns {
    direction: Direction,
    x: Value,
    /// The columns of all ranks, one rank after the other.
    blocks: Value,
    y: Value,
}

impl Recorder {
    /// Records `f` on all columns of `x` and returns this rank's columns of its result; `f` must keep the shape. If `x` is
    /// not sharded by columns, `f` alone is recorded.
    ///
    /// # Panics
    /// If neighbouring ranks hold the same columns.
    #[track_caller]
    pub(crate) fn on_whole_columns(&mut self, x: Value, f: impl FnOnce(&mut Self, Value) -> Value) -> Value {
        let placement = self.placement(x);
        let Placement::ShardColumns { parts } = placement else { return f(self, x) };
        let ranks = self.place.ranks;
        assert!(parts == ranks, "the columns of {} for {ranks} ranks are not gathered", self.describe(x));
        let whole = self.moved(x, Direction::Gather, Placement::Replicate);
        let result = f(self, whole);
        self.moved(result, Direction::Slice, placement)
    }

    #[track_caller]
    fn moved(&mut self, x: Value, direction: Direction, placement: Placement) -> Value {
        let (columns, ranks) = (self.columns(x), self.place.ranks);
        let blocks = self.local(ranks * self.local_rows(x), columns / ranks, self.shape.dtype);
        let y = self.value_in(columns, placement);
        self.push(WholeColumns { direction, x, blocks, y });
        y
    }
}

impl WholeColumns {
    /// Moves a value, or its gradient. `part` has this rank's columns, `whole` those of all ranks.
    fn run(
        &self,
        run: &Run<'_>,
        direction: Direction,
        part: View<'_>,
        whole: View<'_>,
    ) -> Result<(), CommError> {
        let ([rows, width], ranks) = (<[usize; 2]>::from(part.shape().as_matrix()), run.peers().group.size());
        let blocks = run.value(self.blocks);
        match direction {
            Direction::Gather => {
                run.peers().gather(part, blocks)?;
                run.queue().transpose_blocks(
                    blocks.reshape([ranks, rows, width]),
                    whole.reshape([rows, ranks, width]),
                );
            }
            Direction::Slice => {
                let rank = run.peers().group.rank();
                run.queue().transpose_blocks(
                    whole.reshape([rows, ranks, width]),
                    blocks.reshape([ranks, rows, width]),
                );
                run.queue().cast(blocks.rows(rank * rows..(rank + 1) * rows), part);
            }
        }
        Ok(())
    }
}

impl Op for WholeColumns {
    fn facts(&self) -> Facts {
        let name = match self.direction {
            Direction::Gather => "gather columns of ranks",
            Direction::Slice => "own columns",
        };
        Facts { scratch: vec![self.blocks], ..Facts::of(name, [self.x], [self.y]) }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let (x, y) = (run.value(self.x), run.value(self.y));
        match self.direction {
            Direction::Gather => self.run(run, Direction::Gather, x, y),
            Direction::Slice => self.run(run, Direction::Slice, y, x),
        }
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        match self.direction {
            Direction::Gather => self.run(run, Direction::Slice, dx.view(0), dy),
            Direction::Slice => self.run(run, Direction::Gather, dy, dx.view(0)),
        }
    }

    fn work(&self, context: &WorkContext<'_>) -> Vec<Work> {
        let is_forward = matches!(context.pass, Pass::Forward | Pass::Recompute);
        let bytes = context.shapes.bytes(self.blocks);
        let gather = Work::exchange(Ranks::Tensor, Collective::AllGather, bytes);
        if is_forward == (self.direction == Direction::Gather) {
            vec![gather, context.stream()]
        } else {
            vec![context.stream()]
        }
    }
}
