//! The search compared with exhaustive evaluation on small machines: every candidate, with every number of recomputed blocks.
//!
//! A case is a model, a cluster, an objective and the scarcity of memory: all of it, or a fraction of what the best plan would
//! take, so that recomputation has to be chosen layer by layer. `LOCKSTEP_GRID=all` runs the whole grid (`cargo xtask soak`),
//! `LOCKSTEP_GRID=7` every seventh case of it; both print the outcome of each case.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use lockstep_config::RunConfig;
use lockstep_plan::Recompute;
use lockstep_planner::cluster::Cluster;
use lockstep_planner::search::Subject;
use lockstep_planner::{Objective, Planner};

/// Largest allowed gap, as a fraction of the best value.
const MOST: f64 = 0.01;

/// A model and its batch size.
struct Model {
    name: &'static str,
    settings: &'static [&'static str],
}

const GPT2: Model = Model {
    name: "gpt2-124m, 6 layers",
    settings: &[
        "model.preset=gpt2-124m",
        "model.num_hidden_layers=6",
        "train.global_batch=32",
        "train.seq_len=1024",
        "train.precision=bf16",
    ],
};
const LLAMA: Model = Model {
    name: "llama3.2-1b, 12 layers",
    settings: &[
        "model.preset=llama3.2-1b",
        "model.num_hidden_layers=12",
        "train.global_batch=16",
        "train.seq_len=4096",
        "train.precision=bf16",
    ],
};
const SHALLOW: Model = Model {
    name: "llama-15m, 2 layers",
    settings: &[
        "model.preset=llama-15m",
        "model.num_hidden_layers=2",
        "train.global_batch=64",
        "train.seq_len=256",
    ],
};
const MIXTURE: Model = Model {
    name: "mixtral-20m",
    settings: &["model.preset=mixtral-20m", "train.global_batch=16", "train.seq_len=512"],
};
const TINY: Model = Model {
    name: "llama-15m",
    settings: &["model.preset=llama-15m", "train.global_batch=16", "train.seq_len=256"],
};

/// Returns a cluster of `devices` devices of a preset, in nodes of 8.
fn devices(preset: &str, devices: usize) -> Cluster {
    let mut cluster = Cluster::preset(preset).expect("a preset");
    cluster.nodes[0].count = devices.div_ceil(8);
    cluster.nodes[0].devices = devices.min(8);
    cluster.name = format!("{devices} devices of {preset}");
    cluster
}

fn cores(cores: usize) -> Cluster {
    Cluster { name: format!("{cores} cores"), ..Cluster::local(cores, 64 << 30) }
}

/// Outcome of a case.
struct Outcome {
    /// Objective of the search's plan, as a multiple of the minimum.
    ratio: f64,
    candidates: usize,
    /// Number of recomputed blocks in the best plan.
    forgetting: usize,
    /// Description of the better plan, if there is one.
    better: String,
}

fn planner(model: &Model, cluster: &Cluster, objective: Objective) -> Planner {
    let config = RunConfig::parse("", "a test", model.settings).unwrap_or_else(|error| panic!("{error}"));
    Planner::new(config, cluster.clone(), objective).expect("a model")
}

/// Returns the cluster with this fraction of the memory that the fastest plan takes.
fn with_memory(model: &Model, mut cluster: Cluster, share: Option<f64>) -> Option<Cluster> {
    let Some(share) = share else { return Some(cluster) };
    let searched = planner(model, &cluster, Objective::Time).find(1);
    let best = &searched.ranking.best.first()?.value;
    let bytes = share * best.largest().1.total() as f64;
    for node in &mut cluster.nodes {
        // A device reserves some of its memory; the ranks of a host share all of it.
        node.device.memory_bytes = (bytes / 0.94) as u64;
        node.host_memory_bytes = (bytes * best.devices as f64) as u64;
    }
    Some(cluster)
}

/// Runs the search and the exhaustive evaluation; returns `None` if no plan fits.
fn outcome(model: &Model, cluster: &Cluster, objective: Objective) -> Option<Outcome> {
    let mut planner = planner(model, cluster, objective);
    let searched = planner.find(1);
    let found = searched.ranking.best.first();
    let limit = found.map_or(f64::INFINITY, |found| found.objective);
    let (mut least, mut better) = (limit, String::new());
    let candidates = planner.candidates();
    let layers = planner.layers();
    for candidate in &candidates {
        // With offload either all blocks are recomputed or none, and the smallest part that makes the plan fit is offloaded.
        let is_in_memory = candidate.offload.is_nothing();
        let counts = match candidate.recompute {
            Recompute::None => 0..=0,
            _ if is_in_memory => 1..=layers,
            _ => layers..=layers,
        };
        for count in counts {
            let value = match is_in_memory {
                true => planner.value_of(candidate, count, least),
                false => planner.value(candidate, least),
            };
            if let Ok((value, plan)) = value {
                let evaluated = planner.evaluate(&planner.run_under(plan)).expect("a valid plan");
                assert!(evaluated.fits, "{} on {}: {candidate:?}, {count}", model.name, cluster.name);
                least = value;
                better = format!("{candidate:?}, {count} of {layers} blocks");
            }
        }
    }
    let Some(found) = found else {
        assert!(
            least.is_infinite(),
            "{} on {}: {better} fits, and nothing was found",
            model.name,
            cluster.name
        );
        return None;
    };
    let rules = found.value.config.plan.recompute;
    Some(Outcome {
        ratio: found.objective / least,
        candidates: candidates.len(),
        better,
        forgetting: (0..layers).filter(|layer| rules.of(*layer) != Recompute::None).count(),
    })
}

/// A model, a cluster, the fraction of the fastest plan's memory that is available, and the objective.
type Case = (&'static Model, Cluster, Option<f64>, Objective);

/// Returns the cases of CI: each kind of model, machine, objective and scarcity at least once.
fn some() -> Vec<Case> {
    use Objective::{Cost, Headroom, Time};
    vec![
        (&GPT2, devices("dgx-a100", 1), Some(0.6), Time),
        (&GPT2, devices("dgx-a100", 8), Some(0.5), Time),
        (&LLAMA, devices("dgx-h100", 4), Some(0.7), Time),
        (&SHALLOW, devices("dgx-a100", 64), None, Time),
        (&MIXTURE, devices("dgx-a100", 2), Some(0.6), Time),
        (&TINY, cores(4), Some(0.5), Time),
        (&GPT2, devices("dgx-a100", 16), None, Cost),
        (&TINY, cores(2), None, Headroom),
        (&MIXTURE, devices("dgx-a100", 2), None, Headroom),
    ]
}

fn all() -> Vec<Case> {
    let mut cases = some();
    for model in [&GPT2, &LLAMA, &SHALLOW, &MIXTURE, &TINY] {
        for ranks in [1, 2, 4, 8, 16, 64] {
            for preset in ["dgx-a100", "dgx-h100", "ethernet-100g"] {
                for share in [None, Some(0.8), Some(0.6), Some(0.4), Some(0.25)] {
                    cases.push((model, devices(preset, ranks), share, Objective::Time));
                }
            }
            cases.push((model, devices("dgx-a100", ranks), Some(0.5), Objective::Cost));
            if ranks <= 4 {
                cases.push((model, devices("dgx-a100", ranks), Some(0.5), Objective::Headroom));
            }
        }
        for ranks in [1, 2, 4, 8] {
            for share in [None, Some(0.7), Some(0.4)] {
                cases.push((model, cores(ranks), share, Objective::Time));
            }
        }
    }
    cases
}

/// Returns the outcome of a case and a line about it; `None` if no plan fits.
fn looked_at((model, cluster, share, objective): Case) -> Option<(Outcome, String)> {
    let begin = Instant::now();
    let cluster = with_memory(model, cluster, share)?;
    let outcome = outcome(model, &cluster, objective)?;
    let Outcome { ratio, candidates, forgetting, better } = &outcome;
    let gap = (ratio - 1.0) * 100.0;
    let than = if gap > 0.0 { format!(" than {better}") } else { String::new() };
    let line = format!(
        "{} on {}, {share:?} of the memory, {objective:?}: {candidates} candidates, {forgetting} blocks forget, \
         {gap:.3} % worse{than}, {:.1} s",
        model.name,
        cluster.name,
        begin.elapsed().as_secs_f64()
    );
    Some((outcome, line))
}

/// No candidate has less than 99 % of the objective that the search finds.
#[test]
fn a_search_finds_what_looking_at_everything_finds() {
    let grid = std::env::var("LOCKSTEP_GRID").ok();
    let cases = match &grid {
        Some(part) => {
            all().into_iter().step_by(part.parse().map_or(1, |every: usize| every.max(1))).collect()
        }
        None => some(),
    };
    let next = AtomicUsize::new(0);
    let work = || {
        let mut found = Vec::new();
        while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
            let outcome = looked_at(case.clone());
            if let Some((_, line)) = outcome.as_ref().filter(|_| grid.is_some()) {
                eprintln!("{line}");
            }
            found.extend(outcome);
        }
        found
    };
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let found: Vec<(Outcome, String)> = thread::scope(|scope| {
        let workers: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("a case does not panic")).collect()
    });
    let is_worse = |outcome: &Outcome| outcome.ratio > 1.0 + MOST;
    let worst: Vec<&str> =
        found.iter().filter(|(outcome, _)| is_worse(outcome)).map(|(_, line)| line.as_str()).collect();
    assert!(worst.is_empty(), "{}", worst.join("\n"));
    let per_layer = found.iter().filter(|(outcome, _)| outcome.forgetting > 0).count();
    assert!(found.len() >= 8 && per_layer >= 3, "{} cases, of {per_layer} some blocks forget", found.len());
}

/// Each part of an expert would add its whole biases, so a model of such experts (gpt-oss) cannot be recorded in parts.
#[test]
fn experts_with_biases_are_split_whole() {
    let model = concat!("model.path=", env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/gpt_oss");
    let settings = [model, "model.from_pretrained=false", "train.global_batch=16", "train.seq_len=64"];
    let config = RunConfig::parse("", "a test", &settings).unwrap_or_else(|problems| panic!("{problems}"));
    let mut planner = Planner::new(config, devices("dgx-h100", 4), Objective::Time).expect("a model");
    let found = planner.find(1000).ranking.best;
    assert!(found.iter().any(|found| found.value.plan.mesh.expert > 1), "no plan splits experts");
    for found in &found {
        assert_eq!(found.value.plan.mesh.expert_tensor, 1, "{:?}", found.value.plan.mesh);
    }
}
