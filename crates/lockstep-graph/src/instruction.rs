//! The instructions of a program: kernel calls on values and gradients, and the steps of collectives that overlap with
//! products.

use std::ops::Range;

use lockstep_plan::work::Pass;
use lockstep_tensor::Write;

use crate::{
    block::{Value, ValueInfo},
    placement::Transfer,
    storage::Slot,
};

/// Alignment of chunks in the communication buffer, in bytes.
const ALIGNMENT: usize = 64;

/// One step of a program: one or two kernel calls, or a step of an overlapped collective.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Instruction {
    Forward(usize),
    BackwardInputs {
        operation: usize,
        dy: Option<Gradient>,
        dx: Vec<(Gradient, Write)>,
    },
    BackwardWeights {
        operation: usize,
        dy: Gradient,
    },
    Copy {
        from: Gradient,
        to: Gradient,
    },
    Add {
        from: Gradient,
        to: Gradient,
    },
    /// Starts the all-gather of all chunks of this rank's rows.
    Start {
        transit: usize,
    },
    /// Computes a range of rows of a product.
    Part {
        product: Box<Self>,
        transit: usize,
        rows: Rows,
    },
    /// Starts the reduction of a chunk.
    Send {
        transit: usize,
        chunk: usize,
    },
    /// Waits for a chunk.
    Await {
        transit: usize,
        chunk: usize,
    },
}

/// Index of a gradient buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gradient(pub(crate) usize);

/// A gradient buffer, shaped like the value it belongs to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GradientBuffer {
    pub(crate) info: ValueInfo,
    pub(crate) home: Home,
}

/// The owner of a gradient's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Home {
    Anywhere,
    /// Supplied by the caller.
    OutputGradient,
    /// Returned to the caller.
    InputGradient,
}

/// A value or a gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Object {
    Value(Value),
    Gradient(Gradient),
}

/// The rows that a part of a product computes, relative to its collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rows {
    /// This rank's rows.
    Own,
    /// The other ranks' rows of a chunk.
    Others(usize),
    /// All ranks' rows of a chunk, computed directly into the communication buffer.
    Sent(usize),
}

/// A collective that overlaps with products.
#[derive(Debug)]
pub(crate) struct OverlappedCollective {
    /// All-gather, reduce-scatter or all-reduce.
    pub(crate) transfer: Transfer,
    /// The equivalent blocking instruction.
    pub(crate) exchange: Instruction,
    /// Input of an all-gather, or output of a reduction.
    pub(crate) own: Object,
    /// Output of an all-gather, or partial sums of a reduction.
    pub(crate) all: Object,
    /// Shape and dtype of `all`.
    pub(crate) info: ValueInfo,
    /// Row ranges of the chunks: within each rank's block, or, for an all-reduce, within all rows.
    pub(crate) chunks: Vec<Range<usize>>,
    /// Blocks of rows per chunk: one per rank, or 1 for an all-reduce.
    pub(crate) blocks: usize,
    /// Byte offset of its first chunk in the communication buffer.
    pub(crate) first_byte: usize,
    /// Index of its first chunk among the handles of chunks in flight.
    pub(crate) first_pending: usize,
}

impl OverlappedCollective {
    /// Returns the rows of `all` that are block `block` of a chunk.
    pub(crate) fn rows(&self, block: usize, chunk: usize) -> Range<usize> {
        let (first, range) = (block * self.info.rows / self.blocks, &self.chunks[chunk]);
        first + range.start..first + range.end
    }

    /// Returns the number of rows of `all` per block.
    pub(crate) fn block_rows(&self) -> usize {
        self.info.rows / self.blocks
    }

    fn row_bytes(&self) -> usize {
        self.info.columns * self.info.dtype.size_bytes()
    }

    /// Returns the byte range of a chunk in the communication buffer; its blocks follow each other.
    pub(crate) fn bytes(&self, chunk: usize) -> Range<usize> {
        let before: usize = (0..chunk).map(|chunk| self.chunk_bytes(chunk).next_multiple_of(ALIGNMENT)).sum();
        let start = self.first_byte + before;
        start..start + self.chunk_bytes(chunk)
    }

    fn chunk_bytes(&self, chunk: usize) -> usize {
        self.blocks * self.chunks[chunk].len() * self.row_bytes()
    }

    pub(crate) fn total_bytes(&self) -> usize {
        (0..self.chunks.len()).map(|chunk| self.chunk_bytes(chunk).next_multiple_of(ALIGNMENT)).sum()
    }

    /// Returns the number of rows that a part of a product computes.
    pub(crate) fn part_rows(&self, rows: Rows) -> usize {
        match rows {
            Rows::Own => self.block_rows(),
            Rows::Others(chunk) => (self.blocks - 1) * self.chunks[chunk].len(),
            Rows::Sent(chunk) => self.blocks * self.chunks[chunk].len(),
        }
    }
}

/// A list of instructions, with a memory slot for every value and gradient they touch.
#[derive(Debug)]
pub(crate) struct Phase {
    pub(crate) instructions: Vec<Instruction>,
    /// Collectives that overlap with other instructions.
    pub(crate) collectives: Vec<OverlappedCollective>,
    pub(crate) values: Vec<Option<Slot>>,
    pub(crate) gradients: Vec<Option<Slot>>,
    pub(crate) workspace_bytes: usize,
    pub(crate) overlap_buffer_bytes: usize,
    pub(crate) touches_output: bool,
    /// Pass of its forward instructions: `Recompute` in a backward.
    pub(crate) pass: Pass,
    /// Shape and owner of each gradient.
    pub(crate) buffers: Vec<GradientBuffer>,
}
