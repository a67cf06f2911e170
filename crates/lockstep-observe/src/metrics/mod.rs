//! `metrics.jsonl`: one JSON object per line, one line per step or evaluation.
//!
//! A row is a typed record, which fixes its form. A number that is not finite becomes `null`, because JSON has no other way to
//! write it. [`MetricsWriter`] keeps the file whole; [`EventWriter`] writes the same numbers for TensorBoard.

mod appender;
mod event_format;
mod events;
mod means;
mod prometheus;
mod row;
mod server;
mod step_metrics;
mod writer;

pub use appender::Sink;
pub use events::EventWriter;
pub use means::{Amount, CountUnit, Means};
pub use prometheus::Prometheus;
pub use row::Row;
pub use server::Server;
pub use step_metrics::{
    CommunicationUse, DiskUse, EvalMetrics, MemoryUse, PredictedMemory, StepMetrics, imbalance,
};
pub use writer::{FILE_NAME, MetricsFile, MetricsWriter, Resumption, Start};

#[cfg(test)]
pub(crate) use step_metrics::tests::example;
