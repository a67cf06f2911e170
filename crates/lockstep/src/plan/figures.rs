//! Figures of a plan that both answers of `lockstep plan` show: the workload, the step, and memory by category.

use lockstep_plan::{MemoryBytes, MemoryCategory};
use lockstep_planner::cluster::{Cluster, Link, NodeKind};
use lockstep_planner::{Assumption, Evaluated, Planner};
use serde_json::{Map, Value, json};

use crate::output::say;

/// Prints the workload (model, precision, batch) and which part of it is assumed.
pub(super) fn print_workload(planner: &Planner, assumed: &[Assumption]) {
    say!("workload   {}", planner.workload_in_words());
    if !assumed.is_empty() {
        let values: Vec<&str> = assumed.iter().map(|assumption| assumption.value.as_str()).collect();
        let flags: Vec<&str> = assumed.iter().map(|assumption| assumption.flag).collect();
        say!("           {}: usual on accelerators; {} say otherwise", values.join(", "), flags.join(", "));
    }
}

/// Returns the workload in the form of `--json`.
pub(super) fn workload(planner: &Planner, assumed: &[Assumption]) -> Value {
    let train = &planner.config().train;
    json!({
        "model": planner.model_name(), "parameters": planner.parameters(),
        "trained_parameters": planner.trained_parameters(), "precision": train.precision.word(),
        "seq_len": train.seq_len, "global_batch": train.global_batch, "tokens_per_step": train.seq_len * train.global_batch,
        "assumed": assumed.iter().map(|assumption| assumption.setting.as_str()).collect::<Vec<_>>(),
    })
}

/// Returns the machines in the form of `--json`: kinds of nodes, and the links from the innermost to the outermost.
pub(super) fn machines(cluster: &Cluster) -> Value {
    let node =
        |node: &NodeKind| json!({ "count": node.count, "devices": node.devices, "device": node.device.name });
    let link = |link: &Link| json!({ "name": link.name, "gb_per_s": link.gb_per_s });
    json!({
        "name": cluster.name,
        "nodes": cluster.nodes.iter().map(node).collect::<Vec<_>>(),
        "links": cluster.links.iter().map(link).collect::<Vec<_>>(),
    })
}

/// Returns bytes by category and their total, for `--json`.
pub(super) fn memory_by_category(memory: MemoryBytes) -> Value {
    let mut map: Map<String, Value> =
        memory.entries().map(|(category, bytes)| (category.name().to_owned(), bytes.into())).collect();
    // Cached blocks that kernels reuse are not predicted.
    map.remove(MemoryCategory::Cached.name());
    map.insert("total".to_owned(), memory.total().into());
    map.into()
}

/// Returns the figures of a plan's step in the form of `--json`.
pub(super) fn figures(found: &Evaluated, cluster: &Cluster) -> Value {
    let step = &found.step;
    let goodput = (found.devices > 1).then(|| found.goodput(cluster));
    json!({
        "devices": found.devices,
        "step_ms": step.step_ms,
        "tokens_per_s": found.tokens_per_s(),
        "tflops_per_device": found.tflops_per_device(),
        "hardware_tflops_per_device": found.hardware_tflops_per_device(),
        "mfu": found.mfu(),
        "step_parts_ms": {
            "work": step.work_ms, "exchanges": step.exchange_ms, "bubble": step.bubble_ms,
            "gradients": step.gradients_ms, "update": step.update_ms, "host": step.host_ms, "disk": step.disk_ms,
        },
        "memory_by_stage": found.memory.iter().copied().map(memory_by_category).collect::<Vec<Value>>(),
        "capacity_bytes": found.capacity_bytes,
        "price_per_hour": found.price_per_hour,
        "price_source": cluster.nodes.iter().find_map(|node| node.price_source.as_deref()),
        "price_per_billion_tokens": found.price_per_billion_tokens(),
        "stalls_ms": {
            "data": found.data_stall_ms, "save": found.save_stall_ms(), "of_a_save": found.save_ms(),
            "saved_bytes": found.saves.bytes, "steps_between_saves": found.config.checkpoint.every,
        },
        "goodput": goodput.map(|goodput| json!({ "share": goodput.share, "interval_s": goodput.interval_s })),
    })
}
