//! Parts of the pictures on a plan's page: shapes, text and legends.

use std::fmt::Write;

use lockstep_config::human;
use serde::Serialize;

/// Width of every picture in SVG units.
pub(super) const WIDTH: f64 = 1080.0;
/// Colours of the style sheet.
pub(super) const COLOURS: [&str; 8] = ["--a", "--b", "--c", "--d", "--e", "--f", "--g", "--h"];

pub(super) fn colour(index: usize) -> String {
    format!("var({})", COLOURS[index % COLOURS.len()])
}

/// Escapes text for HTML.
pub(super) fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            c => escaped.push(c),
        }
    }
    escaped
}

/// Returns a figure as text, with its exact value and its JSON pointer into `plan --json`; tests compare the two.
pub(super) fn figure(pointer: &str, value: impl Serialize, words: &str) -> String {
    let value = serde_json::to_string(&value).unwrap_or_default();
    format!("<data value=\"{}\" data-of=\"{}\">{}</data>", escaped(&value), escaped(pointer), escaped(words))
}

/// Returns a figure of time.
pub(super) fn time_figure(pointer: &str, ms: f64) -> String {
    figure(pointer, ms, &human::step_time(ms))
}

/// Returns a figure of size.
pub(super) fn size_figure(pointer: &str, bytes: u64) -> String {
    figure(pointer, bytes, &human::bytes(bytes).to_string())
}

/// Returns a figure of a fraction, in percent; a question mark if it is unknown.
pub(super) fn share_figure(pointer: &str, share: Option<f64>) -> String {
    figure(pointer, share, &share.map_or("?".to_owned(), |share| format!("{:.1} %", share * 100.0)))
}

/// Returns a note under a picture.
pub(super) fn note(words: &str) -> String {
    if words.is_empty() { String::new() } else { format!("<p class=\"small\">{}</p>", escaped(words)) }
}

pub(super) fn legend(entries: impl IntoIterator<Item = (String, String)>) -> String {
    let entry = |(name, colour): (String, String)| {
        format!("<span><i style=\"background:{colour}\"></i>{}</span>", escaped(&name))
    };
    format!("<div class=\"legend\">{}</div>", entries.into_iter().map(entry).collect::<String>())
}

/// Returns a table with a fixed first column; cells are HTML.
pub(super) fn table(names: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let cells = |tag: &str, cells: &[String]| -> String {
        cells.iter().map(|cell| format!("<{tag}>{cell}</{tag}>")).collect()
    };
    let names: Vec<String> = names.iter().map(|name| escaped(name)).collect();
    let rows: String = rows.into_iter().map(|row| format!("<tr>{}</tr>", cells("td", &row))).collect();
    format!(
        "<div class=\"scroll\"><table class=\"named\"><tr>{}</tr>{rows}</table></div>",
        cells("th", &names)
    )
}

pub(super) fn svg(height: f64, body: &str) -> String {
    format!(
        "<div class=\"scroll\"><svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" style=\"min-width:680px\">{body}</svg></div>"
    )
}

pub(super) fn rectangle(to: &mut String, [x, y, width, height]: [f64; 4], fill: &str, title: &str) {
    let _ = write!(
        to,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{fill}\">"
    );
    if !title.is_empty() {
        let _ = write!(to, "<title>{}</title>", escaped(title));
    }
    to.push_str("</rect>");
}

pub(super) fn line(to: &mut String, [x1, y1, x2, y2]: [f64; 4], looks: &str) {
    let _ = write!(to, "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" {looks}/>");
}

pub(super) fn text(to: &mut String, [x, y]: [f64; 2], class: &str, words: &str) {
    let _ = write!(to, "<text x=\"{x:.1}\" y=\"{y:.1}\" class=\"{class}\">{}</text>", escaped(words));
}

/// Adds text that ends at `x`.
pub(super) fn text_before(to: &mut String, [x, y]: [f64; 2], words: &str) {
    let _ = write!(to, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"end\">{}</text>", escaped(words));
}

/// Adds text centred at `x`.
pub(super) fn text_around(to: &mut String, [x, y]: [f64; 2], words: &str) {
    let _ = write!(to, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{}</text>", escaped(words));
}

/// Returns a stacked bar. Each part is (amount, title, colour); `looks` is its CSS.
pub(super) fn bar(parts: &[(f64, String, String)], looks: &str) -> String {
    let sum: f64 = parts.iter().map(|(part, ..)| part).sum();
    let piece = |(part, title, colour): &(f64, String, String)| {
        let width = 100.0 * part / sum.max(f64::MIN_POSITIVE);
        format!("<i title=\"{}\" style=\"background:{colour};width:{width:.2}%\"></i>", escaped(title))
    };
    format!("<div class=\"stack\" style=\"{looks}\">{}</div>", parts.iter().map(piece).collect::<String>())
}

/// Returns an amount with the prefix of its unit: `139 GFLOP/s`.
pub(super) fn rate(amount: f64, unit: &str) -> String {
    format!("{}{unit}", human::count_of(amount))
}
