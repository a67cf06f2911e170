//! The kernel of reductions, and the order in which it adds numbers of several ranks.
//!
//! Element i of the result depends on element i of every rank and on nothing else. The ranks are the leaves of a fixed
//! binary tree. Its left half holds the largest power of two of ranks that leaves at least one for the right:
//!
//! ```text
//!     7 ranks:  (((0 1) (2 3)) ((4 5) 6))
//! ```
//!
//! bf16 and f16 are widened to f32 at the leaves and rounded once, at the root. The result therefore has the same bits
//! whatever the chunking, whichever rank reduces which part, and whatever the transport.

use std::mem::MaybeUninit;

use half::{bf16, f16, slice::HalfFloatSliceExt};
use lockstep_tensor::CpuLevel;

use crate::{MAX_WORLD, Number, NumberType, ReduceOp};

/// Number of elements that are reduced at a time; the partial results of the whole tree fit into the L1 cache.
const LANES: usize = 64;
/// Number of levels of the tree over [`MAX_WORLD`] leaves, including the leaves.
const LEVELS: usize = MAX_WORLD.ilog2() as usize + 1;

/// Reduces `elements` elements of the sources, which are in rank order, and writes the result to every target.
///
/// # Safety
/// Each pointer is valid for `elements` elements. Meanwhile no other code writes to them or reads the targets. A target may
/// be identical to a source, but must not overlap one in any other way. Pointers need no alignment.
pub unsafe fn reduce(
    number: NumberType,
    op: ReduceOp,
    sources: &[*const u8],
    targets: &[*mut u8],
    elements: usize,
) {
    // SAFETY: the contract is the same for all types; the caller upholds it.
    unsafe {
        match number {
            NumberType::F32 => reduce_as::<f32>(op, sources, targets, elements),
            NumberType::Bf16 => reduce_as::<bf16>(op, sources, targets, elements),
            NumberType::F16 => reduce_as::<f16>(op, sources, targets, elements),
            NumberType::I64 => reduce_as::<i64>(op, sources, targets, elements),
            NumberType::I32 => reduce_as::<i32>(op, sources, targets, elements),
            NumberType::U32 => reduce_as::<u32>(op, sources, targets, elements),
            NumberType::U8 => reduce_as::<u8>(op, sources, targets, elements),
        }
    }
}

/// # Safety
/// As for [`reduce`].
unsafe fn reduce_as<T: Reducible>(op: ReduceOp, sources: &[*const u8], targets: &[*mut u8], elements: usize) {
    let operands = Operands::<T> { sources, targets, elements, stored: std::marker::PhantomData };
    match op {
        ReduceOp::Sum => CpuLevel::run_at_best(
            #[inline(always)]
            // SAFETY: the caller upholds the contract of `reduce`.
            || unsafe { operands.reduce(T::sum) },
        ),
        ReduceOp::Max => CpuLevel::run_at_best(
            #[inline(always)]
            // SAFETY: the caller upholds the contract of `reduce`.
            || unsafe { operands.reduce(T::max) },
        ),
        ReduceOp::Min => CpuLevel::run_at_best(
            #[inline(always)]
            // SAFETY: the caller upholds the contract of `reduce`.
            || unsafe { operands.reduce(T::min) },
        ),
    }
}

/// Element type and its arithmetic, which may be that of a wider type.
trait Reducible: Number {
    type Wide: Copy + Default;
    fn widen(from: &[Self; LANES], to: &mut [Self::Wide; LANES]);
    fn narrow(from: &[Self::Wide; LANES], to: &mut [Self; LANES]);
    fn sum(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn max(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn min(a: Self::Wide, b: Self::Wide) -> Self::Wide;
}

macro_rules! float_arithmetic {
    () => {
        type Wide = f32;
        #[inline(always)]
        fn sum(a: f32, b: f32) -> f32 {
            a + b
        }
        #[inline(always)]
        fn max(a: f32, b: f32) -> f32 {
            if a > b || a.is_nan() { a } else { b }
        }
        #[inline(always)]
        fn min(a: f32, b: f32) -> f32 {
            if a < b || a.is_nan() { a } else { b }
        }
    };
}

impl Reducible for f32 {
    float_arithmetic!();
    #[inline(always)]
    fn widen(from: &[Self; LANES], to: &mut [f32; LANES]) {
        *to = *from;
    }
    #[inline(always)]
    fn narrow(from: &[f32; LANES], to: &mut [Self; LANES]) {
        *to = *from;
    }
}

impl Reducible for bf16 {
    float_arithmetic!();
    #[inline(always)]
    fn widen(from: &[Self; LANES], to: &mut [f32; LANES]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = from.to_f32();
        }
    }
    #[inline(always)]
    fn narrow(from: &[f32; LANES], to: &mut [Self; LANES]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = Self::from_f32(*from);
        }
    }
}

impl Reducible for f16 {
    float_arithmetic!();
    // `half` selects the CPU's conversion instructions at run time.
    #[inline(always)]
    fn widen(from: &[Self; LANES], to: &mut [f32; LANES]) {
        from.convert_to_f32_slice(to);
    }
    #[inline(always)]
    fn narrow(from: &[f32; LANES], to: &mut [Self; LANES]) {
        to.convert_from_f32_slice(from);
    }
}

macro_rules! reducible_integers {
    ($($type:ty),*) => {$(
        impl Reducible for $type {
            type Wide = Self;
            #[inline(always)]
            fn widen(from: &[Self; LANES], to: &mut [Self; LANES]) {
                *to = *from;
            }
            #[inline(always)]
            fn narrow(from: &[Self; LANES], to: &mut [Self; LANES]) {
                *to = *from;
            }
            #[inline(always)]
            fn sum(a: Self, b: Self) -> Self {
                a.wrapping_add(b)
            }
            #[inline(always)]
            fn max(a: Self, b: Self) -> Self {
                Ord::max(a, b)
            }
            #[inline(always)]
            fn min(a: Self, b: Self) -> Self {
                Ord::min(a, b)
            }
        }
    )*};
}
reducible_integers!(i64, i32, u32, u8);

struct Operands<'a, T> {
    sources: &'a [*const u8],
    targets: &'a [*mut u8],
    elements: usize,
    stored: std::marker::PhantomData<T>,
}

impl<T: Reducible> Operands<'_, T> {
    /// # Safety
    /// As for [`reduce`].
    #[inline(always)]
    unsafe fn reduce(&self, op: impl Fn(T::Wide, T::Wide) -> T::Wide + Copy) {
        // `partials[l]`, if set, is the result over 2^l ranks that waits for its right neighbour.
        let mut partials = [const { MaybeUninit::uninit() }; LEVELS];
        let whole = self.elements / LANES;
        for block in 0..whole {
            // SAFETY: the block is within the operands.
            unsafe { self.reduce_block(block * LANES, LANES, op, &mut partials) };
        }
        let rest = self.elements % LANES;
        if rest > 0 {
            // SAFETY: as above.
            unsafe { self.reduce_block(whole * LANES, rest, op, &mut partials) };
        }
    }

    /// # Safety
    /// As for [`reduce`]; elements `at..at + len` exist, at most `LANES`.
    #[inline(always)]
    unsafe fn reduce_block(
        &self,
        at: usize,
        len: usize,
        op: impl Fn(T::Wide, T::Wide) -> T::Wide,
        partials: &mut [MaybeUninit<[T::Wide; LANES]>; LEVELS],
    ) {
        let (ranks, mut sum) = (self.sources.len(), [T::Wide::default(); LANES]);
        for rank in 0..ranks {
            // SAFETY: the caller upholds the contract.
            sum = unsafe { self.load(rank, at, len) };
            let is_last = rank + 1 == ranks;
            let (mut level, mut subtrees) = (0, rank);
            // The last rank combines with all partial results that still wait.
            while subtrees > 0 && (is_last || subtrees % 2 == 1) {
                if subtrees % 2 == 1 {
                    // SAFETY: an odd number of subtrees has a left neighbour at this level, which was stored when it was
                    // complete.
                    let left = unsafe { partials[level].assume_init_ref() };
                    for (right, left) in sum.iter_mut().zip(left) {
                        *right = op(*left, *right);
                    }
                }
                level += 1;
                subtrees /= 2;
            }
            partials[level].write(sum);
        }
        let mut stored = [T::zeroed(); LANES];
        T::narrow(&sum, &mut stored);
        for target in self.targets {
            // SAFETY: the caller upholds the contract; `stored` is a local array.
            unsafe {
                let target = target.cast::<T>().add(at);
                if len == LANES {
                    target.cast::<[T; LANES]>().write_unaligned(stored);
                } else {
                    std::ptr::copy_nonoverlapping(
                        stored.as_ptr().cast::<u8>(),
                        target.cast(),
                        len * size_of::<T>(),
                    );
                }
            }
        }
    }

    /// # Safety
    /// As for `reduce_block`.
    #[inline(always)]
    unsafe fn load(&self, rank: usize, at: usize, len: usize) -> [T::Wide; LANES] {
        let mut stored = [T::zeroed(); LANES];
        // SAFETY: the caller upholds the contract; `stored` is a local array.
        unsafe {
            let source = self.sources[rank].cast::<T>().add(at);
            if len == LANES {
                stored = source.cast::<[T; LANES]>().read_unaligned();
            } else {
                std::ptr::copy_nonoverlapping(
                    source.cast::<u8>(),
                    stored.as_mut_ptr().cast(),
                    len * size_of::<T>(),
                );
            }
        }
        let mut wide = [T::Wide::default(); LANES];
        T::widen(&stored, &mut wide);
        wide
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Draws the tree by its definition.
    fn draw(first: usize, ranks: usize) -> String {
        if ranks == 1 {
            return first.to_string();
        }
        let left = 1 << (ranks - 1).ilog2();
        format!("({} {})", draw(first, left), draw(first + left, ranks - left))
    }

    /// Reduces `values` in the tree's order, by its definition.
    fn tree(values: &[f32], op: fn(f32, f32) -> f32) -> f32 {
        match values {
            [value] => *value,
            _ => {
                let (left, right) = values.split_at(1 << (values.len() - 1).ilog2());
                op(tree(left, op), tree(right, op))
            }
        }
    }

    fn run<T: Number>(op: ReduceOp, data: &[Vec<T>]) -> Vec<T> {
        let elements = data[0].len();
        let mut targets = vec![vec![T::zeroed(); elements]; 2];
        let sources: Vec<*const u8> = data.iter().map(|data| data.as_ptr().cast()).collect();
        let pointers: Vec<*mut u8> = targets.iter_mut().map(|target| target.as_mut_ptr().cast()).collect();
        // SAFETY: all vectors have that many elements, and the targets are new.
        unsafe { reduce(T::TYPE, op, &sources, &pointers, elements) };
        assert_eq!(bytemuck::cast_slice::<T, u8>(&targets[0]), bytemuck::cast_slice::<T, u8>(&targets[1]));
        targets.swap_remove(0)
    }

    #[test]
    fn the_tree_halves_at_powers_of_two() {
        assert_eq!(draw(0, 2), "(0 1)");
        assert_eq!(draw(0, 3), "((0 1) 2)");
        assert_eq!(draw(0, 6), "(((0 1) (2 3)) (4 5))");
        assert_eq!(draw(0, 7), "(((0 1) (2 3)) ((4 5) 6))");
    }

    proptest! {
        #[test]
        fn sums_follow_the_tree_to_the_bit(
            ranks in 1_usize..20, elements in 0_usize..200, seed in any::<u32>()
        ) {
            let value = |rank: usize, i: usize| {
                let bits = (seed ^ (rank * 7919 + i * 104_729) as u32).wrapping_mul(2_654_435_761);
                (bits as f32 / 4e9 - 0.5) * [1.0, 1e6, 1e-6][(bits % 3) as usize]
            };
            let data: Vec<Vec<f32>> = (0..ranks).map(|rank| (0..elements).map(|i| value(rank, i)).collect()).collect();
            let column = |i: usize| data.iter().map(|data| data[i]).collect::<Vec<f32>>();
            let sum = run(ReduceOp::Sum, &data);
            let halves: Vec<Vec<bf16>> = data.iter().map(|data| data.iter().map(|x| bf16::from_f32(*x)).collect()).collect();
            let half_sum = run(ReduceOp::Sum, &halves);
            let shorts: Vec<Vec<f16>> = data.iter().map(|data| data.iter().map(|x| f16::from_f32(*x)).collect()).collect();
            let short_sum = run(ReduceOp::Sum, &shorts);
            for i in 0..elements {
                prop_assert_eq!(sum[i].to_bits(), tree(&column(i), |a, b| a + b).to_bits());
                let wide: Vec<f32> = halves.iter().map(|data| data[i].to_f32()).collect();
                prop_assert_eq!(half_sum[i].to_bits(), bf16::from_f32(tree(&wide, |a, b| a + b)).to_bits());
                let wide: Vec<f32> = shorts.iter().map(|data| data[i].to_f32()).collect();
                prop_assert_eq!(short_sum[i].to_bits(), f16::from_f32(tree(&wide, |a, b| a + b)).to_bits());
            }
        }

        #[test]
        fn integers_wrap_and_compare(data in proptest::collection::vec(proptest::collection::vec(any::<i64>(), 70), 1..9)) {
            let sum = run(ReduceOp::Sum, &data);
            let (max, min) = (run(ReduceOp::Max, &data), run(ReduceOp::Min, &data));
            let bytes: Vec<Vec<u8>> = data.iter().map(|data| data.iter().map(|x| *x as u8).collect()).collect();
            let byte_sum = run(ReduceOp::Sum, &bytes);
            for i in 0..70 {
                let column = || data.iter().map(|data| data[i]);
                prop_assert_eq!(sum[i], column().fold(0, i64::wrapping_add));
                prop_assert_eq!(max[i], column().max().unwrap());
                prop_assert_eq!(min[i], column().min().unwrap());
                prop_assert_eq!(byte_sum[i], sum[i] as u8);
            }
        }
    }

    #[test]
    fn a_nan_of_any_rank_reaches_the_result() {
        for nan_rank in 0..5 {
            let data: Vec<Vec<f32>> =
                (0..5).map(|rank| vec![if rank == nan_rank { f32::NAN } else { rank as f32 }; 3]).collect();
            for op in ReduceOp::ALL {
                assert!(run(op, &data).iter().all(|x| x.is_nan()), "{op:?} with NaN at rank {nan_rank}");
            }
        }
    }

    #[test]
    fn a_target_may_be_a_source() {
        let mut data = [vec![1.0_f32; 100], vec![2.0; 100], vec![4.0; 100]];
        let pointers: Vec<*mut u8> = data.iter_mut().map(|data| data.as_mut_ptr().cast()).collect();
        let sources: Vec<*const u8> = pointers.iter().map(|pointer| pointer.cast_const()).collect();
        // SAFETY: three vectors of that length.
        unsafe { reduce(NumberType::F32, ReduceOp::Sum, &sources, &pointers, 100) };
        assert!(data.iter().all(|data| *data == [7.0; 100]));
    }
}
