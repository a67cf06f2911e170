//! Model families: configurations, names in checkpoints, memory and work.
//!
//! One program, because linking takes longer than most of these tests.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

mod checkpoints;
mod configs;
mod encoders;
mod memory;
mod work;

/// Directories of fixtures that transformers wrote, one for each family and variant.
const FAMILIES: [&str; 28] = [
    "gpt2",
    "llama",
    "llama_bias",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v3",
    "deepseek_v3_yarn",
    "qwen3_yarn",
    "gpt_neox",
    "gpt_neox_sequential",
    "falcon",
    "falcon_grouped",
    "falcon_one_norm",
    "falcon_alibi",
    "opt",
    "opt_post_norm",
    "bloom",
    "bloom_post_norm",
    "gemma",
    "gemma2",
    "gemma3",
    "olmo2",
    "phi3",
    "gpt_oss",
];
