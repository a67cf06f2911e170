//! The reader: takes entries one key at a time, converts each to its type and records what does not fit.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use crate::declare::{KeyReader, Rules};
use crate::foreign_names::{self, Answer};
use crate::keys::SECTIONS;
use crate::nearest::{is_misspelt_model_key, keys_of, nearest_key};
use crate::problem::{Origin, Problem};
use crate::sources::{Entries, Entry};
use crate::value::{InvalidValue, Readable, numbers_in, shortened};

/// The entries that are not read yet, with the origins and problems of those that are.
pub(crate) struct Reader<'p> {
    entries: BTreeMap<String, Entry>,
    /// Source of each given key.
    pub(crate) origins: BTreeMap<String, Origin>,
    /// Keys whose value was refused; a default stands in for them, so rules between values skip them.
    pub(crate) refused: BTreeSet<String>,
    pub(crate) problems: &'p mut Vec<Problem>,
}

impl<'p> Reader<'p> {
    pub(crate) fn new(entries: Entries, problems: &'p mut Vec<Problem>) -> Self {
        Self { entries: entries.0, origins: BTreeMap::new(), refused: BTreeSet::new(), problems }
    }

    /// Reports every entry that was not taken.
    pub(crate) fn refuse_rest(&mut self) {
        for (name, entry) in std::mem::take(&mut self.entries) {
            let (section, key) = name.split_once('.').unwrap_or((&name, ""));
            let known = SECTIONS.iter().filter(|known| known.name == section);
            let (what, allowed) = match known.flat_map(|known| known.later).any(|later| *later == key) {
                true => ("is not supported yet".to_owned(), format!("in [{section}] {}", keys_of(section))),
                false => unknown_key(&name, section),
            };
            self.problems.push(Problem::new(entry.origin, shortened(&name), what, allowed));
        }
    }
}

impl KeyReader for Reader<'_> {
    fn take<T: Readable>(&mut self, name: &str, default: T, rules: Rules) -> T {
        let Some(Entry { value, origin }) = self.entries.remove(name) else { return default };
        self.origins.insert(name.to_owned(), origin.clone());
        let habit =
            if T::read(&value).is_err() { foreign_names::of_value(name, T::TYPE, &value) } else { None };
        let value = match habit {
            Some(Answer::Is(ours)) => Value::from(ours),
            _ => value,
        };
        let value_type = rules.narrowed(T::TYPE);
        let misfit = match T::read(&value) {
            Ok(_) if !value_type.has_word(&value) => {
                InvalidValue { what: format!("is the string {value}"), allowed: value_type.to_string() }
            }
            Ok(read) if numbers_in(&value).into_iter().all(|number| rules.admits(number)) => return read,
            Ok(_) => InvalidValue { what: format!("is {value}"), allowed: format!("{value_type} {rules}") },
            Err(misfit) => match habit {
                Some(Answer::Write(sentence)) => InvalidValue { allowed: sentence.to_owned(), ..misfit },
                _ => misfit,
            },
        };
        self.refused.insert(name.to_owned());
        self.problems.push(Problem::new(origin, name, misfit.what, misfit.allowed));
        default
    }

    fn take_rest(&mut self, section: &str) -> Map<String, Value> {
        let mut rest = Map::new();
        let prefix = format!("{section}.");
        let names: Vec<String> =
            self.entries.keys().filter(|name| name.starts_with(&prefix)).cloned().collect();
        for name in names {
            let key = &name[prefix.len()..];
            if is_misspelt_model_key(key) || foreign_names::of_key(&name).is_some() {
                continue;
            }
            if let Some(entry) = self.entries.remove(&name) {
                rest.insert(key.to_owned(), entry.value);
                self.origins.insert(name, entry.origin);
            }
        }
        rest
    }
}

/// Returns the message on an unknown key: the answer to another tool's name, else the most similar key if there is one.
fn unknown_key(name: &str, section: &str) -> (String, String) {
    if let Some(Answer::Write(sentence)) = foreign_names::of_key(name) {
        return ("is no key here".to_owned(), sentence.to_owned());
    }
    let near = nearest_key(name).map_or(String::new(), |near| format!("; the nearest is {near}"));
    (format!("unknown key{near}"), format!("in [{section}] {}", keys_of(section)))
}
