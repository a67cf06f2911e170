//! Translation of `fsdp_config`, and the shards and replicas that an FSDP strategy implies.

use serde_json::{Value, json};

use super::{Accelerate, Kind};
use crate::draft::Read;

/// Values of `fsdp_sharding_strategy`, which a file may also give by number, from 1.
const STRATEGIES: [&str; 5] =
    ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"];

/// The settings of `fsdp_config` that decide the sharding.
#[derive(Debug)]
pub(super) struct Fsdp {
    strategy: &'static str,
    keeps_weights: bool,
    why: String,
    wrap: Option<Value>,
}

impl Accelerate<'_> {
    /// Reads the settings of `fsdp_config`.
    pub(super) fn fsdp(&mut self) -> Fsdp {
        let key = |name: &str| format!("fsdp_config.fsdp_{name}");
        let version = self.fields.integer(&key("version")).map_or(1, |read| read.value);
        let given = self.fields.text(&key("sharding_strategy"));
        let reshard = self.fields.text(&key("reshard_after_forward"));
        let strategy_of = |read: &Read<String>| {
            let number =
                read.value.parse::<usize>().ok().and_then(|number| STRATEGIES.get(number.wrapping_sub(1)));
            number.or(STRATEGIES.iter().find(|word| read.value.eq_ignore_ascii_case(word))).copied()
        };
        let mut strategy = "FULL_SHARD";
        for read in given.iter().chain(reshard.iter().filter(|_| version < 2)) {
            match strategy_of(read) {
                Some(word) => strategy = word,
                None if ["true", "false"].contains(&read.value.to_ascii_lowercase().as_str()) => {}
                None => self.fields.refuse(&read.key, format!("is {}", read.shown), STRATEGIES.join(", ")),
            }
        }
        let flag = reshard.as_ref().and_then(|read| match read.value.to_ascii_lowercase().as_str() {
            "true" | "yes" | "on" => Some(true),
            "false" | "no" | "off" => Some(false),
            _ => None,
        });
        let keeps_weights = flag == Some(false) || matches!(strategy, "SHARD_GRAD_OP" | "HYBRID_SHARD_ZERO2");
        let why = match flag {
            Some(flag) => format!("fsdp_reshard_after_forward = {flag}"),
            None => strategy.to_owned(),
        };
        self.set("parallel.offload.optimizer", self.fields.if_on(&key("offload_params"), "cpu"));
        self.set("parallel.offload.parameters", self.fields.if_on(&key("offload_params"), "cpu"));
        self.set("parallel.recompute", self.fields.if_on(&key("activation_checkpointing"), "full"));
        Fsdp { strategy, keeps_weights, why, wrap: self.wrap() }
    }

    fn wrap(&self) -> Option<Value> {
        let least =
            self.fields.integer("fsdp_config.fsdp_min_num_params").map_or(100_000_000, |read| read.value);
        let policy = self.fields.text("fsdp_config.fsdp_auto_wrap_policy")?;
        match policy.value.to_ascii_uppercase().as_str() {
            "TRANSFORMER_BASED_WRAP" => None,
            "SIZE_BASED_WRAP" => Some(json!({ "min_parameters": least.max(1) })),
            "NO_WRAP" => Some(json!(["*"])),
            _ => {
                self.fields.refuse(
                    &policy.key,
                    format!("is {}", policy.shown),
                    "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP",
                );
                None
            }
        }
    }

    /// Sets the shards and replicas of an FSDP strategy.
    pub(super) fn shard(&mut self, fsdp: &Fsdp, ranks: Option<Read<u64>>, machines: u64) {
        if fsdp.strategy == "NO_SHARD" {
            if let Some(ranks) = ranks {
                self.replicas(ranks, Kind::Replicas);
            }
            return;
        }
        self.stage(fsdp);
        let Some(ranks) = ranks else { return };
        if !fsdp.strategy.starts_with("HYBRID") || machines == 1 {
            return self.shards(ranks);
        }
        if !ranks.value.is_multiple_of(machines) {
            return self.fields.refuse(
                "num_processes",
                format!("{} ranks are not the same number on {machines} machines", ranks.value),
                "a multiple",
            );
        }
        self.import.derived(
            "parallel.data_parallel_replicate",
            machines,
            "one hybrid shard group for each machine",
        );
        self.shards(ranks.map(|ranks| ranks / machines));
    }

    /// Sets the sizes of an explicit mesh; their product must be the number of ranks.
    pub(super) fn sizes(&mut self, fsdp: &Fsdp, replicate: Read<u64>, shard: Read<u64>, ranks: u64) {
        if replicate.value * shard.value != ranks {
            let what = format!(
                "{} x {} replicas and shards are not the {ranks} ranks that are left",
                replicate.value, shard.value
            );
            return self.fields.refuse("num_processes", what, "a product of the sizes of parallelism_config");
        }
        // FSDP shards over the context-parallel ranks as well.
        if shard.value > 1 || self.import.value("parallel.context_parallel").is_some() {
            self.stage(fsdp);
        }
        self.shards(shard);
        if replicate.value > 1 {
            self.user("parallel.data_parallel_replicate", replicate);
        }
    }

    /// Sets ZeRO stage 3, which matches FSDP.
    pub(super) fn stage(&mut self, fsdp: &Fsdp) {
        self.import.derived("parallel.zero_stage", 3, format!("FSDP, {}", fsdp.strategy));
        let reshard = if fsdp.keeps_weights { "never" } else { "always" };
        self.import.derived("parallel.reshard_after_forward", reshard, fsdp.why.clone());
        if let Some(wrap) = &fsdp.wrap {
            self.import.derived("parallel.wrap", wrap.clone(), "fsdp_auto_wrap_policy");
        }
    }
}
