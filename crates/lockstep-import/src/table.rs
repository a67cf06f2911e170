//! The table of another tool's keys and their treatment, from which refusals and the pages of the manual come.

use std::fmt::Write as _;

use strsim::normalized_damerau_levenshtein;

/// One key of another tool, or all keys below one (`flops_profiler.*`).
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// Dotted name; `.*` at the end stands for everything below.
    pub key: &'static str,
    /// Value in the tool's code when nobody sets it; empty where there is none.
    pub default: &'static str,
    /// Its treatment.
    pub treatment: Treatment,
}

/// Treatment of a key by the import.
#[derive(Debug, Clone, Copy)]
pub enum Treatment {
    /// Translated: the key has a counterpart.
    To {
        /// Our key, or several.
        ours: &'static str,
        /// The difference from it; empty where it is the same thing.
        how: &'static str,
    },
    /// Accepted without effect, for this reason.
    NoEffect(&'static str),
    /// Refused, unless the value is one of `accepts`.
    Refused {
        /// Values that ask for nothing.
        accepts: &'static [&'static str],
        /// Reason, and what to write instead.
        because: &'static str,
    },
}

/// A key with a counterpart of the same meaning.
pub(crate) const fn to(key: &'static str, default: &'static str, ours: &'static str) -> Row {
    Row { key, default, treatment: Treatment::To { ours, how: "" } }
}

/// A key with a counterpart that differs a little.
pub(crate) const fn to_but(
    key: &'static str,
    default: &'static str,
    ours: &'static str,
    how: &'static str,
) -> Row {
    Row { key, default, treatment: Treatment::To { ours, how } }
}

/// A key that changes nothing.
pub(crate) const fn idle(key: &'static str, default: &'static str, because: &'static str) -> Row {
    Row { key, default, treatment: Treatment::NoEffect(because) }
}

/// A key that is refused, unless its value asks for nothing.
pub(crate) const fn refused(
    key: &'static str,
    default: &'static str,
    accepts: &'static [&'static str],
    because: &'static str,
) -> Row {
    Row { key, default, treatment: Treatment::Refused { accepts, because } }
}

/// The row of a key: its own, or that of the longest group it is in.
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

/// The known key that is most like an unknown one; `None` if none is near.
pub(crate) fn nearest(rows: &'static [Row], key: &str) -> Option<&'static str> {
    let last_of = |key: &'static str| key.rsplit('.').next().unwrap_or(key);
    let written = key.rsplit('.').next().unwrap_or(key);
    let likeness = |row: &Row| {
        let whole = normalized_damerau_levenshtein(key, row.key);
        // A right key in a wrong section; `enabled` and the like stand in too many to be one.
        let last = normalized_damerau_levenshtein(written, last_of(row.key));
        if last_of(row.key).len() > 7 { whole.max(0.95 * last) } else { whole }
    };
    let best = rows
        .iter()
        .filter(|row| !row.key.ends_with('*'))
        .max_by(|a, b| likeness(a).total_cmp(&likeness(b)))?;
    (likeness(best) >= 0.75).then_some(best.key)
}

/// The table in Markdown.
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
