//! The level of the CPU kernels: recorded in checkpoints, kept by a run that resumes, and compared between ranks.

use std::path::Path;

use lockstep_tensor::CpuLevel;
use serde_json::Value;

use crate::nodes::port;
use crate::workshop::{Outcome, Workshop};

const VARIABLE: &str = "LOCKSTEP_CPU_LEVEL";
const FIRST: &str = "checkpoints/step-00000002";
const LAST: &str = "checkpoints/step-00000004";

/// Returns a level below the one that this CPU would choose; `None` on a CPU with the portable level only.
fn lower_level() -> Option<&'static str> {
    let levels = [CpuLevel::Avx2, CpuLevel::Portable].into_iter();
    levels.filter(|level| *level < CpuLevel::highest()).map(CpuLevel::word).next()
}

fn train(workshop: &Workshop, level: &str, more: &[&str]) -> Outcome {
    let arguments = [&["train", "run.toml", "--verbose"], more].concat();
    workshop.start_in(env!("CARGO_BIN_EXE_lockstep"), &arguments, &[(VARIABLE, level)]).finish()
}

fn level_of(workshop: &Workshop, checkpoint: &str) -> Value {
    let manifest = workshop.read(&format!("{checkpoint}/manifest.json"));
    serde_json::from_slice::<Value>(&manifest).unwrap()["kernels"].clone()
}

/// Changes the level that a checkpoint names, and seals the manifest again.
fn rewrite_level(workshop: &Workshop, checkpoint: &str, level: &str) {
    let name = format!("{checkpoint}/manifest.json");
    let text = String::from_utf8(workshop.read(&name)).unwrap();
    let (body, _) = text.split_once(",\n\"manifest_blake3\"").unwrap();
    let old = format!("\"kernels\":{},", level_of(workshop, checkpoint));
    let line = if level.is_empty() { String::new() } else { format!("\"kernels\":{level},") };
    let body = body.replacen(&old, &line, 1);
    let seal = blake3::hash(body.as_bytes());
    workshop.write(&name, format!("{body},\n\"manifest_blake3\":\"{seal}\"\n}}\n"));
}

fn weights(workshop: &Workshop) -> Vec<Vec<u8>> {
    let rank = |rank| workshop.path(&format!("{LAST}/rank-0000{rank}.safetensors"));
    (0..2)
        .map(rank)
        .filter(|path: &std::path::PathBuf| Path::exists(path))
        .map(|path| std::fs::read(path).unwrap())
        .collect()
}

#[test]
fn a_run_that_resumes_keeps_the_level_of_its_checkpoint_and_its_bits() {
    let Some(level) = lower_level() else { return };
    for ranks in ["1", "2"] {
        let (whole, resumed) = (Workshop::new(), Workshop::new());
        let ranks = ["--nproc-per-node", ranks];
        train(&whole, level, &ranks).succeeds();
        train(&resumed, level, &[&ranks[..], &["--steps", "2"]].concat()).succeeds();
        assert_eq!(level_of(&resumed, FIRST), level);
        let shown = resumed.run(&["checkpoint", "show", FIRST]).succeeds().stdout;
        assert!(shown.contains(&format!("kernels           {level}\n")), "{shown}");
        // An empty variable is none.
        let more = train(&resumed, "", &ranks).succeeds();
        assert!(more.stderr.contains("instructions (that of the checkpoint)"), "{more:?}");
        assert!(!more.stderr.contains("warning"), "{more:?}");
        assert_eq!(level_of(&resumed, LAST), level);
        assert!(weights(&resumed) == weights(&whole), "{ranks:?}: other bits at {level}");
        let run: Value = serde_json::from_slice(&resumed.read("runs/run.json")).unwrap();
        assert!(run["machine"].as_str().is_some_and(|text| text.contains("that of the checkpoint")), "{run}");
    }
}

#[test]
fn the_variable_wins_and_the_difference_is_told() {
    let Some(level) = lower_level() else { return };
    let workshop = Workshop::new();
    workshop.run(&["train", "run.toml", "--steps", "2"]).succeeds();
    let own = level_of(&workshop, FIRST);
    let own = own.as_str().unwrap();
    let more = train(&workshop, level, &["--resume", FIRST]).succeeds();
    let told = more.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        &format!("the kernels are now {level}, and were {own}: bits differ"),
        &format!("{VARIABLE}={own} keeps them"),
    ] {
        assert!(told.contains(part.as_str()), "{part}: {more:?}");
    }
    assert_eq!(level_of(&workshop, LAST), level);
}

#[test]
fn a_level_that_the_cpu_or_this_version_does_not_have_is_one_warning() {
    let workshop = Workshop::new();
    workshop.run(&["train", "run.toml", "--steps", "2"]).succeeds();
    let own = level_of(&workshop, FIRST);
    let unknown =
        [("\"avx10_2\"", "which this version does not know"), ("\"\"", "does not know"), ("null", "")];
    let too_high = ("\"amx_bf16\"", "and were amx_bf16, which this CPU does not have");
    let too_high = (CpuLevel::highest() < CpuLevel::AmxBf16).then_some(too_high);
    // The last manifest is one of an earlier version, without the field.
    for (level, part) in unknown.into_iter().chain(too_high).chain([("", "")]) {
        rewrite_level(&workshop, FIRST, level);
        let more = workshop.run(&["train", "run.toml", "--resume", FIRST]).succeeds();
        let told = more.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(told.matches("warning: ").count(), usize::from(!part.is_empty()), "{level}: {more:?}");
        assert!(told.contains(part), "{level}: {more:?}");
        assert_eq!(level_of(&workshop, LAST), own);
    }
}

#[test]
fn a_level_that_is_no_word_is_a_damaged_manifest() {
    let workshop = Workshop::trained();
    rewrite_level(&workshop, FIRST, "5");
    workshop
        .run(&["train", "run.toml", "--resume", FIRST])
        .fails(4, &["manifest.json", "invalid type: integer `5`"]);
}

#[test]
fn ranks_with_unequal_levels_are_told_and_leave_no_level() {
    let Some(level) = lower_level() else { return };
    let workshop = Workshop::new();
    let port = port().to_string();
    let start = |rank: &str, level: &str| {
        let variables = [
            ("RANK", rank),
            ("WORLD_SIZE", "2"),
            ("LOCAL_RANK", rank),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", &port),
            (VARIABLE, level),
        ];
        workshop.start_in(env!("CARGO_BIN_EXE_lockstep"), &["train", "run.toml"], &variables)
    };
    let (first, second) = (start("0", ""), start("1", level));
    let first = first.finish().succeeds();
    second.finish().succeeds();
    let told = first.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "ranks compute with unequal kernels",
        &format!("rank 1 has {level}"),
        &format!("{VARIABLE}={level} gives all"),
    ] {
        assert!(told.contains(part), "{part}: {first:?}");
    }
    assert_eq!(level_of(&workshop, LAST), Value::Null);
}
