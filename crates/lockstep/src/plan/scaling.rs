//! `lockstep plan --scaling`: the table of node counts.

use lockstep_config::human;
use lockstep_planner::{Evaluated, Scaled, Scaling, mesh_in_words};
use serde_json::{Value, json};

use crate::output::say;

/// Most rows of a table.
const MOST_ROWS: usize = 16;
/// Number of nodes up to which a cluster of one node is scaled.
const USUAL_NODES: usize = 16;

/// Returns the node counts of a table: the named ones, or powers of two up to the cluster's.
pub(super) fn nodes(named: &[usize], of_cluster: usize) -> Vec<usize> {
    let most = if of_cluster == 1 { USUAL_NODES } else { of_cluster };
    let mut nodes = match named {
        [] => std::iter::successors(Some(1), |nodes| Some(nodes * 2))
            .take_while(|nodes| *nodes < most)
            .chain([most])
            .collect(),
        named => named.to_vec(),
    };
    nodes.sort_unstable();
    nodes.dedup();
    nodes.truncate(MOST_ROWS);
    nodes
}

pub(super) fn print(scaling: &Scaling) {
    let Scaling { rows, serial_fraction } = scaling;
    say!(
        "\n{:<10}{:>10}{:>10}{:>9}{:>12}{:>14}{:>10}{:>17}  plan of the same batch",
        "nodes",
        "step",
        "speed-up",
        "of ideal",
        "tokens/s",
        "growing batch",
        "step",
        "tokens/s"
    );
    let first = rows.iter().find_map(|row| Some((row.nodes, row.strong.as_ref()?)));
    let first_weak = rows.iter().find_map(|row| Some((row.nodes, row.weak.as_ref()?.tokens_per_s())));
    for Scaled { nodes, strong, weak_batch, weak } in rows {
        let none = || "-".to_owned();
        let of_first = |found: &Evaluated| {
            let (fewest, slowest) = first?;
            let speedup = slowest.step.step_ms / found.step.step_ms;
            Some([
                format!("{speedup:.2}"),
                format!("{:.0} %", 100.0 * speedup * fewest as f64 / *nodes as f64),
            ])
        };
        let [speedup, ideal] = strong.as_ref().and_then(of_first).unwrap_or_else(|| [none(), none()]);
        let step = |found: &Option<Evaluated>| {
            found.as_ref().map_or_else(none, |found| human::step_time(found.step.step_ms))
        };
        let rate = |found: &Option<Evaluated>| {
            found.as_ref().map_or_else(none, |found| human::count(found.tokens_per_s()).to_string())
        };
        let weak_ideal =
            weak.as_ref().zip(first_weak).map_or(String::new(), |(found, (fewest, tokens_per_s))| {
                format!(
                    " ({:.0} %)",
                    100.0 * found.tokens_per_s() / tokens_per_s * fewest as f64 / *nodes as f64
                )
            });
        let plan = strong
            .as_ref()
            .map_or_else(|| "nothing fits".to_owned(), |found| mesh_in_words(&found.plan.mesh));
        say!(
            "{:<10}{:>10}{speedup:>10}{ideal:>9}{:>12}{:>14}{:>10}{:>17}  {plan}",
            human::thousands(*nodes as u64),
            step(strong),
            rate(strong),
            human::thousands(*weak_batch as u64),
            step(weak),
            rate(weak) + &weak_ideal,
        );
    }
    if let Some(serial) = serial_fraction {
        say!(
            "           Amdahl's law fits the same batch with {:.2} % that more nodes do not shorten",
            serial * 100.0
        );
    }
}

pub(super) fn to_json(scaling: &Scaling) -> Value {
    let found = |found: &Evaluated| json!({ "step_ms": found.step.step_ms, "tokens_per_s": found.tokens_per_s(), "mfu": found.mfu(), "mesh": found.plan.mesh });
    let row = |row: &Scaled| {
        json!({
            "nodes": row.nodes, "strong": row.strong.as_ref().map(found),
            "weak_global_batch": row.weak_batch, "weak": row.weak.as_ref().map(found),
        })
    };
    json!({ "rows": scaling.rows.iter().map(row).collect::<Vec<_>>(), "amdahl_serial_fraction": scaling.serial_fraction })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_two_up_to_the_cluster_unless_numbers_are_named() {
        assert_eq!(nodes(&[], 1), [1, 2, 4, 8, 16]);
        assert_eq!(nodes(&[], 96), [1, 2, 4, 8, 16, 32, 64, 96]);
        assert_eq!(nodes(&[8, 2, 8], 4), [2, 8]);
    }
}
