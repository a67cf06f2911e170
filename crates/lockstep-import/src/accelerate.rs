//! Accelerate's `default_config.yaml`: ranks, precision, and one of FSDP, DeepSpeed and Megatron-LM.
//!
//! The file says how a script is started and split; model, data, batch and optimizer stand in the script, so they have
//! our defaults in the result.

use serde_json::{Value, json};

use crate::Options;
use crate::deepspeed;
use crate::document::{self, Syntax};
use crate::draft::{Import, Origin};
use crate::fields::{Field, Fields, Read};
use crate::problem::Problems;
use crate::table::{Row, idle, refused, to, to_but};

const LAUNCH: &str = "it belongs to the start of a run: `--nnodes`, `--node-rank`, `--rdzv-endpoint`";
const DEVICES: &str = "ranks run on the CPU's cores (`train.threads`)";
const COMPILED: &str = "programs are recorded and scheduled before the first step";
const ALWAYS: &str = "it is always so";
const ONE_FORMAT: &str =
    "a checkpoint is read under any plan, and `lockstep checkpoint export` writes model.safetensors";
const ELSEWHERE: &str = "it is for another kind of machine";
const ACCUMULATION: &str = "`train.global_batch`, `train.micro_batch` and the number of ranks decide it";

/// The keys, in the order of `accelerate config`.
pub(crate) static KEYS: &[Row] = &[
    refused(
        "compute_environment",
        "LOCAL_MACHINE",
        &["LOCAL_MACHINE"],
        "start the run on machines of your own, or by Slurm or Kubernetes; allowed: LOCAL_MACHINE",
    ),
    to_but(
        "distributed_type",
        "NO",
        "parallel.data_parallel_replicate, parallel.data_parallel_shard",
        "`NO` and `MULTI_*` are replicas, `FSDP` and `DEEPSPEED` shards",
    ),
    to_but(
        "num_processes",
        "-1",
        "parallel.data_parallel_replicate, parallel.data_parallel_shard",
        "all ranks, over all machines",
    ),
    to_but("num_machines", "1", "parallel.data_parallel_shard", "a hybrid shard group is a machine"),
    idle("machine_rank", "0", LAUNCH),
    idle("main_process_ip", "", LAUNCH),
    idle("main_process_port", "29500", LAUNCH),
    idle("rdzv_backend", "static", LAUNCH),
    idle("rdzv_conf", "", LAUNCH),
    idle("rdzv_id", "", LAUNCH),
    idle("max_restarts", "0", LAUNCH),
    idle("monitor_interval", "5", LAUNCH),
    idle("same_network", "true", LAUNCH),
    idle("main_training_function", "main", LAUNCH),
    idle("command_file", "", LAUNCH),
    idle("commands", "", LAUNCH),
    idle("mpirun_config.*", "", LAUNCH),
    to_but("mixed_precision", "no", "train.precision", "`no` is `f32`; `fp8` is refused"),
    idle("debug", "false", "shapes are checked, and a flight record is kept, in every run"),
    idle("gpu_ids", "all", DEVICES),
    idle("use_cpu", "false", DEVICES),
    idle("enable_cpu_affinity", "false", DEVICES),
    idle("num_cpu_threads_per_process", "", DEVICES),
    idle("downcast_bf16", "no", ELSEWHERE),
    idle("tpu_name", "", ELSEWHERE),
    idle("tpu_zone", "", ELSEWHERE),
    idle("tpu_env", "[]", ELSEWHERE),
    idle("tpu_use_cluster", "false", ELSEWHERE),
    idle("tpu_use_sudo", "false", ELSEWHERE),
    idle("tpu_vm", "", ELSEWHERE),
    idle("ipex_config.*", "", ELSEWHERE),
    idle("dynamo_backend", "no", COMPILED),
    idle("dynamo_config.*", "", COMPILED),
    idle("fp8_config.*", "", "`mixed_precision` is not fp8"),
    // FSDP.
    idle("fsdp_config", "", "it is empty"),
    to_but(
        "fsdp_config.fsdp_version",
        "1",
        "parallel.reshard_after_forward",
        "decides what `fsdp_reshard_after_forward` means",
    ),
    to_but(
        "fsdp_config.fsdp_sharding_strategy",
        "FULL_SHARD",
        "parallel.zero_stage, parallel.reshard_after_forward",
        "`SHARD_GRAD_OP` keeps gathered weights until the backward; `NO_SHARD` makes replicas; `HYBRID_*` shard within a machine",
    ),
    to("fsdp_config.fsdp_reshard_after_forward", "true", "parallel.reshard_after_forward"),
    to_but(
        "fsdp_config.fsdp_offload_params",
        "false",
        "parallel.offload.optimizer, parallel.offload.parameters",
        "`cpu`",
    ),
    to_but("fsdp_config.fsdp_activation_checkpointing", "false", "parallel.recompute", "`full`"),
    to_but(
        "fsdp_config.fsdp_auto_wrap_policy",
        "NO_WRAP",
        "parallel.wrap",
        "`TRANSFORMER_BASED_WRAP` is `block`",
    ),
    to("fsdp_config.fsdp_min_num_params", "1e8", "parallel.wrap"),
    idle(
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
        "",
        "the units are the embedding, each block and the head",
    ),
    idle("fsdp_config.fsdp_state_dict_type", "FULL_STATE_DICT", ONE_FORMAT),
    idle("fsdp_config.fsdp_backward_prefetch", "BACKWARD_PRE", ALWAYS),
    idle("fsdp_config.fsdp_backward_prefetch_policy", "BACKWARD_PRE", ALWAYS),
    idle("fsdp_config.fsdp_forward_prefetch", "false", ALWAYS),
    idle("fsdp_config.fsdp_use_orig_params", "true", ALWAYS),
    idle("fsdp_config.fsdp_sync_module_states", "true", ALWAYS),
    idle("fsdp_config.fsdp_cpu_ram_efficient_loading", "true", ALWAYS),
    refused("fsdp_config.fsdp_ignored_modules", "", &[], "every parameter is sharded; leave it out"),
    // Mesh.
    idle("parallelism_config", "", "it is empty"),
    to("parallelism_config.parallelism_config_dp_replicate_size", "1", "parallel.data_parallel_replicate"),
    to("parallelism_config.parallelism_config_dp_shard_size", "1", "parallel.data_parallel_shard"),
    to("parallelism_config.parallelism_config_tp_size", "1", "parallel.tensor_parallel"),
    to("parallelism_config.parallelism_config_cp_size", "1", "parallel.context_parallel"),
    idle("parallelism_config.parallelism_config_cp_backend", "torch", ALWAYS),
    to(
        "parallelism_config.parallelism_config_cp_comm_strategy",
        "allgather",
        "parallel.context_parallel_method",
    ),
    to_but(
        "parallelism_config.parallelism_config_sp_size",
        "1",
        "parallel.context_parallel",
        "Ulysses: `all_to_all`",
    ),
    idle("parallelism_config.parallelism_config_sp_backend", "deepspeed", ALWAYS),
    idle("parallelism_config.parallelism_config_sp_seq_length", "", "`train.seq_len` says it"),
    idle("parallelism_config.parallelism_config_sp_seq_length_is_variable", "", "`train.seq_len` says it"),
    idle("parallelism_config.parallelism_config_sp_attn_implementation", "", "there is one implementation"),
    // DeepSpeed.
    idle("deepspeed_config", "", "it is empty"),
    to_but(
        "deepspeed_config.deepspeed_config_file",
        "",
        "parallel.zero_stage",
        "its keys are those of a DeepSpeed configuration",
    ),
    to("deepspeed_config.zero_stage", "2", "parallel.zero_stage"),
    to_but(
        "deepspeed_config.offload_optimizer_device",
        "none",
        "parallel.offload.optimizer",
        "`nvme` is `disk`",
    ),
    to("deepspeed_config.offload_optimizer_nvme_path", "", "parallel.offload.dir"),
    to_but(
        "deepspeed_config.offload_param_device",
        "none",
        "parallel.offload.parameters",
        "`nvme` is `disk`",
    ),
    to("deepspeed_config.offload_param_nvme_path", "", "parallel.offload.dir"),
    to("deepspeed_config.gradient_clipping", "1.0", "train.max_grad_norm"),
    idle("deepspeed_config.gradient_accumulation_steps", "1", ACCUMULATION),
    idle("deepspeed_config.zero3_init_flag", "false", "weights are made sharded from the start"),
    idle("deepspeed_config.zero3_save_16bit_model", "false", ONE_FORMAT),
    idle(
        "deepspeed_config.deepspeed_moe_layer_cls_names",
        "",
        "experts follow from the model's configuration",
    ),
    idle("deepspeed_config.deepspeed_multinode_launcher", "pdsh", LAUNCH),
    idle("deepspeed_config.deepspeed_hostfile", "", LAUNCH),
    idle("deepspeed_config.deepspeed_inclusion_filter", "", LAUNCH),
    idle("deepspeed_config.deepspeed_exclusion_filter", "", LAUNCH),
    // Megatron-LM.
    idle("megatron_lm_config", "", "it is empty"),
    to("megatron_lm_config.megatron_lm_tp_degree", "1", "parallel.tensor_parallel"),
    to("megatron_lm_config.megatron_lm_pp_degree", "1", "parallel.pipeline_parallel"),
    to("megatron_lm_config.megatron_lm_context_parallel_size", "1", "parallel.context_parallel"),
    to("megatron_lm_config.megatron_lm_expert_model_parallel_size", "1", "parallel.expert_parallel"),
    to("megatron_lm_config.megatron_lm_expert_tensor_parallel_size", "", "parallel.expert_tensor_parallel"),
    idle("megatron_lm_config.megatron_lm_num_micro_batches", "1", ACCUMULATION),
    to("megatron_lm_config.megatron_lm_sequence_parallelism", "false", "parallel.sequence_parallel"),
    to_but(
        "megatron_lm_config.megatron_lm_recompute_activations",
        "false",
        "parallel.recompute",
        "`selective`",
    ),
    to("megatron_lm_config.megatron_lm_recompute_granularity", "", "parallel.recompute"),
    to_but(
        "megatron_lm_config.megatron_lm_use_distributed_optimizer",
        "false",
        "parallel.zero_stage",
        "stage 1",
    ),
    to("megatron_lm_config.megatron_lm_gradient_clipping", "1.0", "train.max_grad_norm"),
    idle("megatron_lm_config.*", "", "it is the script's, or the model's configuration has it"),
];

/// Values of `fsdp_sharding_strategy`, which may be given by number.
const STRATEGIES: [&str; 5] =
    ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"];

/// Translates the keys of a file; `open` reads `deepspeed_config_file`.
pub(crate) fn import(
    fields: Fields,
    options: Options,
    open: &dyn Fn(&str) -> Result<String, String>,
) -> Result<Import, Problems> {
    let import = Import { file: fields.file.clone(), tool: "Accelerate", ..Import::default() };
    let mut config = Accelerate { fields: &fields, options, import };
    config.precision();
    let kind = config.kind();
    let theirs = match kind {
        Some(Kind::DeepSpeed) => config.deepspeed(open)?,
        _ => {
            config.read_idle_deepspeed();
            None
        }
    };
    config.split(kind);
    let names_batch = config.import.value("train.global_batch").is_some();
    config.batch();
    let mut import = config.import;
    import.without_effect = fields.settle(&[KEYS]);
    for (because, keys) in theirs.into_iter().flatten() {
        import.without_effect.entry(because).or_default().extend(keys);
    }
    if !names_batch {
        import.remark("an Accelerate file names no model, data, batch or optimizer; these are the run's");
    }
    match fields.problems(import.tool) {
        problems if problems.is_empty() => Ok(import),
        problems => Err(Problems(problems)),
    }
}

/// Keys without effect, by the reason.
type Idle = std::collections::BTreeMap<&'static str, Vec<String>>;

/// How ranks are split.
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

    /// Ranks of the run: those that are asked for, else the file's.
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

    /// Translates `deepspeed_config`; keys of a DeepSpeed file without effect.
    fn deepspeed(&mut self, open: &dyn Fn(&str) -> Result<String, String>) -> Result<Option<Idle>, Problems> {
        let key = |name: &str| format!("deepspeed_config.{name}");
        if let Some(path) = self.fields.text(&key("deepspeed_config_file")) {
            self.read_idle_deepspeed();
            let text = match open(&path.value) {
                Ok(text) => text,
                Err(error) => {
                    self.fields.refuse(
                        &path.key,
                        format!("cannot read {}: {error}", path.shown),
                        "a file beside this one",
                    );
                    return Ok(None);
                }
            };
            for name in [
                "zero_stage",
                "gradient_accumulation_steps",
                "gradient_clipping",
                "offload_optimizer_device",
                "offload_param_device",
            ] {
                if self.fields.has(&key(name)) {
                    self.fields.refuse(
                        &key(name),
                        "is given, and deepspeed_config_file says it",
                        "one of the two",
                    );
                }
            }
            return self.deepspeed_file(&path.value, &text).map(Some);
        }
        let section = self.fields.section("deepspeed_config");
        let mut theirs = Fields::new(&self.fields.file, Vec::new());
        for (ours, name) in SECTION_KEYS {
            self.fields.mark(&key(ours));
            if let Some((_, field)) = section.iter().find(|(known, _)| known == ours) {
                theirs.insert(name, field.clone());
            }
        }
        if !theirs.has("zero_optimization.stage") {
            self.import.foreign_default("parallel.zero_stage", 2, "zero_stage of deepspeed_config");
            let node = document::Node::Scalar { text: "2".to_owned(), quoted: false };
            theirs.insert("zero_optimization.stage", Field { line: 0, node });
        }
        deepspeed::translate_section(&theirs, self.options, &mut self.import);
        for setting in &mut self.import.settings {
            rename_origin(&mut setting.origin);
        }
        for problem in theirs.problems("DeepSpeed") {
            let ours = SECTION_KEYS
                .iter()
                .find(|(_, name)| *name == problem.key)
                .map_or(problem.key.clone(), |(ours, _)| key(ours));
            self.fields.refuse(&ours, problem.what, problem.allowed);
        }
        Ok(None)
    }

    fn deepspeed_file(&mut self, file: &str, text: &str) -> Result<Idle, Problems> {
        let entries = document::read(text, file, Syntax::Json).map_err(|problem| Problems(vec![problem]))?;
        let mut theirs = Fields::new(file, entries);
        deepspeed::rename(&mut theirs);
        let ranks = self.ranks().map(|read| read.value as usize);
        let options = Options { ranks, ..self.options };
        deepspeed::translate(&theirs, options, &mut self.import);
        let idle = theirs.settle(&[deepspeed::KEYS]);
        match theirs.problems("DeepSpeed") {
            problems if problems.is_empty() => Ok(idle),
            problems => Err(Problems(problems)),
        }
    }

    /// Reads the keys of `deepspeed_config` that decide nothing here.
    fn read_idle_deepspeed(&mut self) {
        for (ours, _) in SECTION_KEYS {
            self.fields.mark(&format!("deepspeed_config.{ours}"));
        }
        self.fields.mark("deepspeed_config.deepspeed_config_file");
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

    /// A batch that all ranks can share, where our default is none.
    fn batch(&mut self) {
        const DEFAULT_BATCH: u64 = 32;
        let of = |key: &str| self.import.value(key).and_then(Value::as_u64).unwrap_or(1);
        let parts = of("parallel.data_parallel_replicate") * of("parallel.data_parallel_shard");
        if !DEFAULT_BATCH.is_multiple_of(parts) && self.import.value("train.global_batch").is_none() {
            let why = format!("8 sequences for each of {parts} ranks, for the file names none: set it");
            self.import.derived("train.global_batch", 8 * parts, why);
        }
    }

    /// Replicas, or shards of Megatron-LM's distributed optimizer.
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

    /// Shards and replicas of an FSDP strategy.
    fn shard(&mut self, fsdp: &Fsdp, ranks: Option<Read<u64>>, machines: u64) {
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

    /// Sizes of the mesh, which must be all ranks.
    fn sizes(&mut self, fsdp: &Fsdp, replicate: Read<u64>, shard: Read<u64>, ranks: u64) {
        if replicate.value * shard.value != ranks {
            let what = format!(
                "{} x {} replicas and shards are not the {ranks} ranks that are left",
                replicate.value, shard.value
            );
            return self.fields.refuse("num_processes", what, "a product of the sizes of parallelism_config");
        }
        // FSDP shards over the ranks of a sequence as well.
        if shard.value > 1 || self.import.value("parallel.context_parallel").is_some() {
            self.stage(fsdp);
        }
        self.shards(shard);
        if replicate.value > 1 {
            self.user("parallel.data_parallel_replicate", replicate);
        }
    }

    /// Everything is sharded, as FSDP does it.
    fn stage(&mut self, fsdp: &Fsdp) {
        self.import.derived("parallel.zero_stage", 3, format!("FSDP, {}", fsdp.strategy));
        let reshard = if fsdp.keeps_weights { "never" } else { "always" };
        self.import.derived("parallel.reshard_after_forward", reshard, fsdp.why.clone());
        if let Some(wrap) = &fsdp.wrap {
            self.import.derived("parallel.wrap", wrap.clone(), "fsdp_auto_wrap_policy");
        }
    }

    /// Reads `fsdp_config`.
    fn fsdp(&mut self) -> Fsdp {
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
        let offloads = self.fields.flag(&key("offload_params")).filter(|read| read.value);
        if let Some(read) = offloads {
            self.user("parallel.offload.optimizer", read.clone().map(|_| "cpu"));
            self.user("parallel.offload.parameters", read.map(|_| "cpu"));
        }
        if let Some(read) = self.fields.flag(&key("activation_checkpointing")).filter(|read| read.value) {
            self.user("parallel.recompute", read.map(|_| "full"));
        }
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

    /// Reads `parallelism_config`.
    fn mesh(&mut self) -> Mesh {
        let size = |name: &str| self.fields.integer(&format!("parallelism_config.parallelism_config_{name}"));
        let [replicate, shard, tensor, context, sequence] =
            ["dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"].map(size);
        let method = self.fields.text("parallelism_config.parallelism_config_cp_comm_strategy");
        let more = |read: &Option<Read<u64>>| read.as_ref().map_or(1, |read| read.value.max(1));
        let of_a_part = more(&tensor) * more(&context) * more(&sequence);
        if more(&context) > 1 && more(&sequence) > 1 {
            self.fields.refuse(
                "parallelism_config.parallelism_config_sp_size",
                "is given with cp_size; sequences are split in one way",
                "one of the two",
            );
        }
        if let Some(read) = tensor.filter(|read| read.value > 1) {
            self.user("parallel.tensor_parallel", read);
        }
        if let Some(read) = context.filter(|read| read.value > 1) {
            self.user("parallel.context_parallel", read);
            match method {
                Some(read) if read.value == "alltoall" => {
                    self.user("parallel.context_parallel_method", read.map(|_| "all_to_all"))
                }
                Some(read) => self.user("parallel.context_parallel_method", read.map(|_| "all_gather")),
                None => self.import.foreign_default(
                    "parallel.context_parallel_method",
                    "all_gather",
                    "cp_comm_strategy is allgather",
                ),
            }
        }
        if let Some(read) = sequence.filter(|read| read.value > 1) {
            self.user("parallel.context_parallel", read);
            self.import.derived(
                "parallel.context_parallel_method",
                "all_to_all",
                "sequence parallelism of DeepSpeed-Ulysses",
            );
        }
        let sizes = match (replicate, shard) {
            (None, None) => None,
            (replicate, shard) => {
                let one = |key: &str| Read { value: 1, key: key.to_owned(), line: 0, shown: "1".to_owned() };
                Some([replicate.unwrap_or(one("dp_replicate_size")), shard.unwrap_or(one("dp_shard_size"))])
            }
        };
        Mesh { sizes, of_a_part }
    }

    /// Reads `megatron_lm_config`; ranks that share each part of a batch.
    fn megatron(&mut self, is_used: bool) -> u64 {
        let key = |name: &str| format!("megatron_lm_config.megatron_lm_{name}");
        let degree = |name: &str| self.fields.integer(&key(name)).filter(|read| read.value > 1 && is_used);
        let [tensor, pipeline, context, expert, expert_tensor] = [
            "tp_degree",
            "pp_degree",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
        ]
        .map(degree);
        let flag = |name: &str| self.fields.flag(&key(name)).filter(|read| read.value && is_used);
        let [by_tokens, selective, sharded] =
            ["sequence_parallelism", "recompute_activations", "use_distributed_optimizer"].map(flag);
        let granularity = self.fields.text(&key("recompute_granularity")).filter(|_| is_used);
        let clipping = self.fields.number(&key("gradient_clipping")).filter(|_| is_used);
        let of_a_part = [&tensor, &pipeline, &context].into_iter().flatten().map(|read| read.value).product();
        let has_tensor = tensor.is_some();
        for (ours, read) in [
            ("parallel.tensor_parallel", tensor),
            ("parallel.pipeline_parallel", pipeline),
            ("parallel.context_parallel", context),
            ("parallel.expert_parallel", expert),
            ("parallel.expert_tensor_parallel", expert_tensor),
        ] {
            if let Some(read) = read {
                self.user(ours, read);
            }
        }
        if let Some(read) = by_tokens.filter(|_| has_tensor) {
            self.user("parallel.sequence_parallel", read);
        }
        if let Some(read) = sharded {
            self.user("parallel.zero_stage", read.map(|_| 1));
        }
        if let Some(read) = granularity.filter(|read| ["full", "selective"].contains(&read.value.as_str())) {
            self.user("parallel.recompute", read);
        } else if let Some(read) = selective {
            self.user("parallel.recompute", read.map(|_| "selective"));
        }
        if let Some(read) = clipping {
            self.user("train.max_grad_norm", read);
        }
        of_a_part
    }
}

/// What `fsdp_config` says.
#[derive(Debug)]
struct Fsdp {
    strategy: &'static str,
    keeps_weights: bool,
    why: String,
    wrap: Option<Value>,
}

/// What `parallelism_config` says.
#[derive(Debug)]
struct Mesh {
    /// Replicas and shards, if either is given.
    sizes: Option<[Read<u64>; 2]>,
    /// Ranks that share each part of a batch.
    of_a_part: u64,
}

/// Keys of `deepspeed_config` and those of a DeepSpeed file.
const SECTION_KEYS: [(&str, &str); 6] = [
    ("zero_stage", "zero_optimization.stage"),
    ("offload_optimizer_device", "zero_optimization.offload_optimizer.device"),
    ("offload_optimizer_nvme_path", "zero_optimization.offload_optimizer.nvme_path"),
    ("offload_param_device", "zero_optimization.offload_param.device"),
    ("offload_param_nvme_path", "zero_optimization.offload_param.nvme_path"),
    ("gradient_clipping", "gradient_clipping"),
];

/// Has a value of `deepspeed_config` come from the key that stands in the file.
fn rename_origin(origin: &mut Origin) {
    if let Origin::File { key, .. } = origin
        && let Some((ours, _)) = SECTION_KEYS.iter().find(|(_, theirs)| theirs == key)
    {
        *key = format!("deepspeed_config.{ours}");
    }
}
