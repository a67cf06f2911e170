//! Random plans: any degrees of up to eight ranks, any ZeRO stage, any expert parallelism, schedule, stage split and
//! recomputation.
//!
//! A plan is a list of settings of a run, so that `lockstep verify` reproduces a failure. Plans that do not fit their
//! model are not drawn.

use lockstep_config::RunConfig;
use lockstep_config::plan::check;
use lockstep_plan::schedule::Kind;
use proptest::prelude::*;
use proptest::sample::select;

use crate::parity::{GPT_OSS, MIXTURES, MODELS, TinyModel, UNITS};

/// Maximum number of ranks in a plan.
const MOST_RANKS: usize = 8;

/// Upper bound on the padded parameter count of a unit in any of the models.
const LARGEST_UNIT: usize = 60_000;

/// Model with the settings of a plan for it.
#[derive(Debug, Clone)]
pub struct RandomPlan {
    /// Model that the plan is for.
    pub model: TinyModel,
    /// Settings besides the model: keys of `[parallel]`, and the batch sizes.
    pub settings: Vec<String>,
}

/// Returns a strategy for plans on two or more ranks that fit their models. `config` builds a run from a model and
/// settings.
pub fn random_plans(
    config: impl Fn(TinyModel, &[&str]) -> Option<RunConfig>,
) -> impl Strategy<Value = RandomPlan> {
    let models: Vec<_> = MODELS.into_iter().chain(MIXTURES).collect();
    let degrees = (degree(), degree(), degree(), degree());
    let layout = select(vec!["1d", "2d"]);
    let experts = (select(vec![1_usize, 2]), select(vec![1_usize, 2, 4]), select(vec![1_usize, 2]));
    let method = select(vec!["ring", "all_gather", "all_to_all"]);
    let pipeline = (select(Kind::ALL.to_vec()), 1..=3_usize, any::<bool>(), select_stages());
    let batch = (select(vec![1_usize, 2]), select(vec![4_usize, 8]));
    let by_layer = "{ default = \"selective\", layers = [{ every = 2, mode = \"full\" }, { from = 3, mode = \"none\" }] }";
    // `None`: the default limit, which is two gathered units. Otherwise the largest unit and this many more parameters.
    let live = (select(vec!["always", "auto", "never"]), select(vec![None, Some(0_usize), Some(10_000)]));
    let wrap = select(vec!["block", "{ min_parameters = 40000 }", "[\"model.layers.*\"]"]);
    let weights = (live, wrap);
    let recompute =
        (select(vec!["none", "selective", "full", by_layer]), 0..=3_usize, weights, any::<bool>());
    let rows = (any::<bool>(), layout, 1..=4_usize);
    (select(models), degrees, rows, method, experts, pipeline, batch, recompute)
        .prop_map(|(model, degrees, rows, method, experts, stages, batch, recompute)| {
            let (replicate, tensor, context, pipeline) = degrees;
            let (by_tokens, layout, tensor_chunks) = rows;
            let (kind, chunks, given, cuts) = stages;
            let (micro_batch, global_batch) = batch;
            let (recompute, zero_stage, ((reshard, more_live), wrap), slices) = recompute;
            let is_square = tensor == 4 && layout == "2d" && !MIXTURES.contains(&model);
            let mut settings = vec![
                format!("parallel.data_parallel_replicate={replicate}"),
                format!("parallel.tensor_parallel={tensor}"),
                format!("parallel.sequence_parallel={}", by_tokens && tensor > 1 && !is_square),
                format!("parallel.context_parallel={context}"),
                format!("parallel.pipeline_parallel={pipeline}"),
                format!("parallel.recompute={recompute}"),
                format!("train.micro_batch={micro_batch}"),
                format!("train.global_batch={global_batch}"),
            ];
            if tensor > 1 && !is_square && !by_tokens && recompute.contains("full") {
                settings.push(format!("parallel.partition_activations={slices}"));
            }
            if tensor > 1 && !is_square {
                settings.push(format!("parallel.tensor_chunks={tensor_chunks}"));
            }
            let shard = experts.0;
            settings.push(format!("parallel.data_parallel_shard={shard}"));
            if shard * context > 1 {
                settings.extend(sharding(zero_stage, shard * context, reshard, more_live, wrap));
            }
            if MIXTURES.contains(&model) {
                let (_, expert, parts) = experts;
                // Experts with biases have no parts.
                let parts = if model == GPT_OSS { 1 } else { parts };
                settings.push(format!("parallel.expert_parallel={expert}"));
                settings.push(format!("parallel.expert_tensor_parallel={parts}"));
            }
            if is_square {
                settings.push("parallel.tensor_layout=2d".to_owned());
            }
            if context > 1 {
                settings.push(format!("parallel.context_parallel_method={method}"));
            }
            if pipeline > 1 {
                let (least, most) = kind.chunks();
                let chunks = chunks.clamp(least, most);
                settings.push(format!("parallel.pipeline_schedule={}", kind.name()));
                settings.push(format!("parallel.virtual_stages={chunks}"));
                if given && pipeline * chunks <= UNITS {
                    let stages = stages_of(&cuts, pipeline * chunks);
                    settings.push(format!("parallel.pipeline_stages={stages:?}"));
                }
            }
            RandomPlan { model, settings }
        })
        .prop_filter("fits", move |plan| {
            let settings: Vec<&str> = plan.settings.iter().map(String::as_str).collect();
            config(plan.model, &settings)
                .is_some_and(|config| (2..=MOST_RANKS).contains(&config.ranks()) && check(&config).is_ok())
        })
}

/// Returns the settings of a ZeRO stage over `owners` ranks.
fn sharding(
    zero_stage: usize,
    owners: usize,
    reshard: &str,
    more_live: Option<usize>,
    wrap: &str,
) -> Vec<String> {
    let mut settings = vec![format!("parallel.zero_stage={zero_stage}")];
    if zero_stage > 0 {
        settings.push(format!("parallel.wrap={wrap}"));
    }
    if zero_stage == 3 {
        settings.push(format!("parallel.reshard_after_forward={reshard}"));
        if owners == 4 && reshard == "always" {
            settings.push("parallel.secondary_shard=2".to_owned());
        }
        if let Some(more) = more_live.filter(|_| reshard != "never" && wrap == "block") {
            settings.push(format!("parallel.max_live_parameters={}", LARGEST_UNIT + more));
        }
    }
    settings
}

/// Small degrees come first, so that a failure shrinks to few ranks.
fn degree() -> impl Strategy<Value = usize> {
    select(vec![1_usize, 2, 4, 8])
}

/// Returns a strategy for a random order of the boundaries between units. A split takes its cuts from the front.
fn select_stages() -> impl Strategy<Value = Vec<usize>> {
    Just((1..UNITS).collect::<Vec<_>>()).prop_shuffle()
}

/// Returns the number of units in each of `stages` stages, cut at the first boundaries of `order`.
fn stages_of(order: &[usize], stages: usize) -> Vec<usize> {
    let mut cuts = order[..stages - 1].to_vec();
    cuts.extend([0, UNITS]);
    cuts.sort_unstable();
    cuts.windows(2).map(|pair| pair[1] - pair[0]).collect()
}
