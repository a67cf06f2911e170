//! Facts about the model, the optimizer step and the world that a plan is checked against.

/// Facts about the optimizer step that rules need and that do not depend on the model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepFacts {
    /// Sequences of a step over all ranks: the global batch size.
    pub global_batch: usize,
    /// Sequence length in tokens.
    pub seq_len: usize,
    /// True if the optimizer needs whole matrices, as Muon does; element-wise optimizers can update any range of elements.
    pub updates_whole_matrices: bool,
    /// True if the loss scale is dynamic (f16).
    pub scales_loss: bool,
}

/// Facts about the model, the step and the world that a plan is checked against.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Digest of the model, compared with [`Plan::model`](crate::Plan::model).
    pub model: String,
    /// Number of units that stages consist of: of a transformer the embedding, the blocks and the head.
    pub units: usize,
    /// Number of layers, which rules of recomputation name: the blocks of a transformer.
    pub layers: usize,
    /// Number of attention heads.
    pub heads: usize,
    /// Number of key/value heads.
    pub key_value_heads: usize,
    /// Hidden size: columns of the values between blocks.
    pub hidden: usize,
    /// Width of the feed-forward layers.
    pub intermediate: usize,
    /// True if keys and values are projected from a latent vector that all heads share (multi-head latent attention).
    pub has_latent_attention: bool,
    /// True if queries and keys have norms over all heads together.
    pub norms_span_heads: bool,
    /// Vocabulary size in tokens; 0 for a model that reads none.
    pub vocab: usize,
    /// True if the model reads named inputs beside its tokens, such as masks or class labels.
    pub has_inputs: bool,
    /// Sequence length in tokens of every sample, for a model whose samples are all of one length.
    pub fixed_seq_len: Option<usize>,
    /// Experts per block; 0 for a dense model.
    pub experts: usize,
    /// Width of an expert's feed-forward layer.
    pub expert_intermediate: usize,
    /// True if the layers of experts have biases.
    pub experts_have_biases: bool,
    /// Rank of the LoRA adapter if only adapters are trained; `None` otherwise.
    pub adapter_rank: Option<usize>,
    /// True if frozen matrices are quantized.
    pub has_quantized_weights: bool,
    /// Facts about the optimizer step.
    pub step: StepFacts,
    /// World size: number of ranks of the run.
    pub world_size: usize,
}

impl Facts {
    /// Describes the units in messages: `embedding, 12 blocks and head`, or their number for other models.
    pub fn units_in_words(&self) -> String {
        let Self { units, layers, .. } = self;
        if *units == layers + 2 {
            format!("embedding, {layers} blocks and head")
        } else {
            format!("{units} units")
        }
    }
}
