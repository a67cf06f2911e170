//! MPI as one thread may use it: the functions of `shim.c`, with MPI's error codes as errors.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    io,
    marker::PhantomData,
    sync::atomic::{AtomicBool, Ordering},
};

use crate::{CommError, JoinProblem, NumberType, ReduceOp, memory::Stretch, reduce::reduce};

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

/// A communicator, in its box.
#[derive(Debug, Clone, Copy, Default)]
#[repr(transparent)]
pub(super) struct Comm(u64);

/// A request, in its box. What it was made for must stay where it is until it is complete.
#[derive(Debug, Default)]
#[repr(transparent)]
pub(super) struct Request(u64);

/// Room for MPI's words about an error.
const TEXT_BYTES: usize = 256;

/// The library, started by the thread that holds this, which makes all calls.
#[derive(Debug)]
pub(super) struct Mpi {
    pub(super) rank: usize,
    pub(super) ranks: usize,
    /// Ranks of this host.
    pub(super) local_ranks: usize,
    /// All ranks, apart from what else of the process might use MPI.
    pub(super) world: Comm,
    /// It stays on its thread.
    here: PhantomData<*const ()>,
}

/// MPI can be started once in a process.
static IS_STARTED: AtomicBool = AtomicBool::new(false);

impl Mpi {
    /// Starts MPI; waits until all ranks have come.
    ///
    /// # Errors
    /// [`JoinProblem::Again`], and what MPI says.
    pub(super) fn start() -> Result<Self, CommError> {
        if IS_STARTED.swap(true, Ordering::SeqCst) {
            return Err(CommError::Join(JoinProblem::Again));
        }
        let (mut threads, mut rank, mut ranks, mut local_ranks, mut world) = (0, 0, 0, 0, Comm::default());
        // SAFETY: five places for five results. This thread, which starts MPI, makes all calls: any level of support for
        // threads is enough.
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

    /// A communicator for `ranks` of the world, which all of them call with the same `tag`. Waits for them.
    pub(super) fn group(&self, ranks: &[usize], tag: usize) -> Result<Comm, CommError> {
        let ranks: Vec<c_int> = ranks.iter().map(|rank| int(*rank)).collect();
        let mut comm = Comm::default();
        let (count, tag) = (int(ranks.len()), int(tag));
        // SAFETY: as many ranks as are told.
        check("make a group over MPI", unsafe {
            lockstep_mpi_group(self.world, count, ranks.as_ptr(), tag, &mut comm)
        })?;
        Ok(comm)
    }

    /// Sends `bytes` bytes, at most 2^31 - 1.
    ///
    /// # Safety
    /// They stay as they are until the request is complete.
    pub(super) unsafe fn send(
        &self,
        comm: Comm,
        data: *const u8,
        bytes: usize,
        to: usize,
        tag: c_int,
    ) -> Result<Request, CommError> {
        // SAFETY: as the caller promises.
        request("send over MPI", |request| unsafe {
            lockstep_mpi_send(comm, data, int(bytes), int(to), tag, request)
        })
    }

    /// Receives up to `bytes` bytes, at most 2^31 - 1; from any rank, if no one is named.
    ///
    /// # Safety
    /// They are the request's until it is complete.
    pub(super) unsafe fn receive(
        &self,
        comm: Comm,
        data: *mut u8,
        bytes: usize,
        from: Option<usize>,
        tag: c_int,
    ) -> Result<Request, CommError> {
        // SAFETY: as the caller promises.
        request("receive over MPI", |request| unsafe {
            lockstep_mpi_receive(comm, data, int(bytes), from.map_or(-1, int), tag, request)
        })
    }

    /// Replaces `data` by the root's.
    ///
    /// # Safety
    /// It is the request's until that is complete.
    pub(super) unsafe fn broadcast(
        &self,
        comm: Comm,
        data: Stretch,
        root: usize,
    ) -> Result<Request, CommError> {
        // SAFETY: as the caller promises.
        request("broadcast over MPI", |request| unsafe {
            lockstep_mpi_broadcast(comm, data.pointer, int(data.bytes()), int(root), request)
        })
    }

    /// Gathers blocks of `counts` bytes, which begin at `starts`, in `output`; the own one from `input`, or from its place.
    ///
    /// # Safety
    /// Input and output are the request's until that is complete; so are the two lists.
    pub(super) unsafe fn all_gather(
        &self,
        comm: Comm,
        input: Option<Stretch>,
        output: *mut u8,
        counts: &[c_int],
        starts: &[c_int],
    ) -> Result<Request, CommError> {
        let (from, bytes) =
            input.map_or((std::ptr::null(), 0), |input| (input.pointer.cast_const(), input.bytes()));
        // SAFETY: as the caller promises.
        request("gather over MPI", |request| unsafe {
            lockstep_mpi_all_gather(comm, from, int(bytes), output, counts.as_ptr(), starts.as_ptr(), request)
        })
    }

    /// Replaces `data` by the reduction of all ranks'.
    ///
    /// # Safety
    /// It is the request's until that is complete.
    pub(super) unsafe fn all_reduce(
        &self,
        comm: Comm,
        data: Stretch,
        op: ReduceOp,
    ) -> Result<Request, CommError> {
        let number = code(data.number);
        // SAFETY: as the caller promises.
        request("reduce over MPI", |request| unsafe {
            lockstep_mpi_all_reduce(comm, data.pointer, int(data.elements), number, op_code(op), request)
        })
    }

    /// Reduces all ranks' `input` to the root's `output`, which may be the same memory.
    ///
    /// # Safety
    /// Both are the request's until that is complete.
    pub(super) unsafe fn reduce(
        &self,
        comm: Comm,
        input: Stretch,
        output: Option<*mut u8>,
        op: ReduceOp,
        root: usize,
    ) -> Result<Request, CommError> {
        let is_in_place = output == Some(input.pointer);
        let from = if is_in_place { std::ptr::null() } else { input.pointer.cast_const() };
        let to = output.unwrap_or(std::ptr::null_mut());
        let (count, number) = (int(input.elements), code(input.number));
        // SAFETY: as the caller promises.
        request("reduce over MPI", |request| unsafe {
            lockstep_mpi_reduce(comm, from, to, count, number, op_code(op), int(root), request)
        })
    }

    /// Writes the own one of blocks of `counts` elements of the reduction of all ranks' `input`.
    ///
    /// # Safety
    /// Input, output and the list are the request's until that is complete.
    pub(super) unsafe fn reduce_scatter(
        &self,
        comm: Comm,
        input: Stretch,
        output: *mut u8,
        counts: &[c_int],
        op: ReduceOp,
    ) -> Result<Request, CommError> {
        let number = code(input.number);
        // SAFETY: as the caller promises.
        request("reduce over MPI", |request| unsafe {
            let (from, counts) = (input.pointer, counts.as_ptr());
            lockstep_mpi_reduce_scatter(comm, from, output, counts, number, op_code(op), request)
        })
    }

    /// Carries on with everything that is under way. The position of the first of `requests` that is not complete, if any is
    /// not.
    pub(super) fn test(&self, requests: &mut [Request]) -> Result<Option<usize>, CommError> {
        let mut first = 0;
        let count = int(requests.len());
        // SAFETY: as many requests as are told, whose memory their makers see to.
        check("carry on with MPI", unsafe { lockstep_mpi_test(count, requests.as_mut_ptr(), &mut first) })?;
        Ok(usize::try_from(first).ok().filter(|first| *first < requests.len()))
    }

    /// Ends MPI; all ranks do. Nothing is under way but `receive`, which is given up.
    pub(super) fn finish(self, mut receive: Request) -> Result<(), CommError> {
        // SAFETY: a request of this library's; nothing is called after this, which takes `self`.
        check("end MPI", unsafe { lockstep_mpi_finish(&mut receive) })
    }

    /// Ends all ranks' processes.
    pub(super) fn abort(&self, code: i32) {
        // SAFETY: a call without pointers.
        unsafe { lockstep_mpi_abort(code) };
    }
}

fn request(what: &'static str, begin: impl FnOnce(*mut Request) -> c_int) -> Result<Request, CommError> {
    let mut request = Request::default();
    check(what, begin(&mut request)).map(|()| request)
}

fn check(what: &'static str, code: c_int) -> Result<(), CommError> {
    // The one code that MPI fixes.
    if code == 0 {
        return Ok(());
    }
    let mut text = [0; TEXT_BYTES];
    // SAFETY: as much room as is told; what is written there ends with a zero.
    let text = unsafe {
        lockstep_mpi_text(code, text.as_mut_ptr(), int(TEXT_BYTES));
        CStr::from_ptr(text.as_ptr())
    };
    Err(CommError::io(what)(io::Error::other(text.to_string_lossy().into_owned())))
}

/// Ranks, tags and lengths that were cut to fit.
fn int(value: usize) -> c_int {
    c_int::try_from(value).expect("no message is longer, and no rank higher, than MPI's numbers go")
}

fn code(number: NumberType) -> c_int {
    int(NumberType::ALL.iter().position(|other| *other == number).unwrap_or(0))
}

fn op_code(op: ReduceOp) -> c_int {
    int(ReduceOp::ALL.iter().position(|other| *other == op).unwrap_or(0))
}

/// What MPI calls to make `b` of `a` and `b`.
///
/// # Safety
/// `count` elements lie at both.
unsafe fn combine(number: NumberType, op: ReduceOp, a: *const c_void, b: *mut c_void, count: *const c_int) {
    // SAFETY: as MPI promises.
    unsafe {
        let elements = usize::try_from(*count).unwrap_or(0);
        reduce(number, op, &[a.cast(), b.cast_const().cast()], &[b.cast()], elements);
    }
}

macro_rules! user_functions {
    ($($number:ident $op:ident),*) => {
        /// What MPI has no operations for: sums of bf16 and f16, each made in f32; extremes that let no NaN pass unseen. And
        /// what it has wrong: sums of bytes stop at 255 in OpenMPI 4.1, extremes of unsigned numbers are those of
        /// signed ones in MPICH 4.0.
        fn user_functions() -> Vec<(NumberType, ReduceOp, UserFunction)> {
            vec![$({
                unsafe extern "C" fn function(
                    a: *const c_void,
                    b: *mut c_void,
                    count: *const c_int,
                    _: *const c_void,
                ) {
                    // SAFETY: the contract of MPI's.
                    unsafe { combine(NumberType::$number, ReduceOp::$op, a, b, count) }
                }
                (NumberType::$number, ReduceOp::$op, function as UserFunction)
            }),*]
        }
    };
}
user_functions!(U8 Sum, U8 Max, U8 Min, U32 Max, U32 Min, F32 Max, F32 Min, Bf16 Sum, Bf16 Max, Bf16 Min, F16 Sum, F16 Max, F16 Min);
