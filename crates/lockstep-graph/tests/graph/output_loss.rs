//! The output layer with its loss works through the tokens part by part; its results must not depend on the parts.

use lockstep_graph::{
    Batch, Bias, BlockShape, Linear, Mode, ParameterIndex, Parameters, Program, Recompute, Recorder, Replay,
    Seed,
};
use lockstep_plan::{DType, MemoryCategory, random::Philox};
use lockstep_tensor::{Arena, CpuQueue, Gemm, GemmKernels, GemmLayout, LossKernels, Tensor, View, Write};

const SHAPE: BlockShape = BlockShape { sequences: 3, seq_len: 50, dtype: DType::F32 };
const TOKENS: usize = 150;
const WIDTH: usize = 4;
/// A vocabulary so large that its logits come in parts of 128 tokens.
const VOCABULARY: usize = 250_000;
const SEED_GRADIENT: f32 = 0.25;

struct OutputLayer {
    weight: Tensor,
    gradient: Tensor,
}

impl Parameters for OutputLayer {
    fn weight(&self, _: ParameterIndex) -> View<'_> {
        self.weight.view()
    }

    fn gradient(&self, _: ParameterIndex) -> (View<'_>, Write) {
        (self.gradient.view(), Write::Overwrite)
    }

    fn gradient_rows(&self, _: ParameterIndex) -> Option<View<'_>> {
        None
    }
}

fn program() -> Program {
    let mut g = Recorder::new(Mode::Training, SHAPE);
    let x = g.input(WIDTH);
    let layer = Linear { name: "head", out_features: VOCABULARY, bias: Bias::Without, std: 0.5 };
    let losses = g.output_loss(x, layer, None);
    g.finish(losses, Recompute::None)
}

#[test]
fn logits_in_parts_give_the_losses_and_gradients_of_the_whole() {
    let arena = Arena::new();
    let queue = CpuQueue::new(2, &arena).unwrap();
    let category = MemoryCategory::Activations;
    let zeros = |shape: [usize; 2]| Tensor::zeros(&arena, DType::F32, shape, category).unwrap();
    let random = |seed, shape: [usize; 2]| {
        let values: Vec<f32> =
            (0..(shape[0] * shape[1]) as u64).map(|i| Philox::new(seed).normal(i)).collect();
        Tensor::from_slice(&arena, shape, &values, category).unwrap()
    };
    let x = random(1, [TOKENS, WIDTH]);
    // The gradient starts with arbitrary values, which must not matter.
    let layer =
        OutputLayer { weight: random(2, [VOCABULARY, WIDTH]), gradient: random(3, [VOCABULARY, WIDTH]) };
    let labels: Vec<i32> = (0..TOKENS as i32).map(|t| if t % 7 == 6 { -100 } else { t * 901 }).collect();
    let labels = Tensor::from_slice(&arena, [TOKENS], &labels, category).unwrap();
    let ids = Tensor::zeros(&arena, DType::U32, [TOKENS], category).unwrap();

    let program = program();
    let all_logits = TOKENS * VOCABULARY * size_of::<f32>();
    assert!(program.workspace_bytes() < all_logits, "all logits exist: {} bytes", program.workspace_bytes());
    let frame = arena.allocate(program.frame_bytes(), category).unwrap();
    let mut workspace = arena.allocate(program.workspace_bytes(), category).unwrap();
    workspace.bytes_mut().fill(0xff);
    let dx = zeros([TOKENS, WIDTH]);
    let replay = Replay {
        input: Some(x.view()),
        ..Replay::new(
            &queue,
            &layer,
            Batch { labels: Some(labels.view()), ..Batch::new(ids.view(), ids.view()) },
            &frame,
            &workspace,
        )
    };
    let losses = || program.output(&frame).to_vec::<f32>();
    program.forward(&replay).unwrap();
    let from_forward = losses();
    program.output(&frame).copy_from(&[f32::NAN; TOKENS]);
    program.forward_for_backward(&replay).unwrap();
    program.backward(&replay, None, Some(dx.view()), Seed::of_tokens(SEED_GRADIENT)).unwrap();
    assert_eq!(from_forward, losses(), "losses of the forward and of the backward");

    let logits = zeros([TOKENS, VOCABULARY]);
    let (whole_losses, whole_dx) = (zeros([TOKENS, 1]), zeros([TOKENS, WIDTH]));
    let whole_gradient = zeros([VOCABULARY, WIDTH]);
    let multiply = |layout, a, b, c| {
        queue.gemm(Gemm { layout, a, b, c, bias: None, write: Write::Overwrite });
    };
    multiply(GemmLayout::NT, x.view(), layer.weight.view(), logits.view());
    queue.cross_entropy_with_gradient(logits.view(), labels.view(), whole_losses.view(), SEED_GRADIENT);
    multiply(GemmLayout::NN, logits.view(), layer.weight.view(), whole_dx.view());
    multiply(GemmLayout::TN, logits.view(), x.view(), whole_gradient.view());
    assert_close("losses", &losses(), &whole_losses.view().to_vec());
    assert_close("gradient of the input", &dx.view().to_vec(), &whole_dx.view().to_vec());
    assert_close("gradient of the weight", &layer.gradient.view().to_vec(), &whole_gradient.view().to_vec());
}

fn assert_close(name: &str, found: &[f32], expected: &[f32]) {
    let largest = expected.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            (found - expected).abs() <= 1e-6 * largest,
            "{name}, element {i}: {found} in parts, {expected} at once"
        );
    }
}
