//! Options of a recording: its purpose and shape, the rank's places, and the part of the model that is trained.

use std::collections::{BTreeMap, BTreeSet};

use lockstep_graph::{BlockShape, HeadOutput, Mode, RecomputeRules, Statistics};
use lockstep_plan::{BlockFormat, Places};

use crate::lora::Adapter;

/// The trainable part of a model; by default all of it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Tuning {
    /// Canonical names of frozen parameters. A tied parameter follows the one it is tied to.
    pub frozen: BTreeSet<String>,
    /// Block formats of frozen matrices that are quantized, by canonical name.
    pub quantized: BTreeMap<String, BlockFormat>,
    /// The LoRA adapter of linear layers.
    pub adapter: Option<Adapter>,
}

impl Tuning {
    /// Returns true if the adapter applies dropout.
    pub fn has_dropout(&self) -> bool {
        self.adapter.as_ref().is_some_and(|adapter| adapter.config().dropout > 0.0)
    }

    /// Returns a copy without adapter dropout.
    pub fn without_dropout(&self) -> Self {
        Self { adapter: self.adapter.as_ref().map(Adapter::without_dropout), ..self.clone() }
    }
}

/// Options of a recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordingOptions {
    /// Forward and backward (training), or forward only (inference).
    pub mode: Mode,
    /// Shape of a micro-batch of whole sequences, and the dtype that kernels read.
    pub shape: BlockShape,
    /// Recomputation of the blocks.
    pub recompute: RecomputeRules,
    /// Output of the head.
    pub head_output: HeadOutput,
    /// Statistics that batch norms use.
    pub statistics: Statistics,
    /// This rank's places in the tensor-, context- and expert-parallel groups.
    pub places: Places,
}

impl RecordingOptions {
    /// Returns the options for a training step's micro-batch of `shape`, with losses as the output.
    pub fn training(shape: BlockShape, recompute: RecomputeRules, places: Places) -> Self {
        let (mode, head_output) = (Mode::Training, HeadOutput::Losses);
        Self { mode, shape, recompute, head_output, statistics: Statistics::Batch, places }
    }
}
