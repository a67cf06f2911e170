//! The tensors that belong to one parameter, wherever they are.

use std::cell::RefCell;

use half::bf16;
use lockstep_comm::Group;
use lockstep_plan::{DType, ParameterId, ParameterRecord, StateKind, StoreKind, Summing};

use crate::windowed_store::WindowedStore;
use crate::{EngineError, Groups, StateStore, shards::Shards};

/// What a rank owns of a tensor of a parameter, lent by an [`Engine`](crate::Engine) or a [`Snapshot`](crate::Snapshot).
#[derive(Debug, Clone, Copy)]
pub struct StateTensor<'a> {
    /// The parameter.
    pub record: &'a ParameterRecord,
    /// Which of its tensors.
    pub kind: StateKind,
    /// Type of its elements: f32 or bf16.
    pub dtype: DType,
    /// The index of the first element here, in what this rank's model holds of the parameter.
    pub first: usize,
    /// The elements from there on that this rank owns.
    pub contents: Contents<'a>,
}

/// Elements of a tensor, as they are kept.
#[derive(Debug, Clone, Copy)]
pub enum Contents<'a> {
    /// Their bytes.
    Memory(&'a [u8]),
    /// They are read in parts.
    Disk(OnDisk<'a>),
}

/// Elements on disk.
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
    /// Reads the bytes from `start` on, all of which are there.
    ///
    /// # Errors
    /// [`EngineError::Disk`].
    ///
    /// # Panics
    /// If they do not begin and end with elements.
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
    /// How many bytes its elements have.
    pub fn len_bytes(&self) -> usize {
        match self.contents {
            Contents::Memory(bytes) => bytes.len(),
            Contents::Disk(part) => part.elements * part.size,
        }
    }

    /// Its elements, if they are in memory.
    pub fn in_memory(&self) -> Option<&'a [u8]> {
        match self.contents {
            Contents::Memory(bytes) => Some(bytes),
            Contents::Disk(_) => None,
        }
    }

    /// The elements as f32, which holds each of them exactly.
    ///
    /// # Errors
    /// [`EngineError::Disk`], if they are there.
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

    /// The first of `tensors`, if any, that is a parameter with a value in memory that is not finite.
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

/// The numbers of a rank's residuals, by the way in which gradients are summed: among all that have summands, over all replicas.
#[derive(Debug, Clone, Default)]
pub(crate) struct ResidualNumbers(Vec<(Summing, ResidualNumber)>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ResidualNumber {
    own: usize,
    of: usize,
}

impl ResidualNumbers {
    pub(crate) fn new(groups: &Groups, shards: &Shards) -> Self {
        let number = |(summing, group): &(Summing, Group)| {
            let own = groups.replica_of(summing.among) * group.size() + group.rank();
            (*summing, ResidualNumber { own, of: groups.replicas_of(summing.among) * group.size() })
        };
        Self(shards.groups().iter().map(number).collect())
    }

    fn of(&self, record: &ParameterRecord) -> Option<ResidualNumber> {
        let summing = Summing::of(&record.share);
        self.0.iter().find(|(kind, _)| *kind == summing).map(|(_, number)| *number)
    }

    /// Which residual of a parameter is this rank's.
    pub(crate) fn own(&self, record: &ParameterRecord) -> Option<StateKind> {
        self.of(record).map(|number| StateKind::GradientResidual(number.own))
    }

    /// The last residual that a parameter has, and the one after it, which it has not.
    pub(crate) fn last_and_next(&self, record: &ParameterRecord) -> Option<[StateKind; 2]> {
        let of = self.of(record)?.of;
        Some([of - 1, of].map(StateKind::GradientResidual))
    }
}

/// The tensors of a parameter that a store of weights or of optimizer state has.
fn tensor_kind(store: StoreKind) -> StateKind {
    if let StoreKind::Optimizer(kind) = store { kind } else { StateKind::Parameter }
}

/// The tensors of all parameters in `stores`. Selection biases are left out: their owners have them among the weights.
pub(crate) fn tensors_of<'a>(
    records: &'a [ParameterRecord],
    numbers: &ResidualNumbers,
    stores: impl Iterator<Item = &'a mut StateStore>,
) -> Vec<StateTensor<'a>> {
    let mut tensors = Vec::new();
    for store in stores.filter(|store| store.kind() != StoreKind::SelectionBiases) {
        let (kind, dtype) = (store.kind(), store.dtype());
        let tensor = |(id, first, bytes): (ParameterId, usize, &'a [u8])| {
            let record = &records[id.0];
            let kind = match kind {
                StoreKind::GradientResidual => numbers.own(record)?,
                kind => tensor_kind(kind),
            };
            Some(StateTensor { record, kind, dtype, first, contents: Contents::Memory(bytes) })
        };
        tensors.extend(store.parts().into_iter().filter_map(tensor));
    }
    tensors
}

/// The tensors of all parameters on disk, those of a parameter one after the other: they lie near each other.
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
