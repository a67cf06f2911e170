//! The Llama-like families: a table of the defaults of transformers and of the keys in which they differ.

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
}

impl LlamaFamily {
    /// Every Llama-like family.
    pub const ALL: [Self; 8] = [
        Self::Llama,
        Self::Mistral,
        Self::Qwen2,
        Self::Qwen3,
        Self::Mixtral,
        Self::Qwen2Moe,
        Self::Qwen3Moe,
        Self::DeepseekV3,
    ];

    /// Returns the value of `model_type`.
    pub const fn model_type(self) -> &'static str {
        self.traits().model_type
    }

    /// Returns true if the family has experts.
    pub const fn has_experts(self) -> bool {
        matches!(self, Self::Mixtral | Self::Qwen2Moe | Self::Qwen3Moe | Self::DeepseekV3)
    }

    /// Returns the row of the family in the table.
    pub(crate) const fn traits(self) -> FamilyTraits {
        let llama = FamilyTraits {
            model_type: "llama",
            architecture: "LlamaForCausalLM",
            sizes: [32000, 4096, 11008, 32, 32, 2048],
            num_key_value_heads: None,
            rms_norm_eps: 1e-6,
            attention_bias: AttentionBias::Configured,
            has_qk_norm: false,
            windows: Windows::Never,
        };
        let mistral = FamilyTraits {
            model_type: "mistral",
            architecture: "MistralForCausalLM",
            sizes: [32000, 4096, 14336, 32, 32, 4096 * 32],
            num_key_value_heads: Some(8),
            attention_bias: AttentionBias::Never,
            windows: Windows::InAllLayers { default: Some(4096) },
            ..llama
        };
        let qwen2 = FamilyTraits {
            model_type: "qwen2",
            architecture: "Qwen2ForCausalLM",
            sizes: [151936, 4096, 22016, 32, 32, 32768],
            num_key_value_heads: Some(32),
            attention_bias: AttentionBias::OnQueriesKeysValues,
            windows: Windows::InUpperLayers,
            ..llama
        };
        let qwen3 = FamilyTraits {
            model_type: "qwen3",
            architecture: "Qwen3ForCausalLM",
            attention_bias: AttentionBias::Configured,
            has_qk_norm: true,
            ..qwen2
        };
        match self {
            Self::Llama => llama,
            Self::Mistral => mistral,
            Self::Qwen2 => qwen2,
            Self::Qwen3 => qwen3,
            Self::Mixtral => FamilyTraits {
                model_type: "mixtral",
                architecture: "MixtralForCausalLM",
                rms_norm_eps: 1e-5,
                windows: Windows::InAllLayers { default: None },
                ..mistral
            },
            Self::Qwen2Moe => FamilyTraits {
                model_type: "qwen2_moe",
                architecture: "Qwen2MoeForCausalLM",
                sizes: [151936, 2048, 5632, 24, 16, 32768],
                num_key_value_heads: Some(16),
                ..qwen2
            },
            Self::Qwen3Moe => FamilyTraits {
                model_type: "qwen3_moe",
                architecture: "Qwen3MoeForCausalLM",
                sizes: [151936, 2048, 6144, 24, 32, 32768],
                num_key_value_heads: Some(4),
                ..qwen3
            },
            Self::DeepseekV3 => FamilyTraits {
                model_type: "deepseek_v3",
                architecture: "DeepseekV3ForCausalLM",
                sizes: [129280, 7168, 18432, 61, 128, 4096],
                attention_bias: AttentionBias::Never,
                ..llama
            },
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
    /// True if queries and keys have norms.
    pub(crate) has_qk_norm: bool,
    pub(crate) windows: Windows,
}

/// Attention biases of a family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttentionBias {
    /// On all four projections if the key `attention_bias` is true.
    Configured,
    /// Always on queries, keys and values.
    OnQueriesKeysValues,
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
}
