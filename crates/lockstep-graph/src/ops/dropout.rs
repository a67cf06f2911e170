//! Dropout. Its mask is a function of the sample, the token and the feature, so it is the same under every placement and
//! is never saved.

use lockstep_comm::CommError;
use lockstep_plan::work::Kept;
use lockstep_tensor::{TokenPositions, View};

#[cfg(feature = "faults")]
use crate::faults::Fault;
use crate::{
    block::{DropoutSite, TokenRange, Value},
    facts::Facts,
    op::Op,
    placement::Placement,
    recorder::Recorder,
    replay::{InputGradients, Run},
    shapes::Shapes,
};

#[derive(Debug)]
struct Dropout {
    x: Value,
    site: DropoutSite,
    /// The local tokens and the first local column, which key the mask.
    tokens: TokenRange,
    first_feature: u32,
    y: Value,
    /// True if `x` has one row per sequence.
    is_of_sequences: bool,
}

impl Recorder {
    /// Records dropout; records nothing in inference or for probability 0.
    #[track_caller]
    pub fn dropout(&mut self, x: Value, probability: f32) -> Value {
        let Some(site) = self.dropout_site(probability) else { return x };
        let placement = self.placement(x);
        let first_feature = match placement {
            Placement::ShardColumns { parts } => {
                self.place.rank * parts / self.place.ranks * self.values[x.0].columns
            }
            Placement::ShardBlocks(grid) => grid.column * self.values[x.0].columns,
            _ => 0,
        } as u32;
        let y = self.same_shape(x);
        let is_of_sequences = self.local_rows(x) != self.rows_of(placement);
        let tokens = if is_of_sequences {
            TokenRange { first: 0, len: self.local_rows(x) }
        } else {
            self.tokens_of(placement)
        };
        self.push(Dropout { x, site, tokens, first_feature, y, is_of_sequences });
        y
    }
}

impl Dropout {
    fn mask(&self, run: &Run<'_>, x: View<'_>, y: View<'_>) {
        let places = if self.is_of_sequences { TokenPositions::whole(1) } else { run.places(self.tokens) };
        run.queue().dropout(run.dropout(self.site), places, self.first_feature, x, y);
    }
}

impl Op for Dropout {
    fn facts(&self) -> Facts {
        Facts { is_cheap: true, vector_flops: [2, 2, 0], ..Facts::in_place("dropout", self.x, self.y) }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        self.mask(run, run.value(self.x), run.value(self.y));
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        self.mask(run, dy, dx.view(0));
        Ok(())
    }

    fn kept(&self, shapes: &Shapes) -> Kept {
        Kept { dropped: shapes.elements(self.y), ..Kept::default() }
    }

    #[cfg(feature = "faults")]
    fn inject(&mut self, fault: Fault) {
        if fault == Fault::DropoutFromFirstToken {
            self.tokens.first = 0;
        }
    }
}
