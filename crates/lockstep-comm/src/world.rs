//! The shared-memory world of one machine. Ranks join it as threads of one process, or as processes that receive its file
//! descriptors from their launcher over an inherited socket. No segment has a name, so none can be guessed or left behind.

use std::{
    env,
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    sync::atomic::Ordering,
    time::Duration,
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use crate::{
    CommError, Deadline, Group, JoinProblem, MAX_LOCAL_RANKS,
    record::Recorded,
    shm::{
        ShmTransport,
        layout::{MAGIC, Status, VERSION},
        segments::Segments,
    },
};

/// Environment variable with the descriptor of the inherited socket.
pub const SOCKET_VARIABLE: &str = "LOCKSTEP_COMM_FD";

/// Length in bytes of the message that carries the segments' descriptors.
const WELCOME_BYTES: usize = 48;

/// Options of a world of local ranks.
#[derive(Debug, Clone, Copy)]
pub struct WorldOptions {
    /// Bytes of address space for each rank's shared buffers. Pages are allocated on first touch, so it may be generous.
    pub arena_bytes: usize,
    /// Number of cores that the ranks share.
    pub cores: usize,
    /// Time without a heartbeat after which a rank counts as lost.
    pub silence: Duration,
    /// World rank of the first of these ranks in a run that spans several machines.
    pub first_rank: usize,
}

impl Default for WorldOptions {
    /// Returns options with all memory and cores of the machine, and 5 s of silence.
    fn default() -> Self {
        let info = rustix::system::sysinfo();
        let memory = info.totalram.saturating_mul(u64::from(info.mem_unit.max(1)));
        Self {
            arena_bytes: usize::try_from(memory).unwrap_or(usize::MAX / 4),
            cores: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            silence: Duration::from_secs(5),
            first_rank: 0,
        }
    }
}

/// The shared memory of a world, owned by the launcher.
#[derive(Debug)]
pub struct World {
    segments: Segments,
    options: WorldOptions,
}

impl World {
    /// Creates a world for `ranks` ranks, none of which has joined yet.
    ///
    /// # Errors
    /// If `ranks` is out of range, or the system refuses the memory.
    pub fn new(ranks: usize, options: WorldOptions) -> Result<Self, CommError> {
        if ranks == 0 || ranks > MAX_LOCAL_RANKS {
            let allowed = format!("1 to {MAX_LOCAL_RANKS} on one machine");
            return Err(CommError::Join(JoinProblem::OutOfRange {
                what: "number of ranks",
                value: ranks,
                allowed,
            }));
        }
        let segments =
            Segments::create(ranks, options.arena_bytes).map_err(CommError::io("make shared memory"))?;
        Ok(Self { segments, options })
    }

    /// Creates a world and returns the groups of all its ranks, for threads of this process.
    ///
    /// # Errors
    /// As [`World::new`].
    pub fn in_process(ranks: usize, options: WorldOptions) -> Result<Vec<Group>, CommError> {
        let world = Self::new(ranks, options)?;
        let join = |rank| {
            // Each rank maps the segments anew, as separate processes do.
            let files = (0..ranks).map(|rank| world.segments.memory(rank).file().try_clone_to_owned());
            let segments = files.collect::<io::Result<Vec<_>>>().and_then(Segments::open);
            let segments = segments.map_err(CommError::io("map shared memory"))?;
            let segments = segments.beginning_at(options.first_rank);
            ShmTransport::new(segments, rank, options.cores, options.silence).map(Group::world)
        };
        (0..ranks).map(join).collect()
    }

    /// Sends `rank` the descriptors and parameters that it needs to [`join`].
    ///
    /// # Errors
    /// If the message cannot be sent.
    pub fn welcome(&self, socket: &UnixStream, rank: usize) -> Result<(), CommError> {
        let ranks = self.segments.ranks();
        let mut message = [0; WELCOME_BYTES];
        let numbers = [
            MAGIC,
            u64::from(VERSION),
            (rank as u64) << 32 | ranks as u64,
            self.options.cores as u64,
            self.options.silence.as_millis() as u64,
            self.options.first_rank as u64,
        ];
        for (bytes, number) in message.chunks_exact_mut(8).zip(numbers) {
            bytes.copy_from_slice(&number.to_le_bytes());
        }
        let files: Vec<BorrowedFd<'_>> = (0..ranks).map(|rank| self.segments.memory(rank).file()).collect();
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_LOCAL_RANKS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&files));
        sendmsg(socket, &[IoSlice::new(&message)], &mut ancillary, SendFlags::NOSIGNAL)
            .map_err(|error| CommError::io("send shared memory to a rank")(error.into()))?;
        Ok(())
    }

    /// Ends the run on all ranks with `error`, unless it has ended already. Returns the error that ended it.
    pub fn end(&self, error: &CommError) -> CommError {
        self.segments.end(error, usize::MAX - 1)
    }

    /// Returns the error that ended the run; `None` while it goes on.
    pub fn ending(&self) -> Option<CommError> {
        self.segments.ending()
    }

    /// Returns true if a rank has announced its departure, or if it never joined and no other rank is present.
    pub fn has_left(&self, rank: usize) -> bool {
        let is_here = |rank| self.segments.status(rank) == Status::Here;
        match self.segments.status(rank) {
            Status::Left => true,
            // The program is not a Lockstep rank, which then holds for all ranks.
            Status::Absent => !(0..self.segments.ranks()).any(is_here),
            Status::Here | Status::Panicked => false,
        }
    }

    /// Returns the heartbeat count of a rank; `None` before it has joined and after it has left.
    pub fn beat(&self, rank: usize) -> Option<u32> {
        let is_here = self.segments.status(rank) == Status::Here;
        is_here.then(|| self.segments.header(rank).beat.load(Ordering::Relaxed))
    }

    /// Returns the last operations that a rank called, oldest first; also for a dead rank.
    pub fn recorded(&self, rank: usize) -> Vec<Recorded> {
        self.segments.records(rank)
    }
}

/// Joins the world whose launcher holds the other end of `socket`. Returns once all ranks have joined.
///
/// # Errors
/// If the other end is not a Lockstep launcher of this version, or if a rank does not join before `deadline`.
pub fn join(socket: &UnixStream, deadline: Deadline) -> Result<Group, CommError> {
    let group = Group::world(enter(socket, deadline)?.0);
    group.barrier(deadline)?;
    Ok(group)
}

/// The shared memory of this machine's ranks, before its ranks join those of other machines.
#[derive(Debug)]
pub struct Entered(pub(crate) ShmTransport);

/// Enters the world of the launcher at the other end of `socket`, without waiting for the other ranks.
///
/// # Errors
/// If the other end is not a Lockstep launcher of this version, or if it sends nothing before `deadline`.
pub fn enter(socket: &UnixStream, deadline: Deadline) -> Result<Entered, CommError> {
    let (message, files) = receive_welcome(socket, deadline)?;
    let number = |index: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&message[index * 8..index * 8 + 8]);
        u64::from_le_bytes(bytes)
    };
    let theirs = if number(0) == MAGIC { number(1) as u32 } else { 0 };
    if theirs != VERSION {
        return Err(CommError::Join(JoinProblem::Version { theirs, ours: VERSION }));
    }
    let (rank, ranks) = ((number(2) >> 32) as usize, number(2) as u32 as usize);
    if rank >= ranks || ranks != files.len() {
        let allowed = format!("below {} shared segments", files.len());
        return Err(CommError::Join(JoinProblem::OutOfRange { what: "rank", value: rank, allowed }));
    }
    let segments = Segments::open(files).map_err(CommError::io("map shared memory"))?;
    let segments = segments.beginning_at(number(5) as usize);
    ShmTransport::new(segments, rank, number(3) as usize, Duration::from_millis(number(4))).map(Entered)
}

/// Returns the socket that this process inherited from its launcher; `None` if it inherited none.
///
/// # Errors
/// If the variable does not name a socket.
pub fn inherited_socket() -> Result<Option<UnixStream>, CommError> {
    inherited(SOCKET_VARIABLE).map(|socket| socket.map(UnixStream::from))
}

/// Returns a duplicate of the socket whose descriptor number is in the environment variable; `None` if it is unset.
///
/// # Errors
/// If the variable does not name a socket.
pub fn inherited(variable: &'static str) -> Result<Option<OwnedFd>, CommError> {
    let Some(value) = env::var_os(variable) else { return Ok(None) };
    let value = value.to_string_lossy().into_owned();
    let descriptor = value.parse::<RawFd>().ok().filter(|descriptor| *descriptor > 2);
    let is_socket = |descriptor: &RawFd| {
        // SAFETY: borrowed for one `fstat`, which is allowed on any number.
        let borrowed = unsafe { BorrowedFd::borrow_raw(*descriptor) };
        rustix::fs::fstat(borrowed)
            .is_ok_and(|file| rustix::fs::FileType::from_raw_mode(file.st_mode).is_socket())
    };
    let Some(descriptor) = descriptor.filter(is_socket) else {
        return Err(CommError::Join(JoinProblem::Descriptor { variable, value }));
    };
    // SAFETY: the launcher opened it for this process, and no other code here owns it. The descriptor is duplicated, so that a
    // second call finds it as well.
    let socket = unsafe { BorrowedFd::borrow_raw(descriptor) }.try_clone_to_owned();
    socket.map(Some).map_err(CommError::io("use the launcher's socket"))
}

fn receive_welcome(
    socket: &UnixStream,
    deadline: Deadline,
) -> Result<([u8; WELCOME_BYTES], Vec<OwnedFd>), CommError> {
    let what = "receive shared memory from the launcher";
    let limit = deadline.remaining().max(Duration::from_millis(1));
    socket.set_read_timeout(Some(limit)).map_err(CommError::io(what))?;
    let mut message = [0; WELCOME_BYTES];
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_LOCAL_RANKS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
    let received = recvmsg(socket.as_fd(), &mut [IoSliceMut::new(&mut message)], &mut ancillary, flags)
        .map_err(|error| CommError::io(what)(error.into()))?;
    if received.bytes != WELCOME_BYTES {
        return Err(CommError::Join(JoinProblem::HungUp));
    }
    let mut files = Vec::new();
    for control in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = control {
            files.extend(descriptors);
        }
    }
    Ok((message, files))
}
