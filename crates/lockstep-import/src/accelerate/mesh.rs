//! Degrees of parallelism, from `parallelism_config` and `megatron_lm_config`.

use super::Accelerate;
use crate::draft::Read;

/// Sizes of `parallelism_config`.
#[derive(Debug)]
pub(super) struct Mesh {
    /// Sizes of the replicate and the shard axis, if either is given.
    pub(super) sizes: Option<[Read<u64>; 2]>,
    /// Ranks of a model-parallel group, which read the same part of a batch.
    pub(super) of_a_part: u64,
}

impl Accelerate<'_> {
    /// Reads the settings of `parallelism_config`.
    pub(super) fn mesh(&mut self) -> Mesh {
        let size = |name: &str| self.fields.integer(&format!("parallelism_config.parallelism_config_{name}"));
        let [replicate, shard, tensor, context, sequence] =
            ["dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"].map(size);
        let method = self.fields.text("parallelism_config.parallelism_config_cp_comm_strategy");
        let more = |read: &Option<Read<u64>>| read.as_ref().map_or(1, |read| read.value.max(1));
        let of_a_part = more(&tensor) * more(&context) * more(&sequence);
        if more(&context) > 1 && more(&sequence) > 1 {
            self.fields.refuse(
                "parallelism_config.parallelism_config_sp_size",
                "is given with cp_size; sequences are split in one way",
                "one of the two",
            );
        }
        self.set("parallel.tensor_parallel", tensor.filter(|read| read.value > 1));
        if let Some(read) = context.filter(|read| read.value > 1) {
            self.user("parallel.context_parallel", read);
            match method {
                Some(read) if read.value == "alltoall" => {
                    self.user("parallel.context_parallel_method", read.map(|_| "all_to_all"))
                }
                Some(read) => self.user("parallel.context_parallel_method", read.map(|_| "all_gather")),
                None => self.import.foreign_default(
                    "parallel.context_parallel_method",
                    "all_gather",
                    "cp_comm_strategy is allgather",
                ),
            }
        }
        if let Some(read) = sequence.filter(|read| read.value > 1) {
            self.user("parallel.context_parallel", read);
            self.import.derived(
                "parallel.context_parallel_method",
                "all_to_all",
                "sequence parallelism of DeepSpeed-Ulysses",
            );
        }
        let sizes = match (replicate, shard) {
            (None, None) => None,
            (replicate, shard) => {
                let one = |key: &str| Read { value: 1, key: key.to_owned(), line: 0, shown: "1".to_owned() };
                Some([replicate.unwrap_or(one("dp_replicate_size")), shard.unwrap_or(one("dp_shard_size"))])
            }
        };
        Mesh { sizes, of_a_part }
    }

    /// Reads `megatron_lm_config`; returns the number of ranks of a model-parallel group.
    pub(super) fn megatron(&mut self, is_used: bool) -> u64 {
        let key = |name: &str| format!("megatron_lm_config.megatron_lm_{name}");
        let degree = |name: &str| self.fields.integer(&key(name)).filter(|read| read.value > 1 && is_used);
        let [tensor, pipeline, context, expert, expert_tensor] = [
            "tp_degree",
            "pp_degree",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
        ]
        .map(degree);
        let flag = |name: &str| self.fields.flag(&key(name)).filter(|read| read.value && is_used);
        let [by_tokens, selective, sharded] =
            ["sequence_parallelism", "recompute_activations", "use_distributed_optimizer"].map(flag);
        let granularity = self.fields.text(&key("recompute_granularity")).filter(|_| is_used);
        let clipping = self.fields.number(&key("gradient_clipping")).filter(|_| is_used);
        let of_a_part = [&tensor, &pipeline, &context].into_iter().flatten().map(|read| read.value).product();
        let has_tensor = tensor.is_some();
        for (ours, read) in [
            ("parallel.tensor_parallel", tensor),
            ("parallel.pipeline_parallel", pipeline),
            ("parallel.context_parallel", context),
            ("parallel.expert_parallel", expert),
            ("parallel.expert_tensor_parallel", expert_tensor),
        ] {
            self.set(ours, read);
        }
        self.set("parallel.sequence_parallel", by_tokens.filter(|_| has_tensor));
        self.set("parallel.zero_stage", sharded.map(|read| read.map(|_| 1)));
        if let Some(read) = granularity.filter(|read| ["full", "selective"].contains(&read.value.as_str())) {
            self.user("parallel.recompute", read);
        } else if let Some(read) = selective {
            self.user("parallel.recompute", read.map(|_| "selective"));
        }
        self.set("train.max_grad_norm", clipping);
        of_a_part
    }
}
