//! Checked plans, and the part of each rank: its place in the mesh, its stages, and the passes that it makes.
//!
//! A [`CheckedPlan`] knows the whole step; [`CheckedPlan::rank`] is one rank's view of it, from which a model is recorded, its state is
//! laid out and an engine is built. It leaves one decision open: the chunks of tensor-parallel collectives, which depend on the links.

use std::ops::Range;
use std::sync::Arc;

use super::{Plan, TensorDimensions};
use crate::gathering::RankPasses;
use crate::mesh::{Axis, Degrees, ExpertAxis, Mesh};
use crate::schedule::Schedule;
use crate::{ContextPlace, ExpertPlace, StageMemory, TensorPlace};

/// The layout of a step over ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct StepLayout {
    /// The mesh.
    pub mesh: Mesh,
    /// Actions of each rank of a pipeline; `None` without one.
    pub schedule: Option<Arc<Schedule>>,
    /// Units of each stage, from the model's first layer on.
    pub stages: Vec<Range<usize>>,
    /// Micro-batches of a step on each part of the batch.
    pub micro_batches: usize,
}

impl StepLayout {
    /// Returns the pipeline degree.
    pub fn pipeline_ranks(&self) -> usize {
        self.mesh.ranks().degree(Axis::Pipeline)
    }

    /// Returns the stages of a pipeline rank, by number.
    pub fn stages_of(&self, pipeline_rank: usize) -> Vec<usize> {
        self.schedule.as_ref().map_or_else(|| vec![0], |schedule| schedule.stages_of(pipeline_rank).collect())
    }

    /// Returns the stages of a pipeline rank, with their slots for micro-batches.
    pub fn stages_on(&self, pipeline_rank: usize) -> Vec<StageMemory> {
        match &self.schedule {
            Some(schedule) => StageMemory::of_rank(schedule, &self.stages, pipeline_rank),
            None => self.stages.iter().map(|units| StageMemory::whole(units.len())).collect(),
        }
    }

    /// Returns the stages of a pipeline rank and the passes that it makes.
    pub fn passes_of(&self, pipeline_rank: usize) -> RankPasses {
        let pipeline = self.schedule.clone().map(|schedule| (schedule, pipeline_rank));
        RankPasses { stages: self.stages_on(pipeline_rank), pipeline, micro_batches: self.micro_batches }
    }
}

/// A plan that fits a model, a batch and a world: every rule has been applied, and nothing is left open.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckedPlan {
    plan: Arc<Plan>,
    layout: Arc<StepLayout>,
    seq_len: usize,
    global_batch: usize,
}

impl CheckedPlan {
    /// A plan whose layout follows from it, for steps of so many sequences of so many tokens.
    pub(super) fn new(plan: Plan, layout: StepLayout, [global_batch, seq_len]: [usize; 2]) -> Self {
        Self { plan: Arc::new(plan), layout: Arc::new(layout), seq_len, global_batch }
    }

    /// A pipeline whose stages are one unit each, to rehearse its schedule without a model.
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

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The layout of its step.
    pub fn layout(&self) -> &StepLayout {
        &self.layout
    }

    /// The mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.layout.mesh
    }

    /// Sequences of a micro-batch.
    pub fn micro_batch(&self) -> usize {
        self.plan.micro_batch_of(self.global_batch)
    }

    /// Tokens of a sequence.
    pub const fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Sequences of a step, on all ranks together.
    pub const fn global_batch(&self) -> usize {
        self.global_batch
    }

    /// Returns the plan as `rank` carries it out.
    pub fn rank(&self, rank: usize) -> RankPlan {
        let places = Places::of(self.mesh(), rank, &self.plan);
        let pipeline_rank = self.mesh().ranks().coordinate(rank, Axis::Pipeline);
        let passes = self.layout.passes_of(pipeline_rank);
        RankPlan { checked: self.clone(), rank, places, passes }
    }
}

/// A plan on one rank.
#[derive(Debug, Clone)]
pub struct RankPlan {
    checked: CheckedPlan,
    /// The rank.
    pub rank: usize,
    /// The rank's coordinates in the groups that its model is recorded for.
    pub places: Places,
    /// The rank's stages, and the passes through them in a step.
    pub passes: RankPasses,
}

impl RankPlan {
    /// The checked plan that this is one rank's view of.
    pub fn checked(&self) -> &CheckedPlan {
        &self.checked
    }

    /// The plan of all ranks.
    pub fn plan(&self) -> &Plan {
        &self.checked.plan
    }

    /// The layout of the step over all ranks.
    pub fn layout(&self) -> &StepLayout {
        &self.checked.layout
    }

    /// The mesh.
    pub fn mesh(&self) -> &Mesh {
        self.checked.mesh()
    }
}

/// A rank's coordinates in the groups that split blocks, sequences and experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Places {
    /// In the tensor-parallel group.
    pub tensor: TensorPlace,
    /// In the context-parallel group.
    pub context: ContextPlace,
    /// In the expert-parallel group.
    pub experts: ExpertPlace,
}

impl Places {
    /// The coordinates of `rank` under `plan`. Tensor-parallel collectives are whole unless the plan says in how many chunks.
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
        }
    }
}
