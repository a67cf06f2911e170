//! How far a long piece of work is: a trait the work reports to, and a bar for terminals.
//!
//! The work says only how many bytes of source text it has done; what is shown is the observer's business.

use std::sync::Mutex;

use indicatif::{ProgressBar, ProgressStyle};

/// Hears how far tokenization is. Called from one thread at a time.
pub trait Progress: Sync {
    /// Work on `total_bytes` of source text begins; `task` is what the user reads.
    fn begin(&self, task: &str, total_bytes: u64);
    /// Another `bytes` are done.
    fn advance(&self, bytes: u64);
    /// The work is over, done or not.
    fn finish(&self);
}

/// Shows nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn begin(&self, _task: &str, _total_bytes: u64) {}
    fn advance(&self, _bytes: u64) {}
    fn finish(&self) {}
}

/// A bar on standard error where that is a terminal, and nothing elsewhere.
#[derive(Debug, Default)]
pub struct Bar {
    bar: Mutex<Option<ProgressBar>>,
}

const OF_BYTES: &str = "{msg} [{bar:30}] {bytes}/{total_bytes} {binary_bytes_per_sec} {eta} left";
const OF_ITEMS: &str = "{msg} [{bar:30}] {human_pos}/{human_len} {eta} left";

impl Bar {
    fn with(&self, act: impl FnOnce(&mut Option<ProgressBar>)) {
        // A bar whose holder panicked is still a bar.
        act(&mut self.bar.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
    }
}

impl Bar {
    /// Begins work on `total` items that are not bytes.
    pub fn begin_items(&self, task: &str, total: u64) {
        self.show(task, total, OF_ITEMS);
    }

    fn show(&self, task: &str, total: u64, template: &str) {
        // indicatif draws to standard error, and hides itself where that is no terminal.
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
