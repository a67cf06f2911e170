//! The flight recorder of a rank: it writes the records of its operations to private memory, or to the rank's shared segment,
//! where they outlive the rank.

use std::{fmt, panic::Location, sync::atomic::Ordering};

use crate::{
    Call, GroupName,
    record::{self, RECORDS, Record, Recorded},
    shm::segments::Segments,
};

/// Recorder of a rank that communicates over sockets.
pub struct Recorder {
    records: Records,
    count: u64,
}

enum Records {
    Own(Box<[Record]>),
    /// Records in the shared segment of this rank, where they outlive it.
    Shared(Segments, usize),
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder").field("count", &self.count).finish_non_exhaustive()
    }
}

impl Recorder {
    /// Creates a recorder in private memory.
    pub fn private() -> Self {
        Self::new(None)
    }

    /// Creates a recorder in the shared segment of a rank of this machine, or in private memory if there is none.
    pub(crate) fn new(segment: Option<(Segments, usize)>) -> Self {
        let own = || Records::Own((0..RECORDS).map(|_| Record::default()).collect());
        Self {
            records: segment.map_or_else(own, |(segments, rank)| Records::Shared(segments, rank)),
            count: 0,
        }
    }

    fn record(&self, number: u64) -> &Record {
        match &self.records {
            Records::Own(records) => &records[number as usize % RECORDS],
            Records::Shared(segments, rank) => {
                segments.layout.record(segments.memory(*rank), number as usize)
            }
        }
    }

    /// Records an operation and returns its number.
    pub fn write(&mut self, call: Call, group: GroupName, sequence: u32, caller: &Location<'_>) -> u64 {
        let number = self.count;
        self.count += 1;
        record::write(self.record(number), number, call, group, sequence, caller);
        if let Records::Shared(segments, rank) = &self.records {
            segments.header(*rank).recorded.store(self.count, Ordering::Release);
        }
        number
    }

    /// Stamps record `number` with the time at which all ranks had come to the operation (`which` 0), or at which it completed
    /// (1).
    pub fn stamp(&self, number: u64, which: usize) {
        record::stamp(self.record(number), number, which);
    }

    /// Returns the last records, oldest first.
    pub fn read(&self) -> Vec<Recorded> {
        record::read(self.count, |number| self.record(number))
    }
}
