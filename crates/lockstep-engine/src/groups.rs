//! The groups of ranks that a mesh makes of the world, as the engine uses them: who shares its blocks, and over whom its
//! gradients are summed.

use std::{sync::Arc, time::Duration};

use lockstep_comm::{CommError, Deadline, Group, Meter, Metered, ReduceOp};
use lockstep_graph::{GridGroups, Peers};
use lockstep_plan::{
    Among, Axis, ContextPlace, ExpertAxis, Mesh, ParameterRecord, Places, RankPlan, Share, Summing,
    TensorDimensions, TensorPlace, ZeroStage, exact::ExactSum, schedule::Schedule,
};
use lockstep_tensor::View;

use crate::pipeline::Pipeline;

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

/// What there is only with other ranks.
#[derive(Debug, Clone)]
struct World {
    group: Group,
    plan: RankPlan,
    /// No wait for another rank is longer.
    limit: Duration,
    /// The tensor-parallel group; `None` if its degree is 1.
    tensor: Option<Group>,
    /// The row and the column of the tensor-parallel group, if its ranks make a square.
    grid: Option<[Group; 2]>,
    /// The expert-parallel group; `None` if its degree is 1.
    experts: Option<Group>,
    /// The context-parallel group; `None` if its degree is 1.
    context: Option<Group>,
    /// Those that share its sequences or its blocks: experts get other tokens of the same sequences from each.
    sequence: Option<Group>,
    /// The pipeline-parallel group; `None` if its degree is 1.
    pipeline: Option<Group>,
    /// Those that share the model in any way.
    model: Option<Group>,
    /// Those that have its first and its last unit, if that are several.
    ends: Option<Group>,
    /// Counts what is exchanged with those that share the model.
    meter: Arc<Meter>,
}

impl Groups {
    /// Returns a group of one rank.
    pub fn alone() -> Self {
        Self { world: None, places: Places::default() }
    }

    /// The groups that `plan` makes of the ranks of `group`, which all call this together; no wait for another rank is longer than `limit`.
    ///
    /// # Errors
    /// If a rank is lost, or does not answer in time.
    ///
    /// # Panics
    /// If the plan is for another number of ranks, or for another rank.
    pub fn new(group: Group, plan: RankPlan, limit: Duration) -> Result<Self, CommError> {
        let mesh = *plan.mesh();
        assert_eq!((group.size(), group.rank()), (mesh.world_size(), plan.rank), "a plan for another world");
        let mut places = plan.places;
        let mut world = World {
            group,
            plan,
            limit,
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
        if let Some((schedule, _)) = world.plan.passes.pipeline.clone() {
            world.ends = world.ends_of(&schedule)?;
            world.pipeline = world.along(&[Axis::Pipeline])?;
        }
        world.model = world.along(&[Axis::Pipeline, Axis::Shard, Axis::Context, Axis::Tensor])?;
        let is_row = places.tensor.dimensions == TensorDimensions::One;
        let in_a_row = world.tensor.as_ref().filter(|_| is_row);
        if let Some(group) = in_a_row.filter(|_| world.plan.plan().tensor_chunks.is_none()) {
            places.tensor.chunks = chunks_for(group);
        }
        Ok(Self { world: Some(world), places })
    }

    /// The rank's places under `plan`, with the chunks of tensor-parallel collectives that suit what lies between the ranks.
    pub(crate) fn places_of(&self, plan: &RankPlan) -> Places {
        if self.world.is_some() { self.places } else { plan.places }
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
        let World { context, limit, .. } = self.world.as_ref()?;
        context.as_ref().map(|group| Peers { group, limit: *limit })
    }

    /// Whether the rank is the one, of those that own the same of one copy of the model, that counts and saves it.
    pub(crate) fn speaks_for(&self, share: &Share) -> bool {
        let Some(World { plan, .. }) = &self.world else { return true };
        let (mesh, rank) = (plan.mesh(), plan.rank);
        let is_shared_out = self.zero_stage() > ZeroStage::Nothing;
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
        let World { sequence, limit, .. } = self.world.as_ref()?;
        sequence.as_ref().map(|group| Peers { group, limit: *limit })
    }

    /// Those that share out the experts of its layers, if there are any.
    pub(crate) fn expert_peers(&self) -> Option<Peers<'_>> {
        let World { experts, limit, .. } = self.world.as_ref()?;
        experts.as_ref().map(|group| Peers { group, limit: *limit })
    }

    /// Those that share its blocks, if there are any.
    pub(crate) fn peers(&self) -> Option<Peers<'_>> {
        let World { tensor, limit, .. } = self.world.as_ref()?;
        tensor.as_ref().map(|group| Peers { group, limit: *limit })
    }

    /// Its row and its column, if they make a square.
    pub(crate) fn grid_peers(&self) -> Option<GridGroups<'_>> {
        let World { grid, limit, .. } = self.world.as_ref()?;
        let [row, column] = grid.as_ref()?.each_ref().map(|group| Peers { group, limit: *limit });
        Some(GridGroups { row, column })
    }

    /// The rank's part in the pipeline, if there is one.
    pub(crate) fn pipeline(&self) -> Option<Pipeline> {
        let World { pipeline, plan, limit, .. } = self.world.as_ref()?;
        Some(Pipeline::new(plan, pipeline.clone()?, *limit))
    }

    /// The plan that the groups were made for; `None` of one rank alone.
    pub fn plan(&self) -> Option<&RankPlan> {
        self.world.as_ref().map(|world| &world.plan)
    }

    /// The longest wait for another rank; `None` of one rank alone.
    pub fn limit(&self) -> Option<Duration> {
        self.world.as_ref().map(|world| world.limit)
    }

    /// Adds what the ranks with the first and the last unit have of a gradient, on these ranks.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn sum_over_ends(&self, gradient: View<'_>) -> Result<(), CommError> {
        let Some(World { ends: Some(group), limit, .. }) = &self.world else { return Ok(()) };
        group.all_reduce(gradient, ReduceOp::Sum, Deadline::after(*limit))
    }

    /// The exact sum of what the ranks that share a model have of it.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn sum_over_model(&self, sum: &ExactSum) -> Result<ExactSum, CommError> {
        let mut words = sum.to_words();
        if let Some(World { model: Some(group), limit, .. }) = &self.world {
            group.all_reduce(&mut words[..], ReduceOp::Sum, Deadline::after(*limit))?;
        }
        Ok(ExactSum::from_words(&words))
    }

    /// Adds the numbers of all ranks.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn sum_over_world(&self, numbers: &mut [i64]) -> Result<(), CommError> {
        let Some(World { group, limit, .. }) = &self.world else { return Ok(()) };
        group.all_reduce(numbers, ReduceOp::Sum, Deadline::after(*limit))
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

    /// Groups of [`secondary_shard`](lockstep_plan::Sharding) neighbours of those of [`Groups::of_shards`], where these are more and can be divided so.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn of_neighbours(
        &self,
        records: &[ParameterRecord],
    ) -> Result<Vec<(Summing, Group)>, CommError> {
        let Some(world) = &self.world else { return Ok(Vec::new()) };
        let sharding = &world.plan.plan().sharding;
        let make = |ranks: Vec<Vec<usize>>| {
            // Groups of a kind have one size.
            let Some(count) = sharding.neighbours(ranks.first().map_or(0, Vec::len)) else {
                return Ok(None);
            };
            let neighbours = ranks.iter().flat_map(|group| group.chunks(count).map(<[usize]>::to_vec));
            world.made_apart(&neighbours.collect::<Vec<_>>())
        };
        self.of_kinds(records, &[Axis::Shard, Axis::Context], &[ExpertAxis::ExpertShard], make)
    }

    /// Which copy of the model the rank has a part of, among those whose ranks share it out: of experts, and of everything else.
    pub(crate) fn replica_of(&self, among: Among) -> usize {
        let Some(plan) = self.plan() else { return 0 };
        match among {
            Among::Experts => plan.mesh().experts().coordinate(plan.rank, ExpertAxis::Replicate),
            _ => plan.mesh().ranks().coordinate(plan.rank, Axis::Replicate),
        }
    }

    /// How many such copies there are.
    pub(crate) fn replicas_of(&self, among: Among) -> usize {
        let Some(plan) = self.plan() else { return 1 };
        match among {
            Among::Experts => plan.mesh().experts().degree(ExpertAxis::Replicate),
            _ => self.replicas(),
        }
    }

    /// How many copies of the model there are, whole or shared out.
    pub(crate) fn replicas(&self) -> usize {
        self.plan().map_or(1, |plan| plan.mesh().ranks().degree(Axis::Replicate))
    }

    /// Those that own the same of other replicas, if there are any.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn of_replicas(&self) -> Result<Option<Group>, CommError> {
        let Some(world) = &self.world else { return Ok(None) };
        world.made_of(world.mesh().ranks().groups(&[Axis::Replicate]))
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
                Among::Experts => make(world.mesh().experts().groups(of_experts))?,
            };
            Ok(group.map(|group| (kind, group)))
        };
        kinds.into_iter().filter_map(|kind| group(kind).transpose()).collect()
    }

    /// What exchanges with those that share the model have cost since this was last asked. Sums of gradients are not among them.
    pub(crate) fn take_metered(&self) -> Metered {
        self.world.as_ref().map_or_else(Metered::default, |world| world.meter.take())
    }

    /// The ZeRO stage.
    pub fn zero_stage(&self) -> ZeroStage {
        self.plan().map_or(ZeroStage::Nothing, |plan| plan.plan().effective_zero_stage())
    }

    /// All ranks, if there are others.
    pub fn world(&self) -> Option<&Group> {
        self.world.as_ref().map(|world| &world.group)
    }
}

impl World {
    fn mesh(&self) -> &Mesh {
        self.plan.mesh()
    }

    /// The rank's group along some axes that share the model, unless it is alone there.
    fn along(&self, axes: &[Axis]) -> Result<Option<Group>, CommError> {
        self.metered(self.mesh().ranks().groups(axes))
    }

    /// As [`World::made_of`], with the meter.
    fn metered(&self, groups: Vec<Vec<usize>>) -> Result<Option<Group>, CommError> {
        let group = self.made_of(groups)?;
        Ok(group.map(|group| group.with_meter(Arc::clone(&self.meter))))
    }

    /// Ranks that have the first and the last unit of one copy of the model and the same part of them.
    fn ends_of(&self, schedule: &Schedule) -> Result<Option<Group>, CommError> {
        let [first, last] = [0, schedule.stages() - 1].map(|stage| schedule.rank_of(stage));
        let view = self.mesh().ranks();
        let mut groups = view.groups(&[Axis::Pipeline]);
        for group in &mut groups {
            group.retain(|rank| [first, last].contains(&view.coordinate(*rank, Axis::Pipeline)));
        }
        self.metered(groups)
    }

    /// Ranks along some axes, with those on the tensor axis of each that are of the same part of it.
    fn with_neighbours(&self, axes: &[Axis], part: impl Fn(usize) -> usize) -> Vec<Vec<usize>> {
        let view = self.mesh().ranks();
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
        self.group.partition(groups, Deadline::after(self.limit))
    }
}
