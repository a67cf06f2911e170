//! A training run, from its configuration to its metrics.
//!
//! A run is described by a [`RunConfig`]: read from RUN.toml and `--set`, checked as a whole, every value with its origin.
//! [`train`] executes it: it resolves the model, prepares the corpus, resumes from the newest intact checkpoint and runs the
//! steps. The modules around the loop do not touch tensors:
//!
//! - [`config`]: the keys of RUN.toml, in one table from which the parser, the error messages and the manual are derived.
//! - [`schedule`]: the learning rate as a pure function of the step.
//! - [`metrics`]: `metrics.jsonl`, one line per step, continued seamlessly after a resume.
//! - [`progress`]: the progress line on a terminal, or plain lines elsewhere.
//! - [`screen`]: text on standard error, wrapped and coloured.
//! - [`launch`]: starts and watches the local ranks of a run.
//! - [`flight`]: the last operations of each rank, after a failure.
//! - [`forecast`]: the predicted memory of every rank, and [`fit`]: its comparison with the machine's.
//! - [`interrupt`]: Ctrl-C and SIGTERM as a flag that the loop reads between steps.
//! - [`benchmark`]: step times of this machine.
//! - [`rehearsal`]: pipeline schedules, measured and simulated.
//! - [`roofline`]: time of a step by operation, compared with the machine's limits.
//! - [`machine_file`]: this machine as a cluster file, measured.
//! - [`report`]: a run on one page.
//! - [`plan`]: the parallel plan of a run and its check against the model.
//! - [`verify`]: compares a plan's numbers with those of one rank.
//! - [`doctor`]: the resources that the machine offers and lacks.
//! - [`build`]: the commit from which the program was built.
//! - [`human`]: numbers in readable units.
#![forbid(unsafe_code)]

pub mod benchmark;
mod comparison;
mod corpus;
mod describe;
mod error;
mod guard;
pub mod interrupt;
pub mod launch;
pub mod limits;
mod loss_scale;
pub mod machine_file;
mod origin;
mod peak;
mod predicted;
mod ranks;
mod records;
pub mod rehearsal;
mod saving;
mod setup;
mod state;
mod trainer;
pub mod verify;

pub use corpus::{Corpus, CorpusSource, load_tokenizer};
pub use describe::answers;
pub use error::Error;
pub use ranks::{ranks_of, ranks_of_model};
pub use trainer::{StepObserver, Summary, train, train_observed};
