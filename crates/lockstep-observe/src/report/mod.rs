//! `report.html`: a run on one self-contained page.
//!
//! The page is made from the files in `metrics.dir`: `metrics.jsonl` and, if present, `run.json`, `profile.json`, `layout.json`
//! and `timeline.json`. It can therefore be made at any time, even for a run that was killed. This module reads, sums and thins
//! the data; a script in the page draws it.

mod history;
mod series;

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

use history::History;
use lockstep_config::{ModelSource, RunConfig};
use lockstep_plan::PlannedStep;
use serde_json::{Value, json};

use crate::Error;
use crate::json_value::write_json;
use crate::metrics::FILE_NAME;
use crate::page::Page;
use crate::rank_layout::LAYOUT;
use crate::trace::PROFILE;
use crate::trace::pipeline::TIMELINE;

pub use history::MedianStep;

/// Default file name of the page.
pub const REPORT: &str = "report.html";

/// Name of the file that describes the run.
const RUN: &str = "run.json";

const SCRIPT: &str = include_str!("../../assets/report.js");

/// Facts about the run that are known before the first step of a process.
pub struct RunFacts<'a> {
    /// Description of the model.
    pub model: &'a str,
    /// Description of the machine.
    pub machine: &'a str,
    /// First step of this process.
    pub first_step: u64,
    /// Predicted step time, if there is a prediction.
    pub predicted: Option<PlannedStep>,
    /// Peak to which the MFU is relative, if known.
    pub peak: Option<&'a DevicePeak>,
    /// Digest, tokenizer and sources of its data.
    pub data: Value,
}

/// Peak of the devices of all ranks in the compute type of the run.
#[derive(Debug, Clone, PartialEq)]
pub struct DevicePeak {
    /// FLOP/s of all ranks together; a multiply-add counts two.
    pub flops_per_s: f64,
    /// Source of the measurement, in words.
    pub source: &'static str,
}

/// Writes `run.json`, the description of the run for its report.
///
/// # Errors
/// If the file cannot be written.
pub fn describe_run(config: &RunConfig, beginning: &RunFacts<'_>) -> Result<(), Error> {
    let RunFacts { model, machine, first_step, predicted, peak, data } = beginning;
    let name = match config.model_source() {
        ModelSource::Preset(name) | ModelSource::ModelType(name) => name.to_owned(),
        ModelSource::Path(path) => path.display().to_string(),
    };
    let host = rustix::system::uname();
    let run = json!({
        "lockstep": env!("CARGO_PKG_VERSION"),
        "commit": crate::build::commit(),
        "host": host.nodename().to_string_lossy(),
        "data": data,
        "name": name,
        "model": model,
        "machine": machine,
        "steps": config.train.steps,
        "first_step": first_step,
        "restarts": restarts(),
        "predicted": predicted,
        "peak_flops_per_s": peak.map(|peak| peak.flops_per_s),
        "peak_source": peak.map(|peak| peak.source),
        "settings": config.recorded_settings(),
    });
    write_json(&config.metrics.dir.join(RUN), &run)
}

/// Returns the number of restarts by the launcher, as torchelastic counts them.
fn restarts() -> u64 {
    let count = std::env::var("TORCHELASTIC_RESTART_COUNT").ok();
    count.and_then(|count| count.parse().ok()).unwrap_or(0)
}

/// Writes the report of the run in `dir` to `out`, or to `report.html` in `dir`; returns its path.
///
/// # Errors
/// [`Error::NoRun`] if there is no run, [`Error::NoRows`] if no row can be read, [`Error::Metrics`] if a file cannot be read or
/// written.
pub fn write(dir: &Path, out: Option<&Path>) -> Result<PathBuf, Error> {
    write_with(dir, out, b"")
}

/// Writes the report as [`write()`] does, with rows that are not in the metrics file yet.
pub fn write_with(dir: &Path, out: Option<&Path>, waiting: &[u8]) -> Result<PathBuf, Error> {
    let history = history_of(dir, waiting)?;
    let parts = Parts {
        run: read_json(&dir.join(RUN)),
        profile: read_json(&dir.join(PROFILE)),
        layout: read_json(&dir.join(LAYOUT)),
        timeline: read_json(&dir.join(TIMELINE)),
    };
    let out = out.map_or_else(|| dir.join(REPORT), Path::to_owned);
    fs::write(&out, page(&history, parts)).map_err(Error::io("write", &out))?;
    Ok(out)
}

/// Reads the rows of the run in `dir`, followed by the `waiting` ones; fails without any.
fn history_of(dir: &Path, waiting: &[u8]) -> Result<History, Error> {
    let path = dir.join(FILE_NAME);
    let rows = match File::open(&path) {
        Err(source) if matches!(source.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Err(Error::NoRun { dir: dir.to_owned() });
        }
        file => BufReader::new(file.map_err(Error::io("read", &path))?),
    };
    let history = History::read(rows.chain(waiting)).map_err(Error::io("read", &path))?;
    if history.is_empty() {
        return Err(Error::NoRows { path, damaged_lines: history.damaged_lines });
    }
    Ok(history)
}

/// Returns the configuration of the run in `dir` and its median step; `None` if it has too few steps.
///
/// # Errors
/// [`Error::NoRun`], [`Error::NoRows`] or [`Error::Metrics`] if its rows cannot be read; `Error::Config` if its settings
/// cannot.
pub fn measured(dir: &Path) -> Result<(RunConfig, Option<MedianStep>), Error> {
    let history = history_of(dir, b"")?;
    let run = read_json(&dir.join(RUN));
    let settings = run["settings"].as_array().map_or(&[][..], Vec::as_slice);
    let config = RunConfig::recorded(settings, &dir.join(RUN).display().to_string())
        .map_err(lockstep_config::Error::from)?;
    Ok((config, history.usual_step(first_step(&run))))
}

/// Returns the first step of the run's last process.
fn first_step(run: &Value) -> u64 {
    run["first_step"].as_u64().unwrap_or(1)
}

/// Files of a run other than its rows; null for those that are missing.
#[derive(Debug, Clone, Default)]
pub struct Parts {
    /// `run.json`: the description of the run.
    pub run: Value,
    /// `profile.json`: the sampled step, operation by operation.
    pub profile: Value,
    /// `layout.json`: the state held by each rank.
    pub layout: Value,
    /// `timeline.json`: the sampled step of its pipelines.
    pub timeline: Value,
}

/// Returns the page for rows as in `metrics.jsonl` and for the other files of a run; `None` if no row can be read.
///
/// # Errors
/// If the reader fails.
pub fn page_of(rows: impl BufRead, parts: Parts) -> io::Result<Option<String>> {
    let history = History::read(rows)?;
    Ok((!history.is_empty()).then(|| page(&history, parts)))
}

/// Reads an optional file; null if it cannot be read.
fn read_json(path: &Path) -> Value {
    fs::read(path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
}

fn page(history: &History, parts: Parts) -> String {
    let Parts { run, profile, layout, timeline } = parts;
    let text = |key: &str| run[key].as_str().map(str::to_owned);
    let title = text("name").unwrap_or_else(|| "a training run".to_owned());
    let lines: Vec<String> = [text("model"), text("machine")].into_iter().flatten().collect();
    let mut footer = format!("Written by lockstep {}.", env!("CARGO_PKG_VERSION"));
    if history.damaged_lines > 0 {
        footer += &format!(" {} line(s) of {FILE_NAME} could not be read.", history.damaged_lines);
    }
    let mut totals = history.totals();
    totals["planned"] = run["steps"].as_u64().filter(|steps| *steps > history.last_step()).into();
    let data = json!({
        "title": title,
        "lines": lines,
        "footer": footer,
        "totals": totals,
        "series": history.series(),
        "skipped": history.first_skipped(),
        "memory": history.memory(),
        "memory_by_rank": history.memory_by_rank(),
        "memory_beside": history.memory_beside(),
        "usual_step": history.usual_step(first_step(&run)),
        "expert_load": history.expert_load(),
        "run": run,
        "profile": profile,
        "layout": layout,
        "pipelines": timeline,
    });
    Page { title: &title, style: "", script: SCRIPT, data: &data }.html()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write_run(dir: &Path, metrics: &str, run: &Value) {
        fs::write(dir.join(FILE_NAME), metrics).unwrap();
        fs::write(dir.join(RUN), run.to_string()).unwrap();
    }

    /// Returns the data that the page's script reads.
    fn data(page: &str) -> Value {
        let start = page.find("id=\"data\">").unwrap() + "id=\"data\">".len();
        let length = page[start..].find("</script>").unwrap();
        serde_json::from_str(&page[start..start + length]).unwrap()
    }

    #[test]
    fn text_of_the_configuration_is_never_markup() {
        let dir = tempfile::tempdir().unwrap();
        let hostile = "</script><script>alert(1)</script><!-- {{script}} &amp;";
        let run = json!({
            "name": hostile,
            "settings": [{ "key": "data.train", "value": [hostile], "origin": "default" }],
        });
        write_run(dir.path(), "{\"step\":1,\"loss\":2.5}\n", &run);
        let page = fs::read_to_string(write(dir.path(), None).unwrap()).unwrap();
        assert!(!page.contains("<script>alert") && !page.contains("<!--"), "markup from the configuration");
        assert_eq!(page.matches("<script").count(), 2);
        assert_eq!(data(&page)["run"]["settings"][0]["value"][0], hostile);
        assert!(page.contains("<title>&lt;/script>"), "the title is escaped");
    }

    #[test]
    fn metrics_alone_are_enough_and_damaged_lines_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        let rows =
            "{\"step\":1,\"loss\":3.0}\ngarbage\n{\"step\":2,\"loss\":null,\"skipped\":true}\n{\"step\":3";
        fs::write(dir.path().join(FILE_NAME), rows).unwrap();
        fs::write(dir.path().join(PROFILE), "{\"step\": tru").unwrap();
        let out = dir.path().join("page.html");
        assert_eq!(write(dir.path(), Some(&out)).unwrap(), out);
        let data = data(&fs::read_to_string(out).unwrap());
        assert_eq!(data["series"]["loss"], json!({ "x": [1, 2], "y": [3.0, null] }));
        assert_eq!(data["skipped"], json!([2]));
        assert_eq!(data["footer"].as_str().unwrap().matches("2 line(s)").count(), 1, "{}", data["footer"]);
    }

    #[test]
    fn a_run_on_ranks_shows_what_they_cost() {
        let row = |step: u64, busy: f64| {
            let memory = |peak: u64| json!({ "gradients": 10, "peak": peak });
            json!({
                "step": step, "loss": 1.0, "step_ms": 10.0, "memory": memory(50), "memory_by_rank": [memory(50), memory(40)],
                "comm": { "bytes": 800, "busy_ms": busy, "exposed_ms": busy / 2.0 },
            })
            .to_string()
        };
        let rows = format!("{}\n{}\n", row(1, 2.0), row(2, 4.0));
        let data = data(&page_of(rows.as_bytes(), Parts::default()).unwrap().unwrap());
        let totals = &data["totals"];
        assert_eq!((&totals["ranks"], &totals["comm_bytes"]), (&json!(2), &json!(800.0)), "{totals}");
        assert_eq!(totals["comm_share"], json!(0.15), "{totals}");
        assert_eq!(data["series"]["comm_exposed"], json!({ "x": [1, 2], "y": [1.0, 2.0] }));
        assert_eq!(data["memory_by_rank"][1]["peak"], json!(40.0));
        assert_eq!(data["memory_beside"]["processes"], json!([]));
        let alone = page_of(&b"{\"step\":1,\"comm\":{\"bytes\":0}}\n"[..], Parts::default());
        assert_eq!(self::data(&alone.unwrap().unwrap())["totals"]["comm_bytes"], Value::Null);
    }

    #[test]
    fn predicted_memory_and_that_of_processes_stand_beside_what_was_booked() {
        let row = |step: u64, process: Option<u64>| {
            let memory = |bytes: u64| {
                let mut memory = json!({ "gradients": bytes, "cached": 1, "peak": 90 });
                if let Some(process) = process {
                    memory["process_pss"] = json!(process + bytes);
                }
                memory
            };
            json!({
                "step": step, "loss": 1.0, "memory": memory(50), "memory_by_rank": [memory(50), memory(40)],
                "memory_predicted": { "gradients": 50, "total": 50 },
                "memory_predicted_by_rank": [{ "gradients": 50, "total": 50 }, { "gradients": 40, "total": 40 }],
            })
            .to_string()
        };
        let rows = format!("{}\n{}\n{}\n", row(1, None), row(2, Some(7)), row(3, None));
        let data = data(&page_of(rows.as_bytes(), Parts::default()).unwrap().unwrap());
        let beside = &data["memory_beside"];
        // From the last step that measured the process, with the booked bytes.
        assert_eq!(beside["processes"], json!([[57.0, 51.0], [47.0, 41.0]]));
        assert_eq!(beside["predicted"]["total"], json!(50.0));
        assert_eq!(beside["predicted_by_rank"][1]["gradients"], json!(40.0));
    }

    #[test]
    fn a_run_with_experts_shows_who_was_chosen_last() {
        let rows = concat!(
            r#"{"step":1,"loss":2.0,"expert_imbalance":3.0,"expert_load":[[1,3,0,0]]}"#,
            "\n",
            r#"{"step":2,"loss":2.0,"expert_imbalance":2.0}"#,
        );
        let data = data(&page_of(rows.as_bytes(), Parts::default()).unwrap().unwrap());
        assert_eq!(data["series"]["expert_imbalance"], json!({ "x": [1, 2], "y": [3.0, 2.0] }));
        assert_eq!(data["expert_load"], json!([[1.0, 3.0, 0.0, 0.0]]));
    }

    #[test]
    fn where_there_is_no_run_the_error_says_so() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(write(dir.path(), None), Err(Error::NoRun { .. })));
        fs::write(dir.path().join(FILE_NAME), "[]\n").unwrap();
        assert!(matches!(write(dir.path(), None), Err(Error::NoRows { damaged_lines: 1, .. })));
    }
}
