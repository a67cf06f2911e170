//! The metrics of the last step for Prometheus: over HTTP, and in a file for node_exporter's textfile collector.
//!
//! The text follows the exposition format 0.0.4. It is rendered after each step into a reused buffer, which a thread serves. The
//! file is replaced as a whole, at most once per second.

use std::fmt::{self, Write as _};
use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use lockstep_config::RunConfig;
use lockstep_plan::MemoryCategory;

use super::means::{CountUnit, Means};
use super::server::Server;
use super::step_metrics::{EvalMetrics, StepMetrics};
use crate::Error;

/// Initial capacity of the text.
const TEXT_BYTES: usize = 8 << 10;
/// Upper bounds of the buckets of step times, in seconds.
const BUCKETS: [f64; 10] = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0];
/// Least time between two writes of the file.
const FILE_INTERVAL: Duration = Duration::from_secs(1);

/// Exporter of a run's metrics to Prometheus.
#[derive(Debug)]
pub struct Prometheus {
    totals: Totals,
    text: String,
    server: Option<Server>,
    file: Option<(PathBuf, Option<Instant>)>,
}

/// Totals of this process, which are not part of a row.
#[derive(Debug, Default)]
struct Totals {
    run: String,
    steps: u64,
    seconds: f64,
    buckets: [u64; BUCKETS.len()],
    exposed_seconds: f64,
    eval_loss: Option<f64>,
    /// Means of the metrics of the last evaluation.
    eval_metrics: Means,
    saved_at: Option<f64>,
}

impl Prometheus {
    /// Opens the exporter as `metrics.prometheus` and `metrics.prometheus_file` ask; `None` if neither is set.
    ///
    /// # Errors
    /// If the address cannot be listened on.
    pub fn open(config: &RunConfig) -> Result<Option<Self>, Error> {
        let metrics = &config.metrics;
        if metrics.prometheus.is_none() && metrics.prometheus_file.is_none() {
            return Ok(None);
        }
        let server = Server::open(config)?;
        let totals = Totals { run: escaped(&metrics.dir.display().to_string()), ..Totals::default() };
        let file = metrics.prometheus_file.clone().map(|path| (path, None));
        Ok(Some(Self { totals, text: String::with_capacity(TEXT_BYTES), server, file }))
    }

    /// Address of the HTTP server, if there is one.
    pub fn address(&self) -> Option<SocketAddr> {
        self.server.as_ref().map(Server::address)
    }

    /// Updates the text with a completed step.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn step(&mut self, row: &StepMetrics) -> Result<(), Error> {
        let seconds = row.step_ms / 1e3;
        self.totals.steps += 1;
        self.totals.seconds += seconds;
        self.totals.exposed_seconds += row.comm.exposed_ms / 1e3;
        for (count, bound) in self.totals.buckets.iter_mut().zip(BUCKETS) {
            *count += u64::from(seconds <= bound);
        }
        self.text.clear();
        // Writing to a `String` cannot fail.
        let _ = Exposition { row, totals: &self.totals }.write(&mut self.text);
        if let Some(server) = &self.server {
            server.show(row.step, &self.text);
        }
        let is_due = |at: Option<Instant>| at.is_none_or(|at| at.elapsed() >= FILE_INTERVAL);
        match &self.file {
            Some((_, at)) if is_due(*at) => self.write_file(),
            _ => Ok(()),
        }
    }

    /// Records an evaluation; the next step shows it.
    pub fn evaluation(&mut self, row: &EvalMetrics) {
        self.totals.eval_loss = Some(row.loss);
        self.totals.eval_metrics = row.metrics.clone();
    }

    /// Records that a checkpoint was saved; the next step shows the time.
    pub fn saved(&mut self) {
        self.totals.saved_at =
            SystemTime::now().duration_since(UNIX_EPOCH).ok().map(|time| time.as_secs_f64());
    }

    /// Ends the exporter; the file then holds the last step.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn finish(mut self) -> Result<(), Error> {
        if self.totals.steps > 0 && self.file.is_some() { self.write_file() } else { Ok(()) }
    }

    /// Writes the text to a temporary file and renames it, so that a collector never reads half of it.
    fn write_file(&mut self) -> Result<(), Error> {
        let Some((path, at)) = &mut self.file else { return Ok(()) };
        *at = Some(Instant::now());
        let staged = path.with_extension("prom.tmp");
        let written = fs::write(&staged, &self.text).and_then(|()| fs::rename(&staged, &*path));
        written.map_err(Error::io("write", path))
    }
}

/// The text of a step.
struct Exposition<'a> {
    row: &'a StepMetrics,
    totals: &'a Totals,
}

impl Exposition<'_> {
    fn write(&self, out: &mut String) -> fmt::Result {
        let Self { row, totals } = self;
        let run = &totals.run;
        let (version, commit) = (env!("CARGO_PKG_VERSION"), crate::build::commit().unwrap_or(""));
        head(out, "build_info", "gauge", "The program.")?;
        writeln!(out, "lockstep_build_info{{run=\"{run}\",version=\"{version}\",commit=\"{commit}\"}} 1")?;
        let [total, help_total, rate, help_rate] = match row.amount.unit {
            CountUnit::Tokens => [
                "tokens_total",
                "Tokens trained on.",
                "tokens_per_second",
                "Tokens a second in the last step.",
            ],
            CountUnit::Samples => [
                "samples_total",
                "Samples trained on.",
                "samples_per_second",
                "Samples a second in the last step.",
            ],
        };
        let known = [
            ("step", "gauge", "Last step made.", Some(row.step as f64)),
            ("loss", "gauge", "Mean loss of the last step.", Some(row.loss)),
            ("eval_loss", "gauge", "Loss of the last evaluation.", totals.eval_loss),
            ("grad_norm", "gauge", "Gradient norm of the last step before clipping.", Some(row.grad_norm)),
            ("learning_rate", "gauge", "Learning rate of the last step.", Some(row.lr)),
            (total, "counter", help_total, Some(row.amount.seen as f64)),
            (rate, "gauge", help_rate, Some(row.amount.per_s)),
            ("flops_per_second", "gauge", "Model FLOP/s of the last step.", Some(row.flops_per_s)),
            ("mfu_ratio", "gauge", "Model FLOP/s as a share of the devices' peak.", row.mfu),
            ("skipped_steps_total", "counter", "Steps skipped.", Some(row.skipped_steps as f64)),
            ("rollbacks_total", "counter", "Times gone back to earlier weights.", Some(row.rollbacks as f64)),
            (
                "comm_exposed_seconds_total",
                "counter",
                "Time in which rank 0 waited for other ranks.",
                Some(totals.exposed_seconds),
            ),
            ("data_wait_seconds", "gauge", "Wait for data in the last step.", Some(row.data_wait_ms / 1e3)),
            (
                "checkpoint_last_success_timestamp_seconds",
                "gauge",
                "When a checkpoint was last saved.",
                totals.saved_at,
            ),
        ];
        for (name, kind, help, value) in known {
            let Some(value) = value else { continue };
            head(out, name, kind, help)?;
            writeln!(out, "lockstep_{name}{{run=\"{run}\"}} {}", Number(value))?;
        }
        for (name, help, means) in [
            ("metric", "Metrics of the model in the last step, by name.", &row.metrics),
            ("eval_metric", "Metrics of the model in the last evaluation, by name.", &totals.eval_metrics),
        ] {
            if means.is_empty() {
                continue;
            }
            head(out, name, "gauge", help)?;
            for (metric, mean) in means.iter() {
                let (metric, mean) = (escaped(metric), Number(mean));
                writeln!(out, "lockstep_{name}{{run=\"{run}\",name=\"{metric}\"}} {mean}")?;
            }
        }
        head(out, "memory_bytes", "gauge", "Memory by category, the most of any rank.")?;
        for category in MemoryCategory::ALL {
            let (name, bytes) = (category.name(), row.memory.by_category[category]);
            writeln!(out, "lockstep_memory_bytes{{run=\"{run}\",category=\"{name}\"}} {bytes}")?;
        }
        head(out, "memory_peak_bytes", "gauge", "The most memory of all categories together.")?;
        writeln!(out, "lockstep_memory_peak_bytes{{run=\"{run}\"}} {}", row.memory.peak)?;
        let name = "step_duration_seconds";
        head(out, name, "histogram", "Wall-clock time of steps.")?;
        for (bound, count) in BUCKETS.iter().zip(totals.buckets) {
            writeln!(out, "lockstep_{name}_bucket{{run=\"{run}\",le=\"{bound}\"}} {count}")?;
        }
        writeln!(out, "lockstep_{name}_bucket{{run=\"{run}\",le=\"+Inf\"}} {}", totals.steps)?;
        writeln!(out, "lockstep_{name}_sum{{run=\"{run}\"}} {}", totals.seconds)?;
        writeln!(out, "lockstep_{name}_count{{run=\"{run}\"}} {}", totals.steps)
    }
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) -> fmt::Result {
    writeln!(out, "# HELP lockstep_{name} {help}\n# TYPE lockstep_{name} {kind}")
}

/// A number in the notation of Prometheus.
struct Number(f64);

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            value if value.is_nan() => f.write_str("NaN"),
            f64::INFINITY => f.write_str("+Inf"),
            f64::NEG_INFINITY => f.write_str("-Inf"),
            value => write!(f, "{value}"),
        }
    }
}

/// Escapes the value of a label.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::example;
    use crate::metrics::server::tests::ask;

    fn of(arguments: &[&str]) -> Prometheus {
        Prometheus::open(&RunConfig::parse("", "", arguments).unwrap()).unwrap().unwrap()
    }

    #[test]
    fn nothing_is_opened_where_nobody_asks() {
        assert!(Prometheus::open(&RunConfig::default()).unwrap().is_none());
    }

    #[test]
    fn the_last_step_is_served_and_other_paths_are_not_found() {
        let mut prometheus = of(&["metrics.prometheus=127.0.0.1:0", "metrics.dir='a \"b\"'"]);
        prometheus.evaluation(&EvalMetrics { step: 1, loss: 2.5, counted: 1, ..EvalMetrics::default() });
        for step in 1..=3 {
            prometheus.step(&StepMetrics { mfu: Some(0.25), ..example(step) }).unwrap();
        }
        let ask = |path: &str| ask(prometheus.address().unwrap(), path);
        let answer = ask("/metrics");
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        let run = "run=\"a \\\"b\\\"\"";
        for line in [
            format!("lockstep_step{{{run}}} 3"),
            format!("lockstep_loss{{{run}}} 5.5483"),
            format!("lockstep_eval_loss{{{run}}} 2.5"),
            format!("lockstep_mfu_ratio{{{run}}} 0.25"),
            format!("lockstep_tokens_total{{{run}}} 49152"),
            format!("lockstep_memory_bytes{{{run},category=\"parameters\"}} 400000000"),
            format!("lockstep_step_duration_seconds_bucket{{{run},le=\"0.3\"}} 0"),
            format!("lockstep_step_duration_seconds_bucket{{{run},le=\"1\"}} 3"),
            format!("lockstep_step_duration_seconds_count{{{run}}} 3"),
            "# TYPE lockstep_step_duration_seconds histogram".to_owned(),
        ] {
            assert!(answer.lines().any(|found| found == line), "{line}: {answer}");
        }
        assert!(!answer.contains("checkpoint_last"), "nothing is saved: {answer}");
        assert!(ask("/other").starts_with("HTTP/1.1 404 "));
    }

    #[test]
    fn the_file_is_whole_and_has_the_last_step_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.prom");
        let mut prometheus = of(&[&format!("metrics.prometheus_file={}", path.display())]);
        for step in 1..=2 {
            prometheus.step(&StepMetrics { loss: f64::NAN, ..example(step) }).unwrap();
        }
        prometheus.finish().unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains("lockstep_step{run=\"runs\"} 2\n") && text.contains("} NaN\n"), "{text}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left");
    }
}
