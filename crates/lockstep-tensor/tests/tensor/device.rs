//! The queue of an arena on the host.

use lockstep_plan::{DType, MemoryCategory};
use lockstep_tensor::{Arena, Event, MemoryLocation, Tensor};

#[test]
fn on_the_cpu_events_are_complete_and_values_ready() {
    let arena = Arena::new();
    let queue = arena.queue(1).unwrap();
    let tensor = Tensor::zeros(&arena, DType::U32, [3], MemoryCategory::Workspace).unwrap();
    tensor.view().write(&[1_u32, 2, 3]);
    assert!(queue.record().is_complete());
    queue.wait(&Event::COMPLETE);
    let mut host = [0_u32; 3];
    let pending = tensor.view().read(&mut host);
    assert_eq!(format!("{pending:?}"), "Pending(ready)");
    assert_eq!(pending.wait(), &[1, 2, 3]);
    assert!(matches!(tensor.view().place(), MemoryLocation::Host));
}
