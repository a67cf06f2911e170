//! Recorded steps in the Trace Event Format (JSON object form), which chrome://tracing and Perfetto open.
//!
//! Complete events (`ph: "X"`, times in microseconds). The main track nests operations in units and units in steps. Further
//! tracks hold the collectives and messages, each from the end of the one before it, the work between steps (evaluations,
//! checkpoints) and the background saves. A rank is a process.

use std::time::Duration;

use lockstep_comm::{Kind, NumberType};
use lockstep_engine::TimedOperation;
use lockstep_graph::{Pass, Span};
use lockstep_model::RecordedModel;
use serde_json::{Value, json};

use super::recorded::{Pause, RecordedStep, Turn, operation_name, unit_name};

/// The track of steps, units and operations.
const STEPS: u32 = 1;
/// The track of collectives and messages.
const COMMUNICATION: u32 = 2;
/// The track of work between steps.
const PAUSES: u32 = 3;
/// The track of saves in the background.
const SAVES: u32 = 4;

/// Returns the whole file with the events of all ranks.
pub(super) fn file(events: Vec<Value>) -> Value {
    json!({ "displayTimeUnit": "ms", "traceEvents": events })
}

/// Returns the events of `rank`; its times are `shift_us` later than those of the first rank.
pub(super) fn events(
    rank: usize,
    shift_us: f64,
    steps: &[RecordedStep],
    pauses: &[Pause],
    saves: &[Pause],
    model: &RecordedModel,
) -> Vec<Value> {
    let names = [
        (STEPS, "steps", true),
        (COMMUNICATION, "communication", steps.iter().any(|step| !step.called.is_empty())),
        (PAUSES, "between steps", !pauses.is_empty()),
        (SAVES, "background saves", !saves.is_empty()),
    ];
    let mut events = vec![metadata("process_name", 0, json!({ "name": format!("lockstep, rank {rank}") }))];
    events.push(metadata("process_sort_index", 0, json!({ "sort_index": rank })));
    for (track, name, _) in names.into_iter().filter(|(_, _, is_used)| *is_used) {
        events.push(metadata("thread_name", track, json!({ "name": name })));
        events.push(metadata("thread_sort_index", track, json!({ "sort_index": track })));
    }
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
        events.extend(communication(step));
    }
    for (track, category, pauses) in [(PAUSES, "pause", pauses), (SAVES, "save", saves)] {
        events.extend(
            pauses
                .iter()
                .map(|pause| event(pause.name, category, track, pause.start, pause.duration, json!({}))),
        );
    }
    for event in &mut events {
        event["pid"] = rank.into();
        if let Some(start_us) = event["ts"].as_f64() {
            event["ts"] = (start_us + shift_us).into();
        }
    }
    events
}

/// Returns the collectives and messages of a step, each with its exposed and overlapped time.
fn communication(step: &RecordedStep) -> Vec<Value> {
    let (mut events, mut bucket) = (Vec::new(), 0);
    for Turn { called: TimedOperation { call, sequence, start: posted, met, end }, start, hidden } in
        step.turns()
    {
        let mut name = call.kind.name().to_owned();
        // Only gradients are all-reduced in f32.
        if call.kind == Kind::AllReduce && call.number == NumberType::F32 {
            name += &format!(", bucket {bucket}");
            bucket += 1;
        }
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let arguments = json!({
            "what": call.to_string(),
            "operation": sequence,
            "bytes": call.elements * call.number.size_bytes(),
            "queued_ms": ms(start - posted),
            "hidden_ms": ms(hidden),
            "exposed_ms": ms((end - start).saturating_sub(hidden)),
        });
        events.push(event(&name, "communication", COMMUNICATION, step.start + start, end - start, arguments));
        if met > start && met <= end {
            let name = "wait for other ranks";
            events.push(event(
                name,
                "communication",
                COMMUNICATION,
                step.start + start,
                met - start,
                json!({}),
            ));
        }
    }
    events
}

/// Returns the unit of a span and the part of the step that runs it.
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
        "name": name, "cat": category, "ph": "X", "tid": track,
        "ts": start.as_secs_f64() * 1e6, "dur": duration.as_secs_f64() * 1e6, "args": arguments,
    })
}

fn metadata(what: &str, track: u32, arguments: Value) -> Value {
    json!({ "name": what, "ph": "M", "tid": track, "args": arguments })
}

#[cfg(test)]
mod tests {
    use lockstep_comm::Call;
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

    fn called(kind: Kind, start_us: u64, met_us: u64, end_us: u64) -> TimedOperation {
        let call = Call { kind, number: NumberType::F32, op: None, root: None, elements: 1024, detail: 0 };
        let us = Duration::from_micros;
        TimedOperation { call, sequence: 7, start: us(start_us), met: us(met_us), end: us(end_us) }
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
            called: vec![called(Kind::Barrier, 0, 0, 12), called(Kind::AllReduce, 5, 14, 34)],
        };
        let pause = Pause {
            name: "evaluation",
            start: Duration::from_micros(1040),
            duration: Duration::from_micros(5),
        };
        let save =
            Pause { name: "save", start: Duration::from_micros(1005), duration: Duration::from_micros(90) };
        let found = events(3, 100.0, &[step], &[pause], &[save], &model);
        assert!(found.iter().all(|event| event["pid"] == 3));
        let shown: Vec<_> = found
            .iter()
            .filter(|event| event["ph"] == "X")
            .map(|event| {
                let number = |key: &str| event[key].as_f64().unwrap().round() as u64;
                (event["name"].as_str().unwrap().to_owned(), number("ts") - 100, number("dur"))
            })
            .collect();
        let layer = &model.program(1).parameters()[2].name;
        let expected = [
            ("step 7", 1000, 40),
            ("zero gradients", 1000, 10),
            ("block 0 forward", 1010, 20),
            ("attention", 1010, 10),
            (&format!("linear {}", layer.trim_end_matches(".weight")), 1020, 10),
            ("barrier", 1000, 12),
            ("all_reduce, bucket 0", 1012, 22),
            ("wait for other ranks", 1012, 2),
            ("evaluation", 1040, 5),
            ("save", 1005, 90),
        ];
        assert_eq!(shown, expected.map(|(name, start, duration)| (name.to_owned(), start, duration)));
        let named = |name: &str| found.iter().find(|event| event["name"] == name).unwrap();
        let operation = named("attention");
        assert_eq!(operation["args"]["GFLOP/s"].as_f64().map(f64::round), Some(200.0), "{operation}");
        // Its turn comes at 12 us; operations end at 30 us.
        let bucket = &named("all_reduce, bucket 0")["args"];
        let us = |key: &str| (bucket[key].as_f64().unwrap() * 1e3).round() as u64;
        assert_eq!((us("queued_ms"), us("hidden_ms"), us("exposed_ms")), (7, 18, 4), "{bucket}");
        assert_eq!(bucket["bytes"], 4096, "{bucket}");
    }
}
