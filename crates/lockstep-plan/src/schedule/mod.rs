//! Pipeline schedules as data: the ordered list of actions of each pipeline rank in one step.
//!
//! A model is split into *stages*, counted from its first layer; a rank has one stage or several (its *chunks*). Each stage runs a
//! forward and a backward per micro-batch. The backward may be split in two: input gradients first, weight gradients later. A
//! [`Schedule`] has one list of [`Action`]s per rank; the engine, the simulator and pictures all read the same lists.
//!
//! - [`Kind`] names the published schedules; each is a pure function to lists of [`Pass`]es (`generate`).
//! - `lower` derives sends, receives and reductions from any such lists. Users may give their own as a CSV file
//!   ([`passes_from_csv`]).
//! - A `Schedule` can only be made from lists that are complete (`validate`) and cannot deadlock (`deadlock`); otherwise
//!   the [`ScheduleError`] lists every problem.
//! - [`Schedule::simulate`] computes start times and memory from the durations of the passes.

mod csv;
mod deadlock;
mod generate;
mod lower;
mod problem;
mod simulate;
#[cfg(test)]
mod tests;
mod validate;

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

pub use csv::passes_from_csv;
pub use generate::Kind;
pub use problem::{ScheduleError, ScheduleProblem, Wait};
pub use simulate::{Costs, CostsError, Simulation, Span, StageCost};

/// Upper limit of a schedule's size, in forwards of all ranks; more is taken for a mistake.
const MOST_PASSES: usize = 1 << 22;

/// Kind of pass of a micro-batch through a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PassKind {
    /// Forward pass of a micro-batch through a stage.
    Forward,
    /// Whole backward pass: gradients of the inputs and of the weights.
    Backward,
    /// First half of a split backward: gradients of the inputs.
    BackwardInput,
    /// Second half of a split backward: gradients of the weights.
    BackwardWeight,
}

impl PassKind {
    const ALL: [Self; 4] = [Self::Forward, Self::Backward, Self::BackwardInput, Self::BackwardWeight];

    /// Returns the letter in text form, the same as in `torch.distributed.pipelining`.
    pub const fn letter(self) -> char {
        match self {
            Self::Forward => 'F',
            Self::Backward => 'B',
            Self::BackwardInput => 'I',
            Self::BackwardWeight => 'W',
        }
    }

    /// Returns true if the pass computes the gradient of the stage's input.
    pub const fn makes_input_gradient(self) -> bool {
        matches!(self, Self::Backward | Self::BackwardInput)
    }

    /// Returns true if the pass accumulates into the gradients of the stage's weights.
    pub const fn makes_weight_gradient(self) -> bool {
        matches!(self, Self::Backward | Self::BackwardWeight)
    }
}

/// One pass of one micro-batch through one stage. Its text form is `{stage}{F|B|I|W}{micro-batch}`: `3F0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pass {
    /// Kind of pass.
    pub kind: PassKind,
    /// Index of the stage, counted from the model's first layer.
    pub stage: usize,
    /// Index of the micro-batch.
    pub micro_batch: usize,
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.stage, self.kind.letter(), self.micro_batch)
    }
}

/// Error for a text that is not a [`Pass`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no pass; one is written STAGE, one of F, B, I and W, MICRO-BATCH, as in 1F0")]
pub struct PassSyntaxError(pub String);

impl FromStr for Pass {
    type Err = PassSyntaxError;

    fn from_str(text: &str) -> Result<Self, PassSyntaxError> {
        let parse = || {
            let kind = PassKind::ALL.into_iter().find(|kind| text.contains(kind.letter()))?;
            let (stage, micro_batch) = text.split_once(kind.letter())?;
            Some(Self { kind, stage: digits(stage)?, micro_batch: digits(micro_batch)? })
        };
        parse().ok_or_else(|| PassSyntaxError(text.to_owned()))
    }
}

/// Parses a number of digits only; `parse` would accept a leading "+".
fn digits(text: &str) -> Option<usize> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

impl Serialize for Pass {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Pass {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// Point-to-point message between neighbouring stages: activations to the next one, or their gradients to the previous one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Message {
    /// Stage that sends it.
    pub from: usize,
    /// Stage that receives it, a neighbour of `from`.
    pub to: usize,
    /// Index of the micro-batch.
    pub micro_batch: usize,
}

impl Message {
    /// Returns true for the output of a forward, false for the input gradient of a backward.
    pub const fn is_activation(&self) -> bool {
        self.to > self.from
    }

    /// Returns the message that a pass produces for a neighbouring stage; `None` if there is none.
    pub(crate) fn made_by(pass: Pass, stages: usize) -> Option<Self> {
        let Pass { kind, stage: from, micro_batch } = pass;
        let to = match kind {
            PassKind::Forward if from < stages.saturating_sub(1) => from + 1,
            PassKind::Backward | PassKind::BackwardInput if from > 0 => from - 1,
            _ => return None,
        };
        Some(Self { from, to, micro_batch })
    }

    /// Returns the message that a pass needs from a neighbouring stage; `None` if it needs none.
    pub(crate) fn needed_by(pass: Pass, stages: usize) -> Option<Self> {
        let Pass { kind, stage: to, micro_batch } = pass;
        let from = match kind {
            PassKind::Forward if to > 0 => to - 1,
            PassKind::Backward | PassKind::BackwardInput if to < stages.saturating_sub(1) => to + 1,
            _ => return None,
        };
        Some(Self { from, to, micro_batch })
    }
}

/// Returns the index of a message in a table of all possible messages. A stage receives at most one activation and one gradient per
/// micro-batch.
fn place_of(message: Message, micro_batches: usize) -> usize {
    (2 * message.to + usize::from(message.is_activation())) * micro_batches + message.micro_batch
}

/// An action in a rank's list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Action {
    /// Runs a pass, after the message that it needs has arrived.
    Compute(Pass),
    /// Starts to send a message and does not wait.
    Send(Message),
    /// Posts a receive buffer for a message and does not wait.
    Receive(Message),
    /// Starts the data-parallel gradient reduction of a stage, whose gradients are complete on this rank.
    ReduceGradients {
        /// Index of the stage.
        stage: usize,
    },
    /// Runs the optimizer step. It needs the global gradient norm, so it waits for all ranks.
    Step,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = |message: &Message| if message.is_activation() { 'F' } else { 'B' };
        match self {
            Self::Compute(pass) => pass.fmt(f),
            Self::Send(message) => {
                write!(f, "{}SEND_{}{}", message.from, letter(message), message.micro_batch)
            }
            Self::Receive(message) => {
                write!(f, "{}RECV_{}{}", message.to, letter(message), message.micro_batch)
            }
            Self::ReduceGradients { stage } => write!(f, "{stage}REDUCE_GRAD"),
            Self::Step => f.write_str("STEP"),
        }
    }
}

/// A pipeline schedule: one list of actions per rank, complete and free of deadlocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    micro_batches: usize,
    rank_of: Vec<usize>,
    actions: Vec<Vec<Action>>,
    /// Slots of each stage and stages of each rank, computed once because the search asks thousands of times.
    flows: Vec<StageFlow>,
    stages_of: Vec<Vec<usize>>,
}

/// Memory-related properties of a stage, read from the lists.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct StageFlow {
    /// Maximum number of micro-batches in flight: from the receive, or the forward, to the last pass.
    slots: usize,
    /// True if any backward of the stage is split.
    splits_backward: bool,
}

impl Schedule {
    /// Generates a published schedule for `ranks` pipeline ranks with `chunks` stages each.
    pub fn new(kind: Kind, ranks: usize, micro_batches: usize, chunks: usize) -> Result<Self, ScheduleError> {
        Self::from_passes(micro_batches, &kind.passes(ranks, micro_batches, chunks)?)
    }

    /// Generates a published schedule without validation. Tests show that every published schedule is complete and cannot deadlock, so
    /// the search skips the check for its thousands of schedules.
    pub fn published(
        kind: Kind,
        ranks: usize,
        micro_batches: usize,
        chunks: usize,
    ) -> Result<Self, ScheduleError> {
        let passes = kind.passes(ranks, micro_batches, chunks)?;
        let (rank_of, problems) = validate::owners(&passes);
        if !problems.is_empty() {
            return Err(ScheduleError(problems));
        }
        let actions = lower::lower(&rank_of, micro_batches, &passes);
        Ok(Self::of_lists(micro_batches, rank_of, actions).with_flows())
    }

    /// Builds a schedule from the passes of each rank. A stage belongs to the rank with its first forward.
    pub fn from_passes(micro_batches: usize, passes: &[Vec<Pass>]) -> Result<Self, ScheduleError> {
        let (rank_of, mut problems) = validate::owners(passes);
        if micro_batches.saturating_mul(rank_of.len().max(1)) > MOST_PASSES {
            return Err(ScheduleError(vec![ScheduleProblem::TooLong { most: MOST_PASSES }]));
        }
        let actions = lower::lower(&rank_of, micro_batches, passes);
        let schedule = Self::of_lists(micro_batches, rank_of, actions);
        problems.extend(validate::problems(&schedule));
        if problems.is_empty() { Ok(schedule.with_flows()) } else { Err(ScheduleError(problems)) }
    }

    /// Builds a schedule from complete action lists; `rank_of` has the rank of each stage.
    pub fn from_actions(
        rank_of: Vec<usize>,
        micro_batches: usize,
        actions: Vec<Vec<Action>>,
    ) -> Result<Self, ScheduleError> {
        let schedule = Self::of_lists(micro_batches, rank_of, actions);
        let problems = validate::problems(&schedule);
        if problems.is_empty() { Ok(schedule.with_flows()) } else { Err(ScheduleError(problems)) }
    }

    /// Wraps lists that may not be valid yet.
    fn of_lists(micro_batches: usize, rank_of: Vec<usize>, actions: Vec<Vec<Action>>) -> Self {
        let mut stages_of = vec![Vec::new(); actions.len()];
        for (stage, rank) in rank_of.iter().enumerate() {
            if let Some(stages) = stages_of.get_mut(*rank) {
                stages.push(stage);
            }
        }
        Self { micro_batches, rank_of, actions, flows: Vec::new(), stages_of }
    }

    /// Adds the properties of each stage; the lists must be valid.
    fn with_flows(mut self) -> Self {
        let (stages, micro_batches) = (self.stages(), self.micro_batches);
        let mut flows = vec![StageFlow::default(); stages];
        let (mut taken, mut now) = (vec![false; stages * micro_batches], vec![0_usize; stages]);
        for action in self.actions.iter().flatten() {
            let (stage, micro_batch, is_here) = match *action {
                Action::Receive(message) if message.is_activation() => {
                    (message.to, message.micro_batch, true)
                }
                Action::Compute(pass) => {
                    flows[pass.stage].splits_backward |= pass.kind == PassKind::BackwardWeight;
                    (pass.stage, pass.micro_batch, !pass.kind.makes_weight_gradient())
                }
                _ => continue,
            };
            let was_here = std::mem::replace(&mut taken[stage * micro_batches + micro_batch], is_here);
            now[stage] = now[stage] + usize::from(is_here) - usize::from(was_here);
            flows[stage].slots = flows[stage].slots.max(now[stage]);
        }
        self.flows = flows;
        self
    }

    /// Returns the number of pipeline ranks.
    pub fn ranks(&self) -> usize {
        self.actions.len()
    }

    /// Returns the number of stages of the whole pipeline.
    pub fn stages(&self) -> usize {
        self.rank_of.len()
    }

    /// Returns the number of micro-batches of a step.
    pub fn micro_batches(&self) -> usize {
        self.micro_batches
    }

    /// Returns the rank of a stage.
    pub fn rank_of(&self, stage: usize) -> usize {
        self.rank_of[stage]
    }

    /// Returns the stages of a rank (its chunks), in ascending order.
    pub fn stages_of(&self, rank: usize) -> impl Iterator<Item = usize> + '_ {
        self.stages_of[rank].iter().copied()
    }

    /// Returns the maximum number of micro-batches in flight in a stage: from the receive, or the forward, to the last pass.
    pub fn slots(&self, stage: usize) -> usize {
        self.flows[stage].slots
    }

    /// Returns true if any backward of the stage is split, so that weight gradients may come later than input gradients.
    pub fn splits_backward(&self, stage: usize) -> bool {
        self.flows[stage].splits_backward
    }

    /// Returns the actions of a rank, in order.
    pub fn actions(&self, rank: usize) -> &[Action] {
        &self.actions[rank]
    }

    /// Returns true if a message goes from one rank to another.
    fn crosses_ranks(&self, message: Message) -> bool {
        self.rank_of[message.from] != self.rank_of[message.to]
    }

    /// Returns the index of a message in a table of all possible messages.
    fn place_of(&self, message: Message) -> usize {
        place_of(message, self.micro_batches)
    }

    /// Returns the number of possible messages, on one rank or between ranks.
    fn places(&self) -> usize {
        2 * self.stages() * self.micro_batches
    }

    /// Returns the passes of a rank, in order.
    pub fn passes(&self, rank: usize) -> impl Iterator<Item = Pass> + '_ {
        self.actions[rank].iter().filter_map(|action| match action {
            Action::Compute(pass) => Some(*pass),
            _ => None,
        })
    }
}
