//! The keys whose value is one of a list of words: an enum for each, and what it is to those that act by it.
//!
//! A planned word stands under `later` and is refused by name.

use std::{fs, io};

use lockstep_plan::gathering::ReshardAfterForward;
use lockstep_plan::schedule::Kind;
use lockstep_plan::{ContextMethod, Feedback, PassOrder, QuantizedType, Residence, TensorDimensions};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::value::{Misfit, Readable, ValueType, wrong_type};

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

/// Reads types of plans, whose form in plan files is the word that a key takes.
macro_rules! words_of_plans {
    ($($Type:ty: $($word:literal),+;)+) => { $(
        impl Readable for $Type {
            const TYPE: ValueType = ValueType::Choice { allowed: &[$($word),+], later: &[] };

            fn read(value: &Value) -> Result<Self, Misfit> {
                let is_word = value.as_str().is_some_and(|word| [$($word),+].contains(&word));
                let read = Self::deserialize(value).ok().filter(|_| is_word);
                read.ok_or_else(|| wrong_type::<Self>(value))
            }
        }
    )+ };
}

words_of_plans! {
    ContextMethod: "ring", "all_gather", "all_to_all";
    ReshardAfterForward: "always", "auto", "never";
    Residence: "none", "cpu", "disk";
    TensorDimensions: "1d", "2d";
}

/// The word of a plan's choice.
pub fn word_of<T: Serialize>(choice: &T) -> String {
    serde_json::to_value(choice).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

/// `none` for what is not quantized.
impl Readable for Option<QuantizedType> {
    const TYPE: ValueType = ValueType::Choice { allowed: &["none", "int8", "int4"], later: &[] };

    fn read(value: &Value) -> Result<Self, Misfit> {
        match value.as_str() {
            Some("none") => Ok(None),
            Some("int8") => Ok(Some(QuantizedType::Int8)),
            Some("int4") => Ok(Some(QuantizedType::Int4)),
            _ => Err(wrong_type::<Self>(value)),
        }
    }

    fn to_value(&self) -> Value {
        self.map_or("none", QuantizedType::name).into()
    }
}

/// Whether residuals are kept.
impl Readable for Feedback {
    const TYPE: ValueType = ValueType::Flag;

    fn read(value: &Value) -> Result<Self, Misfit> {
        let is_kept = value.as_bool().ok_or_else(|| wrong_type::<Self>(value))?;
        Ok(if is_kept { Self::Kept } else { Self::Dropped })
    }

    fn to_value(&self) -> Value {
        (*self == Self::Kept).into()
    }
}

/// The name of a published schedule, a CSV file, or its rows with a line break after each.
impl Readable for PassOrder {
    const TYPE: ValueType = ValueType::Text;

    fn read(value: &Value) -> Result<Self, Misfit> {
        let name = value.as_str().ok_or_else(|| wrong_type::<Self>(value))?;
        named_passes(name).map_err(|error| Misfit {
            what: format!("\"{name}\" is no schedule, and as a file it cannot be read: {error}"),
            allowed: format!("{}, or a CSV file", Kind::ALL.map(Kind::name).join(", ")),
        })
    }

    fn to_value(&self) -> Value {
        match self {
            Self::Published(kind) => kind.name().into(),
            Self::Rows(rows) => rows.iter().map(|row| format!("{row}\n")).collect::<String>().into(),
        }
    }
}

/// The order of passes that a word names: a published schedule's; else that of the CSV file of this name, or of the rows that it is itself, each
/// with a line break.
///
/// # Errors
/// If the file cannot be read.
pub fn named_passes(name: &str) -> io::Result<PassOrder> {
    if let Some(kind) = Kind::from_name(name) {
        return Ok(PassOrder::Published(kind));
    }
    let rows = |text: &str| PassOrder::Rows(text.lines().map(str::to_owned).collect());
    if name.contains('\n') { Ok(rows(name)) } else { fs::read_to_string(name).map(|text| rows(&text)) }
}
