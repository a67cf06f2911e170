//! Small data of a large group. It goes up the tree in which the members agree, combined on the way, and the result comes down,
//! so that each member talks to lg P others. Sums follow the tree of all reductions: each member adds what its children send,
//! in their order, in the type in which numbers are added.

use half::{bf16, f16};

use super::{
    frame::Key,
    frame::Kind,
    members::Members,
    reduction::ChunkBuffer,
    send_queues::{SendQueues, UnsentBytes},
    stream::Room,
    tree::{children, parent, subtree},
};
use crate::{
    Malformed, NumberType, ReduceOp,
    blocks::Blocks,
    exchange::Exchange,
    memory::MemoryRange,
    reduce::reduce,
    shm::layout::SMALL_BYTES,
    task::{Flow, Receiver, Task},
};

/// Maximum size in bytes of data that is gathered or spread along the tree.
const SPREAD_BYTES: usize = 4 << 20;

/// Progress of a small operation of a large group.
#[derive(Debug)]
pub(crate) struct TreeMovement {
    content: Content,
    /// Data of this member's subtree, as far as it is combined.
    partial: Vec<u8>,
    children: Vec<Child>,
    /// Result, as it comes from the parent.
    result: ChunkBuffer,
    result_bytes: usize,
    phase: Phase,
}

#[derive(Debug)]
struct Child {
    member: usize,
    bytes: usize,
    buffer: ChunkBuffer,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Up,
    Down,
    Done,
}

/// Data that goes along the tree.
#[derive(Debug)]
enum Content {
    /// Partial results, in the type in which numbers are added.
    Reduction { op: ReduceOp, wide: NumberType, elements: usize },
    /// Blocks of the members, in bytes, in order.
    Blocks(Blocks),
    /// All data of one member.
    Root { root: usize, bytes: usize },
}

impl Content {
    /// Returns the data of a task; `None` if it is too large for the tree.
    fn of(task: &Task) -> Option<Self> {
        let content = match &task.flow {
            Flow::Reduction { op, .. } if task.source.bytes() <= SMALL_BYTES => {
                let wide = match task.source.number {
                    NumberType::Bf16 | NumberType::F16 => NumberType::F32,
                    number => number,
                };
                Self::Reduction { op: *op, wide, elements: task.source.elements }
            }
            Flow::Exchange(Exchange::AllGather(blocks) | Exchange::Gather { blocks, .. }) => {
                Self::Blocks(blocks.clone())
            }
            Flow::Exchange(Exchange::Broadcast { root, bytes }) => Self::Root { root: *root, bytes: *bytes },
            Flow::Exchange(Exchange::Scatter { root, blocks }) => {
                Self::Root { root: *root, bytes: blocks.total() }
            }
            _ => return None,
        };
        let bytes = match &content {
            Self::Reduction { .. } => 0,
            Self::Blocks(blocks) => blocks.total(),
            Self::Root { bytes, .. } => *bytes,
        };
        (bytes <= SPREAD_BYTES).then_some(content)
    }

    /// Returns the number of bytes that a member of a group of `members` sends to its parent.
    fn bytes_up(&self, member: usize, members: usize) -> usize {
        let subtree = subtree(member, members);
        match self {
            Self::Reduction { wide, elements, .. } => elements * wide.size_bytes(),
            Self::Blocks(blocks) => blocks.range(subtree.end - 1).end - blocks.range(subtree.start).start,
            Self::Root { root, bytes } => {
                if subtree.contains(root) {
                    *bytes
                } else {
                    0
                }
            }
        }
    }
}

impl TreeMovement {
    /// Plans the movement of a task's data; `None` if it is too large for the tree.
    pub(crate) fn new(task: &Task, members: &Members) -> Option<Self> {
        let content = Content::of(task)?;
        let child = |member| {
            let bytes = content.bytes_up(member, members.len());
            Child { member, bytes, buffer: ChunkBuffer::default() }
        };
        let children = children(members.own, members.len()).map(child).collect();
        // SAFETY: the source is the caller's for the duration of the operation.
        let source =
            unsafe { std::slice::from_raw_parts(task.source.pointer.cast_const(), task.source.bytes()) };
        let (partial, result_bytes) = match &content {
            Content::Reduction { .. } => (widened(task.source.number, source), task.source.bytes()),
            Content::Blocks(blocks) => (source.to_vec(), blocks.total()),
            Content::Root { root, bytes } if *root == members.own => (source.to_vec(), *bytes),
            Content::Root { bytes, .. } => (Vec::new(), *bytes),
        };
        let (result, phase) = (ChunkBuffer::default(), Phase::Up);
        Some(Self { content, partial, children, result, result_bytes, phase })
    }

    /// Advances the operation. Returns true if the result is here, and queued for the children.
    pub(crate) fn advance(
        &mut self,
        key: Key,
        task: &Task,
        members: &Members,
        queues: &mut SendQueues,
        unsent: &mut UnsentBytes,
    ) -> bool {
        const WHOLE: Kind = Kind::Direct { offset: 0 };
        if self.phase == Phase::Up && self.children.iter().all(|child| child.buffer.filled == child.bytes) {
            self.combine();
            match parent(members.own) {
                Some(parent) => {
                    let partial = bytes_of(&mut self.partial);
                    queues.send(members.ranks[parent], key, WHOLE, partial, unsent);
                }
                None => {
                    self.result.bytes = match &self.content {
                        Content::Reduction { .. } => narrowed(task.source.number, &self.partial),
                        Content::Blocks(_) | Content::Root { .. } => std::mem::take(&mut self.partial),
                    };
                    self.result.filled = self.result_bytes;
                }
            }
            self.phase = Phase::Down;
        }
        if self.phase == Phase::Down && self.result.filled == self.result_bytes {
            self.deliver(task, members);
            for child in &self.children {
                let result = bytes_of(&mut self.result.bytes);
                queues.send(members.ranks[child.member], key, WHOLE, result, unsent);
            }
            self.phase = Phase::Done;
        }
        self.phase == Phase::Done
    }

    /// Combines this member's data with that of its children, which has arrived.
    fn combine(&mut self) {
        for child in &mut self.children {
            match self.content {
                Content::Reduction { op, wide, elements } => {
                    let sources = [self.partial.as_ptr(), child.buffer.bytes.as_ptr()];
                    // SAFETY: both vectors hold that many elements, or there are none; the target is one of the sources.
                    unsafe { reduce(wide, op, &sources, &[self.partial.as_mut_ptr()], elements) };
                }
                Content::Blocks(_) | Content::Root { .. } => self.partial.extend(&child.buffer.bytes),
            }
            child.buffer.bytes = Vec::new();
        }
    }

    /// Copies this member's part of the result to its target.
    fn deliver(&self, task: &Task, members: &Members) {
        let (all, size) = (0..self.result_bytes, task.source.number.size_bytes());
        let part = match &task.flow {
            Flow::Reduction { receiver: Receiver::Owner, blocks, .. } => {
                blocks.scaled(size).range(members.own)
            }
            Flow::Exchange(Exchange::Scatter { blocks, .. }) => blocks.range(members.own),
            Flow::Reduction { receiver: Receiver::One(root), .. }
            | Flow::Exchange(Exchange::Gather { root, .. })
                if *root != members.own =>
            {
                0..0
            }
            _ => all,
        };
        let from = &self.result.bytes[part];
        debug_assert!(from.len() <= task.target.bytes());
        // SAFETY: the target is the caller's, and has room for its part of the result.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), task.target.pointer, from.len()) };
    }

    /// Returns the destination of bytes from a child or from the parent.
    pub(crate) fn room(
        &mut self,
        members: &Members,
        member: usize,
        offset: u64,
        bytes: usize,
    ) -> Result<Room, Malformed> {
        let offset = usize::try_from(offset).map_err(|_| Malformed::Range)?;
        if parent(members.own) == Some(member) {
            return self.result.room(self.result_bytes, offset, bytes);
        }
        let child = self.child(member).ok_or(Malformed::Operation)?;
        child.buffer.room(child.bytes, offset, bytes)
    }

    /// Notes that bytes from a child or from the parent have arrived.
    pub(crate) fn take(&mut self, members: &Members, member: usize, bytes: usize) {
        if parent(members.own) == Some(member) {
            self.result.filled += bytes;
        } else if let Some(child) = self.child(member) {
            child.buffer.filled += bytes;
        }
    }

    /// Returns the member whose data is missing.
    pub(crate) fn waits_for(&self, members: &Members) -> Option<usize> {
        let is_short = |child: &&Child| child.buffer.filled < child.bytes;
        match self.phase {
            Phase::Up => self.children.iter().find(is_short).map(|child| child.member),
            Phase::Down => parent(members.own),
            Phase::Done => None,
        }
    }

    fn child(&mut self, member: usize) -> Option<&mut Child> {
        self.children.iter_mut().find(|child| child.member == member)
    }
}

fn bytes_of(bytes: &mut [u8]) -> MemoryRange {
    MemoryRange { pointer: bytes.as_mut_ptr(), number: NumberType::U8, elements: bytes.len() }
}

/// Returns numbers in the type in which they are added.
fn widened(number: NumberType, bytes: &[u8]) -> Vec<u8> {
    let (halves, _) = bytes.as_chunks::<2>();
    match number {
        NumberType::Bf16 => {
            halves.iter().flat_map(|half| bf16::from_ne_bytes(*half).to_f32().to_ne_bytes()).collect()
        }
        NumberType::F16 => {
            halves.iter().flat_map(|half| f16::from_ne_bytes(*half).to_f32().to_ne_bytes()).collect()
        }
        _ => bytes.to_vec(),
    }
}

/// Returns numbers in their own type, rounded once.
fn narrowed(number: NumberType, bytes: &[u8]) -> Vec<u8> {
    let (floats, _) = bytes.as_chunks::<4>();
    let floats = floats.iter().map(|float| f32::from_ne_bytes(*float));
    match number {
        NumberType::Bf16 => floats.flat_map(|float| bf16::from_f32(float).to_ne_bytes()).collect(),
        NumberType::F16 => floats.flat_map(|float| f16::from_f32(float).to_ne_bytes()).collect(),
        _ => bytes.to_vec(),
    }
}
