//! The classes of a classifier: their names in `id2label`, or their number alone.

use serde_json::{Map, Value, json};

use super::limits::Checks;
use super::reader::Reader;

/// Classes of a classifier, each with a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Classes {
    /// Names in the order of their indices (`id2label`).
    pub names: Vec<String>,
}

/// Most classes of a classifier.
const CLASSES: usize = 1 << 20;
/// Keys of `config.json` that hold the names.
const NAMES: [&str; 2] = ["id2label", "label2id"];

impl Classes {
    /// Returns `count` classes with the names that transformers gives them.
    pub fn numbered(count: usize) -> Self {
        // A number out of range is reported by the checks, without its names.
        Self { names: (0..count.min(CLASSES + 1)).map(|class| format!("LABEL_{class}")).collect() }
    }

    /// Returns the number of classes.
    pub fn count(&self) -> usize {
        self.names.len()
    }

    /// Reads the names or the number of classes; by default there are `default`.
    pub(super) fn read(reader: &mut Reader<'_>, default: usize) -> Self {
        match reader.text("problem_type") {
            None | Some("single_label_classification") => {}
            Some(_) => reader.unsupported("problem_type", "\"single_label_classification\" or null"),
        }
        let count = reader.optional_size("num_labels").given();
        let names = reader.table("id2label").map(names_by_index);
        match (names, count) {
            (Some(None), _) => {
                reader.unsupported("id2label", "a name for each of the indices \"0\", \"1\" and so on");
                Self::numbered(default)
            }
            (Some(Some(names)), Some(count)) if names.len() != count => {
                let given = names.len();
                reader.conflict(format!("`id2label` names {given} classes and `num_labels` is {count}"));
                Self { names }
            }
            (Some(Some(names)), _) => Self { names },
            (None, count) => Self::numbered(count.unwrap_or(default)),
        }
    }

    /// Writes the names, from which transformers takes the number.
    pub(super) fn write(&self, table: &mut Map<String, Value>) {
        let index = |(index, name): (usize, &String)| (index.to_string(), json!(name));
        let names: Map<String, Value> = self.names.iter().enumerate().map(index).collect();
        let number = |(index, name): (usize, &String)| (name.clone(), json!(index));
        let indices: Map<String, Value> = self.names.iter().enumerate().map(number).collect();
        table.insert("id2label".to_owned(), Value::Object(names));
        table.insert("label2id".to_owned(), Value::Object(indices));
    }

    /// Removes the names of a table if `overrides` give another number of classes or other names.
    pub(crate) fn forget(table: &mut Map<String, Value>, overrides: &Map<String, Value>) {
        if overrides.contains_key("num_labels") || overrides.contains_key("id2label") {
            NAMES.iter().for_each(|key| drop(table.remove(*key)));
        }
    }

    pub(super) fn check(&self, checks: &mut Checks) {
        let count = self.count();
        checks.size("num_labels", count, CLASSES);
        if count == 1 {
            checks
                .conflict("`num_labels` = 1 is a regression; a classifier has 2 classes or more".to_owned());
        }
    }
}

/// Returns names in the order of their indices; `None` unless each index from 0 on has a name.
fn names_by_index(table: &Map<String, Value>) -> Option<Vec<String>> {
    (0..table.len()).map(|index| table.get(&index.to_string())?.as_str().map(str::to_owned)).collect()
}
