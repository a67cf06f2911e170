//! The roofline of a measured step: the time of each kind of operation, against the least time that this machine could take for it.
//!
//! An operation is bound by arithmetic or by memory, whichever takes longer at the machine's measured peak. The ratio to that bound
//! is what is left to gain, and the operation's share of the step is its weight.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use lockstep_graph::{Activity, Cost, Span};
use lockstep_model::RecordedModel;
use lockstep_plan::DType;
use lockstep_tensor::CpuLevel;
use lockstep_tensor::cpu::{measure_bandwidth, measure_peak};
use serde::Serialize;

/// Measured peaks of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Limits {
    /// Rate of f32 multiply-adds on all threads, in GFLOP/s.
    pub f32_gflops: f64,
    /// Rate of bf16 products summed in f32 on all threads, in GFLOP/s.
    pub bf16_gflops: f64,
    /// Memory bandwidth of all threads together, in GB/s.
    pub memory_gb_per_s: f64,
}

impl Limits {
    /// Measures the machine for about half a second.
    pub fn measure(level: CpuLevel, threads: usize) -> Self {
        let peak = measure_peak(level, threads);
        Self {
            f32_gflops: peak.f32_gflops,
            bf16_gflops: peak.bf16_gflops,
            memory_gb_per_s: measure_bandwidth(level, threads),
        }
    }

    /// Returns the least seconds of arithmetic and of memory, in this order; products are of `dtype`.
    fn seconds(&self, cost: &Cost, dtype: DType) -> (f64, f64) {
        let products = if dtype == DType::F32 { self.f32_gflops } else { self.bf16_gflops };
        let arithmetic = cost.product_flops as f64 / products + cost.vector_flops as f64 / self.f32_gflops;
        (arithmetic / 1e9, cost.bytes as f64 / self.memory_gb_per_s / 1e9)
    }
}

/// Granularity of a roofline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// One row for each kind of operation and pass.
    Kinds,
    /// Linear layers by the name of their weight as well.
    Layers,
}

/// The resource that bounds an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    /// The arithmetic units.
    Compute,
    /// The memory bandwidth.
    Memory,
}

/// All operations of one kind in one step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// Kind of the operation.
    pub operation: String,
    /// Name of the pass, for operations of the model.
    pub pass: Option<&'static str>,
    /// Number of calls.
    pub calls: usize,
    /// Bytes that it must move.
    pub bytes: u64,
    /// Floating-point operations of all calls.
    pub flops: u64,
    /// Time of all calls, in milliseconds.
    pub ms: f64,
    /// Time as a fraction of the step.
    pub share: f64,
    /// Achieved rate, in GFLOP/s.
    pub gflops: f64,
    /// Achieved bandwidth, in GB/s.
    pub gb_per_s: f64,
    /// The least time that the machine could take, in milliseconds, if its limits are known.
    pub limit_ms: Option<f64>,
    /// `limit_ms` as a fraction of `ms`; above 1 if operands were still in a cache.
    pub of_limit: Option<f64>,
    /// The resource that bounds it, if the machine's limits are known.
    pub bound: Option<Bound>,
}

/// Time of a step by operation.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Roofline {
    /// Operations, longest first.
    pub rows: Vec<Row>,
    /// Milliseconds of the whole step.
    pub step_ms: f64,
    /// Milliseconds of all rows together.
    pub covered_ms: f64,
    /// Milliseconds of the rows' limits together.
    pub limit_ms: Option<f64>,
    /// Peaks of the machine, if they were measured.
    pub limits: Option<Limits>,
}

impl Roofline {
    /// Sums the spans of a step of `model` that took `step`.
    pub fn new(
        spans: &[Span],
        step: Duration,
        model: &RecordedModel,
        detail: Detail,
        limits: Option<Limits>,
    ) -> Self {
        let dtype = model.program(0).shape().dtype;
        let step_ms = step.as_secs_f64() * 1e3;
        let mut groups: HashMap<(String, Option<&'static str>), (usize, Cost, Duration)> = HashMap::new();
        for span in spans {
            let key = (name(&span.activity, model, detail), span.activity.pass.map(|pass| pass.name()));
            let (calls, cost, duration) = groups.entry(key).or_default();
            *calls += 1;
            *cost += span.cost;
            *duration += span.duration;
        }
        let mut rows: Vec<Row> = groups
            .into_iter()
            .map(|((operation, pass), (calls, cost, duration))| {
                let seconds = duration.as_secs_f64();
                let limit = limits.map(|limits| limits.seconds(&cost, dtype));
                let limit_ms = limit.map(|(compute, memory)| compute.max(memory) * 1e3);
                Row {
                    operation,
                    pass,
                    calls,
                    bytes: cost.bytes,
                    flops: cost.flops(),
                    ms: seconds * 1e3,
                    share: seconds * 1e3 / step_ms,
                    gflops: rate(cost.flops() as f64 / 1e9, seconds),
                    gb_per_s: rate(cost.bytes as f64 / 1e9, seconds),
                    limit_ms,
                    of_limit: limit_ms.map(|limit_ms| rate(limit_ms / 1e3, seconds)),
                    bound: limit.map(
                        |(compute, memory)| {
                            if compute > memory { Bound::Compute } else { Bound::Memory }
                        },
                    ),
                }
            })
            .collect();
        rows.sort_by(|a, b| {
            b.ms.total_cmp(&a.ms).then_with(|| (&a.operation, a.pass).cmp(&(&b.operation, b.pass)))
        });
        Self {
            covered_ms: rows.iter().map(|row| row.ms).sum(),
            limit_ms: rows.iter().map(|row| row.limit_ms).sum(),
            rows,
            step_ms,
            limits,
        }
    }
}

/// Returns the amount per second; zero if the time is below the clock's resolution.
fn rate(amount: f64, seconds: f64) -> f64 {
    if seconds > 0.0 { amount / seconds } else { 0.0 }
}

/// Returns the name of an operation's row.
pub(crate) fn name(activity: &Activity, model: &RecordedModel, detail: Detail) -> String {
    match (detail, layer(activity, model)) {
        (Detail::Layers, Some(layer)) if activity.name == "linear" => format!("linear {layer}"),
        _ => activity.name.to_owned(),
    }
}

/// Returns the layer that an operation belongs to, such as `self_attn.q_proj`: its parameter's name within its unit.
pub(crate) fn layer<'m>(activity: &Activity, model: &'m RecordedModel) -> Option<&'m str> {
    let declared = &model.program(activity.unit?).parameters()[activity.parameter?.0].name;
    Some(declared.strip_suffix(".weight").unwrap_or(declared))
}

impl fmt::Display for Roofline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.rows.iter().map(|row| row.operation.len()).max().unwrap_or(0).max("operation".len());
        write!(f, "{:width$}  {:16}  {:>5}  {:>8}  {:>8}", "operation", "pass", "calls", "MB", "GFLOP")?;
        writeln!(f, "  {:>9}  {:>6}  {:>8}  {:>6}  of limit", "ms", "share", "GFLOP/s", "GB/s")?;
        for row in &self.rows {
            let (mb, gflop) = (row.bytes as f64 / 1e6, row.flops as f64 / 1e9);
            write!(f, "{:width$}  {:16}  {:>5}", row.operation, row.pass.unwrap_or(""), row.calls)?;
            write!(f, "  {mb:>8.1}  {gflop:>8.2}  {:>9.3}  {:>5.1}%", row.ms, row.share * 100.0)?;
            write!(f, "  {:>8.1}  {:>6.1}", row.gflops, row.gb_per_s)?;
            match (row.of_limit, row.bound) {
                // Operations that move no bytes have no limit.
                (Some(share), Some(bound)) if row.bytes > 0 => {
                    let bound = if bound == Bound::Compute { "compute" } else { "memory" };
                    writeln!(f, "  {:>4.0}% {bound}", share * 100.0)?;
                }
                _ => writeln!(f)?,
            }
        }
        let (covered, step) = (self.covered_ms, self.step_ms);
        writeln!(
            f,
            "the step took {step:.1} ms; operations {covered:.1} ms ({:.1}%), between them {:.1} ms",
            covered / step * 100.0,
            step - covered
        )?;
        let (Some(limits), Some(limit_ms)) = (self.limits, self.limit_ms) else { return Ok(()) };
        let Limits { f32_gflops, bf16_gflops, memory_gb_per_s } = limits;
        writeln!(
            f,
            "measured limits: f32 {f32_gflops:.0} GFLOP/s, bf16 {bf16_gflops:.0} GFLOP/s, memory \
             {memory_gb_per_s:.1} GB/s (above 100%: operands came from a cache)"
        )?;
        write!(
            f,
            "with every operation at its limit the step would take {limit_ms:.1} ms; it takes {:.2} times that",
            step / limit_ms
        )
    }
}

#[cfg(test)]
mod tests {
    use lockstep_graph::{BlockShape, Mode, Pass, Recompute};
    use lockstep_model::{HeadOutput, ModelConfig};

    use super::*;

    const LIMITS: Limits = Limits { f32_gflops: 100.0, bf16_gflops: 200.0, memory_gb_per_s: 10.0 };

    fn model(dtype: DType) -> RecordedModel {
        let config = ModelConfig::preset("baby-gpt").unwrap();
        let shape = BlockShape { sequences: 1, seq_len: 8, dtype };
        RecordedModel::new(&config, Mode::Training, shape, Recompute::None, HeadOutput::Losses)
    }

    fn span(name: &'static str, unit: Option<usize>, ms: u64, cost: Cost) -> Span {
        let pass = unit.map(|_| Pass::Forward);
        let activity = Activity { name, pass, unit, parameter: None };
        Span { activity, cost, start: Duration::ZERO, duration: Duration::from_millis(ms) }
    }

    fn roofline(dtype: DType) -> Roofline {
        let product = Cost { product_flops: 100_000_000, vector_flops: 0, bytes: 1000 };
        let spans = [
            span("add", Some(1), 4, Cost { product_flops: 0, vector_flops: 1000, bytes: 10_000_000 }),
            span("linear", Some(1), 2, product),
            span("linear", Some(2), 2, product),
            span("output layer and loss", Some(model(dtype).units() - 1), 1, product),
            span("data wait", None, 0, Cost::default()),
        ];
        Roofline::new(&spans, Duration::from_millis(10), &model(dtype), Detail::Kinds, Some(LIMITS))
    }

    #[test]
    fn operations_of_a_kind_are_added_up() {
        let found = roofline(DType::F32);
        let rows: Vec<_> = found.rows.iter().map(|row| (row.operation.as_str(), row.calls, row.ms)).collect();
        let expected =
            [("add", 1, 4.0), ("linear", 2, 4.0), ("output layer and loss", 1, 1.0), ("data wait", 1, 0.0)];
        assert_eq!(rows, expected);
        assert_eq!((found.covered_ms, found.step_ms), (9.0, 10.0));
    }

    #[test]
    fn the_limit_is_the_longer_of_arithmetic_and_memory() {
        for (dtype, products_ms) in [(DType::F32, 2.0), (DType::BF16, 1.0)] {
            let found = roofline(dtype);
            let bounds: Vec<_> = found.rows[..2].iter().map(|row| (row.limit_ms, row.bound)).collect();
            let expected = [(Some(1.0), Some(Bound::Memory)), (Some(products_ms), Some(Bound::Compute))];
            assert_eq!(bounds, expected, "{dtype}");
            assert_eq!(found.rows[1].of_limit, Some(products_ms / 4.0), "{dtype}");
        }
    }

    #[test]
    fn the_table_says_what_no_operation_covers_and_what_the_limits_would_give() {
        let table = roofline(DType::F32).to_string();
        assert!(table.contains("operations 9.0 ms (90.0%), between them 1.0 ms"), "{table}");
        assert!(table.ends_with("the step would take 4.0 ms; it takes 2.50 times that"), "{table}");
        assert!(!table.contains("NaN"), "{table}");
    }
}
