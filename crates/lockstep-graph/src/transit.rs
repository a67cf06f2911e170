//! Execution of collectives that overlap with matrix products: the steps that start a collective, compute a chunk, and
//! wait for a chunk.

use std::ops::Range;

use lockstep_comm::{Collective, CommError, LentBuffer, ReduceOp};
use lockstep_plan::DType;
use lockstep_tensor::{Buffer, View};

use crate::{
    buffers::CommunicationBuffer,
    instruction::{Instruction, Object, OverlappedCollective, Rows},
    placement::Transfer,
    program::Program,
    replay::Run,
};

impl<'a> Run<'a> {
    /// Runs one of the instructions of an overlapped collective.
    pub(crate) fn in_transit(&self, program: &Program, instruction: &Instruction) -> Result<(), CommError> {
        let of = |transit: &usize| &self.phase.collectives[*transit];
        match instruction {
            Instruction::Start { transit } => self.start_gather(of(transit)),
            Instruction::Part { product, transit, rows } => self.part(program, product, of(transit), *rows),
            Instruction::Send { transit, chunk } => self.send_sums(of(transit), *chunk),
            Instruction::Await { transit, chunk } => self.receive(of(transit), *chunk),
            _ => unreachable!("no such instruction is part of an exchange: {instruction:?}"),
        }
    }

    /// Copies this rank's rows to their place in the result, and starts the all-gather of all chunks.
    fn start_gather(&self, transit: &OverlappedCollective) -> Result<(), CommError> {
        let (queue, rank) = (self.replay.queue, self.peers().group.rank());
        let (own, all) = (self.object(transit.own), self.object(transit.all));
        queue.cast(own, all.rows(rank * transit.block_rows()..(rank + 1) * transit.block_rows()));
        for chunk in 0..transit.chunks.len() {
            {
                let memory = self.communication_buffer().memory.borrow();
                queue.cast(own.rows(transit.chunks[chunk].clone()), block(&memory, transit, chunk, rank));
            }
            self.start(transit, chunk, |data| Collective::AllGatherInPlace { data, counts: None })?;
        }
        Ok(())
    }

    /// Starts the reduction of a chunk, whose partial sums the products wrote to the communication buffer.
    fn send_sums(&self, transit: &OverlappedCollective, chunk: usize) -> Result<(), CommError> {
        let op = ReduceOp::Sum;
        self.start(transit, chunk, |data| match transit.transfer {
            Transfer::ReduceScatter => Collective::ReduceScatterInPlace { data, op, counts: None },
            _ => Collective::AllReduce { data, op },
        })
    }

    #[track_caller]
    fn start(
        &self,
        transit: &OverlappedCollective,
        chunk: usize,
        collective: impl FnOnce(LentBuffer) -> Collective<LentBuffer, LentBuffer>,
    ) -> Result<(), CommError> {
        let communication_buffer = self.communication_buffer();
        let loan = communication_buffer.memory.borrow_mut().lend(transit.bytes(chunk));
        let pending = self.peers().start(collective(LentBuffer::new(loan, transit.info.dtype)))?;
        communication_buffer.pending.borrow_mut()[transit.first_pending + chunk] = Some(pending);
        Ok(())
    }

    /// Waits for a chunk and copies its rows from the communication buffer to the result.
    fn receive(&self, transit: &OverlappedCollective, chunk: usize) -> Result<(), CommError> {
        let (queue, communication_buffer, rank) =
            (self.replay.queue, self.communication_buffer(), self.peers().group.rank());
        let pending = communication_buffer.pending.borrow_mut()[transit.first_pending + chunk].take();
        if let Some(pending) = pending {
            self.peers().wait(pending)?;
        }
        let memory = communication_buffer.memory.borrow();
        if transit.transfer != Transfer::AllGather {
            let own = if transit.transfer == Transfer::AllReduce { 0 } else { rank };
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

    /// Computes a range of rows of a product.
    fn part(
        &self,
        program: &Program,
        product: &Instruction,
        transit: &OverlappedCollective,
        rows: Rows,
    ) -> Result<(), CommError> {
        let multiply = |rows: Range<usize>, result: View<'_>| match product {
            Instruction::Forward(operation) => {
                program.operations[*operation].forward_rows(self, rows, result);
            }
            Instruction::BackwardInputs { operation, dy: Some(dy), dx } => {
                let (operation, dy) = (&program.operations[*operation], self.gradient(*dy));
                operation.backward_rows(self, dy, rows, result, dx[0].1);
            }
            _ => unreachable!("no product with rows of its own: {product:?}"),
        };
        let result = match product {
            Instruction::Forward(operation) => Object::Value(program.facts[*operation].output()),
            Instruction::BackwardInputs { dx, .. } => Object::Gradient(dx[0].0),
            _ => unreachable!("no product with rows of its own: {product:?}"),
        };
        let rank = self.peers().group.rank();
        let in_place = |rows: Range<usize>| multiply(rows.clone(), self.object(result).rows(rows));
        match rows {
            Rows::Own => in_place(rank * transit.block_rows()..(rank + 1) * transit.block_rows()),
            Rows::Others(chunk) => (0..transit.blocks)
                .filter(|other| *other != rank)
                .for_each(|other| in_place(transit.rows(other, chunk))),
            Rows::Sent(chunk) => {
                let memory = self.communication_buffer().memory.borrow();
                for index in 0..transit.blocks {
                    let target = block(&memory, transit, chunk, index);
                    multiply(transit.rows(index, chunk), target);
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

    fn communication_buffer(&self) -> &'a CommunicationBuffer {
        self.replay
            .communication_buffer
            .expect("a program that exchanges rows beside products is given memory for them")
    }
}

/// Returns block `index` of a chunk in the communication buffer.
fn block<'a>(memory: &'a Buffer, transit: &OverlappedCollective, chunk: usize, index: usize) -> View<'a> {
    let (rows, columns) = (transit.chunks[chunk].len(), transit.info.columns);
    let dtype: DType = transit.info.dtype;
    let start = transit.bytes(chunk).start + index * rows * columns * dtype.size_bytes();
    memory.view(dtype, start, [rows, columns])
}
