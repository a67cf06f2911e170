//! Quantized gradient reduction (qgZ of ZeRO++: Wang et al., 2023, section 3.3).
//!
//! A ring or a tree would round at every hop. Here each rank encodes its gradients once, as records of codes and
//! scales, and sends every owner its part by all-to-all. The owner adds up all parts in f32. Data-parallel replicas
//! then reduce these sums in the same way, each rank a piece of the own range, and all-gather the results.
//!
//! ```text
//! gradients + residual -> records, all-to-all -> sum of the own range                              over the owners
//! own range + residual -> records, all-to-all -> sum of a piece of it -> records, all-gather       over the replicas
//! ```
//!
//! The quantization error of a rank is its residual, which is added to its next gradients (error feedback: Karimireddy
//! et al., 2019). All three sets of records share one residual, so that delivered gradients and residual always add up
//! to the true gradients. LoCo (Xie et al., 2024) keeps an 8-bit moving average and resets it from time to time; here
//! the residual is bf16 and is neither averaged nor reset. It is part of a checkpoint.

use std::ops::Range;

use lockstep_comm::{Collective, LentBuffer};
use lockstep_plan::{
    DType, MemoryCategory, ParameterId, QUANTIZATION_BLOCK, QuantizedGradientStaging, QuantizedType,
    ReductionGroup, StateLayout,
};
use lockstep_tensor::{Arena, Buffer, Kernels, TensorError, View};

use crate::state_store::{ParameterSpan, StateStore};
use crate::{EngineError, reducer::Reducer};

/// Record buffers for gradients whose backward has just run, and the quantization errors of earlier gradients.
#[derive(Debug)]
pub(crate) struct QuantizedGradients {
    kind: QuantizedType,
    flat_parameters: Vec<Option<Coded>>,
    /// Records to be sent, in two alternating buffers selected by [`FlatParameter::parity`](lockstep_plan::FlatParameter::parity).
    sent: [Buffer; 2],
    /// Records received from other ranks, by the same parity.
    received: [Buffer; 2],
    /// Quantization errors of all gradients of this rank, if they are kept.
    pub(crate) residual: Option<StateStore>,
}

/// A flat parameter whose gradients are sent as records.
#[derive(Debug, Clone)]
struct Coded {
    summing: ReductionGroup,
    /// Number of ranks in its shard group.
    ranks: usize,
    /// Index, 0 or 1, of its record buffers; `first` is the index of its first element there.
    parity: usize,
    first: usize,
    elements: usize,
    own: Range<usize>,
    /// Index of the flat parameter in the residual's store.
    in_residual: Option<usize>,
    /// Padding elements between the end of each parameter and the end of its last quantization block.
    gaps: Vec<Range<usize>>,
}

impl Coded {
    /// Returns the byte range of the records of some elements.
    fn records(&self, kind: QuantizedType, elements: Range<usize>) -> Range<usize> {
        kind.bytes(self.first + elements.start)..kind.bytes(self.first + elements.end)
    }
}

impl QuantizedGradients {
    /// Allocates record buffers for the gradients in `store`; returns `None` if nothing is quantized.
    ///
    /// # Errors
    /// If memory runs out.
    pub(crate) fn new(
        arena: &Arena,
        layout: &StateLayout,
        store: &StateStore,
        residual: Option<StateStore>,
    ) -> Result<Option<Self>, TensorError> {
        let Some((kind, passage)) = layout.record_passage() else { return Ok(None) };
        let QuantizedGradientStaging { offsets, sent, received } = passage;
        let records = &layout.records;
        let of_parameter =
            |store: &StateStore, id: usize| store.span_of(ParameterId(id)).map(|place| place.flat);
        let coded = |(index, first): (usize, Option<usize>)| {
            let (of, first) = (&store.flat_parameters()[index], first?);
            let any_of_it = (0..records.len()).find(|id| of_parameter(store, *id) == Some(index));
            let in_residual =
                residual.as_ref().zip(any_of_it).and_then(|(residual, id)| of_parameter(residual, id));
            let places = (0..records.len()).filter_map(|id| store.span_of(ParameterId(id)));
            let gap = |place: ParameterSpan| {
                let end = place.first + place.shape.elements();
                end..end.next_multiple_of(QUANTIZATION_BLOCK)
            };
            let gaps = places.filter(|place| place.flat == index).map(gap);
            Some(Coded {
                summing: of.summing,
                ranks: layout.place(of.summing).ranks,
                parity: of.parity(),
                first,
                elements: of.elements,
                own: of.own.clone(),
                in_residual,
                gaps: gaps.filter(|gap| !gap.is_empty()).collect(),
            })
        };
        let flat_parameters = offsets.into_iter().enumerate().map(coded).collect();
        let buffer =
            |elements: usize| arena.allocate_zeroed(kind.bytes(elements), MemoryCategory::Communication);
        Ok(Some(Self {
            kind,
            flat_parameters,
            sent: [buffer(sent[0])?, buffer(sent[1])?],
            received: [buffer(received[0])?, buffer(received[1])?],
            residual,
        }))
    }

    /// Returns true if a flat parameter is sent as records.
    pub(crate) fn has(&self, flat: usize) -> bool {
        self.flat_parameters[flat].is_some()
    }

    /// Returns true if the records of `flat_parameters` would overwrite records in flight.
    pub(crate) fn is_busy(&self, flat_parameters: &[usize], in_flight: &[usize]) -> bool {
        let buffer = |flat: &usize| self.flat_parameters[*flat].as_ref().map(|coded| coded.parity);
        let mut wanted = flat_parameters.iter().filter_map(buffer);
        wanted.any(|wanted| in_flight.iter().filter_map(buffer).any(|taken| taken == wanted))
    }

    /// Encodes the complete gradients `[elements]` of a flat parameter as records, and begins to send them to the
    /// owners.
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time.
    pub(crate) fn send(
        &mut self,
        queue: &dyn Kernels,
        flat: usize,
        gradients: View<'_>,
        reducer: &mut Reducer,
    ) -> Result<(), EngineError> {
        let Some(coded) = &self.flat_parameters[flat] else { return Ok(()) };
        // Padding still holds values of earlier units, which would coarsen the scales of their quantization blocks.
        coded.gaps.iter().for_each(|gap| queue.zero(gradients.rows(gap.clone())));
        self.encode(queue, coded, gradients, 0..coded.elements);
        let records = coded.records(self.kind, 0..coded.elements);
        let (parity, summing) = (coded.parity, coded.summing);
        let input = LentBuffer::new(self.sent[parity].lend(records.clone()), DType::U8);
        let output = LentBuffer::new(self.received[parity].lend(records.clone()), DType::U8);
        let exchange = Collective::AllToAll { input, output, counts: None };
        reducer.run_over_shards(exchange, records.len(), summing)
    }

    /// Adds up the received records of a flat parameter into `own`, `[own elements]`; does nothing if it is not sent as
    /// records.
    pub(crate) fn accumulate_reduced(&self, queue: &dyn Kernels, flat: usize, own: View<'_>) {
        let Some(coded) = &self.flat_parameters[flat] else { return };
        let records = coded.records(self.kind, 0..coded.elements);
        let received = self.received[coded.parity].view(DType::U8, records.start, [records.len()]);
        queue.dequantize_sum(self.kind, coded.ranks, received, own);
    }

    /// All-reduces this rank's own elements of a flat parameter, `[own elements]`, over the data-parallel replicas.
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time.
    pub(crate) fn sum_over_replicas(
        &mut self,
        queue: &dyn Kernels,
        flat: usize,
        own: View<'_>,
        reducer: &mut Reducer,
    ) -> Result<(), EngineError> {
        let Some(coded) = &self.flat_parameters[flat] else { return Ok(()) };
        let Some((replicas, replica)) = reducer.place_among_replicas() else { return Ok(()) };
        let (kind, elements) = (self.kind, own.elements());
        let blocks = elements / QUANTIZATION_BLOCK;
        let border = |replica: usize| blocks * replica / replicas * QUANTIZATION_BLOCK;
        let piece = border(replica)..border(replica + 1);
        let piece_bytes: Vec<usize> =
            (0..replicas).map(|replica| kind.bytes(border(replica + 1) - border(replica))).collect();
        self.encode(queue, coded, own, coded.own.clone());
        let of_sent = coded.records(kind, coded.own.clone());
        let of_piece = kind.bytes(piece.len());
        let (parity, first) = (coded.parity, coded.own.start);
        let input = LentBuffer::new(self.sent[parity].lend(of_sent.clone()), DType::U8);
        let output = LentBuffer::new(self.received[parity].lend(0..replicas * of_piece), DType::U8);
        let counts = Some((piece_bytes.clone(), vec![of_piece; replicas]));
        reducer.run_over_replicas(Collective::AllToAll { input, output, counts }, of_sent.len())?;
        let summands = self.received[parity].view(DType::U8, 0, [replicas * of_piece]);
        queue.dequantize_sum(kind, replicas, summands, own.rows(piece.clone()));
        if let Some(coded) = &self.flat_parameters[flat] {
            self.encode(queue, coded, own.rows(piece.clone()), first + piece.start..first + piece.end);
        }
        let data = LentBuffer::new(self.sent[parity].lend(of_sent.clone()), DType::U8);
        let counts = Some(piece_bytes);
        reducer.run_over_replicas(Collective::AllGatherInPlace { data, counts }, of_sent.len())?;
        queue.dequantize(kind, self.sent[parity].view(DType::U8, of_sent.start, [of_sent.len()]), own);
        Ok(())
    }

    /// Encodes some elements of a flat parameter as records.
    fn encode(&self, queue: &dyn Kernels, coded: &Coded, gradients: View<'_>, elements: Range<usize>) {
        let records = coded.records(self.kind, elements.clone());
        let target = self.sent[coded.parity].view(DType::U8, records.start, [records.len()]);
        let kept = self.residual.as_ref().zip(coded.in_residual);
        let residual = kept.map(|(residual, flat)| residual.range_of(flat, elements));
        queue.quantize(self.kind, gradients, residual, target);
    }
}
