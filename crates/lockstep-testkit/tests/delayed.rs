//! Tests that results do not depend on timing. The delayed device executes its queue as late as events permit, and the
//! host may not touch its memory. Under every split its numbers must equal the CPU's bit for bit. Each ordering fault
//! must be detected, with a message that names the premature call.
//!
//! `LOCKSTEP_DEVICE=delayed cargo test --test parity` runs the whole parity matrix on delayed devices.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use lockstep_comm::{Collective, Deadline, LentBuffer, ReduceOp, World, WorldOptions};
use lockstep_plan::{DType, MemoryCategory};
use lockstep_tensor::delayed::{Delayed, Fault};
use lockstep_tensor::{Arena, Buffer, DeviceMemory, Queue, Tensor, Workers};
use lockstep_testkit::parity::{
    Compute, DEEPSEEK, GPT2, LLAMA, MIXTRAL, QWEN2_MOE, QWEN3, TinyModel, Workbench, expert_splits, splits,
};

const LATE: Compute = Compute::Delayed(None);
const REPLICAS: &str = "parallel.data_parallel_replicate=2";
const SHARD: &str = "parallel.data_parallel_shard=2";
const TENSOR: &str = "parallel.tensor_parallel=2";
const PIPELINE: &str = "parallel.pipeline_parallel=2";
const BF16: &str = "train.precision=bf16";

/// Computes the numbers of each plan on delayed devices, which asserts that they equal the CPU's.
fn check(model: TinyModel, plans: &[Vec<&str>]) {
    let bench = Workbench::on(LATE).unwrap();
    for plan in plans {
        let settings = [&plan[..], &["train.steps=2"]].concat();
        let found = bench.numbers(&bench.config(model, &settings).unwrap());
        found.unwrap_or_else(|error| panic!("{}, {plan:?}: {error}", model.name));
    }
}

fn settings(split: &[String]) -> Vec<&str> {
    split.iter().map(String::as_str).collect()
}

#[test]
fn a_kernel_runs_once_its_event_is_waited_for_and_earlier_access_is_refused() {
    let device = Delayed::new(None);
    let arena = Arena::on(Arc::<Delayed>::clone(&device));
    let queue = arena.queue(1).unwrap();
    let tensor = |x: [f32; 2]| Tensor::from_slice(&arena, [2], &x, MemoryCategory::Workspace).unwrap();
    let [a, b, y] = [[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]].map(tensor);
    queue.add(a.view(), b.view(), y.view());
    let event = queue.record();
    assert!(!event.is_complete());
    let early = catch_unwind(AssertUnwindSafe(|| device.touch(y.view(), &"a test"))).unwrap_err();
    let message = early.downcast_ref::<String>().unwrap();
    assert!(message.starts_with("too early: a test touches f32 [2]"), "{message}");
    event.wait();
    device.touch(y.view(), &"a test");
    assert_eq!(queue.sum_of_squares(y.view()).wait().value(), 52.0);
    assert_eq!(y.view().fetch::<f32>(), [4.0, 6.0]);
}

#[test]
fn every_split_has_the_bits_of_the_cpu_however_late_it_computes() {
    let splits: Vec<_> = splits(2).into_iter().map(|split| split.settings).collect();
    let plans: Vec<Vec<&str>> = splits.iter().map(|split| settings(split)).collect();
    for model in [GPT2, LLAMA, QWEN3] {
        check(model, &plans);
    }
}

#[test]
fn so_has_every_split_of_a_mixture() {
    let splits: Vec<_> = expert_splits(2).into_iter().map(|split| split.settings).collect();
    let plans: Vec<Vec<&str>> = splits.iter().map(|split| settings(split)).collect();
    for model in [MIXTRAL, QWEN2_MOE, DEEPSEEK] {
        check(model, &plans);
    }
}

#[test]
fn so_have_codes_offloaded_state_and_narrow_weights() {
    let disk = tempfile::tempdir().unwrap();
    let disk = format!("parallel.offload.dir={}", disk.path().display());
    let (zero_2, zero_3) = ("parallel.zero_stage=2", "parallel.zero_stage=3");
    let optimizer = "parallel.offload.optimizer=disk";
    let offload = [optimizer, "parallel.offload.gradients=disk", "parallel.offload.parameters=disk", &disk];
    let codes = ["parallel.quantize_gradients=int8", "parallel.quantize_weights=int8"];
    check(
        LLAMA,
        &[
            vec![BF16],
            [&[SHARD, zero_3, BF16], &codes[..]].concat(),
            offload.to_vec(),
            [&[SHARD, zero_3], &offload[..]].concat(),
            vec![SHARD, zero_2, "parallel.offload.activations=disk", &disk],
            vec![PIPELINE, "parallel.pipeline_schedule=zb_v", "parallel.recompute=full", BF16],
        ],
    );
}

#[test]
fn a_run_that_computes_late_goes_on_from_its_checkpoint() {
    let plan = [SHARD, "parallel.zero_stage=2", BF16];
    let losses = |compute| Workbench::on(compute).unwrap().losses_of_both(GPT2, [&plan, &plan], 4).unwrap();
    assert_eq!(losses(LATE), losses(Compute::AtOnce));
}

/// Returns an arena and a queue of a device with the given fault.
fn device(fault: Option<Fault>) -> (Arena, Box<dyn Queue>) {
    let arena = Arena::on(Delayed::new(fault));
    let queue = arena.queue(1).unwrap();
    (arena, queue)
}

fn ones(arena: &Arena) -> Tensor {
    Tensor::from_slice(arena, [256], &[1.0_f32; 256], MemoryCategory::Workspace).unwrap()
}

#[test]
fn nothing_runs_before_it_is_waited_for() {
    let (arena, queue) = device(None);
    let x = ones(&arena);
    queue.scale(2.0, x.view(), x.view());
    let event = queue.record();
    queue.scale(3.0, x.view(), x.view());
    assert!(!event.is_complete());
    event.wait();
    let after = queue.record();
    assert!(event.is_complete() && !after.is_complete());
    assert_eq!(x.view().fetch::<f32>(), [6.0; 256]);
    assert!(after.is_complete());
}

#[test]
fn freed_memory_is_poison_and_somebody_elses_only_when_the_queue_has_passed_the_free() {
    let (arena, queue) = device(None);
    let buffer = || arena.allocate(1024, MemoryCategory::Workspace).unwrap();
    let place = |buffer: &Buffer| buffer.view(DType::U8, 0, [1]).as_ptr();
    let (first, sum) = (buffer(), ones(&arena));
    let memory = place(&first);
    let view = first.view(DType::F32, 0, [256]);
    queue.scale(4.0, sum.view(), view);
    queue.add(view, sum.view(), sum.view());
    drop(first);
    let second = buffer();
    assert_ne!(place(&second), memory, "the queue still uses it");
    assert_eq!(sum.view().fetch::<f32>(), [5.0; 256]);
    queue.finish();
    let third = buffer();
    assert_eq!(place(&third), memory, "the queue has passed it");
    assert!(third.view(DType::F32, 0, [256]).fetch::<f32>().iter().all(|value| value.is_nan()));
    assert_eq!(arena.in_use()[MemoryCategory::Workspace], 3 * third.len_bytes() + Workers::booked_bytes(1));
}

#[test]
fn a_queue_waits_for_the_event_of_another() {
    let [(arena, queue), (other_arena, other)] = [device(None), device(None)];
    let (x, y) = (ones(&arena), ones(&other_arena));
    queue.scale(7.0, x.view(), x.view());
    other.wait(&queue.record());
    other.add(x.view(), y.view(), y.view());
    assert_eq!(y.view().fetch::<f32>(), [8.0; 256]);
}

/// Returns the message of the panic in which `run` ends.
fn message_of<T>(run: impl FnOnce() -> T) -> String {
    let Err(panic) = catch_unwind(AssertUnwindSafe(run)) else { panic!("the fault went unnoticed") };
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap()
}

/// Checks that a run under `plan`, on devices with the given fault, panics with a message that starts with `expected`.
fn check_fault(fault: Fault, plan: &[&str], expected: &str) {
    let bench = Workbench::on(Compute::Delayed(Some(fault))).unwrap_or_else(|error| panic!("{error}"));
    let config = bench.config(GPT2, &[plan, &["parallel.timeout_s=5"]].concat()).unwrap();
    let message = message_of(|| bench.numbers(&config).map(drop));
    assert!(message.starts_with(expected) && message.contains("was called first"), "{plan:?}: {message}");
}

#[test]
fn fault_1_gradients_are_summed_before_the_backward_has_run() {
    check_fault(Fault::EventsComplete, &[REPLICAS], "too early: all_reduce touches");
}

#[test]
fn fault_2_activations_are_exchanged_before_they_are_computed() {
    check_fault(Fault::EventsComplete, &[TENSOR], "too early: ");
}

#[test]
fn fault_3_an_output_is_sent_to_the_next_stage_before_it_is_computed() {
    check_fault(Fault::EventsComplete, &[PIPELINE], "too early: send touches");
}

#[test]
fn fault_4_weights_are_gathered_before_they_are_updated() {
    check_fault(Fault::EventsComplete, &[SHARD, "parallel.zero_stage=3"], "too early: all_gather touches");
}

#[test]
fn fault_5_state_goes_to_the_disk_before_it_is_updated() {
    let disk = tempfile::tempdir().unwrap();
    let disk = format!("parallel.offload.dir={}", disk.path().display());
    let plan = ["parallel.offload.optimizer=disk", &disk];
    check_fault(Fault::EventsComplete, &plan, "too early: a write of a disk touches");
}

#[test]
fn fault_6_losses_are_read_before_they_are_computed() {
    check_fault(Fault::ReadsAtOnce, &[], "too early: a read of the host touches");
}

/// Returns two tensors on a device with the given fault. The second is to be computed from the first, but is not yet.
fn uncomputed(fault: Option<Fault>) -> (Tensor, Tensor, Box<dyn Queue>) {
    let (arena, queue) = device(fault);
    let zeros = || Tensor::zeros(&arena, DType::F32, [256], MemoryCategory::Workspace).unwrap();
    let (x, y) = (zeros(), zeros());
    queue.finish();
    queue.scale(2.0, x.view(), y.view());
    (x, y, queue)
}

#[test]
fn fault_7_the_next_batch_is_written_before_the_last_one_was_read() {
    let (x, _y, _queue) = uncomputed(Some(Fault::WritesAtOnce));
    let message = message_of(|| x.view().write(&[1.0_f32; 256]));
    let expected = "too early: a write of the host touches f32 [256] in a device's memory before `scale` on";
    assert!(message.starts_with(expected), "{message}");
}

#[test]
fn fault_8_a_buffer_is_freed_before_the_kernel_that_reads_it_has_run() {
    let (x, _y, _queue) = uncomputed(Some(Fault::FreesAtOnce));
    let message = message_of(|| drop(x));
    let expected = "too early: the free of a buffer touches u8 [1024] in a device's memory before `scale` on";
    assert!(message.starts_with(expected), "{message}");
}

#[test]
fn fault_9_a_queue_does_not_wait_for_the_event_of_another() {
    let (arena, queue) = device(None);
    let (other_arena, other) = device(Some(Fault::WaitsSkipped));
    let (x, y) = (ones(&arena), ones(&other_arena));
    queue.finish();
    queue.scale(7.0, x.view(), x.view());
    other.wait(&queue.record());
    other.add(x.view(), y.view(), y.view());
    let message = message_of(|| y.view().fetch::<f32>());
    let expected =
        "too early: `add` of another queue touches f32 [256] in a device's memory before `scale` on";
    assert!(message.starts_with(expected), "{message}");
}

#[test]
fn fault_10_the_host_reads_a_devices_memory() {
    let (arena, _queue) = device(None);
    let x = ones(&arena);
    let expected = "the host touches f32 [256] in the memory of a device";
    for message in
        [message_of(|| x.view().to_vec::<f32>()), message_of(|| x.view().copy_to(&mut [0.0_f32; 256]))]
    {
        assert!(message.starts_with(expected), "{message}");
    }
}

#[test]
fn fault_11_the_host_writes_a_devices_memory() {
    let (arena, _queue) = device(None);
    let message = message_of(|| ones(&arena).view().copy_from(&[0.0_f32; 256]));
    assert!(message.starts_with("the host touches f32 [256] in the memory of a device"), "{message}");
    let mut buffer = arena.allocate(512, MemoryCategory::Workspace).unwrap();
    let message = message_of(|| buffer.bytes_mut().fill(0));
    assert!(message.starts_with("the host touches 512 bytes in the memory of a device"), "{message}");
}

#[test]
fn fault_12_a_borrower_does_not_wait_for_the_event_of_its_loan() {
    let (arena, _queue) = device(None);
    let mut loan = arena.allocate_zeroed(512, MemoryCategory::Workspace).unwrap().lend(0..512);
    let message = message_of(|| loan.bytes().len());
    assert!(message.starts_with("the host touches 512 bytes in the memory of a device"), "{message}");
    loan.hand_over(&"a test");
    assert_eq!(loan.bytes(), [0; 512]);
}

#[test]
fn fault_13_a_kernel_does_not_wait_for_the_collective_that_brings_its_operand() {
    let deadline = || Deadline::after(Duration::from_secs(20));
    let groups = World::in_process(2, WorldOptions::default()).unwrap();
    let rank = |group: lockstep_comm::Group| {
        let (arena, queue) = device(None);
        let mut buffer = arena.allocate_zeroed(1024, MemoryCategory::Gradients).unwrap();
        let ones = ones(&arena);
        queue.cast(ones.view(), buffer.view(DType::F32, 0, [256]));
        let data = LentBuffer::new(buffer.lend(0..1024), DType::F32);
        let sum = group.start(Collective::AllReduce { data, op: ReduceOp::Sum }, deadline()).unwrap();
        let message = message_of(|| queue.zero(buffer.view(DType::F32, 0, [256])));
        assert!(message.starts_with("bytes 0..1024 of a buffer are lent in part"), "{message}");
        drop(sum.wait(deadline()).unwrap());
        queue.scale(0.5, buffer.view(DType::F32, 0, [256]), ones.view());
        assert_eq!(ones.view().fetch::<f32>(), [1.0; 256]);
    };
    std::thread::scope(|scope| {
        for group in groups {
            let rank = Arc::new(&rank);
            scope.spawn(move || rank(group));
        }
    });
}
