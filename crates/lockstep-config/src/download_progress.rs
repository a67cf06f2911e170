//! Progress of a download: a line on standard error when it begins, and a bar if that is a terminal.

use std::io::Write;

use lockstep_data::Bar;
use lockstep_hub::Progress;

use crate::human;

/// Observer that shows downloads to the user.
#[derive(Debug, Default)]
pub(crate) struct Shown {
    bar: Bar,
}

impl Progress for Shown {
    fn begin(&self, task: &str, total_bytes: u64) {
        // A reader that is gone must not end the download.
        let _ = writeln!(std::io::stderr(), "downloading {task}, {}", human::bytes(total_bytes));
        lockstep_data::Progress::begin(&self.bar, task, total_bytes);
    }

    fn advance(&self, bytes: u64) {
        lockstep_data::Progress::advance(&self.bar, bytes);
    }

    fn finish(&self) {
        lockstep_data::Progress::finish(&self.bar);
    }

    fn note(&self, text: &str) {
        tracing::warn!("{text}");
    }
}
