//! Runs of whole papers to which constants were fitted: Narayanan et al. 2021 (arXiv 2104.04473, tables 1 and 2), Korthikanti et
//! al. 2022 (2205.05198, table 5), Grattafiori et al. 2024 (2407.21783, table 4).

use lockstep_planner::cluster::Software;

use super::{Gpt, Measured, Role, Row, gpt, parallel};

/// A row of table 1 of Narayanan et al. 2021: parameters in 10⁹, layers, hidden size, heads, tensor degree, pipeline degree,
/// devices, global batch, micro-batch, chunks and TFLOP/s.
type MegatronRow = (f64, usize, usize, usize, usize, usize, usize, usize, usize, usize, f64);

const MEGATRON: [MegatronRow; 10] = [
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 16, 1, 137.0),
    (3.6, 30, 3072, 32, 2, 1, 64, 512, 16, 1, 138.0),
    (7.5, 36, 4096, 32, 4, 1, 128, 512, 16, 1, 142.0),
    (18.4, 40, 6144, 48, 8, 1, 256, 1024, 8, 1, 135.0),
    (39.1, 48, 8192, 64, 8, 2, 512, 1536, 4, 1, 138.0),
    (76.1, 60, 10240, 80, 8, 4, 1024, 1792, 2, 3, 140.0),
    (145.6, 80, 12288, 96, 8, 8, 1536, 2304, 2, 2, 148.0),
    (310.1, 96, 16384, 128, 8, 16, 1920, 2160, 1, 2, 155.0),
    (529.6, 105, 20480, 128, 8, 35, 2520, 2520, 1, 3, 163.0),
    (1008.0, 128, 25600, 160, 8, 64, 3072, 3072, 1, 1, 163.0),
];

pub(super) fn megatron() -> Vec<Row> {
    let row = |model: String, devices: usize, settings: Vec<String>, tflops: f64| Row {
        name: format!("Megatron-LM 2021, {model}"),
        family: "Megatron-LM 2021",
        role: Role::Fitted,
        machines: "selene".into(),
        nodes: devices / 8,
        software: Software::Megatron,
        settings,
        measured: Measured::HardwareTflops(tflops),
    };
    let mut rows = Vec::new();
    for (params, layers, hidden, heads, tensor, pipeline, devices, batch, micro_batch, chunks, tflops) in
        MEGATRON
    {
        let mut settings = gpt(Gpt { layers, hidden, heads }, [micro_batch, batch], [51200, 2048], "f16");
        settings.extend(parallel(tensor, pipeline, devices / tensor / pipeline, chunks));
        settings.push("parallel.recompute=full".into());
        rows.push(row(format!("{params}B"), devices, settings, tflops));
    }
    // Table 2: layers, hidden size, heads, pipeline degree, global batch, and (devices, TFLOP/s) of each run.
    let larger = [
        (96, 12288, 96, 12, 1536, [(384, 153.0), (768, 149.0), (1536, 141.0)]),
        (105, 20480, 128, 35, 2240, [(560, 171.0), (1120, 167.0), (2240, 159.0)]),
    ];
    for (layers, hidden, heads, pipeline, batch, runs) in larger {
        for (devices, tflops) in runs {
            let mut settings = gpt(Gpt { layers, hidden, heads }, [1, batch], [51200, 2048], "f16");
            settings.extend(parallel(8, pipeline, devices / 8 / pipeline, 1));
            settings.push("parallel.recompute=full".into());
            rows.push(row(format!("{layers} layers on {devices}"), devices, settings, tflops));
        }
    }
    // ZeRO-3 in the same table: layers, hidden size, heads, global batch, devices, micro-batch, TFLOP/s.
    let zero = [
        (96, 12288, 96, 1536, 384, 4, 144.0),
        (96, 12288, 96, 1536, 768, 2, 88.0),
        (96, 12288, 96, 1536, 1536, 1, 44.0),
        (105, 20480, 128, 2560, 640, 4, 138.0),
        (105, 20480, 128, 2240, 1120, 2, 98.0),
        (105, 20480, 128, 2240, 2240, 1, 48.0),
    ];
    for (layers, hidden, heads, batch, devices, micro_batch, tflops) in zero {
        let mut settings = gpt(Gpt { layers, hidden, heads }, [micro_batch, batch], [51200, 2048], "f16");
        settings.extend([
            format!("parallel.data_parallel_shard={devices}"),
            "parallel.zero_stage=3".into(),
            "parallel.recompute=full".into(),
        ]);
        rows.push(Row {
            name: format!("ZeRO-3 in it, {layers} layers on {devices}"),
            family: "ZeRO-3 in Megatron-LM 2021",
            role: Role::Fitted,
            machines: "selene".into(),
            nodes: devices / 8,
            software: Software::DeepSpeed,
            settings,
            measured: Measured::HardwareTflops(tflops),
        });
    }
    rows
}

pub(super) fn korthikanti() -> Vec<Row> {
    // Layers, hidden size, heads, pipeline degree, chunks, micro-batch, global batch, seconds with full and with selective recomputation.
    let runs = [
        ("22B", 48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10),
        ("175B", 96, 12288, 96, 8, 3, 1, 64, 18.13, 13.75),
        ("530B", 105, 20480, 128, 35, 3, 1, 280, 49.05, 37.83),
        ("1T", 128, 25600, 160, 64, 1, 1, 512, 94.42, 71.49),
    ];
    let mut rows = Vec::new();
    for (name, layers, hidden, heads, pipeline, chunks, micro_batch, batch, full, selective) in runs {
        for (mode, seconds) in [("full", full), ("selective", selective)] {
            let mut settings = gpt(Gpt { layers, hidden, heads }, [micro_batch, batch], [51200, 2048], "f16");
            settings.extend(parallel(8, pipeline, 1, chunks));
            settings.push(format!("parallel.recompute={mode}"));
            if mode == "selective" {
                settings.push("parallel.sequence_parallel=true".into());
            }
            rows.push(Row {
                name: format!("Korthikanti 2022, {name} {mode}"),
                family: "Korthikanti 2022",
                role: Role::Fitted,
                machines: "selene".into(),
                nodes: pipeline,
                software: Software::Megatron,
                settings,
                measured: Measured::Seconds(seconds),
            });
        }
    }
    let mut settings = gpt(Gpt { layers: 105, hidden: 20480, heads: 128 }, [1, 2240], [51200, 2048], "f16");
    settings.extend(parallel(8, 35, 8, 3));
    settings.extend(["parallel.recompute=selective".into(), "parallel.sequence_parallel=true".into()]);
    rows.push(Row {
        name: "Korthikanti 2022, 530B x 8".into(),
        family: "Korthikanti 2022",
        role: Role::Fitted,
        machines: "selene".into(),
        nodes: 280,
        software: Software::Megatron,
        settings,
        measured: Measured::Seconds(39.15),
    });
    rows
}

/// Table 4: sequence length, context degree, shard degree, batch of a data-parallel rank, devices, TFLOP/s.
pub(super) fn llama3() -> Vec<Row> {
    let runs = [
        (8192, 1, 64, 32, 8192, 430.0),
        (8192, 1, 128, 16, 16384, 400.0),
        (131_072, 16, 8, 16, 16384, 380.0),
    ];
    let row =
        |(seq_len, context, shard, batch, devices, tflops): (usize, usize, usize, usize, usize, f64)| {
            let settings = [
                "model.preset=llama3-405b".to_owned(),
                format!("train.seq_len={seq_len}"),
                "train.precision=bf16".into(),
                "train.micro_batch=1".into(),
                format!("train.global_batch={}", shard * batch),
                "parallel.tensor_parallel=8".into(),
                "parallel.sequence_parallel=true".into(),
                format!("parallel.context_parallel={context}"),
                "parallel.pipeline_parallel=16".into(),
                "parallel.pipeline_schedule=interleaved_1f1b".into(),
                "parallel.virtual_stages=8".into(),
                format!("parallel.data_parallel_shard={shard}"),
                "parallel.zero_stage=1".into(),
            ];
            let mut settings = settings.to_vec();
            if context > 1 {
                settings.push("parallel.context_parallel_method=all_gather".into());
            }
            Row {
                name: format!("Llama 3 405B, {seq_len} tokens on {devices}"),
                family: "Llama 3",
                role: Role::Fitted,
                machines: "dgx-h100".into(),
                nodes: devices / 8,
                software: Software::Lockstep,
                settings,
                measured: Measured::ModelTflops(tflops),
            }
        };
    runs.map(row).into()
}
