//! The keys whose value is one of a list of words: an enum for each, and what it is to those that act by it.
//!
//! A planned word stands under `later` and is refused by name.

use lockstep_plan::QuantizedType;
use serde::Serialize;
use serde_json::Value;

use super::value::{Misfit, Readable, ValueType, wrong_type};

/// Declares an enum whose variants are the words a key takes, with the words that are planned.
macro_rules! choices {
    ($(
        $(#[doc = $doc:literal])+
        $name:ident { $( $(#[doc = $variant_doc:literal])+ $variant:ident = $word:literal, )+ }
        later [$($later:literal),*]
    )+) => { $(
        $(#[doc = $doc])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
        pub enum $name { $( $(#[doc = $variant_doc])+ #[serde(rename = $word)] $variant, )+ }

        impl $name {
            /// The word that stands for it in RUN.toml.
            pub const fn word(self) -> &'static str {
                match self { $( Self::$variant => $word, )+ }
            }
        }

        impl Readable for $name {
            const TYPE: ValueType = ValueType::Choice { allowed: &[$($word),+], later: &[$($later),*] };

            fn read(value: &Value) -> Result<Self, Misfit> {
                match value.as_str() {
                    $( Some($word) => Ok(Self::$variant), )+
                    Some(word) if [$($later),*].contains(&word) => Err(Misfit {
                        what: format!("\"{word}\" is not supported yet"),
                        allowed: Self::TYPE.to_string(),
                    }),
                    _ => Err(wrong_type::<Self>(value)),
                }
            }
        }
    )+ };
}

choices! {
    /// How training files are read.
    DataFormat {
        /// By file name: `.jsonl` and `.ndjson` are JSON lines, a `.bin` is `indexed` if its `.idx` lies beside it and
        /// `tokens` otherwise, everything else is text.
        Auto = "auto",
        /// UTF-8 text.
        Text = "text",
        /// One JSON object a line.
        JsonLines = "jsonl",
        /// A table, of which a column holds the text.
        Parquet = "parquet",
        /// Megatron's indexed data sets: a `.bin` with its `.idx`.
        Indexed = "indexed",
        /// Files of token ids and nothing else.
        Tokens = "tokens",
    } later []

    /// The type of the ids in raw token files.
    TokenType {
        /// Two bytes.
        U16 = "u16",
        /// Four bytes.
        U32 = "u32",
    } later []

    /// How documents are laid into sequences.
    DataPacking {
        /// One after another, cut anywhere; a token sees what comes before it, of whatever document.
        Stream = "stream",
        /// As `stream`, but a token sees its own document only.
        Documents = "documents",
        /// As `documents`, and cut only if longer than a sequence.
        WholeDocuments = "whole_documents",
    } later []

    /// In which order samples are drawn.
    DataOrder {
        /// A new permutation each epoch, a function of the seed.
        Shuffle = "shuffle",
        /// Consecutive windows of the corpus.
        Sequential = "sequential",
    } later []

    /// The type of activations and of the weights that kernels read.
    Precision {
        /// 32-bit floats throughout.
        F32 = "f32",
        /// bfloat16 with f32 master weights and f32 gradients.
        BF16 = "bf16",
        /// Half precision with f32 master weights, f32 gradients and a scaled loss.
        F16 = "f16",
    } later []

    /// How f32 matrices are multiplied on a CPU with AMX.
    F32Products {
        /// By bf16 tiles: each operand in three parts, six products summed in f32, no less exact than FMA.
        Split = "split",
        /// By vector FMA, as on every other CPU.
        Fma = "fma",
    } later []

    /// The rule that turns gradients into updates.
    OptimizerKind {
        /// Adam with decoupled weight decay.
        AdamW = "adamw",
        /// Gradient descent with momentum.
        Sgd = "sgd",
        /// The sign of an average of gradients.
        Lion = "lion",
        /// Muon for the matrices of the blocks, AdamW for the rest.
        Muon = "muon",
    } later ["onebit_adam"]

    /// How Muon's step size follows from the shape of a matrix.
    MuonScale {
        /// Updates as large as AdamW's.
        MatchAdamW = "match_adamw",
        /// As in Jordan's own.
        Original = "original",
    } later []

    /// The type in which moments and momentum are kept.
    StatePrecision {
        /// 32-bit floats.
        F32 = "f32",
        /// bfloat16.
        BF16 = "bf16",
    } later []

    /// How weights and state that are kept in bf16 are rounded.
    Rounding {
        /// To the nearest number.
        Nearest = "nearest",
        /// Up or down at random, so that small changes add up.
        Stochastic = "stochastic",
    } later []

    /// How the learning rate falls after the warm-up.
    ScheduleKind {
        /// Not at all.
        Constant = "constant",
        /// In a straight line.
        Linear = "linear",
        /// Along half a cosine.
        Cosine = "cosine",
        /// Late: warm-up, a long stable phase, then down with 1 - sqrt.
        WarmupStableDecay = "wsd",
    } later []

    /// How the learning rate grows with the global batch.
    LearningRateScaling {
        /// Not at all.
        None = "none",
        /// With the batch (Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.1).
        Linear = "linear",
        /// With its square root (Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms").
        Sqrt = "sqrt",
    } later []

    /// How strongly an adapter acts.
    Scaling {
        /// `alpha / rank`.
        Standard = "standard",
        /// `alpha / sqrt(rank)`.
        RankStabilized = "rank_stabilized",
    } later []

    /// In what weights go between the ranks that share them out.
    QuantizedWeights {
        /// As kernels read them.
        None = "none",
        /// As codes of a byte, with a scale for each 256.
        Int8 = "int8",
    } later []

    /// In what gradients go between the ranks that share out the model's state.
    QuantizedGradients {
        /// As f32.
        None = "none",
        /// As codes of a byte, with a scale for each 256.
        Int8 = "int8",
        /// As codes of half a byte, with a scale for each 256.
        Int4 = "int4",
    } later []

    /// Where model state is kept.
    Residence {
        /// Where it is used.
        None = "none",
        /// In the memory of the machine.
        Cpu = "cpu",
        /// In a file.
        Disk = "disk",
    } later []

    /// How files of offloaded state are read and written.
    OffloadIo {
        /// As the system can.
        Auto = "auto",
        /// By io_uring.
        IoUring = "io_uring",
        /// By threads.
        Threads = "threads",
    } later []

    /// How ranks reach each other.
    Transport {
        /// By shared memory on one machine, by TCP between machines and where another launcher has started them.
        Auto = "auto",
        /// By shared memory, on one machine.
        Shared = "shared",
        /// By TCP.
        Tcp = "tcp",
        /// By MPI, in a program that was built with the feature `mpi` and started by `mpirun`. Its sums have bits of their own.
        Mpi = "mpi",
    } later ["nccl"]

    /// How ranks share linear layers.
    TensorLayout {
        /// As a row.
        OneDimension = "1d",
        /// As a square.
        TwoDimensions = "2d",
    } later []

    /// How attention reaches the tokens that other ranks hold.
    ContextMethod {
        /// Keys and values go round.
        Ring = "ring",
        /// Keys and values are gathered.
        AllGather = "all_gather",
        /// Tokens are exchanged for heads.
        AllToAll = "all_to_all",
    } later []

    /// What happens to the gathered weights of a unit after its forward.
    ReshardAfterForward {
        /// They are dropped, but for those that the backward begins with.
        Always = "always",
        /// Those stay for which there is room.
        Auto = "auto",
        /// They stay, and there is room for all.
        Never = "never",
    } later []

    /// How gradients are summed over a network.
    AllReduce {
        /// In the order of a fixed tree, as shared memory does: the same bits by every way.
        Tree = "tree",
        /// Around a ring.
        Ring = "ring",
        /// By recursive doubling.
        RecursiveDoubling = "recursive_doubling",
        /// By recursive halving and doubling.
        Rabenseifner = "rabenseifner",
    } later []
}

impl From<lockstep_plan::Residence> for Residence {
    fn from(residence: lockstep_plan::Residence) -> Self {
        match residence {
            lockstep_plan::Residence::Memory => Self::None,
            lockstep_plan::Residence::Host => Self::Cpu,
            lockstep_plan::Residence::Disk => Self::Disk,
        }
    }
}

impl From<Residence> for lockstep_plan::Residence {
    fn from(residence: Residence) -> Self {
        match residence {
            Residence::None => Self::Memory,
            Residence::Cpu => Self::Host,
            Residence::Disk => Self::Disk,
        }
    }
}

impl From<OffloadIo> for lockstep_tensor::DiskMethod {
    fn from(io: OffloadIo) -> Self {
        match io {
            OffloadIo::Auto => Self::Auto,
            OffloadIo::IoUring => Self::IoUring,
            OffloadIo::Threads => Self::Threads,
        }
    }
}

impl From<Transport> for lockstep_comm::Way {
    fn from(transport: Transport) -> Self {
        match transport {
            Transport::Auto => Self::Auto,
            Transport::Shared => Self::SharedMemory,
            Transport::Tcp => Self::Tcp,
            Transport::Mpi => Self::Mpi,
        }
    }
}

impl From<AllReduce> for lockstep_comm::Algorithm {
    fn from(all_reduce: AllReduce) -> Self {
        match all_reduce {
            AllReduce::Tree => Self::Tree,
            AllReduce::Ring => Self::Ring,
            AllReduce::RecursiveDoubling => Self::RecursiveDoubling,
            AllReduce::Rabenseifner => Self::Rabenseifner,
        }
    }
}

impl From<QuantizedWeights> for Option<QuantizedType> {
    fn from(weights: QuantizedWeights) -> Self {
        match weights {
            QuantizedWeights::None => None,
            QuantizedWeights::Int8 => Some(QuantizedType::Int8),
        }
    }
}

impl From<QuantizedGradients> for Option<QuantizedType> {
    fn from(gradients: QuantizedGradients) -> Self {
        match gradients {
            QuantizedGradients::None => None,
            QuantizedGradients::Int8 => Some(QuantizedType::Int8),
            QuantizedGradients::Int4 => Some(QuantizedType::Int4),
        }
    }
}

impl From<TensorLayout> for lockstep_plan::TensorDimensions {
    fn from(layout: TensorLayout) -> Self {
        match layout {
            TensorLayout::OneDimension => Self::One,
            TensorLayout::TwoDimensions => Self::Two,
        }
    }
}

impl From<lockstep_plan::TensorDimensions> for TensorLayout {
    fn from(dimensions: lockstep_plan::TensorDimensions) -> Self {
        match dimensions {
            lockstep_plan::TensorDimensions::One => Self::OneDimension,
            lockstep_plan::TensorDimensions::Two => Self::TwoDimensions,
        }
    }
}

impl From<ReshardAfterForward> for lockstep_plan::gathering::ReshardAfterForward {
    fn from(reshard: ReshardAfterForward) -> Self {
        match reshard {
            ReshardAfterForward::Always => Self::Always,
            ReshardAfterForward::Auto => Self::Auto,
            ReshardAfterForward::Never => Self::Never,
        }
    }
}

impl From<lockstep_plan::gathering::ReshardAfterForward> for ReshardAfterForward {
    fn from(reshard: lockstep_plan::gathering::ReshardAfterForward) -> Self {
        use lockstep_plan::gathering::ReshardAfterForward as Planned;
        match reshard {
            Planned::Always => Self::Always,
            Planned::Auto => Self::Auto,
            Planned::Never => Self::Never,
        }
    }
}

impl From<ContextMethod> for lockstep_plan::ContextMethod {
    fn from(method: ContextMethod) -> Self {
        match method {
            ContextMethod::Ring => Self::Ring,
            ContextMethod::AllGather => Self::AllGather,
            ContextMethod::AllToAll => Self::AllToAll,
        }
    }
}

impl From<lockstep_plan::ContextMethod> for ContextMethod {
    fn from(method: lockstep_plan::ContextMethod) -> Self {
        match method {
            lockstep_plan::ContextMethod::Ring => Self::Ring,
            lockstep_plan::ContextMethod::AllGather => Self::AllGather,
            lockstep_plan::ContextMethod::AllToAll => Self::AllToAll,
        }
    }
}
