//! Views of buffers as values that pass between units: unit outputs, their gradients, and the messages between pipeline
//! stages.

use lockstep_model::RecordedModel;
use lockstep_tensor::{Buffer, View};

/// Returns a view of `buffer` as the output of `unit`, `[local rows, local columns]`. The buffer may have room for more.
pub(crate) fn boundary<'a>(model: &RecordedModel, unit: usize, buffer: &'a Buffer) -> View<'a> {
    let program = model.program(unit);
    buffer.view(program.shape().dtype, 0, [program.output_rows(), program.output_columns()])
}

/// Returns a flat view of the message that a stage sends to the next one, at `offset_bytes` of `buffer`: the output of
/// `unit`, or this rank's slice of it.
pub(crate) fn message<'a>(
    model: &RecordedModel,
    unit: usize,
    buffer: &'a Buffer,
    offset_bytes: usize,
) -> View<'a> {
    let dtype = model.program(unit).shape().dtype;
    buffer.view(dtype, offset_bytes, [message_bytes(model, unit) / dtype.size_bytes()])
}

/// Returns the bytes of a [`message`].
pub(crate) fn message_bytes(model: &RecordedModel, unit: usize) -> usize {
    if model.slices_output(unit) {
        model.slice_elements() * model.program(unit).shape().dtype.size_bytes()
    } else {
        model.program(unit).output_bytes().len()
    }
}
