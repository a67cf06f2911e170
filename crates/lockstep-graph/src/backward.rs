//! Derives the backward of a recording: the gradient each operation reads, the gradients it writes or adds to, and
//! the copies needed where two values share a gradient.
//!
//! An addition passes its gradient on to both inputs without a copy; the copy is made only when one of them
//! is about to receive a second contribution while the other is still needed (the residual stream).

use lockstep_tensor::Write;

use crate::{
    block::{Value, ValueInfo},
    facts::Facts,
    instruction::{Gradient, GradientBuffer, Home, Instruction},
    training::Training,
};

/// The time at which weight gradients are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Right after the input gradients of the same operation.
    Fused,
    /// After all input gradients, in a second list.
    Split,
}

pub(crate) struct Backward {
    pub(crate) inputs: Vec<Instruction>,
    /// Empty under [`Order::Fused`].
    pub(crate) weights: Vec<Instruction>,
    pub(crate) gradients: Vec<GradientBuffer>,
}

/// Returns the backward instructions of operations with these facts; empty if no gradient is needed.
pub(crate) fn derive(
    values: &[ValueInfo],
    facts: &[Facts],
    input: Option<Value>,
    output: Value,
    training: &Training,
    order: Order,
) -> Backward {
    let mut producers = vec![None; values.len()];
    for (index, facts) in facts.iter().enumerate() {
        producers[facts.output().0] = Some(index);
    }
    let mut tape = Tape {
        values,
        training,
        producers,
        of: vec![None; values.len()],
        pinned: Vec::new(),
        out: Backward { inputs: Vec::new(), weights: Vec::new(), gradients: Vec::new() },
        order,
    };
    let mut losses = facts.iter().filter(|facts| facts.is_loss).map(Facts::output);
    if !training.differentiates(output) && !losses.clone().any(|loss| training.differentiates(loss)) {
        return tape.out;
    }
    // A loss seeds itself; any other output is given its gradient.
    if !losses.any(|loss| loss == output) {
        let dy = tape.gradient(output, Home::OutputGradient);
        tape.pinned[dy.0] = true;
        tape.of[output.0] = Some(dy);
        if order == Order::Split {
            // The caller's buffer is no longer valid when the weight gradients are computed.
            let kept = tape.gradient(output, Home::Anywhere);
            tape.out.inputs.push(Instruction::Copy { from: dy, to: kept });
            tape.of[output.0] = Some(kept);
        }
    }
    for (index, facts) in facts.iter().enumerate().rev() {
        tape.operation(index, facts);
    }
    if let Some(input) = input.filter(|input| training.differentiates(*input)) {
        tape.deliver(input);
    }
    tape.out
}

struct Tape<'a> {
    values: &'a [ValueInfo],
    training: &'a Training,
    producers: Vec<Option<usize>>,
    /// The gradient of each value, once something has contributed to it.
    of: Vec<Option<Gradient>>,
    /// Gradients that must not be written to any more.
    pinned: Vec<bool>,
    out: Backward,
    order: Order,
}

impl Tape<'_> {
    fn gradient(&mut self, value: Value, home: Home) -> Gradient {
        self.out.gradients.push(GradientBuffer { info: self.values[value.0], home });
        self.pinned.push(false);
        Gradient(self.out.gradients.len() - 1)
    }

    fn operation(&mut self, index: usize, facts: &Facts) {
        if facts.is_loss {
            self.contribute(index, facts, None);
            return;
        }
        // A value that nothing reads has no gradient, nor do the operations before it.
        let Some(dy) = self.of[facts.output().0] else { return };
        if facts.passes_gradient_on {
            for &x in facts.inputs.iter().filter(|x| self.training.differentiates(**x)) {
                match self.of[x.0] {
                    None => self.of[x.0] = Some(dy),
                    Some(_) => {
                        let to = self.owned(x, index);
                        self.out.inputs.push(Instruction::Add { from: dy, to });
                    }
                }
            }
            return;
        }
        if self.training.reaches_inputs(facts) {
            self.contribute(index, facts, Some(dy));
        }
        if self.training.reaches_weights(facts) {
            let weights = Instruction::BackwardWeights { operation: index, dy };
            match self.order {
                Order::Fused => self.out.inputs.push(weights),
                Order::Split => {
                    self.pinned[dy.0] = true;
                    self.out.weights.push(weights);
                }
            }
        }
    }

    /// Adds an operation's contribution to the gradients of its inputs; `dy` is that of its output, `None` for a loss.
    fn contribute(&mut self, index: usize, facts: &Facts, dy: Option<Gradient>) {
        let mut dx = Vec::with_capacity(facts.inputs.len());
        let mut additions = Vec::new();
        for &x in &facts.inputs {
            let target = match self.of[x.0] {
                // The kernel writes this gradient in any case, but nothing reads it.
                None if !self.training.differentiates(x) => {
                    (self.gradient(x, Home::Anywhere), Write::Overwrite)
                }
                None => {
                    let is_free = |dy: &Gradient| {
                        facts.backward_in_place
                            && !self.pinned[dy.0]
                            && !self.is_shared(*dy, facts.output(), index)
                    };
                    let target = dy.filter(is_free).unwrap_or_else(|| self.gradient(x, Home::Anywhere));
                    self.of[x.0] = Some(target);
                    (target, Write::Overwrite)
                }
                Some(_) => {
                    let owned = self.owned(x, index);
                    if facts.accumulates {
                        (owned, Write::Accumulate)
                    } else {
                        let aside = self.gradient(x, Home::Anywhere);
                        additions.push(Instruction::Add { from: aside, to: owned });
                        (aside, Write::Overwrite)
                    }
                }
            };
            dx.push(target);
        }
        self.out.inputs.push(Instruction::BackwardInputs { operation: index, dy, dx });
        self.out.inputs.extend(additions);
    }

    /// Returns the gradient of `value` in a buffer that may be added to: a copy if another value still needs the current one.
    fn owned(&mut self, value: Value, current: usize) -> Gradient {
        let gradient = self.of[value.0].expect("only a value that has a gradient is added to");
        if !self.pinned[gradient.0] && !self.is_shared(gradient, value, current) {
            return gradient;
        }
        let copy = self.gradient(value, Home::Anywhere);
        self.out.inputs.push(Instruction::Copy { from: gradient, to: copy });
        self.of[value.0] = Some(copy);
        copy
    }

    /// Returns true if a value other than `value`, whose producer is still to be differentiated, uses the same gradient buffer.
    fn is_shared(&self, gradient: Gradient, value: Value, current: usize) -> bool {
        (0..self.values.len()).any(|other| {
            other != value.0
                && self.of[other] == Some(gradient)
                && self.producers[other].is_none_or(|producer| producer <= current)
        })
    }

    /// Makes the gradient of the block's input end in the caller's buffer.
    fn deliver(&mut self, input: Value) {
        let gradient = self.of[input.0].expect("a block uses its input");
        if self.pinned[gradient.0] || self.out.gradients[gradient.0].home != Home::Anywhere {
            let to = self.gradient(input, Home::InputGradient);
            self.out.inputs.push(Instruction::Copy { from: gradient, to });
        } else {
            self.out.gradients[gradient.0].home = Home::InputGradient;
        }
    }
}
