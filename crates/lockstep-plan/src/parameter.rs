//! Record of everything known about a parameter.

use serde::{Deserialize, Serialize};

use crate::{
    BlockFormat, Share,
    random::{Philox, key_from_name},
};

/// Index of a parameter in its model's list of [`ParameterRecord`]s. Programs hold these, never weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ParameterId(pub usize);

/// Initial values of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Initializer {
    /// All zeros: biases.
    Zeros,
    /// All ones: the scale of a norm.
    Ones,
    /// Normal with mean 0 and the given standard deviation.
    Normal {
        /// Standard deviation of the distribution.
        std: f32,
    },
    /// Uniform between `-bound` and `bound`.
    Uniform {
        /// Largest absolute value.
        bound: f32,
    },
}

impl Initializer {
    /// Fills `out` with the elements `start..start + out.len()` of the parameter called `name`.
    ///
    /// A value depends on (seed, name, element index) and on nothing else: any shard, filled by any
    /// rank, holds the bits that the whole tensor would.
    pub fn fill(self, seed: u64, name: &str, start: u64, out: &mut [f32]) {
        match self {
            Self::Zeros => out.fill(0.0),
            Self::Ones => out.fill(1.0),
            Self::Uniform { bound } => {
                let philox = Philox::new(seed ^ key_from_name(name));
                for (element, value) in (start..).zip(out) {
                    *value = bound * (2.0 * philox.uniform(element) - 1.0) as f32;
                }
            }
            Self::Normal { std } => {
                let philox = Philox::new(seed ^ key_from_name(name));
                // Two numbers come from one block; an odd start or end uses half of a block.
                let (first, pairs) = out.split_at_mut((start % 2) as usize & usize::from(!out.is_empty()));
                for value in first {
                    *value = std * philox.normals(start / 2)[1];
                }
                for (block, values) in (start.div_ceil(2)..).zip(pairs.chunks_mut(2)) {
                    for (value, normal) in values.iter_mut().zip(philox.normals(block)) {
                        *value = std * normal;
                    }
                }
            }
        }
    }
}

/// Identifies the flat buffer of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BufferUnit {
    /// First unit of the buffer; the backward pass reaches it last.
    pub first: usize,
    /// Index of the buffer among all buffers of the model.
    pub number: usize,
}

impl BufferUnit {
    /// Returns the buffer of a unit that is not combined with others.
    pub const fn alone(unit: usize) -> Self {
        Self { first: unit, number: unit }
    }
}

/// Everything that sharding, optimizers, clipping, checkpoints and fine-tuning need to know about one parameter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ParameterRecord {
    /// Canonical name: Hugging Face's, e.g. `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// Global shape; linear weights are `[out, in]`.
    pub shape: Vec<usize>,
    /// Shard of the parameter on this rank.
    pub share: Share,
    /// Initial values for a run that starts from scratch.
    pub initializer: Initializer,
    /// The parameter whose storage this one shares, if any (an output layer tied to the embedding).
    pub tie: Option<ParameterId>,
    /// The unit (embedding, one block, head) that owns it.
    pub unit: usize,
    /// Flat buffer of the parameter, which belongs to that unit or to several.
    pub buffer: BufferUnit,
    /// True if the optimizer updates it.
    pub trainable: bool,
    /// Block format in which a frozen matrix is kept in memory; `None` keeps numbers. A row of the shard is whole blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_format: Option<BlockFormat>,
    /// True if weight decay applies; by default to matrices only.
    pub decay: bool,
    /// Factor on the learning rate.
    pub learning_rate_multiplier: f32,
}

impl ParameterRecord {
    /// Returns the number of elements of the whole parameter.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the shape of this rank's shard.
    pub fn local_shape(&self) -> Vec<usize> {
        self.share.shape_of(&self.shape)
    }

    /// Returns the number of elements of this rank's shard.
    pub fn local_elements(&self) -> usize {
        self.local_shape().iter().product()
    }

    /// Returns the shape in which a store keeps this rank's shard: that of its numbers, or `[rows, bytes of a row]` of its blocks.
    ///
    /// # Panics
    /// If the rows of a quantized shard are not whole blocks.
    pub fn stored_shape(&self) -> Vec<usize> {
        let mut shape = self.local_shape();
        if let (Some(format), Some(columns)) = (self.block_format, shape.last_mut()) {
            let bytes = format.bytes(*columns);
            *columns =
                bytes.unwrap_or_else(|| panic!("{}: {columns} columns are no {format} blocks", self.name));
        }
        shape
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_holds_the_bits_of_the_whole() {
        for initializer in [Initializer::Normal { std: 0.02 }, Initializer::Uniform { bound: 0.1 }] {
            let mut whole = vec![0.0; 1000];
            initializer.fill(1337, "model.embed_tokens.weight", 0, &mut whole);
            let mut shard = vec![0.0; 300];
            initializer.fill(1337, "model.embed_tokens.weight", 450, &mut shard);
            assert_eq!(shard, whole[450..750]);
        }
    }

    #[test]
    fn uniform_weights_fill_their_range_evenly() {
        let mut values = vec![0.0; 10_000];
        Initializer::Uniform { bound: 0.5 }.fill(1, "a", 0, &mut values);
        assert!(values.iter().all(|value| value.abs() <= 0.5));
        let mean = values.iter().sum::<f32>() / 1e4;
        let square = values.iter().map(|value| value * value).sum::<f32>() / 1e4;
        // The variance of a uniform number is bound² / 3; ten thousand samples estimate it to about one percent.
        assert!(
            mean.abs() < 0.01 && (square - 0.25 / 3.0).abs() < 0.003,
            "mean {mean}, mean square {square}"
        );
    }

    #[test]
    fn names_and_seeds_give_unrelated_weights() {
        let fill = |seed, name| {
            let mut out = [0.0; 4];
            Initializer::Normal { std: 1.0 }.fill(seed, name, 0, &mut out);
            out
        };
        assert_ne!(fill(1, "a"), fill(2, "a"));
        assert_ne!(fill(1, "a"), fill(1, "b"));
    }
}
