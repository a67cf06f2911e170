//! Rules between values: what each key alone cannot know.

use lockstep_data::Columns;
use lockstep_graph::{BlockShape, Recompute};

use super::choices::{
    DataFormat, LearningRateScaling, OptimizerKind, Precision, QuantizedGradients, QuantizedWeights,
    ReshardAfterForward, Residence, Rounding, ScheduleKind, StatePrecision, TensorLayout, Transport,
};
use super::keys::{MODEL_SOURCES, RunConfig};
use super::problem::{Origin, Problem};
use super::reader::Reader;
use super::value::DataSource;
use super::{ParallelConfig, Purpose};

/// Steps in one trace: a few hundred thousand spans, which is what a browser can show.
const MAX_TRACED_STEPS: u64 = 100;

/// Adds a problem for each rule that `config` breaks. Rules that involve a refused value are passed over:
/// what stands in for it is not what the user meant.
pub(super) fn check(purpose: Purpose, config: &RunConfig, reader: &mut Reader<'_>) {
    let mut checker = Checker { purpose, config, reader };
    checker.model();
    checker.fine_tune();
    checker.data();
    checker.batch();
    checker.guard();
    checker.loss_scale();
    checker.optimizer();
    checker.schedule();
    checker.parallel();
    checker.offload();
    checker.metrics();
    checker.checkpoint();
}

struct Checker<'c, 'r, 'p> {
    purpose: Purpose,
    config: &'c RunConfig,
    reader: &'r mut Reader<'p>,
}

impl Checker<'_, '_, '_> {
    fn given(&self, key: &str) -> bool {
        self.config.origin(key) != Origin::Default
    }

    /// Reports a broken rule at the first of `keys` that somebody set.
    fn refuse(&mut self, keys: &[&str], what: impl Into<String>, allowed: impl Into<String>) {
        if keys.iter().any(|key| self.reader.refused.contains(*key)) {
            return;
        }
        let at = keys.iter().find(|key| self.given(key)).or(keys.first()).copied().unwrap_or_default();
        self.reader.problems.push(Problem::new(self.config.origin(at), at, what, allowed));
    }

    /// Refuses keys that were set though nothing reads them in this combination. An argument that makes another
    /// choice than the file sets aside what the file says of the old one.
    fn refuse_without_effect(&mut self, keys: &[&str], because: &str, depends_on: &str) {
        let chosen_by_argument = matches!(self.config.origin(depends_on), Origin::Argument(_));
        for key in keys {
            let set_aside = chosen_by_argument && matches!(self.config.origin(key), Origin::File { .. });
            if self.given(key) && !set_aside {
                self.refuse(&[key, depends_on], format!("has no effect with {because}"), "leave it out");
            }
        }
    }

    fn model(&mut self) {
        let sources: Vec<&str> = ["model.preset", "model.path", "model.model_type"]
            .into_iter()
            .filter(|key| self.given(key))
            .collect();
        if let [first, second, ..] = sources[..] {
            let what = format!("is given as well as {first}; each names the model");
            self.refuse(&[second], what, format!("one of {}", MODEL_SOURCES.join(", ")));
        }
        if self.config.model.from_pretrained && self.config.model.path.is_none() {
            let what = "is true, but there is no directory to take the weights from";
            self.refuse(&["model.from_pretrained", "model.path"], what, "model.path = \"DIR\" with it");
        }
    }

    fn fine_tune(&mut self) {
        const LORA: [&str; 4] = [
            "fine_tune.lora_alpha",
            "fine_tune.lora_dropout",
            "fine_tune.lora_targets",
            "fine_tune.lora_scaling",
        ];
        let fine_tune = &self.config.fine_tune;
        let has_adapter = fine_tune.adapter.is_some() || fine_tune.lora_rank.is_some();
        if fine_tune.adapter.is_some() {
            let because = "fine_tune.adapter, which has its own";
            self.refuse_without_effect(&LORA, because, "fine_tune.adapter");
            self.refuse_without_effect(&["fine_tune.lora_rank"], because, "fine_tune.adapter");
        } else if fine_tune.lora_rank.is_none() {
            self.refuse_without_effect(&LORA, "no fine_tune.lora_rank", "fine_tune.lora_rank");
        } else if fine_tune.lora_targets.is_empty() {
            let allowed = "names of linear layers, or [\"all-linear\"]";
            self.refuse(&["fine_tune.lora_targets"], "names no layer to adapt", allowed);
        }
        if has_adapter {
            let because = "an adapter, which freezes the whole model";
            self.refuse_without_effect(&["fine_tune.freeze"], because, "fine_tune.lora_rank");
        }
        let has_no_weights = self.purpose == Purpose::Run && !self.config.model.from_pretrained;
        if has_no_weights && self.config.keeps_weights() {
            let keys = ["fine_tune.freeze", "fine_tune.lora_rank", "fine_tune.adapter"];
            let key = keys.into_iter().find(|key| self.given(key)).unwrap_or(keys[0]);
            let allowed = "with model.path = \"DIR\" and model.from_pretrained = true";
            self.refuse(&[key], "would keep random weights as they are", allowed);
        }
    }

    fn data(&mut self) {
        let data = &self.config.data;
        if data.train.is_empty() && data.valid.is_empty() && self.given("data.train") {
            let allowed =
                "files, directories or patterns; left out, text found on this machine is trained on";
            self.refuse(&["data.train"], "names nothing", allowed);
        }
        if !data.valid.is_empty() {
            if data.train.is_empty() {
                self.refuse(&["data.valid", "data.train"], "is given without data.train", "both, or neither");
            }
            self.refuse_without_effect(&["data.valid_fraction"], "data.valid", "data.valid");
        }
        if let Err(unknown) = Columns::new(&data.columns) {
            let allowed = Columns::KNOWN.join(", ");
            self.refuse(&["data.columns"], format!("renames \"{unknown}\", which no record has"), &allowed);
        }
        let because = format!("data.format = \"{}\"", data.format.word());
        match data.format {
            DataFormat::Auto => {}
            DataFormat::Text => {
                self.refuse_without_effect(&["data.text_field", "data.token_type"], &because, "data.format");
            }
            DataFormat::JsonLines | DataFormat::Parquet => {
                self.refuse_without_effect(&["data.token_type"], &because, "data.format");
            }
            DataFormat::Indexed => {
                let keys = ["data.text_field", "data.token_type", "data.cache_dir"];
                self.refuse_without_effect(&keys, &because, "data.format");
            }
            DataFormat::Tokens => {
                self.refuse_without_effect(&["data.text_field", "data.cache_dir"], &because, "data.format");
            }
        }
        let mut weights = 0.0;
        let mut all_weighted = true;
        for source in &data.train {
            match source {
                DataSource::Weighted { weight, .. } => weights += weight,
                DataSource::Plain(_) => all_weighted = false,
            }
        }
        if !all_weighted && weights >= 1.0 {
            let what =
                format!("the weights sum to {weights}, and nothing is left for the entries without one");
            self.refuse(&["data.train"], what, "a sum below 1, or a weight for every entry");
        }
    }

    fn batch(&mut self) {
        let train = &self.config.train;
        let replicas = self.config.batch_parts();
        let of_rank = train.global_batch / replicas;
        if !train.global_batch.is_multiple_of(replicas) {
            let what = format!("{replicas} ranks cannot share train.global_batch = {}", train.global_batch);
            let (below, above) = (of_rank * replicas, (of_rank + 1) * replicas);
            let nearest = if below > 0 { format!("{below} or {above}") } else { above.to_string() };
            let allowed = format!("train.global_batch = {nearest}, or another number of ranks");
            self.refuse(&["parallel.data_parallel_replicate", "train.global_batch"], what, allowed);
        } else if let Some(micro_batch) = train.micro_batch
            && !of_rank.is_multiple_of(micro_batch)
        {
            let of_each = if replicas == 1 { String::new() } else { format!(" / {replicas} ranks") };
            let what =
                format!("{micro_batch} does not divide train.global_batch = {}{of_each}", train.global_batch);
            let divisors: Vec<String> =
                divisors(of_rank).filter(|&d| d <= 2 * micro_batch).map(|d| d.to_string()).collect();
            self.refuse(&["train.micro_batch", "train.global_batch"], what, divisors.join(", "));
        }
        let micro_batch_tokens = self.config.micro_batch().saturating_mul(train.seq_len);
        if micro_batch_tokens > BlockShape::MAX_TOKENS {
            let what =
                format!("with train.seq_len = {} this makes {micro_batch_tokens} tokens", train.seq_len);
            let allowed = format!("at most {} tokens in a micro-batch", BlockShape::MAX_TOKENS);
            self.refuse(&["train.micro_batch", "train.seq_len"], what, allowed);
        }
        let tokens = u128::from(train.steps) * train.global_batch as u128 * train.seq_len as u128;
        if tokens > u128::from(u64::MAX >> 1) {
            let what = format!("with train.global_batch and train.seq_len this makes {tokens} tokens");
            self.refuse(&["train.steps", "train.global_batch", "train.seq_len"], what, "fewer than 2^63");
        }
    }

    fn guard(&mut self) {
        let factor = self.config.train.spike_factor;
        if factor > 0.0 && factor <= 1.0 {
            let what = format!("{factor} would take the usual for a spike");
            self.refuse(&["train.spike_factor"], what, "0 (off), or more than 1; 3 to 10 are usual");
        }
        if self.config.rollback_after() == 0 {
            let because = "train.rollback_after = 0";
            self.refuse_without_effect(&["train.rollback_every"], because, "train.rollback_after");
        }
    }

    fn loss_scale(&mut self) {
        const DYNAMIC: [&str; 4] = [
            "train.initial_scale_power",
            "train.loss_scale_window",
            "train.hysteresis",
            "train.min_loss_scale",
        ];
        let train = &self.config.train;
        if train.precision != Precision::F16 {
            let because = format!("train.precision = \"{}\"", train.precision.word());
            self.refuse_without_effect(&["train.loss_scale"], &because, "train.precision");
            self.refuse_without_effect(&DYNAMIC, &because, "train.precision");
        } else if train.loss_scale > 0.0 {
            self.refuse_without_effect(&DYNAMIC, "a fixed train.loss_scale", "train.loss_scale");
        }
    }

    fn optimizer(&mut self) {
        let kind = self.config.optimizer.kind;
        let without_effect: &[&str] = match kind {
            OptimizerKind::AdamW => &["momentum", "adam_lr", "muon_scale"],
            OptimizerKind::Sgd => &["betas", "eps", "adam_lr", "muon_scale"],
            OptimizerKind::Lion => &["eps", "momentum", "adam_lr", "muon_scale"],
            OptimizerKind::Muon => &[],
        };
        let because = format!("optimizer.kind = \"{}\"", kind.word());
        for key in without_effect {
            self.refuse_without_effect(&[&format!("optimizer.{key}")], &because, "optimizer.kind");
        }
        let (precision, master_weights) = (self.config.train.precision, self.config.train.master_weights);
        if precision != Precision::BF16 && !master_weights {
            let what = format!("false is for train.precision = \"bf16\", not for \"{}\"", precision.word());
            self.refuse(&["train.master_weights", "train.precision"], what, "true, or leave it out");
        }
        let is_narrow = !master_weights || self.config.optimizer.state_precision == StatePrecision::BF16;
        if self.config.optimizer.rounding == Rounding::Stochastic && !is_narrow {
            let what = "\"stochastic\" has nothing to round";
            let allowed = "with optimizer.state_precision = \"bf16\" or train.master_weights = false";
            self.refuse(&["optimizer.rounding"], what, allowed);
        }
    }

    fn schedule(&mut self) {
        let (steps, schedule) = (self.config.train.steps, &self.config.schedule);
        if let Some(warmup_steps) = schedule.warmup_steps
            && warmup_steps > steps
        {
            let what = format!("{warmup_steps} is more than train.steps = {steps}");
            self.refuse(&["schedule.warmup_steps", "train.steps"], what, format!("0 to {steps}"));
        }
        if schedule.scale_lr == LearningRateScaling::None {
            let because = "schedule.scale_lr = \"none\"";
            self.refuse_without_effect(&["schedule.scale_lr_batch"], because, "schedule.scale_lr");
        }
        if schedule.kind == ScheduleKind::Constant {
            self.refuse_without_effect(
                &["schedule.decay_steps", "schedule.min_lr_ratio"],
                "schedule.kind = \"constant\"",
                "schedule.kind",
            );
        }
    }

    fn parallel(&mut self) {
        if self.config.parallel.transport == Transport::Mpi {
            let keys = ["parallel.all_reduce", "parallel.tcp_connections", "parallel.encrypt"];
            let because = "parallel.transport = \"mpi\", which sums in its own way";
            self.refuse_without_effect(&keys, because, "parallel.transport");
        }
        self.tensor_parallel();
        self.partitioned_activations();
        if self.config.parallel.context_parallel == 1 {
            let because = "parallel.context_parallel = 1, whose one rank has whole sequences";
            let keys = ["parallel.context_parallel_method"];
            self.refuse_without_effect(&keys, because, "parallel.context_parallel");
        }
        if self.config.parallel.pipeline_parallel == 1 {
            let keys = ["parallel.pipeline_schedule", "parallel.virtual_stages", "parallel.pipeline_stages"];
            let because = "parallel.pipeline_parallel = 1, which is no pipeline";
            self.refuse_without_effect(&keys, because, "parallel.pipeline_parallel");
        }
        self.sharding();
    }

    /// Refuses keys of tensor parallelism that nothing is split by, and optimizers that cannot be split.
    fn tensor_parallel(&mut self) {
        let tensor_parallel = self.config.parallel.tensor_parallel;
        if tensor_parallel == 1 && self.config.parallel.sequence_parallel {
            let because = "parallel.tensor_parallel = 1, whose one rank has all tokens";
            self.refuse_without_effect(&["parallel.sequence_parallel"], because, "parallel.tensor_parallel");
        }
        if tensor_parallel == 1 && self.config.parallel.tensor_layout == TensorLayout::TwoDimensions {
            let because = "parallel.tensor_parallel = 1, which shares nothing";
            self.refuse_without_effect(&["parallel.tensor_layout"], because, "parallel.tensor_parallel");
        } else if self.config.parallel.tensor_layout == TensorLayout::TwoDimensions
            && self.config.parallel.sequence_parallel
        {
            let because = "parallel.tensor_layout = \"2d\", which splits by tokens in any case";
            self.refuse_without_effect(&["parallel.sequence_parallel"], because, "parallel.tensor_layout");
        }
        if tensor_parallel == 1 {
            let because = "parallel.tensor_parallel = 1, whose one rank exchanges nothing";
            self.refuse_without_effect(&["parallel.tensor_chunks"], because, "parallel.tensor_parallel");
        } else if self.config.parallel.tensor_layout == TensorLayout::TwoDimensions {
            let because = "parallel.tensor_layout = \"2d\", whose products take a block at a time";
            self.refuse_without_effect(&["parallel.tensor_chunks"], because, "parallel.tensor_layout");
        }
        if tensor_parallel > 1 && self.config.optimizer.kind == OptimizerKind::Muon {
            let what = format!(
                "\"muon\" needs whole matrices, and parallel.tensor_parallel = {tensor_parallel} splits them"
            );
            let allowed = "\"adamw\", \"sgd\", \"lion\", or parallel.tensor_parallel = 1";
            self.refuse(&["optimizer.kind", "parallel.tensor_parallel"], what, allowed);
        }
    }

    /// Refuses keys of ZeRO that shard nothing, and optimizers that cannot be sharded.
    fn sharding(&mut self) {
        let ParallelConfig { zero_stage, data_parallel_shard, context_parallel, .. } = self.config.parallel;
        let shards_are_open = self.config.leaves_shards_open();
        if zero_stage > 0 && data_parallel_shard * context_parallel == 1 && !shards_are_open {
            self.no_shards();
        }
        self.quantization();
        let ParallelConfig { reshard_after_forward, offload_parameters, .. } = self.config.parallel;
        let no_wrap = "nothing that is shared out, or on disk, in any buffer";
        let may_shard = zero_stage > 0 && (shards_are_open || data_parallel_shard * context_parallel > 1);
        if !may_shard && self.config.parallel.offload_optimizer != Residence::Disk {
            self.refuse_without_effect(&["parallel.wrap"], no_wrap, "parallel.zero_stage");
        }
        let of_pool = ["parallel.reshard_after_forward", "parallel.max_live_parameters"];
        let because = format!("parallel.zero_stage = {zero_stage}, which leaves all parameters whole");
        if zero_stage < 3 {
            self.refuse_without_effect(&["parallel.secondary_shard"], &because, "parallel.zero_stage");
        }
        if zero_stage < 3 && offload_parameters != Residence::Disk {
            self.refuse_without_effect(&of_pool, &because, "parallel.zero_stage");
        } else if reshard_after_forward == ReshardAfterForward::Never {
            let because =
                "parallel.reshard_after_forward = \"never\", which keeps all; \"auto\" keeps what fits";
            let keys = ["parallel.max_live_parameters", "parallel.secondary_shard"];
            self.refuse_without_effect(&keys, because, "parallel.reshard_after_forward");
        }
        let owners = data_parallel_shard * context_parallel;
        if let Some(neighbours) = self.config.parallel.secondary_shard
            && zero_stage == 3
            && !shards_are_open
            && (neighbours >= owners || !owners.is_multiple_of(neighbours))
        {
            let what = format!(
                "{neighbours} neighbours do not divide the {owners} ranks that share out parameters \
                 (data_parallel_shard x context_parallel) into several groups"
            );
            let choices: Vec<String> =
                divisors(owners).filter(|&d| d > 1 && d < owners).map(|d| d.to_string()).collect();
            let allowed = if choices.is_empty() { "leave it out".to_owned() } else { choices.join(", ") };
            self.refuse(&["parallel.secondary_shard", "parallel.data_parallel_shard"], what, allowed);
        }
        if zero_stage > 0 && self.config.optimizer.kind == OptimizerKind::Muon {
            let what =
                format!("\"muon\" needs whole matrices, and parallel.zero_stage = {zero_stage} cuts them");
            let allowed = "\"adamw\", \"sgd\", \"lion\", or parallel.zero_stage = 0";
            self.refuse(&["optimizer.kind", "parallel.zero_stage"], what, allowed);
        }
    }

    /// Refuses a ZeRO stage beside keys that leave it no shards.
    fn no_shards(&mut self) {
        let replicas = self.config.parallel.data_parallel_replicate;
        if replicas == 1 {
            let because = "parallel.data_parallel_shard = 1, so that nobody is there to share with";
            self.refuse_without_effect(&["parallel.zero_stage"], because, "parallel.data_parallel_shard");
            return;
        }
        let what = format!(
            "shards nothing over parallel.data_parallel_replicate = {replicas}, which are whole copies"
        );
        let allowed = format!(
            "parallel.data_parallel_shard = {replicas} in its place, or neither with --nproc-per-node {replicas}"
        );
        self.refuse(&["parallel.zero_stage", "parallel.data_parallel_replicate"], what, allowed);
    }

    fn partitioned_activations(&mut self) {
        const KEY: &str = "parallel.partition_activations";
        let ParallelConfig {
            tensor_parallel,
            sequence_parallel,
            tensor_layout,
            recompute,
            partition_activations,
            ..
        } = self.config.parallel;
        if !partition_activations {
            return;
        }
        if tensor_parallel == 1 {
            let because = "parallel.tensor_parallel = 1, whose one rank shares nothing";
            self.refuse_without_effect(&[KEY], because, "parallel.tensor_parallel");
        } else if sequence_parallel {
            let because = "parallel.sequence_parallel = true, by which each rank has its own tokens of these values already";
            self.refuse_without_effect(&[KEY], because, "parallel.sequence_parallel");
        } else if tensor_layout == TensorLayout::TwoDimensions {
            let because = "parallel.tensor_layout = \"2d\", by which each rank has its own tokens of these values already";
            self.refuse_without_effect(&[KEY], because, "parallel.tensor_layout");
        }
        if !recompute.forgets(Recompute::Full) {
            let what = format!(
                "true is for blocks that compute everything again from their input, and parallel.recompute = \"{recompute}\" has none"
            );
            let allowed = "false, or parallel.recompute = \"full\", for some layers at least";
            self.refuse(&[KEY, "parallel.recompute"], what, allowed);
        }
    }

    fn offload(&mut self) {
        let ParallelConfig { offload_optimizer, offload_gradients, offload_parameters, .. } =
            self.config.parallel;
        if offload_optimizer != Residence::Disk {
            let others = [
                ("parallel.offload.gradients", offload_gradients),
                ("parallel.offload.parameters", offload_parameters),
            ];
            for (key, _) in others.into_iter().filter(|(_, residence)| *residence == Residence::Disk) {
                let what = "\"disk\" needs the optimizer's state there too, which the update reads with it";
                let keys = [key, "parallel.offload.optimizer"];
                self.refuse(&keys, what, "parallel.offload.optimizer = \"disk\"");
            }
            let (of_state, of_all) =
                ("parallel.offload.fraction", ["parallel.offload.dir", "parallel.offload.io"]);
            let activations = self.config.parallel.offload_activations;
            if offload_optimizer == Residence::None {
                let because = match activations {
                    Residence::None => "nothing that is offloaded",
                    _ => "no model state that is offloaded: activations are offloaded altogether",
                };
                self.refuse_without_effect(&[of_state], because, "parallel.offload.optimizer");
            }
            if activations != Residence::Disk {
                self.refuse_without_effect(&of_all, "nothing on disk", "parallel.offload.optimizer");
            }
            return;
        }
        if self.config.optimizer.kind == OptimizerKind::Muon {
            let what = "\"muon\" needs whole matrices, and on disk they are cut into windows";
            let keys = ["optimizer.kind", "parallel.offload.optimizer"];
            self.refuse(
                &keys,
                what,
                "\"adamw\", \"sgd\", \"lion\", or parallel.offload.optimizer = \"none\"",
            );
        }
        let keeps_master = self.config.train.precision != Precision::F32 && self.config.train.master_weights;
        let keeps_moments =
            self.config.optimizer.kind != OptimizerKind::Sgd || self.config.optimizer.momentum() != 0.0;
        if !keeps_master && !keeps_moments {
            let because = "SGD without momentum, and without master weights, keeps nothing";
            self.refuse_without_effect(&["parallel.offload.optimizer"], because, "optimizer.momentum");
        }
        if self.config.rollback_after() > 0 {
            let what =
                "a copy of the state in memory to go back to has no room where the state itself has none";
            let keys = ["train.rollback_after", "train.spike_factor", "parallel.offload.optimizer"];
            self.refuse(&keys, what, "train.rollback_after = 0, or parallel.offload.optimizer = \"none\"");
        }
        let ParallelConfig {
            zero_stage, data_parallel_shard, data_parallel_replicate, context_parallel, ..
        } = self.config.parallel;
        let owners = data_parallel_shard * context_parallel;
        if offload_parameters == Residence::Disk && owners > 1 && matches!(zero_stage, 1 | 2) {
            let keys = ["parallel.offload.parameters", "parallel.zero_stage"];
            let what = format!(
                "parallel.zero_stage = {zero_stage} has every rank keep all parameters, also those that others update"
            );
            self.refuse(&keys, what, "parallel.zero_stage = 3, or 0");
        }
        let summands = owners * data_parallel_replicate;
        if offload_gradients == Residence::Disk && summands > 1 {
            let keys = ["parallel.offload.gradients", "parallel.zero_stage"];
            if self.config.parallel.quantize_gradients != QuantizedGradients::None {
                let keys = ["parallel.offload.gradients", "parallel.quantize_gradients"];
                let what = "gradients on disk do not travel as small integers";
                self.refuse(&keys, what, "one of the two");
            } else if data_parallel_replicate > 1 {
                let what = "gradients on disk are not summed over replicas";
                self.refuse(&keys, what, "parallel.data_parallel_shard in place of data_parallel_replicate");
            } else if zero_stage < 2 {
                let what = format!("parallel.zero_stage = {zero_stage} keeps all gradients on each rank");
                self.refuse(&keys, what, "parallel.zero_stage = 2 or 3");
            }
        }
    }

    fn quantization(&mut self) {
        let ParallelConfig { zero_stage, quantize_weights, quantize_gradients, .. } = self.config.parallel;
        if quantize_weights != QuantizedWeights::None && zero_stage != 3 {
            let what = format!(
                "\"{}\" is for weights that are gathered before each use, and parallel.zero_stage = {zero_stage} keeps them whole",
                quantize_weights.word()
            );
            let allowed = "\"none\", or parallel.zero_stage = 3";
            self.refuse(&["parallel.quantize_weights", "parallel.zero_stage"], what, allowed);
        }
        if quantize_gradients == QuantizedGradients::None {
            let because = "parallel.quantize_gradients = \"none\", which loses nothing";
            self.refuse_without_effect(
                &["parallel.quantize_feedback"],
                because,
                "parallel.quantize_gradients",
            );
            return;
        }
        let word = quantize_gradients.word();
        if zero_stage == 0 {
            let what = format!(
                "\"{word}\" is for gradients that go to their owners, and with parallel.zero_stage = 0 nobody owns any"
            );
            let allowed = "\"none\", or parallel.zero_stage = 1, 2 or 3 with parallel.data_parallel_shard";
            self.refuse(&["parallel.quantize_gradients", "parallel.zero_stage"], what, allowed);
        }
        let precision = self.config.train.precision;
        if precision == Precision::F16 && self.config.parallel.quantize_feedback {
            let what = "what gradients lose is kept in the unit of a loss scale that changes (train.precision = \"f16\")";
            let allowed = "parallel.quantize_feedback = false, or train.precision = \"bf16\"";
            let keys = ["parallel.quantize_feedback", "parallel.quantize_gradients", "train.precision"];
            self.refuse(&keys, what, allowed);
        }
    }

    fn checkpoint(&mut self) {
        let (checkpoint, train) = (&self.config.checkpoint, &self.config.train);
        let (every, eval_every) = (checkpoint.every, train.eval_every);
        if checkpoint.fallback.as_ref() == Some(&checkpoint.dir) {
            let what = format!("is checkpoint.dir ({})", checkpoint.dir.display());
            self.refuse(&["checkpoint.fallback"], what, "another directory, best on another file system");
        }
        if !checkpoint.keep_best {
            return;
        }
        if checkpoint.keep == 0 {
            self.refuse_without_effect(
                &["checkpoint.keep_best"],
                "checkpoint.keep = 0, which keeps all",
                "checkpoint.keep",
            );
        }
        if eval_every == 0
            || every == 0
            || !every.is_multiple_of(eval_every) && !eval_every.is_multiple_of(every)
        {
            let what = format!(
                "needs steps that are evaluated and saved: checkpoint.every = {every}, train.eval_every = {eval_every}"
            );
            self.refuse(&["checkpoint.keep_best", "train.eval_every"], what, "one a multiple of the other");
        }
    }

    fn metrics(&mut self) {
        if let Some(address) = &self.config.metrics.prometheus {
            let parts = address.rsplit_once(':');
            if !parts.is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok()) {
                let what = format!("{address:?} is no address");
                self.refuse(&["metrics.prometheus"], what, "HOST:PORT, such as 127.0.0.1:9400");
            }
        }
        if let Some([first, last]) = self.config.metrics.trace_steps {
            let most = first.saturating_add(MAX_TRACED_STEPS - 1);
            if last < first || last > most {
                let what = format!(
                    "[{first}, {last}] are not the first and the last of 1 to {MAX_TRACED_STEPS} steps"
                );
                self.refuse(
                    &["metrics.trace_steps"],
                    what,
                    format!("[{first}, {first}] to [{first}, {most}]"),
                );
            } else if first > self.config.train.steps {
                let steps = self.config.train.steps;
                let what = format!("the run ends before step {first}, with train.steps = {steps}");
                self.refuse(&["metrics.trace_steps"], what, format!("from 1 to {steps}"));
            }
        }
    }
}

/// The divisors of `number`, ascending.
pub(super) fn divisors(number: usize) -> impl Iterator<Item = usize> {
    (1..=number).filter(move |&candidate| number.is_multiple_of(candidate))
}
