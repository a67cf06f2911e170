//! The nonlinearity of a plain feed-forward layer, by the names that transformers gives it.

use super::reader::Reader;

/// The nonlinearity of a plain feed-forward layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// x Φ(x), computed with the error function ("gelu").
    GeluExact,
    /// Approximation of GELU by tanh ("gelu_new", "gelu_pytorch_tanh", "gelu_fast").
    GeluTanh,
    /// max(x, 0) ("relu").
    Relu,
}

impl Activation {
    /// Returns the nonlinearity that `key` names, or `default`.
    pub(super) fn read(reader: &mut Reader<'_>, key: &'static str, default: Self) -> Self {
        match reader.text(key) {
            None => default,
            Some("gelu") => Self::GeluExact,
            Some("gelu_new" | "gelu_pytorch_tanh" | "gelu_fast") => Self::GeluTanh,
            Some("relu") => Self::Relu,
            Some(_) => {
                let supported = "\"gelu\", \"gelu_new\", \"gelu_pytorch_tanh\", \"gelu_fast\", \"relu\"";
                reader.unsupported(key, supported);
                default
            }
        }
    }

    /// Returns the name that transformers reads.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::GeluExact => "gelu",
            Self::GeluTanh => "gelu_new",
            Self::Relu => "relu",
        }
    }
}
