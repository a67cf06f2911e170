//! Recorded steps in the Trace Event Format (JSON object form), which chrome://tracing and Perfetto open.
//!
//! Complete events (`ph: "X"`, times in microseconds) on one track; a step holds its units, a unit its operations.
//! What stands between steps (evaluations, checkpoints) has a track of its own, and so have saves beside them.

use std::time::Duration;

use lockstep_graph::{Pass, Span};
use lockstep_model::RecordedModel;
use serde_json::{Value, json};

use super::{Pause, RecordedStep, operation_name, unit_name};

/// The track of steps, units and operations.
const STEPS: u32 = 1;
/// The track of what stands between steps.
const PAUSES: u32 = 2;
/// The track of saves in the background.
const SAVES: u32 = 3;

/// The whole file.
pub(super) fn trace(
    steps: &[RecordedStep],
    pauses: &[Pause],
    saves: &[Pause],
    model: &RecordedModel,
) -> Value {
    let mut events = vec![
        metadata("process_name", 0, "lockstep, rank 0"),
        metadata("thread_name", STEPS, "steps"),
        metadata("thread_name", PAUSES, "between steps"),
        metadata("thread_name", SAVES, "saves beside the steps"),
    ];
    for step in steps {
        events.push(event(
            &format!("step {}", step.step),
            "step",
            STEPS,
            step.start,
            step.duration,
            json!({}),
        ));
        let mut rest = step.spans.as_slice();
        while let Some(first) = rest.first() {
            let together = group(first);
            let length = rest.iter().take_while(|span| group(span) == together).count();
            let (spans, after) = rest.split_at(length);
            if let (Some((unit, part)), Some(last)) = (together, spans.last()) {
                let duration = last.start + last.duration - first.start;
                let name = format!("{} {part}", unit_name(unit, model));
                events.push(event(&name, "unit", STEPS, step.start + first.start, duration, json!({})));
            }
            events.extend(spans.iter().map(|span| operation(span, step.start, model)));
            rest = after;
        }
    }
    for (track, category, pauses) in [(PAUSES, "pause", pauses), (SAVES, "save", saves)] {
        events.extend(
            pauses
                .iter()
                .map(|pause| event(pause.name, category, track, pause.start, pause.duration, json!({}))),
        );
    }
    json!({ "displayTimeUnit": "ms", "traceEvents": events })
}

/// The unit that a span stands under, and what that unit does.
fn group(span: &Span) -> Option<(usize, &'static str)> {
    let part = match span.activity.pass {
        Some(Pass::Forward) => "forward",
        Some(Pass::Recompute | Pass::BackwardInputs | Pass::BackwardWeights) => "backward",
        None => span.activity.name,
    };
    span.activity.unit.map(|unit| (unit, part))
}

fn operation(span: &Span, step_start: Duration, model: &RecordedModel) -> Value {
    let seconds = span.duration.as_secs_f64().max(1e-9);
    let arguments = json!({
        "pass": span.activity.pass.map(Pass::name),
        "bytes": span.cost.bytes,
        "flops": span.cost.flops(),
        "GFLOP/s": span.cost.flops() as f64 / seconds / 1e9,
        "GB/s": span.cost.bytes as f64 / seconds / 1e9,
    });
    let name = operation_name(&span.activity, model);
    event(&name, span.activity.name, STEPS, step_start + span.start, span.duration, arguments)
}

fn event(
    name: &str,
    category: &str,
    track: u32,
    start: Duration,
    duration: Duration,
    arguments: Value,
) -> Value {
    json!({
        "name": name, "cat": category, "ph": "X", "pid": 0, "tid": track,
        "ts": start.as_secs_f64() * 1e6, "dur": duration.as_secs_f64() * 1e6, "args": arguments,
    })
}

fn metadata(what: &str, track: u32, name: &str) -> Value {
    json!({ "name": what, "ph": "M", "pid": 0, "tid": track, "args": { "name": name } })
}

#[cfg(test)]
mod tests {
    use lockstep_graph::{Activity, BlockShape, Cost, Mode, ParameterIndex, Recompute};
    use lockstep_model::{HeadOutput, ModelConfig};
    use lockstep_plan::DType;

    use super::*;

    fn span(name: &'static str, unit: Option<usize>, start_us: u64) -> Span {
        Span {
            activity: Activity { name, pass: unit.map(|_| Pass::Forward), unit, parameter: None },
            cost: Cost { product_flops: 2_000_000, vector_flops: 0, bytes: 1000 },
            start: Duration::from_micros(start_us),
            duration: Duration::from_micros(10),
        }
    }

    #[test]
    fn steps_hold_units_and_units_hold_operations() {
        let config = ModelConfig::preset("baby-gpt").unwrap();
        let shape = BlockShape { sequences: 1, seq_len: 8, dtype: DType::F32 };
        let model = RecordedModel::new(&config, Mode::Training, shape, Recompute::None, HeadOutput::Losses);
        let mut linear = span("linear", Some(1), 20);
        linear.activity.parameter = Some(ParameterIndex(2));
        let spans = vec![span("zero gradients", None, 0), span("attention", Some(1), 10), linear];
        let step = RecordedStep {
            step: 7,
            start: Duration::from_micros(1000),
            duration: Duration::from_micros(40),
            spans,
        };
        let pause = Pause {
            name: "evaluation",
            start: Duration::from_micros(1040),
            duration: Duration::from_micros(5),
        };
        let save =
            Pause { name: "save", start: Duration::from_micros(1005), duration: Duration::from_micros(90) };
        let trace = trace(&[step], &[pause], &[save], &model);
        let events: Vec<_> = trace["traceEvents"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|event| event["ph"] == "X")
            .map(|event| {
                let number = |key: &str| event[key].as_f64().unwrap().round() as u64;
                (event["name"].as_str().unwrap().to_owned(), number("ts"), number("dur"))
            })
            .collect();
        let layer = &model.program(1).parameters()[2].name;
        let expected = [
            ("step 7", 1000, 40),
            ("zero gradients", 1000, 10),
            ("block 0 forward", 1010, 20),
            ("attention", 1010, 10),
            (&format!("linear {}", layer.trim_end_matches(".weight")), 1020, 10),
            ("evaluation", 1040, 5),
            ("save", 1005, 90),
        ];
        assert_eq!(events, expected.map(|(name, start, duration)| (name.to_owned(), start, duration)));
        let operation = &trace["traceEvents"][7];
        assert_eq!(operation["args"]["GFLOP/s"].as_f64().map(f64::round), Some(200.0), "{operation}");
    }
}
