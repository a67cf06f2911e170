//! Importer that translates other trainers' configurations to a RUN.toml.
//!
//! [`import`] is a pure function of a file's text. It translates every key, lists it as `"auto"` or without effect,
//! or refuses it with a reason. Where the other tool's default differs from ours, the result states it explicitly.
//! The result knows the origin of each value ([`Origin`]) and prints as TOML with the origins in comments, or as a
//! table.
#![forbid(unsafe_code)]

mod accelerate;
mod deepspeed;
mod document;
mod draft;
mod fields;
mod problem;
mod table;

use document::Syntax;
use fields::Fields;
use table::find;

pub use draft::{AutoKey, Import, InUse, Lookup, Origin, Resolution, Setting};
pub use problem::{Problem, Problems};
pub use table::{Row, Treatment};

/// Format of a configuration, named after its tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// A DeepSpeed configuration (`ds_config.json`), in JSON.
    DeepSpeed,
    /// A configuration that `accelerate config` writes (`default_config.yaml`), in YAML or JSON.
    Accelerate,
}

impl Format {
    /// Returns the format's name on the command line.
    pub fn word(self) -> &'static str {
        match self {
            Self::DeepSpeed => "deepspeed",
            Self::Accelerate => "accelerate",
        }
    }

    /// Returns the tool's name.
    pub fn tool(self) -> &'static str {
        match self {
            Self::DeepSpeed => "DeepSpeed",
            Self::Accelerate => "Accelerate",
        }
    }

    /// Returns the manual page that lists the tool's keys.
    pub fn page(self) -> &'static str {
        match self {
            Self::DeepSpeed => "docs/coming-from-deepspeed.md",
            Self::Accelerate => "docs/coming-from-accelerate.md",
        }
    }

    /// Guesses the format of a text by its keys; `None` if it cannot be parsed or has no known key.
    pub fn guess(text: &str) -> Option<Self> {
        let entries = document::read(text, "", Syntax::of(text)).ok()?;
        let fields = Fields::new("", entries);
        let known =
            |format: Self| fields.keys().filter(|(key, _)| find(format.keys(), key).is_some()).count();
        match (known(Self::DeepSpeed), known(Self::Accelerate)) {
            (0, 0) => None,
            (deepspeed, accelerate) if deepspeed > accelerate => Some(Self::DeepSpeed),
            _ => Some(Self::Accelerate),
        }
    }

    /// Returns the tool's keys and their treatment.
    pub fn keys(self) -> &'static [Row] {
        match self {
            Self::DeepSpeed => deepspeed::KEYS,
            Self::Accelerate => accelerate::KEYS,
        }
    }

    /// Returns the table of the tool's keys in Markdown.
    pub fn keys_markdown(self) -> String {
        table::markdown(self.keys())
    }

    fn syntax(self, text: &str) -> Syntax {
        match self {
            Self::DeepSpeed => Syntax::Json,
            Self::Accelerate => Syntax::of(text),
        }
    }
}

/// Source of values for keys that are `"auto"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AutoValues {
    /// The defaults of Hugging Face's Trainer, for a file that is imported alone.
    TrainerDefaults,
    /// The configuration of the run that the file is imported into.
    OfTheRun,
}

/// Context of an import, from outside the file.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Ranks of the run, if known.
    pub ranks: Option<usize>,
    /// Source of values for keys that are `"auto"`.
    pub auto: AutoValues,
}

/// Translates the text of a file, called `file` in messages. `open` reads a file that this one refers to.
///
/// # Errors
/// If the file cannot be parsed, or has unknown, refused or contradictory keys. The error lists all of them, in the
/// order of the file.
pub fn import(
    format: Format,
    text: &str,
    file: &str,
    options: Options,
    open: &dyn Fn(&str) -> Result<String, String>,
) -> Result<Import, Problems> {
    let entries =
        document::read(text, file, format.syntax(text)).map_err(|problem| Problems(vec![problem]))?;
    let fields = Fields::new(file, entries);
    match format {
        Format::DeepSpeed => deepspeed::import(fields, options),
        Format::Accelerate => accelerate::import(fields, options, open),
    }
}
