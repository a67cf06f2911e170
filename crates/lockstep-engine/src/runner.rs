//! Runs a recorded model over micro-batches: owns the frames and the workspace, and replays the units in order.
//!
//! A rank runs one or several stages of the model; without a pipeline, one stage is the whole model. Each micro-batch
//! in flight in a stage has a slot: a frame for each unit, and the stage's input.

use std::cell::Cell;

use lockstep_comm::LentBuffer;
use lockstep_graph::{
    Activity, Batch, CommunicationBuffer, ContextPeers, Cost, MAX_REPORTS, Program, Replay, Ring, Seed,
    Timeline, Trace,
};
use lockstep_model::RecordedModel;
use lockstep_plan::{
    DType, MemoryCategory, StageMemory,
    random::{key_from_name, mix},
    schedule::PassKind,
};
use lockstep_tensor::{Arena, Buffer, DiskTraffic, Element, Kernels, Tensor, TensorError, View, find_tensor};

use crate::{
    EngineError, ExpertLoad, Gradients, Groups, HostBatch, Offload, UnitParameters,
    boundaries::{boundary, message, message_bytes},
    offloaded_frames::{FrameId, OffloadedFrames},
    partitioned_activations::PartitionedActivations,
    passes::{PassLocation, StageBoundary},
    running::RunningSums,
    slots::{Slot, Stage, counted_positions, frame},
    weights::WeightSource,
};

/// Memory of the micro-batches in flight, and everything that a replay reads besides weights.
pub struct Runner {
    pub(crate) stages: Vec<Stage>,
    workspace: Buffer,
    /// Gradients of unit outputs; a unit's backward reads one and writes the other.
    boundary: [Buffer; 2],
    /// Gathered unit outputs, where each tensor-parallel rank saves only a slice of them.
    partitioned: Option<PartitionedActivations>,
    /// Frames that are offloaded to disk; `None` if all are in memory.
    offloaded: Option<OffloadedFrames>,
    constants: Vec<Tensor>,
    host_keys: Vec<u32>,
    host_losses: Vec<f32>,
    /// Sums of the model's reports since they were last taken.
    reported: [f64; MAX_REPORTS],
    /// Positions of this rank's tokens, counted from the beginning of their sequences.
    positions: Vec<u32>,
    seed: u64,
    /// Process groups of this rank.
    pub(crate) groups: Groups,
    /// Buffers for keys and values of other ranks in ring attention; `None` without it.
    ring: Option<Ring>,
    /// Buffer for collectives that overlap with matrix products; `None` without such overlap.
    communication_buffer: Option<CommunicationBuffer>,
    timeline: Timeline,
    /// Tokens routed to each expert since the step began.
    pub(crate) expert_load: ExpertLoad,
    /// Statistics of batch norms since the step began.
    pub(crate) running: RunningSums,
    /// Smallest router margin on this rank; `None` unless it is watched.
    pub(crate) router_margin: Option<Cell<f32>>,
    /// Returns true if the current step is to be abandoned; asked before each unit. `None` if no step is.
    pub(crate) abandons: Option<Box<dyn Fn() -> bool + Send + Sync>>,
}

/// Elements of the largest output or report of a model's last unit.
fn reported_elements(head: &Program) -> usize {
    let of_reports = (0..head.reports().len()).map(|report| head.report_elements(report));
    of_reports.fold(head.output_rows() * head.output_columns(), usize::max)
}

/// Purpose of a forward, which decides whether its activations are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A backward follows, so activations are saved.
    Training,
    /// No backward follows.
    Evaluation,
}

impl Runner {
    /// Allocates memory for `model` on one rank; `seed` determines the dropout masks.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn new(model: &RecordedModel, arena: &Arena, seed: u64) -> Result<Self, EngineError> {
        let stages = [StageMemory::whole(model.units())];
        Self::in_groups(model, arena, seed, Groups::alone(), &stages, None)
    }

    /// Allocates memory for `stages` of `model`, which was recorded for this rank of `groups`. With `offload`,
    /// activations are kept in a file.
    ///
    /// # Errors
    /// If memory runs out, or the file of offloaded activations cannot be made.
    pub(crate) fn in_groups(
        model: &RecordedModel,
        arena: &Arena,
        seed: u64,
        groups: Groups,
        stages: &[StageMemory],
        offload: Option<&Offload>,
    ) -> Result<Self, EngineError> {
        let profile = model.profile();
        let are_on_disk = offload.is_some();
        let mut handing_on = stages.iter().map(|stage| stage.units.end).filter(|end| *end < model.units());
        assert!(
            !are_on_disk || handing_on.all(|end| model.program(end - 1).forgets_output()),
            "what a stage hands on is not kept for its own backward"
        );
        arena.require(profile.activation_bytes(stages, are_on_disk), MemoryCategory::Activations)?;
        let losses = model.program(model.units() - 1);
        let sequences = model.program(0).shape().sequences;
        let memory = |stage: &StageMemory| {
            let slots = (0..stage.slots).map(|_| Slot::new(model, &profile, stage, arena, are_on_disk));
            let send_buffer = |_| arena.allocate(profile.boundary_bytes, MemoryCategory::Activations);
            Ok(Stage {
                units: stage.units.clone(),
                slots: slots.collect::<Result<_, TensorError>>()?,
                send_buffers: (0..stage.send_buffers())
                    .map(send_buffer)
                    .collect::<Result<_, TensorError>>()?,
            })
        };
        let units = || stages.iter().flat_map(|stage| stage.units.clone());
        let boundary = || arena.allocate(profile.boundary_bytes, MemoryCategory::Activations);
        Ok(Self {
            stages: stages.iter().map(memory).collect::<Result<_, TensorError>>()?,
            workspace: arena.allocate(profile.workspace_bytes(stages), MemoryCategory::Workspace)?,
            boundary: [boundary()?, boundary()?],
            partitioned: PartitionedActivations::new(model, stages, groups.tensor_place(), arena)?,
            offloaded: OffloadedFrames::new(offload, &profile, stages, arena)?,
            constants: model
                .constants()
                .iter()
                .map(|constant| constant.allocate(arena))
                .collect::<Result<_, TensorError>>()?,
            host_keys: vec![0; 2 * sequences],
            host_losses: vec![0.0; reported_elements(losses)],
            reported: [0.0; MAX_REPORTS],
            positions: counted_positions(&groups, model.program(0).shape()),
            // Dropout masks must be independent of the initial weights and the data order, which use the same seed.
            seed: mix(seed ^ key_from_name("dropout")),
            ring: Ring::new(units().map(|unit| model.program(unit)), arena)?,
            communication_buffer: CommunicationBuffer::new(units().map(|unit| model.program(unit)), arena)?,
            groups,
            timeline: Timeline::default(),
            expert_load: ExpertLoad::new(model),
            running: RunningSums::new(model),
            router_margin: None,
            abandons: None,
        })
    }

    /// Returns the bytes of activations that [`Runner::new`] books for `model`: frames, unit outputs' gradients and the
    /// micro-batch itself.
    pub fn predicted_activation_bytes(model: &RecordedModel) -> usize {
        model.profile().activation_bytes(&[StageMemory::whole(model.units())], false)
    }

    /// Returns the timeline, which records the times of operations while it is enabled.
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// Runs the forward of a stage on the micro-batch that was loaded into the slot of `place`.
    ///
    /// # Errors
    /// As [`Runner::forward`], or if the step is abandoned.
    pub(crate) fn forward_stage(
        &mut self,
        model: &RecordedModel,
        place: PassLocation,
        queue: &dyn Kernels,
        weights: &mut dyn WeightSource,
        purpose: Purpose,
    ) -> Result<(), EngineError> {
        let units = self.stages[place.stage].units.clone();
        let first = model.first_trained_unit();
        for unit in units.clone() {
            self.check_abandoned()?;
            self.make_ready(queue, weights, unit)?;
            self.on_disk(|frames| frames.begin(FrameId::new(place, unit)))?;
            if unit == units.start {
                self.gather_input(model, place, unit)?;
            }
            let weights = weights.weights();
            let parameters = UnitParameters { ids: model.unit_parameters(unit), weights, gradients: None };
            let mut replay = self.replay(model, place, unit, queue, &parameters);
            // A backward does not read this output, which may still be in flight to the next stage.
            let handed_on = self.stages[place.stage].slots[place.slot].output.as_ref();
            let handed_on = handed_on.filter(|_| unit + 1 == units.end);
            replay.output = replay.output.or_else(|| handed_on.map(|buffer| boundary(model, unit, buffer)));
            let program = model.program(unit);
            match purpose {
                Purpose::Training => program.forward_for_backward(&replay)?,
                Purpose::Evaluation => program.forward(&replay)?,
            }
            if let Some(slices) = self.partitioned.as_ref().filter(|_| model.slices_output(unit)) {
                let (buffer, offset_bytes) = self.output_of(model, place, unit);
                slices.keep(queue, unit, slices.slice(buffer, offset_bytes));
            }
            if let Some(counts) = program.load(frame(&self.stages, self.offloaded.as_ref(), place, unit)) {
                self.expert_load.add(unit, counts);
            }
            if purpose == Purpose::Training && !self.running.is_empty() {
                self.running.add(unit, program, frame(&self.stages, self.offloaded.as_ref(), place, unit));
            }
            let is_read_again = first.is_some_and(|first| unit + 1 >= first);
            let is_kept = purpose == Purpose::Training && is_read_again;
            if let Some(frames) = self.offloaded.as_mut().filter(|_| is_kept) {
                frames.end(FrameId::new(place, unit), unit + 1 == units.end)?;
            }
        }
        Ok(())
    }

    /// Returns the head's output after a forward: losses or logits, depending on how the model was recorded.
    ///
    /// # Panics
    /// If the head is not on this rank.
    pub fn output(&self, model: &RecordedModel) -> View<'_> {
        let place = PassLocation::first(self.stages.len() - 1);
        let head = model.units() - 1;
        model.program(head).output(frame(&self.stages, None, place, head))
    }

    /// Returns the sum over unmasked tokens of the losses of the last forward, or of the backward that followed it.
    ///
    /// # Panics
    /// If the head is not on this rank.
    pub fn loss_sum(&mut self, model: &RecordedModel) -> f64 {
        self.loss_sum_of(model, PassLocation::first(self.stages.len() - 1))
    }

    /// Returns the sum of the losses of a micro-batch; `place` must be in the stage that ends in the head.
    pub(crate) fn loss_sum_of(&mut self, model: &RecordedModel, place: PassLocation) -> f64 {
        let begin = self.timeline.begin();
        let head = model.units() - 1;
        let (program, frame) = (model.program(head), frame(&self.stages, None, place, head));
        let mut sum_of = |numbers: View<'_>| -> f64 {
            let host = &mut self.host_losses[..numbers.elements()];
            numbers.reshape([numbers.elements()]).read(&mut *host).wait();
            host.iter().map(|&number| f64::from(number)).sum()
        };
        let sum = sum_of(program.output(frame));
        self.reported[0] += sum;
        for report in 1..program.reports().len() {
            self.reported[report] += sum_of(program.report(frame, report));
        }
        self.timeline.end(begin, || (Activity::of_step("sum losses"), Cost::default()));
        sum
    }

    /// Returns the sums of the model's reports over the micro-batches whose losses were summed since the last call.
    pub(crate) fn take_reported(&mut self) -> [f64; MAX_REPORTS] {
        std::mem::take(&mut self.reported)
    }

    /// Runs a backward of `kind` of every unit of a stage down to the first trained one, after a forward of either
    /// purpose. Adds to `gradients`, and calls `after_unit` after each unit. With [`PassKind::BackwardInput`], weight
    /// gradients are deferred to a later [`PassKind::BackwardWeight`].
    ///
    /// # Errors
    /// As [`Runner::forward_stage`], or as soon as `after_unit` fails.
    #[expect(clippy::too_many_arguments, reason = "what is run, where, and what it contributes to")]
    pub(crate) fn backward_stage(
        &mut self,
        model: &RecordedModel,
        place: PassLocation,
        queue: &dyn Kernels,
        weights: &mut dyn WeightSource,
        gradients: &mut Gradients,
        seed: Seed,
        kind: PassKind,
        mut after_unit: impl FnMut(&mut Gradients, usize) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let units = self.stages[place.stage].units.clone();
        let Some(first) = model.first_trained_unit() else { return Ok(()) };
        for unit in (first.max(units.start)..units.end).rev() {
            self.check_abandoned()?;
            self.make_ready(queue, weights, unit)?;
            self.on_disk(|frames| frames.bring_back(FrameId::new(place, unit), first))?;
            self.gather_input(model, place, unit)?;
            let Stage { slots, send_buffers, .. } = &self.stages[place.stage];
            let slot = &slots[place.slot];
            let output = |buffer| boundary(model, unit, buffer);
            let weights = weights.weights();
            let parameters =
                UnitParameters { ids: model.unit_parameters(unit), weights, gradients: Some(&*gradients) };
            // A pass of weight gradients does not look at these buffers, which may be in flight.
            let dy = || match unit + 1 < units.end {
                true => Some(output(&self.boundary[unit % 2])),
                false => slot.output_gradient.as_ref().map(output),
            };
            let dx = || {
                if unit == first {
                    return None;
                }
                let buffer = match unit > units.start {
                    true => Some(&self.boundary[(unit + 1) % 2]),
                    false => send_buffers.get(place.send_buffer),
                };
                buffer.map(|buffer| boundary(model, unit - 1, buffer))
            };
            let deferred = || &slot.deferred[unit - units.start];
            let replay = self.replay(model, place, unit, queue, &parameters);
            let program = model.program(unit);
            match (kind.makes_input_gradient(), kind.makes_weight_gradient()) {
                (true, true) => program.backward(&replay, dy(), dx(), seed)?,
                (true, false) => program.backward_inputs(&replay, dy(), dx(), seed, deferred())?,
                (false, _) => program.backward_weights(&replay, deferred())?,
            }
            if let Some(frames) = self.offloaded.as_mut().filter(|_| kind.makes_weight_gradient()) {
                frames.forget(FrameId::new(place, unit), first);
            }
            after_unit(gradients, unit)?;
        }
        Ok(())
    }

    fn check_abandoned(&self) -> Result<(), EngineError> {
        let is_asked = self.abandons.as_ref().is_some_and(|is_asked| is_asked());
        if is_asked { Err(EngineError::Abandoned) } else { Ok(()) }
    }

    /// Waits until the weights of a unit are in memory, unsharded, in the type that kernels read.
    fn make_ready(
        &self,
        queue: &dyn Kernels,
        weights: &mut dyn WeightSource,
        unit: usize,
    ) -> Result<(), EngineError> {
        let begin = self.timeline.begin();
        weights.make_ready(queue, unit)?;
        self.timeline.end(begin, || (Activity::of_step("wait for weights"), Cost::default()));
        Ok(())
    }

    /// All-gathers the input of a unit where each tensor-parallel rank saves a slice of it: in its backward, and in the
    /// forward of a stage's first unit.
    fn gather_input(
        &self,
        model: &RecordedModel,
        place: PassLocation,
        unit: usize,
    ) -> Result<(), EngineError> {
        let (Some(before), Some(slices)) = (unit.checked_sub(1), &self.partitioned) else { return Ok(()) };
        let Some(peers) = self.groups.peers().filter(|_| model.slices_output(before)) else { return Ok(()) };
        let Stage { units, slots, .. } = &self.stages[place.stage];
        let (buffer, offset_bytes) = match &slots[place.slot].input {
            Some(input) if unit == units.start => (input, 0),
            _ => self.output_of(model, place, before),
        };
        let kept = slices.slice(buffer, offset_bytes);
        let begin = self.timeline.begin();
        slices.gather(peers, before, kept)?;
        self.timeline.end(begin, || (Activity::of_step("gather saved input"), Cost::default()));
        Ok(())
    }

    /// Returns the buffer and the byte offset of a unit's output, or of this rank's slice of it.
    pub(crate) fn output_of(
        &self,
        model: &RecordedModel,
        place: PassLocation,
        unit: usize,
    ) -> (&Buffer, usize) {
        let Stage { units, slots, .. } = &self.stages[place.stage];
        match &slots[place.slot].output {
            Some(output) if unit + 1 == units.end => (output, 0),
            _ => {
                let frame = frame(&self.stages, self.offloaded.as_ref(), place, unit);
                (frame, model.program(unit).output_bytes().start)
            }
        }
    }

    /// Runs `work` on the offloaded frames, if there are any, and records its time as waiting for the disk.
    fn on_disk(
        &mut self,
        work: impl FnOnce(&mut OffloadedFrames) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let Some(frames) = &mut self.offloaded else { return Ok(()) };
        let begin = self.timeline.begin();
        work(frames)?;
        self.timeline.end(begin, || (Activity::of_step("wait for disk"), Cost::default()));
        Ok(())
    }

    /// Returns the bytes of activations on disk.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.offloaded.as_ref().map_or(0, |frames| frames.staging.disk_bytes())
    }

    /// Returns the disk traffic of activations since the last call.
    pub(crate) fn take_disk_traffic(&mut self) -> DiskTraffic {
        self.offloaded.as_mut().map_or_else(DiskTraffic::default, |frames| frames.staging.take_traffic())
    }

    /// Lends the memory of a message that crosses a border of a stage, for as long as the message is in flight.
    pub(crate) fn lend(
        &mut self,
        model: &RecordedModel,
        place: PassLocation,
        border: StageBoundary,
    ) -> LentBuffer {
        let Stage { units, slots, send_buffers } = &mut self.stages[place.stage];
        let (slot, last) = (&mut slots[place.slot], units.end - 1);
        let output_bytes = |unit: usize| model.program(unit).output_bytes().len();
        let (buffer, start, bytes) = match border {
            StageBoundary::Input => (slot.input.as_mut(), 0, message_bytes(model, units.start - 1)),
            StageBoundary::InputGradient => {
                (send_buffers.get_mut(place.send_buffer), 0, output_bytes(units.start - 1))
            }
            StageBoundary::OutputGradient => (slot.output_gradient.as_mut(), 0, output_bytes(last)),
            StageBoundary::Output if slot.output.is_some() => {
                (slot.output.as_mut(), 0, message_bytes(model, last))
            }
            StageBoundary::Output => {
                let frame = slot.frames.last_mut().and_then(Option::as_mut);
                (frame, model.program(last).output_bytes().start, message_bytes(model, last))
            }
        };
        let buffer = buffer.expect("a stage has memory for what crosses its boundaries");
        LentBuffer::new(buffer.lend(start..start + bytes), DType::U8)
    }

    /// Copies the output of a stage to the input of the next one, which is on the same rank.
    pub(crate) fn copy_output_to_next_stage(
        &self,
        model: &RecordedModel,
        queue: &dyn Kernels,
        from: PassLocation,
        to: PassLocation,
    ) {
        let last = self.stages[from.stage].units.end - 1;
        let (output, start) = self.output_of(model, from, last);
        let input = self.stages[to.stage].slots[to.slot].input.as_ref();
        queue.cast(
            message(model, last, output, start),
            message(model, last, input.expect("a stage that follows another has an input"), 0),
        );
    }

    /// Copies the input gradient of a stage to the output gradient of the one before, which is on the same rank.
    pub(crate) fn copy_gradient_to_previous_stage(
        &self,
        model: &RecordedModel,
        queue: &dyn Kernels,
        from: PassLocation,
        to: PassLocation,
    ) {
        let Stage { units, send_buffers, .. } = &self.stages[from.stage];
        let before = units.start - 1;
        let gradient = send_buffers.get(from.send_buffer).map(|buffer| boundary(model, before, buffer));
        let output = self.stages[to.stage].slots[to.slot].output_gradient.as_ref();
        let output = output.map(|buffer| boundary(model, before, buffer));
        queue.cast(
            gradient.expect("a stage that follows another has a gradient for it"),
            output.expect("a stage that another follows gets a gradient from it"),
        );
    }

    /// Copies this rank's tokens of a micro-batch into a slot.
    pub(crate) fn load(&mut self, model: &RecordedModel, place: PassLocation, batch: &HostBatch<'_>) {
        let begin = self.timeline.begin();
        for (pair, &sample) in self.host_keys.chunks_exact_mut(2).zip(batch.sample_numbers) {
            let key = mix(self.seed ^ mix(sample));
            pair.copy_from_slice(&[key as u32, (key >> 32) as u32]);
        }
        let slot = &self.stages[place.stage].slots[place.slot];
        self.copy_own(batch.ids, &slot.ids);
        self.copy_own(batch.labels, &slot.labels);
        if batch.positions.is_empty() {
            slot.positions.view().write(&self.positions);
        } else {
            self.copy_own(batch.positions, &slot.positions);
        }
        if !batch.document_starts.is_empty() {
            if self.groups.context_place().attended() == 1 {
                self.copy_own(batch.document_starts, &slot.document_starts);
            } else {
                slot.document_starts.view().write(batch.document_starts);
            }
        }
        let slot = &mut self.stages[place.stage].slots[place.slot];
        slot.keeps_documents_apart = batch.document_starts.iter().any(|&start| start != 0);
        slot.dropout_keys.view().write(&self.host_keys);
        for (declared, input) in model.inputs().iter().zip(&slot.inputs) {
            let given = find_tensor(batch.inputs, &declared.name);
            given.expect("the micro-batch was checked: see HostBatch::check").data.write_to(input.view());
        }
        self.timeline.end(begin, || (Activity::of_step("load batch"), Cost::default()));
    }

    /// Returns this rank's tokens of a per-token slice of a micro-batch, range by range: all of them without context
    /// parallelism.
    pub(crate) fn own_tokens<'b, T>(
        &self,
        all: &'b [T],
    ) -> impl Iterator<Item = &'b [T]> + Clone + use<'b, T> {
        let place = self.groups.context_place();
        let sequences = self.host_keys.len() / 2;
        let seq_len = all.len() / sequences.max(1);
        place.token_ranges(sequences, seq_len).map(move |range| &all[range])
    }

    fn copy_own<T: Element>(&self, all: &[T], tensor: &Tensor) {
        let mut row = 0;
        for flat in self.own_tokens(all) {
            tensor.view().rows(row..row + flat.len()).write(flat);
            row += flat.len();
        }
    }

    fn replay<'a>(
        &'a self,
        model: &'a RecordedModel,
        place: PassLocation,
        unit: usize,
        queue: &'a dyn Kernels,
        parameters: &'a UnitParameters<'a>,
    ) -> Replay<'a> {
        let Stage { units, slots, .. } = &self.stages[place.stage];
        let slot = &slots[place.slot];
        let frame = |unit| frame(&self.stages, self.offloaded.as_ref(), place, unit);
        let whole = |unit: usize| {
            self.partitioned.as_ref().filter(|_| model.slices_output(unit)).map(|slices| slices.whole(unit))
        };
        let input = unit.checked_sub(1).and_then(whole).or_else(|| {
            if unit > units.start {
                Some(model.program(unit - 1).output(frame(unit - 1)))
            } else {
                slot.input.as_ref().map(|buffer| boundary(model, unit - 1, buffer))
            }
        });
        let batch = Batch {
            ids: slot.ids.view(),
            labels: Some(slot.labels.view()),
            positions: slot.positions.view(),
            document_starts: slot.keeps_documents_apart.then(|| slot.document_starts.view()),
            dropout_keys: Some(slot.dropout_keys.view()),
            long_rows: model.long_rows(),
            constants: &self.constants,
            inputs: &slot.inputs,
        };
        let replay = self.groups.attach(Replay::new(queue, parameters, batch, frame(unit), &self.workspace));
        Replay {
            input,
            output: whole(unit),
            first_dropout_site: RecordedModel::first_dropout_site(unit),
            context: replay.context.map(|context| ContextPeers { ring: self.ring.as_ref(), ..context }),
            communication_buffer: self.communication_buffer.as_ref(),
            router_margin: self.router_margin.as_ref(),
            trace: Some(Trace { timeline: &self.timeline, unit }),
            ..replay
        }
    }
}
