//! MPI for a single thread: the functions of `shim.c`, with MPI's error codes as errors.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::io;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};

use lockstep_comm::transport::{MemoryRange, reduce};
use lockstep_comm::{CommError, JoinProblem, NumberType, ReduceOp};

type UserFunction = unsafe extern "C" fn(*const c_void, *mut c_void, *const c_int, *const c_void);

unsafe extern "C" {
    fn lockstep_mpi_start(
        threads: *mut c_int,
        rank: *mut c_int,
        size: *mut c_int,
        local: *mut c_int,
        world: *mut Comm,
    ) -> c_int;
    fn lockstep_mpi_operation(number: c_int, op: c_int, function: UserFunction) -> c_int;
    fn lockstep_mpi_group(
        world: Comm,
        count: c_int,
        ranks: *const c_int,
        tag: c_int,
        comm: *mut Comm,
    ) -> c_int;
    fn lockstep_mpi_send(
        comm: Comm,
        data: *const u8,
        bytes: c_int,
        to: c_int,
        tag: c_int,
        request: *mut Request,
    ) -> c_int;
    fn lockstep_mpi_receive(
        comm: Comm,
        data: *mut u8,
        bytes: c_int,
        from: c_int,
        tag: c_int,
        request: *mut Request,
    ) -> c_int;
    fn lockstep_mpi_broadcast(
        comm: Comm,
        data: *mut u8,
        bytes: c_int,
        root: c_int,
        request: *mut Request,
    ) -> c_int;
    fn lockstep_mpi_all_gather(
        comm: Comm,
        input: *const u8,
        bytes: c_int,
        output: *mut u8,
        counts: *const c_int,
        starts: *const c_int,
        request: *mut Request,
    ) -> c_int;
    fn lockstep_mpi_all_reduce(
        comm: Comm,
        data: *mut u8,
        count: c_int,
        number: c_int,
        op: c_int,
        request: *mut Request,
    ) -> c_int;
    fn lockstep_mpi_reduce(
        comm: Comm,
        input: *const u8,
        output: *mut u8,
        count: c_int,
        number: c_int,
        op: c_int,
        root: c_int,
        request: *mut Request,
    ) -> c_int;
    fn lockstep_mpi_reduce_scatter(
        comm: Comm,
        input: *const u8,
        output: *mut u8,
        counts: *const c_int,
        number: c_int,
        op: c_int,
        request: *mut Request,
    ) -> c_int;
    fn lockstep_mpi_test(count: c_int, requests: *mut Request, first: *mut c_int) -> c_int;
    fn lockstep_mpi_finish(receive: *mut Request) -> c_int;
    fn lockstep_mpi_abort(code: c_int) -> c_int;
    fn lockstep_mpi_text(code: c_int, text: *mut c_char, room: c_int) -> c_int;
}

/// Handle of a communicator, as `shim.c` encodes it.
#[derive(Debug, Clone, Copy, Default)]
#[repr(transparent)]
pub(crate) struct Comm(u64);

/// Handle of a request, as `shim.c` encodes it. Its buffers must not move until it is complete.
#[derive(Debug, Default)]
#[repr(transparent)]
pub(crate) struct Request(u64);

/// Size in bytes of the buffer for an MPI error message.
const TEXT_BYTES: usize = 256;

/// The MPI library, owned by the thread that started it and makes all calls.
#[derive(Debug)]
pub(crate) struct Mpi {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    /// Number of ranks on this host.
    pub(crate) local_ranks: usize,
    /// Communicator of all ranks, separate from other uses of MPI in this process.
    pub(crate) world: Comm,
    /// Marker that keeps the value on its thread.
    here: PhantomData<*const ()>,
}

/// True once MPI has been started, which is possible once per process.
static IS_STARTED: AtomicBool = AtomicBool::new(false);

impl Mpi {
    /// Starts MPI. Waits until all ranks have joined.
    ///
    /// # Errors
    /// If MPI was started before, or fails.
    pub(crate) fn start() -> Result<Self, CommError> {
        if IS_STARTED.swap(true, Ordering::SeqCst) {
            return Err(CommError::Join(JoinProblem::Again));
        }
        let (mut threads, mut rank, mut ranks, mut local_ranks, mut world) = (0, 0, 0, 0, Comm::default());
        // SAFETY: five places for five results. This thread starts MPI and makes all calls, so any level of thread support is
        // enough.
        check("start MPI", unsafe {
            lockstep_mpi_start(&mut threads, &mut rank, &mut ranks, &mut local_ranks, &mut world)
        })?;
        for (number, op, function) in user_functions() {
            // SAFETY: the functions have MPI's signature, and live as long as the program.
            check("define a reduction", unsafe {
                lockstep_mpi_operation(code(number), op_code(op), function)
            })?;
        }
        let number = |value: c_int| usize::try_from(value).unwrap_or(0);
        let (rank, ranks, local_ranks) = (number(rank), number(ranks), number(local_ranks));
        Ok(Self { rank, ranks, local_ranks, world, here: PhantomData })
    }

    /// Creates a communicator for `ranks` of the world. All of them call it with the same `tag`, and it waits for them.
    pub(crate) fn group(&self, ranks: &[usize], tag: usize) -> Result<Comm, CommError> {
        let ranks: Vec<c_int> = ranks.iter().map(|rank| int(*rank)).collect();
        let mut comm = Comm::default();
        let (count, tag) = (int(ranks.len()), int(tag));
        // SAFETY: the count is that of the ranks.
        check("make a group over MPI", unsafe {
            lockstep_mpi_group(self.world, count, ranks.as_ptr(), tag, &mut comm)
        })?;
        Ok(comm)
    }

    /// Starts to send `bytes` bytes, at most 2^31 - 1.
    ///
    /// # Safety
    /// The bytes are valid and unchanged until the request is complete.
    pub(crate) unsafe fn send(
        &self,
        comm: Comm,
        data: *const u8,
        bytes: usize,
        to: usize,
        tag: c_int,
    ) -> Result<Request, CommError> {
        // SAFETY: the caller upholds the contract.
        request("send over MPI", |request| unsafe {
            lockstep_mpi_send(comm, data, int(bytes), int(to), tag, request)
        })
    }

    /// Starts to receive up to `bytes` bytes, at most 2^31 - 1; from any rank if `from` is `None`.
    ///
    /// # Safety
    /// No other code accesses the bytes until the request is complete.
    pub(crate) unsafe fn receive(
        &self,
        comm: Comm,
        data: *mut u8,
        bytes: usize,
        from: Option<usize>,
        tag: c_int,
    ) -> Result<Request, CommError> {
        // SAFETY: the caller upholds the contract.
        request("receive over MPI", |request| unsafe {
            lockstep_mpi_receive(comm, data, int(bytes), from.map_or(-1, int), tag, request)
        })
    }

    /// Starts to replace `data` with the root's.
    ///
    /// # Safety
    /// No other code accesses `data` until the request is complete.
    pub(crate) unsafe fn broadcast(
        &self,
        comm: Comm,
        data: MemoryRange,
        root: usize,
    ) -> Result<Request, CommError> {
        // SAFETY: the caller upholds the contract.
        request("broadcast over MPI", |request| unsafe {
            lockstep_mpi_broadcast(comm, data.pointer, int(data.bytes()), int(root), request)
        })
    }

    /// Starts to gather blocks of `counts` bytes at the offsets `starts` of `output`. This rank's block comes from
    /// `input`, or is in its place already.
    ///
    /// # Safety
    /// No other code accesses input, output and lists until the request is complete.
    pub(crate) unsafe fn all_gather(
        &self,
        comm: Comm,
        input: Option<MemoryRange>,
        output: *mut u8,
        counts: &[c_int],
        starts: &[c_int],
    ) -> Result<Request, CommError> {
        let (from, bytes) =
            input.map_or((std::ptr::null(), 0), |input| (input.pointer.cast_const(), input.bytes()));
        // SAFETY: the caller upholds the contract.
        request("gather over MPI", |request| unsafe {
            lockstep_mpi_all_gather(comm, from, int(bytes), output, counts.as_ptr(), starts.as_ptr(), request)
        })
    }

    /// Starts to replace `data` with the reduction of all ranks' `data`.
    ///
    /// # Safety
    /// No other code accesses `data` until the request is complete.
    pub(crate) unsafe fn all_reduce(
        &self,
        comm: Comm,
        data: MemoryRange,
        op: ReduceOp,
    ) -> Result<Request, CommError> {
        let number = code(data.number);
        // SAFETY: the caller upholds the contract.
        request("reduce over MPI", |request| unsafe {
            lockstep_mpi_all_reduce(comm, data.pointer, int(data.elements), number, op_code(op), request)
        })
    }

    /// Starts to reduce all ranks' `input` to the root's `output`, which may be the same memory.
    ///
    /// # Safety
    /// No other code accesses input and output until the request is complete.
    pub(crate) unsafe fn reduce(
        &self,
        comm: Comm,
        input: MemoryRange,
        output: Option<*mut u8>,
        op: ReduceOp,
        root: usize,
    ) -> Result<Request, CommError> {
        let is_in_place = output == Some(input.pointer);
        let from = if is_in_place { std::ptr::null() } else { input.pointer.cast_const() };
        let to = output.unwrap_or(std::ptr::null_mut());
        let (count, number) = (int(input.elements), code(input.number));
        // SAFETY: the caller upholds the contract.
        request("reduce over MPI", |request| unsafe {
            lockstep_mpi_reduce(comm, from, to, count, number, op_code(op), int(root), request)
        })
    }

    /// Starts to reduce all ranks' `input`, and to write this rank's block to `output`. Blocks have `counts` elements.
    ///
    /// # Safety
    /// No other code accesses input, output and list until the request is complete.
    pub(crate) unsafe fn reduce_scatter(
        &self,
        comm: Comm,
        input: MemoryRange,
        output: *mut u8,
        counts: &[c_int],
        op: ReduceOp,
    ) -> Result<Request, CommError> {
        let number = code(input.number);
        // SAFETY: the caller upholds the contract.
        request("reduce over MPI", |request| unsafe {
            let (from, counts) = (input.pointer, counts.as_ptr());
            lockstep_mpi_reduce_scatter(comm, from, output, counts, number, op_code(op), request)
        })
    }

    /// Makes progress with all operations. Returns the index of the first of `requests` that is not complete; `None` if
    /// all are.
    pub(crate) fn test(&self, requests: &mut [Request]) -> Result<Option<usize>, CommError> {
        let mut first = 0;
        let count = int(requests.len());
        // SAFETY: the count is that of the requests, whose makers keep their memory valid.
        check("carry on with MPI", unsafe { lockstep_mpi_test(count, requests.as_mut_ptr(), &mut first) })?;
        Ok(usize::try_from(first).ok().filter(|first| *first < requests.len()))
    }

    /// Shuts MPI down, on all ranks together. No operation is in flight except `receive`, which is cancelled.
    pub(crate) fn finish(self, mut receive: Request) -> Result<(), CommError> {
        // SAFETY: the request is this library's. No call follows, since this takes `self`.
        check("end MPI", unsafe { lockstep_mpi_finish(&mut receive) })
    }

    /// Aborts the processes of all ranks.
    pub(crate) fn abort(&self, code: i32) {
        // SAFETY: the call has no pointers.
        unsafe { lockstep_mpi_abort(code) };
    }
}

fn request(what: &'static str, begin: impl FnOnce(*mut Request) -> c_int) -> Result<Request, CommError> {
    let mut request = Request::default();
    check(what, begin(&mut request)).map(|()| request)
}

fn check(what: &'static str, code: c_int) -> Result<(), CommError> {
    // Success is the only code whose value MPI defines.
    if code == 0 {
        return Ok(());
    }
    let mut text = [0; TEXT_BYTES];
    // SAFETY: the size is that of the buffer; the text written to it ends with a zero.
    let text = unsafe {
        lockstep_mpi_text(code, text.as_mut_ptr(), int(TEXT_BYTES));
        CStr::from_ptr(text.as_ptr())
    };
    Err(CommError::io(what)(io::Error::other(text.to_string_lossy().into_owned())))
}

/// Converts ranks, tags and lengths, which have been limited to fit.
fn int(value: usize) -> c_int {
    c_int::try_from(value).expect("no message is longer, and no rank higher, than MPI's numbers go")
}

fn code(number: NumberType) -> c_int {
    int(NumberType::ALL.iter().position(|other| *other == number).unwrap_or(0))
}

fn op_code(op: ReduceOp) -> c_int {
    int(ReduceOp::ALL.iter().position(|other| *other == op).unwrap_or(0))
}

/// Combines `a` and `b` into `b`, as MPI calls it.
///
/// # Safety
/// `count` elements are valid at both addresses.
unsafe fn combine(number: NumberType, op: ReduceOp, a: *const c_void, b: *mut c_void, count: *const c_int) {
    // SAFETY: MPI upholds the contract.
    unsafe {
        let elements = usize::try_from(*count).unwrap_or(0);
        reduce(number, op, &[a.cast(), b.cast_const().cast()], &[b.cast()], elements);
    }
}

macro_rules! user_functions {
    ($($number:ident $op:ident),*) => {
        /// Returns the reductions that MPI lacks or has wrong. It lacks sums of bf16 and f16 rounded from f32, and
        /// maxima and minima that propagate NaN. Sums of bytes saturate at 255 in OpenMPI 4.1, and maxima and minima of
        /// unsigned numbers compare them as signed in MPICH 4.0.
        fn user_functions() -> Vec<(NumberType, ReduceOp, UserFunction)> {
            vec![$({
                unsafe extern "C" fn function(
                    a: *const c_void,
                    b: *mut c_void,
                    count: *const c_int,
                    _: *const c_void,
                ) {
                    // SAFETY: MPI upholds the contract.
                    unsafe { combine(NumberType::$number, ReduceOp::$op, a, b, count) }
                }
                (NumberType::$number, ReduceOp::$op, function as UserFunction)
            }),*]
        }
    };
}
user_functions!(U8 Sum, U8 Max, U8 Min, U32 Max, U32 Min, F32 Max, F32 Min, Bf16 Sum, Bf16 Max, Bf16 Min, F16 Sum, F16 Max, F16 Min);
