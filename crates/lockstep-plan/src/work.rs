//! What a rank has to do for a micro-batch, unit by unit, as recording the model finds it: matrix products with their shapes, attention,
//! passes over memory, and exchanges with other ranks.
//!
//! Nothing here knows a machine. A device of a cluster says how long a [`Task`] takes, a
//! cluster how long an [`Exchange`].

use std::collections::BTreeSet;

use crate::DType;

/// A matrix product, or several of the same shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Product {
    /// Rows of the result.
    pub rows: u64,
    /// Elements that each element of the result is summed over.
    pub inner: u64,
    /// Columns of the result.
    pub columns: u64,
    /// How many there are: one for each expert that is here, or for each step of ranks that make a square, else 1.
    pub count: u64,
}

impl Product {
    /// Floating-point operations, 2 per multiply-add.
    pub const fn flops(&self) -> u64 {
        2 * self.rows * self.inner * self.columns * self.count
    }
}

/// Attention, or one of its gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Attention {
    /// Floating-point operations of its products over the causal half (or the window), as the model's FLOPs count them: two products
    /// forward, and four for the gradients. Where scores are not kept, computing them again is a
    /// fifth product beside these four.
    pub flops: u64,
    /// Elements of the square of scores of all heads that are here: heads x queries x keys, whatever is masked.
    pub scores: u64,
    /// Elements of a head.
    pub head_dim: u64,
}

/// Which ranks exchange something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Peers {
    /// Those that share the matrices of a block.
    Tensor,
    /// Those of a row or column of the square that the tensor axis makes in two dimensions.
    TensorLine,
    /// Those that share each sequence.
    Context,
    /// Those of the tensor and the context axis together, which have other tokens of the same sequences.
    TensorAndContext,
    /// Those that share out the experts and, where each is cut, their parts: both axes of experts together.
    Expert,
}

/// What they do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Every rank gets the sum of all.
    AllReduce,
    /// Every rank gets what each has.
    AllGather,
    /// Every rank gets its part of the sum of all.
    ReduceScatter,
    /// Every rank sends a part to each.
    AllToAll,
    /// Every rank gets what one has.
    Broadcast,
    /// One rank gets the sum of all.
    Reduce,
    /// Every rank sends to its neighbour what it had from the other one, and so on until all have been everywhere: a step less than
    /// there are ranks.
    Ring,
    /// One such step.
    Shift,
}

/// Values that go between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Exchange {
    /// Between which.
    pub peers: Peers,
    /// How.
    pub collective: Collective,
    /// Bytes of the whole, as nccl-tests counts them: of what each rank has before an all-reduce, a reduce, a reduce-scatter or an
    /// all-to-all, after an all-gather or a broadcast, and of what each sends in one step of a ring.
    pub bytes: u64,
    /// Whether it goes on beside the products or the attention that need or make it: the tasks after an all-gather or a ring, those
    /// before a sum.
    pub is_beside: bool,
    /// Whether the host has to know what has come before it can start what follows: how many rows the ranks will send each other. A device
    /// whose work the host starts ahead of it has nothing to do until then.
    pub is_for_host: bool,
}

/// What kind of work a task is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Labor {
    /// A matrix product.
    Product(Product),
    /// Attention.
    Attention(Attention),
    /// Norms, activation functions, sums, copies: whatever goes through memory.
    Stream,
    /// An exchange.
    Exchange(Exchange),
}

/// Which part of a step a task belongs to, or an operation of the model when it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pass {
    /// The forward.
    Forward,
    /// The backward, computing again what the forward did not save.
    Recompute,
    /// The backward: gradients of values.
    BackwardInputs,
    /// The backward: gradients of weights.
    BackwardWeights,
}

impl Pass {
    /// In words, as traces have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Recompute => "recompute",
            Self::BackwardInputs => "backward inputs",
            Self::BackwardWeights => "backward weights",
        }
    }
}

/// One thing to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Task {
    /// The kind of operation, as traces call it: `linear`, `RMSNorm`.
    pub name: &'static str,
    /// When.
    pub pass: Pass,
    /// Of which kind.
    pub labor: Labor,
    /// Bytes of every operand, once for each time that it must be read or written; 0 of an exchange.
    pub bytes: u64,
    /// Floating-point operations beside products.
    pub vector_flops: u64,
}

/// What an implementation keeps from a forward to its backward that saves every value which some gradient needs, each once, as
/// frameworks without a plan do (the count of Korthikanti et al. 2022, section 4). Lockstep's own bytes are those of
/// [`UnitProfile`](crate::UnitProfile).
///
/// Of a block of GPT-2 with dropout, in 16 bits, `s b h` elements between blocks, `a` heads and `t` tensor-parallel ranks:
///
/// ```text
///                         alone              t ranks                     t ranks, sequence parallel
/// Everything       34 sbh + 5 a s² b   (10 + 24/t) sbh + 5 a s² b / t   (34 sbh + 5 a s² b) / t
/// WithoutScores    34 sbh              (10 + 24/t) sbh                   34 sbh / t
/// InputAlone        2 sbh                2 sbh                            2 sbh / t
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Kept {
    /// Bytes of values, in the type of the model.
    pub value_bytes: u64,
    /// Elements of values that some are dropped of: a byte each says which.
    pub dropped: u64,
    /// Elements of the square of scores, of all heads that are here.
    pub scores: u64,
    /// Those of them that some are dropped of.
    pub dropped_scores: u64,
    /// Elements of logits that are here, of all tokens: losses are computed from them in f32.
    pub logits: u64,
    /// Bytes of the unit's input.
    pub input_bytes: u64,
}

/// What of this is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Keeping {
    /// All of it.
    Everything,
    /// All but attention's scores: attention is computed again (Korthikanti's selective recomputation), or by a kernel that never
    /// writes them.
    WithoutScores,
    /// The unit's input: everything is computed again.
    InputAlone,
}

impl Kept {
    /// Bytes, of a model with values of `dtype`.
    pub const fn bytes(&self, keeping: Keeping, dtype: DType) -> u64 {
        let values = self.value_bytes + self.dropped + self.logits * DType::F32.size_bytes() as u64;
        match keeping {
            // The softmax; what is left of it, and a byte for each element that says whether it is.
            Keeping::Everything => {
                let element = dtype.size_bytes() as u64;
                values + self.scores * element + self.dropped_scores * (element + 1)
            }
            Keeping::WithoutScores => values,
            Keeping::InputAlone => self.input_bytes,
        }
    }
}

/// The work of one unit for one micro-batch: the embedding, a block, or the head.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnitWork {
    /// In the order in which it is done. A loss is left out of the forward of a training step: its backward computes it.
    pub forward: Vec<Task>,
    /// Of a backward in one piece, with what is computed again.
    pub backward: Vec<Task>,
    /// Of the first half of a split backward, with what is computed again.
    pub backward_inputs: Vec<Task>,
    /// Of its second half.
    pub backward_weights: Vec<Task>,
    /// What others than Lockstep keep of it, if nothing is computed again.
    pub kept: Kept,
    /// Elements of parameters that are here.
    pub parameter_elements: u64,
    /// Of these, elements that are of experts: they are summed over fewer ranks.
    pub expert_elements: u64,
    /// Of `parameter_elements`, elements that are trained.
    pub trained_elements: u64,
    /// Of `expert_elements`, elements that are trained.
    pub trained_expert_elements: u64,
}

/// Elements of a unit's parameters on a rank: outside experts, and in them.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct UnitElements {
    /// All of them: weights.
    pub all: [f64; 2],
    /// Those that are trained: gradients and optimizer state.
    pub trained: [f64; 2],
}

impl UnitElements {
    /// The same without some of them.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        let rest = |[dense, experts]: [f64; 2], other: [f64; 2]| {
            [f64::max(dense - other[0], 0.0), f64::max(experts - other[1], 0.0)]
        };
        Self { all: rest(self.all, other.all), trained: rest(self.trained, other.trained) }
    }

    /// Those that are not trained.
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
    /// Elements of its parameters.
    pub fn elements(&self) -> UnitElements {
        let split = |elements: u64, of_experts: u64| [(elements - of_experts) as f64, of_experts as f64];
        UnitElements {
            all: split(self.parameter_elements, self.expert_elements),
            trained: split(self.trained_elements, self.trained_expert_elements),
        }
    }
}

/// The work of a model on one of the ranks that share it.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelWork {
    /// The units that differ.
    pub distinct: Vec<UnitWork>,
    /// Which of these each unit is, from the embedding to the head.
    pub of_unit: Vec<usize>,
    /// Type of weights and values.
    pub dtype: DType,
    /// Bytes of the value between two units that this rank has.
    pub boundary_bytes: u64,
    /// Whether there are several ranks on the tensor axis and all have the same value between units, so that each may send a slice of it.
    pub is_boundary_whole: bool,
    /// Floating-point operations of a forward and a backward of a micro-batch, of all ranks that share the model together, without
    /// what is computed again.
    pub training_flops: u64,
    /// Those of them that are attention's. They count the causal half; papers that count the whole square (Narayanan et al. 2021,
    /// Korthikanti et al. 2022) count [`ModelWork::dense_training_flops`].
    pub attention_flops: u64,
}

impl ModelWork {
    /// The work of a unit.
    pub fn unit(&self, unit: usize) -> &UnitWork {
        &self.distinct[self.of_unit[unit]]
    }

    /// Has the backward of every block do some tasks of its forward once more before anything else: attention where only scores are
    /// forgotten (Korthikanti et al. 2022, section 5), all of them where a system calls the block's forward again.
    pub fn repeat(&mut self, is_repeated: impl Fn(&Task) -> bool) {
        let blocks: BTreeSet<usize> = self.of_unit[1..self.units() - 1].iter().copied().collect();
        for block in blocks {
            let unit = &mut self.distinct[block];
            let again = |task: &Task| Task { pass: Pass::Recompute, ..*task };
            let repeated: Vec<Task> =
                unit.forward.iter().filter(|task| is_repeated(task)).map(again).collect();
            unit.backward.splice(0..0, repeated.iter().copied());
            unit.backward_inputs.splice(0..0, repeated);
        }
    }

    /// Number of units.
    pub fn units(&self) -> usize {
        self.of_unit.len()
    }

    /// [`ModelWork::training_flops`] with the whole square of scores, whatever is masked; of a model without windows.
    pub const fn dense_training_flops(&self) -> u64 {
        self.training_flops.saturating_add(self.attention_flops)
    }
}
