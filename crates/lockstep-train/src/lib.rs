//! A training run, from its configuration to its metrics.
//!
//! What a run *is* stands in a [`RunConfig`]: read from RUN.toml and `--set`, checked as a whole, every value
//! with the place it came from. [`train`] carries it out: it resolves the model, prepares the corpus, resumes
//! from the newest good checkpoint, and makes the steps. Around the loop stand small parts that know no tensor:
//!
//! - [`metrics`]: `metrics.jsonl`, one whole line a step, continued without a seam after a resume.
//! - [`progress`]: the line a person watches, or plain lines where nobody does.
//! - [`screen`]: text on standard error, wrapped and coloured.
//! - [`launch`]: the ranks of a run on this machine, started and watched.
//! - [`flight`]: what ranks called last, when a run ended badly.
//! - [`forecast`]: what every rank will hold in memory, and [`fit`]: whether a machine has that much.
//! - [`interrupt`]: Ctrl-C and SIGTERM as a flag that the loop reads between steps.
//! - [`benchmark`]: how fast the machine at hand makes steps.
//! - [`rehearsal`]: pipeline schedules measured beside simulated.
//! - [`roofline`]: where the time of a step goes, against what the machine could do.
//! - [`machine_file`]: the machine at hand as a cluster file, measured.
//! - [`report`]: a run on one page.
//! - [`verify`]: a plan's numbers against those of one rank.
//! - [`doctor`]: what the machine offers and what it lacks.
//! - [`build`]: the commit that the program was built from.
#![forbid(unsafe_code)]

pub mod benchmark;
pub mod build;
mod comparison;
mod corpus;
mod describe;
pub mod doctor;
mod error;
pub mod fit;
pub mod flight;
pub mod forecast;
mod guard;
mod holdings;
pub mod interrupt;
pub mod launch;
pub mod limits;
mod lock;
mod loss_scale;
mod machine;
pub mod machine_file;
pub mod metrics;
mod origin;
mod peak;
pub mod planner;
pub mod progress;
mod ranks;
mod records;
pub mod rehearsal;
pub mod report;
pub mod roofline;
mod saving;
pub mod screen;
mod setup;
mod state;
mod trace;
mod trainer;
pub mod verify;

pub use corpus::{Corpus, CorpusSource, load_tokenizer};
pub use describe::answers;
pub use error::Error;
pub use forecast::Forecast;
pub use ranks::Ranks;
pub use trainer::{Resume, StepObserver, Summary, train, train_observed};
