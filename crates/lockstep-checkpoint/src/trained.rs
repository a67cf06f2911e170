//! Changes that turn the weights of a base model into those of another: the checkpoint of a fine-tuning run, an adapter, or factors.

use std::collections::BTreeMap;

use lockstep_model::{Adapter, LoraConfig, ModelConfig};
use lockstep_plan::BlockFormat;
use rayon::prelude::*;
use serde::Deserialize;
use serde_json::Value;

use crate::{
    ChannelScales, Checkpoint, CheckpointError, Digest, MANIFEST_FILE, PeftAdapter, TensorKind,
    weight_quantization::round_to_blocks,
};

/// Changes of a base model.
#[derive(Debug)]
pub(crate) enum Trained {
    /// Checkpoint of a fine-tuning run.
    Checkpoint {
        checkpoint: Box<Checkpoint>,
        adapter: Option<Adapter>,
        /// Block formats in which the run kept matrices of the base model.
        quantized: BTreeMap<String, BlockFormat>,
        /// Digest of the base model.
        digest: Digest,
    },
    Peft(Box<PeftAdapter>),
    /// Factors that leave the function of the model as it is.
    Scales(ChannelScales),
}

impl Trained {
    /// Turns a parameter of the base model into that of the fine-tuned model.
    pub(crate) fn tune(&self, name: &str, values: &mut Vec<f32>) -> Result<(), CheckpointError> {
        let (mut a, mut b) = (Vec::new(), Vec::new());
        match self {
            Self::Checkpoint { checkpoint, adapter, quantized, .. } => {
                if checkpoint.tensor(name, &TensorKind::Parameter).is_ok() {
                    return read_whole(checkpoint, name, values);
                }
                if let Some(&format) = quantized.get(name) {
                    round_to_blocks(format, values);
                }
                let Some(adapter) = adapter else { return Ok(()) };
                let Some([name_a, name_b]) = adapter.factors_of(name) else { return Ok(()) };
                read_whole(checkpoint, &name_a, &mut a)?;
                read_whole(checkpoint, &name_b, &mut b)?;
                add_product(adapter.config(), &a, &b, values);
            }
            Self::Peft(peft) => {
                let Some([name_a, name_b]) = peft.adapter().factors_of(name) else { return Ok(()) };
                if let (Some(a), Some(b)) = (peft.parameter(&name_a), peft.parameter(&name_b)) {
                    add_product(peft.adapter().config(), a, b, values);
                }
            }
            Self::Scales(scales) => scales.apply(name, values),
        }
        Ok(())
    }
}

/// Returns the block formats in which the run of a checkpoint kept matrices of its base model.
pub(crate) fn quantized_by(
    checkpoint: &Checkpoint,
) -> Result<BTreeMap<String, BlockFormat>, CheckpointError> {
    match checkpoint.manifest().config.get("quantized") {
        None | Some(Value::Null) => Ok(BTreeMap::new()),
        Some(stored) => BTreeMap::deserialize(stored).map_err(|error| CheckpointError::Manifest {
            path: checkpoint.path().join(MANIFEST_FILE),
            reason: format!("config.quantized: {error}"),
        }),
    }
}

/// Adds a LoRA update: `weight [out, in] += scale · B [out, rank] · A [rank, in]`.
fn add_product(config: &LoraConfig, a: &[f32], b: &[f32], weight: &mut [f32]) {
    let (rank, scale) = (config.rank, config.scale() as f32);
    let inputs = a.len() / rank;
    weight.par_chunks_exact_mut(inputs).zip(b.par_chunks_exact(rank)).for_each(|(row, b)| {
        let mut sums = vec![0.0_f32; inputs];
        for (b, a) in b.iter().zip(a.chunks_exact(inputs)) {
            sums.iter_mut().zip(a).for_each(|(sum, a)| *sum += b * a);
        }
        row.iter_mut().zip(sums).for_each(|(weight, sum)| *weight += scale * sum);
    });
}

/// Returns the adapter of a checkpoint; `None` if its run trained none.
pub(crate) fn adapter_of(
    checkpoint: &Checkpoint,
    model: &ModelConfig,
) -> Result<Option<Adapter>, CheckpointError> {
    let stored = checkpoint.manifest().config.get("adapter").filter(|adapter| !adapter.is_null());
    let Some(stored) = stored else { return Ok(None) };
    let config = LoraConfig::deserialize(stored).map_err(|error| CheckpointError::Manifest {
        path: checkpoint.path().join(MANIFEST_FILE),
        reason: format!("config.adapter: {error}"),
    })?;
    Ok(Some(Adapter::new(config, model)?))
}

/// Reads a whole parameter of a checkpoint.
pub(crate) fn read_whole(
    checkpoint: &Checkpoint,
    name: &str,
    values: &mut Vec<f32>,
) -> Result<(), CheckpointError> {
    values.resize(checkpoint.tensor(name, &TensorKind::Parameter)?.elements(), 0.0);
    checkpoint.read(name, &TensorKind::Parameter, 0, values)
}

#[cfg(test)]
mod tests {
    use lockstep_model::LoraScaling;

    use super::*;

    #[test]
    fn the_product_of_an_adapter_is_added_with_its_scale() {
        let scaling = LoraScaling::Standard;
        let config = LoraConfig { rank: 2, alpha: 6.0, dropout: 0.0, scaling, targets: Vec::new() };
        // A is [2, 3], B is [2, 2], the weight is [2, 3]; the scale is 6 / 2.
        let (a, b) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 0.5, -1.0, 2.0]);
        let mut weight = [10.0, 20.0, 30.0, 40.0, 50.0, 60.0];
        add_product(&config, &a, &b, &mut weight);
        assert_eq!(weight, [19.0, 33.5, 48.0, 61.0, 74.0, 87.0]);
    }
}
