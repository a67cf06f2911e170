//! A run that does not fit the memory of a machine: what it needs, what is there, and the change with which it would fit.

use std::fmt;
use std::ops::Range;

use lockstep_config::human;
use lockstep_plan::MemoryBytes;

/// A run that does not fit the memory of a machine, with a remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryShortage {
    /// Memory that all ranks of the machine need.
    pub needed: MemoryBytes,
    /// Memory that is available, in bytes.
    pub available_bytes: u64,
    /// Ranks on this machine.
    pub ranks: Range<usize>,
    /// The rank that needs most, and its bytes.
    pub largest: (usize, usize),
    /// The smallest change with which the run fits, if there is one.
    pub remedy: Option<Change>,
    /// The change that leaves the least shortage, if none is enough.
    pub least: Option<Change>,
}

/// Settings that reduce a run's memory, and the memory that it then needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The settings, as `--set` takes them.
    pub settings: Vec<String>,
    /// Bytes that all ranks of the machine need with the settings.
    pub needed_bytes: usize,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for setting in &self.settings {
            // A TOML table has spaces and quotation marks, which a shell would interpret.
            let quotation = if setting.contains(' ') { "'" } else { "" };
            write!(f, "--set {quotation}{setting}{quotation} ")?;
        }
        write!(f, "({})", human::bytes(self.needed_bytes as u64))
    }
}

impl fmt::Display for MemoryShortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = |bytes: usize| human::bytes(bytes as u64);
        let (needed, there) = (bytes(self.needed.total()), human::bytes(self.available_bytes));
        writeln!(
            f,
            "the run does not fit the memory of this machine: {needed} are needed, {there} are there"
        )?;
        let parts: Vec<String> = self
            .needed
            .entries()
            .filter(|(_, bytes)| *bytes > 0)
            .map(|(category, size)| format!("{} {}", category.name(), bytes(size)))
            .collect();
        write!(f, "  needed     {}", parts.join(", "))?;
        if self.ranks.len() > 1 {
            let (rank, most) = (self.largest.0, bytes(self.largest.1));
            write!(f, " ({} here; rank {rank} needs most, {most})", human::plural(self.ranks.len(), "rank"))?;
        }
        match (&self.remedy, &self.least) {
            (Some(change), _) => write!(f, "\n  would fit  {change}"),
            (None, Some(change)) => write!(
                f,
                "\n  nothing that can be changed alone makes it fit; {change} comes nearest: more ranks on other machines, or a \
                 smaller model"
            ),
            (None, None) => write!(f, "\n  nothing that can be changed makes it fit"),
        }
    }
}
