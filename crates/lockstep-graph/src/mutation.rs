//! Faults that a test puts in, to see whether it would be noticed: each is a sum left out or a number taken from the wrong place.
//!
//! Without the feature `mutations`, which nothing but that test asks for, none can be active and the compiler removes the
//! places where they would act.

/// A fault. What it is said to do happens on every rank alike, so that none waits for an operation that others leave out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Mutation {
    /// The gradients of what all ranks read are not summed.
    GradientsNotSummed = 1,
    /// The tokens of other ranks are taken to be the own ones.
    TokensNotGathered,
    /// Of the gradients of gathered tokens only the own summand counts.
    GatheredGradientsNotSummed,
    /// Of summands only the own one counts.
    SummandsNotSummed,
    /// Of summands of the own tokens only the own one counts.
    SummandsOfTokensNotSummed,
    /// The gradients of other ranks' tokens are taken to be the own ones.
    GradientsOfTokensNotGathered,
    /// The softmax statistics of other parts of the vocabulary are taken to be the own ones.
    StatisticsNotGathered,
    /// Each summand has the bias in it.
    BiasOnEveryRank,
    /// Every part of a vocabulary is looked up as if it began with token 0.
    VocabularyFromZero,
    /// Tokens are at the positions that they have among the rank's own.
    PositionsFromZero,
    /// Dropout masks are those of the first heads.
    DropoutFromFirstHead,
    /// Dropout masks are those of the first tokens.
    DropoutFromFirstToken,
    /// Gradients of which tensor-parallel ranks have summands are not summed.
    SharedGradientsNotSummed,
    /// Gradients are not summed over replicas.
    ReplicasNotSummed,
    /// Gradients are not summed over the ranks that share out the model's state.
    ShardsNotSummed,
    /// What a rank owns of the gradients is not summed over replicas.
    OwnedNotSummed,
    /// The weights that other ranks own and have updated are left as they were.
    WeightsNotGathered,
    /// Weights that were overwritten since they were gathered are read without being gathered again.
    EvictedWeightsRead,
    /// What neighbours keep of gathered weights stays as it was before an update.
    SecondaryNotRenewed,
    /// What an embedding contributes to a tied table is not summed over ranks.
    TiedRowsNotSummed,
    /// What an embedding contributes to a tied table is left out.
    TiedRowsNotAdded,
    /// Ranks do not agree on the rows that embeddings look up.
    MarksNotAgreed,
    /// The gradient norm is that of the own shards.
    NormOfOwnShards,
    /// The gradient norm counts what several ranks hold once for each.
    NormCountsCopies,
    /// Initial weights of a shard are those of the tensor's first elements.
    WeightsFromFirstElement,
    /// 1/G counts the own replica's tokens only.
    OwnTokensOnly,
    /// Tokens and losses of all ranks are summed, not those of one rank of each replica.
    EveryRankCounts,
    /// All replicas read the samples of the first.
    SamplesOfFirstReplica,
    /// A stage of a pipeline reads zeros for what the stage before computed.
    ActivationsNotSent,
    /// A stage of a pipeline reads zeros for the gradient from the stage after.
    GradientsNotSentBack,
    /// A tied table of the first and the last stage is not summed over both.
    TiedEndsNotSummed,
    /// What experts have made of other ranks' tokens is taken to be that of the own ones.
    TokensOfExpertsNotGathered,
    /// The gradients of other ranks' tokens for experts are taken to be the own ones.
    GradientsForExpertsNotGathered,
    /// A router counts the own part of each sequence as if it were all of them.
    RoutersCountOwnTokens,
    /// Rows that have come from other ranks to their experts are lost.
    RowsForExpertsLost,
    /// What experts of other ranks have made of rows is lost.
    RowsOfExpertsLost,
    /// Gradients that have come from other ranks to the experts of their rows are lost.
    GradientsForRowsLost,
    /// The gradients of rows that other ranks' experts have had are lost.
    GradientsOfRowsLost,
    /// Gradients of experts are not summed over the ranks that hold them.
    ExpertsNotSummed,
    /// Experts have the numbers of the first rank's.
    ExpertsFromFirst,
    /// Keys and values of other ranks on the ring are taken to be the own ones.
    KeysNotPassedOn,
    /// Of the gradients of keys and values that went round only the last rank's summand counts.
    KeyGradientsNotPassedOn,
    /// Gathered keys and values of other ranks are taken to be the own ones.
    KeysNotGathered,
    /// Of the gradients of gathered keys and values only the own summand counts.
    GatheredKeyGradientsNotSummed,
    /// Tokens that others should have sent for heads are taken to be the own ones.
    TokensNotExchanged,
    /// Heads that others should have sent for tokens are taken to be the own ones.
    HeadsNotExchanged,
    /// Gradients of tokens that were exchanged for heads do not go back.
    TokenGradientsNotExchanged,
    /// Gradients of heads that were exchanged for tokens do not go back.
    HeadGradientsNotExchanged,
    /// All ranks that share sequences read the tokens of the first.
    TokensOfFirstContextRank,
    /// Dropout masks are those of the tokens of the first of the ranks that share sequences.
    DropoutOfFirstContextRank,
    /// Tokens that others of a row should have sent for blocks are taken to be the own ones.
    TokensNotExchangedForBlocks,
    /// Blocks that others of a row should have sent for tokens are taken to be the own ones.
    BlocksNotExchangedForTokens,
    /// Gradients of tokens that were exchanged for blocks do not go back.
    GradientsOfBlocksNotExchanged,
    /// Gradients of blocks that were exchanged for tokens do not go back.
    GradientsOfTokensNotExchanged,
    /// Blocks of inputs of others of a row are taken to be the own ones.
    InputBlocksNotSent,
    /// Blocks of weights of others of a column are taken to be the own ones.
    WeightBlocksNotSent,
    /// In the backward, blocks of weights of others of a column are taken to be the own ones.
    WeightBlocksNotSentAgain,
    /// Of the gradient of a block of inputs only the own summand counts.
    InputBlockGradientsNotSummed,
    /// In the backward, blocks of inputs of others of a row are taken to be the own ones.
    InputBlocksNotSentAgain,
    /// Of the gradient of a block of weights only the own summand counts.
    WeightBlockGradientsNotSummed,
    /// Gradients of the biases that the ranks of a column share are not summed.
    ColumnGradientsNotSummed,
    /// The second block of a product replaces the first, and is not added to it.
    BlocksNotAdded,
    /// All rows of a square take their sequences to be those of the first.
    SequencesOfFirstRow,
    /// The last chunk of what is gathered beside products is taken to be the own one.
    ChunkNotGathered,
    /// Products read the last chunk of what is gathered beside them before it has come.
    ChunkNotAwaited,
    /// Of the last chunk of what is summed beside products only the own summand counts.
    ChunkNotSummed,
    /// A rank works with its own weights as they were before they were quantized.
    OwnWeightsNotQuantized,
    /// What gradients lost to their codes is not added to the next ones.
    ResidualNotAdded,
    /// The slices that other ranks keep of a block's input are taken to be the own one.
    SlicesNotGathered,
}

impl Mutation {
    /// All of them.
    pub const ALL: [Self; 69] = [
        Self::GradientsNotSummed,
        Self::TokensNotGathered,
        Self::GatheredGradientsNotSummed,
        Self::SummandsNotSummed,
        Self::SummandsOfTokensNotSummed,
        Self::GradientsOfTokensNotGathered,
        Self::StatisticsNotGathered,
        Self::BiasOnEveryRank,
        Self::VocabularyFromZero,
        Self::PositionsFromZero,
        Self::DropoutFromFirstHead,
        Self::DropoutFromFirstToken,
        Self::SharedGradientsNotSummed,
        Self::ReplicasNotSummed,
        Self::ShardsNotSummed,
        Self::OwnedNotSummed,
        Self::WeightsNotGathered,
        Self::EvictedWeightsRead,
        Self::SecondaryNotRenewed,
        Self::TiedRowsNotSummed,
        Self::TiedRowsNotAdded,
        Self::MarksNotAgreed,
        Self::NormOfOwnShards,
        Self::NormCountsCopies,
        Self::WeightsFromFirstElement,
        Self::OwnTokensOnly,
        Self::EveryRankCounts,
        Self::SamplesOfFirstReplica,
        Self::ActivationsNotSent,
        Self::GradientsNotSentBack,
        Self::TiedEndsNotSummed,
        Self::TokensOfExpertsNotGathered,
        Self::GradientsForExpertsNotGathered,
        Self::RoutersCountOwnTokens,
        Self::RowsForExpertsLost,
        Self::RowsOfExpertsLost,
        Self::GradientsForRowsLost,
        Self::GradientsOfRowsLost,
        Self::ExpertsNotSummed,
        Self::ExpertsFromFirst,
        Self::KeysNotPassedOn,
        Self::KeyGradientsNotPassedOn,
        Self::KeysNotGathered,
        Self::GatheredKeyGradientsNotSummed,
        Self::TokensNotExchanged,
        Self::HeadsNotExchanged,
        Self::TokenGradientsNotExchanged,
        Self::HeadGradientsNotExchanged,
        Self::TokensOfFirstContextRank,
        Self::DropoutOfFirstContextRank,
        Self::TokensNotExchangedForBlocks,
        Self::BlocksNotExchangedForTokens,
        Self::GradientsOfBlocksNotExchanged,
        Self::GradientsOfTokensNotExchanged,
        Self::InputBlocksNotSent,
        Self::WeightBlocksNotSent,
        Self::WeightBlocksNotSentAgain,
        Self::InputBlockGradientsNotSummed,
        Self::InputBlocksNotSentAgain,
        Self::WeightBlockGradientsNotSummed,
        Self::ColumnGradientsNotSummed,
        Self::BlocksNotAdded,
        Self::SequencesOfFirstRow,
        Self::ChunkNotGathered,
        Self::ChunkNotAwaited,
        Self::ChunkNotSummed,
        Self::OwnWeightsNotQuantized,
        Self::ResidualNotAdded,
        Self::SlicesNotGathered,
    ];
}

#[cfg(feature = "mutations")]
static ACTIVE: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(0);

/// Puts a fault into the whole process, or takes it out.
#[cfg(feature = "mutations")]
pub fn activate(mutation: Option<Mutation>) {
    ACTIVE.store(mutation.map_or(0, |mutation| mutation as u8), std::sync::atomic::Ordering::SeqCst);
}

/// Whether the fault is in.
#[cfg(feature = "mutations")]
pub fn active(mutation: Mutation) -> bool {
    ACTIVE.load(std::sync::atomic::Ordering::SeqCst) == mutation as u8
}

/// Whether the fault is in: no.
#[cfg(not(feature = "mutations"))]
pub const fn active(_: Mutation) -> bool {
    false
}
