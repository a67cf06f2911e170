//! Attention to key-value caches whose pages are dealt to several ranks, in generation.
//!
//! Each rank computes the queries, keys and values of its rows of the batch. All of them are gathered; a rank keeps the keys and
//! values whose pages are its own, and attends with all queries to its pages. An all-to-all returns these parts to the ranks of the
//! rows, which merge them by their log-sum-exps. So the cache is split evenly however long a sequence is, and keys that are cached
//! are never sent again.

use lockstep_comm::CommError;
use lockstep_plan::{
    CachePlace, DType,
    work::{Collective, Peers as Ranks},
};
use lockstep_tensor::{Attention, AttentionVariant, TokenSpan};

use crate::{
    block::{Value, ValueInfo},
    ops::attention::AttentionOperation,
    recorder::Recorder,
    replay::{Run, split_heads},
    shapes::Shapes,
    work_context::Work,
};

/// Scratch of an attention to a shared cache. Rows of all ranks are in rank order.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SharedCache {
    ranks: usize,
    /// Queries, keys and values of all ranks' rows; keys once if they are the values.
    gathered: [Value; 3],
    /// Attention of all rows to the pages of this rank, f32.
    part: Value,
    /// Attention of this rank's rows to the pages of each rank, f32.
    parts: Value,
    /// Log-sum-exps of `part`: by head, then by rank.
    statistics: [Value; 2],
    /// Log-sum-exps of `parts`.
    statistics_of_parts: Value,
}

impl SharedCache {
    /// Returns the scratch that an operation lists.
    pub(crate) fn values(&self) -> Vec<Value> {
        let &Self { gathered: [q, k, v], part, parts, statistics: [by_head, by_rank], .. } = self;
        let mut values = vec![q, k, part, parts, by_head, by_rank, self.statistics_of_parts];
        if v != k {
            values.push(v);
        }
        values
    }

    /// Returns the exchanges of an attention.
    pub(crate) fn work(&self, shapes: &Shapes) -> Vec<Work> {
        let [q, k, v] = self.gathered;
        let of_all = [q, k].into_iter().chain((k != v).then_some(v));
        let gathers = of_all.map(|value| (Collective::AllGather, value));
        let returns = [self.parts, self.statistics_of_parts].map(|value| (Collective::AllToAll, value));
        let exchanges = gathers.chain(returns);
        exchanges.map(|(kind, value)| Work::exchange(Ranks::Context, kind, shapes.bytes(value))).collect()
    }
}

impl Recorder {
    /// Records the block for a rank among those that share key-value caches. The recorder's shape, until now that of the rows of all
    /// these ranks, becomes that of this rank's rows.
    ///
    /// # Panics
    /// If the rows do not divide among the ranks.
    #[track_caller]
    pub fn share_cache(&mut self, place: CachePlace) {
        let (rows, ranks) = (self.shape.seq_len, place.ranks);
        assert!(rows.is_multiple_of(ranks), "{rows} rows are not split evenly over {ranks} ranks");
        self.shape.seq_len = rows / ranks;
        self.cache = place;
    }

    /// Creates the scratch of an attention to a shared cache; `heads` counts this rank's query heads.
    pub(crate) fn shared_cache(&mut self, [q, k, v]: [Value; 3], heads: usize) -> SharedCache {
        let ranks = self.cache.ranks;
        let mut of_all = |x: Value, dtype: Option<DType>| {
            let ValueInfo { rows, columns, dtype: own } = self.values[x.0];
            self.local(rows * ranks, columns, dtype.unwrap_or(own))
        };
        let (all_q, all_k) = (of_all(q, None), of_all(k, None));
        let all_v = if k == v { all_k } else { of_all(v, None) };
        let [part, parts] = [(); 2].map(|()| of_all(q, Some(DType::F32)));
        let rows = self.values[q.0].rows * ranks;
        let mut statistic = || self.local(rows, heads, DType::F32);
        let (statistics, statistics_of_parts) = ([statistic(), statistic()], statistic());
        SharedCache { ranks, gathered: [all_q, all_k, all_v], part, parts, statistics, statistics_of_parts }
    }
}

impl AttentionOperation {
    /// Attends from the rows of this rank to all tokens of their sequences.
    ///
    /// # Panics
    /// If the replay has no cache, or no context-parallel group.
    pub(crate) fn shared_cache_attention(
        &self,
        run: &Run<'_>,
        scratch: SharedCache,
    ) -> Result<(), CommError> {
        let Self { q, k, v, y, shape, .. } = *self;
        let cache = run.replay.cache.expect("a program that was recorded for a shared cache is given it");
        let (queue, peers) = (run.queue(), run.peers_of_context());
        let SharedCache { ranks, gathered: [all_q, all_k, all_v], part, parts, .. } = scratch;
        for (own, all) in [(q, all_q), (k, all_k), (v, all_v)].into_iter().take(if k == v { 2 } else { 3 }) {
            peers.gather(run.value(own), run.value(all))?;
        }
        let (heads, rows) = (shape.heads, self.queries(run));
        let of_queries = |view| split_heads(view, heads, shape.head_dim);
        let of_keys = |value| split_heads(run.value(value), shape.key_value_heads, shape.head_dim);
        queue.append_to_cache(cache, shape.key_value_heads, of_keys(all_k), (k != v).then(|| of_keys(all_v)));
        let geometry = self.geometry(run, [TokenSpan::whole(ranks * rows); 2]);
        // A sink counts once.
        let sinks = geometry.variant.sinks.filter(|_| cache.place.rank == 0);
        let geometry = Attention { variant: AttentionVariant { sinks, ..geometry.variant }, ..geometry };
        let [by_head, by_rank] = scratch.statistics.map(|value| run.flat(value));
        let part = run.value(part);
        queue.cached_attention(&geometry, cache, of_queries(run.value(all_q)), of_queries(part), by_head);
        queue.transpose_blocks(by_head.reshape([heads, ranks, rows]), by_rank.reshape([ranks, heads, rows]));
        let (parts, of_parts) = (run.value(parts), run.flat(scratch.statistics_of_parts));
        peers.all_to_all(part, parts)?;
        peers.all_to_all(by_rank, of_parts)?;
        queue.merge_attention(parts, of_parts, of_queries(run.value(y)));
        Ok(())
    }
}
