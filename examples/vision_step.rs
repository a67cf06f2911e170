//! Times of training steps of ResNet on random images, as JSON: `benches/peers/compare_vision.py` compares them with PyTorch's.
//!
//! ```text
//! cargo run --release --example vision_step -- --model resnet18 --batch 32 --threads 2
//! ```
//!
//! The batch is that of each rank. `resnet18` and `resnet50` are for images of 32 × 32 (a stem of 3 × 3), `cnn` is two
//! convolutions, pooling and two linear layers.

use std::process::ExitCode;
use std::time::Instant;

use lockstep::{
    Batch, Bias, Convolution, DType, Engine, Error, InputDeclaration, LABELS, Model, ModelConfig,
    NamedTensor, Optimizer, Recorder, Settings, Sizes, TensorData, Unit, Value, Window2d, World,
};
use serde_json::{Map, Value as Json, json};

/// Steps before the timed ones.
const WARM_UP: usize = 3;
const PIXELS: usize = 32 * 32 * 3;

/// Two convolutions with pooling, and two linear layers.
#[derive(Debug)]
struct Cnn;

impl Model for Cnn {
    fn model_type(&self) -> &str {
        "cnn"
    }

    fn units(&self) -> Vec<Unit> {
        vec![Unit { prefix: String::new(), kind: 0, layer: Some(0) }]
    }

    fn inputs(&self) -> Vec<InputDeclaration> {
        vec![
            InputDeclaration::new("pixel_values", DType::F32, &[32, 32, 3]),
            InputDeclaration::new(LABELS, DType::I32, &[]),
        ]
    }

    fn record(&self, _: usize, g: &mut Recorder) -> Value {
        let mut x = g.data("pixel_values");
        for (name, out_channels) in [("conv1", 32), ("conv2", 64)] {
            let window = Window2d::square(3, 1, 1);
            let bias = Bias::With;
            x = g.conv2d(x, Convolution { name, out_channels, window, groups: 1, bias, initializer: None });
            x = g.relu(x);
            x = g.max_pool2d(x, Window2d::square(2, 2, 0));
        }
        x = g.flatten(x);
        x = g.dense(x, "fc1", 128);
        x = g.relu(x);
        let logits = g.dense(x, "fc2", 10);
        g.cross_entropy(logits, 0.0)
    }

    fn sizes(&self) -> Sizes {
        Sizes { layers: 1, classes: 10, fixed_seq_len: Some(1), ..Sizes::default() }
    }

    fn table(&self) -> Map<String, Json> {
        Map::new()
    }
}

fn model(name: &str) -> Result<ModelConfig, Error> {
    let (layer_type, depths, widths) = match name {
        "cnn" => return Ok(Cnn.into()),
        "resnet50" => ("bottleneck", [3, 4, 6, 3], [256, 512, 1024, 2048]),
        _ => ("basic", [2, 2, 2, 2], [64, 128, 256, 512]),
    };
    let config = json!({
        "model_type": "resnet", "image_size": 32, "num_labels": 10, "stem": "cifar", "layer_type": layer_type,
        "depths": depths, "hidden_sizes": widths,
    });
    Ok(ModelConfig::from_json_text(&config.to_string(), "the bench")?)
}

fn time_steps(world: &World) -> Result<(), Error> {
    let given = lockstep::arguments();
    let value = |name: &str, default: &str| {
        let at = given.iter().position(|flag| flag == name);
        at.and_then(|at| given.get(at + 1)).map_or_else(|| default.to_owned(), Clone::clone)
    };
    let number = |name: &str, default: &str| value(name, default).parse().unwrap_or(1);
    let (batch, steps, threads) =
        (number("--batch", "32"), number("--steps", "10"), number("--threads", "1"));
    let mut settings = Settings {
        global_batch: batch * world.size(),
        optimizer: Optimizer::Sgd { momentum: 0.9 },
        threads,
        ..Settings::default()
    };
    settings.plan.micro_batch = Some(batch);
    let mut engine = Engine::new(world, model(&value("--model", "resnet18"))?, settings)?;
    let pixels = (0..batch * PIXELS).map(|i| ((i * 7919) % 2003) as f32 / 1000.0 - 1.0).collect();
    let labels = (0..batch).map(|i| (i * 7 % 10) as i32).collect();
    let batches = [Batch {
        tensors: vec![
            NamedTensor::new("pixel_values", &[batch, 32, 32, 3], TensorData::F32(pixels)),
            NamedTensor::new(LABELS, &[batch], TensorData::I32(labels)),
        ],
        sample_numbers: (0..batch as u64).collect(),
        skipped: 0,
    }];
    let mut times = Vec::with_capacity(steps);
    let mut losses = Vec::with_capacity(steps);
    for step in 0..WARM_UP + steps {
        let begin = Instant::now();
        let loss = engine.forward_backward(&batches)?;
        engine.step(0.01)?;
        if step >= WARM_UP {
            times.push(begin.elapsed().as_secs_f64() * 1e3);
            losses.push(loss);
        }
    }
    times.sort_by(f64::total_cmp);
    if world.is_first() {
        println!("{}", json!({ "step_ms": times[times.len() / 2], "fastest_ms": times[0], "loss": losses }));
    }
    Ok(())
}

fn main() -> ExitCode {
    lockstep::launch(time_steps)
}
