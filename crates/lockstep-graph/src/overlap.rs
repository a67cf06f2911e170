//! Overlap of tensor-parallel collectives with matrix products: a transformation of a phase's instructions that cuts
//! both into chunks of rows.
//!
//! ```text
//! all-gather, products of its output  ->  start all chunks; products of the local rows; then, chunk by chunk, of the others
//! products, reduction of their output  ->  chunk by chunk: products of its rows, then start its reduction
//! ```
//!
//! A collective in flight is awaited where its result is first needed. Before the cutting, weight gradients are moved
//! behind the reduction of the same layers' input gradients, and all-gathers that only they need are moved before it
//! (as Korthikanti et al., 2022, section 4.2.2, do). The decomposition of products follows Wang et al. (ASPLOS 2023).
//! Chunks are ranges of rows, so no sum changes its order, and no bit depends on their number.

use std::ops::Range;

use crate::{
    block::Value,
    instruction::{GradientBuffer, Instruction, Object, OverlappedCollective, Rows},
    placement::Transfer,
    planner::Planner,
    storage::{Lifetime, Slot, pack},
};

/// Chunks begin at multiples of this many rows if they are long enough: the height of the panels of matrix products.
const GRAIN: usize = 32;
/// Instructions of a phase, with its overlapped collectives.
#[derive(Debug)]
pub(crate) struct Overlapped {
    pub(crate) instructions: Vec<Instruction>,
    pub(crate) collectives: Vec<OverlappedCollective>,
    /// Size of the communication buffer in bytes.
    pub(crate) overlap_buffer_bytes: usize,
}

/// Cuts `rows` rows into ranges, as even as whole grains allow.
fn cut(rows: usize, chunks: usize) -> Vec<Range<usize>> {
    let chunks = chunks.min(rows).max(1);
    let grain = if rows >= GRAIN * chunks { GRAIN } else { 1 };
    let start = |chunk: usize| if chunk == chunks { rows } else { rows * chunk / chunks / grain * grain };
    (0..chunks).map(|chunk| start(chunk)..start(chunk + 1)).collect()
}

impl Planner<'_> {
    /// Overlaps collectives with products, if the block was recorded with several chunks. `slots` holds the slots of
    /// objects that outlive these instructions.
    pub(crate) fn overlapped(
        &self,
        mut instructions: Vec<Instruction>,
        gradients: &[GradientBuffer],
        slots: &[Option<Slot>],
    ) -> Overlapped {
        if self.chunks < 2 {
            return Overlapped { instructions, collectives: Vec::new(), overlap_buffer_bytes: 0 };
        }
        self.reorder_for_overlap(&mut instructions);
        let mut lowering = Lowering {
            planner: self,
            gradients,
            slots,
            list: &instructions,
            out: Vec::with_capacity(instructions.len()),
            collectives: Vec::new(),
            in_flight: Vec::new(),
        };
        lowering.run();
        let Lowering { out: instructions, mut collectives, .. } = lowering;
        let overlap_buffer_bytes = place(&instructions, &mut collectives);
        Overlapped { instructions, collectives, overlap_buffer_bytes }
    }

    /// Returns every object that an instruction of an overlapped list reads or writes.
    pub(crate) fn touches_of(
        &self,
        instruction: &Instruction,
        collectives: &[OverlappedCollective],
    ) -> Vec<usize> {
        match instruction {
            Instruction::Start { transit } => {
                let OverlappedCollective { own, all, .. } = collectives[*transit];
                vec![self.index(own), self.index(all)]
            }
            Instruction::Part { product, transit, rows } => {
                let mut objects = self.touches(product);
                if matches!(rows, Rows::Sent(_)) {
                    let sent = self.index(collectives[*transit].all);
                    objects.retain(|object| *object != sent);
                }
                objects
            }
            Instruction::Send { .. } => Vec::new(),
            Instruction::Await { transit, .. } => {
                let OverlappedCollective { transfer, own, all, .. } = collectives[*transit];
                vec![self.index(if transfer == Transfer::AllGather { all } else { own })]
            }
            _ => self.touches(instruction),
        }
    }

    fn index(&self, object: Object) -> usize {
        match object {
            Object::Value(value) => self.stored_as[value.0],
            Object::Gradient(gradient) => self.object(gradient),
        }
    }

    /// Reorders independent instructions, so that collectives have something to overlap with.
    fn reorder_for_overlap(&self, list: &mut [Instruction]) {
        for at in 0..list.len() {
            match self.exchange(&list[at]) {
                Some((Transfer::AllGather, ..)) => self.gather_early(list, at),
                Some((_, _, all)) => self.sum_early(list, at, self.index(all)),
                None => {}
            }
        }
    }

    /// Moves the products whose result is reduced at `at` directly before it, and weight gradients from between them behind it.
    fn sum_early(&self, list: &mut [Instruction], at: usize, summed: usize) {
        let producers: Vec<usize> =
            (0..at).filter(|i| self.product(&list[*i]).is_some_and(|[_, result]| result == summed)).collect();
        let Some(&first) = producers.first() else { return };
        let between: Vec<usize> = (first..at).filter(|i| !producers.contains(i)).collect();
        let depends = |a: usize, b: usize| self.depend(&list[a], &list[b]);
        let blocks = |other: usize| producers.iter().any(|&p| p < other && depends(p, other));
        if between.iter().any(|&other| blocks(other)) {
            return;
        }
        let (mut before, mut behind) = (Vec::new(), Vec::new());
        for other in between.into_iter().rev() {
            let is_of_weights = matches!(list[other], Instruction::BackwardWeights { .. });
            let is_free = !producers.iter().chain([&at]).chain(&before).any(|&i| depends(i, other));
            if is_of_weights && is_free { behind.push(other) } else { before.push(other) }
        }
        let order = before.into_iter().rev().chain(producers).chain([at]).chain(behind.into_iter().rev());
        let moved: Vec<Instruction> = order.map(|i| list[i].clone()).collect();
        list[first..=at].clone_from_slice(&moved);
    }

    /// Moves the all-gather at `at`, with the recomputation just before it, in front of a weight gradient.
    fn gather_early(&self, list: &mut [Instruction], at: usize) {
        let is_again =
            |i: &usize| matches!(list[*i], Instruction::Forward(_)) && self.exchange(&list[*i]).is_none();
        let first = (0..at).rev().take_while(is_again).last().unwrap_or(at);
        let Some(before) = first.checked_sub(1) else { return };
        let is_of_weights = matches!(list[before], Instruction::BackwardWeights { .. });
        if is_of_weights && !(first..=at).any(|i| self.depend(&list[before], &list[i])) {
            list[before..=at].rotate_left(1);
        }
    }

    /// Returns the collective of an instruction: its kind, its local object (`own`) and its global object (`all`).
    fn exchange(&self, instruction: &Instruction) -> Option<(Transfer, Object, Object)> {
        let (transfer, from, to) = match instruction {
            Instruction::Forward(operation) => {
                let facts = &self.facts[*operation];
                let [forward, _] = facts.transfers?;
                (forward, Object::Value(facts.inputs[0]), Object::Value(facts.output()))
            }
            Instruction::BackwardInputs { operation, dy: Some(dy), dx } => {
                let [_, backward] = self.facts[*operation].transfers?;
                (backward, Object::Gradient(*dy), Object::Gradient(dx[0].0))
            }
            _ => return None,
        };
        match transfer {
            Transfer::AllGather => Some((transfer, from, to)),
            Transfer::ReduceScatter | Transfer::AllReduce => Some((transfer, to, from)),
            _ => None,
        }
    }

    /// Returns the (input, output) objects of a product that computes each output row from the same input row.
    fn product(&self, instruction: &Instruction) -> Option<[usize; 2]> {
        match instruction {
            Instruction::Forward(operation) => {
                let facts = &self.facts[*operation];
                facts.is_row_product.then(|| [self.stored_as[facts.inputs[0].0], facts.output().0])
            }
            Instruction::BackwardInputs { operation, dy: Some(dy), dx } => {
                let is_row_product = self.facts[*operation].is_row_product;
                is_row_product.then(|| [self.object(*dy), self.object(dx[0].0)])
            }
            _ => None,
        }
    }

    /// Returns true if the instruction takes long enough to hide a collective behind.
    fn is_long(&self, instruction: &Instruction) -> bool {
        match instruction {
            Instruction::Forward(operation)
            | Instruction::BackwardInputs { operation, .. }
            | Instruction::BackwardWeights { operation, .. } => self.facts[*operation].is_long,
            _ => false,
        }
    }

    /// Returns true if two instructions must keep their order.
    fn depend(&self, a: &Instruction, b: &Instruction) -> bool {
        let meet = |a: &[usize], b: &[usize]| a.iter().any(|object| b.contains(object));
        let both_add = || {
            let (a, b) = (self.trained_by(a), self.trained_by(b));
            a.iter().any(|parameter| b.contains(parameter))
        };
        meet(&self.writes(a), &self.touches(b)) || meet(&self.writes(b), &self.touches(a)) || both_add()
    }

    /// Returns every object that an instruction may write.
    fn writes(&self, instruction: &Instruction) -> Vec<usize> {
        match instruction {
            Instruction::Forward(operation) => {
                let facts = &self.facts[*operation];
                facts.outputs.iter().chain(&facts.scratch).map(|value| value.0).collect()
            }
            Instruction::BackwardInputs { operation, dx, .. } => {
                let facts = &self.facts[*operation];
                let outputs: &[Value] = if facts.is_loss { &facts.outputs } else { &[] };
                let values = facts.scratch.iter().chain(outputs).map(|value| value.0);
                values.chain(dx.iter().map(|(dx, _)| self.object(*dx))).collect()
            }
            Instruction::BackwardWeights { .. } => Vec::new(),
            Instruction::Copy { to, .. } | Instruction::Add { to, .. } => vec![self.object(*to)],
            _ => unreachable!("instructions are moved before they are cut"),
        }
    }

    /// Returns the parameters whose gradients an instruction adds to.
    fn trained_by(&self, instruction: &Instruction) -> Vec<usize> {
        match instruction {
            Instruction::BackwardInputs { operation, .. } if !self.facts[*operation].is_loss => Vec::new(),
            Instruction::BackwardInputs { operation, .. }
            | Instruction::BackwardWeights { operation, .. } => {
                self.facts[*operation].parameters().map(|parameter| parameter.0).collect()
            }
            _ => Vec::new(),
        }
    }
}

/// State of the cutting of products and collectives.
struct Lowering<'a> {
    planner: &'a Planner<'a>,
    gradients: &'a [GradientBuffer],
    slots: &'a [Option<Slot>],
    list: &'a [Instruction],
    out: Vec<Instruction>,
    collectives: Vec<OverlappedCollective>,
    /// Collectives that have not been awaited, in the order of their start.
    in_flight: Vec<usize>,
}

impl Lowering<'_> {
    fn run(&mut self) {
        let mut at = 0;
        while let Some(instruction) = self.list.get(at) {
            let taken = self.gathered(at).or_else(|| self.summed(at));
            if taken.is_none() {
                self.settle(at..at + 1);
                self.out.push(instruction.clone());
            }
            at += taken.unwrap_or(1);
        }
        for transit in std::mem::take(&mut self.in_flight) {
            self.wait(transit);
        }
    }

    /// Overlaps an all-gather at `at` with the products of its output that follow directly, or, uncut, with a long
    /// instruction. Returns the number of instructions consumed.
    fn gathered(&mut self, at: usize) -> Option<usize> {
        let (Transfer::AllGather, own, all) = self.planner.exchange(&self.list[at])? else { return None };
        let rest = &self.list[at + 1..];
        let gathered = self.planner.index(all);
        let reads_it = |instruction: &&Instruction| {
            let product = self.planner.product(instruction);
            product.is_some_and(|[from, to]| {
                from == gathered && ![gathered, self.planner.index(own)].contains(&to)
            })
        };
        let products = rest.iter().take_while(reads_it).count();
        if products == 0 {
            let touches = |instruction: &Instruction| self.planner.touches(instruction).contains(&gathered);
            let free = rest.iter().take_while(|instruction| !touches(instruction));
            if !free.into_iter().any(|instruction| self.planner.is_long(instruction)) {
                return None;
            }
            self.settle(at..at + 1);
            let transit = self.transit(at, (Transfer::AllGather, own, all), 1);
            self.out.push(Instruction::Start { transit });
            self.in_flight.push(transit);
            return Some(1);
        }
        let end = at + 1 + products;
        self.settle(at..end);
        let transit = self.transit(at, (Transfer::AllGather, own, all), self.planner.chunks);
        self.out.push(Instruction::Start { transit });
        self.parts(at + 1..end, transit, Rows::Own);
        for chunk in 0..self.collectives[transit].chunks.len() {
            self.out.push(Instruction::Await { transit, chunk });
            self.parts(at + 1..end, transit, Rows::Others(chunk));
        }
        Some(1 + products)
    }

    /// Overlaps products from `at` on with the reduction of their result that follows directly. Returns the number of
    /// instructions consumed.
    fn summed(&mut self, at: usize) -> Option<usize> {
        let result = |instruction: &Instruction| self.planner.product(instruction).map(|[_, result]| result);
        let summands = result(&self.list[at])?;
        let products =
            self.list[at..].iter().take_while(|instruction| result(instruction) == Some(summands)).count();
        let end = at + products;
        let (transfer, own, all) = self.planner.exchange(self.list.get(end)?)?;
        if transfer == Transfer::AllGather || self.planner.index(all) != summands {
            return None;
        }
        // The partial sums exist only in the communication buffer, so nothing else may read them.
        let is_in_place = self.planner.index(own) == summands;
        let touched =
            |list: &[Instruction]| list.iter().any(|other| self.planner.touches(other).contains(&summands));
        let is_wanted = touched(&self.list[..at])
            || (!is_in_place && (self.slots[summands].is_some() || touched(&self.list[end + 1..])));
        if is_wanted {
            return None;
        }
        self.settle(at..end + 1);
        let transit = self.transit(end, (transfer, own, all), self.planner.chunks);
        for chunk in 0..self.collectives[transit].chunks.len() {
            self.parts(at..end, transit, Rows::Sent(chunk));
            self.out.push(Instruction::Send { transit, chunk });
        }
        self.in_flight.push(transit);
        Some(products + 1)
    }

    fn parts(&mut self, products: Range<usize>, transit: usize, rows: Rows) {
        let part =
            |product: &Instruction| Instruction::Part { product: Box::new(product.clone()), transit, rows };
        self.out.extend(self.list[products].iter().map(part));
    }

    fn transit(
        &mut self,
        at: usize,
        (transfer, own, all): (Transfer, Object, Object),
        chunks: usize,
    ) -> usize {
        let info = match all {
            Object::Value(value) => self.planner.values[value.0],
            Object::Gradient(gradient) => self.gradients[gradient.0].info,
        };
        let blocks = if transfer == Transfer::AllReduce { 1 } else { self.planner.ranks };
        let first_pending = self.collectives.last().map_or(0, |last| last.first_pending + last.chunks.len());
        self.collectives.push(OverlappedCollective {
            transfer,
            exchange: self.list[at].clone(),
            own,
            all,
            info,
            chunks: cut(info.rows / blocks, chunks),
            blocks,
            first_byte: 0,
            first_pending,
        });
        self.collectives.len() - 1
    }

    /// Waits for the collectives in flight whose objects any of these instructions touches.
    fn settle(&mut self, instructions: Range<usize>) {
        let list = &self.list[instructions];
        let touched: Vec<usize> =
            list.iter().flat_map(|instruction| self.planner.touches(instruction)).collect();
        for transit in std::mem::take(&mut self.in_flight) {
            let OverlappedCollective { own, all, .. } = self.collectives[transit];
            if [own, all].iter().any(|object| touched.contains(&self.planner.index(*object))) {
                self.wait(transit);
            } else {
                self.in_flight.push(transit);
            }
        }
    }

    fn wait(&mut self, transit: usize) {
        let chunks = 0..self.collectives[transit].chunks.len();
        self.out.extend(chunks.map(|chunk| Instruction::Await { transit, chunk }));
    }
}

/// Assigns byte offsets in the communication buffer; returns its size.
fn place(instructions: &[Instruction], collectives: &mut [OverlappedCollective]) -> usize {
    let mut lifetimes: Vec<Lifetime> = collectives
        .iter()
        .map(|transit| Lifetime { first: usize::MAX, last: 0, bytes: transit.total_bytes() })
        .collect();
    for (time, instruction) in instructions.iter().enumerate() {
        if let Instruction::Start { transit }
        | Instruction::Part { transit, .. }
        | Instruction::Send { transit, .. }
        | Instruction::Await { transit, .. } = instruction
        {
            let lifetime = &mut lifetimes[*transit];
            lifetime.first = lifetime.first.min(time);
            lifetime.last = time;
        }
    }
    let (offsets, bytes) = pack(&lifetimes);
    collectives.iter_mut().zip(offsets).for_each(|(transit, offset)| transit.first_byte = offset);
    bytes
}
