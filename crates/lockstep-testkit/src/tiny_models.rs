//! The models of the parity matrix: a tiny one for each family whose numbers a plan could change in a way of its own.

use lockstep_train::verify::TINY_LLAMA;

/// Model of the matrix, as settings of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TinyModel {
    /// Name in messages.
    pub name: &'static str,
    /// Settings that define the model.
    pub settings: &'static [&'static str],
}

/// Learned positions, LayerNorm, tied embeddings, biases, and dropout at every site.
pub const GPT2: TinyModel = TinyModel {
    name: "gpt2",
    settings: &[
        "model.preset=baby-gpt",
        "model.n_layer=4",
        "model.n_embd=32",
        "model.n_head=4",
        "model.n_positions=16",
        "model.bias=true",
        "train.dropout=0.1",
    ],
};

/// Rotary positions, RMSNorm, grouped-query attention, tied embeddings.
pub const LLAMA: TinyModel = TinyModel { name: "llama", settings: &TINY_LLAMA };

/// Query and key norms, and an untied output layer.
pub const QWEN3: TinyModel = TinyModel {
    name: "qwen3",
    settings: &[
        "model.preset=qwen3-0.6b",
        "model.vocab_size=256",
        "model.hidden_size=32",
        "model.intermediate_size=48",
        "model.num_hidden_layers=4",
        "model.num_attention_heads=8",
        "model.num_key_value_heads=4",
        "model.head_dim=8",
        "model.max_position_embeddings=16",
        "model.tie_word_embeddings=false",
    ],
};

/// Query, key and value biases.
pub const QWEN2: TinyModel = TinyModel {
    name: "qwen2",
    settings: &[
        "model.model_type=qwen2",
        "model.vocab_size=256",
        "model.hidden_size=32",
        "model.intermediate_size=48",
        "model.num_hidden_layers=2",
        "model.num_attention_heads=4",
        "model.num_key_value_heads=2",
        "model.max_position_embeddings=16",
    ],
};

/// Llama with sliding-window attention.
pub const MISTRAL: TinyModel = TinyModel {
    name: "mistral",
    settings: &[
        "model.model_type=mistral",
        "model.vocab_size=256",
        "model.hidden_size=32",
        "model.intermediate_size=48",
        "model.num_hidden_layers=2",
        "model.num_attention_heads=4",
        "model.num_key_value_heads=2",
        "model.max_position_embeddings=16",
        "model.sliding_window=5",
    ],
};

/// Experts with an auxiliary loss, a z-loss, and a capacity that drops tokens.
pub const MIXTRAL: TinyModel = TinyModel {
    name: "mixtral",
    settings: &[
        "model.preset=mixtral-20m",
        "model.hidden_size=32",
        "model.intermediate_size=24",
        "model.num_hidden_layers=4",
        "model.num_attention_heads=8",
        "model.num_key_value_heads=4",
        "model.num_local_experts=4",
        "model.router_aux_loss_coef=0.1",
        "model.router_z_loss_coef=0.01",
        "model.expert_capacity_factor=1.25",
        "model.max_position_embeddings=16",
        "model.initializer_range=0.2",
    ],
};

/// A shared expert beside the routed ones, and layers without experts.
pub const QWEN2_MOE: TinyModel = TinyModel {
    name: "qwen2_moe",
    settings: &[
        "model.model_type=qwen2_moe",
        "model.vocab_size=256",
        "model.hidden_size=32",
        "model.intermediate_size=48",
        "model.moe_intermediate_size=16",
        "model.shared_expert_intermediate_size=32",
        "model.num_hidden_layers=4",
        "model.decoder_sparse_step=2",
        "model.num_attention_heads=8",
        "model.num_key_value_heads=4",
        "model.num_experts=8",
        "model.num_experts_per_tok=3",
        "model.router_aux_loss_coef=0.05",
        "model.max_position_embeddings=16",
        "model.initializer_range=0.2",
    ],
};

/// Multi-head latent attention, group-limited routing, and a router bias for load balancing.
pub const DEEPSEEK: TinyModel = TinyModel {
    name: "deepseek_v3",
    settings: &[
        "model.model_type=deepseek_v3",
        "model.vocab_size=256",
        "model.hidden_size=32",
        "model.intermediate_size=48",
        "model.moe_intermediate_size=16",
        "model.num_hidden_layers=4",
        "model.num_attention_heads=8",
        "model.q_lora_rank=16",
        "model.kv_lora_rank=16",
        "model.qk_nope_head_dim=4",
        "model.qk_rope_head_dim=4",
        "model.v_head_dim=6",
        "model.n_routed_experts=8",
        "model.n_group=4",
        "model.topk_group=2",
        "model.num_experts_per_tok=3",
        "model.first_k_dense_replace=1",
        "model.router_bias_update_rate=0.002",
        "model.max_position_embeddings=16",
        "model.initializer_range=0.2",
    ],
};

/// Norms around every branch, capped scores and logits, scaled embeddings, and windows in every other layer.
pub const GEMMA2: TinyModel = TinyModel {
    name: "gemma2",
    settings: &[
        "model.model_type=gemma2",
        "model.vocab_size=256",
        "model.hidden_size=32",
        "model.intermediate_size=48",
        "model.num_hidden_layers=4",
        "model.num_attention_heads=8",
        "model.num_key_value_heads=4",
        "model.head_dim=8",
        "model.sliding_window=5",
        "model.query_pre_attn_scalar=6",
        "model.attn_logit_softcapping=2.0",
        "model.final_logit_softcapping=3.0",
        "model.max_position_embeddings=16",
        "model.initializer_range=0.2",
    ],
};

/// Norms of queries and keys, and a RoPE of their own in layers with a window.
pub const GEMMA3: TinyModel = TinyModel {
    name: "gemma3",
    settings: &[
        "model.model_type=gemma3_text",
        "model.vocab_size=256",
        "model.hidden_size=32",
        "model.intermediate_size=48",
        "model.num_hidden_layers=4",
        "model.num_attention_heads=4",
        "model.num_key_value_heads=2",
        "model.head_dim=8",
        "model.sliding_window=5",
        "model.sliding_window_pattern=3",
        "model.rope_theta=1000.0",
        "model.rope_local_base_freq=100.0",
        "model.max_position_embeddings=16",
    ],
};

/// Norms after every branch, and norms over all heads of queries and keys.
pub const OLMO2: TinyModel = TinyModel {
    name: "olmo2",
    settings: &[
        "model.model_type=olmo2",
        "model.vocab_size=256",
        "model.hidden_size=32",
        "model.intermediate_size=48",
        "model.num_hidden_layers=4",
        "model.num_attention_heads=8",
        "model.num_key_value_heads=4",
        "model.max_position_embeddings=16",
    ],
};

/// Heads that rotate in part.
pub const PHI3: TinyModel = TinyModel {
    name: "phi3",
    settings: &[
        "model.model_type=phi3",
        "model.vocab_size=256",
        "model.hidden_size=32",
        "model.intermediate_size=48",
        "model.num_hidden_layers=2",
        "model.num_attention_heads=4",
        "model.num_key_value_heads=2",
        "model.partial_rotary_factor=0.5",
        "model.sliding_window=9",
        "model.max_position_embeddings=16",
    ],
};

/// Attention sinks, windows in every other layer, and experts with biases. None of its gates reaches the limit: at a limit
/// gradients jump, so that rounding would change them.
pub const GPT_OSS: TinyModel = TinyModel {
    name: "gpt_oss",
    settings: &[
        "model.model_type=gpt_oss",
        "model.vocab_size=256",
        "model.hidden_size=32",
        "model.intermediate_size=24",
        "model.num_hidden_layers=4",
        "model.num_attention_heads=8",
        "model.num_key_value_heads=4",
        "model.head_dim=8",
        "model.sliding_window=5",
        "model.num_local_experts=8",
        "model.num_experts_per_tok=3",
        "model.router_aux_loss_coef=0.05",
        "model.max_position_embeddings=16",
        "model.initializer_range=0.2",
    ],
};

/// All models of the matrix without experts.
pub const MODELS: [TinyModel; 3] = [GPT2, LLAMA, QWEN3];

/// All models of the matrix with experts.
pub const MIXTURES: [TinyModel; 4] = [MIXTRAL, QWEN2_MOE, DEEPSEEK, GPT_OSS];

/// Number of units in each of these models: the embedding, four blocks and the head.
pub const UNITS: usize = 6;
