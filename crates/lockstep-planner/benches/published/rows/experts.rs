//! Mixture-of-experts models: NVIDIA's NeMo, Megatron-LM and Megatron Bridge in bf16, with balanced experts, as in these benchmarks.

use lockstep_planner::cluster::Software;

use super::{Measured, Role, Row, parallel};

/// Returns all rows of this file.
pub(super) fn experts() -> Vec<Row> {
    [grok(), mixtral(), gpt_oss(), qwen()].into_iter().flatten().collect()
}

/// Degree of each axis.
#[derive(Debug, Clone, Copy)]
struct Degrees {
    tensor: usize,
    context: usize,
    pipeline: usize,
    chunks: usize,
    expert: usize,
    expert_tensor: usize,
}

const ALONE: Degrees = Degrees { tensor: 1, context: 1, pipeline: 1, chunks: 1, expert: 8, expert_tensor: 1 };

/// A run in terms of the fields in which the rows of this file differ.
struct Run {
    name: String,
    family: &'static str,
    role: Role,
    machines: &'static str,
    of_node: usize,
    devices: usize,
    model: Vec<String>,
    seq_len: usize,
    degrees: Degrees,
    micro_batch: usize,
    batch: usize,
    measured: Measured,
}

impl Run {
    fn row(self) -> Row {
        let Degrees { tensor, context, pipeline, chunks, expert, expert_tensor } = self.degrees;
        let sharers = self.devices / tensor / context / pipeline;
        let mut settings = self.model;
        settings.extend([
            format!("train.seq_len={}", self.seq_len),
            "train.precision=bf16".into(),
            format!("train.micro_batch={}", self.micro_batch),
            format!("train.global_batch={}", self.batch),
        ]);
        settings.extend(parallel(tensor, pipeline, 1, chunks));
        settings.extend([
            format!("parallel.context_parallel={context}"),
            format!("parallel.data_parallel_shard={sharers}"),
            format!("parallel.zero_stage={}", usize::from(sharers > 1)),
            format!("parallel.expert_parallel={expert}"),
            format!("parallel.expert_tensor_parallel={expert_tensor}"),
        ]);
        if tensor > 1 {
            settings.extend(["parallel.sequence_parallel=true".into(), "parallel.tensor_chunks=4".into()]);
        }
        Row {
            name: self.name,
            family: self.family,
            role: self.role,
            machines: self.machines.into(),
            nodes: self.devices / self.of_node,
            software: Software::MegatronCore,
            settings,
            measured: self.measured,
        }
    }
}

/// Grok-1 with so many layers, in NeMo of January 2025 (github.com/NVIDIA/dgxc-benchmarking, grok1/README_314b.md and its
/// configuration) and of mid 2025 (grok1/README.md): a capacity factor of 1, no recomputation, tensor-parallel collectives
/// overlapped with products. In the earlier version the experts' matrices were tensor-parallel as well.
fn grok() -> Vec<Row> {
    let model = |layers: usize| -> Vec<String> {
        vec![
            "model.preset=mixtral-8x7b".into(),
            format!("model.num_hidden_layers={layers}"),
            "model.hidden_size=6144".into(),
            "model.intermediate_size=32768".into(),
            "model.num_attention_heads=48".into(),
            "model.head_dim=128".into(),
            "model.vocab_size=128256".into(),
            "model.expert_capacity_factor=1.0".into(),
        ]
    };
    // Devices, layers, sequence length, context, pipeline and expert degree, global batch, seconds.
    let before = [
        (8, 2, 4096, 1, 1, 2, 1024, 24.03),
        (16, 4, 4096, 1, 1, 4, 1024, 21.52),
        (32, 4, 4096, 1, 1, 8, 1024, 10.64),
        (64, 8, 8192, 2, 1, 8, 1024, 20.64),
        (128, 16, 8192, 2, 2, 8, 1024, 20.64),
        (256, 32, 8192, 2, 4, 8, 1024, 20.7),
        (512, 64, 8192, 2, 8, 8, 1024, 20.83),
        (1024, 64, 8192, 2, 8, 8, 2048, 21.0),
        (2048, 64, 8192, 2, 8, 8, 4096, 21.09),
    ];
    let row = |(devices, layers, seq_len, context, pipeline, expert, batch, seconds)| Run {
        name: format!("NeMo Grok-1, {layers} layers on {devices}"),
        family: "NeMo with experts, H100",
        role: Role::HeldOut,
        machines: "dgx-h100",
        of_node: 8,
        devices,
        model: model(layers),
        seq_len,
        degrees: Degrees {
            tensor: 4,
            context,
            pipeline,
            chunks: if pipeline > 1 { 8 } else { 1 },
            expert,
            expert_tensor: 4,
        },
        micro_batch: 1,
        batch,
        measured: Measured::Seconds(seconds),
    };
    let mut rows: Vec<Row> = before.map(|run| row(run).row()).into();
    let folded = row((512, 64, 8192, 2, 8, 8, 1024, 15.933));
    let degrees = Degrees { expert_tensor: 1, ..folded.degrees };
    rows.push(Run { name: "NeMo Grok-1 on 512, experts whole".into(), degrees, ..folded }.row());
    for (devices, seconds) in [(128, 7.325), (256, 7.39), (512, 7.324)] {
        let run = row((devices, 64, 8192, 1, 1, 8, 2 * devices, seconds));
        let name = format!("NeMo Grok-1 on {devices} GB200");
        let run =
            Run { name, family: "NeMo with experts, GB200", machines: "gb200-nvl72", of_node: 4, ..run };
        rows.push(run.row());
    }
    rows
}

/// Mixtral 8x7B: NeMo 24.07 on H200 (github.com/AI-Hypercomputer/gpu-recipes, training/a3ultra/mixtral-8x7b/nemo-pretraining-gke, with the
/// configuration that it names), and Megatron-LM 0.9 on H100 (figure and mapping from megatron/core/transformer/moe/README.md). The latter
/// was used to fit the time that a device waits for its host when no token is dropped.
fn mixtral() -> Vec<Row> {
    let model = |vocabulary: usize| {
        vec!["model.preset=mixtral-8x7b".into(), format!("model.vocab_size={vocabulary}")]
    };
    let on_h200 = Run {
        name: "NeMo Mixtral 8x7B on 256 H200".into(),
        family: "NeMo with experts, H200",
        role: Role::HeldOut,
        machines: "hgx-h200",
        of_node: 8,
        devices: 256,
        model: [model(50_304), vec!["model.expert_capacity_factor=1.0".into()]].concat(),
        seq_len: 4096,
        degrees: ALONE,
        micro_batch: 2,
        batch: 1024,
        measured: Measured::Seconds(2.7396),
    };
    let on_h100 = Run {
        name: "Megatron-LM Mixtral 8x7B on 64".into(),
        family: "Megatron-LM with experts, H100",
        role: Role::Fitted,
        machines: "dgx-h100",
        of_node: 8,
        devices: 64,
        model: model(32_000),
        seq_len: 4096,
        degrees: Degrees { pipeline: 4, chunks: 8, ..ALONE },
        micro_batch: 1,
        batch: 256,
        measured: Measured::ModelTflops(468.0),
    };
    vec![on_h200.row(), on_h100.row()]
}

/// GPT-OSS 120B in Megatron Bridge (github.com/NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary-archive.md, versions 25.11 and
/// 26.02). Its sliding windows in every other layer are ignored here.
fn gpt_oss() -> Vec<Row> {
    let model = || -> Vec<String> {
        vec![
            "model.preset=qwen3-30b-a3b".into(),
            "model.num_hidden_layers=36".into(),
            "model.hidden_size=2880".into(),
            "model.num_attention_heads=64".into(),
            "model.num_key_value_heads=8".into(),
            "model.head_dim=64".into(),
            "model.moe_intermediate_size=2880".into(),
            "model.num_experts=128".into(),
            "model.num_experts_per_tok=4".into(),
            "model.vocab_size=201088".into(),
        ]
    };
    // Machines, devices of a node, sequence length, pipeline and expert degree, micro-batch, global batch, tokens per second.
    let runs = [
        ("H100", "dgx-h100", 8, 4096, 4, 8, 4, 512, 5630.0),
        ("H100", "dgx-h100", 8, 4096, 4, 8, 1, 1280, 5993.0),
        ("B200", "dgx-b200", 8, 4096, 1, 8, 4, 512, 8213.0),
        ("B200", "dgx-b200", 8, 4096, 1, 64, 4, 1280, 8047.0),
        ("GB200", "gb200-nvl72", 4, 8192, 1, 64, 1, 1280, 15876.0),
        ("GB200", "gb200-nvl72", 4, 4096, 1, 64, 4, 1280, 15784.0),
    ];
    let of_pipeline = |pipeline: usize| {
        // The same number of blocks on each rank; the embedding and the head are added to the first and the last.
        let stages = (pipeline > 1).then(|| "parallel.pipeline_stages=[10, 9, 9, 10]".to_owned());
        model().into_iter().chain(stages).collect()
    };
    let row = |(kind, machines, of_node, seq_len, pipeline, expert, micro_batch, batch, tokens)| Run {
        name: format!(
            "Megatron Bridge GPT-OSS 120B on 64 {kind}, {pipeline} x {expert}, {micro_batch} of {seq_len}"
        ),
        family: match kind {
            "H100" => "Megatron Bridge, H100",
            "B200" => "Megatron Bridge, B200",
            _ => "Megatron Bridge, GB200",
        },
        role: Role::HeldOut,
        machines,
        of_node,
        devices: 64,
        model: of_pipeline(pipeline),
        seq_len,
        degrees: Degrees { pipeline, expert, ..ALONE },
        micro_batch,
        batch,
        measured: Measured::Tokens(tokens),
    };
    runs.map(|run| row(run).row()).into()
}

/// Qwen3 235B-A22B in Megatron Bridge: on H100 by the log in github.com/NVIDIA/dgxc-benchmarking, qwen3/pretrain/README.md, on
/// GB200 by the same summary.
fn qwen() -> Vec<Row> {
    let model = || -> Vec<String> {
        vec![
            "model.preset=qwen3-30b-a3b".into(),
            "model.num_hidden_layers=94".into(),
            "model.hidden_size=4096".into(),
            "model.num_attention_heads=64".into(),
            "model.num_key_value_heads=4".into(),
            "model.moe_intermediate_size=1536".into(),
        ]
    };
    let on_h100 = Run {
        name: "Megatron Bridge Qwen3 235B-A22B on 256".into(),
        family: "Megatron Bridge, H100",
        role: Role::HeldOut,
        machines: "dgx-h100",
        of_node: 8,
        devices: 256,
        model: model(),
        seq_len: 4096,
        degrees: Degrees { tensor: 2, pipeline: 8, chunks: 4, expert: 32, ..ALONE },
        micro_batch: 1,
        batch: 2048,
        measured: Measured::Seconds(25.532),
    };
    let on_gb200 = Run {
        name: "Megatron Bridge Qwen3 235B-A22B on 256 GB200".into(),
        family: "Megatron Bridge, GB200",
        role: Role::HeldOut,
        machines: "gb200-nvl72",
        of_node: 4,
        devices: 256,
        model: model(),
        seq_len: 4096,
        degrees: Degrees { pipeline: 8, chunks: 3, expert: 32, ..ALONE },
        micro_batch: 1,
        batch: 8192,
        measured: Measured::Tokens(4916.0),
    };
    vec![on_h100.row(), on_gb200.row()]
}
