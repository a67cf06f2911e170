//! Reads a user's schedule: a CSV file with one row of passes per rank, in the format of `torch.distributed.pipelining`.
//!
//! ```text
//!     0F0,0F1,,,0B0,0B1
//!     ,1F0,1B0,1F1,1B1
//! ```
//!
//! A cell is a [`Pass`]. If each rank has one stage, with the rank's own index, the stage may be omitted (`F0`). Empty cells stand for
//! idle time and are ignored: a pass starts as soon as it can. Two passes that PyTorch overlaps, `(0F2;3B0)OVERLAP_F_B`, run one after
//! the other. Sends and receives are derived and are not in the file.

use super::{Pass, ScheduleError, ScheduleProblem};

/// Parses the passes of each rank from a CSV file for `ranks` pipeline ranks.
pub fn passes_from_csv(text: &str, ranks: usize) -> Result<Vec<Vec<Pass>>, ScheduleError> {
    let rows: Vec<&str> = text.trim_end().lines().collect();
    let mut problems = Vec::new();
    if rows.len() != ranks {
        problems.push(ScheduleProblem::Rows { rows: rows.len(), ranks });
    }
    let mut passes = Vec::with_capacity(rows.len());
    for (rank, row) in rows.iter().enumerate() {
        let mut list = Vec::new();
        for (column, cell) in row.split(',').enumerate() {
            let cell = cell.trim().trim_matches('"');
            match cell_passes(cell, rank) {
                Some(cell) => list.extend(cell),
                None => problems.push(ScheduleProblem::BadCell {
                    row: rank + 1,
                    column: column + 1,
                    cell: cell.chars().take(40).collect(),
                }),
            }
        }
        passes.push(list);
    }
    if problems.is_empty() { Ok(passes) } else { Err(ScheduleError(problems)) }
}

/// Parses the passes of a cell: none, one, or two that overlap.
fn cell_passes(cell: &str, rank: usize) -> Option<Vec<Pass>> {
    if cell.is_empty() {
        return Some(Vec::new());
    }
    let overlapped = cell.strip_prefix('(').and_then(|cell| cell.strip_suffix(")OVERLAP_F_B"));
    overlapped.unwrap_or(cell).split(';').map(|pass| one_pass(pass, rank)).collect()
}

fn one_pass(cell: &str, rank: usize) -> Option<Pass> {
    if cell.starts_with(|first: char| first.is_ascii_digit()) {
        cell.parse().ok()
    } else {
        format!("{rank}{cell}").parse().ok()
    }
}
