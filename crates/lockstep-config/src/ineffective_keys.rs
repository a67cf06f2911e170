//! Keys without effect: the combinations of values in which a run does not read a key.
//!
//! A user who sets such a key is told so. In a plan, which sets every key, it is ignored.

use lockstep_plan::gathering::ReshardAfterForward;
use lockstep_plan::{Residence, TensorDimensions};

use crate::choices::{DataFormat, LearningRateScaling, OptimizerKind, Precision, ScheduleKind, Transport};
use crate::keys::RunConfig;

/// Reason why a key has no effect.
#[derive(Debug)]
pub(crate) struct NoEffect {
    /// The reason in words, to follow "has no effect with".
    pub(crate) because: String,
    /// Name of the key whose value is the reason.
    pub(crate) depends_on: &'static str,
}

/// Returns the reason why a key has no effect in a run; `None` if it has one.
pub(crate) fn no_effect(run: &RunConfig, key: &str) -> Option<NoEffect> {
    let (_, reason) = REASONS.iter().find(|(keys, _)| keys.contains(&key))?;
    reason(run)
}

type Reason = Option<NoEffect>;

/// Keys with the function that returns why they have no effect.
type Row = (&'static [&'static str], fn(&RunConfig) -> Reason);

/// The keys that may have no effect.
const REASONS: &[Row] = &[
    (&["data.valid_fraction"], |run| {
        first([idle_if(!run.data.valid.is_empty(), "data.valid", "data.valid"), format_of_samples(run)])
    }),
    (&["data.tokenizer", "data.packing"], format_of_samples),
    (&["data.labels", "data.valid_labels"], |run| {
        let is_other = run.data.format != DataFormat::Idx;
        let because = format!("data.format = \"{}\"", run.data.format.word());
        idle_if(is_other, "data.format", because)
    }),
    (&["data.transforms", "data.valid_transforms"], |run| {
        let because = format!("data.format = \"{}\", whose files hold text", run.data.format.word());
        idle_if(!run.data.format.is_of_samples(), "data.format", because)
    }),
    (&["data.skip_bad_samples", "data.workers"], |run| {
        // A program that brings its own samples names no data.
        let because = format!("data.format = \"{}\", whose files hold text", run.data.format.word());
        idle_if(run.names_data() && !run.data.format.is_of_samples(), "data.format", because)
    }),
    (&["data.token_type"], |run| format_other_than(run, &[DataFormat::Tokens])),
    (&["data.text_field"], |run| format_other_than(run, &[DataFormat::JsonLines, DataFormat::Parquet])),
    (&["data.cache_dir"], |run| {
        use DataFormat::{JsonLines, Parquet, Text, TfRecord, WebDataset};
        format_other_than(run, &[Text, JsonLines, Parquet, WebDataset, TfRecord])
    }),
    (&["train.loss_scale"], loss_scale),
    (
        &["train.initial_scale_power", "train.loss_scale_window", "train.hysteresis", "train.min_loss_scale"],
        |run| {
            let is_fixed = run.train.loss_scale > 0.0;
            first([loss_scale(run), idle_if(is_fixed, "train.loss_scale", "a fixed train.loss_scale")])
        },
    ),
    (&["train.rollback_every"], |run| {
        idle_if(run.rollback_after() == 0, "train.rollback_after", "train.rollback_after = 0")
    }),
    (&["optimizer.betas"], |run| {
        optimizer_other_than(run, &[OptimizerKind::AdamW, OptimizerKind::Lion, OptimizerKind::Muon])
    }),
    (&["optimizer.eps"], |run| optimizer_other_than(run, &[OptimizerKind::AdamW, OptimizerKind::Muon])),
    (&["optimizer.momentum"], |run| optimizer_other_than(run, &[OptimizerKind::Sgd, OptimizerKind::Muon])),
    (&["optimizer.adam_lr", "optimizer.muon_scale"], |run| optimizer_other_than(run, &[OptimizerKind::Muon])),
    (&["schedule.decay_steps", "schedule.min_lr_ratio"], |run| {
        let is_constant = run.schedule.kind == ScheduleKind::Constant;
        idle_if(is_constant, "schedule.kind", "schedule.kind = \"constant\"")
    }),
    (&["schedule.scale_lr_batch"], |run| {
        let is_off = run.schedule.scale_lr == LearningRateScaling::None;
        idle_if(is_off, "schedule.scale_lr", "schedule.scale_lr = \"none\"")
    }),
    (&["fine_tune.freeze"], |run| {
        let has_adapter = run.fine_tune.adapter.is_some() || run.fine_tune.lora_rank.is_some();
        idle_if(has_adapter, "fine_tune.lora_rank", "an adapter, which freezes the whole model")
    }),
    (&["fine_tune.quantize"], |run| {
        let trains_all = !run.keeps_weights();
        idle_if(
            trains_all,
            "fine_tune.lora_rank",
            "all weights trained; fine_tune.lora_rank, adapter or freeze keeps some",
        )
    }),
    (&["fine_tune.lora_rank"], of_given_adapter),
    (
        &[
            "fine_tune.lora_alpha",
            "fine_tune.lora_dropout",
            "fine_tune.lora_targets",
            "fine_tune.lora_scaling",
        ],
        |run| {
            let has_none = run.fine_tune.lora_rank.is_none();
            first([of_given_adapter(run), idle_if(has_none, "fine_tune.lora_rank", "no fine_tune.lora_rank")])
        },
    ),
    (&["parallel.zero_stage"], |run| {
        let is_alone = run.owners() == 1 && run.plan.mesh.replicate == 1 && !run.leaves_shards_open();
        let because = "parallel.data_parallel_shard = 1, so there is no other rank to shard over";
        idle_if(run.plan.zero_stage > 0 && is_alone, "parallel.data_parallel_shard", because)
    }),
    (&["parallel.quantize_feedback"], |run| {
        let because = "parallel.quantize_gradients = \"none\", which loses nothing";
        idle_if(run.plan.quantize_gradients.is_none(), "parallel.quantize_gradients", because)
    }),
    (&["parallel.reshard_after_forward"], of_parameters_in_memory),
    (&["parallel.max_live_parameters"], |run| first([of_parameters_in_memory(run), of_kept_parameters(run)])),
    (&["parallel.secondary_shard"], |run| first([of_whole_parameters(run), of_kept_parameters(run)])),
    (&["parallel.sequence_parallel"], |run| {
        let reasons = [
            of_one_tensor_rank(run, "whose one rank has all tokens"),
            of_square(run, "which splits by tokens in any case"),
        ];
        first(reasons).filter(|_| run.plan.sequence_parallel)
    }),
    (&["parallel.tensor_layout"], |run| {
        let is_square = run.plan.tensor_layout == TensorDimensions::Two;
        of_one_tensor_rank(run, "which shares nothing").filter(|_| is_square)
    }),
    (&["parallel.tensor_chunks"], |run| {
        first([
            of_one_tensor_rank(run, "whose one rank exchanges nothing"),
            of_square(run, "whose products take a block at a time"),
        ])
    }),
    (&["parallel.context_parallel_method"], |run| {
        let because = "parallel.context_parallel = 1, whose one rank has whole sequences";
        idle_if(run.plan.mesh.context == 1, "parallel.context_parallel", because)
    }),
    (&["parallel.pipeline_schedule", "parallel.virtual_stages", "parallel.pipeline_stages"], |run| {
        let because = "parallel.pipeline_parallel = 1, which is no pipeline";
        idle_if(run.plan.mesh.pipeline == 1, "parallel.pipeline_parallel", because)
    }),
    (&["parallel.all_reduce", "parallel.tcp_connections", "parallel.encrypt"], |run| {
        let because = "parallel.transport = \"mpi\", which sums in its own way";
        idle_if(run.parallel.transport == Transport::Mpi, "parallel.transport", because)
    }),
    (&["parallel.partition_activations"], |run| {
        const OWN_TOKENS: &str = "by which each rank has its own tokens of these values already";
        let because = format!("parallel.sequence_parallel = true, {OWN_TOKENS}");
        let reasons = [
            of_one_tensor_rank(run, "whose one rank shares nothing"),
            idle_if(run.plan.sequence_parallel, "parallel.sequence_parallel", because),
            of_square(run, OWN_TOKENS),
        ];
        first(reasons).filter(|_| run.plan.partition_activations)
    }),
    (&["parallel.offload.optimizer"], |run| {
        let keeps_master = run.train.precision != Precision::F32 && run.train.master_weights;
        let keeps_moments = run.optimizer.kind != OptimizerKind::Sgd || run.optimizer.momentum() != 0.0;
        let is_idle = run.plan.residence.optimizer == Residence::Disk && !keeps_master && !keeps_moments;
        let because = "SGD without momentum, and without master weights, keeps nothing";
        idle_if(is_idle, "optimizer.momentum", because)
    }),
    (&["parallel.offload.fraction"], |run| {
        let because = match run.plan.residence.activations {
            Residence::Memory => "nothing that is offloaded",
            _ => "no model state that is offloaded: activations are offloaded altogether",
        };
        let is_idle = run.plan.residence.optimizer == Residence::Memory;
        idle_if(is_idle, "parallel.offload.optimizer", because)
    }),
    (&["parallel.offload.dir", "parallel.offload.io"], |run| {
        idle_if(!run.plan.residence.use_disk(), "parallel.offload.optimizer", "nothing on disk")
    }),
    (&["parallel.wrap"], |run| {
        let may_shard = run.plan.zero_stage > 0 && (run.leaves_shards_open() || run.owners() > 1);
        let is_offloaded = run.plan.residence.optimizer == Residence::Disk;
        let because = "no buffer with sharded or offloaded parameters";
        idle_if(!may_shard && !is_offloaded, "parallel.zero_stage", because)
    }),
    (&["checkpoint.keep_best"], |run| {
        let keeps_all = run.checkpoint.keep == 0 && run.checkpoint.keep_best;
        idle_if(keeps_all, "checkpoint.keep", "checkpoint.keep = 0, which keeps all")
    }),
];

/// Returns the reason why a key has no effect if `is_idle`; `depends_on` is the key whose value decides it.
fn idle_if(is_idle: bool, depends_on: &'static str, because: impl Into<String>) -> Reason {
    is_idle.then(|| NoEffect { because: because.into(), depends_on })
}

/// Returns the first reason that holds.
fn first(reasons: impl IntoIterator<Item = Reason>) -> Reason {
    reasons.into_iter().flatten().next()
}

/// Returns the reason for a key of the data that only the formats `readers` read.
fn format_other_than(run: &RunConfig, readers: &[DataFormat]) -> Reason {
    let format = run.data.format;
    let because = format!("data.format = \"{}\"", format.word());
    idle_if(format != DataFormat::Auto && !readers.contains(&format), "data.format", because)
}

/// Returns the reason for a key of text if the files hold samples.
fn format_of_samples(run: &RunConfig) -> Reason {
    let because = format!("data.format = \"{}\"", run.data.format.word());
    idle_if(run.data.format.is_of_samples(), "data.format", because)
}

fn loss_scale(run: &RunConfig) -> Reason {
    let precision = run.train.precision;
    let because = format!("train.precision = \"{}\"", precision.word());
    idle_if(precision != Precision::F16, "train.precision", because)
}

/// Returns the reason for a key that only the optimizers `readers` read.
fn optimizer_other_than(run: &RunConfig, readers: &[OptimizerKind]) -> Reason {
    let kind = run.optimizer.kind;
    let because = format!("optimizer.kind = \"{}\"", kind.word());
    idle_if(!readers.contains(&kind), "optimizer.kind", because)
}

fn of_given_adapter(run: &RunConfig) -> Reason {
    let is_given = run.fine_tune.adapter.is_some();
    idle_if(is_given, "fine_tune.adapter", "fine_tune.adapter, which has its own")
}

/// Returns the reason for a key of the tensor-parallel group if there is only one rank in it.
fn of_one_tensor_rank(run: &RunConfig, rank: &str) -> Reason {
    let because = format!("parallel.tensor_parallel = 1, {rank}");
    idle_if(run.plan.mesh.tensor == 1, "parallel.tensor_parallel", because)
}

/// Returns the reason for a key that the 2D tensor layout makes meaningless.
fn of_square(run: &RunConfig, square: &str) -> Reason {
    let because = format!("parallel.tensor_layout = \"2d\", {square}");
    idle_if(run.plan.tensor_layout == TensorDimensions::Two, "parallel.tensor_layout", because)
}

fn of_whole_parameters(run: &RunConfig) -> Reason {
    let stage = run.plan.zero_stage;
    let because = format!("parallel.zero_stage = {stage}, which leaves all parameters whole");
    idle_if(stage < 3, "parallel.zero_stage", because)
}

/// Returns the reason for a key of gathered parameters if they are neither sharded nor on disk.
fn of_parameters_in_memory(run: &RunConfig) -> Reason {
    of_whole_parameters(run).filter(|_| run.plan.residence.parameters != Residence::Disk)
}

fn of_kept_parameters(run: &RunConfig) -> Reason {
    let keeps_all = run.plan.sharding.reshard_after_forward == ReshardAfterForward::Never;
    let because = "parallel.reshard_after_forward = \"never\", which keeps all; \"auto\" keeps what fits";
    idle_if(keeps_all, "parallel.reshard_after_forward", because)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::KEYS;

    #[test]
    fn each_key_has_one_row_and_exists() {
        let named: Vec<&str> = REASONS.iter().flat_map(|(keys, _)| *keys).copied().collect();
        for (index, name) in named.iter().enumerate() {
            assert!(KEYS.iter().any(|key| key.name == *name), "{name} is no key");
            assert!(!named[..index].contains(name), "{name} has two rows");
        }
    }
}
