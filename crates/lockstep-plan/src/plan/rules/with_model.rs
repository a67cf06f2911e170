//! Rules about divisibility: heads, columns, experts, tokens and units by the degrees that shard them.

use super::rule::Rule;
use crate::{
    ContextMethod, Facts, LayerRule, Plan, Residence, TensorDimensions,
    nearest::{Choices, nearest_divisor, nearest_multiple, next_to},
};

/// Rules that hold for any degrees, valid or not.
pub(in crate::plan) const WITH_MODEL: &[Rule<Facts>] = &[
    Rule(&["model"], same_model),
    Rule(&["seq_len"], fixed_length),
    Rule(&["recompute"], recomputed_layers),
    Rule(&["mesh.replicate"], world),
    Rule(&["mesh.tensor"], |plan, facts, found| {
        let (tensor, expert_tensor) = (plan.mesh.tensor, plan.mesh.expert_tensor);
        let what =
            format!("tensor {tensor} splits matrices, and frozen ones are quantized as a whole; nearest: 1");
        with_quantized(facts, tensor > 1 || expert_tensor > 1, what, found);
    }),
    Rule(&["zero_stage"], |plan, facts, found| {
        let what = "zero_stage 3 shards parameters, and quantized ones are replicated; nearest: 2";
        with_quantized(facts, plan.zero_stage >= 3, what.to_owned(), found);
    }),
    Rule(&["residence.parameters"], |plan, facts, found| {
        let is_elsewhere = plan.residence.parameters != Residence::Memory;
        let what = "parameters are offloaded, and quantized ones stay in memory; allowed: \"none\"";
        with_quantized(facts, is_elsewhere, what.to_owned(), found);
    }),
];

/// Adds a problem if frozen matrices are quantized and `is_refused`.
fn with_quantized(facts: &Facts, is_refused: bool, what: String, found: &mut Vec<String>) {
    if facts.has_quantized_weights && is_refused {
        found.push(what);
    }
}

/// Rules that divide by degrees, for meshes with at least one rank.
pub(in crate::plan) const ON_RANKS: &[Rule<Facts>] = &[
    Rule(&["mesh.tensor"], tensor),
    Rule(&["tensor_layout", "mesh.tensor"], square),
    Rule(&["mesh.tensor"], side),
    // Each row of a 2D layout has whole sequences.
    Rule(&["micro_batch", "tensor_layout"], |plan, facts, found| {
        multiple_of_side("micro_batch", plan.micro_batch_of(facts.step.global_batch), plan, found);
    }),
    Rule(&["seq_len", "tensor_layout"], |plan, facts, found| {
        multiple_of_side("seq_len", facts.step.seq_len, plan, found);
    }),
    Rule(&["tensor_layout"], adapter_of_side),
    Rule(&["tensor_layout", "mesh.tensor"], beside_square),
    Rule(&["mesh.tensor"], vocabulary),
    Rule(&["mesh.context"], |plan, facts, found| {
        if facts.heads == 0 {
            without_heads("context", plan.mesh.context, found);
        } else if facts.has_inputs {
            with_inputs(plan.mesh.context, found);
        }
    }),
    Rule(&["mesh.expert"], |plan, facts, found| {
        experts(("expert", plan.mesh.expert), (facts.experts, "experts"), facts, found);
    }),
    Rule(&["mesh.expert_tensor"], |plan, facts, found| {
        let split = (facts.expert_intermediate, "columns of an expert");
        experts(("expert_tensor", plan.mesh.expert_tensor), split, facts, found);
        if plan.mesh.expert_tensor > 1 && facts.experts_have_biases {
            let degree = plan.mesh.expert_tensor;
            found.push(format!("expert_tensor {degree} splits experts, and these have biases; nearest: 1"));
        }
    }),
    Rule(&["seq_len", "mesh.context", "sequence_parallel", "tensor_layout"], sequence),
    Rule(&["mesh.context", "context_method"], all_to_all),
    Rule(&["tensor_chunks"], chunks),
    Rule(&["stages", "mesh.pipeline"], stage_count),
    Rule(&["mesh.pipeline"], stages_of_units),
    Rule(&["stages", "mesh.pipeline"], empty_stages),
    Rule(&["stages", "mesh.pipeline"], units_of_stages),
];

fn same_model(plan: &Plan, facts: &Facts, found: &mut Vec<String>) {
    let (of_plan, model) = (&plan.model, &facts.model);
    if !of_plan.is_empty() && of_plan != model {
        found.push(format!("the plan is for the model {of_plan}, and this one is {model}"));
    }
}

/// Adds a problem if sequences do not have the length that all samples of the model have.
fn fixed_length(_: &Plan, facts: &Facts, found: &mut Vec<String>) {
    let seq_len = facts.step.seq_len;
    if let Some(fixed) = facts.fixed_seq_len.filter(|fixed| *fixed != seq_len) {
        found
            .push(format!("seq_len {seq_len}, and every sample of this model has {fixed}; nearest: {fixed}"));
    }
}

fn recomputed_layers(plan: &Plan, facts: &Facts, found: &mut Vec<String>) {
    let last = |rule: &LayerRule| rule.to.unwrap_or(rule.from);
    for layer in plan.recompute.rules().map(last).filter(|layer| *layer >= facts.layers) {
        let last = facts.layers.saturating_sub(1);
        found.push(format!("recompute has a rule for layer {layer}, and the model's layers are 0 to {last}"));
    }
}

/// Adds a problem if the mesh and the world differ in size.
fn world(plan: &Plan, facts: &Facts, found: &mut Vec<String>) {
    let world = facts.world_size;
    let Some(mesh) = plan.mesh.world_size().filter(|&ranks| ranks > 0 && ranks != world) else { return };
    let others = mesh / plan.mesh.replicate;
    let replicas = if world.is_multiple_of(others) && world > 0 {
        format!("with replicate {} it would have as many", world / others)
    } else {
        let nearest = nearest_multiple(world, others);
        format!("its other axes have {others}, so it can have any multiple of that; {nearest}")
    };
    found.push(format!("the mesh has {mesh} ranks and the world {world}; {replicas}"));
}

/// Returns true if `things` divides evenly over `ranks`, or each can be replicated on equally many of them.
fn even(things: usize, ranks: usize) -> bool {
    things.is_multiple_of(ranks) || ranks.is_multiple_of(things)
}

impl Facts {
    /// Returns true if a tensor-parallel group of `ranks` can shard the heads, and shard or replicate the key and value heads.
    pub fn shards_heads(&self, ranks: usize) -> bool {
        let has_heads = ranks == 1 || self.heads > 0;
        let shards_keys = if self.norms_span_heads {
            self.key_value_heads.is_multiple_of(ranks)
        } else {
            even(self.key_value_heads, ranks)
        };
        has_heads && self.heads.is_multiple_of(ranks) && shards_keys
    }
}

/// Returns true if the tensor layout is 2D.
fn is_square(plan: &Plan) -> bool {
    plan.mesh.tensor > 1 && plan.tensor_layout == TensorDimensions::Two
}

/// Returns the side of the square of tensor-parallel ranks; `None` if the layout is 1D or the degree is no square.
fn side_of(plan: &Plan) -> Option<usize> {
    let side = plan.mesh.tensor.isqrt();
    (is_square(plan) && side * side == plan.mesh.tensor).then_some(side)
}

fn heads(degree: &str, value: usize, facts: &Facts, nearest: Choices, found: &mut Vec<String>) {
    divides((degree, value), (facts.heads, "attention heads"), nearest, found);
    let number = facts.key_value_heads;
    if !even(number, value) {
        found.push(format!(
            "{degree} {value} is neither a divisor nor a multiple of the {number} key/value heads; {nearest}"
        ));
    }
}

/// Adds a problem if a degree does not divide the number of things that it shards.
fn divides(degree: (&str, usize), split: (usize, &str), nearest: Choices, found: &mut Vec<String>) {
    let ((degree, value), (number, things)) = (degree, split);
    if !number.is_multiple_of(value) {
        found.push(format!("{degree} {value} does not divide the {number} {things}; {nearest}"));
    }
}

fn multiple(name: &str, number: usize, factors: &str, factor: usize, found: &mut Vec<String>) {
    if number > 0 && !number.is_multiple_of(factor) {
        let nearest = nearest_multiple(number, factor);
        found.push(format!("{name} {number} is not a multiple of {factors} = {factor}; {nearest}"));
    }
}

fn tensor(plan: &Plan, facts: &Facts, found: &mut Vec<String>) {
    if is_square(plan) {
        return;
    }
    let (tensor, columns) = (plan.mesh.tensor, facts.intermediate);
    if facts.heads == 0 {
        without_heads("tensor", tensor, found);
        return;
    }
    let valid = |value: &usize| facts.shards_heads(*value) && columns.is_multiple_of(*value);
    let most = if facts.vocab == 0 { facts.heads } else { facts.heads.min(facts.vocab) };
    let nearest = next_to(tensor, (1..=most).filter(valid));
    heads("tensor", tensor, facts, nearest, found);
    if facts.norms_span_heads {
        let keys = (facts.key_value_heads, "key/value heads, whose norm spans them all");
        divides(("tensor", tensor), keys, nearest, found);
    }
    divides(("tensor", tensor), (columns, "columns of the feed-forward layers"), nearest, found);
}

/// Adds a problem if ranks are to share the blocks or the sequences of a model without attention.
fn without_heads(degree: &str, value: usize, found: &mut Vec<String>) {
    if value > 1 {
        found.push(format!("{degree} {value} shards attention heads, and this model has none; nearest: 1"));
    }
}

/// Adds a problem if ranks are to share the sequences of a model with named inputs, which belong to whole sequences.
fn with_inputs(context: usize, found: &mut Vec<String>) {
    if context > 1 {
        found.push(format!(
            "context {context} shards sequences, and this model reads inputs of whole sequences beside its tokens; nearest: 1"
        ));
    }
}

/// Returns the counts that the side of a 2D layout has to divide.
fn split_by_side(facts: &Facts) -> [(usize, &'static str); 4] {
    [
        (facts.heads, "attention heads"),
        (facts.key_value_heads, "key/value heads"),
        (facts.hidden, "columns between blocks"),
        (facts.intermediate, "columns of the feed-forward layers"),
    ]
}

/// Returns the sides that divide all of these counts.
fn sides(facts: &Facts) -> impl Iterator<Item = usize> {
    let split = split_by_side(facts);
    (2..=facts.heads).filter(move |side| split.iter().all(|(number, _)| number.is_multiple_of(*side)))
}

fn square(plan: &Plan, facts: &Facts, found: &mut Vec<String>) {
    if is_square(plan) && side_of(plan).is_none() {
        let tensor = plan.mesh.tensor;
        let nearest = next_to(tensor, sides(facts).filter_map(|side| side.checked_mul(side)));
        found
            .push(format!("tensor {tensor} is no square of 2 or more, which two dimensions need; {nearest}"));
    }
}

/// Name of the side in messages.
const SIDE: &str = "tensor's side";

fn side(plan: &Plan, facts: &Facts, found: &mut Vec<String>) {
    let Some(side) = side_of(plan) else { return };
    let nearest = next_to(side, sides(facts));
    for split in split_by_side(facts) {
        divides((SIDE, side), split, nearest, found);
    }
}

fn multiple_of_side(name: &str, number: usize, plan: &Plan, found: &mut Vec<String>) {
    if let Some(side) = side_of(plan) {
        multiple(name, number, SIDE, side, found);
    }
}

fn adapter_of_side(plan: &Plan, facts: &Facts, found: &mut Vec<String>) {
    let Some(side) = side_of(plan) else { return };
    if let Some(rank) = facts.adapter_rank.filter(|rank| !rank.is_multiple_of(side)) {
        found.push(format!(
            "{SIDE} {side} does not divide the {rank} columns of the adapter; \
             allowed: \"1d\", or a rank that is a multiple of {side}"
        ));
    }
}

fn beside_square(plan: &Plan, facts: &Facts, found: &mut Vec<String>) {
    let others = [
        (plan.mesh.context > 1, "context parallelism"),
        (facts.experts > 0, "experts"),
        (facts.has_latent_attention, "latent attention"),
        (facts.norms_span_heads, "norms over all heads of queries and keys"),
    ];
    for (_, with) in others.into_iter().filter(|(is_there, _)| is_square(plan) && *is_there) {
        found.push(format!(
            "tensor ranks in two dimensions do not go together with {with}; nearest: tensor_layout 1d"
        ));
    }
}

fn vocabulary(plan: &Plan, facts: &Facts, found: &mut Vec<String>) {
    let (tensor, vocab) = (plan.mesh.tensor, facts.vocab);
    if facts.heads > 0 && vocab > 0 && tensor > vocab {
        found.push(format!(
            "tensor {tensor} leaves ranks without a token of the vocabulary of {vocab}; nearest: {vocab}"
        ));
    }
}

/// Adds a problem if an expert degree does not divide the things that it shards.
fn experts(degree: (&str, usize), split: (usize, &str), facts: &Facts, found: &mut Vec<String>) {
    match degree {
        (_, 1) => {}
        (degree, value) if facts.experts == 0 => {
            let what = "needs a model with experts, and this one has none; nearest: 1";
            found.push(format!("{degree} {value} {what}"));
        }
        (_, value) => divides(degree, split, nearest_divisor(value, split.0), found),
    }
}

fn sequence(plan: &Plan, facts: &Facts, found: &mut Vec<String>) {
    let (context, tensor) = (plan.mesh.context, plan.mesh.tensor);
    let halves = context > 1 && plan.context_method != ContextMethod::AllToAll;
    let parts = if halves { 2 * context } else { context };
    // Tensor-parallel ranks shard the tokens that they send to experts.
    let splits_tokens = plan.sequence_parallel || facts.experts > 0;
    let (factor, factors) = match (splits_tokens && tensor > 1 && !is_square(plan), halves) {
        (true, true) => (least_common_multiple(parts, context * tensor), "2 x context and context x tensor"),
        (true, false) => (context * tensor, "context x tensor"),
        (false, true) => (parts, "2 x context"),
        (false, false) => (parts, "context"),
    };
    // Ranks that shard the tokens of whole sequences need not shard each sequence evenly, unless experts balance them.
    let of_micro_batch = plan.micro_batch_of(facts.step.global_batch).saturating_mul(facts.step.seq_len);
    let is_even = context == 1 && facts.experts == 0 && of_micro_batch.is_multiple_of(factor);
    if !is_even {
        multiple("seq_len", facts.step.seq_len, factors, factor, found);
    }
}

/// Adds a problem if the heads of a tensor-parallel rank cannot be sharded over the context-parallel group.
fn all_to_all(plan: &Plan, facts: &Facts, found: &mut Vec<String>) {
    let (context, tensor) = (plan.mesh.context, plan.mesh.tensor);
    if context > 1 && plan.context_method == ContextMethod::AllToAll {
        let ranks = context * tensor;
        let products = (1..=facts.heads / tensor).map(|context| context * tensor);
        let nearest = next_to(ranks, products.filter(|&ranks| facts.shards_heads(ranks)));
        heads("context x tensor", ranks, facts, nearest, found);
    }
}

fn chunks(plan: &Plan, facts: &Facts, found: &mut Vec<String>) {
    let Some(chunks) = plan.tensor_chunks else { return };
    let tensor = if plan.sequence_parallel { plan.mesh.tensor } else { 1 };
    let of_micro_batch = plan.micro_batch_of(facts.step.global_batch).saturating_mul(facts.step.seq_len);
    let tokens = of_micro_batch / (plan.mesh.context * tensor);
    if chunks > tokens && tokens > 0 {
        found.push(format!(
            "tensor_chunks {chunks} cuts the {tokens} tokens that a rank has of a micro-batch into less than one each; \
             at most: {tokens}"
        ));
    }
}

fn stage_count(plan: &Plan, _: &Facts, found: &mut Vec<String>) {
    let (given, ranks) = (plan.stages.len(), plan.mesh.pipeline);
    if let Some(stages) = plan.schedule.stages(ranks).filter(|&stages| stages != given) {
        let chunks = stages / ranks;
        found.push(format!(
            "the plan splits the model into {given} stages and its schedule has {stages}, {chunks} on each of {ranks} ranks"
        ));
    }
}

fn stages_of_units(plan: &Plan, facts: &Facts, found: &mut Vec<String>) {
    let (units, parts) = (facts.units, facts.units_in_words());
    if let Some(stages) = plan.schedule.stages(plan.mesh.pipeline).filter(|&stages| stages > units) {
        found.push(format!(
            "{stages} stages are more than the {units} units of the model: {parts}; \
             nearest: {units}"
        ));
    }
}

fn empty_stages(plan: &Plan, _: &Facts, found: &mut Vec<String>) {
    let empty = plan.stages.iter().enumerate().filter(|(_, units)| **units == 0);
    found.extend(empty.map(|(stage, _)| format!("stage {stage} has no unit; it has at least 1")));
}

fn units_of_stages(plan: &Plan, facts: &Facts, found: &mut Vec<String>) {
    let (units, parts) = (facts.units, facts.units_in_words());
    let given = plan.stages.iter().fold(0_usize, |sum, &units| sum.saturating_add(units));
    if given != units {
        found.push(format!("the stages have {given} units and the model {units}: {parts}"));
    }
}

fn least_common_multiple(a: usize, b: usize) -> usize {
    let (mut divisor, mut rest) = (a, b);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    a / divisor * b
}
