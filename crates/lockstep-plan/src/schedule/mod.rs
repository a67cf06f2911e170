//! Pipeline schedules as data: what each rank of a pipeline does in one step, in which order.
//!
//! A model is cut into *stages*, counted from its first layer; a rank holds one stage or several (its *chunks*). For
//! each stage and micro-batch there is a forward, and a backward in one piece or in two, of which the second, for the
//! weights, may wait. A [`Schedule`] is one list of [`Action`]s for each rank, and an engine, the simulator and a
//! picture read the same lists literally.
//!
//! - [`Kind`] names the published schedules; each is a pure function to lists of [`Pass`]es (`generate`).
//! - One function derives sends, receives and the rest from such lists, whoever wrote them (`lower`). A user may
//!   give a CSV file ([`passes_from_csv`]).
//! - A `Schedule` can only be made of lists that are complete (`validate`) and cannot deadlock (`deadlock`); otherwise
//!   there is a [`ScheduleError`] with everything that is wrong.
//! - [`Schedule::simulate`] tells what happens when, and what memory is held, given the durations of the passes.

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

/// The longest schedules that are made, in forwards of all ranks: enough for anything but a mistake.
const MOST_PASSES: usize = 1 << 22;

/// Which part of the work on a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PassKind {
    /// The forward.
    Forward,
    /// The whole backward: gradients of the inputs and of the weights.
    Backward,
    /// The first half of a split backward: gradients of the inputs.
    BackwardInput,
    /// The second half: gradients of the weights.
    BackwardWeight,
}

impl PassKind {
    const ALL: [Self; 4] = [Self::Forward, Self::Backward, Self::BackwardInput, Self::BackwardWeight];

    /// The letter in text: that of `torch.distributed.pipelining`.
    pub const fn letter(self) -> char {
        match self {
            Self::Forward => 'F',
            Self::Backward => 'B',
            Self::BackwardInput => 'I',
            Self::BackwardWeight => 'W',
        }
    }

    /// Whether it yields the gradient of the stage's input.
    pub const fn makes_input_gradient(self) -> bool {
        matches!(self, Self::Backward | Self::BackwardInput)
    }

    /// Whether it adds to the gradients of the stage's weights.
    pub const fn makes_weight_gradient(self) -> bool {
        matches!(self, Self::Backward | Self::BackwardWeight)
    }
}

/// One pass of one micro-batch through one stage. In text `{stage}{F|B|I|W}{micro-batch}`: `3F0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pass {
    /// What is done.
    pub kind: PassKind,
    /// The stage, counted from the model's first layer.
    pub stage: usize,
    /// The micro-batch.
    pub micro_batch: usize,
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.stage, self.kind.letter(), self.micro_batch)
    }
}

/// A text that is no [`Pass`].
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

/// A number in digits alone, without the sign that `parse` would let pass.
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

/// What one stage sends to the next (activations) or to the one before (their gradients).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Message {
    /// The stage that made it.
    pub from: usize,
    /// The stage that needs it: a neighbour.
    pub to: usize,
    /// The micro-batch.
    pub micro_batch: usize,
}

impl Message {
    /// Whether it is the output of a forward, not the input gradient of a backward.
    pub const fn is_activation(&self) -> bool {
        self.to > self.from
    }

    /// What a pass makes for a neighbouring stage, if there is one.
    pub(crate) fn made_by(pass: Pass, stages: usize) -> Option<Self> {
        let Pass { kind, stage: from, micro_batch } = pass;
        let to = match kind {
            PassKind::Forward if from < stages.saturating_sub(1) => from + 1,
            PassKind::Backward | PassKind::BackwardInput if from > 0 => from - 1,
            _ => return None,
        };
        Some(Self { from, to, micro_batch })
    }

    /// What a pass needs from a neighbouring stage, if there is one.
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

/// The number of a message between neighbours, with so many micro-batches: a stage gets at most one value and one gradient of each.
fn place_of(message: Message, micro_batches: usize) -> usize {
    (2 * message.to + usize::from(message.is_activation())) * micro_batches + message.micro_batch
}

/// What a rank does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Action {
    /// A pass. It waits for the message that it needs.
    Compute(Pass),
    /// Hands a message over and goes on without waiting.
    Send(Message),
    /// Lends the memory for a message and goes on without waiting.
    Receive(Message),
    /// The gradients of a stage are complete on this rank: their reduction over the data-parallel ranks may start.
    ReduceGradients {
        /// The stage.
        stage: usize,
    },
    /// The update of the weights. It needs the global gradient norm, and so waits for all ranks.
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

/// What each rank of a pipeline does in one step: lists that are complete and cannot deadlock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    micro_batches: usize,
    rank_of: Vec<usize>,
    actions: Vec<Vec<Action>>,
    /// What follows of each stage, and which those of each rank are: read off once, for a search asks thousands of times.
    flows: Vec<StageFlow>,
    stages_of: Vec<Vec<usize>>,
}

/// How a stage is gone through.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct StageFlow {
    /// Micro-batches that are in it at once: from the receive, or the forward, to the last pass.
    slots: usize,
    /// Whether any of its backwards is split.
    splits_backward: bool,
}

impl Schedule {
    /// A published schedule for `ranks` with `chunks` stages each.
    pub fn new(kind: Kind, ranks: usize, micro_batches: usize, chunks: usize) -> Result<Self, ScheduleError> {
        Self::from_passes(micro_batches, &kind.passes(ranks, micro_batches, chunks)?)
    }

    /// The same without looking once more for what tests have shown of every published schedule: that it is complete and cannot
    /// deadlock. For those who make thousands.
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

    /// A schedule from the passes of each rank. A stage belongs to the rank that runs its first forward.
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

    /// A schedule from full lists; `rank_of` tells the rank of each stage.
    pub fn from_actions(
        rank_of: Vec<usize>,
        micro_batches: usize,
        actions: Vec<Vec<Action>>,
    ) -> Result<Self, ScheduleError> {
        let schedule = Self::of_lists(micro_batches, rank_of, actions);
        let problems = validate::problems(&schedule);
        if problems.is_empty() { Ok(schedule.with_flows()) } else { Err(ScheduleError(problems)) }
    }

    /// Lists that may yet be none of a schedule.
    fn of_lists(micro_batches: usize, rank_of: Vec<usize>, actions: Vec<Vec<Action>>) -> Self {
        let mut stages_of = vec![Vec::new(); actions.len()];
        for (stage, rank) in rank_of.iter().enumerate() {
            if let Some(stages) = stages_of.get_mut(*rank) {
                stages.push(stage);
            }
        }
        Self { micro_batches, rank_of, actions, flows: Vec::new(), stages_of }
    }

    /// The same with what follows of each stage; of valid lists alone.
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

    /// Pipeline ranks.
    pub fn ranks(&self) -> usize {
        self.actions.len()
    }

    /// Stages of the whole pipeline.
    pub fn stages(&self) -> usize {
        self.rank_of.len()
    }

    /// Micro-batches of a step.
    pub fn micro_batches(&self) -> usize {
        self.micro_batches
    }

    /// The rank that holds a stage.
    pub fn rank_of(&self, stage: usize) -> usize {
        self.rank_of[stage]
    }

    /// The stages of a rank, in ascending order: its chunks.
    pub fn stages_of(&self, rank: usize) -> impl Iterator<Item = usize> + '_ {
        self.stages_of[rank].iter().copied()
    }

    /// Micro-batches that are in a stage at once: from the receive, or the forward, to the last pass.
    pub fn slots(&self, stage: usize) -> usize {
        self.flows[stage].slots
    }

    /// Whether gradients of a stage's weights may come later than those of its inputs.
    pub fn splits_backward(&self, stage: usize) -> bool {
        self.flows[stage].splits_backward
    }

    /// What a rank does, in this order.
    pub fn actions(&self, rank: usize) -> &[Action] {
        &self.actions[rank]
    }

    /// Whether a message goes from one rank to another.
    fn crosses_ranks(&self, message: Message) -> bool {
        self.rank_of[message.from] != self.rank_of[message.to]
    }

    /// The number of a message among all that there can be, for tables of them.
    fn place_of(&self, message: Message) -> usize {
        place_of(message, self.micro_batches)
    }

    /// How many such numbers there are.
    fn places(&self) -> usize {
        2 * self.stages() * self.micro_batches
    }

    /// The passes of a rank, in this order.
    pub fn passes(&self, rank: usize) -> impl Iterator<Item = Pass> + '_ {
        self.actions[rank].iter().filter_map(|action| match action {
            Action::Compute(pass) => Some(*pass),
            _ => None,
        })
    }
}
