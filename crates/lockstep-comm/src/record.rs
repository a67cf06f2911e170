//! The records of the flight recorder: the last operations of each rank, in memory that may outlive the rank.
//!
//! Operations of a group have the same numbers on all ranks. The records therefore show which operation a run hangs in, and
//! which ranks have not come to it, even when no rank can answer.

use std::{
    fmt,
    panic::Location,
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::time::{ClockId, clock_gettime};

use crate::{Call, GroupName, MAX_WORLD};

/// Number of operations that the flight recorder keeps.
pub(crate) const RECORDS: usize = 1024;
/// Number of bytes kept of a source file's name, counted from its end.
const FILE_BYTES: usize = 48;
/// Number of bits of each number of a group's name.
const GROUP_BITS: u32 = 21;
const GROUP_MASK: u64 = (1 << GROUP_BITS) - 1;
const _: () = assert!((MAX_WORLD as u64) <= GROUP_MASK);

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

/// Record of one operation in the flight recorder.
#[derive(Default)]
#[repr(C, align(64))]
pub(crate) struct Record {
    /// Number of the rank's operation plus 1; 0 while the record is being written.
    pub(crate) number: AtomicU64,
    pub(crate) call: [AtomicU64; 3],
    /// Index of the group, its first rank and its size, each of [`GROUP_BITS`] bits.
    pub(crate) group: AtomicU64,
    pub(crate) sequence: AtomicU64,
    /// Times in microseconds of the machine's clock at which the operation was called, all ranks had called it, and it
    /// was done; 0 for not yet.
    pub(crate) times_us: [AtomicU64; 3],
    /// Line and name (its end) of the source file that called it.
    pub(crate) line: AtomicU64,
    pub(crate) file: [AtomicU64; 6],
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
    let packed = u64::from(group.index)
        | u64::from(group.first) << GROUP_BITS
        | u64::from(group.size) << (2 * GROUP_BITS);
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

/// Returns the complete ones among a rank's last records, oldest first. `count` is the number of all it ever wrote; `record`
/// returns the memory of a record by its number.
pub(crate) fn read<'a>(count: u64, record: impl Fn(u64) -> &'a Record) -> Vec<Recorded> {
    let first = count.saturating_sub(RECORDS as u64);
    (first..count).filter_map(|number| read_one(record(number), number)).collect()
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
            index: (group & GROUP_MASK) as u32,
            first: (group >> GROUP_BITS & GROUP_MASK) as u32,
            size: (group >> (2 * GROUP_BITS) & GROUP_MASK) as u32,
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
        let memory: Vec<Record> = (0..RECORDS).map(|_| Record::default()).collect();
        let of_number = |number: u64| &memory[number as usize % RECORDS];
        let group = GroupName { index: 2, first: 65_530, size: 65_536 };
        let total = RECORDS as u64 + 10;
        for number in 0..total {
            let record = of_number(number);
            let call = Call { elements: number as usize, ..Call::bare(Kind::AllGather) };
            write(record, number, call, group, number as u32, Location::caller());
            stamp(record, number, 0);
        }
        stamp(of_number(total - 1), total - 1, 1);
        let records = read(total, of_number);
        assert_eq!(records.len(), RECORDS);
        assert_eq!((records[0].number, records[RECORDS - 1].number), (10, total - 1));
        let last = &records[RECORDS - 1];
        assert_eq!(
            (last.call.elements, last.group, last.sequence),
            (total as usize - 1, group, total as u32 - 1)
        );
        assert!(last.caller.contains("record.rs:"), "{}", last.caller);
        assert!(last.met_us.is_some() && last.done_us.is_some() && records[0].done_us.is_none());
        assert!(last.to_string().starts_with(
            "all_gather of 1033 u8, operation 1033 of group 2 (65536 ranks from rank 65530): done after"
        ));
    }
}
