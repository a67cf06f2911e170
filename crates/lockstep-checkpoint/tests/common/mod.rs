//! Small state to save, and assertions on a loaded checkpoint.

use lockstep_checkpoint::{Checkpoint, DType, Region, SaveRequest, TensorKind, TensorSlice};

/// State of a model with three parameters and Adam's two moments; every number differs between steps.
pub(crate) struct State {
    pub(crate) step: u64,
    shapes: Vec<(&'static str, Vec<usize>)>,
    values: Vec<(usize, TensorKind, Vec<f32>)>,
}

impl State {
    pub(crate) fn at(step: u64) -> Self {
        let shapes = vec![
            ("model.embed_tokens.weight", vec![37, 16]),
            ("model.layers.0.mlp.up_proj.weight", vec![24, 16]),
            ("model.norm.weight", vec![16]),
        ];
        let mut values = Vec::new();
        for (index, (_, shape)) in shapes.iter().enumerate() {
            for kind in [TensorKind::Parameter, TensorKind::ExpAvg, TensorKind::ExpAvgSq] {
                let elements: usize = shape.iter().product();
                let base = step as f32 + values.len() as f32 * 0.125;
                values.push((index, kind, (0..elements).map(|i| base + i as f32 / 1024.0).collect()));
            }
        }
        Self { step, shapes, values }
    }

    pub(crate) fn slices(&self) -> Vec<TensorSlice<'_>> {
        self.values
            .iter()
            .map(|(index, kind, values)| TensorSlice {
                name: self.shapes[*index].0,
                kind: kind.clone(),
                dtype: DType::F32,
                global_shape: &self.shapes[*index].1,
                region: Region::Whole,
                bytes: bytemuck::cast_slice::<f32, u8>(values).into(),
            })
            .collect()
    }

    pub(crate) fn request(&self) -> SaveRequest<'static> {
        SaveRequest {
            step: self.step,
            samples_consumed: self.step * 64,
            seed: 1337,
            kernels: Some("avx2".to_owned()),
            config: serde_json::json!({"train": {"lr": 3e-4, "steps": 200}}),
            state: serde_json::json!({"loss_scale": 65536.0, "skipped": 1}),
            ..SaveRequest::default()
        }
    }

    /// Asserts that every bit of every tensor in the checkpoint is equal.
    pub(crate) fn assert_equals(&self, checkpoint: &Checkpoint) {
        let manifest = checkpoint.manifest();
        assert_eq!((manifest.step, manifest.samples_consumed), (self.step, self.step * 64));
        assert_eq!(manifest.tensors.len(), self.values.len());
        for (index, kind, values) in &self.values {
            let name = self.shapes[*index].0;
            let mut read = vec![f32::NAN; values.len()];
            checkpoint.read(name, kind, 0, &mut read).unwrap();
            assert!(read == *values, "{kind} of {name} differs at step {}", self.step);
        }
    }
}
