//! Weights that are whole only while units work with them (ZeRO stage 3; Rajbhandari et al., 2020, and PyTorch's FSDP).
//!
//! Each rank keeps what it owns. Which weights are gathered from their owners when, how long they stay and where they lie in a pool is
//! planned before the run ([`GatherPlan`]); here it is carried out: before a use what it reads has come, and while it computes what later
//! ones read is on its way.
//!
//! What a rank has on disk (ZeRO-Infinity: Rajbhandari et al., 2021) is read into its place in the pool instead, while the uses before it
//! compute, and gathered from there, if others own parts of it, when it is used.
//!
//! Weights may travel as small integers (qwZ of ZeRO++: Wang et al., 2023): each rank writes its range as codes and scales, these are
//! gathered, and every rank reads all ranges from them, its own as well, so that all work with the same bits. What neighbours keep is
//! what was read so, and they give it to each other as it is.

use std::ops::Range;
use std::time::{Duration, Instant};

use lockstep_comm::{Collective, CommError, Deadline, Lent, Pending};
use lockstep_plan::gathering::{Bundled, GatherPlan, Gathers, Kept, Sequence, Stay};
use lockstep_plan::{DType, MemoryCategory, ParameterId, QuantizedType, StoreKind};
use lockstep_tensor::{Arena, Buffer, Kernels, TensorError, View};

use crate::secondary::{Secondary, SecondaryPart};
use crate::windowed_store::WindowedStore;
use crate::{EngineError, FlatStore, Traffic, Weights, shards::Shards, stores::Stores};

/// Brings the weights of a unit to where kernels read them.
pub(crate) trait WeightSource {
    /// Waits until the weights of `unit`, the next one of the sequence of uses, are there.
    ///
    /// # Errors
    /// [`EngineError`].
    fn make_ready(&mut self, queue: &dyn Kernels, unit: usize) -> Result<(), EngineError>;

    /// The weights; those that are shared out, of the unit that was made ready last.
    fn weights(&self) -> Weights<'_>;
}

/// Weights that are all there.
impl WeightSource for Weights<'_> {
    fn make_ready(&mut self, _: &dyn Kernels, _: usize) -> Result<(), EngineError> {
        Ok(())
    }

    fn weights(&self) -> Weights<'_> {
        *self
    }
}

/// What a rank owns of the weights.
#[derive(Debug)]
pub(crate) struct Own<'a> {
    pub(crate) stores: &'a mut Stores,
    /// The files of trained and of frozen weights, if any of them are on disk.
    pub(crate) on_disk: [Option<&'a mut WindowedStore>; 2],
}

impl Own<'_> {
    fn store(&mut self, kept: Kept) -> Option<&mut FlatStore> {
        self.stores.get_mut(match kept {
            Kept::Trained => StoreKind::Weights,
            Kept::Frozen => StoreKind::FrozenWeights,
        })
    }

    /// Which elements of a stretch this rank owns.
    fn range(&mut self, kept: Kept, stretch: usize) -> Range<usize> {
        self.store(kept).map_or(0..0, |store| store.stretches()[stretch].own.clone())
    }
}

/// The weights that are whole at the time.
#[derive(Debug)]
pub(crate) struct Gathered {
    pool: Buffer,
    /// What goes between ranks, where it is not the weights themselves: the records of each element of the pool.
    records: Option<(QuantizedType, Buffer)>,
    dtype: DType,
    bundles: Vec<Bundle>,
    /// The bundles that each unit reads.
    needs: Vec<Vec<usize>>,
    /// The bundle of each stretch of the stores, and where it begins there; none of those that nobody else owns a part of.
    in_bundle: [Vec<Option<(usize, usize)>>; 2],
    /// By [`Sequence`].
    plans: [GatherPlan; 3],
    /// What is kept for neighbours, if anything is.
    secondary: Option<Secondary>,
    sequence: Sequence,
    /// Uses of the sequence that have been made ready.
    used: usize,
    limit: Duration,
    traffic: Traffic,
}

/// Stretches that the same units read.
#[derive(Debug, Default)]
struct Bundle {
    stretches: Vec<Gatherable>,
    /// Whether neighbours are to keep what comes, or is there, for further gathers of the sequence.
    is_to_be_kept: bool,
    /// The first element in the pool of where they are, or will be when they have come.
    start: Option<usize>,
    pending: Vec<Pending>,
}

/// A stretch in a bundle.
#[derive(Debug)]
struct Gatherable {
    kept: Kept,
    /// Its number in that store.
    stretch: usize,
    /// Its first element in the bundle.
    start: usize,
    elements: usize,
    secondary: Option<SecondaryPart>,
    /// Whether it is there as records only.
    is_coded: bool,
    /// Whether this rank has its part on disk.
    is_on_disk: bool,
    /// True while that is being read.
    is_read: bool,
}

impl Gathered {
    /// A pool for what is gathered as `gathers` plans, of weights that `own` keeps, and that go between ranks as codes of `quantized`.
    ///
    /// # Errors
    /// Out of memory.
    pub(crate) fn new(
        arena: &Arena,
        gathers: Gathers,
        mut own: Own<'_>,
        shards: &Shards,
        quantized: Option<QuantizedType>,
    ) -> Result<Self, TensorError> {
        let dtype = own.stores.trained().dtype();
        let (pool_elements, pool_bytes) = (gathers.pool_elements(), gathers.pool_bytes(dtype));
        let Gathers { bundles, needs, in_bundle, plans, secondary_elements } = gathers;
        let secondary = secondary_elements.map(|elements| Secondary::new(arena, shards, dtype, elements));
        let secondary = secondary.transpose()?;
        let mut gatherable = |Bundled { kept, stretch, start, elements, is_on_disk, secondary_start }| {
            let part = own.store(kept).zip(secondary.as_ref()).zip(secondary_start);
            let secondary =
                part.and_then(|((store, secondary), start)| secondary.part(store, stretch, start));
            Gatherable {
                kept,
                stretch,
                start,
                elements,
                secondary,
                is_coded: false,
                is_on_disk,
                is_read: false,
            }
        };
        let mut bundle = |stretches: Vec<Bundled>| Bundle {
            stretches: stretches.into_iter().map(&mut gatherable).collect(),
            ..Bundle::default()
        };
        let bundles = bundles.into_iter().map(&mut bundle).collect();
        let in_communication = |bytes: usize| arena.allocate(bytes, MemoryCategory::Communication);
        let of_records =
            |kind: QuantizedType| Ok::<_, TensorError>((kind, in_communication(kind.bytes(pool_elements))?));
        Ok(Self {
            pool: in_communication(pool_bytes)?,
            records: quantized.map(of_records).transpose()?,
            dtype,
            bundles,
            needs,
            in_bundle,
            plans,
            secondary,
            sequence: Sequence::Step,
            used: 0,
            limit: shards.limit(),
            traffic: Traffic::default(),
        })
    }

    /// A sequence of uses begins. What was gathered no longer counts.
    pub(crate) fn begin(&mut self, sequence: Sequence) {
        self.sequence = sequence;
        self.used = 0;
        self.bundles.iter_mut().for_each(|bundle| bundle.start = None);
    }

    /// How weights are gathered in a step.
    pub(crate) fn plan_of_step(&self) -> &GatherPlan {
        &self.plans[Sequence::Step as usize]
    }

    /// What gathering has cost since this was last asked.
    pub(crate) fn take_traffic(&mut self) -> Traffic {
        std::mem::take(&mut self.traffic)
    }

    /// The weights of a parameter that `own` keeps and a unit that was made ready reads; none if they are not kept.
    pub(crate) fn get<'a>(&'a self, kept: Kept, own: &'a FlatStore, id: ParameterId) -> Option<View<'a>> {
        let (stretch, first, shape) = own.place_of(id)?;
        let Some((bundle, in_bundle)) = self.in_bundle[kept as usize][stretch] else { return own.get(id) };
        let start = self.bundles[bundle].start.expect("what a unit reads was made ready");
        let offset_bytes = (start + in_bundle + first) * self.dtype.size_bytes();
        Some(self.pool.view(self.dtype, offset_bytes, shape))
    }

    /// Waits until what `unit` reads is there, and begins to gather what is planned to be on its way meanwhile.
    ///
    /// # Errors
    /// [`EngineError::Comm`], [`EngineError::Disk`].
    ///
    /// # Panics
    /// If the unit is not the next one of the sequence.
    pub(crate) fn make_ready(
        &mut self,
        queue: &dyn Kernels,
        unit: usize,
        own: &mut Own<'_>,
        shards: &Shards,
    ) -> Result<(), EngineError> {
        let begin = Instant::now();
        let deadline = Deadline::after(self.limit);
        let at = self.used;
        self.used += 1;
        let plan = &self.plans[self.sequence as usize];
        assert!(at < plan.len(), "use {at} of {:?}, of unit {unit}, is one more than planned", self.sequence);
        let (now, later) = plan.begins_with(at).split_at(plan.read_at_once(at));
        let mut gather = Gather {
            queue,
            pool: &mut self.pool,
            records: &mut self.records,
            bundles: &mut self.bundles,
            secondary: &mut self.secondary,
            dtype: self.dtype,
            traffic: &mut self.traffic,
        };
        now.iter().try_for_each(|stay| gather.start(stay, own, shards, deadline))?;
        for &bundle in &self.needs[unit] {
            gather.follow_reads(bundle, own, shards, deadline)?;
            let pending = &mut gather.bundles[bundle].pending;
            pending.drain(..).try_for_each(|pending| pending.wait(deadline).map(drop))?;
            gather.decode(bundle);
            gather.keep_for_neighbours(bundle);
        }
        gather.traffic.exposed += begin.elapsed();
        later.iter().try_for_each(|stay| gather.start(stay, own, shards, deadline))?;
        self.traffic.busy += begin.elapsed();
        Ok(())
    }
}

/// What a gather works on.
struct Gather<'a> {
    queue: &'a dyn Kernels,
    pool: &'a mut Buffer,
    records: &'a mut Option<(QuantizedType, Buffer)>,
    bundles: &'a mut [Bundle],
    secondary: &'a mut Option<Secondary>,
    dtype: DType,
    traffic: &'a mut Traffic,
}

impl Gather<'_> {
    /// Begins to gather a bundle; what this rank has of it on disk, to read.
    fn start(
        &mut self,
        stay: &Stay,
        own: &mut Own<'_>,
        shards: &Shards,
        deadline: Deadline,
    ) -> Result<(), EngineError> {
        let Bundle { stretches, start, is_to_be_kept, .. } = &mut self.bundles[stay.bundle];
        *start = Some(stay.start);
        *is_to_be_kept = stay.earlier == 0;
        for index in 0..stretches.len() {
            let part = &mut self.bundles[stay.bundle].stretches[index];
            let from_neighbours = stay.earlier > 0 && self.secondary.is_some() && part.secondary.is_some();
            if from_neighbours || !part.is_on_disk {
                self.gather((stay.bundle, index), from_neighbours, own, shards, deadline)?;
                continue;
            }
            let of_own = own.range(part.kept, part.stretch);
            let start = (stay.start + part.start + of_own.start) * self.dtype.size_bytes();
            if let Some(store) = &mut own.on_disk[part.kept as usize] {
                store.begin_to_fill(part.stretch, self.pool, start)?;
                part.is_read = true;
            }
        }
        Ok(())
    }

    /// Waits for what is being read of a bundle, and begins to gather the rest of that.
    fn follow_reads(
        &mut self,
        bundle: usize,
        own: &mut Own<'_>,
        shards: &Shards,
        deadline: Deadline,
    ) -> Result<(), EngineError> {
        for index in 0..self.bundles[bundle].stretches.len() {
            let Gatherable { kept, stretch, is_read, .. } = &mut self.bundles[bundle].stretches[index];
            let Some(store) = own.on_disk[*kept as usize].as_mut().filter(|_| std::mem::take(is_read)) else {
                continue;
            };
            store.finish_filling(*stretch)?;
            self.gather((bundle, index), false, own, shards, deadline)?;
        }
        Ok(())
    }

    /// Begins to gather a stretch of a bundle, if others own parts of it.
    #[track_caller]
    fn gather(
        &mut self,
        (bundle, index): (usize, usize),
        from_neighbours: bool,
        own: &mut Own<'_>,
        shards: &Shards,
        deadline: Deadline,
    ) -> Result<(), CommError> {
        let (dtype, size) = (self.dtype, self.dtype.size_bytes());
        let Bundle { stretches, start, pending, .. } = &mut self.bundles[bundle];
        let Gatherable { kept, stretch, start: in_bundle, elements, secondary, is_coded, is_on_disk, .. } =
            &mut stretches[index];
        let (stretch, elements, first) = (*stretch, *elements, start.unwrap_or_default() + *in_bundle);
        let Some(store) = own.store(*kept) else { return Ok(()) };
        let group = shards.gathering(store.stretches()[stretch].summing);
        let Some(group) = group else { return Ok(()) };
        let of_own = store.stretches()[stretch].own.clone();
        let bytes = first * size..(first + elements) * size;
        let neighbours = self.secondary.as_mut().zip(*secondary).filter(|_| from_neighbours);
        let of_neighbours = neighbours.and_then(|(kept, part)| kept.lend_from(part));
        *is_coded = of_neighbours.is_none() && self.records.is_some();
        let (group, collective, bytes) = match (of_neighbours, &mut *self.records) {
            (Some((neighbours, buffer, range)), _) => {
                let input = Lent::new(buffer.lend(range), dtype);
                let output = Lent::new(self.pool.lend(bytes.clone()), dtype);
                (neighbours, Collective::AllGather { input, output, counts: None }, bytes.len())
            }
            (None, Some((kind, records))) => {
                let of = |from: usize, to: usize| kind.bytes(first + from)..kind.bytes(first + to);
                let (own_records, all) = (of(of_own.start, of_own.end), of(0, elements));
                let target = records.view(DType::U8, own_records.start, [own_records.len()]);
                let weights = if *is_on_disk {
                    self.pool.view(dtype, (first + of_own.start) * size, [of_own.len()])
                } else {
                    store.own_of(stretch)
                };
                self.queue.quantize(*kind, weights, None, target);
                let data = Lent::new(records.lend(all.clone()), DType::U8);
                (group.clone(), Collective::AllGatherInPlace { data, counts: None }, all.len())
            }
            (None, None) if *is_on_disk => {
                let data = Lent::new(self.pool.lend(bytes.clone()), dtype);
                (group.clone(), Collective::AllGatherInPlace { data, counts: None }, bytes.len())
            }
            (None, None) => {
                let (buffer, range) = store.lend_from(stretch, of_own);
                let input = Lent::new(buffer.lend(range), dtype);
                let output = Lent::new(self.pool.lend(bytes.clone()), dtype);
                (group.clone(), Collective::AllGather { input, output, counts: None }, bytes.len())
            }
        };
        let ranks = group.size() as u64;
        self.traffic.bytes += (ranks - 1) * bytes as u64 / ranks;
        pending.push(group.start(collective, deadline)?);
        group.progress()
    }

    /// Reads what has come of a bundle as records.
    fn decode(&mut self, bundle: usize) {
        let Some((kind, records)) = &*self.records else { return };
        let Bundle { stretches, start: Some(start), .. } = &mut self.bundles[bundle] else { return };
        for Gatherable { start: in_bundle, elements, is_coded, .. } in stretches {
            if !std::mem::take(is_coded) {
                continue;
            }
            let first = *start + *in_bundle;
            let bytes = kind.bytes(first)..kind.bytes(first + *elements);
            let weights = self.pool.view(self.dtype, first * self.dtype.size_bytes(), [*elements]);
            self.queue.dequantize(*kind, records.view(DType::U8, bytes.start, [bytes.len()]), weights);
        }
    }

    /// Keeps this rank's part of what has come from all owners, for the further gathers of its neighbours.
    fn keep_for_neighbours(&mut self, bundle: usize) {
        let Some(secondary) = &self.secondary else { return };
        let Bundle { stretches, is_to_be_kept, start: Some(start), .. } = &mut self.bundles[bundle] else {
            return;
        };
        if !std::mem::take(is_to_be_kept) {
            return;
        }
        for stretch in stretches {
            let Some(part) = stretch.secondary else { continue };
            let offset_bytes = (*start + stretch.start) * self.dtype.size_bytes();
            secondary.keep(self.queue, part, self.pool.view(self.dtype, offset_bytes, [stretch.elements]));
        }
    }
}
