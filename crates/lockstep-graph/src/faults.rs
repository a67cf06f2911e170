//! Faults in recorded blocks, for tests of tests: numbers that are those of another place, as if a rank took itself for another.
//!
//! A fault changes what was recorded before it is compiled ([`Recorder::finish`](crate::Recorder::finish)); nothing else knows of it.

use std::cell::Cell;

use lockstep_plan::{Among, Shard};

use crate::{BatchInput, Recorder, operation::Operation};

/// A number of a recording that a fault takes from the wrong place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Each summand has the bias in it.
    BiasOnEveryRank,
    /// No summand has the bias in it.
    BiasOnNoRank,
    /// Every part of a table is looked up as if it began with token 0.
    VocabularyFromZero,
    /// The logits of every part of a vocabulary count as those of its first tokens.
    LogitsFromZero,
    /// A rank looks up the positions of the first tokens.
    PositionsFromZero,
    /// Dropout masks of attention are those of the first heads.
    DropoutFromFirstHead,
    /// Dropout masks of attention are those of the first sequences.
    DropoutFromFirstSequence,
    /// Dropout masks are those of the first tokens.
    DropoutFromFirstToken,
    /// Routers count their tokens as the first of their sequences.
    RoutesFromFirstToken,
    /// Every rank takes itself for the first of its context-parallel group.
    FirstOfContext,
    /// Shards of parameters begin at element 0 of their dimension.
    ShardsFromZero,
    /// Blocks of parameters that ranks of a square hold begin at element 0 of their inner dimension.
    BlocksFromZero,
    /// Experts have the numbers of the first rank's.
    ExpertsFromFirst,
    /// Parts of experts begin at element 0.
    PartsOfExpertsFromZero,
    /// Each of several ranks that hold the same of a parameter counts it.
    CopiesCounted,
    /// Gradients of which several ranks have summands are taken to be whole.
    SummandsTakenForSums,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 16] = [
        Self::BiasOnEveryRank,
        Self::BiasOnNoRank,
        Self::VocabularyFromZero,
        Self::LogitsFromZero,
        Self::PositionsFromZero,
        Self::DropoutFromFirstHead,
        Self::DropoutFromFirstSequence,
        Self::DropoutFromFirstToken,
        Self::RoutesFromFirstToken,
        Self::FirstOfContext,
        Self::ShardsFromZero,
        Self::BlocksFromZero,
        Self::ExpertsFromFirst,
        Self::PartsOfExpertsFromZero,
        Self::CopiesCounted,
        Self::SummandsTakenForSums,
    ];
}

thread_local! {
    static FAULT: Cell<Option<Fault>> = const { Cell::new(None) };
}

/// Puts a fault into the blocks that this thread records from now on; `None` takes it out.
pub fn record_with(fault: Option<Fault>) {
    FAULT.set(fault);
}

/// The recording with the thread's fault in it.
pub(crate) fn put_into(mut recorder: Recorder) -> Recorder {
    if let Some(fault) = FAULT.get() {
        recorder.operations.iter_mut().for_each(|operation| change_operation(operation, fault));
        change_parameters(&mut recorder, fault);
        if fault == Fault::FirstOfContext {
            recorder.context.rank = 0;
        }
    }
    recorder
}

fn change_operation(operation: &mut Operation, fault: Fault) {
    match (fault, operation) {
        (Fault::BiasOnEveryRank, Operation::Linear { adds_bias, .. }) => *adds_bias = true,
        (Fault::BiasOnNoRank, Operation::Linear { adds_bias, .. }) => *adds_bias = false,
        (Fault::VocabularyFromZero, Operation::Embedding { first_id, .. }) => *first_id = 0,
        (Fault::LogitsFromZero, Operation::OutputLoss { split: Some(split), .. }) => split.first_column = 0,
        (Fault::PositionsFromZero, Operation::Embedding { input: BatchInput::Positions, tokens, .. })
        | (Fault::DropoutFromFirstToken, Operation::Dropout { tokens, .. }) => tokens.first = 0,
        (Fault::DropoutFromFirstHead, Operation::Attention(attention)) => attention.first_head = 0,
        (Fault::DropoutFromFirstSequence, Operation::Attention(attention)) => attention.sequences.first = 0,
        (Fault::RoutesFromFirstToken, Operation::Route(route)) => route.tokens.first = 0,
        _ => {}
    }
}

fn change_parameters(recorder: &mut Recorder, fault: Fault) {
    let from_zero = |shard: &mut Option<Shard>| shard.iter_mut().for_each(|shard| shard.start = 0);
    for share in recorder.parameters.iter_mut().map(|parameter| &mut parameter.share) {
        match (fault, share.among) {
            (Fault::ShardsFromZero, Among::Tensor | Among::TensorColumn)
            | (Fault::ExpertsFromFirst, Among::Experts) => from_zero(&mut share.shard),
            (Fault::BlocksFromZero, Among::Tensor | Among::TensorColumn)
            | (Fault::PartsOfExpertsFromZero, Among::Experts) => from_zero(&mut share.inner),
            (Fault::CopiesCounted, _) => share.copies = 1,
            (Fault::SummandsTakenForSums, _) => share.summands = 1,
            _ => {}
        }
    }
}
