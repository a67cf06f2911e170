//! The pictures of a plan's page.

use std::fmt::Write;

use lockstep_plan::cluster::{Cluster, Device};
use lockstep_plan::schedule::{Action, PassKind};
use lockstep_plan::{Axis, MemoryCategory};

use super::{Point, escaped};
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

/// Which links the axes use.
pub(super) fn links(cluster: &Cluster, best: &Evaluated) -> String {
    let of_a_node = cluster.nodes[0].devices;
    let mut stride = 1;
    let mut words = Vec::new();
    for axis in Axis::ALL.into_iter().rev() {
        let size = best.plan.mesh.of(axis);
        if size > 1 {
            let reach = if stride * size <= of_a_node { "inside a node" } else { "between nodes" };
            words.push(format!("{} {reach}", axis.name()));
        }
        stride *= size;
    }
    words.join(", ")
}

/// The first nodes and their devices, coloured by stage; the number is that of the device's rank.
pub(super) fn mesh(cluster: &Cluster, best: &Evaluated) -> String {
    let of_a_node = cluster.nodes[0].devices.max(1);
    let ranks = best.devices;
    let nodes = ranks.div_ceil(of_a_node);
    let stages = best.plan.mesh.pipeline;
    let of_a_stage = (ranks / stages.max(1)).max(1);
    let tensor = best.plan.mesh.tensor.max(1);
    let drawn: Vec<usize> = if nodes <= MOST_NODES {
        (0..nodes).collect()
    } else {
        (0..MOST_NODES - 2).chain(nodes - 2..nodes).collect()
    };
    let columns = 4.0;
    let (box_width, box_height) = (WIDTH / columns - 12.0, 74.0);
    let mut body = String::new();
    for (place, node) in drawn.iter().enumerate() {
        let x = (place as f64 % columns).floor() * (box_width + 12.0);
        let y = (place as f64 / columns).floor() * (box_height + 24.0) + 16.0;
        text(&mut body, [x, y - 4.0], "name", &format!("node {node}"));
        let _ = write!(
            body,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{box_width:.1}\" height=\"{box_height}\" fill=\"none\" class=\"axis\" rx=\"4\"/>"
        );
        let here = of_a_node.min(ranks - node * of_a_node);
        let in_a_row = here.div_ceil(2).max(1) as f64;
        let cell = (box_width - 8.0) / in_a_row;
        for device in 0..here {
            let rank = node * of_a_node + device;
            let stage = rank / of_a_stage;
            let (column, row) = (device as f64 % in_a_row, (device as f64 / in_a_row).floor());
            let at = [x + 4.0 + column * cell, y + 5.0 + row * 33.0];
            let title = format!("rank {rank}: stage {stage}, tensor {} of {tensor}", rank % tensor);
            rectangle(&mut body, [at[0] + 1.0, at[1], cell - 2.0, 30.0], &colour(stage), &title);
            text(&mut body, [at[0] + cell / 2.0, at[1] + 19.0], "in", &rank.to_string());
        }
    }
    let rows = (drawn.len() as f64 / columns).ceil();
    let mut picture = svg(rows * (box_height + 24.0) + 4.0, &body);
    let shown = legend((0..stages.min(COLOURS.len())).map(|stage| {
        let others = if stages > COLOURS.len() { ", and every 8th after it" } else { "" };
        (
            if stages > 1 { format!("stage {stage}{others}") } else { "the whole model".to_owned() },
            colour(stage),
        )
    }));
    picture += &shown;
    if nodes > drawn.len() {
        let _ = write!(
            picture,
            "<p class=\"small\">{} of {nodes} nodes are drawn: the first and the last.</p>",
            drawn.len()
        );
    }
    picture
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
    let names = parts
        .iter()
        .enumerate()
        .map(|(index, (name, ms))| (format!("{name} {}", human::milliseconds(*ms)), colour(index)));
    format!("<div class=\"stack\">{pieces}</div>{}", legend(names))
}

/// Numbers of the ranks that are drawn: all, or some from the first to the last.
fn drawn_ranks(ranks: usize) -> Vec<usize> {
    if ranks <= MOST_RANKS {
        return (0..ranks).collect();
    }
    (0..MOST_RANKS).map(|place| place * (ranks - 1) / (MOST_RANKS - 1)).collect()
}

/// What each rank of the pipeline does when; none without one.
pub(super) fn timeline(best: &Evaluated) -> String {
    let Some(simulation) = &best.step.simulation else { return String::new() };
    let end_ms = best.step.step_ms.max(f64::MIN_POSITIVE);
    let (left, height) = (60.0, 18.0);
    let scale = (WIDTH - left) / end_ms;
    let ranks = drawn_ranks(simulation.spans.len());
    let mut body = String::new();
    for (row, rank) in ranks.iter().enumerate() {
        let y = row as f64 * (height + 3.0);
        text(&mut body, [0.0, y + 13.0], "", &format!("rank {rank}"));
        let _ = write!(
            body,
            "<rect x=\"{left}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{height}\" class=\"lane\" fill=\"var(--grid)\"/>",
            WIDTH - left
        );
        // Passes of a kind that stand so near that no gap would be seen are one.
        let mut open: Option<(usize, f64, f64, usize)> = None;
        let close = |open: Option<(usize, f64, f64, usize)>, body: &mut String| {
            let Some((kind, start, end, passes)) = open else { return };
            let title = format!(
                "{} {}",
                human::plural(passes, KINDS[kind]),
                human::milliseconds((end - start) / scale)
            );
            rectangle(body, [left + start, y, (end - start).max(0.2), height], &colour(kind), &title);
        };
        for span in &simulation.spans[*rank] {
            let Action::Compute(pass) = span.action else { continue };
            let kind = match pass.kind {
                PassKind::Forward => 0,
                PassKind::Backward | PassKind::BackwardInput => 1,
                PassKind::BackwardWeight => 2,
            };
            let (start, end) = (span.start_ms * scale, span.end_ms * scale);
            let gap = if end - start > 2.0 { 0.0 } else { 0.4 };
            match &mut open {
                Some((last, _, until, passes)) if *last == kind && start - *until < gap => {
                    *until = end;
                    *passes += 1;
                }
                _ => {
                    close(open.take(), &mut body);
                    open = Some((kind, start, end, 1));
                }
            }
        }
        close(open, &mut body);
        let after = [
            (best.step.step_ms - best.step.update_ms - best.step.gradients_ms, best.step.gradients_ms, 3),
            (best.step.step_ms - best.step.update_ms, best.step.update_ms, 4),
        ];
        for (start, ms, kind) in after {
            rectangle(&mut body, [left + start * scale, y, ms * scale, height], &colour(kind), KINDS[kind]);
        }
    }
    let picture = svg(ranks.len() as f64 * (height + 3.0), &body);
    let names = KINDS.iter().enumerate().map(|(kind, name)| ((*name).to_owned(), colour(kind)));
    let note = if ranks.len() < simulation.spans.len() {
        format!(
            "<p class=\"small\">{} of {} ranks of the pipeline are drawn.</p>",
            ranks.len(),
            simulation.spans.len()
        )
    } else {
        String::new()
    };
    picture + &legend(names) + &note
}

const KINDS: [&str; 5] = ["forward", "backward", "backward of weights", "sums of gradients", "update"];

/// What some ranks of the pipeline hold over a step: what always stands, and activations as micro-batches come and go.
pub(super) fn memory(best: &Evaluated) -> String {
    let ranks = best.memory.len();
    let mut shown = vec![0, ranks / 2, ranks.saturating_sub(1)];
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
    text(&mut body, [WIDTH - 60.0, height + 14.0], "", &human::milliseconds(best.step.step_ms));
    let names = shown.iter().enumerate().map(|(index, rank)| {
        let parts = best.memory[*rank].entries().filter(|(_, bytes)| *bytes > 0);
        let parts: Vec<String> = parts
            .map(|(category, bytes)| format!("{} {}", category.name(), human::bytes(bytes as u64)))
            .collect();
        (format!("stage {rank}: {}", parts.join(", ")), colour(index))
    });
    svg(height + 18.0, &body) + &legend(names)
}

/// How many micro-batches a rank of the pipeline holds from which moment on; without one, from the forwards to the backwards of each.
fn held(best: &Evaluated, rank: usize) -> Vec<(f64, f64)> {
    let mut held = Vec::new();
    let mut now = 0.0;
    if let Some(simulation) = &best.step.simulation {
        for span in &simulation.spans[rank] {
            let Action::Compute(pass) = span.action else { continue };
            match pass.kind {
                PassKind::Forward => held.push((span.start_ms, 1.0)),
                kind if kind.makes_weight_gradient() => held.push((span.end_ms, -1.0)),
                _ => {}
            }
        }
    } else {
        let accumulation = best.config.accumulation_steps().clamp(1, 64) as f64;
        let each = (best.step.work_ms + best.step.exchange_ms) / accumulation;
        for index in 0..accumulation as usize {
            held.push((index as f64 * each, 1.0));
            held.push(((index + 1) as f64 * each * 0.999, -1.0));
        }
    }
    held.sort_by(|a, b| a.0.total_cmp(&b.0));
    held.into_iter()
        .map(|(ms, change)| {
            now += change;
            (ms, now)
        })
        .collect()
}

/// Every kind of task under the device's roof: the larger a point the more of a micro-batch it takes.
pub(super) fn roofline(device: &Device, best: &Evaluated, points: &[Point]) -> String {
    let (left, height) = (76.0, 260.0);
    let peak = best.peak_tflops * 1e12;
    let bandwidth = device.memory_gb_per_s * 1e9;
    let ridge = peak / bandwidth;
    let (least_x, most_x) = (0.05_f64, (ridge * 64.0).max(1024.0));
    let (least_y, most_y) = (bandwidth * least_x, peak * 2.0);
    let at = |intensity: f64, rate: f64| {
        let x = (intensity.clamp(least_x, most_x) / least_x).ln() / (most_x / least_x).ln();
        let y = (rate.clamp(least_y, most_y) / least_y).ln() / (most_y / least_y).ln();
        [left + x * (WIDTH - left - 20.0), height - y * (height - 10.0)]
    };
    let mut body = String::new();
    let [start, corner, end] = [at(least_x, bandwidth * least_x), at(ridge, peak), at(most_x, peak)];
    let _ = write!(
        body,
        "<polyline points=\"{:.1},{:.1} {:.1},{:.1} {:.1},{:.1}\" fill=\"none\" stroke=\"var(--soft)\" stroke-width=\"1.5\"/>",
        start[0], start[1], corner[0], corner[1], end[0], end[1]
    );
    text(&mut body, [end[0] - 150.0, end[1] - 5.0], "", &format!("{:.0} TFLOP/s", best.peak_tflops));
    text(
        &mut body,
        [start[0] + 8.0, start[1] - 24.0],
        "",
        &format!("{} GB/s", human::count(device.memory_gb_per_s)),
    );
    text(&mut body, [WIDTH - 190.0, height + 16.0], "", "operations for each byte of memory");
    let all: f64 = points.iter().map(|point| point.seconds).sum();
    let mut names = Vec::new();
    for (index, point) in points.iter().filter(|point| point.rate > 0.0).take(10).enumerate() {
        let [x, y] = at(point.intensity, point.rate);
        let share = point.seconds / all.max(f64::MIN_POSITIVE);
        let words = format!(
            "{}: {:.1} TFLOP/s, {:.0} % of a micro-batch",
            point.name,
            point.rate / 1e12,
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
    svg(height + 20.0, &body) + &legend(names)
}
