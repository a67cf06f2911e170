//! Runs that were not used to fit any constant: other papers, other systems and other networks.
//!
//! The source of each states all that its time depends on. Assumptions are named at the row where a source leaves something open,
//! or where a layer that no model family here has is approximated.

use lockstep_planner::cluster::Software;

use super::{
    Gpt, LLAMA_2_7B, LLAMA_2_13B, LLAMA_2_34B, LLAMA_2_70B, LLAMA_3_8B, LLAMA_3_70B, LLAMA_3_405B, Llama,
    Measured, NEMOTRON_4_15B, NEMOTRON_4_340B, Role, Row, gpt, llama, parallel,
};

/// Returns all rows of this file.
pub(super) fn held_out() -> Vec<Row> {
    [nemo(), bloom(), megascale(), fsdp_of_ibm(), torchtitan()].into_iter().flatten().collect()
}

/// NVIDIA's NeMo 24.09 to 24.12 in bf16, from README files of github.com/NVIDIA/dgxc-benchmarking (nemo_megatron, nemotron,
/// llama3.1) and their configurations: distributed optimizer, no recomputation (that of attention in Nemotron-4 340B is ignored),
/// tensor-parallel collectives overlapped with products except for Nemotron-4 340B.
fn nemo() -> Vec<Row> {
    struct Run {
        name: &'static str,
        settings: fn([usize; 2]) -> Vec<String>,
        tensor: usize,
        context: usize,
        pipeline: usize,
        chunks: usize,
        micro_batch: usize,
        /// Sequences of a step on a data-parallel rank.
        of_rank: usize,
        is_overlapped: bool,
        seconds: &'static [(usize, f64)],
    }
    const ALONE: Run = Run {
        name: "",
        settings: |batch| llama(LLAMA_3_8B, batch, 8192),
        tensor: 1,
        context: 1,
        pipeline: 1,
        chunks: 1,
        micro_batch: 1,
        of_rank: 32,
        is_overlapped: true,
        seconds: &[],
    };
    let runs = [
        Run {
            name: "GPT-3 175B",
            settings: |batch| gpt(Gpt { layers: 96, hidden: 12288, heads: 96 }, batch, [51200, 2048], "bf16"),
            tensor: 4,
            pipeline: 8,
            chunks: 12,
            of_rank: 64,
            seconds: &[(128, 8.309), (512, 8.42), (2048, 8.49)],
            ..ALONE
        },
        Run {
            name: "Nemotron-4 15B",
            settings: |batch| llama(NEMOTRON_4_15B, batch, 4096),
            tensor: 4,
            micro_batch: 4,
            of_rank: 16,
            seconds: &[(16, 2.812), (128, 2.859), (2048, 2.887)],
            ..ALONE
        },
        Run {
            name: "Nemotron-4 340B",
            settings: |batch| llama(NEMOTRON_4_340B, batch, 4096),
            tensor: 8,
            pipeline: 8,
            chunks: 12,
            of_rank: 16,
            is_overlapped: false,
            seconds: &[(128, 4.61), (512, 4.7), (2048, 4.84)],
            ..ALONE
        },
        Run { name: "Llama 3.1 8B", context: 2, seconds: &[(8, 12.91), (32, 13.05), (128, 13.10)], ..ALONE },
        Run {
            name: "Llama 3.1 70B",
            settings: |batch| llama(LLAMA_3_70B, batch, 8192),
            tensor: 4,
            context: 2,
            pipeline: 4,
            chunks: 5,
            of_rank: 64,
            seconds: &[(64, 14.72), (512, 14.89), (2048, 14.98)],
            ..ALONE
        },
        Run {
            name: "Llama 3.1 405B",
            settings: |batch| llama(LLAMA_3_405B, batch, 8192),
            tensor: 8,
            context: 2,
            pipeline: 9,
            chunks: 7,
            of_rank: 63,
            seconds: &[(576, 17.20), (1152, 17.52), (2304, 17.62)],
            ..ALONE
        },
        Run {
            name: "Llama 3.1 405B, 7 layers",
            settings: |batch| llama(Llama { layers: 7, ..LLAMA_3_405B }, batch, 8192),
            tensor: 8,
            context: 2,
            of_rank: 63,
            seconds: &[(32, 8.85)],
            ..ALONE
        },
        Run {
            name: "Llama 3.1 405B, 42 layers",
            settings: |batch| llama(Llama { layers: 42, ..LLAMA_3_405B }, batch, 8192),
            tensor: 8,
            context: 2,
            pipeline: 3,
            chunks: 7,
            of_rank: 63,
            seconds: &[(192, 16.93)],
            ..ALONE
        },
    ];
    let mut rows = Vec::new();
    for run in &runs {
        for &(devices, seconds) in run.seconds {
            let sharers = devices / run.tensor / run.context / run.pipeline;
            let mut settings = (run.settings)([run.micro_batch, sharers * run.of_rank]);
            settings.extend(parallel(run.tensor, run.pipeline, 1, run.chunks));
            settings.extend([
                format!("parallel.data_parallel_shard={sharers}"),
                format!("parallel.zero_stage={}", usize::from(sharers > 1)),
                format!("parallel.context_parallel={}", run.context),
            ]);
            if run.tensor > 1 {
                settings.push("parallel.sequence_parallel=true".into());
                settings.push(format!("parallel.tensor_chunks={}", if run.is_overlapped { 4 } else { 1 }));
            }
            rows.push(Row {
                name: format!("NeMo {} on {devices}", run.name),
                family: "NeMo, H100",
                role: Role::HeldOut,
                machines: "dgx-h100".into(),
                nodes: devices / 8,
                software: Software::Lockstep,
                settings,
                measured: Measured::Seconds(seconds),
            });
        }
    }
    rows
}

/// BigScience's trials before BLOOM, with the code that it was then trained by: github.com/bigscience-workshop/bigscience,
/// train/tr11-176B-ml/chronicles-prequel.md, "Rebalancing layers". Blocks, embedding and head are split evenly. The first row was
/// used to fit the launch time of a kernel (`machines/jean-zay.toml`); the others are held out.
fn bloom() -> Vec<Row> {
    /// Layers, hidden size, heads, tensor degree, pipeline degree, micro-batch, seconds.
    type Bloom = (usize, usize, usize, usize, usize, usize, f64);
    let runs: [Bloom; 9] = [
        (70, 14336, 112, 4, 12, 2, 104.50),
        (70, 14336, 64, 4, 12, 2, 102.03),
        (70, 14336, 64, 4, 12, 4, 102.27),
        (70, 14336, 64, 8, 12, 2, 121.63),
        (82, 13312, 64, 4, 12, 2, 104.45),
        (82, 13312, 64, 8, 12, 4, 111.79),
        (106, 12288, 96, 4, 12, 2, 118.79),
        (100, 12288, 64, 8, 6, 2, 139.72),
        (100, 12288, 64, 8, 6, 4, 120.96),
    ];
    let row = |(layers, hidden, heads, tensor, pipeline, micro_batch, seconds): Bloom| {
        let mut settings = gpt(Gpt { layers, hidden, heads }, [micro_batch, 2048], [250_880, 2048], "bf16");
        settings.extend(parallel(tensor, pipeline, 1, 1));
        settings.extend([
            format!("parallel.data_parallel_shard={}", 384 / tensor / pipeline),
            "parallel.zero_stage=1".into(),
            "parallel.recompute=full".into(),
        ]);
        Row {
            name: format!(
                "BLOOM, {layers} layers of {hidden}, {heads} heads, {tensor} x {pipeline}, {micro_batch}"
            ),
            family: "BLOOM",
            role: if heads == 112 { Role::Fitted } else { Role::HeldOut },
            machines: "jean-zay".into(),
            nodes: 48,
            software: Software::Megatron,
            settings,
            measured: Measured::Seconds(seconds),
        }
    };
    runs.map(row).into()
}

/// Jiang et al. 2024, "MegaScale" (arXiv 2402.15627), table 2: the rows of Megatron-LM. Assumed are a micro-batch of one sequence,
/// and the selective recomputation of Korthikanti et al. 2022.
fn megascale() -> Vec<Row> {
    let runs = [
        (768, 256, 40.0),
        (768, 512, 21.2),
        (768, 1024, 11.9),
        (6144, 3072, 29.02),
        (6144, 6144, 14.78),
        (6144, 12288, 8.57),
    ];
    let row = |(batch, devices, seconds): (usize, usize, f64)| {
        let model = Gpt { layers: 96, hidden: 12288, heads: 128 };
        let mut settings = gpt(model, [1, batch], [64_000, 2048], "bf16");
        settings.extend(parallel(8, 8, devices / 64, 6));
        settings.extend(["parallel.recompute=selective".into(), "parallel.sequence_parallel=true".into()]);
        Row {
            name: format!("Megatron-LM in MegaScale on {devices}"),
            family: "Megatron-LM in MegaScale",
            role: Role::HeldOut,
            machines: "hgx-a100-roce".into(),
            nodes: devices / 8,
            software: Software::Megatron,
            settings,
            measured: Measured::Seconds(seconds),
        }
    };
    runs.map(row).into()
}

/// IBM and Meta, "Maximizing training throughput using PyTorch FSDP" (pytorch.org/blog/maximizing-training, 2024), table 1: 128 A100 and 96
/// H100, two sequences of 4,096 tokens each. "Selective" recomputes every other block, by their ratio of hardware to model FLOP/s.
fn fsdp_of_ibm() -> Vec<Row> {
    let runs = [
        ("7B", LLAMA_2_7B, "none", 3700.0, 7500.0),
        ("13B", LLAMA_2_13B, EVERY_OTHER, 1800.0, 3800.0),
        ("34B", LLAMA_2_34B, "full", 700.0, 1550.0),
        ("70B", LLAMA_2_70B, "full", 370.0, 800.0),
    ];
    let mut rows = Vec::new();
    for (name, model, recompute, on_a100, on_h100) in runs {
        for (family, machines, devices, tokens) in [
            ("FSDP at IBM, A100", "vela-a100", 128, on_a100),
            ("FSDP at IBM, H100", "vela-h100", 96, on_h100),
        ] {
            rows.push(fsdp(
                format!("{family}, Llama 2 {name}"),
                family,
                machines,
                devices,
                (model, [2, 4096], recompute),
                tokens,
            ));
        }
    }
    rows
}

/// Recompute rules under which every other block recomputes fully.
const EVERY_OTHER: &str = r#"{ default = "none", layers = [{ every = 2, mode = "full" }] }"#;

/// torchtitan, docs/performance.md of 2024 (github.com/pytorch/torchtitan): 64 A100, FSDP2. The source does not state the network;
/// 200 Gb/s for each device are assumed, with which these runs hide their communication.
fn torchtitan() -> Vec<Row> {
    let runs = [
        ("Llama 2 13B", LLAMA_2_13B, [2, 4096], "none", 2162.0),
        ("Llama 2 13B, every other block", LLAMA_2_13B, [2, 4096], EVERY_OTHER, 1914.0),
        ("Llama 2 70B", LLAMA_2_70B, [2, 4096], "full", 353.0),
        ("Llama 3 8B, every other block", LLAMA_3_8B, [1, 8192], EVERY_OTHER, 2904.0),
        ("Llama 3 70B", LLAMA_3_70B, [1, 8192], "full", 331.0),
    ];
    let row = |(name, model, shape, recompute, tokens)| {
        let name = format!("torchtitan {name}");
        fsdp(name, "torchtitan, A100", "selene", 64, (model, shape, recompute), tokens)
    };
    runs.map(row).into()
}

fn fsdp(
    name: String,
    family: &'static str,
    machines: &str,
    devices: usize,
    (model, [micro_batch, seq_len], recompute): (Llama, [usize; 2], &str),
    tokens: f64,
) -> Row {
    let mut settings = llama(model, [micro_batch, micro_batch * devices], seq_len);
    settings.extend([
        format!("parallel.data_parallel_shard={devices}"),
        "parallel.zero_stage=3".into(),
        format!("parallel.recompute={recompute}"),
    ]);
    Row {
        name,
        family,
        role: Role::HeldOut,
        machines: machines.to_owned(),
        nodes: devices / 8,
        software: Software::Fsdp,
        settings,
        measured: Measured::Tokens(tokens),
    }
}
