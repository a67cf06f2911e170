//! Predictions of the planner against published runs.
//!
//! ```text
//! cargo bench -p lockstep-planner --bench published [-- --json] [--quick] [--only WORD] [NAME=CLUSTER.toml ...]
//! ```
//!
//! All rows of one kind of machine are predicted with the same constants: those of the preset, or of the cluster file given in its
//! place. Some rows were used to fit those constants. The others, marked "held out", show the accuracy of predictions of other
//! runs. The summary at the end has the errors of each family of rows. `--quick` leaves out pipelines with many stages, whose
//! simulation takes a second.

mod rows;

use std::collections::HashMap;

use lockstep_planner::cluster::Cluster;
use rows::{Role, Row};
use serde_json::json;

/// A row with its predicted and its measured rate.
struct Outcome {
    row: Row,
    predicted: f64,
    measured: f64,
}

impl Outcome {
    fn error(&self) -> f64 {
        self.predicted / self.measured - 1.0
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has = |flag: &str| arguments.iter().any(|argument| argument == flag);
    let only =
        arguments.iter().skip_while(|argument| *argument != "--only").nth(1).cloned().unwrap_or_default();
    let read = |path: &str| {
        let text = std::fs::read_to_string(path).expect("a cluster file");
        Cluster::parse(&text, path).unwrap_or_else(|error| panic!("{path}: {error}"))
    };
    let given = arguments.iter().filter_map(|argument| argument.split_once('='));
    let files: HashMap<String, Cluster> = given.map(|(name, path)| (name.to_owned(), read(path))).collect();
    let rows = rows::published().into_iter();
    let rows = rows.filter(|row| !(has("--quick") && row.is_long()) && row.name.contains(&only));
    let mut outcomes = Vec::new();
    for row in rows {
        let found = row.predicted(files.get(&row.machines).cloned().unwrap_or_else(|| row.machines()));
        let [predicted, measured] = row.figures(&found);
        let outcome = Outcome { row, predicted, measured };
        let step = &found.step;
        if !has("--json") {
            println!(
                "{:<58} {predicted:>9.3} {measured:>9.3} {:>+6.1} %   step {:>7.2} s: work {:.2}, exchanges {:.2}, bubble {:.2}, \
                 gradients {:.2}, update {:.2}",
                outcome.row.name,
                outcome.error() * 100.0,
                step.step_ms / 1e3,
                step.work_ms / 1e3,
                step.exchange_ms / 1e3,
                step.bubble_ms / 1e3,
                step.gradients_ms / 1e3,
                step.update_ms / 1e3,
            );
        }
        outcomes.push(outcome);
    }
    if has("--json") {
        let as_json = |outcome: &Outcome| {
            json!({
                "name": outcome.row.name, "family": outcome.row.family, "held_out": outcome.row.role == Role::HeldOut,
                "predicted": outcome.predicted, "measured": outcome.measured, "error": outcome.error(),
            })
        };
        println!("{}", outcomes.iter().map(as_json).collect::<serde_json::Value>());
        return;
    }
    summarize(&outcomes);
}

/// Prints the errors of each family, in the order of the rows; fitted rows first.
fn summarize(outcomes: &[Outcome]) {
    println!("\n{:<40} {:>5} {:>8} {:>8}", "", "rows", "median", "largest");
    let print = |name: &str, of: &dyn Fn(&Row) -> bool| {
        let errors = outcomes.iter().filter(|outcome| of(&outcome.row)).map(|outcome| outcome.error().abs());
        let mut errors: Vec<f64> = errors.collect();
        errors.sort_by(f64::total_cmp);
        if let (Some(median), Some(largest)) = (errors.get(errors.len() / 2), errors.last()) {
            println!("{name:<40} {:>5} {:>6.1} % {:>6.1} %", errors.len(), median * 100.0, largest * 100.0);
        }
    };
    for (role, word) in [(Role::Fitted, ""), (Role::HeldOut, ", held out")] {
        let mut families: Vec<&str> = Vec::new();
        for outcome in outcomes {
            if !families.contains(&outcome.row.family) {
                families.push(outcome.row.family);
            }
        }
        for family in families {
            print(&format!("{family}{word}"), &|row| row.family == family && row.role == role);
        }
        print(&format!("all{word}"), &|row| row.role == role);
    }
}
