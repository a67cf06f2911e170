//! Quantized collectives (ZeRO++: Wang et al., 2023): a block of elements becomes a scale and a small integer code per element.

use serde::{Deserialize, Serialize};

use crate::named_enum::named_enum;

/// Number of elements that share a scale. It divides every shard, and the distance between parameters in a flat buffer.
pub const QUANTIZATION_BLOCK: usize = 256;

named_enum! {
    /// Integer type of the codes.
    pub enum QuantizedType {
        /// Integers from -127 to 127, one per byte.
        Int8 = "int8",
        /// Integers from -7 to 7, two per byte.
        Int4 = "int4",
    }
}

impl QuantizedType {
    /// Returns the largest code. Codes are symmetric, so that zero has one.
    pub const fn limit(self) -> f32 {
        match self {
            Self::Int8 => 127.0,
            Self::Int4 => 7.0,
        }
    }

    /// Returns the bytes of `elements` quantized elements, scales included.
    ///
    /// # Panics
    /// If `elements` is not a multiple of [`QUANTIZATION_BLOCK`].
    pub const fn bytes(self, elements: usize) -> usize {
        assert!(elements.is_multiple_of(QUANTIZATION_BLOCK), "elements that are quantized are whole blocks");
        let codes = match self {
            Self::Int8 => QUANTIZATION_BLOCK,
            Self::Int4 => QUANTIZATION_BLOCK / 2,
        };
        elements / QUANTIZATION_BLOCK * (size_of::<f32>() + codes)
    }
}

/// Quantized types of collectives within a shard group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Quantization {
    /// Type of weights in all-gathers (qwZ); `None` if they are not quantized.
    pub weights: Option<QuantizedType>,
    /// Type of gradients in reduce-scatters (qgZ); `None` if they are not quantized.
    pub gradients: Option<QuantizedType>,
    /// Handling of the gradients' quantization error.
    pub feedback: Feedback,
}

/// Error feedback: handling of the quantization error of a rank's gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Feedback {
    /// The rank keeps the error and adds it to the next gradients, so that nothing is lost over the steps.
    #[default]
    Kept,
    /// The error is dropped.
    Dropped,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_take_a_quarter_and_an_eighth_of_f32_and_a_scale_a_block() {
        assert_eq!(QuantizedType::Int8.bytes(1024), 1024 + 16);
        assert_eq!(QuantizedType::Int4.bytes(1024), 512 + 16);
        assert_eq!(QuantizedType::Int4.bytes(0), 0);
    }
}
