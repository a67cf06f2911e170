//! The output layer of a language model in inference, split by the vocabulary: each rank computes the logits of its tokens of the
//! vocabulary, and an all-gather gives every rank all of them.
//!
//! ```text
//! x [T, h] -> own logits [T, V_rank], padded to the widest rank -> all-gather [ranks, T · widest] -> y [T, V]
//! ```

use std::ops::Range;

use lockstep_comm::CommError;
use lockstep_plan::{
    Initializer, TensorPlace,
    work::{Collective, Peers as Ranks},
};
use lockstep_tensor::View;

use crate::{
    block::{ParameterIndex, Value},
    facts::Facts,
    op::Op,
    ops::linear::Linear,
    placement::{Placement, Split},
    recorder::Recorder,
    replay::Run,
    work_context::{Work, WorkContext},
};

/// The logits of all ranks. It has no backward: training computes losses from the logits of each rank.
#[derive(Debug)]
struct VocabularyParallelLogits {
    x: Value,
    weight: ParameterIndex,
    bias: Option<ParameterIndex>,
    /// Range of the vocabulary on each rank.
    ranges: Vec<Range<usize>>,
    /// Scratch: this rank's logits, with room for the widest range.
    own: Value,
    /// Scratch: the logits of all ranks, one rank after the other.
    gathered: Value,
    y: Value,
}

impl Recorder {
    /// Records the output layer without a loss: the logits `[tokens, vocabulary]`, on every rank.
    ///
    /// # Panics
    /// If the layer is split in any way other than by the vocabulary.
    #[track_caller]
    pub(crate) fn output_logits(&mut self, x: Value, output: Linear<'_>) -> Value {
        let Linear { name, out_features, bias, std } = output;
        if self.split_of(name) != Some(Split::VocabularyParallel) {
            return self.linear(x, output);
        }
        let x = self.partial_gradient(x);
        let share = self.vocabulary_shard(out_features);
        let shape = [out_features, self.columns(x)];
        let weight = self.parameter(format!("{name}.weight"), &shape, Initializer::Normal { std }, share);
        let bias = self.bias(bias, name, out_features, share);
        let range = |rank| TensorPlace { rank, ..self.place }.vocabulary_range(out_features);
        let ranges: Vec<Range<usize>> = (0..self.place.ranks).map(range).collect();
        let widest = ranges.iter().map(Range::len).max().unwrap_or(0);
        let (rows, dtype) = (self.local_rows(x), self.shape.dtype);
        let own = self.local(1, rows * widest, dtype);
        let gathered = self.local(ranges.len(), rows * widest, dtype);
        let y = self.value_beside(x, out_features, Placement::Replicate);
        self.push(VocabularyParallelLogits { x, weight, bias, ranges, own, gathered, y });
        y
    }
}

impl Op for VocabularyParallelLogits {
    fn facts(&self) -> Facts {
        let Self { x, weight, bias, own, gathered, y, .. } = *self;
        Facts {
            weights: vec![weight],
            bias,
            scratch: vec![own, gathered],
            is_long: true,
            ..Facts::of("output layer", [x], [y])
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let (peers, queue) = (run.peers(), run.queue());
        let (x, y) = (run.value(self.x), run.value(self.y));
        let (rows, vocabulary) = y.shape().as_matrix();
        let (own, gathered) = (run.value(self.own), run.value(self.gathered));
        let width = self.ranges[peers.group.rank()].len();
        let logits = run.flat(self.own).rows(0..rows * width).reshape([rows, width]);
        run.multiply(x, self.weight, self.bias.map(|bias| run.weight(bias)), logits, rows);
        peers.gather(own, gathered)?;
        let y: View<'_> = y.reshape([rows * vocabulary]);
        for (rank, range) in self.ranges.iter().enumerate() {
            let of_rank = gathered.rows(rank..rank + 1);
            let of_rank = of_rank.reshape([of_rank.elements()]);
            for row in 0..rows {
                let from = of_rank.rows(row * range.len()..(row + 1) * range.len());
                let start = row * vocabulary + range.start;
                queue.cast(from, y.rows(start..start + range.len()));
            }
        }
        Ok(())
    }

    fn work(&self, context: &WorkContext<'_>) -> Vec<Work> {
        let shapes = context.shapes;
        let product =
            [shapes.rows(self.x), shapes.columns(self.x), shapes.columns(self.own) / shapes.rows(self.x)];
        let gather = Work::exchange(Ranks::Tensor, Collective::AllGather, shapes.bytes(self.gathered));
        vec![context.products(product, 1), gather]
    }
}
