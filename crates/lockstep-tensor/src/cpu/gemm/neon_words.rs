//! Vectors of words by NEON, in which blocks of quantized weights are decoded: four registers of four lines each.
//!
//! The bits are those of plain arithmetic; of an f16, a signaling NaN becomes a quiet one, as on x86-64.

use std::arch::aarch64::*;

use lockstep_plan::block_format::Words;

use super::{
    aarch64::{transpose_four, widen_f16},
    transpose::SIDE,
    word_lanes::WordLanes,
};

/// Lines of a register.
pub(super) const LINES: usize = 4;
/// Registers of 16 lines.
pub(super) const VECTORS: usize = SIDE / LINES;

/// A word of each of 16 lines.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct NeonWords(pub(super) [uint32x4_t; VECTORS]);

impl NeonWords {
    #[inline(always)]
    fn each(self, change: impl Fn(uint32x4_t) -> uint32x4_t) -> Self {
        Self(self.0.map(change))
    }

    #[inline(always)]
    fn pairs(mut self, other: Self, combine: impl Fn(uint32x4_t, uint32x4_t) -> uint32x4_t) -> Self {
        for (words, other) in self.0.iter_mut().zip(other.0) {
            *words = combine(*words, other);
        }
        self
    }
}

// SAFETY (of all calls): NEON is the baseline of AArch64.
impl Words for NeonWords {
    type Floats = [float32x4_t; VECTORS];

    #[inline(always)]
    fn and(self, mask: u32) -> Self {
        // SAFETY: as above, here and below.
        self.each(|words| unsafe { vandq_u32(words, vdupq_n_u32(mask)) })
    }

    #[inline(always)]
    fn or(self, other: Self) -> Self {
        // SAFETY: as above.
        self.pairs(other, |words, other| unsafe { vorrq_u32(words, other) })
    }

    #[inline(always)]
    fn xor(self, mask: u32) -> Self {
        // SAFETY: as above.
        self.each(|words| unsafe { veorq_u32(words, vdupq_n_u32(mask)) })
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        // SAFETY: as above.
        self.pairs(other, |words, other| unsafe { vsubq_u32(words, other) })
    }

    // Shifts are by a vector, whose negative numbers shift towards the low bits. Of constant numbers the compiler makes immediate ones.
    #[inline(always)]
    fn shl(self, bits: usize) -> Self {
        // SAFETY: as above.
        self.each(|words| unsafe { vshlq_u32(words, vdupq_n_s32(bits as i32)) })
    }

    #[inline(always)]
    fn shr(self, bits: usize) -> Self {
        // SAFETY: as above.
        self.each(|words| unsafe { vshlq_u32(words, vdupq_n_s32(-(bits as i32))) })
    }

    #[inline(always)]
    fn shr_signed(self, bits: usize) -> Self {
        // SAFETY: as above.
        self.each(|words| unsafe {
            let shifted = vshlq_s32(vreinterpretq_s32_u32(words), vdupq_n_s32(-(bits as i32)));
            vreinterpretq_u32_s32(shifted)
        })
    }

    #[inline(always)]
    fn numbers(self) -> Self::Floats {
        // SAFETY: as above.
        self.0.map(|words| unsafe { vcvtq_f32_s32(vreinterpretq_s32_u32(words)) })
    }

    #[inline(always)]
    fn floats(self) -> Self::Floats {
        // SAFETY: as above.
        self.0.map(|words| unsafe { vreinterpretq_f32_u32(words) })
    }

    #[inline(always)]
    fn lookup(self, table: &[f32; 16]) -> Self::Floats {
        // SAFETY: 64 bytes; as above.
        let table = unsafe { vld1q_u8_x4(table.as_ptr().cast()) };
        // SAFETY: as above.
        self.0.map(|words| unsafe {
            // The four bytes of number `index` are bytes `4 · index` to `4 · index + 3` of the table.
            let first = vmulq_n_u32(vandq_u32(words, vdupq_n_u32(15)), 0x0404_0404);
            let bytes = vorrq_u32(first, vdupq_n_u32(0x0302_0100));
            vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(bytes)))
        })
    }

    #[inline(always)]
    fn lookup_bytes(self, table: &[u8; 16]) -> Self {
        // SAFETY: 16 bytes; as above.
        let table = unsafe { vld1q_u8(table.as_ptr()) };
        // SAFETY: as above.
        self.each(|words| unsafe { vreinterpretq_u32_u8(vqtbl1q_u8(table, vreinterpretq_u8_u32(words))) })
    }

    #[inline(always)]
    fn halves(self) -> Self::Floats {
        // SAFETY: as above.
        self.0.map(|words| widen_f16(unsafe { vmovn_u32(words) }))
    }

    #[inline(always)]
    fn products(mut first: Self::Floats, second: Self::Floats) -> Self::Floats {
        for (first, second) in first.iter_mut().zip(second) {
            // SAFETY: as above.
            *first = unsafe { vmulq_f32(*first, second) };
        }
        first
    }

    #[inline(always)]
    fn negatives(numbers: Self::Floats) -> Self::Floats {
        // SAFETY: as above.
        numbers.map(|numbers| unsafe { vnegq_f32(numbers) })
    }
}

impl WordLanes for NeonWords {
    #[inline(always)]
    unsafe fn load(words: &[u32; SIDE]) -> Self {
        // SAFETY: 16 words.
        Self(std::array::from_fn(|index| unsafe { vld1q_u32(words.as_ptr().add(index * LINES)) }))
    }

    #[inline(always)]
    unsafe fn load_bytes(words: &[u8; 4 * SIDE]) -> Self {
        // SAFETY: 16 words at any address; the CPU is little-endian.
        Self(std::array::from_fn(|index| unsafe {
            vld1q_u32(words.as_ptr().cast::<u32>().add(index * LINES))
        }))
    }

    #[inline(always)]
    unsafe fn load_halves(halves: &[u8; 2 * SIDE]) -> Self {
        // SAFETY: 16 halves at any address; the CPU is little-endian.
        Self(std::array::from_fn(|index| unsafe {
            vmovl_u16(vld1_u16(halves.as_ptr().cast::<u16>().add(index * LINES)))
        }))
    }

    /// Transposes four words at a time, and single words after those.
    #[inline(never)]
    unsafe fn transpose(lines: &[*const u8; SIDE], words: &mut [Self]) {
        let (fours, rest) = words.as_chunks_mut::<LINES>();
        let whole = fours.len();
        for (step, words) in fours.iter_mut().enumerate() {
            for (index, lines) in lines.as_chunks::<LINES>().0.iter().enumerate() {
                // SAFETY: the caller has the words there, at any address.
                let columns =
                    unsafe { transpose_four(lines.map(|line| vld1q_u32(line.add(step * LINES * 4).cast()))) };
                for (words, column) in words.iter_mut().zip(columns) {
                    words.0[index] = column;
                }
            }
        }
        for (index, words) in rest.iter_mut().enumerate() {
            let at = 4 * (whole * LINES + index);
            // SAFETY: as above.
            let of_lines = lines.map(|line| unsafe { line.add(at).cast::<u32>().read_unaligned() });
            // SAFETY: NEON is the baseline.
            *words = unsafe { Self::load(&of_lines) };
        }
    }

    #[inline(always)]
    unsafe fn store(self, target: &mut [u32; SIDE]) {
        for (target, words) in target.as_chunks_mut::<LINES>().0.iter_mut().zip(self.0) {
            // SAFETY: room for the words.
            unsafe { vst1q_u32(target.as_mut_ptr(), words) };
        }
    }

    #[inline(always)]
    unsafe fn store_bytes(self, target: &mut [u8; 4 * SIDE]) {
        for (target, words) in target.as_chunks_mut::<{ 4 * LINES }>().0.iter_mut().zip(self.0) {
            // SAFETY: room for the words; the CPU is little-endian.
            unsafe { vst1q_u8(target.as_mut_ptr(), vreinterpretq_u8_u32(words)) };
        }
    }

    #[inline(always)]
    unsafe fn store_floats(numbers: Self::Floats, target: &mut [f32; SIDE]) {
        for (target, numbers) in target.as_chunks_mut::<LINES>().0.iter_mut().zip(numbers) {
            // SAFETY: room for the numbers.
            unsafe { vst1q_f32(target.as_mut_ptr(), numbers) };
        }
    }
}

#[cfg(test)]
mod tests {
    use lockstep_plan::block_format::MOST_WORDS;
    use proptest::{array::uniform16, collection::vec, prelude::*};

    use super::{super::word_lanes::PlainWords, *};

    /// Returns the words of each line.
    fn words_of(words: impl WordLanes) -> [u32; SIDE] {
        let mut target = [0; SIDE];
        // SAFETY: every CPU has the instructions, here and below.
        unsafe { words.store(&mut target) };
        target
    }

    fn zeros<W: WordLanes>() -> W {
        // SAFETY: as above.
        unsafe { W::load(&[0; SIDE]) }
    }

    /// Returns the bits of the number of each line.
    fn bits_of<W: WordLanes>(numbers: W::Floats) -> [u32; SIDE] {
        let mut target = [0.0; SIDE];
        // SAFETY: as above.
        unsafe { W::store_floats(numbers, &mut target) };
        target.map(f32::to_bits)
    }

    /// Asserts that both kinds of words give the same ones.
    macro_rules! same_words {
        ($words:expr, |$of:ident| $work:expr) => {{
            // SAFETY: as above.
            let (neon, plain) = unsafe { (NeonWords::load(&$words), PlainWords::load(&$words)) };
            let (neon, plain) = (
                {
                    let $of = neon;
                    words_of($work)
                },
                {
                    let $of = plain;
                    words_of($work)
                },
            );
            prop_assert_eq!(neon, plain);
        }};
    }

    /// Asserts that both kinds of words give the same numbers.
    macro_rules! same_bits {
        ($words:expr, |$of:ident, $W:ident| $work:expr) => {{
            // SAFETY: as above.
            let (neon, plain) = unsafe { (NeonWords::load(&$words), PlainWords::load(&$words)) };
            let neon = {
                type $W = NeonWords;
                let $of = neon;
                bits_of::<$W>($work)
            };
            let plain = {
                type $W = PlainWords;
                let $of = plain;
                bits_of::<$W>($work)
            };
            prop_assert_eq!(neon, plain);
        }};
    }

    proptest! {
        #[test]
        fn words_are_those_of_plain_arithmetic(words: [u32; SIDE], mask: u32, bits in 0..32_usize, table: [u8; 16]) {
            same_words!(words, |of| of.and(mask));
            same_words!(words, |of| of.xor(mask));
            same_words!(words, |of| of.or(of.shr(bits)));
            same_words!(words, |of| of.shl(bits));
            same_words!(words, |of| of.shr_signed(bits));
            same_words!(words, |of| of.sub(of.xor(mask)));
            same_words!(words, |of| of.and(0x0f0f_0f0f).lookup_bytes(&table));
        }

        #[test]
        fn numbers_are_those_of_plain_arithmetic(words: [u32; SIDE], factors in uniform16(-2.0_f32..2.0)) {
            // Quiet NaN, of which plain arithmetic keeps the bits as well.
            let quiet = words.map(|word| if word & 0x7c00 == 0x7c00 { word | 0x200 } else { word });
            let factors = factors.map(f32::to_bits);
            same_bits!(words, |of, W| of.numbers());
            same_bits!(words, |of, W| of.floats());
            same_bits!(words, |of, W| of.bytes(2));
            same_bits!(words, |of, W| of.lookup(&factors.map(f32::from_bits)));
            same_bits!(quiet, |of, W| of.halves());
            same_bits!(words, |of, W| W::negatives(of.numbers()));
            // SAFETY: as above.
            same_bits!(words, |of, W| W::products(of.numbers(), unsafe { W::load(&factors) }.floats()));
        }

        #[test]
        fn bytes_are_loaded_and_stored_as_they_lie(words in vec(any::<u8>(), 4 * SIDE + 1)) {
            let bytes: &[u8; 4 * SIDE] = words[1..].first_chunk().unwrap();
            let mut stored = [0; 4 * SIDE];
            // SAFETY: as above.
            unsafe {
                let (neon, plain) = (NeonWords::load_bytes(bytes), PlainWords::load_bytes(bytes));
                prop_assert_eq!(words_of(neon), words_of(plain));
                neon.store_bytes(&mut stored);
                let halves = bytes.first_chunk().unwrap();
                let (neon, plain) = (NeonWords::load_halves(halves), PlainWords::load_halves(halves));
                prop_assert_eq!(words_of(neon), words_of(plain));
            }
            prop_assert_eq!(&stored, bytes);
        }

        #[test]
        fn words_of_lines_are_transposed_from_any_address(
            count in 1..=MOST_WORDS,
            ahead in 0..4_usize,
            bytes in vec(any::<u8>(), 4 * MOST_WORDS * SIDE + 4),
        ) {
            let lines = std::array::from_fn(|line| bytes[ahead + line * 4 * count..].as_ptr());
            let (mut neon, mut plain) = ([zeros::<NeonWords>(); MOST_WORDS], [zeros::<PlainWords>(); MOST_WORDS]);
            // SAFETY: each line has as many words; as above.
            unsafe {
                NeonWords::transpose(&lines, &mut neon[..count]);
                PlainWords::transpose(&lines, &mut plain[..count]);
            }
            for (neon, plain) in neon.into_iter().zip(plain) {
                prop_assert_eq!(words_of(neon), plain.0);
            }
        }
    }
}
