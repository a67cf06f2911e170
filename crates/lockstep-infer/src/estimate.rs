//! The speed of a placed model, from bandwidths and rates.
//!
//! ```text
//! pass time = max(bytes from disk / disk, bytes of weights and caches / memory, operations / rate)
//! ```
//!
//! Reads, memory and arithmetic overlap. A decoding step is a pass of one token of each sequence; a prompt takes a pass for each
//! chunk.

use lockstep_model::{HeadOutput, ModelConfig};
use lockstep_plan::Places;

use crate::{
    InferencePlan, Workload,
    run_memory::{RankShare, record},
};

/// Rates of a machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Bandwidth of reads from disk, in bytes per second.
    pub disk: f64,
    /// Bandwidth of main memory, in bytes per second.
    pub memory: f64,
    /// Operations of matrix products per second, in the model's type.
    pub flops: f64,
}

/// Predicted speed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Tokens of prompts per second.
    pub prefill_tokens_per_s: f64,
    /// Generated tokens per second, of all sequences together.
    pub decode_tokens_per_s: f64,
}

impl Estimate {
    /// Estimates the generation of `sequences` sequences of `context` tokens with a placed model.
    pub fn of(plan: &InferencePlan, config: &ModelConfig, workload: Workload, rates: Rates) -> Self {
        let (sequences, context) = match workload {
            Workload::Generation { sequences, context } => (sequences, context),
            Workload::Evaluation { windows, seq_len } => (windows, seq_len),
        };
        let chunk = plan.chunk_tokens.min(context).max(1);
        let flops = |tokens: usize| {
            // A training step takes the operations of a forward three times.
            let recorded = record(config, plan.dtype(), [1, tokens], HeadOutput::Logits, Places::default());
            recorded.training_flops() as f64 / 3.0
        };
        let pass = |tokens: usize, weights: f64, cached: f64, flops: f64| {
            let from_disk = plan.read_bytes(tokens) as f64 / rates.disk;
            from_disk.max((weights + cached) / rates.memory).max(flops / rates.flops)
        };
        // Of experts a token reads some only.
        let (all, per_token) = (plan.model_bytes() as f64, flops(1));
        let read = per_token / 2.0 * plan.bytes_per_weight();
        let whole = RankShare::whole(config);
        let of_sequence = whole.kv_cache_bytes(config, (plan.dtype(), plan.kv_cache), context);
        let cached = sequences as f64 * of_sequence as f64;
        let step = pass(sequences, all.min(sequences as f64 * read), cached, sequences as f64 * per_token);
        let prompt = pass(chunk, all, 0.0, flops(chunk));
        Self { prefill_tokens_per_s: chunk as f64 / prompt, decode_tokens_per_s: sequences as f64 / step }
    }
}
