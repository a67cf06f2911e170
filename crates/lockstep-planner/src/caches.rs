//! Results that a search computes once for all candidates with the same choices: outlines of the bounds, uniform recordings, and
//! splits into stages.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use lockstep_plan::work::UnitElements;
use lockstep_plan::{ContextMethod, Recompute, StateBytes};

use crate::recordings::Uniform;

/// Results of one question, by the choices on which they depend.
#[derive(Debug, Default)]
pub(crate) struct Caches {
    pub(crate) outlines: HashMap<PassKey, Outline>,
    pub(crate) uniforms: HashMap<(PassKey, Recompute), Rc<Uniform>>,
    /// Units of each stage; `None` if there is no split.
    pub(crate) cuts: HashMap<StageSplitKey, Option<Vec<Range<usize>>>>,
}

/// The choices of a candidate on which the passes of a micro-batch depend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PassKey {
    pub(crate) tensor: usize,
    pub(crate) context: usize,
    pub(crate) expert: usize,
    pub(crate) expert_tensor: usize,
    pub(crate) sequence_parallel: bool,
    pub(crate) context_method: ContextMethod,
    pub(crate) micro_batch: usize,
    /// World size on a host, whose ranks divide its cores, and pipeline degree in a mixed cluster; else 0.
    pub(crate) ranks: usize,
    pub(crate) pipeline: usize,
}

/// The choices of a candidate on which its split into stages depends: its passes, the recompute mode and the number of blocks with
/// it, the number of stages, and true for V-shaped schedules.
pub(crate) type StageSplitKey = (PassKey, Recompute, usize, usize, bool);

/// The inputs of the bounds: the model state, and times and saved activations by recompute mode, each recorded on first use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Outline {
    /// By the discriminant of the mode.
    pub(crate) of_mode: [Option<ModeOutline>; 3],
    /// Elements of all units together.
    pub(crate) elements: UnitElements,
    /// Bytes of state per element.
    pub(crate) state: StateBytes,
}

/// Times and saved activations of a recompute mode.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ModeOutline {
    /// Milliseconds of one micro-batch's forward and backward through all units.
    pub(crate) pass_ms: f64,
    /// Activations that all blocks save for one micro-batch, in bytes.
    pub(crate) saved_bytes: f64,
}
