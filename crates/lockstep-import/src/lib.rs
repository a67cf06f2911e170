//! Configurations of other trainers as a RUN.toml.
//!
//! [`import`] is a function of a file's text: every key in it is translated, listed as one without effect or as
//! `"auto"`, or refused with a reason. Where the other tool's default differs from ours, the default is written out. The result
//! knows where each value came from ([`Origin`]) and prints as TOML with that in comments, or as a table.

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

/// Format of a configuration, by the tool it belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// A DeepSpeed configuration (`ds_config.json`), in JSON.
    DeepSpeed,
    /// A configuration that `accelerate config` writes (`default_config.yaml`), in YAML or JSON.
    Accelerate,
}

impl Format {
    /// The word for it on the command line.
    pub fn word(self) -> &'static str {
        match self {
            Self::DeepSpeed => "deepspeed",
            Self::Accelerate => "accelerate",
        }
    }

    /// The tool's name.
    pub fn tool(self) -> &'static str {
        match self {
            Self::DeepSpeed => "DeepSpeed",
            Self::Accelerate => "Accelerate",
        }
    }

    /// The page of the manual with the tool's keys.
    pub fn page(self) -> &'static str {
        match self {
            Self::DeepSpeed => "docs/coming-from-deepspeed.md",
            Self::Accelerate => "docs/coming-from-accelerate.md",
        }
    }

    /// Guesses whose configuration a text is, by its keys; `None` if it cannot be read or has no key of either.
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

    /// The tool's keys and their treatment.
    pub fn keys(self) -> &'static [Row] {
        match self {
            Self::DeepSpeed => deepspeed::KEYS,
            Self::Accelerate => accelerate::KEYS,
        }
    }

    /// The table of its keys in Markdown.
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

/// Source of the values that are `"auto"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AutoValues {
    /// The defaults of Hugging Face's Trainer: the file stands alone.
    TrainerDefaults,
    /// The configuration of the run that the file is given to.
    OfTheRun,
}

/// Knowledge from outside the file.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Ranks of the run, if known.
    pub ranks: Option<usize>,
    /// Source of the values that are `"auto"`.
    pub auto: AutoValues,
}

/// Translates the text of a file, called `file` in messages. `open` reads a file that this one names.
///
/// # Errors
/// If the file cannot be read, or has unknown, refused or contradicting keys: all of them, in the order of the file.
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
