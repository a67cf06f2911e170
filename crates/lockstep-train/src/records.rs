//! Files that a run writes into `metrics.dir`, other than checkpoints.
//!
//! Rows go to `metrics.jsonl` and to TensorBoard's event files. `run.json`, the layout of all ranks, the sampled step and the
//! final report belong to the rows: a run without `metrics.jsonl` has none of them. A failed write never ends a run that has
//! begun; it is reported as a message.

use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use lockstep_config::{RunConfig, human};
use lockstep_engine::{Engine, Ranks};
use lockstep_observe::metrics::{EventWriter, MetricsWriter, Prometheus, Row, Server, Start};
use lockstep_observe::rank_layout::{self, LAYOUT};
use lockstep_observe::report::{self, DevicePeak, RunFacts, describe_run};
use lockstep_observe::roofline::Limits;
use lockstep_observe::trace::Tracer;
use lockstep_observe::trace::pipeline::{self, TIMELINE};
use lockstep_plan::ParameterRecord;
use lockstep_planner::predict_step;
use lockstep_tensor::host::available_memory_bytes;

use crate::error::Error;
use crate::kernels::machine_line;
use crate::saving::SaveInterval;
use crate::training_data::TrainingData;

/// Least duration of a run that measures the machine's limits at its end, which takes a second.
const LONG_RUN_SECONDS: u64 = 30;

/// Least available memory for that measurement.
const SPARE_BYTES: u64 = 1 << 30;
/// Step of a process that is sampled for the report. The first step also pays for page faults.
const SAMPLED_STEP: u64 = 2;

/// Files that a run writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RunOutputs {
    /// Checkpoints and metrics.
    Everything,
    /// No files: the run only returns its numbers.
    Nothing,
}

/// Open records of one run.
pub(crate) struct Records {
    dir: PathBuf,
    rows: Option<MetricsWriter>,
    events: Option<EventWriter>,
    prometheus: Option<Prometheus>,
    /// Health endpoint on a machine other than that of rank 0; shows whether the run advances.
    health: Option<Server>,
    tracer: Tracer,
    /// State of the pipeline timeline in the report; `None` if no timeline is drawn.
    picture: Option<TimelineState>,
    begin: Instant,
    /// Consecutive rows that could not be written at once, and the count at which the next message is due.
    refused: u64,
    next_told: u64,
}

/// Pipeline step whose timeline is shown with the actions of all ranks: the sampled step, later the last one.
#[derive(Debug)]
struct TimelineState {
    schedule: String,
    sampled: u64,
    /// Last step completed, and last step written.
    made: u64,
    written: u64,
}

impl TimelineState {
    /// Returns `None` if the run keeps no rows.
    fn of(config: &RunConfig, start: Start) -> Option<Self> {
        config.metrics.jsonl.then(|| Self {
            schedule: config.plan.schedule.name().to_owned(),
            sampled: start.done() + SAMPLED_STEP,
            made: 0,
            written: 0,
        })
    }
}

impl Records {
    /// Opens the records that this rank keeps of the run, and writes the layout of the ranks; a collective call.
    ///
    /// # Errors
    /// If a file for which `config` asks cannot be opened: a run that cannot write from the start does not begin. If the
    /// communication with other ranks fails.
    pub(crate) fn of_rank(
        config: &RunConfig,
        (start, outputs): (Start, RunOutputs),
        (engine, ranks): (&Engine, &Ranks),
        of_run: (Option<&DevicePeak>, &TrainingData),
        mut tell: impl FnMut(&str),
    ) -> Result<Self, Error> {
        let records = match outputs {
            RunOutputs::Nothing => Self::none(config),
            _ if ranks.is_first() => Self::open(config, engine, start, of_run, &mut tell)?,
            _ => Self::of_other(config, start),
        };
        if records.picture.is_some() {
            report_unless_comm(rank_layout::write(&records.dir, engine, ranks), tell)?;
        }
        Ok(records)
    }

    /// Opens the files for which `config` asks.
    fn open(
        config: &RunConfig,
        engine: &Engine,
        start: Start,
        (peak, data): (Option<&DevicePeak>, &TrainingData),
        tell: impl FnOnce(&str),
    ) -> Result<Self, Error> {
        let metrics = &config.metrics;
        let dir = metrics.dir.clone();
        // Settings that may be refused are checked before anything is written.
        let prometheus = Prometheus::open(config)?;
        if let Some(address) = prometheus.as_ref().and_then(Prometheus::address) {
            tell(&format!("metrics for Prometheus at http://{address}/metrics"));
        }
        let rows = metrics.jsonl.then(|| MetricsWriter::open(&dir, start)).transpose()?;
        let events = metrics.tensorboard.then(|| EventWriter::open(&dir, start)).transpose()?;
        if rows.is_some() {
            let ranks = config.ranks();
            let beginning = RunFacts {
                model: &model_line(engine),
                machine: &machine_line(engine, ranks),
                first_step: start.done() + 1,
                predicted: predict_step(config),
                peak,
                data: data.described(),
            };
            describe_run(config, &beginning)?;
            // Files of an earlier process may describe another plan.
            for name in [LAYOUT, TIMELINE] {
                let _ = fs::remove_file(dir.join(name));
            }
        }
        let sampled = rows.is_some().then_some(start.done() + SAMPLED_STEP);
        Ok(Self {
            rows: rows.map(|(rows, _)| rows),
            events,
            prometheus,
            tracer: Tracer::new(&dir, sampled, metrics.trace_steps),
            picture: TimelineState::of(config, start),
            ..Self::none(config)
        })
    }

    /// Opens the records of a rank other than the first: its contribution to the trace and the timeline and, on the first rank of a
    /// machine, the health endpoint.
    fn of_other(config: &RunConfig, start: Start) -> Self {
        let place = lockstep_launch::place().ok().flatten();
        let serves = place.is_some_and(|place| place.local_rank == Some(0));
        let opened = if serves { Server::open(config) } else { Ok(None) };
        // The run does not depend on the endpoint, and hosts on the same machine contend for one port.
        let health = opened.inspect_err(|error| tracing::warn!("{error}")).unwrap_or_default();
        let tracer = Tracer::new(&config.metrics.dir, None, config.metrics.trace_steps);
        Self { picture: TimelineState::of(config, start), health, tracer, ..Self::none(config) }
    }

    /// Returns the records of a run that writes no files.
    fn none(config: &RunConfig) -> Self {
        let dir = config.metrics.dir.clone();
        Self {
            tracer: Tracer::new(&dir, None, None),
            dir,
            rows: None,
            events: None,
            prometheus: None,
            health: None,
            picture: None,
            begin: Instant::now(),
            refused: 0,
            next_told: 1,
        }
    }

    /// Writes the timeline of the last pipeline step; a collective call.
    fn draw(&mut self, engine: &Engine, ranks: &Ranks) -> Result<(), lockstep_observe::Error> {
        let Some(picture) = &mut self.picture else { return Ok(()) };
        if picture.written == picture.made {
            return Ok(());
        }
        picture.written = picture.made;
        pipeline::write(&self.dir, picture.made, &picture.schedule, engine, ranks)
    }

    /// Rows for a caller that needs them on disk.
    pub(crate) fn rows(&mut self) -> Option<&mut MetricsWriter> {
        self.rows.as_mut()
    }

    /// Appends a row. A row that could not be written is kept for the next attempt. A message follows at the first failure and
    /// whenever their number has doubled.
    pub(crate) fn append(&mut self, row: &impl Row, mut tell: impl FnMut(&str)) {
        let rows = self.rows.as_mut().map(|rows| rows.append(row));
        let events = self.events.as_mut().map(|events| events.append(row));
        let shown = self.prometheus.as_mut().map(|prometheus| row.show(prometheus));
        let mut errors = [rows, events, shown].into_iter().flatten().filter_map(Result::err).peekable();
        if errors.peek().is_none() {
            (self.refused, self.next_told) = (0, 1);
            return;
        }
        self.refused += 1;
        if self.refused == self.next_told {
            self.next_told *= 2;
            errors.for_each(|error| tell(&error.to_string()));
        }
    }

    /// Marks the begin of a step.
    pub(crate) fn begin_step(&mut self, step: u64, engine: &Engine) {
        self.tracer.begin(step, engine);
    }

    /// Marks the end of a step that began at `begin`; a save has been in flight since `saving_since`.
    ///
    /// # Errors
    /// If the communication with other ranks fails. Other failures are reported through `tell`.
    pub(crate) fn end_step(
        &mut self,
        step: u64,
        begin: Instant,
        saving_since: Option<Instant>,
        engine: &Engine,
        ranks: &Ranks,
        mut tell: impl FnMut(&str),
    ) -> Result<(), Error> {
        report_unless_comm(self.tracer.end(step, begin, saving_since, engine, ranks), &mut tell)?;
        if let Some(health) = &self.health {
            health.show(step, "");
        }
        let Some(picture) = &mut self.picture else { return Ok(()) };
        picture.made = step;
        if picture.sampled == step { report_unless_comm(self.draw(engine, ranks), tell) } else { Ok(()) }
    }

    /// Marks the end of the last step: writes a trace that was to continue, and the timeline of this step.
    ///
    /// # Errors
    /// If the communication with other ranks fails. Other failures are reported through `tell`.
    pub(crate) fn end_trace(
        &mut self,
        engine: &Engine,
        ranks: &Ranks,
        mut tell: impl FnMut(&str),
    ) -> Result<(), Error> {
        report_unless_comm(self.tracer.write_trace(engine.model(), ranks), &mut tell)?;
        report_unless_comm(self.draw(engine, ranks), tell)
    }

    /// Marks the end of work between two steps, such as an evaluation.
    pub(crate) fn pause(&mut self, name: &'static str, begin: Instant) {
        self.tracer.pause(name, begin);
    }

    /// Marks the end of a save that overlapped with steps.
    pub(crate) fn saved(&mut self, SaveInterval { begin, end }: SaveInterval) {
        if let Some(prometheus) = &mut self.prometheus {
            prometheus.saved();
        }
        self.tracer.saved(begin, end);
    }

    /// Ends the records: writes what is pending and the report, whose path is returned.
    pub(crate) fn finish(mut self, engine: &Engine, mut tell: impl FnMut(&str)) -> Option<PathBuf> {
        let can_measure = self.rows.is_some()
            && self.begin.elapsed().as_secs() >= LONG_RUN_SECONDS
            && available_memory_bytes().is_none_or(|bytes| bytes >= SPARE_BYTES);
        let queue = engine.queue();
        let limits = can_measure.then(|| Limits::measure(queue.level(), queue.threads()));
        if let Some(limits) = limits
            && let Err(error) = self.tracer.judge_sample(engine.model(), limits)
        {
            tell(&error.to_string());
        }
        if let Some(Err(error)) = self.prometheus.take().map(Prometheus::finish) {
            tell(&error.to_string());
        }
        self.tell_what_is_missing(&mut tell);
        self.report(tell)
    }

    /// Tries once more to write pending rows, and reports how many the file lacks in the end.
    fn tell_what_is_missing(&mut self, mut tell: impl FnMut(&str)) {
        let Some(rows) = &mut self.rows else { return };
        if let Err(error) = rows.file() {
            tell(&error.to_string());
        }
        let (waiting, lost) = rows.waiting();
        let missing = waiting.iter().filter(|byte| **byte == b'\n').count() + lost;
        if missing > 0 {
            let file = rows.path().display();
            tell(&format!("{} of {file} never reached the disk", human::plural(missing, "row")));
        }
    }

    /// Returns true if the run keeps rows.
    pub(crate) fn has_rows(&self) -> bool {
        self.rows.is_some()
    }

    /// Writes the report of the steps so far and returns its path.
    pub(crate) fn report(&self, tell: impl FnOnce(&str)) -> Option<PathBuf> {
        let (waiting, _) = self.rows.as_ref()?.waiting();
        match report::write_with(&self.dir, None, waiting) {
            Ok(path) => Some(path),
            // No step has completed.
            Err(lockstep_observe::Error::NoRows { .. }) => None,
            Err(error) => {
                tell(&format!("no report: {error}"));
                None
            }
        }
    }
}

/// Passes on a communication error, which ends the run, and reports any other error through `tell`.
fn report_unless_comm(
    result: Result<(), lockstep_observe::Error>,
    tell: impl FnOnce(&str),
) -> Result<(), Error> {
    match result {
        Err(error @ lockstep_observe::Error::Comm(_)) => Err(error.into()),
        Err(error) => {
            tell(&error.to_string());
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

fn model_line(engine: &Engine) -> String {
    let model = engine.model();
    // The parameters of the whole model, not of this rank.
    let owned = engine.records().iter().filter(|record| record.tie.is_none());
    let parameters: usize = owned.map(ParameterRecord::elements).sum();
    let shape = model.program(0).shape();
    format!(
        "{} parameters, {}, {} arithmetic, micro-batches of {} × {} tokens",
        human::count(parameters as f64),
        human::plural(model.layers(), "layer"),
        shape.dtype,
        shape.sequences,
        shape.seq_len,
    )
}
