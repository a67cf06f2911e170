//! Megatron-LM of 2020 on V100 and on the first A100, and ZeRO on V100.
//!
//! Megatron-LM: the four models of its README of that year (github.com/NVIDIA/Megatron-LM, images/tables.tex at commit 1930198),
//! with 8 sequences of 1,024 tokens on V100, 16 on A100, and full recomputation, by the FLOPs that the table counts; and the same
//! models some months earlier (nv-adlr.github.io/MegatronLMV1, May 2020). All run on one node unless stated otherwise.

use lockstep_planner::cluster::Software;

use super::{Gpt, Measured, Role, Row, gpt, parallel};

/// Returns all rows of this file.
pub(super) fn volta() -> Vec<Row> {
    [readme(), zero()].into_iter().flatten().collect()
}

/// A model: parameters in 10⁹, layers, hidden size, heads, devices; milliseconds of a step on V100 in May 2020, on V100 with the
/// README, on A100, and on 128 times as many A100.
type Model = (f64, usize, usize, usize, usize, [f64; 4]);

fn readme() -> Vec<Row> {
    let models: [Model; 4] = [
        (1.2, 24, 1920, 15, 1, [1288.0, 1121.0, 1076.0, 1153.0]),
        (2.0, 30, 2304, 18, 2, [1242.0, 1093.0, 1026.0, 1101.0]),
        (4.2, 36, 3072, 24, 4, [1357.0, 1238.0, 1162.0, 1242.0]),
        (8.7, 42, 4096, 32, 8, [1508.0, 1407.0, 1343.0, 1380.0]),
    ];
    let mut rows = Vec::new();
    for (params, layers, hidden, heads, tensor, times) in models {
        let kinds = [
            ("Megatron-LM 1.0, V100", "dgx-2", 8, 1, Role::HeldOut),
            ("Megatron-LM 2020, V100", "dgx-2", 8, 1, Role::HeldOut),
            ("Megatron-LM 2020, A100 40GB", "dgx-a100-40gb", 16, 1, Role::HeldOut),
            ("Megatron-LM 2020, A100 40GB", "dgx-a100-40gb", 16, 128, Role::HeldOut),
        ];
        for ((family, machines, batch, replicas, role), milliseconds) in kinds.into_iter().zip(times) {
            let model = Gpt { layers, hidden, heads };
            let mut settings = gpt(model, [batch, batch * replicas], [51200, 1024], "f16");
            settings.extend(parallel(tensor, 1, replicas, 1));
            settings.push("parallel.recompute=full".into());
            rows.push(Row {
                name: format!("{family}, {params}B on {}", tensor * replicas),
                family,
                role,
                machines: machines.into(),
                nodes: (tensor * replicas).div_ceil(8),
                software: Software::Megatron,
                settings,
                measured: Measured::Seconds(milliseconds / 1e3),
            });
        }
    }
    rows
}

/// Rajbhandari et al. 2020, "ZeRO" (arXiv 1910.02054): 100 billion parameters on 25 DGX-2 at 15 PFLOP/s, which are 38 TFLOP/s of a
/// device; the configuration is in its appendix.
fn zero() -> Vec<Row> {
    let model = Gpt { layers: 125, hidden: 8192, heads: 64 };
    let mut settings = gpt(model, [32, 32 * 25], [51200, 1024], "f16");
    settings.extend(parallel(16, 1, 1, 1));
    settings.extend([
        "parallel.data_parallel_shard=25".into(),
        "parallel.zero_stage=2".into(),
        "parallel.recompute=full".into(),
    ]);
    vec![Row {
        name: "ZeRO, 100B on 400".into(),
        family: "ZeRO, V100",
        role: Role::HeldOut,
        machines: "dgx-2".into(),
        nodes: 25,
        software: Software::DeepSpeed,
        settings,
        measured: Measured::HardwareTflops(38.0),
    }]
}
