//! Dense models on GB200 and H200, the successors of H100; and MaxText on H100.
//!
//! NVIDIA's NeMo in bf16, from github.com/NVIDIA/dgxc-benchmarking (llama3.1/README.md and nemotron/README.md of mid 2025, tables of
//! GB200); and Google's recipes (github.com/AI-Hypercomputer/gpu-recipes, training/a3ultra), with the logs in their README files.

use lockstep_planner::cluster::Software;

use super::{
    LLAMA_2_70B, LLAMA_3_8B, LLAMA_3_70B, LLAMA_3_405B, Llama, Measured, NEMOTRON_4_340B, Role, Row, llama,
    parallel,
};

/// Returns all rows of this file.
pub(super) fn newer() -> Vec<Row> {
    [gb200(), h200(), kempner(), maxtext_on_h100()].into_iter().flatten().collect()
}

/// NeMo with the distributed optimizer, without recomputation, tensor-parallel collectives overlapped with products.
fn gb200() -> Vec<Row> {
    let with_8_heads = Llama { key_value_heads: 8, ..LLAMA_3_405B };
    /// Name, model and sequence length; tensor and context degree, pipeline degree and chunks; and (devices, global batch, seconds)
    /// of each run.
    type OfModel = (&'static str, Llama, usize, [usize; 4], &'static [(usize, usize, f64)]);
    let runs: [OfModel; 2] = [
        (
            "Llama 3.1 405B",
            with_8_heads,
            8192,
            [4, 2, 8, 8],
            &[(128, 64, 9.347), (256, 128, 9.484), (512, 256, 9.508)],
        ),
        (
            "Nemotron-4 340B",
            NEMOTRON_4_340B,
            4096,
            [8, 1, 4, 12],
            &[
                (128, 32, 2.189),
                (256, 64, 2.19),
                (512, 128, 2.229),
                (128, 512, 32.66),
                (256, 512, 16.58),
                (512, 512, 8.468),
            ],
        ),
    ];
    let mut rows = Vec::new();
    for (name, model, seq_len, [tensor, context, pipeline, chunks], of_devices) in runs {
        for &(devices, batch, seconds) in of_devices {
            let sharers = devices / tensor / context / pipeline;
            let mut settings = llama(model, [1, batch], seq_len);
            settings.extend(parallel(tensor, pipeline, 1, chunks));
            settings.extend([
                "parallel.sequence_parallel=true".into(),
                "parallel.tensor_chunks=4".into(),
                format!("parallel.context_parallel={context}"),
                format!("parallel.data_parallel_shard={sharers}"),
                "parallel.zero_stage=1".into(),
            ]);
            // The first row was used to fit the fraction of its peak that a product achieves on a B200.
            let is_fitted = rows.is_empty();
            rows.push(Row {
                name: format!("NeMo {name} on {devices} GB200, {batch} sequences"),
                family: "NeMo, GB200",
                role: if is_fitted { Role::Fitted } else { Role::HeldOut },
                machines: "gb200-nvl72".into(),
                nodes: devices / 4,
                software: Software::Lockstep,
                settings,
                measured: Measured::Seconds(seconds),
            });
        }
    }
    rows
}

/// Recompute rules that approximate MaxText with sharded weights, which saves all but the outputs of the feed-forward's products:
/// by FLOPs, five of six blocks are recomputed.
const ALL_BUT_FEED_FORWARD: &str = r#"{ default = "full", layers = [{ every = 6, mode = "none" }] }"#;

/// MaxText, Llama 3.1 70B: two sequences for each of 256 devices, with weights sharded over 128.
fn h200() -> Vec<Row> {
    let mut settings = llama(LLAMA_3_70B, [2, 512], 8192);
    settings.extend([
        "parallel.data_parallel_shard=128".into(),
        "parallel.data_parallel_replicate=2".into(),
        "parallel.zero_stage=3".into(),
        format!("parallel.recompute={ALL_BUT_FEED_FORWARD}"),
    ]);
    vec![Row {
        name: "MaxText Llama 3.1 70B on 256 H200".into(),
        family: "MaxText, H200",
        role: Role::HeldOut,
        machines: "hgx-h200".into(),
        nodes: 32,
        software: Software::Lockstep,
        settings,
        measured: Measured::Seconds(15.516),
    }]
}

/// The Kempner Institute's KempnerForge (github.com/KempnerInstitute/KempnerForge, benchmarks/mfu_scaling and weak_scaling_160gpu): FSDP2
/// with compiled kernels (one run without), and PyTorch's tensor parallelism, whose communication is exposed. All blocks are recomputed.
fn kempner() -> Vec<Row> {
    let of_13b = Llama {
        layers: 40,
        hidden: 5120,
        heads: 40,
        key_value_heads: 8,
        intermediate: 17920,
        vocabulary: 128_256,
    };
    /// Tensor degree, shard degree, micro-batch, accumulation steps, tokens per second of all devices.
    type Run = (usize, usize, usize, usize, f64);
    let of_models: [(&str, Llama, &[Run]); 3] = [
        (
            "7B",
            LLAMA_3_8B,
            &[
                (1, 1, 2, 4, 10_471.0),
                (1, 2, 2, 4, 18_728.0),
                (2, 1, 4, 2, 13_163.0),
                (1, 4, 4, 2, 38_983.0),
                (4, 1, 4, 2, 25_135.0),
                (2, 2, 4, 2, 25_980.0),
                (4, 2, 4, 2, 44_299.0),
                (4, 4, 4, 2, 82_988.0),
                (4, 8, 4, 2, 155_917.0),
            ],
        ),
        (
            "13B",
            of_13b,
            &[
                (1, 8, 4, 4, 35_405.0),
                (4, 2, 4, 4, 27_345.0),
                (4, 4, 4, 4, 53_814.0),
                (4, 8, 4, 4, 104_309.0),
                (4, 16, 4, 4, 216_507.0),
                (4, 32, 4, 4, 423_306.0),
                (4, 40, 4, 4, 534_644.0),
            ],
        ),
        (
            "70B",
            LLAMA_3_70B,
            &[
                (4, 8, 2, 4, 17_657.0),
                (4, 16, 2, 4, 35_824.0),
                (4, 24, 2, 4, 52_190.0),
                (4, 32, 2, 4, 69_985.0),
                (4, 40, 2, 4, 85_571.0),
            ],
        ),
    ];
    let mut rows = Vec::new();
    for (name, model, runs) in of_models {
        for &(tensor, sharers, micro_batch, accumulation, tokens) in runs {
            let devices = tensor * sharers;
            let mut settings = llama(model, [micro_batch, micro_batch * accumulation * sharers], 4096);
            settings.extend([
                format!("parallel.tensor_parallel={tensor}"),
                format!("parallel.data_parallel_shard={sharers}"),
                format!("parallel.zero_stage={}", if sharers > 1 { 3 } else { 0 }),
                "parallel.recompute=full".into(),
            ]);
            let is_compiled = (name, tensor) != ("13B", 1);
            rows.push(Row {
                name: format!("KempnerForge {name} on {devices} H200, {tensor} x {sharers}"),
                family: if tensor > 1 { "KempnerForge, H200, tensor parallel" } else { "KempnerForge, H200" },
                role: Role::HeldOut,
                machines: "h200-of-4".into(),
                nodes: devices.div_ceil(4),
                software: if is_compiled { Software::Lockstep } else { Software::Fsdp },
                settings,
                measured: Measured::Tokens(tokens / devices as f64),
            });
        }
    }
    rows
}

/// MaxText, Llama 2 70B on H100 (github.com/NVIDIA/dgxc-benchmarking, maxtext/README_70b.md): two sequences of 4,096 tokens for
/// each device. The source does not state the recomputation; that of Google's recipes is assumed.
fn maxtext_on_h100() -> Vec<Row> {
    let runs = [(64, 64, 6.999), (128, 128, 7.072), (256, 256, 7.153), (512, 128, 7.091), (2048, 128, 7.066)];
    let row = |(devices, sharers, seconds): (usize, usize, f64)| {
        let mut settings = llama(LLAMA_2_70B, [2, 2 * devices], 4096);
        settings.extend([
            format!("parallel.data_parallel_shard={sharers}"),
            format!("parallel.data_parallel_replicate={}", devices / sharers),
            "parallel.zero_stage=3".into(),
            format!("parallel.recompute={ALL_BUT_FEED_FORWARD}"),
        ]);
        Row {
            name: format!("MaxText Llama 2 70B on {devices}"),
            family: "MaxText, H100",
            role: Role::HeldOut,
            machines: "dgx-h100".into(),
            nodes: devices / 8,
            software: Software::Lockstep,
            settings,
            measured: Measured::Seconds(seconds),
        }
    };
    runs.map(row).into()
}
