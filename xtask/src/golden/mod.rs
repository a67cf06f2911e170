//! `cargo xtask golden`: results and predictions of varied plans, compared with a recorded file.
//!
//! A safety net for design changes. No bit of a loss, a gradient norm or a weight may change, and no booked or predicted byte or
//! predicted time, unless the change records them again. Each [`Case`] is trained by the program as a user starts it, with ranks
//! as processes, and predicted by `lockstep plan` for a cluster of as many devices. Kernels are limited to AVX2, so that every
//! machine computes the same bits.

mod cases;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::step::run;
use cases::{BASE, CASES, Case, PRETRAINED};

/// Path of the recorded file, relative to the manifest of this package.
const RECORDED: &str = "golden/recorded.tsv";
/// Instruction level to which kernels are limited.
const CPU_LEVEL: (&str, &str) = ("LOCKSTEP_CPU_LEVEL", "avx2");
/// Relative difference by which machines may round a predicted time differently.
const TIME_TOLERANCE: f64 = 1e-9;
/// Settings of every run: several micro-batches on each of up to four replicas, few tokens.
const COMMON: &[&str] = &[
    "data.train=[\"text.jsonl\"]",
    "data.cache_dir=\"cache\"",
    "data.packing=\"stream\"",
    "train.steps=3",
    "train.global_batch=8",
    "train.micro_batch=1",
    "train.seq_len=16",
    "train.threads=1",
    "train.eval_every=0",
    "metrics.tensorboard=false",
    "parallel.timeout_s=60.0",
];
/// Memory categories whose bytes follow from the plan alone.
const CATEGORIES: &[&str] =
    &["parameters", "gradients", "optimizer", "activations", "communication", "workspace"];

/// Record of a case: its fields with their values, in the order of the file.
type Record = Vec<(String, String)>;

/// Runs the cases that `arguments` name, or all, and compares them with the recorded file; with `--write`, writes the file.
///
/// # Errors
/// If a case fails to run, a name is unknown, or a field differs; the text lists every difference.
pub(crate) fn golden(arguments: &[String]) -> Result<(), String> {
    let is_write = arguments.iter().any(|argument| argument == "--write");
    let names: Vec<&String> = arguments.iter().filter(|argument| *argument != "--write").collect();
    if let Some(name) = names.iter().find(|name| !CASES.iter().any(|case| case.name == **name)) {
        let known: Vec<&str> = CASES.iter().map(|case| case.name).collect();
        return Err(format!("no case {name:?}: {}", known.join(", ")));
    }
    run("cargo build --workspace", &[])?;
    let program = program()?;
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(RECORDED);
    let mut recorded = read(&file)?;
    let chosen = CASES.iter().filter(|case| names.is_empty() || names.iter().any(|name| *name == case.name));
    let (mut count, mut different) = (0, Vec::new());
    for case in chosen {
        let found = Bench::new(&program)?.record(case).map_err(|error| format!("{}: {error}", case.name))?;
        let before = recorded.insert(case.name.to_owned(), found.clone()).unwrap_or_default();
        let lines = differences(&before, &found);
        println!("{} {}", if lines.is_empty() { "same     " } else { "DIFFERENT" }, case.name);
        different.extend(lines.into_iter().map(|line| format!("{}: {line}", case.name)));
        count += 1;
    }
    if is_write {
        return write(&file, &recorded);
    }
    match different.len() {
        0 => {
            println!("{count} plans have the recorded bits and bytes");
            Ok(())
        }
        fields => Err(format!(
            "{}\n{fields} fields differ from xtask/{RECORDED}; cargo xtask golden --write records them anew",
            different.join("\n")
        )),
    }
}

/// Returns the path of the program that `cargo build` has made.
fn program() -> Result<PathBuf, String> {
    // This program is in the same directory.
    let own = std::env::current_exe().map_err(|error| format!("where this program is: {error}"))?;
    let program = own.with_file_name("lockstep");
    if program.is_file() { Ok(program) } else { Err(format!("there is no {}", program.display())) }
}

fn read(file: &Path) -> Result<BTreeMap<String, Record>, String> {
    let text = if file.exists() {
        fs::read_to_string(file).map_err(|error| format!("cannot read {}: {error}", file.display()))?
    } else {
        String::new()
    };
    let mut all: BTreeMap<String, Record> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let mut parts = line.splitn(3, '\t').map(str::to_owned);
        if let (Some(name), Some(field), Some(value)) = (parts.next(), parts.next(), parts.next()) {
            all.entry(name).or_default().push((field, value));
        }
    }
    Ok(all)
}

fn write(file: &Path, all: &BTreeMap<String, Record>) -> Result<(), String> {
    let mut text = "# plan\tfield\tvalue: written by `cargo xtask golden --write`\n".to_owned();
    for case in CASES {
        for (field, value) in all.get(case.name).into_iter().flatten() {
            // Writing to a string does not fail.
            let _ = writeln!(text, "{}\t{field}\t{value}", case.name);
        }
    }
    fs::write(file, text).map_err(|error| format!("cannot write {}: {error}", file.display()))
}

/// Returns a line for each field whose value differs from the recorded one.
fn differences(recorded: &Record, found: &Record) -> Vec<String> {
    let value = |record: &Record, field: &str| {
        let entry = record.iter().find(|(name, _)| name == field);
        entry.map_or_else(|| "nothing".to_owned(), |(_, value)| value.clone())
    };
    let mut fields: Vec<&String> = recorded.iter().chain(found).map(|(field, _)| field).collect();
    fields.sort_unstable();
    fields.dedup();
    let line = |field: &String| {
        let (before, now) = (value(recorded, field), value(found, field));
        (!is_same(field, &before, &now)).then(|| format!("{field} is {now}, and was {before}"))
    };
    fields.into_iter().filter_map(line).collect()
}

/// Returns true if two values of a field are equal: bit for bit, or a predicted time within [`TIME_TOLERANCE`].
fn is_same(field: &str, before: &str, now: &str) -> bool {
    let is_time = field.starts_with("predicted_") && field.ends_with("_ms");
    match (before.parse::<f64>(), now.parse::<f64>()) {
        (Ok(before), Ok(now)) if is_time => (before - now).abs() <= TIME_TOLERANCE * before.abs(),
        _ => before == now,
    }
}

/// A directory with a text, in which one case runs.
struct Bench<'a> {
    program: &'a Path,
    dir: tempfile::TempDir,
}

impl<'a> Bench<'a> {
    fn new(program: &'a Path) -> Result<Self, String> {
        let dir = tempfile::tempdir().map_err(|error| format!("no temporary directory: {error}"))?;
        let bench = Self { program, dir };
        bench.put("text.jsonl", &text())?;
        Ok(bench)
    }

    /// Trains a case and predicts it.
    fn record(&self, case: &Case) -> Result<Record, String> {
        let mut record = Record::new();
        let settings = case.settings();
        if case.model == PRETRAINED {
            let (dir, model) = BASE;
            self.train(1, "pretraining", model, &[])?;
            self.export("pretraining", dir)?;
        }
        self.train(case.ranks, "first", &settings, &[])?;
        self.add_run("", "first", &mut record)?;
        if let Some((ranks, other)) = case.resumed_under {
            let settings = [case.model, other, &["train.steps=5"]].concat();
            self.train(ranks, "second", &settings, &["--resume", "first/step-00000003"])?;
            self.add_run("resumed_", "second", &mut record)?;
        }
        self.add_prediction(case.ranks, &settings, &mut record)?;
        Ok(record)
    }

    fn train(&self, ranks: usize, dir: &str, settings: &[&str], more: &[&str]) -> Result<(), String> {
        let dirs = [format!("checkpoint.dir={dir}"), format!("metrics.dir={dir}-metrics")];
        let ranks = ranks.to_string();
        let mut arguments = vec!["train", "--nproc-per-node", &ranks];
        arguments.extend(more);
        let set = COMMON.iter().chain(settings).copied().chain(dirs.iter().map(String::as_str));
        arguments.extend(set.flat_map(|setting| ["--set", setting]));
        self.run(&arguments).map(drop)
    }

    /// Adds losses, gradient norms and bytes of the run in `dir`, and a hash of its final weights.
    fn add_run(&self, prefix: &str, dir: &str, record: &mut Record) -> Result<(), String> {
        let rows = self.get(&format!("{dir}-metrics/metrics.jsonl"))?;
        let rows: Vec<Value> = rows.lines().filter_map(|row| serde_json::from_str(row).ok()).collect();
        let steps = || rows.iter().filter(|row| row["loss"].is_number());
        for field in ["loss", "grad_norm"] {
            let values: Vec<String> = steps().map(|row| row[field].to_string()).collect();
            record.push((format!("{prefix}{field}"), values.join(" ")));
        }
        let last = steps().next_back().ok_or("the run has no row of a step")?;
        for (name, of_ranks, of_one) in [
            ("booked", "memory_by_rank", "memory"),
            ("predicted", "memory_predicted_by_rank", "memory_predicted"),
        ] {
            let one = [last[of_one].clone()];
            let ranks = last[of_ranks].as_array().map_or(&one[..], Vec::as_slice);
            let bytes: Vec<String> = ranks.iter().map(bytes_of).collect();
            record.push((format!("{prefix}{name}_bytes"), bytes.join("; ")));
        }
        record.push((format!("{prefix}weights"), self.hash_of_weights(dir)?));
        Ok(())
    }

    /// Returns a hash of the weights that the newest checkpoint in `dir` exports.
    fn hash_of_weights(&self, dir: &str) -> Result<String, String> {
        let out = format!("{dir}-exported");
        self.export(dir, &out)?;
        let mut hash = blake3::Hasher::new();
        let files = self.list(&out)?;
        for name in files.iter().filter(|name| name.ends_with(".safetensors")) {
            let path = self.dir.path().join(&out).join(name);
            hash.update(&fs::read(&path).map_err(|error| format!("cannot read {name}: {error}"))?);
        }
        Ok(hash.finalize().to_hex()[..32].to_owned())
    }

    /// Exports the newest checkpoint in `dir`.
    fn export(&self, dir: &str, out: &str) -> Result<(), String> {
        let steps = self.list(dir)?;
        let newest = steps.iter().filter(|name| name.starts_with("step-")).max().ok_or("no checkpoint")?;
        self.run(&["checkpoint", "export", &format!("{dir}/{newest}"), "--hf", out]).map(drop)
    }

    /// Adds the predictions of `lockstep plan` on a cluster of as many devices: bytes by rank, and the parts of the step time.
    fn add_prediction(&self, ranks: usize, settings: &[&str], record: &mut Record) -> Result<(), String> {
        let cluster = format!(
            "[[node]]\ndevices = {ranks}\ndevice = \"h100-sxm\"\nhost_memory = \"1TiB\"\ndisk = \"1TB\"\n\
             disk_gb_per_s = 2.0\n[[link]]\nlike = \"nvlink4\"\n"
        );
        self.put("cluster.toml", &cluster)?;
        let mut arguments = vec!["plan", "--json", "--cluster", "cluster.toml"];
        arguments.extend(COMMON.iter().chain(settings).flat_map(|setting| ["--set", *setting]));
        let answer = self.run(&arguments)?;
        let answer: Value = serde_json::from_str(&answer).map_err(|error| format!("plan --json: {error}"))?;
        let predicted = &answer["best"]["predicted"];
        let kinds = predicted["memory"].as_array().ok_or("the plan has no predicted memory")?;
        let bytes: Vec<String> = kinds
            .iter()
            .map(|kind| {
                format!("{} {}", kind["ranks"].as_str().unwrap_or_default(), bytes_of(&kind["bytes"]))
            })
            .collect();
        record.push(("predicted_cluster_bytes".to_owned(), bytes.join("; ")));
        for part in ["step_ms", "compute_ms", "exposed_ms", "bubble_ms"] {
            record.push((format!("predicted_{part}"), predicted["step"][part].to_string()));
        }
        Ok(())
    }

    fn run(&self, arguments: &[&str]) -> Result<String, String> {
        let mut command = Command::new(self.program);
        command.args(arguments).current_dir(self.dir.path()).envs([CPU_LEVEL]);
        let output =
            command.output().map_err(|error| format!("cannot run {}: {error}", self.program.display()))?;
        if !output.status.success() {
            let told = String::from_utf8_lossy(&output.stderr);
            return Err(format!("{}: lockstep {}\n{told}", output.status, arguments.join(" ")));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn put(&self, name: &str, text: &str) -> Result<(), String> {
        fs::write(self.dir.path().join(name), text).map_err(|error| format!("cannot write {name}: {error}"))
    }

    fn get(&self, name: &str) -> Result<String, String> {
        fs::read_to_string(self.dir.path().join(name)).map_err(|error| format!("cannot read {name}: {error}"))
    }

    /// Returns the names in a directory, sorted.
    fn list(&self, dir: &str) -> Result<Vec<String>, String> {
        let entries =
            fs::read_dir(self.dir.path().join(dir)).map_err(|error| format!("cannot read {dir}: {error}"))?;
        let mut names: Vec<String> =
            entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort_unstable();
        Ok(names)
    }
}

/// Formats bytes by category as `parameters=1 gradients=2 ...`.
fn bytes_of(memory: &Value) -> String {
    let parts: Vec<String> =
        CATEGORIES.iter().map(|category| format!("{category}={}", memory[*category])).collect();
    parts.join(" ")
}

/// Returns JSON lines with prompts, whose labels are masked, and completions: ranks differ in their valid tokens.
fn text() -> String {
    let words = ["tape", "shard", "mesh", "rank", "block"];
    let say = |i: usize, count: usize| -> String {
        (0..count).map(|j| format!("{} ", words[(i * i + j * 7) % 5])).collect()
    };
    let line = |i: usize| {
        let (prompt, completion) = (say(i, 1 + i % 4), say(i + 3, 1 + i % 5));
        format!("{{\"prompt\": \"{prompt}\", \"completion\": \"{completion}\"}}\n")
    };
    (0..300).map(line).collect()
}
