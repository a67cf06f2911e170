//! The roofline of a micro-batch: products by shape and all other tasks, under the limits of a device.

use std::fmt::Write;

use lockstep_plan::work::Pass;

use super::svg::{
    WIDTH, colour, escaped, figure, legend, line, rate, share_figure, svg, table, text, text_around,
    text_before,
};
use crate::{Point, Roofline};

/// Rows of the table that are shown; the others unfold.
const FIRST_ROWS: usize = 10;
const PASSES: [Pass; 4] = [Pass::Forward, Pass::Recompute, Pass::BackwardInputs, Pass::BackwardWeights];

fn colour_of(pass: Pass) -> String {
    colour(PASSES.iter().position(|other| *other == pass).unwrap_or(0))
}

/// Draws every kind of task under the device's roof; the area of a point grows with its share of a micro-batch. `number` is the
/// index of the roofline in the plan's details.
pub(super) fn roofline(roofline: &Roofline, number: usize) -> String {
    let Roofline { peak, bandwidth, points, .. } = roofline;
    let (left, height) = (90.0, 260.0);
    let ridge = peak / bandwidth;
    let (least_x, most_x) = (0.05_f64, (ridge * 64.0).max(1024.0));
    let rates = points.iter().filter(|point| point.flops > 0.0).map(Point::rate);
    let (least_y, most_y) =
        (rates.fold(bandwidth * least_x, |least, rate| least.min(0.7 * rate)), peak * 2.0);
    let at = |intensity: f64, rate: f64| {
        let x = (intensity.clamp(least_x, most_x) / least_x).ln() / (most_x / least_x).ln();
        let y = (rate.clamp(least_y, most_y) / least_y).ln() / (most_y / least_y).ln();
        [left + x * (WIDTH - left - 20.0), height - y * (height - 10.0)]
    };
    let mut body = String::new();
    for power in decades(least_x, most_x) {
        let x = at(power, least_y)[0];
        line(&mut body, [x, 10.0, x, height], "class=\"grid\"");
        text_around(&mut body, [x, height + 14.0], &power.to_string());
    }
    for power in decades(least_y, most_y) {
        let y = at(least_x, power)[1];
        line(&mut body, [left, y, WIDTH - 20.0, y], "class=\"grid\"");
        text_before(&mut body, [left - 6.0, y + 4.0], &rate(power, "FLOP/s"));
    }
    let [start, corner, end] = [at(least_x, bandwidth * least_x), at(ridge, *peak), at(most_x, *peak)];
    let _ = write!(
        body,
        "<polyline points=\"{:.1},{:.1} {:.1},{:.1} {:.1},{:.1}\" fill=\"none\" stroke=\"var(--soft)\" stroke-width=\"1.5\"/>",
        start[0], start[1], corner[0], corner[1], end[0], end[1]
    );
    text(&mut body, [corner[0] + 4.0, corner[1] - 8.0], "name", &rate(*peak, "FLOP/s"));
    let slope = at(least_x * 4.0, bandwidth * least_x * 4.0);
    text_before(&mut body, [slope[0] - 6.0, slope[1] - 8.0], &rate(*bandwidth, "B/s"));
    text_before(&mut body, [WIDTH - 20.0, height + 30.0], "operations for each byte of memory");
    let all = roofline.seconds().max(f64::MIN_POSITIVE);
    // Points are sorted by time, so small ones are drawn above large ones.
    for point in points.iter().filter(|point| point.flops > 0.0) {
        let [x, y] = at(point.intensity(), point.rate());
        let share = point.seconds / all;
        let words = format!(
            "{}: {}, {:.1} % of a micro-batch",
            name_of(point),
            rate(point.rate(), "FLOP/s"),
            share * 100.0
        );
        // Tasks other than products are drawn as rings.
        let opacity = if point.shape.is_some() { 0.65 } else { 0.15 };
        let colour = colour_of(point.pass);
        let _ = write!(
            body,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{:.1}\" fill=\"{colour}\" fill-opacity=\"{opacity}\" stroke=\"{colour}\"><title>{}</title></circle>",
            2.5 + 18.0 * share.sqrt(),
            escaped(&words)
        );
    }
    let passes = PASSES.into_iter().filter(|pass| points.iter().any(|point| point.pass == *pass));
    let names = passes.map(|pass| (pass.name().to_owned(), colour_of(pass)));
    let rows = |from: usize, to: usize| {
        let row = |index: usize| row(roofline, index, number);
        table(&COLUMNS, (from..to).map(row))
    };
    let first = points.len().min(FIRST_ROWS);
    let mut rest = String::new();
    if points.len() > first {
        let more = points.len() - first;
        rest = format!("<details><summary>{more} more</summary>{}</details>", rows(first, points.len()));
    }
    svg(height + 36.0, &body) + &legend(names) + &rows(0, first) + &rest
}

fn name_of(point: &Point) -> String {
    match point.shape_in_words() {
        shape if shape.is_empty() => format!("{} {}", point.name, point.pass.name()),
        shape => format!("{shape}, {}", point.pass.name()),
    }
}

const COLUMNS: [&str; 8] = [
    "task",
    "rows × inner × columns",
    "FLOP/byte",
    "comes to",
    "of the peak",
    "of its limit",
    "set by",
    "of a micro-batch",
];

fn row(roofline: &Roofline, index: usize, number: usize) -> Vec<String> {
    let point = &roofline.points[index];
    let pointer = |key: &str| format!("/rooflines/{number}/points/{index}/{key}");
    let percent = |key: &str, share: f64| share_figure(&pointer(key), Some(share));
    let is_bound_by_memory = roofline.is_bound_by_memory(point);
    let has_operations = point.flops > 0.0;
    let of_operations = |cell: String| if has_operations { cell } else { "–".to_owned() };
    let (intensity, flops_per_s) = (point.intensity(), point.rate());
    vec![
        format!(
            "<i class=\"dot\" style=\"background:{}\"></i>{} {}",
            colour_of(point.pass),
            escaped(point.name),
            escaped(point.pass.name())
        ),
        escaped(&point.shape_in_words()),
        of_operations(figure(&pointer("intensity"), intensity, &digits(intensity))),
        of_operations(figure(&pointer("flops_per_s"), flops_per_s, &rate(flops_per_s, "FLOP/s"))),
        of_operations(percent("share_of_peak", flops_per_s / roofline.peak)),
        percent("share_of_limit", roofline.share_of_roof(point)),
        if is_bound_by_memory { "memory" } else { "the peak" }.to_owned(),
        percent("share_of_micro_batch", point.seconds / roofline.seconds().max(f64::MIN_POSITIVE)),
    ]
}

/// Formats a number with as many digits as are significant.
fn digits(number: f64) -> String {
    if number < 10.0 { format!("{number:.2}") } else { format!("{number:.0}") }
}

/// Returns the powers of ten between two numbers.
fn decades(least: f64, most: f64) -> impl Iterator<Item = f64> {
    let (from, to) = (least.log10().ceil() as i32, most.log10().floor() as i32);
    (from..=to).map(|power| 10.0_f64.powi(power))
}
