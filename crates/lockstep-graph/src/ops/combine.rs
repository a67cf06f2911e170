//! Combine: the weighted sum of the rows of each token's slots; with expert parallelism, after their way back from the
//! ranks of the experts.

use lockstep_comm::CommError;
use lockstep_plan::work::Pass;
use lockstep_tensor::View;

use crate::{
    block::Value,
    facts::Facts,
    op::Op,
    ops::expert_rows::SlotTables,
    placement::Placement,
    recorder::Recorder,
    replay::{InputGradients, Run},
    work_context::{Work, WorkContext},
};

#[derive(Debug)]
struct Combine {
    rows: Value,
    weights: Value,
    tables: SlotTables,
    /// Rows of this rank's slots after they are sent back, where experts are on several ranks.
    returned: Option<Value>,
    y: Value,
}

impl Recorder {
    /// Records the sum of the rows of each token's slots by their weights, with the rows and the placement of `x`; a partial sum if
    /// other ranks have experts for the same tokens.
    #[track_caller]
    pub(crate) fn combine(&mut self, rows: Value, weights: Value, tables: SlotTables, x: Value) -> Value {
        let hidden = self.columns(x);
        let slots = self.local_rows(tables.slots);
        let returned = tables.remote.map(|_| self.local(slots, hidden, self.shape.dtype));
        let y = self.same_shape(x);
        if self.replicates_routes() && self.experts.group_size() > 1 {
            self.placements[y.0] = Placement::Partial;
        }
        self.push(Combine { rows, weights, tables, returned, y });
        y
    }
}

impl Op for Combine {
    fn facts(&self) -> Facts {
        let Self { rows, weights, ref tables, returned, y } = *self;
        let (combined, written) = (returned.unwrap_or(rows), [y].into_iter().chain(returned));
        Facts {
            tables: tables.permutations().collect(),
            scratch: tables.buffers().collect(),
            saved_for_inputs: [combined, weights].into_iter().chain(tables.permutations()).collect(),
            expert_rows: Some(tables.expert_rows),
            // Every row is read once, however many rows make a token.
            counted_value: Some(rows),
            vector_flops: [2, 3, 0],
            wide_outputs: returned.into_iter().collect(),
            ..Facts::of("combine experts", [rows, weights], written.collect::<Vec<_>>())
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let mut rows = run.value(self.rows);
        if let (Some(remote), Some(returned)) = (self.tables.remote, self.returned) {
            rows = remote.send_back(run, rows, run.value(returned))?;
        }
        let weights = Some(run.value(self.weights));
        run.queue().unpermute(self.tables.permutation(run), rows, weights, run.value(self.y));
        Ok(())
    }

    /// Computes the gradients of the rows and of the weights.
    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        let (queue, permutation) = (run.queue(), self.tables.permutation(run));
        let (rows, weights) = (run.value(self.returned.unwrap_or(self.rows)), run.value(self.weights));
        let (drows, dweights) = (dx.view(0), dx.view(1));
        let Some(remote) = self.tables.remote else {
            queue.unpermute_backward(permutation, dy, rows, weights, drows, dweights);
            return Ok(());
        };
        let (sending, receiving) = (run.value(remote.sending), run.value(remote.receiving));
        queue.unpermute_backward(permutation, dy, rows, weights, sending, dweights);
        let exchange = remote.known_counts(run);
        exchange.to_experts(sending, receiving)?;
        let arrived = exchange.arrived();
        queue.permute(remote.arrivals(run, &exchange), receiving.rows(0..arrived), drows.rows(0..arrived));
        Ok(())
    }

    fn work(&self, context: &WorkContext<'_>) -> Vec<Work> {
        let exchange = self.tables.rows_sent(context.shapes);
        match context.pass {
            Pass::Forward | Pass::Recompute => exchange.into_iter().chain([context.stream()]).collect(),
            _ => [context.stream()].into_iter().chain(exchange).collect(),
        }
    }
}
