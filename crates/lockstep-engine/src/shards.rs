//! Among whom a rank's model state is shared out, and the collectives by which the ranks give each other their shares.
//!
//! Ranks that hold the same parameters, and are on one coordinate of the replicate axis, share out each stretch of them
//! ([`FlatStore`]): the shard and the context axis, and where neighbours on the tensor axis hold the same and sum its gradients
//! these too. Of experts it is what is left of these axes. So every element has one owner in each replica, and after an update
//! the owners' weights are gathered.
//!
//! ```text
//! gradients   reduce-scatter over the owners, then all-reduce of the own range over the replicas
//! update      of the own range
//! weights     all-gather from the owners
//! ```

use std::time::{Duration, Instant};

use lockstep_comm::{Collective, CommError, Deadline, Group, Lent, Pending};
use lockstep_graph::mutation::{Mutation, active};
use lockstep_plan::{ParameterRecord, Quantization, ShardPlace, Summing, ZeroStage};

use crate::{FlatStore, Groups, Traffic};

/// Who owns what of the model's state.
#[derive(Debug, Default)]
pub(crate) struct Shards {
    stage: ZeroStage,
    quantization: Quantization,
    /// Copies of the model that are shared out.
    replicas: usize,
    /// Those that share out what is summed so, where that are several.
    groups: Vec<(Summing, Group)>,
    limit: Duration,
    /// Stretches that are being gathered.
    pending: Vec<Pending>,
}

impl Shards {
    /// Every rank owns all that it holds.
    pub(crate) fn none() -> Self {
        Self::default()
    }

    /// As `groups` says, for the parameters `records`; all ranks call this together.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn new(groups: &Groups, records: &[ParameterRecord]) -> Result<Self, CommError> {
        let Some(options) = groups.options().filter(|options| options.zero_stage > ZeroStage::Nothing) else {
            return Ok(Self::none());
        };
        let (stage, quantization, limit) = (options.zero_stage, options.quantization, options.limit);
        let of_kinds = groups.of_shards(records)?;
        if of_kinds.is_empty() {
            return Ok(Self::none());
        }
        let (replicas, groups, pending) = (groups.replicas(), of_kinds, Vec::new());
        Ok(Self { stage, quantization, replicas, groups, limit, pending })
    }

    /// How long a wait for the others may be.
    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    /// What is shared out.
    pub(crate) fn stage(&self) -> ZeroStage {
        self.stage
    }

    /// What goes between ranks as small integers.
    pub(crate) fn quantization(&self) -> Quantization {
        self.quantization
    }

    /// How many copies of the model are shared out; 0 where none is.
    pub(crate) fn replicas(&self) -> usize {
        self.replicas
    }

    /// Those that share out what is summed so, where that are several.
    pub(crate) fn groups(&self) -> &[(Summing, Group)] {
        &self.groups
    }

    /// The rank's place among those that share out what is summed so.
    pub(crate) fn place(&self, summing: Summing) -> ShardPlace {
        self.group(summing)
            .map_or_else(ShardPlace::default, |group| ShardPlace { ranks: group.size(), rank: group.rank() })
    }

    /// Those that share out what is summed so, if they are several.
    pub(crate) fn group(&self, summing: Summing) -> Option<&Group> {
        self.groups.iter().find(|(kind, _)| *kind == summing).map(|(_, group)| group)
    }

    /// Fills each stretch of `weights`, of which every rank has brought its own range up to date, with the ranges of the others.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn gather(&mut self, weights: &mut FlatStore) -> Result<Traffic, CommError> {
        let mut traffic = Traffic::default();
        if self.groups.is_empty() || active(Mutation::WeightsNotGathered) {
            return Ok(traffic);
        }
        let begin = Instant::now();
        let deadline = Deadline::after(self.limit);
        let dtype = weights.dtype();
        for stretch in 0..weights.stretches().len() {
            let (summing, elements) =
                (weights.stretches()[stretch].summing, weights.stretches()[stretch].elements);
            let Some(group) = self.group(summing).cloned() else { continue };
            let (buffer, bytes) = weights.lend_from(stretch, 0..elements);
            let ranks = group.size() as u64;
            traffic.bytes += (ranks - 1) * bytes.len() as u64 / ranks;
            let data = Lent::new(buffer.lend(bytes), dtype);
            self.pending.push(group.start(Collective::AllGatherInPlace { data, counts: None }, deadline)?);
            group.progress()?;
        }
        for gathered in self.pending.drain(..) {
            gathered.wait(deadline)?;
        }
        traffic.busy = begin.elapsed();
        traffic.exposed = begin.elapsed();
        Ok(traffic)
    }
}
