//! Exchanges between the ranks that share a block, as they are replayed.

use lockstep_comm::CommError;
use lockstep_tensor::View;

use crate::{Value, layout::Exchange, replay::Run};

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
            Exchange::GatherTokens => self.peers().gather(x, y),
            Exchange::Sum => self.sum(x, y),
            Exchange::SumTokens => self.peers().sum_rows(x, y),
            Exchange::OwnTokens => {
                self.own_rows(x, y);
                Ok(())
            }
            Exchange::AllTokens => self.peers().gather(x, y),
            Exchange::TokensToBlocks => self.tokens_to_blocks(x, y, scratch),
            Exchange::BlocksToTokens => self.blocks_to_tokens(x, y, scratch),
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
            Exchange::SumGradients => self.sum(dy, dx),
            Exchange::GatherTokens => self.peers().sum_rows(dy, dx),
            Exchange::SumTokens => self.peers().gather(dy, dx),
            Exchange::OwnTokens => self.peers().gather(dy, dx),
            Exchange::AllTokens => {
                self.own_rows(dy, dx);
                Ok(())
            }
            Exchange::TokensToBlocks => self.blocks_to_tokens(dy, dx, scratch),
            Exchange::BlocksToTokens => self.tokens_to_blocks(dy, dx, scratch),
            Exchange::Sum => unreachable!("the gradient of its input is that of its output"),
        }
    }

    /// `y = ` the sum of `x` over the ranks; may be in place.
    #[track_caller]
    fn sum(&self, x: View<'_>, y: View<'_>) -> Result<(), CommError> {
        if x.as_ptr() != y.as_ptr() {
            self.replay.queue.cast(x, y);
        }
        self.peers().sum(y)
    }

    /// `rows = ` those of `all` that are this rank's.
    fn own_rows(&self, all: View<'_>, rows: View<'_>) {
        let (len, rank) = (rows.shape().as_matrix().0, self.peers().group.rank());
        self.replay.queue.cast(all.rows(rank * len..(rank + 1) * len), rows);
    }
}
