//! Tests of windowed stores on a disk that is slow, silent, or fails.

use std::io;
use std::time::{Duration, Instant};

use lockstep_plan::{
    Extent, Initializer, ParameterRecord, ShardPlace, Share, StateItem, StoreKind, StoreLayout,
};
use lockstep_tensor::{Action, DiskError};

use super::*;
use crate::faulty_disk::DiskFaults;

const WINDOWS: usize = 20;
const ELEMENTS: usize = 2048;
const FIRST: StoreKind = StoreKind::MasterWeights;
const SECOND: StoreKind = StoreKind::Gradients;

/// Returns a store with two tensors of one parameter that spans many windows.
fn store(directory: &std::path::Path) -> WindowedStore {
    let record = ParameterRecord {
        name: "w".to_owned(),
        shape: vec![WINDOWS * ELEMENTS],
        share: Share::default(),
        initializer: Initializer::Zeros,
        tie: None,
        unit: 0,
        buffer: lockstep_plan::BufferUnit::alone(0),
        trainable: true,
        block_format: None,
        decay: false,
        learning_rate_multiplier: 1.0,
    };
    let arena = Arena::new();
    let (extent, alone) = (Extent::Whole, |_| ShardPlace::default());
    let records = [record];
    let layout = StoreLayout::partly_on_disk(&records, extent, alone, |_| true, |_, _| true);
    let item = StateItem { kind: FIRST, dtype: DType::F32, extent, layout };
    let layout = StateStore::zeros_of(&arena, &records, &item).unwrap();
    let offload = Offload {
        directory: directory.to_owned(),
        window_elements: ELEMENTS,
        limit: Duration::from_millis(200),
        ..Offload::default()
    };
    WindowedStore::zeros(&offload, &layout, vec![(FIRST, DType::F32), (SECOND, DType::F32)], &arena)
        .unwrap()
        .unwrap()
}

/// Adds 1 to all elements of the first kind, window by window as an optimizer step does.
fn pass(store: &mut WindowedStore) -> Result<(), EngineError> {
    for window in 0..WINDOWS {
        store.read_ahead(window, WINDOWS)?;
        store.load(window)?;
        let view = store.view(window, FIRST, 0..ELEMENTS);
        view.copy_from(&view.to_vec::<f32>().iter().map(|value| value + 1.0).collect::<Vec<_>>());
        store.mark_dirty(window);
    }
    store.write_behind()
}

fn contents(store: &mut WindowedStore, kind: StoreKind) -> Vec<f32> {
    let mut values = vec![0.0_f32; WINDOWS * ELEMENTS];
    let all = 0..values.len();
    store.read(ParameterId(0), kind, all, bytemuck::cast_slice_mut(&mut values)).unwrap();
    values
}

fn faulty_disk(mut store: WindowedStore, trouble: DiskFaults) -> WindowedStore {
    store.staging = store.staging.faulty_disk(trouble);
    store
}

#[test]
fn what_is_written_is_read_by_the_next_pass_however_slow_the_disk() {
    let directory = tempfile::tempdir().unwrap();
    for delay in [Duration::ZERO, Duration::from_millis(2)] {
        let mut store = faulty_disk(store(directory.path()), DiskFaults { delay, ..DiskFaults::default() });
        let values: Vec<f32> = (0..WINDOWS * ELEMENTS).map(|i| i as f32).collect();
        // Element 3,000 is not at a window boundary.
        store.write(ParameterId(0), SECOND, 0, &values[..3000]).unwrap();
        store.write(ParameterId(0), SECOND, 3000, &values[3000..]).unwrap();
        (0..3).for_each(|_| pass(&mut store).unwrap());
        assert!(contents(&mut store, FIRST).iter().all(|value| *value == 3.0));
        assert!(contents(&mut store, SECOND) == values);
    }
}

#[test]
fn the_windows_of_elements_are_those_that_have_some_of_them() {
    let directory = tempfile::tempdir().unwrap();
    let store = store(directory.path());
    let all = 0..WINDOWS * ELEMENTS;
    let boundaries =
        [0, 1, ELEMENTS - 1, ELEMENTS, ELEMENTS + 1, 7 * ELEMENTS, all.end - 1, all.end, all.end + 5];
    for start in boundaries {
        for end in boundaries {
            let has_some = |window: &usize| {
                let has = &store.windows()[*window].elements;
                start.max(has.start) < end.min(has.end)
            };
            let expected: Vec<usize> = (0..WINDOWS).filter(has_some).collect();
            let found: Vec<usize> = store.windows_with(0, &(start..end)).collect();
            assert_eq!(found, expected, "{start}..{end}");
        }
    }
}

#[test]
fn each_byte_of_a_long_parameter_is_read_once_though_its_kinds_are_asked_for_one_after_the_other() {
    let directory = tempfile::tempdir().unwrap();
    let mut store = store(directory.path());
    let values: Vec<f32> = (0..WINDOWS * ELEMENTS).map(|i| i as f32).collect();
    for kind in [FIRST, SECOND] {
        store.write(ParameterId(0), kind, 0, &values).unwrap();
    }
    store.write_behind().unwrap();
    store.staging.take_traffic();
    let mut piece = vec![0.0_f32; ELEMENTS / 2];
    for kind in [FIRST, SECOND] {
        for (start, expected) in (0..).step_by(piece.len()).zip(values.chunks(piece.len())) {
            let elements = start..start + expected.len();
            store.read(ParameterId(0), kind, elements, bytemuck::cast_slice_mut(&mut piece)).unwrap();
            assert!(piece == expected, "{kind:?} from {start} on");
        }
    }
    let (read, all) = (store.staging.take_traffic().read_bytes, (2 * 4 * WINDOWS * ELEMENTS) as u64);
    // The windows that were written last are still in memory.
    assert!(read <= all && read >= all - (WINDOW_SLOTS * 2 * 4 * ELEMENTS) as u64, "{read} of {all} bytes");
}

#[test]
fn a_write_that_fails_is_an_error_of_the_pass_or_of_the_next_one() {
    let directory = tempfile::tempdir().unwrap();
    for fails_at in [0, 7, WINDOWS - 1] {
        let mut store = faulty_disk(
            store(directory.path()),
            DiskFaults { fails_at: Some((fails_at, Some(Action::Write))), ..DiskFaults::default() },
        );
        let error = pass(&mut store).and_then(|()| pass(&mut store)).unwrap_err();
        assert!(
            matches!(&error, EngineError::Disk(DiskError::Transfer { action: Action::Write, source, .. })
                if source.kind() == io::ErrorKind::StorageFull),
            "{error}"
        );
    }
}

#[test]
fn a_disk_that_says_nothing_is_an_error_in_time() {
    let directory = tempfile::tempdir().unwrap();
    let mut store =
        faulty_disk(store(directory.path()), DiskFaults { is_silent: true, ..DiskFaults::default() });
    let begin = Instant::now();
    let error = pass(&mut store).unwrap_err();
    assert!(matches!(error, EngineError::Disk(DiskError::Silent { .. })), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}
