//! The mesh on the machines: nodes, their devices, and the pipeline rank or part of the batch of each.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::ops::Range;

use lockstep_plan::Axis;

use super::svg::{COLOURS, WIDTH, colour, legend, note, rectangle, svg, text};
use crate::Evaluated;
use crate::cluster::Cluster;

/// Most nodes that are drawn.
const MOST_NODES: usize = 8;

/// Returns the links that the axes use: for each axis the link that joins a whole group, and the ranks of a group per node if it
/// spans nodes.
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

/// A node that runs any ranks.
#[derive(Debug, Clone, PartialEq)]
struct Node {
    ranks: Range<usize>,
    /// Index of its kind of node in the cluster.
    kind: usize,
}

/// Returns the nodes of `ranks` ranks: in a uniform cluster filled evenly, as the prediction does; in a mixed one filled in order.
fn nodes(cluster: &Cluster, ranks: usize) -> Vec<Node> {
    let of_a_node = ranks.div_ceil(cluster.node_count().max(1)).max(1);
    let of_kind = |kind: usize| {
        let node = &cluster.nodes[kind];
        let devices = if cluster.nodes.len() == 1 { of_a_node } else { node.devices };
        std::iter::repeat_n((kind, devices), node.count)
    };
    let mut first = 0;
    let node = |(kind, devices): (usize, usize)| {
        let here = first..ranks.min(first + devices);
        first = here.end;
        (!here.is_empty()).then_some(Node { ranks: here, kind })
    };
    (0..cluster.nodes.len()).flat_map(of_kind).map_while(node).collect()
}

/// Returns the indices of the nodes to draw: all, or of many the first two, the first of each other kind, those where the next
/// pipeline ranks begin, and the last.
fn drawn_nodes(nodes: &[Node], of_a_stage: usize) -> Vec<usize> {
    if nodes.len() <= MOST_NODES {
        return (0..nodes.len()).collect();
    }
    let last = nodes.len() - 1;
    let changes = (1..nodes.len()).filter(|node| nodes[*node].kind != nodes[node - 1].kind);
    let node_of = |rank: usize| nodes.partition_point(|node| node.ranks.end <= rank);
    let begins = (1..).map(|stage| node_of(stage * of_a_stage)).take_while(|node| *node < last);
    let next = 2..last;
    let mut drawn = BTreeSet::from([0, 1, last]);
    for node in changes.chain(begins.take(nodes.len())).chain(next) {
        if drawn.len() == MOST_NODES {
            break;
        }
        drawn.insert(node);
    }
    drawn.into_iter().collect()
}

/// Draws nodes and their devices, coloured by pipeline rank, or without a pipeline by part of the batch. The number is the device's
/// rank; a frame is around a tensor-parallel group.
pub(super) fn mesh(cluster: &Cluster, best: &Evaluated) -> String {
    let ranks = best.devices;
    let nodes = nodes(cluster, ranks);
    let stages = best.plan.mesh.pipeline.max(1);
    let tensor = best.plan.mesh.tensor.max(1);
    let of_a_stage = (ranks / stages).max(1);
    let (kind, of_a_colour) = match stages {
        1 => ("part of the batch", (tensor * best.plan.mesh.context).max(1)),
        _ => ("pipeline rank", of_a_stage),
    };
    let drawn = drawn_nodes(&nodes, of_a_stage);
    let columns = 4.0;
    let (box_width, box_height) = (WIDTH / columns - 12.0, 74.0);
    let mut body = String::new();
    let mut seen = BTreeSet::new();
    for (place, number) in drawn.iter().enumerate() {
        let Node { ranks: here, kind } = &nodes[*number];
        let x = (place as f64 % columns).floor() * (box_width + 12.0);
        let y = (place as f64 / columns).floor() * (box_height + 24.0) + 16.0;
        let device = &cluster.nodes[*kind].device.name;
        let of_kind = if cluster.nodes.len() > 1 { format!(", {device}") } else { String::new() };
        text(&mut body, [x, y - 4.0], "name", &format!("node {number}{of_kind}"));
        let _ = write!(
            body,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{box_width:.1}\" height=\"{box_height}\" fill=\"none\" class=\"axis\" rx=\"4\"/>"
        );
        let in_a_row = here.len().div_ceil(2).max(1);
        let cell = (box_width - 8.0) / in_a_row as f64;
        let corner = |rank: usize| {
            let device = rank - here.start;
            [x + 4.0 + (device % in_a_row) as f64 * cell, y + 5.0 + (device / in_a_row) as f64 * 33.0]
        };
        for rank in here.clone() {
            let (stage, part) = (rank / of_a_stage, rank / of_a_colour);
            seen.insert(part);
            let at = corner(rank);
            let title = format!("rank {rank}: pipeline rank {stage}, tensor {} of {tensor}", rank % tensor);
            rectangle(&mut body, [at[0] + 1.0, at[1], cell - 2.0, 30.0], &colour(part), &title);
            text(&mut body, [at[0] + cell / 2.0, at[1] + 19.0], "in", &rank.to_string());
        }
        for group in frames(here.clone(), tensor, in_a_row) {
            let [left, top] = corner(group.start);
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
    let mut notes = Vec::new();
    if all <= 1 {
        picture += &legend([("the whole model".to_owned(), colour(0))]);
    } else if seen.len() <= COLOURS.len() {
        picture += &legend(seen.iter().map(|part| (format!("{kind} {part}"), colour(*part))));
    } else {
        notes.push(format!("A colour for each {kind}; after {} they repeat.", COLOURS.len()));
    }
    if tensor > 1 {
        notes.push("A frame: ranks that share each matrix.".to_owned());
    }
    if nodes.len() > drawn.len() {
        notes.push(format!("{} of {} nodes are drawn; the others are like these.", drawn.len(), nodes.len()));
    }
    picture + &note(&notes.join(" "))
}

/// Returns the tensor-parallel groups among the ranks `here`, each cut at the ends of rows of `in_a_row` devices; empty without
/// tensor parallelism.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_nodes_each_kind_is_drawn_and_the_last() {
        let mut cluster = Cluster::preset("dgx-h100x20").unwrap();
        let mut other = cluster.nodes[0].clone();
        (other.count, other.devices) = (12, 4);
        cluster.nodes.push(other);
        let nodes = nodes(&cluster, cluster.devices());
        assert_eq!(nodes.len(), 32);
        assert_eq!(nodes[20], Node { ranks: 160..164, kind: 1 });
        let drawn = drawn_nodes(&nodes, 52);
        assert_eq!(drawn, [0, 1, 2, 6, 13, 19, 20, 31]);
        assert_eq!(drawn_nodes(&nodes[..5], 8), [0, 1, 2, 3, 4]);
        assert_eq!(super::nodes(&cluster, 12).len(), 2, "nodes without ranks are none");
    }
}
