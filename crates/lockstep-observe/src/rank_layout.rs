//! The state held by each rank, for the report: its coordinates in the mesh, its stages and layers, and their bytes.

use std::path::Path;

use lockstep_engine::{Engine, Ranks};
use lockstep_plan::{Axis, MemoryCategory, RankPlan};
use serde_json::{Value, json};

use crate::Error;
use crate::json_value::{gather_json, write_json};

/// Name of the file in `metrics.dir`.
pub const LAYOUT: &str = "layout.json";

/// Writes the layout of all ranks. A collective call: the first rank writes.
///
/// # Errors
/// If the file cannot be written or the communication with other ranks fails.
pub fn write(dir: &Path, engine: &Engine, ranks: &Ranks) -> Result<(), Error> {
    if ranks.size() == 1 {
        return Ok(());
    }
    let path = dir.join(LAYOUT);
    let of_ranks = gather_json(ranks, &path, &of_rank(engine, ranks))?;
    let view = ranks.mesh().ranks();
    let axes: Vec<(&str, usize)> = Axis::ALL.map(|axis| (axis.name(), view.degree(axis))).to_vec();
    match of_ranks {
        Some(of_ranks) => write_json(&path, &json!({ "axes": axes, "ranks": of_ranks })),
        None => Ok(()),
    }
}

/// Returns the state held by this rank.
fn of_rank(engine: &Engine, ranks: &Ranks) -> Value {
    let units = engine.model().units();
    let stages: Vec<Value> = match ranks.groups().plan().map(RankPlan::layout) {
        Some(layout) => {
            let pipeline_rank = ranks.mesh().ranks().coordinate(ranks.rank(), Axis::Pipeline);
            let stage = |stage: usize| json!({ "stage": stage, "holds": units_in_words(layout.stages[stage].clone(), units) });
            layout.stages_of(pipeline_rank).into_iter().map(stage).collect()
        }
        None => vec![json!({ "stage": 0, "holds": units_in_words(0..units, units) })],
    };
    let (mut elements, mut split, mut whole) = (0, 0, 0);
    for id in engine.parameter_ids() {
        let record = &engine.records()[id.0];
        elements += record.local_elements();
        *(if record.share.shard.is_some() { &mut split } else { &mut whole }) += 1;
    }
    let memory = engine.arena().in_use();
    let bytes = |category: MemoryCategory| memory[category];
    json!({
        "coordinates": ranks.mesh().ranks().coordinates(ranks.rank()),
        "stages": stages,
        "elements": elements,
        "split": split,
        "whole": whole,
        "parameters": bytes(MemoryCategory::Parameters),
        "gradients": bytes(MemoryCategory::Gradients),
        "optimizer": bytes(MemoryCategory::Optimizer),
    })
}

/// Describes a range of units of a model with `units` units: `embedding, layers 0-3`.
fn units_in_words(stage: std::ops::Range<usize>, units: usize) -> String {
    let (head, last) = (units - 1, stage.end.min(units - 1));
    let first = stage.start.max(1);
    let mut parts = Vec::new();
    if stage.start == 0 && stage.end > 0 {
        parts.push("embedding".to_owned());
    }
    match last.saturating_sub(first) {
        0 => {}
        1 => parts.push(format!("layer {}", first - 1)),
        _ => parts.push(format!("layers {}-{}", first - 1, last - 2)),
    }
    if stage.contains(&head) {
        parts.push("head".to_owned());
    }
    if parts.is_empty() { "nothing".to_owned() } else { parts.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_told_as_people_speak_of_them() {
        // The model has an embedding, four layers and a head.
        let cases = [
            (0..6, "embedding, layers 0-3, head"),
            (0..2, "embedding, layer 0"),
            (2..4, "layers 1-2"),
            (4..6, "layer 3, head"),
            (5..6, "head"),
            (0..1, "embedding"),
            (3..3, "nothing"),
        ];
        for (stage, words) in cases {
            assert_eq!(units_in_words(stage.clone(), 6), words, "{stage:?}");
        }
    }
}
