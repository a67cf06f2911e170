//! Progress reporting: a trait that long work reports to, and a progress bar for terminals.
//!
//! The work reports bytes of source text; the observer decides what to show.

use std::sync::Mutex;

use indicatif::{ProgressBar, ProgressStyle};

/// Observer of the progress of tokenization. Called from one thread at a time.
pub trait Progress: Sync {
    /// Starts work on `total_bytes` of source text. `task` is shown to the user.
    fn begin(&self, task: &str, total_bytes: u64);
    /// Adds `bytes` to the finished part.
    fn advance(&self, bytes: u64);
    /// Ends the work, whether it succeeded or not.
    fn finish(&self);
}

/// Observer that shows nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn begin(&self, _task: &str, _total_bytes: u64) {}
    fn advance(&self, _bytes: u64) {}
    fn finish(&self) {}
}

/// Progress bar on standard error if that is a terminal; shows nothing otherwise.
#[derive(Debug, Default)]
pub struct Bar {
    bar: Mutex<Option<ProgressBar>>,
}

const OF_BYTES: &str = "{msg} [{bar:30}] {bytes}/{total_bytes} {binary_bytes_per_sec} {eta} left";
const OF_ITEMS: &str = "{msg} [{bar:30}] {human_pos}/{human_len} {eta} left";

impl Bar {
    fn with(&self, act: impl FnOnce(&mut Option<ProgressBar>)) {
        // A bar is usable even after a panic while it was locked.
        act(&mut self.bar.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
    }
}

impl Bar {
    /// Starts work on `total` items that are not bytes.
    pub fn begin_items(&self, task: &str, total: u64) {
        self.show(task, total, OF_ITEMS);
    }

    fn show(&self, task: &str, total: u64, template: &str) {
        // indicatif draws to standard error, and only if that is a terminal.
        let bar = ProgressBar::new(total);
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(task.to_owned());
        self.with(|slot| *slot = Some(bar));
    }
}

impl Progress for Bar {
    fn begin(&self, task: &str, total_bytes: u64) {
        self.show(task, total_bytes, OF_BYTES);
    }

    fn advance(&self, bytes: u64) {
        self.with(|slot| {
            if let Some(bar) = slot {
                bar.inc(bytes);
            }
        });
    }

    fn finish(&self) {
        self.with(|slot| {
            if let Some(bar) = slot.take() {
                bar.finish_and_clear();
            }
        });
    }
}
