//! The training and validation data of a run, whatever they are: text, or samples of named tensors.

use std::sync::Arc;

use lockstep_config::{Problems, ResolvedModel, RunConfig, data_problems};
use lockstep_data::samples::TensorSpec;
use lockstep_data::{BatchSource, MicroBatch, SampleOrder};
use lockstep_engine::HostBatch;
use lockstep_model::ModelConfig;
use lockstep_tensor::{INPUT_IDS, LABELS, NamedTensor, TensorData, find_tensor};
use serde_json::Value;

use crate::Error;
use crate::corpus::TextCorpus;
use crate::samples::{SampleCorpus, batches, check_inputs, training_order};

/// The training and validation data of a run.
#[derive(Debug)]
pub struct TrainingData {
    /// Samples for training, in the run's order.
    pub train: Arc<dyn BatchSource>,
    /// Samples for validation; `None` if there are none.
    pub valid: Option<Arc<dyn BatchSource>>,
    /// The text behind them; `None` for samples of named tensors.
    pub text: Option<TextCorpus>,
    /// The tensors of samples as they are on disk; empty for text.
    pub tensors: Vec<TensorSpec>,
    /// Messages about parts of the data that are damaged and left out.
    pub damages: Vec<String>,
    /// Identity of the training data, which a run that resumes compares: the hash of a text's tokens, or what its owner calls
    /// other samples.
    pub digest: String,
}

impl TrainingData {
    /// Opens the data that `config` names.
    ///
    /// # Errors
    /// If the format of the data is not what the model reads, or as for [`TextCorpus::open`] and [`SampleCorpus::open`].
    pub fn open(config: &RunConfig, model: &ResolvedModel) -> Result<Self, Error> {
        Problems::none_of(data_problems(config, &model.config))?;
        if config.data.format.is_of_samples() {
            return Self::of_samples(config, &model.config, SampleCorpus::open(config, model)?);
        }
        let text = TextCorpus::open(config, model)?;
        let shared = |set: &lockstep_data::Dataset| -> Arc<dyn BatchSource> { Arc::new(set.clone()) };
        Ok(Self {
            train: shared(&text.train),
            valid: text.valid.as_ref().map(shared),
            digest: text.digest.clone(),
            text: Some(text),
            tensors: Vec::new(),
            damages: Vec::new(),
        })
    }

    /// Creates the data of samples, in the order and with the threads that `config` names.
    ///
    /// # Errors
    /// If transformed samples lack an input of the model, or the threads cannot be started.
    pub fn of_samples(config: &RunConfig, model: &ModelConfig, corpus: SampleCorpus) -> Result<Self, Error> {
        let SampleCorpus { train, valid, digest, damages } = corpus;
        for set in [Some(&train), valid.as_ref()].into_iter().flatten() {
            check_inputs(model, set)?;
        }
        let tensors = train.dataset.tensors();
        let train = batches(config, train, training_order(config))?;
        let valid = valid.map(|set| batches(config, set, SampleOrder::Sequential)).transpose()?;
        Ok(Self { train, valid, text: None, tensors, damages, digest })
    }

    /// Returns the digest and the sources of the data, as a run's report names them.
    pub(crate) fn described(&self) -> Value {
        match &self.text {
            Some(text) => text.described(),
            None => serde_json::json!({ "digest": self.digest, "samples": self.train.samples() }),
        }
    }

    /// Returns true if the model is trained on chats.
    pub(crate) fn has_chats(&self) -> bool {
        self.text.iter().flat_map(|text| &text.shapes).any(|shape| shape.uses_template())
    }
}

/// Returns a micro-batch as the engine reads it. Samples of named tensors may hold their tokens as [`INPUT_IDS`], and a label
/// for each of these as [`LABELS`].
pub fn host_batch(batch: &MicroBatch) -> HostBatch<'_> {
    let of_samples = sample_batch(&batch.inputs, &batch.sample_numbers);
    HostBatch {
        ids: if batch.ids.is_empty() { of_samples.ids } else { &batch.ids },
        labels: if batch.labels.is_empty() { of_samples.labels } else { &batch.labels },
        positions: &batch.positions,
        document_starts: &batch.document_starts,
        ..of_samples
    }
}

/// Returns samples of named tensors as the engine reads them; see [`host_batch`].
pub fn sample_batch<'a>(inputs: &'a [NamedTensor], sample_numbers: &'a [u64]) -> HostBatch<'a> {
    let ids: &[u32] = match find_tensor(inputs, INPUT_IDS).map(|tensor| &tensor.data) {
        Some(TensorData::U32(ids)) => ids,
        _ => &[],
    };
    let labels: &[i32] = match find_tensor(inputs, LABELS).map(|tensor| &tensor.data) {
        Some(TensorData::I32(labels)) if labels.len() == ids.len() => labels,
        _ => &[],
    };
    HostBatch { ids, labels, sample_numbers, inputs, ..HostBatch::default() }
}
