//! Facts of a model that plans are checked against.

use lockstep_plan::{CheckedPlan, Facts, Plan, PlanProblems, StepFacts};

use crate::ModelConfig;

impl ModelConfig {
    /// Returns the facts that plans are checked against, for a training step on `world_size` ranks. The model's
    /// digest is left empty, and no adapter is set.
    pub fn facts(&self, step: StepFacts, world_size: usize) -> Facts {
        let sizes = self.model().sizes();
        Facts {
            model: String::new(),
            units: self.model().units().len(),
            layers: sizes.layers,
            heads: sizes.heads,
            key_value_heads: sizes.key_value_heads,
            hidden: sizes.hidden,
            intermediate: sizes.intermediate,
            has_latent_attention: sizes.latent_dim.is_some(),
            norms_span_heads: sizes.norms_span_heads,
            vocab: sizes.vocab,
            has_inputs: !self.model().inputs().is_empty(),
            fixed_seq_len: sizes.fixed_seq_len,
            experts: self.experts().map_or(0, |experts| experts.count),
            expert_intermediate: self.experts().map_or(0, |experts| experts.intermediate_size),
            experts_have_biases: sizes.experts_have_biases,
            adapter_rank: None,
            has_quantized_weights: false,
            step,
            world_size,
        }
    }

    /// Checks `plan` for steps of `global_batch` sequences of `seq_len` tokens. Pipeline stages that the plan leaves
    /// open get equally many units each.
    ///
    /// # Errors
    /// If the plan breaks any rule; the error lists every problem.
    pub fn check_plan(
        &self,
        plan: &Plan,
        [global_batch, seq_len]: [usize; 2],
    ) -> Result<CheckedPlan, PlanProblems> {
        let step = StepFacts { global_batch, seq_len, ..StepFacts::default() };
        let facts = self.facts(step, plan.mesh.world_size().unwrap_or(0));
        let resolved = plan.resolved(&facts, || vec![1.0; facts.units]);
        resolved.as_ref().unwrap_or(plan).check(&facts)
    }
}
