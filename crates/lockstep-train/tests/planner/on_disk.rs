//! What does not fit into memory goes to disk: as little as lets it fit, of what costs least time, and no less than that.

use lockstep_plan::OnDisk;
use lockstep_plan::cluster::Cluster;
use lockstep_plan::search::Subject;
use lockstep_train::RunConfig;
use lockstep_train::planner::{Objective, Planner};

/// A machine with one core and so much memory, and a disk.
fn machine(memory_mib: u64) -> Cluster {
    let mut cluster = Cluster::local(1, memory_mib << 20);
    cluster.nodes[0].disk_bytes = 1 << 40;
    cluster
}

fn config(settings: &[&str]) -> RunConfig {
    let common =
        ["model.preset=gpt2-124m", "train.global_batch=4", "train.seq_len=128", "train.micro_batch=2"];
    let settings: Vec<&str> = common.iter().chain(settings).copied().collect();
    RunConfig::parse("", "RUN.toml", &settings).unwrap_or_else(|problems| panic!("{problems}"))
}

fn planner(memory_mib: u64) -> Planner {
    Planner::new(config(&[]), machine(memory_mib), Objective::Time).expect("a model").with_ranks(1)
}

#[test]
fn what_fits_into_memory_stays_there() {
    let ranking = planner(4096).find(4).ranking;
    assert!(!ranking.best.is_empty());
    for found in &ranking.best {
        assert!(!found.value.plan.residence.use_disk(), "{:?}", found.value.plan);
    }
}

#[test]
fn what_does_not_is_as_fast_as_any_way_to_put_it_on_disk() {
    let all_in_memory = planner(1 << 20).find(1).ranking.best.remove(0).value.largest().1.total() as u64;
    for share in [0.8, 0.6, 0.45] {
        let memory_mib = (all_in_memory as f64 * share) as u64 >> 20;
        let mut planner = planner(memory_mib);
        let found = planner.find(1).ranking.best;
        let best = &found.first().unwrap_or_else(|| panic!("nothing fits into {memory_mib} MiB")).value;
        assert!(best.plan.residence.use_disk() && best.fits, "{:?}", best.plan);
        // Every way to put something there, by parts of a sixteenth.
        let (mut least_ms, mut least) = (f64::INFINITY, None);
        for on_disk in OnDisk::all() {
            for recompute in ["none", "selective", "full"] {
                for part in 1..=16 {
                    let mut other = config(&[&format!("parallel.recompute={recompute}")]);
                    other.train.micro_batch = Some(best.plan.micro_batch);
                    other.parallel.offload_optimizer = on_disk.optimizer.into();
                    other.parallel.offload_gradients = on_disk.gradients.into();
                    other.parallel.offload_parameters = on_disk.parameters.into();
                    other.parallel.offload_activations = on_disk.activations.into();
                    other.parallel.offload_fraction = f64::from(part) / 16.0;
                    let other = planner.evaluate(&other).expect("a plan for one rank");
                    if other.fits && other.step.step_ms < least_ms {
                        (least_ms, least) = (other.step.step_ms, Some(other.plan));
                    }
                }
            }
        }
        let ratio = best.step.step_ms / least_ms;
        assert!(ratio <= 1.01, "{memory_mib} MiB: {ratio} times the least, {:?}, {least:?}", best.plan);
    }
}

#[test]
fn who_says_what_is_on_disk_is_asked_nothing() {
    let cluster = machine(32);
    let said = config(&["parallel.offload.optimizer=disk"]);
    let planner = Planner::new(said, cluster, Objective::Time).expect("a model").with_ranks(1);
    assert!(planner.candidates().iter().all(|candidate| candidate.on_disk == OnDisk::default()));
}

#[test]
fn no_way_to_put_something_on_disk_is_better_than_its_bound() {
    let mut cluster = Cluster::local(4, 1170 << 20);
    cluster.nodes[0].disk_bytes = 1 << 40;
    let model = config(&["train.global_batch=8", "model.n_layer=6"]);
    let mut planner = Planner::new(model, cluster, Objective::Time).expect("a model").with_ranks(4);
    planner.find(1);
    let candidates = planner.candidates();
    let (mut valued, mut wrong) = (0, Vec::new());
    for candidate in candidates.iter().filter(|candidate| !candidate.on_disk.is_nothing()) {
        let bound = planner.bound(candidate);
        if let Ok((value, _)) = planner.value(candidate, f64::INFINITY) {
            valued += 1;
            if bound.is_none_or(|bound| bound > value) {
                wrong.push(format!("{candidate:?}: at least {bound:?}, and it comes to {value}"));
            }
        }
    }
    assert!(valued > 50, "{valued} fit of {}", candidates.len());
    assert!(wrong.is_empty(), "{} of {valued}:\n{}", wrong.len(), wrong[..wrong.len().min(5)].join("\n"));
}
