//! A reader of JSON tables that remembers which keys were read.
//!
//! A key that was neither read nor listed as harmless is unknown. Problems are collected; a default replaces an
//! unusable value so that reading can continue.

use serde_json::{Map, Value};

use super::keys::{Fixed, HARMLESS_KEYS};
use crate::error::{ConfigProblem, nearest};

/// A table, the keys read so far, and the problems found so far.
pub(super) struct Reader<'a> {
    table: &'a Map<String, Value>,
    /// Prefix of keys in problems: empty, or `rope_scaling.` and the like.
    prefix: &'static str,
    known: Vec<&'static str>,
    problems: Vec<ConfigProblem>,
}

/// An optional entry of a table.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Entry<T> {
    /// The key is absent: the family's default applies.
    Absent,
    /// The key is present with `null`: the value is derived from others.
    Null,
    /// The key has a value.
    Given(T),
}

impl<T> Entry<T> {
    /// Returns the value, for keys where absence and `null` mean the same.
    pub(super) fn given(self) -> Option<T> {
        match self {
            Self::Given(value) => Some(value),
            Self::Absent | Self::Null => None,
        }
    }
}

impl<'a> Reader<'a> {
    pub(super) fn new(table: &'a Map<String, Value>, prefix: &'static str) -> Self {
        Self { table, prefix, known: Vec::new(), problems: Vec::new() }
    }

    /// Returns the value of `key`; `null` counts as absent.
    pub(super) fn value(&mut self, key: &'static str) -> Option<&'a Value> {
        self.known.push(key);
        self.table.get(key).filter(|value| !value.is_null())
    }

    /// Returns a whole number, or `default`.
    pub(super) fn size(&mut self, key: &'static str, default: usize) -> usize {
        self.optional_size(key).given().unwrap_or(default)
    }

    /// Returns a whole number by `key` or its alias, or `default`. If both keys are present, they must agree.
    pub(super) fn aliased_size(&mut self, key: &'static str, alias: &'static str, default: usize) -> usize {
        match (self.optional_size(key), self.optional_size(alias)) {
            (Entry::Given(value), Entry::Given(other)) if value != other => {
                self.conflict(format!("`{key}` = {value} and its alias `{alias}` = {other} differ"));
                value
            }
            (value, other) => value.given().or(other.given()).unwrap_or(default),
        }
    }

    /// Returns a whole number that may be derived from others if it is `null`.
    pub(super) fn optional_size(&mut self, key: &'static str) -> Entry<usize> {
        self.entry(key, "a whole number", |value| value.as_u64().and_then(|size| usize::try_from(size).ok()))
    }

    /// Returns a list of whole numbers; empty if the key is absent.
    pub(super) fn sizes(&mut self, key: &'static str) -> Vec<usize> {
        let convert = |value: &Value| -> Option<Vec<usize>> {
            let numbers = value.as_array()?.iter();
            numbers.map(|number| number.as_u64().and_then(|size| usize::try_from(size).ok())).collect()
        };
        self.entry(key, "a list of whole numbers", convert).given().unwrap_or_default()
    }

    /// Returns a number, or `default`.
    pub(super) fn number(&mut self, key: &'static str, default: f64) -> f64 {
        self.optional_number(key).unwrap_or(default)
    }

    /// Returns a number, if there is one.
    pub(super) fn optional_number(&mut self, key: &'static str) -> Option<f64> {
        self.entry(key, "a number", Value::as_f64).given()
    }

    /// Returns a number; `None` for `null`, and `default` if the key is absent.
    pub(super) fn number_or_null(&mut self, key: &'static str, default: Option<f64>) -> Option<f64> {
        match self.entry(key, "a number", Value::as_f64) {
            Entry::Given(value) => Some(value),
            Entry::Null => None,
            Entry::Absent => default,
        }
    }

    /// Returns `true` or `false`, or `default`.
    pub(super) fn flag(&mut self, key: &'static str, default: bool) -> bool {
        self.entry(key, "true or false", Value::as_bool).given().unwrap_or(default)
    }

    /// Returns a string, if there is one.
    pub(super) fn text(&mut self, key: &'static str) -> Option<&'a str> {
        self.entry(key, "a string", Value::as_str).given()
    }

    /// Returns a table, if there is one.
    pub(super) fn table(&mut self, key: &'static str) -> Option<&'a Map<String, Value>> {
        self.entry(key, "a table", Value::as_object).given()
    }

    /// Returns the class that transformers builds: the first entry of `architectures`, if there is one.
    pub(super) fn architecture(&mut self) -> Option<&'a str> {
        let first = self.value("architectures").and_then(|names| names.as_array()?.first())?;
        first.as_str()
    }

    /// Returns a token id, if there is one. Negative ids, which some files use for "none", count as none.
    pub(super) fn token(&mut self, key: &'static str) -> Option<u32> {
        self.tokens(key).first().copied()
    }

    /// Returns the ids of a token id or a list of them; negative ids are dropped.
    pub(super) fn tokens(&mut self, key: &'static str) -> Vec<u32> {
        let convert = |value: &Value| match value.as_i64() {
            Some(id) if id < 0 => Some(None),
            Some(id) => u32::try_from(id).ok().map(Some),
            None => None,
        };
        let ids: Option<Vec<Option<u32>>> = match self.value(key) {
            None => return Vec::new(),
            Some(Value::Array(ids)) => ids.iter().map(convert).collect(),
            Some(id) => convert(id).map(|id| vec![id]),
        };
        ids.map(|ids| ids.into_iter().flatten().collect()).unwrap_or_else(|| {
            self.wrong_type(key, "a token id or a list of token ids");
            Vec::new()
        })
    }

    /// Accepts keys of one family that change no number.
    pub(super) fn harmless(&mut self, keys: &[&'static str]) {
        self.known.extend(keys);
    }

    /// Requires that each key of `fixed` is absent or has a supported value.
    pub(super) fn fixed(&mut self, fixed: &'static [Fixed]) {
        for Fixed { key, allowed, supported } in fixed {
            if let Some(value) = self.value(key)
                && !allowed.contains(&value.to_string().as_str())
            {
                self.unsupported(key, *supported);
            }
        }
    }

    pub(super) fn unsupported(&mut self, key: &'static str, supported: impl Into<String>) {
        let (key, value) = (self.full(key), self.shown(key));
        self.problem(ConfigProblem::Unsupported { key, value, supported: supported.into() });
    }

    pub(super) fn conflict(&mut self, message: impl Into<String>) {
        self.problem(ConfigProblem::Conflict { message: message.into() });
    }

    pub(super) fn problem(&mut self, problem: ConfigProblem) {
        self.problems.push(problem);
    }

    /// Returns a number that has no default; if it is missing, records a problem and returns 1.
    pub(super) fn required_number(&mut self, key: &'static str) -> f64 {
        match self.entry(key, "a number", Value::as_f64) {
            Entry::Given(value) => value,
            Entry::Null | Entry::Absent => {
                if self.table.get(key).is_none_or(Value::is_null) {
                    let key = self.full(key);
                    self.problem(ConfigProblem::Missing { key, expected: "a number".into() });
                }
                1.0
            }
        }
    }

    /// Returns a list of numbers; a problem if the key is absent.
    pub(super) fn required_numbers(&mut self, key: &'static str) -> Vec<f64> {
        let convert =
            |value: &Value| -> Option<Vec<f64>> { value.as_array()?.iter().map(Value::as_f64).collect() };
        match self.entry(key, "a list of numbers", convert) {
            Entry::Given(numbers) => numbers,
            Entry::Null | Entry::Absent => {
                if self.table.get(key).is_none_or(Value::is_null) {
                    let key = self.full(key);
                    self.problem(ConfigProblem::Missing { key, expected: "a list of numbers".into() });
                }
                Vec::new()
            }
        }
    }

    /// Adds the problems that the reader of an inner table found.
    pub(super) fn absorb(&mut self, problems: Vec<ConfigProblem>) {
        self.problems.extend(problems);
    }

    /// Returns the problems found, without looking for unknown keys.
    pub(super) fn problems(self) -> Vec<ConfigProblem> {
        self.problems
    }

    /// Returns the problems found, including unknown keys. Harmless keys are accepted only at the top level, where
    /// the prefix is empty.
    pub(super) fn finish(mut self) -> Vec<ConfigProblem> {
        let harmless: &[&str] = if self.prefix.is_empty() { HARMLESS_KEYS } else { &[] };
        for key in self.table.keys() {
            if self.known.contains(&key.as_str()) || harmless.contains(&key.as_str()) {
                continue;
            }
            let nearest = nearest(key, self.known.iter().chain(harmless).copied());
            let key = format!("{}{}", self.prefix, shorten(key));
            self.problems.push(ConfigProblem::UnknownKey { key, nearest });
        }
        self.problems
    }

    fn entry<T>(
        &mut self,
        key: &'static str,
        expected: &'static str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Entry<T> {
        let Some(value) = self.value(key) else {
            return if self.table.contains_key(key) { Entry::Null } else { Entry::Absent };
        };
        match convert(value) {
            Some(converted) => Entry::Given(converted),
            None => {
                self.wrong_type(key, expected);
                Entry::Absent
            }
        }
    }

    fn wrong_type(&mut self, key: &'static str, expected: &'static str) {
        let (key, value) = (self.full(key), self.shown(key));
        self.problem(ConfigProblem::WrongType { key, value, expected });
    }

    fn full(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    fn shown(&self, key: &str) -> String {
        self.table.get(key).map(|value| shorten(&value.to_string())).unwrap_or_default()
    }
}

/// Returns at most 80 characters of `text`, so that a hostile file cannot fill the terminal.
pub(super) fn shorten(text: &str) -> String {
    const SHOWN_CHARACTERS: usize = 80;
    match text.char_indices().nth(SHOWN_CHARACTERS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}
