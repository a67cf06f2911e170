//! Evaluation and text generation.
//!
//! Both run the same block code as training, recorded in [`Mode::Inference`](lockstep_graph::Mode); there is no
//! second forward. [`LoadedModel`] holds the weights and [`evaluate`] measures the loss on a text. A [`Batch`] reads tokens of several
//! sequences at once, with a key-value cache in pages; a [`Scheduler`] generates many requests with it, and a [`Generator`] reads one
//! sequence.
#![forbid(unsafe_code)]

mod batch;
mod beam;
mod cache;
mod error;
mod evaluate;
mod forward;
mod generate;
mod generation;
mod loaded;
mod sample;
mod scheduler;
mod weights;

pub use batch::{Batch, NewTokens, SequenceId};
pub use beam::{BeamOptions, Hypothesis, beam_search};
pub use error::InferError;
pub use evaluate::{Evaluation, evaluate};
pub use generate::Generator;
pub use generation::GenerationConfig;
pub use loaded::{LoadOptions, LoadedModel};
pub use sample::{Drawn, Sampler, Sampling, TokenLogprob};
pub use scheduler::{Event, FinishReason, Request, RequestId, Scheduler, SchedulerOptions};
