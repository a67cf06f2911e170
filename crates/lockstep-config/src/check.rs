//! Rules between values of several keys, which no key can check alone.

use lockstep_data::Columns;
use lockstep_plan::Residence;

use crate::choices::{DataFormat, Precision, Rounding, StatePrecision};
use crate::ineffective_keys::{NoEffect, no_effect};
use crate::keys::{KEYS, MODEL_SOURCES, RunConfig};
use crate::plan_keys::{key_of, keys_of};
use crate::problem::Origin;
use crate::reader::Reader;
use crate::value::DataSource;

/// Most steps in one trace: a few hundred thousand spans are what a browser can show.
const MAX_TRACED_STEPS: u64 = 100;

/// The use that a configuration is read for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A run, which needs weights for fine-tuning.
    Run,
    /// Planning of a run, which needs no weights.
    Plan,
    /// An inference under a plan. It has no steps, so that rules about the batch do not apply; it checks its plan itself.
    Inference,
}

/// Adds a problem for each rule that `config` breaks. Rules that involve a refused value are skipped: the default in its place is
/// not what the user meant.
pub(crate) fn check(purpose: Purpose, config: &RunConfig, reader: &mut Reader<'_>) {
    let mut checker = Checker { purpose, config, reader };
    checker.idle();
    checker.model();
    checker.fine_tune();
    checker.data();
    checker.tokens();
    checker.guard();
    checker.optimizer();
    checker.schedule();
    checker.plan();
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

    /// Reports a broken rule at the first of `keys` that was set.
    fn refuse(&mut self, keys: &[&str], what: impl Into<String>, allowed: impl Into<String>) {
        if keys.iter().any(|key| self.reader.refused.contains(*key)) {
            return;
        }
        self.reader.problems.push(self.config.problem_at(keys, what, allowed));
    }

    /// Refuses keys that were set although nothing reads them in this combination. Exempt are keys of a plan, which sets every key,
    /// and keys of a file whose choice an argument overrides.
    fn idle(&mut self) {
        for key in KEYS.iter() {
            let Some(NoEffect { because, depends_on }) = no_effect(self.config, key.name) else { continue };
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
        let sources: Vec<&str> = MODEL_SOURCES.into_iter().filter(|key| self.given(key)).collect();
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
            let allowed = "with model.path = \"DIR\" and model.from_pretrained = true";
            self.refuse(&keys, "would keep random weights as they are", allowed);
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
        if data.format.is_of_samples() {
            self.samples();
            return;
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

    /// Checks the keys of samples; names of inputs and classes are checked with the model.
    fn samples(&mut self) {
        let data = &self.config.data;
        let format = format!("data.format = \"{}\"", data.format.word());
        if data.train.is_empty() {
            let allowed = "data.train = [...] with its files";
            self.refuse(&["data.format", "data.train"], "is given without data.train", allowed);
        }
        if data.train.iter().any(|source| matches!(source, DataSource::Weighted { .. })) {
            let what = format!("has an entry with a weight, and {format} reads one file after another");
            self.refuse(&["data.train"], what, "entries without a weight");
        }
        if matches!(data.format, DataFormat::Idx | DataFormat::ImageFolder) {
            for (key, paths) in [("data.train", data.train.len()), ("data.valid", data.valid.len())] {
                if paths > 1 {
                    let what = format!("has {paths} entries, and {format} reads one");
                    self.refuse(&[key], what, "one file or directory");
                }
            }
        }
        if data.format != DataFormat::Idx {
            return;
        }
        for (key, images, has_images, labels) in [
            ("data.labels", "data.train", !data.train.is_empty(), &data.labels),
            ("data.valid_labels", "data.valid", !data.valid.is_empty(), &data.valid_labels),
        ] {
            if has_images != labels.is_some() {
                let (given, missing) = if has_images { (images, key) } else { (key, images) };
                let what = format!("is given without {missing}");
                self.refuse(&[given, missing], what, "both: files of images and of their labels");
            }
        }
    }

    fn tokens(&mut self) {
        let train = &self.config.train;
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

    /// Reports the rules of plans that need neither the model nor the ranks.
    fn plan(&mut self) {
        if self.purpose == Purpose::Inference {
            return;
        }
        for problem in self.config.problems_of_plan_alone() {
            self.refuse(&keys_of(problem.fields()), problem.in_terms_of(key_of), "");
        }
        let rolls_back = self.config.rollback_after() > 0;
        if rolls_back && self.config.plan.residence.optimizer == Residence::Disk {
            let what =
                "a copy of the state in memory to go back to has no room where the state itself has none";
            let keys = ["train.rollback_after", "train.spike_factor", "parallel.offload.optimizer"];
            self.refuse(&keys, what, "train.rollback_after = 0, or parallel.offload.optimizer = \"none\"");
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
