//! The result of an import: settings with their origin, as TOML or as a table.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::Value;

use crate::fields::Read;

/// Sections in the order of the manual.
const SECTIONS: [&str; 8] =
    ["model", "data", "train", "optimizer", "schedule", "parallel", "checkpoint", "metrics"];
/// Longest line of a comment.
const WIDTH: usize = 110;

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The file says it.
    File {
        /// The file.
        file: String,
        /// Its line, from 1.
        line: usize,
        /// The other tool's key.
        key: String,
        /// The value as it stands there.
        shown: String,
    },
    /// The other tool's default, which is not ours.
    ForeignDefault(String),
    /// It follows from other values.
    Derived(String),
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File { file, line, key, shown } if *line > 0 => write!(f, "{file}:{line}: {key} = {shown}"),
            Self::File { key, shown, .. } => write!(f, "{key} = {shown}"),
            Self::ForeignDefault(whose) => write!(f, "default: {whose}"),
            Self::Derived(why) => write!(f, "derived: {why}"),
        }
    }
}

/// A key of RUN.toml and its value.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// `section.key`.
    pub key: &'static str,
    /// Its value.
    pub value: Value,
    /// Where it came from.
    pub origin: Origin,
}

impl Setting {
    /// The value as TOML.
    fn toml(&self) -> String {
        if let Some(number) =
            self.value.as_f64().filter(|number| self.value.is_f64() && *number != 0.0 && number.abs() < 1e-2)
        {
            return format!("{number:e}");
        }
        toml::Value::try_from(&self.value).map_or_else(|_| self.value.to_string(), |value| value.to_string())
    }

    /// The setting as an argument of `--set`.
    pub fn argument(&self) -> String {
        format!("{}={}", self.key, self.toml())
    }
}

/// What a file of another tool says, in our terms.
#[derive(Debug, Clone, Default)]
pub struct Import {
    /// The file, as the user named it.
    pub file: String,
    /// The other tool.
    pub tool: &'static str,
    /// Values, by section.
    pub settings: Vec<Setting>,
    /// Keys that change nothing here, by the reason.
    pub without_effect: BTreeMap<&'static str, Vec<String>>,
    /// What else differs from the other tool.
    pub remarks: Vec<String>,
}

impl Import {
    pub(crate) fn user(&mut self, file: &str, key: &'static str, read: Read<impl Into<Value>>) {
        let Read { value, key: theirs, line, shown } = read;
        let origin = Origin::File { file: file.to_owned(), line, key: theirs, shown };
        self.put(key, value.into(), origin);
    }

    pub(crate) fn foreign_default(
        &mut self,
        key: &'static str,
        value: impl Into<Value>,
        whose: impl Into<String>,
    ) {
        self.put(key, value.into(), Origin::ForeignDefault(whose.into()));
    }

    pub(crate) fn derived(&mut self, key: &'static str, value: impl Into<Value>, why: impl Into<String>) {
        self.put(key, value.into(), Origin::Derived(why.into()));
    }

    pub(crate) fn remark(&mut self, text: impl Into<String>) {
        let text = text.into();
        if !self.remarks.contains(&text) {
            self.remarks.push(text);
        }
    }

    /// The value of a key, if there is one.
    pub(crate) fn value(&self, key: &str) -> Option<&Value> {
        self.settings.iter().find(|setting| setting.key == key).map(|setting| &setting.value)
    }

    /// Sets a key; what the file says wins over what follows from something.
    fn put(&mut self, key: &'static str, value: Value, origin: Origin) {
        let setting = Setting { key, value, origin };
        match self.settings.iter_mut().find(|known| known.key == key) {
            Some(known) if matches!(known.origin, Origin::File { .. }) => {}
            Some(known) => *known = setting,
            None => self.settings.push(setting),
        }
    }

    /// Settings in the order of the manual's sections.
    fn ordered(&self) -> impl Iterator<Item = (&'static str, Vec<&Setting>)> {
        SECTIONS.into_iter().filter_map(|section| {
            let of_section = |setting: &&Setting| setting.key.split('.').next() == Some(section);
            let settings: Vec<&Setting> = self.settings.iter().filter(of_section).collect();
            (!settings.is_empty()).then_some((section, settings))
        })
    }

    /// A RUN.toml with the origin of each value in comments.
    pub fn to_toml(&self) -> String {
        let mut out = format!("# Imported from {} ({}).\n", printable(&self.file), self.tool);
        out.push_str(
            "# Data, and what the file does not say, have their defaults here: docs/configuration.md.\n",
        );
        for (section, settings) in self.ordered() {
            let lines = settings.iter().map(|setting| {
                let name = setting.key.strip_prefix(section).map_or(setting.key, |key| &key[1..]);
                (format!("{name} = {}", setting.toml()), self.place_of(setting))
            });
            let lines: Vec<(String, String)> = lines.collect();
            let width = lines.iter().map(|(line, _)| line.len()).max().unwrap_or(0).min(48);
            // Writing to a String cannot fail.
            let _ = writeln!(out, "\n[{section}]");
            for (line, origin) in lines {
                let _ = writeln!(out, "{line:width$}  # {}", printable(&origin));
            }
        }
        for line in self.notes() {
            let _ = write!(out, "\n{}", commented(&line));
        }
        out
    }

    /// The same as lines for a terminal: value, key, origin.
    pub fn table(&self) -> Vec<String> {
        let rows: Vec<(String, String)> = self
            .ordered()
            .flat_map(|(_, settings)| settings)
            .map(|setting| (format!("{} = {}", setting.key, setting.toml()), self.place_of(setting)))
            .collect();
        let width = rows.iter().map(|(row, _)| row.chars().count()).max().unwrap_or(0);
        rows.into_iter()
            .map(|(row, origin)| format!("{row:width$}  {}", printable(&origin)))
            .chain(self.notes())
            .collect()
    }

    /// The origin of a setting; the file is named if it is not the one that was imported.
    fn place_of(&self, setting: &Setting) -> String {
        let text = setting.origin.to_string();
        match text.strip_prefix(&format!("{}:", self.file)) {
            Some(rest) if matches!(setting.origin, Origin::File { .. }) => format!("line {rest}"),
            _ => text,
        }
    }

    /// What changes nothing, once for each reason, and what differs.
    fn notes(&self) -> Vec<String> {
        let idle = self.without_effect.iter();
        let idle = idle.map(|(because, keys)| format!("without effect: {}: {because}", keys.join(", ")));
        idle.chain(self.remarks.iter().map(|remark| format!("note: {remark}")))
            .map(|line| printable(&line))
            .collect()
    }
}

/// Text without control characters, so that it stays on its line.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// A comment of several lines.
fn commented(text: &str) -> String {
    let mut out = String::new();
    let mut line = "#".to_owned();
    for word in text.split_whitespace() {
        if line.len() + word.len() >= WIDTH && line.len() > 3 {
            out.push_str(&line);
            out.push('\n');
            line = "#  ".to_owned();
        }
        line.push(' ');
        line.push_str(word);
    }
    out + &line + "\n"
}
