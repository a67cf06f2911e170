//! The nonlinearity of a plain feed-forward layer.

use lockstep_graph::{Recorder, Value};
use lockstep_tensor::Gelu;

use crate::config::Activation;

impl Activation {
    /// Records the nonlinearity.
    pub(super) fn record(self, g: &mut Recorder, x: Value) -> Value {
        match self {
            Self::GeluExact => g.gelu(Gelu::Exact, x),
            Self::GeluTanh => g.gelu(Gelu::Tanh, x),
            Self::Relu => g.relu(x),
        }
    }
}
