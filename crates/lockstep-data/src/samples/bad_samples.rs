//! The reaction to damaged samples.

/// Reaction to a sample that is damaged. Errors of the machine, such as a disk that does not answer, always fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnBadSample {
    /// Returns the error.
    #[default]
    Fail,
    /// Skips the sample and counts it.
    Skip,
}
