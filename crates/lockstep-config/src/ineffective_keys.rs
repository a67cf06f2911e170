//! Keys without effect: for each key, the reason why it has none in a run, as a column of the table of keys.
//!
//! A user who sets such a key is told so. In a plan, which sets every key, it is ignored.

use lockstep_plan::gathering::ReshardAfterForward;
use lockstep_plan::{Residence, TensorDimensions};

use crate::choices::{DataFormat, LearningRateScaling, OptimizerKind, Precision, ScheduleKind, Transport};
use crate::declare::{NoEffect, idle_if};
use crate::keys::RunConfig;

type Reason = Option<NoEffect>;

/// Returns the first reason that holds.
fn first(reasons: impl IntoIterator<Item = Reason>) -> Reason {
    reasons.into_iter().flatten().next()
}

pub(crate) fn valid_fraction(run: &RunConfig) -> Reason {
    idle_if(!run.data.valid.is_empty(), "data.valid", "data.valid")
}

/// Returns the reason for a key of the data that only the formats `readers` read.
fn format_other_than(run: &RunConfig, readers: &[DataFormat]) -> Reason {
    let format = run.data.format;
    let because = format!("data.format = \"{}\"", format.word());
    idle_if(format != DataFormat::Auto && !readers.contains(&format), "data.format", because)
}

pub(crate) fn text_field(run: &RunConfig) -> Reason {
    format_other_than(run, &[DataFormat::JsonLines, DataFormat::Parquet])
}

pub(crate) fn token_type(run: &RunConfig) -> Reason {
    format_other_than(run, &[DataFormat::Tokens])
}

pub(crate) fn cache_dir(run: &RunConfig) -> Reason {
    format_other_than(run, &[DataFormat::Text, DataFormat::JsonLines, DataFormat::Parquet])
}

pub(crate) fn rollback_every(run: &RunConfig) -> Reason {
    idle_if(run.rollback_after() == 0, "train.rollback_after", "train.rollback_after = 0")
}

pub(crate) fn loss_scale(run: &RunConfig) -> Reason {
    let precision = run.train.precision;
    let because = format!("train.precision = \"{}\"", precision.word());
    idle_if(precision != Precision::F16, "train.precision", because)
}

pub(crate) fn dynamic_loss_scale(run: &RunConfig) -> Reason {
    let is_fixed = run.train.loss_scale > 0.0;
    first([loss_scale(run), idle_if(is_fixed, "train.loss_scale", "a fixed train.loss_scale")])
}

/// Returns the reason for a key that only the optimizers `readers` read.
fn optimizer_other_than(run: &RunConfig, readers: &[OptimizerKind]) -> Reason {
    let kind = run.optimizer.kind;
    let because = format!("optimizer.kind = \"{}\"", kind.word());
    idle_if(!readers.contains(&kind), "optimizer.kind", because)
}

pub(crate) fn betas(run: &RunConfig) -> Reason {
    optimizer_other_than(run, &[OptimizerKind::AdamW, OptimizerKind::Lion, OptimizerKind::Muon])
}

pub(crate) fn eps(run: &RunConfig) -> Reason {
    optimizer_other_than(run, &[OptimizerKind::AdamW, OptimizerKind::Muon])
}

pub(crate) fn momentum(run: &RunConfig) -> Reason {
    optimizer_other_than(run, &[OptimizerKind::Sgd, OptimizerKind::Muon])
}

pub(crate) fn of_muon(run: &RunConfig) -> Reason {
    optimizer_other_than(run, &[OptimizerKind::Muon])
}

pub(crate) fn decay_of_schedule(run: &RunConfig) -> Reason {
    let is_constant = run.schedule.kind == ScheduleKind::Constant;
    idle_if(is_constant, "schedule.kind", "schedule.kind = \"constant\"")
}

pub(crate) fn scale_lr_batch(run: &RunConfig) -> Reason {
    let is_off = run.schedule.scale_lr == LearningRateScaling::None;
    idle_if(is_off, "schedule.scale_lr", "schedule.scale_lr = \"none\"")
}

fn of_given_adapter(run: &RunConfig) -> Reason {
    let is_given = run.fine_tune.adapter.is_some();
    idle_if(is_given, "fine_tune.adapter", "fine_tune.adapter, which has its own")
}

pub(crate) fn lora_rank(run: &RunConfig) -> Reason {
    of_given_adapter(run)
}

pub(crate) fn lora(run: &RunConfig) -> Reason {
    let has_none = run.fine_tune.lora_rank.is_none();
    first([of_given_adapter(run), idle_if(has_none, "fine_tune.lora_rank", "no fine_tune.lora_rank")])
}

pub(crate) fn freeze(run: &RunConfig) -> Reason {
    let has_adapter = run.fine_tune.adapter.is_some() || run.fine_tune.lora_rank.is_some();
    idle_if(has_adapter, "fine_tune.lora_rank", "an adapter, which freezes the whole model")
}

pub(crate) fn keep_best(run: &RunConfig) -> Reason {
    let keeps_all = run.checkpoint.keep == 0 && run.checkpoint.keep_best;
    idle_if(keeps_all, "checkpoint.keep", "checkpoint.keep = 0, which keeps all")
}

pub(crate) fn of_own_transports(run: &RunConfig) -> Reason {
    let because = "parallel.transport = \"mpi\", which sums in its own way";
    idle_if(run.parallel.transport == Transport::Mpi, "parallel.transport", because)
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

pub(crate) fn sequence_parallel(run: &RunConfig) -> Reason {
    let reasons = [
        of_one_tensor_rank(run, "whose one rank has all tokens"),
        of_square(run, "which splits by tokens in any case"),
    ];
    first(reasons).filter(|_| run.plan.sequence_parallel)
}

pub(crate) fn tensor_layout(run: &RunConfig) -> Reason {
    let is_square = run.plan.tensor_layout == TensorDimensions::Two;
    of_one_tensor_rank(run, "which shares nothing").filter(|_| is_square)
}

pub(crate) fn tensor_chunks(run: &RunConfig) -> Reason {
    first([
        of_one_tensor_rank(run, "whose one rank exchanges nothing"),
        of_square(run, "whose products take a block at a time"),
    ])
}

pub(crate) fn partition_activations(run: &RunConfig) -> Reason {
    const OWN_TOKENS: &str = "by which each rank has its own tokens of these values already";
    let because = format!("parallel.sequence_parallel = true, {OWN_TOKENS}");
    let reasons = [
        of_one_tensor_rank(run, "whose one rank shares nothing"),
        idle_if(run.plan.sequence_parallel, "parallel.sequence_parallel", because),
        of_square(run, OWN_TOKENS),
    ];
    first(reasons).filter(|_| run.plan.partition_activations)
}

pub(crate) fn context_parallel_method(run: &RunConfig) -> Reason {
    let because = "parallel.context_parallel = 1, whose one rank has whole sequences";
    idle_if(run.plan.mesh.context == 1, "parallel.context_parallel", because)
}

pub(crate) fn pipeline(run: &RunConfig) -> Reason {
    let because = "parallel.pipeline_parallel = 1, which is no pipeline";
    idle_if(run.plan.mesh.pipeline == 1, "parallel.pipeline_parallel", because)
}

pub(crate) fn zero_stage(run: &RunConfig) -> Reason {
    let is_alone = run.owners() == 1 && run.plan.mesh.replicate == 1 && !run.leaves_shards_open();
    let because = "parallel.data_parallel_shard = 1, so there is no other rank to shard over";
    idle_if(run.plan.zero_stage > 0 && is_alone, "parallel.data_parallel_shard", because)
}

pub(crate) fn wrap(run: &RunConfig) -> Reason {
    let may_shard = run.plan.zero_stage > 0 && (run.leaves_shards_open() || run.owners() > 1);
    let is_offloaded = run.plan.residence.optimizer == Residence::Disk;
    let because = "no buffer with sharded or offloaded parameters";
    idle_if(!may_shard && !is_offloaded, "parallel.zero_stage", because)
}

fn of_whole_parameters(run: &RunConfig) -> Reason {
    let stage = run.plan.zero_stage;
    let because = format!("parallel.zero_stage = {stage}, which leaves all parameters whole");
    idle_if(stage < 3, "parallel.zero_stage", because)
}

fn of_kept_parameters(run: &RunConfig) -> Reason {
    let keeps_all = run.plan.sharding.reshard_after_forward == ReshardAfterForward::Never;
    let because = "parallel.reshard_after_forward = \"never\", which keeps all; \"auto\" keeps what fits";
    idle_if(keeps_all, "parallel.reshard_after_forward", because)
}

pub(crate) fn reshard_after_forward(run: &RunConfig) -> Reason {
    of_whole_parameters(run).filter(|_| run.plan.residence.parameters != Residence::Disk)
}

pub(crate) fn max_live_parameters(run: &RunConfig) -> Reason {
    first([reshard_after_forward(run), of_kept_parameters(run)])
}

pub(crate) fn secondary_shard(run: &RunConfig) -> Reason {
    first([of_whole_parameters(run), of_kept_parameters(run)])
}

pub(crate) fn quantize_feedback(run: &RunConfig) -> Reason {
    let because = "parallel.quantize_gradients = \"none\", which loses nothing";
    idle_if(run.plan.quantize_gradients.is_none(), "parallel.quantize_gradients", because)
}

pub(crate) fn offload_optimizer(run: &RunConfig) -> Reason {
    let keeps_master = run.train.precision != Precision::F32 && run.train.master_weights;
    let keeps_moments = run.optimizer.kind != OptimizerKind::Sgd || run.optimizer.momentum() != 0.0;
    let is_idle = run.plan.residence.optimizer == Residence::Disk && !keeps_master && !keeps_moments;
    let because = "SGD without momentum, and without master weights, keeps nothing";
    idle_if(is_idle, "optimizer.momentum", because)
}

pub(crate) fn offload_fraction(run: &RunConfig) -> Reason {
    let because = match run.plan.residence.activations {
        Residence::Memory => "nothing that is offloaded",
        _ => "no model state that is offloaded: activations are offloaded altogether",
    };
    let is_idle = run.plan.residence.optimizer == Residence::Memory;
    idle_if(is_idle, "parallel.offload.optimizer", because)
}

pub(crate) fn offload_files(run: &RunConfig) -> Reason {
    idle_if(!run.plan.residence.use_disk(), "parallel.offload.optimizer", "nothing on disk")
}
