//! Model state of a rank as a list: the stores that exist, those that are sharded or on disk, and those that are copied.

use lockstep_plan::gathering::RankPasses;
use lockstep_plan::{
    BufferUnit, CACHE_LINE_BYTES, ContextPlace, DType, Extent, Feedback, Initializer, MemoryCategory,
    ModelProfile, OffloadPlan, ParameterId, ParameterRecord, Quantization, QuantizedType, ShardPlace,
    Sharding, Share, StageMemory, StateFacts, StateKind, StateLayout, StatePlan, StoreKind, UnitProfile,
    ZeroStage,
};

const RANKS: usize = 4;
const ELEMENTS: usize = 4096 * RANKS;

/// Three units of one trained matrix each; the second has an expert selection bias, and the last a frozen matrix.
fn model() -> ModelProfile {
    let record = |unit: usize, name: &str, trainable: bool| ParameterRecord {
        name: format!("{unit}.{name}"),
        shape: vec![ELEMENTS],
        share: Share::default(),
        initializer: Initializer::Zeros,
        tie: None,
        unit,
        buffer: BufferUnit::alone(unit),
        trainable,
        block_format: None,
        decay: false,
        learning_rate_multiplier: 1.0,
    };
    let records = vec![
        record(0, "matrix", true),
        record(1, "matrix", true),
        record(1, "bias", true),
        record(2, "matrix", true),
        record(2, "frozen", false),
    ];
    let unit = |unit: usize| UnitProfile {
        parameters: (0..records.len()).filter(|id| records[*id].unit == unit).map(ParameterId).collect(),
        buffers: (unit == 1).then_some(ParameterId(2)).into_iter().collect(),
        has_backward: true,
        ..UnitProfile::default()
    };
    ModelProfile {
        units: (0..3).map(unit).collect(),
        largest_elements: vec![ELEMENTS; records.len()],
        records,
        dtype: DType::BF16,
        sequences: 1,
        tokens: 16,
        data_bytes: Vec::new(),
        boundary_bytes: 1024,
        slice_bytes: 1024,
        gathered_bytes: 1024,
        constants: Vec::new(),
        context: ContextPlace::default(),
    }
}

fn facts() -> StateFacts {
    StateFacts {
        has_master: true,
        optimizer_dtype: DType::F32,
        optimizer_keeps: vec![
            (StateKind::ExpAvg, vec![true; 5]),
            (StateKind::ExpAvgSq, vec![true; 5]),
            (StateKind::MomentumBuffer, vec![false; 5]),
        ],
        window_elements: 0,
        packed_bytes: 0,
    }
}

fn plan(zero_stage: ZeroStage) -> StatePlan {
    StatePlan {
        zero_stage,
        quantization: Quantization::default(),
        replicas: 1,
        sharding: Sharding::default(),
        facts: facts(),
        on_disk: None,
        has_activations_on_disk: false,
        micro_batches: 1,
        kept_copies: 1,
        saved_copies: 0,
    }
}

fn laid_out(state: &StatePlan, ranks: usize, rank: usize) -> StateLayout {
    StateLayout::new(&model(), &[StageMemory::whole(3)], |_| ShardPlace { ranks, rank }, state)
}

fn kinds<'a>(items: impl IntoIterator<Item = &'a lockstep_plan::StateItem>) -> Vec<StoreKind> {
    items.into_iter().map(|item| item.kind).collect()
}

const MOMENTS: [StoreKind; 2] =
    [StoreKind::Optimizer(StateKind::ExpAvg), StoreKind::Optimizer(StateKind::ExpAvgSq)];

#[test]
fn each_zero_stage_shards_one_kind_of_store_more() {
    let sharded = [
        (ZeroStage::Nothing, vec![]),
        (ZeroStage::Optimizer, vec![StoreKind::MasterWeights, MOMENTS[0], MOMENTS[1]]),
        (ZeroStage::Gradients, vec![StoreKind::MasterWeights, MOMENTS[0], MOMENTS[1], StoreKind::Gradients]),
        (
            ZeroStage::Parameters,
            vec![
                StoreKind::Weights,
                StoreKind::FrozenWeights,
                StoreKind::MasterWeights,
                MOMENTS[0],
                MOMENTS[1],
                StoreKind::Gradients,
            ],
        ),
    ];
    for (stage, expected) in sharded {
        let layout = laid_out(&plan(stage), RANKS, 1);
        let own = layout.items.iter().filter(|item| item.extent == Extent::Own);
        assert_eq!(kinds(own.clone()), expected, "{stage:?}");
        for item in own {
            let flat_parameters = &item.layout.flat_parameters;
            assert!(flat_parameters.iter().all(|flat| flat.own.start == flat.elements / RANKS));
            let elements: usize = flat_parameters.iter().map(|flat| flat.own.len()).sum();
            // A unit without elements in the store is booked one cache line.
            let empty = (0..3).filter(|unit| flat_parameters.iter().all(|flat| flat.unit != *unit)).count();
            let bytes = elements * item.dtype.size_bytes() + empty * CACHE_LINE_BYTES;
            assert_eq!(item.booked_bytes(), bytes, "{stage:?}, {:?}", item.kind);
        }
        // A single rank shards nothing, whatever the stage.
        let alone = laid_out(&plan(stage), 1, 0);
        assert!(alone.items.iter().all(|item| item.extent == Extent::Whole), "{stage:?}");
        // Expert selection biases are a store of their own if the updated weights are sharded.
        let has_biases = stage >= ZeroStage::Optimizer;
        assert_eq!(layout.item(StoreKind::Buffers).is_some(), has_biases, "{stage:?}");
    }
}

#[test]
fn copies_hold_updated_weights_optimizer_state_biases_and_residuals() {
    let quantization =
        Quantization { gradients: Some(QuantizedType::Int8), feedback: Feedback::Kept, weights: None };
    let state = StatePlan { quantization, ..plan(ZeroStage::Gradients) };
    let layout = laid_out(&state, RANKS, 0);
    let [first, second] = MOMENTS;
    let saved = [StoreKind::MasterWeights, first, second, StoreKind::Buffers, StoreKind::GradientResidual];
    assert_eq!(kinds(layout.saved()), saved);
    let model = model();
    let passes = RankPasses { stages: vec![StageMemory::whole(3)], pipeline: None, micro_batches: 1 };
    let gathers = layout.gathers(&model, &passes).unwrap();
    let memory = layout.memory(&model, &passes.stages, gathers.as_ref()).by_category();
    let copied: usize = layout.saved().map(lockstep_plan::StateItem::booked_bytes).sum();
    assert_eq!(memory[MemoryCategory::Snapshot], copied);
    // Without master weights the checkpoint holds the weights that kernels read, and selection biases are apart if those are sharded.
    let layout = laid_out(
        &StatePlan { facts: StateFacts { has_master: false, ..facts() }, ..plan(ZeroStage::Optimizer) },
        RANKS,
        0,
    );
    assert_eq!(kinds(layout.saved()), [StoreKind::Weights, first, second]);
}

#[test]
fn stores_of_the_optimizer_step_lie_on_disk_beside_each_other() {
    let disk = OffloadPlan { share: 0.5, has_gradients: false, has_parameters: true, window_elements: 2048 };
    let layout = laid_out(&StatePlan { on_disk: Some(disk), ..plan(ZeroStage::Nothing) }, 1, 0);
    let [first, second] = MOMENTS;
    let file = [StoreKind::Weights, StoreKind::MasterWeights, first, second];
    assert_eq!(kinds(layout.updated_on_disk()), file);
    for item in &layout.items {
        let on_disk: Vec<usize> =
            item.layout.flat_parameters.iter().filter(|flat| flat.is_on_disk).map(|s| s.unit).collect();
        let expected: &[usize] = match item.kind {
            // Half of the trained state, by whole units from the first on; the frozen matrix separately.
            kind if file.contains(&kind) => &[0, 1],
            StoreKind::FrozenWeights => &[2],
            _ => &[],
        };
        assert_eq!(on_disk, expected, "{:?}", item.kind);
    }
}

#[test]
fn bytes_of_an_element_are_those_of_the_stores_that_every_parameter_has_a_part_in() {
    let bytes = plan(ZeroStage::Nothing).element_bytes(DType::BF16);
    assert_eq!([bytes.weight, bytes.gradient, bytes.optimizer], [2, 4, 12]);
    let bytes = StatePlan { facts: StateFacts { has_master: false, ..facts() }, ..plan(ZeroStage::Nothing) }
        .element_bytes(DType::F32);
    assert_eq!([bytes.weight, bytes.gradient, bytes.optimizer], [4, 4, 8]);
}
