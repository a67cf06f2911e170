//! Observer of a download, for progress bars.

/// Observer of downloads. Called from several threads.
pub trait Progress: Sync {
    /// Starts a download of `total_bytes`; `task` is shown to the user.
    fn begin(&self, task: &str, total_bytes: u64);
    /// Adds `bytes` to the finished part.
    fn advance(&self, bytes: u64);
    /// Ends the download, whether it succeeded or not.
    fn finish(&self);
    /// Tells the user about a wait or a retry.
    fn note(&self, text: &str);
}

/// Observer that shows nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn begin(&self, _task: &str, _total_bytes: u64) {}
    fn advance(&self, _bytes: u64) {}
    fn finish(&self) {}
    fn note(&self, _text: &str) {}
}
