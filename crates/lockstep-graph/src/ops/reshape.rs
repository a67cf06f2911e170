//! A view of a value with other dimensions after its rows. It has the storage of its input and shares its gradient, so
//! no instruction is derived for it.

use lockstep_comm::CommError;

use crate::{block::Value, facts::Facts, op::Op, placement::Placement, recorder::Recorder, replay::Run};

#[derive(Debug)]
struct Reshape {
    x: Value,
    y: Value,
}

impl Recorder {
    /// Records a view of `x` whose rows have the global dimensions `dims`, row-major. Ranks that shard the columns shard
    /// the first of them.
    ///
    /// # Panics
    /// If the dimensions do not have the elements of a row, or the first one cannot be sharded like the columns.
    #[track_caller]
    pub fn reshape(&mut self, x: Value, dims: &[usize]) -> Value {
        let fits = dims.iter().product::<usize>() == self.columns(x);
        assert!(fits, "reshape of {} with dimensions {:?} to {dims:?}", self.describe(x), self.dims(x));
        let parts = match self.placement(x) {
            Placement::ShardColumns { parts } => parts,
            Placement::ShardBlocks(grid) => grid.side,
            _ => 1,
        };
        let is_split = dims.first().is_none_or(|first| first.is_multiple_of(parts));
        assert!(
            is_split,
            "reshape of {} to {dims:?}: {parts} shards of the first dimension",
            self.describe(x)
        );
        let y = self.same_shape(x);
        self.dims[y.0] = dims.to_vec();
        self.push(Reshape { x, y });
        y
    }
}

impl Op for Reshape {
    fn facts(&self) -> Facts {
        let Self { x, y } = *self;
        Facts { alias_of: Some(x), passes_gradient_on: true, ..Facts::of("reshape", [x], [y]) }
    }

    fn forward(&self, _: &Run<'_>) -> Result<(), CommError> {
        Ok(())
    }
}
