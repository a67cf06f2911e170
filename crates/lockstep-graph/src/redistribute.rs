//! Execution of the tensor-parallel collectives of a block, forward and backward.

use lockstep_comm::CommError;
use lockstep_tensor::View;

use crate::{Value, placement::Redistribute, replay::Run};

impl Run<'_> {
    /// Redistributes `x` to another placement and writes it to `y`.
    pub(crate) fn exchange(
        &self,
        exchange: Redistribute,
        x: View<'_>,
        y: View<'_>,
        scratch: Option<Value>,
    ) -> Result<(), CommError> {
        match exchange {
            Redistribute::AllReduceGradient => unreachable!("its output is its input"),
            Redistribute::AllGatherTokens => self.peers().gather(x, y),
            Redistribute::AllReduce => self.sum(x, y),
            Redistribute::ReduceScatterTokens => self.peers().sum_rows(x, y),
            Redistribute::SliceTokens => {
                self.own_rows(x, y);
                Ok(())
            }
            Redistribute::AllGatherReplicated => self.peers().gather(x, y),
            Redistribute::TokensToBlocks => self.tokens_to_blocks(x, y, scratch),
            Redistribute::BlocksToTokens => self.blocks_to_tokens(x, y, scratch),
        }
    }

    /// Writes to `dx` the gradient of a redistribution's input, given the gradient `dy` of its output.
    pub(crate) fn exchange_gradient(
        &self,
        exchange: Redistribute,
        dy: View<'_>,
        dx: View<'_>,
        scratch: Option<Value>,
    ) -> Result<(), CommError> {
        match exchange {
            Redistribute::AllReduceGradient => self.sum(dy, dx),
            Redistribute::AllGatherTokens => self.peers().sum_rows(dy, dx),
            Redistribute::ReduceScatterTokens => self.peers().gather(dy, dx),
            Redistribute::SliceTokens => self.peers().gather(dy, dx),
            Redistribute::AllGatherReplicated => {
                self.own_rows(dy, dx);
                Ok(())
            }
            Redistribute::TokensToBlocks => self.blocks_to_tokens(dy, dx, scratch),
            Redistribute::BlocksToTokens => self.tokens_to_blocks(dy, dx, scratch),
            Redistribute::AllReduce => unreachable!("the gradient of its input is that of its output"),
        }
    }

    /// Writes to `y` the all-reduced sum of `x`; the two may be the same view.
    #[track_caller]
    fn sum(&self, x: View<'_>, y: View<'_>) -> Result<(), CommError> {
        if x.as_ptr() != y.as_ptr() {
            self.replay.queue.cast(x, y);
        }
        self.peers().sum(y)
    }

    /// Copies this rank's range of the rows of `all` to `rows`.
    fn own_rows(&self, all: View<'_>, rows: View<'_>) {
        let (len, rank) = (rows.shape().as_matrix().0, self.peers().group.rank());
        self.replay.queue.cast(all.rows(rank * len..(rank + 1) * len), rows);
    }
}
