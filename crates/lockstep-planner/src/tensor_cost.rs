//! Communication volume of tensor parallelism in 1, 2, 2.5 and 3 dimensions, for layouts from the literature.
//!
//! A linear layer `y = x W` maps `x [tokens, inputs]` by `W [inputs, outputs]` to `y [tokens, outputs]`, in the forward and in the two
//! products of its backward. Below, `X`, `W` and `Y` are the elements of these three, and `p` is the number of ranks. Volumes are what
//! one rank receives, by bandwidth-optimal collectives.
//!
//! ```text
//! 1D    p          by outputs: 2 X (p-1)/p              by inputs: 2 Y (p-1)/p            whole activations between layers
//! 2D    q x q      3 (q-1) (X + W) / p
//! 2.5D  q x q x d  3 (q-1) (X / p + W / q^2) + 2 W / q^2 (d-1)/d                          `d` copies of the weights
//! 3D    l x l x l  (l-1) (3 X + 3 W + 2 Y) / p
//! ```
//!
//! 1D after Shoeybi et al. (2019): one all-reduce in the backward or the forward. 2D after Xu et al. (2021, Optimus), SUMMA of van de
//! Geijn and Watts (1997): each of the products moves two of the three matrices, panel by panel. 2.5D after Wang et al. (2021,
//! Tesseract): `d` such squares shard the tokens, and all-reduce the gradients of the weights that they replicate. 3D after Bian et al.
//! (2021): each product gathers two matrices and scatters the third; the two of the backward have one in common.
//!
//! So 1D communicates only activations, and the others weights as well. They pay off if a rank has many tokens relative to the hidden
//! size.

/// Layout of the ranks of a tensor-parallel group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TensorLayout {
    /// 1D: ranks in a row; weights are sharded by columns, then by rows.
    OneDimension {
        /// Number of ranks.
        ranks: usize,
    },
    /// 2D: ranks in a square.
    TwoDimensions {
        /// Ranks on a side of the square.
        side: usize,
    },
    /// 2.5D: several squares, each with all weights.
    TwoAndAHalfDimensions {
        /// Ranks on a side of a square.
        side: usize,
        /// Number of squares.
        depth: usize,
    },
    /// 3D: ranks in a cube.
    ThreeDimensions {
        /// Ranks on a side of the cube.
        side: usize,
    },
}

/// Dimension by which a linear layer is sharded in the 1D layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LinearSplit {
    /// Column-parallel: outputs are sharded, and the gradient of the input is all-reduced.
    Outputs,
    /// Row-parallel: inputs are sharded, and the output is all-reduced.
    Inputs,
}

/// Shape of a linear layer and of its input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LinearShape {
    /// Rows of the input: tokens of a micro-batch.
    pub tokens: usize,
    /// Columns of the input.
    pub inputs: usize,
    /// Columns of the output.
    pub outputs: usize,
    /// Sharded dimension in the 1D layout.
    pub split: LinearSplit,
}

/// Cost of a linear layer on a rank, for one forward and backward.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct TensorCost {
    /// Elements that the rank receives.
    pub received_elements: f64,
    /// Collectives that the rank takes part in.
    pub collectives: usize,
    /// Elements of the weight on the rank.
    pub weight_elements: f64,
}

impl std::ops::Add for TensorCost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            received_elements: self.received_elements + other.received_elements,
            collectives: self.collectives + other.collectives,
            weight_elements: self.weight_elements + other.weight_elements,
        }
    }
}

impl TensorLayout {
    /// Returns every layout of `ranks` ranks, 1D first. Sides of squares and cubes, and the depth, are 2 or more.
    pub fn all_of(ranks: usize) -> Vec<Self> {
        let squares = (2..=ranks).take_while(|side| side * side <= ranks);
        let mut all = vec![Self::OneDimension { ranks }];
        all.extend(squares.filter(|side| ranks.is_multiple_of(side * side)).map(|side| {
            match ranks / (side * side) {
                1 => Self::TwoDimensions { side },
                depth => Self::TwoAndAHalfDimensions { side, depth },
            }
        }));
        let cube = (2..=ranks).take_while(|side| side * side * side <= ranks).last();
        all.extend(
            cube.filter(|side| side * side * side == ranks).map(|side| Self::ThreeDimensions { side }),
        );
        all
    }

    /// Returns the number of ranks.
    pub const fn ranks(self) -> usize {
        match self {
            Self::OneDimension { ranks } => ranks,
            Self::TwoDimensions { side } => side * side,
            Self::TwoAndAHalfDimensions { side, depth } => side * side * depth,
            Self::ThreeDimensions { side } => side * side * side,
        }
    }

    /// Returns the cost of a linear layer on each rank, for one forward and backward.
    pub fn cost(self, linear: LinearShape) -> TensorCost {
        let LinearShape { tokens, inputs, outputs, split } = linear;
        let [x, w, y] = [tokens * inputs, inputs * outputs, tokens * outputs].map(|elements| elements as f64);
        let p = self.ranks() as f64;
        match self {
            Self::OneDimension { ranks } => {
                let summed = if split == LinearSplit::Outputs { x } else { y };
                TensorCost {
                    received_elements: 2.0 * summed * (p - 1.0) / p,
                    collectives: usize::from(ranks > 1),
                    weight_elements: w / p,
                }
            }
            Self::TwoDimensions { side } => Self::TwoAndAHalfDimensions { side, depth: 1 }.cost(linear),
            Self::TwoAndAHalfDimensions { side, depth } => {
                let (q, d) = (side as f64, depth as f64);
                let held = w / (q * q);
                let moved = 3.0 * (q - 1.0) * (x / p + held);
                TensorCost {
                    received_elements: moved + 2.0 * held * (d - 1.0) / d,
                    // Two panels in each step of each of the three products.
                    collectives: 6 * side + usize::from(depth > 1),
                    weight_elements: held,
                }
            }
            Self::ThreeDimensions { side } => TensorCost {
                received_elements: (side as f64 - 1.0) * (3.0 * x + 3.0 * w + 2.0 * y) / p,
                collectives: 8,
                weight_elements: w / p,
            },
        }
    }

    /// Returns the cost on each rank of the four linear layers of a transformer block with hidden size `hidden` and feed-forward width `4
    /// hidden`.
    pub fn block_cost(self, tokens: usize, hidden: usize) -> TensorCost {
        let (outputs, inputs) = (LinearSplit::Outputs, LinearSplit::Inputs);
        [(hidden, 3 * hidden, outputs), (hidden, hidden, inputs)]
            .into_iter()
            .chain([(hidden, 4 * hidden, outputs), (4 * hidden, hidden, inputs)])
            .map(|(inputs, outputs, split)| self.cost(LinearShape { tokens, inputs, outputs, split }))
            .fold(TensorCost::default(), |sum, cost| sum + cost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HIDDEN: usize = 4096;

    /// Returns the elements that a rank receives, in units of one activation.
    fn received(layout: TensorLayout, tokens: usize) -> f64 {
        layout.block_cost(tokens, HIDDEN).received_elements / (tokens * HIDDEN) as f64
    }

    fn assert_is(found: f64, expected: f64) {
        assert!((found - expected).abs() <= 1e-12 * expected, "{found}, and not {expected}");
    }

    #[test]
    fn a_row_sends_four_sums_of_activations() {
        for ranks in [1, 2, 8] {
            let layout = TensorLayout::OneDimension { ranks };
            assert_is(received(layout, 512), 8.0 * (ranks as f64 - 1.0) / ranks as f64);
            assert_eq!(layout.block_cost(512, HIDDEN).collectives, if ranks > 1 { 4 } else { 0 });
        }
    }

    #[test]
    fn closed_forms_of_a_block() {
        let tokens = 8192;
        let (q, l, ratio) = (4.0, 2.0, HIDDEN as f64 / tokens as f64);
        let square = 3.0 * (q - 1.0) / (q * q) * (7.0 + 12.0 * ratio);
        assert_is(received(TensorLayout::TwoDimensions { side: 4 }, tokens), square);
        let cube = (l - 1.0) / (l * l * l) * (39.0 + 36.0 * ratio);
        assert_is(received(TensorLayout::ThreeDimensions { side: 2 }, tokens), cube);
    }

    #[test]
    fn one_square_is_two_dimensions_and_more_hold_the_weights_as_often() {
        let tokens = 2048;
        let one = TensorLayout::TwoAndAHalfDimensions { side: 2, depth: 1 };
        assert_eq!(
            one.block_cost(tokens, HIDDEN),
            TensorLayout::TwoDimensions { side: 2 }.block_cost(tokens, HIDDEN)
        );
        let two = TensorLayout::TwoAndAHalfDimensions { side: 2, depth: 2 };
        assert_eq!(two.ranks(), 8);
        let weights = (12 * HIDDEN * HIDDEN) as f64;
        assert_is(two.block_cost(tokens, HIDDEN).weight_elements * 8.0, 2.0 * weights);
        assert_is(
            TensorLayout::ThreeDimensions { side: 2 }.block_cost(tokens, HIDDEN).weight_elements * 8.0,
            weights,
        );
    }

    #[test]
    fn every_layout_of_a_number_of_ranks_has_that_number() {
        for ranks in 1..=512 {
            assert!(TensorLayout::all_of(ranks).into_iter().all(|layout| layout.ranks() == ranks), "{ranks}");
        }
        let count = |ranks| TensorLayout::all_of(ranks).len();
        assert_eq!([1, 2, 4, 8, 12, 64].map(count), [1, 1, 2, 3, 2, 5]);
    }

    /// Returns the number of tokens, in hidden sizes, from which on a layout receives less than 1D with equally many ranks.
    fn wins_from(layout: TensorLayout) -> f64 {
        let row = TensorLayout::OneDimension { ranks: layout.ranks() };
        let wins = |tokens: &usize| received(layout, *tokens) < received(row, *tokens);
        let tokens = (1..40_000).map(|step| step * HIDDEN / 1000).find(wins);
        tokens.map_or(f64::INFINITY, |tokens| tokens as f64 / HIDDEN as f64)
    }

    #[test]
    fn squares_and_cubes_pay_where_tokens_are_many_and_ranks_too() {
        let close =
            |found: f64, expected: f64| assert!((found - expected).abs() < 0.01, "{found}, not {expected}");
        close(wins_from(TensorLayout::TwoDimensions { side: 2 }), 12.0);
        close(wins_from(TensorLayout::TwoDimensions { side: 4 }), 1.895);
        close(wins_from(TensorLayout::TwoDimensions { side: 8 }), 0.708);
        close(wins_from(TensorLayout::ThreeDimensions { side: 2 }), 2.118);
        close(wins_from(TensorLayout::ThreeDimensions { side: 4 }), 0.279);
    }
}
