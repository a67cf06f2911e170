//! Factors on the columns and rows of a model's parameters that leave its function as it is: the columns of the weights that read a value are
//! multiplied, and the rows of the parameters that produce it are divided (Lin et al., 2023, "AWQ", section 3.2).

use std::collections::BTreeMap;

/// Factors on the columns and rows of parameters, by name. Without any, parameters keep their values.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ChannelScales {
    parameters: BTreeMap<String, Factors>,
}

/// Factors on one parameter.
#[derive(Debug, Clone, PartialEq, Default)]
struct Factors {
    /// Factor on each column of a matrix.
    columns: Option<Vec<f32>>,
    /// Divisor of each row of a matrix or element of a vector.
    rows: Option<Vec<f32>>,
    /// Number that the model adds to the parameter before it is used, and that is divided with it.
    offset: f32,
}

impl ChannelScales {
    /// Multiplies the columns of the matrix `parameter`.
    pub fn multiply_columns(&mut self, parameter: &str, factors: &[f32]) {
        self.parameters.entry(parameter.to_owned()).or_default().columns = Some(factors.to_vec());
    }

    /// Divides the rows of a matrix, or the elements of a vector to which the model adds `offset`.
    pub fn divide_rows(&mut self, parameter: &str, divisors: &[f32], offset: f32) {
        let factors = self.parameters.entry(parameter.to_owned()).or_default();
        (factors.rows, factors.offset) = (Some(divisors.to_vec()), offset);
    }

    /// Returns true if no parameter has factors.
    pub fn is_empty(&self) -> bool {
        self.parameters.is_empty()
    }

    /// Applies the factors to the values of a parameter.
    pub(crate) fn apply(&self, name: &str, values: &mut [f32]) {
        let Some(Factors { columns, rows, offset }) = self.parameters.get(name) else { return };
        if let Some(columns) = columns {
            for row in values.chunks_exact_mut(columns.len()) {
                row.iter_mut().zip(columns).for_each(|(value, factor)| *value *= factor);
            }
        }
        if let Some(rows) = rows {
            let width = values.len() / rows.len();
            for (row, divisor) in values.chunks_exact_mut(width.max(1)).zip(rows) {
                row.iter_mut().for_each(|value| *value = (*value + offset) / divisor - offset);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_multiplied_and_rows_divided_with_their_offset() {
        let mut scales = ChannelScales::default();
        scales.multiply_columns("matrix", &[2.0, 0.5, 1.0]);
        scales.divide_rows("matrix", &[4.0, 1.0], 0.0);
        scales.divide_rows("norm", &[2.0, 0.5], 1.0);
        let mut matrix = [4.0, 8.0, 2.0, 1.0, 2.0, 3.0];
        scales.apply("matrix", &mut matrix);
        assert_eq!(matrix, [2.0, 1.0, 0.5, 2.0, 1.0, 3.0]);
        let mut norm = [0.0, 1.0];
        scales.apply("norm", &mut norm);
        assert_eq!(norm, [-0.5, 3.0]);
        let mut other = [7.0];
        scales.apply("other", &mut other);
        assert_eq!(other, [7.0]);
    }
}
