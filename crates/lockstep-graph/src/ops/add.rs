//! Addition `y = a + b`. Its inputs share the gradient of its output, so no instruction is derived for its backward.

use lockstep_comm::CommError;

use crate::{block::Value, facts::Facts, op::Op, recorder::Recorder, replay::Run};

#[derive(Debug)]
struct Add {
    a: Value,
    b: Value,
    y: Value,
}

impl Recorder {
    /// Records `a + b`.
    ///
    /// # Panics
    /// If the two have unlike columns or placements, or are partial sums.
    #[track_caller]
    pub fn add(&mut self, a: Value, b: Value) -> Value {
        self.expect_same(a, b, "add");
        let y = self.same_shape(a);
        self.push(Add { a, b, y });
        y
    }
}

impl Op for Add {
    fn facts(&self) -> Facts {
        let Self { a, b, y } = *self;
        Facts {
            in_place_inputs: vec![b, a],
            passes_gradient_on: true,
            vector_flops: [1, 0, 0],
            ..Facts::of("add", [a, b], [y])
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        run.queue().add(run.value(self.a), run.value(self.b), run.value(self.y));
        Ok(())
    }
}
