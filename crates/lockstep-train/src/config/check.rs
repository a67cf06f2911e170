//! Rules between values: what each key alone cannot know.

use lockstep_data::Columns;
use lockstep_graph::BlockShape;
use lockstep_plan::{Feedback, Plan, Recompute, Residence};

use super::Purpose;
use super::choices::{OptimizerKind, Precision, Rounding, StatePrecision};
use super::declare::Idle;
use super::keys::{KEYS, MODEL_SOURCES, RunConfig};
use super::problem::{Origin, Problem};
use super::reader::Reader;
use super::value::DataSource;

/// Steps in one trace: a few hundred thousand spans, which is what a browser can show.
const MAX_TRACED_STEPS: u64 = 100;

/// Adds a problem for each rule that `config` breaks. Rules that involve a refused value are passed over:
/// what stands in for it is not what the user meant.
pub(super) fn check(purpose: Purpose, config: &RunConfig, reader: &mut Reader<'_>) {
    let mut checker = Checker { purpose, config, reader };
    checker.idle();
    checker.model();
    checker.fine_tune();
    checker.data();
    checker.batch();
    checker.guard();
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

    /// Refuses keys that were set though nothing reads them in this combination. An argument that makes another choice than the file overrides what
    /// the file says of the old one, and a plan says everything.
    fn idle(&mut self) {
        for key in KEYS.iter() {
            let Some(Idle { because, depends_on }) = key.rules.idle.and_then(|idle| idle(self.config)) else {
                continue;
            };
            let is_chosen_by_argument = matches!(self.config.origin(depends_on), Origin::Argument(_));
            let origin = self.config.origin(key.name);
            let is_overridden = is_chosen_by_argument && matches!(origin, Origin::File { .. });
            if !matches!(origin, Origin::Default | Origin::Plan(_)) && !is_overridden {
                let what = format!("has no effect with {because}");
                self.refuse(&[key.name, depends_on], what, "leave it out");
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
        let fine_tune = &self.config.fine_tune;
        let adapts = fine_tune.adapter.is_none() && fine_tune.lora_rank.is_some();
        if adapts && fine_tune.lora_targets.is_empty() {
            let allowed = "names of linear layers, or [\"all-linear\"]";
            self.refuse(&["fine_tune.lora_targets"], "names no layer to adapt", allowed);
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
        if !data.valid.is_empty() && data.train.is_empty() {
            self.refuse(&["data.valid", "data.train"], "is given without data.train", "both, or neither");
        }
        if let Err(unknown) = Columns::new(&data.columns) {
            let allowed = Columns::KNOWN.join(", ");
            self.refuse(&["data.columns"], format!("renames \"{unknown}\", which no record has"), &allowed);
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
        } else if let Some(micro_batch) = self.config.plan.micro_batch
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
    }

    fn optimizer(&mut self) {
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
    }

    fn parallel(&mut self) {
        self.sharding();
        self.quantization();
        let plan = &self.config.plan;

        if plan.partition_activations && !plan.recompute.forgets(Recompute::Full) {
            let what = format!(
                "true is for blocks that compute everything again from their input, and parallel.recompute = \"{}\" has none",
                plan.recompute
            );
            let allowed = "false, or parallel.recompute = \"full\", for some layers at least";
            self.refuse(&["parallel.partition_activations", "parallel.recompute"], what, allowed);
        }
        let kind = self.config.optimizer.kind;
        let (tensor, zero_stage) = (plan.mesh.tensor, plan.zero_stage);
        for (key, degree, least, does) in [
            ("parallel.tensor_parallel", tensor, 1, "splits them"),
            ("parallel.zero_stage", usize::from(zero_stage), 0, "cuts them"),
        ] {
            if kind == OptimizerKind::Muon && degree > least {
                let what = format!("\"muon\" needs whole matrices, and {key} = {degree} {does}");
                let allowed = format!("\"adamw\", \"sgd\", \"lion\", or {key} = {least}");
                self.refuse(&["optimizer.kind", key], what, allowed);
            }
        }
    }

    /// Refuses a ZeRO stage without shards, and neighbours that do not divide them.
    fn sharding(&mut self) {
        let Plan { zero_stage, mesh, ref sharding, .. } = self.config.plan;
        let (owners, replicas) = (mesh.shard * mesh.context, mesh.replicate);
        let shards_are_open = self.config.leaves_shards_open();
        if zero_stage > 0 && owners == 1 && replicas > 1 && !shards_are_open {
            let what = format!(
                "shards nothing over parallel.data_parallel_replicate = {replicas}, which are whole copies"
            );
            let allowed = format!(
                "parallel.data_parallel_shard = {replicas} in its place, or neither with --nproc-per-node {replicas}"
            );
            self.refuse(&["parallel.zero_stage", "parallel.data_parallel_replicate"], what, allowed);
        }
        let Some(neighbours) = sharding.secondary_shard.filter(|_| zero_stage == 3 && !shards_are_open)
        else {
            return;
        };
        if neighbours >= owners || !owners.is_multiple_of(neighbours) {
            let what = format!(
                "{neighbours} neighbours do not divide the {owners} ranks that share out parameters \
                 (data_parallel_shard x context_parallel) into several groups"
            );
            let choices: Vec<String> =
                divisors(owners).filter(|&d| d > 1 && d < owners).map(|d| d.to_string()).collect();
            let allowed = if choices.is_empty() { "leave it out".to_owned() } else { choices.join(", ") };
            self.refuse(&["parallel.secondary_shard", "parallel.data_parallel_shard"], what, allowed);
        }
    }

    fn offload(&mut self) {
        let residence = self.config.plan.residence;
        if residence.optimizer != Residence::Disk {
            for (key, residence) in [
                ("parallel.offload.gradients", residence.gradients),
                ("parallel.offload.parameters", residence.parameters),
            ] {
                if residence == Residence::Disk {
                    let what =
                        "\"disk\" needs the optimizer's state there too, which the update reads with it";
                    let keys = [key, "parallel.offload.optimizer"];
                    self.refuse(&keys, what, "parallel.offload.optimizer = \"disk\"");
                }
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
        if self.config.rollback_after() > 0 {
            let what =
                "a copy of the state in memory to go back to has no room where the state itself has none";
            let keys = ["train.rollback_after", "train.spike_factor", "parallel.offload.optimizer"];
            self.refuse(&keys, what, "train.rollback_after = 0, or parallel.offload.optimizer = \"none\"");
        }
        let Plan { zero_stage, mesh, quantize_gradients, .. } = self.config.plan;
        let owners = mesh.shard * mesh.context;
        if residence.parameters == Residence::Disk && owners > 1 && matches!(zero_stage, 1 | 2) {
            let keys = ["parallel.offload.parameters", "parallel.zero_stage"];
            let what = format!(
                "parallel.zero_stage = {zero_stage} has every rank keep all parameters, also those that others update"
            );
            self.refuse(&keys, what, "parallel.zero_stage = 3, or 0");
        }
        let summands = owners * mesh.replicate;
        if residence.gradients == Residence::Disk && summands > 1 {
            let keys = ["parallel.offload.gradients", "parallel.zero_stage"];
            if quantize_gradients.is_some() {
                let keys = ["parallel.offload.gradients", "parallel.quantize_gradients"];
                let what = "gradients on disk do not travel as small integers";
                self.refuse(&keys, what, "one of the two");
            } else if mesh.replicate > 1 {
                let what = "gradients on disk are not summed over replicas";
                self.refuse(&keys, what, "parallel.data_parallel_shard in place of data_parallel_replicate");
            } else if zero_stage < 2 {
                let what = format!("parallel.zero_stage = {zero_stage} keeps all gradients on each rank");
                self.refuse(&keys, what, "parallel.zero_stage = 2 or 3");
            }
        }
    }

    fn quantization(&mut self) {
        let Plan { zero_stage, quantize_weights, quantize_gradients, quantize_feedback, .. } =
            self.config.plan;
        if let Some(kind) = quantize_weights.filter(|_| zero_stage != 3) {
            let what = format!(
                "\"{kind}\" is for weights that are gathered before each use, and parallel.zero_stage = {zero_stage} keeps them whole"
            );
            let allowed = "\"none\", or parallel.zero_stage = 3";
            self.refuse(&["parallel.quantize_weights", "parallel.zero_stage"], what, allowed);
        }
        let Some(kind) = quantize_gradients else { return };
        if zero_stage == 0 {
            let what = format!(
                "\"{kind}\" is for gradients that go to their owners, and with parallel.zero_stage = 0 nobody owns any"
            );
            let allowed = "\"none\", or parallel.zero_stage = 1, 2 or 3 with parallel.data_parallel_shard";
            self.refuse(&["parallel.quantize_gradients", "parallel.zero_stage"], what, allowed);
        }
        let precision = self.config.train.precision;
        if precision == Precision::F16 && quantize_feedback == Feedback::Kept {
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
