//! Problems of a cluster file, each with its place and what is allowed. A file is read to its end, and all problems are reported.

use std::fmt;

/// A problem of a cluster file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterProblem {
    /// Name of the file, and the line: `cluster.toml:7`.
    pub origin: String,
    /// Path of the key, with the index of its table if there may be several: `node[1].device.memory`. Empty for the file as a whole.
    pub place: String,
    /// Description of the problem.
    pub what: String,
    /// Values that are allowed; empty if `what` says it.
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

/// Error of a text that is not a cluster file: all problems in the order of its lines, one per line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
pub struct ClusterError(pub Vec<ClusterProblem>);
