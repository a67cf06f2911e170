//! Recording of single steps, operation by operation.
//!
//! One step is sampled for the report (`profile.json`). The steps in `metrics.trace_steps` are written as a trace for
//! chrome://tracing and Perfetto: one file, with a process for each rank. With a pipeline, the report also shows the actions of
//! all ranks in one step (`timeline.json`).

mod chrome;
pub mod pipeline;
mod profile;

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use lockstep_engine::{Engine, Ranks, TimedOperation};
use lockstep_graph::{Activity, Cost, Span};
use lockstep_model::RecordedModel;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::Error;
use crate::roofline::{Limits, layer};

/// Name of the sampled step's file in `metrics.dir`.
pub const PROFILE: &str = "profile.json";

/// A step with its operations.
#[derive(Debug, Clone)]
struct RecordedStep {
    step: u64,
    /// Time since the begin of the first recorded step.
    start: Duration,
    duration: Duration,
    spans: Vec<Span>,
    /// Collectives and messages of this rank.
    called: Vec<TimedOperation>,
}

/// Work between two recorded steps, or a background save.
#[derive(Debug)]
struct Pause {
    name: &'static str,
    start: Duration,
    duration: Duration,
}

/// Recorder of the sampled step and the traced ones.
#[derive(Debug)]
pub struct Tracer {
    dir: PathBuf,
    /// Step to sample, if any.
    sampled: Option<u64>,
    /// First and last step to trace.
    traced: Option<[u64; 2]>,
    /// Begin of the first recorded step, as an instant and in microseconds since 1970 for the alignment of ranks.
    origin: Instant,
    origin_us: u64,
    steps: Vec<RecordedStep>,
    pauses: Vec<Pause>,
    /// Saves overlapped with steps.
    saves: Vec<Pause>,
    sample: Option<RecordedStep>,
}

impl Tracer {
    /// Returns a tracer that writes to `dir`.
    pub fn new(dir: &Path, sampled: Option<u64>, traced: Option<[u64; 2]>) -> Self {
        Self {
            dir: dir.to_owned(),
            sampled,
            traced,
            origin: Instant::now(),
            origin_us: 0,
            steps: Vec::new(),
            pauses: Vec::new(),
            saves: Vec::new(),
            sample: None,
        }
    }

    fn is_traced(&self, step: u64) -> bool {
        self.traced.is_some_and(|[first, last]| (first..=last).contains(&step))
    }

    /// Marks the begin of a step and starts recording if the step is sampled or traced.
    pub fn begin(&mut self, step: u64, engine: &Engine) {
        if self.sampled == Some(step) || self.is_traced(step) {
            if self.steps.is_empty() {
                self.origin = Instant::now();
                let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH);
                self.origin_us = since_1970.map_or(0, |time| time.as_micros() as u64);
            }
            engine.timeline().start();
        }
    }

    /// Marks the end of a step that began at `begin`. A save has been in flight since `saving_since`.
    ///
    /// # Errors
    /// If the file of the step cannot be written, after which the run can go on, or if the communication with other ranks fails.
    pub fn end(
        &mut self,
        step: u64,
        begin: Instant,
        saving_since: Option<Instant>,
        engine: &Engine,
        ranks: &Ranks,
    ) -> Result<(), Error> {
        if self.sampled != Some(step) && !self.is_traced(step) {
            return Ok(());
        }
        let duration = begin.elapsed();
        let spans = engine.timeline().stop();
        let start = begin.saturating_duration_since(self.origin);
        let recorded = RecordedStep { step, start, duration, spans, called: ranks.called_since(begin) };
        if self.is_traced(step) {
            self.steps.push(recorded.clone());
        }
        if self.sampled == Some(step) {
            self.sample = Some(recorded);
            self.write_profile(engine.model(), None)?;
        }
        match self.traced {
            Some([_, last]) if last == step => {
                if let Some(begin) = saving_since {
                    self.saved(begin, Instant::now());
                }
                self.write_trace(engine.model(), ranks)
            }
            _ => Ok(()),
        }
    }

    /// Records work between two steps that has just ended.
    pub fn pause(&mut self, name: &'static str, begin: Instant) {
        if !self.steps.is_empty() && self.traced.is_some() {
            let start = begin.saturating_duration_since(self.origin);
            self.pauses.push(Pause { name, start, duration: begin.elapsed() });
        }
    }

    /// Records a background save that ran from `begin` to `end`.
    pub fn saved(&mut self, begin: Instant, end: Instant) {
        if !self.steps.is_empty() && self.traced.is_some() && end > self.origin {
            // A save that began before the first traced step is shown from that step on.
            let begin = begin.max(self.origin);
            let (start, duration) = (begin - self.origin, end - begin);
            self.saves.push(Pause { name: "save", start, duration });
        }
    }

    /// Writes the sampled step again, compared with `limits` of the machine.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn judge_sample(&mut self, model: &RecordedModel, limits: Limits) -> Result<(), Error> {
        self.write_profile(model, Some(limits))
    }

    fn write_profile(&self, model: &RecordedModel, limits: Option<Limits>) -> Result<(), Error> {
        let Some(sample) = &self.sample else { return Ok(()) };
        write_json(&self.dir.join(PROFILE), &profile::describe(sample, model, limits))
    }

    /// Writes the trace, once, if there is one. A collective call: the first rank writes the events of all.
    ///
    /// # Errors
    /// If the file cannot be written or the communication with other ranks fails.
    pub fn write_trace(&mut self, model: &RecordedModel, ranks: &Ranks) -> Result<(), Error> {
        let (Some(first), Some(last)) = (self.steps.first(), self.steps.last()) else { return Ok(()) };
        let path = self.dir.join(format!("trace-{:08}-{:08}.json", first.step, last.step));
        let origins_us = ranks.all_numbers(self.origin_us)?;
        let rank = ranks.rank();
        let shift_us = origins_us[rank] as f64 - origins_us[0] as f64;
        let events = chrome::events(rank, shift_us, &self.steps, &self.pauses, &self.saves, model);
        self.traced = None;
        self.steps.clear();
        self.pauses.clear();
        self.saves.clear();
        let failed = |source: serde_json::Error| Error::Metrics {
            path: path.clone(),
            action: "write",
            source: source.into(),
        };
        if ranks.size() == 1 {
            return write_json(&path, &chrome::file(events));
        }
        let parts = ranks.gather(&serde_json::to_vec(&events).map_err(failed)?)?;
        let events = parts.iter().map(|part| serde_json::from_slice::<Vec<Value>>(part));
        let events: Vec<Vec<Value>> = events.collect::<Result<_, _>>().map_err(failed)?;
        if ranks.is_first() { write_json(&path, &chrome::file(events.concat())) } else { Ok(()) }
    }
}

/// Writes a file atomically: a reader sees all of it or nothing.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<(), Error> {
    let failed = |source: io::Error| Error::Metrics { path: path.to_owned(), action: "write", source };
    let draft = path.with_extension("tmp");
    let written = || -> io::Result<()> {
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir)?;
        }
        let mut file = BufWriter::new(File::create(&draft)?);
        serde_json::to_writer(&mut file, value)?;
        file.flush()?;
        fs::rename(&draft, path)
    };
    written().map_err(failed)
}

/// Returns the name of a unit, such as `block 3`.
fn unit_name(unit: usize, model: &RecordedModel) -> String {
    match unit {
        0 => "embedding".to_owned(),
        unit if unit + 1 == model.units() => "head".to_owned(),
        unit => format!("block {}", unit - 1),
    }
}

/// Returns the name of an operation within its unit.
fn operation_name(activity: &Activity, model: &RecordedModel) -> String {
    match layer(activity, model) {
        Some(layer) => format!("{} {layer}", activity.name),
        None => activity.name.to_owned(),
    }
}

/// An operation between ranks from the end of the one before it; they run in order.
struct Turn {
    called: TimedOperation,
    start: Duration,
    /// Time for which the operation overlaps with compute of this rank.
    hidden: Duration,
}

impl RecordedStep {
    fn turns(&self) -> Vec<Turn> {
        let mut before = Duration::ZERO;
        let turn = |called: &TimedOperation| {
            let (start, end) = (called.start.max(before).min(called.end), called.end);
            before = end;
            let is_work = |span: &&Span| span.cost != Cost::default();
            let overlap =
                |span: &Span| end.min(span.start + span.duration).saturating_sub(start.max(span.start));
            Turn { called: *called, start, hidden: self.spans.iter().filter(is_work).map(overlap).sum() }
        };
        self.called.iter().map(turn).collect()
    }
}

/// Gathers what each rank has to tell on the first rank, in the order of the ranks; `None` on the others.
///
/// # Errors
/// If a rank is lost or does not answer in time, or a value cannot be read as JSON.
pub(crate) fn gather_json<T: Serialize + DeserializeOwned>(
    ranks: &Ranks,
    own: &T,
) -> Result<Option<Vec<T>>, Error> {
    let unreadable = |error: serde_json::Error| Error::Metrics {
        path: PathBuf::from("what a rank tells"),
        action: "read",
        source: error.into(),
    };
    let parts = ranks.gather(&serde_json::to_vec(own).map_err(unreadable)?)?;
    if !ranks.is_first() {
        return Ok(None);
    }
    let values = parts.iter().map(|part| serde_json::from_slice(part).map_err(unreadable));
    values.collect::<Result<_, _>>().map(Some)
}
