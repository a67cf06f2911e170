//! Predictions of every published run and of plans of every kind, compared with a recorded file, so that a change of the cost
//! model never changes them unnoticed.
//!
//! `LOCKSTEP_WRITE_DOCS=1 cargo test -p lockstep-train --test planner recorded` writes the file.

use std::fmt::Write;
use std::path::Path;

use lockstep_planner::Evaluated;
use lockstep_planner::cluster::Cluster;

use super::{details, rows};

const FILE: &str = "tests/planner/recorded.tsv";
/// Relative difference by which two machines may round differently.
const TOLERANCE: f64 = 1e-7;

/// Returns a line with the name, the step time and the exposed communication in milliseconds, and the bytes of the rank that
/// books most.
fn line(name: &str, found: &Evaluated) -> String {
    let most = found.memory.iter().map(|memory| memory.total()).max().unwrap_or(0);
    let mut line = format!("{name}\t{:.9e}\t{:.9e}\t{most}", found.step.step_ms, found.step.exposed_ms());
    line.retain(|c| c != '\n');
    line
}

fn predictions() -> String {
    let mut text = "# run\tstep_ms\texposed_ms\tbytes\n".to_owned();
    let mut add = |line: String| {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{line}");
    };
    for row in rows::published().iter().filter(|row| !row.is_long()) {
        add(line(&format!("{}: {}", row.family, row.name), &row.predicted(row.machines())));
    }
    for (index, (cluster, settings)) in details::plans().into_iter().enumerate() {
        let mut planner = super::planner(&settings, Cluster::preset(cluster).expect("a preset"));
        add(line(
            &format!("plan {index} on {cluster}"),
            &planner.of_run().expect("a plan that fits the model"),
        ));
    }
    text
}

/// Returns true if two lines are equal, with numbers within [`TOLERANCE`].
fn is_alike(found: &str, expected: &str) -> bool {
    let near = |(found, expected): (&str, &str)| match (found.parse::<f64>(), expected.parse::<f64>()) {
        (Ok(found), Ok(expected)) => (found - expected).abs() <= TOLERANCE * expected.abs(),
        _ => found == expected,
    };
    found.split('\t').count() == expected.split('\t').count()
        && found.split('\t').zip(expected.split('\t')).all(near)
}

#[test]
fn recorded_predictions_are_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(FILE);
    let found = predictions();
    if std::env::var_os("LOCKSTEP_WRITE_DOCS").is_some() {
        std::fs::write(&path, found).expect("the file can be written");
        return;
    }
    let recorded = std::fs::read_to_string(&path).expect("a recorded file");
    let differs = found.lines().zip(recorded.lines()).find(|(found, recorded)| !is_alike(found, recorded));
    assert_eq!(differs, None, "found and recorded; LOCKSTEP_WRITE_DOCS=1 writes {FILE} anew");
    assert_eq!(found.lines().count(), recorded.lines().count(), "runs");
}
