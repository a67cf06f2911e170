//! The result of an import: settings with their origin, as TOML or as a table.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::Value;

/// Sections of RUN.toml in the order of the manual.
const SECTIONS: [&str; 8] =
    ["model", "data", "train", "optimizer", "schedule", "parallel", "checkpoint", "metrics"];
/// Largest width of a comment line.
const WIDTH: usize = 110;

/// A value that was read, with its key and line.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Read<T> {
    pub(crate) value: T,
    pub(crate) key: String,
    pub(crate) line: usize,
    /// The value as written in the file.
    pub(crate) shown: String,
}

impl<T> Read<T> {
    pub(crate) fn map<U>(self, change: impl FnOnce(T) -> U) -> Read<U> {
        Read { value: change(self.value), key: self.key, line: self.line, shown: self.shown }
    }
}

/// Source of a setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// A line of the imported file.
    File {
        /// Name of the file.
        file: String,
        /// Line in the file, from 1.
        line: usize,
        /// The other tool's key.
        key: String,
        /// The value as written in the file.
        shown: String,
    },
    /// A default of Hugging Face's Trainer, for keys with the value `"auto"`.
    Trainer {
        /// Name of the file.
        file: String,
        /// Line of the first key, from 1.
        line: usize,
        /// Keys with the value `"auto"`.
        keys: Vec<String>,
    },
    /// The other tool's default, which differs from ours; a description.
    ForeignDefault(String),
    /// A rule that computes the value from others; a description.
    Derived(String),
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File { file, line, key, shown } if *line > 0 => write!(f, "{file}:{line}: {key} = {shown}"),
            Self::File { key, shown, .. } => write!(f, "{key} = {shown}"),
            Self::Trainer { file, line, keys } => {
                write!(f, "{file}:{line}: {} = \"auto\", the Trainer's default", keys.join(", "))
            }
            Self::ForeignDefault(whose) => write!(f, "default: {whose}"),
            Self::Derived(why) => write!(f, "derived: {why}"),
        }
    }
}

/// A key of RUN.toml with its value.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// Full name, `section.key`.
    pub key: &'static str,
    /// Value of the key.
    pub value: Value,
    /// Source of the value.
    pub origin: Origin,
}

impl Setting {
    /// Returns the value as TOML.
    fn toml(&self) -> String {
        toml_of(&self.value)
    }

    /// Returns the setting as an argument of `--set`.
    pub fn argument(&self) -> String {
        format!("{}={}", self.key, self.toml())
    }
}

/// A key with the value `"auto"` that sets nothing by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AutoKey {
    /// Name of the file.
    pub file: String,
    /// Line in the file, from 1.
    pub line: usize,
    /// The other tool's key.
    pub key: String,
    /// Value that the key takes in the run.
    pub resolution: Resolution,
}

/// Resolution of a key with the value `"auto"`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resolution {
    /// The run's values of these keys of RUN.toml apply.
    LeftTo(Vec<&'static str>),
    /// The only supported value applies.
    Taken(&'static str),
}

/// The run's value of a key, for the run that a file is imported into.
#[derive(Debug, Clone, PartialEq)]
pub struct InUse {
    /// Value of the key.
    pub value: Value,
    /// Description of its source; `None` if the source is the imported file.
    pub origin: Option<String>,
}

/// Function that looks up the run's value of a key of RUN.toml.
pub type Lookup<'a> = &'a dyn Fn(&str) -> Option<InUse>;

/// Result of translating a file of another tool.
#[derive(Debug, Clone, Default)]
pub struct Import {
    /// Name of the file, as given by the user.
    pub file: String,
    /// Name of the other tool.
    pub tool: &'static str,
    /// Settings translated from the file.
    pub settings: Vec<Setting>,
    /// Keys that change nothing here, grouped by reason.
    pub without_effect: BTreeMap<&'static str, Vec<String>>,
    /// Keys with the value `"auto"` that are not the origin of a setting.
    pub autos: Vec<AutoKey>,
    /// Other differences from the other tool.
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

    /// Sets a key to the Trainer's default. `auto` lists the file's keys with the value `"auto"`, each with its line.
    pub(crate) fn trainer(
        &mut self,
        file: &str,
        key: &'static str,
        value: impl Into<Value>,
        auto: Vec<(&str, usize)>,
    ) {
        let line = auto.first().map_or(0, |(_, line)| *line);
        let keys = auto.into_iter().map(|(key, _)| key.to_owned()).collect();
        self.put(key, value.into(), Origin::Trainer { file: file.to_owned(), line, keys });
    }

    /// Records a key that changes nothing, with the reason.
    pub(crate) fn idle(&mut self, because: &'static str, key: impl Into<String>) {
        self.without_effect.entry(because).or_default().push(key.into());
    }

    pub(crate) fn remark(&mut self, text: impl Into<String>) {
        let text = text.into();
        if !self.remarks.contains(&text) {
            self.remarks.push(text);
        }
    }

    /// Returns true if the result mentions a key of `file`, as one without effect or as the origin of a setting.
    pub(crate) fn names(&self, file: &str, key: &str) -> bool {
        let is_origin = |setting: &Setting| match &setting.origin {
            Origin::File { file: of, key: known, .. } => of == file && known == key,
            Origin::Trainer { file: of, keys, .. } => of == file && keys.iter().any(|known| known == key),
            Origin::ForeignDefault(_) | Origin::Derived(_) => false,
        };
        let is_idle = |idle: &String| idle.strip_suffix(" = \"auto\"").unwrap_or(idle) == key;
        self.settings.iter().any(is_origin) || self.without_effect.values().flatten().any(is_idle)
    }

    /// Returns the value of a key, if it is set.
    pub(crate) fn value(&self, key: &str) -> Option<&Value> {
        self.settings.iter().find(|setting| setting.key == key).map(|setting| &setting.value)
    }

    /// Sets a key. Values from the file take precedence over derived ones and defaults.
    fn put(&mut self, key: &'static str, value: Value, origin: Origin) {
        let setting = Setting { key, value, origin };
        match self.settings.iter_mut().find(|known| known.key == key) {
            Some(known) if matches!(known.origin, Origin::File { .. }) => {}
            Some(known) => *known = setting,
            None => self.settings.push(setting),
        }
    }

    /// Returns the settings by section, in the order of the manual.
    fn ordered(&self) -> impl Iterator<Item = (&'static str, Vec<&Setting>)> {
        SECTIONS.into_iter().filter_map(|section| {
            let of_section = |setting: &&Setting| setting.key.split('.').next() == Some(section);
            let settings: Vec<&Setting> = self.settings.iter().filter(of_section).collect();
            (!settings.is_empty()).then_some((section, settings))
        })
    }

    /// Returns a RUN.toml with the origin of each value in comments.
    pub fn to_toml(&self) -> String {
        self.to_toml_with(&|_| None)
    }

    /// Returns a RUN.toml as [`Import::to_toml`] does, with the run's values of keys that are `"auto"`.
    pub fn to_toml_with(&self, in_use: Lookup<'_>) -> String {
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
        for line in self.notes(in_use) {
            let _ = write!(out, "\n{}", commented(&line));
        }
        out
    }

    /// Returns lines for a terminal: value, key and origin of each setting. Values of the run that override a setting
    /// are shown instead.
    pub fn table(&self, in_use: Lookup<'_>) -> Vec<String> {
        let rows: Vec<(String, String)> = self
            .ordered()
            .flat_map(|(_, settings)| settings)
            .map(|setting| match in_use(setting.key) {
                Some(InUse { value, origin: Some(origin) }) if !is_same(&value, &setting.value) => {
                    let row = format!("{} = {}", setting.key, toml_of(&value));
                    (row, format!("{origin} wins over {}", self.place_of(setting)))
                }
                _ => (format!("{} = {}", setting.key, setting.toml()), self.place_of(setting)),
            })
            .collect();
        let width = rows.iter().map(|(row, _)| row.chars().count()).max().unwrap_or(0);
        rows.into_iter()
            .map(|(row, origin)| format!("{row:width$}  {}", printable(&origin)))
            .chain(self.notes(in_use))
            .collect()
    }

    /// Returns the origin of a setting. It names the file only if that is not the imported one.
    fn place_of(&self, setting: &Setting) -> String {
        let text = setting.origin.to_string();
        match text.strip_prefix(&format!("{}:", self.file)) {
            Some(rest) if matches!(setting.origin, Origin::File { .. } | Origin::Trainer { .. }) => {
                format!("line {rest}")
            }
            _ => text,
        }
    }

    /// Returns lines for the keys that set nothing, those without effect grouped by reason, and the remarks.
    fn notes(&self, in_use: Lookup<'_>) -> Vec<String> {
        let autos = self.autos.iter().map(|auto| self.auto_line(auto, in_use));
        let idle = self.without_effect.iter();
        let idle = idle.map(|(because, keys)| format!("without effect: {}: {because}", keys.join(", ")));
        let remarks = self.remarks.iter().map(|remark| format!("note: {remark}"));
        autos.chain(idle).chain(remarks).map(|line| printable(&line)).collect()
    }

    /// Returns the line of a key with the value `"auto"`: the run's value, and its source.
    fn auto_line(&self, auto: &AutoKey, in_use: Lookup<'_>) -> String {
        let AutoKey { file, line, key, resolution } = auto;
        let place =
            if *file == self.file { format!("line {line}") } else { format!("{}:{line}", printable(file)) };
        let value = match resolution {
            Resolution::Taken(value) => format!("taken as {value}, the only value that is available here"),
            Resolution::LeftTo(ours) => {
                let value_of = |ours: &&'static str| match in_use(ours) {
                    Some(InUse { value: Value::Null, .. }) => format!("{ours} (not set)"),
                    Some(InUse { value, origin: Some(origin) }) => {
                        format!("{ours} = {} ({origin})", toml_of(&value))
                    }
                    Some(InUse { value, origin: None }) => format!("{ours} = {}", toml_of(&value)),
                    None => match self.value(ours) {
                        Some(value) => format!("{ours} = {}", toml_of(value)),
                        None => (*ours).to_owned(),
                    },
                };
                format!("left to {}", ours.iter().map(value_of).collect::<Vec<_>>().join(", "))
            }
        };
        format!("auto: {place}: {key} = \"auto\", {value}")
    }
}

/// Formats a value as TOML.
fn toml_of(value: &Value) -> String {
    if let Some(number) =
        value.as_f64().filter(|number| value.is_f64() && *number != 0.0 && number.abs() < 1e-2)
    {
        return format!("{number:e}");
    }
    toml::Value::try_from(value).map_or_else(|_| value.to_string(), |value| value.to_string())
}

/// Returns true if two values are equal, whatever the form of numbers (`1`, `1.0`).
fn is_same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| is_same(a, b))
        }
        _ => a == b || a.as_f64().is_some_and(|a| b.as_f64() == Some(a)),
    }
}

/// Replaces control characters by spaces, so that the text stays on one line.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Formats text as a comment of several lines.
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
