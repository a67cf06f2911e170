//! Runs a recorded model over one micro-batch: the frames, the workspace, and the order of the units.

use lockstep_comm::CommError;
use lockstep_graph::{Activity, Batch, Cost, Program, Replay, Timeline, Trace};
use lockstep_model::RecordedModel;
use lockstep_plan::{
    DType, MemoryCategory,
    random::{key_from_name, mix},
};
use lockstep_tensor::{Arena, Buffer, Kernels, Tensor, TensorError, View};

use crate::{Gradients, Groups, UnitParameters, Weights};

/// A micro-batch in host memory; all slices but the last are `[sequences · seq_len]`.
#[derive(Debug, Clone, Copy)]
pub struct HostBatch<'a> {
    /// Token ids.
    pub ids: &'a [u32],
    /// What follows each token, -100 where masked.
    pub labels: &'a [i32],
    /// Position of each token in its sequence.
    pub positions: &'a [u32],
    /// For each token, the index within its sequence of the first token of its document: attention sees nothing
    /// before it. 0 everywhere costs nothing.
    pub document_starts: &'a [u32],
    /// Global sample number of each sequence, counted through all epochs: the key of its dropout masks.
    pub sample_numbers: &'a [u64],
}

/// The memory of one micro-batch in flight.
pub struct Runner {
    /// One frame for each unit.
    frames: Vec<Buffer>,
    workspace: Buffer,
    /// Gradients of the values between units; a unit reads one and writes the other.
    boundary: [Buffer; 2],
    ids: Tensor,
    labels: Tensor,
    positions: Tensor,
    document_starts: Tensor,
    /// Whether a sequence of the micro-batch holds more than one document.
    keeps_documents_apart: bool,
    dropout_keys: Tensor,
    inverse_frequencies: Option<Tensor>,
    host_keys: Vec<u32>,
    host_losses: Vec<f32>,
    seed: u64,
    /// Those who share the model's blocks.
    groups: Groups,
    timeline: Timeline,
}

impl Runner {
    /// Memory for `model` on one rank, whose dropout masks follow from `seed`.
    ///
    /// # Errors
    /// [`TensorError::OutOfMemory`].
    pub fn new(model: &RecordedModel, arena: &Arena, seed: u64) -> Result<Self, TensorError> {
        Self::in_groups(model, arena, seed, Groups::alone())
    }

    /// Memory for `model`, which was recorded for this rank of `groups`.
    ///
    /// # Errors
    /// [`TensorError::OutOfMemory`].
    pub fn in_groups(
        model: &RecordedModel,
        arena: &Arena,
        seed: u64,
        groups: Groups,
    ) -> Result<Self, TensorError> {
        arena.require(Self::predicted_activation_bytes(model), MemoryCategory::Activations)?;
        let shape = model.program(0).shape();
        let tokens = shape.tokens();
        let frames = (0..model.units())
            .map(|unit| arena.allocate(model.program(unit).frame_bytes(), MemoryCategory::Activations))
            .collect::<Result<_, _>>()?;
        let workspace_bytes = (0..model.units()).map(|unit| model.program(unit).workspace_bytes()).max();
        let boundary_bytes = boundary_bytes(model);
        let boundary = || arena.allocate(boundary_bytes, MemoryCategory::Activations);
        let input = |dtype, dims: &[usize]| Tensor::zeros(arena, dtype, dims, MemoryCategory::Activations);
        Ok(Self {
            frames,
            workspace: arena.allocate(workspace_bytes.unwrap_or(0), MemoryCategory::Workspace)?,
            boundary: [boundary()?, boundary()?],
            ids: input(DType::U32, &[tokens])?,
            labels: input(DType::I32, &[tokens])?,
            positions: input(DType::U32, &[tokens])?,
            document_starts: input(DType::U32, &[tokens])?,
            keeps_documents_apart: false,
            dropout_keys: input(DType::U32, &[shape.sequences, 2])?,
            inverse_frequencies: model
                .inverse_frequencies()
                .map(|table| Tensor::from_slice(arena, [table.len()], table, MemoryCategory::Parameters))
                .transpose()?,
            host_keys: vec![0; 2 * shape.sequences],
            host_losses: vec![0.0; tokens],
            // Dropout must not walk in step with the initial weights or the data order.
            seed: mix(seed ^ key_from_name("dropout")),
            groups,
            timeline: Timeline::default(),
        })
    }

    /// Bytes of activations that [`Runner::new`] books for `model`: frames, boundaries and the micro-batch itself.
    pub fn predicted_activation_bytes(model: &RecordedModel) -> usize {
        let shape = model.program(0).shape();
        // The model that overflows this is refused by the arena.
        let frames = (0..model.units())
            .map(|unit| Arena::booked_bytes(model.program(unit).frame_bytes()))
            .fold(0, usize::saturating_add);
        let boundary = boundary_bytes(model);
        let inputs = 4 * Arena::booked_bytes(4 * shape.tokens()) + Arena::booked_bytes(8 * shape.sequences);
        frames.saturating_add(2 * Arena::booked_bytes(boundary) + inputs)
    }

    /// Where the times of operations are recorded while it is on.
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// Runs the forward of every unit.
    ///
    /// # Errors
    /// [`CommError`]: none on one rank.
    pub fn forward(
        &mut self,
        model: &RecordedModel,
        queue: &dyn Kernels,
        weights: Weights<'_>,
        batch: &HostBatch<'_>,
    ) -> Result<(), CommError> {
        self.run_forward(model, queue, weights, batch, Program::forward)
    }

    /// Runs the forward of every unit as far as [`Runner::backward`] needs it, which computes the losses.
    ///
    /// # Errors
    /// [`CommError`].
    pub fn forward_for_backward(
        &mut self,
        model: &RecordedModel,
        queue: &dyn Kernels,
        weights: Weights<'_>,
        batch: &HostBatch<'_>,
    ) -> Result<(), CommError> {
        self.run_forward(model, queue, weights, batch, Program::forward_for_backward)
    }

    fn run_forward(
        &mut self,
        model: &RecordedModel,
        queue: &dyn Kernels,
        weights: Weights<'_>,
        batch: &HostBatch<'_>,
        forward: fn(&Program, &Replay<'_>) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let begin = self.timeline.begin();
        self.load(batch);
        self.timeline.end(begin, || (Activity::of_step("load batch"), Cost::default()));
        for unit in 0..model.units() {
            let parameters = UnitParameters { ids: model.unit_parameters(unit), weights, gradients: None };
            forward(model.program(unit), &self.replay(model, unit, queue, &parameters))?;
        }
        Ok(())
    }

    /// The head's output after a forward: losses or logits, as the model was recorded.
    pub fn output(&self, model: &RecordedModel) -> View<'_> {
        let head = model.units() - 1;
        model.program(head).output(&self.frames[head])
    }

    /// The sum of the losses of the last forward, or of the backward that followed it, over the tokens that are not
    /// masked.
    pub fn loss_sum(&mut self, model: &RecordedModel) -> f64 {
        let head = model.units() - 1;
        let begin = self.timeline.begin();
        let losses = model.program(head).output(&self.frames[head]);
        losses.reshape([losses.elements()]).copy_to(&mut self.host_losses);
        let sum = self.host_losses.iter().map(|&loss| f64::from(loss)).sum();
        self.timeline.end(begin, || (Activity::of_step("sum losses"), Cost::default()));
        sum
    }

    /// Runs the backward of every unit that has one after a forward (of either kind), contributing to `gradients`, and
    /// calls `after_unit` with each. `seed_gradient` is that of each token's loss.
    ///
    /// # Errors
    /// [`CommError`], and what `after_unit` says, at once.
    pub fn backward<E: From<CommError>>(
        &mut self,
        model: &RecordedModel,
        queue: &dyn Kernels,
        weights: Weights<'_>,
        gradients: &mut Gradients,
        seed_gradient: f32,
        mut after_unit: impl FnMut(&mut Gradients, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let between = model.program(0);
        let boundary = |buffer: usize| -> View<'_> {
            let shape = [between.output_rows(), between.output_columns()];
            self.boundary[buffer].view(between.shape().dtype, 0, shape)
        };
        let last = model.units() - 1;
        let Some(first) = model.first_trained_unit() else { return Ok(()) };
        for unit in (first..=last).rev() {
            let parameters =
                UnitParameters { ids: model.unit_parameters(unit), weights, gradients: Some(&*gradients) };
            let dy = (unit < last).then(|| boundary(unit % 2));
            let dx = (unit > first).then(|| boundary((unit + 1) % 2));
            let replay = self.replay(model, unit, queue, &parameters);
            model.program(unit).backward(&replay, dy, dx, seed_gradient)?;
            after_unit(gradients, unit)?;
        }
        Ok(())
    }

    fn load(&mut self, batch: &HostBatch<'_>) {
        for (pair, &sample) in self.host_keys.chunks_exact_mut(2).zip(batch.sample_numbers) {
            let key = mix(self.seed ^ mix(sample));
            pair.copy_from_slice(&[key as u32, (key >> 32) as u32]);
        }
        self.ids.view().copy_from(batch.ids);
        self.labels.view().copy_from(batch.labels);
        self.positions.view().copy_from(batch.positions);
        self.document_starts.view().copy_from(batch.document_starts);
        self.keeps_documents_apart = batch.document_starts.iter().any(|&start| start != 0);
        self.dropout_keys.view().copy_from(&self.host_keys);
    }

    fn replay<'a>(
        &'a self,
        model: &'a RecordedModel,
        unit: usize,
        queue: &'a dyn Kernels,
        parameters: &'a UnitParameters<'a>,
    ) -> Replay<'a> {
        Replay {
            queue,
            parameters,
            batch: Batch {
                ids: self.ids.view(),
                labels: Some(self.labels.view()),
                positions: self.positions.view(),
                document_starts: self.keeps_documents_apart.then(|| self.document_starts.view()),
                dropout_keys: Some(self.dropout_keys.view()),
                inverse_frequencies: self.inverse_frequencies.as_ref().map(Tensor::view),
            },
            input: unit.checked_sub(1).map(|before| model.program(before).output(&self.frames[before])),
            frame: &self.frames[unit],
            workspace: &self.workspace,
            first_dropout_site: RecordedModel::first_dropout_site(unit),
            cache: None,
            peers: self.groups.peers(),
            trace: Some(Trace { timeline: &self.timeline, unit }),
        }
    }
}

/// Bytes of the values between units.
fn boundary_bytes(model: &RecordedModel) -> usize {
    let between = model.program(0);
    between.output_rows() * between.output_columns() * between.shape().dtype.size_bytes()
}
