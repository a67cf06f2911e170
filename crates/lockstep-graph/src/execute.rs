//! Replay of a program: each instruction becomes a call of an operation on views of the caller's buffers.
//!
//! A replay walks a list and allocates nothing. If it is traced, each instruction is a span.

use lockstep_comm::CommError;
use lockstep_tensor::{Buffer, View};

use crate::{
    instruction::{Instruction, Phase},
    program::Program,
    replay::{Extra, InputGradients, Replay, Run, Seed},
    timeline::Trace,
};

impl Program {
    /// Runs the forward and leaves the output in the frame, or in `replay.output`.
    ///
    /// # Errors
    /// If a collective fails or times out, as in all replays. A replay without groups is infallible.
    pub fn forward(&self, replay: &Replay<'_>) -> Result<(), CommError> {
        self.run(&self.forward, replay, Extra::default())
    }

    /// Runs the forward of a step that continues with a backward. A loss is skipped, because [`Program::backward`]
    /// computes its logits anyway; a block without a loss runs in full.
    ///
    /// # Errors
    /// If a collective fails or times out.
    pub fn forward_for_backward(&self, replay: &Replay<'_>) -> Result<(), CommError> {
        let extra = Extra { skips_loss: true, ..Extra::default() };
        self.run(&self.forward, replay, extra)
    }

    /// Returns the output in the frame, after a forward; losses also after a backward.
    pub fn output<'a>(&self, frame: &'a Buffer) -> View<'a> {
        self.in_frame(frame, self.output)
    }

    /// Computes the input and weight gradients, after a forward. `dy` is the gradient of the output (`None` for a
    /// block that ends in a loss); `dx` receives that of the input (`None` for a block without an input).
    ///
    /// # Errors
    /// If a collective fails or times out.
    pub fn backward(
        &self,
        replay: &Replay<'_>,
        dy: Option<View<'_>>,
        dx: Option<View<'_>>,
        seed: Seed,
    ) -> Result<(), CommError> {
        let extra = Extra { dy, dx, seed, ..Extra::default() };
        self.run(&self.backward, replay, extra)
    }

    /// Runs the first half of a split backward, the input gradients. Values for the weight gradients are saved in
    /// `deferred` (at least [`Program::deferred_bytes`]) and in the frame.
    ///
    /// # Errors
    /// If a collective fails or times out.
    pub fn backward_inputs(
        &self,
        replay: &Replay<'_>,
        dy: Option<View<'_>>,
        dx: Option<View<'_>>,
        seed: Seed,
        deferred: &Buffer,
    ) -> Result<(), CommError> {
        let extra = Extra { dy, dx, seed, deferred: Some(deferred), ..Extra::default() };
        self.run(&self.backward_inputs, replay, extra)
    }

    /// Runs the second half of a split backward, which adds to the weight gradients.
    ///
    /// # Errors
    /// If a collective fails or times out.
    pub fn backward_weights(&self, replay: &Replay<'_>, deferred: &Buffer) -> Result<(), CommError> {
        let extra = Extra { deferred: Some(deferred), ..Extra::default() };
        self.run(&self.backward_weights, replay, extra)
    }

    fn run(&self, phase: &Phase, replay: &Replay<'_>, extra: Extra<'_>) -> Result<(), CommError> {
        let run = Run { shapes: &self.shapes, phase, replay, extra };
        let is_loss = |instruction: &Instruction| match instruction {
            Instruction::Forward(operation) => self.facts[*operation].is_loss,
            _ => false,
        };
        for instruction in &phase.instructions {
            if extra.skips_loss && is_loss(instruction) {
                continue;
            }
            match replay.trace {
                None => self.instruction(&run, instruction)?,
                Some(Trace { timeline, unit }) => timeline.span(
                    || (self.activity(instruction, phase, unit), self.cost(instruction, phase)),
                    || self.instruction(&run, instruction),
                )?,
            }
        }
        Ok(())
    }

    fn instruction(&self, run: &Run<'_>, instruction: &Instruction) -> Result<(), CommError> {
        match instruction {
            Instruction::Forward(operation) => {
                let facts = &self.facts[*operation];
                if let Some(observer) = run.replay().observer.filter(|_| facts.is_row_product) {
                    observer.observe(facts.weights[0], run.value(facts.inputs[0]));
                }
                self.operations[*operation].forward(run)?;
            }
            Instruction::BackwardInputs { operation, dy, dx } => {
                let (operation, dx) = (&self.operations[*operation], InputGradients { run, targets: dx });
                match dy {
                    Some(dy) => operation.backward_inputs(run, run.gradient(*dy), &dx)?,
                    None => operation.backward_loss(run, &dx)?,
                }
            }
            Instruction::BackwardWeights { operation, dy } => {
                self.operations[*operation].backward_weights(run, run.gradient(*dy))?;
            }
            Instruction::Copy { from, to } => run.queue().cast(run.gradient(*from), run.gradient(*to)),
            Instruction::Add { from, to } => {
                let to = run.gradient(*to);
                run.queue().add(to, run.gradient(*from), to);
            }
            _ => run.in_transit(self, instruction)?,
        }
        Ok(())
    }
}
