//! All ways of running a backward agree bit for bit: fused and split, with and without recomputation. The gradient is
//! the derivative of the loss.

use lockstep_graph::{
    AttentionOptions, AttentionShape, Batch, BatchInput, BatchNormOptions, Bias, BlockShape, Constant,
    Convolution, InputDeclaration, InputGradient, Linear, LoraAdapters, Mixture, Mode, ParameterIndex,
    Parameters, Program, Recompute, Recorder, Replay, Routing, Seed, Statistics, Value,
};
use lockstep_plan::{DType, MemoryCategory, random::Philox};
use lockstep_tensor::{
    Activation, Arena, AttentionDirection, CpuQueue, GatedActivation, Gelu, RouterScores, RouterWeights,
    Tensor, View, Window2d, Write,
};

const SHAPE: BlockShape = BlockShape { sequences: 2, seq_len: 5, dtype: DType::F32 };
const WIDTH: usize = 12;
/// Bytes of the values saved under full recomputation: the output, and the slot counts of the experts.
const SAVED_ALWAYS: usize = (10 * WIDTH * 4).next_multiple_of(64) + 64;
const SEED: Seed = Seed::new(1.0, 0.5);

fn linear<'a>(name: &'a str, out_features: usize, bias: Bias) -> Linear<'a> {
    Linear { name, out_features, bias, std: 0.3 }
}

/// Records a block with every kind of operation: two residual branches, grouped-query attention with rotary
/// positions, a gated and a plain feed-forward, dropout, and low-rank adapters of which two use the same `A`.
fn everything(g: &mut Recorder, x: Value, dropout: f32) -> Value {
    let layers = [("q", "qv"), ("v", "qv"), ("down", "down")];
    let layers = layers.into_iter().map(|(layer, name)| (layer.to_owned(), name.to_owned())).collect();
    g.adapt(LoraAdapters { rank: 3, scale: 0.7, dropout, layers });
    let normed = g.rms_norm(x, "norm_1", WIDTH, 1e-5);
    let q = g.linear(normed, linear("q", 16, Bias::With));
    let k = g.linear(normed, linear("k", 8, Bias::Without));
    let v = g.linear(normed, linear("v", 8, Bias::With));
    let q = g.rms_norm_around_one(q, "q_norm", 4, 1e-5);
    let frequencies = g.constant("frequencies");
    let (q, k) = (g.rope(q, 4, frequencies), g.rope(k, 4, frequencies));
    let shape = AttentionShape { scale: 0.5, ..AttentionShape::new(4, 2, 4) };
    let attended = g.attention(q, k, v, shape, AttentionOptions { dropout, ..AttentionOptions::default() });
    let projected = g.linear(attended, linear("o", WIDTH, Bias::With));
    let dropped = g.dropout(projected, dropout);
    let x = g.add(x, dropped);
    let normed = g.layer_norm(x, "norm_2", Bias::With, 1e-5);
    let gate = g.linear(normed, linear("gate", 20, Bias::Without));
    let up = g.linear(normed, linear("up", 20, Bias::Without));
    let active = g.gated(GatedActivation::Silu, gate, up);
    let active = g.gated(GatedActivation::Gelu(Gelu::Tanh), up, active);
    let down = g.linear(active, linear("down", WIDTH, Bias::Without));
    let wide = g.linear(normed, linear("wide", 14, Bias::With));
    let active = g.gelu(Gelu::Tanh, wide);
    let narrow = g.linear(active, linear("narrow", WIDTH, Bias::With));
    let fed = g.add(down, narrow);
    let routed = g.mixture(normed, &MIXTURE);
    let share = g.linear(normed, linear("share", 1, Bias::Without));
    let shared = g.gate_rows(share, fed);
    let fed = g.add(routed, shared);
    g.add(x, fed)
}

/// Records a block with every variant of attention: of an encoder with a key mask, types of tokens and positions, and of a decoder
/// with partly rotated heads, linear biases, a window, capped scores and sinks.
fn variants(g: &mut Recorder, x: Value) -> Value {
    let types = g.data("types");
    let of_types = g.embedding(BatchInput::Named(types), "types", 3, WIDTH, 0.5);
    let x = g.add(x, of_types);
    let positions = BatchInput::PositionsFrom { row: 2 };
    let of_positions = g.embedding(positions, "positions", 2 + SHAPE.seq_len, WIDTH, 0.5);
    let x = g.add(x, of_positions);
    let mut heads = |x, name: [&str; 3]| name.map(|name| g.linear(x, linear(name, 8, Bias::With)));
    let [q, k, v] = heads(x, ["q1", "k1", "v1"]);
    let mask = g.data("mask");
    let direction = AttentionDirection::Bidirectional;
    let shape = AttentionShape { direction, ..AttentionShape::new(2, 2, 4) };
    let options = AttentionOptions { key_mask: Some(mask), ..AttentionOptions::default() };
    let attended = g.attention(q, k, v, shape, options);
    let projected = g.linear(attended, linear("o1", WIDTH, Bias::With));
    let x = g.add(x, projected);
    let mut heads = |x, name: [&str; 3]| name.map(|name| g.linear(x, linear(name, 8, Bias::With)));
    let [q, k, v] = heads(x, ["q2", "k2", "v2"]);
    let frequency = g.constant("frequency");
    let [q, k] = [q, k].map(|x| g.rope(x, 4, frequency));
    let shape = AttentionShape { window: Some(4), soft_cap: Some(1.5), ..AttentionShape::new(2, 2, 4) };
    let slopes = Some(g.constant("slopes"));
    let options =
        AttentionOptions { alibi_slopes: slopes, sinks: Some("sinks"), ..AttentionOptions::default() };
    let attended = g.attention(q, k, v, shape, options);
    let projected = g.linear(attended, linear("o2", WIDTH, Bias::With));
    g.add(x, projected)
}

/// Records a block of images `[2, 2, 3]` with every operation on them.
fn vision(g: &mut Recorder, statistics: Statistics) -> Value {
    g.set_statistics(statistics);
    let x = g.input_of(&[2, 2, 3]);
    let convolution = |name, bias| Convolution {
        name,
        out_channels: 4,
        window: Window2d::square(3, 1, 1),
        groups: 1,
        bias,
        initializer: None,
    };
    let first = g.conv2d(x, convolution("conv_1", Bias::With));
    let normed = g.batch_norm(first, "norm_1", BatchNormOptions::default());
    let active = g.activation(Activation::Silu, normed);
    let second = g.conv2d(active, Convolution { groups: 2, ..convolution("conv_2", Bias::Without) });
    let normed = g.batch_norm(second, "norm_2", BatchNormOptions::default());
    let summed = g.add(normed, active);
    let largest = g.max_pool2d(summed, Window2d::square(2, 1, 1));
    let average = g.avg_pool2d(largest, Window2d::square(2, 1, 0));
    let flat = g.flatten(average);
    g.dense(flat, "fc", WIDTH)
}

/// Experts with a capacity below the number of slots, so that some sequences drop slots.
const MIXTURE: Mixture<'_> = Mixture {
    router: "router",
    selection_bias: None,
    layers: ["experts.gate", "experts.up", "experts.down"],
    experts: 4,
    intermediate_size: 6,
    bias: Bias::With,
    activation: GatedActivation::Clamped { slope: 1.702, limit: 0.5 },
    routing: Routing {
        top_k: 2,
        scores: RouterScores::Softmax,
        weights: RouterWeights::Normalized,
        scale: 1.5,
        groups: None,
        auxiliary_loss: 0.3,
        z_loss: 0.2,
        capacity_factor: Some(1.2),
    },
    std: 0.3,
};

fn block(recompute: Recompute, dropout: f32) -> Program {
    partly_trained(recompute, dropout, &[], InputGradient::Wanted)
}

/// Records the block with these parameters frozen.
fn partly_trained(recompute: Recompute, dropout: f32, frozen: &[String], input: InputGradient) -> Program {
    let record = |g: &mut Recorder| {
        let x = g.input(WIDTH);
        everything(g, x, dropout)
    };
    recorded(&record, recompute, frozen, input)
}

/// Returns a recorder with the constants and named inputs of [`World`].
fn recorder() -> Recorder {
    let mut g = Recorder::new(Mode::Training, SHAPE);
    g.declare_constants(&constants());
    g.declare_inputs(
        &["mask", "types"].map(|name| InputDeclaration::new(name, DType::U32, &[SHAPE.seq_len])),
    );
    g
}

fn constants() -> [Constant; 3] {
    [("frequencies", vec![1.0, 0.1]), ("frequency", vec![0.7]), ("slopes", vec![0.5, 0.25])]
        .map(|(name, values)| Constant::new(name, values))
}

fn recorded(
    record: &dyn Fn(&mut Recorder) -> Value,
    recompute: Recompute,
    frozen: &[String],
    input: InputGradient,
) -> Program {
    let mut g = recorder();
    g.freeze(frozen.iter().cloned());
    g.set_input_gradient(input);
    let y = record(&mut g);
    g.finish(y, recompute)
}

/// Records a whole model: an embedding, the block, and a loss.
fn with_loss(recompute: Recompute) -> Program {
    let mut g = recorder();
    let x = g.embedding(BatchInput::Ids, "table", 7, WIDTH, 0.5);
    let y = everything(&mut g, x, 0.0);
    let losses = g.output_loss(y, linear("head", 7, Bias::Without), None);
    g.finish(losses, recompute)
}

/// Records a whole model: an embedding, the variants of attention, and a loss of capped logits with a bias.
fn variants_with_loss(recompute: Recompute) -> Program {
    let mut g = recorder();
    let x = g.embedding(BatchInput::Ids, "table", 7, WIDTH, 0.5);
    let y = variants(&mut g, x);
    let losses = g.output_loss(y, linear("head", 7, Bias::With), Some(1.5));
    g.finish(losses, recompute)
}

struct Store {
    weights: Vec<Tensor>,
    gradients: Vec<Tensor>,
}

impl Store {
    fn new(program: &Program, arena: &Arena) -> Self {
        let tensor =
            |shape: &[usize]| Tensor::zeros(arena, DType::F32, shape, MemoryCategory::Parameters).unwrap();
        let make = || program.parameters().iter().map(|parameter| tensor(&parameter.shape)).collect();
        let store = Self { weights: make(), gradients: make() };
        for (parameter, weight) in program.parameters().iter().zip(&store.weights) {
            let mut values = vec![0.0; weight.view().elements()];
            parameter.initializer.fill(3, &parameter.name, 0, &mut values);
            // Biases start at zero and scales at one, where mistakes hide.
            let noise = Philox::new(values.len() as u64);
            (0..).zip(&mut values).for_each(|(i, value)| *value += 0.1 * noise.normal(i));
            weight.view().copy_from(&values);
        }
        store
    }

    fn gradients(&self) -> Vec<Vec<f32>> {
        self.gradients.iter().map(|gradient| gradient.view().to_vec()).collect()
    }
}

impl Parameters for Store {
    fn weight(&self, index: ParameterIndex) -> View<'_> {
        self.weights[index.0].view()
    }

    fn gradient(&self, index: ParameterIndex) -> (View<'_>, Write) {
        (self.gradients[index.0].view(), Write::Accumulate)
    }

    fn gradient_rows(&self, _: ParameterIndex) -> Option<View<'_>> {
        None
    }
}

/// The surroundings of a block: the micro-batch, the input, the gradient of the output.
struct World {
    arena: Arena,
    queue: CpuQueue,
    ids: Tensor,
    labels: Tensor,
    positions: Tensor,
    keys: Tensor,
    constants: [Tensor; 3],
    inputs: [Tensor; 2],
    x: Tensor,
    dy: Tensor,
}

impl World {
    fn new() -> Self {
        let arena = Arena::new();
        let tokens = SHAPE.tokens();
        let noise = |seed| -> Vec<f32> {
            (0..(tokens * WIDTH) as u64).map(|i| Philox::new(seed).normal(i)).collect()
        };
        let category = MemoryCategory::Activations;
        let positions: Vec<u32> = (0..tokens).map(|i| (i % SHAPE.seq_len) as u32).collect();
        let labels = [1, 2, -100, 0, 3, 4, 5, 6, -100, 2];
        let ids: [u32; 10] = [0, 1, 2, 2, 0, 3, 4, 5, 6, 1];
        Self {
            queue: CpuQueue::new(2, &arena).unwrap(),
            ids: Tensor::from_slice(&arena, [tokens], &ids, category).unwrap(),
            labels: Tensor::from_slice(&arena, [tokens], &labels, category).unwrap(),
            positions: Tensor::from_slice(&arena, [tokens], &positions, category).unwrap(),
            keys: Tensor::from_slice(&arena, [2, 2], &[1_u32, 2, 3, 4], category).unwrap(),
            constants: constants().map(|constant| constant.allocate(&arena).unwrap()),
            inputs: [[1, 1, 1, 0, 0, 1, 1, 1, 1, 0_u32], [0, 0, 1, 1, 2, 0, 1, 1, 1, 1]]
                .map(|values| Tensor::from_slice(&arena, [2, SHAPE.seq_len], &values, category).unwrap()),
            x: Tensor::from_slice(&arena, [tokens, WIDTH], &noise(1), category).unwrap(),
            dy: Tensor::from_slice(&arena, [tokens, WIDTH], &noise(2), category).unwrap(),
            arena,
        }
    }

    /// Runs `work` with a replay whose buffers are full of NaN, so that reads of unwritten memory show.
    fn replay<R>(
        &self,
        program: &Program,
        store: &Store,
        has_input: bool,
        work: impl FnOnce(&Replay<'_>) -> R,
    ) -> R {
        let poisoned = |bytes| {
            let mut buffer = self.arena.allocate(bytes, MemoryCategory::Workspace).unwrap();
            buffer.bytes_mut().fill(0xff);
            buffer
        };
        let frame = poisoned(program.frame_bytes());
        let workspace = poisoned(program.workspace_bytes().max(program.split_workspace_bytes()));
        work(&Replay {
            input: has_input.then(|| self.x.view()),
            first_dropout_site: 3,
            ..Replay::new(
                &self.queue,
                store,
                Batch {
                    labels: Some(self.labels.view()),
                    dropout_keys: Some(self.keys.view()),
                    constants: &self.constants,
                    inputs: &self.inputs,
                    ..Batch::new(self.ids.view(), self.positions.view())
                },
                &frame,
                &workspace,
            )
        })
    }

    fn dx(&self) -> Tensor {
        Tensor::zeros(&self.arena, DType::F32, [SHAPE.tokens(), WIDTH], MemoryCategory::Activations).unwrap()
    }

    /// Returns the gradients of the input and of every parameter, by a fused backward.
    fn fused(&self, program: &Program) -> (Vec<f32>, Vec<Vec<f32>>) {
        let store = Store::new(program, &self.arena);
        let dx = self.dx();
        self.replay(program, &store, true, |replay| {
            program.forward(replay).unwrap();
            program.backward(replay, Some(self.dy.view()), Some(dx.view()), SEED).unwrap();
        });
        (dx.view().to_vec(), store.gradients())
    }

    /// Returns the same gradients by a split backward; between the halves the output's gradient and the workspace are overwritten.
    fn split(&self, program: &Program) -> (Vec<f32>, Vec<Vec<f32>>) {
        let store = Store::new(program, &self.arena);
        let dx = self.dx();
        let deferred = self.arena.allocate(program.deferred_bytes(), MemoryCategory::Activations).unwrap();
        let found = self.replay(program, &store, true, |replay| {
            program.forward(replay).unwrap();
            let dy = self.dx();
            dy.view().copy_from(&self.dy.view().to_vec::<f32>());
            program.backward_inputs(replay, Some(dy.view()), Some(dx.view()), SEED, &deferred).unwrap();
            assert!(store.gradients().iter().flatten().all(|&g| g == 0.0), "weights wait for their turn");
            let found = dx.view().to_vec::<f32>();
            // The owners of these buffers reuse them in the meantime.
            let lost = vec![f32::NAN; SHAPE.tokens() * WIDTH];
            dy.view().copy_from(&lost);
            dx.view().copy_from(&lost);
            let bytes = program.split_workspace_bytes();
            replay.workspace.view(DType::U8, 0, [bytes]).copy_from(&vec![0xff_u8; bytes]);
            program.backward_weights(replay, &deferred).unwrap();
            found
        });
        (found, store.gradients())
    }

    fn loss(&self, program: &Program, store: &Store) -> f64 {
        self.replay(program, store, false, |replay| {
            program.forward(replay).unwrap();
            program.output(replay.frame).to_vec::<f32>().iter().map(|&loss| f64::from(loss)).sum()
        })
    }
}

#[test]
fn every_way_of_running_the_backward_gives_the_same_bits() {
    let world = World::new();
    for dropout in [0.0, 0.3] {
        let reference = world.fused(&block(Recompute::None, dropout));
        assert!(reference.0.iter().chain(reference.1.iter().flatten()).all(|g| g.is_finite()));
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
            let program = block(recompute, dropout);
            assert!(world.fused(&program) == reference, "fused, {recompute:?}, dropout {dropout}");
            assert!(world.split(&program) == reference, "split, {recompute:?}, dropout {dropout}");
        }
    }
}

#[test]
fn what_is_trained_gets_the_same_gradient_whatever_else_is_not() {
    compare_partly_trained(&|g| {
        let x = g.input(WIDTH);
        everything(g, x, 0.3)
    });
}

#[test]
fn variants_of_attention_get_the_same_gradients_whatever_is_not_trained_or_recomputed() {
    compare_partly_trained(&|g| {
        let x = g.input(WIDTH);
        variants(g, x)
    });
}

#[test]
fn images_get_the_same_gradients_whatever_is_not_trained_or_recomputed() {
    for statistics in [Statistics::Batch, Statistics::Running] {
        compare_partly_trained(&|g| vision(g, statistics));
    }
}

/// Checks, with each parameter alone trained, all but each, none, and random subsets, that every way of running the
/// backward gives the gradients of a training of all parameters.
fn compare_partly_trained(record: &dyn Fn(&mut Recorder) -> Value) {
    let world = World::new();
    let all = recorded(record, Recompute::None, &[], InputGradient::Wanted);
    let reference = world.fused(&all);
    let name = |index: usize| all.parameters()[index].name.clone();
    let trainable: Vec<usize> = all.trained().map(|index| index.0).collect();
    let random = |seed: u64| move |i: usize| Philox::new(seed).at(i as u64)[0].is_multiple_of(2);
    let mut choices: Vec<Vec<usize>> = vec![vec![]];
    for &only in &trainable {
        choices.push(vec![only]);
        choices.push(trainable.iter().copied().filter(|&index| index != only).collect());
    }
    choices.extend((0..12).map(|seed| trainable.iter().copied().filter(|&i| random(seed)(i)).collect()));
    for trained in choices {
        let frozen = trainable.iter().filter(|index| !trained.contains(index)).map(|&index| name(index));
        let frozen: Vec<String> = frozen.collect();
        for input in [InputGradient::Wanted, InputGradient::Unwanted] {
            for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
                let program = recorded(record, recompute, &frozen, input);
                let wanted = input == InputGradient::Wanted;
                assert_eq!(program.has_backward(), wanted || !trained.is_empty());
                for (dx, gradients) in [world.fused(&program), world.split(&program)] {
                    let says = || format!("{input:?}, {recompute:?}, without {frozen:?}");
                    assert!(
                        if wanted { dx == reference.0 } else { dx.iter().all(|x| *x == 0.0 || x.is_nan()) },
                        "{}",
                        says()
                    );
                    for (i, gradient) in gradients.iter().enumerate() {
                        let right = match trained.contains(&i) {
                            true => *gradient == reference.1[i],
                            false => gradient.iter().all(|g| *g == 0.0),
                        };
                        assert!(right, "{}: {}", name(i), says());
                    }
                }
            }
        }
    }
}

#[test]
fn what_nothing_waits_for_is_neither_saved_nor_counted() {
    let all = block(Recompute::None, 0.0).profile();
    let biases = |name: &&str| name.ends_with("bias");
    let program = block(Recompute::None, 0.0);
    let names = || program.parameters().iter().map(|parameter| parameter.name.as_str());
    let frozen: Vec<String> = names().filter(|name| !biases(name)).map(str::to_owned).collect();
    let only_biases = partly_trained(Recompute::None, 0.0, &frozen, InputGradient::Wanted).profile();
    assert_eq!(all.backward_flops, 2 * all.forward_flops);
    assert!(only_biases.backward_flops < all.backward_flops && only_biases.saved_bytes < all.saved_bytes);
    let everything: Vec<String> = names().map(str::to_owned).collect();
    let nothing = partly_trained(Recompute::None, 0.0, &everything, InputGradient::Unwanted).profile();
    assert_eq!((nothing.backward_flops, nothing.forward_flops), (0, all.forward_flops));
    assert_eq!(nothing.saved_bytes, SAVED_ALWAYS, "the output and what experts were chosen alone");
}

#[test]
fn recomputation_saves_less() {
    let bytes = |recompute| block(recompute, 0.1).frame_bytes();
    let (none, selective, full) =
        (bytes(Recompute::None), bytes(Recompute::Selective), bytes(Recompute::Full));
    assert!(full < selective && selective < none, "full {full}, selective {selective}, none {none}");
    assert_eq!(full, SAVED_ALWAYS, "full saves the output and what experts were chosen alone");
}

#[test]
fn the_gradient_is_the_derivative_of_the_loss() {
    let world = World::new();
    for program in [with_loss(Recompute::None), variants_with_loss(Recompute::Full)] {
        let store = Store::new(&program, &world.arena);
        world.replay(&program, &store, false, |replay| {
            program.forward(replay).unwrap();
            // Router losses are not part of the loss summed here.
            program.backward(replay, None, None, Seed::of_tokens(1.0)).unwrap();
        });
        check_derivatives(&program, &store, &store.gradients(), || world.loss(&program, &store));
    }
}

#[test]
fn the_gradients_of_images_are_derivatives() {
    let world = World::new();
    for statistics in [Statistics::Batch, Statistics::Running] {
        let record = |g: &mut Recorder| vision(g, statistics);
        let program = recorded(&record, Recompute::None, &[], InputGradient::Wanted);
        let (_, gradients) = world.fused(&program);
        let store = Store::new(&program, &world.arena);
        // The output's gradient is that of its product with `dy`.
        let dy = world.dy.view().to_vec::<f32>();
        let loss = || {
            world.replay(&program, &store, true, |replay| {
                program.forward(replay).unwrap();
                let y = program.output(replay.frame).to_vec::<f32>();
                y.iter().zip(&dy).map(|(&y, &dy)| f64::from(y) * f64::from(dy)).sum()
            })
        };
        check_derivatives(&program, &store, &gradients, loss);
    }
}

/// Compares the gradient of each trained parameter with central differences of the loss.
fn check_derivatives(program: &Program, store: &Store, gradients: &[Vec<f32>], loss: impl Fn() -> f64) {
    for ParameterIndex(index) in program.trained() {
        let (gradient, weight) = (&gradients[index], store.weights[index].view());
        let values = weight.to_vec::<f32>();
        // Along a random direction, the central difference equals the dot product of gradient and direction.
        let direction: Vec<f32> = (0..values.len() as u64).map(|i| Philox::new(9).normal(i)).collect();
        let h = 2e-3;
        let along = |sign: f32| {
            let moved: Vec<f32> = values.iter().zip(&direction).map(|(v, d)| v + sign * h * d).collect();
            weight.copy_from(&moved);
            loss()
        };
        let slope = (along(1.0) - along(-1.0)) / (2.0 * f64::from(h));
        weight.copy_from(&values);
        let expected: f64 = gradient.iter().zip(&direction).map(|(&g, &d)| f64::from(g) * f64::from(d)).sum();
        let scale: f64 = gradient.iter().map(|&g| f64::from(g).abs()).sum();
        let name = &program.parameters()[index].name;
        assert!((slope - expected).abs() < 2e-3 * scale + 1e-3, "{name}: slope {slope}, gradient {expected}");
    }
}
