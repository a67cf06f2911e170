//! Operands of a job: views that outlive the call, and the list of the memory behind them.

use std::{fmt, ops::Range, sync::Arc};

use lockstep_plan::{DType, QuantizedType};

use crate::{
    Activation, AdamW, Attention, AttentionVariant, AttentionWrite, BatchNorm, BlockGemm, BlockMatrix,
    Conv2d, DeviceMemory, Dropout, GatedActivation, Gelu, Gemm, GroupedGemm, HeadProduct, LayerNorm, Lion,
    Matrix, MemoryLocation, Muon, PagedCache, Permutation, Pool2d, RmsNorm, Rotary, Rotation, Router,
    RouterGradients, RouterOutputs, RunningStatistics, Sgd, Shape, TokenPositions, View, Write,
};

/// The memory that a job uses.
pub(super) struct Operands {
    device: *const (),
    own: Vec<Operand>,
    /// Operands that lie on other devices.
    foreign: Vec<(Arc<dyn DeviceMemory>, View<'static>)>,
    is_on_host: bool,
}

struct Operand {
    bytes: Range<usize>,
    dtype: DType,
    shape: Shape,
}

impl Operands {
    /// Creates an empty list for a job of `device`.
    pub(super) fn of(device: &dyn DeviceMemory) -> Self {
        Self {
            device: std::ptr::from_ref(device).cast(),
            own: Vec::new(),
            foreign: Vec::new(),
            is_on_host: false,
        }
    }

    /// Adds a view, and returns a view of the same memory in the form that the host's kernels take, valid until the
    /// job has run.
    pub(super) fn take(&mut self, view: View<'_>) -> View<'static> {
        // SAFETY: a device's buffer is freed once the queue has passed the free, so the memory lasts until the job
        // has run. A job with an operand on the host runs before its call returns.
        let of = |place| unsafe { View::new(view.start(), view.dtype(), view.shape(), place) };
        let late = of(MemoryLocation::Host);
        match view.place() {
            MemoryLocation::Host => self.is_on_host = true,
            MemoryLocation::Device(device) if std::ptr::addr_eq(Arc::as_ptr(device), self.device) => {
                let start = view.as_ptr() as usize;
                let bytes = start..start + view.elements() * view.dtype().size_bytes();
                self.own.push(Operand { bytes, dtype: view.dtype(), shape: view.shape() });
            }
            MemoryLocation::Device(device) => self.foreign.push((Arc::clone(device), late)),
        }
        late
    }

    /// Returns true if any operand lies in host memory, which the host may touch at any time.
    pub(super) fn are_on_host(&self) -> bool {
        self.is_on_host
    }

    /// Returns true if any operand shares a byte with one of `others` on the same device.
    pub(super) fn overlap(&self, others: &Self) -> bool {
        let overlap =
            |a: &Operand, b: &Operand| a.bytes.start.max(b.bytes.start) < a.bytes.end.min(b.bytes.end);
        self.own.iter().any(|a| others.own.iter().any(|b| overlap(a, b)))
    }

    /// Tells the other devices that a job uses their memory.
    pub(super) fn touch_foreign(&self, job: &str) {
        for (device, view) in &self.foreign {
            // SAFETY: as in `take`.
            let view = unsafe {
                View::new(view.start(), view.dtype(), view.shape(), MemoryLocation::Device(device))
            };
            device.touch(view, &format_args!("`{job}` of another queue"));
        }
    }
}

impl fmt::Display for Operands {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, Operand { dtype, shape, .. }) in self.own.iter().enumerate() {
            write!(f, "{}{dtype} {shape:?}", if index == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

/// An argument of a kernel, converted for a call that happens later.
pub(super) trait Late {
    type Late: 'static;

    fn late(self, operands: &mut Operands) -> Self::Late;
}

impl Late for View<'_> {
    type Late = View<'static>;

    fn late(self, operands: &mut Operands) -> View<'static> {
        operands.take(self)
    }
}

impl Late for BlockMatrix<'_> {
    type Late = BlockMatrix<'static>;

    fn late(self, operands: &mut Operands) -> BlockMatrix<'static> {
        self.with_bytes(operands.take(self.bytes()))
    }
}

impl Late for Matrix<'_> {
    type Late = Matrix<'static>;

    fn late(self, operands: &mut Operands) -> Matrix<'static> {
        match self {
            Self::Dense(numbers) => Matrix::Dense(numbers.late(operands)),
            Self::Blocks(blocks) => Matrix::Blocks(blocks.late(operands)),
        }
    }
}

impl<T: Late> Late for Option<T> {
    type Late = Option<T::Late>;

    fn late(self, operands: &mut Operands) -> Self::Late {
        self.map(|argument| argument.late(operands))
    }
}

/// Implements [`Late`] for arguments without views.
macro_rules! plain {
    ($($type:ty),*) => {$(
        impl Late for $type {
            type Late = Self;

            fn late(self, _: &mut Operands) -> Self {
                self
            }
        }
    )*};
}
plain!(
    Activation,
    Pool2d,
    AttentionWrite,
    Conv2d,
    GatedActivation,
    Gelu,
    QuantizedType,
    Rotation,
    TokenPositions,
    Write,
    f32,
    u32,
    usize
);

/// Implements [`Late`] for arguments with views, all of which are recorded.
macro_rules! with_views {
    ($($name:ident { $($field:ident),* })*) => {$(
        impl Late for $name<'_> {
            type Late = $name<'static>;

            fn late(self, operands: &mut Operands) -> $name<'static> {
                // SAFETY: the types differ in the lifetime of views, each of which is replaced.
                let mut late = unsafe { std::mem::transmute::<$name<'_>, $name<'static>>(self) };
                $(late.$field = self.$field.late(operands);)*
                late
            }
        }
    )*};
}
with_views! {
    AdamW { parameter, gradient, exp_avg, exp_avg_sq, rounded }
    Attention { document_starts, dropout, variant }
    BlockGemm { a, b, c, bias }
    BatchNorm { x, weight, mean, rstd }
    AttentionVariant { document_ends, key_mask, alibi_slopes, sinks }
    Dropout { keys }
    Gemm { a, b, c, bias }
    GroupedGemm { a, b, c, bias, offsets }
    HeadProduct { x, weight, y }
    LayerNorm { x, weight, mean, rstd }
    Lion { parameter, gradient, exp_avg, rounded }
    Muon { parameter, gradient, momentum_buffer, rounded }
    PagedCache { keys, values, row_starts, cached, pages }
    Permutation { slots, rows }
    RmsNorm { x, weight, rstd }
    Rotary { positions, inverse_frequencies }
    RunningStatistics { mean, variance }
    RouterOutputs { scores, log_sum_exp, experts, weights }
    Router { selection_bias }
    RouterGradients { weights, probabilities }
    Sgd { parameter, gradient, momentum_buffer, rounded }
}
