//! Published runs: model, machines, plan and measured speed of each.
//!
//! Some were used to fit the constants of the cost model ([`Role::Fitted`]). The others ([`Role::HeldOut`]) never are: they show
//! how far predictions of unseen runs can be trusted.

mod experts;
mod fitted;
mod held_out;
mod mosaic;
mod newer;
mod tpu;
mod volta;

use lockstep_config::RunConfig;
use lockstep_planner::cluster::{Cluster, Software};
use lockstep_planner::{Evaluated, Objective, Planner};

/// A published run.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    /// Name of the run in the source.
    pub(crate) name: String,
    /// Group of the row in the summary: rows of one source on one kind of machine.
    pub(crate) family: &'static str,
    /// Use of the row.
    pub(crate) role: Role,
    /// Name of a preset, or of a file in `machines/`.
    pub(crate) machines: String,
    nodes: usize,
    software: Software,
    settings: Vec<String>,
    measured: Measured,
}

/// Use of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Role {
    /// Constants were fitted to it.
    Fitted,
    /// It is only compared with the prediction.
    HeldOut,
}

/// The published measurement of a run.
#[derive(Debug, Clone, Copy)]
enum Measured {
    /// TFLOP/s of a device, recomputation included.
    HardwareTflops(f64),
    /// TFLOP/s of a device, without recomputation.
    ModelTflops(f64),
    /// Seconds of a step.
    Seconds(f64),
    /// Tokens per second of a device.
    Tokens(f64),
}

/// Machines without a preset, since no more is known of them than a run needs.
const MACHINES: [(&str, &str); 8] = [
    ("dgx-a100-40gb", include_str!("../machines/dgx-a100-40gb.toml")),
    ("gb200-nvl72", include_str!("../machines/gb200-nvl72.toml")),
    ("h200-of-4", include_str!("../machines/h200-of-4.toml")),
    ("hgx-a100-40gb-roce", include_str!("../machines/hgx-a100-40gb-roce.toml")),
    ("jean-zay", include_str!("../machines/jean-zay.toml")),
    ("selene", include_str!("../machines/selene.toml")),
    ("vela-a100", include_str!("../machines/vela-a100.toml")),
    ("vela-h100", include_str!("../machines/vela-h100.toml")),
];

impl Row {
    /// Returns the machines of the run, as a cluster of one node.
    pub(crate) fn machines(&self) -> Cluster {
        match MACHINES.iter().find(|(name, _)| *name == self.machines) {
            Some((name, text)) => Cluster::parse(text, name).expect("a cluster file"),
            None => Cluster::preset(&self.machines).expect("a preset"),
        }
    }

    /// Returns true if the pipeline has so many stages that its simulation takes a second.
    pub(crate) fn is_long(&self) -> bool {
        let pipeline = |setting: &String| setting.strip_prefix("parallel.pipeline_parallel=")?.parse().ok();
        self.settings.iter().find_map(pipeline).unwrap_or(1) > 16
    }

    /// Predicts the run with the devices and links of `machines`.
    pub(crate) fn predicted(&self, machines: Cluster) -> Evaluated {
        let mut cluster = machines;
        cluster.nodes[0].count = self.nodes;
        cluster.software = self.software;
        let settings: Vec<&str> = self.settings.iter().map(String::as_str).collect();
        let config = RunConfig::parse("", &self.name, &settings);
        let config = config.unwrap_or_else(|error| panic!("{}: {error}", self.name));
        let mut planner = Planner::new(config, cluster, Objective::Time).expect("a model");
        planner.of_run().unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    /// Returns the predicted and the published figure, both as rates.
    pub(crate) fn figures(&self, found: &Evaluated) -> [f64; 2] {
        match self.measured {
            Measured::HardwareTflops(tflops) => [found.hardware_tflops_per_device(), tflops],
            Measured::ModelTflops(tflops) => [found.tflops_per_device(), tflops],
            Measured::Seconds(seconds) => [1e3 / found.step.step_ms, 1.0 / seconds],
            Measured::Tokens(tokens) => [found.tokens_per_s() / found.devices as f64, tokens],
        }
    }
}

/// Returns all published runs.
pub(crate) fn published() -> Vec<Row> {
    let of_papers = [fitted::megatron(), fitted::korthikanti(), fitted::llama3(), mosaic::mosaic()];
    let of_others = [held_out::held_out(), experts::experts(), newer::newer(), volta::volta(), tpu::tpu()];
    of_papers.into_iter().chain(of_others).flatten().collect()
}

/// Sizes of a GPT as Megatron-LM's papers train it.
#[derive(Debug, Clone, Copy)]
struct Gpt {
    layers: usize,
    hidden: usize,
    heads: usize,
}

/// Returns the settings of a GPT with these [micro-batch, global batch] and [vocabulary, sequence length].
fn gpt(
    Gpt { layers, hidden, heads }: Gpt,
    [micro_batch, global_batch]: [usize; 2],
    [vocabulary, seq_len]: [usize; 2],
    precision: &str,
) -> Vec<String> {
    vec![
        "model.preset=gpt2-124m".into(),
        format!("model.n_layer={layers}"),
        format!("model.n_embd={hidden}"),
        format!("model.n_head={heads}"),
        format!("model.vocab_size={vocabulary}"),
        format!("model.n_positions={seq_len}"),
        format!("train.seq_len={seq_len}"),
        format!("train.precision={precision}"),
        format!("train.micro_batch={micro_batch}"),
        format!("train.global_batch={global_batch}"),
    ]
}

/// Sizes of a Llama model.
#[derive(Debug, Clone, Copy)]
struct Llama {
    layers: usize,
    hidden: usize,
    heads: usize,
    key_value_heads: usize,
    intermediate: usize,
    vocabulary: usize,
}

const LLAMA_2_7B: Llama = Llama {
    layers: 32,
    hidden: 4096,
    heads: 32,
    key_value_heads: 32,
    intermediate: 11008,
    vocabulary: 32_000,
};
const LLAMA_2_13B: Llama =
    Llama { layers: 40, hidden: 5120, heads: 40, key_value_heads: 40, intermediate: 13824, ..LLAMA_2_7B };
const LLAMA_2_34B: Llama =
    Llama { layers: 48, hidden: 8192, heads: 64, key_value_heads: 8, intermediate: 22016, ..LLAMA_2_7B };
const LLAMA_2_70B: Llama = Llama { layers: 80, intermediate: 28672, ..LLAMA_2_34B };
const LLAMA_3_8B: Llama =
    Llama { key_value_heads: 8, intermediate: 14336, vocabulary: 128_256, ..LLAMA_2_7B };
const LLAMA_3_70B: Llama = Llama { vocabulary: 128_256, ..LLAMA_2_70B };
/// Llama 3 405B with 16 key/value heads, as in NeMo.
const LLAMA_3_405B: Llama = Llama {
    layers: 126,
    hidden: 16384,
    heads: 128,
    key_value_heads: 16,
    intermediate: 53248,
    vocabulary: 128_256,
};
/// Nemotron-4 15B. Its feed-forward has two matrices and a squared ReLU; here it is a SwiGLU with three matrices of two thirds of
/// their width, which has as many parameters and FLOPs.
const NEMOTRON_4_15B: Llama = Llama {
    layers: 32,
    hidden: 6144,
    heads: 48,
    key_value_heads: 8,
    intermediate: 4 * 6144 * 2 / 3,
    vocabulary: 256_000,
};
const NEMOTRON_4_340B: Llama =
    Llama { layers: 96, hidden: 18432, heads: 96, intermediate: 4 * 18432 * 2 / 3, ..NEMOTRON_4_15B };

fn llama(model: Llama, [micro_batch, global_batch]: [usize; 2], seq_len: usize) -> Vec<String> {
    vec![
        "model.preset=llama3-8b".into(),
        format!("model.num_hidden_layers={}", model.layers),
        format!("model.hidden_size={}", model.hidden),
        format!("model.num_attention_heads={}", model.heads),
        format!("model.num_key_value_heads={}", model.key_value_heads),
        format!("model.intermediate_size={}", model.intermediate),
        format!("model.vocab_size={}", model.vocabulary),
        format!("train.seq_len={seq_len}"),
        "train.precision=bf16".into(),
        format!("train.micro_batch={micro_batch}"),
        format!("train.global_batch={global_batch}"),
    ]
}

/// Returns the settings of tensor, pipeline and data parallelism, with `chunks` virtual stages on each pipeline rank.
fn parallel(tensor: usize, pipeline: usize, replicas: usize, chunks: usize) -> Vec<String> {
    let mut settings = vec![
        format!("parallel.tensor_parallel={tensor}"),
        format!("parallel.pipeline_parallel={pipeline}"),
        format!("parallel.data_parallel_replicate={replicas}"),
    ];
    if chunks > 1 {
        settings.push("parallel.pipeline_schedule=interleaved_1f1b".into());
        settings.push(format!("parallel.virtual_stages={chunks}"));
    }
    settings
}
