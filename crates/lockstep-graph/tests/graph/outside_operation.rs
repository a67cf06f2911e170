//! An operation that is defined outside the crate trains like one of the crate: its gradients are derivatives, and
//! recomputation, a split backward, views and tensor parallelism change nothing.

use std::{panic, sync::Mutex, thread, time::Duration};

use lockstep_comm::{CommError, Group, World, WorldOptions};
use lockstep_graph::{
    Batch, Bias, BlockShape, Facts, InputGradients, Linear, Mode, Op, ParameterIndex, Parameters, Peers,
    Placement, Program, Recompute, Recorder, Replay, Run, Seed, Split, Value,
};
use lockstep_plan::{DType, Initializer, MemoryCategory, TensorPlace, random::Philox};
use lockstep_tensor::{Arena, CpuQueue, Tensor, View, Write};

const SHAPE: BlockShape = BlockShape { sequences: 2, seq_len: 3, dtype: DType::F32 };
const WIDTH: usize = 4;
const INNER: usize = 8;

/// A squared ReLU with a learned scale for each channel: `y = s · max(x, 0)²`.
#[derive(Debug)]
struct SquaredRelu {
    x: Value,
    scale: ParameterIndex,
    y: Value,
}

/// Records a squared ReLU with the parameter `NAME.scale [columns]`.
#[track_caller]
fn squared_relu(g: &mut Recorder, x: Value, name: &str) -> Value {
    g.expect_placement(x, |placement| placement != Placement::Partial, name);
    let columns = g.columns(x);
    let share = g.share_of_columns(x);
    let scale = g.parameter(format!("{name}.scale"), &[columns], Initializer::Ones, share);
    let y = g.same_shape(x);
    g.push(SquaredRelu { x, scale, y });
    y
}

impl Op for SquaredRelu {
    fn facts(&self) -> Facts {
        Facts {
            weights: vec![self.scale],
            saved_for_inputs: vec![self.x],
            saved_for_weights: vec![self.x],
            accumulates: true,
            is_cheap: true,
            vector_flops: [3, 4, 3],
            ..Facts::of("squared ReLU", [self.x], [self.y])
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let (x, scale) = (run.value(self.x).to_vec::<f32>(), run.weight(self.scale).to_vec::<f32>());
        let y: Vec<f32> = x.iter().zip(scale.iter().cycle()).map(|(x, s)| s * x.max(0.0).powi(2)).collect();
        run.value(self.y).copy_from(&y);
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        let (x, scale) = (run.value(self.x).to_vec::<f32>(), run.weight(self.scale).to_vec::<f32>());
        let dy = dy.to_vec::<f32>();
        let mut sums = dx.view(0).to_vec::<f32>();
        for (i, sum) in sums.iter_mut().enumerate() {
            let before = if dx.write(0) == Write::Accumulate { *sum } else { 0.0 };
            *sum = before + dy[i] * scale[i % scale.len()] * 2.0 * x[i].max(0.0);
        }
        dx.view(0).copy_from(&sums);
        Ok(())
    }

    fn backward_weights(&self, run: &Run<'_>, dy: View<'_>) -> Result<(), CommError> {
        let (x, dy) = (run.value(self.x).to_vec::<f32>(), dy.to_vec::<f32>());
        let gradient = run.gradient_of_weight(self.scale);
        let mut sums = gradient.to_vec::<f32>();
        let columns = sums.len();
        x.iter().zip(&dy).enumerate().for_each(|(i, (x, dy))| sums[i % columns] += dy * x.max(0.0).powi(2));
        gradient.copy_from(&sums);
        Ok(())
    }
}

/// Records a feed-forward with a residual branch; `up` is read twice, so that gradients accumulate.
fn program(recompute: Recompute, ranks: usize, rank: usize) -> Program {
    let mut g = Recorder::new(Mode::Training, SHAPE);
    let splits = [("up", Split::ColumnParallel { pieces: INNER }), ("down", Split::RowParallel)];
    let place = TensorPlace { ranks, rank, ..TensorPlace::default() };
    g.split(place, splits.map(|(name, split)| (name.to_owned(), split)));
    let x = g.input(WIDTH);
    let linear = |name, out_features| Linear { name, out_features, bias: Bias::With, std: 0.5 };
    let up = g.linear(x, linear("up", INNER));
    let heads = g.reshape(up, &[4, 2]);
    assert_eq!((g.dims(up), g.dims(heads)), (&[INNER][..], &[4, 2][..]));
    let first = squared_relu(&mut g, heads, "first");
    let second = squared_relu(&mut g, up, "second");
    let first = g.reshape(first, &[INNER]);
    let active = g.add(first, second);
    let down = g.linear(active, linear("down", WIDTH));
    let y = g.add(x, down);
    let y = g.reshape(y, &[2, 2]);
    g.finish(y, recompute)
}

struct Store {
    weights: Vec<Tensor>,
    gradients: Vec<Tensor>,
}

impl Store {
    /// Returns this rank's shards of random weights.
    fn new(program: &Program, arena: &Arena) -> Self {
        let category = MemoryCategory::Parameters;
        let local = |parameter: &lockstep_graph::ParameterDeclaration| {
            let noise = Philox::new(parameter.name.len() as u64);
            let values: Vec<f32> = parameter
                .share
                .element_ranges(&parameter.shape)
                .flat_map(|(first, len)| first..first + len)
                .map(|element| noise.normal(element as u64))
                .collect();
            let shape = parameter.share.shape_of(&parameter.shape);
            let zeros = Tensor::zeros(arena, DType::F32, &shape[..], category).unwrap();
            (Tensor::from_slice(arena, &shape[..], &values, category).unwrap(), zeros)
        };
        let (weights, gradients) = program.parameters().iter().map(local).unzip();
        Self { weights, gradients }
    }
}

impl Parameters for Store {
    fn weight(&self, index: ParameterIndex) -> View<'_> {
        self.weights[index.0].view()
    }

    fn gradient(&self, index: ParameterIndex) -> (View<'_>, Write) {
        (self.gradients[index.0].view(), Write::Overwrite)
    }

    fn gradient_rows(&self, _: ParameterIndex) -> Option<View<'_>> {
        None
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Backward {
    Fused,
    Split,
}

/// Output, gradient of the input, and gradients of the parameters.
#[derive(Debug, PartialEq)]
struct Results {
    y: Vec<f32>,
    dx: Vec<f32>,
    gradients: Vec<Vec<f32>>,
}

fn noise(seed: u64) -> Vec<f32> {
    (0..(SHAPE.tokens() * WIDTH) as u64).map(|i| Philox::new(seed).normal(i)).collect()
}

/// Runs a program forward and backward, with NaN in every buffer before; `moved` is added to a weight, or to the input.
fn run(
    program: &Program,
    group: Option<&Group>,
    backward: Backward,
    moved: Option<(Option<usize>, &[f32])>,
) -> Results {
    let arena = group.map_or_else(Arena::new, |group| group.arena(&[MemoryCategory::Workspace]));
    let queue = CpuQueue::new(1, &arena).unwrap();
    let store = Store::new(program, &arena);
    let category = MemoryCategory::Activations;
    let tensor =
        |values: &[f32]| Tensor::from_slice(&arena, [SHAPE.tokens(), WIDTH], values, category).unwrap();
    let (x, dy, dx) = (tensor(&noise(1)), tensor(&noise(2)), tensor(&noise(3)));
    if let Some((parameter, direction)) = moved {
        let target = parameter.map_or(x.view(), |index| store.weights[index].view());
        let values = target.to_vec::<f32>();
        target.copy_from(&values.iter().zip(direction).map(|(a, b)| a + b).collect::<Vec<_>>());
    }
    let ids = Tensor::zeros(&arena, DType::U32, [SHAPE.tokens()], category).unwrap();
    let poisoned = |bytes| {
        let mut buffer = arena.allocate(bytes, MemoryCategory::Workspace).unwrap();
        buffer.bytes_mut().fill(0xff);
        buffer
    };
    let frame = poisoned(program.frame_bytes());
    let workspace = poisoned(program.workspace_bytes().max(program.split_workspace_bytes()));
    let deferred = poisoned(program.deferred_bytes());
    let replay = Replay {
        input: Some(x.view()),
        peers: group.map(|group| Peers { group, limit: Duration::from_secs(60) }),
        ..Replay::new(&queue, &store, Batch::new(ids.view(), ids.view()), &frame, &workspace)
    };
    program.forward(&replay).unwrap();
    let (of_y, of_x) = (Some(dy.view()), Some(dx.view()));
    match backward {
        Backward::Fused => program.backward(&replay, of_y, of_x, Seed::default()).unwrap(),
        Backward::Split => {
            program.backward_inputs(&replay, of_y, of_x, Seed::default(), &deferred).unwrap();
            program.backward_weights(&replay, &deferred).unwrap();
        }
    }
    Results {
        y: program.output(&frame).to_vec(),
        dx: dx.view().to_vec(),
        gradients: store.gradients.iter().map(|gradient| gradient.view().to_vec()).collect(),
    }
}

#[test]
fn its_gradients_are_derivatives() {
    let program = program(Recompute::None, 1, 0);
    let found = run(&program, None, Backward::Fused, None);
    let names = program.parameters().iter().map(|parameter| parameter.name.as_str());
    let of_parameters = names.zip(&found.gradients).enumerate().map(|(i, (name, g))| (Some(i), name, g));
    for (index, name, gradient) in of_parameters.chain([(None, "input", &found.dx)]) {
        let h = 2e-3;
        let direction: Vec<f32> = (0..gradient.len() as u64).map(|i| h * Philox::new(9).normal(i)).collect();
        let opposite: Vec<f32> = direction.iter().map(|step| -step).collect();
        let dot = |a: &[f32], b: &[f32]| -> f64 {
            a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
        };
        let along =
            |step: &[f32]| dot(&run(&program, None, Backward::Fused, Some((index, step))).y, &noise(2));
        let (slope, expected) = ((along(&direction) - along(&opposite)) / 2.0, dot(gradient, &direction));
        let scale: f64 = gradient.iter().map(|g| f64::from(g.abs() * h)).sum();
        assert!((slope - expected).abs() < 5e-3 * scale, "{name}: slope {slope}, gradient {expected}");
    }
}

#[test]
fn recomputation_and_a_split_backward_change_no_bit() {
    let reference = run(&program(Recompute::None, 1, 0), None, Backward::Fused, None);
    assert!(reference.gradients.iter().flatten().all(|gradient| gradient.is_finite()));
    for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
        for backward in [Backward::Fused, Backward::Split] {
            let found = run(&program(recompute, 1, 0), None, backward, None);
            assert_eq!(found, reference, "{recompute:?}, {backward:?}");
        }
    }
}

#[test]
fn two_tensor_parallel_ranks_agree_with_one() {
    let whole = program(Recompute::None, 1, 0);
    let reference = run(&whole, None, Backward::Fused, None);
    let options = WorldOptions { arena_bytes: 1 << 24, ..WorldOptions::default() };
    let groups = World::in_process(2, options).unwrap();
    let close = |found: &[f32], expected: &[f32], what: &str| {
        let largest = expected.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
        assert_eq!(found.len(), expected.len(), "{what}");
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() <= 1e-5 * largest, "{what}: {found}, on one rank {expected}");
        }
    };
    thread::scope(|scope| {
        for group in &groups {
            let (reference, close) = (&reference, &close);
            scope.spawn(move || {
                let part = program(Recompute::Selective, 2, group.rank());
                let found = run(&part, Some(group), Backward::Split, None);
                close(&found.y, &reference.y, "output");
                close(&found.dx, &reference.dx, "gradient of the input");
                for (index, parameter) in part.parameters().iter().enumerate() {
                    let ranges = parameter.share.element_ranges(&parameter.shape);
                    let own = ranges.flat_map(|(first, len)| first..first + len);
                    let expected: Vec<f32> = own.map(|i| reference.gradients[index][i]).collect();
                    close(&found.gradients[index], &expected, &parameter.name);
                }
                let scale = part.parameters().iter().find(|p| p.name == "first.scale").unwrap();
                assert_eq!(scale.share.shape_of(&scale.shape), [INNER / 2], "each rank has its channels");
            });
        }
    });
}

#[test]
fn its_work_follows_from_its_facts() {
    let work = program(Recompute::None, 1, 0).work();
    let elements = (SHAPE.tokens() * INNER) as u64;
    let tasks: Vec<_> = work.forward.iter().filter(|task| task.name == "squared ReLU").collect();
    assert_eq!(tasks.len(), 2);
    for task in tasks {
        // The input, the output and the scale.
        let expected = (3 * elements, (2 * elements + INNER as u64) * 4);
        assert_eq!((task.vector_flops, task.bytes), expected);
    }
}

#[test]
fn shapes_that_do_not_fit_are_reported_at_the_line_of_the_model() {
    static PLACE: Mutex<Option<(String, u32)>> = Mutex::new(None);
    let before = panic::take_hook();
    panic::set_hook(Box::new(|info| {
        let place = info.location().map(|location| (location.file().to_owned(), location.line()));
        *PLACE.lock().unwrap() = place;
    }));
    let record = |wrong: fn(&mut Recorder, Value)| {
        panic::catch_unwind(|| {
            let mut g = Recorder::new(Mode::Training, SHAPE);
            let x = g.input(WIDTH);
            wrong(&mut g, x);
        })
    };
    let add = |g: &mut Recorder, x: Value| {
        let narrow = Linear { name: "narrow", out_features: 3, bias: Bias::Without, std: 0.1 };
        let narrow = g.linear(x, narrow);
        g.add(x, narrow);
    };
    let line = line!() - 2;
    let found = record(add);
    panic::set_hook(before);
    let text = *found.unwrap_err().downcast::<String>().unwrap();
    assert!(text.contains("add of [6, 4] Replicate and [6, 3] Replicate"), "{text}");
    assert_eq!(PLACE.lock().unwrap().take(), Some((file!().to_owned(), line)));
}
