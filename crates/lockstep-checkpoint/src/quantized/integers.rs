//! Integer codes in groups along the inputs: one reader for the layouts of GPTQ, AWQ and compressed-tensors.
//!
//! ```text
//! weight[o][i] = scale[o][g] · (code[o][i] - zero[o][g]),  g = group of input i
//! ```
//!
//! Codes and zero points are unsigned here. A signed code of `b` bits is stored with 2^(b-1) added, and so is its zero point.

use std::ops::Range;

use lockstep_plan::{
    BlockFormat, DType,
    block_format::{BlockCodec, Int4Codec, Int8Codec},
};

use crate::convert;

/// Order of the columns in a word of AWQ: half `i` holds column `AWQ_ORDER[i]` of its eight.
const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
/// Zero point of signed codes of 8 bits.
pub(super) const MIDDLE_OF_BYTE: u8 = 128;

/// Layout of the codes of a matrix `[outputs, inputs]`.
#[derive(Debug, Clone, Copy)]
pub(super) enum Codes<'a> {
    /// Words `[inputs · bits / 32, outputs]`, each of neighbouring inputs.
    AlongInputs { words: &'a [u8], bits: usize },
    /// Words `[inputs, outputs / 8]`, each of neighbouring outputs in AWQ's order.
    AcrossOutputs { words: &'a [u8] },
    /// Words `[outputs, ⌈inputs · bits / 32⌉]`, each of neighbouring inputs.
    Rows { words: &'a [u8], bits: usize },
    /// Signed bytes `[outputs, inputs]`.
    Bytes { bytes: &'a [u8] },
}

/// Zero points of groups.
#[derive(Debug, Clone, Copy)]
pub(super) enum Zeros<'a> {
    /// The same for all groups.
    Constant(u8),
    /// Words `[groups, ⌈outputs · bits / 32⌉]`; `shift` is added, modulo 2^bits.
    AcrossOutputs { words: &'a [u8], bits: usize, shift: u32, is_awq: bool },
    /// Words `[⌈outputs · bits / 32⌉, groups]`.
    DownOutputs { words: &'a [u8], bits: usize },
    /// Signed bytes `[outputs, groups]`.
    Bytes { bytes: &'a [u8] },
}

/// Scales of groups.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scales<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) dtype: DType,
    pub(super) order: ScaleOrder,
    /// Number by which a product of code and scale is multiplied.
    pub(super) factor: Option<f32>,
}

/// Order of the scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ScaleOrder {
    /// `[outputs, groups]`.
    ByOutput,
    /// `[groups, outputs]`.
    ByGroup,
    /// One for the whole matrix.
    One,
}

/// Groups of the inputs.
#[derive(Debug, Clone, Copy)]
pub(super) enum Groups<'a> {
    /// Neighbouring inputs; the last group may be shorter.
    Contiguous(usize),
    /// The group of each input, as i32.
    Listed(&'a [u8]),
}

/// A matrix of integer codes.
#[derive(Debug, Clone, Copy)]
pub(super) struct IntegerMatrix<'a> {
    pub(super) codes: Codes<'a>,
    pub(super) zeros: Zeros<'a>,
    pub(super) scales: Scales<'a>,
    pub(super) groups: Groups<'a>,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    pub(super) group_count: usize,
}

/// Rows of a matrix, unpacked.
#[derive(Debug, Default)]
struct Rows {
    /// `[rows, inputs]`.
    codes: Vec<u8>,
    /// `[rows, groups]`.
    scales: Vec<f32>,
    /// `[rows, groups]`.
    zeros: Vec<u8>,
}

#[inline(always)]
fn word(words: &[u8], index: usize) -> u32 {
    let bytes = &words[4 * index..4 * index + 4];
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// Returns field `index` of `bits` bits of a word.
#[inline(always)]
fn field(word: u32, bits: usize, index: usize) -> u8 {
    (word >> (bits * index) & ((1 << bits) - 1)) as u8
}

/// Returns the number of the half of a word in which AWQ stores column `column` of eight.
fn awq_half(column: usize) -> usize {
    AWQ_ORDER.iter().position(|&of| of == column).unwrap_or_default()
}

/// Returns true if a list of groups differs from contiguous groups of `group` inputs each.
pub(super) fn are_groups_permuted(bytes: &[u8], group: usize) -> bool {
    (0..bytes.len() / 4).any(|input| word(bytes, input) as usize != input / group)
}

/// Returns true if every group in the list is below `count`.
pub(super) fn are_groups_valid(bytes: &[u8], count: usize) -> bool {
    (0..bytes.len() / 4).all(|input| (word(bytes, input) as usize) < count)
}

impl<'a> IntegerMatrix<'a> {
    /// Returns the format of blocks that represents the matrix exactly, or the reason why there is none.
    pub(super) fn format(&self) -> Result<BlockFormat, &'static str> {
        let Groups::Contiguous(group) = self.groups else {
            return Err("its groups are not contiguous (act-order)");
        };
        let divides = |block: usize| {
            self.inputs.is_multiple_of(block) && (group.is_multiple_of(block) || self.group_count == 1)
        };
        let is_4_bits = self.is_4_bits();
        let formats: &[_] = if is_4_bits {
            &[BlockFormat::Int4G128, BlockFormat::Int4G64, BlockFormat::Int4G32]
        } else {
            &[BlockFormat::Int8G128, BlockFormat::Int8G32]
        };
        if !is_4_bits && !self.are_zeros_in_the_middle() {
            return Err("its codes of 8 bits have zero points");
        }
        let found = formats.iter().find(|format| divides(format.block_elements()));
        found.copied().ok_or("its groups are no multiple of 32 inputs")
    }

    fn is_4_bits(&self) -> bool {
        match self.codes {
            Codes::AlongInputs { bits, .. } | Codes::Rows { bits, .. } => bits == 4,
            Codes::AcrossOutputs { .. } => true,
            Codes::Bytes { .. } => false,
        }
    }

    fn are_zeros_in_the_middle(&self) -> bool {
        match self.zeros {
            Zeros::Constant(zero) => zero == MIDDLE_OF_BYTE,
            Zeros::Bytes { bytes } => bytes.iter().all(|&byte| byte == 0),
            _ => {
                let mut zeros = vec![0; self.group_count];
                (0..self.outputs).all(|output| {
                    self.read_zeros(output, &mut zeros);
                    zeros.iter().all(|&zero| zero == MIDDLE_OF_BYTE)
                })
            }
        }
    }

    /// Decodes some rows to `values`, in f32.
    pub(super) fn decode(&self, outputs: Range<usize>, values: &mut [f32]) {
        let rows = self.rows(outputs);
        let group_of: Vec<usize> = (0..self.inputs).map(|input| self.group(input)).collect();
        for (row, values) in values.chunks_exact_mut(self.inputs.max(1)).enumerate() {
            let of_groups = row * self.group_count..(row + 1) * self.group_count;
            let (scales, zeros) = (&rows.scales[of_groups.clone()], &rows.zeros[of_groups]);
            let codes = &rows.codes[row * self.inputs..][..self.inputs];
            for ((value, &code), &group) in values.iter_mut().zip(codes).zip(&group_of) {
                *value = scales[group] * (f32::from(code) - f32::from(zeros[group]));
            }
            if let Some(factor) = self.scales.factor {
                values.iter_mut().for_each(|value| *value *= factor);
            }
        }
    }

    /// Writes some rows as blocks of [`IntegerMatrix::format`].
    pub(super) fn pack(&self, format: BlockFormat, outputs: Range<usize>, blocks: &mut [u8]) {
        match format {
            BlockFormat::Int4G32 => self.pack_4_bits::<32>(outputs, blocks),
            BlockFormat::Int4G64 => self.pack_4_bits::<64>(outputs, blocks),
            BlockFormat::Int4G128 => self.pack_4_bits::<128>(outputs, blocks),
            BlockFormat::Int8G32 => self.pack_8_bits::<32>(outputs, blocks),
            BlockFormat::Int8G128 => self.pack_8_bits::<128>(outputs, blocks),
            _ => unreachable!("`format` returns no other one"),
        }
    }

    fn pack_4_bits<const N: usize>(&self, outputs: Range<usize>, blocks: &mut [u8]) {
        let rows = self.rows(outputs);
        let per_row = self.inputs / N;
        let codes = rows.codes.chunks_exact(N);
        for (index, (codes, block)) in codes.zip(blocks.chunks_exact_mut(Int4Codec::<N>::BYTES)).enumerate() {
            let group = index / per_row * self.group_count + self.group(index % per_row * N);
            Int4Codec::<N>::pack(rows.scales[group], rows.zeros[group], codes, block);
        }
    }

    fn pack_8_bits<const N: usize>(&self, outputs: Range<usize>, blocks: &mut [u8]) {
        let rows = self.rows(outputs);
        let per_row = self.inputs / N;
        let (mut signed, factor) = ([0; N], self.scales.factor.unwrap_or(1.0));
        let codes = rows.codes.chunks_exact(N);
        for (index, (codes, block)) in codes.zip(blocks.chunks_exact_mut(Int8Codec::<N>::BYTES)).enumerate() {
            let group = index / per_row * self.group_count + self.group(index % per_row * N);
            for (signed, code) in signed.iter_mut().zip(codes) {
                *signed = (code ^ MIDDLE_OF_BYTE).cast_signed();
            }
            Int8Codec::<N>::pack(rows.scales[group] * factor, &signed, block);
        }
    }

    /// Returns the group of an input.
    fn group(&self, input: usize) -> usize {
        match self.groups {
            Groups::Contiguous(group) => input / group,
            Groups::Listed(bytes) => word(bytes, input) as usize,
        }
    }

    fn rows(&self, outputs: Range<usize>) -> Rows {
        let (count, groups) = (outputs.len(), self.group_count);
        let mut rows = Rows {
            codes: vec![0; count * self.inputs],
            scales: vec![0.0; count * groups],
            zeros: vec![0; count * groups],
        };
        self.read_codes(outputs.clone(), &mut rows.codes);
        for (row, output) in outputs.enumerate() {
            self.read_zeros(output, &mut rows.zeros[row * groups..][..groups]);
            self.read_scales(output, &mut rows.scales[row * groups..][..groups]);
        }
        rows
    }

    fn read_codes(&self, outputs: Range<usize>, codes: &mut [u8]) {
        let inputs = self.inputs;
        match self.codes {
            Codes::AlongInputs { words, bits } => {
                // In the order of memory: words of neighbouring outputs lie side by side.
                let per_word = 32 / bits;
                for line in 0..inputs.div_ceil(per_word) {
                    for (row, output) in outputs.clone().enumerate() {
                        let word = word(words, line * self.outputs + output);
                        let codes = codes[row * inputs..][..inputs].chunks_mut(per_word).nth(line);
                        for (index, code) in codes.into_iter().flatten().enumerate() {
                            *code = field(word, bits, index);
                        }
                    }
                }
            }
            Codes::AcrossOutputs { words } => {
                let line_words = self.outputs / 8;
                for input in 0..inputs {
                    for (row, output) in outputs.clone().enumerate() {
                        let word = word(words, input * line_words + output / 8);
                        codes[row * inputs + input] = field(word, 4, awq_half(output % 8));
                    }
                }
            }
            Codes::Rows { words, bits } => {
                let per_word = 32 / bits;
                let row_words = inputs.div_ceil(per_word);
                for (output, codes) in outputs.zip(codes.chunks_exact_mut(inputs)) {
                    for (index, codes) in codes.chunks_mut(per_word).enumerate() {
                        let word = word(words, output * row_words + index);
                        for (index, code) in codes.iter_mut().enumerate() {
                            *code = field(word, bits, index);
                        }
                    }
                }
            }
            Codes::Bytes { bytes } => {
                let stored = &bytes[outputs.start * inputs..outputs.end * inputs];
                for (code, byte) in codes.iter_mut().zip(stored) {
                    *code = byte ^ MIDDLE_OF_BYTE;
                }
            }
        }
    }

    /// Fills `zeros` with the zero points of an output's groups.
    fn read_zeros(&self, output: usize, zeros: &mut [u8]) {
        for (group, zero) in zeros.iter_mut().enumerate() {
            *zero = match self.zeros {
                Zeros::Constant(zero) => zero,
                Zeros::AcrossOutputs { words, bits, shift, is_awq } => {
                    let per_word = 32 / bits;
                    let place = if is_awq { awq_half(output % 8) } else { output % per_word };
                    let word = word(words, group * self.outputs.div_ceil(per_word) + output / per_word);
                    let stored = u32::from(field(word, bits, place));
                    ((stored + shift) & ((1 << bits) - 1)) as u8
                }
                Zeros::DownOutputs { words, bits } => {
                    let per_word = 32 / bits;
                    let word = word(words, output / per_word * self.group_count + group);
                    field(word, bits, output % per_word)
                }
                Zeros::Bytes { bytes } => match self.is_4_bits() {
                    true => bytes[output * self.group_count + group].wrapping_add(8),
                    false => bytes[output * self.group_count + group] ^ MIDDLE_OF_BYTE,
                },
            };
        }
    }

    /// Fills `scales` with the scales of an output's groups.
    fn read_scales(&self, output: usize, scales: &mut [f32]) {
        let Scales { bytes, dtype, order, .. } = self.scales;
        let size = dtype.size_bytes();
        for (group, scale) in scales.iter_mut().enumerate() {
            let index = match order {
                ScaleOrder::ByOutput => output * self.group_count + group,
                ScaleOrder::ByGroup => group * self.outputs + output,
                ScaleOrder::One => 0,
            };
            *scale = convert::scalar(dtype, &bytes[index * size..(index + 1) * size]);
        }
    }
}
