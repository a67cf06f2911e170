//! Published runs: what was trained on which machines, how, and how fast it was.
//!
//! Sources: Narayanan et al. 2021 (arXiv 2104.04473, tables 1 and 2), Korthikanti et al. 2022 (2205.05198, table 5), Grattafiori et al. 2024
//! (2407.21783, table 4), Mosaic's llm-foundry (README of its training benchmarks).

use lockstep_plan::cluster::{Cluster, Software};
use lockstep_train::RunConfig;
use lockstep_train::planner::{Evaluated, Objective, Planner};

/// A published run.
pub(crate) struct Row {
    pub(crate) name: String,
    /// Name of a preset, with a number of nodes.
    cluster: String,
    software: Software,
    settings: Vec<String>,
    measured: Measured,
}

impl Row {
    /// The preset that its machines are described by.
    pub(crate) fn preset(&self) -> &str {
        self.cluster.rsplit_once('x').expect("a number of nodes").0
    }

    /// Whether a pipeline has so many stages that its simulation takes a second.
    pub(crate) fn is_long(&self) -> bool {
        ["105 layers", "530B", "1T", "310", "529", "1008"].iter().any(|part| self.name.contains(part))
            && !self.name.contains("ZeRO")
    }

    /// What is predicted of it with the devices and links of `machines`.
    pub(crate) fn predicted(&self, machines: Cluster) -> Evaluated {
        let (_, nodes) = self.cluster.rsplit_once('x').expect("a number of nodes");
        let mut cluster = machines;
        cluster.nodes[0].count = nodes.parse().expect("a number");
        cluster.software = self.software;
        let settings: Vec<&str> = self.settings.iter().map(String::as_str).collect();
        let config = RunConfig::parse("", &self.name, &settings);
        let config = config.unwrap_or_else(|error| panic!("{}: {error}", self.name));
        let mut planner = Planner::new(config, cluster, Objective::Time).expect("a model");
        planner.of_run().unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    /// The figure that was published, as a rate, and what is predicted of it.
    pub(crate) fn figures(&self, found: &Evaluated) -> [f64; 2] {
        match self.measured {
            Measured::HardwareTflops(tflops) => [found.hardware_tflops_per_device(), tflops],
            Measured::ModelTflops(tflops) => [found.tflops_per_device(), tflops],
            Measured::Seconds(seconds) => [1e3 / found.step.step_ms, 1.0 / seconds],
        }
    }
}

/// All of them.
pub(crate) fn published() -> Vec<Row> {
    megatron()
        .into_iter()
        .chain(korthikanti())
        .chain(llama3())
        .chain(mosaic("dgx-h100", 989.5, &MOSAIC_H100))
        .chain(mosaic("hgx-a100-roce", 312.0, &MOSAIC_A100))
        .collect()
}

/// What was measured of it.
enum Measured {
    /// 10¹² operations a second of a device, with what is computed again.
    HardwareTflops(f64),
    /// Without.
    ModelTflops(f64),
    /// Seconds of a step.
    Seconds(f64),
}

/// A GPT as Megatron-LM's papers train it.
struct Gpt {
    layers: usize,
    hidden: usize,
    heads: usize,
}

fn gpt(Gpt { layers, hidden, heads }: Gpt, batch: [usize; 2]) -> Vec<String> {
    let [micro_batch, global_batch] = batch;
    vec![
        "model.preset=gpt2-124m".into(),
        format!("model.n_layer={layers}"),
        format!("model.n_embd={hidden}"),
        format!("model.n_head={heads}"),
        "model.vocab_size=51200".into(),
        "model.n_positions=2048".into(),
        "train.seq_len=2048".into(),
        "train.precision=f16".into(),
        format!("train.micro_batch={micro_batch}"),
        format!("train.global_batch={global_batch}"),
    ]
}

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

/// Table 1 of Narayanan et al. 2021: parameters in 10⁹, layers, hidden size, heads, tensor, pipeline, devices, batch, micro-batch, chunks
/// and TFLOP/s.
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

fn megatron() -> Vec<Row> {
    let mut rows = Vec::new();
    for (params, layers, hidden, heads, tensor, pipeline, devices, batch, micro_batch, chunks, tflops) in
        MEGATRON
    {
        let mut settings = gpt(Gpt { layers, hidden, heads }, [micro_batch, batch]);
        settings.extend(parallel(tensor, pipeline, devices / tensor / pipeline, chunks));
        settings.push("parallel.recompute=full".into());
        rows.push(Row {
            name: format!("Megatron-LM 2021, {params}B"),
            cluster: format!("dgx-a100x{}", devices / 8),
            software: Software::Megatron,
            settings,
            measured: Measured::HardwareTflops(tflops),
        });
    }
    // Table 2: layers, hidden size, heads, pipeline, and for each number of devices the TFLOP/s.
    let larger = [
        (96, 12288, 96, 12, 1536, [(384, 153.0), (768, 149.0), (1536, 141.0)]),
        (105, 20480, 128, 35, 2240, [(560, 171.0), (1120, 167.0), (2240, 159.0)]),
    ];
    for (layers, hidden, heads, pipeline, batch, runs) in larger {
        for (devices, tflops) in runs {
            let mut settings = gpt(Gpt { layers, hidden, heads }, [1, batch]);
            settings.extend(parallel(8, pipeline, devices / 8 / pipeline, 1));
            settings.push("parallel.recompute=full".into());
            rows.push(Row {
                name: format!("Megatron-LM 2021, {layers} layers on {devices}"),
                cluster: format!("dgx-a100x{}", devices / 8),
                software: Software::Megatron,
                settings,
                measured: Measured::HardwareTflops(tflops),
            });
        }
    }
    // ZeRO-3 in the same table: layers, hidden size, heads, batch, devices, micro-batch, TFLOP/s.
    let zero = [
        (96, 12288, 96, 1536, 384, 4, 144.0),
        (96, 12288, 96, 1536, 768, 2, 88.0),
        (96, 12288, 96, 1536, 1536, 1, 44.0),
        (105, 20480, 128, 2560, 640, 4, 138.0),
        (105, 20480, 128, 2240, 1120, 2, 98.0),
        (105, 20480, 128, 2240, 2240, 1, 48.0),
    ];
    for (layers, hidden, heads, batch, devices, micro_batch, tflops) in zero {
        let mut settings = gpt(Gpt { layers, hidden, heads }, [micro_batch, batch]);
        settings.extend([
            format!("parallel.data_parallel_shard={devices}"),
            "parallel.zero_stage=3".into(),
            "parallel.recompute=full".into(),
        ]);
        rows.push(Row {
            name: format!("ZeRO-3 in it, {layers} layers on {devices}"),
            cluster: format!("dgx-a100x{}", devices / 8),
            software: Software::DeepSpeed,
            settings,
            measured: Measured::HardwareTflops(tflops),
        });
    }
    rows
}

fn korthikanti() -> Vec<Row> {
    // Layers, hidden size, heads, pipeline, chunks, micro-batch, batch, seconds with full recomputation and with their work.
    let runs = [
        ("22B", 48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10),
        ("175B", 96, 12288, 96, 8, 3, 1, 64, 18.13, 13.75),
        ("530B", 105, 20480, 128, 35, 3, 1, 280, 49.05, 37.83),
        ("1T", 128, 25600, 160, 64, 1, 1, 512, 94.42, 71.49),
    ];
    let mut rows = Vec::new();
    for (name, layers, hidden, heads, pipeline, chunks, micro_batch, batch, full, selective) in runs {
        for (mode, seconds) in [("full", full), ("selective", selective)] {
            let mut settings = gpt(Gpt { layers, hidden, heads }, [micro_batch, batch]);
            settings.extend(parallel(8, pipeline, 1, chunks));
            settings.push(format!("parallel.recompute={mode}"));
            if mode == "selective" {
                settings.push("parallel.sequence_parallel=true".into());
            }
            rows.push(Row {
                name: format!("Korthikanti 2022, {name} {mode}"),
                cluster: format!("dgx-a100x{pipeline}"),
                software: Software::Megatron,
                settings,
                measured: Measured::Seconds(seconds),
            });
        }
    }
    let mut settings = gpt(Gpt { layers: 105, hidden: 20480, heads: 128 }, [1, 2240]);
    settings.extend(parallel(8, 35, 8, 3));
    settings.extend(["parallel.recompute=selective".into(), "parallel.sequence_parallel=true".into()]);
    rows.push(Row {
        name: "Korthikanti 2022, 530B x 8".into(),
        cluster: "dgx-a100x280".into(),
        software: Software::Megatron,
        settings,
        measured: Measured::Seconds(39.15),
    });
    rows
}

/// Table 4: sequence length, context, replicas, batch of a replica, devices, TFLOP/s.
fn llama3() -> Vec<Row> {
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
                cluster: format!("dgx-h100x{}", devices / 8),
                software: Software::Lockstep,
                settings,
                measured: Measured::ModelTflops(tflops),
            }
        };
    runs.map(row).into()
}

/// Runs of Mosaic's llm-foundry: model, sequence length, devices, micro-batch, accumulation, whether activations are computed again, and
/// model FLOP/s as a share of the peak in percent.
type Mosaic = (&'static str, usize, usize, usize, usize, bool, f64);

const MOSAIC_H100: [Mosaic; 22] = [
    ("70b", 2048, 512, 8, 1, true, 41.25),
    ("70b", 2048, 128, 8, 1, true, 43.36),
    ("70b", 2048, 64, 8, 4, true, 42.57),
    ("30b", 2048, 512, 8, 1, true, 40.27),
    ("30b", 2048, 128, 8, 1, true, 41.85),
    ("30b", 2048, 32, 14, 3, true, 43.92),
    ("30b", 8192, 8, 1, 21, true, 29.92),
    ("13b", 2048, 512, 16, 1, true, 41.12),
    ("13b", 2048, 128, 16, 1, true, 42.18),
    ("13b", 2048, 8, 2, 1, false, 39.79),
    ("13b", 16384, 8, 3, 3, true, 35.55),
    ("7b", 2048, 512, 6, 1, false, 42.2),
    ("7b", 2048, 128, 6, 1, false, 45.71),
    ("7b", 2048, 8, 6, 1, false, 46.44),
    ("7b", 8192, 8, 8, 2, true, 37.14),
    ("7b", 32768, 8, 2, 2, true, 30.94),
    ("3b", 2048, 64, 6, 3, false, 40.8),
    ("3b", 8192, 8, 3, 6, false, 40.31),
    ("3b", 512, 8, 40, 6, false, 46.32),
    ("1b", 2048, 64, 20, 1, false, 40.85),
    ("1b", 8192, 8, 3, 4, false, 37.73),
    ("1b", 512, 8, 56, 4, false, 43.21),
];

const MOSAIC_A100: [Mosaic; 18] = [
    ("70b", 2048, 64, 8, 4, true, 53.33),
    ("70b", 2048, 32, 2, 16, true, 48.56),
    ("30b", 2048, 8, 3, 21, true, 55.3),
    ("30b", 8192, 8, 1, 21, true, 39.38),
    ("13b", 2048, 8, 2, 3, false, 59.57),
    ("13b", 4096, 8, 10, 3, true, 57.62),
    ("13b", 16384, 8, 3, 3, true, 54.07),
    ("7b", 2048, 8, 6, 2, false, 64.23),
    ("7b", 8192, 8, 8, 2, true, 54.47),
    ("7b", 32768, 8, 2, 2, true, 49.46),
    ("7b", 1024, 8, 64, 2, true, 58.01),
    ("3b", 2048, 8, 10, 2, false, 62.11),
    ("3b", 8192, 8, 3, 6, false, 59.34),
    ("3b", 512, 8, 40, 6, false, 63.71),
    ("1b", 2048, 8, 14, 4, false, 59.86),
    ("1b", 8192, 8, 3, 4, false, 56.69),
    ("1b", 512, 8, 56, 4, false, 60.68),
    ("760m", 2048, 8, 24, 2, false, 56.85),
];

fn mosaic(cluster: &str, peak_tflops: f64, runs: &[Mosaic]) -> Vec<Row> {
    let row = |&(model, seq_len, devices, micro_batch, accumulation, again, mfu): &Mosaic| {
        let (hidden, layers, heads) = match model {
            "70b" => (8192, 80, 64),
            "30b" => (7168, 48, 56),
            "13b" => (5120, 40, 40),
            "7b" => (4096, 32, 32),
            "3b" => (2560, 32, 20),
            "1b" => (2048, 24, 16),
            _ => (1536, 24, 12),
        };
        let batch = [micro_batch, micro_batch * accumulation * devices];
        let mut settings = gpt(Gpt { layers, hidden, heads }, batch);
        settings.retain(|setting| {
            !["model.vocab", "model.n_pos", "train.seq", "train.prec"]
                .iter()
                .any(|key| setting.starts_with(key))
        });
        settings.extend([
            "model.vocab_size=50368".into(),
            format!("model.n_positions={seq_len}"),
            format!("train.seq_len={seq_len}"),
            "train.precision=bf16".into(),
            format!("parallel.data_parallel_shard={devices}"),
            "parallel.zero_stage=3".into(),
            format!("parallel.recompute={}", if again { "full" } else { "none" }),
        ]);
        Row {
            name: format!("llm-foundry {model}, {seq_len} tokens on {devices}"),
            cluster: format!("{cluster}x{}", devices / 8),
            software: Software::Fsdp,
            settings,
            measured: Measured::ModelTflops(mfu / 100.0 * peak_tflops),
        }
    };
    runs.iter().map(row).collect()
}
