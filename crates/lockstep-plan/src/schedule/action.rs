//! Vocabulary of schedules: passes of micro-batches through stages, messages between stages, and the actions of a rank.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

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
    pub(super) const ALL: [Self; 4] =
        [Self::Forward, Self::Backward, Self::BackwardInput, Self::BackwardWeight];

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
pub(super) fn place_of(message: Message, micro_batches: usize) -> usize {
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
