//! Keys of a `config.json` that are ignored because they change no number, and keys that are supported with certain values only.
//!
//! The lists are explicit: a key that is on neither list and that no family reads is an error.

/// A key that is supported with certain values only.
pub(super) struct Fixed {
    pub(super) key: &'static str,
    /// The supported values as JSON text (a number may be written in two ways).
    pub(super) allowed: &'static [&'static str],
    /// Explanation of the supported values, for the error message.
    pub(super) supported: &'static str,
}

const fn fixed(key: &'static str, allowed: &'static [&'static str], supported: &'static str) -> Fixed {
    Fixed { key, allowed, supported }
}

/// Options of all families that would change what the model computes.
pub(super) const FIXED_FOR_ALL: &[Fixed] = &[
    fixed("is_encoder_decoder", &["false"], "false (decoder-only models)"),
    fixed("tie_encoder_decoder", &["false"], "false (decoder-only models)"),
    fixed("add_cross_attention", &["false"], "false (decoder-only models)"),
    fixed("cross_attention_hidden_size", &[], "null (decoder-only models)"),
    fixed("pruned_heads", &["{}"], "{} (no pruned heads)"),
    fixed("auto_map", &[], "null (code that comes with a checkpoint is never run)"),
];

/// Keys of Gemma without influence: a second form of the period of layers without a window.
pub(super) const HARMLESS_FOR_GEMMA: &[&str] = &["_sliding_window_pattern"];

/// Options of GPT-2 that would change what the model computes.
pub(super) const FIXED_FOR_GPT2: &[Fixed] = &[
    fixed("scale_attn_weights", &["true"], "true (scores divided by the square root of the head size)"),
    fixed("scale_attn_by_inverse_layer_idx", &["false"], "false"),
    fixed("reorder_and_upcast_attn", &["false"], "false (attention accumulates in f32 as it is)"),
];

/// Options of the Llama-like families that would change what the model computes.
pub(super) const FIXED_FOR_LLAMA: &[Fixed] = &[fixed("use_mrope", &["false"], "false (text only)")];

/// Activation of the families that gate by SiLU.
pub(super) const FIXED_SILU: &[Fixed] = &[fixed("hidden_act", &["\"silu\"", "\"swish\""], "\"silu\"")];

/// Activation of the families that gate by GELU. The first files of Gemma say "gelu" and mean the tanh approximation.
pub(super) const FIXED_GELU: &[Fixed] = &[
    fixed("hidden_act", &["\"gelu_pytorch_tanh\"", "\"gelu\""], "\"gelu_pytorch_tanh\""),
    fixed("hidden_activation", &["\"gelu_pytorch_tanh\""], "\"gelu_pytorch_tanh\""),
];

/// The original context of families that have it in the RoPE table only.
pub(super) const FIXED_WITHOUT_ORIGINAL_CONTEXT: &[Fixed] =
    &[fixed("original_max_position_embeddings", &[], "null here (it belongs into the RoPE table)")];

/// Options of Gemma that would change what the model computes.
pub(super) const FIXED_FOR_GEMMA: &[Fixed] =
    &[fixed("use_bidirectional_attention", &["false"], "false or null (causal attention)")];

/// Options of Phi-3 that would change what the model computes.
pub(super) const FIXED_FOR_PHI3: &[Fixed] = &[
    fixed("resid_pdrop", &["0", "0.0"], "0 (dropout on attention alone)"),
    fixed("embd_pdrop", &["0", "0.0"], "0 (dropout on attention alone)"),
];

/// Keys of gpt-oss without influence: second names of others.
pub(super) const HARMLESS_FOR_GPT_OSS: &[&str] = &["experts_per_token", "initial_context_length"];

/// Options of the families with experts that would change what the model computes.
pub(super) const FIXED_FOR_EXPERTS: &[Fixed] =
    &[fixed("router_jitter_noise", &["0", "0.0"], "0 (routers see what the experts see)")];

/// Options of DeepSeek-V3 that would change what the model computes.
pub(super) const FIXED_FOR_DEEPSEEK: &[Fixed] = &[
    fixed("scoring_func", &["\"sigmoid\""], "\"sigmoid\""),
    fixed("topk_method", &["\"noaux_tc\""], "\"noaux_tc\""),
    fixed("moe_layer_freq", &["1"], "1 (experts in all layers but the first)"),
    fixed("num_nextn_predict_layers", &["0"], "0 (no layers that predict further tokens)"),
];

/// Options of BERT that would change what the model computes.
pub(super) const FIXED_FOR_BERT: &[Fixed] = &[
    fixed("position_embedding_type", &["\"absolute\""], "\"absolute\" (learned positions)"),
    fixed("is_decoder", &["false"], "false (attention in both directions)"),
];

/// Keys of ViT that belong to its heads for other tasks.
pub(super) const HARMLESS_FOR_VIT: &[&str] = &["encoder_stride", "pooler_act", "pooler_output_size"];
/// Options of GPT-NeoX that would change what the model computes.
pub(super) const FIXED_FOR_NEOX: &[Fixed] = &[
    fixed("attention_probs_dropout_prob", &["0", "0.0"], "0 (`attention_dropout` sets this probability)"),
    fixed("hidden_dropout_prob", &["0", "0.0"], "0 (`hidden_dropout` sets this probability)"),
];

/// Options of Falcon that would change what the model computes.
pub(super) const FIXED_FOR_FALCON: &[Fixed] =
    &[fixed("apply_residual_connection_post_layernorm", &["false"], "false")];

/// Options of OPT that would change what the model computes.
pub(super) const FIXED_FOR_OPT: &[Fixed] = &[
    fixed("layerdrop", &["0", "0.0"], "0 (no layers are left out in training)"),
    fixed("activation_dropout", &["0", "0.0"], "0 (transformers applies none)"),
    fixed("layer_norm_elementwise_affine", &["true"], "true (norms have weights and biases)"),
];

/// Options of BLOOM that would change what the model computes.
pub(super) const FIXED_FOR_BLOOM: &[Fixed] =
    &[fixed("n_inner", &[], "null (feed-forward layers are four times as wide as the residual stream)")];

/// Keys of Falcon without influence on training or logits.
pub(super) const HARMLESS_FOR_FALCON: &[&str] = &["ff_factor"];

/// Keys of BLOOM without influence on training or logits: switches of transformers' and Megatron's implementations.
pub(super) const HARMLESS_FOR_BLOOM: &[&str] = &[
    "attention_softmax_in_fp32",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "offset_alibi",
    "skip_bias_add",
    "skip_bias_add_qkv",
    "slow_but_exact",
    "unk_token_id",
];

/// Options inside a RoPE table that would change what the model computes.
pub(super) const FIXED_FOR_ROPE: &[Fixed] =
    &[fixed("partial_rotary_factor", &["1", "1.0"], "1.0 (the whole head is rotated)")];

/// Keys without influence on training or logits: provenance, special tokens that are not read, generation settings,
/// heads for other tasks, and switches of transformers' implementation.
pub(super) const HARMLESS_KEYS: &[&str] = &[
    // Provenance, and storage, which readers of weights look at.
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "dtype",
    "finetuning_task",
    "model_name",
    "model_type",
    "name_or_path",
    "quantization_config",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    // Special tokens that no code here reads.
    "decoder_start_token_id",
    "sep_token_id",
    // Switches of the implementation, equal up to rounding.
    "cache_implementation",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "attn_implementation",
    "chunk_size_feed_forward",
    "gradient_checkpointing",
    "is_decoder",
    "keys_to_ignore_at_inference",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pretraining_tp",
    "return_dict",
    "tf_legacy_loss",
    "torchscript",
    "use_bfloat16",
    "use_cache",
    "use_return_dict",
    // GPT-2's second name for the number of positions, and its heads for other tasks.
    "_num_labels",
    "n_ctx",
    "n_special",
    "predict_special_tokens",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    // Heads for other tasks.
    "classifier_dropout",
    "id2label",
    "label2id",
    "num_labels",
    "prefix",
    "problem_type",
    "task_specific_params",
    // Generation.
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "suppress_tokens",
    "target_lookbehind",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
];
