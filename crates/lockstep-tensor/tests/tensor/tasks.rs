//! Memory touched by the threads of a queue.

use lockstep_plan::MemoryCategory;
use lockstep_tensor::{Arena, CpuQueue, Queue};

#[test]
fn touched_memory_is_committed_and_keeps_its_contents() {
    let workers = CpuQueue::new(3, &Arena::new()).unwrap().workers();
    for elements in [0, 1, 1000, 100_000, 1_000_003] {
        let mut bytes: Vec<u8> = (0..4 * elements).map(|index| index as u8).collect();
        workers.touch(&mut bytes, 4);
        assert!(bytes.iter().enumerate().all(|(index, byte)| *byte == index as u8), "{elements} elements");
    }
    let mut fresh = Arena::new().allocate_zeroed(16 << 20, MemoryCategory::Parameters).unwrap();
    workers.touch(fresh.bytes_mut(), 4);
    // SAFETY: a query without arguments in memory.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let mut resident = vec![0_u8; (16 << 20) / page];
    // SAFETY: the range is the buffer's, which starts at a huge page, and the vector has a byte for each page.
    let code = unsafe {
        libc::mincore(fresh.bytes_mut().as_mut_ptr().cast(), 16 << 20, resident.as_mut_ptr().cast())
    };
    assert_eq!((code, resident.iter().filter(|page| **page & 1 == 0).count()), (0, 0));
}
