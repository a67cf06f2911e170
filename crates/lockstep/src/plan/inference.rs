//! `lockstep plan --inference`: memory and speed of a model that generates under a memory limit, before it is loaded.

use clap::Args;
use lockstep_config::human;
use lockstep_infer::{Estimate, InferError, InferencePlan, LoadOptions, Rates, Workload};
use lockstep_plan::DType;
use lockstep_planner::machine::LocalMachine;
use serde_json::{Map, Value, json};

use crate::exit::Failure;
use crate::infer::{DtypeChoice, KvCacheChoice};
use crate::output::{note, say};
use crate::placement::{FoundModel, PlacementArguments, modules_json, table};
use crate::quantize::QuantizedType;
use crate::thread_count::threads;

/// Tokens of a sequence if nothing else is said.
const CONTEXT: usize = 2048;
/// Most sequences that are tried at a time.
const MOST_SEQUENCES: usize = 1024;

/// Bytes that are read to time the disk.
const TIMED_BYTES: usize = 1 << 30;

/// Arguments of the plan of an inference.
#[derive(Debug, Clone, Args)]
pub(crate) struct InferenceArguments {
    /// Plan generation instead of training: memory by category, tokens per second, and what would fit
    #[arg(long, requires = "model", conflicts_with_all = ["run", "settings", "plan", "cluster", "seq_len", "global_batch", "html", "output", "scaling", "calibrate"])]
    pub(super) inference: bool,
    /// With --inference: sequences at a time
    #[arg(long, value_name = "B", requires = "inference", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    batch: u64,
    /// With --inference: tokens of a sequence, prompt included [default: 2048, or as many as the model allows]
    #[arg(long, value_name = "N", requires = "inference", value_parser = clap::value_parser!(u64).range(1..))]
    context: Option<u64>,
    /// With --inference: type of weights and activations
    #[arg(long, value_name = "TYPE", requires = "inference", default_value = "auto", value_enum)]
    dtype: DtypeChoice,
    /// With --inference: type of cached keys and values; auto takes that of the activations
    #[arg(long, value_name = "TYPE", requires = "inference", default_value = "auto", value_enum)]
    kv_cache: KvCacheChoice,
    /// With --inference: quantize the linear layers of blocks as they are loaded, in groups of 128 (int8) or 64 (int4, nf4)
    #[arg(long, value_name = "TYPE", requires = "inference", value_enum)]
    quantize: Option<QuantizedType>,
    /// With --inference: compute threads [default: all cores]
    #[arg(long, requires = "inference")]
    threads: Option<usize>,
    #[command(flatten)]
    placement: PlacementArguments,
}

/// A model and the machine it is planned for.
struct Question<'q> {
    found: &'q FoundModel,
    placement: &'q PlacementArguments,
}

impl InferenceArguments {
    /// Refuses flags of placement without `--inference`.
    pub(super) fn refuse_without(&self) -> Result<(), Failure> {
        match self.placement.is_given() {
            true => Err(Failure::configuration(
                "--device-map, --max-memory and --offload-dir are for `lockstep plan --inference --model DIR`",
            )),
            false => Ok(()),
        }
    }

    pub(super) fn run(&self, model: &str, as_json: bool) -> Result<(), Failure> {
        let threads = threads(self.threads)?;
        let (dtype, kv_cache) = (self.dtype.dtype(), self.kv_cache.stored());
        let quantize = self.quantize.map(QuantizedType::quantization);
        let options = LoadOptions { dtype, kv_cache, quantize, ..LoadOptions::new(threads) };
        let found = &FoundModel::described(model, options, &self.placement)?;
        let longest = found.description.config().max_position_embeddings();
        let context = self.context.map_or(CONTEXT.min(longest), |tokens| tokens as usize);
        if context > longest {
            let refused = InferError::TooLong { tokens: context, allowed: longest };
            return Err(Failure::configuration(format!("--context {context}: {refused}")));
        }
        // A generation has its tokenizer in memory; a model without one is not asked for it.
        let _tokenizer = found.description.tokenizer().ok();
        let question = Question { found, placement: &self.placement };
        let workload = Workload::Generation { sequences: self.batch as usize, context };
        let plan = question.plan(workload)?;
        let (rates, sources) = question.rates(&plan)?;
        let estimate = Estimate::of(&plan, found.description.config(), workload, rates);
        let fitting = question.fitting(&plan, workload, longest);
        if as_json {
            say!("{}", document(&plan, &estimate, rates, &fitting));
        } else {
            show(&plan, &estimate, &fitting, workload);
            note!("rates: {sources}");
            if !found.directory.has_weights() {
                let dtype = found.directory.stored_dtype();
                note!("weights: none on this machine; those of the configuration, in {dtype}");
            }
        }
        Ok(())
    }
}

/// Larger limits and workloads.
struct Fitting {
    /// Limit in which every weight stays in memory, in bytes.
    all_resident_bytes: u64,
    /// Most tokens of a sequence under the limit.
    longest_context: usize,
    /// Most sequences at a time under the limit.
    largest_batch: usize,
}

impl Question<'_> {
    fn plan(&self, workload: Workload) -> Result<InferencePlan, Failure> {
        let request = self.placement.request(workload, self.found.options)?;
        Ok(InferencePlan::new(&self.found.directory, self.found.dtype(), &request)?)
    }

    /// Returns the rates of this machine, and where they come from. Reads from disk are measured on the model's own files.
    fn rates(&self, plan: &InferencePlan) -> Result<(Rates, String), Failure> {
        let LocalMachine { cluster, doubt } = LocalMachine::for_ranks(1, self.found.options.threads);
        let node = &cluster.nodes[0];
        let device = &node.device;
        let dtype = if plan.dtype() == DType::BF16 { DType::BF16 } else { DType::F32 };
        let peak = device.peak_tflops.get(&dtype).copied().unwrap_or(0.1);
        let measured = if plan.read_bytes(1) > 0 { plan.measure_disk(TIMED_BYTES)? } else { None };
        let disk = measured.unwrap_or(node.disk_gb_per_s * 1e9);
        let rates = Rates {
            disk,
            memory: device.memory_gb_per_s * 1e9,
            flops: peak * device.efficiency.product * 1e12,
        };
        let of_disk =
            if measured.is_some() { "measured on the model's files" } else { "of the machine file" };
        let of_rest = doubt.unwrap_or_else(|| "measured by lockstep bench machine".to_owned());
        let shown = [rates.disk, rates.memory].map(|rate| rate / 1e9);
        Ok((rates, format!("disk {:.2} GB/s, {of_disk}; memory {:.1} GB/s, {of_rest}", shown[0], shown[1])))
    }

    fn fitting(&self, plan: &InferencePlan, workload: Workload, longest: usize) -> Fitting {
        let Workload::Generation { sequences, context } = workload else {
            unreachable!("a generation is planned")
        };
        let fits = |sequences, context| self.plan(Workload::Generation { sequences, context }).is_ok();
        let saved = plan.memory.weights + plan.memory.streaming + plan.memory.experts;
        Fitting {
            all_resident_bytes: plan.memory.total() - saved + plan.model_bytes(),
            longest_context: last_that(context, longest, |context| fits(sequences, context)),
            largest_batch: last_that(sequences, MOST_SEQUENCES, |sequences| fits(sequences, context)),
        }
    }
}

/// Returns the largest number from `known` to `most` for which `holds` is true, given that it is for `known` and that numbers above
/// one that fails fail too.
fn last_that(known: usize, most: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut good, mut bad) = (known, most + 1);
    while good + 1 < bad {
        let middle = if bad > most { most } else { good + (bad - good) / 2 };
        if holds(middle) { good = middle } else { bad = middle }
    }
    good
}

fn document(plan: &InferencePlan, estimate: &Estimate, rates: Rates, fitting: &Fitting) -> Value {
    let memory: Map<String, Value> = plan
        .memory
        .by_name()
        .iter()
        .map(|&(name, bytes)| (name.to_lowercase().replace(' ', "_"), json!(bytes)))
        .collect();
    json!({
        "dtype": plan.dtype().to_string(), "kv_cache_type": plan.kv_cache.to_string(), "limit_bytes": plan.limit_bytes, "memory": memory, "total_bytes": plan.memory.total(),
        "least_bytes": plan.least_bytes, "all_resident_bytes": fitting.all_resident_bytes,
        "longest_context": fitting.longest_context, "largest_batch": fitting.largest_batch,
        "hf_device_map": plan.map.to_json(), "modules": modules_json(plan), "model_bytes": plan.model_bytes(),
        "disk_bytes": plan.disk_bytes, "read_bytes_per_pass": plan.read_bytes(plan.chunk_tokens), "read_bytes_per_token": plan.read_bytes(1), "buffers": plan.buffers(),
        "chunk_tokens": plan.chunk_tokens, "prefill_tokens_per_s": estimate.prefill_tokens_per_s,
        "decode_tokens_per_s": estimate.decode_tokens_per_s, "disk_gb_per_s": rates.disk / 1e9,
        "memory_gb_per_s": rates.memory / 1e9, "gflops": rates.flops / 1e9,
    })
}

fn show(plan: &InferencePlan, estimate: &Estimate, fitting: &Fitting, workload: Workload) {
    let Workload::Generation { sequences, context } = workload else {
        unreachable!("a generation is planned")
    };
    for line in table(plan) {
        say!("{line}");
    }
    let of_batch = human::plural(sequences, "sequence");
    say!("for {of_batch} of {context} tokens:");
    say!("  prefill  {:>10.1} tokens/s", estimate.prefill_tokens_per_s);
    say!("  decode   {:>10.2} tokens/s", estimate.decode_tokens_per_s);
    say!("what would fit:");
    say!("  least limit for this                {}", human::bytes(plan.least_bytes));
    say!("  limit with every weight in memory   {}", human::bytes(fitting.all_resident_bytes));
    say!("  longest context under this limit    {}", human::plural(fitting.longest_context, "token"));
    say!("  most sequences under this limit     {}", human::thousands(fitting.largest_batch as u64));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_number_that_holds_is_found() {
        for (last, most) in [(1, 1), (1, 9), (7, 9), (9, 9), (500, 1024)] {
            assert_eq!(last_that(1, most, |number| number <= last), last, "{last} of {most}");
        }
    }
}
