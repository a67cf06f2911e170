//! Memory of the micro-batches in flight in a stage of the model.

use std::ops::Range;

use lockstep_graph::BlockShape;
use lockstep_model::RecordedModel;
use lockstep_plan::{DType, MemoryCategory, ModelProfile, StageMemory};
use lockstep_tensor::{Arena, Buffer, Tensor, TensorError};

use crate::{
    Groups,
    offloaded_frames::{FrameId, OffloadedFrames},
    passes::PassLocation,
};

/// A stage of the model on this rank.
#[derive(Debug)]
pub(crate) struct Stage {
    pub(crate) units: Range<usize>,
    pub(crate) slots: Vec<Slot>,
    /// Gradients of the stage's input, to be sent to the stage before; empty for the first stage.
    pub(crate) send_buffers: Vec<Buffer>,
}

/// Memory of one micro-batch in a stage.
#[derive(Debug)]
pub(crate) struct Slot {
    /// Frame of each unit, which ends with the unit's output or this rank's slice of it; `None` if it is offloaded to
    /// disk.
    pub(crate) frames: Vec<Option<Buffer>>,
    /// Output for the next stage, if it is not in the frame of the last unit.
    pub(crate) output: Option<Buffer>,
    /// Values that the deferred weight gradients of each unit read; empty unless the backward is split.
    pub(crate) deferred: Vec<Buffer>,
    /// Output of the stage before, or this rank's slice of it; `None` for the first stage.
    pub(crate) input: Option<Buffer>,
    /// Gradient of the output, received from the next stage; `None` for the last stage.
    pub(crate) output_gradient: Option<Buffer>,
    pub(crate) ids: Tensor,
    pub(crate) labels: Tensor,
    pub(crate) positions: Tensor,
    pub(crate) document_starts: Tensor,
    /// True if a sequence of the micro-batch holds more than one document.
    pub(crate) keeps_documents_apart: bool,
    pub(crate) dropout_keys: Tensor,
    /// Named inputs, `[samples, elements]`, in the order of the model's declarations.
    pub(crate) inputs: Vec<Tensor>,
}

impl Slot {
    /// Allocates memory for a micro-batch in `stage`. With `are_on_disk`, frames that can be offloaded get no memory
    /// here.
    ///
    /// # Errors
    /// If memory runs out.
    pub(crate) fn new(
        model: &RecordedModel,
        profile: &ModelProfile,
        stage: &StageMemory,
        arena: &Arena,
        are_on_disk: bool,
    ) -> Result<Self, TensorError> {
        let StageMemory { units, splits_backward, .. } = stage;
        let shape = model.program(0).shape();
        let tokens = shape.tokens();
        let category = MemoryCategory::Activations;
        let input = |dtype, dims: &[usize]| Tensor::zeros(arena, dtype, dims, category);
        let has_after = units.end < model.units();
        let output = profile.input_bytes(units.end).filter(|_| are_on_disk && has_after);
        let border = |bytes: Option<usize>| bytes.map(|bytes| arena.allocate(bytes, category)).transpose();
        let deferred = units.clone().filter(|_| *splits_backward);
        Ok(Self {
            frames: units
                .clone()
                .map(|unit| border(profile.frame_in_memory_bytes(stage, unit, are_on_disk)))
                .collect::<Result<_, _>>()?,
            output: border(output)?,
            deferred: deferred
                .map(|unit| arena.allocate(model.program(unit).deferred_bytes(), category))
                .collect::<Result<_, _>>()?,
            input: border(profile.input_bytes(units.start))?,
            output_gradient: border(has_after.then_some(profile.boundary_bytes))?,
            ids: input(DType::U32, &[tokens])?,
            labels: input(DType::I32, &[tokens])?,
            positions: input(DType::U32, &[tokens])?,
            document_starts: input(DType::U32, &[tokens * profile.context.attended()])?,
            keeps_documents_apart: false,
            dropout_keys: input(DType::U32, &[shape.sequences, 2])?,
            inputs: model
                .inputs()
                .iter()
                .map(|named| input(named.dtype, &[shape.sequences, named.elements()]))
                .collect::<Result<_, _>>()?,
        })
    }
}

/// Returns the positions of a rank's tokens in the sequences of a micro-batch.
pub(crate) fn counted_positions(groups: &Groups, shape: BlockShape) -> Vec<u32> {
    let place = groups.context_place();
    let seq_len = shape.seq_len * place.ranks;
    let tokens = place.token_ranges(shape.sequences, seq_len).flatten();
    tokens.map(|token| (token % seq_len) as u32).collect()
}

/// Returns the frame of a unit, in memory or read back from disk.
pub(crate) fn frame<'a>(
    stages: &'a [Stage],
    offloaded: Option<&'a OffloadedFrames>,
    place: PassLocation,
    unit: usize,
) -> &'a Buffer {
    let Stage { units, slots, .. } = &stages[place.stage];
    match (&slots[place.slot].frames[unit - units.start], offloaded) {
        (Some(frame), _) => frame,
        (None, Some(offloaded)) => offloaded.get(FrameId::new(place, unit)),
        (None, None) => unreachable!("a frame is in memory or on disk"),
    }
}
