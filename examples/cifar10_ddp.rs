//! A small CNN on CIFAR-10 under data parallelism, on any number of ranks and machines: PyTorch's first DDP tutorial.
//!
//! ```text
//! cargo run --release --example cifar10_ddp -- --nproc_per_node=2
//! cargo run --release --example cifar10_ddp -- --nproc_per_node=4 --nnodes=2 --node_rank=0 \
//!     --rdzv_id=job --rdzv_backend=c10d --rdzv_endpoint=HOST:PORT
//! ```
//!
//! `--model resnet18` trains a ResNet-18 for images of this size. `--set KEY=VALUE` sets any key of RUN.toml, such as
//! `--set parallel.zero_stage=3` (FSDP); `--auto` takes the planner's choice. Without `--data DIR` (the binary version of CIFAR-10) it
//! writes images of the same format with patterns to learn.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use lockstep::samples::{
    Cifar, CifarKind, Normalize, RandomCrop, RandomHorizontalFlip, RenamedTensors, Split, ToFloat,
    write_synthetic_cifar10,
};
use lockstep::{
    Bias, Convolution, DType, Error, InputDeclaration, LABELS, Layout, Model, ModelConfig, Recorder, Sizes,
    Trainer, Transforms, Unit, Value, Window2d, World,
};
use serde_json::{Map, Value as Json, json};

/// Name of the images, which the family ResNet gives them.
const PIXELS: &str = "pixel_values";

/// Two convolutions with pooling, and two linear layers.
#[derive(Debug)]
struct SimpleCnn;

impl SimpleCnn {
    /// Records a convolution of 3 × 3, its ReLU, and a maximum over 2 × 2.
    fn conv(g: &mut Recorder, x: Value, name: &str, out_channels: usize) -> Value {
        let window = Window2d::square(3, 1, 1);
        let conv = Convolution { name, out_channels, window, groups: 1, bias: Bias::With, initializer: None };
        let y = g.conv2d(x, conv);
        let y = g.relu(y);
        g.max_pool2d(y, Window2d::square(2, 2, 0))
    }
}

impl Model for SimpleCnn {
    fn model_type(&self) -> &str {
        "simple_cnn"
    }

    /// Three units, each of its own kind: what pipeline stages, FSDP and recomputation handle.
    fn units(&self) -> Vec<Unit> {
        let unit = |kind| Unit { prefix: String::new(), kind, layer: Some(kind) };
        (0..3).map(unit).collect()
    }

    fn inputs(&self) -> Vec<InputDeclaration> {
        vec![
            InputDeclaration::new(PIXELS, DType::F32, &[32, 32, 3]),
            InputDeclaration::new(LABELS, DType::I32, &[]),
        ]
    }

    fn record(&self, unit: usize, g: &mut Recorder) -> Value {
        let x = match unit {
            0 => g.data(PIXELS),
            1 => g.input_of(&[16, 16, 32]),
            _ => g.input_of(&[8, 8, 64]),
        };
        if unit < 2 {
            return Self::conv(g, x, ["conv1", "conv2"][unit], [32, 64][unit]);
        }
        let x = g.flatten(x);
        let hidden = g.dense(x, "fc1", 128);
        let x = g.relu(hidden);
        let logits = g.dense(x, "fc2", 10);
        g.accuracy(logits);
        g.cross_entropy(logits, 0.0)
    }

    fn sizes(&self) -> Sizes {
        Sizes { layers: 3, classes: 10, fixed_seq_len: Some(1), ..Sizes::default() }
    }

    fn table(&self) -> Map<String, Json> {
        Map::new()
    }
}

fn resnet18() -> Result<ModelConfig, Error> {
    let config = json!({
        "model_type": "resnet", "image_size": 32, "num_labels": 10, "stem": "cifar", "layer_type": "basic",
        "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2],
    });
    Ok(ModelConfig::from_json_text(&config.to_string(), "the example")?)
}

/// Trains as one rank; every rank runs this.
fn train(world: &World) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let given = lockstep::arguments();
    let value = |name: &str| given.iter().position(|flag| flag == name).and_then(|at| given.get(at + 1));
    let directory = match value("--data") {
        Some(directory) => PathBuf::from(directory),
        None => patterns(world)?,
    };
    let normalize = || Normalize::new(&Normalize::CIFAR10.0, &Normalize::CIFAR10.1);
    // The same images are cropped alike on any number of ranks: a transform is a function of (seed, sample, epoch).
    let augmented = Transforms::new()
        .then(PIXELS, RandomCrop { height: 32, width: 32, padding: 4 })
        .then(PIXELS, RandomHorizontalFlip)
        .then(PIXELS, ToFloat)
        .then(PIXELS, normalize()?);
    let plain = Transforms::new().then(PIXELS, ToFloat).then(PIXELS, normalize()?);
    let open = |split| {
        let images = Cifar::open(&directory, CifarKind::Cifar10, split)?;
        Ok::<_, Error>(RenamedTensors::new(Arc::new(images), [(PIXELS, "image")])?)
    };
    let model = match value("--model").map_or("simple_cnn", String::as_str) {
        "simple_cnn" => SimpleCnn.into(),
        "resnet18" => resnet18()?,
        other => return Err(format!("--model is simple_cnn or resnet18, not {other}").into()),
    };
    let steps = value("--steps").map_or("100", String::as_str);
    let is_planned = given.iter().any(|flag| flag == "--auto");
    let done = Trainer::new(model)
        .plan(if is_planned { Layout::Auto } else { Layout::Replicas })
        .data(open(Split::Train)?, augmented)
        .valid(open(Split::Test)?, plain)
        .set(format!("train.steps={steps}"))
        .set("train.global_batch=64")
        .set("train.eval_every=50")
        .set("optimizer.lr=1e-3")
        .set("optimizer.weight_decay=0.01")
        .set("checkpoint.dir=runs/cifar10/checkpoints")
        .set("metrics.dir=runs/cifar10")
        .settings_from_arguments()
        .run(world)?;
    if world.is_first()
        && let (Some(loss), Some(eval)) = (done.loss, done.eval_loss)
    {
        println!("step {}: loss {loss:.4}, {eval:.4} on the test images", done.step);
    }
    Ok(())
}

/// Writes images of ten kinds of stripes, in CIFAR-10's format, once for all ranks of a machine.
fn patterns(world: &World) -> Result<PathBuf, Error> {
    let directory = Path::new("runs/cifar10/patterns");
    if world.is_first() && !directory.join("test_batch.bin").exists() {
        write_synthetic_cifar10(directory, 5000, 500, 1)?;
    }
    world.barrier()?;
    Ok(directory.to_owned())
}

fn main() -> ExitCode {
    lockstep::launch(train)
}
