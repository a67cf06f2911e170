//! Mistakes in a file of another tool: place, mistake, and what is allowed.

use std::fmt;

/// One mistake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The file, as the user named it.
    pub file: String,
    /// Line from 1; 0 for the file as a whole.
    pub line: usize,
    /// The key concerned, dotted; empty for a mistake of the file as a whole.
    pub key: String,
    /// The mistake.
    pub what: String,
    /// Allowed values, or the way out; empty where `what` says it.
    pub allowed: String,
}

impl Problem {
    pub(crate) fn new(
        file: &str,
        line: usize,
        key: &str,
        what: impl Into<String>,
        allowed: impl Into<String>,
    ) -> Self {
        Self { file: file.to_owned(), line, key: key.to_owned(), what: what.into(), allowed: allowed.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        f.write_str(": ")?;
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.what)?;
        if !self.allowed.is_empty() {
            write!(f, "; allowed: {}", self.allowed)?;
        }
        Ok(())
    }
}

/// The mistakes of a file, in its order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems(pub Vec<Problem>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0[..] {
            [one] => write!(f, "{one}"),
            all => {
                write!(f, "the file has {} problems:", all.len())?;
                all.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
            }
        }
    }
}

impl std::error::Error for Problems {}

/// At most 60 characters of a text, escaped, for a message.
pub(crate) fn shortened(text: &str) -> String {
    let mut out: String = text.chars().take(60).flat_map(char::escape_debug).collect();
    if text.chars().nth(60).is_some() {
        out.push_str("...");
    }
    out
}
