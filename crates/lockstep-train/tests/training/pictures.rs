//! Data that a run on several ranks records for its report: the layout of the ranks, a pipeline step, and the communication
//! volume. Ranks are threads here, over the same shared memory as processes.

use std::path::Path;

use lockstep_comm::{World, WorldOptions};
use lockstep_config::{Resume, RunConfig};
use lockstep_launch::interrupt::Interrupt;
use lockstep_observe::progress::Progress;
use lockstep_plan::schedule::{Kind, Schedule};
use lockstep_planner::{LinearShape, LinearSplit, TensorLayout};
use lockstep_train::{ranks_of, train};
use serde_json::Value;

const RUN: &str = r#"
[model]
preset = "llama-15m"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 16
tie_word_embeddings = false

[train]
steps = 3
global_batch = 4
micro_batch = 1
seq_len = 16
threads = 1
eval_every = 1
eval_steps = 1
"#;

/// Runs four ranks with these settings in `dir`.
fn run(dir: &Path, settings: &[&str]) {
    std::fs::write(dir.join("text.txt"), "a rank of the mesh waits for the tape\n".repeat(200)).unwrap();
    let [text, cache, out] = ["text.txt", "cache", "runs"].map(|name| dir.join(name));
    let text = format!(
        "{RUN}[data]\ntrain = [{text:?}]\nvalid = [{text:?}]\ncache_dir = {cache:?}\n[checkpoint]\ndir = {out:?}\n[metrics]\ndir = {out:?}\n"
    );
    let config = RunConfig::parse(&text, "test", settings).unwrap();
    let options = WorldOptions { arena_bytes: 1 << 28, ..WorldOptions::default() };
    let groups = World::in_process(config.ranks(), options).unwrap();
    std::thread::scope(|scope| {
        for group in groups {
            let config = &config;
            scope.spawn(move || {
                let ranks = ranks_of(group, config).unwrap();
                let show = |steps| Progress::as_lines(steps, Box::new(std::io::sink()));
                train(config, &Resume::Never, &ranks, &Interrupt::default(), show).unwrap();
            });
        }
    });
}

fn read(dir: &Path, name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(dir.join("runs").join(name)).unwrap()).unwrap()
}

/// Returns the metrics row of the last step.
fn last_step(dir: &Path) -> Value {
    let rows = std::fs::read_to_string(dir.join("runs/metrics.jsonl")).unwrap();
    let mut rows = rows.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    rows.rfind(|row| row.get("loss").is_some()).unwrap()
}

#[test]
fn the_report_of_a_pipeline_has_every_pass_of_its_last_step_and_every_layer_on_its_rank() {
    let dir = tempfile::tempdir().unwrap();
    let settings =
        ["parallel.pipeline_parallel=2", "parallel.tensor_parallel=2", "parallel.pipeline_schedule=zb_v"];
    run(dir.path(), &settings);

    let layout = read(dir.path(), "layout.json");
    let ranks = layout["ranks"].as_array().unwrap();
    let held: Vec<Vec<&str>> = ranks
        .iter()
        .map(|rank| {
            let stages = rank["stages"].as_array().unwrap();
            stages.iter().map(|stage| stage["holds"].as_str().unwrap()).collect()
        })
        .collect();
    // Two stages on each pipeline rank, in V shape; tensor-parallel ranks hold shards of the same stages.
    assert_eq!(held[0], held[1]);
    assert_eq!(held[2], held[3]);
    let all = [held[0][0], held[2][0], held[2][1], held[0][1]].join("; ");
    assert!(held[0][0].starts_with("embedding") && held[0][1].ends_with("head"), "{all}");
    assert_eq!(all.matches("layer").count() + all.matches('-').count(), 4, "each layer once: {all}");
    let coordinates: Vec<&Value> = ranks.iter().map(|rank| &rank["coordinates"]).collect();
    assert_eq!(coordinates[3], &serde_json::json!([1, 0, 0, 0, 1]), "{coordinates:?}");
    assert!(ranks.iter().all(|rank| rank["split"].as_u64() > Some(0)), "{layout}");

    let timeline = read(dir.path(), "timeline.json");
    assert_eq!((&timeline["step"], timeline["pipelines"].as_array().unwrap().len()), (&Value::from(3), 2));
    let schedule = Schedule::new(Kind::ZeroBubbleV, 2, 4, 2).unwrap();
    for pipeline in timeline["pipelines"].as_array().unwrap() {
        for which in ["measured", "simulated"] {
            let step = &pipeline[which];
            for rank in 0..2 {
                let row = step["rows"][rank].as_array().unwrap();
                let passes = row.iter().filter(|bar| bar[0] != "U");
                let found: Vec<String> =
                    passes.map(|bar| format!("{}{}{}", bar[1], bar[0].as_str().unwrap(), bar[2])).collect();
                let expected: Vec<String> = schedule.passes(rank).map(|pass| pass.to_string()).collect();
                assert_eq!(found, expected, "{which}, rank {rank}");
                let starts: Vec<f64> = row.iter().map(|bar| bar[3].as_f64().unwrap()).collect();
                assert!(starts.is_sorted() && starts[0] >= 0.0, "{which}, rank {rank}: {starts:?}");
            }
            let bubble = step["bubble"].as_f64().unwrap();
            assert!((0.0..1.0).contains(&bubble), "{which}: {bubble}");
        }
        assert!(pipeline["simulated"]["step_ms"].as_f64() > Some(0.0), "{pipeline}");
    }

    let comm = last_step(dir.path())["comm"].clone();
    let number = |key: &str| comm[key].as_f64().unwrap();
    // Four micro-batches: for each, two messages of 16 tokens of 32 f32 leave rank 0.
    let messages = 4.0 * 2.0 * 16.0 * 32.0 * 4.0;
    assert!(number("bytes") > messages, "{comm}, messages alone are {messages}");
    assert!(number("exposed_ms") > 0.0 && number("busy_ms") >= number("exposed_ms"), "{comm}");
    let page = std::fs::read_to_string(dir.path().join("runs/report.html")).unwrap();
    assert!(page.contains("\"simulated\":{") && page.contains("\"layout\":{"), "the report has both");
}

#[test]
fn a_square_of_ranks_sends_what_is_modelled_and_each_rank_holds_its_blocks() {
    let found = |layers: usize| {
        let dir = tempfile::tempdir().unwrap();
        let layers = format!("model.num_hidden_layers={layers}");
        let square = ["parallel.tensor_parallel=4", "parallel.tensor_layout=2d", "train.micro_batch=2"];
        run(dir.path(), &[&square[..], &[&layers]].concat());
        let layout = read(dir.path(), "layout.json");
        (last_step(dir.path())["comm"]["bytes"].as_u64().unwrap(), layout)
    };
    let ((bytes_of_3, layout), (bytes_of_2, _)) = (found(3), found(2));
    // Two micro-batches of 2 · 16 tokens, linear layers of one block. Each rank takes part in a broadcast or reduction as sender
    // or receiver: the counter counts it in full on both, the model counts what one of the two receives.
    let (tokens, split) = (32, LinearSplit::Inputs);
    let linears = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 64), (32, 64), (64, 32)];
    let received = linears.map(|(inputs, outputs)| {
        let linear = LinearShape { tokens, inputs, outputs, split };
        TensorLayout::TwoDimensions { side: 2 }.cost(linear).received_elements
    });
    let products = 2.0 * received.iter().sum::<f64>();
    // Half of 8 tokens goes to the other rank of the row, before and after each of two branches, in forward and backward.
    let exchanges = (8 * 8 * 32 / 2) as f64;
    // Two norms, whose gradients of 32 elements, with padding, are all-reduced over all ranks.
    let norms = 2.0 * 1024.0 * 2.0 * 3.0 / 4.0;
    let modelled = (2.0 * (products + exchanges) + norms) * 4.0;
    assert_eq!((bytes_of_3 - bytes_of_2) as f64, modelled);
    for rank in layout["ranks"].as_array().unwrap() {
        // A quarter of each matrix and of the two vocabulary matrices, and the norms.
        let linears: usize = linears.iter().map(|(inputs, outputs)| inputs * outputs / 4).sum();
        assert_eq!(rank["elements"], 3 * (linears + 2 * 32) + 32 + 2 * 256 / 4 * 32, "{rank}");
        assert_eq!((&rank["split"], &rank["whole"]), (&Value::from(3 * 7 + 2), &Value::from(7)), "{rank}");
    }
}

#[test]
fn tensor_exchanges_of_a_step_are_counted_and_those_of_an_evaluation_are_not() {
    let bytes = |eval_every: &str| {
        let dir = tempfile::tempdir().unwrap();
        run(dir.path(), &["parallel.tensor_parallel=4", eval_every]);
        assert!(!dir.path().join("runs/timeline.json").exists(), "there is no pipeline");
        last_step(dir.path())["comm"]["bytes"].as_u64().unwrap()
    };
    let (with, without) = (bytes("train.eval_every=1"), bytes("train.eval_every=0"));
    assert_eq!(with, without);
    // At least two all-reduces of each layer's activations in forward: 2 (P-1)/P of 16 tokens of 32 f32, for four micro-batches.
    assert!(with > 4 * 4 * 2 * (2 * 3 * 16 * 32 * 4 / 4), "{with}");
}
