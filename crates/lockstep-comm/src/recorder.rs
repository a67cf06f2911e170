//! The flight recorder: the last operations of each rank, in shared memory that outlives the rank.
//!
//! Operations of a group have the same numbers on all ranks. The records therefore show which operation a run hangs in, and
//! which ranks have not come to it, even when no rank can answer.

use std::{
    fmt,
    panic::Location,
    sync::atomic::{AtomicU64, Ordering},
};

use lockstep_tensor::SharedMemory;
use rustix::time::{ClockId, clock_gettime};

use crate::{
    Call, GroupName,
    shm::{
        layout::{Layout, RECORDS, Record},
        segments::Segments,
    },
};

/// Number of bytes kept of a source file's name, counted from its end.
const FILE_BYTES: usize = 48;

/// Record of one operation of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recorded {
    /// Number of the operation among all of the rank's, from 0.
    pub number: u64,
    /// Description of the operation.
    pub call: Call,
    /// Group of the operation.
    pub group: GroupName,
    /// Number of the operation in its group.
    pub sequence: u32,
    /// Time of the call in microseconds, on the machine's monotonic clock.
    pub posted_us: u64,
    /// Time at which all ranks had called it, in microseconds; `None` before.
    pub met_us: Option<u64>,
    /// Time at which this rank's part was complete, in microseconds; `None` before.
    pub done_us: Option<u64>,
    /// Calling source line as `file:line`; long file names keep their end.
    pub caller: String,
}

impl fmt::Display for Recorded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match (self.met_us, self.done_us) {
            (_, Some(done)) => format!("done after {} us", done - self.posted_us.min(done)),
            (Some(_), None) => "in flight".to_owned(),
            (None, None) => "waiting for others".to_owned(),
        };
        write!(f, "{}, operation {} of {}: {state} ({})", self.call, self.sequence, self.group, self.caller)
    }
}

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
        write(self.record(number), number, call, group, sequence, caller);
        if let Records::Shared(segments, rank) = &self.records {
            segments.header(*rank).recorded.store(self.count, Ordering::Release);
        }
        number
    }

    /// Stamps record `number` with the time at which all ranks had come to the operation (`which` 0), or at which it completed
    /// (1).
    pub fn stamp(&self, number: u64, which: usize) {
        stamp(self.record(number), number, which);
    }

    /// Returns the last records, oldest first.
    pub fn read(&self) -> Vec<Recorded> {
        let first = self.count.saturating_sub(RECORDS as u64);
        (first..self.count).filter_map(|number| read_one(self.record(number), number)).collect()
    }
}

/// Returns the time in microseconds on the machine's monotonic clock, which all its processes share. [`Recorded`] uses it.
pub fn now_us() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000
}

/// Writes record `number`, counted from 0, with the current time.
pub(crate) fn write(
    record: &Record,
    number: u64,
    call: Call,
    group: GroupName,
    sequence: u32,
    caller: &Location<'_>,
) {
    record.number.store(0, Ordering::Release);
    for (word, shared) in call.to_words().into_iter().zip(&record.call) {
        shared.store(word, Ordering::Relaxed);
    }
    let packed = u64::from(group.index) | u64::from(group.first) << 16 | u64::from(group.size) << 32;
    record.group.store(packed, Ordering::Relaxed);
    record.sequence.store(sequence.into(), Ordering::Relaxed);
    record.times_us[0].store(now_us(), Ordering::Relaxed);
    record.times_us[1].store(0, Ordering::Relaxed);
    record.times_us[2].store(0, Ordering::Relaxed);
    record.line.store(caller.line().into(), Ordering::Relaxed);
    let name = caller.file().as_bytes();
    let end = &name[name.len().saturating_sub(FILE_BYTES)..];
    for (index, shared) in record.file.iter().enumerate() {
        let mut word = [0; 8];
        let rest = end.get(index * 8..).unwrap_or_default();
        let len = rest.len().min(8);
        word[..len].copy_from_slice(&rest[..len]);
        shared.store(u64::from_le_bytes(word), Ordering::Relaxed);
    }
    record.number.store(number + 1, Ordering::Release);
}

/// Stamps a record with the time at which all ranks had come to the operation (`which` 0), or at which it completed (1).
pub(crate) fn stamp(record: &Record, number: u64, which: usize) {
    if record.number.load(Ordering::Relaxed) == number + 1 {
        record.times_us[1 + which].store(now_us(), Ordering::Relaxed);
    }
}

/// Returns the complete ones among a rank's last records, oldest first. `recorded` is the number of all it ever wrote.
pub(crate) fn read(layout: &Layout, memory: &SharedMemory, recorded: u64) -> Vec<Recorded> {
    let first = recorded.saturating_sub(RECORDS as u64);
    (first..recorded).filter_map(|number| read_one(layout.record(memory, number as usize), number)).collect()
}

fn read_one(record: &Record, number: u64) -> Option<Recorded> {
    let get = |word: &AtomicU64| word.load(Ordering::Relaxed);
    if record.number.load(Ordering::Acquire) != number + 1 {
        return None;
    }
    let group = get(&record.group);
    let name: Vec<u8> =
        record.file.iter().flat_map(|word| get(word).to_le_bytes()).filter(|byte| *byte != 0).collect();
    let time = |index: usize| Some(get(&record.times_us[index])).filter(|time| *time != 0);
    let recorded = Recorded {
        number,
        call: Call::from_words([get(&record.call[0]), get(&record.call[1]), get(&record.call[2])])?,
        group: GroupName {
            index: u32::from(group as u16),
            first: u32::from((group >> 16) as u16),
            size: (group >> 32) as u32,
        },
        sequence: get(&record.sequence) as u32,
        posted_us: get(&record.times_us[0]),
        met_us: time(1),
        done_us: time(2),
        caller: format!("{}:{}", String::from_utf8_lossy(&name), get(&record.line)),
    };
    // The record may have been overwritten meanwhile.
    (record.number.load(Ordering::Acquire) == number + 1).then_some(recorded)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kind;

    #[test]
    fn the_last_records_are_read_back_oldest_first() {
        let layout = Layout::new(1);
        let memory = SharedMemory::create(layout.heap_at()).unwrap();
        let group = GroupName { index: 2, first: 5, size: 40 };
        let total = RECORDS as u64 + 10;
        for number in 0..total {
            let record = layout.record(&memory, number as usize);
            let call = Call { elements: number as usize, ..Call::bare(Kind::AllGather) };
            write(record, number, call, group, number as u32, Location::caller());
            stamp(record, number, 0);
        }
        stamp(layout.record(&memory, 9), total - 1, 1);
        let records = read(&layout, &memory, total);
        assert_eq!(records.len(), RECORDS);
        assert_eq!((records[0].number, records[RECORDS - 1].number), (10, total - 1));
        let last = &records[RECORDS - 1];
        assert_eq!(
            (last.call.elements, last.group, last.sequence),
            (total as usize - 1, group, total as u32 - 1)
        );
        assert!(last.caller.contains("recorder.rs:"), "{}", last.caller);
        assert!(last.met_us.is_some() && last.done_us.is_some() && records[0].done_us.is_none());
        assert!(last.to_string().starts_with(
            "all_gather of 1033 u8, operation 1033 of group 2 (40 ranks from rank 5): done after"
        ));
    }
}
