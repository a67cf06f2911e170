//! The sources of a configuration, RUN.toml and the `--set` arguments, as JSON values with their origin.
//!
//! Nothing here knows the meaning of a key, except that a bare word given to `--set` is a string for keys that take text. Later
//! sources replace earlier ones; a key and its alias are the same key.

use std::collections::BTreeMap;
use std::sync::Arc;

use lockstep_plan::Plan;
use serde_json::{Map, Value};
use toml::de::{DeTable, DeValue};

use crate::foreign_names::{self, Answer};
use crate::keys::{ALIASES, KEYS, MODEL_SOURCES, SECTIONS, values_of_plan};
use crate::nearest::{all_sections, nearest_key, nearest_section};
use crate::problem::{Origin, Problem};
use crate::value::shortened;

/// Deepest nesting of a value.
const MAX_DEPTH: usize = 32;

/// A value and its source.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) value: Value,
    pub(crate) origin: Origin,
}

/// Status of a value in another tool's configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImportedFrom {
    /// The user wrote it there; a run that sets another value contradicts it.
    User,
    /// It is the other tool's default or derived from other values; a value of the run replaces it.
    Rule,
}

/// A value from another tool's configuration.
#[derive(Debug, Clone)]
pub struct Imported {
    /// The key, `section.key`.
    pub key: String,
    /// The value, as JSON.
    pub value: Value,
    /// The file and the line that sets the value; line 0 for the file as a whole.
    pub place: (String, usize),
    /// Status of the value in that file.
    pub from: ImportedFrom,
}

/// The values of all sources together, by `section.key`.
#[derive(Debug, Default)]
pub(crate) struct Entries(pub(crate) BTreeMap<String, Entry>);

impl FromIterator<(String, Value, Origin)> for Entries {
    fn from_iter<I: IntoIterator<Item = (String, Value, Origin)>>(values: I) -> Self {
        Self(values.into_iter().map(|(key, value, origin)| (key, Entry { value, origin })).collect())
    }
}

impl Entries {
    /// Adds a TOML document, which messages call `name`.
    ///
    /// If its syntax is broken nothing is added: what could be read of it would only cause follow-up errors.
    pub(crate) fn add_document(&mut self, text: &str, name: &str, problems: &mut Vec<Problem>) {
        let name: Arc<str> = name.into();
        let line_starts: Vec<usize> = text.match_indices('\n').map(|(at, _)| at + 1).collect();
        let origin_at = |offset: usize| Origin::File {
            name: name.clone(),
            line: line_starts.partition_point(|&start| start <= offset) + 1,
        };
        let (document, errors) = DeTable::parse_recoverable(text);
        if !errors.is_empty() {
            let first = problems.len();
            for error in errors {
                let origin = origin_at(error.span().map_or(text.len(), |span| span.start));
                // Further errors on the same line are consequences of the first.
                if problems[first..].iter().all(|problem| problem.origin != origin) {
                    problems.push(Problem::new(origin, "", clipped_lines(&error.to_string()), ""));
                }
            }
            return;
        }
        for (section, content) in document.get_ref() {
            let (origin, section) = (origin_at(section.span().start), section.get_ref());
            let DeValue::Table(table) = content.get_ref() else {
                problems.push(not_a_section(section, origin));
                continue;
            };
            if !SECTIONS.iter().any(|known| known.name == section) {
                problems.push(unknown_section(section, origin));
                continue;
            }
            for (key, value) in table {
                let origin = origin_at(key.span().start);
                let written = format!("{section}.{}", key.get_ref());
                match to_json(value.get_ref(), MAX_DEPTH) {
                    Ok(value) => {
                        for (written, value) in flattened(written, value) {
                            self.add_new(&written, Entry { value, origin: origin.clone() }, problems);
                        }
                    }
                    Err(what) => problems.push(Problem::new(origin, written, what, "")),
                }
            }
        }
    }

    /// Adds a value of another tool's configuration to those of a document.
    pub(crate) fn add_imported(&mut self, imported: &Imported, problems: &mut Vec<Problem>) {
        let Imported { key, value, place: (name, line), from } = imported;
        let origin = Origin::File { name: name.as_str().into(), line: *line };
        match self.0.get(key) {
            None => self.add_known(key.clone(), value.clone(), origin),
            Some(said) if *from == ImportedFrom::User && !is_same(&said.value, value) => {
                let what = format!("is {value} here and {} in {}", said.value, said.origin);
                let allowed = format!("the same in both, or one of them; {name} may say \"auto\"");
                problems.push(Problem::new(origin, key, what, allowed));
            }
            Some(_) => {}
        }
    }

    /// Adds the keys of a plan, which replace those of a document. Messages call the plan `name`.
    pub(crate) fn add_plan(&mut self, name: &str, plan: &Plan) {
        let mut plan = plan.clone();
        if plan.mesh.shard * plan.mesh.context == 1 {
            // Nothing is sharded, so neither weights nor gradients are sent in quantized form.
            (plan.quantize_weights, plan.quantize_gradients) = (None, None);
        }
        for (key, value) in values_of_plan(&plan) {
            match value {
                Value::Null => drop(self.0.remove(key)),
                value => self.add_known(key.to_owned(), value, Origin::Plan(name.into())),
            }
        }
    }

    /// Adds the value of a key, replacing an earlier one.
    fn add_known(&mut self, key: String, value: Value, origin: Origin) {
        self.0.insert(key, Entry { value, origin });
    }

    /// Adds an entry of a document, which must not have both a key and its alias.
    fn add_new(&mut self, written: &str, entry: Entry, problems: &mut Vec<Problem>) {
        let name = canonical(written);
        if let Some(first) = self.0.get(name) {
            let what = format!("is another name of {name}, which {} sets already", first.origin);
            problems.push(Problem::new(entry.origin, written, what, "one of the two"));
            return;
        }
        self.0.insert(name.to_owned(), entry);
    }

    /// Adds a `--set` argument: `section.key=VALUE`, VALUE in TOML or a bare word. An argument that names the model overrides
    /// another name in a file.
    pub(crate) fn add_argument(&mut self, argument: &str, problems: &mut Vec<Problem>) {
        let origin = Origin::Argument(shortened(argument).into());
        let Some((written, value)) = argument.split_once('=') else {
            problems.push(Problem::new(origin, "", "has no '='", "--set section.key=VALUE"));
            return;
        };
        let (written, value) = (written.trim(), value.trim());
        let name = canonical(written);
        let parts: Vec<&str> = name.split('.').collect();
        if parts.len() < 2 || parts.len() > MAX_DEPTH || parts.iter().any(|part| part.is_empty()) {
            let near = nearest_key(name).map_or(String::new(), |near| format!("; the nearest is {near}"));
            let what = format!("is not the name of a key{near}");
            let allowed = sectionless(name).unwrap_or("--set section.key=VALUE".to_owned());
            problems.push(Problem::new(origin, shortened(name), what, allowed));
            return;
        }
        if !SECTIONS.iter().any(|known| known.name == parts[0]) {
            problems.push(unknown_section(parts[0], origin));
            return;
        }
        let takes_text = KEYS.iter().any(|key| key.name == name && key.value_type.is_text());
        let value = match argument_value(value, takes_text) {
            Ok(value) => value,
            Err(what) => {
                problems.push(Problem::new(origin, name, what, "a TOML value or a bare word"));
                return;
            }
        };
        if MODEL_SOURCES.contains(&name) {
            self.0.retain(|key, entry| {
                !MODEL_SOURCES.contains(&key.as_str()) || matches!(entry.origin, Origin::Argument(_))
            });
        }
        match parts[..] {
            // Overrides of the model's configuration may be nested: `model.rope_scaling.factor=8.0`.
            ["model", key, ref path @ ..] if !path.is_empty() => {
                let entry = self
                    .0
                    .entry(format!("model.{key}"))
                    .or_insert_with(|| Entry { value: Value::Object(Map::new()), origin: origin.clone() });
                match insert_at(&mut entry.value, path, value) {
                    Ok(()) => entry.origin = origin,
                    Err(what) => problems.push(Problem::new(origin, name, what, "")),
                }
            }
            _ => {
                for (name, value) in flattened(name.to_owned(), value) {
                    self.0.insert(name, Entry { value, origin: origin.clone() });
                }
            }
        }
    }
}

/// Returns true if two values are equal, with integers and floats compared as numbers.
fn is_same(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().is_some_and(|a| b.as_f64() == Some(a))
}

/// Splits a table into one value per entry if `name.KEY` is a key; otherwise returns the value as it is.
fn flattened(name: String, value: Value) -> Vec<(String, Value)> {
    let is_group =
        || KEYS.iter().any(|key| key.name.strip_prefix(&name).is_some_and(|rest| rest.starts_with('.')));
    match value {
        Value::Object(table) if is_group() => {
            table.into_iter().map(|(key, value)| (format!("{name}.{key}"), value)).collect()
        }
        value => vec![(name, value)],
    }
}

/// Clips the lines of a message that quotes a line of the file.
fn clipped_lines(message: &str) -> String {
    let clip = |line: &str| line.chars().take(200).collect::<String>();
    message.trim_end().lines().map(clip).collect::<Vec<_>>().join("\n")
}

/// Returns the name under which a key is stored.
fn canonical(written: &str) -> &str {
    if let Some((_, name)) = ALIASES.iter().find(|(alias, _)| *alias == written) {
        return name;
    }
    match foreign_names::of_key(written) {
        Some(Answer::Is(name)) if written.contains('.') => name,
        _ => written,
    }
}

/// Returns what to write for a key that was given without a section.
fn sectionless(name: &str) -> Option<String> {
    let own = KEYS.iter().find(|key| key.key() == name).map(|key| Answer::Is(key.name));
    let ours = match own.or_else(|| foreign_names::of_key(name))? {
        Answer::Write(sentence) => return Some(sentence.to_owned()),
        Answer::Is(ours) => ours,
    };
    let (section, key) = ours.split_once('.')?;
    Some(format!("{key}, below the line [{section}]; as an argument --set {ours}=VALUE"))
}

fn not_a_section(name: &str, origin: Origin) -> Problem {
    if SECTIONS.iter().any(|known| known.name == name) {
        let what = "is a section, not a value";
        return Problem::new(origin, name, what, format!("the line [{name}] and its keys below it"));
    }
    let near = nearest_key(name).map_or(String::new(), |near| format!("; the nearest is {near}"));
    let what = format!("unknown key outside any section{near}");
    let allowed = sectionless(name).unwrap_or_else(|| format!("the sections {}", all_sections()));
    Problem::new(origin, shortened(name), what, allowed)
}

fn unknown_section(name: &str, origin: Origin) -> Problem {
    let what = match nearest_section(name) {
        Some(near) => format!("unknown section; the nearest is [{near}]"),
        None => "unknown section".to_owned(),
    };
    Problem::new(origin, format!("[{}]", shortened(name)), what, format!("the sections {}", all_sections()))
}

/// Parses the VALUE of a `--set` argument. Text that does not begin like a structured TOML value and is none is a bare word.
fn argument_value(text: &str, takes_text: bool) -> Result<Value, String> {
    let quoted = text.starts_with(['"', '\'', '[', '{']);
    let (value, errors) = DeValue::parse_recoverable(text);
    let parsed = match errors.into_iter().next() {
        Some(error) => Err(format!("broken TOML value: {}", error.message())),
        None => to_json(value.get_ref(), MAX_DEPTH),
    };
    match parsed {
        Ok(value @ Value::String(_)) => Ok(value),
        _ if takes_text && !quoted => Ok(Value::String(text.to_owned())),
        Ok(value) => Ok(value),
        // A number or date that no key accepts is no bare word either: `1e999`, `2020-01-01`.
        Err(what) if quoted || text.is_empty() || text.starts_with(|c: char| c.is_ascii_digit()) => Err(what),
        Err(_) => Ok(Value::String(text.to_owned())),
    }
}

/// Inserts `value` at `path` within tables, creating those that are missing.
fn insert_at(tree: &mut Value, path: &[&str], value: Value) -> Result<(), String> {
    let Some((first, rest)) = path.split_first() else {
        *tree = value;
        return Ok(());
    };
    match tree {
        Value::Object(table) => {
            let child = table.entry(*first).or_insert_with(|| Value::Object(Map::new()));
            insert_at(child, rest, value)
        }
        other => Err(format!("{other} is set there, which is not a table and has no key \"{first}\"")),
    }
}

/// Converts a TOML value to JSON, or returns why it cannot.
fn to_json(value: &DeValue<'_>, depth: usize) -> Result<Value, String> {
    let Some(depth) = depth.checked_sub(1) else {
        return Err(format!("nests deeper than {MAX_DEPTH} levels"));
    };
    match value {
        DeValue::String(text) => Ok(Value::String(text.to_string())),
        DeValue::Boolean(flag) => Ok(Value::Bool(*flag)),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .map(Value::from)
            .map_err(|_| format!("the integer {} does not fit 64 bits", shortened(&number.to_string()))),
        DeValue::Float(number) => number
            .as_str()
            .parse()
            .ok()
            .and_then(serde_json::Number::from_f64)
            .map(Value::Number)
            .ok_or_else(|| format!("{} is not a finite number", shortened(number.as_str()))),
        DeValue::Datetime(date) => Err(format!("the date {date} is not a value that any key takes")),
        DeValue::Array(items) => items
            .iter()
            .map(|item| to_json(item.get_ref(), depth))
            .collect::<Result<_, _>>()
            .map(Value::Array),
        DeValue::Table(table) => table
            .iter()
            .map(|(key, value)| Ok((key.get_ref().to_string(), to_json(value.get_ref(), depth)?)))
            .collect::<Result<_, _>>()
            .map(Value::Object),
    }
}
