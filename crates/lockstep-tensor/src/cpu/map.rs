//! The loop of the elementwise kernels.

use super::{
    CpuQueue,
    operands::Operand,
    simd::{BLOCK, Block, Float, Isa, inlined, map_block},
    tasks::elements_per_task,
};
use crate::View;

/// Computes `outputs[m][i] = f(isa, [inputs[0][i], inputs[1][i], ...])[m]`.
///
/// The caller must have checked that all views have the same number of elements, and that an output overlaps another
/// operand only if it is an input in place. `f` must be `inlined!`.
#[inline(always)]
pub(super) fn map<T: Float, const N: usize, const M: usize>(
    queue: &CpuQueue,
    inputs: [View<'_>; N],
    outputs: [View<'_>; M],
    f: impl Fn(Isa, [f32; N]) -> [f32; M] + Sync,
) {
    let elements = outputs[0].elements();
    let inputs = inputs.map(Operand::<T>::new);
    let outputs = outputs.map(Operand::<T>::new);
    queue.for_each_range(
        elements,
        elements_per_task(elements),
        inlined!(|range, isa| {
            let mut results = [Block::ZERO; M];
            for start in range.clone().step_by(BLOCK) {
                let n = BLOCK.min(range.end - start);
                let mut x: [&[T]; N] = [&[]; N];
                for (x, input) in x.iter_mut().zip(&inputs) {
                    // SAFETY: this task alone writes this range of any operand, and not while the slices live.
                    *x = unsafe { input.read(start..start + n) };
                }
                map_block(x, &mut results, n, inlined!(|x| f(isa, x)));
                for (output, block) in outputs.iter().zip(&results) {
                    // SAFETY: this task alone accesses this range, and no slice of it is used any more.
                    T::store_all(isa, &block.0[..n], unsafe { output.write(start..start + n) });
                }
            }
        }),
    );
}
