//! Table of another tool's keys and their treatment, from which refusals and the manual pages are generated.

use std::fmt::Write as _;

use strsim::normalized_damerau_levenshtein;

/// One key of another tool, or all keys below one (`flops_profiler.*`).
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// Dotted name; a final `.*` means every key below.
    pub key: &'static str,
    /// Default in the tool's code; empty if there is none.
    pub default: &'static str,
    /// Treatment by the import.
    pub treatment: Treatment,
}

/// Treatment of a key by the import.
#[derive(Debug, Clone, Copy)]
pub enum Treatment {
    /// Translated to a key of RUN.toml.
    To {
        /// Our key, or several separated by commas.
        ours: &'static str,
        /// Difference from our key; empty if the meaning is the same.
        how: &'static str,
    },
    /// Accepted without effect, for the given reason.
    NoEffect(&'static str),
    /// Refused, unless the value is the one that `accepts` names.
    Refused {
        /// Value that requests nothing and is accepted, if there is one.
        accepts: Option<&'static str>,
        /// Reason, and what to write instead.
        because: &'static str,
    },
}

/// Splits the lines of a table into cells at tabs. Skips empty lines and comments (`#`).
fn lines(table: &'static str) -> impl Iterator<Item = Vec<&'static str>> {
    let is_row = |line: &&str| !line.is_empty() && !line.starts_with('#');
    table.lines().filter(is_row).map(|line| line.split('\t').collect())
}

/// Reads a table of two columns.
///
/// # Panics
/// If a line has another number of cells.
pub(crate) fn pairs(table: &'static str) -> Vec<[&'static str; 2]> {
    let pair = |cells: Vec<_>| cells.try_into().unwrap_or_else(|cells| panic!("{cells:?} is no pair"));
    lines(table).map(pair).collect()
}

/// Reads a table of keys, whose first lines describe its columns. A line `@name, reason` gives a name to a reason that several
/// keys share.
///
/// # Panics
/// If a line has no form of the table, or names an unknown reason.
pub(crate) fn read(table: &'static str) -> Vec<Row> {
    let (reasons, keys): (Vec<_>, Vec<_>) = lines(table).partition(|cells| cells[0].starts_with('@'));
    let reason =
        |cell: &'static str| match reasons.iter().find(|named| named[0] == cell).map(|named| &named[..]) {
            Some([_, reason]) => *reason,
            None if !cell.starts_with('@') => cell,
            _ => panic!("the table has no reason {cell}"),
        };
    let row = |cells: Vec<&'static str>| {
        let (key, default, treatment) = match cells[..] {
            [key, default, "to", ours] => (key, default, Treatment::To { ours, how: "" }),
            [key, default, "to", ours, how] => (key, default, Treatment::To { ours, how }),
            [key, default, "idle", because] => (key, default, Treatment::NoEffect(reason(because))),
            [key, default, "refused", because] => {
                (key, default, Treatment::Refused { accepts: None, because: reason(because) })
            }
            [key, default, "refused", because, accepts] => {
                (key, default, Treatment::Refused { accepts: Some(accepts), because: reason(because) })
            }
            _ => panic!("{cells:?} is no row of a table of keys"),
        };
        Row { key, default, treatment }
    };
    keys.into_iter().map(row).collect()
}

/// Returns the row of a key: its own, or that of the longest group that contains it.
pub(crate) fn find(rows: &'static [Row], key: &str) -> Option<&'static Row> {
    rows.iter().find(|row| row.key == key).or_else(|| {
        let group = |row: &&Row| {
            row.key
                .strip_suffix('*')
                .is_some_and(|prefix| key.starts_with(prefix) || prefix == format!("{key}."))
        };
        rows.iter().filter(group).max_by_key(|row| row.key.len())
    })
}

/// Returns the known key that is most similar to an unknown one; `None` if none is similar.
pub(crate) fn nearest(rows: &'static [Row], key: &str) -> Option<&'static str> {
    let last_of = |key: &'static str| key.rsplit('.').next().unwrap_or(key);
    let written = key.rsplit('.').next().unwrap_or(key);
    let likeness = |row: &Row| {
        let whole = normalized_damerau_levenshtein(key, row.key);
        // Recognizes a right key in a wrong section. Short names such as `enabled` are in too many sections for that.
        let last = normalized_damerau_levenshtein(written, last_of(row.key));
        if last_of(row.key).len() > 7 { whole.max(0.95 * last) } else { whole }
    };
    let best = rows
        .iter()
        .filter(|row| !row.key.ends_with('*'))
        .max_by(|a, b| likeness(a).total_cmp(&likeness(b)))?;
    (likeness(best) >= 0.75).then_some(best.key)
}

/// Returns the table in Markdown.
pub(crate) fn markdown(rows: &[Row]) -> String {
    let mut out = "| key | default there | here | |\n|---|---|---|---|\n".to_owned();
    for Row { key, default, treatment } in rows {
        let default = if default.is_empty() { String::new() } else { format!("`{default}`") };
        let (ours, remark) = match treatment {
            Treatment::To { ours, how } => {
                let ours = ours.split(", ").map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
                (ours, (*how).to_owned())
            }
            Treatment::NoEffect(because) => ("without effect".to_owned(), (*because).to_owned()),
            Treatment::Refused { accepts: None, because } => ("refused".to_owned(), (*because).to_owned()),
            Treatment::Refused { accepts: Some(value), because } => {
                (format!("refused, unless `{value}`"), (*because).to_owned())
            }
        };
        // Writing to a String cannot fail.
        let _ = writeln!(out, "| `{key}` | {default} | {ours} | {remark} |");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_comments_shared_reasons_and_lines_without_their_last_cells() {
        let table = "# Keys.\n@why\tit is so\n\na\t1\tto\tx.y\nb\t\tto\tx.z\ttwice\nc\t0\tidle\t@why\nd\t\trefused\tno\toff\n";
        let rows: Vec<String> = read(table).iter().map(|row| format!("{row:?}")).collect();
        let row = |key: &str, default: &str, treatment: Treatment| {
            format!("Row {{ key: {key:?}, default: {default:?}, treatment: {treatment:?} }}")
        };
        assert_eq!(
            rows,
            [
                row("a", "1", Treatment::To { ours: "x.y", how: "" }),
                row("b", "", Treatment::To { ours: "x.z", how: "twice" }),
                row("c", "0", Treatment::NoEffect("it is so")),
                row("d", "", Treatment::Refused { accepts: Some("off"), because: "no" }),
            ]
        );
    }
    #[test]
    #[should_panic(expected = "no reason @whi")]
    fn a_misspelt_reason_is_an_error() {
        read("@why\tit is so\na\t1\tidle\t@whi\n");
    }

    #[test]
    #[should_panic(expected = "is no row")]
    fn a_cell_too_many_is_an_error() {
        read("a\t1\tto\tx.y\ttwice\tmore\n");
    }
}
