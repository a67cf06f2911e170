//! Exchanges between the ranks that share a block, as they are replayed.

use lockstep_comm::CommError;
use lockstep_tensor::View;

use crate::{
    Peers, Value,
    layout::Exchange,
    mutation::{Mutation, active},
    replay::Run,
};

impl Run<'_> {
    /// `y` is `x` in another layout.
    pub(crate) fn exchange(
        &self,
        exchange: Exchange,
        x: View<'_>,
        y: View<'_>,
        scratch: Option<Value>,
    ) -> Result<(), CommError> {
        match exchange {
            Exchange::SumGradients => unreachable!("its output is its input"),
            Exchange::GatherTokens => self.gather(x, y, Mutation::TokensNotGathered),
            Exchange::Sum => self.sum(x, y, Mutation::SummandsNotSummed),
            Exchange::SumTokens => self.sum_rows(x, y, Mutation::SummandsOfTokensNotSummed),
            Exchange::OwnTokens => {
                self.own_rows(x, y);
                Ok(())
            }
            Exchange::AllTokens => self.gather(x, y, Mutation::TokensOfExpertsNotGathered),
            Exchange::TokensToBlocks => {
                self.tokens_to_blocks(x, y, scratch, Mutation::TokensNotExchangedForBlocks)
            }
            Exchange::BlocksToTokens => {
                self.blocks_to_tokens(x, y, scratch, Mutation::BlocksNotExchangedForTokens)
            }
        }
    }

    /// `dx` is the gradient of the value whose gradient in another layout is `dy`.
    pub(crate) fn exchange_gradient(
        &self,
        exchange: Exchange,
        dy: View<'_>,
        dx: View<'_>,
        scratch: Option<Value>,
    ) -> Result<(), CommError> {
        match exchange {
            Exchange::SumGradients => self.sum(dy, dx, Mutation::GradientsNotSummed),
            Exchange::GatherTokens => self.sum_rows(dy, dx, Mutation::GatheredGradientsNotSummed),
            Exchange::SumTokens => self.gather(dy, dx, Mutation::GradientsOfTokensNotGathered),
            Exchange::OwnTokens => self.gather(dy, dx, Mutation::GradientsForExpertsNotGathered),
            Exchange::AllTokens => {
                self.own_rows(dy, dx);
                Ok(())
            }
            Exchange::TokensToBlocks => {
                self.blocks_to_tokens(dy, dx, scratch, Mutation::GradientsOfBlocksNotExchanged)
            }
            Exchange::BlocksToTokens => {
                self.tokens_to_blocks(dy, dx, scratch, Mutation::GradientsOfTokensNotExchanged)
            }
            Exchange::Sum => unreachable!("the gradient of its input is that of its output"),
        }
    }

    /// `y = ` the sum of `x` over the ranks; may be in place.
    fn sum(&self, x: View<'_>, y: View<'_>, left_out: Mutation) -> Result<(), CommError> {
        if x.as_ptr() != y.as_ptr() {
            self.replay.queue.cast(x, y);
        }
        if active(left_out) {
            return Ok(());
        }
        self.peers().sum(y)
    }

    /// `rows = ` those of the sum of `summands` over the ranks that are this rank's.
    fn sum_rows(&self, summands: View<'_>, rows: View<'_>, left_out: Mutation) -> Result<(), CommError> {
        self.sum_rows_from(self.peers(), summands, rows, left_out)
    }

    /// `rows = ` those of `all` that are this rank's.
    fn own_rows(&self, all: View<'_>, rows: View<'_>) {
        let (len, rank) = (rows.shape().as_matrix().0, self.peers().group.rank());
        self.replay.queue.cast(all.rows(rank * len..(rank + 1) * len), rows);
    }

    /// [`Run::sum_rows`] over some ranks.
    pub(crate) fn sum_rows_from(
        &self,
        peers: Peers<'_>,
        summands: View<'_>,
        rows: View<'_>,
        left_out: Mutation,
    ) -> Result<(), CommError> {
        if active(left_out) {
            let (len, rank) = (rows.shape().as_matrix().0, peers.group.rank());
            self.replay.queue.cast(summands.rows(rank * len..(rank + 1) * len), rows);
            return Ok(());
        }
        peers.sum_rows(summands, rows)
    }

    /// `all = ` the `part` of each rank, one after the other.
    pub(crate) fn gather(&self, part: View<'_>, all: View<'_>, left_out: Mutation) -> Result<(), CommError> {
        self.gather_from(self.peers(), part, all, left_out)
    }

    /// [`Run::gather`] from some ranks.
    pub(crate) fn gather_from(
        &self,
        peers: Peers<'_>,
        part: View<'_>,
        all: View<'_>,
        left_out: Mutation,
    ) -> Result<(), CommError> {
        if active(left_out) {
            let (len, parts) = (part.elements(), all.elements() / part.elements());
            let (part, all) = (part.reshape([1, len]), all.reshape([parts, len]));
            (0..parts).for_each(|to| self.replay.queue.cast(part, all.rows(to..to + 1)));
            return Ok(());
        }
        peers.gather(part, all)
    }
}
