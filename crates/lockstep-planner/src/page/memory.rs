//! Memory over a step: the constant part, and activations as micro-batches come and go.

use std::fmt::Write;

use lockstep_config::human;
use lockstep_plan::MemoryCategory;

use super::svg::{
    WIDTH, colour, legend, line, note, size_figure, svg, table, text, text_before, time_figure,
};
use crate::details::MemoryCurve;
use crate::{Details, Evaluated};

/// Width of a column of the picture: of the values in a column the first, the last, the least and the greatest are drawn.
const COLUMN: f64 = 2.0;
/// Largest ratio of capacity to booked bytes at which the capacity is drawn.
const MOST_ROOM: f64 = 3.0;

/// Draws the memory that some pipeline ranks have in use over a step.
pub(super) fn memory(best: &Evaluated, details: &Details) -> String {
    let ranks = details.memory.len();
    // The ends, the middle, and the rank that books most.
    let mut shown = vec![0, ranks / 2, ranks.saturating_sub(1), best.largest().0];
    shown.sort_unstable();
    shown.dedup();
    shown.retain(|rank| *rank < ranks);
    let (left, top, height) = (76.0, 14.0, 164.0);
    let booked = details.memory.iter().map(|curve| curve.booked_bytes as f64).fold(1.0, f64::max);
    let limit_bytes = best.capacity_bytes as f64;
    // A limit far above the curves would flatten them.
    let shows_limit = limit_bytes <= MOST_ROOM * booked;
    let most = if shows_limit { booked.max(limit_bytes) } else { 1.1 * booked };
    let x = (WIDTH - left) / best.step.step_ms.max(f64::MIN_POSITIVE);
    let at = |ms: f64, bytes: f64| [left + ms * x, height - bytes * (height - top) / most];
    let mut body = String::new();
    for (index, rank) in shown.iter().enumerate() {
        let curve = &details.memory[*rank];
        let ends = [at(0.0, curve.booked_bytes as f64), at(best.step.step_ms, curve.booked_bytes as f64)];
        let looks = format!("stroke=\"{}\" stroke-opacity=\"0.45\" stroke-dasharray=\"2 3\"", colour(index));
        line(&mut body, [ends[0][0], ends[0][1], ends[1][0], ends[1][1]], &looks);
        let path = path(curve, best.step.step_ms, at);
        let _ = write!(
            body,
            "<path d=\"{path}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.6\"><title>{}</title></path>",
            colour(index),
            name_of(*rank, ranks)
        );
        let (peak_ms, peak_bytes) = curve.peak();
        let [x, y] = at(peak_ms, peak_bytes as f64);
        let _ = write!(body, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{}\"/>", colour(index));
    }
    let mark = if shows_limit { limit_bytes } else { booked };
    let y = at(0.0, mark)[1];
    if shows_limit {
        line(&mut body, [left, y, WIDTH, y], "stroke=\"var(--bad)\" stroke-dasharray=\"4 3\"");
    }
    line(&mut body, [left, height, WIDTH, height], "class=\"axis\"");
    text(&mut body, [0.0, y + 4.0], "", &human::bytes(mark as u64).to_string());
    text(&mut body, [0.0, height], "", "0");
    text_before(&mut body, [WIDTH, height + 14.0], &human::step_time(best.step.step_ms));
    let lines = shown.iter().enumerate().map(|(index, rank)| (name_of(*rank, ranks), colour(index)));
    let limit = shows_limit.then(|| ("what a rank may book".to_owned(), "var(--bad)".to_owned()));
    let mut notes = "Lines: what is in use, most at the dot. Dotted: what is booked for the whole step, which has room for each \
                     micro-batch from when its values may come, and for each pass that one may be kept for."
        .to_owned();
    if shown.len() < ranks {
        let _ = write!(
            notes,
            " {} of {ranks} ranks of the pipeline are drawn: the ends, the middle, and the one that books most.",
            shown.len()
        );
    }
    svg(height + 18.0, &body) + &legend(lines.chain(limit)) + &rows(best, details, &shown) + &note(&notes)
}

fn name_of(rank: usize, ranks: usize) -> String {
    if ranks > 1 { format!("pipeline rank {rank}") } else { "each rank".to_owned() }
}

/// Returns the corners of a curve as an SVG path.
fn path(curve: &MemoryCurve, step_ms: f64, at: impl Fn(f64, f64) -> [f64; 2]) -> String {
    let corner = |(ms, bytes): (f64, usize)| at(ms, bytes as f64);
    let corners: Vec<[f64; 2]> = curve.points.iter().copied().map(corner).collect();
    let mut path = String::new();
    let Some(first) = corners.first() else { return path };
    let _ = write!(path, "M{:.1} {:.1}", first[0], first[1]);
    for column in corners.chunk_by(|a, b| (a[0] / COLUMN).floor() == (b[0] / COLUMN).floor()) {
        let of = |choose: fn(f64, f64) -> f64| column.iter().map(|corner| corner[1]).reduce(choose);
        let ends = [Some(column[0][1]), of(f64::min), of(f64::max), column.last().map(|corner| corner[1])];
        let _ = write!(path, "H{:.1}", column[0][0]);
        let mut last = f64::NAN;
        for y in ends.into_iter().flatten() {
            if y != last {
                let _ = write!(path, "V{y:.1}");
            }
            last = y;
        }
    }
    let _ = write!(path, "H{:.1}", at(step_ms, 0.0)[0]);
    path
}

fn rows(best: &Evaluated, details: &Details, shown: &[usize]) -> String {
    let bytes = |pointer: &str, bytes: usize| size_figure(pointer, bytes as u64);
    let has = |category: &MemoryCategory| best.memory.iter().any(|memory| memory[*category] > 0);
    let categories: Vec<MemoryCategory> = MemoryCategory::ALL.into_iter().filter(has).collect();
    let row = |rank: &usize| {
        let (curve, booked) = (&details.memory[*rank], &best.memory[*rank]);
        let (peak_ms, peak_bytes) = curve.peak();
        let over_time = |key: &str| format!("/memory_over_time/{rank}/{key}");
        let mut row = vec![
            name_of(*rank, details.memory.len()),
            bytes(&over_time("standing_bytes"), curve.standing_bytes),
            bytes(&over_time("peak_bytes"), peak_bytes),
            time_figure(&over_time("peak_ms"), peak_ms),
            bytes(&over_time("booked_bytes"), curve.booked_bytes),
        ];
        row.extend(categories.iter().map(|category| {
            let pointer = format!("/ranking/0/memory_by_stage/{rank}/{}", category.name());
            bytes(&pointer, booked[*category])
        }));
        row
    };
    let mut names = vec!["", "always there", "most in use", "from", "booked"];
    names.extend(categories.iter().map(|category| category.name()));
    table(&names, shown.iter().map(row))
}
