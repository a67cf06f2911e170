//! Storage of cached keys and values: the type of their elements and the scales beside them, and the ranks that hold them.
//!
//! Integers and E4M3 numbers of 8 bits have a scale of their own for each token, head and operand (keys or values). A
//! vector's codes depend on nothing but the vector, so the order in which a cache is filled changes no bit, and no
//! calibration is needed.

use crate::{DType, named_enum::named_enum};

named_enum! {
    /// Type in which a cache stores keys and values, apart from the type of the computation.
    pub enum KvCacheType {
        /// IEEE 754 binary32.
        F32 = "f32",
        /// The upper half of a binary32.
        Bf16 = "bf16",
        /// IEEE 754 binary16.
        F16 = "f16",
        /// Integers from -127 to 127 times a scale, the largest magnitude of the vector / 127.
        Int8 = "int8",
        /// E4M3 numbers up to 448 times a scale, the largest magnitude of the vector / 448.
        Fp8 = "fp8",
    }
}

/// A rank's position among the ranks that key-value caches are sharded over. A sequence's pages are assigned round-robin: rank `rank` has
/// those whose index in the sequence is `rank` modulo `ranks`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CachePlace {
    /// Number of ranks that each cache is sharded over.
    pub ranks: usize,
    /// Rank among them.
    pub rank: usize,
}

impl Default for CachePlace {
    /// A cache on one rank.
    fn default() -> Self {
        Self { ranks: 1, rank: 0 }
    }
}

impl CachePlace {
    /// Returns true if this rank has the page of this index in a sequence.
    pub const fn holds(&self, page: usize) -> bool {
        page % self.ranks == self.rank
    }
}

impl KvCacheType {
    /// Returns the type that stores numbers of `dtype` unchanged; `None` for integers.
    pub const fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F32 => Some(Self::F32),
            DType::BF16 => Some(Self::Bf16),
            DType::F16 => Some(Self::F16),
            DType::I32 | DType::U32 | DType::U8 => None,
        }
    }

    /// Returns true if a computation in `dtype` can use a cache of this type: numbers of that type, and all that are narrower.
    pub fn holds(self, dtype: DType) -> bool {
        match self {
            Self::Int8 | Self::Fp8 => Self::of(dtype).is_some(),
            Self::Bf16 => matches!(dtype, DType::F32 | DType::BF16),
            Self::F32 | Self::F16 => Self::of(dtype) == Some(self),
        }
    }

    /// Returns the bytes of an element, scales aside.
    pub const fn element_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::Int8 | Self::Fp8 => 1,
        }
    }

    /// Returns the bytes of the scale of each token, head and operand; 0 without scales.
    pub const fn scale_bytes(self) -> usize {
        match self {
            Self::F32 | Self::Bf16 | Self::F16 => 0,
            Self::Int8 | Self::Fp8 => size_of::<f32>(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_holds_the_type_of_the_computation_and_narrower_ones() {
        for (dtype, held) in [
            (DType::F32, &["f32", "bf16", "int8", "fp8"][..]),
            (DType::BF16, &["bf16", "int8", "fp8"]),
            (DType::F16, &["f16", "int8", "fp8"]),
            (DType::U8, &[]),
        ] {
            let types = KvCacheType::ALL.iter().filter(|stored| stored.holds(dtype));
            let found: Vec<String> = types.map(ToString::to_string).collect();
            assert_eq!(found, held, "{dtype}");
        }
    }
}
