//! Predicted times of all-reduces against published runs of nccl-tests, and the table of both in docs/clusters.md.
//!
//! The runs are in `tests/clusters/all_reduces.json`. Links are fitted to some of them (`src/cluster/presets/links.toml`). So the test
//! shows how well one set of constants per kind of link describes sizes over six decades and 8 to 8,192 devices.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

use std::fmt::Write;
use std::fs;
use std::path::Path;

use lockstep_plan::work::Collective;
use lockstep_planner::cluster::Cluster;
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// Four nodes of AWS p6-b200, which has no preset.
const EFA: &str = "node = { count = 4, devices = 8, device = \"b200-sxm\" }\n\
                   link = [{ like = \"nvlink5\" }, { like = \"efa-400g\" }]";

/// Bus bandwidths in 10⁹ bytes per second, measured and predicted.
struct Point {
    ranks: usize,
    bytes: u64,
    measured: f64,
    predicted: f64,
}

impl Point {
    /// Returns the relative error of the predicted time.
    fn error(&self) -> f64 {
        self.measured / self.predicted - 1.0
    }
}

struct Run {
    what: String,
    source: String,
    points: Vec<Point>,
}

fn runs() -> Vec<Run> {
    let file: Value = serde_json::from_str(include_str!("clusters/all_reduces.json")).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let of_run = |run: &Value| {
        let points = run["rows"].as_array().unwrap().iter().map(|row| {
            // A row may name a cluster of its own.
            let (name, row) = match row.as_array().unwrap().as_slice() {
                [name @ Value::String(_), row @ ..] => (text(name), row),
                row => (text(&run["cluster"]), row),
            };
            let (ranks, bytes) = (row[0].as_u64().unwrap() as usize, row[1].as_u64().unwrap());
            point(&name, ranks, bytes, row[2].as_f64().unwrap())
        });
        Run { what: text(&run["what"]), source: text(&run["source"]), points: points.collect() }
    };
    file["runs"].as_array().unwrap().iter().map(of_run).collect()
}

fn point(name: &str, ranks: usize, bytes: u64, measured: f64) -> Point {
    let cluster = match name {
        "efa" => Cluster::parse(EFA, "efa"),
        name if name.contains('x') && name.ends_with(|c: char| c.is_ascii_digit()) => Cluster::preset(name),
        name => Cluster::preset(&format!("{name}x{}", ranks.div_ceil(8))),
    };
    let cluster = cluster.unwrap_or_else(|problems| panic!("{problems}"));
    let seconds = cluster.seconds(Collective::AllReduce, bytes, &cluster.placement(ranks, 1));
    let factor = 2.0 * (ranks - 1) as f64 / ranks as f64;
    Point { ranks, bytes, measured, predicted: factor * bytes as f64 / seconds / 1e9 }
}

/// Returns the largest and the mean error of the points whose bytes are in a range; `None` if there are none.
fn errors(run: &Run, from: u64, to: u64) -> Option<(f64, f64)> {
    let errors: Vec<f64> = run
        .points
        .iter()
        .filter(|point| (from..to).contains(&point.bytes))
        .map(|point| point.error().abs())
        .collect();
    let largest = errors.iter().copied().max_by(f64::total_cmp)?;
    Some((largest, errors.iter().sum::<f64>() / errors.len() as f64))
}

#[test]
fn large_all_reduces_take_what_was_measured() {
    let mut failures = Vec::new();
    for run in runs() {
        // B200 reduces in switches from 8 GiB on only, which no single set of constants describes.
        let largest_allowed = if run.what.contains("B200") { 0.12 } else { 0.11 };
        for (from, to, largest, mean) in
            [(64 * MIB, u64::MAX, largest_allowed, 0.09), (MIB, 64 * MIB, 0.45, 0.17)]
        {
            if let Some((found, found_mean)) = errors(&run, from, to)
                && (found > largest || found_mean > mean)
            {
                failures.push(format!(
                    "{} from {from} bytes: off by {found:.3} at most, {found_mean:.3} on average; allowed are {largest} and {mean}",
                    run.what
                ));
                for point in run.points.iter().filter(|point| (from..to).contains(&point.bytes)) {
                    failures.push(format!(
                        "  {} ranks, {} bytes: {} measured, {:.1} predicted",
                        point.ranks, point.bytes, point.measured, point.predicted
                    ));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn share(errors: Option<(f64, f64)>) -> String {
    errors.map_or("-".to_owned(), |(largest, mean)| format!("{:.0}, {:.0}", 100.0 * largest, 100.0 * mean))
}

/// Returns both tables of the page.
fn tables() -> String {
    let mut text = String::new();
    let runs = runs();
    writeln!(text, "| all-reduce | points | from 64 MiB | 1 to 64 MiB | below 1 MiB | source |").unwrap();
    writeln!(text, "|---|---:|---:|---:|---:|---|").unwrap();
    for run in &runs {
        let [large, middle, small] =
            [(64 * MIB, u64::MAX), (MIB, 64 * MIB), (0, MIB)].map(|(from, to)| share(errors(run, from, to)));
        let (what, points, source) = (&run.what, run.points.len(), &run.source);
        writeln!(text, "| {what} | {points} | {large} | {middle} | {small} | {source} |").unwrap();
    }
    writeln!(text, "\nSome of them, measured and predicted, in 10⁹ bytes a second:\n").unwrap();
    let sizes = [MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1 << 30, 16 << 30];
    writeln!(text, "| all-reduce | 1 MiB | 16 MiB | 64 MiB | 256 MiB | 1 GiB | 16 GiB |").unwrap();
    writeln!(text, "|---|---:|---:|---:|---:|---:|---:|").unwrap();
    for (run, ranks) in [(0, 8), (1, 8), (2, 8), (3, 32), (4, 32), (4, 512), (4, 8192), (5, 512)] {
        let run = &runs[run];
        let cells = sizes.map(|bytes| {
            let point = run.points.iter().find(|point| (point.ranks, point.bytes) == (ranks, bytes));
            point.map_or("-".to_owned(), |point| format!("{:.0}, {:.0}", point.measured, point.predicted))
        });
        writeln!(text, "| {ranks} of: {} | {} |", run.what, cells.join(" | ")).unwrap();
    }
    text
}

/// Checks the tables of the page, or writes them if LOCKSTEP_WRITE_DOCS is set.
#[test]
fn the_tables_of_the_page_are_current() {
    const BEGIN: &str = "<!-- written by the test all_reduces -->\n";
    const END: &str = "<!-- end -->";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/clusters.md");
    let page = fs::read_to_string(&path).unwrap();
    let (head, rest) = page.split_once(BEGIN).expect("the page has a place for the tables");
    let (written, tail) = rest.split_once(END).expect("and the place has an end");
    if std::env::var_os("LOCKSTEP_WRITE_DOCS").is_some() {
        fs::write(&path, format!("{head}{BEGIN}{}{END}{tail}", tables())).unwrap();
        return;
    }
    assert_eq!(written, tables(), "run LOCKSTEP_WRITE_DOCS=1 cargo test --workspace --test all_reduces");
}
