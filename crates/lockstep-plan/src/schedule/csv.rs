//! A user's schedule: a CSV file with one row of passes for each rank, as `torch.distributed.pipelining` writes them.
//!
//! ```text
//!     0F0,0F1,,,0B0,0B1
//!     ,1F0,1B0,1F1,1B1
//! ```
//!
//! A cell is a [`Pass`]. Where each rank has one stage, which is then its row, the number of the stage may be left out
//! (`F0`). Empty cells stand for idle time and say nothing: a pass starts when it can. Two passes that PyTorch overlaps,
//! `(0F2;3B0)OVERLAP_F_B`, are read as one after the other. Sends and receives are derived and are not in the file.

use super::{Pass, ScheduleError, ScheduleProblem};

/// The passes of each rank in a CSV file for `ranks` pipeline ranks.
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

/// The passes of a cell: none, one, or two that overlap.
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
