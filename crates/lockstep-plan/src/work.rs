//! Work of a rank for one micro-batch, unit by unit, as recorded from the model: GEMMs with their shapes, attention, memory-bound
//! kernels, and exchanges with other ranks.
//!
//! It is independent of the machine. `lockstep-planner` predicts the time of a [`Task`] on a device and
//! that of an [`Exchange`] on a cluster.

use std::collections::BTreeSet;

use crate::DType;

/// A GEMM, or several of the same shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Product {
    /// Rows of the result.
    pub rows: u64,
    /// Inner dimension: elements that each element of the result is summed over.
    pub inner: u64,
    /// Columns of the result.
    pub columns: u64,
    /// Number of GEMMs: one per local expert, or per step of a 2D layout; otherwise 1.
    pub count: u64,
}

impl Product {
    /// Returns the floating-point operations, 2 per multiply-add.
    pub const fn flops(&self) -> u64 {
        2 * self.rows * self.inner * self.columns * self.count
    }
}

/// Attention, or its gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Attention {
    /// Floating-point operations over the causal half (or the window), as model FLOPs count them: two products in the forward, four in
    /// the backward. Recomputed scores would be a fifth product, which is not counted.
    pub flops: u64,
    /// Number of scores of all local heads: heads x queries x keys, masked ones included.
    pub scores: u64,
    /// Elements of an attention head.
    pub head_dim: u64,
}

/// Group of ranks that take part in an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Peers {
    /// Ranks of the tensor-parallel group.
    Tensor,
    /// Row or column of the square in a 2D tensor layout.
    TensorLine,
    /// Ranks of the context-parallel group.
    Context,
    /// Tensor- and context-parallel groups together, whose ranks have different tokens of the same sequences.
    TensorAndContext,
    /// Expert-parallel group, including the tensor-parallel ranks of each expert.
    Expert,
    /// Data-parallel ranks, which run the same program on other samples.
    Replicas,
}

/// Kind of collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Every rank gets the sum of all operands.
    AllReduce,
    /// Every rank gets the operands of all ranks.
    AllGather,
    /// Every rank gets its shard of the sum of all operands.
    ReduceScatter,
    /// Every rank sends a part of its operand to each rank.
    AllToAll,
    /// Every rank gets the operand of one rank.
    Broadcast,
    /// One rank gets the sum of all operands.
    Reduce,
    /// Blocks travel round a ring until every rank has had all of them: one step less than there are ranks.
    Ring,
    /// One step of a ring.
    Shift,
}

/// A collective inside a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Exchange {
    /// Group of ranks that take part.
    pub peers: Peers,
    /// Kind of collective.
    pub collective: Collective,
    /// Size in bytes, as nccl-tests count it. It is the operand before an all-reduce, reduce, reduce-scatter or all-to-all; the result
    /// after an all-gather or broadcast; and the block that each rank sends in one step of a ring.
    pub bytes: u64,
    /// True if it overlaps with the GEMMs or attention that need or make its value: those after an all-gather or a ring, those before a
    /// reduction.
    pub is_overlapped: bool,
    /// True if the host needs the result before it can launch what follows, such as the number of rows of a token dispatch. A device that
    /// is fed ahead of time idles until then.
    pub is_for_host: bool,
}

/// Kind of work of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TaskKind {
    /// One or several GEMMs.
    Product(Product),
    /// Attention or its gradients.
    Attention(Attention),
    /// A memory-bound kernel: norms, activation functions, sums, copies.
    Stream,
    /// Collective with other ranks.
    Exchange(Exchange),
}

/// Part of a step that a task belongs to, or an operation of the model while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pass {
    /// Forward pass of the unit.
    Forward,
    /// Recomputation in the backward of values that the forward did not save.
    Recompute,
    /// Input gradients in the backward.
    BackwardInputs,
    /// Weight gradients in the backward.
    BackwardWeights,
}

impl Pass {
    /// Returns the name in traces.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Recompute => "recompute",
            Self::BackwardInputs => "backward inputs",
            Self::BackwardWeights => "backward weights",
        }
    }
}

/// A task: one kernel or exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Task {
    /// Kind of operation, as in traces: `linear`, `RMSNorm`.
    pub name: &'static str,
    /// Part of the step.
    pub pass: Pass,
    /// Kind of work.
    pub kind: TaskKind,
    /// Bytes of all operands, counted once per necessary read or write; 0 for an exchange.
    pub bytes: u64,
    /// Floating-point operations outside GEMMs.
    pub vector_flops: u64,
}

/// Saved activations of a unit in a framework without a memory plan. It saves every value that some gradient needs, each once (the count
/// of Korthikanti et al. 2022, section 4). Lockstep's own bytes are those of [`UnitProfile`](crate::UnitProfile).
///
/// For a GPT-2 block with dropout, in 16 bits, with `s b h` elements between blocks, `a` heads and `t` tensor-parallel ranks:
///
/// ```text
///                         alone              t ranks                     t ranks, sequence parallel
/// Everything       34 sbh + 5 a s² b   (10 + 24/t) sbh + 5 a s² b / t   (34 sbh + 5 a s² b) / t
/// WithoutScores    34 sbh              (10 + 24/t) sbh                   34 sbh / t
/// InputAlone        2 sbh                2 sbh                            2 sbh / t
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Kept {
    /// Bytes of saved values in the dtype of the model.
    pub value_bytes: u64,
    /// Elements with dropout: each has a mask of one byte.
    pub dropped: u64,
    /// Attention scores of all local heads.
    pub scores: u64,
    /// Attention scores with dropout.
    pub dropped_scores: u64,
    /// Local logits of all tokens; losses are computed from them in f32.
    pub logits: u64,
    /// Bytes of the unit's input.
    pub input_bytes: u64,
}

/// Extent of saved activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SavedExtent {
    /// All saved activations.
    Everything,
    /// All but the attention scores: attention is recomputed (Korthikanti's selective recomputation), or fused so that scores are never
    /// written.
    WithoutScores,
    /// Only the unit's input: everything is recomputed.
    InputAlone,
}

impl Kept {
    /// Returns the bytes of saved activations of a model with values of `dtype`.
    pub const fn bytes(&self, keeping: SavedExtent, dtype: DType) -> u64 {
        let values = self.value_bytes + self.dropped + self.logits * DType::F32.size_bytes() as u64;
        match keeping {
            // The softmax, its output after dropout, and a mask of one byte per element.
            SavedExtent::Everything => {
                let element = dtype.size_bytes() as u64;
                values + self.scores * element + self.dropped_scores * (element + 1)
            }
            SavedExtent::WithoutScores => values,
            SavedExtent::InputAlone => self.input_bytes,
        }
    }
}

/// Work of one unit (the embedding, a block, or the head) for one micro-batch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnitWork {
    /// Tasks of the forward, in order. The forward of a training step omits a loss: its backward computes it.
    pub forward: Vec<Task>,
    /// Tasks of a whole backward, recomputation included.
    pub backward: Vec<Task>,
    /// Tasks of the first half of a split backward, recomputation included.
    pub backward_inputs: Vec<Task>,
    /// Tasks of the second half of a split backward.
    pub backward_weights: Vec<Task>,
    /// Saved activations without recomputation in frameworks other than Lockstep.
    pub kept: Kept,
    /// Elements of parameters on this rank. A quantized matrix counts as the elements that take as many bytes as its blocks.
    pub parameter_elements: u64,
    /// Elements of expert parameters among them, which are reduced over a smaller group.
    pub expert_elements: u64,
    /// Trained elements among `parameter_elements`.
    pub trained_elements: u64,
    /// Trained elements among `expert_elements`.
    pub trained_expert_elements: u64,
}

/// Elements of a unit's parameters on a rank: `[dense, experts]`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct UnitElements {
    /// All elements, which have weights.
    pub all: [f64; 2],
    /// Trained elements, which also have gradients and optimizer state.
    pub trained: [f64; 2],
}

impl UnitElements {
    /// Returns the elements minus those of `other`, at least 0.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        let rest = |[dense, experts]: [f64; 2], other: [f64; 2]| {
            [f64::max(dense - other[0], 0.0), f64::max(experts - other[1], 0.0)]
        };
        Self { all: rest(self.all, other.all), trained: rest(self.trained, other.trained) }
    }

    /// Returns the elements that are not trained.
    pub fn frozen(&self) -> [f64; 2] {
        let [dense, experts] = self.all;
        [dense - self.trained[0], experts - self.trained[1]]
    }
}

impl std::ops::AddAssign for UnitElements {
    fn add_assign(&mut self, other: Self) {
        for (sum, more) in [(&mut self.all, other.all), (&mut self.trained, other.trained)] {
            sum[0] += more[0];
            sum[1] += more[1];
        }
    }
}

impl UnitWork {
    /// Returns the elements of the unit's parameters.
    pub fn elements(&self) -> UnitElements {
        let split = |elements: u64, of_experts: u64| [(elements - of_experts) as f64, of_experts as f64];
        UnitElements {
            all: split(self.parameter_elements, self.expert_elements),
            trained: split(self.trained_elements, self.trained_expert_elements),
        }
    }
}

/// Work of a model on one rank of its tensor-, context- and expert-parallel groups.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelWork {
    /// Units that differ from each other.
    pub distinct: Vec<UnitWork>,
    /// Index in `distinct` of each unit, from the embedding to the head.
    pub of_unit: Vec<usize>,
    /// Dtype of weights and values.
    pub dtype: DType,
    /// Bytes of a value between two units on this rank.
    pub boundary_bytes: u64,
    /// True if tensor-parallel ranks have equal values between units, so that each may send a slice.
    pub is_boundary_whole: bool,
    /// Model FLOPs of a forward and a backward of a micro-batch, summed over the ranks of the model, without recomputation.
    pub training_flops: u64,
    /// Attention's part of `training_flops`. It counts the causal half; papers that count all scores (Narayanan et al. 2021, Korthikanti
    /// et al. 2022) use [`ModelWork::dense_training_flops`].
    pub attention_flops: u64,
}

impl ModelWork {
    /// Returns the work of a unit.
    pub fn unit(&self, unit: usize) -> &UnitWork {
        &self.distinct[self.of_unit[unit]]
    }

    /// Adds a recomputation of some forward tasks to the start of every block's backward: of attention for selective recomputation
    /// (Korthikanti et al. 2022, section 5), of all tasks for systems that call the block's forward again.
    pub fn repeat(&mut self, is_repeated: impl Fn(&Task) -> bool) {
        let blocks: BTreeSet<usize> =
            self.of_unit.iter().copied().take(self.units().saturating_sub(1)).skip(1).collect();
        for block in blocks {
            let unit = &mut self.distinct[block];
            let again = |task: &Task| Task { pass: Pass::Recompute, ..*task };
            let repeated: Vec<Task> =
                unit.forward.iter().filter(|task| is_repeated(task)).map(again).collect();
            unit.backward.splice(0..0, repeated.iter().copied());
            unit.backward_inputs.splice(0..0, repeated);
        }
    }

    /// Returns the number of units.
    pub fn units(&self) -> usize {
        self.of_unit.len()
    }

    /// Returns [`ModelWork::training_flops`] with all attention scores, masked ones included; only for models without windows.
    pub const fn dense_training_flops(&self) -> u64 {
        self.training_flops.saturating_add(self.attention_flops)
    }
}
