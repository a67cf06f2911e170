//! `lockstep bench machine`: measures this machine, writes it as a cluster file and prints a table.

use std::path::{Path, PathBuf};

use clap::{Args, ValueHint};
use lockstep_config::human;
use lockstep_planner::cluster::{Cluster, Device};
use lockstep_planner::machine::measured_file;
use lockstep_train::machine_file::{Extent, MeasuredMachine, measure};
use serde_json::{Value, json};

use crate::exit::Failure;
use crate::output::{note, say, warning};
use crate::ranks;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Cluster file to write [default: the file in the user's cache directory that plan and train read]
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    output: Option<PathBuf>,
    /// Ranks that compute at the same time: a number, or one for each core (auto)
    #[arg(long, value_name = "N|auto", default_value = "auto", value_parser = ranks::number_of_cores)]
    nproc_per_node: usize,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Fraction of the cores that other processes may use without a warning.
const BUSY: f64 = 0.05;

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let output = arguments.output.clone().unwrap_or_else(measured_file);
    // The measured disk is that of the output file; a bad path is reported before the measurement.
    let directory = match output.parent() {
        Some(directory) if !directory.as_os_str().is_empty() => directory,
        _ => Path::new("."),
    };
    let refuse =
        |error: std::io::Error| Failure::configuration(format!("cannot write {}: {error}", output.display()));
    if arguments.output.is_none() {
        std::fs::create_dir_all(directory).map_err(refuse)?;
    }
    std::fs::OpenOptions::new().create(true).append(true).open(&output).map_err(refuse)?;
    if !arguments.json {
        note!("measuring for half a minute; whatever else runs here is measured with it");
    }
    let found = measure(arguments.nproc_per_node, directory, &Extent::default())?;
    std::fs::write(&output, found.cluster.to_toml()).map_err(refuse)?;
    if let Some(others) = found.others.filter(|others| *others > BUSY) {
        let percent = 100.0 * others;
        warning(&format!(
            "other processes had {percent:.0} % of the cores meanwhile; measure again when they are done"
        ));
    }
    if let Some(problem) = &found.disk_problem {
        warning(&format!("the disk was not measured: {problem}"));
    }
    if arguments.json {
        say!("{}", document(&found, &output));
    } else {
        show(&found);
        say!("written to {}", output.display());
        if arguments.output.is_none() {
            say!("lockstep plan and lockstep train go by it");
        }
    }
    Ok(())
}

fn document(found: &MeasuredMachine, path: &Path) -> Value {
    let device = |device: &Device| {
        let peaks = device.peak_tflops.iter().map(|(dtype, peak)| (dtype.to_string(), json!(peak)));
        json!({
            "peak_tflops": peaks.collect::<serde_json::Map<_, _>>(), "memory_gb_per_s": device.memory_gb_per_s,
            "product": device.efficiency.product, "half_shape": device.efficiency.half_shape,
            "cold_gb_per_s": device.efficiency.cold_gb_per_s,
            "measured": device.efficiency.measured,
        })
    };
    let Cluster { nodes, links, .. } = &found.cluster;
    let node = &nodes[0];
    let link = links.first().map(|link| {
        json!({
            "gb_per_s": link.gb_per_s, "efficiency": link.efficiency, "in_switch": link.in_switch, "latency_us": link.latency_us,
            "start_us": link.start_us, "fill": link.fill,
        })
    });
    json!({
        "file": path, "ranks": node.devices, "device": device(&node.device), "alone": node.alone.as_ref().map(device),
        "link": link, "others": found.others, "disk_gb_per_s": node.disk_gb_per_s, "memory_bytes": node.host_memory_bytes,
        "errors": { "products": found.product_errors.0, "products_alone": found.product_errors.1, "link": found.link_error },
    })
}

fn show(found: &MeasuredMachine) {
    let node = &found.cluster.nodes[0];
    let (of_rank, of_alone) = (&node.device, node.alone.as_ref());
    let row = |name: &str, value: &dyn Fn(&Device) -> f64| {
        let alone = of_alone.map_or_else(String::new, |device| format!("{:>12.2}", value(device)));
        say!("{name:34} {:>12.2} {alone}", value(of_rank));
    };
    let heading = match node.devices {
        1 => "a rank".to_owned(),
        ranks => format!("each of {ranks}"),
    };
    say!("{:34} {heading:>12} {}", "", if of_alone.is_some() { "   all cores" } else { "" });
    for dtype in of_rank.peak_tflops.keys() {
        row(&format!("large products, {dtype}, GFLOP/s"), &|device| {
            device.peak_tflops.get(dtype).copied().unwrap_or(0.0) * device.efficiency.product * 1e3
        });
    }
    for (side, name) in ["rows", "inner elements", "columns"].into_iter().enumerate() {
        row(&format!("half of that with so many {name}"), &|device| device.efficiency.half_shape[side]);
    }
    row("what no cache has of products, GB/s", &|device| device.efficiency.cold_gb_per_s);
    row("memory, GB/s", &|device| device.memory_gb_per_s);
    for (name, unit) in [
        ("attention forward", "GFLOP/s"),
        ("attention backward inputs", "GFLOP/s"),
        ("RMSNorm forward", "GB/s"),
        ("SwiGLU forward", "GB/s"),
        ("update", "GB/s"),
    ] {
        row(&format!("{name}, {unit}"), &|device| {
            device.efficiency.measured.get(name).copied().unwrap_or(0.0)
        });
    }
    let off = |error: f64| format!("{:.0} %", 100.0 * error);
    let (together, alone) = found.product_errors;
    let single =
        if of_alone.is_some() { format!("{} and {}", off(together), off(alone)) } else { off(alone) };
    say!("single products are off what the file says by {single}");
    if let (Some(link), Some(error)) = (found.cluster.links.first(), found.link_error) {
        say!(
            "between ranks: {:.1} GB/s, all-reduces {:.1} GB/s, {:.2} us a step; single exchanges are off by {}",
            link.gb_per_s * link.efficiency,
            link.gb_per_s * link.in_switch.unwrap_or(1.0),
            link.latency_us,
            off(error)
        );
    }
    if found.disk_problem.is_none() {
        say!("disk: {:.2} GB/s, {} free", node.disk_gb_per_s, human::bytes(node.disk_bytes));
    }
    say!("memory: {}", human::bytes(node.host_memory_bytes));
}
