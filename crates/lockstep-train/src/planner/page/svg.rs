//! The pictures of a plan's page.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::ops::Range;

use lockstep_plan::cluster::Cluster;
use lockstep_plan::schedule::{Action, PassKind, Span};
use lockstep_plan::{Axis, MemoryCategory};

use super::{Roofline, escaped, rate, time};
use crate::human;
use crate::planner::{Evaluated, parts};

const WIDTH: f64 = 1080.0;
/// The style sheet's colours.
const COLOURS: [&str; 8] = ["--a", "--b", "--c", "--d", "--e", "--f", "--g", "--h"];
/// Nodes and ranks that are drawn at most; of more the first and the last.
const MOST_NODES: usize = 8;
const MOST_RANKS: usize = 16;

fn colour(index: usize) -> String {
    format!("var({})", COLOURS[index % COLOURS.len()])
}

fn legend(entries: impl IntoIterator<Item = (String, String)>) -> String {
    let entry = |(name, colour): (String, String)| {
        format!("<span><i style=\"background:{colour}\"></i>{}</span>", escaped(&name))
    };
    format!("<div class=\"legend\">{}</div>", entries.into_iter().map(entry).collect::<String>())
}

fn svg(height: f64, body: &str) -> String {
    format!(
        "<div class=\"scroll\"><svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" style=\"min-width:680px\">{body}</svg></div>"
    )
}

fn rectangle(to: &mut String, [x, y, width, height]: [f64; 4], fill: &str, title: &str) {
    let _ = write!(
        to,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{fill}\">"
    );
    if !title.is_empty() {
        let _ = write!(to, "<title>{}</title>", escaped(title));
    }
    to.push_str("</rect>");
}

/// Words that end at `x`.
fn text_before(to: &mut String, [x, y]: [f64; 2], words: &str) {
    let _ = write!(to, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"end\">{}</text>", escaped(words));
}

fn text(to: &mut String, [x, y]: [f64; 2], class: &str, words: &str) {
    let _ = write!(to, "<text x=\"{x:.1}\" y=\"{y:.1}\" class=\"{class}\">{}</text>", escaped(words));
}

/// What takes most of the step.
pub(super) fn bound(best: &Evaluated) -> String {
    let largest = parts(&best.step).into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
    largest.map_or(String::new(), |(name, ms)| {
        format!("{:.0} % of it is {name}", 100.0 * ms / best.step.step_ms.max(f64::MIN_POSITIVE))
    })
}

/// Which links the axes use: that which joins all ranks of a group, and how many of them share a node where not all do.
pub(super) fn links(cluster: &Cluster, best: &Evaluated) -> String {
    let mesh = &best.plan.mesh;
    let mut stride = 1;
    let mut words = Vec::new();
    let mut say = |name: &str, size: usize, stride: usize| {
        if size < 2 {
            return;
        }
        let placement = cluster.placement(size, stride);
        let joins_all = |level: &usize| placement.within(*level) >= size;
        let level = (0..cluster.links.len()).find(joins_all).unwrap_or(cluster.links.len().saturating_sub(1));
        let Some(link) = cluster.links.get(level) else { return };
        let within = placement.within(0);
        let near = if level > 0 && within > 1 { format!(" ({within} in a node)") } else { String::new() };
        words.push(format!("{name} {size} over {}{near}", link.name));
    };
    for axis in Axis::ALL.into_iter().rev() {
        let size = mesh.of(axis);
        say(axis.name(), size, stride);
        stride *= size;
    }
    say("expert tensor", mesh.expert_tensor, 1);
    say("expert", mesh.expert, mesh.expert_tensor);
    words.join(", ")
}

/// Numbers of the nodes that are drawn: all; or of many the first two, those where the next ranks of the pipeline begin, and the last.
fn drawn_nodes(nodes: usize, nodes_of_a_stage: usize) -> Vec<usize> {
    if nodes <= MOST_NODES {
        return (0..nodes).collect();
    }
    let begin = |stage: usize| stage * nodes_of_a_stage.max(1);
    let mut drawn: Vec<usize> = [0, 1].into_iter().chain((1..).map(begin).take(MOST_NODES)).collect();
    drawn.sort_unstable();
    drawn.dedup();
    drawn.retain(|node| *node < nodes - 1);
    drawn.truncate(MOST_NODES - 1);
    drawn.push(nodes - 1);
    drawn
}

/// The first nodes and their devices, coloured by rank of the pipeline, or by part of the batch without one. The number is that of the
/// device's rank; a frame is around ranks that share each matrix.
pub(super) fn mesh(cluster: &Cluster, best: &Evaluated) -> String {
    let ranks = best.devices;
    let of_a_node = ranks.div_ceil(cluster.node_count().max(1)).max(1);
    let nodes = ranks.div_ceil(of_a_node);
    let stages = best.plan.mesh.pipeline.max(1);
    let tensor = best.plan.mesh.tensor.max(1);
    let of_a_stage = (ranks / stages).max(1);
    let (kind, of_a_colour) = match stages {
        1 => ("part of the batch", (tensor * best.plan.mesh.context).max(1)),
        _ => ("pipeline rank", of_a_stage),
    };
    let drawn = drawn_nodes(nodes, if stages > 1 { of_a_stage / of_a_node } else { 1 });
    let columns = 4.0;
    let (box_width, box_height) = (WIDTH / columns - 12.0, 74.0);
    let mut body = String::new();
    let mut seen = BTreeSet::new();
    for (place, node) in drawn.iter().enumerate() {
        let x = (place as f64 % columns).floor() * (box_width + 12.0);
        let y = (place as f64 / columns).floor() * (box_height + 24.0) + 16.0;
        text(&mut body, [x, y - 4.0], "name", &format!("node {node}"));
        let _ = write!(
            body,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{box_width:.1}\" height=\"{box_height}\" fill=\"none\" class=\"axis\" rx=\"4\"/>"
        );
        let here = of_a_node.min(ranks - node * of_a_node);
        let in_a_row = here.div_ceil(2).max(1);
        let cell = (box_width - 8.0) / in_a_row as f64;
        let corner = |device: usize| {
            [x + 4.0 + (device % in_a_row) as f64 * cell, y + 5.0 + (device / in_a_row) as f64 * 33.0]
        };
        for device in 0..here {
            let rank = node * of_a_node + device;
            let (stage, part) = (rank / of_a_stage, rank / of_a_colour);
            seen.insert(part);
            let at = corner(device);
            let title = format!("rank {rank}: pipeline rank {stage}, tensor {} of {tensor}", rank % tensor);
            rectangle(&mut body, [at[0] + 1.0, at[1], cell - 2.0, 30.0], &colour(part), &title);
            text(&mut body, [at[0] + cell / 2.0, at[1] + 19.0], "in", &rank.to_string());
        }
        for group in frames(node * of_a_node..node * of_a_node + here, tensor, in_a_row) {
            let [left, top] = corner(group.start - node * of_a_node);
            let _ = write!(
                body,
                "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"32\" fill=\"none\" stroke=\"var(--text)\" stroke-width=\"1.5\" rx=\"3\"/>",
                left,
                top - 1.0,
                group.len() as f64 * cell
            );
        }
    }
    let rows = (drawn.len() as f64 / columns).ceil();
    let mut picture = svg(rows * (box_height + 24.0) + 4.0, &body);
    let all = ranks / of_a_colour;
    if all <= 1 {
        picture += &legend([("the whole model".to_owned(), colour(0))]);
    } else if seen.len() <= COLOURS.len() {
        picture += &legend(seen.iter().map(|part| (format!("{kind} {part}"), colour(*part))));
    } else {
        let _ = write!(
            picture,
            "<p class=\"small\">A colour for each {kind}; after {} they repeat.</p>",
            COLOURS.len()
        );
    }
    let mut notes = Vec::new();
    if tensor > 1 {
        notes.push("A frame: ranks that share each matrix.".to_owned());
    }
    if nodes > drawn.len() {
        notes.push(format!("{} of {nodes} nodes are drawn; the others are like these.", drawn.len()));
    }
    if !notes.is_empty() {
        let _ = write!(picture, "<p class=\"small\">{}</p>", escaped(&notes.join(" ")));
    }
    picture
}

/// The ranks among `here` that share matrices, row by row of `in_a_row`; none where nobody shares any.
fn frames(here: Range<usize>, tensor: usize, in_a_row: usize) -> Vec<Range<usize>> {
    if tensor < 2 {
        return Vec::new();
    }
    let place = |rank: usize| (rank / tensor, (rank - here.start) / in_a_row);
    let mut frames: Vec<Range<usize>> = Vec::new();
    for rank in here.clone() {
        match frames.last_mut() {
            Some(last) if place(last.start) == place(rank) => last.end = rank + 1,
            _ => frames.push(rank..rank + 1),
        }
    }
    frames
}

/// One bar of the parts of a whole, with their names.
pub(super) fn stacked(parts: &[(&'static str, f64)]) -> String {
    let sum: f64 = parts.iter().map(|(_, ms)| ms).sum();
    let piece = |(index, (_, ms)): (usize, &(&str, f64))| {
        format!(
            "<i style=\"background:{};width:{:.2}%\"></i>",
            colour(index),
            100.0 * ms / sum.max(f64::MIN_POSITIVE)
        )
    };
    let pieces: String = parts.iter().enumerate().map(piece).collect();
    let names =
        parts.iter().enumerate().map(|(index, (name, ms))| (format!("{name} {}", time(*ms)), colour(index)));
    format!("<div class=\"stack\">{pieces}</div>{}", legend(names))
}

/// A thin bar of the parts of a step, `share` of its column wide.
pub(super) fn strip(parts: &[(&'static str, f64)], share: f64) -> String {
    let sum: f64 = parts.iter().map(|(_, ms)| ms).sum();
    let piece = |(index, (name, ms)): (usize, &(&str, f64))| {
        format!(
            "<i title=\"{} {}\" style=\"background:{};width:{:.2}%\"></i>",
            escaped(name),
            time(*ms),
            colour(index),
            100.0 * ms / sum.max(f64::MIN_POSITIVE)
        )
    };
    let pieces: String = parts.iter().enumerate().map(piece).collect();
    format!(
        "<div class=\"stack\" style=\"height:5px;margin-top:2px;width:{:.0}%\">{pieces}</div>",
        100.0 * share
    )
}

/// Numbers of the ranks that are drawn: all, or some from the first to the last.
fn drawn_ranks(ranks: usize) -> Vec<usize> {
    if ranks <= MOST_RANKS {
        return (0..ranks).collect();
    }
    (0..MOST_RANKS).map(|place| place * (ranks - 1) / (MOST_RANKS - 1)).collect()
}

/// What of a step a rank is at, and from when to when in milliseconds; `PassKind` as an index into `KINDS`.
struct Pass {
    kind: usize,
    start: f64,
    end: f64,
}

/// The passes of a rank of the pipeline; without one those of every rank, one micro-batch after the other.
fn passes(best: &Evaluated, rank: usize) -> Vec<Pass> {
    if let Some(simulation) = &best.step.simulation {
        let pass = |span: &Span| {
            let Action::Compute(pass) = span.action else { return None };
            let kind = match pass.kind {
                PassKind::Forward => 0,
                PassKind::Backward | PassKind::BackwardInput => 1,
                PassKind::BackwardWeight => 2,
            };
            Some(Pass { kind, start: span.start_ms, end: span.end_ms })
        };
        return simulation.spans[rank].iter().filter_map(pass).collect();
    }
    let Some(stage) = best.step.stages.first() else { return Vec::new() };
    let (forward, backward) = (stage.forward.seconds() * 1e3, stage.backward.seconds() * 1e3);
    let of_micro_batch = |index: usize| {
        let start = index as f64 * (forward + backward);
        let middle = start + forward;
        [Pass { kind: 0, start, end: middle }, Pass { kind: 1, start: middle, end: middle + backward }]
    };
    (0..best.config.accumulation_steps()).flat_map(of_micro_batch).collect()
}

/// What each rank of the pipeline does when; without one what every rank does.
pub(super) fn timeline(best: &Evaluated) -> String {
    let step_ms = best.step.step_ms.max(f64::MIN_POSITIVE);
    let (left, height) = (60.0, 18.0);
    let scale = (WIDTH - left) / step_ms;
    let all = best.step.simulation.as_ref().map_or(1, |simulation| simulation.spans.len());
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
                let title = format!("{} {}", KINDS[pass.kind], time(pass.end - pass.start));
                // A gap says where one micro-batch ends.
                rectangle(&mut body, [start, y, (width - 0.8).max(0.4), height], &colour(pass.kind), &title);
            }
        }
        let after = [
            (best.step.step_ms - best.step.update_ms - best.step.gradients_ms, best.step.gradients_ms, 3),
            (best.step.step_ms - best.step.update_ms, best.step.update_ms, 4),
        ];
        for (start, ms, kind) in after.into_iter().filter(|(_, ms, _)| *ms > 0.0) {
            seen[kind] = true;
            let title = format!("{} {}", KINDS[kind], time(ms));
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
    let note =
        if notes.is_empty() { String::new() } else { format!("<p class=\"small\">{}</p>", notes.join(" ")) };
    picture + &legend(names.chain([("waiting".to_owned(), "var(--grid)".to_owned())])) + &note
}

/// Passes that are narrower than a line: how much of each stretch of the step a rank is at which kind of them, as heights.
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

/// Passes narrower than this on average are drawn as shares of stretches of the step, each this wide.
const LEAST_PASS: f64 = 3.0;
const STRETCH: f64 = 12.0;

const KINDS: [&str; 5] = ["forward", "backward", "backward of weights", "sums of gradients", "update"];

/// What some ranks of the pipeline hold over a step: what always stands, and activations as micro-batches come and go.
pub(super) fn memory(best: &Evaluated) -> String {
    let ranks = best.memory.len();
    // The ends, the middle, and the one that needs most.
    let mut shown = vec![0, ranks / 2, ranks.saturating_sub(1), best.largest().0];
    shown.sort_unstable();
    shown.dedup();
    let (left, height) = (76.0, 150.0);
    let most =
        best.memory.iter().map(|memory| memory.total() as f64).fold(best.capacity_bytes as f64, f64::max);
    let (x, y) = ((WIDTH - left) / best.step.step_ms.max(f64::MIN_POSITIVE), height / most.max(1.0) / 1.08);
    let mut body = String::new();
    for (index, rank) in shown.iter().enumerate() {
        let memory = best.memory[*rank];
        let activations = memory[MemoryCategory::Activations] as f64;
        let standing = memory.total() as f64 - activations;
        let held = held(best, *rank);
        let peak = held.iter().map(|(_, number)| *number).fold(0.0, f64::max).max(1.0);
        let point = |ms: f64, held: f64| {
            format!("{:.1},{:.1}", left + ms * x, height - (standing + activations * held / peak) * y)
        };
        let mut points = vec![point(0.0, 0.0)];
        let mut last = 0.0;
        let mut last_x = -1.0;
        for (ms, number) in held {
            // Corners that fall into one pixel are one.
            if (ms * x - last_x).abs() > 0.5 || number == peak {
                points.push(point(ms, last));
                points.push(point(ms, number));
                last_x = ms * x;
            }
            last = number;
        }
        points.push(point(best.step.step_ms, 0.0));
        let _ = write!(
            body,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.6\"/>",
            points.join(" "),
            colour(index)
        );
    }
    let limit = height - best.capacity_bytes as f64 * y;
    let _ = write!(
        body,
        "<line x1=\"{left}\" y1=\"{limit:.1}\" x2=\"{WIDTH}\" y2=\"{limit:.1}\" stroke=\"var(--bad)\" stroke-dasharray=\"4 3\"/>\
         <line x1=\"{left}\" y1=\"{height}\" x2=\"{WIDTH}\" y2=\"{height}\" class=\"axis\"/>"
    );
    text(&mut body, [0.0, limit + 4.0], "", &human::bytes(best.capacity_bytes).to_string());
    text(&mut body, [0.0, height], "", "0");
    text_before(&mut body, [WIDTH, height + 14.0], &time(best.step.step_ms));
    let names = shown.iter().enumerate().map(|(index, rank)| {
        let parts = best.memory[*rank].entries().filter(|(_, bytes)| *bytes > 0);
        let parts: Vec<String> = parts
            .map(|(category, bytes)| format!("{} {}", category.name(), human::bytes(bytes as u64)))
            .collect();
        let name = if ranks > 1 { format!("pipeline rank {rank}") } else { "each rank".to_owned() };
        let total = human::bytes(best.memory[*rank].total() as u64);
        (format!("{name} {total}: {}", parts.join(", ")), colour(index))
    });
    svg(height + 18.0, &body) + &legend(names)
}

/// How many micro-batches a rank of the pipeline holds from which moment on.
fn held(best: &Evaluated, rank: usize) -> Vec<(f64, f64)> {
    let passes = passes(best, rank);
    let is_split = passes.iter().any(|pass| pass.kind == 2);
    let frees = if is_split { 2 } else { 1 };
    let mut changes = Vec::new();
    for pass in &passes {
        if pass.kind == 0 {
            changes.push((pass.start, 1.0));
        } else if pass.kind == frees {
            changes.push((pass.end, -1.0));
        }
    }
    changes.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut now = 0.0;
    changes
        .into_iter()
        .map(|(ms, change)| {
            now += change;
            (ms, now)
        })
        .collect()
}

/// Every kind of task under the device's roof: the larger a point the more of a micro-batch it takes.
pub(super) fn roofline(roofline: &Roofline) -> String {
    let Roofline { peak, bandwidth, points, .. } = roofline;
    let (left, height) = (90.0, 260.0);
    let ridge = peak / bandwidth;
    let (least_x, most_x) = (0.05_f64, (ridge * 64.0).max(1024.0));
    let (least_y, most_y) = (bandwidth * least_x, peak * 2.0);
    let at = |intensity: f64, rate: f64| {
        let x = (intensity.clamp(least_x, most_x) / least_x).ln() / (most_x / least_x).ln();
        let y = (rate.clamp(least_y, most_y) / least_y).ln() / (most_y / least_y).ln();
        [left + x * (WIDTH - left - 20.0), height - y * (height - 10.0)]
    };
    let mut body = String::new();
    for power in decades(least_x, most_x) {
        let x = at(power, least_y)[0];
        let _ = write!(body, "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"10\" y2=\"{height}\" class=\"grid\"/>");
        let _ = write!(
            body,
            "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{power}</text>",
            height + 14.0
        );
    }
    for power in decades(least_y, most_y) {
        let y = at(least_x, power)[1];
        let _ = write!(
            body,
            "<line x1=\"{left}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\" class=\"grid\"/>",
            WIDTH - 20.0
        );
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
    let all: f64 = points.iter().map(|point| point.seconds).sum();
    let mut names = Vec::new();
    for (index, point) in points.iter().filter(|point| point.rate > 0.0).take(COLOURS.len()).enumerate() {
        let [x, y] = at(point.intensity, point.rate);
        let share = point.seconds / all.max(f64::MIN_POSITIVE);
        let words = format!(
            "{}: {}, {:.1} % of a micro-batch",
            point.name,
            rate(point.rate, "FLOP/s"),
            share * 100.0
        );
        let _ = write!(
            body,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{:.1}\" fill=\"{}\" fill-opacity=\"0.7\"><title>{}</title></circle>",
            3.0 + 22.0 * share.sqrt(),
            colour(index),
            escaped(&words)
        );
        names.push((words, colour(index)));
    }
    svg(height + 36.0, &body) + &legend(names)
}

/// Powers of ten between two numbers.
fn decades(least: f64, most: f64) -> impl Iterator<Item = f64> {
    let (from, to) = (least.log10().ceil() as i32, most.log10().floor() as i32);
    (from..=to).map(|power| 10.0_f64.powi(power))
}
