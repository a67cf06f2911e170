//! What can be wrong with a plan.

use super::PLAN_VERSION;
use crate::{
    mesh::MeshProblem,
    nearest::{Choices, lines},
    schedule::ScheduleProblem,
};

/// Why a plan cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The text is no plan.
    #[error("this is no plan: {0}")]
    Syntax(#[from] serde_json::Error),
    /// The plan cannot be executed: everything that is wrong, one line each.
    #[error("{}", lines(.0))]
    Invalid(Vec<PlanProblem>),
}

/// One thing that is wrong with a plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanProblem {
    /// A file of another version.
    #[error("the plan's format has version {version}; this program reads version {PLAN_VERSION}")]
    Version {
        /// The file's.
        version: u32,
    },
    /// A plan for another model.
    #[error("the plan is for the model {plan}, and this one is {model}")]
    OtherModel {
        /// Digest in the plan.
        plan: String,
        /// Digest of the model.
        model: String,
    },
    /// Degrees that are no mesh.
    #[error(transparent)]
    Mesh(#[from] MeshProblem),
    /// A mesh of another size than the world.
    #[error(
        "the mesh has {mesh} ranks and the world {world}; {}",
        replicas(.without_replicate, .world)
    )]
    World {
        /// Ranks of the mesh.
        mesh: usize,
        /// Ranks that are there.
        world: usize,
        /// Ranks of the mesh with one replica.
        without_replicate: usize,
    },
    /// A degree that does not divide what it splits.
    #[error("{degree} {value} does not divide the {number} {things}; {nearest}")]
    Degree {
        /// Name of the degree, or of the product of degrees.
        degree: &'static str,
        /// Its value.
        value: usize,
        /// How many things there are.
        number: usize,
        /// What is split.
        things: &'static str,
        /// The values next to it that split everything they have to.
        nearest: Choices,
    },
    /// Key and value heads that can be neither shared out nor repeated evenly.
    #[error(
        "{degree} {value} is neither a divisor nor a multiple of the {number} key/value heads; {nearest}"
    )]
    KeyValueHeads {
        /// Name of the degree, or of the product of degrees.
        degree: &'static str,
        /// Its value.
        value: usize,
        /// Key and value heads.
        number: usize,
        /// The values next to it that split everything they have to.
        nearest: Choices,
    },
    /// Tensor ranks in two dimensions that are no square.
    #[error("tensor {tensor} is no square of 2 or more, which two dimensions need; {nearest}")]
    NoSquare {
        /// The degree.
        tensor: usize,
        /// The squares next to it that split everything they have to.
        nearest: Choices,
    },
    /// Something that ranks in two dimensions cannot share.
    #[error("tensor ranks in two dimensions do not go together with {with}; nearest: tensor_layout 1d")]
    TwoDimensions {
        /// What it is.
        with: &'static str,
    },
    /// More tensor ranks than tokens.
    #[error("tensor {tensor} leaves ranks without a token of the vocabulary of {vocab}; nearest: {vocab}")]
    Vocabulary {
        /// The degree.
        tensor: usize,
        /// Tokens.
        vocab: usize,
    },
    /// More chunks than tokens.
    #[error(
        "tensor_chunks {chunks} cuts the {tokens} tokens that a rank has of a micro-batch into less than one each; \
         at most: {tokens}"
    )]
    Chunks {
        /// The number.
        chunks: usize,
        /// Tokens.
        tokens: usize,
    },
    /// A batch or sequence that does not come out even.
    #[error("{name} {number} is not a multiple of {factors} = {factor}; {nearest}")]
    NotMultiple {
        /// What it is.
        name: &'static str,
        /// Its value.
        number: usize,
        /// What it should be a multiple of, in words.
        factors: &'static str,
        /// And as a number.
        factor: usize,
        /// The multiples next to it.
        nearest: Choices,
    },
    /// Something of which there must be at least one.
    #[error("{name} is 0; it is at least 1")]
    Zero {
        /// Its name.
        name: &'static str,
    },
    /// Expert degrees for a model that has none.
    #[error("{degree} {value} needs a model with experts, and this one has none; nearest: 1")]
    NoExperts {
        /// Name of the degree.
        degree: &'static str,
        /// Its value.
        value: usize,
    },
    /// A rule for a layer that there is not.
    #[error("recompute has a rule for layer {layer}, and the model's layers are 0 to {}", layers.saturating_sub(1))]
    RecomputeLayer {
        /// Its number.
        layer: usize,
        /// How many there are.
        layers: usize,
    },
    /// Nothing is sent that would be quantized.
    #[error("{what} is for what zero_stage {least} and more send, and zero_stage is {zero_stage}")]
    NothingToQuantize {
        /// The field.
        what: &'static str,
        /// The plan's.
        zero_stage: u8,
        /// The least that would do.
        least: u8,
    },
    /// Weights in too few bits.
    #[error(
        "quantize_weights is int4; it is int8 or left out, for weights of 4 bits are too coarse to train"
    )]
    NarrowWeights,
    /// A stage of ZeRO that does not exist.
    #[error("zero_stage {zero_stage} does not exist; it is 0, 1, 2 or 3")]
    ZeroStage {
        /// What was given.
        zero_stage: u8,
    },
    /// A schedule that is none.
    #[error("schedule of {micro_batches} micro-batches: {problem}")]
    Schedule {
        /// Micro-batches of a step.
        micro_batches: usize,
        /// What is wrong.
        problem: ScheduleProblem,
    },
    /// A split into another number of stages than the schedule has.
    #[error(
        "the plan splits the model into {given} stages and its schedule has {stages}, {chunks} on each of {ranks} ranks"
    )]
    StageCount {
        /// Stages of the split.
        given: usize,
        /// Stages of the schedule.
        stages: usize,
        /// Stages of a rank.
        chunks: usize,
        /// Pipeline ranks.
        ranks: usize,
    },
    /// More stages than units.
    #[error(
        "{stages} stages are more than the {units} units of the model: embedding, {layers} blocks and head; nearest: {units}"
    )]
    TooManyStages {
        /// Stages of the schedule.
        stages: usize,
        /// Units of the model.
        units: usize,
        /// Blocks of the model.
        layers: usize,
    },
    /// A stage without any unit.
    #[error("stage {stage} has no unit; it has at least 1")]
    EmptyStage {
        /// Which.
        stage: usize,
    },
    /// A prediction that says two things of a rank.
    #[error("predicted.memory has rank {rank} more than once")]
    PredictedTwice {
        /// Which.
        rank: usize,
    },
    /// A split of another number of units than the model has.
    #[error("the stages have {given} units and the model {units}: embedding, {layers} blocks and head")]
    Units {
        /// Units of all stages.
        given: usize,
        /// Units of the model.
        units: usize,
        /// Blocks of the model.
        layers: usize,
    },
}

fn replicas(without_replicate: &usize, world: &usize) -> String {
    if world.is_multiple_of(*without_replicate) && *world > 0 {
        return format!("with replicate {} it would have as many", world / without_replicate);
    }
    let nearest = crate::nearest::nearest_multiple(*world, *without_replicate);
    format!("its other axes have {without_replicate}, so it can have any multiple of that; {nearest}")
}
