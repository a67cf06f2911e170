//! CIFAR-10 and CIFAR-100 in their binary version.
//!
//! A file is a sequence of records without a header: one label byte (two for CIFAR-100: coarse, fine), then 3,072
//! pixels as planes of red, green and blue, each 32 × 32 row-major. Samples are read from the files, not kept in memory.

use std::{
    fs,
    path::{Path, PathBuf},
};

use lockstep_plan::DType;
use lockstep_tensor::TensorData;

use super::{
    dataset::{Dataset, check_index, get_new, label_problem},
    file_pool::FilePool,
    tensor::{Sample, TensorSpec},
};
use crate::error::{DataError, Result};

/// Height and width of the images, in pixels.
pub(crate) const SIDE: usize = 32;
/// Pixels of one color.
pub(crate) const PLANE_BYTES: usize = SIDE * SIDE;
/// Bytes of the pixels of one record.
pub(crate) const PIXEL_BYTES: usize = 3 * PLANE_BYTES;
/// Bytes of the longest record.
const MOST_RECORD_BYTES: usize = 2 + PIXEL_BYTES;

/// Version of the data set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CifarKind {
    /// 10 classes: tensors `image` (u8 `[32, 32, 3]`) and `label` (i32).
    Cifar10,
    /// 100 classes in 20 groups: tensors `image`, `label` (the fine one) and `coarse_label`.
    Cifar100,
}

/// Part of a data set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// Samples to train on.
    Train,
    /// Samples held out.
    Test,
}

impl CifarKind {
    /// Names and class counts of the label bytes, in the order of the file.
    fn labels(self) -> &'static [(&'static str, u32)] {
        match self {
            Self::Cifar10 => &[("label", 10)],
            Self::Cifar100 => &[("coarse_label", 20), ("label", 100)],
        }
    }

    fn record_bytes(self) -> usize {
        self.labels().len() + PIXEL_BYTES
    }

    /// Names of the files of a part.
    fn files(self, split: Split) -> &'static [&'static str] {
        match (self, split) {
            (Self::Cifar10, Split::Train) => &CIFAR10_TRAIN_FILES,
            (Self::Cifar10, Split::Test) => &[CIFAR10_TEST_FILE],
            (Self::Cifar100, Split::Train) => &["train.bin"],
            (Self::Cifar100, Split::Test) => &["test.bin"],
        }
    }

    /// Returns the files of a part in `directory`, or in the published archive's directory below it.
    pub fn files_in(self, directory: &Path, split: Split) -> Vec<PathBuf> {
        let inner = directory.join(self.archive_directory());
        let directory = if inner.is_dir() { &inner } else { directory };
        self.files(split).iter().map(|name| directory.join(name)).collect()
    }

    /// Directory in the published archive.
    fn archive_directory(self) -> &'static str {
        match self {
            Self::Cifar10 => "cifar-10-batches-bin",
            Self::Cifar100 => "cifar-100-binary",
        }
    }
}

/// Names of the files of CIFAR-10's training part.
pub(crate) const CIFAR10_TRAIN_FILES: [&str; 5] =
    ["data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin"];
/// Name of the file of CIFAR-10's test part.
pub(crate) const CIFAR10_TEST_FILE: &str = "test_batch.bin";

/// CIFAR-10 or CIFAR-100 on disk.
#[derive(Debug)]
pub struct Cifar {
    kind: CifarKind,
    files: FilePool,
    /// Number of records before each file, and the total.
    starts: Vec<u64>,
    specs: Vec<TensorSpec>,
}

impl Cifar {
    /// Opens one part of a data set in `directory`, or in the published archive's directory below it
    /// (`cifar-10-batches-bin`, `cifar-100-binary`).
    ///
    /// # Errors
    /// If a file is missing, empty, or not a whole number of records.
    pub fn open(directory: &Path, kind: CifarKind, split: Split) -> Result<Self> {
        Self::from_files(kind.files_in(directory, split), kind)
    }

    /// Opens files of records, in this order.
    ///
    /// # Errors
    /// If there is no file, or one is missing, empty, or not a whole number of records.
    pub fn from_files(paths: Vec<PathBuf>, kind: CifarKind) -> Result<Self> {
        let record_bytes = kind.record_bytes() as u64;
        let mut starts = vec![0];
        let mut end = 0;
        for path in &paths {
            let bytes = fs::metadata(path).map_err(DataError::io("open", path))?.len();
            let records = bytes / record_bytes;
            if bytes == 0 || bytes % record_bytes != 0 {
                return Err(DataError::BadRecord {
                    path: path.clone(),
                    record: format!("record {records}"),
                    offset_bytes: records * record_bytes,
                    problem: format!(
                        "it has {} bytes; allowed: one or more records of {record_bytes} bytes, the binary version of \
                         the data set",
                        bytes % record_bytes
                    ),
                });
            }
            end += records;
            starts.push(end);
        }
        if paths.is_empty() {
            return Err(DataError::out_of_range("the number of CIFAR files", 0, "1 or more"));
        }
        let mut specs = vec![TensorSpec::fixed("image", DType::U8, &[SIDE, SIDE, 3])];
        let labels = kind.labels().iter().rev();
        specs.extend(labels.map(|(name, _)| TensorSpec::fixed(*name, DType::I32, &[])));
        Ok(Self { kind, files: FilePool::new(paths), starts, specs })
    }

    fn fill(&self, index: u64, sample: &mut Sample) -> Result<()> {
        let file = self.starts.partition_point(|&start| start <= index) - 1;
        let record = index - self.starts[file];
        let record_bytes = self.kind.record_bytes();
        let offset = record * record_bytes as u64;
        let mut bytes = [0; MOST_RECORD_BYTES];
        let bytes = &mut bytes[..record_bytes];
        self.files.read_exact(file, offset, bytes)?;
        let (labels, planes) = bytes.split_at(self.kind.labels().len());
        let [image, label_tensors @ ..] = sample.prepare(&self.specs) else { return Ok(()) };
        for (at, (&label, &(_, classes))) in labels.iter().zip(self.kind.labels()).enumerate() {
            if u32::from(label) >= classes {
                return Err(DataError::BadRecord {
                    path: self.files.path(file).to_owned(),
                    record: format!("record {record}"),
                    offset_bytes: offset + at as u64,
                    problem: label_problem(&label, classes),
                });
            }
        }
        for (tensor, &label) in label_tensors.iter_mut().zip(labels.iter().rev()) {
            if let TensorData::I32(values) = &mut tensor.data {
                values.push(i32::from(label));
            }
        }
        image.shape.extend([SIDE, SIDE, 3]);
        if let TensorData::U8(pixels) = &mut image.data {
            interleave(planes, pixels);
        }
        Ok(())
    }
}

/// Appends three planes as pixels of three bytes.
fn interleave(planes: &[u8], pixels: &mut Vec<u8>) {
    let (red, rest) = planes.split_at(PLANE_BYTES);
    let (green, blue) = rest.split_at(PLANE_BYTES);
    for ((&red, &green), &blue) in red.iter().zip(green).zip(blue) {
        pixels.extend_from_slice(&[red, green, blue]);
    }
}

impl Dataset for Cifar {
    fn len(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        self.specs.clone()
    }

    fn get(&self, index: u64) -> Result<Sample> {
        get_new(self, index)
    }

    fn get_into(&self, index: u64, sample: &mut Sample) -> Result<()> {
        check_index(index, self.len())?;
        self.fill(index, sample)
    }
}
