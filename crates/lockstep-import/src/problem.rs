//! Problems in a file of another tool: place, description, and allowed values.

use std::fmt;

/// A problem in a file of another tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Name of the file, as given by the user.
    pub file: String,
    /// Line from 1; 0 for the file as a whole.
    pub line: usize,
    /// The dotted key; empty for a problem of the file as a whole.
    pub key: String,
    /// Description of the problem.
    pub what: String,
    /// Allowed values, or a way out; empty if `what` says it.
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

/// The problems of a file, in the order of the file.
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

/// Returns at most 60 characters of a text, escaped, for a message.
pub(crate) fn shortened(text: &str) -> String {
    let mut out: String = text.chars().take(60).flat_map(char::escape_debug).collect();
    if text.chars().nth(60).is_some() {
        out.push_str("...");
    }
    out
}
