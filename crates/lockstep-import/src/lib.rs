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
mod format;
mod options;
mod problem;
mod table;

use document::Syntax;
use fields::Fields;
use table::find;

pub use draft::{AutoKey, Import, InUse, Lookup, Origin, Resolution, Setting};
pub use format::Format;
pub use options::{AutoValues, Options};
pub use problem::{Problem, Problems};
pub use table::{Row, Treatment};

impl Format {
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

    fn syntax(self, text: &str) -> Syntax {
        match self {
            Self::DeepSpeed => Syntax::Json,
            Self::Accelerate => Syntax::of(text),
        }
    }
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
