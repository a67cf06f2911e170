//! Transforms of samples: functions of the sample and of (seed, sample number, epoch), never of a thread or a rank.

use std::fmt::Debug;

use lockstep_plan::random::{Philox, key_from_name, mix};
use lockstep_tensor::NamedTensor;

use super::{
    sequence::SamplePlace,
    tensor::{Sample, Spares, TensorSpec},
};
use crate::error::{DataError, Result};

/// Random numbers of one transform of one sample, by counter.
#[derive(Debug, Clone, Copy)]
pub struct SampleRandom {
    philox: Philox,
    sample: u64,
    epoch: u64,
    /// Position of the transform in its list.
    step: u32,
}

impl SampleRandom {
    /// Creates the random numbers for the sample at `place`, for the transform at position `step` of a list.
    pub fn new(seed: u64, place: SamplePlace, step: u32) -> Self {
        let philox = Philox::new(mix(seed ^ key_from_name("lockstep/sample-transform")));
        Self { philox, sample: place.sample, epoch: place.epoch, step }
    }

    /// Returns the 64 random bits of draw number `draw`, below 2^16.
    pub fn bits(&self, draw: u16) -> u64 {
        // Sample numbers fill two words; epochs beyond 2^32 do not occur, as the sample number implies the epoch.
        let step = (self.step << 16) | u32::from(draw);
        let [low, high, ..] =
            self.philox.block([self.sample as u32, (self.sample >> 32) as u32, self.epoch as u32, step]);
        (u64::from(high) << 32) | u64::from(low)
    }

    /// Returns draw number `draw` as a number in `[0, 1)`.
    pub fn uniform(&self, draw: u16) -> f64 {
        (self.bits(draw) >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns draw number `draw` as a number in `0..end`; 0 if `end` is 0.
    pub fn below(&self, draw: u16, end: usize) -> usize {
        ((u128::from(self.bits(draw)) * end as u128) >> 64) as usize
    }
}

/// Function of one tensor of a sample.
pub trait Transform: Debug + Send + Sync {
    /// Returns the tensor that results from one with this specification.
    ///
    /// # Errors
    /// If the transform does not suit the tensor; the text says what is allowed.
    fn output(&self, input: &TensorSpec) -> Result<TensorSpec, String>;

    /// Transforms a tensor that suits in place. Random choices come from `random` alone; vectors may come from
    /// `spares`, which receive those that are replaced.
    ///
    /// # Errors
    /// If this tensor cannot be transformed, such as an image smaller than the crop.
    fn apply(
        &self,
        tensor: &mut NamedTensor,
        random: SampleRandom,
        spares: &mut Spares,
    ) -> Result<(), String>;
}

/// List of transforms, applied in order, each to one tensor of a sample.
#[derive(Debug, Default)]
pub struct Transforms {
    steps: Vec<(String, Box<dyn Transform>)>,
}

impl Transforms {
    /// Creates an empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a transform of the tensor `tensor`.
    #[must_use]
    pub fn then(mut self, tensor: &str, transform: impl Transform + 'static) -> Self {
        self.steps.push((tensor.to_owned(), Box::new(transform)));
        self
    }

    /// Returns the tensors of a transformed sample.
    ///
    /// # Errors
    /// If a transform does not suit its tensor, or there is no tensor of its name.
    pub fn output(&self, mut tensors: Vec<TensorSpec>) -> Result<Vec<TensorSpec>> {
        for (name, transform) in &self.steps {
            let names = || tensors.iter().map(|spec| spec.name.to_string()).collect::<Vec<_>>().join(", ");
            let found = tensors.iter().position(|spec| *spec.name == **name);
            let at = found.ok_or_else(|| {
                bad(transform, name, format!("there is no such tensor; allowed: {}", names()))
            })?;
            tensors[at] = transform.output(&tensors[at]).map_err(|problem| bad(transform, name, problem))?;
        }
        Ok(tensors)
    }

    /// Transforms a sample in place.
    ///
    /// # Errors
    /// If a transform fails. The contents of the sample are unspecified then.
    pub fn apply(&self, sample: &mut Sample, seed: u64, place: SamplePlace) -> Result<()> {
        for (step, (name, transform)) in self.steps.iter().enumerate() {
            let random = SampleRandom::new(seed, place, step as u32);
            let Some((tensor, spares)) = sample.tensor_mut(name) else {
                return Err(bad(transform, name, "there is no such tensor".to_owned()));
            };
            if let Err(problem) = transform.apply(tensor, random, spares) {
                let problem = format!("{transform:?} of \"{name}\": {problem}");
                return Err(DataError::BadSample { index: place.index, problem });
            }
        }
        Ok(())
    }
}

fn bad(transform: &dyn Debug, tensor: &str, problem: String) -> DataError {
    DataError::BadTransform { transform: format!("{transform:?}"), tensor: tensor.to_owned(), problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_depend_on_seed_sample_epoch_step_and_number_alone() {
        let place = |sample, epoch| SamplePlace { sample, epoch, index: 0 };
        let base = SampleRandom::new(1, place(5, 2), 3).bits(0);
        assert_eq!(base, SampleRandom::new(1, SamplePlace { index: 9, ..place(5, 2) }, 3).bits(0));
        let others = [
            SampleRandom::new(2, place(5, 2), 3).bits(0),
            SampleRandom::new(1, place(6, 2), 3).bits(0),
            SampleRandom::new(1, place(5 + (1 << 32), 2), 3).bits(0),
            SampleRandom::new(1, place(5, 3), 3).bits(0),
            SampleRandom::new(1, place(5, 2), 4).bits(0),
            SampleRandom::new(1, place(5, 2), 3).bits(1),
        ];
        assert!(others.iter().all(|&other| other != base), "{base}: {others:?}");
    }

    #[test]
    fn draws_are_uniform() {
        let mut counts = [0; 7];
        let mut sum = 0.0;
        for sample in 0..7_000 {
            let random = SampleRandom::new(0, SamplePlace { sample, epoch: 0, index: 0 }, 0);
            counts[random.below(0, 7)] += 1;
            sum += random.uniform(1);
        }
        assert!(counts.iter().all(|count| (880..1_120).contains(count)), "{counts:?}");
        assert!((sum / 7_000.0 - 0.5).abs() < 0.02, "{sum}");
        assert_eq!(SampleRandom::new(0, SamplePlace { sample: 0, epoch: 0, index: 0 }, 0).below(0, 0), 0);
    }
}
