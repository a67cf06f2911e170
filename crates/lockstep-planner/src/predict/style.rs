//! What systems do differently with the same devices: which values they write, what they do one thing after the other, and in how many
//! bytes they keep their state. Each is a fact of the system's code or paper, but for four numbers that published runs gave: how far
//! DeepSpeed's gathers of 2021 fell short of what the links give, how often elementwise kernels of PyTorch's backward go through memory,
//! how slow attention's backward in Triton was, and how long a device waits for a host that waits for counts of rows. Each of them is the
//! same for all runs of its system, on all devices.

use crate::cluster::Software;
use lockstep_plan::{DType, StateBytes};

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
    /// How often it goes through memory where one pass would do, in a forward (also one that is done again) and in a backward: 1 with
    /// fused kernels.
    pub passes: [f64; 2],
    /// Whether operations that have no kernel of their own are put together of elementwise ones, each of which reads and writes
    /// all of its operands.
    pub composes: bool,
    /// Whether tokens go once to the ranks that share an expert's matrices, which gather them from each other, and what they make of them
    /// is scattered before it goes back; else each of these ranks has them sent, and sends its part.
    pub gathers_for_experts: bool,
    /// Seconds for which a device has nothing to do in a forward because the host waits for how many rows will come to its experts.
    pub counts_wait_s: f64,
    /// Share that its fused attention comes to of what a device's best does, in a forward and in a backward.
    pub attention: [f64; 2],
    /// Bytes that go through memory for each parameter that is gathered (stage 3), in a forward and in a backward, beside what products
    /// read and write.
    pub unit_bytes: [f64; 2],
    /// Bytes of an update of a parameter.
    pub update_bytes: f64,
    /// Bytes of an element's state where weights are of 16 bits.
    pub state: StateBytes,
}

/// Bytes that writing a gradient in 16 bits and adding it to a sum in f32 takes: read and write of the one, and of the other.
pub(super) const APART_BYTES: f64 = 2.0 + 2.0 + 4.0 + 4.0;
/// Bytes of an update of a parameter by AdamW in one pass: gradient, master weight and both moments in f32, the weight written in 16 bits.
const UPDATE_BYTES: f64 = 4.0 + 3.0 * 8.0 + 2.0;
/// The same by PyTorch's `foreach` kernels, one operation after the other: decay of the weight (8), the first moment's mean (12), decay (8)
/// and mean (12) of the second, its root (8), its correction (8), epsilon (8), the step (16), and the weight in 16 bits (6).
const FOREACH_UPDATE_BYTES: f64 = 8.0 + 12.0 + 8.0 + 12.0 + 8.0 + 8.0 + 8.0 + 16.0 + 6.0;
/// Bytes of a parameter that FSDP's gather writes, and those of its backward: another gather (2), the gradient's copy into the flat buffer
/// (4), its cast to f32 (6), its division by the ranks (8), and the reduce-scatter's read and write (8). llm-foundry's rows by themselves
/// give 30 for both.
const FSDP_UNIT_BYTES: [f64; 2] = [2.0, 2.0 + 4.0 + 6.0 + 8.0 + 8.0];
/// Bytes that go through memory for each score of a forward: mask and softmax, then dropout with its mask, each read and written.
pub(super) const SCORE_BYTES_FORWARD: f64 = 4.0 + 5.0;
/// The same of a backward, which reads the output of the softmax as well.
pub(super) const SCORE_BYTES_BACKWARD: f64 = 6.0 + 5.0;

/// What a host takes from having read the counts of a dispatch until the device is as far behind it again as it was: Mixtral 8x7B in
/// Megatron-LM, where nothing is dropped.
const COUNTS_WAIT_S: f64 = 2e-3;

impl Style {
    /// How often a task of this name goes through memory where one kernel would go once: [`Style::passes`], and of how many kernels it is
    /// put together.
    ///
    /// Tensors in 16 bits are one unit, in f32 two. RMSNorm in f32 (PyTorch has a kernel for it from 2.8 on): cast (3), square (4), mean (2),
    /// product with the root (4), cast back (3), product with the weight (2), 18 units where a kernel has 2; backward about 36 instead of 6.
    /// Rotary embeddings in f32: cast (3), product (4), cast back (3), 10 instead of 2, both ways. SwiGLU: SiLU (2) and a product (3), 5
    /// instead of 3; backward 9 instead of 5.
    pub(super) fn passes_of(&self, name: &str, is_backward: bool) -> f64 {
        let composed = match name {
            _ if !self.composes => [1.0; 2],
            "RMSNorm" => [18.0 / 2.0, 36.0 / 6.0],
            "RoPE" => [10.0 / 2.0; 2],
            "SwiGLU" => [5.0 / 3.0, 9.0 / 5.0],
            _ => [1.0; 2],
        };
        let way = usize::from(is_backward);
        self.passes[way] * composed[way]
    }

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
            passes: [1.0; 2],
            composes: false,
            gathers_for_experts: false,
            counts_wait_s: COUNTS_WAIT_S,
            attention: [1.0; 2],
            unit_bytes: [0.0; 2],
            update_bytes: UPDATE_BYTES,
            state: StateBytes::MIXED_ADAM_F32_GRADIENTS,
        };
        match self {
            Self::Lockstep => lockstep,
            Self::MegatronCore => Style { gathers_for_experts: true, ..lockstep },
            Self::Megatron => Style {
                writes_scores: true,
                adds_gradients_apart: true,
                sums_beside: false,
                sends_beside: false,
                gathers_again_beside: true,
                slices_messages: true,
                ..lockstep
            },
            Self::Fsdp => Style {
                passes: [1.0, 4.0],
                composes: true,
                unit_bytes: FSDP_UNIT_BYTES,
                update_bytes: FOREACH_UPDATE_BYTES,
                ..lockstep
            },
            Self::LlmFoundry => Style { attention: [1.0, 0.385], ..Self::Fsdp.style() },
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
