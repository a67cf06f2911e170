//! Parameters of one unit, as its program accesses them.
//!
//! A program refers to parameters by index. [`UnitParameters`] maps an index to the weights that kernels read and to
//! the gradient that they contribute to.

use lockstep_graph::{ParameterIndex, Parameters, StreamedExperts};
use lockstep_plan::ParameterId;
use lockstep_tensor::{Matrix, View, Write};

use crate::{Gradients, Weights};

/// Parameters of one unit, as its program accesses them.
pub struct UnitParameters<'a> {
    /// Parameter id of each of the program's parameter indices.
    pub ids: &'a [ParameterId],
    /// Weights that kernels read.
    pub weights: Weights<'a>,
    /// Gradients; `None` without a backward.
    pub gradients: Option<&'a Gradients>,
}

impl Parameters for UnitParameters<'_> {
    fn weight(&self, index: ParameterIndex) -> View<'_> {
        self.weights.view(self.ids[index.0])
    }

    fn matrix(&self, index: ParameterIndex) -> Matrix<'_> {
        self.weights.matrix(self.ids[index.0])
    }

    fn streamed_experts(&self, stack: ParameterIndex) -> Option<StreamedExperts<'_>> {
        self.weights.streamed_experts(self.ids[stack.0])
    }

    fn exact(&self, index: ParameterIndex) -> View<'_> {
        let id = self.ids[index.0];
        self.weights.exact.and_then(|store| store.get(id)).unwrap_or_else(|| self.weights.view(id))
    }

    fn gradient(&self, index: ParameterIndex) -> (View<'_>, Write) {
        self.gradients.expect("a backward is given gradients").contribute(self.ids[index.0])
    }

    fn gradient_rows(&self, table: ParameterIndex) -> Option<View<'_>> {
        self.gradients.expect("a backward is given gradients").rows(self.ids[table.0])
    }
}
