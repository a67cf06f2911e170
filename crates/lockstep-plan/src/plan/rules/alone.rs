//! Rules that need no model: about the plan itself, and about the optimizer step.

use super::rule::Rule;
use crate::{
    Degrees, Feedback, MAX_MICRO_BATCH_TOKENS, Plan, PlanPrediction, QuantizedType, Recompute, Residence,
    StepFacts, TensorDimensions, ZeroStage,
    gathering::ReshardAfterForward,
    nearest::{divisors, nearest_multiple, next_to},
    plan::file::version_problem,
};

pub(in crate::plan) const ALONE: &[Rule<StepFacts>] = &[
    Rule(&["version"], |plan, _, found| found.extend(version_problem(plan.version))),
    Rule(&["predicted.memory"], |plan, _, found| {
        let twice = plan.predicted.iter().flat_map(PlanPrediction::repeated);
        found.extend(twice.map(|rank| format!("predicted.memory has rank {rank} more than once")));
    }),
    Rule(&["global_batch"], |_, step, found| at_least_one("global_batch", Some(step.global_batch), found)),
    Rule(&["seq_len"], |_, step, found| at_least_one("seq_len", Some(step.seq_len), found)),
    Rule(&["micro_batch"], |plan, _, found| at_least_one("micro_batch", plan.micro_batch, found)),
    Rule(&["tensor_chunks"], |plan, _, found| at_least_one("tensor_chunks", plan.tensor_chunks, found)),
    Rule(&["mesh.replicate", "mesh.shard", "global_batch"], batch_parts),
    Rule(&["micro_batch", "global_batch"], micro_batches),
    Rule(&["micro_batch", "seq_len"], micro_batch_tokens),
    Rule(&["zero_stage"], |plan, _, found| {
        let stage = plan.zero_stage;
        if ZeroStage::from_number(stage.into()).is_none() {
            found.push(format!("zero_stage {stage} does not exist; it is 0, 1, 2 or 3"));
        }
    }),
    Rule(&["zero_stage", "mesh.replicate"], sharded_replicas),
    Rule(&["sharding.secondary_shard", "mesh.shard"], secondary_shard),
    Rule(&["quantize_weights"], |plan, _, found| {
        if plan.quantize_weights == Some(QuantizedType::Int4) {
            let what = "it is int8 or left out, for weights of 4 bits are too coarse to train";
            found.push(format!("quantize_weights is int4; {what}"));
        }
    }),
    Rule(&["quantize_weights", "zero_stage"], quantized_weights),
    Rule(&["quantize_gradients", "zero_stage"], quantized_gradients),
    Rule(&["quantize_feedback", "quantize_gradients", "precision"], kept_feedback),
    Rule(&["partition_activations", "recompute"], partitioned_activations),
    Rule(&["optimizer", "mesh.tensor"], |plan, step, found| {
        let how = format!("`mesh.tensor` = {} splits them", plan.mesh.tensor);
        whole_matrices(step, plan.mesh.tensor > 1, &how, "`mesh.tensor` = 1", found);
    }),
    Rule(&["optimizer", "zero_stage"], |plan, step, found| {
        let how = format!("`zero_stage` = {} cuts them", plan.zero_stage);
        whole_matrices(step, plan.zero_stage > 0, &how, "`zero_stage` = 0", found);
    }),
    Rule(&["optimizer", "residence.optimizer"], |plan, step, found| {
        let is_on_disk = plan.residence.optimizer == Residence::Disk;
        let (how, instead) = ("on disk they are cut into windows", "`residence.optimizer` = \"none\"");
        whole_matrices(step, is_on_disk, how, instead, found);
    }),
    Rule(&["residence.gradients", "residence.optimizer"], |plan, _, found| {
        with_optimizer("gradients", plan.residence.gradients, plan, found);
    }),
    Rule(&["residence.parameters", "residence.optimizer"], |plan, _, found| {
        with_optimizer("parameters", plan.residence.parameters, plan, found);
    }),
    Rule(&["residence.parameters", "zero_stage"], parameters_on_disk),
    Rule(&["residence.gradients", "quantize_gradients"], |plan, _, found| {
        let are_summed = owners(&plan.mesh).saturating_mul(plan.mesh.replicate) > 1;
        let what = "do not travel as small integers; allowed: one of the two";
        gradients_on_disk(plan, are_summed && plan.quantize_gradients.is_some(), what, found);
    }),
    Rule(&["residence.gradients", "mesh.replicate"], |plan, _, found| {
        let what = "are not summed over replicas; allowed: `mesh.shard` in place of `mesh.replicate`";
        gradients_on_disk(plan, plan.mesh.replicate > 1, what, found);
    }),
    Rule(&["residence.gradients", "zero_stage"], |plan, _, found| {
        let keeps_all = format!("`zero_stage` = {} keeps all on each rank", plan.zero_stage);
        let what = format!("are those that a rank owns, and {keeps_all}; allowed: `zero_stage` = 2 or 3");
        gradients_on_disk(plan, plan.mesh.replicates_gradients(plan.zero_stage), &what, found);
    }),
];

fn at_least_one(name: &str, number: Option<usize>, found: &mut Vec<String>) {
    if number == Some(0) {
        found.push(format!("{name} is 0; it is at least 1"));
    }
}

/// Returns the number of data-parallel ranks, each of which reads its part of the batch; `None` if it is 0 or overflows.
fn parts(mesh: &Degrees) -> Option<usize> {
    mesh.replicate.checked_mul(mesh.shard).filter(|parts| *parts > 0)
}

fn batch_parts(plan: &Plan, step: &StepFacts, found: &mut Vec<String>) {
    let batch = step.global_batch;
    if let Some(parts) = parts(&plan.mesh).filter(|parts| !batch.is_multiple_of(*parts)) {
        let nearest = nearest_multiple(batch, parts);
        found.push(format!(
            "{parts} ranks cannot share `global_batch` = {batch}; {nearest}, or another number of ranks"
        ));
    }
}

fn micro_batches(plan: &Plan, step: &StepFacts, found: &mut Vec<String>) {
    let batch = step.global_batch;
    let Some(parts) = parts(&plan.mesh).filter(|parts| batch.is_multiple_of(*parts)) else { return };
    let of_part = batch / parts;
    if let Some(size) = plan.micro_batch.filter(|size| *size > 0 && !of_part.is_multiple_of(*size)) {
        let of_each = if parts == 1 { String::new() } else { format!(" / {parts} ranks") };
        let fitting = (1..=of_part.min(size.saturating_mul(2))).filter(|size| of_part.is_multiple_of(*size));
        let fitting: Vec<String> = fitting.map(|size| size.to_string()).collect();
        found.push(format!(
            "micro_batch {size} does not divide `global_batch` = {batch}{of_each}; allowed: {}",
            fitting.join(", ")
        ));
    }
}

fn micro_batch_tokens(plan: &Plan, step: &StepFacts, found: &mut Vec<String>) {
    let size = plan.micro_batch_of(step.global_batch);
    let tokens = size.saturating_mul(step.seq_len);
    if tokens > MAX_MICRO_BATCH_TOKENS {
        found.push(format!(
            "micro_batch {size} with `seq_len` = {} makes {tokens} tokens; \
             allowed: at most {MAX_MICRO_BATCH_TOKENS} tokens in a micro-batch",
            step.seq_len
        ));
    }
}

/// Returns the number of ranks over which ZeRO shards the model state.
fn owners(mesh: &Degrees) -> usize {
    mesh.shard.saturating_mul(mesh.context)
}

fn sharded_replicas(plan: &Plan, _: &StepFacts, found: &mut Vec<String>) {
    let (stage, replicas) = (plan.zero_stage, plan.mesh.replicate);
    if stage > 0 && owners(&plan.mesh) == 1 && replicas > 1 {
        found.push(format!(
            "zero_stage {stage} shards nothing over `mesh.replicate` = {replicas}, which are whole copies; \
             allowed: `mesh.shard` = {replicas} in its place, or neither with --nproc-per-node {replicas}"
        ));
    }
}

fn secondary_shard(plan: &Plan, _: &StepFacts, found: &mut Vec<String>) {
    let keeps_all = plan.sharding.reshard_after_forward == ReshardAfterForward::Never;
    let owners = owners(&plan.mesh);
    let gathers = plan.zero_stage == 3 && !keeps_all && owners > 1 && plan.mesh.world_size().is_some();
    let Some(neighbours) = plan.sharding.secondary_shard.filter(|_| gathers) else { return };
    if neighbours >= owners || !owners.is_multiple_of(neighbours) {
        let nearest = next_to(neighbours, divisors(owners).filter(|size| (2..owners).contains(size)));
        found.push(format!(
            "{neighbours} neighbours do not divide the {owners} ranks that shard parameters \
             (`mesh.shard` x `mesh.context`) into several groups; {nearest}, or leave it out"
        ));
    }
}

fn quantized_weights(plan: &Plan, _: &StepFacts, found: &mut Vec<String>) {
    let stage = plan.zero_stage;
    if let Some(kind) = plan.quantize_weights.filter(|_| stage != 3) {
        found.push(format!(
            "quantize_weights \"{kind}\" is for weights that are gathered before each use, and `zero_stage` = {stage} keeps them whole; \
             allowed: \"none\", or `zero_stage` = 3"
        ));
    }
}

fn quantized_gradients(plan: &Plan, _: &StepFacts, found: &mut Vec<String>) {
    if let Some(kind) = plan.quantize_gradients.filter(|_| plan.zero_stage == 0) {
        found.push(format!(
            "quantize_gradients \"{kind}\" is for gradients that go to their owners, and with `zero_stage` = 0 nobody owns any; \
             allowed: \"none\", or `zero_stage` = 1, 2 or 3 with `mesh.shard`"
        ));
    }
}

fn kept_feedback(plan: &Plan, step: &StepFacts, found: &mut Vec<String>) {
    let keeps = plan.quantize_gradients.is_some() && plan.quantize_feedback == Feedback::Kept;
    if step.scales_loss && keeps {
        found.push(
            "what gradients lose is kept in the unit of a loss scale that changes (`precision` = \"f16\"); \
             allowed: `quantize_feedback` = false, or `precision` = \"bf16\""
                .to_owned(),
        );
    }
}

fn partitioned_activations(plan: &Plan, _: &StepFacts, found: &mut Vec<String>) {
    let have_the_same_tokens =
        plan.mesh.tensor > 1 && !plan.sequence_parallel && plan.tensor_layout == TensorDimensions::One;
    let partitions = plan.partition_activations && have_the_same_tokens;
    if partitions && !plan.recompute.forgets(Recompute::Full) {
        found.push(format!(
            "partition_activations is for blocks that compute everything again from their input, and `recompute` = \"{}\" has none; \
             allowed: false, or `recompute` = \"full\", for some layers at least",
            plan.recompute
        ));
    }
}

/// Adds a problem if matrices are sharded and the optimizer needs them whole.
fn whole_matrices(step: &StepFacts, is_cut: bool, how: &str, instead: &str, found: &mut Vec<String>) {
    if step.updates_whole_matrices && is_cut {
        let others = "\"adamw\", \"sgd\", \"lion\"";
        found.push(format!("\"muon\" needs whole matrices, and {how}; allowed: {others}, or {instead}"));
    }
}

fn with_optimizer(what: &str, residence: Residence, plan: &Plan, found: &mut Vec<String>) {
    if residence == Residence::Disk && plan.residence.optimizer != Residence::Disk {
        found.push(format!(
            "{what} on disk need the optimizer's state there too, which the update reads with them; \
             allowed: `residence.optimizer` = \"disk\""
        ));
    }
}

impl Degrees {
    /// Returns true if every rank keeps all parameters, also those that other ranks update: ZeRO stages 1 and 2.
    pub fn replicates_parameters(&self, zero_stage: u8) -> bool {
        owners(self) > 1 && matches!(zero_stage, 1 | 2)
    }

    /// Returns true if every rank keeps all gradients, although other ranks have them as well: below ZeRO stage 2.
    pub fn replicates_gradients(&self, zero_stage: u8) -> bool {
        owners(self) > 1 && zero_stage < 2
    }
}

fn parameters_on_disk(plan: &Plan, _: &StepFacts, found: &mut Vec<String>) {
    let Plan { zero_stage, ref mesh, residence, .. } = *plan;
    let are_on_disk = [residence.parameters, residence.optimizer] == [Residence::Disk; 2];
    if are_on_disk && mesh.replicates_parameters(zero_stage) {
        found.push(format!(
            "parameters on disk are those that a rank updates, and `zero_stage` = {zero_stage} has every rank keep all; \
             allowed: `zero_stage` = 3, or 0"
        ));
    }
}

fn gradients_on_disk(plan: &Plan, is_broken: bool, what: &str, found: &mut Vec<String>) {
    if is_broken && [plan.residence.gradients, plan.residence.optimizer] == [Residence::Disk; 2] {
        found.push(format!("gradients on disk {what}"));
    }
}
