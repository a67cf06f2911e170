//! Products of heads with matrices of their own: latent attention in inference (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.2).
//!
//! A layer `W [heads · n, rank]` that projects keys from a latent `c` may multiply the queries instead: `q_h · (W_h c) = (q_h W_h) · c`.
//! A layer that projects values may multiply what attention gives for the latents: `Σ p (W_h c) = W_h (Σ p c)`. So attention reads
//! latents, which all heads share.

use lockstep_comm::CommError;
use lockstep_plan::{Initializer, work::TaskKind};
use lockstep_tensor::{GemmLayout, HeadProduct};

use crate::{
    block::{Mode, ParameterIndex, Value},
    facts::Facts,
    op::Op,
    ops::linear::Linear,
    placement::{Placement, Split},
    recorder::Recorder,
    replay::{Run, split_heads},
    work_context::{Work, WorkContext},
};

/// A layer that is applied to heads: `y_h = x_h W_h` or `y_h = x_h W_hᵀ`.
#[derive(Debug)]
struct HeadProductOperation {
    layout: GemmLayout,
    x: Value,
    weight: ParameterIndex,
    /// Heads on this rank.
    heads: usize,
    /// Elements that are summed.
    depth: usize,
    y: Value,
}

impl Recorder {
    /// Returns true if attention reads the latents that keys and values are projected from: in inference, where a cache holds latents.
    /// Ranks that share sequences exchange keys and values of heads.
    pub fn attends_to_latents(&self) -> bool {
        self.mode() == Mode::Inference && self.context.ranks == 1
    }

    /// Records `y_h = x_h W_h` of each of `heads` heads, for a layer `W [heads · n, rank]` that projects a latent of `rank` elements:
    /// the queries of its latents.
    ///
    /// # Panics
    /// If the block is recorded for training, the layer has an adapter, a head of `x` has other than `n` elements, or `x` is not
    /// sharded as the layer.
    #[track_caller]
    pub fn heads_to_latents(&mut self, x: Value, linear: Linear<'_>, heads: usize, rank: usize) -> Value {
        let depth = linear.out_features / heads;
        assert_eq!(
            self.columns(x),
            heads * depth,
            "{}: heads of {depth} in {}",
            linear.name,
            self.describe(x)
        );
        self.head_product(GemmLayout::NN, x, linear, [heads, depth, rank])
    }

    /// Records `y_h = x_h W_hᵀ` of each of `heads` heads, for a layer `W [heads · n, rank]` that projects a latent of `rank` elements.
    /// The latents are the first elements of each head of `x`.
    ///
    /// # Panics
    /// If the block is recorded for training, the layer has an adapter, a head of `x` has less than `rank` elements, or `x` is not
    /// sharded as the layer.
    #[track_caller]
    pub fn latents_to_heads(&mut self, x: Value, linear: Linear<'_>, heads: usize, rank: usize) -> Value {
        let width = self.columns(x) / heads;
        assert!(width >= rank, "{}: latents of {rank} elements in heads of {width}", linear.name);
        self.head_product(GemmLayout::NT, x, linear, [heads, rank, linear.out_features / heads])
    }

    #[track_caller]
    fn head_product(
        &mut self,
        layout: GemmLayout,
        x: Value,
        Linear { name, out_features, std, .. }: Linear<'_>,
        [heads, depth, width]: [usize; 3],
    ) -> Value {
        assert!(self.mode() == Mode::Inference, "{name}: products of heads have no backward");
        let is_adapted = self.low_rank.as_ref().is_some_and(|adapters| adapters.layers.contains_key(name));
        assert!(!is_adapted, "{name}: a layer that is applied to heads has no adapter");
        let rank = if layout == GemmLayout::NN { width } else { depth };
        let placement = self.placement(x);
        let share = match self.split_of(name) {
            Some(Split::ColumnParallel { pieces }) => {
                let parts = self.parts(name, pieces);
                let is_sharded = |placement| placement == Placement::ShardColumns { parts };
                self.expect_placement(x, is_sharded, name);
                self.shard(0, out_features, parts)
            }
            _ => self.whole_share(placement),
        };
        let weight = self.parameter(
            format!("{name}.weight"),
            &[out_features, rank],
            Initializer::Normal { std },
            share,
        );
        let y = self.value_like(x, heads * width);
        let heads = heads * self.local_columns(x) / self.columns(x);
        self.push(HeadProductOperation { layout, x, weight, heads, depth, y });
        y
    }
}

impl Op for HeadProductOperation {
    fn facts(&self) -> Facts {
        Facts {
            weights: vec![self.weight],
            is_long: true,
            ..Facts::of("product of heads", [self.x], [self.y])
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let of_heads = |value: Value| {
            let view = run.value(value);
            split_heads(view, self.heads, view.shape().as_matrix().1 / self.heads)
        };
        let (x, y) = (of_heads(self.x), of_heads(self.y));
        let (layout, weight) = (self.layout, run.matrix(self.weight));
        run.queue().multiply_heads(HeadProduct { layout, x, weight, y });
        Ok(())
    }

    fn work(&self, context: &WorkContext<'_>) -> Vec<Work> {
        let (shapes, heads) = (context.shapes, self.heads as u64);
        let [rows, columns] = [shapes.rows(self.y), shapes.columns(self.y)];
        let product = context.product([rows, self.depth as u64, columns / heads], heads);
        vec![context.task(TaskKind::Product(product), product.flops())]
    }
}
