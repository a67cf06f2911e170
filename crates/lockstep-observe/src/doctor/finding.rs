//! A line of `lockstep doctor`: one checked item, its value, and the effect of the value on a run.

use serde::Serialize;

/// Effect of a finding on a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Correct, or without effect.
    Ok,
    /// Runs work, but slower or with less room than possible.
    Warning,
    /// A resource that runs need is missing.
    Missing,
}

/// Result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Part of the machine.
    pub section: &'static str,
    /// Item that was checked.
    pub name: String,
    /// Value that was found.
    pub value: String,
    /// Effect of the value on a run.
    pub status: Status,
    /// Advice on what to change, if anything.
    pub advice: Option<String>,
}

impl Finding {
    /// Returns a finding that is correct, or without effect.
    pub(super) fn ok(section: &'static str, name: impl Into<String>, value: impl Into<String>) -> Self {
        let (name, value) = (name.into(), value.into());
        Self { section, name, value, status: Status::Ok, advice: None }
    }

    /// Sets the effect on a run, with advice on what to change.
    pub(super) fn with(self, status: Status, advice: impl Into<String>) -> Self {
        Self { status, advice: Some(advice.into()), ..self }
    }

    /// Turns the finding into a warning if `is_poor`, with advice on what to change.
    pub(super) fn warned_if(self, is_poor: bool, advice: impl Into<String>) -> Self {
        if is_poor { self.with(Status::Warning, advice) } else { self }
    }
}
