//! The timeline of a step: a picture of the whole, and the data of every pass, which the page's script draws when a reader zooms in.

use std::collections::HashMap;
use std::fmt::Write;

use lockstep_config::human;
use lockstep_plan::schedule::{Action, PassKind};
use serde_json::json;

use super::svg::{WIDTH, colour, legend, note, rectangle, svg, text};
use crate::Evaluated;

/// Most ranks in the picture; of more, evenly spaced ones from the first to the last.
const MOST_RANKS: usize = 16;
/// Width below which passes, on average, are drawn as shares of ranges of the step, each `STRETCH` wide.
const LEAST_PASS: f64 = 3.0;
const STRETCH: f64 = 12.0;
/// Most passes in the page's data; beyond, only those of the drawn ranks.
const MOST_PASSES: usize = 400_000;
/// Waiting times are given in ticks, of which a step has this many.
const TICKS: f64 = (1 << 22) as f64;

const KINDS: [&str; 5] = ["forward", "backward", "backward of weights", "sums of gradients", "update"];

/// Returns the ranks that are drawn: all, or evenly spaced ones from the first to the last.
fn drawn_ranks(ranks: usize) -> Vec<usize> {
    if ranks <= MOST_RANKS {
        return (0..ranks).collect();
    }
    (0..MOST_RANKS).map(|place| place * (ranks - 1) / (MOST_RANKS - 1)).collect()
}

fn ranks_of(best: &Evaluated) -> usize {
    best.step.simulation.as_ref().map_or(1, |simulation| simulation.spans.len())
}

/// A span of a rank in a step: an index into [`KINDS`], begin and end in milliseconds.
struct Pass {
    kind: usize,
    start: f64,
    end: f64,
}

fn kind_of(kind: PassKind) -> usize {
    match kind {
        PassKind::Forward => 0,
        PassKind::Backward | PassKind::BackwardInput => 1,
        PassKind::BackwardWeight => 2,
    }
}

/// Returns the passes of a pipeline rank; without a pipeline those of every rank, one micro-batch after the other.
fn passes(best: &Evaluated, rank: usize) -> Vec<Pass> {
    let of_span = |span: &lockstep_plan::schedule::Span| match span.action {
        Action::Compute(pass) => {
            Some(Pass { kind: kind_of(pass.kind), start: span.start_ms, end: span.end_ms })
        }
        _ => None,
    };
    best.spans(rank).iter().filter_map(of_span).collect()
}

/// Returns the spans after the passes, as (begin, length, kind).
fn after(best: &Evaluated) -> impl Iterator<Item = (f64, f64, usize)> {
    let step = &best.step;
    let (gradients_ms, update_ms) = (step.gradients_ms, step.update_ms);
    let parts = [
        (step.step_ms - update_ms - gradients_ms, gradients_ms, 3),
        (step.step_ms - update_ms, update_ms, 4),
    ];
    parts.into_iter().filter(|(_, ms, _)| *ms > 0.0)
}

/// Draws the spans of each pipeline rank; without a pipeline those of every rank.
pub(super) fn timeline(best: &Evaluated) -> String {
    let step_ms = best.step.step_ms.max(f64::MIN_POSITIVE);
    let (left, height) = (60.0, 18.0);
    let scale = (WIDTH - left) / step_ms;
    let all = ranks_of(best);
    let ranks = drawn_ranks(all);
    let mut body = String::new();
    let (mut seen, mut is_dense) = ([false; KINDS.len()], false);
    for (row, rank) in ranks.iter().enumerate() {
        let y = row as f64 * (height + 3.0);
        let name = if all > 1 { format!("rank {rank}") } else { "each rank".to_owned() };
        text(&mut body, [0.0, y + 13.0], "", &name);
        rectangle(&mut body, [left, y, WIDTH - left, height], "var(--grid)", "");
        let passes = passes(best, *rank);
        passes.iter().for_each(|pass| seen[pass.kind] = true);
        let worked: f64 = passes.iter().map(|pass| pass.end - pass.start).sum();
        if worked * scale / (passes.len().max(1) as f64) < LEAST_PASS {
            is_dense = true;
            bands(&mut body, &passes, scale, [left, y, height]);
        } else {
            for pass in &passes {
                let (start, width) = (left + pass.start * scale, (pass.end - pass.start) * scale);
                let title = format!("{} {}", KINDS[pass.kind], human::step_time(pass.end - pass.start));
                // A gap marks the border between micro-batches.
                rectangle(&mut body, [start, y, (width - 0.8).max(0.4), height], &colour(pass.kind), &title);
            }
        }
        for (start, ms, kind) in after(best) {
            seen[kind] = true;
            let title = format!("{} {}", KINDS[kind], human::step_time(ms));
            rectangle(&mut body, [left + start * scale, y, ms * scale, height], &colour(kind), &title);
        }
    }
    let picture = svg(ranks.len() as f64 * (height + 3.0), &body);
    let named = KINDS.iter().enumerate().filter(|(kind, _)| seen[*kind]);
    let names = named.map(|(kind, name)| ((*name).to_owned(), colour(kind)));
    let mut notes = Vec::new();
    if is_dense {
        notes.push(
            "Passes too short to be seen are drawn as shares of the time, one above the other.".to_owned(),
        );
    }
    if ranks.len() < all {
        notes.push(format!("{} of {all} ranks of the pipeline are drawn.", ranks.len()));
    }
    let legend = legend(names.chain([("waiting".to_owned(), "var(--grid)".to_owned())]));
    format!(
        "<div id=\"timeline\"><div id=\"whole\">{picture}{}</div></div>{legend}{}",
        note(&notes.join(" ")),
        data(best)
    )
}

/// Draws passes that are narrower than a line: for each range of the step, the share of each kind of pass as a height.
fn bands(to: &mut String, passes: &[Pass], scale: f64, [left, y, height]: [f64; 3]) {
    let end = passes.iter().map(|pass| pass.end).fold(0.0, f64::max) * scale;
    let mut shares = vec![[0.0_f64; 3]; (end / STRETCH).ceil() as usize + 1];
    for pass in passes {
        let (mut start, end) = (pass.start * scale / STRETCH, pass.end * scale / STRETCH);
        while start < end {
            let stretch = start.floor();
            let until = end.min(stretch + 1.0);
            shares[stretch as usize][pass.kind] += until - start;
            start = until;
        }
    }
    let mut paths = [String::new(), String::new(), String::new()];
    for (index, shares) in shares.iter().enumerate() {
        let mut from = 0.0;
        for (path, share) in paths.iter_mut().zip(shares) {
            if *share > 0.005 {
                let (x, y) = (left + index as f64 * STRETCH, y + height * from);
                let _ = write!(path, "M{x:.0} {y:.1}h{STRETCH}v{:.1}h-{STRETCH}z", height * share);
            }
            from += share;
        }
    }
    for (kind, path) in paths.iter().enumerate().filter(|(_, path)| !path.is_empty()) {
        let _ =
            write!(to, "<path d=\"{path}\" fill=\"{}\"><title>{}</title></path>", colour(kind), KINDS[kind]);
    }
}

/// Returns the passes for the script in a compact form: there may be hundreds of thousands.
fn data(best: &Evaluated) -> String {
    let all = ranks_of(best);
    let passes = |rank: usize| {
        best.spans(rank).iter().filter(|span| matches!(span.action, Action::Compute(_))).count()
    };
    let is_long = (0..all).map(passes).sum::<usize>() > MOST_PASSES;
    let ranks = if is_long { drawn_ranks(all) } else { (0..all).collect() };
    let tick_ms = best.step.step_ms / TICKS;
    let rows: Vec<_> = ranks.into_iter().map(|rank| row(best, rank, tick_ms)).collect();
    let after: Vec<_> =
        after(best).map(|(start, ms, kind)| json!({ "start": start, "ms": ms, "kind": kind })).collect();
    let data = json!({
        "step_ms": best.step.step_ms, "tick_ms": tick_ms, "ranks": all, "kinds": KINDS,
        "after": after, "rows": rows,
    });
    // The JSON must not close the element that it stands in.
    format!(
        "<script type=\"application/json\" id=\"passes\">{}</script>",
        data.to_string().replace('<', "\\u003c")
    )
}

/// Encodes the passes of a rank in order, each as a letter for its stage and kind. A number before it is the ticks that the rank
/// waits; `:N` behind it is the micro-batch, if it is not the next one of that letter.
fn row(best: &Evaluated, rank: usize, tick_ms: f64) -> serde_json::Value {
    let mut letters: Vec<serde_json::Value> = Vec::new();
    let mut known: HashMap<(usize, PassKind), (usize, usize)> = HashMap::new();
    let mut passes = String::new();
    let mut now_ms = 0.0;
    for span in best.spans(rank).iter() {
        let Action::Compute(pass) = span.action else { continue };
        let ms = span.end_ms - span.start_ms;
        let (index, next) = known.entry((pass.stage, pass.kind)).or_insert_with(|| {
            letters.push(json!({ "stage": pass.stage, "kind": kind_of(pass.kind), "ms": ms }));
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
            let _ = write!(passes, ":{}", pass.micro_batch);
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
