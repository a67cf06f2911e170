//! A training run, from its configuration to its metrics.
//!
//! What a run *is* stands in a [`RunConfig`]: read from RUN.toml and `--set`, checked as a whole, every value
//! with the place it came from. [`train`] carries it out: it resolves the model, prepares the corpus, resumes
//! from the newest good checkpoint, and makes the steps. Around the loop stand small parts that know no tensor:
//!
//! - [`launch`]: the ranks of a run on this machine, started and watched.
//! - [`interrupt`]: Ctrl-C and SIGTERM as a flag that the loop reads between steps.
//! - [`benchmark`]: how fast the machine at hand makes steps.
//! - [`rehearsal`]: pipeline schedules measured beside simulated.
//! - [`machine_file`]: the machine at hand as a cluster file, measured.
//! - [`verify`]: a plan's numbers against those of one rank.
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
