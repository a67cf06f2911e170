//! Fault injection for recorded blocks, to test that the tests notice: a shard offset or count is replaced by a wrong one.
//!
//! A fault changes the recording before it is compiled ([`Recorder::finish`](crate::Recorder::finish)): its parameters, and
//! the operations that override [`Op::inject`](crate::Op::inject).

use std::cell::Cell;

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

/// Returns the fault of this thread.
pub(crate) fn current() -> Option<Fault> {
    FAULT.get()
}
