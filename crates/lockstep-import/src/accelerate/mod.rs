//! Translation of Accelerate's `default_config.yaml`: ranks, precision, and one of FSDP, DeepSpeed and Megatron-LM.
//!
//! The file describes only how a script is launched and parallelized. Model, data, batch and optimizer are in the
//! script, so the result has our defaults for them.

mod deepspeed;
mod fsdp;
mod mesh;

use serde_json::Value;

use crate::draft::{Import, Read};
use crate::fields::Fields;
use crate::format::Format;
use crate::options::Options;
use crate::problem::Problems;

/// Translates the keys of a file; `open` reads `deepspeed_config_file`.
pub(crate) fn import(
    fields: Fields,
    options: Options,
    open: &dyn Fn(&str) -> Result<String, String>,
) -> Result<Import, Problems> {
    let import = Import { file: fields.file.clone(), tool: Format::Accelerate.tool(), ..Import::default() };
    let mut config = Accelerate { fields: &fields, options, import };
    config.precision();
    let kind = config.kind();
    match kind {
        Some(Kind::DeepSpeed) => config.deepspeed(open)?,
        _ => config.read_idle_deepspeed(),
    }
    config.split(kind);
    let names_batch = config.import.value("train.global_batch").is_some();
    config.batch();
    let mut import = config.import;
    fields.settle(Format::Accelerate, &mut import);
    if !names_batch {
        import.remark("an Accelerate file names no model, data, batch or optimizer; these are the run's");
    }
    fields.outcome(Format::Accelerate).map(|()| import)
}

/// Kind of parallelism, from `distributed_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    One,
    Replicas,
    Fsdp,
    DeepSpeed,
    Megatron,
}

struct Accelerate<'f> {
    fields: &'f Fields,
    options: Options,
    import: Import,
}

impl Accelerate<'_> {
    fn user(&mut self, ours: &'static str, read: Read<impl Into<Value>>) {
        self.import.user(&self.fields.file, ours, read);
    }

    /// Sets a key if the file gives its value.
    fn set(&mut self, ours: &'static str, read: Option<Read<impl Into<Value>>>) {
        if let Some(read) = read {
            self.user(ours, read);
        }
    }

    fn precision(&mut self) {
        let Some(read) = self.fields.text("mixed_precision") else { return };
        let word = match read.value.to_ascii_lowercase().as_str() {
            "no" | "false" | "off" => "f32",
            "fp16" => "f16",
            "bf16" => "bf16",
            "fp8" => return self.fields.refuse(&read.key, "is fp8, which is not available", "bf16"),
            _ => return self.fields.refuse(&read.key, format!("is {}", read.shown), "no, fp16 or bf16"),
        };
        self.user("train.precision", read.map(|_| word));
    }

    fn kind(&self) -> Option<Kind> {
        let Some(read) = self.fields.text("distributed_type") else {
            self.fields.refuse(
                "distributed_type",
                "is missing",
                "NO, MULTI_GPU, MULTI_CPU, FSDP, DEEPSPEED or MEGATRON_LM",
            );
            return None;
        };
        Some(match read.value.to_ascii_uppercase().as_str() {
            "NO" | "FALSE" => Kind::One,
            "FSDP" => Kind::Fsdp,
            "DEEPSPEED" => Kind::DeepSpeed,
            "MEGATRON_LM" => Kind::Megatron,
            kind if kind.starts_with("MULTI_") => Kind::Replicas,
            _ => {
                self.fields.refuse(
                    &read.key,
                    format!("is {}", read.shown),
                    "NO, MULTI_GPU, MULTI_CPU, FSDP, DEEPSPEED or MEGATRON_LM",
                );
                return None;
            }
        })
    }

    /// Returns the number of ranks: the option's, else the file's.
    fn ranks(&self) -> Option<Read<u64>> {
        let number = self.fields.number("num_processes").filter(|read| read.value != -1.0);
        let of_file = number.and_then(|read| {
            let is_count = read.value >= 1.0 && read.value.fract() == 0.0 && read.value < 1e6;
            if !is_count {
                self.fields.refuse(
                    &read.key,
                    format!("is {}", read.shown),
                    "a number of ranks from 1, or -1",
                );
            }
            is_count.then(|| read.map(|number| number as u64))
        });
        match self.options.ranks {
            Some(ranks) => Some(Read {
                value: ranks as u64,
                key: "--ranks".to_owned(),
                line: 0,
                shown: ranks.to_string(),
            }),
            None => of_file,
        }
    }

    fn machines(&self) -> u64 {
        self.fields.integer("num_machines").map_or(1, |read| read.value.max(1))
    }

    fn split(&mut self, kind: Option<Kind>) {
        let ranks = self.ranks();
        let machines = self.machines();
        let mesh = self.mesh();
        let fsdp = self.fsdp();
        let megatron = self.megatron(kind == Some(Kind::Megatron));
        let Some(kind) = kind else { return };
        if machines > 1 {
            self.import.remark(format!("{machines} machines: start with --nnodes {machines} --node-rank N --rdzv-endpoint HOST:PORT on each"));
        }
        let parts = mesh.of_a_part * megatron;
        let Some(ranks) = ranks else {
            self.import.remark("the file does not say how many ranks there are: --nproc-per-node N");
            if kind == Kind::Fsdp {
                self.shard(&fsdp, None, 1);
            }
            return;
        };
        if !ranks.value.is_multiple_of(parts) {
            let what = format!("is {}, and {parts} ranks share each part of a batch", ranks.value);
            return self.fields.refuse("num_processes", what, format!("a multiple of {parts}"));
        }
        let open = ranks.map(|ranks| ranks / parts);
        match kind {
            Kind::One | Kind::Replicas | Kind::Megatron => self.replicas(open, kind),
            Kind::DeepSpeed => {
                let is_sharded =
                    self.import.value("parallel.zero_stage").and_then(Value::as_u64).unwrap_or(0) > 0;
                if is_sharded { self.shards(open) } else { self.replicas(open, kind) }
            }
            Kind::Fsdp => match mesh.sizes {
                Some([replicate, shard]) => self.sizes(&fsdp, replicate, shard, open.value),
                None => self.shard(&fsdp, Some(open), machines),
            },
        }
    }

    /// Sets a global batch that divides evenly among the ranks, if our default does not.
    fn batch(&mut self) {
        const DEFAULT_BATCH: u64 = 32;
        let of = |key: &str| self.import.value(key).and_then(Value::as_u64).unwrap_or(1);
        let parts = of("parallel.data_parallel_replicate") * of("parallel.data_parallel_shard");
        if !DEFAULT_BATCH.is_multiple_of(parts) && self.import.value("train.global_batch").is_none() {
            let why = format!("8 sequences for each of {parts} ranks, for the file names none: set it");
            self.import.derived("train.global_batch", 8 * parts, why);
        }
    }

    /// Sets the number of replicas, or of shards for Megatron-LM's distributed optimizer.
    fn replicas(&mut self, ranks: Read<u64>, kind: Kind) {
        if kind == Kind::Megatron && self.import.value("parallel.zero_stage").is_some() {
            return self.shards(ranks);
        }
        if ranks.value > 1 || kind == Kind::One {
            self.user("parallel.data_parallel_replicate", ranks);
        }
    }

    fn shards(&mut self, ranks: Read<u64>) {
        if ranks.value > 1 {
            self.user("parallel.data_parallel_shard", ranks);
        }
    }
}
