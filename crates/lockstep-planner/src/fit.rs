//! Checks before allocation that the ranks of a machine fit its memory together; if not, finds the smallest change to the run with
//! which they would.
//!
//! Only memory that a step writes in any case counts as needed. Reserves that may stay unused get pages only on first write, so no
//! run is refused that would have worked.

use std::ops::Range;

use lockstep_config::plan::check;
use lockstep_config::{
    OptimizerKind, Precision, ResolvedModel, RunConfig, StatePrecision, recompute_setting,
};
use lockstep_plan::{MemoryBytes, Plan, Recompute, Residence, Residences};
use lockstep_tensor::host::takable_memory_bytes;

pub use crate::shortage::{Change, MemoryShortage};
use crate::{Error, Forecast};

/// Refuses a run whose ranks `ranks` on this machine need more memory than is available.
///
/// # Errors
/// [`Error::DoesNotFit`] if they do; another error if the configuration does not fit its model.
pub fn require(config: &RunConfig, model: &ResolvedModel, ranks: Range<usize>) -> Result<(), Error> {
    match takable_memory_bytes() {
        Some(available_bytes) => require_within(config, model, ranks, available_bytes),
        None => Ok(()),
    }
}

/// As [`require`], with a given amount of available memory.
///
/// # Errors
/// As [`require`].
pub fn require_within(
    config: &RunConfig,
    model: &ResolvedModel,
    ranks: Range<usize>,
    available_bytes: u64,
) -> Result<(), Error> {
    let forecast = Forecast::of(config, model)?;
    let predict_step = |config: &RunConfig| Forecast::of(config, &check(config)?.1);
    require_forecast(&forecast, ranks, available_bytes, |fits| changed(config, false, &predict_step, fits))
}

/// As [`require`], with the memory of the ranks already predicted; `search` looks for a remedy.
fn require_forecast(
    forecast: &Forecast,
    ranks: Range<usize>,
    available_bytes: u64,
    search: impl FnOnce(&dyn Fn(&Forecast) -> (usize, bool)) -> Found,
) -> Result<(), Error> {
    let ranks = ranks.start.min(forecast.ranks())..ranks.end.min(forecast.ranks());
    let needed = needed(forecast, ranks.clone());
    if needed.total() as u64 <= available_bytes {
        return Ok(());
    }
    let of_rank = |rank: usize| (rank, forecast.of_rank(rank).touched().total());
    let largest = ranks.clone().map(of_rank).rev().max_by_key(|(_, bytes)| *bytes).unwrap_or_default();
    let fits = |other: &Forecast| {
        // The ranks of this machine stay the same, although a changed plan may need more machines.
        let bytes = self::needed(other, ranks.clone()).total();
        (bytes, bytes as u64 <= available_bytes)
    };
    let Found { remedy, least } = search(&fits);
    Err(Error::DoesNotFit(Box::new(MemoryShortage {
        needed,
        available_bytes,
        ranks,
        largest,
        remedy,
        least,
    })))
}

/// As [`require`], for the steps of a benchmark; `predict_step` predicts their memory under a configuration. Batch and precision are
/// the benchmark's own, so no remedy changes them.
///
/// # Errors
/// [`Error::DoesNotFit`] if the steps do not fit; the error of `predict_step` for `config` itself.
pub fn require_for_benchmark(
    config: &RunConfig,
    predict_step: &dyn Fn(&RunConfig) -> Result<Forecast, Error>,
) -> Result<(), Error> {
    match takable_memory_bytes() {
        Some(available_bytes) => require_for_benchmark_within(config, predict_step, available_bytes),
        None => Ok(()),
    }
}

/// As [`require_for_benchmark`], with a given amount of available memory.
///
/// # Errors
/// As [`require_for_benchmark`].
fn require_for_benchmark_within(
    config: &RunConfig,
    predict_step: &dyn Fn(&RunConfig) -> Result<Forecast, Error>,
    available_bytes: u64,
) -> Result<(), Error> {
    let forecast = predict_step(config)?;
    let ranks = 0..forecast.ranks();
    require_forecast(&forecast, ranks, available_bytes, |fits| changed(config, true, predict_step, fits))
}

/// Returns the bytes of memory that are available to a run, swap included; `None` if the system does not report them.
pub fn available_bytes() -> Option<u64> {
    takable_memory_bytes()
}

/// Returns the memory that some ranks need together.
pub fn needed(forecast: &Forecast, ranks: Range<usize>) -> MemoryBytes {
    ranks.map(|rank| forecast.of_rank(rank).touched()).sum()
}

/// The result of a search for a remedy.
#[derive(Debug, Default)]
struct Found {
    remedy: Option<Change>,
    least: Option<Change>,
}

/// A change of one setting or of a few that belong together; returns false if it does not apply.
type Step = fn(&mut RunConfig, &mut Vec<String>) -> bool;

/// The changes, cheapest first, each with true if it applies to benchmarks too, whose batch and precision are fixed. All but the last
/// two leave the results the same up to rounding.
const STEPS: [(Step, bool); 15] = [
    (|config, settings| zero(config, settings, 1), true),
    (|config, settings| recompute(config, settings, Recompute::Selective), true),
    (|config, settings| zero(config, settings, 2), true),
    (|config, settings| halve_micro_batch(config, settings, 1), false),
    (|config, settings| recompute(config, settings, Recompute::Full), true),
    (|config, settings| halve_micro_batch(config, settings, 2), false),
    (|config, settings| zero(config, settings, 3), true),
    (|config, settings| halve_micro_batch(config, settings, usize::MAX), false),
    (no_copies, false),
    (offload_state, true),
    (offload_gradients, true),
    (offload_parameters, true),
    (offload_activations, true),
    (narrow_state, true),
    (narrow_weights, false),
];

/// Returns the first change that fits, alone or, if none does alone, together with all before it.
fn changed(
    config: &RunConfig,
    is_benchmark: bool,
    predict_step: &dyn Fn(&RunConfig) -> Result<Forecast, Error>,
    fits: &dyn Fn(&Forecast) -> (usize, bool),
) -> Found {
    let applicable = STEPS.into_iter().filter(|(_, is_for_benchmarks)| *is_for_benchmarks || !is_benchmark);
    let changes: Vec<Step> = applicable.map(|(step, _)| step).collect();
    let tried = |steps: &[Step]| -> Option<(Change, bool)> {
        let (mut changed, mut settings) = (config.clone(), Vec::new());
        let mut applies = false;
        for step in steps {
            applies |= step(&mut changed, &mut settings);
        }
        if !applies {
            return None;
        }
        // A changed plan that does not fit its model is no remedy.
        let needed = |run: &RunConfig| Some(fits(&predict_step(run).ok()?));
        let (mut needed_bytes, is_enough) = needed(&changed)?;
        if is_enough && is_state_moved(config, &changed) {
            let within = |share: f64| {
                let mut run = changed.clone();
                run.plan.residence.fraction = share;
                needed(&run).filter(|(_, is_enough)| *is_enough).map(|(bytes, _)| bytes)
            };
            if let Some((share, bytes)) = least_share(within) {
                needed_bytes = bytes;
                settings.push(format!("parallel.offload.fraction={share}"));
            }
        }
        Some((Change { settings: last_of_each(settings), needed_bytes }, is_enough))
    };
    for step in &changes {
        if let Some((change, true)) = tried(std::slice::from_ref(step)) {
            return Found { remedy: Some(change), least: None };
        }
    }
    let mut least: Option<Change> = None;
    for count in 2..=changes.len() {
        let Some((change, is_enough)) = tried(&changes[..count]) else { continue };
        if is_enough {
            return Found { remedy: Some(change), least: None };
        }
        if least.as_ref().is_none_or(|least| change.needed_bytes < least.needed_bytes) {
            least = Some(change);
        }
    }
    Found { remedy: None, least }
}

/// Returns true if a change has offloaded optimizer state to disk.
fn is_state_moved(from: &RunConfig, to: &RunConfig) -> bool {
    from.plan.residence.optimizer != Residence::Disk && to.plan.residence.optimizer == Residence::Disk
}

/// Returns the smallest fraction of the state, in sixteenths, that has to be on disk, and the bytes needed then; `None` if it is
/// all. `within` returns the bytes of a fraction that fits; a larger fraction fits as well.
fn least_share(within: impl Fn(f64) -> Option<usize>) -> Option<(f64, usize)> {
    const PARTS: u32 = 16;
    let share = |parts: u32| f64::from(parts) / f64::from(PARTS);
    let (mut too_little, mut enough) = (0, (PARTS, None));
    while enough.0 - too_little > 1 {
        let parts = too_little.midpoint(enough.0);
        match within(share(parts)) {
            Some(bytes) => enough = (parts, Some(bytes)),
            None => too_little = parts,
        }
    }
    Some((share(enough.0), enough.1?))
}

/// Keeps the last value of each key.
fn last_of_each(settings: Vec<String>) -> Vec<String> {
    let key = |setting: &String| setting.split('=').next().map(str::to_owned);
    let is_last = |(index, setting): &(usize, &String)| {
        settings[index + 1..].iter().all(|later| key(later) != key(setting))
    };
    settings.iter().enumerate().filter(is_last).map(|(_, setting)| setting.clone()).collect()
}

/// Raises every layer to at least the recompute mode `least`.
fn recompute(config: &mut RunConfig, settings: &mut Vec<String>, least: Recompute) -> bool {
    let more = config.plan.recompute.at_least(least);
    if let Some(rules) = more {
        config.plan.recompute = rules;
        settings.push(recompute_setting(&rules));
    }
    more.is_some()
}

/// Shards the model state over all data-parallel ranks, at least by ZeRO stage `stage`.
fn zero(config: &mut RunConfig, settings: &mut Vec<String>, stage: u8) -> bool {
    let plan = &mut config.plan;
    let ranks = plan.mesh.replicate * plan.mesh.shard;
    let is_shared_already = plan.zero_stage >= stage && plan.mesh.replicate == 1;
    let needs_whole_matrices = config.optimizer.kind == OptimizerKind::Muon;
    if ranks * plan.mesh.context == 1 || is_shared_already || needs_whole_matrices {
        return false;
    }
    if plan.mesh.replicate > 1 {
        (plan.mesh.replicate, plan.mesh.shard) = (1, ranks);
        settings.push("parallel.data_parallel_replicate=1".to_owned());
        settings.push(format!("parallel.data_parallel_shard={ranks}"));
    }
    plan.zero_stage = stage.max(plan.zero_stage);
    settings.push(format!("parallel.zero_stage={}", plan.zero_stage));
    true
}

fn halve_micro_batch(config: &mut RunConfig, settings: &mut Vec<String>, times: usize) -> bool {
    let before = config.micro_batch();
    let mut micro_batch = before;
    for _ in 0..times {
        if micro_batch == 1 || !micro_batch.is_multiple_of(2) {
            break;
        }
        micro_batch /= 2;
    }
    let is_less = micro_batch < before;
    if is_less {
        config.plan.micro_batch = Some(micro_batch);
        settings.push(format!("train.micro_batch={micro_batch}"));
    }
    is_less
}

/// Keeps no copy of the state for rollbacks.
fn no_copies(config: &mut RunConfig, settings: &mut Vec<String>) -> bool {
    let keeps = config.rollback_after() > 0;
    if keeps {
        config.train.rollback_after = Some(0);
        settings.push("train.rollback_after=0".to_owned());
    }
    keeps
}

/// Offloads a kind of state to disk; returns false if it is there.
fn offload(
    config: &mut RunConfig,
    settings: &mut Vec<String>,
    kind: &str,
    residence: fn(&mut Residences) -> &mut Residence,
) -> bool {
    let before = std::mem::replace(residence(&mut config.plan.residence), Residence::Disk);
    if before != Residence::Disk {
        settings.push(format!("parallel.offload.{kind}=disk"));
    }
    before != Residence::Disk
}

/// Offloads the optimizer state to disk.
fn offload_state(config: &mut RunConfig, settings: &mut Vec<String>) -> bool {
    config.optimizer.kind != OptimizerKind::Muon
        && config.rollback_after() == 0
        && offload(config, settings, "optimizer", |residences| &mut residences.optimizer)
}

/// Returns true if the optimizer state is on disk or could be offloaded there.
fn has_state_on_disk(config: &mut RunConfig, settings: &mut Vec<String>) -> bool {
    config.plan.residence.optimizer == Residence::Disk || offload_state(config, settings)
}

/// Offloads gradients to disk, which requires the optimizer state there.
fn offload_gradients(config: &mut RunConfig, settings: &mut Vec<String>) -> bool {
    let Plan { mesh, zero_stage, residence, .. } = &config.plan;
    let has_summands = mesh.replicate * mesh.shard * mesh.context > 1;
    let are_kept_by_all = has_summands && (*zero_stage < 2 || mesh.replicate > 1);
    let may_move = !are_kept_by_all && residence.gradients != Residence::Disk;
    may_move
        && has_state_on_disk(config, settings)
        && offload(config, settings, "gradients", |residences| &mut residences.gradients)
}

/// Offloads the weights that kernels read to disk, which requires the optimizer state there and the same sharding of both.
fn offload_parameters(config: &mut RunConfig, settings: &mut Vec<String>) -> bool {
    let Plan { mesh, zero_stage, residence, .. } = &config.plan;
    let are_kept_by_all = mesh.shard * mesh.context > 1 && matches!(zero_stage, 1 | 2);
    let may_move = !are_kept_by_all && residence.parameters != Residence::Disk;
    may_move
        && has_state_on_disk(config, settings)
        && offload(config, settings, "parameters", |residences| &mut residences.parameters)
}

/// Offloads the saved activations of blocks to disk.
fn offload_activations(config: &mut RunConfig, settings: &mut Vec<String>) -> bool {
    offload(config, settings, "activations", |residences| &mut residences.activations)
}

fn narrow_state(config: &mut RunConfig, settings: &mut Vec<String>) -> bool {
    let is_wide = config.optimizer.state_precision == StatePrecision::F32;
    if is_wide {
        config.optimizer.state_precision = StatePrecision::BF16;
        settings.push("optimizer.state_precision=bf16".to_owned());
    }
    is_wide
}

/// Switches to bf16 without master weights.
fn narrow_weights(config: &mut RunConfig, settings: &mut Vec<String>) -> bool {
    let has_more = config.train.precision != Precision::BF16 || config.train.master_weights;
    if has_more {
        config.train.precision = Precision::BF16;
        config.train.master_weights = false;
        settings.extend(["train.precision=bf16", "train.master_weights=false"].map(str::to_owned));
    }
    has_more
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_config::resolve_model;

    fn config(settings: &[&str]) -> RunConfig {
        let model =
            ["model.preset=baby-gpt", "data.train=[\"a.txt\"]", "train.global_batch=8", "train.threads=1"];
        let settings: Vec<&str> = model.iter().chain(settings).copied().collect();
        RunConfig::parse("", "RUN.toml", &settings).unwrap_or_else(|problems| panic!("{problems}"))
    }

    fn total(config: &RunConfig) -> usize {
        let model = resolve_model(config).unwrap();
        let forecast = Forecast::of(config, &model).unwrap();
        needed(&forecast, 0..forecast.ranks()).total()
    }

    fn refusal(config: &RunConfig, available_bytes: usize) -> MemoryShortage {
        let model = resolve_model(config).unwrap();
        match require_within(config, &model, 0..config.ranks(), available_bytes as u64) {
            Err(Error::DoesNotFit(misfit)) => *misfit,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_needs_a_byte_less_than_is_there_fits() {
        let run = config(&["train.micro_batch=4", "parallel.data_parallel_replicate=2"]);
        let model = resolve_model(&run).unwrap();
        let needed = total(&run);
        require_within(&run, &model, 0..2, needed as u64).unwrap();
        let misfit = refusal(&run, needed - 1);
        assert_eq!((misfit.needed.total(), misfit.available_bytes), (needed, needed as u64 - 1));
        // One of two ranks needs half of it.
        require_within(&run, &model, 1..2, needed as u64 / 2 + 1).unwrap();
    }

    #[test]
    fn the_smallest_change_that_fits_is_named_with_what_it_needs() {
        let run = config(&["train.micro_batch=4", "parallel.data_parallel_replicate=2"]);
        let of = |settings: &[&str]| total(&config(&[&["train.micro_batch=4"][..], settings].concat()));
        let shards = ["parallel.data_parallel_shard=2", "parallel.zero_stage=1"];
        // The first change that is enough, not the one that saves most.
        let by_stage_1 = refusal(&run, of(&shards)).remedy.unwrap();
        assert_eq!(by_stage_1.needed_bytes, of(&shards));
        let expected = ["parallel.data_parallel_replicate=1", shards[0], shards[1]];
        assert_eq!(by_stage_1.settings, expected);
        let alone = config(&["train.micro_batch=4"]);
        let by_recompute = refusal(&alone, total(&alone) - 1).remedy.unwrap();
        assert_eq!(by_recompute.settings, ["parallel.recompute=selective"]);
        assert_eq!(by_recompute.needed_bytes, of(&["parallel.recompute=selective"]));
    }

    #[test]
    fn layers_that_compute_again_keep_to_it_where_more_of_them_must() {
        let rules = "parallel.recompute={ layers = [{ from = 0, to = 1, mode = \"full\" }] }";
        let run = config(&["train.micro_batch=4", rules]);
        let misfit = refusal(&run, total(&run) - 1);
        let expected = "parallel.recompute={ default = \"selective\", layers = [{ from = 0, to = 1, every = 1, mode = \"full\" }] }";
        let remedy = misfit.remedy.clone().unwrap();
        assert_eq!(remedy.settings, [expected]);
        assert_eq!(remedy.needed_bytes, total(&config(&["train.micro_batch=4", expected])));
        assert!(misfit.to_string().contains(&format!("--set '{expected}' ")), "{misfit}");
    }

    #[test]
    fn activations_that_dominate_go_to_the_disk() {
        // A micro-batch of one sequence cannot be halved.
        let run = config(&[
            "train.micro_batch=1",
            "model.n_layer=48",
            "model.n_positions=4096",
            "train.seq_len=4096",
        ]);
        let on_disk = "parallel.offload.activations=disk";
        let all = ["train.micro_batch=1", "model.n_layer=48", "model.n_positions=4096", "train.seq_len=4096"];
        let full = total(&config(&[&all[..], &["parallel.recompute=full"]].concat()));
        let needed = total(&config(&[&all[..], &[on_disk]].concat()));
        assert!(needed < full, "{needed} bytes with activations on disk, {full} with those computed again");
        let remedy = refusal(&run, needed).remedy.unwrap();
        assert_eq!((remedy.settings, remedy.needed_bytes), (vec![on_disk.to_owned()], needed));
    }

    #[test]
    fn changes_that_are_not_enough_alone_are_taken_together_and_else_the_nearest_is_named() {
        let run = config(&["train.micro_batch=4"]);
        let both = config(&["train.micro_batch=2", "parallel.recompute=full"]);
        let misfit = refusal(&run, total(&both));
        let remedy = misfit.remedy.clone().unwrap();
        assert!(remedy.needed_bytes <= total(&both) && !remedy.settings.is_empty(), "{remedy:?}");
        let text = misfit.to_string();
        assert!(text.contains("would fit  --set ") && text.contains("activations"), "{text}");
        let hopeless = refusal(&run, 1 << 20);
        assert_eq!(hopeless.remedy, None);
        let least = hopeless.least.clone().unwrap();
        assert!(least.settings.contains(&"train.master_weights=false".to_owned()), "{least:?}");
        assert!(hopeless.to_string().contains("comes nearest"), "{hopeless}");
    }

    #[test]
    fn a_benchmark_that_does_not_fit_is_told_what_would_and_keeps_its_batch_and_precision() {
        let config = config(&["parallel.data_parallel_replicate=2", "train.micro_batch=4"]);
        let predict_step = |config: &RunConfig| Forecast::of(config, &check(config)?.1);
        let refusal = |available_bytes: usize| match require_for_benchmark_within(
            &config,
            &predict_step,
            available_bytes as u64,
        ) {
            Err(Error::DoesNotFit(misfit)) => *misfit,
            other => panic!("{available_bytes} bytes: {other:?}"),
        };
        let all = total(&config);
        assert!(require_for_benchmark_within(&config, &predict_step, all as u64).is_ok());
        let change = refusal(all - 1).remedy.expect("less is needed if state is sharded");
        assert!(
            change.needed_bytes < all && change.settings.iter().any(|set| set.contains("zero_stage=1")),
            "{change}"
        );
        let least = refusal(1).least.expect("a change that comes nearest");
        assert!(least.needed_bytes < change.needed_bytes, "{least}");
        assert!(least.settings.iter().all(|set| !set.starts_with("train.")), "{least}");
    }

    #[test]
    fn no_more_of_the_state_goes_to_the_disk_than_has_to() {
        // For a small model the windows take more memory than offload saves.
        let model = ["model.n_embd=512", "model.n_head=8", "model.n_layer=12"];
        let smallest = [&model[..], &["train.micro_batch=1", "parallel.recompute=full"]].concat();
        let run = config(&smallest);
        let on_disk = |share: f64| {
            let share = format!("parallel.offload.fraction={share}");
            total(&config(&[&smallest[..], &["parallel.offload.optimizer=disk", &share]].concat()))
        };
        for share in [0.25, 0.5, 1.0] {
            let Change { settings, needed_bytes } = refusal(&run, on_disk(share)).remedy.unwrap();
            // Whole units are offloaded, so a smaller fraction may do as well.
            let found =
                settings.iter().find_map(|setting| setting.strip_prefix("parallel.offload.fraction="));
            let found = found.map_or(1.0, |share| share.parse().unwrap());
            assert!(settings.contains(&"parallel.offload.optimizer=disk".to_owned()), "{settings:?}");
            assert!(found <= share && needed_bytes == on_disk(found), "{settings:?}: {needed_bytes}");
            assert!(found == 0.0625 || on_disk(found - 0.0625) > on_disk(share), "{settings:?}");
        }
    }

    #[test]
    fn whatever_is_proposed_is_a_run_that_needs_what_was_said() {
        for plan in
            [&["parallel.data_parallel_shard=4", "parallel.zero_stage=1"][..], &["train.spike_factor=3.0"]]
        {
            let run = config(plan);
            let whole = total(&run);
            for percent in [95, 80, 60, 40] {
                let Some(Change { settings, needed_bytes }) = refusal(&run, whole * percent / 100).remedy
                else {
                    continue;
                };
                let all: Vec<&str> =
                    plan.iter().copied().chain(settings.iter().map(String::as_str)).collect();
                assert_eq!(total(&config(&all)), needed_bytes, "{settings:?}");
                assert!(needed_bytes <= whole * percent / 100, "{settings:?}: {needed_bytes} of {whole}");
            }
        }
    }
}
