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
    /// Refused, unless the value is one of `accepts`.
    Refused {
        /// Values that request nothing and are accepted.
        accepts: &'static [&'static str],
        /// Reason, and what to write instead.
        because: &'static str,
    },
}

/// Creates the row of a key whose counterpart has the same meaning.
pub(crate) const fn to(key: &'static str, default: &'static str, ours: &'static str) -> Row {
    Row { key, default, treatment: Treatment::To { ours, how: "" } }
}

/// Creates the row of a key whose counterpart differs a little.
pub(crate) const fn to_but(
    key: &'static str,
    default: &'static str,
    ours: &'static str,
    how: &'static str,
) -> Row {
    Row { key, default, treatment: Treatment::To { ours, how } }
}

/// Creates the row of a key that changes nothing.
pub(crate) const fn idle(key: &'static str, default: &'static str, because: &'static str) -> Row {
    Row { key, default, treatment: Treatment::NoEffect(because) }
}

/// Creates the row of a key that is refused, unless its value requests nothing.
pub(crate) const fn refused(
    key: &'static str,
    default: &'static str,
    accepts: &'static [&'static str],
    because: &'static str,
) -> Row {
    Row { key, default, treatment: Treatment::Refused { accepts, because } }
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
            Treatment::Refused { accepts: [], because } => ("refused".to_owned(), (*because).to_owned()),
            Treatment::Refused { accepts, because } => {
                let values = accepts.iter().map(|value| format!("`{value}`")).collect::<Vec<_>>().join(", ");
                (format!("refused, unless {values}"), (*because).to_owned())
            }
        };
        // Writing to a String cannot fail.
        let _ = writeln!(out, "| `{key}` | {default} | {ours} | {remark} |");
    }
    out
}
