//! The planner beside published runs: what it predicts for each, and what was measured.
//!
//! ```text
//! cargo run --release -p lockstep-train --example published [-- --json] [--quick] [NAME=CLUSTER.toml ...]
//! ```
//!
//! Every row of a kind of machine is predicted with the same constants: those of the preset, or of the cluster file that stands in for it.
//! `--quick` leaves out pipelines with many stages, whose simulation takes a second.

mod rows;

use std::collections::HashMap;

use lockstep_plan::cluster::Cluster;
use serde_json::json;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has = |flag: &str| arguments.iter().any(|argument| argument == flag);
    let read = |path: &str| {
        let text = std::fs::read_to_string(path).expect("a cluster file");
        Cluster::parse(&text, path).unwrap_or_else(|error| panic!("{path}: {error}"))
    };
    let given = arguments.iter().filter_map(|argument| argument.split_once('='));
    let files: HashMap<String, Cluster> = given.map(|(name, path)| (name.to_owned(), read(path))).collect();
    let rows = rows::published().into_iter().filter(|row| !has("--quick") || !row.is_long());
    let mut results = Vec::new();
    for row in rows {
        let preset = row.preset();
        let machines = files.get(preset).cloned();
        let found = row.predicted(machines.unwrap_or_else(|| Cluster::preset(preset).expect("a preset")));
        let [predicted, measured] = row.figures(&found);
        let error = predicted / measured - 1.0;
        let step = &found.step;
        results
            .push(json!({ "name": row.name, "predicted": predicted, "measured": measured, "error": error }));
        if !has("--json") {
            println!(
                "{:<46} {predicted:>8.3} {measured:>8.3} {:>+6.1} %   step {:>7.2} s: work {:.2}, exchanges {:.2}, bubble {:.2}, \
                 gradients {:.2}, update {:.2}",
                row.name,
                error * 100.0,
                step.step_ms / 1e3,
                step.work_ms / 1e3,
                step.exchange_ms / 1e3,
                step.bubble_ms / 1e3,
                step.gradients_ms / 1e3,
                step.update_ms / 1e3,
            );
        }
    }
    if has("--json") {
        println!("{}", serde_json::Value::from(results));
        return;
    }
    let mut errors: Vec<f64> = results.iter().filter_map(|row| row["error"].as_f64()).map(f64::abs).collect();
    errors.sort_by(f64::total_cmp);
    println!(
        "median {:.1} %, largest {:.1} %",
        errors[errors.len() / 2] * 100.0,
        errors[errors.len() - 1] * 100.0
    );
}
