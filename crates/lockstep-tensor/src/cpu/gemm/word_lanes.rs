//! Vectors of a word of each of 16 lines, in which blocks of quantized weights are decoded.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use lockstep_plan::block_format::{Words, widen};

use super::transpose::SIDE;
#[cfg(target_arch = "x86_64")]
use super::transpose::{transpose_quarters, transpose_vectors};

/// A vector of words whose methods may be called only if the CPU has its instructions; so may be those of [`Words`], of words that
/// come from here.
pub(super) trait WordLanes: Words {
    /// Loads words.
    unsafe fn load(words: &[u32; SIDE]) -> Self;
    /// Loads words as they lie in memory, little-endian.
    unsafe fn load_bytes(words: &[u8; 4 * SIDE]) -> Self;
    /// Loads the low halves of words; the high halves are zero.
    unsafe fn load_halves(halves: &[u8; 2 * SIDE]) -> Self;
    /// Transposes words of lines: word `w` of line `l` goes to lane `l` of `words[w]`. Each line must have them from its address on. A
    /// call, which all formats share.
    unsafe fn transpose(lines: &[*const u8; SIDE], words: &mut [Self]);
    /// Writes the words.
    unsafe fn store(self, target: &mut [u32; SIDE]);
    /// Writes the words as bytes, little-endian.
    unsafe fn store_bytes(self, target: &mut [u8; 4 * SIDE]);
    /// Writes numbers.
    unsafe fn store_floats(numbers: Self::Floats, target: &mut [f32; SIDE]);
}

/// Plain arithmetic.
#[derive(Clone, Copy)]
pub(super) struct PlainWords(pub(super) [u32; SIDE]);

impl PlainWords {
    #[inline(always)]
    fn each(mut self, change: impl Fn(u32) -> u32) -> Self {
        for word in &mut self.0 {
            *word = change(*word);
        }
        self
    }

    #[inline(always)]
    fn map(self, number: impl Fn(u32) -> f32) -> [f32; SIDE] {
        let mut floats = [0.0; SIDE];
        for (float, word) in floats.iter_mut().zip(self.0) {
            *float = number(word);
        }
        floats
    }
}

impl Words for PlainWords {
    type Floats = [f32; SIDE];

    #[inline(always)]
    fn and(self, mask: u32) -> Self {
        self.each(|word| word & mask)
    }

    #[inline(always)]
    fn or(mut self, other: Self) -> Self {
        for (word, other) in self.0.iter_mut().zip(other.0) {
            *word |= other;
        }
        self
    }

    #[inline(always)]
    fn xor(self, mask: u32) -> Self {
        self.each(|word| word ^ mask)
    }

    #[inline(always)]
    fn sub(mut self, other: Self) -> Self {
        for (word, other) in self.0.iter_mut().zip(other.0) {
            *word = word.wrapping_sub(other);
        }
        self
    }

    #[inline(always)]
    fn shl(self, bits: usize) -> Self {
        self.each(|word| word << bits)
    }

    #[inline(always)]
    fn shr(self, bits: usize) -> Self {
        self.each(|word| word >> bits)
    }

    #[inline(always)]
    fn shr_signed(self, bits: usize) -> Self {
        self.each(|word| (word.cast_signed() >> bits).cast_unsigned())
    }

    #[inline(always)]
    fn numbers(self) -> [f32; SIDE] {
        self.map(|word| word.cast_signed() as f32)
    }

    #[inline(always)]
    fn floats(self) -> [f32; SIDE] {
        self.map(f32::from_bits)
    }

    #[inline(always)]
    fn lookup(self, table: &[f32; 16]) -> [f32; SIDE] {
        self.map(|word| table[(word & 15) as usize])
    }

    #[inline(always)]
    fn lookup_bytes(self, table: &[u8; 16]) -> Self {
        self.each(|word| word.lookup_bytes(table))
    }

    #[inline(always)]
    fn halves(self) -> [f32; SIDE] {
        self.map(|word| widen(word as u16))
    }

    #[inline(always)]
    fn products(mut first: [f32; SIDE], second: [f32; SIDE]) -> [f32; SIDE] {
        for (product, factor) in first.iter_mut().zip(second) {
            *product *= factor;
        }
        first
    }

    #[inline(always)]
    fn negatives(mut numbers: [f32; SIDE]) -> [f32; SIDE] {
        for number in &mut numbers {
            *number = -*number;
        }
        numbers
    }
}

impl WordLanes for PlainWords {
    #[inline(always)]
    unsafe fn load(words: &[u32; SIDE]) -> Self {
        Self(*words)
    }

    #[inline(always)]
    unsafe fn load_bytes(words: &[u8; 4 * SIDE]) -> Self {
        let mut loaded = [0; SIDE];
        for (word, bytes) in loaded.iter_mut().zip(words.as_chunks().0) {
            *word = u32::from_le_bytes(*bytes);
        }
        Self(loaded)
    }

    #[inline(always)]
    unsafe fn load_halves(halves: &[u8; 2 * SIDE]) -> Self {
        let mut loaded = [0; SIDE];
        for (word, bytes) in loaded.iter_mut().zip(halves.as_chunks().0) {
            *word = u32::from(u16::from_le_bytes(*bytes));
        }
        Self(loaded)
    }

    #[inline(never)]
    unsafe fn transpose(lines: &[*const u8; SIDE], words: &mut [Self]) {
        for (index, words) in words.iter_mut().enumerate() {
            for (word, line) in words.0.iter_mut().zip(lines) {
                // SAFETY: the caller's promise.
                *word = u32::from_le(unsafe { line.add(4 * index).cast::<u32>().read_unaligned() });
            }
        }
    }

    #[inline(always)]
    unsafe fn store(self, target: &mut [u32; SIDE]) {
        *target = self.0;
    }

    #[inline(always)]
    unsafe fn store_bytes(self, target: &mut [u8; 4 * SIDE]) {
        for (bytes, word) in target.as_chunks_mut().0.iter_mut().zip(self.0) {
            *bytes = word.to_le_bytes();
        }
    }

    #[inline(always)]
    unsafe fn store_floats(numbers: [f32; SIDE], target: &mut [f32; SIDE]) {
        *target = numbers;
    }
}

/// Implements [`Words`] by intrinsics on one vector or two halves.
#[cfg(target_arch = "x86_64")]
macro_rules! words {
    ($(#[$doc:meta])* $name:ident([$vector:ty; $count:literal]), $floats:ty, $set:ident, $and:ident, $or:ident, $xor:ident,
     $sub:ident, $floats_of:ident, $shl:ident, $shr:ident, $shr_signed:ident, $numbers:ident, $products:ident,
     |$halves:ident| $widen:expr, |$number:ident| $negative:expr,
     |$index:ident, $table:ident| $look_up:expr, |$bytes:ident, $byte_table:ident| $look_up_bytes:expr, $load:ident, $store:ident, $store_floats:ident,
     $zero:ident, |$half_address:ident| $load_halves:expr, $transpose:path) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        #[repr(transparent)]
        pub(super) struct $name(pub(super) [$vector; $count]);

        // SAFETY (of all calls): words come from an unsafe function whose caller promises the instructions.
        impl Words for $name {
            type Floats = [$floats; $count];

            #[inline(always)]
            fn and(mut self, mask: u32) -> Self {
                for words in &mut self.0 {
                    // SAFETY: as above, here and below.
                    *words = unsafe { $and(*words, $set(mask.cast_signed())) };
                }
                self
            }

            #[inline(always)]
            fn or(mut self, other: Self) -> Self {
                for (words, other) in self.0.iter_mut().zip(other.0) {
                    // SAFETY: as above.
                    *words = unsafe { $or(*words, other) };
                }
                self
            }

            #[inline(always)]
            fn xor(mut self, mask: u32) -> Self {
                for words in &mut self.0 {
                    // SAFETY: as above.
                    *words = unsafe { $xor(*words, $set(mask.cast_signed())) };
                }
                self
            }

            #[inline(always)]
            fn sub(mut self, other: Self) -> Self {
                for (words, other) in self.0.iter_mut().zip(other.0) {
                    // SAFETY: as above.
                    *words = unsafe { $sub(*words, other) };
                }
                self
            }

            #[inline(always)]
            fn shl(mut self, bits: usize) -> Self {
                for words in &mut self.0 {
                    // SAFETY: as above.
                    *words = unsafe { $shl(*words, _mm_cvtsi32_si128(bits as i32)) };
                }
                self
            }

            #[inline(always)]
            fn shr(mut self, bits: usize) -> Self {
                for words in &mut self.0 {
                    // SAFETY: as above.
                    *words = unsafe { $shr(*words, _mm_cvtsi32_si128(bits as i32)) };
                }
                self
            }

            #[inline(always)]
            fn shr_signed(mut self, bits: usize) -> Self {
                for words in &mut self.0 {
                    // SAFETY: as above.
                    *words = unsafe { $shr_signed(*words, _mm_cvtsi32_si128(bits as i32)) };
                }
                self
            }

            #[inline(always)]
            fn numbers(self) -> Self::Floats {
                // SAFETY: as above.
                self.0.map(#[inline(always)] |words| unsafe { $numbers(words) })
            }

            #[inline(always)]
            fn floats(self) -> Self::Floats {
                // SAFETY: as above.
                self.0.map(#[inline(always)] |words| unsafe { $floats_of(words) })
            }

            #[inline(always)]
            fn lookup(self, $table: &[f32; 16]) -> Self::Floats {
                // SAFETY: as above.
                self.0.map(#[inline(always)] |$index| unsafe { $look_up })
            }

            #[inline(always)]
            fn lookup_bytes(mut self, table: &[u8; 16]) -> Self {
                // SAFETY: 16 bytes; as above.
                let $byte_table = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
                for words in &mut self.0 {
                    let $bytes = *words;
                    // SAFETY: as above.
                    *words = unsafe { $look_up_bytes };
                }
                self
            }

            #[inline(always)]
            fn halves(self) -> Self::Floats {
                // SAFETY: as above.
                self.0.map(#[inline(always)] |$halves| unsafe { $widen })
            }

            #[inline(always)]
            fn products(mut first: Self::Floats, second: Self::Floats) -> Self::Floats {
                for (first, second) in first.iter_mut().zip(second) {
                    // SAFETY: as above.
                    *first = unsafe { $products(*first, second) };
                }
                first
            }

            #[inline(always)]
            fn negatives(mut numbers: Self::Floats) -> Self::Floats {
                for number in &mut numbers {
                    let $number = *number;
                    // SAFETY: as above.
                    *number = unsafe { $negative };
                }
                numbers
            }
        }

        impl WordLanes for $name {
            #[inline(always)]
            unsafe fn load(words: &[u32; SIDE]) -> Self {
                // SAFETY: 16 words.
                unsafe {
                    let mut loaded = Self([$zero(); $count]);
                    for (index, vector) in loaded.0.iter_mut().enumerate() {
                        *vector = $load(words.as_ptr().add(index * SIDE / $count).cast());
                    }
                    loaded
                }
            }

            #[inline(always)]
            unsafe fn load_bytes(words: &[u8; 4 * SIDE]) -> Self {
                // SAFETY: 16 words; the CPU is little-endian.
                unsafe {
                    let mut loaded = Self([$zero(); $count]);
                    for (index, vector) in loaded.0.iter_mut().enumerate() {
                        *vector = $load(words.as_ptr().add(index * 4 * SIDE / $count).cast());
                    }
                    loaded
                }
            }

            #[inline(always)]
            unsafe fn load_halves(halves: &[u8; 2 * SIDE]) -> Self {
                // SAFETY: 16 halves.
                unsafe {
                    let mut loaded = Self([$zero(); $count]);
                    for (index, vector) in loaded.0.iter_mut().enumerate() {
                        let $half_address = halves.as_ptr().add(index * 2 * SIDE / $count);
                        *vector = $load_halves;
                    }
                    loaded
                }
            }

            #[inline(always)]
            unsafe fn transpose(lines: &[*const u8; SIDE], words: &mut [Self]) {
                // SAFETY: the caller's promise.
                unsafe { $transpose(lines, words) }
            }

            #[inline(always)]
            unsafe fn store(self, target: &mut [u32; SIDE]) {
                // SAFETY: room for 16 words.
                unsafe {
                    for (index, vector) in self.0.into_iter().enumerate() {
                        $store(target.as_mut_ptr().add(index * SIDE / $count).cast(), vector);
                    }
                }
            }

            #[inline(always)]
            unsafe fn store_bytes(self, target: &mut [u8; 4 * SIDE]) {
                // SAFETY: room for 16 words; the CPU is little-endian.
                unsafe {
                    for (index, vector) in self.0.into_iter().enumerate() {
                        $store(target.as_mut_ptr().add(index * 4 * SIDE / $count).cast(), vector);
                    }
                }
            }

            #[inline(always)]
            unsafe fn store_floats(numbers: Self::Floats, target: &mut [f32; SIDE]) {
                // SAFETY: room for 16 numbers.
                unsafe {
                    for (index, vector) in numbers.into_iter().enumerate() {
                        $store_floats(target.as_mut_ptr().add(index * SIDE / $count), vector);
                    }
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
words!(
    /// AVX2.
    Words256([__m256i; 2]), __m256, _mm256_set1_epi32, _mm256_and_si256, _mm256_or_si256, _mm256_xor_si256,
    _mm256_sub_epi32, _mm256_castsi256_ps, _mm256_sll_epi32, _mm256_srl_epi32, _mm256_sra_epi32, _mm256_cvtepi32_ps, _mm256_mul_ps,
    |words| {
        let low = _mm256_and_si256(words, _mm256_set1_epi32(0xffff));
        let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(low, low));
        _mm256_cvtph_ps(_mm256_castsi256_si128(packed))
    },
    |number| _mm256_xor_ps(number, _mm256_set1_ps(-0.0)),
    |index, table| {
        // The lanes of the low half of the table and of the high half; bit 3, moved to the sign, selects one.
        let half = |first: usize| _mm256_permutevar8x32_ps(_mm256_loadu_ps(table[first..].as_ptr()), index);
        _mm256_blendv_ps(half(0), half(8), _mm256_castsi256_ps(_mm256_slli_epi32::<28>(index)))
    },
    |bytes, table| _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), bytes),
    _mm256_loadu_si256, _mm256_storeu_si256, _mm256_storeu_ps, _mm256_setzero_si256,
    |address| _mm256_cvtepu16_epi32(_mm_loadu_si128(address.cast())), transpose_words
);

#[cfg(target_arch = "x86_64")]
words!(
    /// AVX-512.
    Words512([__m512i; 1]), __m512, _mm512_set1_epi32, _mm512_and_si512, _mm512_or_si512, _mm512_xor_si512,
    _mm512_sub_epi32, _mm512_castsi512_ps, _mm512_sll_epi32, _mm512_srl_epi32, _mm512_sra_epi32, _mm512_cvtepi32_ps, _mm512_mul_ps,
    |words| _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)),
    |number| _mm512_xor_ps(number, _mm512_set1_ps(-0.0)),
    |index, table| _mm512_permutexvar_ps(index, _mm512_loadu_ps(table.as_ptr())),
    |bytes, table| _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), bytes),
    _mm512_loadu_si512, _mm512_storeu_si512, _mm512_storeu_ps, _mm512_setzero_si512,
    |address| _mm512_cvtepu16_epi32(_mm256_loadu_si256(address.cast())), transpose_words_avx512
);

/// Transposes words by scalar loads.
///
/// # Safety
/// As [`WordLanes::transpose`].
#[cfg(target_arch = "x86_64")]
#[inline(never)]
#[target_feature(enable = "avx2")]
unsafe fn transpose_words(lines: &[*const u8; SIDE], words: &mut [Words256]) {
    for (index, words) in words.iter_mut().enumerate() {
        let mut of_lines = [0; SIDE];
        for (word, line) in of_lines.iter_mut().zip(lines) {
            // SAFETY: the caller's promise.
            *word = unsafe { line.add(4 * index).cast::<u32>().read_unaligned() };
        }
        // SAFETY: as above.
        *words = unsafe { Words256::load(&of_lines) };
    }
}

/// Transposes words of lines by AVX-512, 16, 8 or 4 words or one at a time: word `w` of line `l` goes to lane `l` of `words[w]`.
///
/// # Safety
/// The CPU must have AVX-512, and each line the words from its address on.
#[cfg(target_arch = "x86_64")]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")]
unsafe fn transpose_words_avx512(lines: &[*const u8; SIDE], words: &mut [Words512]) {
    let mut done = 0;
    while done < words.len() {
        let words = &mut words[done..];
        let mut addresses = *lines;
        for address in &mut addresses {
            *address = address.wrapping_add(4 * done);
        }
        // SAFETY: the caller's promises.
        done += unsafe {
            match words.len() {
                SIDE.. => transpose_sixteen(&addresses, words),
                8.. => transpose_eight(&addresses, words),
                4.. => transpose_four(&addresses, words),
                _ => {
                    let mut of_lines = [0; SIDE];
                    for (word, line) in of_lines.iter_mut().zip(addresses) {
                        *word = line.cast::<u32>().read_unaligned();
                    }
                    words[0] = Words512::load(&of_lines);
                    1
                }
            }
        };
    }
}

/// Transposes 16 words. Returns their number.
///
/// # Safety
/// As [`transpose_words_avx512`].
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn transpose_sixteen(lines: &[*const u8; SIDE], words: &mut [Words512]) -> usize {
    // SAFETY: the caller's promises.
    unsafe {
        let mut rows = [_mm512_setzero_si512(); SIDE];
        for (line, row) in lines.iter().zip(&mut rows) {
            *row = _mm512_loadu_si512(line.cast());
        }
        transpose_vectors(&mut rows);
        for (row, words) in rows.iter().zip(words) {
            words.0 = [*row];
        }
    }
    SIDE
}

/// Transposes eight words. Returns their number.
///
/// # Safety
/// As [`transpose_words_avx512`].
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn transpose_eight(lines: &[*const u8; SIDE], words: &mut [Words512]) -> usize {
    // SAFETY: the caller's promises.
    unsafe {
        // Lines 0 to 3 and 8 to 11, each with the line four later.
        let mut rows = [_mm512_setzero_si512(); 8];
        for (index, row) in rows.iter_mut().enumerate() {
            let line = index + index / 4 * 4;
            let [low, high] =
                [_mm256_loadu_si256(lines[line].cast()), _mm256_loadu_si256(lines[line + 4].cast())];
            *row = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
        }
        // Quarters: words j and j + 4 of four lines, then of the next four lines.
        let first = transpose_quarters([rows[0], rows[1], rows[2], rows[3]]);
        let second = transpose_quarters([rows[4], rows[5], rows[6], rows[7]]);
        for (index, (first, second)) in first.into_iter().zip(second).enumerate() {
            words[index].0 = [_mm512_shuffle_i32x4::<0x88>(first, second)];
            words[4 + index].0 = [_mm512_shuffle_i32x4::<0xdd>(first, second)];
        }
    }
    8
}

/// Transposes four words. Returns their number.
///
/// # Safety
/// As [`transpose_words_avx512`].
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn transpose_four(lines: &[*const u8; SIDE], words: &mut [Words512]) -> usize {
    // SAFETY: the caller's promises.
    unsafe {
        let mut rows = [_mm512_setzero_si512(); 4];
        for (line, row) in rows.iter_mut().enumerate() {
            *row = _mm512_castsi128_si512(_mm_loadu_si128(lines[line].cast()));
            *row = _mm512_inserti32x4::<1>(*row, _mm_loadu_si128(lines[line + 4].cast()));
            *row = _mm512_inserti32x4::<2>(*row, _mm_loadu_si128(lines[line + 8].cast()));
            *row = _mm512_inserti32x4::<3>(*row, _mm_loadu_si128(lines[line + 12].cast()));
        }
        for (row, words) in transpose_quarters(rows).into_iter().zip(words) {
            words.0 = [row];
        }
    }
    4
}
