//! Summary of a model's quantized matrices.

use std::collections::BTreeMap;

/// Summary of a quantized model, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantizationSummary {
    /// Name of the method.
    pub method: &'static str,
    /// Number of matrices that are repacked.
    pub packed: usize,
    /// Number of matrices that are decoded, by the reason.
    pub decoded: BTreeMap<&'static str, usize>,
}
