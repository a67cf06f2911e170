//! Device mesh: ranks laid out on named axes, and the process groups along them.
//!
//! The mesh is pure arithmetic. Ranks are numbered like the digits of a number, slowest axis first: pipeline, replicate, shard, context,
//! tensor. Neighbouring ranks usually share a machine, so they differ in the axis with the most communication. Experts use a second view
//! of the same ranks: the product of shard, context and tensor is split again into expert shard, expert, and expert tensor.
//!
//! ```text
//!     pipeline │ replicate │ shard        │ context │ tensor             View<Axis>
//!     pipeline │ replicate │ expert shard │ expert  │ expert tensor      View<ExpertAxis>
//! ```

use serde::{Deserialize, Serialize};

use crate::named_enum::named_enum;
use crate::nearest::{Choices, nearest_divisor};
use crate::{Among, ReductionGroup, ShardPlace, ZeroStage};

named_enum! {
    /// Axis of the view for everything except experts, slowest first.
    #[derive(PartialOrd, Ord)]
    pub enum Axis {
        /// Pipeline parallelism: ranks have different stages of the model.
        Pipeline = "pipeline",
        /// Replicated data parallelism: ranks hold copies of the parameters and read different sequences.
        Replicate = "replicate",
        /// Sharded data parallelism: ranks read different sequences and shard parameters, gradients or optimizer state (ZeRO, FSDP).
        Shard = "shard",
        /// Context parallelism: ranks have different tokens of each sequence.
        Context = "context",
        /// Tensor parallelism: ranks have different shards of each matrix.
        Tensor = "tensor",
    }
}

impl Axis {
    /// Data-parallel axes: ranks along them read different sequences.
    pub const BATCH: [Self; 2] = [Self::Replicate, Self::Shard];
    /// Axes whose ranks see different tokens, so that gradients are reduced over them.
    pub const TOKENS: [Self; 3] = [Self::Replicate, Self::Shard, Self::Context];
}

/// Axis of the expert view, slowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExpertAxis {
    /// Pipeline parallelism, the same as [`Axis::Pipeline`].
    Pipeline,
    /// Replicated data parallelism, the same as [`Axis::Replicate`].
    Replicate,
    /// Ranks with the same experts, over which the experts' state may be sharded.
    ExpertShard,
    /// Expert parallelism: ranks have different experts.
    Expert,
    /// Tensor parallelism within an expert: ranks have different shards of its matrices.
    ExpertTensor,
}

/// Degrees of the mesh axes as written in a file; an omitted axis has degree 1. [`Mesh::new`] checks them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Degrees {
    /// Degree of pipeline parallelism.
    pub pipeline: usize,
    /// Number of data-parallel replicas, each of which may be sharded.
    pub replicate: usize,
    /// Number of ranks over which the state of each replica is sharded.
    pub shard: usize,
    /// Degree of context parallelism.
    pub context: usize,
    /// Degree of tensor parallelism.
    pub tensor: usize,
    /// Expert-parallel degree; the ranks are taken from tensor, context and shard, in this order.
    pub expert: usize,
    /// Tensor-parallel degree within an expert: a divisor of `tensor`.
    pub expert_tensor: usize,
}

impl Default for Degrees {
    fn default() -> Self {
        Self { pipeline: 1, replicate: 1, shard: 1, context: 1, tensor: 1, expert: 1, expert_tensor: 1 }
    }
}

impl Degrees {
    /// Returns the degree of an axis.
    pub const fn of(&self, axis: Axis) -> usize {
        match axis {
            Axis::Pipeline => self.pipeline,
            Axis::Replicate => self.replicate,
            Axis::Shard => self.shard,
            Axis::Context => self.context,
            Axis::Tensor => self.tensor,
        }
    }

    /// Returns the number of ranks; `None` if it does not fit a `u32`.
    pub fn world_size(&self) -> Option<usize> {
        let product = Axis::ALL.iter().try_fold(1_usize, |world, &axis| world.checked_mul(self.of(axis)));
        product.filter(|&world| u32::try_from(world).is_ok())
    }

    /// Returns everything that keeps these degrees from forming a mesh; empty if they form one.
    pub fn problems(&self) -> Vec<MeshProblem> {
        let expert_degrees = [("expert", self.expert), ("expert_tensor", self.expert_tensor)];
        let mut problems: Vec<_> = Axis::ALL
            .iter()
            .map(|&axis| (axis.name(), self.of(axis)))
            .chain(expert_degrees)
            .filter(|&(_, degree)| degree == 0)
            .map(|(axis, _)| MeshProblem::Zero { axis })
            .collect();
        if !problems.is_empty() {
            return problems;
        }
        if self.world_size().is_none() {
            return vec![MeshProblem::TooManyRanks];
        }
        if !self.tensor.is_multiple_of(self.expert_tensor) {
            problems.push(MeshProblem::ExpertTensor {
                expert_tensor: self.expert_tensor,
                tensor: self.tensor,
                nearest: nearest_divisor(self.expert_tensor, self.tensor),
            });
            return problems;
        }
        let ranks = self.shard * self.context * self.tensor / self.expert_tensor;
        if !ranks.is_multiple_of(self.expert) {
            problems.push(MeshProblem::Expert {
                expert: self.expert,
                ranks,
                nearest: nearest_divisor(self.expert, ranks),
            });
        }
        problems
    }
}

/// Reason why [`Degrees`] do not form a mesh.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MeshProblem {
    /// A degree is zero.
    #[error("the degree of {axis} is 0; an axis that is not used has degree 1")]
    Zero {
        /// Name of the axis.
        axis: &'static str,
    },
    /// The product of the degrees exceeds a `u32`.
    #[error("the degrees multiply to more ranks than can be counted")]
    TooManyRanks,
    /// The tensor degree within experts does not divide the tensor degree.
    #[error("expert_tensor {expert_tensor} does not divide tensor {tensor}; {nearest}")]
    ExpertTensor {
        /// Degree of the expert tensor axis.
        expert_tensor: usize,
        /// Tensor degree, which it has to divide.
        tensor: usize,
        /// Nearest valid degrees.
        nearest: Choices,
    },
    /// The expert degree does not divide the ranks of shard, context and tensor.
    #[error("expert {expert} does not divide shard x context x tensor / expert_tensor = {ranks}; {nearest}")]
    Expert {
        /// Degree of expert parallelism.
        expert: usize,
        /// Number of ranks that it has to divide: `shard * context * tensor / expert_tensor`.
        ranks: usize,
        /// Nearest valid degrees.
        nearest: Choices,
    },
}

/// All problems of a set of degrees.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", crate::nearest::lines(.0))]
pub struct MeshError(pub Vec<MeshProblem>);

/// A mesh of ranks with valid [`Degrees`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Degrees", into = "Degrees")]
pub struct Mesh(Degrees);

impl Mesh {
    /// Returns true if a rank has the first copy of the model, or a part of it; the other copies are the same.
    pub fn is_in_first_replica(&self, rank: usize, zero_stage: ZeroStage) -> bool {
        self.replicated_axes(zero_stage).iter().all(|axis| self.ranks().coordinate(rank, *axis) == 0)
    }

    /// Returns the axes along which ranks hold the same parameters. Axes that experts are sharded over are not among them, nor those that
    /// ZeRO shards the state over.
    pub fn replicated_axes(&self, zero_stage: ZeroStage) -> &'static [Axis] {
        let view = self.experts();
        let experts = view.degree(ExpertAxis::Expert) * view.degree(ExpertAxis::ExpertTensor);
        if experts > 1 || zero_stage > ZeroStage::Nothing { &[Axis::Replicate] } else { &Axis::TOKENS }
    }

    /// Creates a mesh with the given degrees.
    ///
    /// # Errors
    /// If the degrees do not form a mesh; the error lists every problem.
    pub fn new(degrees: Degrees) -> Result<Self, MeshError> {
        let problems = degrees.problems();
        if problems.is_empty() { Ok(Self(degrees)) } else { Err(MeshError(problems)) }
    }

    /// Returns the degrees of the axes.
    pub const fn degrees(&self) -> Degrees {
        self.0
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.ranks().world_size()
    }

    /// Returns the view for everything except experts.
    pub fn ranks(&self) -> View<Axis> {
        View { axes: Axis::ALL.map(|axis| (axis, self.0.of(axis))) }
    }

    /// Returns the data-parallel degree: the number of parts in which a global batch is read.
    pub fn batch_parts(&self) -> usize {
        Axis::BATCH.iter().map(|axis| self.0.of(*axis)).product()
    }

    /// Returns the expert view of the same ranks.
    pub fn experts(&self) -> View<ExpertAxis> {
        let Degrees { pipeline, replicate, shard, context, tensor, expert, expert_tensor } = self.0;
        View {
            axes: [
                (ExpertAxis::Pipeline, pipeline),
                (ExpertAxis::Replicate, replicate),
                (ExpertAxis::ExpertShard, shard * context * tensor / expert / expert_tensor),
                (ExpertAxis::Expert, expert),
                (ExpertAxis::ExpertTensor, expert_tensor),
            ],
        }
    }
}

impl Mesh {
    /// Returns the size of the shard group of parameters whose gradients are reduced over `ReductionGroup`. Its ranks hold the same parameters
    /// and have the same replicate coordinate.
    pub fn shard_ranks(&self, ReductionGroup { among, summands }: ReductionGroup) -> usize {
        match among {
            // A column of a 2D layout has as many ranks as a row.
            Among::Tensor | Among::TensorColumn => {
                let ranks = self.ranks();
                ranks.degree(Axis::Shard) * ranks.degree(Axis::Context) * summands
            }
            Among::Experts => self.experts().degree(ExpertAxis::ExpertShard),
        }
    }

    /// Returns the position of `rank` in that shard group, whose ranks are in ascending order; see [`shard_ranks`](Mesh::shard_ranks).
    pub fn shard_place(&self, rank: usize, summing: ReductionGroup) -> ShardPlace {
        let (view, ranks) = (self.ranks(), self.shard_ranks(summing));
        let (tensor, summands) = (view.coordinate(rank, Axis::Tensor), summing.summands);
        let neighbour = match summing.among {
            Among::Experts => {
                return ShardPlace { ranks, rank: self.experts().coordinate(rank, ExpertAxis::ExpertShard) };
            }
            Among::Tensor => tensor % summands,
            Among::TensorColumn => tensor / summands,
        };
        let of_tokens = view.coordinate(rank, Axis::Shard) * view.degree(Axis::Context)
            + view.coordinate(rank, Axis::Context);
        ShardPlace { ranks, rank: of_tokens * summands + neighbour }
    }
}

impl Default for Mesh {
    /// A mesh of one rank.
    fn default() -> Self {
        Self(Degrees::default())
    }
}

impl TryFrom<Degrees> for Mesh {
    type Error = MeshError;

    fn try_from(degrees: Degrees) -> Result<Self, MeshError> {
        Self::new(degrees)
    }
}

impl From<Mesh> for Degrees {
    fn from(mesh: Mesh) -> Self {
        mesh.0
    }
}

/// Ranks of a [`Mesh`] laid out on five axes, slowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View<A> {
    axes: [(A, usize); 5],
}

impl<A: Copy + PartialEq> View<A> {
    /// Returns the axes and their degrees, slowest first.
    pub const fn axes(&self) -> &[(A, usize); 5] {
        &self.axes
    }

    /// Returns the degree of an axis.
    pub fn degree(&self, axis: A) -> usize {
        self.axes.iter().filter(|(candidate, _)| *candidate == axis).map(|(_, degree)| degree).product()
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.axes.iter().map(|(_, degree)| degree).product()
    }

    /// Returns the coordinates of a rank, slowest axis first. `rank` must be below the world size.
    pub fn coordinates(&self, rank: usize) -> [usize; 5] {
        let mut rest = rank;
        let mut coordinates = [0; 5];
        for (coordinate, (_, degree)) in coordinates.iter_mut().zip(self.axes).rev() {
            *coordinate = rest % degree;
            rest /= degree;
        }
        coordinates
    }

    /// Returns the coordinate of a rank on one axis.
    pub fn coordinate(&self, rank: usize, axis: A) -> usize {
        let coordinates = self.coordinates(rank);
        self.axes.iter().zip(coordinates).find(|((a, _), _)| *a == axis).map_or(0, |(_, place)| place)
    }

    /// Returns the rank at the given coordinates: the inverse of [`View::coordinates`].
    pub fn rank(&self, coordinates: [usize; 5]) -> usize {
        self.axes.iter().zip(coordinates).fold(0, |rank, (&(_, degree), place)| rank * degree + place)
    }

    /// Returns the groups of ranks that differ only in the given axes. Ranks of a group are in ascending order, groups in the order of
    /// their first ranks, and every rank is in exactly one group. Without axes, each rank is a group of its own.
    pub fn groups(&self, axes: &[A]) -> Vec<Vec<usize>> {
        let inside: usize =
            self.axes.iter().filter(|(axis, _)| axes.contains(axis)).map(|(_, degree)| degree).product();
        let mut groups: Vec<Vec<usize>> = Vec::with_capacity(self.world_size() / inside);
        let mut of_first = vec![usize::MAX; self.world_size()];
        for rank in 0..self.world_size() {
            let first = self.first_of_group(rank, axes);
            if first == rank {
                of_first[rank] = groups.len();
                groups.push(Vec::with_capacity(inside));
            }
            groups[of_first[first]].push(rank);
        }
        groups
    }

    /// Returns the group of one rank along the given axes, in ascending order.
    pub fn group_of(&self, rank: usize, axes: &[A]) -> Vec<usize> {
        let first = self.first_of_group(rank, axes);
        let mut group = vec![first];
        // Slowest axis first, so that ranks come in ascending order.
        let mut stride = self.world_size();
        for (axis, degree) in self.axes {
            stride /= degree;
            if axes.contains(&axis) {
                group = group
                    .iter()
                    .flat_map(|&base| (0..degree).map(move |place| base + place * stride))
                    .collect();
            }
        }
        group
    }

    /// Returns the lowest rank of the group of `rank` along the given axes.
    fn first_of_group(&self, rank: usize, axes: &[A]) -> usize {
        let mut coordinates = self.coordinates(rank);
        for ((axis, _), place) in self.axes.iter().zip(&mut coordinates) {
            if axes.contains(axis) {
                *place = 0;
            }
        }
        self.rank(coordinates)
    }
}

#[cfg(test)]
mod tests {
    use proptest::{prelude::*, sample::select, sample::subsequence};

    use super::*;

    /// Meshes of up to a few hundred ranks, with any valid expert view.
    fn meshes() -> impl Strategy<Value = Mesh> {
        [1..4_usize, 1..4, 1..5, 1..4, 1..5]
            .prop_flat_map(|[pipeline, replicate, shard, context, tensor]| {
                let divisors =
                    |n: usize| select((1..=n).filter(|d| n.is_multiple_of(*d)).collect::<Vec<_>>());
                let dense = Degrees { pipeline, replicate, shard, context, tensor, ..Degrees::default() };
                divisors(tensor).prop_flat_map(move |expert_tensor| {
                    divisors(shard * context * tensor / expert_tensor).prop_map(move |expert| Degrees {
                        expert,
                        expert_tensor,
                        ..dense
                    })
                })
            })
            .prop_map(|degrees| Mesh::new(degrees).unwrap())
    }

    const EXPERT_AXES: [ExpertAxis; 5] = [
        ExpertAxis::Pipeline,
        ExpertAxis::Replicate,
        ExpertAxis::ExpertShard,
        ExpertAxis::Expert,
        ExpertAxis::ExpertTensor,
    ];

    fn check_groups<A: Copy + PartialEq>(view: &View<A>, axes: &[A]) -> Result<(), TestCaseError> {
        let groups = view.groups(axes);
        let size: usize = axes.iter().map(|&axis| view.degree(axis)).product();
        let mut seen: Vec<usize> = groups.concat();
        for group in &groups {
            prop_assert_eq!(group.len(), size);
            prop_assert!(group.is_sorted(), "{:?}", group);
            prop_assert_eq!(group, &view.group_of(group[size / 2], axes));
            for &(axis, _) in view.axes().iter().filter(|(axis, _)| !axes.contains(axis)) {
                let places: Vec<_> = group.iter().map(|&rank| view.coordinate(rank, axis)).collect();
                prop_assert!(places.windows(2).all(|pair| pair[0] == pair[1]), "{:?}", places);
            }
        }
        prop_assert!(groups.is_sorted_by_key(|group| group[0]));
        seen.sort_unstable();
        prop_assert_eq!(seen, (0..view.world_size()).collect::<Vec<_>>());
        Ok(())
    }

    proptest! {
        #[test]
        fn shard_places_count_the_ranks_of_a_group_in_ascending_order(mesh in meshes()) {
            let view = mesh.ranks();
            let tensor = |rank: &usize| view.coordinate(*rank, Axis::Tensor);
            for rank in 0..mesh.world_size() {
                let degree = view.degree(Axis::Tensor);
                for summands in (1..=degree).filter(|summands| degree.is_multiple_of(*summands)) {
                    let mut group = view.group_of(rank, &[Axis::Shard, Axis::Context, Axis::Tensor]);
                    group.retain(|other| tensor(other) / summands == tensor(&rank) / summands);
                    let place = mesh.shard_place(rank, ReductionGroup { among: Among::Tensor, summands });
                    prop_assert_eq!((place.ranks, group[place.rank]), (group.len(), rank));
                }
                let group = mesh.experts().group_of(rank, &[ExpertAxis::ExpertShard]);
                let place = mesh.shard_place(rank, ReductionGroup { among: Among::Experts, summands: 1 });
                prop_assert_eq!((place.ranks, group[place.rank]), (group.len(), rank));
            }
        }

        #[test]
        fn groups_along_any_axes_partition_the_world(
            mesh in meshes(),
            axes in subsequence(Axis::ALL.to_vec(), 0..=5),
            expert_axes in subsequence(EXPERT_AXES.to_vec(), 0..=5),
        ) {
            check_groups(&mesh.ranks(), &axes)?;
            check_groups(&mesh.experts(), &expert_axes)?;
        }

        #[test]
        fn coordinates_lead_back_to_their_rank(mesh in meshes()) {
            prop_assert_eq!(mesh.experts().world_size(), mesh.world_size());
            for rank in 0..mesh.world_size() {
                prop_assert_eq!(mesh.ranks().rank(mesh.ranks().coordinates(rank)), rank);
                prop_assert_eq!(mesh.experts().rank(mesh.experts().coordinates(rank)), rank);
            }
        }

        #[test]
        fn experts_stay_within_their_stage_and_replica(mesh in meshes()) {
            for rank in 0..mesh.world_size() {
                let (dense, expert) = (mesh.ranks().coordinates(rank), mesh.experts().coordinates(rank));
                prop_assert_eq!(dense[..2].to_vec(), expert[..2].to_vec());
            }
        }
    }

    fn mesh(degrees: Degrees) -> Mesh {
        Mesh::new(degrees).unwrap()
    }

    #[test]
    fn tensor_ranks_are_neighbours_and_pipeline_ranks_are_far_apart() {
        let mesh = mesh(Degrees { pipeline: 2, shard: 2, tensor: 2, ..Degrees::default() });
        assert_eq!(mesh.ranks().groups(&[Axis::Tensor]), [[0, 1], [2, 3], [4, 5], [6, 7]]);
        assert_eq!(mesh.ranks().groups(&[Axis::Shard]), [[0, 2], [1, 3], [4, 6], [5, 7]]);
        assert_eq!(mesh.ranks().groups(&[Axis::Pipeline]), [[0, 4], [1, 5], [2, 6], [3, 7]]);
        assert_eq!(mesh.ranks().groups(&[Axis::Tensor, Axis::Pipeline]), [[0, 1, 4, 5], [2, 3, 6, 7]]);
    }

    #[test]
    fn experts_borrow_the_fastest_axes_first() {
        let degrees = Degrees { shard: 2, context: 2, tensor: 2, expert: 4, ..Degrees::default() };
        let experts = mesh(degrees).experts();
        assert_eq!(experts.groups(&[ExpertAxis::Expert]), [[0, 1, 2, 3], [4, 5, 6, 7]]);
        assert_eq!(experts.groups(&[ExpertAxis::ExpertShard]), [[0, 4], [1, 5], [2, 6], [3, 7]]);
        // With an expert tensor axis, the expert axis leaves those ranks alone.
        let experts = mesh(Degrees { expert_tensor: 2, ..degrees }).experts();
        assert_eq!(experts.groups(&[ExpertAxis::ExpertTensor]), [[0, 1], [2, 3], [4, 5], [6, 7]]);
        assert_eq!(experts.groups(&[ExpertAxis::Expert]), [[0, 2, 4, 6], [1, 3, 5, 7]]);
    }

    #[test]
    fn degrees_that_are_no_mesh_are_told_with_the_nearest_that_are() {
        let message = |degrees| Mesh::new(degrees).unwrap_err().to_string();
        let degrees = Degrees::default();
        assert_eq!(
            message(Degrees { shard: 0, expert: 0, ..degrees }),
            "the degree of shard is 0; an axis that is not used has degree 1\n\
             the degree of expert is 0; an axis that is not used has degree 1"
        );
        assert_eq!(
            message(Degrees { tensor: 4, expert_tensor: 3, ..degrees }),
            "expert_tensor 3 does not divide tensor 4; nearest: 2 or 4"
        );
        assert_eq!(
            message(Degrees { shard: 3, tensor: 4, expert: 5, ..degrees }),
            "expert 5 does not divide shard x context x tensor / expert_tensor = 12; nearest: 4 or 6"
        );
        assert_eq!(
            message(Degrees { shard: usize::MAX, tensor: 2, ..degrees }),
            "the degrees multiply to more ranks than can be counted"
        );
    }
}
