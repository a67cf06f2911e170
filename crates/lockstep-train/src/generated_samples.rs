//! Random samples of any model with named inputs, on which plans are verified: a sample is a function of its number.

use std::{ops::Range, sync::Arc};

use lockstep_data::{BatchSource, IGNORE_LABEL, MicroBatch};
use lockstep_graph::InputLimit;
use lockstep_model::{InputDeclaration, ModelConfig};
use lockstep_plan::random::{Philox, mix};
use lockstep_tensor::{LABELS, NamedTensor, TensorData};

use crate::TrainingData;

/// Number of samples of an epoch.
const SAMPLES: u64 = 1 << 20;

/// Samples with random tokens, inputs and labels. Sequences end in padding, and some labels are masked.
#[derive(Debug)]
struct GeneratedSamples {
    /// Named inputs, a tensor per sample.
    inputs: Vec<InputDeclaration>,
    /// True for the inputs that the model declares per token.
    is_per_token: Vec<bool>,
    vocabulary: usize,
    classes: usize,
    seq_len: usize,
}

/// Returns random samples for a model that reads named inputs; `None` for one that reads tokens alone.
pub(crate) fn generated_samples(model: &ModelConfig, seq_len: usize) -> Option<TrainingData> {
    let declared = model.model().inputs();
    if declared.is_empty() {
        return None;
    }
    let sizes = model.model().sizes();
    let samples = GeneratedSamples {
        is_per_token: declared.iter().map(|input| input.is_per_token).collect(),
        inputs: declared.iter().map(|input| input.for_tokens(seq_len)).collect(),
        vocabulary: sizes.vocab,
        classes: sizes.classes,
        seq_len,
    };
    Some(TrainingData {
        train: Arc::new(samples),
        valid: None,
        text: None,
        tensors: Vec::new(),
        damages: Vec::new(),
        digest: "generated samples".to_owned(),
    })
}

impl GeneratedSamples {
    /// Returns random words of a part of a sample: its tokens, their labels, or one of its inputs.
    fn words(sample: u64, part: u64) -> impl Fn(usize) -> u32 {
        let words = Philox::new(mix(sample ^ mix(part)));
        move |index| words.at(index as u64)[0]
    }

    /// Returns the number of a sample's tokens before its padding.
    fn length(&self, sample: u64) -> usize {
        self.seq_len - (sample as usize * 3) % self.seq_len.div_ceil(2)
    }

    fn push_tokens(&self, sample: u64, batch: &mut MicroBatch) {
        let (ids, labels, masks) = (Self::words(sample, 0), Self::words(sample, 1), Self::words(sample, 2));
        let length = self.length(sample);
        for token in 0..self.seq_len {
            // The first token counts in any case, so that no step is without a target.
            let is_counted = token == 0 || token < length && masks(token).is_multiple_of(3);
            batch.ids.push(ids(token) % self.vocabulary as u32);
            batch.labels.push(match is_counted {
                true => (labels(token) % self.vocabulary as u32) as i32,
                false => IGNORE_LABEL,
            });
        }
    }

    /// Appends a sample's tensor of the input at `index`.
    fn push_input(&self, sample: u64, index: usize, data: &mut TensorData) {
        let (input, words) = (&self.inputs[index], Self::words(sample, 3 + index as u64));
        let all = 0..input.elements();
        match data {
            TensorData::F32(values) => {
                let values_of = Philox::new(mix(sample ^ mix(3 + index as u64)));
                values.extend(all.map(|i| values_of.normal(i as u64)));
            }
            TensorData::U8(values) => values.extend(all.map(|i| words(i) as u8)),
            TensorData::U32(values) => values.extend(all.map(|i| match input.limit {
                Some(InputLimit::Below(limit)) => words(i) % limit,
                _ if self.is_per_token[index] => u32::from(i < self.length(sample)),
                _ => words(i) % 2,
            })),
            TensorData::I32(labels) => labels.extend(all.map(|i| {
                let is_masked = sample % 5 == 3 && input.name == LABELS;
                if is_masked { IGNORE_LABEL } else { (words(i) % self.classes.max(2) as u32) as i32 }
            })),
        }
    }
}

impl BatchSource for GeneratedSamples {
    fn samples(&self) -> u64 {
        SAMPLES
    }

    fn fill(&self, samples: Range<u64>, batch: &mut MicroBatch) -> lockstep_data::Result<()> {
        let count = (samples.end - samples.start) as usize;
        *batch = MicroBatch { sequences: count, seq_len: self.seq_len, ..MicroBatch::default() };
        let mut tensors: Vec<TensorData> = self
            .inputs
            .iter()
            .map(|input| TensorData::empty(input.dtype).unwrap_or(TensorData::F32(Vec::new())))
            .collect();
        for sample in samples {
            batch.sample_numbers.push(sample);
            if self.vocabulary > 0 {
                self.push_tokens(sample, batch);
            }
            tensors.iter_mut().enumerate().for_each(|(index, data)| self.push_input(sample, index, data));
        }
        batch.inputs = self
            .inputs
            .iter()
            .zip(tensors)
            .map(|(input, data)| {
                let shape = [&[count], &input.shape[..]].concat();
                NamedTensor::new(&*input.name, &shape, data)
            })
            .collect();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_the_same_in_every_micro_batch() {
        let model = r#"{"model_type": "bert", "num_labels": 3, "vocab_size": 9, "hidden_size": 8, "num_attention_heads": 2}"#;
        let model = ModelConfig::from_json_text(model, "a test").expect("a model");
        let data = generated_samples(&model, 6).expect("BERT reads inputs");
        let fill = |range: Range<u64>| {
            let mut batch = MicroBatch::default();
            data.train.fill(range, &mut batch).expect("samples");
            batch
        };
        let (both, second) = (fill(4..6), fill(5..6));
        assert_eq!(both.ids[6..], second.ids);
        for (of_both, alone) in both.inputs.iter().zip(&second.inputs) {
            let half = |data: &TensorData| match data {
                TensorData::U32(values) => values.iter().map(|value| i64::from(*value)).collect(),
                TensorData::I32(values) => values.iter().map(|value| i64::from(*value)).collect(),
                other => panic!("no input of BERT is {other:?}"),
            };
            let (of_both, alone): (Vec<i64>, Vec<i64>) = (half(&of_both.data), half(&alone.data));
            assert_eq!(of_both[of_both.len() / 2..], alone);
        }
        assert!(generated_samples(&ModelConfig::preset("baby-gpt").expect("a preset"), 6).is_none());
    }
}
