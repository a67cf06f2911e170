//! `lockstep plan --calibrate`: calibrates a machine file by runs.

use lockstep_config::human;
use lockstep_planner::machine::{self, LocalMachine, measured_file};
use lockstep_planner::{Calibrated, CalibratedRun, ComputeFactor, FinishedRun, calibrate};
use serde_json::{Value, json};

use super::arguments::{Arguments, write};
use crate::exit::Failure;
use crate::output::say;
use crate::verify::plan_in_words;

/// Calibrates the machine by the runs that the arguments name, prints the factors, and writes the file.
pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let (cluster, file) = match &arguments.cluster {
        Some(name) => (machine::cluster(name)?, Some(name.into())),
        None => (LocalMachine::for_ranks(1, 0).cluster, Some(measured_file())),
    };
    let output =
        arguments.output.clone().or(file.filter(|file| arguments.cluster.is_none() || file.is_file()));
    let Some(output) = output else {
        let message = "a preset is no file that could learn: say with --output where it is to be written";
        return Err(Failure::configuration(message.to_owned()));
    };
    let runs = arguments.calibrate.iter().map(|dir| FinishedRun::read(dir)).collect::<Result<_, _>>()?;
    let learned = calibrate(&cluster, runs)?;
    if let Some(directory) = output.parent().filter(|_| arguments.output.is_none()) {
        std::fs::create_dir_all(directory).map_err(|error| {
            Failure::configuration(format!("cannot make {}: {error}", directory.display()))
        })?;
    }
    write(&output, &learned.cluster.to_toml())?;
    if arguments.json {
        let mut document = document(&learned);
        document["file"] = json!(output);
        say!("{document}");
    } else {
        show(&learned);
        say!("written to {}; plans for this machine go by it until it is removed", output.display());
    }
    Ok(())
}

fn document(learned: &Calibrated) -> Value {
    let run = |CalibratedRun { run, before, after }: &CalibratedRun| json!({ "dir": run.dir, "ranks": run.config.ranks(), "measured": run.step, "before": before, "after": after });
    let work = |ComputeFactor { is_alone, dtype, factor, runs }: &ComputeFactor| json!({ "alone": is_alone, "dtype": dtype, "factor": factor, "runs": runs });
    json!({
        "work": learned.work.iter().map(work).collect::<Vec<_>>(), "exchanges": learned.exchanges,
        "runs": learned.runs.iter().map(run).collect::<Vec<_>>(),
    })
}

fn show(learned: &Calibrated) {
    let off = |predicted: f64, measured: f64| format!("{:+.1}%", 100.0 * (predicted / measured - 1.0));
    say!("{:<50}{:>11}{:>11}{:>8}{:>11}{:>8}", "", "measured", "predicted", "", "now", "");
    for CalibratedRun { run, before, after } in &learned.runs {
        let waits = |plan: &lockstep_plan::PlannedStep| plan.exposed_ms + plan.bubble_ms;
        let row = |name: &str, measured: f64, before: f64, after: f64| {
            let cells = [measured, before, after].map(human::milliseconds);
            let [measured_cell, before_cell, after_cell] = cells;
            say!(
                "{name:<50}{measured_cell:>11}{before_cell:>11}{:>8}{after_cell:>11}{:>8}",
                off(before, measured),
                off(after, measured)
            );
        };
        say!("{}: {}", run.dir.display(), plan_in_words(&run.config));
        row("  a step", run.step.step_ms, before.step_ms, after.step_ms);
        if run.step.exposed_ms > 0.0 {
            row("  of it waiting for other ranks", run.step.exposed_ms, waits(before), waits(after));
        }
        if before.disk_ms > 0.0 {
            row("  of it waiting for the disk", run.step.disk_ms, before.disk_ms, after.disk_ms);
        }
    }
    let errors = |predicted: fn(&CalibratedRun) -> f64| {
        let error = |run: &CalibratedRun| (predicted(run) / run.run.step.step_ms - 1.0).abs();
        let all: Vec<f64> = learned.runs.iter().map(error).collect();
        let (sum, most) = (all.iter().sum::<f64>(), all.iter().copied().fold(0.0, f64::max));
        format!("{:.1} % on average, {:.1} % at most", 100.0 * sum / all.len() as f64, 100.0 * most)
    };
    let (before, after) = (errors(|run| run.before.step_ms), errors(|run| run.after.step_ms));
    say!("\nsteps were off by {before}; now by {after}");
    let memory = learned.runs.iter().filter_map(|CalibratedRun { run, .. }| {
        Some((run.step.predicted_bytes? / run.step.booked_bytes? - 1.0).abs())
    });
    if let Some(most) = memory.reduce(f64::max) {
        say!("memory was off by {:.1} % at most", 100.0 * most);
    }
    for ComputeFactor { is_alone, dtype, factor, runs } in &learned.work {
        let whose = if *is_alone { "a rank with all cores" } else { "each of several ranks" };
        let runs = human::plural(*runs, "run");
        say!("{dtype} work of {whose} takes {factor:.2} times as long as was predicted ({runs})");
    }
    if let Some(factor) = learned.exchanges {
        say!("exchanges take {factor:.2} times as long");
    }
}
