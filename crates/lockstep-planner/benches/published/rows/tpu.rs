//! TPU: MaxText's published configurations with their throughput (github.com/AI-Hypercomputer/maxtext, MaxText/configs/v5p and v4,
//! each with its README), and PaLM.

use lockstep_planner::cluster::Software;

use super::{Llama, Measured, Role, Row, llama};

/// Returns all rows of this file.
pub(super) fn tpu() -> Vec<Row> {
    [v5p(), v4(), palm()].into_iter().flatten().collect()
}

/// Returns the FLOPs of a token as MaxText counts them: six for each parameter, and the causal half of attention.
fn flops_of_token(model: Llama, head_dim: usize, seq_len: usize) -> f64 {
    let Llama { layers, hidden, heads, key_value_heads, intermediate, vocabulary } = model;
    let attention = 2 * hidden * head_dim * (heads + key_value_heads);
    let block = attention + 3 * hidden * intermediate;
    (6 * (layers * block + 2 * vocabulary * hidden) + 6 * layers * heads * head_dim * seq_len) as f64
}

/// A model on a slice of TPU chips, with tensor parallelism over `tensor` chips and weights sharded over the others.
struct Slice {
    name: String,
    family: &'static str,
    machines: &'static str,
    model: Llama,
    head_dim: usize,
    seq_len: usize,
    chips: usize,
    tensor: usize,
    /// Sequences per chip.
    of_chip: usize,
    recompute: &'static str,
    tflops: f64,
}

impl Slice {
    fn row(self) -> Row {
        let micro_batch = self.of_chip * self.tensor;
        let mut settings = llama(self.model, [micro_batch, self.of_chip * self.chips], self.seq_len);
        settings.extend([
            format!("model.head_dim={}", self.head_dim),
            format!("parallel.tensor_parallel={}", self.tensor),
            format!("parallel.data_parallel_shard={}", self.chips / self.tensor),
            "parallel.zero_stage=3".into(),
            format!("parallel.recompute={}", self.recompute),
        ]);
        if self.tensor > 1 {
            // XLA fuses tensor-parallel collectives with the products next to them.
            settings.extend(["parallel.sequence_parallel=true".into(), "parallel.tensor_chunks=4".into()]);
        }
        let flops = flops_of_token(self.model, self.head_dim, self.seq_len);
        Row {
            name: self.name,
            family: self.family,
            role: Role::HeldOut,
            machines: self.machines.into(),
            nodes: self.chips / 4,
            software: Software::Lockstep,
            settings,
            measured: Measured::Tokens(self.tflops * 1e12 / flops),
        }
    }
}

/// MaxText on slices of one v5p pod. `minimal` saves the outputs of products.
fn v5p() -> Vec<Row> {
    let of_32b = Llama {
        layers: 32,
        hidden: 8192,
        heads: 64,
        key_value_heads: 64,
        intermediate: 28672,
        vocabulary: 32_000,
    };
    let of_64b = Llama { layers: 64, ..of_32b };
    let of_128b = Llama { heads: 128, key_value_heads: 128, intermediate: 57344, ..of_64b };
    let of_256b = Llama { hidden: 16384, ..of_128b };
    let of_512b = Llama { layers: 128, ..of_256b };
    let of_1024b = Llama { heads: 256, key_value_heads: 256, intermediate: 114_688, ..of_512b };
    let runs = [
        ("32B", of_32b, 64, 4, 7, "selective", 328.0),
        ("64B", of_64b, 64, 4, 3, "selective", 323.0),
        ("128B", of_128b, 128, 8, 1, "selective", 315.0),
        ("128B", of_128b, 256, 8, 1, "selective", 316.0),
        ("256B", of_256b, 512, 8, 1, "selective", 308.0),
        ("512B", of_512b, 512, 8, 2, "full", 294.0),
        ("1024B", of_1024b, 2048, 8, 2, "full", 297.0),
    ];
    let row = |(name, model, chips, tensor, of_chip, recompute, tflops)| Slice {
        name: format!("MaxText {name} on {chips} v5p"),
        family: "MaxText, TPU v5p",
        machines: "tpu-v5p",
        model,
        head_dim: 128,
        seq_len: 2048,
        chips,
        tensor,
        of_chip,
        recompute,
        tflops,
    };
    runs.map(|run| row(run).row()).into()
}

/// MaxText on v4. The feed-forward has two matrices; here it has three of two thirds of their width. The sequence length is assumed
/// to be 2,048 tokens.
fn v4() -> Vec<Row> {
    let of_22b = Llama {
        layers: 48,
        hidden: 6144,
        heads: 24,
        key_value_heads: 24,
        intermediate: 24576 * 2 / 3,
        vocabulary: 32_000,
    };
    let of_52b = Llama {
        layers: 32,
        hidden: 12288,
        heads: 32,
        key_value_heads: 32,
        intermediate: 49152 * 2 / 3,
        ..of_22b
    };
    let runs = [("22B", of_22b, 64, 13, 156.0), ("52B", of_52b, 192, 7, 154.0)];
    let row = |(name, model, chips, of_chip, tflops)| Slice {
        name: format!("MaxText {name} on {chips} v4"),
        family: "MaxText, TPU v4",
        machines: "tpu-v4",
        model,
        head_dim: 256,
        seq_len: 2048,
        chips,
        tensor: 1,
        of_chip,
        recompute: "full",
        tflops,
    };
    runs.map(|run| row(run).row()).into()
}

/// Chowdhery et al. 2022, "PaLM" (arXiv 2204.02311), section 4 and table 3: 238.3 thousand tokens per second on two pods of 3,072
/// v4, each with a tensor degree of 12 and weights sharded over 256. Three of four blocks are assumed to be recomputed, by the
/// ratio of hardware to model FLOP/s. Its single key/value head is twelve here, one for each chip, and its parallel attention and
/// feed-forward are the usual sequential ones.
fn palm() -> Vec<Row> {
    let model = Llama {
        layers: 118,
        hidden: 18432,
        heads: 48,
        key_value_heads: 12,
        intermediate: 4 * 18432,
        vocabulary: 256_000,
    };
    let mut settings = llama(model, [4, 2048], 2048);
    settings.extend([
        "model.head_dim=256".into(),
        "parallel.tensor_parallel=12".into(),
        "parallel.data_parallel_shard=256".into(),
        "parallel.data_parallel_replicate=2".into(),
        "parallel.zero_stage=3".into(),
        r#"parallel.recompute={ default = "full", layers = [{ every = 4, mode = "none" }] }"#.into(),
    ]);
    vec![Row {
        name: "PaLM 540B on 6144 v4".into(),
        family: "PaLM, TPU v4",
        role: Role::HeldOut,
        machines: "tpu-v4".into(),
        nodes: 6144 / 4,
        software: Software::Lockstep,
        settings,
        measured: Measured::Tokens(238_300.0 / 6144.0),
    }]
}
