//! Bytes that a rank books under a plan, known before anything is allocated: the same sums that the engine makes when it
//! allocates, of the same sizes. Tests hold them to each other, byte by byte.
//!
//! What is not predicted is what kernels take for the time of a call and give back (booked as workspace, then as cached): it
//! depends on the instructions that a CPU has, and on no plan but by the micro-batch.

use crate::gathering::{Gathering, Gathers, RankPasses, TooFewLive};
use crate::{
    DType, DiskPlan, Extent, Feedback, MemoryBytes, MemoryCategory, ModelProfile, ParameterRecord,
    Quantization, QuantizedType, RecordPassage, ShardPlace, SharedTable, StageMemory, StoreLayout, Summing,
    UnitProfile, Wrap, ZeroStage, booked_bytes, window_bytes, window_memory_bytes,
};

/// How the state of a run is kept, beside what the model's recording says.
#[derive(Debug, Clone, PartialEq)]
pub struct StatePlan {
    /// What of it the ranks share out that would else each hold a copy.
    pub zero_stage: ZeroStage,
    /// What these ranks send as small integers.
    pub quantization: Quantization,
    /// Copies of the model, whole or shared out.
    pub replicas: usize,
    /// Which units stand together.
    pub wrap: Wrap,
    /// How weights are gathered where they are shared out.
    pub gathering: Gathering,
    /// Whether f32 weights are kept beside those that kernels read.
    pub has_master: bool,
    /// Type of the optimizer's numbers.
    pub optimizer_dtype: DType,
    /// The optimizer's numbers: what each is, and of which parameters it is kept, by [`ParameterId`](crate::ParameterId).
    pub optimizer_keeps: Vec<(&'static str, Vec<bool>)>,
    /// What of it is on disk, if anything is.
    pub on_disk: Option<DiskPlan>,
    /// Whether what units keep for their backward is on disk.
    pub has_activations_on_disk: bool,
    /// Micro-batches of a step, on all ranks that read other tokens together.
    pub micro_batches: usize,
    /// Bytes of packed operands.
    pub packed_bytes: usize,
    /// Copies of the state that are kept, to go back to.
    pub kept_copies: usize,
    /// Copies that are made if there is memory for them, to be saved beside the steps.
    pub saved_copies: usize,
}

/// Something that a rank has in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryItem {
    /// What it is booked as.
    pub category: MemoryCategory,
    /// What it is.
    pub what: &'static str,
    /// Bytes that are booked.
    pub bytes: usize,
    /// Whether it is room that a step may not need all of: the system gives pages when they are first written.
    pub is_reserve: bool,
}

/// Everything that a rank has in memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryPrediction {
    /// What there is, in the order of the categories.
    pub items: Vec<MemoryItem>,
}

impl MemoryPrediction {
    /// What is booked.
    pub fn by_category(&self) -> MemoryBytes {
        self.bytes_where(|_| true)
    }

    /// What of it a step writes to in any case.
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

/// What a rank with these passes of `model` books; `shard_ranks` says how many share out what is summed so
/// ([`Mesh::shard_ranks`](crate::Mesh::shard_ranks)).
///
/// # Errors
/// [`TooFewLive`].
pub fn predicted(
    model: &ModelProfile,
    passes: RankPasses<'_>,
    shard_ranks: impl Fn(Summing) -> usize,
    state: &StatePlan,
) -> Result<MemoryPrediction, TooFewLive> {
    let mut prediction = MemoryPrediction::default();
    let stages = passes.stages;
    let rank = Rank::new(model, stages, shard_ranks, state);
    rank.book_state(&mut prediction);
    rank.book_gathered(passes, &mut prediction)?;
    model.book_activations(stages, state.has_activations_on_disk, &mut prediction);
    rank.book_exchanges(&mut prediction);
    prediction.add(MemoryCategory::Workspace, "inside a unit", booked_bytes(model.workspace_bytes(stages)));
    prediction.reserve(MemoryCategory::Workspace, "packed operands", state.packed_bytes);
    prediction.items.sort_by_key(|item| item.category);
    Ok(prediction)
}

/// A rank, and what it has of the model.
pub(super) struct Rank<'a, S> {
    pub(super) model: &'a ModelProfile,
    stages: &'a [StageMemory],
    is_here: Vec<bool>,
    /// As this rank sees them, where a table's uses are on two.
    records: Vec<ParameterRecord>,
    shared_table: Option<SharedTable>,
    shard_ranks: S,
    /// What is shared out, if there is anybody to share with.
    zero_stage: ZeroStage,
    /// Of which units what is trained has its state on disk.
    units_on_disk: Vec<bool>,
    /// Of which units what is not trained is there.
    frozen_on_disk: Vec<bool>,
    state: &'a StatePlan,
}

impl<'a, S: Fn(Summing) -> usize> Rank<'a, S> {
    pub(super) fn new(
        model: &'a ModelProfile,
        stages: &'a [StageMemory],
        shard_ranks: S,
        state: &'a StatePlan,
    ) -> Self {
        let is_here = model.is_here(stages);
        let mut records = model.records.clone();
        state.wrap.apply(&mut records, stages.iter().map(|stage| &stage.units));
        let has_others = records.iter().any(|record| shard_ranks(Summing::of(&record.share)) > 1);
        let zero_stage = if has_others { state.zero_stage } else { ZeroStage::Nothing };
        let shared_table = SharedTable::of(&mut records, &is_here);
        let (units_on_disk, frozen_on_disk) = (Vec::new(), Vec::new());
        let mut rank = Self {
            model,
            stages,
            is_here,
            records,
            shared_table,
            shard_ranks,
            zero_stage,
            units_on_disk,
            frozen_on_disk,
            state,
        };
        if let Some(disk) = state.on_disk {
            let weights = rank.shared_out(ZeroStage::Parameters, |index| rank.is_trained(index));
            rank.units_on_disk = weights.units_on_disk(disk.share);
            let frozen = rank.shared_out(ZeroStage::Parameters, |index| rank.is_frozen(index));
            rank.frozen_on_disk = frozen.units_on_disk(disk.share);
        }
        rank
    }

    fn is_trained(&self, index: usize) -> bool {
        self.records[index].trainable && self.is_here[self.records[index].unit]
    }

    fn is_frozen(&self, index: usize) -> bool {
        !self.records[index].trainable && self.is_here[self.records[index].unit]
    }

    fn chooses_experts(&self, index: usize) -> bool {
        let bias = self.model.units[self.records[index].unit].selection_bias;
        bias.is_some_and(|id| id.0 == index)
    }

    /// How many ranks share out what is summed so.
    fn ranks(&self, summing: Summing) -> usize {
        if self.zero_stage == ZeroStage::Nothing { 1 } else { (self.shard_ranks)(summing) }
    }

    /// Where a store stands that is shared out from a stage on. All owners have as much.
    fn shared_out(&self, from: ZeroStage, keeps: impl Fn(usize) -> bool) -> StoreLayout {
        self.partly_on_disk(self.extent(from), keeps, |_, _| false)
    }

    /// How much of its stretches a store has that is shared out from a stage on.
    fn extent(&self, from: ZeroStage) -> Extent {
        if self.zero_stage >= from { Extent::Own } else { Extent::Whole }
    }

    fn partly_on_disk(
        &self,
        extent: Extent,
        keeps: impl Fn(usize) -> bool,
        is_on_disk: impl Fn(usize, bool) -> bool,
    ) -> StoreLayout {
        let place = |summing| ShardPlace { ranks: self.ranks(summing), rank: 0 };
        StoreLayout::partly_on_disk(&self.records, extent, place, keeps, is_on_disk)
    }

    fn is_on_disk(&self, unit: usize) -> bool {
        self.units_on_disk.get(unit).is_some_and(|is_on_disk| *is_on_disk)
    }

    /// Where gradients stand: whole, or what their owners or the disk have not.
    pub(super) fn gradients(&self) -> StoreLayout {
        let extent = if self.hands_gradients_on() { Extent::Own } else { Extent::Whole };
        let has_gradients = self.state.on_disk.is_some_and(|disk| disk.has_gradients);
        let is_on_disk = |unit: usize, is_tied: bool| has_gradients && self.is_on_disk(unit) && !is_tied;
        self.partly_on_disk(extent, |index| self.is_trained(index), is_on_disk)
    }

    /// Whether gradients leave for where they are kept as soon as they are complete.
    fn hands_gradients_on(&self) -> bool {
        self.zero_stage >= ZeroStage::Gradients || self.state.on_disk.is_some_and(|disk| disk.has_gradients)
    }

    /// Where a store of the optimizer's state stands.
    fn of_optimizer(&self, keeps: impl Fn(usize) -> bool) -> StoreLayout {
        let keeps = |index: usize| keeps(index) && self.is_trained(index);
        self.partly_on_disk(self.extent(ZeroStage::Optimizer), keeps, |unit, _| self.is_on_disk(unit))
    }

    /// The tensors that the windows of the optimizer's state have beside each other: where the first of them stands, and the types of all.
    pub(super) fn state_on_disk(&self) -> (Option<StoreLayout>, Vec<DType>) {
        let (mut layout, mut dtypes) = (None, Vec::new());
        if self.has_weights_on_disk() {
            (layout, dtypes) = (Some(self.weights()), vec![self.model.dtype]);
        }
        if self.state.has_master {
            dtypes.push(DType::F32);
            layout.get_or_insert_with(|| self.of_optimizer(|_| true));
        }
        for (_, keeps) in &self.state.optimizer_keeps {
            let kept = self.of_optimizer(|index| keeps[index]);
            if !kept.is_empty() {
                dtypes.push(self.state.optimizer_dtype);
                layout.get_or_insert(kept);
            }
        }
        (layout, dtypes)
    }

    /// Memory for windows of what is on disk: of the optimizer's state, of gradients and of weights that are not trained.
    fn book_windows(&self, prediction: &mut MemoryPrediction) {
        let Some(DiskPlan { window_elements, .. }) = self.state.on_disk else { return };
        let mut book = |what, layout: &StoreLayout, dtypes: &[DType]| {
            let Some(elements) = layout.longest_window(window_elements) else { return };
            let bytes = window_memory_bytes(window_bytes(dtypes.iter().copied(), elements));
            prediction.add(MemoryCategory::Workspace, what, booked_bytes(bytes));
        };
        if let (Some(layout), dtypes) = self.state_on_disk() {
            book("windows of the optimizer's state", &layout, &dtypes);
        }
        book("windows of gradients", &self.gradients(), &[DType::F32]);
        book("windows of frozen weights", &self.frozen(), &[self.model.dtype]);
    }

    /// Where a store stands that every rank has whole.
    fn whole(&self, keeps: impl Fn(usize) -> bool) -> StoreLayout {
        StoreLayout::new(&self.records, Extent::Whole, |_| ShardPlace::default(), keeps)
    }

    /// Where the weights that kernels read stand of what is trained.
    pub(super) fn weights(&self) -> StoreLayout {
        let is_on_disk = |unit: usize, _| self.has_weights_on_disk() && self.is_on_disk(unit);
        let extent = self.extent(ZeroStage::Parameters);
        self.partly_on_disk(extent, |index| self.is_trained(index), is_on_disk)
    }

    /// Where those stand that are not trained.
    pub(super) fn frozen(&self) -> StoreLayout {
        let has_weights = self.has_weights_on_disk();
        let is_on_disk = |unit: usize, _| has_weights && self.frozen_on_disk.get(unit) == Some(&true);
        // Of what nobody shares out a rank owns all, whatever its place.
        let shared_out = self.zero_stage >= ZeroStage::Parameters;
        let place = |summing| ShardPlace { ranks: if shared_out { self.ranks(summing) } else { 1 }, rank: 0 };
        let extent = self.extent(ZeroStage::Parameters);
        StoreLayout::partly_on_disk(&self.records, extent, place, |index| self.is_frozen(index), is_on_disk)
    }

    fn has_weights_on_disk(&self) -> bool {
        self.state.on_disk.is_some_and(|disk| disk.has_parameters)
    }

    /// Weights, gradients and the optimizer's state. All of it passes through `store`: what lives elsewhere than in memory
    /// says there what it is staged in.
    fn book_state(&self, prediction: &mut MemoryPrediction) {
        let Self { model, state, .. } = self;
        let mut store = |category, what, layout: StoreLayout, dtype| {
            let bytes = layout.booked_bytes(dtype);
            prediction.add(category, what, bytes);
            bytes
        };
        let weights = self.weights();
        let weights_bytes = store(MemoryCategory::Parameters, "trained weights", weights, model.dtype);
        store(MemoryCategory::Parameters, "frozen weights", self.frozen(), model.dtype);
        store(MemoryCategory::Gradients, "sums of gradients", self.gradients(), DType::F32);
        let of_optimizer = MemoryCategory::Optimizer;
        let mut saved_bytes = weights_bytes;
        if state.has_master {
            saved_bytes = store(of_optimizer, "f32 master weights", self.of_optimizer(|_| true), DType::F32);
        }
        for (what, keeps) in &state.optimizer_keeps {
            let layout = self.of_optimizer(|index| keeps[index]);
            saved_bytes += store(of_optimizer, what, layout, state.optimizer_dtype);
        }
        let updated = if state.has_master { ZeroStage::Optimizer } else { ZeroStage::Parameters };
        if self.zero_stage >= updated || state.on_disk.is_some() {
            let biases = self.whole(|index| self.chooses_experts(index) && self.is_trained(index));
            saved_bytes += store(of_optimizer, "biases that choose experts", biases, DType::F32);
        }
        if let Some(residual) = self.residual() {
            saved_bytes += residual.booked_bytes(DType::BF16);
        }
        self.book_windows(prediction);
        // There is no copy of what is on disk.
        let copied = if state.on_disk.is_some() { 0 } else { saved_bytes };
        let copies = |number: usize| copied.saturating_mul(number);
        prediction.add(MemoryCategory::Snapshot, "a state to go back to", copies(state.kept_copies));
        prediction.reserve(MemoryCategory::Snapshot, "a state being saved", copies(state.saved_copies));
        if model.frequencies > 0 {
            let bytes = booked_bytes(DType::F32.size_bytes() * model.frequencies);
            prediction.add(MemoryCategory::Parameters, "rotary frequencies", bytes);
        }
        self.book_looked_up(prediction);
    }

    /// Gradients of the rows that tokens look up in a table which the output layer shares.
    fn book_looked_up(&self, prediction: &mut MemoryPrediction) {
        for (index, record) in self.records.iter().enumerate() {
            let Some(table) = record.tie.filter(|_| self.is_trained(index)) else { continue };
            let of_table = &self.records[table.0];
            if of_table.unit == record.unit {
                continue;
            }
            let sizes = LookedUpSizes::new(of_table, self.model.tokens, self.state.micro_batches);
            let LookedUpSizes { rows_bytes, row_ids_bytes, token_rows_bytes, .. } = sizes;
            let numbers = booked_bytes(row_ids_bytes) + booked_bytes(token_rows_bytes);
            prediction.reserve(
                MemoryCategory::Gradients,
                "rows that tokens look up",
                booked_bytes(rows_bytes),
            );
            prediction.add(MemoryCategory::Gradients, "numbers of these rows", numbers);
        }
    }

    /// In what gradients go to their owners, if not as they are.
    fn quantized_gradients(&self) -> Option<QuantizedType> {
        self.state.quantization.gradients.filter(|_| self.zero_stage > ZeroStage::Nothing)
    }

    /// Whether a stretch of the gradients is sent as records: not what nobody shares, nor a table that is summed over stages as well.
    fn is_coded(&self, gradients: &StoreLayout, stretch: usize) -> bool {
        let unshared = self.shared_table.and_then(|table| gradients.places[table.id.0]);
        let is_unshared = unshared.is_some_and(|(of_table, _)| of_table == stretch);
        self.ranks(gradients.stretches[stretch].summing) > 1 && !is_unshared
    }

    /// What the codes of gradients fail to say, if it is kept: of all that are coded, on every rank.
    fn residual(&self) -> Option<StoreLayout> {
        self.quantized_gradients().filter(|_| self.state.quantization.feedback == Feedback::Kept)?;
        let gradients = self.shared_out(ZeroStage::Gradients, |index| self.is_trained(index));
        let place = |summing| ShardPlace { ranks: self.ranks(summing), rank: 0 };
        let keeps = |index: usize| {
            let stretch = gradients.places[index].filter(|_| self.is_trained(index));
            stretch.is_some_and(|(stretch, _)| self.is_coded(&gradients, stretch))
        };
        Some(StoreLayout::new(&self.records, Extent::Whole, place, keeps))
    }

    /// Which weights are whole while units work with them, and when; none where all are where kernels read them.
    pub(super) fn gathers(&self, passes: RankPasses<'_>) -> Result<Option<Gathers>, TooFewLive> {
        let is_shared_out = self.zero_stage >= ZeroStage::Parameters;
        if !is_shared_out && !self.has_weights_on_disk() {
            return Ok(None);
        }
        let stores = [Some(&self.weights()), Some(&self.frozen())];
        let ranks = |summing| if is_shared_out { self.ranks(summing) } else { 1 };
        Gathers::new(self.model, stores, ranks, passes, self.state.gathering).map(Some)
    }

    /// Weights that are whole while units work with them, and what is kept of them for neighbours.
    fn book_gathered(
        &self,
        passes: RankPasses<'_>,
        prediction: &mut MemoryPrediction,
    ) -> Result<(), TooFewLive> {
        let Some(gathers) = self.gathers(passes)? else { return Ok(()) };
        let is_shared_out = self.zero_stage >= ZeroStage::Parameters;
        let bytes = |elements: usize| booked_bytes(elements.saturating_mul(self.model.dtype.size_bytes()));
        let pool_bytes = booked_bytes(gathers.pool_bytes(self.model.dtype));
        prediction.add(MemoryCategory::Communication, "gathered weights", pool_bytes);
        if let Some(kind) = self.state.quantization.weights.filter(|_| is_shared_out) {
            let bytes = booked_bytes(kind.bytes(gathers.pool_elements()));
            prediction.add(MemoryCategory::Communication, "records of weights", bytes);
        }
        let kept = gathers.secondary_elements.map_or(0, bytes);
        prediction.add(MemoryCategory::Parameters, "weights kept for neighbours", kept);
        Ok(())
    }

    /// What is on its way between ranks.
    fn book_exchanges(&self, prediction: &mut MemoryPrediction) {
        let Self { model, stages, state, .. } = self;
        let category = MemoryCategory::Communication;
        let records = |kind: QuantizedType, elements: [usize; 2]| -> usize {
            elements.map(|elements| booked_bytes(kind.bytes(elements))).into_iter().sum()
        };
        let both = |elements: [usize; 2], dtype: DType| -> usize {
            elements
                .map(|elements| booked_bytes(elements.saturating_mul(dtype.size_bytes())))
                .into_iter()
                .sum()
        };
        if self.hands_gradients_on() {
            let bytes = both(self.gradients().passage().elements, DType::F32);
            prediction.add(category, "gradients on their way to their owners", bytes);
        }
        if let Some(kind) = self.quantized_gradients() {
            let gradients = self.shared_out(ZeroStage::Gradients, |index| self.is_trained(index));
            let RecordPassage { sent, received, .. } =
                gradients.record_passage(state.replicas, |stretch| self.is_coded(&gradients, stretch));
            prediction.add(category, "records of gradients", records(kind, sent) + records(kind, received));
        }
        if let Some(residual) = self.residual() {
            prediction.add(category, "what gradients lost", residual.booked_bytes(DType::BF16));
        }
        prediction.add(category, "keys and values of others", model.ring_bytes(stages));
        prediction.add(category, "rows on their way", model.transit_bytes(stages));
        prediction.add(category, "gathered inputs of blocks", model.gathering_bytes(stages));
    }
}

/// What the gradients of looked-up rows of a table take: room for as many rows as a step can ever look up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LookedUpSizes {
    /// Rows.
    pub capacity: usize,
    /// Bytes of the rows, in f32.
    pub rows_bytes: usize,
    /// Bytes of the rows' numbers in the table.
    pub row_ids_bytes: usize,
    /// Bytes of the row of each token of a micro-batch.
    pub token_rows_bytes: usize,
}

impl LookedUpSizes {
    /// For `table` and `micro_batches` of `tokens`, on all replicas together.
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

/// Bytes of some stages that do not depend on the state.
impl ModelProfile {
    fn book_activations(&self, stages: &[StageMemory], are_on_disk: bool, prediction: &mut MemoryPrediction) {
        let category = MemoryCategory::Activations;
        let boundary = booked_bytes(self.boundary_bytes);
        let (mut saved, mut deferred, mut between, mut inputs) = (0_usize, 0_usize, 2 * boundary, 0_usize);
        let of_tokens = |tokens: usize| booked_bytes(DType::U32.size_bytes() * tokens);
        let of_micro_batch = 3 * of_tokens(self.tokens)
            + of_tokens(self.tokens * self.context.attended())
            + booked_bytes(2 * DType::U32.size_bytes() * self.sequences);
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
            let given = self.given_bytes(stage.units.start).map_or(0, booked_bytes);
            let has_after = stage.units.end < self.units.len();
            let gradients = stage.slots * usize::from(has_after) + stage.outboxes();
            let handed_on = self.given_bytes(stage.units.end).filter(|_| are_on_disk && has_after);
            let handed_on = handed_on.map_or(0, booked_bytes);
            between = between.saturating_add(stage.slots * (given + handed_on) + gradients * boundary);
            inputs += stage.slots * of_micro_batch;
        }
        prediction.add(category, "kept from forward to backward", saved);
        if are_on_disk {
            let (places, bytes) = self.frame_places(stages);
            prediction.add(category, "on its way to and from disk", places * booked_bytes(bytes));
        }
        prediction.add(category, "kept for gradients of weights", deferred);
        prediction.add(category, "values and gradients between units", between);
        prediction.add(category, "micro-batches", inputs);
    }

    /// Bytes of activations that these stages book, with what units keep in memory or on disk.
    pub fn activation_bytes(&self, stages: &[StageMemory], are_on_disk: bool) -> usize {
        let mut prediction = MemoryPrediction::default();
        self.book_activations(stages, are_on_disk, &mut prediction);
        prediction.by_category().total()
    }

    fn units_of<'m>(&'m self, stages: &'m [StageMemory]) -> impl Iterator<Item = &'m UnitProfile> + Clone {
        stages.iter().flat_map(|stage| &self.units[stage.units.clone()])
    }

    /// Bytes that a unit works in: those of the largest.
    pub fn workspace_bytes(&self, stages: &[StageMemory]) -> usize {
        let splits = stages.iter().any(|stage| stage.splits_backward);
        let of_unit = |unit: &UnitProfile| {
            if splits { unit.workspace_bytes.max(unit.split_workspace_bytes) } else { unit.workspace_bytes }
        };
        self.units_of(stages).map(of_unit).max().unwrap_or(0)
    }

    /// Bytes of keys and values, and of their gradients, that go round the ranks that share sequences.
    fn ring_bytes(&self, stages: &[StageMemory]) -> usize {
        let elements = self.units_of(stages).map(|unit| unit.ring_elements).max().unwrap_or(0);
        if elements == 0 {
            return 0;
        }
        let has_gradients = self.units_of(stages).any(|unit| unit.has_backward);
        let blocks = RingSizes::new(elements, self.dtype, self.context.ranks, has_gradients);
        blocks.blocks_bytes.into_iter().chain(blocks.gradients_bytes).map(booked_bytes).sum()
    }

    /// Bytes of the two outputs of units that are whole, of those that ranks keep slices of.
    fn gathering_bytes(&self, stages: &[StageMemory]) -> usize {
        let slices = |unit: usize| self.units[unit].slices_output;
        let any =
            stages.iter().any(|stage| (stage.units.start.saturating_sub(1)..stage.units.end).any(slices));
        if any { 2 * booked_bytes(self.gathered_bytes) } else { 0 }
    }

    /// Bytes of rows that are on their way beside products.
    fn transit_bytes(&self, stages: &[StageMemory]) -> usize {
        self.units_of(stages).filter_map(|unit| unit.transit_bytes).max().map_or(0, booked_bytes)
    }
}

/// Buffers of ring attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingSizes {
    /// One block that goes, one that comes, and a copy to compute with of what has to go on at once.
    pub blocks_bytes: [usize; 3],
    /// Two blocks of gradients that are added to and sent by turns, and one that comes; f32.
    pub gradients_bytes: [usize; 3],
}

impl RingSizes {
    /// For blocks of so many elements of keys and values, of `dtype`, that go round `ranks`.
    pub fn new(elements: usize, dtype: DType, ranks: usize, has_gradients: bool) -> Self {
        let bytes = elements * dtype.size_bytes();
        // The last of two ranks sends nothing on.
        let copy_bytes = if ranks > 2 { bytes } else { 0 };
        let gradient_bytes = if has_gradients { elements * DType::F32.size_bytes() } else { 0 };
        Self { blocks_bytes: [bytes, bytes, copy_bytes], gradients_bytes: [gradient_bytes; 3] }
    }
}
