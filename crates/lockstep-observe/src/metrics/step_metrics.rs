//! The metrics of a step and of an evaluation, as they are written: one field for each key of a row.

use std::time::Duration;

use lockstep_comm::CommError;
use lockstep_engine::{Ranks, Traffic};
use lockstep_plan::{MemoryBytes, MemoryCategory};
use lockstep_tensor::{Arena, DiskTraffic};
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use super::means::{Amount, CountUnit, Means};

/// Metrics of one training step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepMetrics {
    /// Step number, from 1.
    pub step: u64,
    /// Mean loss over all predicted tokens of the global batch; the weighted sum of the means of several losses.
    pub loss: f64,
    /// Mean of each metric of the model, such as `accuracy`.
    #[serde(flatten)]
    pub metrics: Means,
    /// Mean of each loss, if the model has several.
    #[serde(skip_serializing_if = "Means::is_empty")]
    pub losses: Means,
    /// Global L2 norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Learning rate of this step.
    pub lr: f64,
    /// Tokens or samples that the step and the run have trained on.
    #[serde(flatten)]
    pub amount: Amount,
    /// Wall-clock time of the step in milliseconds, waits included.
    pub step_ms: f64,
    /// Model FLOPs of the step divided by `step_ms`, in FLOP/s; recomputation does not count.
    pub flops_per_s: f64,
    /// Model FLOPs utilization: the fraction of the devices' peak, if the peak is known.
    pub mfu: Option<f64>,
    /// True if the optimizer step was skipped because a value was not finite or a spike.
    pub skipped: bool,
    /// Number of skipped steps up to and including this one.
    pub skipped_steps: u64,
    /// Number of rollbacks to an earlier copy of the state, up to and including this step.
    pub rollbacks: u64,
    /// Damaged samples that were skipped in this step, over all ranks.
    #[serde(skip_serializing_if = "is_zero")]
    pub skipped_samples: u64,
    /// Loss scale; in f16 only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Load of the most chosen expert divided by the mean load, maximum over layers; in models with experts only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expert_imbalance: Option<f64>,
    /// Token slots of this step routed to each expert, for each layer with experts. Empty for steps that are not logged.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub expert_load: Vec<Vec<i64>>,
    /// Memory by category; the maximum over ranks in each.
    pub memory: MemoryUse,
    /// Memory of each rank, if there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub memory_by_rank: Vec<MemoryUse>,
    /// Predicted memory by category, computed before the first allocation.
    pub memory_predicted: PredictedMemory,
    /// Predicted memory of each rank, if there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub memory_predicted_by_rank: Vec<PredictedMemory>,
    /// Communication of the collectives; zero on one rank.
    pub comm: CommunicationUse,
    /// Disk traffic of this rank, if model state or activations are offloaded to disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskUse>,
    /// Milliseconds spent waiting for data.
    pub data_wait_ms: f64,
    /// Milliseconds that the training waited for a save.
    pub checkpoint_stall_ms: f64,
}

/// Returns true if there is nothing to report.
fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// Returns the largest load divided by the mean load of some experts; `None` if all loads are 0.
pub fn imbalance(counts: &[i64]) -> Option<f64> {
    let (total, most) = (counts.iter().sum::<i64>(), counts.iter().max()?);
    (total > 0).then(|| *most as f64 * counts.len() as f64 / total as f64)
}

/// Memory in bytes by category, and the peak of their sum.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes by category.
    pub by_category: MemoryBytes,
    /// Peak of the sum over all categories.
    pub peak: usize,
    /// Resident bytes of the rank's process, with shared pages divided among their users (PSS). Zero in steps that do not measure
    /// it.
    pub process_pss: usize,
}

/// Predicted bytes by category of a rank. The cache of freed blocks (`cached`) is not predicted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PredictedMemory(pub MemoryBytes);

impl Serialize for PredictedMemory {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (category, bytes) in self.0.entries().filter(|(category, _)| *category != MemoryCategory::Cached)
        {
            map.serialize_entry(category.name(), &bytes)?;
        }
        map.serialize_entry("total", &self.0.total())?;
        map.end()
    }
}

impl MemoryUse {
    /// Number of `u64` words in which a value is sent to other ranks.
    pub const WORDS: usize = MemoryCategory::ALL.len() + 2;

    /// Returns the bytes in use in an arena, and its peak.
    pub fn of(arena: &Arena) -> Self {
        Self { by_category: arena.in_use(), peak: arena.peak_total_bytes(), process_pss: 0 }
    }

    /// Returns the memory of every rank, in the order of the ranks.
    ///
    /// # Errors
    /// If a rank is lost or does not answer in time.
    #[track_caller]
    pub fn of_ranks(self, ranks: &Ranks) -> Result<Vec<Self>, CommError> {
        Ok(ranks.numbers(self.to_words())?.iter().map(|words| Self::from_words(words)).collect())
    }

    /// Returns the maximum of both in each category.
    pub fn maximum(self, other: &Self) -> Self {
        let (own, other) = (self.to_words(), other.to_words());
        Self::from_words(&std::array::from_fn::<_, { Self::WORDS }, _>(|i| own[i].max(other[i])))
    }

    /// Returns the bytes of each category, the peak and the process's memory as words for other ranks.
    pub fn to_words(self) -> [u64; Self::WORDS] {
        std::array::from_fn(|i| match MemoryCategory::ALL.get(i) {
            Some(category) => self.by_category[*category] as u64,
            None if i == MemoryCategory::ALL.len() => self.peak as u64,
            None => self.process_pss as u64,
        })
    }

    /// Returns the memory that [`MemoryUse::to_words`] has turned into words.
    pub fn from_words(words: &[u64]) -> Self {
        let mut memory = Self::default();
        for (category, word) in MemoryCategory::ALL.into_iter().zip(words) {
            memory.by_category[category] = *word as usize;
        }
        let word = |index: usize| words.get(index).map_or(0, |word| *word as usize);
        let peak = MemoryCategory::ALL.len();
        Self { peak: word(peak), process_pss: word(peak + 1), ..memory }
    }
}

impl Serialize for MemoryUse {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for category in MemoryCategory::ALL {
            map.serialize_entry(category.name(), &self.by_category[category])?;
        }
        map.serialize_entry("peak", &self.peak)?;
        if self.process_pss > 0 {
            map.serialize_entry("process_pss", &self.process_pss)?;
        }
        map.end()
    }
}

/// Disk traffic of a step with model state or activations on disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct DiskUse {
    /// Size of the files in bytes.
    pub bytes: u64,
    /// Bytes read in the step.
    pub read_bytes: u64,
    /// Bytes written in the step.
    pub written_bytes: u64,
    /// Milliseconds in which at least one read or write was in flight.
    pub busy_ms: f64,
    /// Milliseconds in which compute waited for the disk.
    pub exposed_ms: f64,
}

impl DiskUse {
    /// Returns the disk use of an engine whose files have `bytes` bytes; `None` if there is no file.
    pub fn of(bytes: u64, traffic: DiskTraffic) -> Option<Self> {
        let DiskTraffic { read_bytes, written_bytes, busy, exposed } = traffic;
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let (busy_ms, exposed_ms) = (ms(busy), ms(exposed));
        (bytes > 0).then_some(Self { bytes, read_bytes, written_bytes, busy_ms, exposed_ms })
    }
}

/// Communication of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct CommunicationUse {
    /// Bytes sent in the step.
    pub bytes: u64,
    /// Milliseconds in which at least one collective was in flight.
    pub busy_ms: f64,
    /// Milliseconds in which compute waited for a collective.
    pub exposed_ms: f64,
}

impl From<Traffic> for CommunicationUse {
    fn from(traffic: Traffic) -> Self {
        let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
        Self { bytes: traffic.bytes, busy_ms: ms(traffic.busy), exposed_ms: ms(traffic.exposed) }
    }
}

/// The result of one evaluation.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct EvalMetrics {
    /// Last step before the evaluation.
    pub step: u64,
    /// Mean loss over all predicted tokens; the weighted sum of the means of several losses.
    pub loss: f64,
    /// Mean of each metric of the model.
    pub metrics: Means,
    /// Mean of each loss, if the model has several.
    pub losses: Means,
    /// Unit of `counted`.
    pub unit: CountUnit,
    /// Number of predicted tokens, or of samples.
    pub counted: u64,
    /// Wall-clock time in milliseconds.
    pub ms: f64,
}

/// Writes all keys but the step with the prefix `eval_`.
impl Serialize for EvalMetrics {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("step", &self.step)?;
        map.serialize_entry("eval_loss", &self.loss)?;
        for (name, mean) in self.metrics.iter() {
            map.serialize_entry(&format_args!("eval_{name}"), &mean)?;
        }
        if !self.losses.is_empty() {
            map.serialize_entry("eval_losses", &self.losses)?;
        }
        map.serialize_entry(&format_args!("eval_{}", self.unit.word()), &self.counted)?;
        map.serialize_entry("eval_ms", &self.ms)?;
        map.end()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn example(step: u64) -> StepMetrics {
        let mut by_category = MemoryBytes::default();
        by_category[MemoryCategory::Parameters] = 400_000_000;
        by_category[MemoryCategory::Cached] = 32_013_312;
        StepMetrics {
            step,
            loss: 5.5483,
            grad_norm: 1.93,
            lr: 3e-5,
            metrics: Means::default(),
            losses: Means::default(),
            amount: Amount { of_step: 16384, seen: 16384 * step, per_s: 39702.0, ..Amount::default() },
            step_ms: 412.7,
            flops_per_s: 1.2e11,
            mfu: None,
            skipped: false,
            skipped_steps: 0,
            rollbacks: 0,
            skipped_samples: 0,
            loss_scale: None,
            expert_imbalance: None,
            expert_load: Vec::new(),
            memory: MemoryUse { by_category, peak: 500_000_000, process_pss: 0 },
            memory_by_rank: Vec::new(),
            memory_predicted: PredictedMemory(by_category),
            memory_predicted_by_rank: Vec::new(),
            comm: CommunicationUse::default(),
            disk: None,
            data_wait_ms: 0.1,
            checkpoint_stall_ms: 0.0,
        }
    }

    #[test]
    fn a_step_is_the_line_that_scripts_expect() {
        let line = serde_json::to_string(&example(1)).unwrap();
        assert_eq!(
            line,
            concat!(
                r#"{"step":1,"loss":5.5483,"grad_norm":1.93,"lr":0.00003,"tokens":16384,"tokens_seen":16384,"#,
                r#""tokens_per_s":39702.0,"step_ms":412.7,"flops_per_s":120000000000.0,"mfu":null,"skipped":false,"#,
                r#""skipped_steps":0,"rollbacks":0,"memory":{"parameters":400000000,"gradients":0,"optimizer":0,"activations":0,"communication":0,"#,
                r#""workspace":0,"snapshot":0,"cached":32013312,"peak":500000000},"#,
                r#""memory_predicted":{"parameters":400000000,"gradients":0,"optimizer":0,"activations":0,"communication":0,"#,
                r#""workspace":0,"snapshot":0,"total":432013312},"#,
                r#""comm":{"bytes":0,"busy_ms":0.0,"exposed_ms":0.0},"data_wait_ms":0.1,"checkpoint_stall_ms":0.0}"#,
            )
        );
    }

    #[test]
    fn experts_are_shown_by_layer_with_the_greatest_imbalance() {
        let row = StepMetrics {
            expert_imbalance: imbalance(&[1, 3, 0, 0]),
            expert_load: vec![vec![1, 3, 0, 0]],
            ..example(1)
        };
        let row = serde_json::to_value(row).unwrap();
        assert_eq!((&row["expert_imbalance"], &row["expert_load"][0][1]), (&3.0.into(), &3.into()), "{row}");
        assert_eq!(imbalance(&[0, 0]), None);
    }

    #[test]
    fn floats_print_with_all_digits_that_matter() {
        for loss in [1.0 / 3.0, 2.5e-310, 1e300, 4.158_883_083_359_672] {
            let line = serde_json::to_string(&StepMetrics { loss, ..example(1) }).unwrap();
            let value: serde_json::Value = serde_json::from_str(&line).unwrap();
            assert_eq!(value["loss"].as_f64().map(f64::to_bits), Some(loss.to_bits()), "{line}");
        }
    }

    #[test]
    fn a_loss_that_is_not_finite_is_null() {
        let metrics = StepMetrics { loss: f64::NAN, grad_norm: f64::INFINITY, skipped: true, ..example(1) };
        let value = serde_json::to_value(metrics).unwrap();
        assert!(value["loss"].is_null() && value["grad_norm"].is_null(), "{value}");
    }

    #[test]
    fn memory_survives_the_way_through_words_and_its_maximum_is_that_of_each_category() {
        let (mut one, other) = (example(1).memory, example(1).memory);
        one.by_category[MemoryCategory::Gradients] = 7;
        one.by_category[MemoryCategory::Parameters] = 1;
        one.process_pss = 600_000_000;
        assert_eq!(MemoryUse::from_words(&one.to_words()), one);
        let most = one.maximum(&other);
        assert_eq!(most.by_category[MemoryCategory::Gradients], 7);
        assert_eq!((most.by_category[MemoryCategory::Parameters], most.peak), (400_000_000, 500_000_000));
        let row = StepMetrics { memory: most, memory_by_rank: vec![one, other], ..example(1) };
        let row = serde_json::to_value(row).unwrap();
        assert_eq!(row["memory_by_rank"][0]["gradients"], 7, "{row}");
        assert_eq!(row["memory_by_rank"][0]["process_pss"], 600_000_000, "{row}");
        assert!(row["memory_by_rank"][1]["process_pss"].is_null(), "{row}");
    }

    #[test]
    fn an_evaluation_carries_eval_loss() {
        let row = EvalMetrics { step: 100, loss: 2.5, counted: 81920, ms: 12.5, ..EvalMetrics::default() };
        let line = serde_json::to_string(&row).unwrap();
        assert_eq!(line, r#"{"step":100,"eval_loss":2.5,"eval_tokens":81920,"eval_ms":12.5}"#);
    }

    #[test]
    fn a_classifier_reports_its_metrics_and_counts_samples() {
        let means = |name: &str, mean| Means(vec![(name.into(), mean)]);
        let amount = Amount { unit: CountUnit::Samples, of_step: 64, seen: 128, per_s: 500.5 };
        let row = StepMetrics { metrics: means("accuracy", 0.25), amount, ..example(2) };
        let line = serde_json::to_string(&row).unwrap();
        let start = concat!(
            r#"{"step":2,"loss":5.5483,"accuracy":0.25,"grad_norm":1.93,"lr":0.00003,"#,
            r#""samples":64,"samples_seen":128,"samples_per_s":500.5,"step_ms":412.7,"#
        );
        assert!(line.starts_with(start), "{line}");
        let row = EvalMetrics {
            step: 2,
            loss: 2.5,
            metrics: means("accuracy", 0.5),
            losses: means("box_error", 0.125),
            unit: CountUnit::Samples,
            counted: 10,
            ms: 1.5,
        };
        assert_eq!(
            serde_json::to_string(&row).unwrap(),
            concat!(
                r#"{"step":2,"eval_loss":2.5,"eval_accuracy":0.5,"eval_losses":{"box_error":0.125},"#,
                r#""eval_samples":10,"eval_ms":1.5}"#
            )
        );
    }
}
