//! The timeline of a pipeline step as measured on all ranks, and a simulation of its schedule with the measured mean duration of
//! each action. The report draws both.

use std::fs;
use std::path::Path;
use std::time::Instant;

use lockstep_comm::now_us;
use lockstep_engine::{Engine, PassTime, Ranks, StepTimes};
use lockstep_plan::Axis;
use lockstep_plan::schedule::{Action, Costs, Pass, PassKind, Schedule, Simulation, StageCost};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::Error;
use crate::json_value::{gather_json, write_json};

/// Name of the file in `metrics.dir`.
pub const TIMELINE: &str = "timeline.json";

/// Limit on the actions written; more cannot be seen. The first pipeline is always written.
const MOST_PASSES: usize = 20_000;

/// Times of one rank, sent to the first rank.
#[derive(Debug, Serialize, Deserialize)]
struct OwnStep {
    /// Boot id of the machine; ranks with the same one share a clock.
    boot: String,
    /// Time of a barrier on the rank's own clock.
    met_us: u64,
    begin_us: u64,
    passes: Vec<(Pass, u64, u64)>,
    passed_us: u64,
    end_us: u64,
}

/// An action or, with `None`, the optimizer step; times in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Bar {
    pass: Option<Pass>,
    start_ms: f64,
    end_ms: f64,
}

/// Writes the timeline of the last step, which has number `step` and ran the schedule named `schedule`. Does nothing without a
/// pipeline. A collective call: the first rank writes.
///
/// # Errors
/// The file cannot be written; [`Error::Comm`].
pub fn write(dir: &Path, step: u64, schedule: &str, engine: &Engine, ranks: &Ranks) -> Result<(), Error> {
    let pipeline = ranks.groups().plan().and_then(|plan| plan.passes.pipeline.as_ref());
    let Some(((actions, _), times)) = pipeline.zip(engine.pipeline_times()) else {
        return Ok(());
    };
    ranks.barrier()?;
    let path = dir.join(TIMELINE);
    let Some(steps) = gather_json(ranks, &path, &OwnStep::of(times, now_us()))? else { return Ok(()) };
    let shifts_us: Vec<i64> = steps.iter().map(|own| own.shift_us(&steps[0])).collect();
    let bars: Vec<Vec<Bar>> = steps.iter().zip(&shifts_us).map(|(own, shift)| own.bars(*shift)).collect();
    let pipelines = ranks.mesh().ranks().groups(&[Axis::Pipeline]);
    let shown = (MOST_PASSES / actions.ranks() / steps[0].passes.len().max(1)).max(1);
    let describe = |ranks: &Vec<usize>| {
        describe(actions, ranks, &ranks.iter().map(|rank| bars[*rank].clone()).collect::<Vec<_>>())
    };
    let all: Vec<Value> = pipelines.iter().take(shown).map(describe).collect();
    let file = json!({ "step": step, "schedule": schedule, "pipelines": all, "of": pipelines.len() });
    write_json(&path, &file)
}

impl OwnStep {
    fn of(times: &StepTimes, met_us: u64) -> Self {
        let (now, now_us) = (Instant::now(), now_us());
        let us =
            |time: Instant| now_us.saturating_sub(now.saturating_duration_since(time).as_micros() as u64);
        let StepTimes { begin, passes, passed, end } = times;
        let pass = |PassTime { pass, begin, end }: &PassTime| (*pass, us(*begin), us(*end));
        Self {
            boot: fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default(),
            met_us,
            begin_us: us(*begin),
            passes: passes.iter().map(pass).collect(),
            passed_us: us(*passed),
            end_us: us(*end),
        }
    }

    /// Returns the offset in microseconds from this rank's clock to that of `first`.
    fn shift_us(&self, first: &Self) -> i64 {
        if self.boot == first.boot { 0 } else { first.met_us.cast_signed() - self.met_us.cast_signed() }
    }

    /// Returns the begin of the step, the actions and the optimizer step, with `shift_us` added.
    fn bars(&self, shift_us: i64) -> Vec<Bar> {
        let ms = |us: u64| us.saturating_add_signed(shift_us) as f64 / 1e3;
        let bar = |pass, start, end| Bar { pass, start_ms: ms(start), end_ms: ms(end) };
        let passes = self.passes.iter().map(|(pass, begin, end)| bar(Some(*pass), *begin, *end));
        // The first bar marks the begin of the step, and the last begins when the rank's actions are done.
        let begin = bar(None, self.begin_us, self.begin_us);
        std::iter::once(begin).chain(passes).chain([bar(None, self.passed_us, self.end_us)]).collect()
    }
}

/// Returns the timeline of one pipeline from the bars of its ranks. The first bar of a rank marks its begin, the last one starts
/// at the end of its actions.
fn describe(schedule: &Schedule, ranks: &[usize], bars: &[Vec<Bar>]) -> Value {
    let begin_ms =
        bars.iter().filter_map(|bars| bars.first()).map(|bar| bar.start_ms).fold(f64::MAX, f64::min);
    // No rank can start its optimizer step before the last one has finished its actions.
    let met_ms = bars.iter().filter_map(|bars| bars.last()).map(|bar| bar.start_ms).fold(0.0, f64::max);
    let mut measured: Vec<Vec<Bar>> = Vec::new();
    for bars in bars {
        let mut row: Vec<Bar> = bars[1..].to_vec();
        if let Some(update) = row.last_mut() {
            update.start_ms = met_ms.min(update.end_ms);
        }
        for bar in &mut row {
            (bar.start_ms, bar.end_ms) = (bar.start_ms - begin_ms, bar.end_ms - begin_ms);
        }
        measured.push(row);
    }
    let costs = costs_of(schedule, &measured);
    let simulated = schedule.simulate(&costs).map(|simulation| bars_of(&simulation)).unwrap_or_default();
    json!({ "ranks": ranks, "measured": picture(&measured), "simulated": picture(&simulated) })
}

/// Returns the mean duration of each stage's actions and of the optimizer step. If a stage has both whole and split backwards,
/// their total duration is preserved.
fn costs_of(schedule: &Schedule, measured: &[Vec<Bar>]) -> Costs {
    let mut sums = vec![[(0.0, 0); 4]; schedule.stages()];
    let mut optimizer_ms: f64 = 0.0;
    for bar in measured.iter().flatten() {
        let ms = bar.end_ms - bar.start_ms;
        match bar.pass {
            Some(pass) => {
                let (sum, count) = &mut sums[pass.stage][index(pass.kind)];
                (*sum, *count) = (*sum + ms, *count + 1);
            }
            None => optimizer_ms = optimizer_ms.max(ms),
        }
    }
    let mean = |(sum, count): (f64, u32)| if count == 0 { 0.0 } else { sum / f64::from(count) };
    let stage = |[forward, whole, input, weight]: [(f64, u32); 4]| {
        let (mut backward_input_ms, mut backward_weight_ms) = (mean(input), mean(weight));
        if input.1 == 0 {
            backward_input_ms = mean(whole);
        } else {
            let planned = backward_input_ms * f64::from(whole.1 + input.1)
                + backward_weight_ms * f64::from(whole.1 + weight.1);
            let factor = if planned > 0.0 { (whole.0 + input.0 + weight.0) / planned } else { 1.0 };
            backward_input_ms *= factor;
            backward_weight_ms *= factor;
        }
        StageCost { forward_ms: mean(forward), backward_input_ms, backward_weight_ms, ..StageCost::default() }
    };
    Costs { stages: sums.into_iter().map(stage).collect(), optimizer_ms, ..Costs::default() }
}

const fn index(kind: PassKind) -> usize {
    match kind {
        PassKind::Forward => 0,
        PassKind::Backward => 1,
        PassKind::BackwardInput => 2,
        PassKind::BackwardWeight => 3,
    }
}

fn bars_of(simulation: &Simulation) -> Vec<Vec<Bar>> {
    let row = |spans: &Vec<lockstep_plan::schedule::Span>| {
        let bar = |span: &lockstep_plan::schedule::Span| {
            let pass = match span.action {
                Action::Compute(pass) => Some(pass),
                Action::Step => None,
                _ => return None,
            };
            Some(Bar { pass, start_ms: span.start_ms, end_ms: span.end_ms })
        };
        spans.iter().filter_map(bar).collect()
    };
    simulation.spans.iter().map(row).collect()
}

/// Returns a step as the report draws it: each bar as letter, stage, micro-batch, start and duration in milliseconds.
fn picture(rows: &[Vec<Bar>]) -> Value {
    let step_ms = rows.iter().flatten().map(|bar| bar.end_ms).fold(0.0, f64::max);
    let worked_ms: f64 = rows.iter().flatten().map(|bar| bar.end_ms - bar.start_ms).sum();
    let available_ms = step_ms * rows.len() as f64;
    let bubble = if available_ms > 0.0 { 1.0 - worked_ms / available_ms } else { 0.0 };
    let round = |ms: f64| (ms * 1e3).round() / 1e3;
    let bar = |Bar { pass, start_ms, end_ms }: &Bar| match pass {
        Some(Pass { kind, stage, micro_batch }) => {
            json!([kind.letter(), stage, micro_batch, round(*start_ms), round(end_ms - start_ms)])
        }
        None => json!(["U", 0, 0, round(*start_ms), round(end_ms - start_ms)]),
    };
    let rows: Vec<Vec<Value>> = rows.iter().map(|row| row.iter().map(bar).collect()).collect();
    json!({ "step_ms": round(step_ms), "bubble": bubble, "rows": rows })
}

#[cfg(test)]
mod tests {
    use lockstep_plan::schedule::Kind;

    use super::*;

    /// Returns what ranks would measure in a step that runs as simulated, beginning at 1 s.
    fn as_simulated(schedule: &Schedule, costs: &Costs) -> Vec<OwnStep> {
        let us = |ms: f64| 1_000_000 + (ms * 1e3) as u64;
        let own = |rows: Vec<Bar>| {
            let (update, passes) = rows.split_last().unwrap();
            OwnStep {
                boot: "a".to_owned(),
                met_us: 9_000_000,
                begin_us: us(0.0),
                passes: passes
                    .iter()
                    .map(|bar| (bar.pass.unwrap(), us(bar.start_ms), us(bar.end_ms)))
                    .collect(),
                // Stages do not finish at the same time.
                passed_us: us(passes.last().unwrap().end_ms),
                end_us: us(update.end_ms),
            }
        };
        bars_of(&schedule.simulate(costs).unwrap()).into_iter().map(own).collect()
    }

    #[test]
    fn a_step_that_goes_as_simulated_is_the_simulation_whatever_the_ranks_clocks_say() {
        for kind in Kind::ALL {
            let schedule = Schedule::new(kind, 2, 4, kind.chunks().0).unwrap();
            let cost = StageCost {
                forward_ms: 2.0,
                backward_input_ms: 3.0,
                backward_weight_ms: 1.0,
                ..StageCost::default()
            };
            let costs = Costs { optimizer_ms: 5.0, ..Costs::uniform(schedule.stages(), cost) };
            let mut steps = as_simulated(&schedule, &costs);
            // The second rank is on another machine, whose clock is 3 s ahead.
            let ahead = 3_000_000;
            let other = &mut steps[1];
            other.boot = "b".to_owned();
            for time in [&mut other.met_us, &mut other.begin_us, &mut other.passed_us, &mut other.end_us] {
                *time += ahead;
            }
            other
                .passes
                .iter_mut()
                .for_each(|(_, begin, end)| (*begin, *end) = (*begin + ahead, *end + ahead));
            let bars: Vec<_> = steps.iter().map(|own| own.bars(own.shift_us(&steps[0]))).collect();
            let found = describe(&schedule, &[0, 1], &bars);
            let simulation = schedule.simulate(&costs).unwrap();
            for which in ["measured", "simulated"] {
                let step_ms = found[which]["step_ms"].as_f64().unwrap();
                let bubble = found[which]["bubble"].as_f64().unwrap();
                assert!((step_ms - simulation.step_ms).abs() < 0.01, "{kind} {which}: {step_ms}");
                assert!((bubble - simulation.bubble).abs() < 0.001, "{kind} {which}: {bubble}");
            }
            let row = |which: &str| found[which]["rows"][1].as_array().unwrap().len();
            assert_eq!(
                (row("measured"), row("simulated")),
                (schedule.passes(1).count() + 1, row("measured"))
            );
        }
    }
}
