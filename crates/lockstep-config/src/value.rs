//! The types of keys, each with the one way to read it.
//!
//! TOML is first converted to JSON values (see `sources`), so that `--set`, a file and a checkpoint's manifest yield the same
//! values. Here those become Rust values, or a [`InvalidValue`].

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use lockstep_plan::{RecomputeRules, Wrap};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;

/// Type of a key's value, for messages and the manual.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueType {
    /// `true` or `false`.
    Flag,
    /// A whole number.
    Integer,
    /// A finite number.
    Number,
    /// Two finite numbers.
    NumberPair,
    /// Two whole numbers.
    IntegerPair,
    /// A single string.
    Text,
    /// A list of strings.
    TextList,
    /// A list of whole numbers.
    IntegerList,
    /// A list of strings and tables `{ path, weight }`.
    SourceList,
    /// A list of tables, each a transform of images.
    TransformList,
    /// Numbers by name.
    NumberTable,
    /// Strings by name.
    TextTable,
    /// Recomputation of blocks: a word for all, or a table of rules.
    Recompute,
    /// Grouping of units into flat parameters: a word, a table with a size, or a list of patterns.
    Wrap,
    /// One of a list of words.
    Choice {
        /// The words that are accepted.
        allowed: &'static [&'static str],
    },
}

impl ValueType {
    /// Returns true if a bare word or number given to `--set` is meant as a string.
    pub(crate) fn is_text(self) -> bool {
        matches!(self, Self::Text | Self::Choice { .. } | Self::Recompute | Self::Wrap)
    }

    /// Returns false for a word that is not among the choice's.
    pub(crate) fn has_word(self, value: &Value) -> bool {
        match (self, value.as_str()) {
            (Self::Choice { allowed }, Some(word)) => allowed.contains(&word),
            _ => true,
        }
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Flag => "true or false",
            Self::Integer => "an integer",
            Self::Number => "a number",
            Self::NumberPair => "two numbers, [a, b]",
            Self::IntegerPair => "two integers, [a, b]",
            Self::Text => "a string",
            Self::NumberTable => "a table of numbers, { \"a\" = 0.5, \"b\" = 2.0 }",
            Self::TextTable => "a table of strings, { a = \"b\", c = \"d\" }",
            Self::Recompute => {
                "\"none\", \"selective\", \"full\", or { default = \"none\", layers = [{ from = 0, to = 3, every = 2, mode = \"full\" }] }"
            }
            Self::Wrap => "\"block\", { min_parameters = 10000000 }, or [\"model.layers.*\"]",
            Self::TextList => "a list of strings, [\"a\", \"b\"]",
            Self::IntegerList => "a list of integers, [4, 3, 3]",
            Self::TransformList => "a list of tables, [{ kind = \"random_crop\", size = 32, padding = 4 }]",
            Self::SourceList => "a list of strings and tables, [\"a\", { path = \"b\", weight = 0.3 }]",
            Self::Choice { allowed } => return write!(f, "\"{}\"", allowed.join("\", \"")),
        })
    }
}

/// Reason why a value does not fit its key.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct InvalidValue {
    pub(crate) what: String,
    pub(crate) allowed: String,
}

impl InvalidValue {
    /// Returns the misfit of a value for which `what` holds, with the type that is allowed.
    pub(crate) fn of<T: Readable>(what: String) -> Self {
        Self { what, allowed: T::TYPE.to_string() }
    }
}

/// A type that a key of the configuration can have.
pub(crate) trait Readable: Serialize + Sized {
    /// The type, for messages and the manual.
    const TYPE: ValueType;

    /// Reads a value, or returns why it does not fit.
    fn read(value: &Value) -> Result<Self, InvalidValue>;

    /// Returns the value in the form of TOML and JSON.
    fn to_value(&self) -> Value {
        serde_json::to_value(self).unwrap_or_default()
    }
}

/// Returns the misfit of a value of the wrong type.
pub(crate) fn wrong_type<T: Readable>(value: &Value) -> InvalidValue {
    let found = match value {
        Value::Null => "nothing".to_owned(),
        Value::Bool(flag) => format!("the flag {flag}"),
        Value::Number(number) => format!("the number {number}"),
        Value::String(text) => format!("the string \"{}\"", shortened(text)),
        Value::Array(items) => format!("a list of {}", items.len()),
        Value::Object(_) => "a table".to_owned(),
    };
    InvalidValue::of::<T>(format!("is {found}"))
}

/// Returns the numbers in a value, which must be in the key's range.
pub(crate) fn numbers_in(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(items) => items.iter().flat_map(numbers_in).collect(),
        Value::Object(table) => table.values().flat_map(numbers_in).collect(),
        other => other.as_f64().into_iter().collect(),
    }
}

/// Returns at most 60 characters of a text, escaped, for a message.
pub(crate) fn shortened(text: &str) -> String {
    let mut out: String = text.chars().take(60).flat_map(char::escape_debug).collect();
    if text.chars().nth(60).is_some() {
        out.push_str("...");
    }
    out
}

impl Readable for bool {
    const TYPE: ValueType = ValueType::Flag;

    fn read(value: &Value) -> Result<Self, InvalidValue> {
        value.as_bool().ok_or_else(|| wrong_type::<Self>(value))
    }
}

impl Readable for u64 {
    const TYPE: ValueType = ValueType::Integer;

    fn read(value: &Value) -> Result<Self, InvalidValue> {
        if let Some(number) = value.as_u64() {
            return Ok(number);
        }
        let mut misfit = wrong_type::<Self>(value);
        match value.as_f64() {
            Some(number) if number < 0.0 => misfit.allowed = "an integer, 0 or more".to_owned(),
            // `1e3` is a float in TOML; say how to write it.
            Some(number) if number.fract() == 0.0 && number < 1e15 => {
                misfit.allowed = format!("an integer: write {number:.0}");
            }
            _ => {}
        }
        Err(misfit)
    }
}

impl Readable for usize {
    const TYPE: ValueType = ValueType::Integer;

    fn read(value: &Value) -> Result<Self, InvalidValue> {
        let number = u64::read(value)?;
        Self::try_from(number).map_err(|_| wrong_type::<Self>(value))
    }
}

impl Readable for u8 {
    const TYPE: ValueType = ValueType::Integer;

    fn read(value: &Value) -> Result<Self, InvalidValue> {
        // The key's range refuses larger numbers.
        u64::read(value).map(|number| Self::try_from(number).unwrap_or(Self::MAX))
    }
}

impl Readable for f64 {
    const TYPE: ValueType = ValueType::Number;

    fn read(value: &Value) -> Result<Self, InvalidValue> {
        value.as_f64().ok_or_else(|| wrong_type::<Self>(value))
    }
}

impl Readable for [f64; 2] {
    const TYPE: ValueType = ValueType::NumberPair;

    fn read(value: &Value) -> Result<Self, InvalidValue> {
        read_pair::<Self, f64>(value, Value::as_f64)
    }
}

impl Readable for [u64; 2] {
    const TYPE: ValueType = ValueType::IntegerPair;

    fn read(value: &Value) -> Result<Self, InvalidValue> {
        read_pair::<Self, u64>(value, Value::as_u64)
    }
}

/// Reads a list of two.
fn read_pair<Pair: Readable, T>(
    value: &Value,
    read: impl Fn(&Value) -> Option<T>,
) -> Result<[T; 2], InvalidValue> {
    let pair = value.as_array().map(Vec::as_slice);
    let Some([first, second]) = pair else { return Err(wrong_type::<Pair>(value)) };
    match (read(first), read(second)) {
        (Some(first), Some(second)) => Ok([first, second]),
        _ => Err(InvalidValue::of::<Pair>(format!("is {value}"))),
    }
}

impl Readable for String {
    const TYPE: ValueType = ValueType::Text;

    fn read(value: &Value) -> Result<Self, InvalidValue> {
        let text = value.as_str().ok_or_else(|| wrong_type::<Self>(value))?;
        if text.is_empty() || text.contains('\0') {
            return Err(InvalidValue {
                what: format!("is \"{}\"", shortened(text)),
                allowed: "a string that is not empty and holds no NUL".to_owned(),
            });
        }
        Ok(text.to_owned())
    }
}

impl Readable for PathBuf {
    const TYPE: ValueType = ValueType::Text;

    fn read(value: &Value) -> Result<Self, InvalidValue> {
        String::read(value).map(Self::from)
    }
}

impl Readable for Vec<String> {
    const TYPE: ValueType = ValueType::TextList;

    fn read(value: &Value) -> Result<Self, InvalidValue> {
        read_list::<Self, String>(&listed(value), String::read)
    }
}

impl Readable for Vec<usize> {
    const TYPE: ValueType = ValueType::IntegerList;

    fn read(value: &Value) -> Result<Self, InvalidValue> {
        read_list::<Self, usize>(value, usize::read)
    }
}

/// Returns a value as a list: a single string or table becomes a list of one.
fn listed(value: &Value) -> Cow<'_, Value> {
    match value {
        Value::String(_) | Value::Object(_) => Cow::Owned(Value::Array(vec![value.clone()])),
        _ => Cow::Borrowed(value),
    }
}

/// Reads every entry of a list.
fn read_list<List: Readable, T>(
    value: &Value,
    read: impl Fn(&Value) -> Result<T, InvalidValue>,
) -> Result<Vec<T>, InvalidValue> {
    let items = value.as_array().ok_or_else(|| wrong_type::<List>(value))?;
    let numbered = items.iter().enumerate();
    numbered
        .map(|(i, item)| {
            read(item).map_err(|InvalidValue { what, allowed }| InvalidValue {
                what: format!("entry {} {what}", i + 1),
                allowed,
            })
        })
        .collect()
}

/// An entry of `data.train`: files, and their weight in a blend.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum DataSource {
    /// A file, a directory or a glob pattern.
    Plain(String),
    /// Files with a weight.
    Weighted {
        /// A file, a directory or a glob pattern.
        path: String,
        /// Share of the samples.
        weight: f64,
    },
}

impl DataSource {
    /// Returns the file, directory or pattern.
    pub fn path(&self) -> &str {
        match self {
            Self::Plain(path) | Self::Weighted { path, .. } => path,
        }
    }
}

impl Readable for Vec<DataSource> {
    const TYPE: ValueType = ValueType::SourceList;

    fn read(value: &Value) -> Result<Self, InvalidValue> {
        read_list::<Self, DataSource>(&listed(value), |item| {
            let Value::Object(table) = item else { return String::read(item).map(DataSource::Plain) };
            let misfit =
                |what: String| InvalidValue { what, allowed: "{ path = \"a\", weight = 0.3 }".to_owned() };
            if let Some(key) = table.keys().find(|key| !["path", "weight"].contains(&key.as_str())) {
                return Err(misfit(format!("has the unknown key \"{}\"", shortened(key))));
            }
            let path = table.get("path").ok_or_else(|| misfit("has no path".to_owned()))?;
            let path =
                String::read(path).map_err(|found| misfit(format!("has a path that {}", found.what)))?;
            let Some(weight) = table.get("weight") else { return Ok(DataSource::Plain(path)) };
            match weight.as_f64() {
                Some(number) if number > 0.0 => Ok(DataSource::Weighted { path, weight: number }),
                _ => Err(misfit(format!("has the weight {weight}, which is no number above 0"))),
            }
        })
    }
}

impl Readable for BTreeMap<String, f64> {
    const TYPE: ValueType = ValueType::NumberTable;

    fn read(value: &Value) -> Result<Self, InvalidValue> {
        read_table::<Self, f64>(value, Value::as_f64)
    }
}

impl Readable for BTreeMap<String, String> {
    const TYPE: ValueType = ValueType::TextTable;

    fn read(value: &Value) -> Result<Self, InvalidValue> {
        read_table::<Self, String>(value, |value| value.as_str().map(str::to_owned))
    }
}

/// Reads every entry of a table.
fn read_table<Table: Readable, T>(
    value: &Value,
    read: impl Fn(&Value) -> Option<T>,
) -> Result<BTreeMap<String, T>, InvalidValue> {
    let table = value.as_object().ok_or_else(|| wrong_type::<Table>(value))?;
    let entry = |(name, value): (&String, &Value)| match read(value) {
        Some(read) => Ok((name.clone(), read)),
        None => Err(InvalidValue::of::<Table>(format!("\"{}\" is {value}", shortened(name)))),
    };
    table.iter().map(entry).collect()
}

impl Readable for RecomputeRules {
    const TYPE: ValueType = ValueType::Recompute;

    fn read(value: &Value) -> Result<Self, InvalidValue> {
        let word = |word: &str| ["none", "selective", "full"].contains(&word);
        match value {
            Value::String(text) if !word(text) => Err(wrong_type::<Self>(value)),
            Value::String(_) | Value::Object(_) => Self::deserialize(value).map_err(|error| {
                let what = shortened(&error.to_string());
                InvalidValue::of::<Self>(format!("is a table that says nothing: {what}"))
            }),
            _ => Err(wrong_type::<Self>(value)),
        }
    }
}

impl Readable for Wrap {
    const TYPE: ValueType = ValueType::Wrap;

    fn read(value: &Value) -> Result<Self, InvalidValue> {
        let is_readable = match value {
            Value::String(_) => true,
            Value::Object(table) => table.values().all(Value::is_u64),
            Value::Array(patterns) => patterns.iter().all(Value::is_string),
            _ => false,
        };
        if !is_readable {
            return Err(wrong_type::<Self>(value));
        }
        Self::deserialize(value).map_err(|error| InvalidValue::of::<Self>(shortened(&error.to_string())))
    }
}

/// A key that need not be set.
impl<T: Readable> Readable for Option<T> {
    const TYPE: ValueType = T::TYPE;

    fn read(value: &Value) -> Result<Self, InvalidValue> {
        T::read(value).map(Some)
    }
}

/// The tokenizer that turns text into ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenizerSource {
    /// Byte-level: each byte is a token.
    Bytes,
    /// A Hugging Face `tokenizer.json`.
    File(PathBuf),
}

impl Readable for TokenizerSource {
    const TYPE: ValueType = ValueType::Text;

    fn read(value: &Value) -> Result<Self, InvalidValue> {
        let text = String::read(value)?;
        Ok(if text == "bytes" { Self::Bytes } else { Self::File(text.into()) })
    }
}

impl Serialize for TokenizerSource {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Bytes => Path::new("bytes"),
            Self::File(path) => path,
        }
        .serialize(serializer)
    }
}
