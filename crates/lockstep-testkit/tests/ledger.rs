//! Tests of predicted memory: the prediction for a rank must equal its arena's ledger, by category and to the byte,
//! after the engine is built and after steps.
//!
//! The engine allocates the flat stores from the same list that the prediction sums. So the plans here vary the other
//! buffers: activations, workspace, staging of collectives and disks, and gathered weights.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

use lockstep_config::{RunConfig, resolve_model};
use lockstep_engine::{Engine, Ranks};
use lockstep_observe::metrics::StepMetrics;
use lockstep_plan::schedule::Kind;
use lockstep_plan::{MemoryBytes, MemoryCategory, OffloadBytes};
use lockstep_planner::Forecast;
use lockstep_testkit::parity::{
    DEEPSEEK, GPT2, LLAMA, MIXTRAL, MIXTURES, MODELS, QWEN2, QWEN2_MOE, QWEN3, TinyModel, Workbench,
    expert_splits, on_ranks, pairs, splits, square,
};
use lockstep_train::verify::watch;
use lockstep_train::{Error, StepObserver};

/// Upper bound on the kernels' caches in each of these tiny models: attention scratch and partial sums.
const MOST_CACHED_BYTES: usize = 2 << 20;

/// Observer that records the ledger at the start of a run and after two steps.
#[derive(Default)]
struct Bookkeeper {
    predicted: MemoryBytes,
    predicted_traffic: OffloadBytes,
    moved: OffloadBytes,
    booked: Vec<(&'static str, MemoryBytes)>,
}

impl StepObserver for Bookkeeper {
    fn begins(&mut self, engine: &mut Engine) {
        self.predicted = engine.predicted_memory().by_category();
        self.predicted_traffic = engine.predicted_disk_traffic().total();
        self.booked.push(("at the start", engine.arena().in_use()));
    }

    fn gradients_ready(&mut self, step: u64, engine: &mut Engine) -> Result<(), Error> {
        if step == 3 {
            self.booked.push(("after two steps", engine.arena().in_use()));
        }
        Ok(())
    }

    fn step_ended(&mut self, row: &StepMetrics) {
        // The first step still finds windows in memory that were loaded at the start.
        if let Some(disk) = row.disk.filter(|_| row.step == 2) {
            self.moved = OffloadBytes { read: disk.read_bytes, written: disk.written_bytes, waited: 0 };
        }
    }
}

/// Returns true if the disk traffic is within a tenth of the prediction. When few windows fit into memory, the number
/// of cache hits depends on the windows that were loaded first.
fn is_near(moved: OffloadBytes, predicted: OffloadBytes) -> bool {
    let is_near = |moved: u64, predicted: u64| moved.abs_diff(predicted) * 10 <= predicted;
    is_near(moved.read, predicted.read) && is_near(moved.written, predicted.written)
}

/// Returns true if exactly as much is written as predicted, and no more is read. In a stage with few blocks, saved
/// activations may still be in memory when backward needs them.
fn reads_no_more(moved: OffloadBytes, predicted: OffloadBytes) -> bool {
    moved.read <= predicted.read && moved.written == predicted.written
}

/// Returns every difference between the ledgers of a plan's ranks and their predictions.
fn differences(bench: &Workbench, model: TinyModel, plan: &[&str]) -> Result<Vec<String>, Error> {
    let settings: Vec<&str> = plan.iter().copied().chain(["train.steps=3"]).collect();
    let config = bench.config(model, &settings)?;
    let forecast = Forecast::of(&config, &resolve_model(&config)?)?;
    let seen = on_ranks(&config, |ranks: &Ranks| {
        let mut bookkeeper = Bookkeeper::default();
        watch(&config, ranks, &mut bookkeeper)?;
        Ok((ranks.rank(), bookkeeper))
    })?;
    let mut lines = Vec::new();
    for (rank, Bookkeeper { predicted, predicted_traffic, moved, booked }) in seen {
        // A model with router biases writes these in separate transfers.
        let has_frames = config.plan.residence.have_activations_on_disk();
        let is_foretold = if has_frames && config.plan.mesh.pipeline > 1 { reads_no_more } else { is_near };
        if model.name != DEEPSEEK.name && !is_foretold(moved, predicted_traffic) {
            lines.push(format!("rank {rank} moves {moved:?} in a step, predicted {predicted_traffic:?}"));
        }
        let of_launcher = forecast.of_rank(rank).by_category();
        for (category, bytes) in predicted.entries().filter(|(category, _)| !is_of_run(*category)) {
            if of_launcher[category] != bytes {
                let name = category.name();
                lines.push(format!(
                    "rank {rank}, {name}: the rank predicts {bytes}, the launcher {}",
                    of_launcher[category]
                ));
            }
        }
        if booked.len() != 2 {
            lines.push(format!("rank {rank}: the run has not come to its third step"));
        }
        for (when, booked) in booked {
            for (category, booked) in booked.entries() {
                let name = category.name();
                if category == MemoryCategory::Cached {
                    let most = if when == "at the start" { 0 } else { MOST_CACHED_BYTES };
                    if booked > most {
                        lines.push(format!(
                            "rank {rank} {when}, {name}: {booked}, at most {most} are allowed"
                        ));
                    }
                } else if booked != predicted[category] && !is_of_run(category) {
                    let predicted = predicted[category];
                    lines.push(format!("rank {rank} {when}, {name}: predicted {predicted}, booked {booked}"));
                }
            }
        }
    }
    Ok(lines)
}

/// Returns true if the training run books this category, and not the engine.
fn is_of_run(category: MemoryCategory) -> bool {
    category == MemoryCategory::Snapshot
}

fn check<Setting: AsRef<str>>(models: &[TinyModel], plans: &[Vec<Setting>]) {
    let bench = Workbench::new().unwrap();
    let mut failures = Vec::new();
    for model in models {
        for plan in plans {
            let plan: Vec<&str> = plan.iter().map(AsRef::as_ref).collect();
            let lines = differences(&bench, *model, &plan).unwrap_or_else(|error| vec![error.to_string()]);
            if !lines.is_empty() {
                failures.push(format!("{}, {}:\n  {}", model.name, plan.join(" "), lines.join("\n  ")));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn with(splits: Vec<Vec<String>>, more: &[&str]) -> Vec<Vec<String>> {
    let more = || more.iter().map(ToString::to_string);
    splits.into_iter().map(|split| split.into_iter().chain(more()).collect()).collect()
}

fn alone(splits: Vec<lockstep_testkit::parity::Split>) -> Vec<Vec<String>> {
    splits.into_iter().map(|split| split.settings).collect()
}

#[test]
fn one_rank_books_what_was_predicted() {
    let plans = [
        &[][..],
        &["parallel.recompute=selective"],
        &["parallel.recompute=full"],
        &["train.precision=bf16"],
        &["train.precision=f16"],
        &["train.global_batch=1", "train.micro_batch=1"],
        &["train.threads=3"],
    ];
    check(&[GPT2, LLAMA, QWEN3, MIXTRAL, DEEPSEEK], &plans.map(<[&str]>::to_vec));
}

#[test]
fn every_split_books_what_was_predicted() {
    check(&MODELS, &alone(splits(2)));
    check(&[LLAMA, QWEN2], &with(alone(vec![square(2)]), &["parallel.recompute=selective"]));
}

#[test]
fn so_does_every_split_over_four_ranks_whatever_it_recomputes() {
    for recompute in ["selective", "full"] {
        check(&[LLAMA], &with(alone(splits(4)), &[&format!("parallel.recompute={recompute}")]));
    }
}

#[test]
fn every_pair_of_splits_books_what_was_predicted() {
    check(&[LLAMA], &pairs(&splits(2)));
}

#[test]
fn every_split_of_a_mixture_books_what_was_predicted() {
    let all = || expert_splits(2).into_iter().chain(splits(2)).collect::<Vec<_>>();
    check(&[MIXTRAL, QWEN2_MOE], &alone(all()));
    check(&[MIXTRAL], &pairs(&all()));
    let shards = ["parallel.data_parallel_shard=4", "parallel.expert_parallel=2", "parallel.zero_stage=3"];
    check(&MIXTURES, &[shards.to_vec()]);
}

#[test]
fn schedules_with_many_micro_batches_book_what_was_predicted() {
    for schedule in Kind::ALL.map(Kind::name) {
        let plan = [
            "parallel.pipeline_parallel=2".to_owned(),
            format!("parallel.pipeline_schedule={schedule}"),
            "train.global_batch=8".to_owned(),
            "train.micro_batch=1".to_owned(),
        ];
        check(&[GPT2], &[plan.to_vec()]);
    }
    check(&[LLAMA], &[vec!["parallel.pipeline_parallel=2", "parallel.pipeline_stages=[1, 5]"]]);
}

#[test]
fn what_travels_as_small_integers_books_what_was_predicted() {
    let shards = |more: &[&'static str]| [&["parallel.data_parallel_shard=2"], more].concat();
    let (weights, gradients) = ("parallel.quantize_weights=int8", "parallel.quantize_gradients=int8");
    let (int4, forgets) = ("parallel.quantize_gradients=int4", "parallel.quantize_feedback=false");
    let (one, two, three) = ("parallel.zero_stage=1", "parallel.zero_stage=2", "parallel.zero_stage=3");
    let [replicas, tensor, pipeline, context] = [
        "parallel.data_parallel_replicate=2",
        "parallel.tensor_parallel=2",
        "parallel.pipeline_parallel=2",
        "parallel.context_parallel=2",
    ];
    let mut plans = vec![
        shards(&[three, weights]),
        shards(&[one, gradients]),
        shards(&[two, int4]),
        shards(&[two, int4, forgets]),
        shards(&[three, weights, int4]),
        shards(&[two, replicas, gradients]),
        shards(&[three, tensor, weights, gradients]),
        shards(&[three, pipeline, weights, int4]),
        shards(&[three, context, weights, gradients]),
        shards(&[three, weights, gradients, "train.precision=bf16"]),
        shards(&[three, weights, int4, forgets, "train.precision=f16"]),
    ];
    check(&[GPT2, LLAMA], &plans);
    let shards = |more: &[&'static str]| {
        [&["parallel.data_parallel_shard=4", "parallel.expert_parallel=2"], more].concat()
    };
    plans = vec![shards(&[two, int4]), shards(&[three, weights, gradients])];
    check(&[MIXTRAL], &plans);
    // Three replicas, so that the pieces of owned gradients differ in length.
    let three_copies = [
        "parallel.data_parallel_replicate=3",
        "parallel.data_parallel_shard=2",
        two,
        gradients,
        "train.global_batch=12",
    ];
    check(&[LLAMA], &[three_copies.to_vec()]);
}

#[test]
fn layers_that_compute_again_by_themselves_book_what_was_predicted() {
    let rules =
        "parallel.recompute={ default = \"selective\", layers = [{ from = 1, every = 2, mode = \"full\" }] }";
    check(&[GPT2, LLAMA, MIXTRAL], &[vec![rules], vec![rules, "parallel.pipeline_parallel=2"]]);
}

#[test]
fn slices_of_what_blocks_were_given_book_what_was_predicted() {
    let with_slices = |plan: &[&'static str]| {
        let common = ["parallel.tensor_parallel=2", "parallel.partition_activations=true"];
        [&common[..], plan].concat()
    };
    let (full, bf16) = ("parallel.recompute=full", "train.precision=bf16");
    let some =
        "parallel.recompute={ default = \"selective\", layers = [{ from = 1, every = 2, mode = \"full\" }] }";
    let many = ["parallel.pipeline_parallel=2", "train.global_batch=8", "train.micro_batch=1"];
    let mut plans = vec![
        with_slices(&[full]),
        with_slices(&[full, bf16]),
        with_slices(&[some]),
        with_slices(&[full, "parallel.data_parallel_shard=2", "parallel.zero_stage=3"]),
        with_slices(&[some, "parallel.pipeline_parallel=2", "parallel.pipeline_stages=[1, 5]"]),
    ];
    let schedules = ["1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zb_v"];
    let schedules = schedules.map(|name| format!("parallel.pipeline_schedule={name}"));
    let of_schedule = |schedule: &String| {
        let plan = [&with_slices(&[full]), &many[..]].concat();
        plan.into_iter().map(ToOwned::to_owned).chain([schedule.clone()]).collect::<Vec<String>>()
    };
    check(&[GPT2], &schedules.iter().map(of_schedule).collect::<Vec<_>>());
    check(&[LLAMA, MIXTRAL], &plans);
    // With three ranks no value splits evenly.
    let thirds = ["parallel.tensor_parallel=3", "parallel.partition_activations=true", full];
    let model = ["model.n_head=6", "model.n_embd=36", "train.seq_len=14", "train.micro_batch=1"];
    plans = vec![[&thirds[..], &model].concat()];
    check(&[GPT2], &plans);
}

#[test]
fn what_is_frozen_books_what_was_predicted() {
    let lora = "fine_tune.lora_rank=2";
    let shards = |stage| vec![lora, "parallel.data_parallel_shard=2", stage];
    let plans = [
        vec![lora],
        shards("parallel.zero_stage=3"),
        vec![lora, "parallel.pipeline_parallel=2", "train.precision=bf16"],
        [shards("parallel.zero_stage=2"), vec!["parallel.quantize_gradients=int8"]].concat(),
        // Matrices with rows of 32 are quantized, others stay numbers.
        vec![lora, "fine_tune.quantize=int8"],
        [shards("parallel.zero_stage=2"), vec!["fine_tune.quantize=int8", "train.precision=bf16"]].concat(),
        vec![lora, "fine_tune.quantize=int4", "parallel.pipeline_parallel=2", "parallel.recompute=full"],
    ];
    // Only these models of the matrix start from pretrained weights, which freezing requires.
    check(&[MIXTRAL, QWEN2_MOE], &plans);
}

#[test]
fn weights_that_are_gathered_book_what_was_predicted() {
    let settings: [&[&str]; 5] = [
        &["parallel.reshard_after_forward=always"],
        &["parallel.reshard_after_forward=always", "parallel.max_live_parameters=60000"],
        &["parallel.reshard_after_forward=auto"],
        &["parallel.max_live_parameters=80000"],
        &["parallel.reshard_after_forward=never"],
    ];
    let two = "parallel.data_parallel_shard=2";
    let pipeline = "parallel.pipeline_parallel=2";
    let layouts: [(TinyModel, &[&str]); 8] = [
        (GPT2, &[two]),
        (LLAMA, &[two, "train.precision=bf16", "parallel.recompute=selective"]),
        // The vocabulary shards differ in size, also within the ranks that gather from each other.
        (
            GPT2,
            &[
                two,
                "parallel.tensor_parallel=2",
                "parallel.sequence_parallel=true",
                "model.vocab_size=300",
                "data.tokenizer=bytes",
            ],
        ),
        (GPT2, &[two, "parallel.tensor_parallel=2", "model.vocab_size=300", "data.tokenizer=bytes"]),
        (LLAMA, &[two, pipeline, "parallel.pipeline_schedule=interleaved_1f1b"]),
        (QWEN3, &[two, pipeline, "parallel.pipeline_schedule=zb_v", "parallel.recompute=full"]),
        (MIXTRAL, &[two, "parallel.expert_parallel=2", "parallel.data_parallel_replicate=2"]),
        (
            QWEN2_MOE,
            &[
                two,
                "parallel.tensor_parallel=2",
                "fine_tune.freeze=[\"model.embed_tokens.*\", \"model.layers.1.*\", \"*norm*\"]",
            ],
        ),
    ];
    let common = ["parallel.zero_stage=3", "train.global_batch=8", "train.micro_batch=1"];
    for (model, layout) in layouts {
        let plans = settings.map(|setting| [layout, &common, setting].concat());
        check(&[model], &plans);
    }
}

#[test]
fn weights_that_neighbours_keep_book_what_was_predicted() {
    let four = "parallel.data_parallel_shard=4";
    let layouts: [(TinyModel, &[&str]); 4] = [
        (GPT2, &[four]),
        (LLAMA, &[four, "train.precision=bf16", "parallel.recompute=full"]),
        (
            GPT2,
            &["parallel.data_parallel_shard=2", "parallel.context_parallel=2", "parallel.tensor_parallel=2"],
        ),
        // Experts of a parallel degree of 2 are sharded over two ranks only, so they have no secondary shard.
        (MIXTRAL, &[four, "parallel.expert_parallel=2"]),
    ];
    let common = [
        "parallel.zero_stage=3",
        "parallel.secondary_shard=2",
        "train.global_batch=8",
        "train.micro_batch=1",
    ];
    for (model, layout) in layouts {
        for setting in ["parallel.reshard_after_forward=always", "parallel.max_live_parameters=60000"] {
            check(&[model], &[[layout, &common, &[setting]].concat()]);
        }
    }
}

/// The ledger of a training run also contains snapshots of its state.
#[test]
fn what_is_on_disk_books_its_windows() {
    let disk = tempfile::tempdir().unwrap();
    let disk = format!("parallel.offload.dir={}", disk.path().display());
    let on_disk = ["parallel.offload.optimizer=disk", &disk];
    let with_gradients = [&on_disk[..], &["parallel.offload.gradients=disk"]].concat();
    let by_half = [&with_gradients[..], &["parallel.offload.fraction=0.5"]].concat();
    let plans: [&[&str]; 5] = [
        &["train.precision=bf16"],
        &["parallel.data_parallel_shard=2", "parallel.zero_stage=2", "train.precision=bf16"],
        &["parallel.data_parallel_shard=4", "parallel.zero_stage=3"],
        &["parallel.tensor_parallel=2"],
        &["parallel.pipeline_parallel=2"],
    ];
    for offload in [&on_disk[..], &with_gradients, &by_half] {
        let plans = plans.map(|plan| [plan, offload].concat());
        check(&[GPT2, LLAMA, DEEPSEEK], &plans);
    }
    let everything = [&with_gradients[..], &["parallel.offload.parameters=disk"]].concat();
    let little = [&everything[..], &["parallel.max_live_parameters=80000"]].concat();
    let half = [&everything[..], &["parallel.offload.fraction=0.5"]].concat();
    let plans: [&[&str]; 6] = [
        &["train.precision=bf16"],
        &["optimizer.kind=lion", "train.precision=bf16", "train.master_weights=false"],
        &["parallel.data_parallel_shard=4", "parallel.zero_stage=3"],
        &["parallel.data_parallel_shard=2", "parallel.zero_stage=3", "parallel.quantize_weights=int8"],
        &["parallel.tensor_parallel=2"],
        &["parallel.pipeline_parallel=2"],
    ];
    for offload in [&everything[..], &little, &half] {
        let of_all = plans.map(|plan| [plan, offload].concat());
        check(&[GPT2, LLAMA], &of_all);
        let frozen = ["fine_tune.lora_rank=2", "train.precision=bf16"];
        check(&[MIXTRAL], &[[&frozen[..], offload].concat()]);
    }
}

#[test]
fn units_that_stand_together_book_what_was_predicted() {
    let shard = "parallel.data_parallel_shard=2";
    let plans: [&[&str]; 6] = [
        &[shard, "parallel.zero_stage=1"],
        &[shard, "parallel.zero_stage=2", "train.precision=bf16"],
        &[shard, "parallel.zero_stage=3", "parallel.reshard_after_forward=always"],
        &[shard, "parallel.zero_stage=3", "parallel.pipeline_parallel=2"],
        &[shard, "parallel.zero_stage=2", "parallel.quantize_gradients=int8", "parallel.tensor_parallel=2"],
        &[shard, "parallel.zero_stage=2", "fine_tune.freeze=[\"model.layers.0.*\"]"],
    ];
    for wrap in ["parallel.wrap={ min_parameters = 40000 }", "parallel.wrap=[\"model.layers.*\"]"] {
        let plans = plans.map(|plan| [plan, &[wrap]].concat());
        check(&[GPT2, LLAMA], &plans[..5]);
        check(&[QWEN2_MOE], &plans);
    }
}

#[test]
fn activations_on_disk_book_what_is_left_of_them() {
    let disk = tempfile::tempdir().unwrap();
    let disk = format!("parallel.offload.dir={}", disk.path().display());
    let on_disk = |plan: &[&'static str]| -> Vec<String> {
        let all = ["parallel.offload.activations=disk", &disk];
        all.iter().chain(plan).map(ToString::to_string).collect()
    };
    let (full, zb_h1) = ("parallel.recompute=full", "parallel.pipeline_schedule=zb_h1");
    let some =
        "parallel.recompute={ default = \"selective\", layers = [{ from = 1, every = 2, mode = \"full\" }] }";
    let many = ["parallel.pipeline_parallel=2", "train.global_batch=8", "train.micro_batch=1"];
    let [tensor, slices] = ["parallel.tensor_parallel=2", "parallel.partition_activations=true"];
    let plans = [
        on_disk(&[]),
        on_disk(&[full, "train.precision=bf16"]),
        on_disk(&[some, "parallel.data_parallel_shard=2", "parallel.zero_stage=3"]),
        on_disk(&[full, tensor, slices]),
        on_disk(&many),
        on_disk(&[&many[..], &[full, zb_h1]].concat()),
        on_disk(&[&many[..], &[full, tensor, slices]].concat()),
        on_disk(&[&many[..], &["parallel.pipeline_schedule=interleaved_1f1b"]].concat()),
        on_disk(&["parallel.pipeline_parallel=2", "parallel.pipeline_stages=[1, 5]"]),
        on_disk(&["parallel.offload.optimizer=disk", "parallel.offload.gradients=disk"]),
    ];
    check(&[GPT2, LLAMA, MIXTRAL], &plans);
}

#[test]
fn copies_of_the_state_are_predicted() {
    let bench = Workbench::new().unwrap();
    for setting in ["train.precision=f32", "parallel.quantize_gradients=int8"] {
        let plan =
            ["parallel.data_parallel_shard=2", "parallel.zero_stage=2", "train.rollback_after=3", setting];
        let config: RunConfig = bench.config(LLAMA, &[&plan[..], &["train.steps=3"]].concat()).unwrap();
        let forecast = Forecast::of(&config, &resolve_model(&config).unwrap()).unwrap();
        let seen = on_ranks(&config, |ranks: &Ranks| {
            let mut bookkeeper = Bookkeeper::default();
            watch(&config, ranks, &mut bookkeeper)?;
            Ok((ranks.rank(), bookkeeper.booked[1].1))
        });
        for (rank, booked) in seen.unwrap() {
            let snapshot = MemoryCategory::Snapshot;
            let predicted = forecast.of_rank(rank).by_category()[snapshot];
            assert!(booked[snapshot] > 0);
            assert_eq!(booked[snapshot], predicted, "{setting}, rank {rank}");
        }
    }
}
