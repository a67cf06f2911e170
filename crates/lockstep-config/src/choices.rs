//! The keys whose value is one of a list of words: an enum for each, and its conversions to other crates' types.
//!
//! A planned word stands under `later` and is refused by name.

use std::{fs, io};

use lockstep_plan::gathering::ReshardAfterForward;
use lockstep_plan::schedule::Kind;
use lockstep_plan::{ContextMethod, DType, Feedback, PassOrder, QuantizedType, Residence, TensorDimensions};
use serde::Serialize;
use serde_json::Value;

use crate::value::{InvalidValue, Readable, ValueType, wrong_type};

/// Declares an enum whose variants are the words a key takes, with the words that are planned.
macro_rules! choices {
    ($(
        $(#[doc = $doc:literal])+
        $name:ident { $( $(#[doc = $variant_doc:literal])+ $variant:ident = $word:literal, )+ }
        $(later [$($later:literal),+])?
    )+) => { $(
        $(#[doc = $doc])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
        pub enum $name { $( $(#[doc = $variant_doc])+ #[serde(rename = $word)] $variant, )+ }

        impl $name {
            /// Every variant, in the order of the manual.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// Returns the word of this variant in RUN.toml.
            pub const fn word(self) -> &'static str {
                match self { $( Self::$variant => $word, )+ }
            }
        }

        impl Readable for $name {
            const TYPE: ValueType = ValueType::Choice { allowed: &[$($word),+] };

            fn read(value: &Value) -> Result<Self, InvalidValue> {
                match value.as_str() {
                    $( Some($word) => Ok(Self::$variant), )+
                    Some(word) if <[&str]>::contains(&[$($($later),+)?], &word) => {
                        Err(InvalidValue::of::<Self>(format!("\"{word}\" is not supported yet")))
                    }
                    _ => Err(wrong_type::<Self>(value)),
                }
            }
        }
    )+ };
}

impl DataFormat {
    /// Returns true if the files hold samples of named tensors, such as images with labels, and false for text and tokens.
    pub const fn is_of_samples(self) -> bool {
        match self {
            Self::Auto | Self::Text | Self::JsonLines | Self::Parquet | Self::Indexed | Self::Tokens => false,
            Self::Cifar10
            | Self::Cifar100
            | Self::Idx
            | Self::ImageFolder
            | Self::WebDataset
            | Self::TfRecord => true,
        }
    }

    /// Returns the formats of samples, or those of text.
    pub fn all_of(samples: bool) -> impl Iterator<Item = Self> {
        Self::ALL.iter().copied().filter(move |format| format.is_of_samples() == samples)
    }
}

choices! {
    /// Format of the training files.
    DataFormat {
        /// By file name: `.jsonl` and `.ndjson` are JSON lines, a `.bin` is `indexed` if its `.idx` lies beside it and
        /// `tokens` otherwise, everything else is text.
        Auto = "auto",
        /// Plain text in UTF-8.
        Text = "text",
        /// One JSON object a line.
        JsonLines = "jsonl",
        /// A Parquet table with a column of text.
        Parquet = "parquet",
        /// Megatron's indexed data sets: a `.bin` with its `.idx`.
        Indexed = "indexed",
        /// Files of token ids and nothing else.
        Tokens = "tokens",
        /// CIFAR-10's binary version: a directory with its files, or files of records.
        Cifar10 = "cifar10",
        /// CIFAR-100's binary version.
        Cifar100 = "cifar100",
        /// MNIST's idx files of images, with others of labels.
        Idx = "idx",
        /// A directory with one directory of images per class.
        ImageFolder = "image_folder",
        /// Tar shards of WebDataset.
        WebDataset = "webdataset",
        /// Files of TensorFlow's records, each a `tf.Example`.
        TfRecord = "tfrecord",
    }

    /// Type of the ids in raw token files.
    TokenType {
        /// Two bytes, unsigned.
        U16 = "u16",
        /// Four bytes, unsigned.
        U32 = "u32",
    }

    /// Packing of documents into sequences.
    DataPacking {
        /// One document after another, cut anywhere; a token attends to all tokens before it, across documents.
        Stream = "stream",
        /// As `stream`, but a token attends to its own document only.
        Documents = "documents",
        /// As `documents`, and a document is cut only if it is longer than a sequence.
        WholeDocuments = "whole_documents",
    }

    /// Order in which samples are drawn.
    DataOrder {
        /// A new permutation each epoch, a function of the seed.
        Shuffle = "shuffle",
        /// Consecutive windows of the corpus.
        Sequential = "sequential",
    }

    /// Type of activations and of the weights that kernels read.
    Precision {
        /// 32-bit floats throughout.
        F32 = "f32",
        /// bfloat16 with f32 master weights and f32 gradients.
        BF16 = "bf16",
        /// Half precision with f32 master weights, f32 gradients and a scaled loss.
        F16 = "f16",
    }

    /// Method of f32 matrix products on a CPU with AMX.
    F32Products {
        /// By bf16 tiles: each operand in three parts, six products summed in f32; at least as exact as FMA.
        Split = "split",
        /// By vector FMA, as on every other CPU.
        Fma = "fma",
    }

    /// Optimizer of the run.
    OptimizerKind {
        /// Adam with decoupled weight decay.
        AdamW = "adamw",
        /// Gradient descent with momentum.
        Sgd = "sgd",
        /// The sign of an average of gradients.
        Lion = "lion",
        /// Muon for the matrices of the blocks, AdamW for the other parameters.
        Muon = "muon",
    } later ["onebit_adam"]

    /// Scaling of Muon's step size by the shape of a matrix.
    MuonScale {
        /// Updates as large as AdamW's.
        MatchAdamW = "match_adamw",
        /// Updates as in Keller Jordan's original.
        Original = "original",
    }

    /// Type of moments and momentum.
    StatePrecision {
        /// 32-bit floats, f32.
        F32 = "f32",
        /// bfloat16, which halves their memory.
        BF16 = "bf16",
    }

    /// Rounding of weights and optimizer state in bf16.
    Rounding {
        /// To the nearest number.
        Nearest = "nearest",
        /// Up or down at random, so that small changes add up.
        Stochastic = "stochastic",
    }

    /// Decay of the learning rate after the warm-up.
    ScheduleKind {
        /// Constant at the peak.
        Constant = "constant",
        /// Linear decay after the warm-up.
        Linear = "linear",
        /// Decay along half a cosine.
        Cosine = "cosine",
        /// Warm-up, a long stable phase, then decay with 1 - sqrt.
        WarmupStableDecay = "wsd",
    }

    /// Scaling of the learning rate with the global batch.
    LearningRateScaling {
        /// The rate is independent of the batch.
        None = "none",
        /// Proportional to the batch (Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.1).
        Linear = "linear",
        /// By the square root of the batch (Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms").
        Sqrt = "sqrt",
    }

    /// Scaling of an adapter's output.
    Scaling {
        /// `alpha / rank`.
        Standard = "standard",
        /// `alpha / sqrt(rank)`.
        RankStabilized = "rank_stabilized",
    }

    /// Quantization of frozen matrices.
    BaseQuantization {
        /// Numbers of `train.precision`.
        None = "none",
        /// NormalFloat, 4 bits (Dettmers et al., 2023, "QLoRA"), with an f32 scale for each 64 neighbours of a row: 4.5 bits per weight.
        Nf4 = "nf4",
        /// Integers of 4 bits, with an f32 scale and a zero point for each 64 neighbours.
        Int4 = "int4",
        /// Integers of 8 bits, with an f32 scale for each 128 neighbours.
        Int8 = "int8",
    }

    /// Method of reading and writing files of offloaded state.
    OffloadIo {
        /// By io_uring where the system has it, else by threads.
        Auto = "auto",
        /// By io_uring alone.
        IoUring = "io_uring",
        /// By threads with blocking calls.
        Threads = "threads",
    }

    /// Transport between ranks.
    Transport {
        /// Shared memory on one machine; TCP between machines and where another launcher has started the ranks.
        Auto = "auto",
        /// Shared memory, on one machine.
        Shared = "shared",
        /// TCP between all ranks.
        Tcp = "tcp",
        /// MPI, in a program that was built with the feature `mpi` and started by `mpirun`. Its all-reduce may give other bits.
        Mpi = "mpi",
    } later ["nccl"]

    /// Algorithm of gradient all-reduces over a network.
    AllReduce {
        /// In the order of a fixed tree, as in shared memory: the same bits on every transport.
        Tree = "tree",
        /// Around a ring.
        Ring = "ring",
        /// By recursive doubling.
        RecursiveDoubling = "recursive_doubling",
        /// By recursive halving and doubling.
        Rabenseifner = "rabenseifner",
    }
}

/// Converts choices into the types of the crates that act on them; a variant is followed by its name there if that differs.
macro_rules! conversions {
    ($($Choice:ident => $Type:ty: $($variant:ident $($other:ident)?),+;)+) => { $(
        impl From<$Choice> for $Type {
            fn from(choice: $Choice) -> Self {
                match choice { $( $Choice::$variant => conversions!(@variant $variant $($other)?), )+ }
            }
        }
    )+ };
    (@variant $same:ident) => { Self::$same };
    (@variant $variant:ident $other:ident) => { Self::$other };
}

conversions! {
    Precision => DType: F32, BF16, F16;
    StatePrecision => DType: F32, BF16;
    Rounding => lockstep_engine::RoundingMode: Nearest, Stochastic;
    MuonScale => lockstep_engine::MuonScale: MatchAdamW, Original;
    Scaling => lockstep_model::LoraScaling: Standard, RankStabilized;
    OffloadIo => lockstep_tensor::DiskIo: Auto, IoUring, Threads;
    Transport => lockstep_comm::TransportKind: Auto, Shared SharedMemory, Tcp, Mpi;
    AllReduce => lockstep_comm::Algorithm: Tree, Ring, RecursiveDoubling, Rabenseifner;
}

/// Implements [`Readable`] for types of plans, whose names in plan files are the words that a key takes.
macro_rules! named_in_plans {
    ($($Type:ty),+) => { $(
        impl Readable for $Type {
            const TYPE: ValueType = ValueType::Choice { allowed: <$Type>::NAMES };

            fn read(value: &Value) -> Result<Self, InvalidValue> {
                let named = |name: &str| Self::ALL.into_iter().find(|choice| choice.name() == name);
                value.as_str().and_then(named).ok_or_else(|| wrong_type::<Self>(value))
            }
        }
    )+ };
}

named_in_plans!(ContextMethod, ReshardAfterForward, Residence, TensorDimensions);

/// `None` is the word `none`: not quantized.
impl Readable for Option<QuantizedType> {
    const TYPE: ValueType = ValueType::Choice { allowed: &["none", "int8", "int4"] };

    fn read(value: &Value) -> Result<Self, InvalidValue> {
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

/// Error feedback as a flag: true keeps the residuals.
impl Readable for Feedback {
    const TYPE: ValueType = ValueType::Flag;

    fn read(value: &Value) -> Result<Self, InvalidValue> {
        let is_kept = value.as_bool().ok_or_else(|| wrong_type::<Self>(value))?;
        Ok(if is_kept { Self::Kept } else { Self::Dropped })
    }

    fn to_value(&self) -> Value {
        (*self == Self::Kept).into()
    }
}

/// A pipeline schedule: the name of a published one, a CSV file, or its rows with a line break after each.
impl Readable for PassOrder {
    const TYPE: ValueType = ValueType::Text;

    fn read(value: &Value) -> Result<Self, InvalidValue> {
        let name = value.as_str().ok_or_else(|| wrong_type::<Self>(value))?;
        named_passes(name).map_err(|error| InvalidValue {
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

/// Returns the order of passes that `name` stands for: a published schedule, the CSV file of this name, or if it has line breaks,
/// its own rows.
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
