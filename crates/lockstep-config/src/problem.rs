//! Mistakes in a configuration: location, description and remedy.
//!
//! Reading RUN.toml never stops at the first mistake. Each becomes a [`Problem`]; a run starts only if there are none, and
//! otherwise the user sees all of them.

use std::fmt;
use std::sync::Arc;

/// Source of a value of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The default; nobody set the value.
    Default,
    /// A line of a file.
    File {
        /// The file, as the user named it.
        name: Arc<str>,
        /// Line number, from 1.
        line: usize,
    },
    /// A `--set` argument, as it was given.
    Argument(Arc<str>),
    /// A plan: the path of its file, or its name in messages.
    Plan(Arc<str>),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { name, line } => write!(f, "{name}:{line}"),
            Self::Argument(text) => write!(f, "--set {text}"),
            Self::Plan(name) => f.write_str(name),
        }
    }
}

/// One mistake in a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Source of the wrong value.
    pub origin: Origin,
    /// The key concerned, `section.key`; empty for a mistake of the file as a whole.
    pub key: String,
    /// Description of the mistake.
    pub what: String,
    /// Allowed values or a remedy; empty if `what` includes it.
    pub allowed: String,
}

impl Problem {
    pub(crate) fn new(
        origin: Origin,
        key: impl Into<String>,
        what: impl Into<String>,
        allowed: impl Into<String>,
    ) -> Self {
        Self { origin, key: key.into(), what: what.into(), allowed: allowed.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.origin)?;
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

/// All mistakes of one configuration; never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems(Vec<Problem>);

impl Problems {
    /// Returns `Ok` if there are no problems.
    ///
    /// # Errors
    /// With all of `problems`, if there are any.
    pub fn none_of(problems: Vec<Problem>) -> Result<(), Self> {
        if problems.is_empty() { Ok(()) } else { Err(Self(problems)) }
    }

    /// Wraps `problems`, of which there is at least one.
    pub(crate) fn all_of(problems: Vec<Problem>) -> Self {
        debug_assert!(!problems.is_empty());
        Self(problems)
    }

    /// Returns the mistakes: those of the text first, in its order, then those between values.
    pub fn iter(&self) -> impl Iterator<Item = &Problem> {
        self.0.iter()
    }
}

impl From<Problem> for Problems {
    fn from(problem: Problem) -> Self {
        Self(vec![problem])
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.len() {
            1 => f.write_str("the configuration has a problem:")?,
            n => write!(f, "the configuration has {n} problems:")?,
        }
        for problem in &self.0 {
            // Messages of the TOML parser have several lines; they are indented under their problem.
            write!(f, "\n  {}", problem.to_string().replace('\n', "\n    "))?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}
