//! The planner compared with published runs, with an exhaustive search, and with common rules of thumb.

#[path = "planner/details.rs"]
mod details;
#[path = "planner/exhaustive.rs"]
mod exhaustive;
#[path = "planner/offload.rs"]
mod offload;
#[path = "../examples/questions/table.rs"]
mod questions;
#[path = "planner/recorded.rs"]
mod recorded;
#[path = "../benches/published/rows/mod.rs"]
mod rows;
#[path = "planner/usual.rs"]
mod usual;

use lockstep_config::RunConfig;
use lockstep_plan::ContextMethod;
use lockstep_planner::cluster::{Cluster, Software};
use lockstep_planner::search::{Subject, search};
use lockstep_planner::{Evaluated, Objective, Planner};

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

/// Papers used to calibrate DGX A100: every row within 10 %, half of them within 5 %.
#[test]
fn published_runs_are_predicted() {
    let mut errors = Vec::new();
    for row in rows::published() {
        let is_of_papers = ["Megatron-LM 2021", "Korthikanti 2022"].contains(&row.family);
        if row.is_long() || !is_of_papers {
            continue;
        }
        let found = row.predicted(row.machines());
        let [predicted, measured] = row.figures(&found);
        let error = (predicted / measured - 1.0).abs();
        assert!(error < 0.1, "{}: {predicted} predicted, {measured} measured", row.name);
        errors.push(error);
    }
    errors.sort_by(f64::total_cmp);
    assert!(errors.len() > 10 && errors[errors.len() / 2] < 0.05, "{errors:?}");
}

/// Held-out sources, not used for any constant: every row within 16 %, half of each source within 7.5 %.
#[test]
fn runs_that_were_held_out_are_predicted() {
    let families = [
        "NeMo, H100",
        "Megatron-LM in MegaScale",
        "BLOOM",
        "FSDP at IBM, A100",
        "FSDP at IBM, H100",
        "torchtitan, A100",
        "llm-foundry, H100",
        "NeMo with experts, H100",
        "NeMo, GB200",
        "MaxText, H100",
        "MaxText, TPU v5p",
        "Megatron-LM 1.0, V100",
        "Megatron-LM 2020, V100",
    ];
    for family in families {
        let mut errors = Vec::new();
        for row in rows::published() {
            if row.family != family || row.role != rows::Role::HeldOut {
                continue;
            }
            let found = row.predicted(row.machines());
            let [predicted, measured] = row.figures(&found);
            let error = (predicted / measured - 1.0).abs();
            assert!(error < 0.16, "{}: {predicted} predicted, {measured} measured", row.name);
            errors.push(error);
        }
        errors.sort_by(f64::total_cmp);
        assert!(errors.len() >= 4 && errors[errors.len() / 2] < 0.075, "{family}: {errors:?}");
    }
}

/// No bound exceeds the value of its candidate.
#[test]
fn bounds_are_bounds() {
    let settings =
        ["model.preset=gpt2-355m", "train.global_batch=64", "train.seq_len=1024", "train.precision=bf16"];
    let mut planner = planner(&settings, Cluster::preset("dgx-a100x2").unwrap());
    let mut compared = 0;
    // Other context methods have no bound where a ring is as good; the exhaustive test shows that the search loses nothing by
    // that.
    let candidates = planner.candidates().into_iter().filter(|one| one.context_method == ContextMethod::Ring);
    for candidate in candidates.step_by(41) {
        let bound = planner.bound(&candidate);
        if let Ok((step_ms, _)) = planner.value(&candidate, f64::INFINITY) {
            let bound = bound.unwrap_or_else(|| panic!("{candidate:?} can be, and has no bound"));
            assert!(bound <= step_ms * 1.001, "{candidate:?}: {bound} is above {step_ms}");
            compared += 1;
        }
    }
    assert!(compared > 20, "{compared}");
}

/// Bounds hold with an adapter as well, whose gradients and optimizer state alone exist. Three memory sizes; the smallest needs
/// offload.
#[test]
fn bounds_of_fine_tuning_are_bounds() {
    check_bounds_of_fine_tuning("fine_tune.quantize=none");
}

/// The bounds count the bytes of quantized matrices' blocks, and the search leaves out plans that cannot hold blocks.
#[test]
fn bounds_of_fine_tuning_over_blocks_are_bounds() {
    check_bounds_of_fine_tuning("fine_tune.quantize=nf4");
}

fn check_bounds_of_fine_tuning(quantize: &str) {
    let settings = [
        "model.preset=gpt2-355m",
        "fine_tune.lora_rank=16",
        quantize,
        "train.global_batch=32",
        "train.seq_len=1024",
        "train.precision=bf16",
    ];
    let config = RunConfig::load_to_plan(None, None, &settings).unwrap_or_else(|error| panic!("{error}"));
    for memory_mib in [80 << 10, 2 << 10, 700] {
        let mut cluster = Cluster::preset("dgx-a100").expect("a preset");
        cluster.nodes[0].devices = 4;
        cluster.nodes[0].device.memory_bytes = memory_mib << 20;
        let mut planner = Planner::new(config.clone(), cluster, Objective::Time).expect("a model");
        planner.find(1);
        let candidates = planner.candidates().into_iter();
        let candidates = candidates.filter(|one| one.context_method == ContextMethod::Ring);
        let mut compared = 0;
        for candidate in candidates.step_by(17) {
            let bound = planner.bound(&candidate);
            if let Ok((step_ms, _)) = planner.value(&candidate, f64::INFINITY) {
                let bound = bound.unwrap_or_else(|| panic!("{candidate:?} can be, and has no bound"));
                assert!(bound <= step_ms * 1.001, "{candidate:?}: {bound} is above {step_ms}");
                compared += 1;
            }
        }
        assert!(compared > 5, "{compared} in {memory_mib} MiB");
    }
}

/// Tensor parallelism stays inside a node; the rest of a large model is split over stages or shards, and data parallelism takes
/// the remaining devices (Narayanan et al. 2021, section 3.5).
#[test]
fn tensor_parallel_stays_inside_a_node() {
    let settings =
        ["model.preset=llama3-70b", "train.global_batch=512", "train.seq_len=4096", "train.precision=bf16"];
    for cluster in ["dgx-a100x16", "dgx-h100x16", "ethernet-100gx16"] {
        let plan = best(&settings, cluster).plan;
        assert!(plan.mesh.tensor <= 8, "{cluster}: {:?}", plan.mesh);
        assert!(plan.mesh.replicate * plan.mesh.shard > 1, "{cluster}: {:?}", plan.mesh);
        assert!(plan.mesh.pipeline > 1 || plan.zero_stage == 3, "{cluster}: {:?}", plan.mesh);
        // Shards are gathered for every micro-batch's passes, while a pipeline sends one activation per stage: slower networks
        // favour more stages. In Narayanan et al., ZeRO's gathers took longer than pipeline bubbles on 600 GB/s and 8 x 200 Gb/s.
        // Here gathers overlap with compute, unit by unit, so shards win on such networks, and stages on 100 Gb/s per node.
        let is_slow = cluster.starts_with("ethernet");
        assert_eq!(plan.mesh.pipeline > 1, is_slow, "{cluster}: {:?}", plan.mesh);
    }
}

/// Takeaway 1 of Narayanan et al. 2021: tensor parallelism up to the devices of a node, then pipeline over nodes. Takeaway 2: no
/// more of both than the model needs to fit, and data parallelism beyond. 405 billion parameters on 1,024 A100, as in their table
/// 1.
#[test]
fn a_model_far_larger_than_a_node_is_cut_as_megatron_cuts_it() {
    let settings =
        ["model.preset=llama3-405b", "train.global_batch=1024", "train.seq_len=4096", "train.precision=bf16"];
    let cluster = Cluster { software: Software::Megatron, ..Cluster::preset("dgx-a100x128").unwrap() };
    let plan = planner(&settings, cluster).find(1).ranking.best.remove(0).value.plan;
    assert_eq!((plan.mesh.tensor, plan.mesh.context), (8, 1), "{:?}", plan.mesh);
    assert!(plan.mesh.pipeline > 1 && plan.mesh.shard * plan.mesh.replicate > 1, "{:?}", plan.mesh);
}

/// The axis order of Llama 3 (Grattafiori et al. 2024, section 3.3.2): tensor innermost and inside a node, context next, pipeline
/// over nodes, data parallel outermost. Also the plan of their table 4 for 8,192 tokens on 16,384 GPUs.
#[test]
fn llama_3_is_laid_out_in_its_own_order() {
    let settings =
        ["model.preset=llama3-405b", "train.global_batch=2048", "train.seq_len=8192", "train.precision=bf16"];
    let found = best(&settings, "dgx-h100x2048");
    let mesh = found.plan.mesh;
    assert!(mesh.tensor <= 8 && mesh.pipeline >= 16 && mesh.shard * mesh.replicate > 1, "{mesh:?}");
    // Their plan has tensor degree 8, 16 stages and no context parallelism. The search finds a lower tensor degree, context
    // parallelism in its place, and more stages. By Lockstep's ledger their plan exceeds the memory of a device because gradients
    // stay unsharded in f32. With 8 key/value heads of 128, context parallelism sends a sixteenth of what tensor parallelism
    // does, overlapped with attention. V-shaped schedules, which did not exist then, wait for one forward where interleaved ones
    // wait for P - 1. Their plan is predicted at its measured 41 % of peak and the search's plan faster, which has not been
    // confirmed on machines.
    let theirs = [
        "parallel.tensor_parallel=8",
        "parallel.sequence_parallel=true",
        "parallel.pipeline_parallel=16",
        "parallel.pipeline_schedule=interleaved_1f1b",
        "parallel.virtual_stages=4",
        "parallel.data_parallel_shard=128",
        "parallel.zero_stage=1",
        "train.micro_batch=1",
    ];
    let theirs = [&settings[..], &theirs].concat();
    let theirs = planner(&theirs, Cluster::preset("dgx-h100x2048").unwrap()).of_run().expect("their plan");
    let mfu = theirs.mfu().expect("a known peak");
    assert!((0.36..0.46).contains(&mfu), "{mfu}");
    let ratio = found.step.step_ms / theirs.step.step_ms;
    assert!((0.7..1.0).contains(&ratio), "{ratio}");
}

/// Longer sequences have a higher context degree: Llama 3 uses 16 for 131,072 tokens, and 1 for 8,192.
#[test]
fn longer_sequences_are_shared_by_more_ranks() {
    let shared = |seq_len: usize| {
        let (seq_len, batch) =
            (format!("train.seq_len={seq_len}"), format!("train.global_batch={}", (1 << 22) / seq_len));
        let settings = ["model.preset=llama3-70b", &seq_len, &batch, "train.precision=bf16"];
        best(&settings, "dgx-h100x32").plan.mesh.context
    };
    let [short, long, longest] = [8192, 32_768, 131_072].map(shared);
    assert!(short <= long && long <= longest && longest >= 8, "{short} {long} {longest}");
}

/// A model that fits each device is not split: data-parallel replicas, with or without sharded state.
#[test]
fn a_small_model_is_trained_by_copies() {
    let settings =
        ["model.preset=gpt2-124m", "train.global_batch=512", "train.seq_len=1024", "train.precision=bf16"];
    let plan = best(&settings, "dgx-a100").plan;
    let cut = plan.mesh.tensor * plan.mesh.pipeline * plan.mesh.context;
    assert_eq!(cut, 1, "{:?}", plan.mesh);
}

/// A cluster of unequal nodes: slow nodes get fewer layers, and the bound of a plan does not exceed its value.
#[test]
fn slow_nodes_get_fewer_layers() {
    let mut cluster = Cluster::preset("dgx-a100x2").unwrap();
    let mut slow = cluster.nodes[0].clone();
    cluster.nodes[0].count = 1;
    slow.count = 1;
    slow.device.peak_tflops.values_mut().for_each(|rate| *rate /= 2.0);
    cluster.nodes.push(slow);
    let settings = [
        "model.preset=llama3.2-1b",
        "model.num_hidden_layers=30",
        "train.global_batch=64",
        "train.seq_len=2048",
        "train.precision=bf16",
    ];
    let mut planner = planner(&settings, cluster);
    let mut compared = 0;
    let candidates = planner.candidates().into_iter();
    let candidates = candidates.filter(|one| one.degrees.pipeline == 2 && one.degrees.context == 1);
    for candidate in candidates.step_by(7) {
        let bound = planner.bound(&candidate);
        let Ok((step_ms, plan)) = planner.value(&candidate, f64::INFINITY) else { continue };
        assert!(
            bound.is_some_and(|bound| bound <= step_ms * 1.001),
            "{candidate:?}: {bound:?} and {step_ms}"
        );
        let units = plan.stages;
        if candidate.schedule.1 == 1 {
            assert!(units[0] > units[1], "{candidate:?}: {units:?}");
            compared += 1;
        }
    }
    assert!(compared > 3, "{compared}");
}

/// One slow device delays all: the step is longer by at most the device's own slowdown, and grows with it.
#[test]
fn a_slow_device_holds_up_the_step() {
    let settings =
        ["model.preset=llama3-70b", "train.global_batch=512", "train.seq_len=4096", "train.precision=bf16"];
    for cluster in ["dgx-h100x16", "ethernet-100gx16"] {
        let mut planner = planner(&settings, Cluster::preset(cluster).unwrap());
        let found = planner.find(1).ranking.best.remove(0).value;
        let [same, some, half] =
            [1.0, 0.9, 0.5].map(|speed| planner.with_slow_device(&found, speed).expect("a plan"));
        assert!((same - 1.0).abs() < 1e-9, "{cluster}: {same}");
        assert!(1.0 < some && some < half && half <= 2.0, "{cluster}: {some} {half}");
    }
}

/// The search returns the best candidates whatever their order.
#[test]
fn a_search_ranks_what_it_is_asked_for() {
    let settings =
        ["model.preset=gpt2-124m", "train.global_batch=16", "train.seq_len=1024", "train.precision=bf16"];
    let mut planner = planner(&settings, Cluster::preset("dgx-a100").unwrap());
    let candidates = planner.candidates();
    let forwards = search(candidates.clone(), 4, &mut planner, &mut ());
    let backwards = search(candidates.into_iter().rev(), 4, &mut planner, &mut ());
    let times = |ranking: &lockstep_planner::search::Ranking<lockstep_plan::Plan>| -> Vec<f64> {
        ranking.best.iter().map(|found| found.objective).collect()
    };
    assert_eq!(times(&forwards), times(&backwards));
    assert_eq!(forwards.best.len(), 4);
}
