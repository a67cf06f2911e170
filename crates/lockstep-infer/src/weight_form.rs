//! Form of a model's weights in memory: the type of those that are numbers, the blocks of those that are quantized, and the order of
//! the rows of blocks.

use lockstep_checkpoint::{RowOrder, WeightQuantization, gguf::StoredElements, is_quantizable};
use lockstep_plan::{BlockFormat, DType, ParameterRecord};
use lockstep_tensor::{BlockActivations, BlockLayout, BlockMatrix, Matrix, Shape, View};

/// Form of the weights of a model in memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WeightForm {
    /// Type of weights that are numbers.
    pub(crate) dtype: DType,
    /// Quantization of whole matrices of linear layers that are stored as numbers.
    pub(crate) quantization: Option<WeightQuantization>,
    /// Activations in products with quantized weights.
    pub(crate) activations: BlockActivations,
}

impl WeightForm {
    /// Returns the form of weights in type `dtype`. Activations that are `None` are int8, but their own type if that is f32.
    pub(crate) fn new(
        dtype: DType,
        quantization: Option<WeightQuantization>,
        activations: Option<BlockActivations>,
    ) -> Self {
        let int8 = if dtype == DType::F32 { BlockActivations::Float } else { BlockActivations::Int8 };
        Self { dtype, quantization, activations: activations.unwrap_or(int8) }
    }

    /// Returns true if the rows of a matrix are interleaved: those of blocks whose codes are multiplied with codes of activations.
    pub(crate) fn interleaves(&self, elements: StoredElements, shape: Shape) -> bool {
        let StoredElements::Blocks(format) = elements else { return false };
        // Each matrix of a stack is multiplied on its own.
        let matrix =
            if let [_, rows, columns] = *shape.dims() { Shape::from([rows, columns]) } else { shape };
        self.activations == BlockActivations::Int8
            && format.has_integer_codes()
            && bytes_of(elements, BlockLayout::Interleaved, matrix).is_some()
    }

    /// Returns the format in which a matrix, or a stack of the matrices of experts, that is stored as numbers is quantized; `None` if
    /// it is not.
    pub(crate) fn quantized_format(&self, record: &ParameterRecord) -> Option<BlockFormat> {
        let quantization = self.quantization?;
        let matrix = match record.shape[..] {
            [_, rows, columns] if record.name.contains(".experts.") => [rows, columns],
            [rows, columns] => [rows, columns],
            _ => return None,
        };
        let is_quantized = record.tie.is_none() && is_quantizable(&record.name, &matrix);
        is_quantized.then(|| quantization.format(matrix[1])).flatten()
    }
}

/// Returns the bytes of elements of a shape in a layout, which only blocks have; `None` if they do not fit it.
pub(crate) fn bytes_of(elements: StoredElements, layout: BlockLayout, shape: Shape) -> Option<usize> {
    match elements {
        StoredElements::Dense(dtype) => Some(shape.elements() * dtype.size_bytes()),
        StoredElements::Blocks(format) => BlockMatrix::bytes_of(format, layout, shape.as_matrix().into()),
    }
}

/// Returns the matrix of a shape that lies in memory; `memory` returns a view of it, or `None` if it lies elsewhere.
pub(crate) fn matrix_of<'m>(
    (elements, layout): (StoredElements, BlockLayout),
    shape: Shape,
    memory: impl FnOnce(DType, Shape) -> Option<View<'m>>,
) -> Option<Matrix<'m>> {
    match elements {
        StoredElements::Dense(dtype) => memory(dtype, shape).map(Matrix::Dense),
        StoredElements::Blocks(format) => {
            let bytes = memory(DType::U8, Shape::from([bytes_of(elements, layout, shape)?]))?;
            Some(Matrix::Blocks(BlockMatrix::with_layout(format, layout, bytes, shape.as_matrix().into())))
        }
    }
}

/// Copies the rows of a matrix, or of a range of its rows that begins with a head, into the order of the parameter. Both views are
/// bytes.
pub(crate) fn copy_rows(from: View<'_>, order: RowOrder, row_bytes: usize, to: View<'_>) {
    if row_bytes == 0 {
        return;
    }
    let mut row = vec![0_u8; row_bytes];
    for (number, start) in (0..to.elements()).step_by(row_bytes).enumerate() {
        let stored = order.stored_row(number) * row_bytes;
        from.rows(stored..stored + row_bytes).copy_to(&mut row);
        to.rows(start..start + row_bytes).copy_from(&row);
    }
}
