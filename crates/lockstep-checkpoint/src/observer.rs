//! Observation of a save: the points that it reaches, and its waits for the file system, each of which may end it.

use std::{fmt, io, path::Path, sync::Weak, time::Duration};

/// Points of a commit, in order. Fault tests stop a save at each of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CommitPoint {
    /// The hidden directory exists.
    StagingCreated,
    /// The file of a rank exists and is empty.
    ShardStarted,
    /// Half of the file's tensors have been passed to the writer thread.
    ShardHalfWritten,
    /// The whole file has been written.
    ShardWritten,
    /// The whole file is durable.
    ShardSynced,
    /// Only half of the manifest has been written.
    ManifestHalfWritten,
    /// The manifest has been written.
    ManifestWritten,
    /// The manifest is durable.
    ManifestSynced,
    /// The entries of the hidden directory are durable.
    StagingSynced,
    /// The directory has its final name: the checkpoint is committed.
    Renamed,
    /// The final name is durable.
    ParentSynced,
}

impl CommitPoint {
    /// All points, in the order in which a save reaches them.
    pub const ALL: [Self; 11] = [
        Self::StagingCreated,
        Self::ShardStarted,
        Self::ShardHalfWritten,
        Self::ShardWritten,
        Self::ShardSynced,
        Self::ManifestHalfWritten,
        Self::ManifestWritten,
        Self::ManifestSynced,
        Self::StagingSynced,
        Self::Renamed,
        Self::ParentSynced,
    ];
}

/// Observer of a save that may stop it at any point. Fault tests do so, and so does a run that must end at once.
pub trait CommitObserver {
    /// Called at each point. An error stops the save and removes the files written so far, unless the save is already
    /// committed.
    fn reached(&self, point: CommitPoint) -> io::Result<()>;

    /// Called every tenth of a second while the save waits for its file system. An error gives up the wait; the files
    /// written so far are removed once the file system answers. By default a save waits forever.
    fn waiting(&self, _wait: &Wait<'_>) -> io::Result<()> {
        Ok(())
    }
}

/// Observer that never stops a save.
impl CommitObserver for () {
    fn reached(&self, _: CommitPoint) -> io::Result<()> {
        Ok(())
    }
}

/// State of a wait for the file system during a save.
#[derive(Debug, Clone, Copy)]
pub struct Wait<'a> {
    /// The kind of call: "writing", "syncing", ...
    pub doing: &'static str,
    /// The file or directory of the call.
    pub path: &'a Path,
    /// Time since the last progress.
    pub idle: Duration,
}

/// Thread that a save has abandoned in a file-system call.
#[derive(Clone)]
pub struct Abandoned(pub(crate) Weak<()>);

impl Abandoned {
    /// Returns true while the call has not returned.
    pub fn is_stuck(&self) -> bool {
        self.0.strong_count() > 0
    }
}

impl fmt::Debug for Abandoned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Abandoned").field("is_stuck", &self.is_stuck()).finish()
    }
}
