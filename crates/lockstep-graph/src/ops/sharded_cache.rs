//! Attention to key-value caches whose pages are sharded over the context-parallel ranks, in generation.
//!
//! Each rank computes the queries, keys and values of its rows of the batch. All of them are gathered; a rank keeps the keys and
//! values whose pages are its own, and attends with all queries to its pages. An all-to-all returns these parts to the ranks of the
//! rows, which merge them by their log-sum-exps. So the cache is split evenly however long a sequence is, and keys that are cached
//! are never sent again.

use lockstep_comm::CommError;
use lockstep_tensor::{Attention, AttentionVariant, TokenSpan};

use crate::{
    ops::attention::AttentionOperation,
    replay::{Run, split_heads},
    sharded_cache::ShardedCache,
};

impl AttentionOperation {
    /// Attends from the rows of this rank to all tokens of their sequences.
    ///
    /// # Panics
    /// If the replay has no cache, or no context-parallel group.
    pub(crate) fn sharded_cache_attention(
        &self,
        run: &Run<'_>,
        scratch: ShardedCache,
    ) -> Result<(), CommError> {
        let Self { q, k, v, y, shape, .. } = *self;
        let cache = run.replay.cache.expect("a program that was recorded for a sharded cache is given it");
        let (queue, peers) = (run.queue(), run.peers_of_context());
        let ShardedCache { ranks, gathered: [all_q, all_k, all_v], part, parts, .. } = scratch;
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
