//! The groups of ranks that a mesh makes of the world, as the engine uses them: who shares its blocks, and over whom its
//! gradients are summed.

use std::{sync::Arc, time::Duration};

use lockstep_comm::{CommError, Deadline, Group, Meter, Metered, ReduceOp};
use lockstep_graph::{GridPeers, Peers};
use lockstep_plan::{
    Among, Axis, ContextMethod, ContextPlace, ExpertAxis, ExpertPlace, Mesh, ParameterRecord, Quantization,
    Share, Summing, TensorDimensions, TensorPlace, ZeroStage, exact::ExactSum, gathering::Gathering,
    gathering::LiveParameters,
};
use lockstep_tensor::View;

use crate::{PipelinePlan, pipeline::Pipeline};

/// How ranks work together, beside the degrees of their mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupOptions {
    /// Whether tensor-parallel ranks split values by tokens between the products (sequence parallelism).
    pub splits_tokens: bool,
    /// Whether they share linear layers as a row or as a square, which splits tokens in any case.
    pub tensor_dimensions: TensorDimensions,
    /// Chunks of rows in which tensor-parallel ranks exchange values beside their products; left out, it depends on what lies
    /// between them.
    pub tensor_chunks: Option<usize>,
    /// Whether each of them keeps a slice of the inputs of blocks that are computed again, where all have the same.
    pub partitions_activations: bool,
    /// How attention reaches the tokens that other context-parallel ranks hold.
    pub context_method: ContextMethod,
    /// What of the model's state is shared out over the shard axis.
    pub zero_stage: ZeroStage,
    /// What these ranks send as small integers.
    pub quantization: Quantization,
    /// Where parameters are shared out, how many are whole at once.
    pub live_parameters: LiveParameters,
    /// Neighbours among which what a step has gathered is kept once more, so that its further gathers ask these alone.
    pub secondary_shard: Option<usize>,
    /// Gradients are summed in buckets of up to so many bytes.
    pub bucket_bytes: usize,
    /// No wait for another rank is longer.
    pub limit: Duration,
}

impl GroupOptions {
    /// How weights are gathered.
    pub(crate) fn gathering(&self) -> Gathering {
        Gathering { live: self.live_parameters, secondary_shard: self.secondary_shard }
    }
}

/// Chunks of rows, where nobody says how many. Over a network, few enough that each is worth a message and a product. Within a
/// machine nothing is on its way by itself: ranks copy what they exchange with the cores that they multiply with.
fn chunks_for(group: &Group) -> usize {
    const OVER_A_NETWORK: usize = 4;
    if group.is_on_one_machine() { 1 } else { OVER_A_NETWORK }
}

/// The groups that a rank is in.
#[derive(Debug, Clone)]
pub struct Groups {
    world: Option<World>,
    places: Places,
}

/// A rank's places in its mesh, for which its model is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Places {
    /// Among those that share its blocks.
    pub tensor: TensorPlace,
    /// Among those that share its sequences.
    pub context: ContextPlace,
    /// Among those that share out experts.
    pub experts: ExpertPlace,
}

impl Places {
    /// Those of `rank`; exchanges are at once unless `options` says in how many chunks.
    pub fn of(mesh: &Mesh, rank: usize, options: &GroupOptions) -> Self {
        let (ranks, experts) = (mesh.ranks(), mesh.experts());
        let is_row = ranks.degree(Axis::Tensor) > 1 && options.tensor_dimensions == TensorDimensions::One;
        Self {
            tensor: TensorPlace {
                ranks: ranks.degree(Axis::Tensor),
                rank: ranks.coordinate(rank, Axis::Tensor),
                splits_tokens: options.splits_tokens || options.tensor_dimensions == TensorDimensions::Two,
                dimensions: options.tensor_dimensions,
                chunks: options.tensor_chunks.filter(|_| is_row).unwrap_or(1),
                slices_inputs: options.partitions_activations && is_row && !options.splits_tokens,
            },
            context: ContextPlace {
                ranks: ranks.degree(Axis::Context),
                rank: ranks.coordinate(rank, Axis::Context),
                method: options.context_method,
            },
            experts: ExpertPlace {
                ranks: experts.degree(ExpertAxis::Expert),
                rank: experts.coordinate(rank, ExpertAxis::Expert),
                tensor_ranks: experts.degree(ExpertAxis::ExpertTensor),
                tensor_rank: experts.coordinate(rank, ExpertAxis::ExpertTensor),
            },
        }
    }
}

/// What there is only with other ranks.
#[derive(Debug, Clone)]
struct World {
    group: Group,
    mesh: Mesh,
    options: GroupOptions,
    /// Those that share its blocks.
    tensor: Option<Group>,
    /// Of these the row and the column that it is in, if they make a square.
    grid: Option<[Group; 2]>,
    /// Those that share out the experts of its layers.
    experts: Option<Group>,
    /// Those that share its sequences.
    context: Option<Group>,
    /// Those that share its sequences or its blocks: experts get other tokens of the same sequences from each.
    sequence: Option<Group>,
    /// Those that have the other stages of the model, and what all of them do.
    pipeline: Option<(Group, Arc<PipelinePlan>)>,
    /// Those that share the model in any way.
    model: Option<Group>,
    /// Those that have its first and its last unit, if that are several.
    ends: Option<Group>,
    /// Counts what is exchanged with those that share the model.
    meter: Arc<Meter>,
}

impl Groups {
    /// One rank.
    pub fn alone() -> Self {
        Self { world: None, places: Places::default() }
    }

    /// The groups of `mesh` over the ranks of `group`, which all call this together; `pipeline` says what the ranks of its pipeline
    /// do, if it has one.
    ///
    /// # Errors
    /// [`CommError`].
    ///
    /// # Panics
    /// If the mesh has another number of ranks, or its pipeline is not that of the plan.
    pub fn new(
        group: Group,
        mesh: Mesh,
        options: GroupOptions,
        pipeline: Option<PipelinePlan>,
    ) -> Result<Self, CommError> {
        assert_eq!(group.size(), mesh.world_size(), "a mesh of another size than its world");
        let ranks = mesh.ranks().degree(Axis::Pipeline);
        let planned = pipeline.as_ref().map_or(1, |plan| plan.schedule.ranks());
        assert_eq!(planned, ranks, "a plan for another pipeline than the mesh's");
        let mut places = Places::of(&mesh, group.rank(), &options);
        let mut world = World {
            group,
            mesh,
            options,
            tensor: None,
            grid: None,
            experts: None,
            sequence: None,
            context: None,
            pipeline: None,
            model: None,
            ends: None,
            meter: Arc::default(),
        };
        world.tensor = world.along(&[Axis::Tensor])?;
        if let Some(grid) = places.tensor.grid() {
            let rows = world.with_neighbours(&[], |tensor| tensor / grid.side);
            let columns = world.with_neighbours(&[], |tensor| tensor % grid.side);
            world.grid = world.metered(rows)?.zip(world.metered(columns)?).map(|(row, column)| [row, column]);
        }
        world.context = world.along(&[Axis::Context])?;
        world.sequence = world.along(&[Axis::Context, Axis::Tensor])?;
        let axes = [ExpertAxis::Expert, ExpertAxis::ExpertTensor];
        world.experts = world.metered(mesh.experts().groups(&axes))?;
        if let Some(plan) = pipeline {
            world.ends = world.ends_of(&plan)?;
            world.pipeline = world.along(&[Axis::Pipeline])?.map(|group| (group, Arc::new(plan)));
        }
        world.model = world.along(&[Axis::Pipeline, Axis::Shard, Axis::Context, Axis::Tensor])?;
        let in_a_row = world.tensor.as_ref().filter(|_| options.tensor_dimensions == TensorDimensions::One);
        if let Some(group) = in_a_row.filter(|_| options.tensor_chunks.is_none()) {
            places.tensor.chunks = chunks_for(group);
        }
        Ok(Self { world: Some(world), places })
    }

    /// The rank's places in the mesh.
    pub fn places(&self) -> Places {
        self.places
    }

    /// Where the rank is among those that share its blocks.
    pub fn tensor_place(&self) -> TensorPlace {
        self.places.tensor
    }

    /// Where the rank is among those that share its sequences.
    pub fn context_place(&self) -> ContextPlace {
        self.places.context
    }

    /// Those that share its sequences, if there are any.
    pub(crate) fn context_peers(&self) -> Option<Peers<'_>> {
        let World { context, options, .. } = self.world.as_ref()?;
        context.as_ref().map(|group| Peers { group, limit: options.limit })
    }

    /// Whether the rank is the one, of those that own the same of one copy of the model, that counts and saves it.
    pub(crate) fn speaks_for(&self, share: &Share) -> bool {
        let Some(World { group, mesh, options, .. }) = &self.world else { return true };
        let rank = group.rank();
        let is_shared_out = options.zero_stage > ZeroStage::Nothing;
        match share.among {
            Among::Tensor => {
                let is_first = |axis| mesh.ranks().coordinate(rank, axis) == 0;
                let neighbour = if is_shared_out {
                    self.places.tensor.rank / share.summands
                } else {
                    self.places.tensor.rank
                };
                let copies = if is_shared_out { share.copies.div_ceil(share.summands) } else { share.copies };
                (is_shared_out || is_first(Axis::Shard) && is_first(Axis::Context))
                    && neighbour.is_multiple_of(copies)
            }
            Among::TensorColumn => {
                let is_first = |axis| mesh.ranks().coordinate(rank, axis) == 0;
                let is_of_first_row = self.places.tensor.grid().is_none_or(|grid| grid.row == 0);
                is_shared_out || is_first(Axis::Shard) && is_of_first_row
            }
            Among::Experts => is_shared_out || mesh.experts().coordinate(rank, ExpertAxis::ExpertShard) == 0,
        }
    }

    /// Those that route other tokens of the same sequences, if there are any.
    pub(crate) fn sequence_peers(&self) -> Option<Peers<'_>> {
        let World { sequence, options, .. } = self.world.as_ref()?;
        sequence.as_ref().map(|group| Peers { group, limit: options.limit })
    }

    /// Those that share out the experts of its layers, if there are any.
    pub(crate) fn expert_peers(&self) -> Option<Peers<'_>> {
        let World { experts, options, .. } = self.world.as_ref()?;
        experts.as_ref().map(|group| Peers { group, limit: options.limit })
    }

    /// Those that share its blocks, if there are any.
    pub(crate) fn peers(&self) -> Option<Peers<'_>> {
        let World { tensor, options, .. } = self.world.as_ref()?;
        tensor.as_ref().map(|group| Peers { group, limit: options.limit })
    }

    /// Its row and its column, if they make a square.
    pub(crate) fn grid_peers(&self) -> Option<GridPeers<'_>> {
        let World { grid, options, .. } = self.world.as_ref()?;
        let [row, column] = grid.as_ref()?.each_ref().map(|group| Peers { group, limit: options.limit });
        Some(GridPeers { row, column })
    }

    /// The rank's part in the pipeline, if there is one.
    pub(crate) fn pipeline(&self) -> Option<Pipeline> {
        let World { pipeline, options, .. } = self.world.as_ref()?;
        let (group, plan) = pipeline.clone()?;
        Some(Pipeline::new(plan, group, options.limit))
    }

    /// What the ranks of the pipeline do, and which of them this is.
    pub fn pipeline_plan(&self) -> Option<(&PipelinePlan, usize)> {
        let (group, plan) = self.world.as_ref()?.pipeline.as_ref()?;
        Some((plan, group.rank()))
    }

    /// Adds what the ranks with the first and the last unit have of a gradient, on these ranks.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn sum_over_ends(&self, gradient: View<'_>) -> Result<(), CommError> {
        let Some(World { ends: Some(group), options, .. }) = &self.world else { return Ok(()) };
        group.all_reduce(gradient, ReduceOp::Sum, Deadline::after(options.limit))
    }

    /// The exact sum of what the ranks that share a model have of it.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn sum_over_model(&self, sum: &ExactSum) -> Result<ExactSum, CommError> {
        let mut words = sum.to_words();
        if let Some(World { model: Some(group), options, .. }) = &self.world {
            group.all_reduce(&mut words[..], ReduceOp::Sum, Deadline::after(options.limit))?;
        }
        Ok(ExactSum::from_words(&words))
    }

    /// Adds the numbers of all ranks.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn sum_over_world(&self, numbers: &mut [i64]) -> Result<(), CommError> {
        let Some(World { group, options, .. }) = &self.world else { return Ok(()) };
        group.all_reduce(numbers, ReduceOp::Sum, Deadline::after(options.limit))
    }

    /// The groups over which gradients of `records` are summed; none where that is the rank alone.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn of_gradients(
        &self,
        records: &[ParameterRecord],
    ) -> Result<Vec<(Summing, Group)>, CommError> {
        let world = self.world.as_ref();
        let make = |ranks| world.map_or(Ok(None), |world| world.made_of(ranks));
        self.of_kinds(records, &Axis::TOKENS, &[ExpertAxis::Replicate, ExpertAxis::ExpertShard], make)
    }

    /// The groups of those that can share out what they hold of `records`; none where that is the rank alone.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn of_shards(&self, records: &[ParameterRecord]) -> Result<Vec<(Summing, Group)>, CommError> {
        let world = self.world.as_ref();
        let make = |ranks| world.map_or(Ok(None), |world| world.made_of(ranks));
        self.of_kinds(records, &[Axis::Shard, Axis::Context], &[ExpertAxis::ExpertShard], make)
    }

    /// Groups of the same ranks as those of [`Groups::of_shards`], and of nothing else's.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn of_shards_apart(
        &self,
        records: &[ParameterRecord],
    ) -> Result<Vec<(Summing, Group)>, CommError> {
        let world = self.world.as_ref();
        let make = |ranks: Vec<Vec<usize>>| world.map_or(Ok(None), |world| world.made_apart(&ranks));
        self.of_kinds(records, &[Axis::Shard, Axis::Context], &[ExpertAxis::ExpertShard], make)
    }

    /// Groups of [`GroupOptions::secondary_shard`] neighbours of those of [`Groups::of_shards`], where these are more and can be divided so.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn of_neighbours(
        &self,
        records: &[ParameterRecord],
    ) -> Result<Vec<(Summing, Group)>, CommError> {
        let Some(world) = &self.world else { return Ok(Vec::new()) };
        let gathering = world.options.gathering();
        let make = |ranks: Vec<Vec<usize>>| {
            // Groups of a kind have one size.
            let Some(count) = gathering.neighbours(ranks.first().map_or(0, Vec::len)) else {
                return Ok(None);
            };
            let neighbours = ranks.iter().flat_map(|group| group.chunks(count).map(<[usize]>::to_vec));
            world.made_apart(&neighbours.collect::<Vec<_>>())
        };
        self.of_kinds(records, &[Axis::Shard, Axis::Context], &[ExpertAxis::ExpertShard], make)
    }

    /// Which copy of the model the rank has a part of, among those whose ranks share it out: of experts, and of everything else.
    pub(crate) fn replica_of(&self, among: Among) -> usize {
        let Some(World { group, mesh, .. }) = &self.world else { return 0 };
        match among {
            Among::Experts => mesh.experts().coordinate(group.rank(), ExpertAxis::Replicate),
            _ => mesh.ranks().coordinate(group.rank(), Axis::Replicate),
        }
    }

    /// How many such copies there are.
    pub(crate) fn replicas_of(&self, among: Among) -> usize {
        let Some(World { mesh, .. }) = &self.world else { return 1 };
        match among {
            Among::Experts => mesh.experts().degree(ExpertAxis::Replicate),
            _ => self.replicas(),
        }
    }

    /// How many copies of the model there are, whole or shared out.
    pub(crate) fn replicas(&self) -> usize {
        self.world.as_ref().map_or(1, |world| world.mesh.ranks().degree(Axis::Replicate))
    }

    /// Those that own the same of other replicas, if there are any.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn of_replicas(&self) -> Result<Option<Group>, CommError> {
        let Some(world) = &self.world else { return Ok(None) };
        world.made_of(world.mesh.ranks().groups(&[Axis::Replicate]))
    }

    /// For each way in which gradients of `records` are summed, the ranks along some axes that hold the same; with them the
    /// neighbours on the tensor axis that have summands.
    fn of_kinds(
        &self,
        records: &[ParameterRecord],
        axes: &[Axis],
        of_experts: &[ExpertAxis],
        make: impl Fn(Vec<Vec<usize>>) -> Result<Option<Group>, CommError>,
    ) -> Result<Vec<(Summing, Group)>, CommError> {
        let Some(world) = &self.world else { return Ok(Vec::new()) };
        let mut kinds: Vec<Summing> = records.iter().map(|record| Summing::of(&record.share)).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let group = |kind: Summing| {
            let group = match kind.among {
                Among::Tensor => make(world.with_neighbours(axes, |tensor| tensor / kind.summands))?,
                // A column has as many ranks as a row.
                Among::TensorColumn => make(world.with_neighbours(axes, |tensor| tensor % kind.summands))?,
                Among::Experts => make(world.mesh.experts().groups(of_experts))?,
            };
            Ok(group.map(|group| (kind, group)))
        };
        kinds.into_iter().filter_map(|kind| group(kind).transpose()).collect()
    }

    /// What exchanges with those that share the model have cost since this was last asked. Sums of gradients are not among them.
    pub(crate) fn take_metered(&self) -> Metered {
        self.world.as_ref().map_or_else(Metered::default, |world| world.meter.take())
    }

    /// How all ranks are laid out.
    pub(crate) fn mesh(&self) -> Mesh {
        self.world.as_ref().map_or_else(Mesh::default, |world| world.mesh)
    }

    /// What of the model's state is shared out.
    pub fn zero_stage(&self) -> ZeroStage {
        self.options().map_or(ZeroStage::Nothing, |options| options.zero_stage)
    }

    /// The groups' options, with other ranks.
    pub(crate) fn options(&self) -> Option<GroupOptions> {
        self.world.as_ref().map(|world| world.options)
    }

    /// This rank.
    pub(crate) fn rank(&self) -> usize {
        self.world().map_or(0, Group::rank)
    }

    /// All ranks, if there are others.
    pub fn world(&self) -> Option<&Group> {
        self.world.as_ref().map(|world| &world.group)
    }
}

impl World {
    /// The rank's group along some axes that share the model, unless it is alone there.
    fn along(&self, axes: &[Axis]) -> Result<Option<Group>, CommError> {
        self.metered(self.mesh.ranks().groups(axes))
    }

    /// As [`World::made_of`], with the meter.
    fn metered(&self, groups: Vec<Vec<usize>>) -> Result<Option<Group>, CommError> {
        let group = self.made_of(groups)?;
        Ok(group.map(|group| group.with_meter(Arc::clone(&self.meter))))
    }

    /// Ranks that have the first and the last unit of one copy of the model and the same part of them.
    fn ends_of(&self, plan: &PipelinePlan) -> Result<Option<Group>, CommError> {
        let [first, last] = [0, plan.schedule.stages() - 1].map(|stage| plan.schedule.rank_of(stage));
        let view = self.mesh.ranks();
        let mut groups = view.groups(&[Axis::Pipeline]);
        for group in &mut groups {
            group.retain(|rank| [first, last].contains(&view.coordinate(*rank, Axis::Pipeline)));
        }
        self.metered(groups)
    }

    /// Ranks along some axes, with those on the tensor axis of each that are of the same part of it.
    fn with_neighbours(&self, axes: &[Axis], part: impl Fn(usize) -> usize) -> Vec<Vec<usize>> {
        let view = self.mesh.ranks();
        let axes: Vec<Axis> = axes.iter().copied().chain([Axis::Tensor]).collect();
        let part_of = |rank: &usize| part(view.coordinate(*rank, Axis::Tensor));
        let parts = (0..view.degree(Axis::Tensor)).map(&part).max().map_or(0, |last| last + 1);
        let cut = |group: Vec<usize>| -> Vec<Vec<usize>> {
            let of = |wanted: usize| group.iter().copied().filter(|rank| part_of(rank) == wanted).collect();
            (0..parts).map(of).collect()
        };
        view.groups(&axes).into_iter().flat_map(cut).collect()
    }

    /// The one of `groups` that the rank is in. No group of one rank is made.
    fn made_of(&self, groups: Vec<Vec<usize>>) -> Result<Option<Group>, CommError> {
        if groups.len() == 1 && groups[0].len() == self.group.size() && self.group.size() > 1 {
            return Ok(Some(self.group.clone()));
        }
        self.made_apart(&groups)
    }

    /// As [`World::made_of`], also where that is all ranks: operations of the two groups do not wait for each other.
    fn made_apart(&self, groups: &[Vec<usize>]) -> Result<Option<Group>, CommError> {
        if groups.iter().all(|group| group.len() == 1) {
            return Ok(None);
        }
        self.group.partition(groups, Deadline::after(self.options.limit))
    }
}
