//! Named inputs of a micro-batch besides its tokens: images, masks, class labels. A model declares them; a unit reads one
//! as a value, which has no gradient.

use crate::{
    block::{InputDeclaration, Value, ValueInfo},
    placement::Placement,
    recorder::Recorder,
};

/// Name of the input that a loss counts: elements other than -100 of an i32 input are valid.
pub const LABELS: &str = "labels";

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
        if let Some(&(value, _)) = self.data.iter().find(|(_, known)| *known == index) {
            return value;
        }
        assert_eq!(self.context.ranks, 1, "the input {name} is not split over context-parallel ranks");
        let InputDeclaration { dtype, .. } = self.inputs[index];
        let info = ValueInfo { rows: self.shape.sequences, columns: self.inputs[index].elements(), dtype };
        let value = self.create(info, Placement::Replicate);
        self.data.push((value, index));
        value
    }
}
