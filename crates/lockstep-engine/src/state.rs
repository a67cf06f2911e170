//! The tensors of a parameter's state, in memory or on disk, as checkpoints read them.

use std::cell::RefCell;

use half::bf16;
use lockstep_comm::Group;
use lockstep_plan::{DType, ParameterId, ParameterRecord, ReductionGroup, StateKind, StoreKind};

use crate::windowed_store::WindowedStore;
use crate::{EngineError, Groups, StateStore, shards::Shards};

/// The elements of a parameter's tensor that a rank owns, borrowed from an [`Engine`](crate::Engine) or a
/// [`Snapshot`](crate::Snapshot).
#[derive(Debug, Clone, Copy)]
pub struct StateTensor<'a> {
    /// Record of the parameter.
    pub record: &'a ParameterRecord,
    /// Kind of the tensor: parameter, optimizer state or gradient residual.
    pub kind: StateKind,
    /// Type of the elements: f32 or bf16.
    pub dtype: DType,
    /// Index of the first owned element among the parameter's elements on this rank.
    pub first: usize,
    /// Elements that this rank owns, from `first` on.
    pub contents: Contents<'a>,
}

/// Elements of a tensor in their stored type.
#[derive(Debug, Clone, Copy)]
pub enum Contents<'a> {
    /// Bytes of elements in memory.
    Memory(&'a [u8]),
    /// Elements on disk, which are read in parts.
    Disk(OnDisk<'a>),
}

/// Handle of a tensor's elements on disk.
#[derive(Debug, Clone, Copy)]
pub struct OnDisk<'a> {
    store: &'a RefCell<WindowedStore>,
    id: ParameterId,
    kind: StoreKind,
    first: usize,
    elements: usize,
    size: usize,
}

impl OnDisk<'_> {
    /// Reads `bytes.len()` bytes from byte `start` of the elements on.
    ///
    /// # Errors
    /// If the disk fails or does not answer in time.
    ///
    /// # Panics
    /// If the range does not begin and end at element boundaries.
    pub fn read(&self, start: usize, bytes: &mut [u8]) -> Result<(), EngineError> {
        assert!(
            start.is_multiple_of(self.size) && bytes.len().is_multiple_of(self.size),
            "part of an element"
        );
        let first = self.first + start / self.size;
        let elements = first..first + bytes.len() / self.size;
        self.store.borrow_mut().read(self.id, self.kind, elements, bytes)
    }
}

impl<'a> StateTensor<'a> {
    /// Returns the bytes of the elements.
    pub fn len_bytes(&self) -> usize {
        match self.contents {
            Contents::Memory(bytes) => bytes.len(),
            Contents::Disk(part) => part.elements * part.size,
        }
    }

    /// Returns the bytes of the elements, if they are in memory.
    pub fn in_memory(&self) -> Option<&'a [u8]> {
        match self.contents {
            Contents::Memory(bytes) => Some(bytes),
            Contents::Disk(_) => None,
        }
    }

    /// Returns the elements as f32, which represents each exactly.
    ///
    /// # Errors
    /// If the elements are on disk and the disk fails or does not answer in time.
    pub fn to_vec(&self) -> Result<Vec<f32>, EngineError> {
        let mut values = vec![0.0_f32; self.len_bytes() / self.dtype.size_bytes()];
        let mut narrow = vec![bf16::ZERO; if self.dtype == DType::BF16 { values.len() } else { 0 }];
        let bytes: &mut [u8] = match self.dtype {
            DType::BF16 => bytemuck::cast_slice_mut(&mut narrow),
            _ => bytemuck::cast_slice_mut(&mut values),
        };
        match self.contents {
            Contents::Memory(kept) => bytes.copy_from_slice(kept),
            Contents::Disk(part) => part.read(0, bytes)?,
        }
        values.iter_mut().zip(narrow).for_each(|(value, narrow)| *value = narrow.to_f32());
        Ok(values)
    }

    /// Returns the name of the first parameter among `tensors` that has a non-finite value in memory; `None` if all are
    /// finite.
    pub fn first_not_finite<'t>(tensors: &'t [StateTensor<'_>]) -> Option<&'t str> {
        let is_broken = |tensor: &&StateTensor<'_>| {
            // Not finite: all bits of the exponent are set. A maximum vectorizes, a search does not.
            let Contents::Memory(bytes) = tensor.contents else { return false };
            let greatest_exponent = match tensor.dtype {
                DType::BF16 => {
                    let words: &[u16] = bytemuck::cast_slice(bytes);
                    u32::from(words.iter().map(|word| word & 0x7f80).fold(0, u16::max)) << 16
                }
                _ => {
                    let words: &[u32] = bytemuck::cast_slice(bytes);
                    words.iter().map(|word| word & 0x7f80_0000).fold(0, u32::max)
                }
            };
            tensor.kind == StateKind::Parameter && greatest_exponent == 0x7f80_0000
        };
        tensors.iter().find(is_broken).map(|tensor| tensor.record.name.as_str())
    }
}

/// Index of this rank's gradient residual (the quantization error that error feedback keeps) and number of residuals, by reduction
/// group. Each rank that contributes to a gradient has one, over all data-parallel replicas.
#[derive(Debug, Clone, Default)]
pub(crate) struct ResidualNumbers(Vec<(ReductionGroup, [usize; 2])>);

impl ResidualNumbers {
    pub(crate) fn new(groups: &Groups, shards: &Shards) -> Self {
        let numbers = |(summing, group): &(ReductionGroup, Group)| {
            let (replica, replicas) = groups.replica_of(summing.among);
            (*summing, [replica * group.size() + group.rank(), replicas * group.size()])
        };
        Self(shards.groups.iter().map(numbers).collect())
    }

    /// Returns the kind of this rank's residual of a parameter, that of the last residual, and the one after it, which does
    /// not exist; `None` if its gradient is not reduced over a shard group.
    pub(crate) fn kinds(&self, record: &ParameterRecord) -> Option<[StateKind; 3]> {
        let summing = ReductionGroup::of(&record.share);
        let (_, [own, count]) = *self.0.iter().find(|(kind, _)| *kind == summing)?;
        Some([own, count - 1, count].map(StateKind::GradientResidual))
    }
}

/// Returns the kind of tensors in a store of weights or optimizer state.
fn tensor_kind(store: StoreKind) -> StateKind {
    if let StoreKind::Optimizer(kind) = store { kind } else { StateKind::Parameter }
}

/// Returns the tensors of all parameters in `stores`. Buffers are left out, because their owners have them among the
/// weights.
pub(crate) fn tensors_of<'a>(
    records: &'a [ParameterRecord],
    numbers: &ResidualNumbers,
    stores: impl Iterator<Item = &'a mut StateStore>,
) -> Vec<StateTensor<'a>> {
    let mut tensors = Vec::new();
    for store in stores.filter(|store| store.kind() != StoreKind::Buffers) {
        let (kind, dtype) = (store.kind(), store.dtype());
        let tensor = |(id, first, bytes): (ParameterId, usize, &'a [u8])| {
            let record = &records[id.0];
            let kind = match kind {
                StoreKind::GradientResidual => numbers.kinds(record)?[0],
                kind => tensor_kind(kind),
            };
            Some(StateTensor { record, kind, dtype, first, contents: Contents::Memory(bytes) })
        };
        tensors.extend(store.parts().into_iter().filter_map(tensor));
    }
    tensors
}

/// Returns the tensors of all parameters on disk. Those of one parameter are consecutive, because they are close to
/// each other in the file.
pub(crate) fn tensors_on_disk<'a>(
    records: &'a [ParameterRecord],
    store: &'a RefCell<WindowedStore>,
) -> Vec<StateTensor<'a>> {
    let borrowed = store.borrow();
    let is_rounded = |kind| kind == StoreKind::Weights && borrowed.keeps(StoreKind::MasterWeights);
    let mut tensors = Vec::new();
    for (id, owned) in borrowed.owned() {
        let saved = borrowed.kinds().iter().filter(|(kind, _)| !is_rounded(*kind));
        tensors.extend(saved.map(|&(kind, dtype)| {
            let (first, elements, size) = (owned.start, owned.len(), dtype.size_bytes());
            let contents = Contents::Disk(OnDisk { store, id, kind, first, elements, size });
            StateTensor { record: &records[id.0], kind: tensor_kind(kind), dtype, first, contents }
        }));
    }
    tensors
}
