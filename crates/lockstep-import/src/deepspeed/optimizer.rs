//! Translation of DeepSpeed's optimizer and learning-rate schedule.

use serde_json::json;

use super::DeepSpeed;
use crate::draft::Read;
use crate::fields::Fields;
use crate::options::AutoValues;

/// DeepSpeed's default learning rate.
const LEARNING_RATE: f64 = 1e-3;
/// The Trainer's default learning rate.
const TRAINER_LEARNING_RATE: f64 = 5e-5;

/// Returns our name of an optimizer, and its parameters besides the learning rate and weight decay; `None` for an unsupported one.
fn rule_of(kind: &str) -> Option<(&'static str, &'static [&'static str])> {
    Some(match kind.to_ascii_lowercase().as_str() {
        "adam" | "adamw" | "fusedadam" | "deepspeedcpuadam" => ("adamw", &["betas", "eps"]),
        "sgd" => ("sgd", &["momentum"]),
        "lion" | "fusedlion" => ("lion", &["betas"]),
        "muon" => ("muon", &["betas", "eps", "momentum", "muon_lr", "adam_lr"]),
        _ => return None,
    })
}

/// Settings of `optimizer.params`.
struct Params {
    lr: Option<Read<f64>>,
    betas: Option<Read<[f64; 2]>>,
    eps: Option<Read<f64>>,
    weight_decay: Option<Read<f64>>,
    momentum: Option<Read<f64>>,
    muon_lr: Option<Read<f64>>,
    adam_lr: Option<Read<f64>>,
}

impl DeepSpeed<'_, '_> {
    /// Returns true if the file names a supported optimizer, or none.
    pub(super) fn knows_optimizer(fields: &Fields) -> bool {
        fields.text("optimizer.type").is_none_or(|kind| rule_of(&kind.value).is_some())
    }

    pub(super) fn clipping(&mut self) {
        let clipping = self.fields.number("gradient_clipping");
        self.given("train.max_grad_norm", "gradient_clipping", clipping, 1.0);
    }

    pub(super) fn optimizer(&mut self) {
        let number = |name: &str| self.fields.number(&format!("optimizer.params.{name}"));
        let params = Params {
            lr: number("lr"),
            betas: self.fields.pair("optimizer.params.betas"),
            eps: number("eps"),
            weight_decay: number("weight_decay"),
            momentum: number("momentum"),
            muon_lr: number("muon_lr"),
            adam_lr: number("adam_lr"),
        };
        let kind = self.fields.text("optimizer.type");
        let peak = self.schedule(kind.is_some());
        match kind {
            Some(kind) => self.rule(kind, params, peak),
            None if self.fields.has("optimizer") => {
                self.fields.refuse(
                    "optimizer.params.lr",
                    "optimizer has no type",
                    "optimizer.type = \"AdamW\"",
                );
            }
            None => {
                self.set("optimizer.lr", peak);
                self.import.remark("the file names no optimizer; [optimizer] is the run's");
            }
        }
    }

    /// Sets the optimizer that the file names.
    fn rule(&mut self, kind: Read<String>, params: Params, peak: Option<Read<f64>>) {
        let Params { lr, betas, eps, weight_decay, momentum, muon_lr, adam_lr } = params;
        let Some((word, knows)) = rule_of(&kind.value) else {
            let is_compressed = ["onebitadam", "zerooneadam", "onebitlamb"]
                .contains(&kind.value.to_ascii_lowercase().as_str());
            return if is_compressed {
                let what = format!("is {}, whose compressed communication is not available", kind.shown);
                let allowed =
                    "AdamW, with zero_optimization.zero_quantized_gradients = true for compressed gradients";
                self.fields.refuse(&kind.key, what, allowed);
            } else {
                let what = format!("is {}, which is not available", kind.shown);
                self.fields.refuse(&kind.key, what, "Adam, AdamW, SGD, Lion or Muon");
            };
        };
        for (name, is_given) in [
            ("betas", betas.is_some()),
            ("eps", eps.is_some()),
            ("momentum", momentum.is_some()),
            ("muon_lr", muon_lr.is_some()),
            ("adam_lr", adam_lr.is_some()),
        ] {
            if is_given && !knows.contains(&name) {
                self.fields.refuse(
                    &format!("optimizer.params.{name}"),
                    format!("{} has none", kind.value),
                    "leave it out",
                );
            }
        }
        let rate = muon_lr.clone().or(lr.clone());
        self.user("optimizer.kind", kind.map(|_| word));
        match peak.or(rate) {
            Some(read) => self.user("optimizer.lr", read),
            None => self.open_rate(),
        }
        self.set("optimizer.adam_lr", adam_lr.or(lr.filter(|_| muon_lr.is_some())));
        self.decay_rates(word, betas, eps);
        if !self.given("optimizer.weight_decay", "optimizer.params.weight_decay", weight_decay, 0.0) {
            self.import.foreign_default(
                "optimizer.weight_decay",
                0.0,
                "optimizers decay nothing unless told to",
            );
        }
        match momentum {
            Some(read) => self.user("optimizer.momentum", read),
            None if word == "sgd" => {
                self.import.foreign_default("optimizer.momentum", 0.0, "SGD has no momentum unless told to")
            }
            None => {}
        }
        if word == "muon" {
            self.import.foreign_default("optimizer.muon_scale", "original", "Muon's own scale");
        }
    }

    fn decay_rates(&mut self, word: &str, betas: Option<Read<[f64; 2]>>, eps: Option<Read<f64>>) {
        let usual = json!([0.9, 0.999]);
        let betas = betas.map(|read| read.map(|pair| json!(pair)));
        if !self.given("optimizer.betas", "optimizer.params.betas", betas, usual.clone())
            && matches!(word, "adamw" | "muon")
        {
            self.import.foreign_default("optimizer.betas", usual, "betas of Adam");
        }
        self.given("optimizer.eps", "optimizer.params.eps", eps, 1e-8);
    }

    /// Sets the learning rate of an optimizer for which the file gives none.
    fn open_rate(&mut self) {
        let auto = self.fields.autos(&[
            "optimizer.params.lr",
            "optimizer.params.muon_lr",
            "scheduler.params.warmup_max_lr",
        ]);
        match (auto.is_empty(), self.options.auto) {
            (false, AutoValues::TrainerDefaults) => {
                self.import.trainer(&self.fields.file, "optimizer.lr", TRAINER_LEARNING_RATE, auto);
            }
            (false, AutoValues::OfTheRun) => {}
            (true, _) => {
                self.import.foreign_default("optimizer.lr", LEARNING_RATE, "an optimizer without lr")
            }
        }
    }

    /// Sets the learning-rate schedule; returns the peak learning rate if the scheduler gives one.
    fn schedule(&mut self, has_optimizer: bool) -> Option<Read<f64>> {
        let key = |name: &str| format!("scheduler.params.{name}");
        let lows = ["warmup_min_lr", "warmup_min_ratio"].map(|name| self.fields.number(&key(name)));
        for (low, _) in self.fields.autos(&[&key("warmup_min_lr"), &key("warmup_min_ratio")]) {
            self.import.idle("a warm-up begins at 0", format!("{low} = \"auto\""));
        }
        let peak = self.fields.number(&key("warmup_max_lr"));
        let warmup = self.fields.integer(&key("warmup_num_steps"));
        let shape = self.fields.text(&key("warmup_type"));
        let total = self.fields.integer(&key("total_num_steps"));
        let floor = self.fields.number(&key("cos_min_ratio"));
        let Some(kind) = self.fields.text("scheduler.type") else {
            if self.fields.has("scheduler") {
                self.fields.refuse(
                    &key("warmup_num_steps"),
                    "scheduler has no type",
                    "scheduler.type = \"WarmupDecayLR\"",
                );
            } else if has_optimizer {
                self.no_scheduler();
            }
            return None;
        };
        let word = match kind.value.as_str() {
            "WarmupLR" => "constant",
            "WarmupDecayLR" => "linear",
            "WarmupCosineLR" => "cosine",
            _ => {
                let what = format!("is {}, which is not available", kind.shown);
                self.fields.refuse(&kind.key, what, "WarmupLR, WarmupDecayLR or WarmupCosineLR");
                return None;
            }
        };
        for low in lows.into_iter().flatten().filter(|read| read.value != 0.0) {
            self.fields.refuse(&low.key, format!("is {}, and a warm-up here begins at 0", low.shown), "0");
        }
        self.user("schedule.kind", kind.map(|_| word));
        self.warmup(warmup, shape);
        match (word, floor) {
            ("linear", _) => {
                self.import.foreign_default("schedule.min_lr_ratio", 0.0, "WarmupDecayLR ends at 0")
            }
            ("cosine", Some(read)) => self.user("schedule.min_lr_ratio", read),
            ("cosine", None) => self.import.foreign_default("schedule.min_lr_ratio", 1e-4, "cos_min_ratio"),
            _ => {}
        }
        self.set("train.steps", total);
        self.enough_steps();
        peak
    }

    fn warmup(&mut self, warmup: Option<Read<u64>>, shape: Option<Read<String>>) {
        let key = "scheduler.params.warmup_num_steps";
        let is_none = warmup.as_ref().is_some_and(|read| read.value == 0)
            || (warmup.is_none() && self.fields.is_auto(key));
        if !self.given("schedule.warmup_steps", key, warmup, 0) {
            self.import.foreign_default("schedule.warmup_steps", 1000, "warmup_num_steps");
        }
        if !is_none && shape.is_none_or(|read| read.value != "linear") {
            self.import.remark(
                "the warm-up is linear here; warmup_type = \"log\", DeepSpeed's default, rises faster",
            );
        }
    }

    /// Sets the number of steps if the file gives none and the default is shorter than the warm-up.
    fn enough_steps(&mut self) {
        let warmup =
            self.import.value("schedule.warmup_steps").and_then(serde_json::Value::as_u64).unwrap_or(0);
        if warmup > 1000 && self.import.value("train.steps").is_none() {
            let why = "ten times the warm-up, for the file names no length: set it";
            self.import.derived("train.steps", warmup.saturating_mul(10), why);
        }
    }

    /// Sets the schedule of a file without a scheduler: the Trainer's default for a file with `"auto"`, else constant
    /// as in DeepSpeed.
    fn no_scheduler(&mut self) {
        match (self.fields.has_auto(), self.options.auto) {
            (true, AutoValues::OfTheRun) => {}
            (true, AutoValues::TrainerDefaults) => {
                let whose = "a file with \"auto\" is the Trainer's, whose schedule is linear to 0";
                self.import.foreign_default("schedule.kind", "linear", whose);
                self.import.foreign_default("schedule.warmup_steps", 0, whose);
                self.import.foreign_default("schedule.min_lr_ratio", 0.0, whose);
            }
            (false, _) => {
                let whose = "without a scheduler the learning rate is constant";
                self.import.foreign_default("schedule.kind", "constant", whose);
                self.import.foreign_default("schedule.warmup_steps", 0, whose);
            }
        }
    }
}
