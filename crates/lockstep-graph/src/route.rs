//! Mixtures of experts, as they are replayed.

use lockstep_comm::CommError;
use lockstep_tensor::{Permutation, Routed, Router, RouterGradients, View};

use crate::{
    operation::{RouteOperation, SlotTables, TokenRange},
    replay::Run,
};

impl<'a> Run<'a> {
    pub(crate) fn route(&self, route: &RouteOperation) -> Result<(), CommError> {
        let RouteOperation { capacity, experts, counts, probabilities, kept, .. } = *route;
        let (queue, routed, places) =
            (self.replay.queue, self.routed(route), self.places(self.tokens(route)));
        queue.router_top_k(&self.router(route), self.value(route.logits), routed);
        queue.router_load(routed, places, self.value(counts), self.value(probabilities));
        if let (Some(capacity), Some(kept)) = (capacity, kept) {
            queue.limit_slots(self.value(experts), places, capacity, None, self.value(kept));
        }
        Ok(())
    }

    /// The gradient of the logits: by the weights, and by the losses of the router.
    pub(crate) fn route_gradient(&self, route: &RouteOperation, dweights: View<'_>, dlogits: View<'_>) {
        let RouteOperation { routing, counts, probabilities, .. } = *route;
        let (queue, seed) = (self.replay.queue, self.extra.seed.of_sequences);
        let (counts, probabilities) = (self.value(counts), self.value(probabilities));
        let (experts, seq_len) = (counts.shape().as_matrix().1 as f32, self.seq_len() as f32);
        let has_loss = routing.auxiliary_loss != 0.0;
        if has_loss {
            let even = experts / (routing.top_k as f32 * seq_len * seq_len);
            queue.scale(seed * routing.auxiliary_loss * even, counts, probabilities);
        }
        let gradients = RouterGradients {
            weights: dweights,
            probabilities: has_loss.then_some(probabilities),
            squared_log_sum_exp: seed * routing.z_loss / seq_len,
        };
        let (routed, places) = (self.routed(route), self.places(self.tokens(route)));
        let logits = self.value(route.logits);
        queue.router_top_k_backward(&self.router(route), logits, routed, gradients, places, dlogits);
    }

    pub(crate) fn dispatch(
        &self,
        x: View<'_>,
        chosen: View<'_>,
        tables: SlotTables,
        rows: View<'_>,
    ) -> Result<(), CommError> {
        let permutation = self.permutation(tables);
        self.replay.queue.sort_slots(chosen, 0, permutation, self.flat(tables.offsets));
        self.replay.queue.permute(permutation, x, rows);
        Ok(())
    }

    pub(crate) fn dispatch_gradient(
        &self,
        drows: View<'_>,
        tables: SlotTables,
        dx: View<'_>,
    ) -> Result<(), CommError> {
        self.replay.queue.unpermute(self.permutation(tables), drows, None, dx);
        Ok(())
    }

    pub(crate) fn combine(
        &self,
        rows: View<'_>,
        weights: View<'_>,
        tables: SlotTables,
        y: View<'_>,
    ) -> Result<(), CommError> {
        self.replay.queue.unpermute(self.permutation(tables), rows, Some(weights), y);
        Ok(())
    }

    pub(crate) fn combine_gradient(
        &self,
        dy: View<'_>,
        rows: View<'_>,
        weights: View<'_>,
        tables: SlotTables,
        [drows, dweights]: [View<'_>; 2],
    ) -> Result<(), CommError> {
        self.replay.queue.unpermute_backward(self.permutation(tables), dy, rows, weights, drows, dweights);
        Ok(())
    }

    fn router(&self, route: &RouteOperation) -> Router<'a> {
        let RouteOperation { bias, routing, .. } = *route;
        Router {
            top_k: routing.top_k,
            scores: routing.scores,
            selection_bias: bias.map(|bias| self.replay.parameters.exact(bias)),
            groups: routing.groups,
            weights: routing.weights,
            scale: routing.scale,
        }
    }

    fn routed(&self, route: &RouteOperation) -> Routed<'a> {
        Routed {
            scores: self.value(route.scores),
            log_sum_exp: self.flat(route.log_sum_exp),
            experts: self.value(route.experts),
            weights: self.value(route.weights),
        }
    }

    fn permutation(&self, tables: SlotTables) -> Permutation<'a> {
        Permutation { slots: self.flat(tables.slots), rows: self.flat(tables.rows) }
    }

    /// The tokens that are routed here.
    fn tokens(&self, route: &RouteOperation) -> TokenRange {
        TokenRange { first: 0, len: self.value(route.logits).shape().as_matrix().0 }
    }
}
