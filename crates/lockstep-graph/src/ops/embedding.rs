//! Embedding: one row of a table for each token, by the token's id or position. Under tensor parallelism the table is
//! sharded by rows (vocabulary-parallel), and each rank contributes the rows that it has.

use lockstep_comm::CommError;
use lockstep_plan::Initializer;
use lockstep_tensor::{Matrix, View};

#[cfg(feature = "faults")]
use crate::faults::Fault;
use crate::{
    block::{BatchInput, ParameterIndex, TokenRange, Value},
    facts::Facts,
    op::Op,
    placement::{Placement, Split},
    recorder::Recorder,
    replay::Run,
};

#[derive(Debug)]
struct Embedding {
    input: BatchInput,
    table: ParameterIndex,
    /// Token id of this rank's first row of the table.
    first_id: u32,
    /// The tokens to look up.
    tokens: TokenRange,
    y: Value,
}

impl Recorder {
    /// Records an embedding: one row of the table `NAME.weight [rows, columns]` per token.
    ///
    /// # Panics
    /// If the table is split in any way other than by its rows, or if it is split and some rows belong to no position.
    #[track_caller]
    pub fn embedding(
        &mut self,
        input: BatchInput,
        name: &str,
        rows: usize,
        columns: usize,
        std: f32,
    ) -> Value {
        let (share, placement) = match self.split_of(name) {
            None => (self.whole_share(self.stream()), self.stream()),
            Some(Split::VocabularyParallel) => {
                let is_whole = !matches!(input, BatchInput::PositionsFrom { .. });
                assert!(
                    is_whole,
                    "{name} [{rows}, {columns}]: a table that is split has no rows before its first"
                );
                (self.vocabulary_shard(rows), Placement::Partial)
            }
            Some(split) => {
                panic!("{name} [{rows}, {columns}]: a table is split by its rows, not by {split:?}")
            }
        };
        let initializer = Initializer::Normal { std };
        let table = self.parameter(format!("{name}.weight"), &[rows, columns], initializer, share);
        let first_id = share.shard.map_or(0, |shard| shard.start as u32);
        let y = self.value_in(columns, placement);
        let tokens = self.tokens_of(placement);
        self.push(Embedding { input, table, first_id, tokens, y });
        self.reduce_partial(y)
    }
}

impl Embedding {
    fn indices<'a>(&self, run: &Run<'a>) -> View<'a> {
        let batch = &run.replay().batch;
        let all = match self.input {
            BatchInput::Ids => batch.ids,
            BatchInput::Positions | BatchInput::PositionsFrom { .. } => batch.positions,
            BatchInput::Named(value) => run.flat(value),
        };
        all.rows(self.tokens.first..self.tokens.first + self.tokens.len)
    }

    /// Returns the rows that inputs number, of the table or its gradient.
    fn numbered_rows<'a>(&self, table: View<'a>) -> View<'a> {
        match self.input {
            BatchInput::PositionsFrom { row } => table.rows(row..table.shape().as_matrix().0),
            BatchInput::Ids | BatchInput::Positions | BatchInput::Named(_) => table,
        }
    }
}

impl Op for Embedding {
    fn facts(&self) -> Facts {
        let tables = match self.input {
            BatchInput::Named(value) => vec![value],
            BatchInput::Ids | BatchInput::Positions | BatchInput::PositionsFrom { .. } => vec![],
        };
        Facts {
            tables,
            weights: vec![self.table],
            looks_up_rows: true,
            vector_flops: [0, 0, 1],
            ..Facts::of("embedding", [], [self.y])
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let (indices, y) = (self.indices(run), run.value(self.y));
        match run.matrix(self.table) {
            Matrix::Dense(table) => {
                run.queue().embedding(indices, self.numbered_rows(table), self.first_id, y)
            }
            Matrix::Blocks(table) => {
                let first = match self.input {
                    BatchInput::PositionsFrom { row } => row,
                    BatchInput::Ids | BatchInput::Positions | BatchInput::Named(_) => 0,
                };
                let first_id = self.first_id.wrapping_sub(first as u32);
                run.queue().block_embedding(indices, table, first_id, y);
            }
        }
        Ok(())
    }

    fn backward_weights(&self, run: &Run<'_>, dy: View<'_>) -> Result<(), CommError> {
        let (rows, first) = match run.replay().parameters.gradient_rows(self.table) {
            Some(rows) => (rows, 0),
            None => (self.indices(run), self.first_id),
        };
        let gradient = self.numbered_rows(run.gradient_of_weight(self.table));
        run.queue().embedding_backward(rows, dy, first, gradient);
        Ok(())
    }

    #[cfg(feature = "faults")]
    fn inject(&mut self, fault: Fault) {
        match (fault, self.input) {
            (Fault::VocabularyFromZero, _) => self.first_id = 0,
            (Fault::PositionsFromZero, BatchInput::Positions | BatchInput::PositionsFrom { .. }) => {
                self.tokens.first = 0;
            }
            _ => {}
        }
    }
}
