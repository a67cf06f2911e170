//! The schedule itself: the action list of each rank, with the stages and memory slots that follow from the lists.

use super::action::{Action, Message, Pass, PassKind, place_of};

/// A pipeline schedule: one list of actions per rank, complete and free of deadlocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    pub(super) micro_batches: usize,
    pub(super) rank_of: Vec<usize>,
    pub(super) actions: Vec<Vec<Action>>,
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
    /// Wraps lists that may not be valid yet.
    pub(super) fn of_lists(micro_batches: usize, rank_of: Vec<usize>, actions: Vec<Vec<Action>>) -> Self {
        let mut stages_of = vec![Vec::new(); actions.len()];
        for (stage, rank) in rank_of.iter().enumerate() {
            if let Some(stages) = stages_of.get_mut(*rank) {
                stages.push(stage);
            }
        }
        Self { micro_batches, rank_of, actions, flows: Vec::new(), stages_of }
    }

    /// Adds the properties of each stage; the lists must be valid.
    pub(super) fn with_flows(mut self) -> Self {
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
    pub(super) fn crosses_ranks(&self, message: Message) -> bool {
        self.rank_of[message.from] != self.rank_of[message.to]
    }

    /// Returns the index of a message in a table of all possible messages.
    pub(super) fn place_of(&self, message: Message) -> usize {
        place_of(message, self.micro_batches)
    }

    /// Returns the number of possible messages, on one rank or between ranks.
    pub(super) fn places(&self) -> usize {
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
