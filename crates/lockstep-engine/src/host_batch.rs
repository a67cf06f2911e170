//! A micro-batch in host memory, what it counts in the model's losses and metrics, and its checks.

use lockstep_graph::{InputLimit, MAX_REPORTS, Report};
use lockstep_model::RecordedModel;
use lockstep_tensor::{INPUT_IDS, LABELS, NamedTensor, TensorData, find_tensor};

use crate::EngineError;

/// A micro-batch in host memory. Slices of tokens are `[sequences · seq_len]` and cover whole sequences, also with context
/// parallelism; they are empty for a model that reads no tokens.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostBatch<'a> {
    /// Token ids, each below the vocabulary size.
    pub ids: &'a [u32],
    /// Target of each token: the id of the next one, or -100 where masked.
    pub labels: &'a [i32],
    /// Position of each token in its sequence; if empty, tokens are counted from the beginning of their sequence.
    pub positions: &'a [u32],
    /// For each token, the index within its sequence of the first token of its document; attention does not look before
    /// it. All zeros select the cheaper attention without document masks.
    pub document_starts: &'a [u32],
    /// Global sample number of each sequence, counted through all epochs: the key of its dropout masks.
    pub sample_numbers: &'a [u64],
    /// Named inputs, `[sequences, ...]` each; those that the model does not declare are ignored.
    pub inputs: &'a [NamedTensor],
}

impl HostBatch<'_> {
    /// Returns the number of targets that a model's loss counts, the divisor of the loss: the labels other than -100; for a
    /// model whose input [`LABELS`] is not of integers its elements, and for one without labels the samples.
    pub fn targets(&self, model: &RecordedModel) -> u64 {
        self.counts(model)[0]
    }

    /// Returns the numbers of targets that each report of the model counts, in their order.
    pub fn counts(&self, model: &RecordedModel) -> [u64; MAX_REPORTS] {
        let mut counts = [0; MAX_REPORTS];
        counts[0] = self.labels_counted(model);
        for (count, Report { target, .. }) in counts.iter_mut().zip(model.reports()) {
            let named = target.as_ref().filter(|target| *target != LABELS);
            *count = match named.and_then(|target| find_tensor(self.inputs, target)).map(|found| &found.data)
            {
                Some(TensorData::I32(labels)) => valid(labels),
                Some(values) => values.len() as u64,
                None => self.labels_counted(model),
            };
        }
        counts
    }

    fn labels_counted(&self, model: &RecordedModel) -> u64 {
        let is_read = model.inputs().iter().any(|input| input.name == LABELS);
        let named = find_tensor(self.inputs, LABELS).filter(|_| is_read);
        match named.map(|tensor| &tensor.data) {
            Some(TensorData::I32(labels)) => valid(labels),
            Some(values) => values.len() as u64,
            None if self.labels.is_empty() => self.sample_numbers.len() as u64,
            None => valid(self.labels),
        }
    }

    /// Checks the tokens, the named inputs and their labels against what the model declares.
    ///
    /// # Errors
    /// If an input is missing, has another dtype or size or is out of range, or a label is no class.
    pub(crate) fn check(&self, model: &RecordedModel) -> Result<(), EngineError> {
        self.check_ids(model.vocabulary())?;
        let samples = model.program(0).shape().sequences;
        for declared in model.inputs() {
            let name = || declared.name.clone();
            let elements = samples * declared.elements();
            let expected = || format!("{elements} elements of {}", declared.dtype);
            let Some(given) = find_tensor(self.inputs, &declared.name) else {
                let names: Vec<&str> = self.inputs.iter().map(|tensor| &*tensor.name).collect();
                let found = format!("a micro-batch of {names:?}");
                return Err(EngineError::Input { name: name(), found, expected: expected() });
            };
            if (given.dtype(), given.data.len()) != (declared.dtype, elements) {
                let found = format!("{} elements of {}", given.data.len(), given.dtype());
                return Err(EngineError::Input { name: name(), found, expected: expected() });
            }
            if let (Some(InputLimit::Below(limit)), TensorData::U32(numbers)) = (declared.limit, &given.data)
                && let Some(number) = numbers.iter().find(|number| **number >= limit)
            {
                let (found, expected) = (format!("the number {number}"), format!("numbers below {limit}"));
                return Err(EngineError::Input { name: name(), found, expected });
            }
            let of_reports =
                model.reports().iter().filter(|report| report.target.as_ref() == Some(&declared.name));
            let of_labels = || (declared.name == LABELS).then_some(model.classes());
            let classes = of_reports.filter_map(|report| report.classes).min().or_else(of_labels);
            let classes = classes.filter(|classes| *classes > 0);
            if let (Some(labels), Some(classes)) = (given.data.as_i32(), classes) {
                let is_class = |label: i32| label == IGNORED || (0..classes as i32).contains(&label);
                if let Some(at) = labels.iter().position(|label| !is_class(*label)) {
                    let sample = self.sample_numbers.get(at * samples / labels.len().max(1)).copied();
                    return Err(EngineError::Label { sample, label: labels[at], classes });
                }
            }
        }
        Ok(())
    }

    /// Checks that a model with a vocabulary is given ids of its tokens.
    fn check_ids(&self, vocabulary: usize) -> Result<(), EngineError> {
        let beyond = self.ids.iter().find(|id| **id as usize >= vocabulary);
        let found = match beyond {
            _ if vocabulary == 0 => return Ok(()),
            None if !self.ids.is_empty() => return Ok(()),
            None => "a micro-batch without tokens".to_owned(),
            Some(id) => format!("the id {id}"),
        };
        let expected = format!("ids of a vocabulary of {vocabulary} tokens");
        Err(EngineError::Input { name: INPUT_IDS.to_owned(), found, expected })
    }
}

/// Label of a target that is masked.
const IGNORED: i32 = -100;

/// Returns the number of labels that are not masked.
fn valid(labels: &[i32]) -> u64 {
    labels.iter().filter(|label| **label != IGNORED).count() as u64
}
