//! The Llama-like families: a table of the defaults of transformers, and of the keys and parts of a block in which they
//! differ.

use lockstep_tensor::{GatedActivation, Gelu};

/// Llama-like families, one for each `model_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LlamaFamily {
    /// Llama 1 to 3: biases as configured.
    Llama,
    /// Mistral: a sliding window, no biases.
    Mistral,
    /// Qwen2 and Qwen2.5: biases on queries, keys and values.
    Qwen2,
    /// Qwen3: norms on queries and keys, and an independent head size.
    Qwen3,
    /// Mistral's architecture with experts in every layer.
    Mixtral,
    /// Qwen2's architecture with experts, one of which is shared by all tokens.
    Qwen2Moe,
    /// Qwen3's architecture with experts.
    Qwen3Moe,
    /// DeepSeek-V3: latent attention, and experts that are chosen by group and balanced by a selection bias.
    DeepseekV3,
    /// Gemma: a feed-forward gated by GELU, scaled embeddings, and norms whose weights are offsets from one.
    Gemma,
    /// Gemma 2: norms around attention and feed-forward, soft caps, and windows in every other layer.
    Gemma2,
    /// The text model of Gemma 3: norms on queries and keys, and windows with a RoPE of their own in five of six layers.
    Gemma3,
    /// OLMo 2: norms after attention and feed-forward only, and norms over whole queries and keys.
    Olmo2,
    /// Phi-3 and Phi-4: fused projections in checkpoints, and RoPE on part of each head.
    Phi3,
    /// gpt-oss: attention sinks, windows in every other layer, and experts with biases and clamped gates.
    GptOss,
}

/// The row of Llama, from which the others differ.
const LLAMA: FamilyTraits = FamilyTraits {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    sizes: [32000, 4096, 11008, 32, 32, 2048],
    num_key_value_heads: None,
    rms_norm_eps: 1e-6,
    attention_bias: AttentionBias::Configured,
    qk_norm: QueryKeyNorm::Never,
    windows: Windows::Never,
    head_dim: None,
    rope_theta: 10_000.0,
    ties_embeddings: false,
    soft_caps: None,
    block: BlockStyle {
        norms: NormPlacement::Before,
        norm_scale: NormScale::Weight,
        gate: GatedActivation::Silu,
        scales_embeddings: false,
        has_sinks: false,
    },
};

/// The row of Mistral, which Mixtral shares.
const MISTRAL: FamilyTraits = FamilyTraits {
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    sizes: [32000, 4096, 14336, 32, 32, 4096 * 32],
    num_key_value_heads: Some(8),
    attention_bias: AttentionBias::Never,
    windows: Windows::InAllLayers { default: Some(4096) },
    ..LLAMA
};

/// The row of Qwen2, which the other Qwen families share.
const QWEN2: FamilyTraits = FamilyTraits {
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    sizes: [151936, 4096, 22016, 32, 32, 32768],
    num_key_value_heads: Some(32),
    attention_bias: AttentionBias::OnQueriesKeysValues,
    windows: Windows::InUpperLayers,
    ..LLAMA
};

/// The row of Qwen3, which its experts share.
const QWEN3: FamilyTraits = FamilyTraits {
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    attention_bias: AttentionBias::Configured,
    qk_norm: QueryKeyNorm::OfHeads,
    head_dim: Some(128),
    ..QWEN2
};

impl LlamaFamily {
    /// Every Llama-like family.
    pub const ALL: [Self; 14] = [
        Self::Llama,
        Self::Mistral,
        Self::Qwen2,
        Self::Qwen3,
        Self::Mixtral,
        Self::Qwen2Moe,
        Self::Qwen3Moe,
        Self::DeepseekV3,
        Self::Gemma,
        Self::Gemma2,
        Self::Gemma3,
        Self::Olmo2,
        Self::Phi3,
        Self::GptOss,
    ];

    /// Returns the value of `model_type`.
    pub const fn model_type(self) -> &'static str {
        self.traits().model_type
    }

    /// Returns true if the family has experts.
    pub const fn has_experts(self) -> bool {
        matches!(self, Self::Mixtral | Self::Qwen2Moe | Self::Qwen3Moe | Self::DeepseekV3 | Self::GptOss)
    }

    /// Returns the row of the family in the table.
    pub(crate) const fn traits(self) -> FamilyTraits {
        match self {
            Self::Llama => LLAMA,
            Self::Mistral => MISTRAL,
            Self::Qwen2 => QWEN2,
            Self::Qwen3 => QWEN3,
            Self::Mixtral => FamilyTraits {
                model_type: "mixtral",
                architecture: "MixtralForCausalLM",
                rms_norm_eps: 1e-5,
                windows: Windows::InAllLayers { default: None },
                ..MISTRAL
            },
            Self::Qwen2Moe => FamilyTraits {
                model_type: "qwen2_moe",
                architecture: "Qwen2MoeForCausalLM",
                sizes: [151936, 2048, 5632, 24, 16, 32768],
                num_key_value_heads: Some(16),
                ..QWEN2
            },
            Self::Qwen3Moe => FamilyTraits {
                model_type: "qwen3_moe",
                architecture: "Qwen3MoeForCausalLM",
                sizes: [151936, 2048, 6144, 24, 32, 32768],
                num_key_value_heads: Some(4),
                ..QWEN3
            },
            Self::DeepseekV3 => FamilyTraits {
                model_type: "deepseek_v3",
                architecture: "DeepseekV3ForCausalLM",
                sizes: [129280, 7168, 18432, 61, 128, 4096],
                attention_bias: AttentionBias::Never,
                ..LLAMA
            },
            Self::Gemma | Self::Gemma2 | Self::Gemma3 => self.gemma_traits(),
            Self::Olmo2 => FamilyTraits {
                model_type: "olmo2",
                architecture: "Olmo2ForCausalLM",
                sizes: [50304, 4096, 11008, 32, 32, 2048],
                rms_norm_eps: 1e-5,
                qk_norm: QueryKeyNorm::OfAll,
                block: BlockStyle { norms: NormPlacement::After, ..LLAMA.block },
                ..LLAMA
            },
            Self::Phi3 => FamilyTraits {
                model_type: "phi3",
                architecture: "Phi3ForCausalLM",
                sizes: [32064, 3072, 8192, 32, 32, 4096],
                rms_norm_eps: 1e-5,
                attention_bias: AttentionBias::Never,
                windows: Windows::InAllLayers { default: None },
                ..LLAMA
            },
            Self::GptOss => FamilyTraits {
                model_type: "gpt_oss",
                architecture: "GptOssForCausalLM",
                sizes: [201088, 2880, 2880, 36, 64, 4096 * 32],
                num_key_value_heads: Some(8),
                rms_norm_eps: 1e-5,
                attention_bias: AttentionBias::Everywhere,
                windows: Windows::InMostLayers { default: 128, every: 2 },
                head_dim: Some(64),
                rope_theta: 150_000.0,
                block: BlockStyle {
                    gate: GatedActivation::Clamped { slope: 1.702, limit: 7.0 },
                    has_sinks: true,
                    ..LLAMA.block
                },
                ..LLAMA
            },
        }
    }

    const fn gemma_traits(self) -> FamilyTraits {
        let gemma = FamilyTraits {
            model_type: "gemma",
            architecture: "GemmaForCausalLM",
            sizes: [256_000, 3072, 24576, 28, 16, 8192],
            num_key_value_heads: Some(16),
            head_dim: Some(256),
            ties_embeddings: true,
            block: BlockStyle {
                norm_scale: NormScale::OnePlusWeight,
                gate: GatedActivation::Gelu(Gelu::Tanh),
                scales_embeddings: true,
                ..LLAMA.block
            },
            ..LLAMA
        };
        let gemma2 = FamilyTraits {
            model_type: "gemma2",
            architecture: "Gemma2ForCausalLM",
            sizes: [256_000, 2304, 9216, 26, 8, 8192],
            num_key_value_heads: Some(4),
            windows: Windows::InMostLayers { default: 4096, every: 2 },
            soft_caps: Some([Some(50.0), Some(30.0)]),
            block: BlockStyle { norms: NormPlacement::Around, ..gemma.block },
            ..gemma
        };
        match self {
            Self::Gemma2 => gemma2,
            Self::Gemma3 => FamilyTraits {
                model_type: "gemma3_text",
                architecture: "Gemma3ForCausalLM",
                sizes: [262_208, 2304, 9216, 26, 8, 4096 * 32],
                qk_norm: QueryKeyNorm::OfHeads,
                windows: Windows::InMostLayers { default: 4096, every: 6 },
                rope_theta: 1_000_000.0,
                soft_caps: Some([None, None]),
                ..gemma2
            },
            _ => gemma,
        }
    }
}

/// A row of the table of families.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FamilyTraits {
    pub(crate) model_type: &'static str,
    /// Class of transformers.
    pub(crate) architecture: &'static str,
    /// Defaults: vocabulary, hidden size, intermediate size, layers, query heads, positions.
    pub(crate) sizes: [usize; 6],
    /// Default number of key and value heads; `None` means as many as query heads.
    pub(crate) num_key_value_heads: Option<usize>,
    /// Default epsilon of the norms.
    pub(crate) rms_norm_eps: f64,
    pub(crate) attention_bias: AttentionBias,
    pub(crate) qk_norm: QueryKeyNorm,
    pub(crate) windows: Windows,
    /// Default elements of a head; `None` divides the hidden size by the heads.
    pub(crate) head_dim: Option<usize>,
    /// Default base of RoPE.
    pub(crate) rope_theta: f64,
    /// Default of `tie_word_embeddings`.
    pub(crate) ties_embeddings: bool,
    /// Default soft caps of scores and logits, and a scale of scores in the configuration (`query_pre_attn_scalar`);
    /// `None` for a family without these keys.
    pub(crate) soft_caps: Option<[Option<f64>; 2]>,
    pub(crate) block: BlockStyle,
}

/// Parts of a family's blocks that no key of its configuration changes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockStyle {
    pub(crate) norms: NormPlacement,
    pub(crate) norm_scale: NormScale,
    /// Gated activation of the feed-forward layers and of the experts.
    pub(crate) gate: GatedActivation,
    /// True if embeddings are multiplied by the square root of the hidden size.
    pub(crate) scales_embeddings: bool,
    /// True if each head has a learned logit without a key in its softmax: `self_attn.sinks`.
    pub(crate) has_sinks: bool,
}

/// Norms of a block relative to attention and feed-forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NormPlacement {
    /// Norms of the inputs of branches: `x + f(norm(x))`.
    Before,
    /// Norms of the outputs of branches: `x + norm(f(x))`.
    After,
    /// Norms of both: `x + norm(f(norm(x)))`.
    Around,
}

/// Scale of a norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NormScale {
    Weight,
    /// The weight is an offset from one.
    OnePlusWeight,
}

/// Norms of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueryKeyNorm {
    Never,
    /// Over each head.
    OfHeads,
    /// Over all heads together.
    OfAll,
}

/// Attention biases of a family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttentionBias {
    /// On all four projections if the key `attention_bias` is true.
    Configured,
    /// Always on queries, keys and values.
    OnQueriesKeysValues,
    /// Always on all four projections.
    Everywhere,
    Never,
}

/// Sliding windows of a family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Windows {
    Never,
    /// In all layers; `default` is the window of an absent key.
    InAllLayers {
        default: Option<usize>,
    },
    /// In the layers from `max_window_layers` on, if `use_sliding_window` is true: Qwen.
    InUpperLayers,
    /// In all layers but the last of every `every`; `default` is the window of an absent key.
    InMostLayers {
        default: usize,
        every: usize,
    },
}
