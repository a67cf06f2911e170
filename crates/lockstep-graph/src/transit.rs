//! Exchanges that go on beside products, as they are replayed: memory for what is on its way, and what is done at its beginning, for
//! each chunk, and at its end.

use std::cell::RefCell;

use lockstep_comm::{Collective, CommError, Lent, Pending, ReduceOp};
use lockstep_plan::{DType, MemoryCategory};
use lockstep_tensor::{Arena, Buffer, TensorError, View};

use crate::{
    Program,
    overlap::{Object, Rows, Transit, Way},
    program::Instruction,
    replay::Run,
};

/// Memory for rows that are on their way between ranks while these multiply others.
#[derive(Debug)]
pub struct Transits {
    memory: RefCell<Buffer>,
    pending: RefCell<Vec<Option<Pending>>>,
}

impl Transits {
    /// Memory for any of `programs`, if any exchanges rows beside its products.
    ///
    /// # Errors
    /// [`TensorError::OutOfMemory`].
    pub fn new<'a>(
        programs: impl Iterator<Item = &'a Program>,
        arena: &Arena,
    ) -> Result<Option<Self>, TensorError> {
        let (bytes, chunks) = programs.fold((0, 0), |(bytes, chunks), program| {
            (bytes.max(program.transit_bytes()), chunks.max(program.transit_chunks()))
        });
        if chunks == 0 {
            return Ok(None);
        }
        let memory = RefCell::new(arena.allocate(bytes, MemoryCategory::Communication)?);
        Ok(Some(Self { memory, pending: RefCell::new((0..chunks).map(|_| None).collect()) }))
    }
}

impl<'a> Run<'a> {
    /// Carries out one of the instructions that exchanges beside products are made of.
    pub(crate) fn in_transit(&self, instruction: &Instruction) -> Result<(), CommError> {
        let of = |transit: &usize| &self.phase.transits[*transit];
        match instruction {
            Instruction::Start { transit } => self.start_gather(of(transit)),
            Instruction::Part { product, transit, rows } => self.part(product, of(transit), *rows),
            Instruction::Send { transit, chunk } => self.send_sums(of(transit), *chunk),
            Instruction::Await { transit, chunk } => self.receive(of(transit), *chunk),
            _ => unreachable!("no such instruction is part of an exchange: {instruction:?}"),
        }
    }

    /// Puts the own rows where those of all belong, and sends them.
    fn start_gather(&self, transit: &Transit) -> Result<(), CommError> {
        let (queue, rank) = (self.replay.queue, self.peers().group.rank());
        let (own, all) = (self.object(transit.own), self.object(transit.all));
        queue.cast(own, all.rows(rank * transit.block_rows()..(rank + 1) * transit.block_rows()));
        for chunk in 0..transit.chunks.len() {
            {
                let memory = self.transits().memory.borrow();
                queue.cast(own.rows(transit.chunks[chunk].clone()), block(&memory, transit, chunk, rank));
            }
            self.start(transit, chunk, |data| Collective::AllGatherInPlace { data, counts: None })?;
        }
        Ok(())
    }

    /// Sends the summands of a chunk, which are where they are sent from.
    fn send_sums(&self, transit: &Transit, chunk: usize) -> Result<(), CommError> {
        let op = ReduceOp::Sum;
        self.start(transit, chunk, |data| match transit.way {
            Way::SumRows => Collective::ReduceScatterInPlace { data, op, counts: None },
            _ => Collective::AllReduce { data, op },
        })
    }

    #[track_caller]
    fn start(
        &self,
        transit: &Transit,
        chunk: usize,
        collective: impl FnOnce(Lent) -> Collective<Lent, Lent>,
    ) -> Result<(), CommError> {
        let transits = self.transits();
        let loan = transits.memory.borrow_mut().lend(transit.bytes(chunk));
        let pending = self.peers().start(collective(Lent::new(loan, transit.info.dtype)))?;
        transits.pending.borrow_mut()[transit.first_pending + chunk] = Some(pending);
        Ok(())
    }

    /// Waits for a chunk, and puts its rows where they belong.
    fn receive(&self, transit: &Transit, chunk: usize) -> Result<(), CommError> {
        let (queue, transits, rank) = (self.replay.queue, self.transits(), self.peers().group.rank());
        let pending = transits.pending.borrow_mut()[transit.first_pending + chunk].take();
        if let Some(pending) = pending {
            self.peers().wait(pending)?;
        }
        let memory = transits.memory.borrow();
        if transit.way != Way::Gather {
            let own = if transit.way == Way::Sum { 0 } else { rank };
            let rows = self.object(transit.own).rows(transit.chunks[chunk].clone());
            queue.cast(block(&memory, transit, chunk, own), rows);
            return Ok(());
        }
        let all = self.object(transit.all);
        for other in (0..transit.blocks).filter(|other| *other != rank) {
            let rows = all.rows(transit.rows(other, chunk));
            queue.cast(block(&memory, transit, chunk, other), rows);
        }
        Ok(())
    }

    /// Computes some rows of a product.
    fn part(&self, product: &Instruction, transit: &Transit, rows: Rows) -> Result<(), CommError> {
        let (product, result) = match product {
            Instruction::Forward(operation) => {
                let operation = &self.program.operations[*operation];
                (self.output_product(operation), Object::Value(operation.output()))
            }
            Instruction::BackwardInputs { operation, dy: Some(dy), dx } => {
                let operation = &self.program.operations[*operation];
                let (dx, write) = dx[0];
                (self.input_product(operation, self.gradient(*dy), write), Object::Gradient(dx))
            }
            _ => unreachable!("no product with rows of its own: {product:?}"),
        };
        let rank = self.peers().group.rank();
        let in_place = |rows: std::ops::Range<usize>| {
            self.multiply_rows(&product, rows.clone(), self.object(result).rows(rows));
        };
        match rows {
            Rows::Own => in_place(rank * transit.block_rows()..(rank + 1) * transit.block_rows()),
            Rows::Others(chunk) => (0..transit.blocks)
                .filter(|other| *other != rank)
                .for_each(|other| in_place(transit.rows(other, chunk))),
            Rows::Sent(chunk) => {
                let memory = self.transits().memory.borrow();
                for index in 0..transit.blocks {
                    let target = block(&memory, transit, chunk, index);
                    self.multiply_rows(&product, transit.rows(index, chunk), target);
                }
            }
        }
        if self.peers().group.is_in_background() { Ok(()) } else { self.peers().progress() }
    }

    fn object(&self, object: Object) -> View<'a> {
        match object {
            Object::Value(value) => self.value(value),
            Object::Gradient(gradient) => self.gradient(gradient),
        }
    }

    fn transits(&self) -> &'a Transits {
        self.replay.transits.expect("a program that exchanges rows beside products is given memory for them")
    }
}

/// A block of a chunk, where it is kept on its way.
fn block<'a>(memory: &'a Buffer, transit: &Transit, chunk: usize, index: usize) -> View<'a> {
    let (rows, columns) = (transit.chunks[chunk].len(), transit.info.columns);
    let dtype: DType = transit.info.dtype;
    let start = transit.bytes(chunk).start + index * rows * columns * dtype.size_bytes();
    memory.view(dtype, start, [rows, columns])
}
