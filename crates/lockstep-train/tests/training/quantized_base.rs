//! Runs that train an adapter over a quantized base model (QLoRA): they learn, resume with the same bits, and their checkpoints are
//! models whose matrices have the values that the run trained with.

use std::collections::BTreeMap;
use std::path::Path;

use lockstep_checkpoint::gguf::StoredElements;
use lockstep_checkpoint::{
    Checkpoint, CheckpointError, DType, ModelDirectory, TensorKind, WeightQuantization, WeightType,
};
use lockstep_config::{Resume, resolve_model};
use lockstep_plan::BlockFormat;
use lockstep_train::Error;

use crate::fine_tune::{Bench, weights};

/// A model whose rows are whole blocks of every format.
const BASE: &str = r#"
[model]
preset = "llama-15m"
hidden_size = 128
intermediate_size = 256
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 4
max_position_embeddings = 24
"#;

const LORA: [&str; 3] =
    ["fine_tune.lora_rank=4", r#"fine_tune.lora_targets=["q_proj", "down_proj"]"#, "optimizer.lr=1e-2"];

const NF4: &str = "fine_tune.quantize=nf4";

fn settings<'s>(more: &[&'s str]) -> Vec<&'s str> {
    LORA.iter().chain(more).copied().collect()
}

/// Returns the rows of a run's metrics.
fn metrics(bench: &Bench, run: &str) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(bench.path(run).join("metrics.jsonl")).unwrap();
    let rows = text.lines().map(|line| serde_json::from_str(line).unwrap());
    rows.filter(|row: &serde_json::Value| row.get("loss").is_some()).collect()
}

/// Returns the bits of everything that a checkpoint holds.
fn saved(dir: &Path) -> BTreeMap<String, Vec<u32>> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let entries = checkpoint.manifest().tensors.clone();
    let read = |(name, kind): (String, TensorKind)| {
        let mut values = vec![0.0; checkpoint.tensor(&name, &kind).unwrap().elements()];
        checkpoint.read(&name, &kind, 0, &mut values).unwrap();
        (format!("{name} {kind:?}"), values.iter().map(|value: &f32| value.to_bits()).collect())
    };
    entries.into_iter().map(|entry| read((entry.name, entry.kind))).collect()
}

/// Returns true for the matrices of linear layers in blocks.
fn is_quantized(name: &str) -> bool {
    name.contains(".layers.") && name.ends_with("_proj.weight")
}

fn is_adapted(name: &str) -> bool {
    name.ends_with("q_proj.weight") || name.ends_with("down_proj.weight")
}

#[test]
fn an_adapter_over_nf4_learns_in_less_memory() {
    let bench = Bench::of(BASE);
    for precision in ["train.precision=f32", "train.precision=bf16"] {
        let run = |name: &str, quantize: &str| {
            let settings = settings(&[quantize, precision, "train.steps=40"]);
            bench.tune(name, &settings, &Resume::Never).unwrap();
            let rows = metrics(&bench, name);
            let loss = |row: &serde_json::Value| row["loss"].as_f64().unwrap();
            let parameters = rows[0]["memory"]["parameters"].as_u64().unwrap();
            (loss(&rows[0]), loss(rows.last().unwrap()), parameters)
        };
        let (first, last, parameters) = run("nf4", NF4);
        let (_, _, of_numbers) = run("numbers", "fine_tune.quantize=none");
        assert!(last < 0.8 * first, "{precision}: the loss goes from {first} to {last}");
        assert!(2 * parameters < of_numbers, "{precision}: {parameters} bytes, {of_numbers} as numbers");
    }
}

#[test]
fn a_run_over_a_quantized_base_resumes_bit_for_bit_with_the_same_quantization_only() {
    let bench = Bench::of(BASE);
    for (quantize, precision) in
        [(NF4, "train.precision=f32"), ("fine_tune.quantize=int4", "train.precision=bf16")]
    {
        let of = |steps| settings(&[quantize, precision, "schedule.kind=constant", steps]);
        bench.tune("whole", &of("train.steps=6"), &Resume::Never).unwrap();
        bench.tune("parts", &of("train.steps=3"), &Resume::Never).unwrap();
        bench.tune("parts", &of("train.steps=6"), &Resume::Auto).unwrap();
        let (whole, parts) = (saved(&bench.step("whole", 6)), saved(&bench.step("parts", 6)));
        assert!(whole.keys().all(|name| name.contains(".lora_")), "{:?}", whole.keys());
        assert!(whole == parts, "{quantize}, {precision}");
        for other in ["fine_tune.quantize=int8", "fine_tune.quantize=none"] {
            let other = settings(&[other, precision, "schedule.kind=constant", "train.steps=8"]);
            let resumed = bench.tune("parts", &other, &Resume::From(bench.step("parts", 6)));
            let Err(Error::OtherRun { differences, can_go_on: false, .. }) = resumed else {
                panic!("{resumed:?}")
            };
            assert_eq!(
                differences.iter().map(|found| &*found.key).collect::<Vec<_>>(),
                ["fine_tune.quantize"]
            );
        }
    }
}

#[test]
fn a_checkpoint_is_the_model_of_decoded_matrices_with_the_adapter_merged() {
    let bench = Bench::of(BASE);
    bench.tune("run", &settings(&[NF4, "train.steps=4"]), &Resume::Never).unwrap();
    let run = ModelDirectory::open(&bench.step("run", 4)).unwrap();
    run.export_hf(DType::F32, &bench.path("merged")).unwrap();
    run.export_adapter(DType::F32, &bench.path("adapter")).unwrap();
    let (before, merged) = (weights(&bench.path("hf")), weights(&bench.path("merged")));
    for (name, values) in &merged {
        let mut expected: Vec<f32> = before[name].iter().map(|bits| f32::from_bits(*bits)).collect();
        if is_quantized(name) {
            let mut blocks = vec![0; BlockFormat::Nf4G64.bytes(expected.len()).unwrap()];
            BlockFormat::Nf4G64.quantize(&expected, &mut blocks);
            BlockFormat::Nf4G64.dequantize(&blocks, &mut expected);
        }
        let is_same = values.iter().zip(&expected).all(|(found, expected)| *found == expected.to_bits());
        assert_eq!(is_same, !is_adapted(name), "{name}");
    }
    // peft merges the adapter into the same values, given the base model in NF4.
    let nf4 = WeightQuantization { to: WeightType::Nf4, group_size: None };
    ModelDirectory::open(&bench.path("hf")).unwrap().quantize(nf4, &bench.path("hf-nf4")).unwrap();
    let quantized = ModelDirectory::open(&bench.path("hf-nf4")).unwrap();
    let beside = quantized.with_adapter(&bench.path("adapter")).unwrap();
    let compare = |name: &str, found: &[f32]| -> Result<(), CheckpointError> {
        for (found, expected) in found.iter().zip(&merged[name]) {
            let expected = f32::from_bits(*expected);
            assert!((found - expected).abs() <= 1e-6, "{name}: {found}, merged {expected}");
        }
        Ok(())
    };
    beside.for_each_parameter(compare).unwrap();
}

#[test]
fn blocks_of_a_quantized_directory_are_trained_over_as_they_are_stored() {
    let bench = Bench::of(BASE);
    bench.tune("dense", &settings(&[NF4, "train.steps=3"]), &Resume::Never).unwrap();
    for (to, name) in [(WeightType::Nf4, "nf4"), (WeightType::Int4, "int4"), (WeightType::Int8, "int8")] {
        let stored = bench.path(&format!("stored-{name}"));
        let quantization = WeightQuantization { to, group_size: None };
        ModelDirectory::open(&bench.path("hf")).unwrap().quantize(quantization, &stored).unwrap();
        let model = format!("[model]\npath = {stored:?}\nfrom_pretrained = true\n");
        let run = |run: &str, quantize: &str| {
            let settings = settings(&[quantize, "train.steps=3"]);
            bench.run(run, &model, &settings, &Resume::Never).unwrap();
            saved(&bench.step(run, 3))
        };
        // Whatever the type that is asked for, the blocks are those of the files, with the numbers that they decode to.
        let (blocks, numbers) = (run("blocks", NF4), run("numbers", "fine_tune.quantize=none"));
        assert!(blocks == numbers, "{name}");
        if to == WeightType::Nf4 {
            assert!(blocks == saved(&bench.step("dense", 3)), "the same blocks were quantized at load");
        }
        assert!(weights(&bench.step("blocks", 3)) == weights(&bench.step("numbers", 3)), "{name}");
    }
}

#[test]
fn blocks_of_a_gguf_file_are_trained_over_as_they_are_stored() {
    let bench = Bench::of(BASE);
    let file = bench.path("base.gguf");
    let hf = ModelDirectory::open(&bench.path("hf")).unwrap();
    hf.export_gguf(StoredElements::Blocks(BlockFormat::Q8_0), &file).unwrap();
    let model = format!("[model]\npath = {file:?}\nfrom_pretrained = true\n");
    let run = |run: &str, quantize: &str| {
        let settings = settings(&[quantize, "train.steps=3", "data.tokenizer=bytes"]);
        bench.run(run, &model, &settings, &Resume::Never).unwrap();
        (saved(&bench.step(run, 3)), metrics(&bench, run)[0]["memory"]["parameters"].as_u64().unwrap())
    };
    let ((blocks, bytes), (numbers, of_numbers)) =
        (run("blocks", NF4), run("numbers", "fine_tune.quantize=none"));
    assert!(blocks == numbers, "the adapters differ");
    assert!(2 * bytes < of_numbers, "{bytes} bytes, {of_numbers} as numbers");
}

#[test]
fn what_cannot_be_quantized_is_refused() {
    let bench = Bench::of(BASE);
    let lora = "fine_tune.lora_rank=2";
    for (settings, expected) in [
        (&[NF4][..], &["fine_tune.quantize", "has no effect with all weights trained"][..]),
        (&[r#"fine_tune.freeze=["*norm*"]"#, NF4], &["fine_tune.quantize", "quantizes nothing"]),
        (&[lora, "fine_tune.quantize=fp4"], &["fine_tune.quantize", "\"nf4\""]),
        (
            &[lora, NF4, "parallel.data_parallel_shard=2", "parallel.zero_stage=3"],
            &["parallel.zero_stage", "quantized ones are replicated; nearest: 2"],
        ),
        (
            &[lora, NF4, "parallel.tensor_parallel=2"],
            &["parallel.tensor_parallel", "quantized as a whole; nearest: 1"],
        ),
        (
            &[lora, NF4, "parallel.offload.optimizer=disk", "parallel.offload.parameters=disk"],
            &["parallel.offload.parameters", "quantized ones stay in memory"],
        ),
        (&[lora, "load_in_4bit=true"], &["fine_tune.quantize = \"nf4\""]),
    ] {
        let text = format!("{}[train]\nseq_len = 24\n", bench.pretrained());
        let problem = match lockstep_config::RunConfig::parse(&text, "test", settings) {
            Ok(config) => resolve_model(&config).unwrap_err().to_string(),
            Err(problems) => problems.to_string(),
        };
        for part in expected {
            assert!(problem.contains(part), "{settings:?}: `{part}` is not in: {problem}");
        }
    }
}
