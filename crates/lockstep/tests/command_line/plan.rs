//! `plan`: the memory of a plan's ranks and whether it fits; also compares the ledgers of ranks with the system's figures for
//! their processes.

use serde_json::Value;

use crate::workshop::Workshop;

/// 23 million parameters: enough to make the other memory of a process negligible.
const MODEL: [&str; 6] = [
    "model.vocab_size=256",
    "model.hidden_size=512",
    "model.intermediate_size=1536",
    "model.num_hidden_layers=7",
    "model.num_attention_heads=8",
    "model.num_key_value_heads=8",
];

fn arguments<'a>(command: &[&'a str], settings: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    let sets = settings.iter().flat_map(|setting| ["--set", setting]);
    command.iter().copied().chain(sets).chain(more.iter().copied()).collect()
}

#[test]
fn a_plan_is_predicted_and_what_is_written_runs() {
    let workshop = Workshop::new();
    let plan = |settings: &[&str], more: &[&str]| workshop.run(&arguments(&["plan"], settings, more));
    let split = ["parallel.tensor_parallel=2", "parallel.data_parallel_shard=2", "parallel.zero_stage=2"];
    let settings = [&["model.preset=baby-gpt", "train.global_batch=4"][..], &split].concat();
    let found = plan(&settings, &["--json", "--explain", "--memory", "64GiB", "-o", "plan.json"]).json();
    let row = &found["ranking"][0];
    assert_eq!(
        (&row["fits"], &row["zero_stage"], &row["mesh"]["tensor"]),
        (&true.into(), &2.into(), &2.into())
    );
    let total = row["memory_bytes"]["total"].as_u64().unwrap();
    let ranks = row["memory_by_rank"].as_array().unwrap();
    assert_eq!(ranks.iter().map(|rank| rank["ranks"].as_u64().unwrap()).sum::<u64>(), 4, "{row}");
    let sum: u64 =
        ranks[0]["made_of"].as_array().unwrap().iter().map(|item| item["bytes"].as_u64().unwrap()).sum();
    assert_eq!(ranks[0]["memory_bytes"]["total"].as_u64(), Some(sum), "{row}");
    assert!(ranks.iter().any(|rank| rank["memory_bytes"]["total"].as_u64() == Some(total)), "{row}");
    let few = plan(&settings, &["--json", "--memory", "32MiB"]).json();
    assert_eq!(few["ranking"][0]["fits"], false, "{few}");
    // A machine for each rank needs less memory than one for all.
    let spread = plan(&settings, &["--json", "--nproc-per-node", "1"]).json();
    let needed = |found: &Value| found["ranking"][0]["machine"]["needed_bytes"].as_u64().unwrap();
    assert!(needed(&spread) < needed(&few) && needed(&few) <= 4 * needed(&spread), "{spread} {few}");
    let text = plan(&settings, &["--memory", "32MiB"]).succeeds().stdout;
    assert!(text.contains("does NOT fit: 4 ranks of a machine need"), "{text}");
    let verify = ["parallel.pipeline_parallel=2"];
    let of_sample = workshop.run(&arguments(&["plan"], &verify, &["-o", "pipeline.json"])).succeeds();
    assert!(of_sample.stdout.contains("2 pipeline ranks"), "{of_sample:?}");
    let again = workshop.run(&["plan", "--plan", "pipeline.json"]).succeeds();
    assert!(again.stdout.contains("2 pipeline ranks"), "{again:?}");
    assert!(again.stderr.is_empty(), "{again:?}");
    plan(&["parallel.tensor_parallel=5"], &[]).refuses(2, &["tensor 5 does not divide"]);
}

#[test]
fn what_a_plan_file_predicts_is_what_is_booked_and_other_settings_than_its_own_are_told() {
    let workshop = Workshop::new();
    let split = ["parallel.data_parallel_shard=2", "parallel.zero_stage=1", "train.global_batch=4"];
    let with_file =
        |more: &[&str]| workshop.run(&[&["plan", "run.toml", "--plan", "plan.json"], more].concat());
    let found =
        workshop.run(&arguments(&["plan", "run.toml"], &split, &["--json", "-o", "plan.json"])).json();
    let file: Value = serde_json::from_slice(&workshop.read("plan.json")).unwrap();
    assert_eq!(found["best"], file);
    let memory = file["predicted"]["memory"].as_array().unwrap();
    let of_rank = &found["ranking"][0]["memory_by_rank"][0];
    assert_eq!(memory[0]["ranks"].as_str().unwrap().split(['-', ',']).next(), Some("0"));
    for (category, bytes) in memory[0]["bytes"].as_object().unwrap() {
        assert_eq!(Some(bytes), of_rank["memory_bytes"].get(category), "{category} of {of_rank} and {file}");
    }
    // There is no warning with the same settings.
    let same = with_file(&["--set", "train.global_batch=4"]).succeeds();
    assert!(same.stderr.is_empty(), "{same:?}");
    let told = |text: &str| {
        for part in [
            "warning: plan.json was edited, or made for other settings: rank 0 is predicted optimizer",
            "-o plan.json",
        ] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
    };
    let other = ["--set", "train.global_batch=4", "--set", "optimizer.kind=lion"];
    told(&with_file(&other).succeeds().stderr);
    let trained =
        workshop.run(&[&["train", "run.toml", "--plan", "plan.json"][..], &other].concat()).succeeds();
    told(&trained.stderr);
    assert_eq!(trained.stderr.matches("warning").count(), 1, "{trained:?}");
    // Two entries for one rank are an error.
    let mut twice = file.clone();
    let more = twice["predicted"]["memory"][0].clone();
    twice["predicted"]["memory"].as_array_mut().unwrap().push(more);
    workshop.write("plan.json", twice.to_string());
    with_file(&["--set", "train.global_batch=4"])
        .refuses(2, &["plan.json", "predicted.memory has rank 0 more than once"]);
}

#[test]
fn processes_of_ranks_have_what_their_ledgers_say_and_that_is_what_was_predicted() {
    let workshop = Workshop::new();
    let steps = ["--batch", "1", "--seq-len", "16", "--steps", "1", "--threads", "1", "--json"];
    for (precision, stage) in [("f32", 1), ("f32", 2), ("f32", 3), ("bf16", 1), ("bf16", 2), ("bf16", 3)] {
        let stage = format!("parallel.zero_stage={stage}");
        let settings = [&MODEL[..], &["parallel.data_parallel_shard=2", &stage]].concat();
        let more = [&steps[..], &["--precision", precision]].concat();
        let found =
            workshop.run(&arguments(&["bench", "step", "--model", "llama-15m"], &settings, &more)).json();
        let bytes = |memory: &Value, name: &str| memory[name].as_u64().unwrap();
        let ranks = found["memory_by_rank"].as_array().unwrap();
        let predicted = found["memory_predicted_by_rank"].as_array().unwrap();
        assert_eq!((ranks.len(), predicted.len()), (2, 2), "{found}");
        let (mut booked_bytes, mut process_bytes) = (0, 0);
        for (booked, predicted) in ranks.iter().zip(predicted) {
            for name in ["parameters", "gradients", "optimizer", "activations", "communication", "workspace"]
            {
                assert_eq!(
                    bytes(booked, name),
                    bytes(predicted, name),
                    "{precision}, {stage}, {name}: {found}"
                );
            }
            booked_bytes += bytes(predicted, "total") + bytes(booked, "cached");
            process_bytes += bytes(booked, "process_pss");
        }
        let off = process_bytes as f64 / booked_bytes as f64 - 1.0;
        assert!(
            off.abs() < 0.1,
            "{precision}, {stage}: {process_bytes} bytes of processes, {booked_bytes} of ledgers"
        );
    }
}

#[test]
fn a_machine_is_not_measured_for_a_file_that_cannot_be_written() {
    let workshop = Workshop::new();
    let begin = std::time::Instant::now();
    let arguments = ["bench", "machine", "-o", "nowhere/machine.toml"];
    workshop.run(&arguments).refuses(2, &["cannot write nowhere/machine.toml"]);
    assert!(begin.elapsed() < std::time::Duration::from_secs(10), "{:?}", begin.elapsed());
}

#[test]
fn a_search_finds_a_plan_that_train_takes_and_a_page_shows_it() {
    let workshop = Workshop::new();
    let settings = ["train.precision=f32", "train.steps=2", "data.train=[\"text.txt\"]"];
    workshop.write("text.txt", "What is searched is found. ".repeat(400));
    let more = ["--model", "baby-gpt", "--seq-len", "64", "--global-batch", "4", "--json", "--explain"];
    let outputs = ["-o", "best.json", "--html", "plan.html"];
    let found = workshop.run(&arguments(&["plan"], &settings, &[&more[..], &outputs].concat())).json();
    let rows = found["ranking"].as_array().unwrap();
    let step = |row: &Value| row["step_ms"].as_f64().unwrap();
    assert!(!rows.is_empty() && rows.is_sorted_by(|a, b| step(a) <= step(b)), "{rows:?}");
    assert_eq!(found["best"]["predicted"]["step"]["step_ms"].as_f64(), Some(step(&rows[0])), "{found}");
    assert!(found["search"]["candidates"].as_u64() >= found["search"]["valued"].as_u64(), "{found}");
    assert!(!found["neighbours"].as_array().unwrap().is_empty(), "{found}");
    let page = String::from_utf8(workshop.read("plan.html")).unwrap();
    assert!(page.contains("The best plans"), "{page}");
    let run = "model.preset = \"baby-gpt\"\n[train]\nseq_len = 64\nglobal_batch = 4\n";
    workshop.write("run.toml", run);
    workshop.run(&arguments(&["train", "run.toml"], &settings, &["--plan", "best.json"])).succeeds();
}

#[test]
fn machines_with_nonsense_are_told_all_of_it_at_once() {
    let workshop = Workshop::new();
    let cluster = "[node]\ndevices = 0\ndevice = { peak_tflops = { bf17 = 3 }, memory = \"-3GiB\", memory_gb_per_s = 0 }\n";
    workshop.write("bad.toml", cluster);
    let told = [
        "devices: 0 is not",
        "\"bf17\" is not known; the nearest is bf16",
        "\"-3GiB\" is not a size",
        "memory_gb_per_s: 0",
    ];
    workshop.run(&["plan", "--cluster", "bad.toml"]).refuses(2, &told);
    workshop.run(&["plan", "--cluster", "dgx-h10"]).refuses(2, &["the nearest is dgx-h100"]);
    workshop
        .run(&["plan", "--cluster", "nowhere.toml"])
        .refuses(2, &["cannot read the cluster nowhere.toml"]);
    let large = [
        "plan",
        "--model",
        "llama3-405b",
        "--cluster",
        "dgx-h100",
        "--global-batch",
        "8",
        "--seq-len",
        "1024",
        // More than the disk of a node holds.
        "--set",
        "model.num_hidden_layers=2000",
    ];
    let told = ["no plan fits", "on dgx-h100", "the state of the model takes 104 TiB", "of host memory"];
    workshop.run(&large).refuses(2, &told);
}

/// Flags of a question with only a model and a cluster.
const QUESTION: [&str; 5] = ["plan", "--model", "llama3-8b", "--cluster", "h100x16"];

#[test]
fn a_question_without_a_workload_gets_a_usual_one_that_is_told() {
    let workshop = Workshop::new();
    let text = workshop.run(&QUESTION).succeeds().stdout;
    let told = [
        "workload   llama3-8b (8.0B parameters), bf16, 512 sequences of 8,192 tokens = 4,194,304 tokens a step",
        "--precision, --seq-len, --global-batch say otherwise",
        "cluster    dgx-h100x2: 2 nodes of 8 x h100-sxm",
        "on demand",
    ];
    for line in told {
        assert!(text.contains(line), "{line:?} is not in:\n{text}");
    }
    assert!(!text.contains("-0.0 %"), "{text}");
    let own = ["--precision", "f32", "--seq-len", "4096", "--global-batch", "64", "--json"];
    let found = workshop.run(&[&QUESTION[..], &own].concat()).json();
    let workload = &found["workload"];
    assert_eq!(
        (&workload["precision"], &workload["tokens_per_step"], &workload["assumed"]),
        (&"f32".into(), &(4096 * 64).into(), &serde_json::json!([])),
        "{workload}"
    );
}

#[test]
fn a_training_and_other_numbers_of_nodes_are_reckoned() {
    let workshop = Workshop::new();
    let question = [&QUESTION[..], &["--tokens", "1T", "--scaling=1,4"]].concat();
    let found = workshop.run(&[&question[..], &["--json"]].concat()).json();
    let (training, figures) = (&found["training"], &found["ranking"][0]);
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{value} is no number"));
    let days = 1e12 / number(&figures["tokens_per_s"]) / 86_400.0;
    assert!((number(&training["days"]) / days - 1.0).abs() < 1e-9, "{training} is not {days} days");
    let device_hours = number(&training["days_with_failures"]) * 24.0 * 16.0;
    assert!((number(&training["device_hours"]) / device_hours - 1.0).abs() < 1e-9, "{training}");
    let dollars = device_hours / 16.0 * number(&figures["price_per_hour"]);
    assert!((number(&training["dollars"]) / dollars - 1.0).abs() < 1e-9, "{training} is not ${dollars}");
    let rows = found["scaling"]["rows"].as_array().unwrap();
    let nodes: Vec<u64> = rows.iter().filter_map(|row| row["nodes"].as_u64()).collect();
    assert_eq!(nodes, [1, 4]);
    let speedup = number(&rows[0]["strong"]["step_ms"]) / number(&rows[1]["strong"]["step_ms"]);
    assert!((2.0..=4.4).contains(&speedup), "{speedup} on four times the nodes");
    assert_eq!(
        rows[1]["weak_global_batch"].as_u64(),
        Some(4 * rows[0]["weak_global_batch"].as_u64().unwrap())
    );
    workshop.run(&[&QUESTION[..], &["--tokens", "1X"]].concat()).refuses(2, &["300B or 1T"]);
    workshop.run(&[&QUESTION[..], &["--limit", "5 days"]].concat()).refuses(2, &["no unit"]);
}

#[test]
fn a_search_that_is_stopped_says_how_much_better_another_plan_could_be() {
    let workshop = Workshop::new();
    let stopped =
        workshop.run(&["plan", "--model", "llama3-8b", "--cluster", "dgx-h100x16", "--limit", "0s"]);
    stopped.refuses(2, &["no plan was found so far", "--limit gives the search more time"]);
}

#[test]
fn a_model_that_does_not_fit_is_told_what_would() {
    let workshop = Workshop::new();
    let refused = workshop.run(&["plan", "--model", "llama3-70b", "--cluster", "tpu-v5p"]);
    refused.refuses(2, &["no plan fits: llama3-70b", "--cluster tpu-v5px"]);
}

/// Returns the keys after `--set` in a line, as they are typed.
fn typed_settings(line: &str) -> Vec<String> {
    let typed = line.split("--set ").skip(1).map(|part| part.split([' ', ':']).next().unwrap_or_default());
    typed.map(|setting| setting.trim_matches('\'').to_owned()).collect()
}

#[test]
fn a_given_plan_that_does_not_fit_is_told_what_would() {
    let workshop = Workshop::new();
    let given = ["plan", "--model", "llama3-8b", "--cluster", "dgx-h100", "--set"];
    for (plan, has_nearest) in [("data_parallel_replicate=8", true), ("tensor_parallel=1", false)] {
        let plan = format!("parallel.{plan}");
        let given = [&given[..], &[&plan]].concat();
        let text = workshop.run(&given).succeeds().stdout;
        assert!(text.contains("does NOT fit"), "{text}");
        assert_eq!(text.contains("it fits    with --set"), has_nearest, "{text}");
        let lines: Vec<&str> = text.lines().skip_while(|line| !line.starts_with("verdict")).skip(1).collect();
        assert!((1..=2).contains(&lines.len()), "{text}");
        for line in lines {
            let settings = typed_settings(line);
            assert!(!settings.is_empty(), "{line}");
            let more = settings.iter().flat_map(|setting| ["--set", setting]);
            let told = workshop.run(&given.iter().copied().chain(more).collect::<Vec<&str>>()).succeeds();
            assert!(told.stdout.contains("verdict    fits"), "{line}\n{told:?}");
        }
        let found = workshop.run(&[&given[..], &["--json"]].concat()).json();
        assert!(found["remedies"]["best"]["settings"].is_array(), "{found}");
    }
    // A schedule is dropped from a plan without a pipeline.
    let pipeline = ["--set", "parallel.pipeline_parallel=2", "--set", "parallel.pipeline_schedule=1f1b"];
    let large =
        ["plan", "--model", "llama3-8b", "--cluster", "h100x2", "--seq-len", "512", "--global-batch", "8"];
    let text = workshop.run(&[&large[..], &pipeline].concat()).succeeds().stdout;
    assert!(text.contains("does NOT fit") && text.contains("the best   of a search: "), "{text}");
    // If no plan fits, other machines are suggested.
    let none =
        ["plan", "--model", "llama3-70b", "--cluster", "tpu-v5p", "--set", "parallel.tensor_parallel=4"];
    let text = workshop.run(&none).succeeds().stdout;
    assert!(text.contains("others fit with --cluster tpu-v5px"), "{text}");
}

#[test]
fn fine_tuning_of_a_preset_is_planned_and_what_is_frozen_has_no_state() {
    let workshop = Workshop::new();
    let question =
        ["plan", "--model", "llama3-8b", "--cluster", "h100x8", "--seq-len", "2048", "--global-batch", "32"];
    let lora = ["--set", "fine_tune.lora_rank=8"];
    let given = ["--json", "--set", "parallel.data_parallel_shard=8", "--set", "parallel.zero_stage=2"];
    let [whole, tuned] =
        [&[][..], &lora].map(|more: &[&str]| workshop.run(&[&question[..], &given, more].concat()).json());
    let memory = |found: &Value, kind: &str| found["ranking"][0]["memory_bytes"][kind].as_u64().unwrap();
    for kind in ["gradients", "optimizer"] {
        let (tuned, whole) = (memory(&tuned, kind), memory(&whole, kind));
        assert!(50 * tuned < whole, "{kind}: {tuned} of {whole}");
    }
    assert!(memory(&tuned, "parameters") >= memory(&whole, "parameters"), "{tuned}");
    let trained = tuned["workload"]["trained_parameters"].as_u64().unwrap();
    assert!((20_000_000..22_000_000).contains(&trained), "{trained}");
    // The whole run on one device, in which the state of the full model would not fit.
    let one =
        ["plan", "--model", "llama3-8b", "--cluster", "h100", "--seq-len", "2048", "--global-batch", "32"];
    let found = workshop.run(&[&one[..], &lora].concat()).succeeds().stdout;
    assert!(found.contains("8.0B parameters, 21.0M trained") && !found.contains("in host memory"), "{found}");
    workshop.write("run.toml", "[model]\npreset = \"llama3.2-1b\"\n[fine_tune]\nfreeze = [\"*mlp*\"]\n");
    workshop
        .run(&["plan", "run.toml", "--cluster", "h100", "--seq-len", "1024", "--global-batch", "8"])
        .succeeds();
    // A run with frozen parameters needs pretrained weights.
    workshop.run(&["train", "run.toml"]).refuses(2, &["would keep random weights"]);
}

#[test]
fn the_headline_of_a_plan_says_its_zero_stage() {
    let workshop = Workshop::new();
    for (settings, stage) in [
        (&["parallel.data_parallel_replicate=2"][..], 0),
        (&["parallel.data_parallel_shard=2", "parallel.zero_stage=0"], 0),
        (&["parallel.data_parallel_shard=2", "parallel.zero_stage=3"], 3),
    ] {
        let text = workshop.run(&arguments(&["plan"], settings, &[])).succeeds().stdout;
        let headline = text.lines().find(|line| line.starts_with("plan ")).unwrap_or_default();
        assert_eq!(headline.matches("ZeRO").count(), 1, "{headline}");
        assert!(headline.contains(&format!("ZeRO stage {stage}")), "{headline}");
    }
}

#[test]
fn machines_are_counted_as_other_tools_count_them() {
    let workshop = Workshop::new();
    let refused = |flags: &[&str], told: &str| {
        workshop.run(&[&["plan", "--model", "llama3-8b"], flags].concat()).refuses(2, &[told]);
    };
    refused(&["--gpus", "16"], "write --cluster dgx-h100x2 for 16 x h100-sxm");
    refused(&["--num-gpus=4"], "write --cluster h100x4 for 4 x h100-sxm");
    refused(&["--nnodes", "2"], "write --cluster dgx-h100x2");
    refused(&["--cluster", "a100", "--gpus", "32"], "write --cluster dgx-a100x4");
    refused(&["--cluster", "h1000"], "accelerators (h100x16)");
    let plan = ["--json", "--set", "parallel.data_parallel_shard=16", "--set", "parallel.zero_stage=3"];
    for cluster in ["16xH100", "2x8xH100", "h100:16", "h100x16"] {
        let named = ["plan", "--model", "llama3-8b", "--cluster", cluster];
        let found = workshop.run(&[&named[..], &plan].concat()).json();
        assert_eq!(found["best"]["predicted"]["step"]["cluster"], "dgx-h100x2", "{cluster}");
    }
}

#[test]
fn more_ranks_than_devices_are_refused_with_a_cluster_that_has_enough() {
    let workshop = Workshop::new();
    let plan = |cluster: &str, shards: usize| {
        let shards = format!("parallel.data_parallel_shard={shards}");
        let settings =
            [&shards[..], "parallel.zero_stage=3", "parallel.recompute=full", "train.micro_batch=1"];
        let command = ["plan", "--model", "llama3-8b", "--global-batch", "512", "--cluster", cluster];
        workshop.run(&arguments(&command, &settings, &[]))
    };
    for (cluster, shards, told) in [
        (
            "h100x8",
            32,
            "32 ranks, and the cluster has 8 devices (dgx-h100): write --cluster dgx-h100x4, which has 32",
        ),
        (
            "h100x4",
            8,
            "8 ranks, and the cluster has 4 devices (4 of 8 devices of dgx-h100): write --cluster dgx-h100,",
        ),
        (
            "dgx-a100x2",
            64,
            "64 ranks, and the cluster has 16 devices (dgx-a100x2): write --cluster dgx-a100x8,",
        ),
    ] {
        let refused = plan(cluster, shards);
        assert!(refused.stdout.is_empty(), "{refused:?}");
        refused.refuses(2, &[told, "or smaller degrees in [parallel]"]);
    }
    plan("dgx-h100x4", 32).succeeds();
    // Ranks of this machine may share its cores.
    let cores = std::thread::available_parallelism().unwrap().get();
    let shards = format!("parallel.data_parallel_shard={}", 2 * cores);
    let batch = format!("train.global_batch={}", 2 * cores);
    workshop.run(&arguments(&["plan"], &[&shards, &batch], &[])).succeeds();
}

#[test]
fn a_plan_with_state_in_host_memory_is_read_back_as_the_same_plan() {
    let workshop = Workshop::new();
    let question = ["plan", "--model", "llama3-70b", "--cluster", "h100x16", "--limit", "20s", "--json"];
    let found = workshop.run(&[&question[..], &["-o", "plan.json"]].concat()).json();
    let file: Value = serde_json::from_slice(&workshop.read("plan.json")).unwrap();
    assert_eq!(file["residence"]["optimizer"], "cpu", "{file}");
    let again = workshop.run(&[&question[..], &["--plan", "plan.json"]].concat());
    assert!(again.stderr.is_empty(), "{again:?}");
    let again = again.json();
    let [found, again] = [&found["ranking"][0], &again["ranking"][0]];
    assert_eq!(again["fits"], true, "{again}");
    for figure in ["mesh", "step_ms", "memory_bytes", "step_parts_ms"] {
        assert_eq!(found[figure], again[figure], "{figure}");
    }
    // Ranks on CPUs keep everything in host memory anyway.
    let offloaded = ["parallel.offload.optimizer=cpu", "parallel.offload.fraction=0.5"];
    workshop.run(&arguments(&["plan", "run.toml"], &offloaded, &["-o", "small.json"])).succeeds();
    workshop.run(&["train", "run.toml", "--plan", "small.json"]).succeeds();
    // Offload needs room in host memory.
    let replicas =
        ["parallel.data_parallel_replicate=8", "parallel.offload.optimizer=cpu", "parallel.recompute=full"];
    let little =
        ["plan", "--model", "llama3-8b", "--cluster", "dgx-h100", "--memory", "640GB", "--seq-len", "1024"];
    let told = workshop.run(&arguments(&little, &replicas, &[])).succeeds().stdout;
    assert!(told.contains("does NOT fit: it has no room for what is offloaded"), "{told}");
}

#[test]
fn a_model_in_place_of_a_run_is_told_its_flag() {
    let workshop = Workshop::new();
    let plan = |run: &str| workshop.run(&["plan", run, "--cluster", "h100x16"]);
    plan("llama3-70b").refuses(2, &["llama3-70b", "write `lockstep plan --model llama3-70b`"]);
    plan("llama4-70b.toml").refuses(2, &["cannot read the configuration llama4-70b.toml: No such file"]);
    std::fs::create_dir(workshop.path("llama")).unwrap();
    workshop.write("llama/config.json", "{}");
    std::fs::create_dir(workshop.path("empty")).unwrap();
    let empty = plan("empty");
    assert!(!empty.stderr.contains("is a model"), "{empty:?}");
    plan("llama").refuses(2, &["llama is a model: write `lockstep plan --model llama`"]);
}

#[test]
fn a_memory_without_a_unit_is_refused() {
    let workshop = Workshop::new();
    let plan = |memory: &str| workshop.run(&["plan", "run.toml", "--memory", memory]);
    plan("80").refuses(2, &["80 bytes; write 80GB"]);
    plan("1048576").succeeds();
}

/// Returns the description of the run in its records.
fn recorded(workshop: &Workshop) -> Value {
    serde_json::from_slice(&workshop.read("runs/run.json")).unwrap()
}

#[test]
fn a_run_that_does_not_say_how_it_is_split_is_planned_and_goes_on_by_the_same_plan() {
    let workshop = Workshop::new();
    let train =
        |arguments: &[&str]| workshop.run(&[&["train", "run.toml", "-v"], arguments].concat()).succeeds();
    let one = train(&[]);
    assert!(one.stderr.contains("plan       one rank, micro-batches of 2 sequences: "), "{one:?}");
    assert!(one.stderr.contains("this machine is not measured"), "{one:?}");
    let two = train(&["--nproc-per-node", "2", "--resume", "never"]);
    assert!(two.stderr.contains("plan       2 replicas, micro-batches of 2 sequences: "), "{two:?}");
    assert_eq!(two.stderr.matches("plan  ").count(), 1, "{two:?}");
    let settings = recorded(&workshop)["settings"].clone();
    let value = |key: &str| {
        settings.as_array().unwrap().iter().find(|setting| setting["key"] == key).unwrap()["value"].clone()
    };
    assert_eq!(value("parallel.data_parallel_replicate"), 2, "{settings}");
    // With the same number of ranks as before, the plan is kept.
    let more = train(&["--nproc-per-node", "2", "--set", "train.steps=6"]);
    assert!(more.stderr.contains("plan       2 replicas, as checkpoints/step-00000004"), "{more:?}");
    let other = train(&["--set", "train.steps=8"]);
    assert!(other.stderr.contains("plan       one rank, micro-batches"), "{other:?}");
    // No plan is printed if the user has set it.
    let told = train(&["--set", "train.steps=8", "--set", "parallel.tensor_parallel=1"]);
    assert!(!told.stderr.contains("plan  "), "{told:?}");
}

#[test]
fn a_machine_learns_from_a_run_and_the_next_run_is_predicted() {
    let workshop = Workshop::new();
    let steps = ["--set", "train.steps=12", "--set", "train.precision=f32", "--resume", "never"];
    let train = |more: &[&str]| workshop.run(&[&["train", "run.toml"], &steps[..], more].concat()).succeeds();
    let first = train(&[]);
    assert!(recorded(&workshop)["predicted"].is_null(), "{first:?}");
    let learned = workshop.run(&["plan", "--calibrate", "runs", "--json"]).succeeds().json();
    let run = &learned["runs"][0];
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{value} of {learned}"));
    let (measured, after) = (number(&run["measured"]["step_ms"]), number(&run["after"]["step_ms"]));
    assert!((after / measured - 1.0).abs() < 0.01, "{learned}");
    assert!(workshop.path("cache/lockstep/machine.toml").is_file());
    let second = train(&["-v", "--nproc-per-node", "2", "--set", "metrics.dir=both"]);
    let words = second.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("predicted from measurements of this machine"), "{second:?}");
    let both: Value = serde_json::from_slice(&workshop.read("both/run.json")).unwrap();
    assert!(number(&both["predicted"]["step_ms"]) > 0.0 && both["first_step"] == 1, "{both}");
    let report = String::from_utf8(workshop.read("both/report.html")).unwrap();
    assert!(report.contains("\"usual_step\":{\"booked_bytes\":"), "{report}");
    // From both runs at once, to another file.
    let both = ["plan", "--calibrate", "runs", "--calibrate", "both", "--output", "two.toml"];
    let told = workshop.run(&both).succeeds();
    assert!(told.stdout.contains("of it waiting for other ranks"), "{told:?}");
    assert!(String::from_utf8(workshop.read("two.toml")).unwrap().contains("[[link]]"));
}

#[test]
fn a_search_for_so_many_ranks_looks_at_no_others() {
    let workshop = Workshop::new();
    let ranks = |number: &str| {
        let found =
            workshop.run(&["plan", "run.toml", "--nproc-per-node", number, "--json"]).succeeds().json();
        let rows = found["ranking"].as_array().unwrap().clone();
        assert!(!rows.is_empty(), "{found}");
        let degree = |row: &Value, axis: &str| row["mesh"][axis].as_u64().unwrap_or(1);
        let axes = ["pipeline", "replicate", "shard", "context", "tensor"];
        rows.iter().map(|row| axes.map(|axis| degree(row, axis)).iter().product()).collect::<Vec<u64>>()
    };
    for (number, each) in [("1", 1), ("2", 2), ("4", 4)] {
        let found = ranks(number);
        assert!(found.iter().all(|ranks| *ranks == each), "{number}: {found:?}");
    }
}

#[test]
fn what_is_no_run_teaches_nothing() {
    let workshop = Workshop::trained();
    let refused = |arguments: &[&str], parts: &[&str]| {
        workshop.run(&[&["plan", "--calibrate"], arguments].concat()).refuses(2, parts);
    };
    refused(&["nowhere"], &["nowhere"]);
    refused(&["runs"], &["too few steps", "3 more"]);
    refused(&["runs", "run.toml"], &["cannot be used with"]);
    workshop.run(&["train", "run.toml", "--set", "train.steps=8"]).succeeds();
    refused(&["runs", "--cluster", "dgx-a100"], &["a preset is no file", "--output"]);
}

#[test]
fn a_plan_that_a_search_has_written_is_not_called_edited() {
    let workshop = Workshop::new();
    workshop.run(&["plan", "run.toml", "--nproc-per-node", "2", "-o", "found.json"]).succeeds();
    let trained = workshop.run(&["train", "run.toml", "--plan", "found.json"]).succeeds();
    assert!(!trained.stderr.contains("warning"), "{trained:?}");
}
