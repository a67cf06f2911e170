//! Dispatch: a copy of the row of each slot, sorted by expert; with expert parallelism, on the ranks of the experts.

use lockstep_comm::CommError;
use lockstep_plan::{
    DType,
    work::{Collective, Exchange, Pass, Peers as Ranks, TaskKind},
};
use lockstep_tensor::View;

use crate::{
    block::Value,
    facts::{ExpertRows, Facts},
    op::Op,
    ops::{
        expert_rows::{RemoteRows, SlotTables},
        route::Routes,
    },
    recorder::Recorder,
    replay::{InputGradients, Run},
    shapes::Shapes,
    timeline::Cost,
    work_context::{Work, WorkContext},
};

#[derive(Debug)]
struct Dispatch {
    x: Value,
    chosen: Value,
    /// True if the router limits the slots of each expert.
    has_capacity: bool,
    tables: SlotTables,
    rows: Value,
}

impl Recorder {
    /// Records the dispatch: copies the row of each slot of this rank's experts, sorted by expert.
    #[track_caller]
    pub(crate) fn dispatch(
        &mut self,
        x: Value,
        routes: &Routes,
        top_k: usize,
        experts: usize,
    ) -> (Value, SlotTables) {
        let (place, hidden) = (self.experts, self.columns(x));
        let here = self.experts_here(experts);
        let (ranks, parts) = match self.replicates_routes() {
            true => (1, 1),
            false => (place.group_size(), place.tensor_ranks),
        };
        let slots = self.values[x.0].rows * top_k * parts;
        // Upper bound: even if all tokens of all ranks came here, a token would fill at most one slot per local expert.
        let rows = if ranks == 1 { slots } else { self.values[x.0].rows * top_k.min(here) * ranks };
        let expert_rows = ExpertRows { room: rows, even: slots };
        let mut numbers = |rows: usize| self.local(rows, 1, DType::U32);
        let tables = SlotTables {
            slots: numbers(slots),
            rows: numbers(slots),
            offsets: numbers(here + 1),
            expert_rows,
            first_expert: if ranks == 1 { place.rank * here } else { 0 },
            remote: (ranks > 1).then(|| RemoteRows {
                place,
                experts: (parts > 1).then(|| numbers(slots)),
                sent: numbers(here * ranks + 1),
                received: numbers(here * ranks),
                arrived: numbers(rows),
                arrived_slots: numbers(rows),
                arrived_rows: numbers(rows),
                // Allocated below, once the row counts are known.
                sending: x,
                receiving: x,
            }),
        };
        let remote = tables.remote.map(|remote| RemoteRows {
            sending: self.local(slots, hidden, self.shape.dtype),
            receiving: self.local(rows, hidden, self.shape.dtype),
            ..remote
        });
        let tables = SlotTables { remote, ..tables };
        let rows = self.local(rows, hidden, self.shape.dtype);
        self.push(Dispatch { x, chosen: routes.chosen, has_capacity: routes.has_capacity, tables, rows });
        (rows, tables)
    }

    /// Returns the number of experts on this rank.
    #[track_caller]
    fn experts_here(&self, experts: usize) -> usize {
        let ranks = self.experts.ranks;
        assert!(experts.is_multiple_of(ranks), "{experts} experts are not divided among {ranks} ranks");
        experts / ranks
    }
}

impl Op for Dispatch {
    fn facts(&self) -> Facts {
        let Self { x, chosen, ref tables, rows, .. } = *self;
        let experts = tables.remote.and_then(|remote| remote.experts);
        let written = [rows].into_iter().chain(tables.permutations()).chain([tables.offsets]);
        Facts {
            tables: vec![chosen],
            scratch: tables.buffers().chain(tables.remote.map(|remote| remote.arrived)).collect(),
            saved_for_inputs: tables.permutations().collect(),
            is_cheap: tables.remote.is_none(),
            expert_rows: Some(tables.expert_rows),
            vector_flops: [0, 1, 0],
            ..Facts::of("dispatch to experts", [x], written.chain(experts).collect::<Vec<_>>())
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let (queue, tables, permutation) = (run.queue(), self.tables, self.tables.permutation(run));
        let (x, chosen, rows) = (run.value(self.x), run.value(self.chosen), run.value(self.rows));
        let Some(remote) = tables.remote else {
            queue.sort_slots(chosen, tables.first_expert as u32, permutation, run.flat(tables.offsets));
            queue.permute(permutation, x, rows);
            return Ok(());
        };
        let chosen = remote.parts_of_experts(run, chosen);
        queue.sort_slots(chosen, 0, permutation, run.flat(remote.sent));
        let (sending, receiving) = (run.value(remote.sending), run.value(remote.receiving));
        queue.permute(permutation, x, sending);
        let exchange = remote.exchange_counts(run)?;
        exchange.to_experts(sending, receiving)?;
        // Received rows are sorted by sender, then expert; the experts need them sorted by expert, then sender.
        let arrived = run.flat(remote.arrived).rows(0..exchange.arrived());
        queue.arrived_experts(run.flat(remote.received), exchange.experts, arrived);
        let arrivals = remote.arrivals(run, &exchange);
        queue.sort_slots(arrived, 0, arrivals, run.flat(tables.offsets));
        let arrived = exchange.arrived();
        queue.permute(arrivals, receiving.rows(0..arrived), rows.rows(0..arrived));
        Ok(())
    }

    fn backward_inputs(
        &self,
        run: &Run<'_>,
        drows: View<'_>,
        dx: &InputGradients<'_>,
    ) -> Result<(), CommError> {
        let rows = match self.tables.remote {
            None => drows,
            Some(remote) => remote.send_back(run, drows, run.value(remote.sending))?,
        };
        run.queue().unpermute(self.tables.permutation(run), rows, None, dx.view(0));
        Ok(())
    }

    fn work(&self, context: &WorkContext<'_>) -> Vec<Work> {
        let (shapes, remote) = (context.shapes, self.tables.remote.as_ref());
        let is_forward = matches!(context.pass, Pass::Forward | Pass::Recompute);
        let counts = remote.filter(|_| is_forward).map(|remote| self.counts_exchanged(remote, shapes));
        [context.stream()].into_iter().chain(counts).chain(self.tables.rows_sent(shapes)).collect()
    }
}

impl Dispatch {
    /// All-to-all of the row counts of each expert. With a capacity the host need not wait for the counts: the most
    /// rows that can come are known.
    fn counts_exchanged(&self, remote: &RemoteRows, shapes: &Shapes) -> Work {
        let kind = TaskKind::Exchange(Exchange {
            peers: Ranks::Expert,
            collective: Collective::AllToAll,
            bytes: shapes.rows(remote.received) * size_of::<i64>() as u64,
            is_overlapped: false,
            is_for_host: !self.has_capacity,
        });
        Work { kind, cost: Cost::default() }
    }
}
