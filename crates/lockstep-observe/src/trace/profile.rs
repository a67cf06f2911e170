//! The sampled step as the report reads it: its roofline and its spans.

use lockstep_graph::{Pass, Span};
use lockstep_model::RecordedModel;
use serde_json::{Value, json};

use super::recorded::{RecordedStep, Turn, operation_name, unit_name};
use crate::roofline::{Detail, Limits, Roofline, name};

/// Limit on the spans above which those too short to be seen are dropped.
const MAX_SPANS: usize = 4000;
/// Least fraction of a step that is visible.
const VISIBLE: f64 = 1.0 / 4000.0;

/// Returns everything that the report shows of the sampled step.
pub(super) fn describe(step: &RecordedStep, model: &RecordedModel, limits: Option<Limits>) -> Value {
    let is_shown = |span: &&Span| {
        step.spans.len() <= MAX_SPANS || span.duration.as_secs_f64() > VISIBLE * step.duration.as_secs_f64()
    };
    let mut spans: Vec<Value> = step
        .spans
        .iter()
        .filter(is_shown)
        .map(|span| {
            let name_in_unit = operation_name(&span.activity, model);
            json!({
                "name": match span.activity.unit {
                    Some(unit) => format!("{}, {name_in_unit}", unit_name(unit, model)),
                    None => name_in_unit,
                },
                "kind": name(&span.activity, model, Detail::Kinds),
                "lane": lane(span.activity.pass),
                "start_ms": microseconds(span.start.as_secs_f64()),
                "ms": microseconds(span.duration.as_secs_f64()),
            })
        })
        .collect();
    spans.extend(step.turns().iter().map(|Turn { called, start, hidden }| {
        let seconds = (called.end - *start).as_secs_f64();
        json!({
            "name": format!("{}, {:.0} % overlapped", called.call, 100.0 * hidden.as_secs_f64() / seconds.max(1e-9)),
            "kind": "communication",
            "lane": "ranks",
            "start_ms": microseconds(start.as_secs_f64()),
            "ms": microseconds(seconds),
        })
    }));
    let roofline = Roofline::new(&step.spans, step.duration, model, Detail::Kinds, limits);
    json!({ "step": step.step, "roofline": roofline, "spans": spans })
}

/// Converts seconds to milliseconds, rounded to three decimals.
fn microseconds(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e3
}

fn lane(pass: Option<Pass>) -> &'static str {
    match pass {
        Some(Pass::Forward) => "forward",
        Some(Pass::Recompute) => "recompute",
        Some(Pass::BackwardInputs | Pass::BackwardWeights) => "backward",
        None => "step",
    }
}
