//! Facts of a model that plans are checked against.

use lockstep_plan::{CheckedPlan, Facts, Plan, PlanProblems, StepFacts};

use crate::ModelConfig;

impl ModelConfig {
    /// Returns the facts that plans are checked against, for a training step on `world_size` ranks. The model's
    /// digest is left empty, and no adapter is set.
    pub fn facts(&self, step: StepFacts, world_size: usize) -> Facts {
        Facts {
            model: String::new(),
            layers: self.num_hidden_layers(),
            heads: self.num_attention_heads(),
            key_value_heads: self.num_key_value_heads(),
            hidden: self.hidden_size(),
            intermediate: self.intermediate_size(),
            has_latent_attention: self.has_latent_attention(),
            vocab: self.vocab_size(),
            experts: self.experts().map_or(0, |experts| experts.count),
            expert_intermediate: self.experts().map_or(0, |experts| experts.intermediate_size),
            adapter_rank: None,
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
        let resolved = plan.resolved(&facts, || vec![1.0; facts.units()]);
        resolved.as_ref().unwrap_or(plan).check(&facts)
    }
}
