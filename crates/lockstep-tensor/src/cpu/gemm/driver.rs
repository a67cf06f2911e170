//! The loops around a micro-kernel. For each block of depth and chunk of columns, all threads pack B once. Then
//! tasks, each a tile of C, pack their rows of A and multiply the panels.
//!
//! Products that are made together share these steps, so that many small ones keep all threads busy. Their chunks are
//! collected into a batch, limited by the room for packed columns of B, and a batch is packed and multiplied at once.
//!
//! Every element of C is computed by one task, in an order that depends only on the shape of its product.

use std::{
    hint,
    marker::PhantomData,
    ops::Range,
    slice,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use super::{
    blocks::{Blocks, Grain},
    kernel::{ColumnPanels, Columns, MicroKernel, Place},
    lanes::Dot,
    pack::{Factors, Packing},
    problem::Problem,
    rows,
    scratch::{PARTIAL_COLUMNS, Scratch},
    store::{Finish, Target, Tile, Window, scatter, store, store_rows},
    task_rows::{Lookahead, TaskRows, panel},
    thin::{self, Panel, ThinKernel, ThinRows, ThinScratch},
};
use crate::{
    CpuLevel, CpuQueue, Element, Summation, Write,
    cpu::{
        pool::Pool,
        shares::{STAGES, Task},
        simd::{CACHE_LINE_BYTES, Float, inlined, prefetch},
    },
};

/// Products with fewer multiplications run on the calling thread: waking others costs more.
const SERIAL_MULTIPLICATIONS: usize = 1 << 16;
/// Largest number of panels of B that a thread packs at a time.
const PACKED_PANELS: usize = 4;
/// Number of parts in which B is packed, if there are that many panels.
const PACKING_PARTS: usize = 4;
/// Number of times that a tile fetches rows of the next task: before its products, after them and after its stores. A core has room for
/// a dozen fetches, and waits with one more.
const FETCHES_PER_TILE: usize = 3;
/// Largest number of chunks of a batch, which are on the stack.
const MOST_CHUNKS: usize = 64;

/// The threads that run a product.
#[derive(Clone, Copy)]
enum Threads<'a> {
    Caller,
    Pool(&'a Pool),
}

impl Threads<'_> {
    fn run(self, tasks: [usize; STAGES], run: &(dyn Fn(Task) + Sync)) {
        match self {
            Self::Caller => (0..tasks.iter().sum()).for_each(|index| run(Task { index, next: None })),
            Self::Pool(pool) => pool.run_stages(tasks, run),
        }
    }
}

/// Computes `problems` with the micro-kernel `K` on operands packed as `U`; problems with few rows use vectors `V`.
pub(super) fn multiply<'a, K: ThinKernel, U: Packing, V: Dot<U::Source>, C: Float>(
    queue: &CpuQueue,
    problems: impl IntoIterator<Item = Problem<'a, U::Source, C>>,
) where
    U::Source: 'a,
{
    // Locked for all products: callers on other threads take turns.
    let (mut columns, mut partial) = (queue.scratch.columns(), queue.scratch.partial());
    let mut batch = Batch::<K, U, V, C> {
        context: TaskContext {
            level: queue.level,
            scratch: &queue.scratch,
            partial: Window::new(partial.elements_mut::<f32>().as_mut_ptr(), PARTIAL_COLUMNS),
        },
        summation: queue.summation,
        pool: &queue.pool,
        columns: columns.elements_mut(),
        chunks: [const { None }; MOST_CHUNKS],
        len: 0,
        end: Start::default(),
        multiplications: 0,
        kernel: PhantomData,
    };
    problems.into_iter().for_each(|problem| batch.add(problem));
    batch.run();
}

fn grain<K: MicroKernel, U: Packing, C: Float>(problem: &Problem<'_, U::Source, C>, threads: usize) -> Grain {
    let packs_rows = !TaskRows::can_be_lines::<K, U>(&problem.a, problem.k);
    Grain {
        rows: K::ROWS,
        columns: K::COLUMNS,
        task_rows: if packs_rows { 2 * K::TASK_ROWS } else { K::TASK_ROWS },
        packs_rows,
        depth: K::DEPTH,
        planes: U::PLANES,
        block_depth: problem.a.block_depth().map(|depth| depth.div_ceil(U::ELEMENTS)),
        threads,
        keeps_partial_sums: keeps_partial_sums(problem),
    }
}

/// Returns true if sums over blocks of depth need a buffer of their own.
fn keeps_partial_sums<T, C: Float>(problem: &Problem<'_, T, C>) -> bool {
    C::DTYPE != f32::DTYPE || matches!(problem.c, Target::Filters(..))
}

/// The environment that all tasks share.
#[derive(Clone, Copy)]
struct TaskContext<'a> {
    level: CpuLevel,
    scratch: &'a Scratch,
    partial: Window<f32>,
}

/// Chunks that are packed and multiplied together.
struct Batch<'a, 's, K, U: Packing, V, C> {
    context: TaskContext<'s>,
    summation: Summation,
    pool: &'s Pool,
    /// Buffer for the packed panels of B.
    columns: &'s mut [u32],
    chunks: [Option<Chunk<'a, U::Source, C>>; MOST_CHUNKS],
    len: usize,
    /// Start of the next chunk.
    end: Start,
    multiplications: usize,
    kernel: PhantomData<fn(K, V)>,
}

/// Start of a chunk in its batch.
#[derive(Debug, Clone, Copy, Default)]
struct Start {
    /// Index among the units of packed panels.
    unit: usize,
    /// Index among the packing parts.
    part: usize,
    /// Index among the tasks.
    task: usize,
}

/// Algorithm of a chunk.
#[derive(Clone, Copy)]
enum Method {
    /// Panels of B are packed for all tasks.
    Packed(Blocks),
    /// Tasks pack and multiply parts of panels: a whole product of few rows, with the bits of the packed one.
    Thin(Blocks),
    /// Dot products of lines: a whole product of few rows.
    Dots,
}

/// A chunk of rows and columns of a product at a block of depth.
struct Chunk<'a, T, C> {
    problem: Problem<'a, T, C>,
    method: Method,
    rows: Range<usize>,
    columns: Range<usize>,
    depth: Range<usize>,
    /// Units of depth of the packed panels.
    units: usize,
    /// Units of all panels.
    packed_units: usize,
    start: Start,
}

impl<'a, K: ThinKernel, U: Packing, V: Dot<U::Source>, C: Float> Batch<'a, '_, K, U, V, C> {
    /// Adds the chunks of a product. If there is no more room, computes the earlier chunks first.
    fn add(&mut self, problem: Problem<'a, U::Source, C>) {
        let Problem { m, n, k, .. } = problem;
        if m == 0 || n == 0 {
            return;
        }
        let whole = Chunk {
            problem,
            method: Method::Dots,
            rows: 0..m,
            columns: 0..n,
            depth: 0..k,
            units: 0,
            packed_units: 0,
            start: Start::default(),
        };
        if rows::fits(&problem, self.summation) {
            return self.push(whole, 0, rows::tasks(&problem));
        }
        let grain = grain::<K, U, C>(&problem, self.pool.threads());
        let blocks = Blocks::new(m, n, k.div_ceil(U::ELEMENTS), grain);
        if thin::fits::<K, U, C>(&problem, self.summation) {
            return self.push(Chunk { method: Method::Thin(blocks), ..whole }, 0, thin::tasks(&problem));
        }
        let block_depth = blocks.depth * U::ELEMENTS;
        for rows in parts(0..m, blocks.chunk_rows) {
            for columns in parts(0..n, blocks.chunk_columns) {
                // At least once: an empty depth still sets C to the bias or to zero.
                for start in (0..k.max(1)).step_by(block_depth) {
                    let depth = start..(start + block_depth).min(k);
                    let units = depth.len().div_ceil(U::ELEMENTS).next_multiple_of(K::DEPTH);
                    let panels = columns.len().div_ceil(K::COLUMNS);
                    let packed_units = panels * U::panel_units::<ColumnPanels<K>>(units);
                    // The buffer of partial sums holds one chunk, and a block of depth adds to the sums of the
                    // previous one.
                    let is_alone = depth.len() < k;
                    if is_alone || self.end.unit + packed_units > self.columns.len() {
                        self.run();
                    }
                    let packing_parts = panels.div_ceil(panels_at_a_time(panels));
                    let tasks = blocks.tasks(rows.len(), columns.len()).count();
                    let (rows, columns, method) = (rows.clone(), columns.clone(), Method::Packed(blocks));
                    let chunk = Chunk { method, rows, columns, depth, units, packed_units, ..whole };
                    self.push(chunk, packing_parts, tasks);
                    if is_alone {
                        self.run();
                    }
                }
            }
        }
    }

    fn push(&mut self, chunk: Chunk<'a, U::Source, C>, packing_parts: usize, tasks: usize) {
        if self.len == MOST_CHUNKS {
            self.run();
        }
        let Problem { m, n, k, .. } = chunk.problem;
        self.multiplications = self.multiplications.saturating_add(m.saturating_mul(n).saturating_mul(k));
        let (start, packed_units) = (self.end, chunk.packed_units);
        self.chunks[self.len] = Some(Chunk { start, ..chunk });
        self.len += 1;
        self.end = Start {
            unit: start.unit + packed_units,
            part: start.part + packing_parts,
            task: start.task + tasks,
        };
    }

    /// Computes the chunks added so far.
    fn run(&mut self) {
        let threads = match self.multiplications {
            ..=SERIAL_MULTIPLICATIONS => Threads::Caller,
            _ => Threads::Pool(self.pool),
        };
        let (chunks, context, end) = (&self.chunks[..self.len], self.context, self.end);
        let at = |index: usize, start: fn(&Start) -> usize| {
            let later = chunks
                .partition_point(|chunk| chunk.as_ref().is_some_and(|chunk| start(&chunk.start) <= index));
            let chunk = chunks[later - 1].as_ref().expect("all chunks up to `len` are there");
            (chunk, index - start(&chunk.start))
        };
        let panels = Window::new(self.columns.as_mut_ptr(), end.unit);
        let parts_left = AtomicUsize::new(end.part);
        let small = chunks.last().and_then(Option::as_ref).map_or(0, Chunk::small_tasks);
        // Packing first, and no barrier after it: a thread that finds no part left to pack waits for the others' last ones.
        // Small tasks last, so that threads end together.
        threads.run([end.part, end.task - small, small], &|Task { index, next }| {
            let Some(task) = index.checked_sub(end.part) else {
                let _done = Countdown(&parts_left);
                let (chunk, part) = at(index, |start| start.part);
                // SAFETY: the parts of the packed columns do not overlap, and each belongs to one task.
                return unsafe { chunk.pack::<K, U>(part, panels) };
            };
            wait_for_zero(&parts_left);
            let (chunk, task) = at(task, |start| start.task);
            match chunk.method {
                // SAFETY: the queue's level has the vector's instructions.
                Method::Dots => unsafe { rows::task::<V, _, _>(&chunk.problem, task) },
                Method::Thin(blocks) => chunk.thin_task::<K, U>(context, blocks, task),
                Method::Packed(blocks) => {
                    // SAFETY: all parts are packed, and nothing writes them from now on: all tasks only read.
                    let packed = unsafe { slice::from_raw_parts(panels.pointer().cast_const(), end.unit) };
                    let next = next.and_then(|next| next.checked_sub(end.part + chunk.start.task));
                    // SAFETY: the queue's level has the kernel's instructions.
                    unsafe { K::prepared(|| chunk.task::<K, U>(context, blocks, (task, next), packed)) };
                }
            }
        });
        (self.len, self.end, self.multiplications) = (0, Start::default(), 0);
    }
}

/// Counts down by one when it is dropped, after a panic as well.
struct Countdown<'a>(&'a AtomicUsize);

impl Drop for Countdown<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// Waits until a count is zero. Those who count down are at work.
fn wait_for_zero(count: &AtomicUsize) {
    /// Looks before other threads get the core, of which there may be too few.
    const LOOKS: usize = 1000;
    for look in 0.. {
        if count.load(Ordering::Acquire) == 0 {
            return;
        }
        if look < LOOKS { hint::spin_loop() } else { thread::yield_now() }
    }
}

/// Returns the number of panels of B that a thread packs at a time.
fn panels_at_a_time(panels: usize) -> usize {
    (panels / PACKING_PARTS).clamp(1, PACKED_PANELS)
}

impl<T: Float, C: Float> Chunk<'_, T, C> {
    /// Number of small tasks, the last ones.
    fn small_tasks(&self) -> usize {
        let Method::Packed(blocks) = self.method else { return 0 };
        blocks.tasks(self.rows.len(), self.columns.len()).small_count()
    }

    /// Packs part `part` of the columns of B.
    ///
    /// # Safety
    /// `panels` must be the batch's panels, and nothing else may use this part of them.
    unsafe fn pack<K: MicroKernel, U: Packing<Source = T>>(&self, part: usize, panels: Window<u32>) {
        let panels_of_part = panels_at_a_time(self.columns.len().div_ceil(K::COLUMNS));
        let part_units = panels_of_part * U::panel_units::<ColumnPanels<K>>(self.units);
        let first = part * part_units;
        let len = part_units.min(self.packed_units - first);
        // SAFETY: the caller's promise.
        let packed = unsafe { panels.at(0, self.start.unit + first).row(0, len) };
        let columns = self.columns.start + part * panels_of_part * K::COLUMNS..self.columns.end;
        let (b, depth) = (&self.problem.b, self.depth.clone());
        // SAFETY: the queue's level has the kernel's instructions.
        unsafe { U::pack::<K::Vector, ColumnPanels<K>>(b, columns, depth, self.units, packed) };
    }

    /// Computes part `index` of C, and fetches the rows of part `next`, unless that is of another chunk. The thread must be
    /// prepared for the kernel.
    fn task<K: MicroKernel, U: Packing<Source = T>>(
        &self,
        context: TaskContext<'_>,
        blocks: Blocks,
        (index, next): (usize, Option<usize>),
        packed_columns: &[u32],
    ) {
        let tasks = blocks.tasks(self.rows.len(), self.columns.len());
        let [rows, columns] = tasks.ranges(index, &self.rows, &self.columns);

        let units = self.units;
        let packed_columns = &packed_columns[self.start.unit..][..self.packed_units];
        let mut scratch = context.scratch.rows();
        let Problem { a, b, .. } = &self.problem;
        let packed_rows = TaskRows::new::<K, U>(a, rows.clone(), self.depth.clone(), units, &mut scratch);

        let column_panel_units = U::panel_units::<ColumnPanels<K>>(units);
        let [later_rows, later_columns] = match next.filter(|next| *next < tasks.count()) {
            Some(next) => tasks.ranges(next, &self.rows, &self.columns),
            None => [0..0, columns.clone()],
        };
        let tiles = columns.len().div_ceil(K::COLUMNS) * rows.len().div_ceil(K::ROWS);
        let mut lookahead = Lookahead::new(a, later_rows, self.depth.clone(), FETCHES_PER_TILE * tiles);

        let mut tile = Tile::zeros();
        for column in columns.clone().step_by(K::COLUMNS) {
            let panel_of = |column: usize| {
                panel(packed_columns, (column - self.columns.start) / K::COLUMNS, column_panel_units)
            };
            let packed_b = panel_of(column);
            let later = column + K::COLUMNS;
            let later_b = panel_of(if later < columns.end { later } else { later_columns.start });
            for (index, row) in rows.clone().step_by(K::ROWS).enumerate() {
                let (row_end, column_end) =
                    (rows.end.min(row + K::ROWS), columns.end.min(column + K::COLUMNS));
                let factors = || {
                    let (rows, columns, depth) = (row..row_end, column..column_end, self.depth.clone());
                    Factors { a, b, rows, columns, depth }
                };
                let size = (row_end - row, column_end - column);
                let place = self.place::<K, U>((row, column), size);
                lookahead.step();
                if place.is_none() && self.problem.write == Write::Accumulate {
                    self.fetch((row, column), size);
                }
                if U::is_exceptional(packed_b) {
                    U::exceptional_tile(&factors(), &mut tile, K::COLUMNS);
                } else {
                    let later = later_b.as_ptr().wrapping_add(index * units * K::FETCHED_UNITS);
                    let b = Columns { units: packed_b.as_ptr(), later };
                    // SAFETY: the level has the kernel's instructions, the thread is prepared, and the panel of B
                    // holds `units`. Only this task uses this tile of C.
                    let is_exceptional =
                        unsafe { packed_rows.multiply::<K, U>(index, units, b, place, &mut tile) };
                    if is_exceptional {
                        U::exceptional_rows(&factors(), &mut tile, K::COLUMNS);
                    }
                }
                lookahead.step();
                if place.is_none() {
                    self.store::<K, U>(context, (&mut tile, K::COLUMNS), (row, column), size);
                }
                lookahead.step();
            }
        }
    }

    /// Computes task `index` of a product of few rows, panel by panel.
    fn thin_task<K: ThinKernel, U: Packing<Source = T>>(
        &self,
        context: TaskContext<'_>,
        blocks: Blocks,
        index: usize,
    ) {
        let Problem { m, k, ref a, ref b, .. } = self.problem;
        let mut buffer = context.scratch.rows();
        let mut scratch = ThinScratch::new(buffer.elements_mut());
        let width = thin::width::<K::Vector>(m);
        let context = TaskContext { partial: Window::new(scratch.partial.as_mut_ptr(), width), ..context };
        let rows = ThinRows::new::<K, U>(a, m, &mut scratch);
        let mut tile = Tile::zeros();
        let block_depth = blocks.depth * U::ELEMENTS;
        let mut multiply = |columns: Range<usize>| {
            // At least once: an empty depth still sets C to the bias or to zero.
            for start in (0..k.max(1)).step_by(block_depth) {
                let depth = start..k.min(start + block_depth);
                let panel = Panel { b, columns: columns.clone(), depth: depth.clone() };
                // SAFETY: the queue's level has the kernel's instructions, and the thread is prepared below.
                unsafe { K::panel::<U>(&panel, &rows, &mut scratch, &mut tile) };
                let part = Chunk { rows: 0..m, columns: columns.clone(), depth, ..*self };
                part.store::<K, U>(context, (&mut tile, width), (0, columns.start), (m, columns.len()));
            }
        };
        // SAFETY: the queue's level has the kernel's instructions.
        unsafe {
            K::prepared_for_rows(m, || {
                thin::panels(&self.problem, index, width).for_each(&mut multiply);
            });
        }
    }

    /// Returns the place of a tile of C, if the kernel can write it there: a whole tile of an f32 matrix.
    fn place<K: MicroKernel, U: Packing<Source = T>>(
        &self,
        (row, column): (usize, usize),
        size: (usize, usize),
    ) -> Option<Place> {
        let Problem { k, c, bias, write, .. } = self.problem;
        let (first, last) = (self.depth.start == 0, self.depth.end == k);
        let bias = bias.filter(|_| last);
        let Target::Matrix(window) = c else { return None };
        let is_f32 = C::DTYPE == f32::DTYPE && (bias.is_none() || T::DTYPE == f32::DTYPE);
        let is_segmented = self.problem.a.long_patches().is_some();
        if !K::IS_IN_PLACE || U::MARK_UNITS > 0 || !is_f32 || is_segmented || size != (K::ROWS, K::COLUMNS) {
            return None;
        }
        // SAFETY: the tile lies in C.
        let window = unsafe { window.at(row, column) };
        let bias = bias.map(|bias| bias[column..].as_ptr().cast());
        let write = if first { write } else { Write::Accumulate };
        Some(Place { first: window.pointer().cast(), stride: window.row_stride(), bias, write })
    }

    /// Fetches a tile of a matrix into the cache: it is read when its sums are complete.
    fn fetch(&self, (row, column): (usize, usize), (rows, columns): (usize, usize)) {
        let Target::Matrix(window) = self.problem.c else { return };
        for row in row..row + rows {
            // SAFETY: the tile lies in C.
            let first = unsafe { window.at(row, column) }.pointer().cast_const();
            for column in (0..columns).step_by(CACHE_LINE_BYTES / size_of::<C>()) {
                prefetch(first.wrapping_add(column));
            }
        }
    }

    /// Adds a tile, whose rows are `width` apart, to the sums of earlier blocks of depth, and finishes it if this block is the
    /// last.
    fn store<K: MicroKernel, U: Packing<Source = T>>(
        &self,
        context: TaskContext<'_>,
        (tile, width): (&mut Tile, usize),
        (row, column): (usize, usize),
        size: (usize, usize),
    ) {
        let Problem { k, c, bias, write, .. } = self.problem;
        let (first, last) = (self.depth.start == 0, self.depth.end == k);
        let bias = bias.filter(|_| last).map(|bias| &bias[column..]);
        let earlier = if first { Write::Overwrite } else { Write::Accumulate };
        let level = context.level;
        // SAFETY: the tile lies in the chunk and the chunk in C; the partial sums hold a chunk. Only this task
        // accesses this tile.
        unsafe {
            let has_partial = keeps_partial_sums(&self.problem) && !(first && last);
            let place = (row - self.rows.start, column - self.columns.start);
            let partial = has_partial.then(|| context.partial.at(place.0, place.1));
            if let Some(partial) = partial.filter(|_| !last) {
                let finish = Finish { partial: None, bias, write: earlier };
                return store(level, size, tile, width, &finish, partial);
            }
            let finish = Finish { partial, bias, write: if first || has_partial { write } else { earlier } };
            match c {
                Target::Filters(window, filters) => {
                    let window = window.at(0, column * filters.lane_stride);
                    let row = inlined!(|i| window.at(0, filters.at(row + i).0));
                    scatter(size, tile, width, &finish, row, filters.lane_stride);
                }
                Target::Matrix(window) => store(level, size, tile, width, &finish, window.at(row, column)),
                Target::Grid(..) => {
                    let target = |i| c.row(row + i, column, size.1);
                    store_rows(level, size, tile.elements_mut(), width, &finish, &target);
                }
            }
        }
    }
}

/// Splits a range into parts of `len`; the last may be shorter.
fn parts(whole: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    let end = whole.end;
    whole.step_by(len).map(move |start| start..(start + len).min(end))
}
