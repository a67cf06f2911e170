//! Translation of DeepSpeed's `ds_config.json`.
//!
//! `keys.tsv` lists the treatment of each key. This module derives the values that depend on several keys: the batch
//! sizes, the learning-rate schedule, and the residence of state.

mod elastic;
mod optimizer;

use std::sync::LazyLock;

use serde_json::{Value, json};

use crate::draft::{Import, Read};
use crate::fields::Fields;
use crate::format::Format;
use crate::options::{AutoValues, Options};
use crate::problem::Problems;
use crate::table;

/// Sequences per micro-batch by the Trainer's default.
const TRAINER_MICRO_BATCH: u64 = 8;

/// Keys of f16 loss scaling.
const LOSS_SCALE: [&str; 5] = [
    "fp16.loss_scale",
    "fp16.initial_scale_power",
    "fp16.loss_scale_window",
    "fp16.hysteresis",
    "fp16.min_loss_scale",
];

/// Translates the keys of a file.
pub(crate) fn import(mut fields: Fields, options: Options) -> Result<Import, Problems> {
    let mut import =
        Import { file: fields.file.clone(), tool: Format::DeepSpeed.tool(), ..Import::default() };
    rename(&mut fields);
    translate(&fields, options, &mut import);
    if !DeepSpeed::knows_optimizer(&fields) {
        fields.forget("optimizer.params");
    }
    fields.settle(Format::DeepSpeed, &mut import);
    fields.outcome(Format::DeepSpeed).map(|()| import)
}

/// Deprecated or alternative names of keys, and their current names.
static RENAMED: LazyLock<Vec<[&str; 2]>> = LazyLock::new(|| table::pairs(include_str!("renamed.tsv")));

/// Renames deprecated keys to their current names.
pub(crate) fn rename(fields: &mut Fields) {
    for [old, new] in RENAMED.iter() {
        fields.rename(old, new);
    }
    for (flag, device) in [
        ("cpu_offload", "offload_optimizer.device"),
        ("cpu_offload_params", "offload_param.device"),
        ("cpu_offload_param", "offload_param.device"),
    ] {
        let device = format!("zero_optimization.{device}");
        if let Some(mut field) = fields.remove(&format!("zero_optimization.{flag}")) {
            let is_on = field.node.flag().unwrap_or(false);
            let text = if is_on { "cpu" } else { "none" }.to_owned();
            field.node = crate::document::Node::Scalar { text, quoted: true };
            if !fields.has(&device) {
                fields.insert(&device, field);
            }
        }
    }
}

/// Reads every key that has a counterpart.
pub(crate) fn translate(fields: &Fields, options: Options, import: &mut Import) {
    let mut config = DeepSpeed { fields, options, import };
    config.precision();
    config.batch();
    config.clipping();
    config.optimizer();
    config.zero();
    config.parallel();
    config.activations();
    config.records();
}

/// Reads the keys that Accelerate's `deepspeed_config` supports.
pub(crate) fn translate_section(fields: &Fields, options: Options, import: &mut Import) {
    let mut config = DeepSpeed { fields, options, import };
    config.clipping();
    config.zero();
}

struct DeepSpeed<'f, 'i> {
    fields: &'f Fields,
    options: Options,
    import: &'i mut Import,
}

impl DeepSpeed<'_, '_> {
    fn user(&mut self, ours: &'static str, read: Read<impl Into<Value>>) {
        self.import.user(&self.fields.file, ours, read);
    }

    /// Sets a key if the file gives its value.
    fn set(&mut self, ours: &'static str, read: Option<Read<impl Into<Value>>>) {
        if let Some(read) = read {
            self.user(ours, read);
        }
    }

    /// Sets a key to `read` if it is given; for `"auto"`, to the Trainer's default if the file is imported alone.
    /// Returns true if the file has the key.
    fn given(
        &mut self,
        ours: &'static str,
        theirs: &str,
        read: Option<Read<impl Into<Value>>>,
        trainer: impl Into<Value>,
    ) -> bool {
        match read {
            Some(read) => self.user(ours, read),
            None if self.fields.is_auto(theirs) => {
                if self.options.auto == AutoValues::TrainerDefaults {
                    self.import.trainer(&self.fields.file, ours, trainer, self.fields.autos(&[theirs]));
                }
            }
            None => return false,
        }
        true
    }

    fn precision(&mut self) {
        let dtype = self.fields.text("torch_autocast.dtype").map_or("bfloat16".to_owned(), |read| read.value);
        let autocast = if dtype.contains("bfloat16") || dtype == "bf16" { "bf16" } else { "f16" };
        let autocast = self.fields.if_on("torch_autocast.enabled", autocast);
        match (self.fields.if_on("fp16.enabled", "f16"), self.fields.if_on("bf16.enabled", "bf16")) {
            (Some(read), Some(_)) => {
                self.fields.refuse(&read.key, "is true, and bf16.enabled is too", "one of the two")
            }
            (fp16, bf16) => match fp16.or(bf16).or(autocast) {
                Some(read) => self.user("train.precision", read),
                None => self.open_precision(),
            },
        }
        let is_f16 = self.import.value("train.precision") == Some(&json!("f16"));
        let is_bf16 = self.import.value("train.precision") == Some(&json!("bf16"));
        self.loss_scale(is_f16);
        let in_place = self.fields.if_on("bf16.bf16_master_weights_and_grads", false);
        self.set("train.master_weights", in_place.filter(|_| is_bf16));
        let narrow = self.fields.if_on("bf16.bf16_optimizer_states", "bf16");
        self.set("optimizer.state_precision", narrow.filter(|_| is_bf16));
    }

    /// Sets the precision to f32, the Trainer's default, if the file leaves it to the Trainer.
    fn open_precision(&mut self) {
        let auto = self.fields.autos(&["fp16.enabled", "bf16.enabled", "torch_autocast.enabled"]);
        if !auto.is_empty() && self.options.auto == AutoValues::TrainerDefaults {
            self.import.trainer(&self.fields.file, "train.precision", "f32", auto);
        }
    }

    fn loss_scale(&mut self, is_f16: bool) {
        let scale = self.fields.number("fp16.loss_scale");
        let is_fixed = scale.as_ref().is_some_and(|read| read.value > 0.0);
        self.set("train.loss_scale", scale.filter(|_| is_f16 && is_fixed));
        for (ours, theirs) in [
            ("train.initial_scale_power", "fp16.initial_scale_power"),
            ("train.loss_scale_window", "fp16.loss_scale_window"),
            ("train.hysteresis", "fp16.hysteresis"),
        ] {
            self.set(ours, self.fields.integer(theirs).filter(|_| is_f16 && !is_fixed));
        }
        self.set(
            "train.min_loss_scale",
            self.fields.number("fp16.min_loss_scale").filter(|_| is_f16 && !is_fixed),
        );
        let is_left_to_run = self.fields.is_auto("fp16.enabled") && self.options.auto == AutoValues::OfTheRun;
        let because = if is_left_to_run {
            "`fp16.enabled` is \"auto\"; in a run in f16 set `train.loss_scale` and its neighbours in RUN.toml"
        } else {
            "`fp16.enabled` is not true"
        };
        for key in LOSS_SCALE.iter().filter(|key| !is_f16 && self.fields.is_given(key)) {
            self.import.idle(because, *key);
        }
    }

    /// Returns the number of data-parallel ranks, if the number of ranks is known.
    fn data_parallel(&self) -> Option<u64> {
        // Without a given number of ranks, one MiCS shard group is assumed.
        let shard = self.fields.number("zero_optimization.mics_shard_size").filter(|read| read.value >= 1.0);
        let ranks = self.options.ranks.map(|ranks| ranks as u64).or(shard.map(|read| read.value as u64))?;
        let of_a_part: u64 = [self.sequence_parallel(), self.tensor_parallel()]
            .into_iter()
            .flatten()
            .map(|read| read.value.max(1))
            .product();
        if ranks == 0 || !ranks.is_multiple_of(of_a_part) {
            let key = if self.sequence_parallel().is_some() {
                "sequence_parallel_size"
            } else {
                "tensor_parallel.autotp_size"
            };
            self.fields.refuse(
                key,
                format!("{of_a_part} ranks share each part of a batch, and there are {ranks}"),
                "a divisor of the number of ranks",
            );
            return None;
        }
        Some(ranks / of_a_part)
    }

    fn sequence_parallel(&self) -> Option<Read<u64>> {
        self.fields.integer("sequence_parallel_size")
    }

    fn tensor_parallel(&self) -> Option<Read<u64>> {
        let keys = [
            "tensor_parallel.autotp_size",
            "tensor_parallel.tp.tp_size",
            "tensor_parallel.tensor_parallel.tp_size",
        ];
        let reads: Vec<Read<u64>> = keys.iter().filter_map(|key| self.fields.integer(key)).collect();
        reads.into_iter().find(|read| read.value > 1)
    }

    fn batch(&mut self) {
        if self.elastic() {
            return;
        }
        let keys = ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"];
        let [global, micro, accumulation] = keys.map(|key| self.fields.integer(key));
        for read in [&global, &micro, &accumulation].into_iter().flatten().filter(|read| read.value == 0) {
            self.fields.refuse(&read.key, "is 0", "1 or more");
        }
        let positive = |read: &Read<u64>| read.value > 0;
        let (global, micro, accumulation) =
            (global.filter(positive), micro.filter(positive), accumulation.filter(positive));
        let ranks = self.data_parallel();
        let passes = accumulation.as_ref().map(|read| read.value);
        match (global, micro) {
            (Some(global), Some(micro)) => {
                let parts = ranks
                    .or(passes.map(|_| global.value / micro.value / passes.unwrap_or(1)))
                    .unwrap_or(1)
                    .max(1);
                let made = passes.unwrap_or(global.value / micro.value / parts).max(1);
                if micro.value * made * parts != global.value {
                    let what = format!(
                        "is {}, and {} sequences of a rank x {made} steps of accumulation x {parts} ranks are {}",
                        global.value,
                        micro.value,
                        micro.value * made * parts
                    );
                    self.fields.refuse(&global.key, what, "make them equal, or leave one of the three out");
                    return;
                }
                if passes.is_some() && ranks.is_none() && parts > 1 {
                    self.import.remark(format!("the three batch sizes are those of {parts} data-parallel ranks: --nproc-per-node {parts}"));
                }
                self.user("train.global_batch", global);
                self.user("train.micro_batch", micro);
            }
            (Some(global), None) => self.micro_batch(global, passes, ranks),
            (None, Some(micro)) => {
                let parts = ranks.unwrap_or(1);
                let why = format!("{} sequences x {} x {parts} ranks", micro.value, passes.unwrap_or(1));
                let global = micro.value.saturating_mul(passes.unwrap_or(1)).saturating_mul(parts);
                self.import.derived("train.global_batch", global, why);
                self.user("train.micro_batch", micro);
                self.batch_of_one_rank(ranks);
            }
            (None, None) => self.open_batch(passes.unwrap_or(1), ranks),
        }
    }

    /// Derives the micro-batch from the global batch and, if given, the accumulation steps.
    fn micro_batch(&mut self, global: Read<u64>, passes: Option<u64>, ranks: Option<u64>) {
        let made = passes.unwrap_or(1);
        match ranks {
            Some(parts) if global.value.is_multiple_of(parts * made) => {
                let why = format!("{} / {made} / {parts} ranks", global.value);
                self.import.derived("train.micro_batch", global.value / made / parts, why);
            }
            Some(parts) => {
                let what =
                    format!("{made} steps of accumulation on {parts} ranks do not divide {}", global.value);
                self.fields.refuse(&global.key, what, "a multiple of both");
                return;
            }
            None => self
                .import
                .remark("train.micro_batch is open, for it follows from the number of ranks: --ranks N"),
        }
        self.user("train.global_batch", global);
    }

    /// Sets the Trainer's default batch if the file leaves it to the Trainer; otherwise leaves the batch to the run.
    fn open_batch(&mut self, passes: u64, ranks: Option<u64>) {
        let is_auto =
            self.fields.is_auto("train_batch_size") || self.fields.is_auto("train_micro_batch_size_per_gpu");
        match (is_auto, self.options.auto) {
            (true, AutoValues::TrainerDefaults) => {
                let auto = self.fields.autos(&["train_micro_batch_size_per_gpu", "train_batch_size"]);
                self.import.trainer(&self.fields.file, "train.micro_batch", TRAINER_MICRO_BATCH, auto);
                let global = TRAINER_MICRO_BATCH.saturating_mul(passes).saturating_mul(ranks.unwrap_or(1));
                self.import.derived(
                    "train.global_batch",
                    global,
                    format!("8 x {passes} x {} ranks", ranks.unwrap_or(1)),
                );
                self.batch_of_one_rank(ranks);
            }
            (true, AutoValues::OfTheRun) => {}
            (false, _) => self.import.remark(
                "the file names no batch size; train.global_batch and train.micro_batch are the run's",
            ),
        }
    }

    fn batch_of_one_rank(&mut self, ranks: Option<u64>) {
        if ranks.is_none() {
            self.import.remark("train.global_batch is that of one rank, for the file does not say how many there are: --ranks N");
        }
    }

    fn zero(&mut self) {
        let section = "zero_optimization";
        let deprecated = self.fields.flag(section).map(|read| read.map(u64::from));
        let key = |name: &str| format!("{section}.{name}");
        let stage = self.fields.integer(&key("stage")).or(deprecated);
        let number = stage.as_ref().map_or(0, |read| read.value);
        if let Some(read) = stage {
            if number > 3 {
                self.fields.refuse(&read.key, format!("is {number}"), "0, 1, 2 or 3");
                return;
            }
            self.user("parallel.zero_stage", read);
        }
        if number > 0 && self.import.value("optimizer.kind") == Some(&json!("muon")) {
            self.fields.refuse(
                "optimizer.type",
                "is Muon, which needs whole matrices, and zero_optimization.stage shards them",
                "stage 0, or AdamW",
            );
        }
        self.offload(number);
        let live = self.fields.integer(&key("stage3_max_live_parameters"));
        let neighbours = self.fields.integer(&key("zero_hpz_partition_size"));
        let weights = self.fields.if_on(&key("zero_quantized_weights"), "int8");
        if number == 3 {
            self.set("parallel.max_live_parameters", live.filter(|read| read.value > 0));
            self.set("parallel.secondary_shard", neighbours.filter(|read| read.value > 1));
            self.set("parallel.quantize_weights", weights);
        }
        self.gradients(number);
        let shard: Option<Read<f64>> = self.fields.number(&key("mics_shard_size"));
        self.set(
            "parallel.data_parallel_shard",
            shard.filter(|read| read.value > 0.0).map(|read| read.map(|number| number as u64)),
        );
    }

    /// Sets gradient quantization. DeepSpeed drops the quantization error, unless LoCo feeds it back.
    fn gradients(&mut self, stage: u64) {
        let loco = self.fields.has("zero_optimization.zeropp_loco_param.err_beta")
            || self.fields.has("zero_optimization.zeropp_loco_param.reset_T");
        self.fields.mark("zero_optimization.zeropp_loco_param.err_beta");
        self.fields.mark("zero_optimization.zeropp_loco_param.reset_T");
        let gradients = self.fields.if_on("zero_optimization.zero_quantized_gradients", "int4");
        let Some(read) = gradients.filter(|_| stage > 0) else { return };
        self.user("parallel.quantize_gradients", read);
        if !loco {
            self.import.foreign_default(
                "parallel.quantize_feedback",
                false,
                "without zeropp_loco_param what gradients lose is dropped",
            );
        }
    }

    fn offload(&mut self, stage: u64) {
        let mut on_disk = false;
        for (name, ours) in [
            ("offload_optimizer", "parallel.offload.optimizer"),
            ("offload_param", "parallel.offload.parameters"),
        ] {
            let key = |rest: &str| format!("zero_optimization.{name}.{rest}");
            let device = self.fields.text(&key("device"));
            let path = self.fields.text(&key("nvme_path"));
            let ratio = (name == "offload_optimizer").then(|| self.fields.number(&key("ratio"))).flatten();
            let Some(device) = device else { continue };
            let place = match device.value.as_str() {
                "none" => continue,
                "cpu" => "cpu",
                "nvme" => "disk",
                _ => {
                    self.fields.refuse(&device.key, format!("is {}", device.shown), "none, cpu or nvme");
                    continue;
                }
            };
            let least = if name == "offload_param" { 3 } else { 1 };
            if stage < least {
                self.import.remark(format!("{} has no effect at stage {stage} there, nor here", device.key));
                continue;
            }
            let is_disk = place == "disk";
            if is_disk && name == "offload_param" && !on_disk {
                self.fields.refuse(
                    &device.key,
                    "is nvme, and the optimizer's state is not on disk with the parameters",
                    "offload_optimizer.device = nvme as well",
                );
                continue;
            }
            on_disk |= is_disk;
            self.user(ours, device.map(|_| place));
            self.set(
                "parallel.offload.dir",
                path.filter(|_| is_disk && self.import.value("parallel.offload.dir").is_none()),
            );
            self.set("parallel.offload.fraction", ratio.filter(|read| is_disk && read.value < 1.0));
        }
    }

    fn parallel(&mut self) {
        if let Some(read) = self.sequence_parallel().filter(|read| read.value > 1) {
            self.user("parallel.context_parallel", read);
            self.import.derived(
                "parallel.context_parallel_method",
                "all_to_all",
                "sequence parallelism of DeepSpeed-Ulysses",
            );
        }
        self.set("parallel.tensor_parallel", self.tensor_parallel());
        let is_on = self.fields.if_on("expert_parallel.enabled", ()).is_some();
        let experts = self.fields.integer("expert_parallel.autoep_size");
        let of_each = self.fields.integer("expert_parallel.expert_tensor_parallel_size");
        self.set("parallel.expert_parallel", experts.filter(|read| is_on && read.value > 1));
        self.set("parallel.expert_tensor_parallel", of_each.filter(|read| is_on && read.value > 1));
    }

    fn activations(&mut self) {
        let key = |name: &str| format!("activation_checkpointing.{name}");
        let sliced = self.fields.if_on(&key("partition_activations"), true);
        let offloaded = self.fields.if_on(&key("cpu_checkpointing"), "cpu");
        let number = self.fields.integer(&key("number_checkpoints")).filter(|read| read.value > 0);
        if sliced.is_none() && offloaded.is_none() && number.is_none() {
            return;
        }
        let why = "what activation_checkpointing partitions or offloads are inputs of recomputed blocks";
        self.import.derived("parallel.recompute", "full", why);
        if let Some(read) = sliced {
            match self.tensor_parallel() {
                Some(_) => self.user("parallel.partition_activations", read),
                None => {
                    self.import.remark(format!("{} has no effect without tensor-parallel ranks", read.key))
                }
            }
        }
        self.set("parallel.offload.activations", offloaded);
    }

    fn records(&mut self) {
        let every = self.fields.number("steps_per_print").filter(|read| read.value >= 1.0);
        self.set("train.log_every", every.map(|read| read.map(|number| number as u64)));
        self.set("metrics.tensorboard", self.fields.flag("tensorboard.enabled"));
        self.set(
            "metrics.dir",
            self.fields.text("tensorboard.output_path").filter(|read| !read.value.is_empty()),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_renamed_key_is_a_key_of_the_table() {
        for [old, new] in RENAMED.iter() {
            assert!(Format::DeepSpeed.keys().iter().any(|row| row.key == *new), "{old} becomes {new}");
        }
    }
}
