//! Memory over a step in a compact form: the curves of some pipeline ranks, thinned to what a page can show.

use serde_json::{Value, json};

use super::timeline::tick_ms;
use crate::details::MemoryCurve;
use crate::{Details, Evaluated};

/// Columns of a picture: of the values in a column the first, the last, the least and the greatest are kept.
const COLUMNS: f64 = 512.0;

/// Returns the curves of the pipeline ranks at the ends and in the middle, and of the one that books most.
pub(super) fn memory(best: &Evaluated, details: &Details) -> Value {
    let ranks = details.memory.len();
    let mut shown = vec![0, ranks / 2, ranks.saturating_sub(1), best.largest().0];
    shown.sort_unstable();
    shown.dedup();
    let curve = |rank: usize| {
        let curve = details.memory.get(rank)?;
        Some(json!({ "pipeline_rank": rank, "points": thinned(curve, tick_ms(best), best.step.step_ms) }))
    };
    shown.into_iter().filter_map(curve).collect()
}

/// Returns the bytes in use by columns, each as ticks and the values that follow each other there.
fn thinned(curve: &MemoryCurve, tick_ms: f64, step_ms: f64) -> Vec<Vec<u64>> {
    let column = |ms: f64| (ms / step_ms.max(f64::MIN_POSITIVE) * COLUMNS).floor();
    let columns = curve.points.chunk_by(|a, b| column(a.0) == column(b.0));
    let kept = |points: &[(f64, usize)]| {
        let bytes = || points.iter().map(|(_, bytes)| *bytes as u64);
        let mut kept: Vec<u64> = [bytes().next(), bytes().min(), bytes().max(), bytes().next_back()]
            .into_iter()
            .flatten()
            .collect();
        kept.dedup();
        kept.insert(0, (points[0].0 / tick_ms.max(f64::MIN_POSITIVE)).round() as u64);
        kept
    };
    columns.map(kept).collect()
}
