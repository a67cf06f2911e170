//! Checked plans, and one rank's part of them: its coordinates in the mesh, its stages, and its forward and backward passes.
//!
//! A [`CheckedPlan`] describes the whole step; [`CheckedPlan::rank`] is one rank's view of it. From that view the model is recorded, the
//! state is laid out and the engine is built. One choice stays open: the number of chunks of tensor-parallel collectives, which depends
//! on the links.

use std::ops::Range;
use std::sync::Arc;

use super::Plan;
use crate::gathering::RankPasses;
use crate::mesh::{Axis, Degrees, ExpertAxis, Mesh};
use crate::schedule::Schedule;
use crate::{CachePlace, ContextPlace, ExpertPlace, StageMemory, TensorDimensions, TensorPlace};

/// Layout of a step: the mesh, and the assignment of units and micro-batches to its ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct StepLayout {
    /// Mesh of all ranks of the run.
    pub mesh: Mesh,
    /// Schedule of the pipeline; `None` without pipeline parallelism.
    pub schedule: Option<Arc<Schedule>>,
    /// Range of units of each stage, first layer first.
    pub stages: Vec<Range<usize>>,
    /// Micro-batches per step of each data-parallel rank.
    pub micro_batches: usize,
}

impl StepLayout {
    /// Returns the degree of pipeline parallelism.
    pub fn pipeline_ranks(&self) -> usize {
        self.mesh.ranks().degree(Axis::Pipeline)
    }

    /// Returns the indices of the stages on a pipeline rank.
    pub fn stages_of(&self, pipeline_rank: usize) -> Vec<usize> {
        self.schedule.as_ref().map_or_else(|| vec![0], |schedule| schedule.stages_of(pipeline_rank).collect())
    }

    /// Returns the stages of a pipeline rank, each with its number of micro-batch slots.
    pub fn stages_on(&self, pipeline_rank: usize) -> Vec<StageMemory> {
        match &self.schedule {
            Some(schedule) => StageMemory::of_rank(schedule, &self.stages, pipeline_rank),
            None => self.stages.iter().map(|units| StageMemory::whole(units.len())).collect(),
        }
    }

    /// Returns the stages of a pipeline rank and its forward and backward passes.
    pub fn passes_of(&self, pipeline_rank: usize) -> RankPasses {
        let pipeline = self.schedule.clone().map(|schedule| (schedule, pipeline_rank));
        RankPasses { stages: self.stages_on(pipeline_rank), pipeline, micro_batches: self.micro_batches }
    }
}

/// A plan that fits a model, a batch and a world size: it obeys every rule and has no open choice that changes its layout.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckedPlan {
    plan: Arc<Plan>,
    layout: Arc<StepLayout>,
    seq_len: usize,
    global_batch: usize,
}

impl CheckedPlan {
    /// Wraps a plan and the layout that follows from it.
    pub(super) fn new(plan: Plan, layout: StepLayout, [global_batch, seq_len]: [usize; 2]) -> Self {
        Self { plan: Arc::new(plan), layout: Arc::new(layout), seq_len, global_batch }
    }

    /// Creates a plan for a pipeline of one unit per stage, to run a schedule without a model.
    ///
    /// # Panics
    /// If the schedule has more ranks than a mesh can have.
    pub fn of_schedule(schedule: Schedule) -> Self {
        let degrees = Degrees { pipeline: schedule.ranks(), ..Degrees::default() };
        let mesh = Mesh::new(degrees).expect("a mesh of one axis");
        let stages = (0..schedule.stages()).map(|unit| unit..unit + 1).collect::<Vec<_>>();
        let plan = Plan { mesh: degrees, stages: vec![1; stages.len()], ..Plan::default() };
        let global_batch = schedule.micro_batches();
        let layout =
            StepLayout { mesh, stages, micro_batches: global_batch, schedule: Some(Arc::new(schedule)) };
        Self::new(plan, layout, [global_batch, 1])
    }

    /// Returns the plan that was checked.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Returns the layout of the step.
    pub fn layout(&self) -> &StepLayout {
        &self.layout
    }

    /// Returns the mesh of all ranks.
    pub fn mesh(&self) -> &Mesh {
        &self.layout.mesh
    }

    /// Returns the micro-batch size in sequences.
    pub fn micro_batch(&self) -> usize {
        self.plan.micro_batch_of(self.global_batch)
    }

    /// Returns the sequence length in tokens.
    pub const fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Returns the global batch size in sequences.
    pub const fn global_batch(&self) -> usize {
        self.global_batch
    }

    /// Returns the view that `rank` has of the plan.
    pub fn rank(&self, rank: usize) -> RankPlan {
        let places = Places::of(self.mesh(), rank, &self.plan);
        let pipeline_rank = self.mesh().ranks().coordinate(rank, Axis::Pipeline);
        let passes = self.layout.passes_of(pipeline_rank);
        RankPlan { checked: self.clone(), rank, places, passes }
    }
}

/// One rank's view of a checked plan.
#[derive(Debug, Clone)]
pub struct RankPlan {
    checked: CheckedPlan,
    /// Global rank of this view.
    pub rank: usize,
    /// Coordinates in the tensor-, context- and expert-parallel groups, which the model is recorded for.
    pub places: Places,
    /// Stages of the rank, and its forward and backward passes in a step.
    pub passes: RankPasses,
}

impl RankPlan {
    /// Returns the checked plan that this is a view of.
    pub fn checked(&self) -> &CheckedPlan {
        &self.checked
    }

    /// Returns the plan, which is the same for all ranks.
    pub fn plan(&self) -> &Plan {
        &self.checked.plan
    }

    /// Returns the layout of the step over all ranks.
    pub fn layout(&self) -> &StepLayout {
        &self.checked.layout
    }

    /// Returns the mesh of all ranks.
    pub fn mesh(&self) -> &Mesh {
        self.checked.mesh()
    }
}

/// A rank's coordinates in the groups that shard blocks, sequences and experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Places {
    /// Coordinates in the tensor-parallel group.
    pub tensor: TensorPlace,
    /// Coordinates in the context-parallel group.
    pub context: ContextPlace,
    /// Coordinates in the expert-parallel group.
    pub experts: ExpertPlace,
    /// Coordinates among the ranks that key-value caches are sharded over, in generation. They are the context-parallel ranks, but each
    /// has consecutive rows of a batch, whatever their sequences.
    pub cache: CachePlace,
}

impl Places {
    /// Returns the coordinates for generation: key-value caches are sharded over the context-parallel ranks.
    #[must_use]
    pub fn for_generation(self) -> Self {
        let ContextPlace { ranks, rank, .. } = self.context;
        Self { context: ContextPlace::default(), cache: CachePlace { ranks, rank }, ..self }
    }

    /// Computes the coordinates of `rank` under `plan`. Tensor-parallel collectives are not chunked unless the plan says so.
    pub fn of(mesh: &Mesh, rank: usize, plan: &Plan) -> Self {
        let (ranks, experts) = (mesh.ranks(), mesh.experts());
        let is_row = ranks.degree(Axis::Tensor) > 1 && plan.tensor_layout == TensorDimensions::One;
        Self {
            tensor: TensorPlace {
                ranks: ranks.degree(Axis::Tensor),
                rank: ranks.coordinate(rank, Axis::Tensor),
                splits_tokens: plan.sequence_parallel || plan.tensor_layout == TensorDimensions::Two,
                dimensions: plan.tensor_layout,
                chunks: plan.tensor_chunks.filter(|_| is_row).unwrap_or(1),
                slices_inputs: plan.partition_activations && is_row && !plan.sequence_parallel,
            },
            context: ContextPlace {
                ranks: ranks.degree(Axis::Context),
                rank: ranks.coordinate(rank, Axis::Context),
                method: plan.context_method,
            },
            experts: ExpertPlace {
                ranks: experts.degree(ExpertAxis::Expert),
                rank: experts.coordinate(rank, ExpertAxis::Expert),
                tensor_ranks: experts.degree(ExpertAxis::ExpertTensor),
                tensor_rank: experts.coordinate(rank, ExpertAxis::ExpertTensor),
            },
            cache: CachePlace::default(),
        }
    }
}
