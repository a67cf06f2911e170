//! A run's rows, read from `metrics.jsonl`, and their totals.
//!
//! The file may come from an older version or a killed run, or may be damaged: unreadable lines are counted and dropped, and
//! every value may be missing.

use std::collections::BTreeMap;
use std::io::{self, BufRead};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::metrics::CountUnit;

use super::series::{Point, maxima, smoothed, thinned, thinned_with_bounds};

/// Limit on the skipped steps listed by number.
const MAX_NAMED: usize = 200;

/// A row of a step or of an evaluation.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Row {
    step: Option<u64>,
    loss: Option<f64>,
    grad_norm: Option<f64>,
    lr: Option<f64>,
    tokens_seen: Option<u64>,
    samples_seen: Option<u64>,
    step_ms: Option<f64>,
    tokens_per_s: Option<f64>,
    samples_per_s: Option<f64>,
    accuracy: Option<f64>,
    eval_accuracy: Option<f64>,
    flops_per_s: Option<f64>,
    mfu: Option<f64>,
    skipped: bool,
    rollbacks: Option<u64>,
    memory: BTreeMap<String, f64>,
    memory_by_rank: Vec<BTreeMap<String, f64>>,
    memory_predicted: BTreeMap<String, f64>,
    memory_predicted_by_rank: Vec<BTreeMap<String, f64>>,
    comm: Communication,
    disk: Disk,
    data_wait_ms: Option<f64>,
    checkpoint_stall_ms: Option<f64>,
    eval_loss: Option<f64>,
    expert_imbalance: Option<f64>,
    expert_load: Vec<Vec<f64>>,
}

/// Communication of a step.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Communication {
    bytes: Option<f64>,
    busy_ms: Option<f64>,
    exposed_ms: Option<f64>,
}

/// Disk use of a step.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Disk {
    exposed_ms: Option<f64>,
}

/// The rows of a run as the report needs them.
#[derive(Debug, Default)]
pub(super) struct History {
    loss: Vec<Point>,
    eval_loss: Vec<Point>,
    grad_norm: Vec<Point>,
    lr: Vec<Point>,
    /// Throughput, in `unit` per second.
    amount_per_s: Vec<Point>,
    accuracy: Vec<Point>,
    eval_accuracy: Vec<Point>,
    stalls: Vec<Point>,
    flops_per_s: Vec<f64>,
    mfu: Vec<Point>,
    skipped: Vec<u64>,
    rollbacks: Option<u64>,
    memory: BTreeMap<String, f64>,
    memory_by_rank: Vec<BTreeMap<String, f64>>,
    memory_predicted: BTreeMap<String, f64>,
    memory_predicted_by_rank: Vec<BTreeMap<String, f64>>,
    /// Process memory (PSS) and booked bytes by rank, from the last step that measured them.
    processes: Vec<[f64; 2]>,
    expert_imbalance: Vec<Point>,
    expert_load: Vec<Vec<f64>>,
    comm_bytes: Option<f64>,
    comm_busy: Vec<Point>,
    comm_exposed: Vec<Point>,
    amount_seen: Option<u64>,
    /// Unit of the throughput.
    unit: CountUnit,
    step_ms: f64,
    data_wait_ms: f64,
    /// Step number, with the step time less data waits, the exposed communication and the exposed disk time, in milliseconds.
    times: Vec<(u64, [f64; 3])>,
    pub(super) damaged_lines: usize,
}

/// Median times and the memory of a run's steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct MedianStep {
    /// Median step time in milliseconds, without waits for data.
    pub step_ms: f64,
    /// Median exposed communication of the first rank in milliseconds.
    pub exposed_ms: f64,
    /// Median exposed disk time of the first rank in milliseconds.
    pub disk_ms: f64,
    /// Number of steps measured.
    pub steps: usize,
    /// Bytes booked in the ledger: the maximum over ranks of each category, summed, without the cache.
    pub booked_bytes: Option<f64>,
    /// Predicted value of `booked_bytes`.
    pub predicted_bytes: Option<f64>,
}

/// First steps of a process that are not measured; they pay for page faults and other one-time work.
const FIRST_STEPS: u64 = 2;

impl History {
    pub(super) fn read(mut reader: impl BufRead) -> io::Result<Self> {
        let mut history = Self::default();
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line)? > 0 {
            match serde_json::from_slice::<Row>(&line) {
                Ok(row @ Row { step: Some(step), .. }) => history.add(step, row),
                _ => history.damaged_lines += 1,
            }
            line.clear();
        }
        Ok(history)
    }

    fn add(&mut self, step: u64, row: Row) {
        if row.eval_loss.is_some() {
            self.eval_loss.push((step, row.eval_loss));
            if row.eval_accuracy.is_some() {
                self.eval_accuracy.push((step, row.eval_accuracy));
            }
            return;
        }
        self.loss.push((step, row.loss));
        self.grad_norm.push((step, row.grad_norm));
        self.lr.push((step, row.lr));
        if row.samples_per_s.is_some() {
            self.unit = CountUnit::Samples;
        }
        self.amount_per_s.push((step, row.tokens_per_s.or(row.samples_per_s)));
        if row.accuracy.is_some() {
            self.accuracy.push((step, row.accuracy));
        }
        self.flops_per_s.extend(row.flops_per_s);
        if row.mfu.is_some() {
            self.mfu.push((step, row.mfu));
        }
        if let Some(stall) = row.checkpoint_stall_ms.filter(|stall| *stall > 0.0) {
            self.stalls.push((step, Some(stall)));
        }
        if row.skipped {
            self.skipped.push(step);
        }
        if !row.memory.is_empty() {
            let of_each = if row.memory_by_rank.is_empty() {
                std::slice::from_ref(&row.memory)
            } else {
                &row.memory_by_rank
            };
            let processes: Option<Vec<_>> = of_each.iter().map(process_and_ledger).collect();
            self.processes = processes.unwrap_or(std::mem::take(&mut self.processes));
            self.memory = row.memory;
            self.memory_by_rank = row.memory_by_rank;
            self.memory_predicted = row.memory_predicted;
            self.memory_predicted_by_rank = row.memory_predicted_by_rank;
        }
        if row.expert_imbalance.is_some() {
            self.expert_imbalance.push((step, row.expert_imbalance));
        }
        if !row.expert_load.is_empty() {
            self.expert_load = row.expert_load;
        }
        if let Some(bytes) = row.comm.bytes.filter(|bytes| *bytes > 0.0) {
            self.comm_bytes = Some(bytes);
            self.comm_busy.push((step, row.comm.busy_ms));
            self.comm_exposed.push((step, row.comm.exposed_ms));
        }
        if let Some(step_ms) = row.step_ms {
            let exposed_ms = row.comm.exposed_ms.unwrap_or(0.0);
            let disk_ms = row.disk.exposed_ms.unwrap_or(0.0);
            self.times.push((step, [step_ms - row.data_wait_ms.unwrap_or(0.0), exposed_ms, disk_ms]));
        }
        self.rollbacks = row.rollbacks.or(self.rollbacks);
        self.amount_seen = row.tokens_seen.or(row.samples_seen).or(self.amount_seen);
        self.step_ms += row.step_ms.unwrap_or(0.0);
        self.data_wait_ms += row.data_wait_ms.unwrap_or(0.0);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.loss.is_empty() && self.eval_loss.is_empty()
    }

    pub(super) fn last_step(&self) -> u64 {
        self.loss.last().or(self.eval_loss.last()).map_or(0, |point| point.0)
    }

    /// Returns the step numbers of the first skipped steps.
    pub(super) fn first_skipped(&self) -> &[u64] {
        &self.skipped[..self.skipped.len().min(MAX_NAMED)]
    }

    /// Returns the bytes by category and the peak, from the last step that has them.
    pub(super) fn memory(&self) -> Option<&BTreeMap<String, f64>> {
        (!self.memory.is_empty()).then_some(&self.memory)
    }

    /// Returns the value of [`History::memory`] for each rank; empty if there is only one.
    pub(super) fn memory_by_rank(&self) -> &[BTreeMap<String, f64>] {
        &self.memory_by_rank
    }

    /// Returns the predicted bytes by category (maximum and per rank), and process memory paired with the ledger's bytes.
    pub(super) fn memory_beside(&self) -> Value {
        json!({
            "predicted": self.memory_predicted,
            "predicted_by_rank": self.memory_predicted_by_rank,
            "processes": self.processes,
        })
    }

    /// Returns the medians of the steps of a process that began with step `first`; `None` if it has too few.
    pub(super) fn usual_step(&self, first: u64) -> Option<MedianStep> {
        let of_process = || self.times.iter().filter(|(step, _)| *step >= first + FIRST_STEPS);
        let middle = |part: usize| median(of_process().map(|(_, times)| times[part]).collect());
        Some(MedianStep {
            step_ms: middle(0)?,
            exposed_ms: middle(1)?,
            disk_ms: middle(2)?,
            steps: of_process().count(),
            booked_bytes: (!self.memory.is_empty()).then(|| booked(&self.memory)),
            predicted_bytes: self.memory_predicted.get("total").copied(),
        })
    }

    /// Returns the load of each expert, by layer, from the last step that has it.
    pub(super) fn expert_load(&self) -> &[Vec<f64>] {
        &self.expert_load
    }

    /// Returns the lines of the charts.
    pub(super) fn series(&self) -> Value {
        json!({
            "loss": thinned_with_bounds(&self.loss),
            "smoothed": thinned(&smoothed(&self.loss)),
            "eval_loss": thinned(&self.eval_loss),
            "lr": thinned(&self.lr),
            "grad_norm": thinned_with_bounds(&self.grad_norm),
            "amount_per_s": thinned_with_bounds(&self.amount_per_s),
            "accuracy": thinned(&smoothed(&self.accuracy)),
            "eval_accuracy": thinned(&self.eval_accuracy),
            "mfu": thinned_with_bounds(&self.mfu),
            "stall": maxima(&self.stalls),
            "expert_imbalance": thinned_with_bounds(&self.expert_imbalance),
            "comm_busy": thinned(&self.comm_busy),
            "comm_exposed": thinned(&self.comm_exposed),
        })
    }

    /// Returns the totals shown above the charts.
    pub(super) fn totals(&self) -> Value {
        let stall_ms: f64 = self.stalls.iter().filter_map(|point| point.1).sum();
        let all_ms = self.step_ms + stall_ms;
        let exposed_ms: f64 = self.comm_exposed.iter().filter_map(|point| point.1).sum();
        let share = |part: f64| (all_ms > 0.0).then(|| part / all_ms);
        json!({
            "steps": self.last_step(),
            "unit": self.unit.word(),
            "amount_seen": self.amount_seen,
            "seconds": (self.step_ms > 0.0).then_some(self.step_ms / 1e3),
            "loss": smoothed(&self.loss).last().and_then(|point| point.1),
            "eval_loss": self.eval_loss.last().and_then(|point| point.1),
            "accuracy": smoothed(&self.accuracy).last().and_then(|point| point.1),
            "eval_accuracy": self.eval_accuracy.last().and_then(|point| point.1),
            "amount_per_s": median(self.amount_per_s.iter().filter_map(|point| point.1).collect()),
            "flops_per_s": median(self.flops_per_s.clone()),
            "mfu": median(self.mfu.iter().filter_map(|point| point.1).collect()),
            "peak_bytes": self.memory.get("peak"),
            "stall_seconds": stall_ms / 1e3,
            "stall_share": share(stall_ms),
            "data_share": share(self.data_wait_ms),
            "ranks": (self.memory_by_rank.len() > 1).then_some(self.memory_by_rank.len()),
            "comm_bytes": self.comm_bytes,
            "comm_share": self.comm_bytes.and_then(|_| share(exposed_ms)),
            "skipped": self.skipped.len(),
            "rollbacks": self.rollbacks,
        })
    }
}

/// Returns process memory (PSS) and booked bytes of a row; `None` if the step did not measure the process.
fn process_and_ledger(memory: &BTreeMap<String, f64>) -> Option<[f64; 2]> {
    let process = *memory.get("process_pss")?;
    let cached = memory.get("cached").copied().unwrap_or(0.0);
    Some([process, booked(memory) + cached])
}

/// Returns the sum of all booked categories except the cache.
fn booked(memory: &BTreeMap<String, f64>) -> f64 {
    let is_booked = |name: &str| !["peak", "process_pss", "cached"].contains(&name);
    memory.iter().filter(|(name, _)| is_booked(name)).map(|(_, bytes)| bytes).sum()
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
