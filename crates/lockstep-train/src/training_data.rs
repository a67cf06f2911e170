//! The training and validation data of a run, whatever they are: text, or samples of named tensors.

use std::sync::Arc;

use lockstep_config::{ResolvedModel, RunConfig};
use lockstep_data::{BatchSource, MicroBatch};
use lockstep_engine::HostBatch;
use lockstep_tensor::{INPUT_IDS, LABELS, TensorData, find_tensor};
use serde_json::Value;

use crate::Error;
use crate::corpus::TextCorpus;

/// The training and validation data of a run.
#[derive(Debug)]
pub struct TrainingData {
    /// Samples for training, in the run's order.
    pub train: Arc<dyn BatchSource>,
    /// Samples for validation; `None` if there are none.
    pub valid: Option<Arc<dyn BatchSource>>,
    /// The text behind them; `None` for samples of named tensors.
    pub text: Option<TextCorpus>,
    /// Identity of the training data, which a run that resumes compares: the hash of a text's tokens, or what its owner calls
    /// other samples.
    pub digest: String,
}

impl TrainingData {
    /// Opens the data that `config` names.
    ///
    /// # Errors
    /// As for [`TextCorpus::open`].
    pub fn open(config: &RunConfig, model: &ResolvedModel) -> Result<Self, Error> {
        let text = TextCorpus::open(config, model)?;
        let shared = |set: &lockstep_data::Dataset| -> Arc<dyn BatchSource> { Arc::new(set.clone()) };
        Ok(Self {
            train: shared(&text.train),
            valid: text.valid.as_ref().map(shared),
            digest: text.digest.clone(),
            text: Some(text),
        })
    }

    /// Creates the data of samples; `digest` tells them from other data when a run resumes.
    pub fn of_samples(
        train: Arc<dyn BatchSource>,
        valid: Option<Arc<dyn BatchSource>>,
        digest: impl Into<String>,
    ) -> Self {
        Self { train, valid, text: None, digest: digest.into() }
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
    let ids = match find_tensor(&batch.inputs, INPUT_IDS).map(|tensor| &tensor.data) {
        Some(TensorData::U32(ids)) if batch.ids.is_empty() => ids,
        _ => &batch.ids,
    };
    let labels = match find_tensor(&batch.inputs, LABELS).map(|tensor| &tensor.data) {
        Some(TensorData::I32(labels)) if batch.labels.is_empty() && labels.len() == ids.len() => labels,
        _ => &batch.labels,
    };
    HostBatch {
        ids,
        labels,
        positions: &batch.positions,
        document_starts: &batch.document_starts,
        sample_numbers: &batch.sample_numbers,
        inputs: &batch.inputs,
    }
}
