//! Whether a plan fits a model, a batch and a world: everything that does not, at once.

use std::sync::Arc;

use super::{
    CheckedPlan, ContextMethod, Facts, PLAN_VERSION, Plan, PlanError, PlanPrediction, PlanProblem,
    StepLayout, TensorDimensions,
};
use crate::{
    LayerRule, QuantizedType, ZeroStage,
    mesh::{Axis, Mesh},
    nearest::{Choices, nearest_divisor, nearest_multiple, next_to},
    schedule::{Schedule, ScheduleError, ScheduleProblem},
};

impl Plan {
    /// Everything that keeps this plan from being executed for a model, batch and world; or what is executed.
    pub fn check(&self, facts: &Facts) -> Result<CheckedPlan, PlanError> {
        let mut check = Check { plan: self, facts, problems: Vec::new() };
        check.identity();
        let mesh = check.mesh();
        let countable = self.mesh.world_size().is_some_and(|ranks| ranks > 0);
        let schedule = if countable {
            if check.is_square() {
                check.square();
            } else {
                check.tensor();
            }
            check.vocabulary();
            check.experts();
            check.sequence();
            check.chunks();
            check.schedule()
        } else {
            None
        };
        match (mesh, schedule) {
            (Some(mesh), Some(schedule)) if check.problems.is_empty() => {
                let (micro_batches, stages) = (schedule.micro_batches(), self.unit_ranges());
                let schedule = (schedule.ranks() > 1).then(|| Arc::new(schedule));
                let layout = StepLayout { mesh, schedule, stages, micro_batches };
                Ok(CheckedPlan::new(self.clone(), layout, [facts.global_batch, facts.seq_len]))
            }
            _ => Err(PlanError::Invalid(check.problems)),
        }
    }
}

struct Check<'a> {
    plan: &'a Plan,
    facts: &'a Facts,
    problems: Vec<PlanProblem>,
}

impl Check<'_> {
    /// Sequences of a micro-batch.
    fn micro_batch(&self) -> usize {
        self.plan.micro_batch_of(self.facts.global_batch)
    }

    fn identity(&mut self) {
        let Self { plan, facts, .. } = *self;
        if plan.version != PLAN_VERSION {
            self.problems.push(PlanProblem::Version { version: plan.version });
        }
        if !plan.model.is_empty() && plan.model != facts.model {
            let (plan, model) = (plan.model.clone(), facts.model.clone());
            self.problems.push(PlanProblem::OtherModel { plan, model });
        }
        if ZeroStage::from_number(plan.zero_stage.into()).is_none() {
            self.problems.push(PlanProblem::ZeroStage { zero_stage: plan.zero_stage });
        }
        let last = |rule: &LayerRule| rule.to.unwrap_or(rule.from);
        for layer in plan.recompute.rules().map(last).filter(|layer| *layer >= facts.layers) {
            self.problems.push(PlanProblem::RecomputeLayer { layer, layers: facts.layers });
        }
        if plan.quantize_weights == Some(QuantizedType::Int4) {
            self.problems.push(PlanProblem::NarrowWeights);
        }
        for (what, kind, stages) in [
            ("quantize_weights", plan.quantize_weights, 3..4),
            ("quantize_gradients", plan.quantize_gradients, 1..4),
        ] {
            if kind.is_some() && !stages.contains(&plan.zero_stage) {
                let (zero_stage, least) = (plan.zero_stage, stages.start);
                self.problems.push(PlanProblem::NothingToQuantize { what, zero_stage, least });
            }
        }
        let twice = plan.predicted.iter().flat_map(PlanPrediction::repeated);
        self.problems.extend(twice.map(|rank| PlanProblem::PredictedTwice { rank }));
        for (name, number) in [
            ("micro_batch", self.micro_batch()),
            ("global_batch", facts.global_batch),
            ("seq_len", facts.seq_len),
        ] {
            if number == 0 {
                self.problems.push(PlanProblem::Zero { name });
            }
        }
    }

    fn mesh(&mut self) -> Option<Mesh> {
        let (degrees, world) = (self.plan.mesh, self.facts.world_size);
        let mesh = Mesh::new(degrees);
        if let Err(error) = &mesh {
            self.problems.extend(error.0.iter().cloned().map(PlanProblem::from));
        }
        // A mesh can be of the right size though its experts do not fit.
        if let Some(mesh) = degrees.world_size().filter(|&ranks| ranks > 0 && ranks != world) {
            let without_replicate = mesh / degrees.replicate;
            self.problems.push(PlanProblem::World { mesh, world, without_replicate });
        }
        mesh.ok()
    }

    /// Whether `value` ranks can share out the heads, and the key and value heads, each of which ranks may repeat.
    fn splits_heads(&self, value: usize) -> bool {
        let Facts { heads, key_value_heads, .. } = *self.facts;
        heads.is_multiple_of(value) && even(key_value_heads, value)
    }

    fn tensor(&mut self) {
        let (tensor, facts) = (self.plan.mesh.tensor, self.facts);
        let valid = |value: usize| self.splits_heads(value) && facts.intermediate.is_multiple_of(value);
        let nearest = next_to(tensor, (1..=facts.heads.min(facts.vocab)).filter(|&value| valid(value)));
        self.heads("tensor", tensor, nearest);
        if !facts.intermediate.is_multiple_of(tensor) {
            self.problems.push(PlanProblem::Degree {
                degree: "tensor",
                value: tensor,
                number: facts.intermediate,
                things: "columns of the feed-forward layers",
                nearest,
            });
        }
    }

    fn vocabulary(&mut self) {
        let (tensor, vocab) = (self.plan.mesh.tensor, self.facts.vocab);
        if tensor > vocab {
            self.problems.push(PlanProblem::Vocabulary { tensor, vocab });
        }
    }

    /// Whether the tensor ranks are to share linear layers in two dimensions.
    fn is_square(&self) -> bool {
        self.plan.mesh.tensor > 1 && self.plan.tensor_layout == TensorDimensions::Two
    }

    /// What a square of ranks splits, by its side: whole sequences over its rows, heads and columns over its columns.
    fn square(&mut self) {
        const DEGREE: &str = "tensor's side";
        let (tensor, facts) = (self.plan.mesh.tensor, self.facts);
        let side = tensor.isqrt();
        let split = [
            (facts.heads, "attention heads"),
            (facts.key_value_heads, "key/value heads"),
            (facts.hidden, "columns between blocks"),
            (facts.intermediate, "columns of the feed-forward layers"),
        ];
        let sides =
            || (2..=facts.heads).filter(|side| split.iter().all(|(number, _)| number.is_multiple_of(*side)));
        if side * side == tensor {
            let nearest = next_to(side, sides());
            for (number, things) in split.into_iter().filter(|(number, _)| !number.is_multiple_of(side)) {
                self.problems.push(PlanProblem::Degree {
                    degree: DEGREE,
                    value: side,
                    number,
                    things,
                    nearest,
                });
            }
            self.multiple("micro_batch", self.micro_batch(), side, DEGREE);
            self.multiple("seq_len", facts.seq_len, side, DEGREE);
        } else {
            let squares = sides().filter_map(|side| side.checked_mul(side));
            self.problems.push(PlanProblem::NoSquare { tensor, nearest: next_to(tensor, squares) });
        }
        let others = [
            (self.plan.mesh.context > 1, "context parallelism"),
            (facts.experts > 0, "experts"),
            (facts.has_latent_attention, "latent attention"),
        ];
        let others = others.into_iter().filter(|(is_there, _)| *is_there);
        self.problems.extend(others.map(|(_, with)| PlanProblem::TwoDimensions { with }));
    }

    fn heads(&mut self, degree: &'static str, value: usize, nearest: Choices) {
        let Facts { heads, key_value_heads, .. } = *self.facts;
        if !heads.is_multiple_of(value) {
            let things = "attention heads";
            self.problems.push(PlanProblem::Degree { degree, value, number: heads, things, nearest });
        }
        if !even(key_value_heads, value) {
            let number = key_value_heads;
            self.problems.push(PlanProblem::KeyValueHeads { degree, value, number, nearest });
        }
    }

    fn experts(&mut self) {
        let (degrees, facts) = (self.plan.mesh, self.facts);
        let splits = [
            ("expert", degrees.expert, facts.experts, "experts"),
            ("expert_tensor", degrees.expert_tensor, facts.expert_intermediate, "columns of an expert"),
        ];
        for (degree, value, number, things) in splits {
            if value > 1 && facts.experts == 0 {
                self.problems.push(PlanProblem::NoExperts { degree, value });
            } else if value > 1 && !number.is_multiple_of(value) {
                let nearest = nearest_divisor(value, number);
                self.problems.push(PlanProblem::Degree { degree, value, number, things, nearest });
            }
        }
    }

    fn sequence(&mut self) {
        let (context, tensor) = (self.plan.mesh.context, self.plan.mesh.tensor);
        let halves = context > 1 && self.plan.context_method != ContextMethod::AllToAll;
        let parts = if halves { 2 * context } else { context };
        // Tensor ranks share out the tokens that they bring to experts.
        let splits_tokens = self.plan.sequence_parallel || self.facts.experts > 0;
        let (factor, factors) = match (splits_tokens && tensor > 1 && !self.is_square(), halves) {
            (true, true) => {
                (least_common_multiple(parts, context * tensor), "2 x context and context x tensor")
            }
            (true, false) => (context * tensor, "context x tensor"),
            (false, true) => (parts, "2 x context"),
            (false, false) => (parts, "context"),
        };
        self.multiple("seq_len", self.facts.seq_len, factor, factors);
        if context > 1 && self.plan.context_method == ContextMethod::AllToAll {
            // What tensor ranks have of the heads is shared out once more.
            let ranks = context * tensor;
            let products = (1..=self.facts.heads / tensor).map(|context| context * tensor);
            let nearest = next_to(ranks, products.filter(|&ranks| self.splits_heads(ranks)));
            self.heads("context x tensor", ranks, nearest);
        }
    }

    fn chunks(&mut self) {
        let Some(chunks) = self.plan.tensor_chunks else { return };
        if chunks == 0 {
            self.problems.push(PlanProblem::Zero { name: "tensor_chunks" });
        }
        let tensor = if self.plan.sequence_parallel { self.plan.mesh.tensor } else { 1 };
        let tokens =
            self.micro_batch().saturating_mul(self.facts.seq_len) / (self.plan.mesh.context * tensor);
        if chunks > tokens && tokens > 0 {
            self.problems.push(PlanProblem::Chunks { chunks, tokens });
        }
    }

    fn multiple(&mut self, name: &'static str, number: usize, factor: usize, factors: &'static str) {
        if number > 0 && !number.is_multiple_of(factor) {
            let nearest = nearest_multiple(number, factor);
            self.problems.push(PlanProblem::NotMultiple { name, number, factors, factor, nearest });
        }
    }

    fn schedule(&mut self) -> Option<Schedule> {
        let Self { plan, facts, .. } = *self;
        let ranks = plan.mesh.pipeline;
        let parts: usize = Axis::BATCH.iter().map(|&axis| plan.mesh.of(axis)).product();
        let factor = parts.checked_mul(self.micro_batch()).filter(|&factor| factor > 0)?;
        self.multiple("global_batch", facts.global_batch, factor, "replicate x shard x micro_batch");
        // Rounded up if the batch does not come out even, so that the rest of the schedule is checked as well.
        let micro_batches = facts.global_batch.div_ceil(factor).max(1);
        // More ranks than there are have been told of already, and the lists of a million of them would take minutes.
        let is_countable = ranks <= facts.world_size;
        let schedule = is_countable.then(|| plan.schedule.for_ranks(ranks, micro_batches));
        let stages = match plan.schedule.kind() {
            Some((_, chunks)) => ranks.checked_mul(chunks),
            None => schedule.iter().flatten().next().map(Schedule::stages),
        };
        self.stages(stages);
        match schedule? {
            Ok(schedule) => Some(schedule),
            Err(ScheduleError(problems)) => {
                let problem = |problem: ScheduleProblem| PlanProblem::Schedule { micro_batches, problem };
                self.problems.extend(problems.into_iter().map(problem));
                None
            }
        }
    }

    /// Whether the split has as many stages as the schedule, if that is known, and the model's units.
    fn stages(&mut self, stages: Option<usize>) {
        let (given, ranks) = (self.plan.stages.len(), self.plan.mesh.pipeline);
        let (units, layers) = (self.facts.units(), self.facts.layers);
        if let Some(stages) = stages.filter(|&stages| stages != given) {
            let chunks = stages / ranks;
            self.problems.push(PlanProblem::StageCount { given, stages, chunks, ranks });
        }
        if let Some(stages) = stages.filter(|&stages| stages > units) {
            self.problems.push(PlanProblem::TooManyStages { stages, units, layers });
        }
        let empty = self.plan.stages.iter().enumerate().filter(|(_, units)| **units == 0);
        self.problems.extend(empty.map(|(stage, _)| PlanProblem::EmptyStage { stage }));
        let given = self.plan.stages.iter().fold(0_usize, |sum, &units| sum.saturating_add(units));
        if given != units {
            self.problems.push(PlanProblem::Units { given, units, layers });
        }
    }
}

/// Whether `things` can be shared out evenly among `ranks`, or each be repeated on as many of them as every other.
fn even(things: usize, ranks: usize) -> bool {
    things.is_multiple_of(ranks) || ranks.is_multiple_of(things)
}

fn least_common_multiple(a: usize, b: usize) -> usize {
    let (mut divisor, mut rest) = (a, b);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    a / divisor * b
}
