//! Values that cross the borders between units, as buffers have them: outputs, their gradients, and what one stage of a pipeline sends
//! the next.

use lockstep_model::RecordedModel;
use lockstep_tensor::{Buffer, View};

/// A buffer as a value between units.
pub(crate) fn boundary<'a>(model: &RecordedModel, buffer: &'a Buffer) -> View<'a> {
    let between = model.program(0);
    buffer.view(between.shape().dtype, 0, [between.output_rows(), between.output_columns()])
}

/// What a stage hands to the next one, as a buffer has it from an offset on: the output of its last unit, or a slice of it.
pub(crate) fn message<'a>(
    model: &RecordedModel,
    unit: usize,
    buffer: &'a Buffer,
    offset_bytes: usize,
) -> View<'a> {
    let dtype = model.program(unit).shape().dtype;
    buffer.view(dtype, offset_bytes, [message_bytes(model, unit) / dtype.size_bytes()])
}

/// Bytes of that.
pub(crate) fn message_bytes(model: &RecordedModel, unit: usize) -> usize {
    if model.slices_output(unit) {
        model.slice_elements() * model.program(unit).shape().dtype.size_bytes()
    } else {
        boundary_bytes(model)
    }
}

/// Bytes of the values between units.
pub(crate) fn boundary_bytes(model: &RecordedModel) -> usize {
    let between = model.program(0);
    between.output_rows() * between.output_columns() * between.shape().dtype.size_bytes()
}
