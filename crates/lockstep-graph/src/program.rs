//! A recorded block, ready to be replayed: its parameters, its phases, and the memory that each takes.

use std::ops::Range;

use lockstep_tensor::{Buffer, View};

use crate::{
    block::{BlockShape, ParameterDeclaration, ParameterIndex, RunningUpdate, Value, ValueInfo},
    facts::Facts,
    instruction::Phase,
    op::Op,
    reports::Report,
    shapes::Shapes,
};

/// A compiled block, ready to be replayed any number of times.
#[derive(Debug)]
pub struct Program {
    pub(crate) shapes: Shapes,
    pub(crate) operations: Vec<Box<dyn Op>>,
    /// Facts of each operation.
    pub(crate) facts: Vec<Facts>,
    pub(crate) input: Option<Value>,
    pub(crate) output: Value,
    pub(crate) forward: Phase,
    pub(crate) backward: Phase,
    pub(crate) backward_inputs: Phase,
    pub(crate) backward_weights: Phase,
    pub(crate) frame_bytes: usize,
    pub(crate) deferred_bytes: usize,
}

impl Program {
    /// Returns the parameters, in the order in which the block declares them.
    pub fn parameters(&self) -> &[ParameterDeclaration] {
        &self.shapes.parameters
    }

    /// Returns the losses and metrics of the unit, the loss that it returns first; empty if it does not end in a loss.
    pub fn reports(&self) -> &[Report] {
        &self.shapes.reports
    }

    /// Number of elements of a report.
    pub fn report_elements(&self, report: usize) -> usize {
        self.shapes.values[self.shapes.reports[report].values.0].elements()
    }

    /// Returns the numbers of a report in the frame, f32 `[rows, 1]`: of a loss after a forward or a backward, of a metric
    /// after a forward.
    pub fn report<'a>(&self, frame: &'a Buffer, report: usize) -> View<'a> {
        self.in_frame(frame, self.shapes.reports[report].values)
    }

    /// Returns the shape that the program was recorded for; under context parallelism, with the local tokens of each sequence.
    pub fn shape(&self) -> BlockShape {
        self.shapes.block
    }

    /// Returns true if the gradient of the output is needed: something in the block is trained, or an earlier block
    /// needs its gradient.
    pub fn has_backward(&self) -> bool {
        self.shapes.training.differentiates(self.output)
    }

    /// Number of columns of the output.
    pub fn output_columns(&self) -> usize {
        self.shapes.values[self.output.0].columns
    }

    /// Byte range of the output in a frame; all other saved values lie before it.
    pub fn output_bytes(&self) -> Range<usize> {
        let start = self.forward.values[self.output.0].map_or(0, |slot| slot.offset_bytes);
        start..start + self.shapes.values[self.output.0].bytes()
    }

    /// Returns true if no backward of the block reads its output, so that only the next unit needs it.
    pub fn forgets_output(&self) -> bool {
        let backward = [&self.backward, &self.backward_inputs, &self.backward_weights];
        !backward.iter().any(|phase| phase.touches_output)
    }

    /// Returns the parameter that biases the choice of experts. It has no gradient; the load of the experts updates it.
    pub fn selection_bias(&self) -> Option<ParameterIndex> {
        self.facts.iter().find_map(|facts| facts.selection_bias)
    }

    /// Returns the parameters that have no gradient and that the engine updates otherwise.
    pub fn buffers(&self) -> impl Iterator<Item = ParameterIndex> {
        self.facts.iter().flat_map(|facts| facts.buffers.iter().copied())
    }

    /// Returns the parameters that the optimizer updates: those that are not frozen, without the buffers.
    pub fn trained(&self) -> impl Iterator<Item = ParameterIndex> {
        let indices = (0..self.parameters().len()).map(ParameterIndex);
        indices.filter(|index| self.shapes.trains(*index) && self.buffers().all(|buffer| buffer != *index))
    }

    /// Returns the changes of running statistics.
    pub fn running_updates(&self) -> impl Iterator<Item = RunningUpdate> {
        self.facts.iter().filter_map(|facts| facts.running)
    }

    /// Returns true if the program runs collectives over the data-parallel ranks.
    pub fn reads_replicas(&self) -> bool {
        self.facts.iter().any(|facts| facts.reads_replicas)
    }

    /// Returns the statistics of a change of running statistics, after a forward: f32 `[3, channels]`.
    pub fn statistics<'a>(&self, frame: &'a Buffer, update: RunningUpdate) -> View<'a> {
        self.in_frame(frame, update.statistics)
    }

    /// Returns the number of experts of the block; `None` for a block without experts.
    pub fn experts(&self) -> Option<usize> {
        let counts = self.facts.iter().find_map(|facts| facts.slot_counts)?;
        Some(self.shapes.values[counts.0].columns)
    }

    /// Returns the number of slots per sequence and expert in the last forward, f32 `[sequences, experts]`; `None`
    /// for a block without experts.
    pub fn load<'a>(&self, frame: &'a Buffer) -> Option<View<'a>> {
        let counts = self.facts.iter().find_map(|facts| facts.slot_counts)?;
        Some(self.in_frame(frame, counts))
    }

    /// Returns a value that the forward saved.
    pub(crate) fn in_frame<'a>(&self, frame: &'a Buffer, value: Value) -> View<'a> {
        let ValueInfo { rows, columns, dtype } = self.shapes.values[value.0];
        let slot = self.forward.values[value.0].expect("a saved value has a place");
        frame.view(dtype, slot.offset_bytes, [rows, columns])
    }

    /// Number of rows of the input and the output: the tokens of a micro-batch, or this rank's tokens of it.
    pub fn output_rows(&self) -> usize {
        self.shapes.values[self.output.0].rows
    }

    /// Size of a frame in bytes.
    pub fn frame_bytes(&self) -> usize {
        self.frame_bytes
    }

    /// Workspace of a forward and a fused backward, in bytes.
    pub fn workspace_bytes(&self) -> usize {
        self.forward.workspace_bytes.max(self.backward.workspace_bytes)
    }

    /// Workspace of a forward and a split backward, in bytes.
    pub fn split_workspace_bytes(&self) -> usize {
        let split = self.backward_inputs.workspace_bytes.max(self.backward_weights.workspace_bytes);
        self.forward.workspace_bytes.max(split)
    }

    /// Size of a deferred buffer in bytes: the values that a split backward saves for the weight gradients.
    pub fn deferred_bytes(&self) -> usize {
        self.deferred_bytes
    }

    /// Size of the communication buffer for collectives that overlap with products, in bytes.
    pub fn overlap_buffer_bytes(&self) -> usize {
        self.phases().map(|phase| phase.overlap_buffer_bytes).max().unwrap_or(0)
    }

    /// Largest number of chunks that can be in flight; 0 if no collective overlaps with products.
    pub fn transit_chunks(&self) -> usize {
        let of = |phase: &Phase| phase.collectives.iter().map(|transit| transit.chunks.len()).sum();
        self.phases().map(of).max().unwrap_or(0)
    }

    /// Elements of the largest block of keys and values that travels around the context-parallel group; 0 without ring attention.
    pub fn ring_elements(&self) -> usize {
        self.operations.iter().map(|operation| operation.ring_elements(&self.shapes)).max().unwrap_or(0)
    }

    /// Returns the operations with their facts.
    pub(crate) fn recorded(&self) -> impl Iterator<Item = (&dyn Op, &Facts)> {
        self.operations.iter().map(Box::as_ref).zip(&self.facts)
    }

    fn phases(&self) -> impl Iterator<Item = &Phase> {
        [&self.forward, &self.backward, &self.backward_inputs, &self.backward_weights].into_iter()
    }
}
