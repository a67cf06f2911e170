//! Work and saved activations of a rank, as recorded, checked against closed forms and published figures.

use lockstep_graph::{BlockShape, Recompute};
use lockstep_model::{
    LlamaConfig, ModelConfig, RecordedModel, RecordingOptions, Tuning, model_work, parameter_records,
};
use lockstep_plan::work::{
    Collective, Exchange, ModelWork, Pass, Peers, SavedExtent, Task, TaskKind, UnitWork,
};
use lockstep_plan::{ContextMethod, ContextPlace, DType, ExpertPlace, Places, TensorDimensions, TensorPlace};

/// A model of Korthikanti et al. (2022), table 3, with its values in figures 1 and 7.
struct Published {
    name: &'static str,
    heads: usize,
    hidden: usize,
    layers: usize,
    /// Sequences per micro-batch.
    sequences: usize,
    stages: usize,
    chunks: usize,
    /// Figure 1: activations in GiB, without and with sequence parallelism and selective recomputation.
    activations_gib: [f64; 2],
    /// Figure 7, read off the figure: percent of the activations under tensor parallelism alone. With sequence
    /// parallelism, with selective recomputation, with both, and with full recomputation.
    percent: [f64; 4],
}

const TENSOR: usize = 8;
const SEQ_LEN: usize = 2048;
const VOCABULARY: usize = 51_200;

const PUBLISHED: [Published; 4] = [
    Published {
        name: "22B",
        heads: 64,
        hidden: 6144,
        layers: 48,
        sequences: 4,
        stages: 1,
        chunks: 1,
        activations_gib: [59.25, 9.5625],
        percent: [66.84, 49.42, 16.18, 7.64],
    },
    Published {
        name: "175B",
        heads: 96,
        hidden: 12_288,
        layers: 96,
        sequences: 1,
        stages: 8,
        chunks: 3,
        activations_gib: [66.84, 12.35],
        percent: [62.04, 56.53, 18.49, 8.71],
    },
    Published {
        name: "530B",
        heads: 128,
        hidden: 20_480,
        layers: 105,
        sequences: 1,
        stages: 35,
        chunks: 3,
        activations_gib: [114.02, 23.08],
        percent: [58.31, 62.04, 20.27, 9.42],
    },
    Published {
        name: "1T",
        heads: 160,
        hidden: 25_600,
        layers: 128,
        sequences: 1,
        stages: 64,
        chunks: 1,
        activations_gib: [131.25, 26.56],
        percent: [58.31, 62.04, 20.27, 9.42],
    },
];

impl Published {
    fn config(&self) -> ModelConfig {
        let config = ModelConfig::preset("gpt2-124m").unwrap();
        let config = config.get::<lockstep_model::Gpt2Config>().expect("a GPT-2").clone();
        let config = lockstep_model::Gpt2Config {
            vocab_size: VOCABULARY,
            hidden_size: self.hidden,
            intermediate_size: 4 * self.hidden,
            num_hidden_layers: self.layers,
            num_attention_heads: self.heads,
            max_position_embeddings: SEQ_LEN,
            ..config
        };
        ModelConfig::from(config).with_dropout(0.1)
    }

    fn options(&self, tensor: TensorPlace, recompute: Recompute) -> RecordingOptions {
        let shape = BlockShape { sequences: self.sequences, seq_len: SEQ_LEN, dtype: DType::F16 };
        let places = Places { tensor, ..Places::default() };
        RecordingOptions::training(shape, recompute.into(), places)
    }

    fn work(&self, tensor: TensorPlace) -> ModelWork {
        model_work(&self.config(), &Tuning::default(), self.options(tensor, Recompute::None))
    }

    /// Elements of the value between two blocks.
    fn sbh(&self) -> f64 {
        (self.sequences * SEQ_LEN * self.hidden) as f64
    }

    /// Bytes per element of the attention scores, `5 a s / h`.
    fn scores(&self) -> f64 {
        5.0 * (self.heads * SEQ_LEN) as f64 / self.hidden as f64
    }
}

fn alone(shape: BlockShape) -> RecordingOptions {
    at(Places::default(), shape)
}

fn at(places: Places, shape: BlockShape) -> RecordingOptions {
    RecordingOptions::training(shape, Recompute::None.into(), places)
}

fn split_over(ranks: usize, splits_tokens: bool) -> TensorPlace {
    TensorPlace { ranks, splits_tokens, ..TensorPlace::default() }
}

#[track_caller]
fn assert_near(found: f64, expected: f64, within: f64, what: &str) {
    let off = (found - expected).abs() / expected;
    assert!(off <= within, "{what}: {found} and not {expected}, off by {:.3} %", 100.0 * off);
}

#[test]
fn a_layer_keeps_what_is_published() {
    let t = TENSOR as f64;
    for model in &PUBLISHED {
        let scores = model.scores();
        let kept = |tensor, keeping| {
            let work = model.work(tensor);
            work.unit(1).kept.bytes(keeping, work.dtype) as f64 / model.sbh()
        };
        let (alone, in_parts) = (TensorPlace::default(), split_over(TENSOR, false));
        let with_tokens = split_over(TENSOR, true);
        let (all, without) = (SavedExtent::Everything, SavedExtent::WithoutScores);
        for (tensor, keeping, expected, what) in [
            (alone, all, 34.0 + scores, "alone"),
            (alone, without, 34.0, "alone, selective"),
            (in_parts, all, 10.0 + 24.0 / t + scores / t, "tensor"),
            (with_tokens, all, (34.0 + scores) / t, "tensor and sequence"),
            (in_parts, without, 10.0 + 24.0 / t, "tensor, selective"),
            (with_tokens, without, 34.0 / t, "tensor and sequence, selective"),
            (in_parts, SavedExtent::InputAlone, 2.0, "full"),
        ] {
            assert_near(kept(tensor, keeping), expected, 1e-9, &format!("{}, {what}", model.name));
        }
    }
}

#[test]
fn the_ends_of_a_model_keep_what_is_published() {
    // Section 4.3: the mask of the embedding's dropout; the inputs of the last norm and of the output layer, and logits in f32.
    for model in &PUBLISHED {
        let work = model.work(split_over(TENSOR, true));
        let of = |unit| work.unit(unit).kept.bytes(SavedExtent::Everything, work.dtype) as f64;
        let sbh_of_rank = model.sbh() / TENSOR as f64;
        assert_near(of(0), sbh_of_rank, 1e-12, model.name);
        let vocabulary = VOCABULARY as f64 / model.hidden as f64;
        let head = 4.0 * sbh_of_rank * (1.0 + vocabulary);
        assert_near(of(work.units() - 1), head, 1e-12, model.name);
    }
}

#[test]
fn without_dropout_of_attention_a_score_is_two_bytes() {
    let model = &PUBLISHED[0];
    let options = model.options(TensorPlace::default(), Recompute::None);
    let work = model_work(&model.config().without_dropout(), &Tuning::default(), options);
    let kept = work.unit(1).kept.bytes(SavedExtent::Everything, work.dtype) as f64 / model.sbh();
    // Without dropout the two other masks are absent as well.
    assert_near(kept, 32.0 + model.scores() * 2.0 / 5.0, 1e-9, "without dropout");
}

#[test]
fn a_first_stage_keeps_what_figures_1_and_7_say() {
    let [alone, with_tokens] = [split_over(TENSOR, false), split_over(TENSOR, true)];
    let (all, without) = (SavedExtent::Everything, SavedExtent::WithoutScores);
    for model in &PUBLISHED {
        let kept = |tensor, keeping| {
            let work = model.work(tensor);
            work.unit(1).kept.bytes(keeping, work.dtype) as f64
        };
        // The first stage saves as many micro-batches as there are stages; interleaved stages save more (section 4.2.3).
        let [p, m] = [model.stages, model.chunks].map(|count| count as f64);
        let interleaved = if model.chunks > 1 { 1.0 + (p - 1.0) / (p * m) } else { 1.0 };
        let gib = |bytes: f64| bytes * model.layers as f64 * interleaved / f64::from(1 << 30);
        let [neither, both] = model.activations_gib;
        assert_near(gib(kept(alone, all)), neither, 5e-4, model.name);
        assert_near(gib(kept(with_tokens, without)), both, 5e-4, model.name);
        let found =
            [(with_tokens, all), (alone, without), (with_tokens, without), (alone, SavedExtent::InputAlone)]
                .map(|(tensor, keeping)| 100.0 * kept(tensor, keeping) / kept(alone, all));
        for (found, read) in found.into_iter().zip(model.percent) {
            assert!((found - read).abs() < 0.15, "{}: {found} %, and {read} in the figure", model.name);
        }
    }
}

fn flops(tasks: &[Task], passes: &[Pass]) -> u64 {
    let of = |task: &Task| match task.kind {
        TaskKind::Product(product) => product.flops(),
        // The full score square; `flops` counts half of it.
        TaskKind::Attention(attention) => 2 * attention.flops,
        TaskKind::Stream | TaskKind::Exchange(_) => 0,
    };
    tasks.iter().filter(|task| passes.contains(&task.pass)).map(of).sum()
}

#[test]
fn floating_point_operations_are_the_published_ones() {
    for model in &PUBLISHED {
        let [b, l, s, h, v] =
            [model.sequences, model.layers, SEQ_LEN, model.hidden, VOCABULARY].map(|count| count as f64);
        // Narayanan et al. (2021), section 5.1, without and with recomputation.
        let published = 72.0 * b * l * s * h * h * (1.0 + s / (6.0 * h) + v / (12.0 * h * l));
        let hardware = 96.0 * b * l * s * h * h * (1.0 + s / (6.0 * h) + v / (16.0 * h * l));
        let work = model.work(TensorPlace::default());
        assert_near(work.dense_training_flops() as f64, published, 1e-12, model.name);
        assert_eq!(model.work(split_over(TENSOR, true)).training_flops, work.training_flops);

        let options = model.options(TensorPlace::default(), Recompute::Full);
        let work = model_work(&model.config(), &Tuning::default(), options);
        let passes = [Pass::Forward, Pass::Recompute, Pass::BackwardInputs, Pass::BackwardWeights];
        let of_unit = |unit: &UnitWork| flops(&unit.forward, &passes) + flops(&unit.backward, &passes);
        let found: u64 = (0..work.units()).map(|unit| of_unit(work.unit(unit))).sum();
        // Nothing in the backward reads the output of a block's last product, so it is not recomputed.
        let last = 8.0 * b * l * s * h * h;
        assert_near(found as f64, hardware - last, 1e-12, model.name);
    }
}

#[test]
fn parameters_are_the_published_ones() {
    for model in &PUBLISHED {
        let [l, s, h, v] = [model.layers, SEQ_LEN, model.hidden, VOCABULARY].map(|count| count as u64);
        // The published form is 12 l h² (1 + 13 / 12h + (V + s) / 12lh).
        let published = 12 * l * h * h + 13 * l * h + (v + s) * h;
        let elements = |tensor| {
            let work = model.work(tensor);
            (0..work.units()).map(|unit| work.unit(unit).parameter_elements).sum::<u64>()
        };
        // A tied table counts in two units; the formula omits the last norm.
        assert_eq!(elements(TensorPlace::default()), published + v * h + 2 * h, "{}", model.name);
        let t = TENSOR as u64;
        // Norms, biases of row-parallel layers, and positions are on every rank.
        let whole = l * (4 + 2) * h + 2 * h + s * h;
        let expected = (published + v * h + 2 * h - whole) / t + whole;
        assert_eq!(elements(split_over(TENSOR, false)), expected, "{}", model.name);
    }
}

/// Bytes that a rank sends in a forward and a backward of a unit, without and with recomputation, if collectives are
/// bandwidth-optimal over `ranks` ranks.
fn sent(unit: &UnitWork, peers: Peers, ranks: usize) -> [f64; 2] {
    let n = ranks as f64;
    let bytes = |exchange: &Exchange| {
        let share = match exchange.collective {
            Collective::AllReduce => 2.0 * (n - 1.0) / n,
            Collective::AllGather | Collective::ReduceScatter | Collective::AllToAll => (n - 1.0) / n,
            Collective::Ring => n - 1.0,
            Collective::Broadcast | Collective::Reduce | Collective::Shift => 1.0,
        };
        share * exchange.bytes as f64
    };
    let mut sums = [0.0; 2];
    for task in unit.forward.iter().chain(&unit.backward) {
        let TaskKind::Exchange(exchange) = task.kind else { continue };
        assert_eq!(exchange.peers, peers, "{task:?}");
        sums[1] += bytes(&exchange);
        sums[0] += if task.pass == Pass::Recompute { 0.0 } else { bytes(&exchange) };
    }
    sums
}

#[test]
fn tensor_parallel_ranks_send_what_four_sums_are() {
    for model in &PUBLISHED {
        for ranks in [2, 4, 8] {
            // In 16 bits. 8 b s h (t-1)/t elements: four all-reduces per block (Shoeybi et al. 2019; Narayanan et al.
            // 2021, section 3.2).
            let four = 2.0 * 8.0 * model.sbh() * (ranks as f64 - 1.0) / ranks as f64;
            let [once, all] = sent(model.work(split_over(ranks, false)).unit(1), Peers::Tensor, ranks);
            assert_near(once, four, 1e-12, model.name);
            assert_near(all, four, 1e-12, model.name);
            // The same as all-gathers and reduce-scatters, and two more all-gathers (Korthikanti et al. 2022, section 4.2.2).
            let [once, all] = sent(model.work(split_over(ranks, true)).unit(1), Peers::Tensor, ranks);
            assert_near(once, four, 1e-12, model.name);
            assert_near(all, four * 10.0 / 8.0, 1e-12, model.name);
            // With full recomputation others send 6/4 of it (Rajbhandari et al. 2019, section 8). Here the all-reduce
            // that ends a block is not repeated, because nothing reads its result.
            let options = model.options(split_over(ranks, false), Recompute::Full);
            let work = model_work(&model.config(), &Tuning::default(), options);
            let [once, all] = sent(work.unit(1), Peers::Tensor, ranks);
            assert_near(once, four, 1e-12, model.name);
            assert_near(all, four * 5.0 / 4.0, 1e-12, model.name);
        }
    }
}

#[test]
fn what_is_cut_into_chunks_is_one_task_beside_its_products() {
    let model = &PUBLISHED[0];
    let parts = |chunks, splits_tokens| {
        let work = model.work(TensorPlace { chunks, ..split_over(TENSOR, splits_tokens) });
        let unit = work.unit(1).clone();
        let is_overlapped =
            |task: &&Task| matches!(task.kind, TaskKind::Exchange(exchange) if exchange.is_overlapped);
        let beside = unit.forward.iter().chain(&unit.backward).filter(is_overlapped).count();
        let lists = [unit.forward, unit.backward, unit.backward_inputs, unit.backward_weights].map(|tasks| {
            let mut words: Vec<String> = tasks.iter().map(|task| format!("{task:?}")).collect();
            words
                .iter_mut()
                .for_each(|words| *words = words.replace("is_overlapped: true", "is_overlapped: false"));
            words.sort();
            words
        });
        (lists, beside)
    };
    for splits_tokens in [false, true] {
        let [(alone, none), (cut, beside)] = [1, 4].map(|chunks| parts(chunks, splits_tokens));
        assert_eq!(cut, alone, "split by tokens: {splits_tokens}");
        assert_eq!(none, 0);
        assert!(beside >= 4, "{beside} exchanges beside products");
    }
}

fn llama(options: RecordingOptions) -> ModelWork {
    model_work(&ModelConfig::preset("llama3-8b").unwrap(), &Tuning::default(), options)
}

#[test]
fn ranks_that_share_sequences_send_keys_and_values() {
    let shape = BlockShape { sequences: 2, seq_len: 4096, dtype: DType::BF16 };
    // Elements of the keys and values, and of the queries, of all tokens.
    let [keys, queries] = [2 * 1024, 4096].map(|width| (shape.tokens() * width) as f64);
    for ranks in [2, 4, 8] {
        let n = ranks as f64;
        let sent = |method| {
            let context = ContextPlace { ranks, rank: 0, method };
            sent(llama(at(Places { context, ..Places::default() }, shape)).unit(1), Peers::Context, ranks)
        };
        // Forward and backward: n - 1 steps in 16 bits. The gradients in f32: n steps, the last one to their owner.
        let ring = 2.0 * 2.0 * keys * (n - 1.0) / n + 4.0 * keys;
        assert_near(sent(ContextMethod::Ring)[1], ring, 1e-12, "ring");
        // An all-gather, a reduce-scatter of the gradients, and the all-gather again.
        let once = 2.0 * keys * (n - 1.0) / n;
        let gathered = sent(ContextMethod::AllGather);
        assert_near(gathered[0], 2.0 * once, 1e-12, "all-gather");
        assert_near(gathered[1], 3.0 * once, 1e-12, "all-gather again");
        // Everything that a rank holds of queries, keys, values and outputs except its own heads, there and back.
        let held = 2.0 * (keys + 2.0 * queries) / n;
        assert_near(sent(ContextMethod::AllToAll)[1], 2.0 * held * (n - 1.0) / n, 1e-12, "all-to-all");
    }
}

#[test]
fn mixtures_multiply_with_active_parameters_alone() {
    let shape = BlockShape { sequences: 1, seq_len: 1024, dtype: DType::BF16 };
    // In billions, as published: total parameters, and active parameters of a token.
    for (name, total, active) in [("mixtral-8x7b", 46.7, 12.9), ("qwen3-30b-a3b", 30.5, 3.3)] {
        let config = ModelConfig::preset(name).unwrap();
        let experts = config.experts().unwrap();
        let records = parameter_records(&config);
        let is_of_experts = |name: &str| name.contains(".experts.");
        let elements = |wanted: &dyn Fn(&str) -> bool| -> u64 {
            let wanted = records.iter().filter(|record| record.shape.len() > 1 && wanted(&record.name));
            wanted.map(|record| record.shape.iter().product::<usize>() as u64).sum()
        };
        let of_experts = elements(&is_of_experts);
        let others = elements(&|name| !is_of_experts(name) && !name.contains("embed_tokens"));
        let table = elements(&|name| name.contains("embed_tokens"));
        let used = others + of_experts * experts.per_token as u64 / experts.count as u64;
        assert_near((others + of_experts + table) as f64 / 1e9, total, 0.002, name);
        // Qwen3's active count is 3.35.
        assert_near((used + table) as f64 / 1e9, active, 0.02, name);

        let alone_work = model_work(&config, &Tuning::default(), alone(shape));
        let products = 6 * used * shape.tokens() as u64;
        assert_eq!(alone_work.training_flops - alone_work.attention_flops, products, "{name}");
        let passes = [Pass::Forward, Pass::BackwardInputs, Pass::BackwardWeights];
        let of_unit = |unit: &UnitWork| flops(&unit.forward, &passes) + flops(&unit.backward, &passes);
        let of_tasks: u64 = (0..alone_work.units()).map(|unit| of_unit(alone_work.unit(unit))).sum();
        assert_eq!(of_tasks, alone_work.dense_training_flops(), "{name}");
        let here =
            |work: &ModelWork| -> u64 { (0..work.units()).map(|unit| work.unit(unit).expert_elements).sum() };
        assert_eq!(here(&alone_work), of_experts, "{name}");

        // A row per slot to the experts and back, the same for their gradients, and the row counts.
        for ranks in [2, 8] {
            let place = ExpertPlace { ranks, rank: 0, tensor_ranks: 1, tensor_rank: 0 };
            let work = model_work(
                &config,
                &Tuning::default(),
                at(Places { experts: place, ..Places::default() }, shape),
            );
            assert_eq!(here(&work), of_experts / ranks as u64, "{name}");
            let (n, slots) = (ranks as f64, (shape.tokens() * experts.per_token) as f64);
            let rows = 2.0 * slots * config.hidden_size() as f64 * (n - 1.0) / n;
            let counts = 8.0 * experts.count as f64 * (n - 1.0) / n;
            let [_, all] = sent(work.unit(1), Peers::Expert, ranks);
            assert_near(all, 4.0 * rows + counts, 1e-12, name);
            // Rows come from all ranks and go to all: each rank has as many rows as alone, for fewer experts.
            assert_near(of_products(work.unit(1)), of_products(alone_work.unit(1)), 1e-12, name);
        }
    }
}

/// The host must know how many rows it receives, unless experts have a capacity.
#[test]
fn a_host_waits_for_how_many_rows_come_where_nothing_is_dropped() {
    let shape = BlockShape { sequences: 1, seq_len: 64, dtype: DType::BF16 };
    let place = ExpertPlace { ranks: 2, rank: 0, tensor_ranks: 1, tensor_rank: 0 };
    let waits = |config: &ModelConfig| {
        let options = at(Places { experts: place, ..Places::default() }, shape);
        let work = model_work(config, &Tuning::default(), options);
        let is_for_host =
            |task: &&Task| matches!(task.kind, TaskKind::Exchange(exchange) if exchange.is_for_host);
        let unit = work.unit(1);
        [&unit.forward, &unit.backward].map(|pass| pass.iter().filter(is_for_host).count())
    };
    let config = ModelConfig::preset("mixtral-20m").unwrap();
    assert_eq!(waits(&config), [1, 0]);
    let mut llama = config.get::<LlamaConfig>().expect("a Llama with experts").clone();
    llama.experts.as_mut().unwrap().capacity_factor = Some(1.0);
    assert_eq!(waits(&llama.into()), [0, 0]);
}

fn of_products(unit: &UnitWork) -> f64 {
    let passes = [Pass::Forward, Pass::BackwardInputs, Pass::BackwardWeights];
    (flops(&unit.forward, &passes) + flops(&unit.backward, &passes)) as f64
}

#[test]
fn a_square_of_ranks_sends_blocks_along_its_lines() {
    let model = &PUBLISHED[0];
    let tensor = TensorPlace { dimensions: TensorDimensions::Two, ..split_over(4, true) };
    let work = model.work(tensor);
    let unit = work.unit(1);
    let count = |collective| {
        let is_such = |task: &&Task| {
            matches!(task.kind, TaskKind::Exchange(exchange)
                if exchange.peers == Peers::TensorLine && exchange.collective == collective)
        };
        unit.forward.iter().chain(&unit.backward).filter(is_such).count()
    };
    // Six layers in two steps each: two broadcasts per step forward, one in each half of the backward, which also reduces.
    assert_eq!((count(Collective::Broadcast), count(Collective::Reduce)), (6 * 2 * 4, 6 * 2 * 2));
    // To blocks and back for each of two branches, and the same for gradients.
    assert_eq!(count(Collective::AllToAll), 8);
    assert_near(
        4.0 * of_products(unit),
        of_products(model.work(TensorPlace::default()).unit(1)),
        1e-12,
        "FLOPs",
    );
}

#[test]
fn ranks_that_split_the_vocabulary_tell_each_other_three_numbers_of_each_token() {
    let shape = BlockShape { sequences: 1, seq_len: 8192, dtype: DType::BF16 };
    let work = llama(at(Places { tensor: split_over(8, false), ..Places::default() }, shape));
    let head = work.unit(work.units() - 1);
    let told = head.backward.iter().filter_map(|task| match task.kind {
        TaskKind::Exchange(exchange) if exchange.collective == Collective::AllGather => Some(exchange.bytes),
        _ => None,
    });
    let told: Vec<u64> = told.collect();
    assert_eq!(told.iter().sum::<u64>(), 3 * 4 * 8 * 8192, "{told:?}");
    assert!(told.len() > 1, "the tokens' logits are computed in parts");
    // The products still count as those of all tokens at once.
    let products = head.backward.iter().filter(|task| matches!(task.kind, TaskKind::Product(_)));
    assert_eq!(products.count(), 3);
}

#[test]
fn a_models_work_is_that_of_its_recording_and_takes_less_than_a_moment() {
    let shape = BlockShape { sequences: 1, seq_len: 4096, dtype: DType::BF16 };
    let config = ModelConfig::preset("llama3-405b").unwrap();
    let options = at(Places { tensor: split_over(8, true), ..Places::default() }, shape);
    let recorded = RecordedModel::tuned(&config, &Tuning::default(), options).work();
    let mut shortest = std::time::Duration::MAX;
    for _ in 0..20 {
        let begin = std::time::Instant::now();
        let work = model_work(&config, &Tuning::default(), options);
        shortest = shortest.min(begin.elapsed());
        assert_eq!(work, recorded);
    }
    assert_eq!((recorded.units(), recorded.distinct.len()), (128, 3));
    // A few hundred microseconds, because a search records hundreds of variants.
    assert!(shortest.as_millis() < 5, "{shortest:?}");
}
