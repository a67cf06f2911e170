//! Offload of a model that exceeds the memory: the smallest part that makes it fit, chosen by its cost in time, to host memory
//! before disk.

use lockstep_config::RunConfig;
use lockstep_plan::{Offload, Residence};
use lockstep_planner::cluster::Cluster;
use lockstep_planner::search::{Candidate, Rejection, Subject};
use lockstep_planner::{Objective, Planner};

/// Returns a machine with one core, this memory and a disk.
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
        // All ways to offload a part, in sixteenths.
        let (mut least_ms, mut least) = (f64::INFINITY, None);
        for on_disk in Offload::all_to(Residence::Disk) {
            for recompute in ["none", "selective", "full"] {
                for part in 1..=16 {
                    let mut other = config(&[&format!("parallel.recompute={recompute}")]);
                    other.plan.micro_batch = best.plan.micro_batch;
                    other.plan.residence = on_disk.of_fraction(f64::from(part) / 16.0);
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
    assert!(planner.candidates().iter().all(|candidate| candidate.offload == Offload::default()));
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
    for candidate in candidates.iter().filter(|candidate| !candidate.offload.is_nothing()) {
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

/// Returns a preset's node with this number of devices and memory per device.
fn devices(preset: &str, devices: usize, memory_bytes: u64) -> Cluster {
    let mut cluster = Cluster::preset(preset).expect("a preset");
    cluster.nodes[0].devices = devices;
    cluster.nodes[0].device.memory_bytes = memory_bytes;
    cluster
}

fn on_devices(cluster: Cluster, settings: &[&str]) -> Planner {
    let common =
        ["model.preset=gpt2-124m", "train.global_batch=8", "train.seq_len=1024", "train.precision=bf16"];
    let settings: Vec<&str> = common.iter().chain(settings).copied().collect();
    let config = RunConfig::parse("", "a test", &settings).unwrap_or_else(|problems| panic!("{problems}"));
    Planner::new(config, cluster, Objective::Time).expect("a model")
}

#[test]
fn host_memory_comes_before_the_disk() {
    let everything = on_devices(devices("dgx-h100", 2, 80 << 30), &[]).find(1).ranking.best.remove(0).value;
    let needed = everything.largest().1.total() as u64;
    let places = |cluster: Cluster| {
        let found = on_devices(cluster, &[]).find(1).ranking.best;
        let plan = &found.first().expect("a plan that fits").value.plan;
        let residence = plan.residence;
        [residence.optimizer, residence.gradients, residence.parameters, residence.activations]
    };
    let roomy = devices("dgx-h100", 2, 80 << 30);
    assert_eq!(places(roomy), [Residence::Memory; 4]);
    let mut small = devices("dgx-h100", 2, needed / 4);
    let offloaded = places(small.clone());
    assert!(offloaded.contains(&Residence::Host) && !offloaded.contains(&Residence::Disk), "{offloaded:?}");
    small.nodes[0].host_memory_bytes = 1 << 20;
    let offloaded = places(small);
    assert!(offloaded.contains(&Residence::Disk) && !offloaded.contains(&Residence::Host), "{offloaded:?}");
}

#[test]
fn what_a_run_offloads_itself_takes_no_device_memory() {
    let best = |memory_bytes| {
        let settings = ["parallel.offload.optimizer=cpu", "train.micro_batch=1"];
        on_devices(devices("dgx-h100", 1, memory_bytes), &settings).find(1).ranking.best
    };
    let roomy = best(80 << 30).remove(0).value;
    let needed = roomy.largest().1.total() as f64;
    let found = best((needed / 0.9) as u64);
    let plan = found.first().map(|found| &found.value.plan);
    assert_eq!(plan, Some(&roomy.plan), "{needed} bytes are needed");
}

/// A step that streams from host memory takes no longer than with a slower disk, and no less than without offload.
#[test]
fn offload_costs_what_the_links_take() {
    let step_ms = |place: &str| {
        let mut cluster = devices("dgx-h100", 2, 80 << 30);
        cluster.nodes[0].host_gb_per_s = 1.0;
        cluster.nodes[0].disk_gb_per_s = 0.5;
        let offload: Vec<String> =
            ["optimizer", "gradients"].map(|what| format!("parallel.offload.{what}={place}")).into();
        let settings: Vec<&str> = offload.iter().map(String::as_str).collect();
        let settings = [&["parallel.data_parallel_shard=2", "parallel.zero_stage=2"][..], &settings].concat();
        on_devices(cluster, &settings).of_run().expect("a plan").step
    };
    let [none, host, disk] = ["none", "cpu", "disk"].map(step_ms);
    assert_eq!((none.host_ms, none.disk_ms), (0.0, 0.0));
    // 62M elements per rank: 12 bytes of state each way, 4 of gradients. The link reads and writes at the same time; the disk,
    // shared by both ranks, does one after the other.
    let elements = 124e6 / 2.0;
    let update_ms = elements * 16.0 / 1e9 * 1e3;
    assert!((0.8..1.3).contains(&(host.host_ms / update_ms)), "{} ms of {update_ms}", host.host_ms);
    assert!(
        host.disk_ms == 0.0 && disk.host_ms == 0.0 && disk.disk_ms > 4.0 * host.host_ms,
        "{host:?} {disk:?}"
    );
    let parts = |step: &lockstep_planner::predict::StepPrediction| {
        step.work_ms
            + step.exchange_ms
            + step.bubble_ms
            + step.gradients_ms
            + step.update_ms
            + step.host_ms
            + step.disk_ms
    };
    for step in [&none, &host, &disk] {
        assert!((parts(step) / step.step_ms - 1.0).abs() < 1e-6, "{} of {}", parts(step), step.step_ms);
    }
}

#[test]
fn no_way_to_offload_to_host_memory_is_better_than_its_bound() {
    let mut planner = on_devices(devices("dgx-h100", 2, 640 << 20), &["model.n_layer=6"]);
    let found = planner.find(1).ranking.best;
    assert!(found[0].value.plan.residence.offload_anything(), "{:?}", found[0].value.plan);
    let candidates: Vec<Candidate> = planner.candidates();
    let (mut valued, mut wrong) = (0, Vec::new());
    for candidate in candidates.iter().filter(|candidate| !candidate.offload.is_nothing()) {
        let bound = planner.bound(candidate);
        match planner.value(candidate, f64::INFINITY) {
            Ok((value, _)) => {
                valued += 1;
                if bound.is_none_or(|bound| bound > value) {
                    wrong.push(format!("{candidate:?}: at least {bound:?}, and it comes to {value}"));
                }
                // A candidate known to be no better is not evaluated in full; a better one always is.
                let mut is_worse =
                    |factor: f64| matches!(planner.value(candidate, value * factor), Err(Rejection::Worse));
                if is_worse(1.0 + 1e-9) || !is_worse(1.0 - 1e-9) {
                    wrong.push(format!("{candidate:?} is misjudged beside {value}"));
                }
            }
            Err(_) => continue,
        }
    }
    assert!(valued > 50, "{valued} fit of {}", candidates.len());
    assert!(wrong.is_empty(), "{} of {valued}:\n{}", wrong.len(), wrong[..wrong.len().min(5)].join("\n"));
}

/// The offloaded fraction is found with bounds first; the ledgers confirm that no smaller fraction would fit.
#[test]
fn the_fraction_is_the_smallest_that_fits() {
    let mixture = ["model.preset=mixtral-20m", "train.global_batch=16", "train.seq_len=512"];
    let shallow = ["model.n_layer=6"];
    let (mut compared, mut wrong) = (0, Vec::new());
    for (settings, ranks) in [(&mixture[..], 2), (&shallow[..], 4), (&shallow[..], 2)] {
        let on = |memory_bytes| on_devices(devices("dgx-h100", ranks, memory_bytes), settings);
        // Nothing is offloaded while any plan fits without offload.
        let needed = on(80 << 30).find(1).ranking.best[0].value.largest().1.total() as u64;
        let sizes = std::iter::successors(Some(needed), |bytes| Some(bytes * 9 / 10));
        let mut planners = sizes.map(on);
        let offloads = |planner: &mut Planner| {
            let found = planner.find(1).ranking.best;
            found.first().is_none_or(|found| found.value.plan.residence.offload_anything())
        };
        let mut planner =
            planners.find_map(|mut planner| offloads(&mut planner).then_some(planner)).expect("a size");
        let candidates = planner.candidates().into_iter();
        let candidates = candidates.filter(|candidate| candidate.offload.optimizer != Residence::Memory);
        for candidate in candidates.step_by(31) {
            let Ok((_, plan)) = planner.value(&candidate, f64::INFINITY) else { continue };
            let config = planner.run_under(plan);
            compared += 1;
            let mut fits = |parts: u32| {
                let mut other = config.clone();
                other.plan.residence.fraction = f64::from(parts) / 32.0;
                planner.evaluate(&other).expect("a valid plan").fits
            };
            let found = (config.plan.residence.fraction * 32.0).round() as u32;
            if !fits(found) || (found > 1 && fits(found - 1)) {
                wrong.push(format!("{found} parts of {candidate:?}"));
            }
        }
    }
    assert!(compared > 30, "{compared} candidates fit");
    assert!(wrong.is_empty(), "{} of {compared}:\n{}", wrong.len(), wrong[..wrong.len().min(5)].join("\n"));
}

/// Bounds reject nearly all candidates: a ledger costs as much as a hundred of them.
#[test]
fn few_candidates_are_held_against_ledgers() {
    let cluster = Cluster::preset("dgx-h100").expect("a preset");
    let settings =
        ["model.preset=llama3-70b", "train.global_batch=32", "train.seq_len=4096", "train.precision=bf16"];
    let config = RunConfig::parse("", "a test", &settings).unwrap_or_else(|error| panic!("{error}"));
    let mut planner = Planner::new(config, cluster, Objective::Time).expect("a model");
    let ranking = planner.find(3).ranking;
    assert!(ranking.best[0].value.plan.residence.offload_anything(), "{:?}", ranking.best[0].value.plan);
    let (ledgers, valued) = (planner.ledgers(), ranking.valued);
    assert!(10 * ledgers < valued, "{ledgers} ledgers for {valued} candidates");
}
