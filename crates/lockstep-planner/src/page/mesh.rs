//! The mesh on the machines: the links that its axes use, and the nodes that a page has room for.

use std::collections::BTreeSet;
use std::ops::Range;

use lockstep_plan::Axis;
use serde_json::{Value, json};

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

/// Returns the nodes to draw: number, ranks as first and end, and in a mixed cluster the device; `count` counts all nodes with ranks.
pub(super) fn mesh(cluster: &Cluster, best: &Evaluated) -> Value {
    let nodes = nodes(cluster, best.devices);
    let of_a_stage = (best.devices / best.plan.mesh.pipeline.max(1)).max(1);
    let is_mixed = cluster.nodes.len() > 1;
    let node = |number: usize| {
        let Node { ranks, kind } = &nodes[number];
        let device = is_mixed.then(|| &cluster.nodes[*kind].device.name);
        json!({ "number": number, "ranks": [ranks.start, ranks.end], "device": device })
    };
    let drawn: Vec<Value> = drawn_nodes(&nodes, of_a_stage).into_iter().map(node).collect();
    json!({ "nodes": drawn, "count": nodes.len() })
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
