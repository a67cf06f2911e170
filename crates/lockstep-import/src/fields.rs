//! The keys of a document in dotted form, each read with the type that its key requires.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use crate::document::Node;
use crate::draft::{AutoKey, Import, Read, Resolution};
use crate::format::Format;
use crate::problem::{Problem, Problems, shortened};
use crate::table::{Treatment, find, nearest};

/// A value with its line.
#[derive(Debug, Clone)]
pub(crate) struct Field {
    pub(crate) line: usize,
    pub(crate) node: Node,
}

/// The keys of a file, the keys read so far, and the problems found so far.
#[derive(Debug)]
pub(crate) struct Fields {
    pub(crate) file: String,
    fields: BTreeMap<String, Field>,
    taken: RefCell<BTreeSet<String>>,
    problems: RefCell<Vec<Problem>>,
}

impl Fields {
    pub(crate) fn new(file: &str, entries: Vec<(String, usize, Node)>) -> Self {
        let mut fields = BTreeMap::new();
        flatten("", entries, &mut fields);
        Self { file: file.to_owned(), fields, taken: RefCell::default(), problems: RefCell::default() }
    }

    /// Renames a key; returns false if the file lacks it. A key under both names is a problem.
    pub(crate) fn rename(&mut self, from: &str, to: &str) -> bool {
        let Some(field) = self.fields.remove(from) else { return false };
        if self.fields.contains_key(to) {
            self.refuse_at(
                field.line,
                from,
                format!("is another name of {to}, which is given too"),
                "one of the two",
            );
            return true;
        }
        self.fields.insert(to.to_owned(), field);
        true
    }

    /// Returns the keys of a section, relative to it.
    pub(crate) fn section(&self, name: &str) -> Vec<(String, Field)> {
        let prefix = format!("{name}.");
        let below = self
            .fields
            .iter()
            .filter_map(|(key, field)| Some((key.strip_prefix(&prefix)?.to_owned(), field.clone())));
        below.collect()
    }

    /// Returns the keys, sorted by name.
    pub(crate) fn keys(&self) -> impl Iterator<Item = (&str, &Field)> {
        self.fields.iter().map(|(key, field)| (key.as_str(), field))
    }

    /// Adds a key, as if it were in the file.
    pub(crate) fn insert(&mut self, key: &str, field: Field) {
        self.fields.insert(key.to_owned(), field);
    }

    /// Removes a key and returns its value.
    pub(crate) fn remove(&mut self, key: &str) -> Option<Field> {
        self.fields.remove(key)
    }

    /// Returns true if the file has the key or the section.
    pub(crate) fn has(&self, key: &str) -> bool {
        let prefix = format!("{key}.");
        self.fields.contains_key(key) || self.fields.keys().any(|known| known.starts_with(&prefix))
    }

    /// Returns true if the key has a value other than null and `"auto"`.
    pub(crate) fn is_given(&self, key: &str) -> bool {
        self.fields.get(key).is_some_and(|field| !field.node.is_null() && !is_auto(&field.node))
    }

    /// Returns true if the value is `"auto"`.
    pub(crate) fn is_auto(&self, key: &str) -> bool {
        self.fields.get(key).is_some_and(|field| is_auto(&field.node))
    }

    /// Returns the line of a key, from 1; 0 if the file lacks it.
    pub(crate) fn line(&self, key: &str) -> usize {
        self.fields.get(key).map_or(0, |field| field.line)
    }

    /// Returns those of `keys` that are `"auto"`, each with its line.
    pub(crate) fn autos<'k>(&self, keys: &[&'k str]) -> Vec<(&'k str, usize)> {
        keys.iter().filter(|key| self.is_auto(key)).map(|key| (*key, self.line(key))).collect()
    }

    /// Returns true if any value is `"auto"`.
    pub(crate) fn has_auto(&self) -> bool {
        self.fields.values().any(|field| is_auto(&field.node))
    }

    pub(crate) fn flag(&self, key: &str) -> Option<Read<bool>> {
        self.take(key, "true or false", Node::flag)
    }

    /// Returns `value`, with the place of a flag, if the flag is given and true.
    pub(crate) fn if_on<T>(&self, key: &str, value: T) -> Option<Read<T>> {
        self.flag(key).filter(|read| read.value).map(|read| read.map(|_| value))
    }

    pub(crate) fn number(&self, key: &str) -> Option<Read<f64>> {
        self.take(key, "a number, or \"auto\"", Node::number)
    }

    pub(crate) fn integer(&self, key: &str) -> Option<Read<u64>> {
        self.take(key, "an integer, 0 or more, or \"auto\"", Node::integer)
    }

    pub(crate) fn text(&self, key: &str) -> Option<Read<String>> {
        self.take(key, "a word", |node| node.text().map(str::to_owned))
    }

    pub(crate) fn pair(&self, key: &str) -> Option<Read<[f64; 2]>> {
        self.take(key, "two numbers, [a, b]", |node| match node {
            Node::List(items) => match &items[..] {
                [first, second] => Some([first.number()?, second.number()?]),
                _ => None,
            },
            _ => None,
        })
    }

    /// Removes the keys of a section that another problem makes irrelevant.
    pub(crate) fn forget(&mut self, section: &str) {
        let prefix = format!("{section}.");
        self.fields.retain(|key, _| !key.starts_with(&prefix));
    }

    /// Marks a key as read.
    pub(crate) fn mark(&self, key: &str) {
        self.taken.borrow_mut().insert(key.to_owned());
    }

    fn take<T>(&self, key: &str, allowed: &str, read: impl FnOnce(&Node) -> Option<T>) -> Option<Read<T>> {
        let field = self.fields.get(key)?;
        let is_first = self.taken.borrow_mut().insert(key.to_owned());
        if field.node.is_null() || is_auto(&field.node) {
            return None;
        }
        match read(&field.node) {
            Some(value) => {
                Some(Read { value, key: key.to_owned(), line: field.line, shown: field.node.shown() })
            }
            None => {
                if is_first {
                    self.refuse_at(field.line, key, format!("is {}", field.node.shown()), allowed);
                }
                None
            }
        }
    }

    /// Records a problem of a key.
    pub(crate) fn refuse(&self, key: &str, what: impl Into<String>, allowed: impl Into<String>) {
        self.refuse_at(self.line(key), key, what, allowed);
    }

    fn refuse_at(&self, line: usize, key: &str, what: impl Into<String>, allowed: impl Into<String>) {
        self.problems.borrow_mut().push(Problem::new(&self.file, line, &shortened(key), what, allowed));
    }

    /// Adds every key that sets nothing to `import`: the keys that are `"auto"`, and those without effect with their
    /// reason. Unknown and refused keys become problems.
    pub(crate) fn settle(&self, format: Format, import: &mut Import) {
        let mut reported = BTreeSet::new();
        for (key, Field { line, node }) in &self.fields {
            let Some(row) = find(format.keys(), key) else {
                if is_comment(key) {
                    import.idle(COMMENT, key);
                } else {
                    let near = nearest(format.keys(), key)
                        .map_or(String::new(), |near| format!("; the nearest is {near}"));
                    let allowed = format!("the keys in {}", format.page());
                    self.refuse_at(*line, key, format!("{UNKNOWN}{near}"), allowed);
                }
                continue;
            };
            let auto =
                |resolution| AutoKey { file: self.file.clone(), line: *line, key: key.clone(), resolution };
            match row.treatment {
                _ if node.is_null() => {}
                Treatment::To { .. } if import.names(&self.file, key) => {}
                Treatment::To { ours, .. } if is_auto(node) => {
                    import.autos.push(auto(Resolution::LeftTo(ours.split(", ").collect())));
                }
                Treatment::To { ours, .. } => {
                    debug_assert!(
                        self.taken.borrow().contains(key),
                        "{key} has a counterpart and nobody read it"
                    );
                    if ours.split(", ").all(|ours| import.value(ours).is_none()) {
                        import.idle(NOTHING_TO_SET, key);
                    }
                }
                Treatment::NoEffect(because) if is_auto(node) => {
                    import.idle(because, format!("{key} = \"auto\""));
                }
                Treatment::NoEffect(because) => import.idle(because, key),
                Treatment::Refused { accepts: Some(only), .. } if is_auto(node) => {
                    import.autos.push(auto(Resolution::Taken(only)));
                }
                Treatment::Refused { accepts, .. } if asks_for_nothing(node, accepts) => {
                    import.idle(AS_HERE, key);
                }
                Treatment::Refused { because, .. } => {
                    // A refused section is reported once.
                    if reported.insert(row.key) {
                        let name = row.key.strip_suffix(".*").unwrap_or(key);
                        let what = if name == key {
                            format!("is {}: {because}", node.shown())
                        } else {
                            because.to_owned()
                        };
                        self.refuse_at(*line, name, what, "");
                    }
                }
            }
        }
    }

    /// Fails with the problems, in the order of the file. If most keys are unknown, that is the only problem: the file is
    /// another tool's.
    pub(crate) fn outcome(&self, format: Format) -> Result<(), Problems> {
        let mut problems = self.problems.take();
        let unknown = problems.iter().filter(|problem| problem.what.starts_with(UNKNOWN)).count();
        if unknown > 3 && 2 * unknown > self.fields.len() {
            let what = format!(
                "{unknown} of its {} keys are unknown: this is no configuration of {}",
                self.fields.len(),
                format.tool()
            );
            let allowed = format!("the keys in {}", format.page());
            problems = vec![Problem::new(&self.file, 0, "", what, allowed)];
        }
        problems.sort_by_key(|problem| problem.line);
        if problems.is_empty() { Ok(()) } else { Err(Problems(problems)) }
    }
}

/// Beginning of the message about an unknown key.
const UNKNOWN: &str = "unknown key";
/// Reason for a key that is a comment.
const COMMENT: &str = "a comment";
/// Reason for a key that has a counterpart but does not set it.
const NOTHING_TO_SET: &str = "nothing to set: the run has it so already, or another key makes it moot";
/// Reason for a key with its only accepted value.
const AS_HERE: &str = "it is always so here";

/// Returns true if a key is a comment. JSON has no comments, so people write them as keys.
fn is_comment(key: &str) -> bool {
    let last = key.rsplit('.').next().unwrap_or(key);
    last.starts_with("_comment") || last.starts_with("//") || last == "comment" || key.starts_with('_')
}

/// Returns true if a value is the accepted one.
fn asks_for_nothing(node: &Node, accepted: Option<&str>) -> bool {
    let (Some(text), Some(accepted)) = (node.text(), accepted) else { return false };
    accepted.eq_ignore_ascii_case(text)
        || (accepted == "false" && node.flag() == Some(false))
        || (accepted == "true" && node.flag() == Some(true))
        || accepted.parse::<f64>().is_ok_and(|number| node.number() == Some(number))
}

fn is_auto(node: &Node) -> bool {
    node.text() == Some("auto")
}

fn flatten(prefix: &str, entries: Vec<(String, usize, Node)>, fields: &mut BTreeMap<String, Field>) {
    for (key, line, node) in entries {
        let name = if prefix.is_empty() { key } else { format!("{prefix}.{key}") };
        match node {
            Node::Map(inner) if !inner.is_empty() => flatten(&name, inner, fields),
            node => {
                fields.insert(name, Field { line, node });
            }
        }
    }
}
