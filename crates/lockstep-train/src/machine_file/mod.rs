//! Measures this machine and writes it as a cluster file, so that predictions hold here.
//!
//! Ranks of a machine share its cores and its memory, so two settings are timed: all ranks at work at the same time, each on its
//! share of the cores; and one rank with all cores. The file has both (`node.device`, `node.alone`), and [`NodeKind::device_of`]
//! interpolates for plans in between.

mod descent;
mod disk;
mod links;
mod others;
mod products;
mod ranks;
mod tasks;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use lockstep_comm::{Deadline, Group};
use lockstep_engine::EngineError;
use lockstep_plan::DType;
use lockstep_planner::cluster::{Cluster, Device, Efficiency, NodeKind};
use lockstep_planner::fit::available_bytes;
use lockstep_planner::machine::name_of_this;
use lockstep_tensor::cpu::{measure_bandwidth, measure_peak};
use lockstep_tensor::{Arena, CpuQueue};
use others::Ticks;
use ranks::{LIMIT, on_ranks};
use tasks::Rates;

use crate::Error;

/// Types that models are trained in; tasks of the first have plain names, those of the others end in the type.
const TYPES: [DType; 2] = [DType::F32, DType::BF16];
/// Mean time between failures of a machine, in hours: the figure for accelerators (`docs/clusters.md`), since none is known for this one.
const HOURS_BETWEEN_FAILURES: f64 = 50_680.0;
/// Assumed memory, in bytes, of a machine that does not report how much is available.
const UNKNOWN_MEMORY_BYTES: u64 = 8 << 30;

/// The effort of a measurement.
#[derive(Debug, Clone, Copy)]
pub struct Extent {
    /// Sequence length of the models whose operations are timed; products have at most twice as many tokens.
    pub tokens: usize,
    /// Timed steps of each of these models; the median counts.
    pub steps: usize,
    /// Duration for which each collective is repeated.
    pub exchange: Duration,
    /// Data written to the disk and read from it, in MiB.
    pub disk_mib: usize,
}

impl Default for Extent {
    /// Returns an effort of about half a minute.
    fn default() -> Self {
        Self { tokens: 512, steps: 5, exchange: Duration::from_millis(60), disk_mib: 768 }
    }
}

/// The measured machine, with the errors of its fit.
#[derive(Debug, Clone)]
pub struct MeasuredMachine {
    /// The machine as a cluster of one node.
    pub cluster: Cluster,
    /// Mean relative error of the file on single products: on a rank of several, and on one with all cores.
    pub product_errors: (f64, f64),
    /// Mean relative error of the file on collectives; `None` for one rank.
    pub link_error: Option<f64>,
    /// Reason why the disk could not be measured; `None` if it was.
    pub disk_problem: Option<String>,
    /// Fraction of the cores that other processes used during the measurement; `None` if the system does not report it.
    pub others: Option<f64>,
}

/// Measures this machine with `ranks` ranks, and its disk in `directory`. Nothing else should run meanwhile.
///
/// # Errors
/// If memory or threads cannot be had, or a rank does not answer ([`Error::Comm`]).
pub fn measure(ranks: usize, directory: &Path, extent: &Extent) -> Result<MeasuredMachine, Error> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let memory_bytes = available_bytes().unwrap_or(UNKNOWN_MEMORY_BYTES);
    let begin = Ticks::now();
    let alone = first(on_ranks(1, |group| Setting::measure(group, cores, extent))?);
    let together = match ranks {
        0 | 1 => None,
        _ => Some(first(on_ranks(ranks, |group| Setting::measure(group, (cores / ranks).max(1), extent))?)),
    };
    let (alone, product_error) = alone.device("all cores", memory_bytes);
    let (device, of_one) = match together {
        Some(setting) => setting.device("core", memory_bytes),
        None => (alone.clone(), product_error),
    };
    let (disk, disk_problem) = match disk::measure(directory, extent.disk_mib) {
        Ok(disk) => (Some(disk), None),
        Err(error) => (None, Some(format!("{}: {error}", directory.display()))),
    };
    let mut cluster = Cluster::local(ranks.max(1), memory_bytes);
    cluster.name = name_of_this(cores);
    cluster.nodes = vec![NodeKind {
        count: 1,
        devices: ranks.max(1),
        host_memory_bytes: memory_bytes,
        // Host memory is the same memory.
        host_gb_per_s: device.memory_gb_per_s,
        host_memory_gb_per_s: None,
        disk_gb_per_s: disk.map_or(1.0, |disk| disk.gb_per_s),
        disk_bytes: disk.map_or(0, |disk| disk.free_bytes),
        price_per_hour: None,
        price_source: None,
        kilowatts: None,
        hours_between_failures: HOURS_BETWEEN_FAILURES,
        device,
        alone: (ranks > 1).then_some(alone),
    }];
    let mut link_error = None;
    if ranks > 1 {
        let (link, error) = links::fit(&links::time(ranks, extent.exchange)?, &cluster);
        (cluster.links, link_error) = (vec![link], Some(error));
    } else {
        cluster.links.clear();
    }
    let others = Ticks::now().zip(begin).and_then(|(end, begin)| end.others_since(begin));
    Ok(MeasuredMachine { cluster, product_errors: (of_one, product_error), link_error, disk_problem, others })
}

/// The rates that a rank measured in one setting.
struct Setting {
    peaks: Vec<f64>,
    memory_gb_per_s: f64,
    products: Vec<Vec<products::Timed>>,
    /// Rates of tasks by type, in the order of [`TYPES`].
    tasks: Vec<Rates>,
    launch_us: f64,
}

impl Setting {
    /// Measures this rank, in step with the other ranks of the group.
    fn measure(group: &Group, threads: usize, extent: &Extent) -> Result<Self, Error> {
        let together = || Ok::<_, Error>(group.barrier(Deadline::after(LIMIT))?);
        let arena = Arena::new();
        let queue = CpuQueue::new(threads, &arena).map_err(EngineError::from)?;
        together()?;
        let peak = measure_peak(queue.level(), threads);
        together()?;
        let memory_gb_per_s = measure_bandwidth(queue.level(), threads);
        together()?;
        let launch_us = tasks::launch_us(&queue, &arena).map_err(EngineError::from)?;
        let (mut of_products, mut of_tasks) = (Vec::new(), Vec::new());
        for dtype in TYPES {
            together()?;
            of_products
                .push(products::time(&queue, &arena, dtype, 2 * extent.tokens).map_err(EngineError::from)?);
        }
        for dtype in TYPES {
            together()?;
            of_tasks.push(tasks::measure(threads, dtype, extent.tokens, extent.steps)?);
        }
        // A rank that is done early would leave the memory bandwidth to the others.
        together()?;
        let peaks = vec![peak.f32_gflops * 1e9, peak.bf16_gflops * 1e9];
        Ok(Self { peaks, memory_gb_per_s, products: of_products, tasks: of_tasks, launch_us })
    }

    /// Returns the setting as a device of a cluster, and the mean relative error of its fit on single products.
    fn device(self, name: &str, memory_bytes: u64) -> (Device, f64) {
        let rates = |(dtype, timed): (DType, &Vec<products::Timed>)| {
            timed.iter().map(|timed| timed.rate(dtype)).collect::<Vec<_>>()
        };
        let of_products: Rates = TYPES.into_iter().zip(&self.products).flat_map(rates).collect();
        let fit = products::fit(&self.peaks.into_iter().zip(self.products).collect::<Vec<_>>());
        let peak_tflops: BTreeMap<DType, f64> =
            TYPES.into_iter().zip(&fit.peaks).map(|(dtype, peak)| (dtype, peak / 1e12)).collect();
        let plain = &self.tasks[0];
        let attention = plain.get("attention forward").map_or(f64::NAN, |rate| rate / (fit.peaks[0] / 1e9));
        let attention = if attention.is_finite() { attention.clamp(0.001, 1.2) } else { 0.5 };
        let stream = stream_rate(plain).map_or(0.8, |rate| (rate / self.memory_gb_per_s).clamp(0.01, 1.2));
        let mut measured = of_products;
        for (dtype, tasks) in TYPES.into_iter().zip(&self.tasks) {
            let name =
                |name: &String| if dtype == TYPES[0] { name.clone() } else { format!("{name} {dtype}") };
            measured.extend(tasks.iter().map(|(task, rate)| (name(task), *rate)));
        }
        let efficiency = Efficiency {
            product: fit.product,
            half_shape: fit.half_shape,
            tile: None,
            attention,
            // No kernel here writes scores to memory.
            scores: attention,
            stream,
            cold_gb_per_s: fit.cold / 1e9,
            launch_us: self.launch_us,
            measured,
        };
        let memory_gb_per_s = self.memory_gb_per_s;
        let device = Device {
            name: name.to_owned(),
            peak_tflops,
            memory_bytes,
            memory_gb_per_s,
            is_host: true,
            efficiency,
        };
        (device, fit.error)
    }
}

/// Returns the median rate of all tasks that are bound by memory.
fn stream_rate(tasks: &Rates) -> Option<f64> {
    let is_stream = |name: &str| !name.starts_with("attention") && name != "update";
    let mut rates: Vec<f64> =
        tasks.iter().filter(|(name, _)| is_stream(name)).map(|(_, rate)| *rate).collect();
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied()
}

fn first<T>(of_ranks: Vec<T>) -> T {
    of_ranks.into_iter().next().expect("there is a rank")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_glimpse_of_this_machine_is_a_cluster_whose_rates_are_all_there() {
        let begin = std::time::Instant::now();
        let extent = Extent { tokens: 32, steps: 1, exchange: Duration::from_millis(1), disk_mib: 4 };
        let found = measure(2, &std::env::temp_dir(), &extent).unwrap();
        let text = found.cluster.to_toml();
        let read = Cluster::parse(&text, "machine").unwrap_or_else(|problems| panic!("{problems}\n{text}"));
        assert_eq!(read, found.cluster);
        let node = &read.nodes[0];
        assert_eq!((node.devices, read.devices()), (2, 2));
        let alone = node.alone.as_ref().expect("ranks share the cores");
        for device in [&node.device, alone] {
            assert!(device.is_host && device.peak_tflops.len() == TYPES.len(), "{device:?}");
            for name in
                ["update", "update bf16", "attention forward", "GELU backward inputs", "SwiGLU recompute"]
            {
                assert!(device.efficiency.measured.contains_key(name), "{name}: {device:?}");
            }
        }
        assert!(read.links.len() == 1 && found.link_error.is_some(), "{:?}", read.links);
        assert!(begin.elapsed() < Duration::from_secs(120), "{:?}", begin.elapsed());
    }

    #[test]
    fn one_rank_needs_no_link() {
        let extent = Extent { tokens: 16, steps: 1, exchange: Duration::ZERO, disk_mib: 4 };
        let found = measure(1, Path::new("/nowhere/at/all"), &extent).unwrap();
        assert_eq!((found.cluster.links.len(), found.cluster.nodes[0].alone.is_none()), (0, true));
        assert!(found.disk_problem.unwrap().contains("/nowhere/at/all"));
        assert_eq!(Cluster::parse(&found.cluster.to_toml(), "machine").as_ref(), Ok(&found.cluster));
    }
}
