//! The numbers of the last step for Prometheus: over HTTP, and in a file for node_exporter's textfile collector.
//!
//! The text is that of the exposition format 0.0.4. It is made anew after each step in a buffer that stays; a thread hands it to whoever
//! asks. The file is replaced as a whole, at most once a second.

use std::fmt::{self, Write as _};
use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::{EvalMetrics, StepMetrics};
use crate::Error;
use crate::config::RunConfig;
use lockstep_plan::MemoryCategory;

/// Room for the text.
const TEXT_BYTES: usize = 8 << 10;
/// Upper bounds of the buckets of step times, in seconds.
const BUCKETS: [f64; 10] = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0];
/// How often the file is written.
const FILE_INTERVAL: Duration = Duration::from_secs(1);
/// How long one who asks may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// A longer request is none of Prometheus.
const REQUEST_BYTES: usize = 8 << 10;

/// Shows a run to Prometheus.
#[derive(Debug)]
pub struct Prometheus {
    totals: Totals,
    text: String,
    server: Option<Server>,
    file: Option<(PathBuf, Option<Instant>)>,
}

/// What is counted by this process, for a row does not say it.
#[derive(Debug, Default)]
struct Totals {
    run: String,
    steps: u64,
    seconds: f64,
    buckets: [u64; BUCKETS.len()],
    exposed_seconds: f64,
    eval_loss: Option<f64>,
    saved_at: Option<f64>,
}

impl Prometheus {
    /// What `metrics.prometheus` and `metrics.prometheus_file` ask for; none where they are not set.
    ///
    /// # Errors
    /// [`Error::Prometheus`] if the address cannot be listened on.
    pub fn open(config: &RunConfig) -> Result<Option<Self>, Error> {
        let metrics = &config.metrics;
        if metrics.prometheus.is_none() && metrics.prometheus_file.is_none() {
            return Ok(None);
        }
        let server = metrics.prometheus.as_deref().map(Server::start).transpose()?;
        let totals = Totals { run: escaped(&metrics.dir.display().to_string()), ..Totals::default() };
        let file = metrics.prometheus_file.clone().map(|path| (path, None));
        Ok(Some(Self { totals, text: String::with_capacity(TEXT_BYTES), server, file }))
    }

    /// Where it is listened on, if it is.
    pub fn address(&self) -> Option<SocketAddr> {
        self.server.as_ref().map(|server| server.address)
    }

    /// A step is done.
    ///
    /// # Errors
    /// [`Error::Metrics`] if the file cannot be written.
    pub fn step(&mut self, row: &StepMetrics) -> Result<(), Error> {
        let seconds = row.step_ms / 1e3;
        self.totals.steps += 1;
        self.totals.seconds += seconds;
        self.totals.exposed_seconds += row.comm.exposed_ms / 1e3;
        for (count, bound) in self.totals.buckets.iter_mut().zip(BUCKETS) {
            *count += u64::from(seconds <= bound);
        }
        self.text.clear();
        // Text takes whatever is written to it.
        let _ = Exposition { row, totals: &self.totals }.write(&mut self.text);
        if let Some(server) = &self.server {
            let mut shown = server.text.lock().unwrap_or_else(PoisonError::into_inner);
            shown.clear();
            shown.push_str(&self.text);
        }
        let is_due = |at: Option<Instant>| at.is_none_or(|at| at.elapsed() >= FILE_INTERVAL);
        match &self.file {
            Some((_, at)) if is_due(*at) => self.write_file(),
            _ => Ok(()),
        }
    }

    /// An evaluation is done; the next step shows it.
    pub fn evaluation(&mut self, row: &EvalMetrics) {
        self.totals.eval_loss = Some(row.eval_loss);
    }

    /// A checkpoint is saved; the next step shows when.
    pub fn saved(&mut self) {
        self.totals.saved_at =
            SystemTime::now().duration_since(UNIX_EPOCH).ok().map(|time| time.as_secs_f64());
    }

    /// The run has ended: its last step is in the file.
    ///
    /// # Errors
    /// [`Error::Metrics`].
    pub fn finish(mut self) -> Result<(), Error> {
        if self.totals.steps > 0 && self.file.is_some() { self.write_file() } else { Ok(()) }
    }

    /// The file with the text, written beside it and renamed: a collector never reads half of it.
    fn write_file(&mut self) -> Result<(), Error> {
        let Some((path, at)) = &mut self.file else { return Ok(()) };
        *at = Some(Instant::now());
        let staged = path.with_extension("prom.tmp");
        let written = fs::write(&staged, &self.text).and_then(|()| fs::rename(&staged, &*path));
        written.map_err(|source| Error::Metrics { path: path.clone(), action: "write", source })
    }
}

/// A step as text.
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
        let known = [
            ("step", "gauge", "Last step made.", Some(row.step as f64)),
            ("loss", "gauge", "Mean loss of the last step.", Some(row.loss)),
            ("eval_loss", "gauge", "Loss of the last evaluation.", totals.eval_loss),
            ("grad_norm", "gauge", "Gradient norm of the last step before clipping.", Some(row.grad_norm)),
            ("learning_rate", "gauge", "Learning rate of the last step.", Some(row.lr)),
            ("tokens_total", "counter", "Tokens trained on.", Some(row.tokens_seen as f64)),
            ("tokens_per_second", "gauge", "Tokens a second in the last step.", Some(row.tokens_per_s)),
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

/// A number as Prometheus spells it.
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

/// The value of a label.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// A thread that answers `GET /metrics` with the text at hand. Dropped, it ends.
#[derive(Debug)]
struct Server {
    address: SocketAddr,
    text: Arc<Mutex<String>>,
    has_ended: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Server {
    fn start(address: &str) -> Result<Self, Error> {
        let failed = |source| Error::Prometheus { address: address.to_owned(), source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        let address_bound = listener.local_addr().map_err(failed)?;
        let text = Arc::new(Mutex::new(String::with_capacity(TEXT_BYTES)));
        let has_ended = Arc::new(AtomicBool::new(false));
        let (shown, ended) = (Arc::clone(&text), Arc::clone(&has_ended));
        let serve = move || {
            for stream in
                listener.incoming().map_while(|stream| (!ended.load(Ordering::Acquire)).then_some(stream))
            {
                // One who hangs up asks again.
                let _ = stream.and_then(|stream| answer(stream, &shown));
            }
        };
        let thread =
            thread::Builder::new().name("lockstep-metrics".to_owned()).spawn(serve).map_err(failed)?;
        tracing::debug!(address = %address_bound, "metrics for Prometheus");
        Ok(Self { address: address_bound, text, has_ended, thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.has_ended.store(true, Ordering::Release);
        // It waits for somebody to ask.
        let is_woken = TcpStream::connect_timeout(&reachable(self.address), PATIENCE).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| is_woken) {
            let _ = thread.join();
        }
    }
}

/// An address at which this machine reaches a socket that is bound to any of its own.
fn reachable(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V4(of) if of.ip().is_unspecified() => ([127, 0, 0, 1], of.port()).into(),
        SocketAddr::V6(of) if of.ip().is_unspecified() => (std::net::Ipv6Addr::LOCALHOST, of.port()).into(),
        address => address,
    }
}

/// Reads a request and answers it.
fn answer(mut stream: TcpStream, text: &Mutex<String>) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut request = Vec::new();
    let mut part = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        match stream.read(&mut part)? {
            0 => return Ok(()),
            _ if request.len() > REQUEST_BYTES => return Ok(()),
            count => request.extend_from_slice(&part[..count]),
        }
    }
    let is_ours =
        [&b"GET /metrics "[..], b"GET /metrics?", b"GET / "].iter().any(|start| request.starts_with(start));
    let (status, body) = if is_ours {
        ("200 OK", text.lock().unwrap_or_else(PoisonError::into_inner).clone())
    } else {
        ("404 Not Found", "GET /metrics\n".to_owned())
    };
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )?;
    stream.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::tests::example;

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
        prometheus.evaluation(&EvalMetrics { step: 1, eval_loss: 2.5, eval_tokens: 1, eval_ms: 1.0 });
        for step in 1..=3 {
            prometheus.step(&StepMetrics { mfu: Some(0.25), ..example(step) }).unwrap();
        }
        let ask = |path: &str| {
            let mut stream = TcpStream::connect(prometheus.address().unwrap()).unwrap();
            write!(stream, "GET {path} HTTP/1.1\r\nHost: here\r\n\r\n").unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            answer
        };
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

    #[test]
    fn a_port_that_is_taken_is_an_error() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("metrics.prometheus={}", taken.local_addr().unwrap());
        let config = RunConfig::parse("", "", &[address]).unwrap();
        assert!(matches!(Prometheus::open(&config), Err(Error::Prometheus { .. })));
    }
}
