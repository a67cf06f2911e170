//! Exchanges beside products: a pass over the instructions of a phase, which lets the ranks that share a block exchange some
//! rows while they multiply others.
//!
//! ```text
//! gather, products of what is gathered   ->  start all chunks; the own rows' products; then, chunk by chunk, those of what came
//! products, sum of their result          ->  chunk by chunk, the products of its rows, and their sum on its way
//! ```
//!
//! What is on its way is waited for where something needs it. Before that, gradients of weights are moved behind the sum of the
//! same layers' input gradients, and gathers that only they need before it (as Korthikanti et al., 2022, section 4.2.2, do). Cutting the
//! products themselves is after Wang et al. (ASPLOS 2023). Chunks are rows, so that no sum changes its order: no bit depends on
//! their number.

use std::ops::Range;

use crate::{
    Value,
    backward::{Gradient, GradientBuffer},
    layout::Exchange,
    operation::Operation,
    program::{Instruction, Planner},
    recorder::ValueInfo,
    storage::{Lifetime, Slot, pack},
};

/// Chunks begin at multiples of so many rows if they are as long: where the panels of products do.
const GRAIN: usize = 32;
/// Places of chunks in the memory for what is on its way are multiples of this.
const ALIGNMENT: usize = 64;

/// What the ranks do with the rows of all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// Each gives its own, and gets those of all.
    Gather,
    /// All have summands of all rows, and each gets the sums of its own.
    SumRows,
    /// The same, and each gets all sums.
    Sum,
}

/// A value or a gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Object {
    Value(Value),
    Gradient(Gradient),
}

/// The rows of a part of a product, by the exchange that it is computed beside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rows {
    /// This rank's.
    Own,
    /// Those of the other ranks in a chunk.
    Others(usize),
    /// Those of all ranks in a chunk, which are computed where they are sent from.
    Sent(usize),
}

/// An exchange that goes on beside products.
#[derive(Debug)]
pub(crate) struct Transit {
    pub(crate) way: Way,
    /// The instruction that would carry it out at once.
    pub(crate) exchange: Instruction,
    /// What this rank gives to a gather; what it gets of a sum.
    pub(crate) own: Object,
    /// What it gets of a gather; what it has summands of.
    pub(crate) all: Object,
    /// Of the rows of all ranks.
    pub(crate) info: ValueInfo,
    /// Ranges of the rows that each rank has an own block of; of all rows if no rank has.
    pub(crate) chunks: Vec<Range<usize>>,
    /// Blocks of rows of a chunk: one for each rank, or one.
    pub(crate) blocks: usize,
    /// Where its first chunk is kept on its way.
    pub(crate) first_byte: usize,
    /// Number of its first chunk among those that may be on their way.
    pub(crate) first_pending: usize,
}

impl Transit {
    /// Rows of `all` that are block `block` of a chunk.
    pub(crate) fn rows(&self, block: usize, chunk: usize) -> Range<usize> {
        let (first, range) = (block * self.info.rows / self.blocks, &self.chunks[chunk]);
        first + range.start..first + range.end
    }

    /// Rows of `all` in one block.
    pub(crate) fn block_rows(&self) -> usize {
        self.info.rows / self.blocks
    }

    fn row_bytes(&self) -> usize {
        self.info.columns * self.info.dtype.size_bytes()
    }

    /// Where a chunk is kept on its way: one block after the other.
    pub(crate) fn bytes(&self, chunk: usize) -> Range<usize> {
        let before: usize = (0..chunk).map(|chunk| self.chunk_bytes(chunk).next_multiple_of(ALIGNMENT)).sum();
        let start = self.first_byte + before;
        start..start + self.chunk_bytes(chunk)
    }

    fn chunk_bytes(&self, chunk: usize) -> usize {
        self.blocks * self.chunks[chunk].len() * self.row_bytes()
    }

    fn total_bytes(&self) -> usize {
        (0..self.chunks.len()).map(|chunk| self.chunk_bytes(chunk).next_multiple_of(ALIGNMENT)).sum()
    }

    /// Rows that an instruction works on, with the chunk that it is for.
    pub(crate) fn part_rows(&self, rows: Rows) -> usize {
        match rows {
            Rows::Own => self.block_rows(),
            Rows::Others(chunk) => (self.blocks - 1) * self.chunks[chunk].len(),
            Rows::Sent(chunk) => self.blocks * self.chunks[chunk].len(),
        }
    }
}

/// Instructions, and the exchanges among them that go on beside others.
#[derive(Debug)]
pub(crate) struct Overlapped {
    pub(crate) instructions: Vec<Instruction>,
    pub(crate) transits: Vec<Transit>,
    /// Memory for what is on its way.
    pub(crate) transit_bytes: usize,
}

/// Ranges of `rows` rows, as even as whole grains allow.
fn cut(rows: usize, chunks: usize) -> Vec<Range<usize>> {
    let chunks = chunks.min(rows).max(1);
    let grain = if rows >= GRAIN * chunks { GRAIN } else { 1 };
    let start = |chunk: usize| if chunk == chunks { rows } else { rows * chunk / chunks / grain * grain };
    (0..chunks).map(|chunk| start(chunk)..start(chunk + 1)).collect()
}

impl Planner<'_> {
    /// The instructions, with exchanges that go on beside products if the block was recorded for that. `slots` are the places of
    /// objects that live longer than these instructions.
    pub(crate) fn overlapped(
        &self,
        mut instructions: Vec<Instruction>,
        gradients: &[GradientBuffer],
        slots: &[Option<Slot>],
    ) -> Overlapped {
        if self.chunks < 2 {
            return Overlapped { instructions, transits: Vec::new(), transit_bytes: 0 };
        }
        self.bring_together(&mut instructions);
        let mut lowering = Lowering {
            planner: self,
            gradients,
            slots,
            list: &instructions,
            out: Vec::with_capacity(instructions.len()),
            transits: Vec::new(),
            on_the_way: Vec::new(),
        };
        lowering.run();
        let Lowering { out: instructions, mut transits, .. } = lowering;
        let transit_bytes = place(&instructions, &mut transits);
        Overlapped { instructions, transits, transit_bytes }
    }

    /// Everything an instruction of an overlapped list reads or writes in the memory of values and gradients.
    pub(crate) fn touches_of(&self, instruction: &Instruction, transits: &[Transit]) -> Vec<usize> {
        match instruction {
            Instruction::Start { transit } => {
                let Transit { own, all, .. } = transits[*transit];
                vec![self.index(own), self.index(all)]
            }
            Instruction::Part { product, transit, rows } => {
                let mut objects = self.touches(product);
                if matches!(rows, Rows::Sent(_)) {
                    let sent = self.index(transits[*transit].all);
                    objects.retain(|object| *object != sent);
                }
                objects
            }
            Instruction::Send { .. } => Vec::new(),
            Instruction::Await { transit, .. } => {
                let Transit { way, own, all, .. } = transits[*transit];
                vec![self.index(if way == Way::Gather { all } else { own })]
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

    /// Moves instructions that do not depend on each other, so that exchanges have something beside them.
    fn bring_together(&self, list: &mut [Instruction]) {
        for at in 0..list.len() {
            match self.exchange(&list[at]) {
                Some((Way::Gather, ..)) => self.gather_early(list, at),
                Some((_, _, all)) => self.sum_early(list, at, self.index(all)),
                None => {}
            }
        }
    }

    /// Moves the products of which the result is summed at `at` to just before it, and gradients of weights from between them
    /// behind it.
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

    /// Moves the gather at `at`, with what is computed again for it just before, in front of a gradient of weights.
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

    /// What an instruction exchanges: the way, what is this rank's own of it, and what is of all ranks.
    fn exchange(&self, instruction: &Instruction) -> Option<(Way, Object, Object)> {
        match instruction {
            Instruction::Forward(operation) => {
                let Operation::Exchange { exchange, x, y, .. } = self.operations[*operation] else {
                    return None;
                };
                let (x, y) = (Object::Value(x), Object::Value(y));
                match exchange {
                    Exchange::GatherTokens | Exchange::AllTokens => Some((Way::Gather, x, y)),
                    Exchange::SumTokens => Some((Way::SumRows, y, x)),
                    Exchange::Sum => Some((Way::Sum, y, x)),
                    Exchange::SumGradients | Exchange::OwnTokens => None,
                    Exchange::TokensToBlocks | Exchange::BlocksToTokens => None,
                }
            }
            Instruction::BackwardInputs { operation, dy: Some(dy), dx } => {
                let Operation::Exchange { exchange, .. } = self.operations[*operation] else { return None };
                let (dy, dx) = (Object::Gradient(*dy), Object::Gradient(dx[0].0));
                match exchange {
                    Exchange::SumTokens | Exchange::OwnTokens => Some((Way::Gather, dy, dx)),
                    Exchange::GatherTokens => Some((Way::SumRows, dx, dy)),
                    Exchange::SumGradients => Some((Way::Sum, dx, dy)),
                    Exchange::AllTokens | Exchange::Sum => None,
                    Exchange::TokensToBlocks | Exchange::BlocksToTokens => None,
                }
            }
            _ => None,
        }
    }

    /// The objects of which an instruction makes rows of one from the same rows of the other by a product: (from, to).
    fn product(&self, instruction: &Instruction) -> Option<[usize; 2]> {
        match instruction {
            Instruction::Forward(operation) => match self.operations[*operation] {
                Operation::Linear { x, y, .. } => Some([self.stored_as[x.0], y.0]),
                _ => None,
            },
            Instruction::BackwardInputs { operation, dy: Some(dy), dx } => {
                match self.operations[*operation] {
                    Operation::Linear { .. } => Some([self.object(*dy), self.object(dx[0].0)]),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    /// Whether it is worth waiting beside.
    fn is_long(&self, instruction: &Instruction) -> bool {
        match instruction {
            Instruction::Forward(operation)
            | Instruction::BackwardInputs { operation, .. }
            | Instruction::BackwardWeights { operation, .. } => matches!(
                self.operations[*operation],
                Operation::Linear { .. } | Operation::GroupedLinear { .. } | Operation::Attention(_)
            ),
            _ => false,
        }
    }

    /// Whether two instructions may not change places.
    fn depend(&self, a: &Instruction, b: &Instruction) -> bool {
        let meet = |a: &[usize], b: &[usize]| a.iter().any(|object| b.contains(object));
        let both_add = || {
            let (a, b) = (self.trained_by(a), self.trained_by(b));
            a.iter().any(|parameter| b.contains(parameter))
        };
        meet(&self.writes(a), &self.touches(b)) || meet(&self.writes(b), &self.touches(a)) || both_add()
    }

    /// Everything an instruction may write.
    fn writes(&self, instruction: &Instruction) -> Vec<usize> {
        match instruction {
            Instruction::Forward(operation) => {
                let operation = &self.operations[*operation];
                operation.outputs().iter().chain(&operation.scratch()).map(|value| value.0).collect()
            }
            Instruction::BackwardInputs { operation, dx, .. } => match self.operations[*operation] {
                Operation::Linear { .. }
                | Operation::Exchange { .. }
                | Operation::RmsNorm { .. }
                | Operation::LayerNorm { .. }
                | Operation::Rope { .. }
                | Operation::Gelu { .. }
                | Operation::SwiGlu { .. }
                | Operation::Dropout { .. } => dx.iter().map(|(dx, _)| self.object(*dx)).collect(),
                _ => self.touches(instruction),
            },
            Instruction::BackwardWeights { .. } => Vec::new(),
            Instruction::Copy { to, .. } | Instruction::Add { to, .. } => vec![self.object(*to)],
            Instruction::Start { .. }
            | Instruction::Part { .. }
            | Instruction::Send { .. }
            | Instruction::Await { .. } => unreachable!("instructions are moved before they are cut"),
        }
    }

    /// The parameters to whose gradients an instruction adds.
    fn trained_by(&self, instruction: &Instruction) -> Vec<usize> {
        match instruction {
            Instruction::BackwardInputs { operation, .. } if !self.operations[*operation].is_loss() => {
                Vec::new()
            }
            Instruction::BackwardInputs { operation, .. }
            | Instruction::BackwardWeights { operation, .. } => {
                self.operations[*operation].parameters().map(|parameter| parameter.0).collect()
            }
            _ => Vec::new(),
        }
    }
}

/// Cuts products and exchanges.
struct Lowering<'a> {
    planner: &'a Planner<'a>,
    gradients: &'a [GradientBuffer],
    slots: &'a [Option<Slot>],
    list: &'a [Instruction],
    out: Vec<Instruction>,
    transits: Vec<Transit>,
    /// Those that have not been waited for, in the order of their beginning.
    on_the_way: Vec<usize>,
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
        for transit in std::mem::take(&mut self.on_the_way) {
            self.wait(transit);
        }
    }

    /// A gather at `at`, with the products of what is gathered right behind it; how many instructions that are.
    fn gathered(&mut self, at: usize) -> Option<usize> {
        let (Way::Gather, own, all) = self.planner.exchange(&self.list[at])? else { return None };
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
            let transit = self.transit(at, (Way::Gather, own, all), 1);
            self.out.push(Instruction::Start { transit });
            self.on_the_way.push(transit);
            return Some(1);
        }
        let end = at + 1 + products;
        self.settle(at..end);
        let transit = self.transit(at, (Way::Gather, own, all), self.planner.chunks);
        self.out.push(Instruction::Start { transit });
        self.parts(at + 1..end, transit, Rows::Own);
        for chunk in 0..self.transits[transit].chunks.len() {
            self.out.push(Instruction::Await { transit, chunk });
            self.parts(at + 1..end, transit, Rows::Others(chunk));
        }
        Some(1 + products)
    }

    /// Products from `at` on, and a sum of their result right behind them; how many instructions that are.
    fn summed(&mut self, at: usize) -> Option<usize> {
        let result = |instruction: &Instruction| self.planner.product(instruction).map(|[_, result]| result);
        let summands = result(&self.list[at])?;
        let products =
            self.list[at..].iter().take_while(|instruction| result(instruction) == Some(summands)).count();
        let end = at + products;
        let (way, own, all) = self.planner.exchange(self.list.get(end)?)?;
        if way == Way::Gather || self.planner.index(all) != summands {
            return None;
        }
        // The summands are never in their place: nothing else may look for them there.
        let is_in_place = self.planner.index(own) == summands;
        let touched =
            |list: &[Instruction]| list.iter().any(|other| self.planner.touches(other).contains(&summands));
        let is_wanted = touched(&self.list[..at])
            || (!is_in_place && (self.slots[summands].is_some() || touched(&self.list[end + 1..])));
        if is_wanted {
            return None;
        }
        self.settle(at..end + 1);
        let transit = self.transit(end, (way, own, all), self.planner.chunks);
        for chunk in 0..self.transits[transit].chunks.len() {
            self.parts(at..end, transit, Rows::Sent(chunk));
            self.out.push(Instruction::Send { transit, chunk });
        }
        self.on_the_way.push(transit);
        Some(products + 1)
    }

    fn parts(&mut self, products: Range<usize>, transit: usize, rows: Rows) {
        let part =
            |product: &Instruction| Instruction::Part { product: Box::new(product.clone()), transit, rows };
        self.out.extend(self.list[products].iter().map(part));
    }

    fn transit(&mut self, at: usize, (way, own, all): (Way, Object, Object), chunks: usize) -> usize {
        let info = match all {
            Object::Value(value) => self.planner.values[value.0],
            Object::Gradient(gradient) => self.gradients[gradient.0].info,
        };
        let blocks = if way == Way::Sum { 1 } else { self.planner.ranks };
        let first_pending = self.transits.last().map_or(0, |last| last.first_pending + last.chunks.len());
        self.transits.push(Transit {
            way,
            exchange: self.list[at].clone(),
            own,
            all,
            info,
            chunks: cut(info.rows / blocks, chunks),
            blocks,
            first_byte: 0,
            first_pending,
        });
        self.transits.len() - 1
    }

    /// Waits for what is on its way that any of these instructions touches.
    fn settle(&mut self, instructions: Range<usize>) {
        let list = &self.list[instructions];
        let touched: Vec<usize> =
            list.iter().flat_map(|instruction| self.planner.touches(instruction)).collect();
        for transit in std::mem::take(&mut self.on_the_way) {
            let Transit { own, all, .. } = self.transits[transit];
            if [own, all].iter().any(|object| touched.contains(&self.planner.index(*object))) {
                self.wait(transit);
            } else {
                self.on_the_way.push(transit);
            }
        }
    }

    fn wait(&mut self, transit: usize) {
        let chunks = 0..self.transits[transit].chunks.len();
        self.out.extend(chunks.map(|chunk| Instruction::Await { transit, chunk }));
    }
}

/// Gives what is on its way its places; returns the bytes that takes.
fn place(instructions: &[Instruction], transits: &mut [Transit]) -> usize {
    let mut lifetimes: Vec<Lifetime> = transits
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
    transits.iter_mut().zip(offsets).for_each(|(transit, offset)| transit.first_byte = offset);
    bytes
}
