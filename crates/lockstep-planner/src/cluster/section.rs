//! Tables of a TOML file, read key by key. Values are converted and checked; values that do not fit, and keys that were never asked for,
//! become problems with their place.

use std::cell::RefCell;
use std::collections::BTreeMap;

use lockstep_config::human::{read_bytes, whole_bytes};
use strsim::normalized_damerau_levenshtein;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{ClusterProblem, MOST_OF_A_PEAK};

/// Maximum length of names and values in messages; longer ones are cut.
const LONGEST_QUOTE: usize = 40;
/// Range of rates and times; values beyond it are mistakes, and would make others infinite.
const RATES: std::ops::RangeInclusive<f64> = 1e-9..=1e15;

/// Collects problems with their lines.
pub(super) struct Notes<'n> {
    name: &'n str,
    line_starts: Vec<usize>,
    problems: RefCell<Vec<(usize, ClusterProblem)>>,
}

impl<'n> Notes<'n> {
    pub(super) fn new(text: &str, name: &'n str) -> Self {
        let line_starts = text.match_indices('\n').map(|(at, _)| at + 1).collect();
        Self { name, line_starts, problems: RefCell::default() }
    }

    /// Adds a problem of `place`, at byte offset `at` of the text.
    pub(super) fn add(&self, at: usize, place: &str, what: impl Into<String>, allowed: impl Into<String>) {
        let line = self.line_starts.partition_point(|&start| start <= at) + 1;
        let problem = ClusterProblem {
            origin: format!("{}:{line}", self.name),
            place: place.to_owned(),
            what: what.into(),
            allowed: allowed.into(),
        };
        self.problems.borrow_mut().push((at, problem));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of problems.
    pub(super) fn len(&self) -> usize {
        self.problems.borrow().len()
    }

    /// Returns true if there is a problem on the line of this offset already.
    pub(super) fn has_line_of(&self, at: usize) -> bool {
        let line = |at: usize| self.line_starts.partition_point(|&start| start <= at);
        self.problems.borrow().iter().any(|(other, _)| line(*other) == line(at))
    }

    /// Returns all problems in the order of the text.
    pub(super) fn into_problems(self) -> Vec<ClusterProblem> {
        let mut problems = self.problems.into_inner();
        problems.sort_by_key(|(at, _)| *at);
        problems.into_iter().map(|(_, problem)| problem).collect()
    }
}

/// Range of numbers that a key accepts.
#[derive(Debug, Clone, Copy)]
pub(super) enum Rule {
    /// Positive numbers, without 0.
    Positive,
    /// Positive numbers and 0.
    NotNegative,
    /// Fractions from 0, exclusive, to 1.2: they are relative to vendors' peaks, which some devices exceed.
    Share,
}

impl Rule {
    fn admits(self, number: f64) -> bool {
        match self {
            Self::Positive => RATES.contains(&number),
            Self::NotNegative => number == 0.0 || RATES.contains(&number),
            Self::Share => number > 1e-6 && number <= MOST_OF_A_PEAK,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Positive => "a positive number",
            Self::NotNegative => "a number of 0 or more",
            Self::Share => "a share",
        }
    }

    const fn allowed(self) -> &'static str {
        match self {
            Self::Positive => "1e-9 to 1e15",
            Self::NotNegative => "0 to 1e15",
            Self::Share => "above 0, at most 1.2",
        }
    }
}

type Value<'d> = Spanned<DeValue<'d>>;

/// A table that is being read.
pub(super) struct Section<'r, 'd> {
    pub(super) notes: &'r Notes<'r>,
    /// Path of the table, such as `node[1].device`; empty for the file.
    place: String,
    /// Byte offset in the text.
    pub(super) at: usize,
    table: &'d DeTable<'d>,
    /// Keys that were asked for.
    asked: Vec<&'static str>,
}

impl<'r, 'd> Section<'r, 'd> {
    pub(super) fn of_document(notes: &'r Notes<'r>, table: &'d DeTable<'d>) -> Self {
        Self { notes, place: String::new(), at: 0, table, asked: Vec::new() }
    }

    /// Returns the path of one of its keys.
    pub(super) fn place_of(&self, key: &str) -> String {
        if self.place.is_empty() { key.to_owned() } else { format!("{}.{key}", self.place) }
    }

    /// Returns the byte offset of one of its keys, or of the table if the key is missing.
    pub(super) fn offset_of(&self, key: &str) -> usize {
        self.table.get(key).map_or(self.at, |value| value.span().start)
    }

    /// Adds a problem of one of its keys.
    pub(super) fn refuse(&self, key: &str, what: impl Into<String>, allowed: impl Into<String>) {
        self.notes.add(self.offset_of(key), &self.place_of(key), what, allowed);
    }

    /// Adds a problem of the table as a whole.
    pub(super) fn refuse_whole(&self, what: impl Into<String>, allowed: impl Into<String>) {
        self.notes.add(self.at, &self.place, what, allowed);
    }

    /// Returns true if the table has the key.
    pub(super) fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    /// Adds a problem if the table lacks a key.
    pub(super) fn require(&self, key: &str, allowed: &str) {
        if !self.has(key) {
            self.refuse(key, "is missing", allowed);
        }
    }

    fn value(&mut self, key: &'static str) -> Option<&'d Value<'d>> {
        self.asked.push(key);
        self.table.get(key)
    }

    /// Reads a number.
    pub(super) fn number(&mut self, key: &'static str, rule: Rule) -> Option<f64> {
        let value = self.value(key)?;
        self.checked_number(key, value, rule)
    }

    fn checked_number(&self, key: &str, value: &Value<'d>, rule: Rule) -> Option<f64> {
        let found = number_of(value.get_ref()).filter(|&number| rule.admits(number));
        if found.is_none() {
            let what = format!("{} is not {}", quoted(value.get_ref()), rule.name());
            self.notes.add(value.span().start, &self.place_of(key), what, rule.allowed());
        }
        found
    }

    /// Reads a list of exactly `N` numbers.
    pub(super) fn numbers<const N: usize>(&mut self, key: &'static str, rule: Rule) -> Option<[f64; N]> {
        let value = self.value(key)?;
        let DeValue::Array(items) = value.get_ref() else {
            self.refuse(key, format!("{} is not a list", quoted(value.get_ref())), format!("{N} numbers"));
            return None;
        };
        if items.len() != N {
            self.refuse(key, format!("has {} numbers", items.len()), format!("{N} numbers"));
            return None;
        }
        let mut numbers = [0.0; N];
        let mut is_sound = true;
        for (index, (item, number)) in items.iter().zip(&mut numbers).enumerate() {
            match self.checked_number(&format!("{key}[{index}]"), item, rule) {
                Some(found) => *number = found,
                None => is_sound = false,
            }
        }
        is_sound.then_some(numbers)
    }

    /// Reads a value that `convert` accepts; any other is refused in these words.
    fn read_as<T>(
        &mut self,
        key: &'static str,
        convert: impl FnOnce(&'d DeValue<'d>) -> Option<T>,
        wrong: &str,
        allowed: &str,
    ) -> Option<T> {
        let value = self.value(key)?.get_ref();
        let found = convert(value);
        if found.is_none() {
            self.refuse(key, format!("{} {wrong}", quoted(value)), allowed);
        }
        found
    }

    /// Reads a count: a whole number from 1.
    pub(super) fn count(&mut self, key: &'static str) -> Option<usize> {
        self.read_as(key, count_of, "is not a number of things", "a whole number from 1 to 4294967295")
    }

    /// Reads a size in bytes.
    pub(super) fn size(&mut self, key: &'static str) -> Option<u64> {
        let convert = |value: &DeValue<'_>| match value {
            DeValue::String(text) => read_bytes(text),
            other => number_of(other).and_then(|number| whole_bytes(number, 1)),
        };
        let allowed = "a number of bytes, or one with a unit: \"80GiB\", \"1.5TiB\", \"512MB\"";
        self.read_as(key, convert, "is not a size", allowed)
    }

    /// Reads a text of one line that is not empty.
    pub(super) fn text(&mut self, key: &'static str) -> Option<&'d str> {
        let is_line = |text: &&str| !text.trim().is_empty() && text.chars().all(|c| !c.is_control());
        self.read_as(key, |value| value.as_str().filter(is_line), "is not a name", "a text of one line")
    }

    /// Reads one of a few names.
    pub(super) fn choice(&mut self, key: &'static str, names: &[&str]) -> Option<&'d str> {
        let text = self.text(key)?;
        if names.contains(&text) {
            return Some(text);
        }
        self.refuse(key, unknown(text, names), one_of(names));
        None
    }

    /// Reads a boolean.
    pub(super) fn flag(&mut self, key: &'static str) -> Option<bool> {
        self.read_as(key, DeValue::as_bool, "is neither true nor false", "true, false")
    }

    /// Reads a value that may be a text or something else.
    pub(super) fn text_or_other(&mut self, key: &'static str) -> Option<Result<&'d str, &'d DeValue<'d>>> {
        match self.value(key)?.get_ref() {
            DeValue::String(text) => Some(Ok(text)),
            other => Some(Err(other)),
        }
    }

    /// Reads a table.
    pub(super) fn section(&mut self, key: &'static str) -> Option<Section<'r, 'd>> {
        let value = self.value(key)?;
        self.section_of(self.place_of(key), value)
    }

    fn section_of(&self, place: String, value: &'d Value<'d>) -> Option<Section<'r, 'd>> {
        let at = value.span().start;
        match value.get_ref() {
            DeValue::Table(table) => Some(Section { notes: self.notes, place, at, table, asked: Vec::new() }),
            other => {
                self.notes.add(at, &place, format!("{} is not a table", quoted(other)), "a table of keys");
                None
            }
        }
    }

    /// Reads tables of which there may be several, `[[key]]`, or one, `[key]`.
    pub(super) fn sections(&mut self, key: &'static str) -> Vec<Section<'r, 'd>> {
        let Some(value) = self.value(key) else { return Vec::new() };
        match value.get_ref() {
            DeValue::Array(items) => items
                .iter()
                .enumerate()
                .filter_map(|(index, item)| self.section_of(format!("{}[{index}]", self.place_of(key)), item))
                .collect(),
            _ => self.section_of(self.place_of(key), value).into_iter().collect(),
        }
    }

    /// Reads all keys with positive numbers, whatever their names.
    pub(super) fn all_numbers(self) -> BTreeMap<String, f64> {
        let number = |(key, value): (&'d Spanned<_>, &'d Value<'d>)| {
            let key: &str = AsRef::<str>::as_ref(key.get_ref());
            Some((key.to_owned(), self.checked_number(&cut(key), value, Rule::Positive)?))
        };
        self.table.iter().filter_map(number).collect()
    }

    /// Returns all keys, for tables whose keys are names.
    pub(super) fn keys(&self) -> impl Iterator<Item = &'d str> {
        self.table.keys().map(|key| AsRef::<str>::as_ref(key.get_ref()))
    }

    /// Reads the number of a key of such a table.
    pub(super) fn number_of_key(&self, key: &str, rule: Rule) -> Option<f64> {
        self.checked_number(key, self.table.get(key)?, rule)
    }

    /// Adds a problem for every key that was never asked for.
    pub(super) fn finish(self) {
        for key in self.table.keys() {
            let name: &str = AsRef::<str>::as_ref(key.get_ref());
            if !self.asked.contains(&name) {
                let what = format!("unknown key{}", nearest(name, &self.asked));
                self.notes.add(key.span().start, &self.place_of(&cut(name)), what, one_of(&self.asked));
            }
        }
    }
}

/// Returns the message for an unknown name, with the nearest known one.
pub(super) fn unknown(name: &str, names: &[&str]) -> String {
    format!("\"{}\" is not known{}", cut(name), nearest(name, names))
}

/// Returns all names, separated by commas.
pub(super) fn one_of(names: &[&str]) -> String {
    names.join(", ")
}

fn nearest(name: &str, names: &[&str]) -> String {
    // Comparison takes the product of both lengths.
    let name = cut(name);
    let likeness = |candidate: &&&str| normalized_damerau_levenshtein(&name, candidate);
    let best = names.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    best.map_or_else(String::new, |best| format!("; the nearest is {best}"))
}

/// Cuts and escapes a text for a message.
fn cut(text: &str) -> String {
    let short: String = text.chars().take(LONGEST_QUOTE).flat_map(char::escape_debug).collect();
    if text.chars().nth(LONGEST_QUOTE).is_some() { format!("{short}...") } else { short }
}

/// Formats a value for a message.
pub(super) fn quoted(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => format!("\"{}\"", cut(text)),
        DeValue::Integer(number) => cut(number.as_str()),
        DeValue::Float(number) => cut(number.as_str()),
        DeValue::Boolean(flag) => flag.to_string(),
        DeValue::Datetime(date) => date.to_string(),
        DeValue::Array(_) => "a list".to_owned(),
        DeValue::Table(_) => "a table".to_owned(),
    }
}

fn number_of(value: &DeValue<'_>) -> Option<f64> {
    let number = match value {
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix()).ok()? as f64,
        DeValue::Float(number) => number.as_str().parse::<f64>().ok()?,
        _ => return None,
    };
    number.is_finite().then_some(number)
}

/// Returns a whole number from 1 that fits a `u32`; `None` for anything else.
pub(super) fn count_of(value: &DeValue<'_>) -> Option<usize> {
    let DeValue::Integer(number) = value else { return None };
    let number = i64::from_str_radix(number.as_str(), number.radix()).ok()?;
    u32::try_from(number).ok().filter(|&number| number > 0).map(|number| number as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_long_is_cut_and_what_is_not_printable_is_escaped() {
        assert_eq!(cut(&"x".repeat(50)), format!("{}...", "x".repeat(40)));
        assert_eq!(cut("a\u{1b}[1m"), "a\\u{1b}[1m");
    }
}
