//! Pipeline schedule of a plan: a published one by name, or the user's rows.

use serde::{Deserialize, Serialize};

use crate::schedule::{Kind, Schedule, ScheduleError, passes_from_csv};

/// Pipeline schedule of a plan: `{ "kind": "1f1b", "chunks": 1 }` or `{ "rows": ["F0,F1,B0,B1", ...] }`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "ScheduleFields", into = "ScheduleFields")]
pub struct PipelineSchedule {
    /// Order of the forward and backward passes on each rank.
    pub passes: PassOrder,
    /// Stages per rank of a published schedule; `None` for the fewest that its kind allows.
    pub chunks: Option<usize>,
}

/// Order of the forward and backward passes on each pipeline rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum PassOrder {
    /// Order of a published schedule.
    Published(Kind),
    /// Order given by the user: rows of [`passes_from_csv`], one per rank.
    Rows(Vec<String>),
}

impl Default for PassOrder {
    fn default() -> Self {
        Self::Published(Kind::OneForwardOneBackward)
    }
}

impl PipelineSchedule {
    /// Creates a published schedule with `chunks` stages on each rank.
    pub const fn published(kind: Kind, chunks: usize) -> Self {
        Self { passes: PassOrder::Published(kind), chunks: Some(chunks) }
    }

    /// Creates a schedule from a user's rows, one per rank.
    pub const fn rows(rows: Vec<String>) -> Self {
        Self { passes: PassOrder::Rows(rows), chunks: None }
    }

    /// Returns the kind of a published schedule and its stages per rank; `None` for a user's schedule.
    pub fn kind(&self) -> Option<(Kind, usize)> {
        match self.passes {
            PassOrder::Published(kind) => Some((kind, self.chunks.unwrap_or(kind.chunks().0))),
            PassOrder::Rows(_) => None,
        }
    }

    /// Returns the name for messages: that of a published schedule, or "a schedule from a file".
    pub fn name(&self) -> &'static str {
        self.kind().map_or("a schedule from a file", |(kind, _)| kind.name())
    }

    /// Returns the number of stages on all `ranks` together; `None` if the rows cannot be read or the number overflows.
    pub fn stages(&self, ranks: usize) -> Option<usize> {
        match (&self.passes, self.kind()) {
            (PassOrder::Rows(rows), _) => {
                let passes = passes_from_csv(&rows.join("\n"), ranks).ok()?;
                passes.iter().flatten().map(|pass| pass.stage.saturating_add(1)).max()
            }
            (PassOrder::Published(_), kind) => ranks.checked_mul(kind?.1),
        }
    }

    /// Generates the schedule of `ranks` pipeline ranks and `micro_batches` micro-batches.
    ///
    /// # Errors
    /// If the schedule does not work with these numbers; the error lists every problem.
    pub fn for_ranks(&self, ranks: usize, micro_batches: usize) -> Result<Schedule, ScheduleError> {
        match (&self.passes, self.kind()) {
            (PassOrder::Rows(rows), _) => passes_from_csv(&rows.join("\n"), ranks)
                .and_then(|passes| Schedule::from_passes(micro_batches, &passes)),
            (PassOrder::Published(kind), chunks) => {
                Schedule::new(*kind, ranks, micro_batches, chunks.map_or(1, |(_, chunks)| chunks))
            }
        }
    }
}

/// Serialized form of [`PipelineSchedule`].
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ScheduleFields {
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<Kind>,
    #[serde(skip_serializing_if = "Option::is_none")]
    chunks: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rows: Option<Vec<String>>,
}

impl TryFrom<ScheduleFields> for PipelineSchedule {
    type Error = &'static str;

    fn try_from(fields: ScheduleFields) -> Result<Self, &'static str> {
        match fields {
            ScheduleFields { kind: Some(kind), chunks, rows: None } => {
                Ok(Self { passes: PassOrder::Published(kind), chunks })
            }
            ScheduleFields { kind: None, chunks: None, rows: Some(rows) } => Ok(Self::rows(rows)),
            _ => Err("a schedule has either a kind, with its number of chunks, or rows"),
        }
    }
}

impl From<PipelineSchedule> for ScheduleFields {
    fn from(PipelineSchedule { passes, chunks }: PipelineSchedule) -> Self {
        match passes {
            PassOrder::Published(kind) => Self { kind: Some(kind), chunks, rows: None },
            PassOrder::Rows(rows) => Self { kind: None, chunks: None, rows: Some(rows) },
        }
    }
}
