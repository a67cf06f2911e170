//! The timeline of a step in a compact form: there may be hundreds of thousands of passes.

use std::collections::HashMap;
use std::fmt::Write;

use lockstep_plan::schedule::{Action, PassKind};
use serde_json::{Value, json};

use crate::Evaluated;

/// Ranks with passes if there are more than [`MOST_PASSES`]: evenly spaced ones from the first to the last.
const FEW_RANKS: usize = 16;
/// Limit on the passes of all ranks together.
const MOST_PASSES: usize = 400_000;
/// Times are given in ticks, of which a step has this many.
const TICKS: f64 = (1 << 22) as f64;

/// Returns the milliseconds of a tick.
pub(super) fn tick_ms(best: &Evaluated) -> f64 {
    best.step.step_ms / TICKS
}

/// Returns the passes of every pipeline rank; without a pipeline those of each rank. Too many are limited to some ranks.
pub(super) fn timeline(best: &Evaluated) -> Value {
    let all = best.step.simulation.as_ref().map_or(1, |simulation| simulation.spans.len());
    let passes = |rank: usize| {
        best.spans(rank).iter().filter(|span| matches!(span.action, Action::Compute(_))).count()
    };
    let is_long = (0..all).map(passes).sum::<usize>() > MOST_PASSES && all > FEW_RANKS;
    let spaced = |place: usize| place * (all - 1) / (FEW_RANKS - 1);
    let ranks: Vec<usize> = if is_long { (0..FEW_RANKS).map(spaced).collect() } else { (0..all).collect() };
    let rows: Vec<Value> = ranks.into_iter().map(|rank| row(best, rank)).collect();
    json!({ "tick_ms": tick_ms(best), "ranks": all, "rows": rows })
}

/// Returns the index of a kind of pass in the page's list of kinds.
fn pass_kind(kind: PassKind) -> usize {
    match kind {
        PassKind::Forward => 0,
        PassKind::Backward | PassKind::BackwardInput => 1,
        PassKind::BackwardWeight => 2,
    }
}

/// Encodes the passes of a rank in order, each as a letter for its stage and kind. A number before it is the ticks that the rank
/// waits; `:N;` behind it is the micro-batch, if it is not the next one of that letter.
fn row(best: &Evaluated, rank: usize) -> Value {
    let tick_ms = tick_ms(best);
    let mut letters: Vec<Value> = Vec::new();
    let mut known: HashMap<(usize, PassKind), (usize, usize)> = HashMap::new();
    let mut passes = String::new();
    let mut now_ms = 0.0;
    for span in best.spans(rank).iter() {
        let Action::Compute(pass) = span.action else { continue };
        let ms = span.end_ms - span.start_ms;
        let (index, next) = known.entry((pass.stage, pass.kind)).or_insert_with(|| {
            letters.push(json!({ "stage": pass.stage, "kind": pass_kind(pass.kind), "ms": ms }));
            (letters.len() - 1, 0)
        });
        // Rounding errors of earlier waits are corrected here, so that they never add up.
        let waited = ((span.start_ms - now_ms) / tick_ms.max(f64::MIN_POSITIVE)).round();
        if waited > 0.0 {
            let _ = write!(passes, "{waited:.0}");
            now_ms += waited * tick_ms;
        }
        now_ms += ms;
        passes.push(letter(*index));
        if *next != pass.micro_batch {
            let _ = write!(passes, ":{};", pass.micro_batch);
        }
        *next = pass.micro_batch + 1;
    }
    json!({ "rank": rank, "letters": letters, "passes": passes })
}

/// Returns the letter of an index: `A` to `Z`, then the characters from `À` on.
fn letter(index: usize) -> char {
    let after = || char::from_u32(0xC0 + index.saturating_sub(26) as u32);
    u8::try_from(index)
        .ok()
        .filter(|index| *index < 26)
        .map(|index| (b'A' + index).into())
        .or_else(after)
        .unwrap_or('?')
}
