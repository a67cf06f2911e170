//! The interface of an operation of a recorded block. Whatever runs, differentiates, plans or estimates a recording
//! knows operations by this trait alone, so an operation is one file, in this crate or in another one.

use std::{fmt::Debug, ops::Range};

use lockstep_comm::CommError;
use lockstep_plan::work::Kept;
use lockstep_tensor::{View, Write};

#[cfg(feature = "faults")]
use crate::faults::Fault;
use crate::{
    column_scale::ColumnScale,
    facts::Facts,
    replay::{InputGradients, Run},
    shapes::Shapes,
    work_context::{Work, WorkContext},
};

/// An operation of a recorded block, recorded by [`Recorder::push`](crate::Recorder::push).
///
/// It holds its operands as [`Value`](crate::Value)s and [`ParameterIndex`](crate::ParameterIndex)es, states its
/// [`Facts`], and calls kernels on the views that a [`Run`] resolves them to. It allocates nothing while it runs.
/// Its results depend on shapes and inputs only: a forward may run again to recompute values that were not saved.
pub trait Op: Debug + Send + Sync {
    /// Returns the operands, the saved activations of each backward, and what planning may assume.
    fn facts(&self) -> Facts;

    /// Computes the outputs.
    ///
    /// # Errors
    /// If a collective fails or times out, as in all functions that run.
    fn forward(&self, run: &Run<'_>) -> Result<(), CommError>;

    /// Computes the gradients of the inputs from `dy`, the gradient of the output. Only the activations that
    /// [`Facts::saved_for_inputs`] names may be read.
    ///
    /// # Errors
    /// If a collective fails or times out.
    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        let _ = (run, dy, dx);
        unreachable!("no such instruction is derived: input gradients of {self:?}")
    }

    /// Computes the gradients of the trained parameters from `dy`, the gradient of the output. Only the activations
    /// that [`Facts::saved_for_weights`] names may be read.
    ///
    /// # Errors
    /// If a collective fails or times out.
    fn backward_weights(&self, run: &Run<'_>, dy: View<'_>) -> Result<(), CommError> {
        let _ = (run, dy);
        unreachable!("no such instruction is derived: weight gradients of {self:?}")
    }

    /// Computes a loss with the gradients of its input and its trained parameters, for [`Facts::is_loss`]. The gradients
    /// are seeded with [`Run::seed`].
    ///
    /// # Errors
    /// If a collective fails or times out.
    fn backward_loss(&self, run: &Run<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        let _ = (run, dx);
        unreachable!("no such instruction is derived: {self:?} is no loss")
    }

    /// Computes a range of rows of the output into `y`, for [`Facts::is_row_product`]. The rows have the bits that they
    /// have in the whole output.
    fn forward_rows(&self, run: &Run<'_>, rows: Range<usize>, y: View<'_>) {
        let _ = (run, rows, y);
        unreachable!("no such instruction is derived: rows of {self:?}")
    }

    /// Computes a range of rows of the gradient of the input into `dx`, for [`Facts::is_row_product`]; `dy` has all rows.
    fn backward_rows(&self, run: &Run<'_>, dy: View<'_>, rows: Range<usize>, dx: View<'_>, write: Write) {
        let _ = (run, dy, rows, dx, write);
        unreachable!("no such instruction is derived: rows of the gradient of {self:?}")
    }

    /// Returns the tasks of a pass in order, with their cost. The default is one memory-bound task.
    fn work(&self, context: &WorkContext<'_>) -> Vec<Work> {
        vec![context.stream()]
    }

    /// Returns what a framework without memory planning saves besides the values that gradients need: dropout masks,
    /// attention scores and logits.
    fn kept(&self, shapes: &Shapes) -> Kept {
        let _ = shapes;
        Kept::default()
    }

    /// Returns where a positive factor on each column of the output can be applied instead; `None` if the columns are proportional neither
    /// to parameters nor to columns of an input.
    fn column_scale(&self) -> Option<ColumnScale> {
        None
    }

    /// Returns the elements of a block of keys and values that travels around the context-parallel group; 0 for an
    /// operation without a ring.
    fn ring_elements(&self, shapes: &Shapes) -> usize {
        let _ = shapes;
        0
    }

    /// Applies a fault that a test injects.
    #[cfg(feature = "faults")]
    fn inject(&mut self, fault: Fault) {
        let _ = fault;
    }
}
