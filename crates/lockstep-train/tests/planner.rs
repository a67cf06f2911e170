//! The planner held against what was published, against an exhaustive search, and against the rules of thumb that people go by.

#[path = "../examples/published/rows.rs"]
mod rows;

use std::time::{Duration, Instant};

use lockstep_plan::cluster::Cluster;
use lockstep_plan::search::{Subject, search};
use lockstep_train::RunConfig;
use lockstep_train::planner::{Evaluated, Objective, Planner};

fn planner(settings: &[&str], cluster: Cluster) -> Planner {
    let config = RunConfig::parse("", "a test", settings).unwrap_or_else(|error| panic!("{error}"));
    Planner::new(config, cluster, Objective::Time).expect("a model")
}

fn best(settings: &[&str], cluster: &str) -> Evaluated {
    let mut planner = planner(settings, Cluster::preset(cluster).expect("a preset"));
    let ranking = planner.find(1).ranking;
    let [best] = &ranking.best[..] else { panic!("nothing fits {cluster}: {:?}", ranking.rejected) };
    best.value.clone()
}

/// Of the papers that the constants of DGX A100 are for: every row within 10 %, half of them within 5 %.
#[test]
fn published_runs_are_predicted() {
    let mut errors = Vec::new();
    for row in rows::published() {
        let is_of_papers = row.name.contains("Megatron") || row.name.contains("Korthikanti");
        if row.is_long() || !is_of_papers {
            continue;
        }
        let found = row.predicted(Cluster::preset(row.preset()).unwrap());
        let [predicted, measured] = row.figures(&found);
        let error = (predicted / measured - 1.0).abs();
        assert!(error < 0.1, "{}: {predicted} predicted, {measured} measured", row.name);
        errors.push(error);
    }
    errors.sort_by(f64::total_cmp);
    assert!(errors.len() > 10 && errors[errors.len() / 2] < 0.05, "{errors:?}");
}

/// Branch and bound finds what valuing every candidate finds.
#[test]
fn nothing_is_better_than_what_a_search_finds() {
    let begin = Instant::now();
    let models: [(&[&str], &str); 3] = [
        (
            &[
                "model.preset=gpt2-124m",
                "train.global_batch=32",
                "train.seq_len=1024",
                "train.precision=bf16",
            ],
            "dgx-a100",
        ),
        (
            &[
                "model.preset=llama3.2-1b",
                "train.global_batch=16",
                "train.seq_len=4096",
                "train.precision=bf16",
                "model.num_hidden_layers=8",
            ],
            "dgx-h100x2",
        ),
        (&["model.preset=mixtral-20m", "train.global_batch=16", "train.seq_len=512"], "dgx-a100"),
    ];
    for (settings, cluster) in models {
        let found = best(settings, cluster).step.step_ms;
        let mut planner = planner(settings, Cluster::preset(cluster).unwrap());
        let mut least = f64::INFINITY;
        // Every third, so that all kinds of candidates are met in the time of a test.
        for candidate in planner.candidates().into_iter().step_by(3) {
            if let Ok((step_ms, _)) = planner.value(&candidate, f64::INFINITY) {
                assert!(
                    step_ms >= found * 0.99,
                    "{candidate:?} takes {step_ms} ms, the best that was found {found}"
                );
                least = least.min(step_ms);
            }
            assert!(begin.elapsed() < Duration::from_secs(300), "{settings:?} took too long");
        }
        assert!(least < 2.0 * found, "{settings:?}: {least} and {found}");
    }
}

/// No bound is above what its candidate comes to.
#[test]
fn bounds_are_bounds() {
    let settings =
        ["model.preset=gpt2-355m", "train.global_batch=64", "train.seq_len=1024", "train.precision=bf16"];
    let mut planner = planner(&settings, Cluster::preset("dgx-a100x2").unwrap());
    let mut compared = 0;
    for candidate in planner.candidates().into_iter().step_by(41) {
        let bound = planner.bound(&candidate);
        if let Ok((step_ms, _)) = planner.value(&candidate, f64::INFINITY) {
            let bound = bound.unwrap_or_else(|| panic!("{candidate:?} can be, and has no bound"));
            assert!(bound <= step_ms * 1.001, "{candidate:?}: {bound} is above {step_ms}");
            compared += 1;
        }
    }
    assert!(compared > 20, "{compared}");
}

/// Tensor parallel stays inside a node; what is left of a large model goes over stages or shards, and data parallel takes the rest
/// (Narayanan et al. 2021, section 3.5).
#[test]
fn tensor_parallel_stays_inside_a_node() {
    let settings =
        ["model.preset=llama3-70b", "train.global_batch=512", "train.seq_len=4096", "train.precision=bf16"];
    for cluster in ["dgx-a100x16", "dgx-h100x16"] {
        let plan = best(&settings, cluster).plan;
        assert!(plan.mesh.tensor <= 8, "{cluster}: {:?}", plan.mesh);
        assert!(plan.mesh.replicate * plan.mesh.shard > 1, "{cluster}: {:?}", plan.mesh);
    }
}

/// What fits each device is not cut: copies, with or without shared state.
#[test]
fn a_small_model_is_trained_by_copies() {
    let settings =
        ["model.preset=gpt2-124m", "train.global_batch=512", "train.seq_len=1024", "train.precision=bf16"];
    let plan = best(&settings, "dgx-a100").plan;
    let cut = plan.mesh.tensor * plan.mesh.pipeline * plan.mesh.context;
    assert_eq!(cut, 1, "{:?}", plan.mesh);
}

/// Sequences that are too long for a device are shared (Llama 3 at 131,072 tokens).
#[test]
fn long_sequences_are_shared() {
    let settings =
        ["model.preset=llama3-70b", "train.global_batch=32", "train.seq_len=131072", "train.precision=bf16"];
    let plan = best(&settings, "dgx-h100x32").plan;
    assert!(plan.mesh.context > 1, "{:?}", plan.mesh);
}

/// Search ends with the candidates that are best whatever their order.
#[test]
fn a_search_ranks_what_it_is_asked_for() {
    let settings =
        ["model.preset=gpt2-124m", "train.global_batch=16", "train.seq_len=1024", "train.precision=bf16"];
    let mut planner = planner(&settings, Cluster::preset("dgx-a100").unwrap());
    let candidates = planner.candidates();
    let forwards = search(candidates.clone(), 4, &mut planner);
    let backwards = search(candidates.into_iter().rev(), 4, &mut planner);
    let times = |ranking: &lockstep_plan::search::Ranking<RunConfig>| -> Vec<f64> {
        ranking.best.iter().map(|found| found.objective).collect()
    };
    assert_eq!(times(&forwards), times(&backwards));
    assert_eq!(forwards.best.len(), 4);
}
