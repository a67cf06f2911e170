//! Process groups of the device mesh: tensor, context, expert and pipeline groups, and the groups over which gradients
//! are reduced and model state is sharded.

use std::{ops::Range, sync::Arc, time::Duration};

use lockstep_comm::{CommError, Deadline, Group, Meter, Metered, ReduceOp};
use lockstep_graph::{ContextPeers, GridGroups, Peers, Replay};
use lockstep_plan::{
    Among, Axis, ContextPlace, ExpertAxis, Mesh, ParameterRecord, Places, RankPlan, ReductionGroup, Share,
    TensorDimensions, TensorPlace, ZeroStage, exact::ExactSum, schedule::Schedule,
};
use lockstep_tensor::View;

/// Default number of row chunks of a tensor-parallel collective that overlaps with matrix products. Over a network
/// there are few, so that each is worth a message and a product. Within a machine there is one: copies use the same
/// cores as products, so chunks would overlap nothing.
fn chunks_for(group: &Group) -> usize {
    const OVER_A_NETWORK: usize = 4;
    if group.is_on_one_machine() { 1 } else { OVER_A_NETWORK }
}

/// Axes over which model state that is not of experts can be sharded.
const SHARD_AXES: [Axis; 2] = [Axis::Shard, Axis::Context];

/// Groups of a rank, one for each kind of gradient reduction; groups of one rank are left out.
#[derive(Debug, Clone, Default)]
pub(crate) struct ReductionGroups(Vec<(ReductionGroup, Group)>);

impl ReductionGroups {
    /// Returns the group of a kind of reduction; `None` if this rank is alone in it.
    pub(crate) fn get(&self, kind: ReductionGroup) -> Option<&Group> {
        self.iter().find(|(of, _)| *of == kind).map(|(_, group)| group)
    }

    /// Returns the groups with their kinds.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &(ReductionGroup, Group)> {
        self.0.iter()
    }

    /// Returns true if there is no group of several ranks.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Process groups of a rank, and its place in each.
#[derive(Debug, Clone)]
pub struct Groups {
    world: Option<World>,
    places: Places,
}

/// Parts of [`Groups`] that exist only in a world of more than one rank.
#[derive(Debug, Clone)]
struct World {
    group: Group,
    plan: RankPlan,
    /// Timeout of every wait for another rank.
    limit: Duration,
    /// The tensor-parallel group; `None` if its degree is 1.
    tensor: Option<Group>,
    /// Row group and column group of this rank if the tensor-parallel group forms a square grid (SUMMA).
    grid: Option<[Group; 2]>,
    /// The expert-parallel group; `None` if its degree is 1.
    experts: Option<Group>,
    /// The context-parallel group; `None` if its degree is 1.
    context: Option<Group>,
    /// Context and tensor axes together: each of these ranks routes different tokens of the same sequences to experts.
    /// `None` if both degrees are 1.
    sequence: Option<Group>,
    /// The pipeline-parallel group; `None` if its degree is 1.
    pipeline: Option<Group>,
    /// The data-parallel ranks: replicate and shard axes. `None` if there is one, or programs have no collectives over them.
    replicas: Option<Group>,
    /// All ranks of one data-parallel replica: pipeline, shard, context and tensor axes.
    model: Option<Group>,
    /// Ranks that hold the first and the last unit; `None` if that is one rank.
    ends: Option<Group>,
    /// Counts the traffic of collectives between the ranks of one model replica, gradient reduction excepted.
    meter: Arc<Meter>,
}

impl Groups {
    /// Returns the groups of a world of one rank.
    pub fn alone() -> Self {
        Self { world: None, places: Places::default() }
    }

    /// Partitions `group` into the process groups of `plan`; a collective call. `limit` is the timeout of every wait
    /// for another rank.
    ///
    /// # Errors
    /// If a rank is lost, or does not answer in time.
    ///
    /// # Panics
    /// If the plan's world size or rank differs from that of `group`.
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
            replicas: None,
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

    /// Returns the rank's places under `plan`, with a number of chunks for tensor-parallel collectives that suits the
    /// link between the ranks.
    pub(crate) fn places_of(&self, plan: &RankPlan) -> Places {
        if self.world.is_some() { self.places } else { plan.places }
    }

    /// Returns the rank's places in the groups that shard blocks, sequences and experts, which the model is recorded for.
    pub fn places(&self) -> Places {
        self.places
    }

    /// Returns the units of this rank's first stage, of a model of `units` units: all without a pipeline.
    pub fn stage(&self, units: usize) -> Range<usize> {
        let stage = self.plan().and_then(|plan| plan.passes.stages.first());
        stage.map_or(0..units, |stage| stage.units.clone())
    }

    /// Returns a replay with the groups that its collectives run over. Ring attention needs buffers as well.
    pub fn attach<'a>(&'a self, replay: Replay<'a>) -> Replay<'a> {
        Replay {
            peers: self.peers(),
            grid: self.grid_peers(),
            expert_peers: self.expert_peers(),
            sequence_peers: self.sequence_peers(),
            replicas: self.replica_peers(),
            context: self.context_peers().map(|peers| ContextPeers { peers, ring: None }),
            ..replay
        }
    }

    /// Returns the rank's place in the tensor-parallel group.
    pub fn tensor_place(&self) -> TensorPlace {
        self.places.tensor
    }

    /// Returns the rank's place in the context-parallel group.
    pub fn context_place(&self) -> ContextPlace {
        self.places.context
    }

    /// Returns the context-parallel group; `None` if its degree is 1.
    pub fn context_peers(&self) -> Option<Peers<'_>> {
        let World { context, limit, .. } = self.world.as_ref()?;
        context.as_ref().map(|group| Peers { group, limit: *limit })
    }

    /// Returns true if this rank counts and saves parameters with this `share`. Of the ranks of one model replica that
    /// own the same elements, exactly one does.
    pub(crate) fn is_primary_owner(&self, share: &Share) -> bool {
        let Some(World { plan, .. }) = &self.world else { return true };
        let (mesh, rank) = (plan.mesh(), plan.rank);
        let is_sharded = self.zero_stage() > ZeroStage::Nothing;
        let is_first = |axis| mesh.ranks().coordinate(rank, axis) == 0;
        match share.among {
            Among::Tensor => {
                let neighbours = if is_sharded { share.summands } else { 1 };
                let copies = share.copies.div_ceil(neighbours);
                (is_sharded || is_first(Axis::Shard) && is_first(Axis::Context))
                    && (self.places.tensor.rank / neighbours).is_multiple_of(copies)
            }
            Among::TensorColumn => {
                let is_of_first_row = self.places.tensor.grid().is_none_or(|grid| grid.row == 0);
                is_sharded || is_first(Axis::Shard) && is_of_first_row
            }
            Among::Experts => is_sharded || mesh.experts().coordinate(rank, ExpertAxis::ExpertShard) == 0,
        }
    }

    /// Returns the group of the context and tensor axes, whose ranks route different tokens of the same sequences;
    /// `None` if both degrees are 1.
    pub(crate) fn sequence_peers(&self) -> Option<Peers<'_>> {
        let World { sequence, limit, .. } = self.world.as_ref()?;
        sequence.as_ref().map(|group| Peers { group, limit: *limit })
    }

    /// Returns the group over which the experts of a layer are sharded; `None` if its degree is 1.
    pub(crate) fn expert_peers(&self) -> Option<Peers<'_>> {
        let World { experts, limit, .. } = self.world.as_ref()?;
        experts.as_ref().map(|group| Peers { group, limit: *limit })
    }

    /// Returns the tensor-parallel group; `None` if its degree is 1.
    pub(crate) fn peers(&self) -> Option<Peers<'_>> {
        let World { tensor, limit, .. } = self.world.as_ref()?;
        tensor.as_ref().map(|group| Peers { group, limit: *limit })
    }

    /// Returns the row and column groups of the tensor-parallel grid; `None` if it is not a square grid.
    pub(crate) fn grid_peers(&self) -> Option<GridGroups<'_>> {
        let World { grid, limit, .. } = self.world.as_ref()?;
        let [row, column] = grid.as_ref()?.each_ref().map(|group| Peers { group, limit: *limit });
        Some(GridGroups { row, column })
    }

    /// Returns the data-parallel ranks, once [`Groups::join_replicas`] has been called; `None` if there is one.
    pub(crate) fn replica_peers(&self) -> Option<Peers<'_>> {
        let World { replicas, limit, .. } = self.world.as_ref()?;
        replicas.as_ref().map(|group| Peers { group, limit: *limit })
    }

    /// Makes the group of the data-parallel ranks, for programs with collectives over them; a collective call.
    ///
    /// # Errors
    /// If a rank is lost, or does not answer in time.
    pub(crate) fn join_replicas(&mut self) -> Result<(), CommError> {
        let Some(world) = &mut self.world else { return Ok(()) };
        world.replicas = world.along(&[Axis::Replicate, Axis::Shard])?;
        Ok(())
    }

    /// Returns the pipeline-parallel group; `None` if its degree is 1.
    pub fn pipeline_peers(&self) -> Option<Peers<'_>> {
        let World { pipeline, limit, .. } = self.world.as_ref()?;
        pipeline.as_ref().map(|group| Peers { group, limit: *limit })
    }

    /// Returns the plan that the groups were made for; `None` in a world of one rank.
    pub fn plan(&self) -> Option<&RankPlan> {
        self.world.as_ref().map(|world| &world.plan)
    }

    /// Returns the timeout of a wait for another rank; `None` in a world of one rank.
    pub fn limit(&self) -> Option<Duration> {
        self.world.as_ref().map(|world| world.limit)
    }

    /// All-reduces a gradient over the ranks that hold the first and the last unit; does nothing on other ranks.
    ///
    /// # Errors
    /// If a rank is lost, or does not answer in time.
    pub(crate) fn all_reduce_over_first_and_last_stage(&self, gradient: View<'_>) -> Result<(), CommError> {
        let Some(World { ends: Some(group), limit, .. }) = &self.world else { return Ok(()) };
        group.all_reduce(gradient, ReduceOp::Sum, Deadline::after(*limit))
    }

    /// Returns the exact sum over all ranks of the model replica.
    ///
    /// # Errors
    /// If a rank is lost, or does not answer in time.
    pub(crate) fn sum_over_model(&self, sum: &ExactSum) -> Result<ExactSum, CommError> {
        let mut words = sum.to_words();
        if let Some(World { model: Some(group), limit, .. }) = &self.world {
            group.all_reduce(&mut words[..], ReduceOp::Sum, Deadline::after(*limit))?;
        }
        Ok(ExactSum::from_words(&words))
    }

    /// All-reduces `numbers` over all ranks.
    ///
    /// # Errors
    /// If a rank is lost, or does not answer in time.
    pub(crate) fn sum_over_world(&self, numbers: &mut [i64]) -> Result<(), CommError> {
        let Some(World { group, limit, .. }) = &self.world else { return Ok(()) };
        group.all_reduce(numbers, ReduceOp::Sum, Deadline::after(*limit))
    }

    /// Adds up numbers over all ranks, in the order of the ranks.
    ///
    /// # Errors
    /// If a rank is lost, or does not answer in time.
    pub(crate) fn add_up_over_world(&self, numbers: &mut [f64]) -> Result<(), CommError> {
        let Some(World { group, limit, .. }) = &self.world else { return Ok(()) };
        let own: Vec<i64> = numbers.iter().map(|number| number.to_bits().cast_signed()).collect();
        let mut all = vec![0_i64; own.len() * group.size()];
        group.all_gather(&own[..], &mut all[..], Deadline::after(*limit))?;
        numbers.fill(0.0);
        for of_rank in all.chunks_exact(own.len().max(1)) {
            let of_rank = of_rank.iter().map(|bits| f64::from_bits(bits.cast_unsigned()));
            numbers.iter_mut().zip(of_rank).for_each(|(sum, number)| *sum += number);
        }
        Ok(())
    }

    /// Returns the groups over which the gradients of `records` are reduced.
    ///
    /// # Errors
    /// If a rank is lost, or does not answer in time.
    pub(crate) fn reduction_groups(&self, records: &[ParameterRecord]) -> Result<ReductionGroups, CommError> {
        self.of_kinds(
            records,
            &Axis::TOKENS,
            &[ExpertAxis::Replicate, ExpertAxis::ExpertShard],
            World::made_of,
        )
    }

    /// Returns the groups over which the model state of `records` can be sharded (ZeRO).
    ///
    /// # Errors
    /// If a rank is lost, or does not answer in time.
    pub(crate) fn shard_groups(&self, records: &[ParameterRecord]) -> Result<ReductionGroups, CommError> {
        self.of_kinds(records, &SHARD_AXES, &[ExpertAxis::ExpertShard], World::made_of)
    }

    /// Returns separate groups of the same ranks as [`Groups::shard_groups`], whose collectives do not wait for those of
    /// other groups.
    ///
    /// # Errors
    /// If a rank is lost, or does not answer in time.
    pub(crate) fn separate_shard_groups(
        &self,
        records: &[ParameterRecord],
    ) -> Result<ReductionGroups, CommError> {
        self.of_kinds(records, &SHARD_AXES, &[ExpertAxis::ExpertShard], World::made_apart)
    }

    /// Returns subgroups of [`secondary_shard`](lockstep_plan::Sharding) neighbours within each group of
    /// [`Groups::shard_groups`]; only where that group is larger and divides evenly.
    ///
    /// # Errors
    /// If a rank is lost, or does not answer in time.
    pub(crate) fn secondary_shard_groups(
        &self,
        records: &[ParameterRecord],
    ) -> Result<ReductionGroups, CommError> {
        let make = |world: &World, ranks: Vec<Vec<usize>>| {
            // All groups of a kind have the same size.
            let size = ranks.first().map_or(0, Vec::len);
            let Some(count) = world.plan.plan().sharding.neighbours(size) else { return Ok(None) };
            let neighbours = ranks.iter().flat_map(|group| group.chunks(count).map(<[usize]>::to_vec));
            world.made_apart(neighbours.collect())
        };
        self.of_kinds(records, &SHARD_AXES, &[ExpertAxis::ExpertShard], make)
    }

    /// Returns the index of this rank's data-parallel replica and the number of replicas: on the experts' mesh for
    /// experts, on the ranks' mesh for everything else.
    pub(crate) fn replica_of(&self, among: Among) -> (usize, usize) {
        let Some(plan) = self.plan() else { return (0, 1) };
        let (ranks, experts) = (plan.mesh().ranks(), plan.mesh().experts());
        let (axis, of_experts) = (Axis::Replicate, ExpertAxis::Replicate);
        match among {
            Among::Experts => (experts.coordinate(plan.rank, of_experts), experts.degree(of_experts)),
            _ => (ranks.coordinate(plan.rank, axis), ranks.degree(axis)),
        }
    }

    /// Returns the group of ranks that own the same elements in other data-parallel replicas; `None` if there is one
    /// replica.
    ///
    /// # Errors
    /// If a rank is lost, or does not answer in time.
    pub(crate) fn replica_group(&self) -> Result<Option<Group>, CommError> {
        let Some(world) = &self.world else { return Ok(None) };
        world.made_of(world.mesh().ranks().groups(&[Axis::Replicate]))
    }

    /// Makes one group for each kind of [`ReductionGroup`] among `records`: the ranks along `axes` (`of_experts` for experts)
    /// that hold the same elements, and the neighbours on the tensor axis that contribute to the same gradients.
    fn of_kinds(
        &self,
        records: &[ParameterRecord],
        axes: &[Axis],
        of_experts: &[ExpertAxis],
        make: impl Fn(&World, Vec<Vec<usize>>) -> Result<Option<Group>, CommError>,
    ) -> Result<ReductionGroups, CommError> {
        let Some(world) = &self.world else { return Ok(ReductionGroups::default()) };
        let mut kinds: Vec<ReductionGroup> =
            records.iter().map(|record| ReductionGroup::of(&record.share)).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let group = |kind: ReductionGroup| {
            let ranks = match kind.among {
                Among::Tensor => world.with_neighbours(axes, |tensor| tensor / kind.summands),
                // A column has as many ranks as a row.
                Among::TensorColumn => world.with_neighbours(axes, |tensor| tensor % kind.summands),
                Among::Experts => world.mesh().experts().groups(of_experts),
            };
            Ok(make(world, ranks)?.map(|group| (kind, group)))
        };
        Ok(ReductionGroups(
            kinds.into_iter().filter_map(|kind| group(kind).transpose()).collect::<Result<_, _>>()?,
        ))
    }

    /// Returns the traffic since the last call of collectives between the ranks of one model replica, gradient
    /// reduction excepted.
    pub(crate) fn take_metered(&self) -> Metered {
        self.world.as_ref().map_or_else(Metered::default, |world| world.meter.take())
    }

    /// Returns the effective ZeRO stage.
    pub fn zero_stage(&self) -> ZeroStage {
        self.plan().map_or(ZeroStage::Nothing, |plan| plan.plan().effective_zero_stage())
    }

    /// Returns the group of all ranks; `None` in a world of one rank.
    pub fn world(&self) -> Option<&Group> {
        self.world.as_ref().map(|world| &world.group)
    }
}

impl World {
    fn mesh(&self) -> &Mesh {
        self.plan.mesh()
    }

    /// Returns this rank's metered group along some axes; `None` if it has one rank.
    fn along(&self, axes: &[Axis]) -> Result<Option<Group>, CommError> {
        self.metered(self.mesh().ranks().groups(axes))
    }

    /// As [`World::made_of`], with traffic counted by the meter.
    fn metered(&self, groups: Vec<Vec<usize>>) -> Result<Option<Group>, CommError> {
        let group = self.made_of(groups)?;
        Ok(group.map(|group| group.with_meter(Arc::clone(&self.meter))))
    }

    /// Returns the group of the pipeline's ranks that hold the first and the last stage.
    fn ends_of(&self, schedule: &Schedule) -> Result<Option<Group>, CommError> {
        let [first, last] = [0, schedule.stages() - 1].map(|stage| schedule.rank_of(stage));
        let view = self.mesh().ranks();
        let mut groups = view.groups(&[Axis::Pipeline]);
        for group in &mut groups {
            group.retain(|rank| [first, last].contains(&view.coordinate(*rank, Axis::Pipeline)));
        }
        self.metered(groups)
    }

    /// Returns groups of ranks along `axes` and the tensor axis, the latter cut into parts: `part` maps a tensor
    /// coordinate to its part.
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

    /// Returns this rank's group among `groups`; `None` if all have one rank. Reuses the world group where that has the
    /// same ranks.
    fn made_of(&self, groups: Vec<Vec<usize>>) -> Result<Option<Group>, CommError> {
        if groups.len() == 1 && groups[0].len() == self.group.size() && self.group.size() > 1 {
            return Ok(Some(self.group.clone()));
        }
        self.made_apart(groups)
    }

    /// As [`World::made_of`], but never reuses the world group: collectives of the two do not wait for each other.
    fn made_apart(&self, groups: Vec<Vec<usize>>) -> Result<Option<Group>, CommError> {
        if groups.iter().all(|group| group.len() == 1) {
            return Ok(None);
        }
        self.group.partition(&groups, Deadline::after(self.limit))
    }
}
