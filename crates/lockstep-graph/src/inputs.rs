//! Named inputs of a micro-batch besides its tokens (images, masks, class labels) and named constants of a model. A model
//! declares them; a unit reads one as a value, which has no gradient.

use lockstep_comm::CommError;
use lockstep_plan::DType;

use crate::{
    block::{Constant, InputDeclaration, Value, ValueInfo},
    facts::Facts,
    op::Op,
    placement::Placement,
    recorder::Recorder,
    replay::Run,
    storage::Region,
};

/// A conversion of an f32 input to the dtype of activations.
#[derive(Debug)]
struct Conversion {
    x: Value,
    y: Value,
}

impl Op for Conversion {
    fn facts(&self) -> Facts {
        Facts { tables: vec![self.x], is_cheap: true, ..Facts::of("convert input", [], [self.y]) }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        run.queue().cast(run.value(self.x), run.value(self.y));
        Ok(())
    }
}

impl Recorder {
    /// Declares the named inputs of the model, in the order in which a micro-batch has them.
    pub fn declare_inputs(&mut self, inputs: &[InputDeclaration]) {
        self.inputs = inputs.to_vec();
    }

    /// Returns a named input of the micro-batch, `[samples, shape of a sample]`.
    ///
    /// # Panics
    /// If the model declares no input of this name, or ranks split the samples' sequences.
    #[track_caller]
    pub fn data(&mut self, name: &str) -> Value {
        let Some(index) = self.inputs.iter().position(|input| input.name == name) else {
            let names: Vec<&str> = self.inputs.iter().map(|input| input.name.as_str()).collect();
            panic!("the model declares no input {name}, only {names:?}");
        };
        assert_eq!(self.context.ranks, 1, "the input {name} is not split over context-parallel ranks");
        let input = self.inputs[index].for_tokens(self.shape.seq_len);
        let (dtype, columns, shape) = (input.dtype, input.elements(), input.shape);
        let value =
            self.create(ValueInfo { rows: self.shape.sequences, columns, dtype }, Placement::Replicate);
        self.give(value, Region::Data(index));
        if shape.len() > 1 {
            self.set_dims(value, &shape);
        }
        if dtype == DType::F32 && self.shape.dtype != DType::F32 { self.converted(value) } else { value }
    }

    /// Declares the constants of the model, in the order in which a replay has them.
    pub fn declare_constants(&mut self, constants: &[Constant]) {
        self.constants = constants.to_vec();
    }

    /// Returns a constant of the model, f32 `[1, numbers]`. It is small and on the device during every pass, so
    /// operations that read it need not list it in their [`Facts`].
    ///
    /// # Panics
    /// If the model declares no constant of this name.
    #[track_caller]
    pub fn constant(&mut self, name: &str) -> Value {
        let Some(index) = self.constants.iter().position(|constant| constant.name == name) else {
            let names: Vec<&str> = self.constants.iter().map(|constant| constant.name.as_str()).collect();
            panic!("the model declares no constant {name}, only {names:?}");
        };
        let value = self.local(1, self.constants[index].values.len(), DType::F32);
        self.give(value, Region::Constant(index));
        value
    }

    /// Marks a value as one that the caller of a replay supplies.
    fn give(&mut self, value: Value, region: Region) {
        self.written[value.0] = true;
        self.given.push((value, region));
    }

    fn converted(&mut self, x: Value) -> Value {
        let info = ValueInfo { dtype: self.shape.dtype, ..self.values[x.0] };
        let y = self.create(info, self.placement(x));
        self.copy_dims(x, y);
        self.push(Conversion { x, y });
        y
    }
}
