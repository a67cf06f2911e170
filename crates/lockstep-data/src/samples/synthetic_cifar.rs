//! A small data set in CIFAR-10's binary format, made of patterns that a model can learn: for examples and tests that
//! must not download anything.

use std::{fs, path::Path};

use lockstep_plan::random::{Philox, key_from_name, mix};

use super::cifar::{CIFAR10_TEST_FILE, CIFAR10_TRAIN_FILES, PIXEL_BYTES, PLANE_BYTES, SIDE};
use crate::error::{DataError, Result};

/// Direction of each class's stripes: the change of phase per column and per row, in 1/64 of a period.
const STRIPES: [(u64, u64); 10] =
    [(8, 0), (0, 8), (6, 6), (6, 58), (16, 0), (0, 16), (4, 12), (12, 60), (20, 20), (2, 4)];

/// Amplitude of each class's stripes in red, green and blue.
const COLORS: [[i64; 3]; 10] = [
    [48, 16, 16],
    [16, 48, 16],
    [16, 16, 48],
    [40, 40, 8],
    [8, 40, 40],
    [40, 8, 40],
    [28, 28, 28],
    [48, 24, 0],
    [0, 48, 24],
    [24, 0, 48],
];

/// Maximum change of a pixel by noise, and of an image by its brightness.
const NOISE: u64 = 40;
const BRIGHTNESS: u64 = 24;

/// Writes CIFAR-10's files (`data_batch_1.bin` to `_5.bin`, `test_batch.bin`, `batches.meta.txt`) to `directory`, with
/// `train_samples` and `test_samples` samples in all. The same arguments give the same bytes on every machine.
///
/// The image of a class has stripes of the class's direction, width and color, with a random phase and brightness, under
/// noise. A small convolutional network separates the classes; the mean color alone says little.
///
/// # Errors
/// If `train_samples` is below 5 or `test_samples` below 1, or a file cannot be written.
pub fn write_synthetic_cifar10(
    directory: &Path,
    train_samples: u64,
    test_samples: u64,
    seed: u64,
) -> Result<()> {
    let files = CIFAR10_TRAIN_FILES.len() as u64;
    if train_samples < files {
        return Err(DataError::out_of_range(
            "train_samples",
            train_samples,
            format!("{files} or more: one per file"),
        ));
    }
    if test_samples == 0 {
        return Err(DataError::out_of_range("test_samples", 0, "1 or more"));
    }
    fs::create_dir_all(directory).map_err(DataError::io("create", directory))?;
    let write = |name: &str, samples: std::ops::Range<u64>| {
        let path = directory.join(name);
        let bytes: Vec<u8> = samples.flat_map(|sample| record(seed, sample)).collect();
        fs::write(&path, bytes).map_err(DataError::io("write", &path))
    };
    for (file, name) in CIFAR10_TRAIN_FILES.iter().enumerate() {
        let file = file as u64;
        write(name, file * train_samples / files..(file + 1) * train_samples / files)?;
    }
    // Sample numbers far from those of any training part.
    write(CIFAR10_TEST_FILE, 1 << 40..(1 << 40) + test_samples)?;
    let meta = directory.join("batches.meta.txt");
    let names: String = (0..STRIPES.len()).map(|class| format!("stripes_{class}\n")).collect();
    fs::write(&meta, names).map_err(DataError::io("write", &meta))
}

/// Returns one record: label, then planes.
fn record(seed: u64, sample: u64) -> Vec<u8> {
    let philox = Philox::new(mix(seed ^ key_from_name("lockstep/synthetic-cifar")));
    let words = |block: u32| philox.block([sample as u32, (sample >> 32) as u32, block, 0]);
    let [class, phase, brightness, _] = words(0);
    let class = class as usize % STRIPES.len();
    let (phase, brightness) = (u64::from(phase % 64), spread(brightness, BRIGHTNESS));
    let (per_column, per_row) = STRIPES[class];
    let mut bytes = Vec::with_capacity(1 + PIXEL_BYTES);
    bytes.push(class as u8);
    let mut noise = [0; 4];
    for (plane, amplitude) in COLORS[class].into_iter().enumerate() {
        for pixel in 0..PLANE_BYTES {
            let at = plane * PLANE_BYTES + pixel;
            if at.is_multiple_of(4) {
                noise = words(1 + at as u32 / 4);
            }
            let (row, column) = ((pixel / SIDE) as u64, (pixel % SIDE) as u64);
            let wave = triangle(phase + column * per_column + row * per_row);
            let value = 128 + brightness + wave * amplitude / 16 + spread(noise[at % 4], NOISE);
            bytes.push(value.clamp(0, 255) as u8);
        }
    }
    bytes
}

/// Returns a number in `-most..=most` from random bits.
fn spread(bits: u32, most: u64) -> i64 {
    ((u64::from(bits) * (2 * most + 1)) >> 32) as i64 - most as i64
}

/// Returns a triangle wave of period 64 and amplitude 16 at `phase`.
fn triangle(phase: u64) -> i64 {
    let phase = (phase % 64) as i64;
    (if phase < 32 { phase } else { 64 - phase }) - 16
}
