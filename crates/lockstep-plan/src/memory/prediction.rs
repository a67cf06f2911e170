//! Predicted memory of a rank under a plan, before anything is allocated: its [`StateLayout`], and the buffers of passes, collectives and
//! transfers. Tests compare the latter with what the engine books, byte by byte.
//!
//! Temporary memory inside a kernel call is not predicted (booked as workspace, then as cached). It depends on the CPU's instruction set,
//! and on the plan only through the micro-batch size.

use super::{StateItem, StateLayout, StatePlan, StoreKind};
use crate::gathering::{Gathers, LiveLimitTooLow, RankPasses};
use crate::{
    DType, MemoryBytes, MemoryCategory, ModelProfile, OffloadPlan, ParameterRecord, QuantizedGradientStaging,
    ReductionGroup, StageMemory, UnitProfile, booked_bytes, window_bytes, window_memory_bytes,
};

/// A group of buffers of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryItem {
    /// Category that it is booked under.
    pub category: MemoryCategory,
    /// Description for reports.
    pub what: &'static str,
    /// Bytes that are booked.
    pub bytes: usize,
    /// True for address space that a step may not fill; the system commits pages when they are first written.
    pub is_reserve: bool,
}

/// All memory of a rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryPrediction {
    /// Buffers, in the order of the categories.
    pub items: Vec<MemoryItem>,
}

impl MemoryPrediction {
    /// Returns the booked bytes by category.
    pub fn by_category(&self) -> MemoryBytes {
        self.bytes_where(|_| true)
    }

    /// Returns the bytes by category that every step touches: all but reserves.
    pub fn touched(&self) -> MemoryBytes {
        self.bytes_where(|item| !item.is_reserve)
    }

    fn bytes_where(&self, counts: impl Fn(&MemoryItem) -> bool) -> MemoryBytes {
        let mut bytes = MemoryBytes::default();
        for item in self.items.iter().filter(|item| counts(item)) {
            bytes[item.category] = bytes[item.category].saturating_add(item.bytes);
        }
        bytes
    }

    fn add(&mut self, category: MemoryCategory, what: &'static str, bytes: usize) {
        if bytes > 0 {
            self.items.push(MemoryItem { category, what, bytes, is_reserve: false });
        }
    }

    fn reserve(&mut self, category: MemoryCategory, what: &'static str, bytes: usize) {
        if bytes > 0 {
            self.items.push(MemoryItem { category, what, bytes, is_reserve: true });
        }
    }
}

/// Predicts the memory of a rank with these passes of `model`. `shard_ranks` returns the size of the shard group for each reduction group
/// ([`Mesh::shard_ranks`](crate::Mesh::shard_ranks)).
///
/// # Errors
/// If the limit on live parameters leaves no room for a unit's weights.
pub fn predicted(
    model: &ModelProfile,
    passes: &RankPasses,
    shard_ranks: impl Fn(ReductionGroup) -> usize,
    state: &StatePlan,
) -> Result<MemoryPrediction, LiveLimitTooLow> {
    let layout = StateLayout::of_first_ranks(model, &passes.stages, shard_ranks, state);
    let gathers = layout.gathers(model, passes)?;
    Ok(layout.memory(model, &passes.stages, gathers.as_ref()))
}

impl StateLayout {
    /// Returns the memory of the rank: its stores, copies of them, and the buffers of its passes, collectives and transfers. The
    /// arguments must be those of the state layout, and its [`gathers`](StateLayout::gathers).
    pub fn memory(
        &self,
        model: &ModelProfile,
        stages: &[StageMemory],
        gathers: Option<&Gathers>,
    ) -> MemoryPrediction {
        let mut memory = MemoryPrediction::default();
        for item in &self.items {
            memory.add(item.kind.category(), item.kind.name(), item.booked_bytes());
        }
        self.book_copies(&mut memory);
        self.book_windows(&mut memory);
        for elements in &model.constants {
            let bytes = booked_bytes(DType::F32.size_bytes() * elements);
            memory.add(MemoryCategory::Parameters, "constants", bytes);
        }
        self.book_looked_up(model, &mut memory);
        if let Some(gathers) = gathers {
            self.book_gathered(gathers, model.dtype, &mut memory);
        }
        model.book_activations(stages, self.plan.has_activations_on_disk, &mut memory);
        self.book_passing(&mut memory);
        let category = MemoryCategory::Communication;
        memory.add(category, "keys and values of other ranks", model.ring_bytes(stages));
        memory.add(category, "rows in flight", model.overlap_buffer_bytes(stages));
        memory.add(category, "gathered inputs of blocks", model.gathering_bytes(stages));
        memory.add(MemoryCategory::Workspace, "inside a unit", booked_bytes(model.workspace_bytes(stages)));
        memory.reserve(MemoryCategory::Workspace, "packed operands", self.plan.facts.packed_bytes);
        memory.items.sort_by_key(|item| item.category);
        memory
    }

    /// Adds the copies of the state, for rollback and for saving. Offloaded state is not copied.
    fn book_copies(&self, memory: &mut MemoryPrediction) {
        let StatePlan { on_disk, kept_copies, saved_copies, .. } = self.plan;
        let bytes = if on_disk.is_some() { 0 } else { self.saved().map(StateItem::booked_bytes).sum() };
        let copies = |number: usize| usize::saturating_mul(bytes, number);
        memory.add(MemoryCategory::Snapshot, "a state to go back to", copies(kept_copies));
        memory.reserve(MemoryCategory::Snapshot, "a state being saved", copies(saved_copies));
    }

    /// Adds the memory for windows of each offload file.
    fn book_windows(&self, memory: &mut MemoryPrediction) {
        let Some(OffloadPlan { window_elements, .. }) = self.plan.on_disk else { return };
        let names = ["windows of the optimizer's state", "windows of gradients", "windows of frozen weights"];
        for (what, file) in names.into_iter().zip(self.files()) {
            let Some((layout, dtypes)) = file else { continue };
            let Some(elements) = layout.longest_window(window_elements) else { continue };
            let bytes = window_memory_bytes(window_bytes(dtypes, elements));
            memory.add(MemoryCategory::Workspace, what, booked_bytes(bytes));
        }
    }

    /// Adds the sparse gradients of embedding rows of a tied table.
    fn book_looked_up(&self, model: &ModelProfile, memory: &mut MemoryPrediction) {
        for (_, table) in self.tied_tables() {
            let sizes =
                SparseGradientSizes::new(&self.records[table.0], model.tokens, self.plan.micro_batches);
            let SparseGradientSizes { rows_bytes, row_ids_bytes, token_rows_bytes, .. } = sizes;
            let numbers = booked_bytes(row_ids_bytes) + booked_bytes(token_rows_bytes);
            memory.reserve(MemoryCategory::Gradients, "rows that tokens look up", booked_bytes(rows_bytes));
            memory.add(MemoryCategory::Gradients, "numbers of these rows", numbers);
        }
    }

    /// Adds the pool of gathered weights, its quantized form, and secondary shards.
    fn book_gathered(&self, gathers: &Gathers, dtype: DType, memory: &mut MemoryPrediction) {
        let category = MemoryCategory::Communication;
        memory.add(category, "gathered weights", booked_bytes(gathers.pool_bytes(dtype)));
        if let Some(kind) = self.plan.quantized_weights() {
            memory.add(category, "records of weights", booked_bytes(kind.bytes(gathers.pool_elements())));
        }
        let bytes = |elements: usize| booked_bytes(elements.saturating_mul(dtype.size_bytes()));
        let kept = gathers.secondary_elements.map_or(0, bytes);
        memory.add(MemoryCategory::Parameters, "secondary parameter shard", kept);
    }

    /// Adds the staging buffers of gradients, plain and quantized.
    fn book_passing(&self, memory: &mut MemoryPrediction) {
        let category = MemoryCategory::Communication;
        let both = |elements: [usize; 2], bytes: &dyn Fn(usize) -> usize| -> usize {
            elements.map(|elements| booked_bytes(bytes(elements))).into_iter().sum()
        };
        if self.plan.hands_gradients_on() {
            let passage = self.layout_of(StoreKind::Gradients).passage();
            let bytes = |elements: usize| elements.saturating_mul(DType::F32.size_bytes());
            memory.add(category, "quantized gradients in flight", both(passage.elements, &bytes));
        }
        if let Some((kind, QuantizedGradientStaging { sent, received, .. })) = self.record_passage() {
            let bytes = |elements: usize| kind.bytes(elements);
            memory.add(category, "records of gradients", both(sent, &bytes) + both(received, &bytes));
        }
    }
}

/// Sizes of the sparse gradient of a tied embedding table, with room for every row that a step can look up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SparseGradientSizes {
    /// Maximum number of rows.
    pub capacity: usize,
    /// Bytes of the rows in f32.
    pub rows_bytes: usize,
    /// Bytes of the row indices.
    pub row_ids_bytes: usize,
    /// Bytes of the row index of each token of a micro-batch.
    pub token_rows_bytes: usize,
}

impl SparseGradientSizes {
    /// Computes the sizes for `table` and `micro_batches` of `tokens` each, on all replicas together.
    pub fn new(table: &ParameterRecord, tokens: usize, micro_batches: usize) -> Self {
        let shape = table.local_shape();
        let capacity = shape[0].min(tokens.saturating_mul(micro_batches));
        let (f32_bytes, u32_bytes) = (DType::F32.size_bytes(), DType::U32.size_bytes());
        Self {
            capacity,
            rows_bytes: capacity.saturating_mul(shape[1] * f32_bytes),
            row_ids_bytes: capacity.saturating_mul(u32_bytes),
            token_rows_bytes: tokens * u32_bytes,
        }
    }
}

/// Activation and buffer sizes of a rank's stages, independent of the model state.
impl ModelProfile {
    fn book_activations(&self, stages: &[StageMemory], are_on_disk: bool, prediction: &mut MemoryPrediction) {
        let category = MemoryCategory::Activations;
        let boundary = booked_bytes(self.boundary_bytes);
        let (mut saved, mut deferred, mut between, mut inputs) = (0_usize, 0_usize, 2 * boundary, 0_usize);
        for stage in stages {
            let of_units = |bytes: fn(&UnitProfile) -> usize| {
                let units = self.units[stage.units.clone()].iter();
                let one = units.map(|unit| booked_bytes(bytes(unit))).fold(0, usize::saturating_add);
                one.saturating_mul(stage.slots)
            };
            let in_memory = |unit| self.frame_in_memory_bytes(stage, unit, are_on_disk).map(booked_bytes);
            let frames = stage.units.clone().filter_map(in_memory).fold(0, usize::saturating_add);
            saved = saved.saturating_add(frames.saturating_mul(stage.slots));
            if stage.splits_backward {
                deferred = deferred.saturating_add(of_units(|unit| unit.deferred_bytes));
            }
            let given = self.input_bytes(stage.units.start).map_or(0, booked_bytes);
            let has_after = stage.units.end < self.units.len();
            let gradients = stage.slots * usize::from(has_after) + stage.send_buffers();
            let handed_on = self.input_bytes(stage.units.end).filter(|_| are_on_disk && has_after);
            let handed_on = handed_on.map_or(0, booked_bytes);
            between = between.saturating_add(stage.slots * (given + handed_on) + gradients * boundary);
            inputs += stage.slots * self.micro_batch_bytes();
        }
        prediction.add(category, "kept from forward to backward", saved);
        if are_on_disk {
            let (places, bytes) = self.frame_places(stages);
            prediction.add(category, "disk staging buffers", places * booked_bytes(bytes));
        }
        prediction.add(category, "saved for weight gradients", deferred);
        prediction.add(category, "values and gradients between units", between);
        prediction.add(category, "micro-batches", inputs);
    }

    /// Returns the booked activation bytes of these stages, with frames in memory or on disk.
    pub fn activation_bytes(&self, stages: &[StageMemory], are_on_disk: bool) -> usize {
        let mut prediction = MemoryPrediction::default();
        self.book_activations(stages, are_on_disk, &mut prediction);
        prediction.by_category().total()
    }

    fn units_of<'m>(&'m self, stages: &'m [StageMemory]) -> impl Iterator<Item = &'m UnitProfile> + Clone {
        stages.iter().flat_map(|stage| &self.units[stage.units.clone()])
    }

    /// Returns the workspace bytes of the largest unit.
    pub fn workspace_bytes(&self, stages: &[StageMemory]) -> usize {
        let splits = stages.iter().any(|stage| stage.splits_backward);
        let of_unit = |unit: &UnitProfile| {
            if splits { unit.workspace_bytes.max(unit.split_workspace_bytes) } else { unit.workspace_bytes }
        };
        self.units_of(stages).map(of_unit).max().unwrap_or(0)
    }

    /// Returns the bytes of the ring attention buffers.
    fn ring_bytes(&self, stages: &[StageMemory]) -> usize {
        let elements = self.units_of(stages).map(|unit| unit.ring_elements).max().unwrap_or(0);
        if elements == 0 {
            return 0;
        }
        let has_gradients = self.units_of(stages).any(|unit| unit.has_backward);
        let blocks = RingSizes::new(elements, self.dtype, self.context.ranks, has_gradients);
        blocks.blocks_bytes.into_iter().chain(blocks.gradients_bytes).map(booked_bytes).sum()
    }

    /// Returns the bytes of two gathered unit outputs, if any output is sliced.
    fn gathering_bytes(&self, stages: &[StageMemory]) -> usize {
        let slices = |unit: usize| self.units[unit].slices_output;
        let any =
            stages.iter().any(|stage| (stage.units.start.saturating_sub(1)..stage.units.end).any(slices));
        if any { 2 * booked_bytes(self.gathered_bytes) } else { 0 }
    }

    /// Returns the bytes of row chunks in flight.
    fn overlap_buffer_bytes(&self, stages: &[StageMemory]) -> usize {
        self.units_of(stages).filter_map(|unit| unit.overlap_buffer_bytes).max().map_or(0, booked_bytes)
    }
}

/// Sizes of the ring attention buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingSizes {
    /// Send block, receive block, and a copy to compute with while the block is sent on.
    pub blocks_bytes: [usize; 3],
    /// Two gradient blocks that alternate between accumulation and sending, and one to receive; f32.
    pub gradients_bytes: [usize; 3],
}

impl RingSizes {
    /// Computes the sizes for blocks of `elements` keys and values of `dtype` in a ring of `ranks`.
    pub fn new(elements: usize, dtype: DType, ranks: usize, has_gradients: bool) -> Self {
        let bytes = elements * dtype.size_bytes();
        // In a ring of two, nothing is sent on.
        let copy_bytes = if ranks > 2 { bytes } else { 0 };
        let gradient_bytes = if has_gradients { elements * DType::F32.size_bytes() } else { 0 };
        Self { blocks_bytes: [bytes, bytes, copy_bytes], gradients_bytes: [gradient_bytes; 3] }
    }
}
