//! The planner's usual questions: models of eight sizes on clusters from one node to 2,048.

/// A model on machines.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Question {
    /// Name of a model preset.
    pub(crate) model: &'static str,
    /// Name of a cluster preset.
    pub(crate) cluster: &'static str,
    /// Tokens of a sequence.
    pub(crate) seq_len: usize,
    /// Sequences of a global batch.
    pub(crate) global_batch: usize,
    /// True if any plan fits.
    pub(crate) fits: bool,
    /// Most candidates that may be evaluated for the three best plans.
    pub(crate) most_valued: usize,
    /// True if the answer takes less than half a second.
    pub(crate) is_quick: bool,
}

impl Question {
    /// Returns the settings of a run in bf16.
    pub(crate) fn settings(&self) -> Vec<String> {
        vec![
            format!("model.preset={}", self.model),
            format!("train.seq_len={}", self.seq_len),
            format!("train.global_batch={}", self.global_batch),
            "train.precision=bf16".to_owned(),
        ]
    }
}

/// Returns the planner's usual questions, by model size: the rows of `table.tsv`.
///
/// # Panics
/// If a row is malformed.
pub(crate) fn questions() -> Vec<Question> {
    let rows = include_str!("table.tsv").lines().filter(|row| !row.starts_with('#'));
    rows.map(|row| parsed(row).unwrap_or_else(|| panic!("{row} is no question"))).collect()
}

/// Parses a row; `None` if it is malformed.
fn parsed(row: &'static str) -> Option<Question> {
    let columns: Vec<&str> = row.split('\t').collect();
    let [model, cluster, seq_len, global_batch, asked, most_valued] = columns[..] else { return None };
    let fits = most_valued != "-";
    Some(Question {
        model,
        cluster,
        seq_len: seq_len.parse().ok()?,
        global_batch: global_batch.parse().ok()?,
        fits,
        most_valued: if fits { most_valued.parse().ok()? } else { usize::MAX },
        is_quick: match asked {
            "quick" => true,
            "long" => false,
            _ => return None,
        },
    })
}
