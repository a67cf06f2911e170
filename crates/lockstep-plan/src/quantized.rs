//! Small integers in which weights and gradients go between ranks (ZeRO++: Wang et al., 2023): a block of elements becomes a scale and a
//! code for each element.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Elements that share a scale. It divides what ranks own of anything, and the distance between parameters in a flat buffer.
pub const QUANTIZATION_BLOCK: usize = 256;

/// The type of the codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum QuantizedType {
    /// Whole numbers from -127 to 127, a byte each.
    Int8,
    /// Whole numbers from -7 to 7, two in a byte.
    Int4,
}

impl QuantizedType {
    /// The largest code. Codes are symmetric, so that zero has one.
    pub const fn limit(self) -> f32 {
        match self {
            Self::Int8 => 127.0,
            Self::Int4 => 7.0,
        }
    }

    /// The name in plans.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }

    /// Bytes of so many elements, scales included.
    ///
    /// # Panics
    /// If these are not whole blocks.
    pub const fn bytes(self, elements: usize) -> usize {
        assert!(elements.is_multiple_of(QUANTIZATION_BLOCK), "elements that are quantized are whole blocks");
        let codes = match self {
            Self::Int8 => QUANTIZATION_BLOCK,
            Self::Int4 => QUANTIZATION_BLOCK / 2,
        };
        elements / QUANTIZATION_BLOCK * (size_of::<f32>() + codes)
    }
}

/// What goes between the ranks that share out a model's state as small integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Quantization {
    /// Weights that are gathered before each use (qwZ).
    pub weights: Option<QuantizedType>,
    /// Gradients that are summed (qgZ).
    pub gradients: Option<QuantizedType>,
    /// What is kept of what gradients lost.
    pub feedback: Feedback,
}

/// What a rank does with what its gradients lost to their codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Feedback {
    /// It keeps it and adds it to the next gradients, so that over the steps nothing is lost.
    #[default]
    Kept,
    /// Nothing.
    Dropped,
}

impl fmt::Display for QuantizedType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
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
