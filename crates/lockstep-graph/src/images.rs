//! Shapes of values of any rank: the dimensions after the rows, and images among them.
//!
//! A value is dense and row-major. Its rows are samples or tokens; the dimensions of one row are a way to read the columns.

use crate::{block::Value, placement::Placement, recorder::Recorder};

impl Recorder {
    /// Returns the unit's input, the output of the unit before, with the dimensions of one row: `[height, width, channels]`
    /// for an image.
    ///
    /// # Panics
    /// If called twice.
    #[track_caller]
    pub fn input_of(&mut self, dims: &[usize]) -> Value {
        let value = self.input(dims.iter().product());
        self.set_dims(value, dims);
        value
    }

    /// Sets the dimensions of one row of a value; its elements stay where they are.
    ///
    /// # Panics
    /// If the elements of a row are not those of `dims`.
    #[track_caller]
    pub(crate) fn set_dims(&mut self, value: Value, dims: &[usize]) {
        let (elements, columns) = (dims.iter().product::<usize>(), self.columns(value));
        assert_eq!(elements, columns, "{dims:?} for the {columns} columns of {}", self.describe(value));
        self.dims[value.0] = dims.to_vec();
    }

    /// Returns `[samples, height, width, channels]` of an image; `what` names the operation in errors.
    ///
    /// # Panics
    /// If the value is no image, or ranks hold parts of it.
    #[track_caller]
    pub(crate) fn image(&self, value: Value, what: &str) -> [usize; 4] {
        self.expect_placement(value, |placement| placement == Placement::Replicate, what);
        match *self.dims(value) {
            [height, width, channels] => [self.local_rows(value), height, width, channels],
            ref other => panic!("{what}: an image is [height, width, channels], not {other:?}"),
        }
    }

    /// Creates an image with the rows and the placement of another.
    pub(crate) fn image_like(&mut self, other: Value, [height, width]: [usize; 2], channels: usize) -> Value {
        let value = self.value_like(other, height * width * channels);
        self.set_dims(value, &[height, width, channels]);
        value
    }
}
