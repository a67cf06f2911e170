//! What can be wrong with a cluster file: where, what, and what would be right. A file is read to its end; all problems are told.

use std::fmt;

/// One mistake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterProblem {
    /// What the file is called, and the line: `cluster.toml:7`.
    pub origin: String,
    /// The key, with the number of its table where there may be several: `node[1].device.memory`. Empty for the file as a whole.
    pub place: String,
    /// What is wrong.
    pub what: String,
    /// What would be right; empty where `what` says it.
    pub allowed: String,
}

impl fmt::Display for ClusterProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.origin)?;
        if !self.place.is_empty() {
            write!(f, "{}: ", self.place)?;
        }
        f.write_str(&self.what)?;
        if !self.allowed.is_empty() {
            write!(f, "; allowed: {}", self.allowed)?;
        }
        Ok(())
    }
}

/// Why a text describes no cluster: everything that is wrong with it, in the order of its lines, one to a line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
pub struct ClusterError(pub Vec<ClusterProblem>);
