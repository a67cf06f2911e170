//! Recorder of the sampled step and the traced ones, which a run calls at the begin and the end of each step.

use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use lockstep_engine::{Engine, Ranks};
use lockstep_model::RecordedModel;

use super::recorded::{Pause, RecordedStep};
use super::{chrome, profile};
use crate::Error;
use crate::json_value::{gather_json, write_json};
use crate::roofline::Limits;

/// Name of the sampled step's file in `metrics.dir`.
pub const PROFILE: &str = "profile.json";

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
        // The events of one rank need no detour through bytes; there may be hundreds of thousands.
        let parts = if ranks.size() == 1 { Some(vec![events]) } else { gather_json(ranks, &path, &events)? };
        match parts {
            Some(parts) => write_json(&path, &chrome::file(parts.into_iter().flatten().collect())),
            None => Ok(()),
        }
    }
}
