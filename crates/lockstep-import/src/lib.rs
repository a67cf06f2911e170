//! Configurations of other trainers as a RUN.toml.
//!
//! [`import`] is a function of a file's text: every key in it is translated, changes nothing here (and is said to), or
//! is refused with a reason. Where the other tool's default differs from ours, the default is written out. The result
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

pub use draft::{Import, Origin, Setting};
pub use problem::{Problem, Problems};
pub use table::{Row, Treatment};

/// A tool whose configuration can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// A DeepSpeed configuration (`ds_config.json`).
    DeepSpeed,
    /// What `accelerate config` writes (`default_config.yaml`), in YAML or JSON.
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

    /// Every key of the tool, with what becomes of it.
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

    fn syntax(self) -> Syntax {
        match self {
            Self::DeepSpeed => Syntax::Json,
            Self::Accelerate => Syntax::Yaml,
        }
    }
}

/// What `"auto"` stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AutoValues {
    /// The defaults of Hugging Face's Trainer: the file stands alone.
    TrainerDefaults,
    /// What the run says that the file is given to.
    OfTheRun,
}

/// What is known besides the file.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Ranks of the run, if known.
    pub ranks: Option<usize>,
    /// What `"auto"` stands for.
    pub auto: AutoValues,
}

/// Translates the text of a file, called `file` in messages. `open` reads a file that this one names.
///
/// # Errors
/// All mistakes of the file, in its order.
pub fn import(
    format: Format,
    text: &str,
    file: &str,
    options: Options,
    open: &dyn Fn(&str) -> Result<String, String>,
) -> Result<Import, Problems> {
    let entries = document::read(text, file, format.syntax()).map_err(|problem| Problems(vec![problem]))?;
    let fields = Fields::new(file, entries);
    match format {
        Format::DeepSpeed => deepspeed::import(fields, options),
        Format::Accelerate => accelerate::import(fields, options, open),
    }
}
