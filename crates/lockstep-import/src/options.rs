//! Context of an import: what the imported file alone does not say.

/// Source of values for keys that are `"auto"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AutoValues {
    /// The defaults of Hugging Face's Trainer, for a file that is imported alone.
    TrainerDefaults,
    /// The configuration of the run that the file is imported into.
    OfTheRun,
}

/// Context of an import, from outside the file.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Ranks of the run, if known.
    pub ranks: Option<usize>,
    /// Source of values for keys that are `"auto"`.
    pub auto: AutoValues,
}
