//! The types a key can have, each with the one way to read it.
//!
//! TOML is first turned into JSON values (see `sources`), so that what `--set` gives, what a file gives and
//! what a checkpoint's manifest holds are the same thing; here those become Rust values, or a [`Misfit`].

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Serialize, Serializer};
use serde_json::Value;

/// What kind of value a key takes, for messages and the manual.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueType {
    /// `true` or `false`.
    Flag,
    /// A whole number.
    Integer,
    /// A finite number.
    Number,
    /// Two finite numbers.
    NumberPair,
    /// Two whole numbers.
    IntegerPair,
    /// A string.
    Text,
    /// A list of strings.
    TextList,
    /// A list of whole numbers.
    IntegerList,
    /// A list of strings and tables `{ path, weight }`.
    SourceList,
    /// Numbers by name.
    NumberTable,
    /// One of a list of words.
    Choice {
        /// The words that work.
        allowed: &'static [&'static str],
        /// The words that are planned.
        later: &'static [&'static str],
    },
}

impl ValueType {
    /// Whether a bare word or number given to `--set` is meant as a string.
    pub(super) fn is_text(self) -> bool {
        matches!(self, Self::Text | Self::Choice { .. })
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag => f.write_str("true or false"),
            Self::Integer => f.write_str("an integer"),
            Self::Number => f.write_str("a number"),
            Self::NumberPair => f.write_str("two numbers, [a, b]"),
            Self::IntegerPair => f.write_str("two integers, [a, b]"),
            Self::Text => f.write_str("a string"),
            Self::NumberTable => f.write_str("a table of numbers, { \"a\" = 0.5, \"b\" = 2.0 }"),
            Self::TextList => f.write_str("a list of strings, [\"a\", \"b\"]"),
            Self::IntegerList => f.write_str("a list of integers, [4, 3, 3]"),
            Self::SourceList => {
                f.write_str("a list of strings and tables, [\"a\", { path = \"b\", weight = 0.3 }]")
            }
            Self::Choice { allowed, .. } => {
                for (i, word) in allowed.iter().enumerate() {
                    write!(f, "{}\"{word}\"", if i == 0 { "" } else { ", " })?;
                }
                Ok(())
            }
        }
    }
}

/// Why a value does not fit its key.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Misfit {
    pub(super) what: String,
    pub(super) allowed: String,
}

/// A type that a key of the configuration can have.
pub(super) trait Readable: Serialize + Sized {
    /// For messages and the manual.
    const TYPE: ValueType;

    /// Reads it, or says why not.
    fn read(value: &Value) -> Result<Self, Misfit>;

    /// The numbers in it, to be held against the key's range.
    fn numbers(&self) -> Vec<f64> {
        Vec::new()
    }
}

/// The misfit of a value of the wrong type.
fn wrong_type<T: Readable>(value: &Value) -> Misfit {
    let found = match value {
        Value::Null => "nothing".to_owned(),
        Value::Bool(flag) => format!("the flag {flag}"),
        Value::Number(number) => format!("the number {number}"),
        Value::String(text) => format!("the string \"{}\"", shortened(text)),
        Value::Array(items) => format!("a list of {}", items.len()),
        Value::Object(_) => "a table".to_owned(),
    };
    Misfit { what: format!("is {found}"), allowed: T::TYPE.to_string() }
}

/// At most 60 characters of a text, escaped, for a message.
pub(super) fn shortened(text: &str) -> String {
    let mut out: String = text.chars().take(60).flat_map(char::escape_debug).collect();
    if text.chars().nth(60).is_some() {
        out.push_str("...");
    }
    out
}

impl Readable for bool {
    const TYPE: ValueType = ValueType::Flag;

    fn read(value: &Value) -> Result<Self, Misfit> {
        value.as_bool().ok_or_else(|| wrong_type::<Self>(value))
    }
}

impl Readable for u64 {
    const TYPE: ValueType = ValueType::Integer;

    fn read(value: &Value) -> Result<Self, Misfit> {
        if let Some(number) = value.as_u64() {
            return Ok(number);
        }
        let mut misfit = wrong_type::<Self>(value);
        match value.as_f64() {
            Some(number) if number < 0.0 => misfit.allowed = "an integer, 0 or more".to_owned(),
            // `1e3` is a float to TOML; say how to write it.
            Some(number) if number.fract() == 0.0 && number < 1e15 => {
                misfit.allowed = format!("an integer: write {number:.0}");
            }
            _ => {}
        }
        Err(misfit)
    }

    fn numbers(&self) -> Vec<f64> {
        vec![*self as f64]
    }
}

impl Readable for usize {
    const TYPE: ValueType = ValueType::Integer;

    fn read(value: &Value) -> Result<Self, Misfit> {
        let number = u64::read(value)?;
        Self::try_from(number).map_err(|_| wrong_type::<Self>(value))
    }

    fn numbers(&self) -> Vec<f64> {
        vec![*self as f64]
    }
}

impl Readable for f64 {
    const TYPE: ValueType = ValueType::Number;

    fn read(value: &Value) -> Result<Self, Misfit> {
        value.as_f64().ok_or_else(|| wrong_type::<Self>(value))
    }

    fn numbers(&self) -> Vec<f64> {
        vec![*self]
    }
}

impl Readable for [f64; 2] {
    const TYPE: ValueType = ValueType::NumberPair;

    fn read(value: &Value) -> Result<Self, Misfit> {
        let pair = value.as_array().map(Vec::as_slice);
        let Some([first, second]) = pair else { return Err(wrong_type::<Self>(value)) };
        match (first.as_f64(), second.as_f64()) {
            (Some(first), Some(second)) => Ok([first, second]),
            _ => Err(Misfit { what: format!("is {value}"), allowed: Self::TYPE.to_string() }),
        }
    }

    fn numbers(&self) -> Vec<f64> {
        self.to_vec()
    }
}

impl Readable for [u64; 2] {
    const TYPE: ValueType = ValueType::IntegerPair;

    fn read(value: &Value) -> Result<Self, Misfit> {
        let pair = value.as_array().map(Vec::as_slice);
        let Some([first, second]) = pair else { return Err(wrong_type::<Self>(value)) };
        match (first.as_u64(), second.as_u64()) {
            (Some(first), Some(second)) => Ok([first, second]),
            _ => Err(Misfit { what: format!("is {value}"), allowed: Self::TYPE.to_string() }),
        }
    }

    fn numbers(&self) -> Vec<f64> {
        self.map(|number| number as f64).to_vec()
    }
}

impl Readable for String {
    const TYPE: ValueType = ValueType::Text;

    fn read(value: &Value) -> Result<Self, Misfit> {
        let text = value.as_str().ok_or_else(|| wrong_type::<Self>(value))?;
        if text.is_empty() || text.contains('\0') {
            return Err(Misfit {
                what: format!("is \"{}\"", shortened(text)),
                allowed: "a string that is not empty and holds no NUL".to_owned(),
            });
        }
        Ok(text.to_owned())
    }
}

impl Readable for PathBuf {
    const TYPE: ValueType = ValueType::Text;

    fn read(value: &Value) -> Result<Self, Misfit> {
        String::read(value).map(Self::from)
    }
}

impl Readable for Vec<String> {
    const TYPE: ValueType = ValueType::TextList;

    fn read(value: &Value) -> Result<Self, Misfit> {
        is_list_of_strings::<Self>(value)?;
        read_list::<Self, String>(value, String::read)
    }
}

impl Readable for Vec<usize> {
    const TYPE: ValueType = ValueType::IntegerList;

    fn read(value: &Value) -> Result<Self, Misfit> {
        read_list::<Self, usize>(value, usize::read)
    }

    fn numbers(&self) -> Vec<f64> {
        self.iter().map(|number| *number as f64).collect()
    }
}

/// A misfit for one string where a list of them is meant.
fn is_list_of_strings<List: Readable>(value: &Value) -> Result<(), Misfit> {
    let Some(text) = value.as_str() else { return Ok(()) };
    let allowed = format!("a list of strings: write [\"{}\"]", shortened(text));
    Err(Misfit { allowed, ..wrong_type::<List>(value) })
}

/// Reads every entry of a list.
fn read_list<List: Readable, T>(
    value: &Value,
    read: impl Fn(&Value) -> Result<T, Misfit>,
) -> Result<Vec<T>, Misfit> {
    let items = value.as_array().ok_or_else(|| wrong_type::<List>(value))?;
    let numbered = items.iter().enumerate();
    numbered
        .map(|(i, item)| {
            read(item).map_err(|Misfit { what, allowed }| Misfit {
                what: format!("entry {} {what}", i + 1),
                allowed,
            })
        })
        .collect()
}

/// One entry of `data.train`: files, and how much of a blend they are.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum DataSource {
    /// A file, a directory or a glob pattern.
    Plain(String),
    /// One with a weight.
    Weighted {
        /// A file, a directory or a glob pattern.
        path: String,
        /// Its share of the samples.
        weight: f64,
    },
}

impl DataSource {
    /// The file, directory or pattern.
    pub fn path(&self) -> &str {
        match self {
            Self::Plain(path) | Self::Weighted { path, .. } => path,
        }
    }
}

impl Readable for Vec<DataSource> {
    const TYPE: ValueType = ValueType::SourceList;

    fn read(value: &Value) -> Result<Self, Misfit> {
        is_list_of_strings::<Self>(value)?;
        read_list::<Self, DataSource>(value, |item| {
            let Value::Object(table) = item else { return String::read(item).map(DataSource::Plain) };
            let misfit = |what: String| Misfit { what, allowed: "{ path = \"a\", weight = 0.3 }".to_owned() };
            if let Some(key) = table.keys().find(|key| !["path", "weight"].contains(&key.as_str())) {
                return Err(misfit(format!("has the unknown key \"{}\"", shortened(key))));
            }
            let path = table.get("path").ok_or_else(|| misfit("has no path".to_owned()))?;
            let path =
                String::read(path).map_err(|found| misfit(format!("has a path that {}", found.what)))?;
            let Some(weight) = table.get("weight") else { return Ok(DataSource::Plain(path)) };
            match weight.as_f64() {
                Some(number) if number > 0.0 => Ok(DataSource::Weighted { path, weight: number }),
                _ => Err(misfit(format!("has the weight {weight}, which is no number above 0"))),
            }
        })
    }
}

impl Readable for BTreeMap<String, f64> {
    const TYPE: ValueType = ValueType::NumberTable;

    fn read(value: &Value) -> Result<Self, Misfit> {
        let table = value.as_object().ok_or_else(|| wrong_type::<Self>(value))?;
        table
            .iter()
            .map(|(name, value)| match value.as_f64() {
                Some(number) => Ok((name.clone(), number)),
                None => Err(Misfit {
                    what: format!("\"{}\" is {value}", shortened(name)),
                    allowed: Self::TYPE.to_string(),
                }),
            })
            .collect()
    }

    fn numbers(&self) -> Vec<f64> {
        self.values().copied().collect()
    }
}

/// A key that may be left out.
impl<T: Readable> Readable for Option<T> {
    const TYPE: ValueType = T::TYPE;

    fn read(value: &Value) -> Result<Self, Misfit> {
        T::read(value).map(Some)
    }

    fn numbers(&self) -> Vec<f64> {
        self.as_ref().map(T::numbers).unwrap_or_default()
    }
}

/// Which tokenizer turns text into ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenizerSource {
    /// Each byte is a token.
    Bytes,
    /// A Hugging Face `tokenizer.json`.
    File(PathBuf),
}

impl Readable for TokenizerSource {
    const TYPE: ValueType = ValueType::Text;

    fn read(value: &Value) -> Result<Self, Misfit> {
        let text = String::read(value)?;
        Ok(if text == "bytes" { Self::Bytes } else { Self::File(text.into()) })
    }
}

impl Serialize for TokenizerSource {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Bytes => Path::new("bytes"),
            Self::File(path) => path,
        }
        .serialize(serializer)
    }
}

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

    /// How strongly an adapter acts.
    Scaling {
        /// `alpha / rank`.
        Standard = "standard",
        /// `alpha / sqrt(rank)`.
        RankStabilized = "rank_stabilized",
    } later []

    /// What a block computes again in its backward, in place of keeping it.
    Recompute {
        /// Nothing.
        None = "none",
        /// What costs much memory and little time.
        Selective = "selective",
        /// The whole block from its input.
        Full = "full",
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

impl From<ReshardAfterForward> for lockstep_plan::residence::ReshardAfterForward {
    fn from(reshard: ReshardAfterForward) -> Self {
        match reshard {
            ReshardAfterForward::Always => Self::Always,
            ReshardAfterForward::Auto => Self::Auto,
            ReshardAfterForward::Never => Self::Never,
        }
    }
}

impl From<lockstep_plan::residence::ReshardAfterForward> for ReshardAfterForward {
    fn from(reshard: lockstep_plan::residence::ReshardAfterForward) -> Self {
        use lockstep_plan::residence::ReshardAfterForward as Planned;
        match reshard {
            Planned::Always => Self::Always,
            Planned::Auto => Self::Auto,
            Planned::Never => Self::Never,
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

impl From<Recompute> for lockstep_plan::Recompute {
    fn from(recompute: Recompute) -> Self {
        match recompute {
            Recompute::None => Self::None,
            Recompute::Selective => Self::Selective,
            Recompute::Full => Self::Full,
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

impl From<lockstep_plan::Recompute> for Recompute {
    fn from(recompute: lockstep_plan::Recompute) -> Self {
        match recompute {
            lockstep_plan::Recompute::None => Self::None,
            lockstep_plan::Recompute::Selective => Self::Selective,
            lockstep_plan::Recompute::Full => Self::Full,
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
