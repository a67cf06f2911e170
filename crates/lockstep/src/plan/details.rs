//! The parts of a plan's step for `--json` and `--explain`: traffic over each level of links, rooflines, memory over time.

use lockstep_config::human;
use lockstep_planner::cluster::Cluster;
use lockstep_planner::predict::{StepTraffic, Traffic};
use lockstep_planner::{Details, MemoryCurve, Point, Roofline};
use serde_json::{Map, Value, json};

use crate::output::say;

/// Returns the keys of a document beside its plans: traffic, rooflines and memory over time.
pub(super) fn to_json(details: &Details, cluster: &Cluster) -> Map<String, Value> {
    let Details { traffic, rooflines, memory } = details;
    let memory = memory.iter().enumerate().map(curve);
    Map::from_iter([
        ("traffic".to_owned(), sent(traffic, cluster)),
        ("rooflines".to_owned(), rooflines.iter().map(roofline).collect()),
        ("memory_over_time".to_owned(), memory.collect()),
    ])
}

fn sent(traffic: &StepTraffic, cluster: &Cluster) -> Value {
    let links: Vec<&str> = cluster.links.iter().map(|link| link.name.as_str()).collect();
    let kind = |kind: &Traffic| {
        json!({
            "sent": kind.sent.name(), "ranks": kind.ranks, "bytes": kind.bytes[..links.len()],
            "busy_ms": kind.busy_ms, "exposed_ms": kind.exposed_ms, "hidden": kind.hidden(),
        })
    };
    json!({
        "pipeline_rank": traffic.pipeline_rank, "links": links,
        "kinds": traffic.kinds.iter().map(kind).collect::<Vec<_>>(), "shared_links_ms": traffic.shared_ms,
    })
}

fn roofline(roofline: &Roofline) -> Value {
    let all = roofline.seconds().max(f64::MIN_POSITIVE);
    let point = |point: &Point| {
        json!({
            "name": point.name, "pass": point.pass.name(),
            "shape": point.shape.map(|shape| json!({
                "rows": shape.rows, "inner": shape.inner, "columns": shape.columns, "count": shape.count,
            })),
            "flops": point.flops, "bytes": point.bytes, "ms": point.seconds * 1e3,
            "intensity": point.intensity(), "flops_per_s": point.rate(),
            "share_of_peak": point.rate() / roofline.peak, "share_of_limit": roofline.share_of_roof(point),
            "share_of_micro_batch": point.seconds / all,
            "bound": if roofline.is_bound_by_memory(point) { "memory" } else { "compute" },
        })
    };
    json!({
        "device": roofline.device, "pipeline_ranks": roofline.pipeline_ranks,
        "peak_flops_per_s": roofline.peak, "bandwidth_bytes_per_s": roofline.bandwidth,
        "points": roofline.points.iter().map(point).collect::<Vec<_>>(),
    })
}

fn curve((rank, curve): (usize, &MemoryCurve)) -> Value {
    let (peak_ms, peak_bytes) = curve.peak();
    json!({
        "pipeline_rank": rank, "standing_bytes": curve.standing_bytes,
        "peak_bytes": peak_bytes, "peak_ms": peak_ms, "booked_bytes": curve.booked_bytes,
    })
}

/// Prints the traffic of a rank in a step as a short table; nothing for a rank that sends nothing.
pub(super) fn print_traffic(traffic: &StepTraffic, cluster: &Cluster) {
    let StepTraffic { pipeline_rank, kinds, shared_ms } = traffic;
    if kinds.is_empty() {
        return;
    }
    let is_used = |level: &usize| kinds.iter().any(|kind| kind.bytes[*level] > 0.0);
    let levels: Vec<usize> = (0..cluster.links.len()).filter(is_used).collect();
    let cells = |cell: &dyn Fn(usize) -> String| -> String {
        levels.iter().map(|level| format!("{:>14}", cell(*level))).collect()
    };
    let links = cells(&|level| cluster.links[level].name.clone());
    let title = format!("what pipeline rank {pipeline_rank} sends");
    say!("\n{title:<28}{links}{:>12}{:>12}{:>8}", "takes", "waited for", "hidden");
    for kind in kinds {
        let bytes = cells(&|level| human::bytes(kind.bytes[level] as u64).to_string());
        let hidden = format!("{:.0} %", kind.hidden() * 100.0);
        let (busy, exposed) = (human::milliseconds(kind.busy_ms), human::milliseconds(kind.exposed_ms));
        say!("  {:<26}{bytes}{busy:>12}{exposed:>12}{hidden:>8}", kind.sent.name());
    }
    if *shared_ms > 0.0 {
        say!("  {} more, because several go over the same links at once", human::milliseconds(*shared_ms));
    }
}
