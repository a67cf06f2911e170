//! Choices that change no bit: schedules, recomputation, and where the state is, in memory, on disk or on other ranks.

use lockstep_plan::schedule::Kind;
use lockstep_testkit::parity::{DEEPSEEK, GPT2, LLAMA, MIXTRAL, QWEN2_MOE, QWEN3, TinyModel, Workbench};
use lockstep_train::verify::Numbers;

use crate::{
    CONTEXT_2, EXPERT_2, EXPERT_4, GRADIENTS_ON_DISK, OPTIMIZER_ON_DISK, PARTS_2, PIPELINE_2, REPLICAS_2,
    SEQUENCE, SHARD_2, TENSOR_2,
};

#[test]
fn schedules_stages_and_recomputation_change_no_bit() {
    let bench = Workbench::new().unwrap();
    let numbers = |settings: &[&str]| -> Numbers {
        let settings: Vec<&str> = settings.iter().copied().chain(["train.steps=3"]).collect();
        bench.numbers(&bench.config(GPT2, &settings).unwrap()).unwrap()
    };
    let expected = numbers(&[]);
    let same = |plan: &[&str]| {
        let found = numbers(plan);
        assert!(found == expected, "{}: {:?}, one rank {:?}", plan.join(" "), found.steps, expected.steps);
    };
    for schedule in Kind::ALL.map(Kind::name) {
        let schedule = format!("parallel.pipeline_schedule={schedule}");
        for recompute in ["none", "selective", "full"] {
            same(&[PIPELINE_2, &schedule, &format!("parallel.recompute={recompute}")]);
        }
    }
    for stages in ["[1, 5]", "[4, 2]", "[5, 1]"] {
        same(&[PIPELINE_2, &format!("parallel.pipeline_stages={stages}")]);
    }
}

#[test]
fn sharing_out_the_state_changes_no_bit() {
    let bench = Workbench::new().unwrap();
    let models = [
        (GPT2, &[][..]),
        (LLAMA, &["train.precision=bf16"]),
        (DEEPSEEK, &["train.precision=bf16"]),
        (QWEN3, &[TENSOR_2, SEQUENCE]),
    ];
    for (model, more) in models {
        let numbers = |settings: &[&str]| -> Numbers {
            // One micro-batch per rank: with more, stage 2 sums over ranks first, and the others over micro-batches
            // first.
            let all = settings.iter().chain(more).copied().chain(["train.steps=4", "train.global_batch=4"]);
            let config = bench.config(model, &all.collect::<Vec<_>>()).unwrap();
            bench.numbers(&config).unwrap()
        };
        let copies = numbers(&["parallel.data_parallel_replicate=4", "train.micro_batch=1"]);
        for [replicate, shard] in [[1, 4], [2, 2]] {
            for stage in [0, 1, 2, 3] {
                let degrees = [
                    format!("parallel.data_parallel_replicate={replicate}"),
                    format!("parallel.data_parallel_shard={shard}"),
                    format!("parallel.zero_stage={stage}"),
                ];
                let [replicate, shard, zero] = degrees.each_ref().map(String::as_str);
                let found = numbers(&[replicate, shard, zero, "train.micro_batch=1"]);
                assert!(
                    found == copies,
                    "{}, {degrees:?}: {:?}, copies {:?}",
                    model.name,
                    found.steps,
                    copies.steps
                );
            }
        }
    }
}

#[test]
fn keeping_slices_of_what_blocks_were_given_changes_no_bit() {
    let bench = Workbench::new().unwrap();
    const FULL: &str = "parallel.recompute=full";
    const BF16: &str = "train.precision=bf16";
    const SOME: &str =
        "parallel.recompute={ default = \"selective\", layers = [{ from = 1, every = 2, mode = \"full\" }] }";
    // With three ranks no value splits evenly.
    let thirds = ["model.n_head=6", "model.n_embd=36", "train.seq_len=14", "train.micro_batch=1"];
    let mut plans: Vec<(TinyModel, Vec<&str>)> = vec![
        (GPT2, vec![TENSOR_2, FULL, "train.dropout=0.1"]),
        (LLAMA, vec!["parallel.tensor_parallel=4", FULL, BF16]),
        (GPT2, [&["parallel.tensor_parallel=3", FULL, BF16], &thirds[..]].concat()),
        (LLAMA, vec![TENSOR_2, FULL, "parallel.tensor_chunks=3", REPLICAS_2]),
        (LLAMA, vec![TENSOR_2, FULL, SHARD_2, "parallel.zero_stage=3", BF16]),
        (QWEN3, vec![TENSOR_2, SOME, CONTEXT_2]),
        (GPT2, vec![TENSOR_2, SOME, PIPELINE_2, "parallel.pipeline_stages=[1, 5]"]),
        (MIXTRAL, vec![TENSOR_2, FULL, EXPERT_2]),
        (DEEPSEEK, vec![TENSOR_2, FULL, SHARD_2, EXPERT_4]),
        (MIXTRAL, vec![TENSOR_2, FULL, PARTS_2, PIPELINE_2]),
    ];
    let schedules = Kind::ALL.map(|kind| format!("parallel.pipeline_schedule={}", kind.name()));
    plans.extend(schedules.iter().map(|schedule| (GPT2, vec![TENSOR_2, FULL, PIPELINE_2, schedule])));
    for (model, plan) in plans {
        let numbers = |more: &[&str]| -> Numbers {
            let config = bench.config(model, &[&plan[..], more, &["train.steps=3"]].concat()).unwrap();
            bench.numbers(&config).unwrap()
        };
        let (found, whole) = (numbers(&["parallel.partition_activations=true"]), numbers(&[]));
        assert!(found == whole, "{}, {plan:?}: {:?}, whole {:?}", model.name, found.steps, whole.steps);
    }
}

#[test]
fn activations_on_disk_change_no_bit() {
    let bench = Workbench::new().unwrap();
    let disk = tempfile::tempdir().unwrap();
    let disk = format!("parallel.offload.dir={}", disk.path().display());
    const ON_DISK: &str = "parallel.offload.activations=disk";
    const FULL: &str = "parallel.recompute=full";
    const BF16: &str = "train.precision=bf16";
    const SLICES: &str = "parallel.partition_activations=true";
    const SOME: &str =
        "parallel.recompute={ default = \"selective\", layers = [{ from = 1, every = 2, mode = \"full\" }] }";
    let mut plans: Vec<(TinyModel, Vec<&str>)> = vec![
        (GPT2, vec!["train.dropout=0.1"]),
        (LLAMA, vec![FULL, BF16]),
        (GPT2, vec![REPLICAS_2, SOME]),
        (LLAMA, vec![SHARD_2, "parallel.zero_stage=3", BF16]),
        (LLAMA, vec![TENSOR_2, FULL, SLICES]),
        (QWEN3, vec![TENSOR_2, SEQUENCE, CONTEXT_2]),
        (GPT2, vec![PIPELINE_2, TENSOR_2, FULL, SLICES, "parallel.pipeline_stages=[1, 5]"]),
        (GPT2, vec![PIPELINE_2, SHARD_2, "parallel.zero_stage=2", SOME]),
        (MIXTRAL, vec![SHARD_2, EXPERT_2, BF16]),
        (DEEPSEEK, vec![TENSOR_2, SHARD_2, EXPERT_4, "parallel.recompute=selective"]),
        (GPT2, vec![OPTIMIZER_ON_DISK, PARAMETERS_ON_DISK]),
    ];
    let schedules = Kind::ALL.map(|kind| format!("parallel.pipeline_schedule={}", kind.name()));
    let batch = ["train.global_batch=8", "train.micro_batch=1"];
    for recompute in ["parallel.recompute=none", FULL] {
        let of = |schedule| (GPT2, [&[PIPELINE_2, recompute, schedule][..], &batch].concat());
        plans.extend(schedules.iter().map(String::as_str).map(of));
    }
    for (model, plan) in plans {
        let numbers = |more: &[&str]| -> Numbers {
            let config = bench.config(model, &[&plan[..], more, &["train.steps=3"]].concat()).unwrap();
            bench.numbers(&config).unwrap()
        };
        let (found, in_memory) = (numbers(&[ON_DISK, &disk]), numbers(&[]));
        let (name, steps) = (model.name, &found.steps);
        assert!(found == in_memory, "{name}, {plan:?}: {steps:?}, in memory {:?}", in_memory.steps);
    }
}

const PARAMETERS_ON_DISK: &str = "parallel.offload.parameters=disk";

#[test]
fn moving_state_to_the_disk_changes_no_bit() {
    let bench = Workbench::new().unwrap();
    let disk = tempfile::tempdir().unwrap();
    let disk = format!("parallel.offload.dir={}", disk.path().display());
    const BF16: &str = "train.precision=bf16";
    let plans: [(TinyModel, &[&str]); 9] = [
        // One micro-batch: with gradients in memory, further ones would accumulate within the matrix products.
        (GPT2, &["train.global_batch=1", "train.micro_batch=1", BF16]),
        (LLAMA, &[SHARD_2, "parallel.zero_stage=2", BF16]),
        (LLAMA, &[SHARD_2, "parallel.zero_stage=3"]),
        (GPT2, &["parallel.data_parallel_shard=4", "parallel.zero_stage=3", "train.micro_batch=1"]),
        // One micro-batch: gradients of norms are partial sums, which on disk are reduced after each micro-batch.
        (QWEN3, &[TENSOR_2, SEQUENCE, BF16, "train.global_batch=2", "train.micro_batch=2"]),
        (GPT2, &[PIPELINE_2, "parallel.pipeline_schedule=zb_h1", SHARD_2, "parallel.zero_stage=2"]),
        (LLAMA, &[PIPELINE_2, SHARD_2, "parallel.zero_stage=2"]),
        (DEEPSEEK, &[SHARD_2, "parallel.zero_stage=3", BF16]),
        (QWEN2_MOE, &[SHARD_2, EXPERT_2, "parallel.zero_stage=2"]),
    ];
    for (model, plan) in plans {
        let numbers = |more: &[&str]| -> Numbers {
            let config = bench.config(model, &[plan, more, &["train.steps=4"]].concat()).unwrap();
            bench.numbers(&config).unwrap()
        };
        let in_memory = numbers(&[]);
        for share in ["1", "0.5"] {
            let share = format!("parallel.offload.fraction={share}");
            let all = [OPTIMIZER_ON_DISK, GRADIENTS_ON_DISK, PARAMETERS_ON_DISK];
            // With stage 2 every rank holds all parameters.
            let most = if plan.contains(&"parallel.zero_stage=2") { 2 } else { 3 };
            for more in (1..=most).map(|count| &all[..count]) {
                let found = numbers(&[more, &[disk.as_str(), share.as_str()]].concat());
                let (name, steps) = (model.name, &found.steps);
                assert!(found == in_memory, "{name}, {plan:?}, {more:?}: {steps:?}, {:?}", in_memory.steps);
            }
        }
    }
    // Replicas hold the same state and reduce their gradients in memory.
    let replicas = |more: &[&str]| {
        let config = bench.config(LLAMA, &[&[REPLICAS_2, "train.steps=4"], more].concat()).unwrap();
        bench.numbers(&config).unwrap()
    };
    assert!(replicas(&[OPTIMIZER_ON_DISK, &disk]) == replicas(&[]));
    assert!(replicas(&[OPTIMIZER_ON_DISK, PARAMETERS_ON_DISK, &disk]) == replicas(&[]));
}

#[test]
fn which_units_stand_together_changes_no_bit() {
    let bench = Workbench::new().unwrap();
    let disk = tempfile::tempdir().unwrap();
    let disk = format!("parallel.offload.dir={}", disk.path().display());
    let stage = ["parallel.zero_stage=1", "parallel.zero_stage=2", "parallel.zero_stage=3"];
    let plans: [(TinyModel, &[&str]); 9] = [
        (GPT2, &[SHARD_2, stage[0], "train.precision=bf16"]),
        (LLAMA, &[SHARD_2, stage[1], REPLICAS_2]),
        (LLAMA, &[SHARD_2, stage[2], "parallel.recompute=full"]),
        (GPT2, &[SHARD_2, stage[1], PIPELINE_2, "parallel.pipeline_schedule=zb_h1"]),
        (QWEN3, &[SHARD_2, stage[2], PIPELINE_2, "parallel.pipeline_schedule=interleaved_1f1b"]),
        (MIXTRAL, &[SHARD_2, stage[2], EXPERT_2]),
        (GPT2, &[SHARD_2, stage[1], TENSOR_2, SEQUENCE]),
        (
            QWEN2_MOE,
            &[
                SHARD_2,
                stage[1],
                "fine_tune.freeze=[\"model.embed_tokens.*\", \"model.layers.1.*\", \"*norm*\"]",
            ],
        ),
        (LLAMA, &[OPTIMIZER_ON_DISK, GRADIENTS_ON_DISK, PARAMETERS_ON_DISK, &disk]),
    ];
    let wraps = ["{ min_parameters = 40000 }", "{ min_parameters = 1000000 }", "[\"model.layers.*\"]"];
    for (model, plan) in plans {
        let numbers = |more: &[&str]| -> Numbers {
            let common = ["train.steps=3", "train.global_batch=8", "train.micro_batch=1"];
            bench.numbers(&bench.config(model, &[plan, &common, more].concat()).unwrap()).unwrap()
        };
        let by_block = numbers(&[]);
        for wrap in wraps {
            let found = numbers(&[&format!("parallel.wrap={wrap}")]);
            let (name, steps) = (model.name, &found.steps);
            assert!(found == by_block, "{name}, {plan:?}, {wrap}: {steps:?}, {:?}", by_block.steps);
        }
    }
}

#[test]
fn weights_that_come_from_the_disk_are_those_that_were_left_there() {
    let bench = Workbench::new().unwrap();
    let disk = tempfile::tempdir().unwrap();
    let disk = format!("parallel.offload.dir={}", disk.path().display());
    let offload = [OPTIMIZER_ON_DISK, PARAMETERS_ON_DISK, &disk];
    let stage_3 = [SHARD_2, "parallel.zero_stage=3"];
    let plans: [(TinyModel, &[&str]); 5] = [
        // Frozen parameters are also on disk, and are never written again.
        (QWEN2_MOE, &["fine_tune.lora_rank=2", "train.precision=bf16"]),
        (
            MIXTRAL,
            &[
                SHARD_2,
                "parallel.zero_stage=3",
                "fine_tune.lora_rank=2",
                "fine_tune.lora_targets=[\"q_proj\"]",
            ],
        ),
        // Weights are quantized after they are read from disk.
        (GPT2, &[SHARD_2, "parallel.zero_stage=3", "parallel.quantize_weights=int8"]),
        (GPT2, &["parallel.data_parallel_shard=4", "parallel.zero_stage=3", "parallel.secondary_shard=2"]),
        (LLAMA, &[PIPELINE_2, "parallel.pipeline_schedule=interleaved_1f1b", "train.precision=bf16"]),
    ];
    for (model, plan) in plans {
        let numbers = |more: &[&str]| -> Numbers {
            let common = ["train.steps=3", "train.global_batch=8", "train.micro_batch=1"];
            bench.numbers(&bench.config(model, &[plan, &common, more].concat()).unwrap()).unwrap()
        };
        let in_memory = numbers(&[]);
        let pools: [&[&str]; 3] =
            [&[], &["parallel.reshard_after_forward=always"], &["parallel.max_live_parameters=80000"]];
        for pool in pools {
            let found = numbers(&[&offload[..], pool].concat());
            assert!(
                found == in_memory,
                "{}, {plan:?}, {pool:?}: {:?}, {:?}",
                model.name,
                found.steps,
                in_memory.steps
            );
        }
    }
    // Evaluation and checkpoints read parameters from disk.
    let alone = [&["train.global_batch=4", "train.precision=bf16"][..], &offload].concat();
    let apart = [&stage_3[..], &["train.global_batch=4", "train.precision=bf16"], &offload].concat();
    let in_memory = ["train.global_batch=4", "train.precision=bf16"];
    let expected = bench.losses_of_both(LLAMA, [&in_memory, &in_memory], 6).unwrap();
    for plans in [[&alone[..], &in_memory], [&in_memory, &alone], [&alone, &alone]] {
        assert_eq!(bench.losses_of_both(LLAMA, plans, 6).unwrap(), expected, "{plans:?}");
    }
    let found = bench.losses_of_both(LLAMA, [&alone, &apart], 6).unwrap();
    assert_eq!(found[..3], expected[..3]);
    assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-3 * b), "{found:?}, {expected:?}");
}

#[test]
fn when_weights_are_gathered_changes_no_bit() {
    let bench = Workbench::new().unwrap();
    let zb_v = ["parallel.pipeline_schedule=zb_v", "parallel.recompute=full"];
    let layouts: [(TinyModel, &[&str]); 8] = [
        (GPT2, &[]),
        (LLAMA, &["train.precision=bf16", "parallel.recompute=selective"]),
        // The vocabulary shards differ in size.
        (GPT2, &[TENSOR_2, SEQUENCE, "model.vocab_size=300", "data.tokenizer=bytes"]),
        (LLAMA, &[PIPELINE_2, "parallel.pipeline_schedule=interleaved_1f1b"]),
        (QWEN3, &[&[PIPELINE_2], &zb_v[..]].concat()),
        (MIXTRAL, &[EXPERT_2, REPLICAS_2]),
        // Frozen parameters are sharded and gathered as well.
        (MIXTRAL, &["fine_tune.lora_rank=2"]),
        (
            QWEN2_MOE,
            &["fine_tune.freeze=[\"model.embed_tokens.*\", \"model.layers.1.*\", \"*norm*\"]", TENSOR_2],
        ),
    ];
    let settings: [&[&str]; 6] = [
        &["parallel.reshard_after_forward=always"],
        &["parallel.reshard_after_forward=always", "parallel.max_live_parameters=60000"],
        &["parallel.reshard_after_forward=auto"],
        &["parallel.max_live_parameters=60000"],
        &["parallel.max_live_parameters=80000"],
        &["parallel.reshard_after_forward=never"],
    ];
    for (model, layout) in layouts {
        let numbers = |settings: &[&str]| -> Numbers {
            let common = [SHARD_2, "train.steps=3", "train.global_batch=8", "train.micro_batch=1"];
            let all: Vec<&str> = common.iter().chain(layout).chain(settings).copied().collect();
            bench.numbers(&bench.config(model, &all).unwrap()).unwrap()
        };
        let expected = numbers(&["parallel.zero_stage=2"]);
        for setting in settings {
            let found = numbers(&[&["parallel.zero_stage=3"], setting].concat());
            assert!(
                found == expected,
                "{}, {layout:?}, {setting:?}: {:?}, stage 2 {:?}",
                model.name,
                found.steps,
                expected.steps
            );
        }
    }
}

#[test]
fn weights_that_neighbours_keep_have_the_bits_of_their_owners() {
    let bench = Workbench::new().unwrap();
    let always = "parallel.reshard_after_forward=always";
    let layouts: [(TinyModel, &[&str]); 4] = [
        (GPT2, &["parallel.data_parallel_shard=4"]),
        (LLAMA, &["parallel.data_parallel_shard=4", "train.precision=bf16", "parallel.recompute=full"]),
        (GPT2, &[SHARD_2, CONTEXT_2, TENSOR_2, SEQUENCE]),
        // Experts of a parallel degree of 2 are sharded over two ranks only, so they have no secondary shard.
        (MIXTRAL, &["parallel.data_parallel_shard=4", EXPERT_2]),
    ];
    for (model, layout) in layouts {
        let numbers = |settings: &[&str]| -> Numbers {
            let common = ["train.steps=3", "train.global_batch=8", "train.micro_batch=1"];
            let all: Vec<&str> = common.iter().chain(layout).chain(settings).copied().collect();
            bench.numbers(&bench.config(model, &all).unwrap()).unwrap()
        };
        let expected = numbers(&["parallel.zero_stage=2"]);
        for settings in [&[always][..], &["parallel.max_live_parameters=60000"]] {
            let found =
                numbers(&[&["parallel.zero_stage=3", "parallel.secondary_shard=2"], settings].concat());
            assert!(
                found == expected,
                "{}, {layout:?}, {settings:?}: {:?}, stage 2 {:?}",
                model.name,
                found.steps,
                expected.steps
            );
        }
    }
}
