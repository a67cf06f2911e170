//! Values that only linear layers read, and the parameters whose rows produce their columns.
//!
//! If column `c` of a value is divided by a positive factor, and column `c` of every weight that reads it is multiplied by the factor, the block
//! computes the same function. The division moves to the parameters that are proportional to the column: the scale of a norm, or the
//! rows of a linear layer from which operations lead to the value that are linear in each column.

use crate::{
    block::{ParameterIndex, Value},
    column_scale::ColumnScale,
    facts::Facts,
    program::Program,
};

/// Linear layers that read one value, which nothing else reads, and the parameters that produce its columns.
#[derive(Debug, Clone, PartialEq)]
pub struct SharedInput {
    /// Weights `[out, columns]` of the layers.
    pub weights: Vec<ParameterIndex>,
    /// Parameter whose rows produce the columns: the scale of a norm, or the weight of a linear layer.
    pub producer: ParameterIndex,
    /// Bias of the producer.
    pub producer_bias: Option<ParameterIndex>,
    /// Number that is added to the producer before it is used.
    pub producer_offset: f32,
    /// Row of the producer for each column. Columns of several query heads may have one.
    pub producer_rows: Vec<usize>,
}

impl Program {
    /// Returns the inputs of linear layers whose columns can be scaled without a change of the block's function, in the order
    /// of the forward. The block must have been recorded for one rank.
    pub fn shared_inputs(&self) -> Vec<SharedInput> {
        let mut found: Vec<(Value, Option<SharedInput>)> = Vec::new();
        for facts in self.facts.iter().filter(|facts| facts.is_row_product) {
            let x = facts.inputs[0];
            if found.iter().all(|(known, _)| *known != x) {
                found.push((x, self.shared_input(x)));
            }
        }
        found.into_iter().filter_map(|(_, input)| input).collect()
    }

    fn shared_input(&self, x: Value) -> Option<SharedInput> {
        if x == self.output || !self.readers(x).all(|facts| facts.is_row_product) {
            return None;
        }
        let columns = self.shapes.values[x.0].columns;
        let weights: Vec<ParameterIndex> = self.readers(x).map(|facts| facts.weights[0]).collect();
        let is_scalable = |&weight: &ParameterIndex| {
            self.is_used_once(weight) && self.parameters()[weight.0].shape[1..] == [columns]
        };
        if !weights.iter().all(is_scalable) {
            return None;
        }
        let (mut value, mut rows) = (x, (0..columns).collect::<Vec<usize>>());
        loop {
            let producer = self.facts.iter().position(|facts| facts.outputs.first() == Some(&value))?;
            match self.operations[producer].column_scale()? {
                ColumnScale::Parameters { weight, bias, offset } => {
                    let of_columns = self.parameters()[weight.0].shape[0];
                    let is_whole = of_columns == self.shapes.values[value.0].columns;
                    let is_own =
                        is_whole && [Some(weight), bias].iter().flatten().all(|p| self.is_used_once(*p));
                    return is_own.then_some(SharedInput {
                        weights,
                        producer: weight,
                        producer_bias: bias,
                        producer_offset: offset,
                        producer_rows: rows,
                    });
                }
                ColumnScale::Input { input, group, head_dim } => {
                    if input == self.output || self.readers(input).count() != 1 {
                        return None;
                    }
                    value = input;
                    rows.iter_mut()
                        .for_each(|row| *row = *row / (group * head_dim) * head_dim + *row % head_dim);
                }
            }
        }
    }

    /// Returns the facts of the operations that read a value, once for each time they read it.
    fn readers(&self, value: Value) -> impl Iterator<Item = &Facts> {
        let times = move |facts: &Facts| {
            let alias = facts.alias_of.filter(|_| facts.reads().all(|read| read != value));
            facts.reads().chain(alias).filter(|read| *read == value).count()
        };
        self.facts.iter().flat_map(move |facts| std::iter::repeat_n(facts, times(facts)))
    }

    fn is_used_once(&self, parameter: ParameterIndex) -> bool {
        let used = |facts: &Facts| {
            let others = facts.buffers.iter().copied().chain(facts.selection_bias);
            facts.parameters().chain(others).filter(|used| *used == parameter).count()
        };
        self.facts.iter().map(used).sum::<usize>() == 1
    }
}

#[cfg(test)]
mod tests {
    use lockstep_plan::{DType, Recompute};
    use lockstep_tensor::GatedActivation;

    use super::*;
    use crate::{
        block::{Bias, BlockShape, Mode},
        ops::{
            attention::{AttentionOptions, AttentionShape},
            linear::Linear,
        },
        recorder::Recorder,
    };

    fn linear(g: &mut Recorder, x: Value, name: &str, out_features: usize) -> Value {
        g.linear(x, Linear { name, out_features, bias: Bias::With, std: 0.02 })
    }

    /// Records attention with two query heads of four columns for one key head, then a gated feed-forward. `also` reads the first norm.
    fn program(also: impl FnOnce(&mut Recorder, Value, Value) -> Value) -> Program {
        let mut g =
            Recorder::new(Mode::Inference, BlockShape { sequences: 1, seq_len: 3, dtype: DType::F32 });
        let x = g.input(8);
        let normed = g.rms_norm_around_one(x, "first", 8, 1e-5);
        let [q, k, v] = [("q", 8), ("k", 4), ("v", 4)].map(|(name, out)| linear(&mut g, normed, name, out));
        let attended = g.attention(q, k, v, AttentionShape::new(2, 1, 4), AttentionOptions::default());
        let attended = linear(&mut g, attended, "o", 8);
        let x = also(&mut g, attended, normed);
        let normed = g.layer_norm(x, "second", Bias::With, 1e-5);
        let [gate, up] = ["gate", "up"].map(|name| linear(&mut g, normed, name, 16));
        let active = g.gated(GatedActivation::Silu, gate, up);
        let down = linear(&mut g, active, "down", 8);
        let y = g.add(x, down);
        g.finish(y, Recompute::None)
    }

    /// Names of layers and of what produces their input, the offset of that, and its row for each column.
    type Described<'p> = (Vec<&'p str>, Vec<&'p str>, f32, Vec<usize>);

    /// Returns the names of the layers and of what produces their input, the offset, and the rows.
    fn inputs(program: &Program) -> Vec<Described<'_>> {
        let name = |index: &ParameterIndex| program.parameters()[index.0].name.as_str();
        let described = |input: &SharedInput| {
            let producers = [input.producer].into_iter().chain(input.producer_bias).collect::<Vec<_>>();
            let [layers, producers] =
                [&input.weights, &producers].map(|indices| indices.iter().map(name).collect());
            (layers, producers, input.producer_offset, input.producer_rows.clone())
        };
        program.shared_inputs().iter().map(described).collect()
    }

    #[test]
    fn inputs_are_scaled_where_norms_values_and_gated_layers_produce_them() {
        let program = program(|g, attended, _| g.add(attended, attended));
        let columns = |count: usize| (0..count).collect::<Vec<usize>>();
        let expected = [
            (vec!["q.weight", "k.weight", "v.weight"], vec!["first.weight"], 1.0, columns(8)),
            (vec!["o.weight"], vec!["v.weight", "v.bias"], 0.0, vec![0, 1, 2, 3, 0, 1, 2, 3]),
            (vec!["gate.weight", "up.weight"], vec!["second.weight", "second.bias"], 0.0, columns(8)),
            (vec!["down.weight"], vec!["up.weight", "up.bias"], 0.0, columns(16)),
        ];
        assert_eq!(inputs(&program), expected);
    }

    #[test]
    fn an_input_that_a_sum_reads_as_well_is_not_scaled() {
        let program = program(|g, attended, normed| g.add(attended, normed));
        let layers: Vec<Vec<&str>> = inputs(&program).into_iter().map(|(layers, ..)| layers).collect();
        assert_eq!(layers, [vec!["o.weight"], vec!["gate.weight", "up.weight"], vec!["down.weight"]]);
    }
}
