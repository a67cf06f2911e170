//! The head of a classifier that starts from the weights of a language model: it is new, and the language model's is left.

use std::collections::BTreeSet;

use lockstep_model::{ModelConfig, parameter_records};

/// Parameters of the two heads.
#[derive(Debug, Default)]
pub(crate) struct NewHead {
    /// Names of the parameters that get initial values if the weights lack them.
    own: BTreeSet<String>,
    /// Names of the parameters among the weights that nothing reads.
    left: BTreeSet<String>,
}

impl NewHead {
    /// Returns the heads of `model` and of the model whose weights it starts from; none unless the first classifies and the other
    /// does not.
    pub(crate) fn of(model: &ModelConfig, pretrained: &ModelConfig) -> Self {
        let classifies = |model: &ModelConfig| model.model().sizes().classes > 0;
        if !classifies(model) || classifies(pretrained) {
            return Self::default();
        }
        Self { own: names_of_head(model), left: names_of_head(pretrained) }
    }

    /// Returns true if the parameter may be absent from the weights.
    pub(crate) fn is_new(&self, name: &str) -> bool {
        self.own.contains(name)
    }

    /// Returns true if the weights may have the parameter although the model does not.
    pub(crate) fn is_left(&self, name: &str) -> bool {
        self.left.contains(name)
    }
}

/// Returns the names of the last unit's parameters.
fn names_of_head(model: &ModelConfig) -> BTreeSet<String> {
    let records = parameter_records(model);
    let last = records.last().map(|record| record.unit);
    records.into_iter().filter(|record| Some(record.unit) == last).map(|record| record.name).collect()
}
