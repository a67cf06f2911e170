//! A recorded block: its parameters, its instructions, and the memory that each phase takes.

use std::{collections::BTreeSet, ops::Range};

use lockstep_plan::{ContextPlace, Initializer, Recompute, Share, TensorPlace};
use lockstep_tensor::{Buffer, View};

use crate::{
    BlockShape, Mode, ParameterIndex, Recorder, Value,
    backward::{self, Gradient, GradientBuffer, Home, Order},
    operation::Operation,
    overlap::{Overlapped, OverlappedCollective, Rows},
    recorder::ValueInfo,
    storage::{Bump, Lifetime, Region, Slot, pack},
    summa::SummaLinear,
    training::Training,
};

/// A parameter as its block declares it; the name is relative to the block.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterDeclaration {
    /// Name within the block, e.g. `self_attn.q_proj.weight`.
    pub name: String,
    /// Global (unsharded) shape.
    pub shape: Vec<usize>,
    /// This rank's shard.
    pub share: Share,
    /// Initializer of the global parameter.
    pub initializer: Initializer,
    /// True if it is trained and so has a gradient.
    pub trainable: bool,
}

/// Compute and memory of a block, known as soon as it is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockProfile {
    /// Floating-point operations of one forward: 2 per multiply-add of matrix products, and of attention's two
    /// products over the causal half.
    pub forward_flops: u64,
    /// Floating-point operations of one backward: for each product, as many as forward for the input gradients and as
    /// many for the weight gradients, where these are needed.
    pub backward_flops: u64,
    /// Bytes saved from the forward to the backward, the block's output included.
    pub saved_bytes: usize,
    /// Bytes of scratch inside a forward or a backward.
    pub workspace_bytes: usize,
    /// Bytes saved between the two halves of a split backward.
    pub deferred_bytes: usize,
    /// Number of parameter elements on this rank.
    pub parameter_elements: usize,
    /// Floating-point operations of attention in one forward and one backward.
    pub attention_flops: u64,
}

/// One step of a program: one or two kernel calls, or a step of an overlapped collective.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Instruction {
    Forward(usize),
    BackwardInputs {
        operation: usize,
        dy: Option<Gradient>,
        dx: Vec<(Gradient, lockstep_tensor::Write)>,
    },
    BackwardWeights {
        operation: usize,
        dy: Gradient,
    },
    Copy {
        from: Gradient,
        to: Gradient,
    },
    Add {
        from: Gradient,
        to: Gradient,
    },
    /// Starts the all-gather of all chunks of this rank's rows.
    Start {
        transit: usize,
    },
    /// Computes a range of rows of a product.
    Part {
        product: Box<Self>,
        transit: usize,
        rows: Rows,
    },
    /// Starts the reduction of a chunk.
    Send {
        transit: usize,
        chunk: usize,
    },
    /// Waits for a chunk.
    Await {
        transit: usize,
        chunk: usize,
    },
}

/// A list of instructions, with a memory slot for every value and gradient they touch.
#[derive(Debug)]
pub(crate) struct Phase {
    pub(crate) instructions: Vec<Instruction>,
    /// Collectives that overlap with other instructions.
    pub(crate) communication_buffer: Vec<OverlappedCollective>,
    pub(crate) values: Vec<Option<Slot>>,
    pub(crate) gradients: Vec<Option<Slot>>,
    workspace_bytes: usize,
    transit_bytes: usize,
    touches_output: bool,
}

/// A compiled block, ready to be replayed any number of times.
#[derive(Debug)]
pub struct Program {
    pub(crate) shape: BlockShape,
    pub(crate) context: ContextPlace,
    pub(crate) values: Vec<ValueInfo>,
    pub(crate) operations: Vec<Operation>,
    pub(crate) gradients: Vec<GradientBuffer>,
    pub(crate) split_gradients: Vec<GradientBuffer>,
    parameters: Vec<ParameterDeclaration>,
    pub(crate) training: Training,
    pub(crate) input: Option<Value>,
    pub(crate) output: Value,
    pub(crate) forward: Phase,
    pub(crate) backward: Phase,
    pub(crate) backward_inputs: Phase,
    pub(crate) backward_weights: Phase,
    frame_bytes: usize,
    deferred_bytes: usize,
}

impl Program {
    pub(crate) fn compile(recorder: Recorder, output: Value, recompute: Recompute) -> Self {
        #[cfg(feature = "faults")]
        let recorder = crate::faults::put_into(recorder);
        let training = Training::new(&recorder);
        let Recorder { mode, shape, context, place, values, operations, parameters, input, .. } = recorder;
        let planner = Planner::new(&values, &operations, input, output, &training, (mode, recompute), place);
        let does_something = |index: &usize| operations[*index].renamed().is_none();
        let forward_instructions =
            (0..operations.len()).filter(does_something).map(Instruction::Forward).collect();
        let forward = planner.place(forward_instructions, &[], &[]);

        let empty = || planner.place(Vec::new(), &[], &[]);
        let mut program = Self {
            forward,
            backward: empty(),
            backward_inputs: empty(),
            backward_weights: empty(),
            gradients: Vec::new(),
            split_gradients: Vec::new(),
            frame_bytes: planner.frame_bytes,
            deferred_bytes: 0,
            shape,
            context,
            parameters,
            training: Training::default(),
            input,
            output,
            values: Vec::new(),
            operations: Vec::new(),
        };
        if mode == Mode::Training {
            let fused = backward::derive(&values, &operations, input, output, &training, Order::Fused);
            let instructions = planner.with_recomputation(fused.inputs, &mut Vec::new());
            program.backward = planner.place(instructions, &fused.gradients, &[]);
            program.gradients = fused.gradients;

            let split = backward::derive(&values, &operations, input, output, &training, Order::Split);
            let mut recomputed = Vec::new();
            let inputs = planner.with_recomputation(split.inputs, &mut recomputed);
            let weights = planner.with_recomputation(split.weights, &mut recomputed.clone());
            let (deferred, bytes) = planner.deferred(&inputs, &weights, &split.gradients);
            program.backward_inputs = planner.place(inputs, &split.gradients, &deferred);
            program.backward_weights = planner.place(weights, &split.gradients, &deferred);
            program.split_gradients = split.gradients;
            program.deferred_bytes = bytes;
        }
        program.training = training;
        program.values = values;
        program.operations = operations;
        program
    }

    /// Returns the parameters, in the order in which the block declares them.
    pub fn parameters(&self) -> &[ParameterDeclaration] {
        &self.parameters
    }

    /// Returns the shape that the program was recorded for; under context parallelism, with the local tokens of each sequence.
    pub fn shape(&self) -> BlockShape {
        self.shape
    }

    /// Returns true if the gradient of the output is needed: something in the block is trained, or an earlier block
    /// needs its gradient.
    pub fn has_backward(&self) -> bool {
        self.training.differentiates(self.output)
    }

    /// Number of columns of the output.
    pub fn output_columns(&self) -> usize {
        self.values[self.output.0].columns
    }

    /// Byte range of the output in a frame; all other saved values lie before it.
    pub fn output_bytes(&self) -> Range<usize> {
        let start = self.forward.values[self.output.0].map_or(0, |slot| slot.offset_bytes);
        start..start + self.values[self.output.0].bytes()
    }

    /// Returns true if no backward of the block reads its output, so that only the next unit needs it.
    pub fn forgets_output(&self) -> bool {
        let backward = [&self.backward, &self.backward_inputs, &self.backward_weights];
        !backward.iter().any(|phase| phase.touches_output)
    }

    /// Returns the parameter that biases the choice of experts. It has no gradient; the load of the experts updates it.
    pub fn selection_bias(&self) -> Option<ParameterIndex> {
        self.operations.iter().find_map(Operation::selection_bias)
    }

    /// Returns the number of experts of the block; `None` for a block without experts.
    pub fn experts(&self) -> Option<usize> {
        let counts = self.operations.iter().find_map(Operation::always_saved)?;
        Some(self.values[counts.0].columns)
    }

    /// Returns the number of slots per sequence and expert in the last forward, f32 `[sequences, experts]`; `None`
    /// for a block without experts.
    pub fn load<'a>(&self, frame: &'a Buffer) -> Option<View<'a>> {
        let counts = self.operations.iter().find_map(Operation::always_saved)?;
        let (info, slot) = (self.values[counts.0], self.forward.values[counts.0]?);
        Some(frame.view(info.dtype, slot.offset_bytes, [info.rows, info.columns]))
    }

    /// Number of rows of the input and the output: the tokens of a micro-batch, or this rank's tokens of it.
    pub fn output_rows(&self) -> usize {
        self.values[self.output.0].rows
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
    pub fn transit_bytes(&self) -> usize {
        self.phases().map(|phase| phase.transit_bytes).max().unwrap_or(0)
    }

    /// Largest number of chunks that can be in flight; 0 if no collective overlaps with products.
    pub fn transit_chunks(&self) -> usize {
        let of = |phase: &Phase| phase.communication_buffer.iter().map(|transit| transit.chunks.len()).sum();
        self.phases().map(of).max().unwrap_or(0)
    }

    fn phases(&self) -> impl Iterator<Item = &Phase> {
        [&self.forward, &self.backward, &self.backward_inputs, &self.backward_weights].into_iter()
    }

    /// Returns the compute and memory of the block.
    pub fn profile(&self) -> BlockProfile {
        BlockProfile {
            forward_flops: self.operations.iter().map(|operation| self.product_flops(operation)).sum(),
            backward_flops: self.operations.iter().map(|operation| self.backward_flops(operation)).sum(),
            saved_bytes: self.frame_bytes,
            workspace_bytes: self.workspace_bytes(),
            deferred_bytes: self.deferred_bytes,
            parameter_elements: self
                .parameters
                .iter()
                .map(|parameter| parameter.share.shape_of(&parameter.shape).iter().product::<usize>())
                .sum(),
            attention_flops: self.attention_flops(),
        }
    }

    fn attention_flops(&self) -> u64 {
        let is_attention = |operation: &&Operation| matches!(operation, Operation::Attention(_));
        let flops = |operation| self.product_flops(operation) + self.backward_flops(operation);
        self.operations.iter().filter(is_attention).map(flops).sum()
    }

    pub(crate) fn backward_flops(&self, operation: &Operation) -> u64 {
        let forward = self.product_flops(operation);
        let inputs = if self.training.reaches_inputs(operation) { forward } else { 0 };
        let weights = match operation {
            Operation::Linear { weight, .. }
            | Operation::SummaLinear(SummaLinear { weight, .. })
            | Operation::GroupedLinear { weight, .. }
            | Operation::OutputLoss { weight, .. }
                if self.training.trains(*weight) =>
            {
                forward
            }
            // Attention has no weights; its backward has two products per forward product.
            Operation::Attention(_) => inputs,
            _ => 0,
        };
        inputs + weights
    }
}

/// Returns for each value the value whose memory it uses: itself, unless it is an alias.
pub(crate) fn stored_as(values: usize, operations: &[Operation]) -> Vec<usize> {
    let mut stored_as: Vec<usize> = (0..values).collect();
    for operation in operations {
        if let Some(value) = operation.renamed() {
            stored_as[operation.output().0] = stored_as[value.0];
        }
    }
    stored_as
}

/// The inputs of memory planning, and the slots that are fixed for all phases.
pub(crate) struct Planner<'a> {
    pub(crate) values: &'a [ValueInfo],
    pub(crate) operations: &'a [Operation],
    input: Option<Value>,
    output: Value,
    training: &'a Training,
    /// Size of the tensor-parallel group, and number of chunks of its overlapped collectives.
    pub(crate) ranks: usize,
    pub(crate) chunks: usize,
    /// Operation that writes each value; `None` for the block's input.
    producers: Vec<Option<usize>>,
    /// The value whose memory each value uses: itself, unless it is an alias.
    pub(crate) stored_as: Vec<usize>,
    /// Slots of the values in the frame and of the block's input.
    fixed: Vec<Option<Slot>>,
    frame_bytes: usize,
}

impl<'a> Planner<'a> {
    fn new(
        values: &'a [ValueInfo],
        operations: &'a [Operation],
        input: Option<Value>,
        output: Value,
        training: &'a Training,
        (mode, recompute): (Mode, Recompute),
        TensorPlace { ranks, chunks, .. }: TensorPlace,
    ) -> Self {
        let mut producers = vec![None; values.len()];
        for (index, operation) in operations.iter().enumerate() {
            for value in operation.outputs() {
                producers[value.0] = Some(index);
            }
        }
        let stored_as = stored_as(values.len(), operations);
        let mut saved = vec![false; values.len()];
        if mode == Mode::Training && recompute != Recompute::Full {
            for operation in operations {
                let for_inputs = if training.runs_for_inputs(operation) {
                    operation.needs_for_inputs()
                } else {
                    Vec::new()
                };
                for value in for_inputs.into_iter().chain(operation.needs_for_weights(training)) {
                    saved[stored_as[value.0]] = true;
                }
            }
        }
        let is_cheap = |operation: &&Operation| recompute == Recompute::Selective && operation.is_cheap();
        for operation in operations.iter().filter(|operation| is_cheap(operation) || operation.is_gathered())
        {
            let is_needed = std::mem::replace(&mut saved[operation.output().0], false);
            // Save the local keys and values, so that their projection is not recomputed before the gather.
            if is_needed && operation.gathers_sequences() {
                operation.inputs().iter().for_each(|input| saved[stored_as[input.0]] = true);
            }
        }
        saved[output.0] = true;
        operations.iter().filter_map(Operation::always_saved).for_each(|value| saved[value.0] = true);
        let mut frame = Bump::default();
        let mut fixed: Vec<Option<Slot>> = (0..values.len())
            .map(|index| {
                if input == Some(Value(index)) {
                    Some(Slot::start_of(Region::Input))
                } else {
                    let is_in_frame = saved[index] && index != output.0;
                    is_in_frame.then(|| frame.place(Region::Frame, values[index].bytes()))
                }
            })
            .collect();
        // The output comes last, so that a frame can do without it.
        fixed[output.0].get_or_insert_with(|| frame.place(Region::Output, values[output.0].bytes()));
        let frame_bytes = frame.bytes;
        let chunks = if ranks > 1 { chunks } else { 1 };
        Self {
            values,
            operations,
            input,
            output,
            training,
            ranks,
            chunks,
            producers,
            stored_as,
            fixed,
            frame_bytes,
        }
    }

    /// Inserts the forward of each unsaved value before the first instruction that reads it. `available` lists the
    /// values recomputed so far.
    fn with_recomputation(
        &self,
        instructions: Vec<Instruction>,
        available: &mut Vec<Value>,
    ) -> Vec<Instruction> {
        let mut out = Vec::with_capacity(instructions.len());
        for instruction in instructions {
            for value in self.values_read(&instruction) {
                self.ensure(value, available, &mut out);
            }
            out.push(instruction);
        }
        out
    }

    fn ensure(&self, value: Value, available: &mut Vec<Value>, out: &mut Vec<Instruction>) {
        if self.fixed[value.0].is_some() || available.contains(&value) {
            return;
        }
        let producer = self.producers[value.0].expect("a value that is not the block's input has a producer");
        for input in self.stored(self.operations[producer].reads()) {
            self.ensure(input, available, out);
        }
        out.push(Instruction::Forward(producer));
        available.extend(self.operations[producer].outputs());
    }

    /// Returns the values whose memory these use.
    fn stored(&self, values: Vec<Value>) -> Vec<Value> {
        values.into_iter().map(|value| Value(self.stored_as[value.0])).collect()
    }

    fn values_read(&self, instruction: &Instruction) -> Vec<Value> {
        self.stored(match instruction {
            Instruction::Forward(operation) => self.operations[*operation].reads(),
            Instruction::BackwardInputs { operation, .. } => self.operations[*operation].needs_for_inputs(),
            Instruction::BackwardWeights { operation, .. } => {
                self.operations[*operation].needs_for_weights(self.training)
            }
            Instruction::Copy { .. }
            | Instruction::Add { .. }
            | Instruction::Start { .. }
            | Instruction::Part { .. }
            | Instruction::Send { .. }
            | Instruction::Await { .. } => vec![],
        })
    }

    /// Returns the object number of a gradient. Objects are the values followed by the gradients.
    pub(crate) fn object(&self, gradient: Gradient) -> usize {
        self.values.len() + gradient.0
    }

    /// Returns every object that an instruction reads or writes, for the instructions before [`Planner::overlapped`].
    pub(crate) fn touches(&self, instruction: &Instruction) -> Vec<usize> {
        let mut objects: Vec<usize> = self.values_read(instruction).iter().map(|value| value.0).collect();
        if let Instruction::Forward(operation) | Instruction::BackwardInputs { operation, .. } = instruction {
            objects.extend(self.operations[*operation].scratch().iter().map(|value| value.0));
        }
        if let Instruction::BackwardWeights { operation, .. } = instruction {
            objects.extend(self.operations[*operation].scratch_for_weights().iter().map(|value| value.0));
        }
        let mut gradient = |gradient: Gradient| objects.push(self.object(gradient));
        match instruction {
            Instruction::Forward(operation) => {
                objects.extend(self.operations[*operation].outputs().iter().map(|value| value.0));
            }
            Instruction::BackwardInputs { dy, dx, .. } => {
                dy.iter().copied().chain(dx.iter().map(|(dx, _)| *dx)).for_each(&mut gradient);
            }
            Instruction::BackwardWeights { dy, .. } => gradient(*dy),
            Instruction::Copy { from, to } | Instruction::Add { from, to } => {
                gradient(*from);
                gradient(*to);
            }
            Instruction::Start { .. }
            | Instruction::Part { .. }
            | Instruction::Send { .. }
            | Instruction::Await { .. } => {
                unreachable!("what they touch is said by their communication_buffer")
            }
        }
        objects
    }

    /// Returns slots in the deferred buffer for the objects that both halves of a split backward touch, and the total bytes.
    fn deferred(
        &self,
        inputs: &[Instruction],
        weights: &[Instruction],
        gradients: &[GradientBuffer],
    ) -> (Vec<(usize, Slot)>, usize) {
        let objects = |instructions: &[Instruction]| {
            let mut objects: Vec<usize> =
                instructions.iter().flat_map(|instruction| self.touches(instruction)).collect();
            objects.sort_unstable();
            objects.dedup();
            objects
        };
        let (first, second) = (objects(inputs), objects(weights));
        let scratch: BTreeSet<usize> =
            self.operations.iter().flat_map(Operation::scratch).map(|value| value.0).collect();
        let mut bump = Bump::default();
        let places = second
            .into_iter()
            .filter(|object| first.binary_search(object).is_ok() && !scratch.contains(object))
            .filter(|&object| self.fixed.get(object).is_none_or(Option::is_none))
            .map(|object| (object, bump.place(Region::Deferred, self.bytes(object, gradients))))
            .collect();
        (places, bump.bytes)
    }

    fn bytes(&self, object: usize, gradients: &[GradientBuffer]) -> usize {
        match self.values.get(object) {
            Some(value) => value.bytes(),
            None => gradients[object - self.values.len()].info.bytes(),
        }
    }

    /// Returns for each object the object that takes over its storage. An output takes over that of an input which
    /// dies there and which it may overwrite; any other object keeps its own. The lifetime of such an output begins
    /// with the input's.
    fn heirs(
        &self,
        instructions: &[Instruction],
        gradients: &[GradientBuffer],
        slots: &[Option<Slot>],
        lifetimes: &mut [Option<Lifetime>],
    ) -> Vec<usize> {
        let mut heir: Vec<usize> = (0..slots.len()).collect();
        for (time, instruction) in instructions.iter().enumerate() {
            let Instruction::Forward(operation) = instruction else { continue };
            let operation = &self.operations[*operation];
            let output = operation.output().0;
            let dying =
                operation.in_place_inputs().into_iter().map(|value| self.stored_as[value.0]).find(|&input| {
                    slots[input].is_none()
                        && input != output
                        && lifetimes[input].is_some_and(|lifetime| lifetime.last == time)
                        && self.bytes(input, gradients) == self.bytes(output, gradients)
                });
            if let Some(input) = dying {
                heir[input] = output;
                let first = lifetimes[input].map_or(time, |lifetime| lifetime.first);
                if let Some(lifetime) = &mut lifetimes[output] {
                    lifetime.first = lifetime.first.min(first);
                }
            }
        }
        heir
    }

    /// Assigns a slot to every object of a phase.
    fn place(
        &self,
        instructions: Vec<Instruction>,
        gradients: &[GradientBuffer],
        deferred: &[(usize, Slot)],
    ) -> Phase {
        let count = self.values.len() + gradients.len();
        let mut slots: Vec<Option<Slot>> = self.fixed.clone();
        slots.extend(gradients.iter().map(|gradient| match gradient.home {
            Home::OutputGradient => Some(Slot::start_of(Region::OutputGradient)),
            Home::InputGradient => Some(Slot::start_of(Region::InputGradient)),
            Home::Anywhere => None,
        }));
        for &(object, slot) in deferred {
            slots[object] = Some(slot);
        }

        let Overlapped { instructions, communication_buffer, transit_bytes } =
            self.overlapped(instructions, gradients, &slots);
        let mut lifetimes: Vec<Option<Lifetime>> = vec![None; count];
        for (time, instruction) in instructions.iter().enumerate() {
            for object in self.touches_of(instruction, &communication_buffer) {
                let bytes = self.bytes(object, gradients);
                lifetimes[object].get_or_insert(Lifetime { first: time, last: time, bytes }).last = time;
            }
        }

        let heir = self.heirs(&instructions, gradients, &slots, &mut lifetimes);
        let free: Vec<usize> = (0..count)
            .filter(|&object| {
                slots[object].is_none() && heir[object] == object && lifetimes[object].is_some()
            })
            .collect();
        let packed: Vec<Lifetime> = free.iter().filter_map(|&object| lifetimes[object]).collect();
        let (offsets, workspace_bytes) = pack(&packed);
        for (&object, offset_bytes) in free.iter().zip(offsets) {
            slots[object] = Some(Slot { region: Region::Workspace, offset_bytes });
        }
        for object in 0..count {
            let mut last = object;
            while heir[last] != last {
                last = heir[last];
            }
            if lifetimes[object].is_some() {
                slots[object] = slots[last];
            }
        }
        for value in 0..self.values.len() {
            slots[value] = slots[self.stored_as[value]];
        }
        let gradient_slots = (0..gradients.len()).map(|g| slots[self.object(Gradient(g))]).collect();
        slots.truncate(self.values.len());
        debug_assert!(self.input.is_none_or(|input| slots[input.0].is_some()));
        Phase {
            instructions,
            communication_buffer,
            values: slots,
            gradients: gradient_slots,
            workspace_bytes,
            transit_bytes,
            touches_output: lifetimes[self.output.0].is_some(),
        }
    }
}
