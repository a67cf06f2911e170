//! Training systems, and their differences on the same devices: values that they write, operations that they do not overlap, and bytes
//! of their state. Nothing else in the crate names a system: it reads [`SystemTraits`]. Each difference is a fact of the system's code
//! or paper, except four fitted constants:
//!
//! - the efficiency of DeepSpeed's gathers of 2021,
//! - the memory passes of elementwise kernels in PyTorch's backward,
//! - the speed of Triton attention's backward,
//! - the wait of a device whose host reads routing counts.
//!
//! Each constant is the same for all runs of its system, on all devices.

use lockstep_plan::work::{ModelWork, SavedExtent, Task, TaskKind};
use lockstep_plan::{DType, Recompute, StateBytes};

/// Training system, for the choices in which systems differ. The constants of a device are the same for all.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Software {
    /// Lockstep's own engine.
    Lockstep,
    /// Megatron-LM of 2021 and 2022: attention writes scores, and f32 gradients are reduced after the backward.
    Megatron,
    /// Megatron Core (Megatron-LM and NeMo from 2023 on): as Lockstep, except the token dispatch to tensor-parallel experts.
    MegatronCore,
    /// PyTorch FSDP with fused attention and unfused other operations; gathers and reductions overlap with compute.
    Fsdp,
    /// PyTorch FSDP in Mosaic's llm-foundry of 2023: with Triton attention, whose backward was slow.
    LlmFoundry,
    /// DeepSpeed ZeRO: gradients are reduced in 16 bits.
    DeepSpeed,
}

impl Software {
    /// All training systems.
    pub const ALL: [Self; 6] =
        [Self::Lockstep, Self::Megatron, Self::MegatronCore, Self::Fsdp, Self::LlmFoundry, Self::DeepSpeed];

    /// Returns the name in a cluster file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lockstep => "lockstep",
            Self::Megatron => "megatron",
            Self::MegatronCore => "megatron-core",
            Self::Fsdp => "fsdp",
            Self::LlmFoundry => "llm-foundry",
            Self::DeepSpeed => "deepspeed",
        }
    }
}

/// Implementation choices of a training system.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SystemTraits {
    /// True if attention writes all of its scores and reads them again; false for fused attention (Dao et al. 2022).
    pub unfused_attention: bool,
    /// True if a weight gradient is computed in 16 bits and then added to the f32 accumulator by a separate kernel.
    pub separate_accumulation: bool,
    /// True if the gradient reduction overlaps with the backward.
    pub overlaps_reductions: bool,
    /// True if weight gathers and gradient reduce-scatters overlap with passes.
    pub overlaps_gathers: bool,
    /// Collectives per unit for its weights: one with flat buffers, one per parameter without.
    pub gathers_of_a_unit: f64,
    /// Fraction of the link bandwidth that all-gathers and reduce-scatters achieve, in (0, 1].
    pub gather_efficiency: f64,
    /// True if the repeated all-gather for weight gradients overlaps with the input gradients (Korthikanti et al. 2022, section 4.2.2).
    pub gathers_again_beside: bool,
    /// True if messages between stages overlap with passes; otherwise both ranks wait for each.
    pub overlaps_sends: bool,
    /// True if tensor-parallel ranks each send a slice of their common value to the next stage, which gathers it.
    pub slices_messages: bool,
    /// Memory passes of elementwise kernels relative to a single fused pass, in a forward (also a recomputed one) and in a backward.
    pub passes: [f64; 2],
    /// True if operations without a kernel of their own are composed of elementwise ones, each of which reads and writes all operands.
    pub composes: bool,
    /// True if each token is sent once to an expert's tensor-parallel group, which all-gathers it and reduce-scatters the result.
    /// Otherwise every rank of the group gets the token and returns its partial result.
    pub gathers_for_experts: bool,
    /// Seconds for which a device idles in a forward because the host waits for the number of rows that its experts get.
    pub counts_wait_s: f64,
    /// Speed of its fused attention relative to the device's best, in a forward and in a backward.
    pub attention: [f64; 2],
    /// Bytes through memory per gathered parameter (stage 3), in a forward and in a backward, in addition to those of GEMMs.
    pub unit_bytes: [f64; 2],
    /// Bytes through memory per parameter in the optimizer step.
    pub update_bytes: f64,
    /// Bytes of state per element if weights have 16 bits.
    pub state: StateBytes,
    /// True if memory is that of Lockstep's own ledger, and state can be offloaded; false for the formulas of papers.
    pub has_ledger: bool,
    /// Probability of dropout in the system's published runs, which saved its masks; the default of runs under it.
    pub dropout: f64,
}

/// Bytes per element of a separate gradient accumulation: read and write in 16 bits, read and write in f32.
pub(crate) const APART_BYTES: f64 = 2.0 + 2.0 + 4.0 + 4.0;
/// Bytes per parameter of a fused AdamW step: gradient, master weight and both moments in f32, and the weight written in 16 bits.
const UPDATE_BYTES: f64 = 4.0 + 3.0 * 8.0 + 2.0;
/// Bytes per parameter of AdamW by PyTorch's `foreach` kernels, one operation after the other: decay of the weight (8), the first
/// moment's mean (12), decay (8) and mean (12) of the second, its root (8), its correction (8), epsilon (8), the step (16), and the
/// weight in 16 bits (6).
const FOREACH_UPDATE_BYTES: f64 = 8.0 + 12.0 + 8.0 + 12.0 + 8.0 + 8.0 + 8.0 + 16.0 + 6.0;
/// Bytes per parameter of FSDP's gather in the forward, and in the backward: another gather (2), the gradient's copy into the flat buffer
/// (4), its cast to f32 (6), its division by the ranks (8), and the reduce-scatter's read and write (8). A fit to llm-foundry's runs
/// alone gives 30 for both.
const FSDP_UNIT_BYTES: [f64; 2] = [2.0, 2.0 + 4.0 + 6.0 + 8.0 + 8.0];
/// Bytes per attention score in a forward: mask and softmax, then dropout with its mask, each read and written.
pub(crate) const SCORE_BYTES_FORWARD: f64 = 4.0 + 5.0;
/// Bytes per attention score in a backward, which reads the output of the softmax as well.
pub(crate) const SCORE_BYTES_BACKWARD: f64 = 6.0 + 5.0;

/// Time from the host's read of the dispatch counts until it is as far ahead of the device as before: fitted to dropless Mixtral 8x7B in
/// Megatron-LM.
const COUNTS_WAIT_S: f64 = 2e-3;

impl SystemTraits {
    /// Returns the memory passes of the task `name` relative to a fused kernel: [`SystemTraits::passes`], times the factor of composed kernels.
    ///
    /// In units of a 16-bit tensor (f32 is two): RMSNorm in f32 (PyTorch has a kernel for it from 2.8 on) has cast (3), square (4), mean
    /// (2), product with the root (4), cast back (3) and product with the weight (2), 18 units instead of 2; its backward about 36
    /// instead of 6. Rotary embeddings in f32 have cast (3), product (4) and cast back (3), 10 instead of 2, both ways. SwiGLU has SiLU
    /// (2) and a product (3), 5 instead of 3; its backward 9 instead of 5.
    pub(crate) fn passes_of(&self, name: &str, is_backward: bool) -> f64 {
        let composed = match name {
            _ if !self.composes => [1.0; 2],
            "RMSNorm" => [18.0 / 2.0, 36.0 / 6.0],
            "RoPE" => [10.0 / 2.0; 2],
            "SwiGLU" | "GeGLU" => [5.0 / 3.0, 9.0 / 5.0],
            _ => [1.0; 2],
        };
        let way = usize::from(is_backward);
        self.passes[way] * composed[way]
    }

    /// Returns the bytes of activations that a system without a ledger saves in a unit. Selective recomputation saves everything but the
    /// attention scores.
    pub(crate) fn saved_bytes(&self, work: &ModelWork, unit: usize, recompute: Recompute) -> u64 {
        let is_block = unit > 0 && unit + 1 < work.units();
        let extent = match recompute {
            Recompute::Full if is_block => SavedExtent::InputAlone,
            Recompute::Selective if is_block => SavedExtent::WithoutScores,
            _ if !self.unfused_attention => SavedExtent::WithoutScores,
            _ => SavedExtent::Everything,
        };
        work.unit(unit).kept.bytes(extent, work.dtype)
    }

    /// Returns a predicate of the tasks that a backward repeats; `None` if it repeats the operations whose outputs it reads, as
    /// Lockstep does. Other systems repeat the whole forward, or attention alone where its scores are written to memory.
    pub(crate) fn repeats(&self, recompute: Recompute) -> Option<fn(&Task) -> bool> {
        match recompute {
            Recompute::Selective if self.unfused_attention => {
                Some(|task| matches!(task.kind, TaskKind::Attention(_)))
            }
            Recompute::Full if !self.has_ledger => Some(|_| true),
            _ => None,
        }
    }

    /// Returns the bytes of state per element if kernels read weights of `dtype`.
    pub const fn state_bytes(&self, dtype: DType) -> StateBytes {
        match dtype {
            DType::F32 => StateBytes::ADAM_F32,
            _ => self.state,
        }
    }
}

impl Software {
    /// Returns the implementation choices of the system.
    pub const fn traits(self) -> SystemTraits {
        let lockstep = SystemTraits {
            unfused_attention: false,
            separate_accumulation: false,
            overlaps_reductions: true,
            overlaps_sends: true,
            slices_messages: false,
            overlaps_gathers: true,
            gathers_again_beside: false,
            gathers_of_a_unit: 1.0,
            gather_efficiency: 1.0,
            passes: [1.0; 2],
            composes: false,
            gathers_for_experts: false,
            counts_wait_s: COUNTS_WAIT_S,
            attention: [1.0; 2],
            unit_bytes: [0.0; 2],
            update_bytes: UPDATE_BYTES,
            state: StateBytes::MIXED_ADAM_F32_GRADIENTS,
            has_ledger: true,
            dropout: 0.0,
        };
        let other = SystemTraits { has_ledger: false, ..lockstep };
        match self {
            Self::Lockstep => lockstep,
            Self::MegatronCore => SystemTraits { gathers_for_experts: true, ..other },
            Self::Megatron => SystemTraits {
                unfused_attention: true,
                separate_accumulation: true,
                overlaps_reductions: false,
                overlaps_sends: false,
                gathers_again_beside: true,
                slices_messages: true,
                dropout: 0.1,
                ..other
            },
            Self::Fsdp => SystemTraits {
                passes: [1.0, 4.0],
                composes: true,
                unit_bytes: FSDP_UNIT_BYTES,
                update_bytes: FOREACH_UPDATE_BYTES,
                ..other
            },
            Self::LlmFoundry => SystemTraits { attention: [1.0, 0.385], ..Self::Fsdp.traits() },
            Self::DeepSpeed => SystemTraits {
                unfused_attention: true,
                separate_accumulation: true,
                overlaps_gathers: false,
                gathers_of_a_unit: 7.0,
                gather_efficiency: 0.143,
                state: StateBytes::MIXED_ADAM,
                dropout: 0.1,
                ..other
            },
        }
    }
}
