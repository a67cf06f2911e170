//! Fault injection for recorded blocks, to test that the tests notice: a shard offset or count is replaced by a wrong one.
//!
//! A fault changes the recording before it is compiled ([`Recorder::finish`](crate::Recorder::finish)); no other code
//! knows about faults.

use std::cell::Cell;

use lockstep_plan::{Among, Shard};

use crate::{block::BatchInput, operation::Operation, recorder::Recorder};

/// A wrong offset or count in a recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Every rank of a row-parallel layer adds the bias to its partial sum.
    BiasOnEveryRank,
    /// No rank of a row-parallel layer adds the bias to its partial sum.
    BiasOnNoRank,
    /// Every shard of a vocabulary-parallel embedding is looked up as if its first row were token 0.
    VocabularyFromZero,
    /// Every shard of vocabulary-parallel logits is taken for the first columns of the vocabulary.
    LogitsFromZero,
    /// Position embeddings of a token range are those of the first tokens.
    PositionsFromZero,
    /// Attention dropout masks are those of the first heads.
    DropoutFromFirstHead,
    /// Attention dropout masks are those of the first sequences.
    DropoutFromFirstSequence,
    /// Dropout masks of a token range are those of the first tokens.
    DropoutFromFirstToken,
    /// Routers take their token range for the first tokens of the micro-batch.
    RoutesFromFirstToken,
    /// Every rank acts as rank 0 of its context-parallel group.
    FirstOfContext,
    /// Parameter shards of the tensor-parallel group begin at element 0 of their dimension.
    ShardsFromZero,
    /// Parameter blocks of two-dimensional tensor parallelism begin at element 0 of their inner dimension.
    BlocksFromZero,
    /// Every rank's experts are numbered like rank 0's.
    ExpertsFromFirst,
    /// Expert shards of the tensor-parallel group begin at element 0 of their dimension.
    PartsOfExpertsFromZero,
    /// Ranks that hold a copy of the same shard each count it once, so that it enters the norm several times.
    ReplicasCountedTwice,
    /// Partial gradients are taken for complete ones.
    PartialTakenAsReduced,
}

impl Fault {
    /// Every fault that can be injected.
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
        Self::ReplicasCountedTwice,
        Self::PartialTakenAsReduced,
    ];
}

thread_local! {
    static FAULT: Cell<Option<Fault>> = const { Cell::new(None) };
}

/// Injects a fault into the blocks that this thread records from now on; `None` removes it.
pub fn record_with(fault: Option<Fault>) {
    FAULT.set(fault);
}

/// Applies the thread's fault to a recording.
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
            (Fault::ReplicasCountedTwice, _) => share.copies = 1,
            (Fault::PartialTakenAsReduced, _) => share.summands = 1,
            _ => {}
        }
    }
}
