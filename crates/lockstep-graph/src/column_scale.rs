//! Proportionality of the columns of an operation's output: to parameters, or to columns of an input. Scales of channels move there
//! (see `shared_input`).

use crate::block::{ParameterIndex, Value};

/// The origin of a positive factor on each column of an operation's output.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ColumnScale {
    /// Column `c` is proportional to row `c` of `weight + offset`, and of the bias if there is one.
    Parameters {
        /// Scale of a norm, or weight of a linear layer.
        weight: ParameterIndex,
        /// Bias that is added to the scaled column.
        bias: Option<ParameterIndex>,
        /// Number that is added to the weight before it is used.
        offset: f32,
    },
    /// Column `c` is proportional to a column of an input: `c` itself, or the column of a key head that `group` consecutive query heads
    /// of `head_dim` columns share.
    Input {
        /// The input.
        input: Value,
        /// Heads of the output for each head of the input.
        group: usize,
        /// Columns of a head.
        head_dim: usize,
    },
}

impl ColumnScale {
    /// Returns the scale of an output whose column `c` is proportional to column `c` of `input`.
    pub fn of_input(input: Value) -> Self {
        Self::Input { input, group: 1, head_dim: 1 }
    }
}
