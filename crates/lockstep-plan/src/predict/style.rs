//! What systems do differently with the same devices: which values they write, what they do one thing after the other, and in how many
//! bytes they keep their state. Each is a fact of the system's code
//! or paper, but for how far DeepSpeed's gathers of 2021 fell short of what the links give: that is the one number for all of its published runs.

use crate::cluster::Software;
use crate::{DType, StateBytes};

/// The habits of a system.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Style {
    /// Whether attention writes the square of its scores, whole, before it reads it again; else it never does (Dao et al. 2022).
    pub writes_scores: bool,
    /// Whether a gradient of a weight is made in 16 bits and then added to the sum in f32, in a pass of its own.
    pub adds_gradients_apart: bool,
    /// Whether gradients are summed over the ranks beside the backward that makes them.
    pub sums_beside: bool,
    /// Whether weights are gathered, and gradients scattered, beside passes.
    pub gathers_beside: bool,
    /// Collectives of each unit's weights: one with flat buffers, one for each parameter without.
    pub gathers_of_a_unit: f64,
    /// Share of what links give that gathers come to.
    pub gathers_at: f64,
    /// Whether values that are gathered once more for gradients of weights come beside the gradients of inputs (Korthikanti et al.
    /// 2022, section 4.2.2).
    pub gathers_again_beside: bool,
    /// Whether messages between stages go beside passes; else both ranks wait for each.
    pub sends_beside: bool,
    /// Whether tensor-parallel ranks send a slice each of what all of them have to the next stage, which gathers it.
    pub slices_messages: bool,
    /// How often it goes through memory where one pass would do: 1 with fused kernels.
    pub passes: f64,
    /// Share that its fused attention comes to of what a device's best does.
    pub attention: f64,
    /// Bytes of an element's state where weights are of 16 bits.
    pub state: StateBytes,
}

/// Bytes that writing a gradient in 16 bits and adding it to a sum in f32 takes: read and write of the one, and of the other.
pub(super) const APART_BYTES: f64 = 2.0 + 2.0 + 4.0 + 4.0;
/// Bytes of an update of a parameter by AdamW: gradient, master weight and both moments in f32, the weight written in 16 bits.
pub(super) const UPDATE_BYTES: f64 = 4.0 + 3.0 * 8.0 + 2.0;
/// Bytes that go through memory for each score of a forward: mask and softmax, then dropout with its mask, each read and written.
pub(super) const SCORE_BYTES_FORWARD: f64 = 4.0 + 5.0;
/// The same of a backward, which reads the output of the softmax as well.
pub(super) const SCORE_BYTES_BACKWARD: f64 = 6.0 + 5.0;

impl Style {
    /// Bytes of an element's state where kernels read weights of `dtype`.
    pub const fn state_bytes(&self, dtype: DType) -> StateBytes {
        match dtype {
            DType::F32 => StateBytes::ADAM_F32,
            _ => self.state,
        }
    }
}

impl Software {
    /// What it does.
    pub const fn style(self) -> Style {
        let lockstep = Style {
            writes_scores: false,
            adds_gradients_apart: false,
            sums_beside: true,
            sends_beside: true,
            slices_messages: false,
            gathers_beside: true,
            gathers_again_beside: false,
            gathers_of_a_unit: 1.0,
            gathers_at: 1.0,
            passes: 1.0,
            attention: 1.0,
            state: StateBytes::MIXED_ADAM_F32_GRADIENTS,
        };
        match self {
            Self::Lockstep => lockstep,
            Self::Megatron => Style {
                writes_scores: true,
                adds_gradients_apart: true,
                sums_beside: false,
                sends_beside: false,
                gathers_again_beside: true,
                slices_messages: true,
                ..lockstep
            },
            Self::Fsdp => Style { passes: 3.0, attention: 0.55, ..lockstep },
            Self::DeepSpeed => Style {
                writes_scores: true,
                adds_gradients_apart: true,
                gathers_beside: false,
                gathers_of_a_unit: 7.0,
                gathers_at: 0.143,
                state: StateBytes::MIXED_ADAM,
                ..lockstep
            },
        }
    }
}
