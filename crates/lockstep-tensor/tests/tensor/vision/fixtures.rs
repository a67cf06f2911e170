//! The kernels of vision models against PyTorch: `tests/fixtures/vision.py` makes the numbers.

use std::path::Path;

use lockstep_plan::{DType, MemoryCategory};
use lockstep_tensor::{
    Activation, Arena, BatchNorm, BatchNormKernels, Conv2d, ConvolutionKernels, CpuLevel, CpuQueue,
    ElementwiseKernels, LossKernels, Pool2d, PoolKernels, RunningStatistics, Shape, Tensor, Window2d, Write,
};
use safetensors::{Dtype, SafeTensors};

/// The fixture, and the arena of the tensors that are made from it.
struct Fixture {
    bytes: Vec<u8>,
    arena: Arena,
}

impl Fixture {
    fn read() -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/vision.safetensors");
        Self { bytes: std::fs::read(path).unwrap(), arena: Arena::new() }
    }

    /// Returns the tensor `name`.
    fn tensor(&self, name: &str) -> Tensor {
        let tensors = SafeTensors::deserialize(&self.bytes).unwrap();
        let tensor = tensors.tensor(name).unwrap();
        let words = tensor.data().chunks_exact(4).map(|word| word.try_into().unwrap());
        let (shape, category) = (Shape::from(tensor.shape()), MemoryCategory::Activations);
        match tensor.dtype() {
            Dtype::I32 => {
                let labels: Vec<i32> = words.map(i32::from_le_bytes).collect();
                Tensor::from_slice(&self.arena, shape, &labels, category).unwrap()
            }
            _ => {
                let values: Vec<f32> = words.map(f32::from_le_bytes).collect();
                Tensor::from_slice(&self.arena, shape, &values, category).unwrap()
            }
        }
    }

    fn zeros(&self, dtype: DType, shape: impl Into<Shape>) -> Tensor {
        Tensor::zeros(&self.arena, dtype, shape, MemoryCategory::Activations).unwrap()
    }

    /// Panics unless the elements of `actual` are close to those of the fixture's tensor `name`.
    #[track_caller]
    fn check(&self, name: &str, actual: &Tensor) {
        let (actual, expected) = (actual.view().to_vec::<f32>(), self.tensor(name).view().to_vec::<f32>());
        assert_eq!(actual.len(), expected.len(), "{name}");
        for (index, (a, b)) in actual.iter().zip(&expected).enumerate() {
            assert!((a - b).abs() <= 2e-5 * (1.0 + b.abs()), "{name}[{index}] is {a}, and PyTorch's {b}");
        }
    }
}

fn queues() -> impl Iterator<Item = CpuQueue> {
    CpuLevel::available().map(|level| CpuQueue::with_level(2, &Arena::new(), level).unwrap())
}

#[test]
fn convolutions_agree_with_pytorch() {
    let dilated = Window2d { kernel: [3, 2], stride: [1, 1], padding: [2, 1], dilation: [2, 1] };
    let strided = Conv2d::new([2, 9, 8, 5], 6, Window2d::square(3, 2, 1), 1).unwrap();
    let dilated = Conv2d::new([2, 7, 6, 8], 10, dilated, 2).unwrap();
    let fixture = Fixture::read();
    for queue in queues() {
        for (name, conv) in [("strided", strided), ("dilated", dilated)] {
            let of = |part: &str| fixture.tensor(&format!("conv.{name}.{part}"));
            let (x, weight, bias, dy) = (of("x"), of("weight"), of("bias"), of("dy"));
            let zeros = |shape: Shape| fixture.zeros(DType::F32, shape);
            let (y, dx, dweight) =
                (zeros(conv.output_shape()), zeros(conv.input_shape()), zeros(conv.weight_shape()));
            let dbias = zeros([conv.out_channels()].into());
            queue.conv2d(conv, x.view(), weight.view(), Some(bias.view()), y.view());
            queue.conv2d_backward_input(conv, dy.view(), weight.view(), dx.view(), Write::Overwrite);
            queue.conv2d_backward_weight(conv, dy.view(), x.view(), dweight.view());
            queue.sum_rows(dy.view(), dbias.view());
            for (part, tensor) in [("y", y), ("dx", dx), ("dweight", dweight), ("dbias", dbias)] {
                fixture.check(&format!("conv.{name}.{part}"), &tensor);
            }
        }
    }
}

#[test]
fn batch_normalization_agrees_with_pytorch() {
    let fixture = Fixture::read();
    let [x, weight, bias, dy] =
        ["x", "weight", "bias", "dy"].map(|part| fixture.tensor(&format!("norm.{part}")));
    let shape = x.view().shape();
    for queue in queues() {
        let of = |rows: usize| fixture.zeros(DType::F32, [rows, 4]);
        let (statistics, mean, rstd, sums) = (of(3), of(1), of(1), of(2));
        let (running_mean, running_variance) = (of(1), of(1));
        running_variance.view().copy_from(&[1.0_f32; 4]);
        let running =
            RunningStatistics { mean: running_mean.view(), variance: running_variance.view(), momentum: 0.1 };
        let [y, dx] = [(); 2].map(|()| fixture.zeros(DType::F32, shape));
        queue.batch_norm_statistics(x.view(), statistics.view());
        queue.merge_batch_norm(statistics.view(), 1e-5, Some(running), mean.view(), rstd.view());
        let norm = BatchNorm { x: x.view(), weight: weight.view(), mean: mean.view(), rstd: rstd.view() };
        queue.batch_norm(norm, bias.view(), y.view());
        queue.batch_norm_backward_sums(norm, dy.view(), sums.view());
        let rows = shape.as_matrix().0;
        queue.batch_norm_backward_input(norm, dy.view(), sums.view(), rows, dx.view(), Write::Overwrite);
        fixture.check("norm.y", &y);
        fixture.check("norm.dx", &dx);
        fixture.check("norm.running_mean", &running_mean);
        fixture.check("norm.running_var", &running_variance);
        let [dbias, dweight] = [0, 1].map(|which| {
            let sum = sums.view().rows(which..which + 1).to_vec::<f32>();
            Tensor::from_slice(&fixture.arena, [4], &sum, MemoryCategory::Activations).unwrap()
        });
        fixture.check("norm.dbias", &dbias);
        fixture.check("norm.dweight", &dweight);
        queue.reciprocal_deviation(running_variance.view(), 1e-5, rstd.view());
        queue.batch_norm(BatchNorm { mean: running_mean.view(), ..norm }, bias.view(), y.view());
        fixture.check("norm.evaluated", &y);
    }
}

#[test]
fn pools_agree_with_pytorch() {
    let pool = Pool2d::new([2, 9, 8, 5], Window2d::square(3, 2, 1)).unwrap();
    let fixture = Fixture::read();
    for queue in queues() {
        let [x, max_dy, avg_dy] = ["max.x", "max.dy", "avg.dy"].map(|name| fixture.tensor(name));
        let (y, dx) =
            (fixture.zeros(DType::F32, pool.output_shape()), fixture.zeros(DType::F32, pool.input_shape()));
        let indices = fixture.zeros(DType::U8, pool.output_shape());
        queue.max_pool2d(pool, x.view(), y.view(), indices.view());
        queue.max_pool2d_backward(pool, max_dy.view(), indices.view(), dx.view(), Write::Overwrite);
        fixture.check("max.y", &y);
        fixture.check("max.dx", &dx);
        queue.avg_pool2d(pool, x.view(), y.view());
        queue.avg_pool2d_backward(pool, avg_dy.view(), dx.view(), Write::Overwrite);
        fixture.check("avg.y", &y);
        fixture.check("avg.dx", &dx);
    }
}

#[test]
fn losses_agree_with_pytorch() {
    let fixture = Fixture::read();
    for queue in queues() {
        let (logits, labels) = (fixture.tensor("loss.logits"), fixture.tensor("loss.labels"));
        let losses = fixture.zeros(DType::F32, [6]);
        // Five of the six rows have a label.
        let (view, seed) = (losses.view(), 1.0 / 5.0);
        queue.cross_entropy_smoothed_with_gradient(logits.view(), labels.view(), 0.1, view, seed);
        fixture.check("loss.rows", &losses);
        fixture.check("loss.dlogits", &logits);
        let (x, target) = (fixture.tensor("mse.x"), fixture.tensor("mse.target"));
        let losses = fixture.zeros(DType::F32, [4]);
        queue.squared_error_with_gradient(x.view(), target.view(), losses.view(), 1.0 / 28.0);
        fixture.check("mse.rows", &losses);
        fixture.check("mse.dx", &x);
    }
}

#[test]
fn activations_agree_with_pytorch() {
    let fixture = Fixture::read();
    let names = ["relu", "silu", "tanh", "sigmoid"];
    for queue in queues() {
        for (kind, name) in Activation::ALL.into_iter().zip(names) {
            let (x, dy) = (fixture.tensor("activation.x"), fixture.tensor("activation.dy"));
            let [y, dx] = [(); 2].map(|()| fixture.zeros(DType::F32, x.view().shape()));
            queue.activation(kind, x.view(), y.view());
            let saved = if kind.saves_output() { y.view() } else { x.view() };
            queue.activation_backward(kind, dy.view(), saved, dx.view());
            fixture.check(&format!("activation.{name}.y"), &y);
            fixture.check(&format!("activation.{name}.dx"), &dx);
        }
    }
}
