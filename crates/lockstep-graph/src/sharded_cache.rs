//! Scratch and recording of attention to a key-value cache that is sharded over ranks; `ops::sharded_cache` runs it.

use lockstep_plan::{
    CachePlace, DType,
    work::{Collective, Peers as Ranks},
};

use crate::{
    block::{Value, ValueInfo},
    recorder::Recorder,
    shapes::Shapes,
    work_context::Work,
};

/// Scratch of an attention to a sharded cache. Rows of all ranks are in rank order.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ShardedCache {
    pub(crate) ranks: usize,
    /// Queries, keys and values of all ranks' rows; keys once if they are the values.
    pub(crate) gathered: [Value; 3],
    /// Attention of all rows to the pages of this rank, f32.
    pub(crate) part: Value,
    /// Attention of this rank's rows to the pages of each rank, f32.
    pub(crate) parts: Value,
    /// Log-sum-exps of `part`: by head, then by rank.
    pub(crate) statistics: [Value; 2],
    /// Log-sum-exps of `parts`.
    pub(crate) statistics_of_parts: Value,
}

impl ShardedCache {
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
    /// Records the block for a rank among those that key-value caches are sharded over. The recorder's shape, until now that of the rows
    /// of all these ranks, becomes that of this rank's rows.
    ///
    /// # Panics
    /// If the rows do not divide among the ranks.
    #[track_caller]
    pub fn shard_cache(&mut self, place: CachePlace) {
        let (rows, ranks) = (self.shape.seq_len, place.ranks);
        assert!(rows.is_multiple_of(ranks), "{rows} rows are not split evenly over {ranks} ranks");
        self.shape.seq_len = rows / ranks;
        self.cache = place;
    }

    /// Creates the scratch of an attention to a sharded cache; `heads` counts this rank's query heads.
    pub(crate) fn sharded_cache(&mut self, [q, k, v]: [Value; 3], heads: usize) -> ShardedCache {
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
        ShardedCache { ranks, gathered: [all_q, all_k, all_v], part, parts, statistics, statistics_of_parts }
    }
}
