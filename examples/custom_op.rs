//! An operation of one's own: a learned slope for negative inputs (PReLU; He et al., 2015), one per column, in a model that
//! trains under any plan.
//!
//! ```text
//! cargo run --release --example custom_op -- --nproc_per_node=2 --set parallel.zero_stage=3
//! ```

use std::process::ExitCode;

use lockstep::samples::TensorDataset;
use lockstep::{CommError, Write};
use lockstep::{
    DType, Error, Facts, Initializer, InputDeclaration, InputGradients, LABELS, Model, NamedTensor, Op,
    ParameterIndex, Placement, Recorder, Run, Sizes, TensorData, Trainer, Transforms, Unit, Value, View,
    World,
};
use serde_json::{Map, Value as Json};

/// `y = max(x, 0) + slope · min(x, 0)`.
#[derive(Debug)]
struct LearnedSlope {
    x: Value,
    slope: ParameterIndex,
    y: Value,
}

/// Records the operation with the parameter `NAME.weight [columns]`.
fn learned_slope(g: &mut Recorder, x: Value, name: &str) -> Value {
    // The rule of its placement: every rank of a tensor-parallel group has the whole rows.
    g.expect_placement(x, |placement| placement == Placement::Replicate, name);
    let columns = g.columns(x);
    let share = g.whole_share(Placement::Replicate);
    let slope = g.parameter(format!("{name}.weight"), &[columns], Initializer::Zeros, share);
    let y = g.same_shape(x);
    g.push(LearnedSlope { x, slope, y });
    y
}

/// Calls `each` with the column and the index of every element, and writes what it returns.
fn map(from: &[f32], columns: usize, each: impl Fn(usize, f32) -> f32) -> Vec<f32> {
    from.iter().enumerate().map(|(at, x)| each(at % columns, *x)).collect()
}

impl Op for LearnedSlope {
    fn facts(&self) -> Facts {
        Facts {
            weights: vec![self.slope],
            saved_for_inputs: vec![self.x],
            saved_for_weights: vec![self.x],
            ..Facts::of("learned slope", [self.x], [self.y])
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let (x, slope) = (run.value(self.x).to_vec(), run.weight(self.slope).to_vec::<f32>());
        let y = map(&x, slope.len(), |column, x| if x > 0.0 { x } else { slope[column] * x });
        run.value(self.y).copy_from(&y);
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        let (x, slope, dy) =
            (run.value(self.x).to_vec::<f32>(), run.weight(self.slope).to_vec::<f32>(), dy.to_vec::<f32>());
        let of = |at: usize| if x[at] > 0.0 { dy[at] } else { slope[at % slope.len()] * dy[at] };
        let gradient: Vec<f32> = (0..x.len()).map(of).collect();
        dx.view(0).copy_from(&gradient);
        Ok(())
    }

    fn backward_weights(&self, run: &Run<'_>, dy: View<'_>) -> Result<(), CommError> {
        let (x, dy) = (run.value(self.x).to_vec::<f32>(), dy.to_vec::<f32>());
        let (gradient, write) = run.gradient_to_write(self.slope);
        let mut sums =
            if write == Write::Accumulate { gradient.to_vec() } else { vec![0.0; gradient.elements()] };
        let columns = sums.len();
        for (at, (x, dy)) in x.iter().zip(&dy).enumerate() {
            sums[at % columns] += x.min(0.0) * dy;
        }
        gradient.copy_from(&sums);
        Ok(())
    }
}

/// A classifier of points in the plane.
#[derive(Debug)]
struct Classifier;

impl Model for Classifier {
    fn model_type(&self) -> &str {
        "classifier"
    }

    fn units(&self) -> Vec<Unit> {
        vec![Unit { prefix: String::new(), kind: 0, layer: Some(0) }]
    }

    fn inputs(&self) -> Vec<InputDeclaration> {
        vec![InputDeclaration::new("point", DType::F32, &[2]), InputDeclaration::new(LABELS, DType::I32, &[])]
    }

    fn record(&self, _: usize, g: &mut Recorder) -> Value {
        let x = g.data("point");
        let x = g.dense(x, "hidden", 32);
        let x = learned_slope(g, x, "slope");
        let logits = g.dense(x, "output", 2);
        g.cross_entropy(logits, 0.0)
    }

    fn sizes(&self) -> Sizes {
        Sizes { layers: 1, classes: 2, fixed_seq_len: Some(1), ..Sizes::default() }
    }

    fn table(&self) -> Map<String, Json> {
        Map::new()
    }
}

fn train(world: &World) -> Result<(), Error> {
    // Is a point inside of a circle?
    let coordinate = |i: usize| ((i * 7919) % 2000) as f32 / 1000.0 - 1.0;
    let points: Vec<f32> = (0..2048).map(coordinate).collect();
    let labels = points.chunks(2).map(|p| i32::from(p[0].hypot(p[1]) < 0.8)).collect();
    let data = TensorDataset::new(vec![
        NamedTensor::new("point", &[1024, 2], TensorData::F32(points)),
        NamedTensor::new(LABELS, &[1024], TensorData::I32(labels)),
    ])?;
    let trainer = Trainer::new(Classifier).data(data, Transforms::new()).set("train.steps=100");
    let trainer = trainer.set("train.global_batch=64").set("optimizer.lr=1e-2").set("checkpoint.every=0");
    let done = trainer.set("metrics.dir=runs/custom_op").settings_from_arguments().run(world)?;
    if let Some(loss) = done.loss.filter(|_| world.is_first()) {
        println!("loss {loss:.4} after {} steps", done.step);
    }
    Ok(())
}

fn main() -> ExitCode {
    lockstep::launch(train)
}
