//! TFRecord: files of records that each hold one [`Example`].
//!
//! A record is its length (u64), the masked CRC-32C of the length (u32), the bytes, and their masked CRC-32C (u32), all
//! little endian. One pass over the lengths finds the records; the bytes are checked when a sample is read.

use std::{
    fs::File,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use lockstep_tensor::{NamedTensor, TensorData};

use super::{
    brace::expand_shards,
    dataset::{Dataset, check_index, get_new},
    field::{Field, FieldKind, check_fields, shape_text},
    record_index::ShardIndex,
    shards::{ShardOptions, Shards},
    tensor::{Sample, TensorSpec},
    tf_example::{Example, Feature},
};
use crate::error::{DataError, Result};

/// Bytes before and after the contents of a record.
const HEADER_BYTES: usize = 12;
const FOOTER_BYTES: usize = 4;

/// Version of the numbers in an index: offset and length of the contents of each record.
const INDEX_PURPOSE: &str = "lockstep tfrecord index 1";

/// Constant of the mask of checksums.
const MASK_DELTA: u32 = 0xA282_EAD8;

/// Returns the masked CRC-32C of `bytes`, as records store it.
pub fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(MASK_DELTA)
}

/// Appends a record to `out`.
pub fn write_record(contents: &[u8], out: &mut Vec<u8>) {
    let length = (contents.len() as u64).to_le_bytes();
    out.extend(length);
    out.extend(masked_crc(&length).to_le_bytes());
    out.extend(contents);
    out.extend(masked_crc(contents).to_le_bytes());
}

/// Returns the offset and length of the contents of each record. Damage ends the index.
fn index_records(file: &File, path: &Path) -> Result<ShardIndex> {
    let io = |error| DataError::io("read", path)(error);
    let file_bytes = file.metadata().map_err(io)?.len();
    let mut numbers = Vec::new();
    let mut at = 0;
    while at < file_bytes {
        let mut header = [0; HEADER_BYTES];
        let there = (file_bytes - at).min(HEADER_BYTES as u64) as usize;
        file.read_exact_at(&mut header[..there], at).map_err(io)?;
        let length = match check_length(&header[..there], at, file_bytes) {
            Ok(length) => length,
            Err(problem) => {
                let record = format!("record {}", numbers.len() / 2);
                let bad = DataError::BadRecord { path: path.to_owned(), record, offset_bytes: at, problem };
                return Ok(ShardIndex { numbers, damage: Some(bad) });
            }
        };
        numbers.extend([at + HEADER_BYTES as u64, length]);
        at += length + (HEADER_BYTES + FOOTER_BYTES) as u64;
    }
    Ok(ShardIndex { numbers, damage: None })
}

/// Returns the length that the header of a record at `at` states.
fn check_length(header: &[u8], at: u64, file_bytes: u64) -> Result<u64, String> {
    let (Some((length, crc)), HEADER_BYTES) = (header.split_first_chunk(), header.len()) else {
        return Err(format!(
            "the file ends after {} of its {HEADER_BYTES} bytes of header: it was cut off",
            header.len()
        ));
    };
    let crc = u32::from_le_bytes(std::array::from_fn(|byte| crc[byte]));
    let expected = masked_crc(length);
    if crc != expected {
        let is_gzip = header.starts_with(&[0x1F, 0x8B]);
        let hint = if is_gzip { "; the file is compressed by gzip, decompress it" } else { "" };
        return Err(format!(
            "the checksum of its length is {expected:#010x}, but the file says {crc:#010x}{hint}"
        ));
    }
    let length = u64::from_le_bytes(*length);
    let end = length.checked_add(at + (HEADER_BYTES + FOOTER_BYTES) as u64);
    if end.is_none_or(|end| end > file_bytes) {
        return Err(format!("it has {length} bytes, but the file ends at byte {file_bytes}: it was cut off"));
    }
    Ok(length)
}

/// Samples in TFRecord files; a tensor per [`Field`], whose keys are names of features.
#[derive(Debug)]
pub struct TfRecordDataset {
    shards: Shards,
    fields: Vec<Field>,
    specs: Vec<TensorSpec>,
}

impl TfRecordDataset {
    /// Opens the files that `shards` names, such as `data/train-{00000..00099}-of-00100.tfrecord`; see
    /// [`expand_shards`].
    ///
    /// # Errors
    /// If a file cannot be read, is damaged (unless `on_damage` says otherwise) or compressed, there is no record, or
    /// `fields` is empty or ambiguous.
    pub fn open(shards: &str, fields: Vec<Field>, options: ShardOptions<'_>) -> Result<Self> {
        Self::from_files(expand_shards(shards)?, fields, options)
    }

    /// Opens these files, in this order, as [`open`](Self::open) does.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn from_files(paths: Vec<PathBuf>, fields: Vec<Field>, options: ShardOptions<'_>) -> Result<Self> {
        check_fields(&fields)?;
        let shards = Shards::open(paths, 2, options, INDEX_PURPOSE, index_records)?;
        let specs = fields.iter().map(Field::spec).collect();
        Ok(Self { shards, fields, specs })
    }

    /// Returns the damages at which files end early, with [`OnBadSample::Skip`](super::OnBadSample::Skip).
    pub fn damages(&self) -> &[DataError] {
        &self.shards.damages
    }
}

/// Decodes the feature of a field into its tensor.
fn decode(field: &Field, example: &Example<'_>, tensor: &mut NamedTensor) -> Result<(), String> {
    let found = field.keys.iter().find_map(|key| Some((key, example.feature(key)?)));
    let Some((key, feature)) = found else {
        let names: Vec<String> = example.names().take(8).collect();
        return Err(format!("it has no feature {} (it has: {})", field.described(), names.join(", ")));
    };
    let one = |expected: &str| format!("its feature \"{key}\" is not {expected}");
    match (&field.kind, feature) {
        (FieldKind::Image(_) | FieldKind::Bytes, Feature::Bytes(values)) => {
            let [bytes] = values[..] else { return Err(one("one byte string")) };
            field.decode(bytes, tensor).map_err(|problem| format!("feature \"{key}\": {problem}"))
        }
        (FieldKind::Image(_) | FieldKind::Bytes, _) => Err(one("one byte string")),
        (FieldKind::Class { .. }, Feature::Integers(values)) => match values[..] {
            [label] => field.push_class(label, tensor),
            _ => Err(one("one integer")),
        },
        (FieldKind::Class { .. }, _) => Err(one("one integer")),
        (FieldKind::Array { shape, .. }, feature) => {
            push_values(feature, &mut tensor.data).ok_or_else(|| {
                let dtype = tensor.data.dtype();
                one(&format!("a list of numbers that {dtype} holds"))
            })?;
            let count = tensor.data.len();
            tensor.shape = concrete_shape(shape, count)
                .ok_or_else(|| one(&format!("{} values: it has {count}", shape_text(shape))))?;
            Ok(())
        }
    }
}

/// Appends the values of a list; `None` if the dtype does not hold them.
fn push_values(feature: &Feature<'_>, data: &mut TensorData) -> Option<()> {
    match (feature, data) {
        (Feature::Floats(values), TensorData::F32(data)) => data.extend(values),
        (Feature::Integers(values), TensorData::I32(data)) => push_integers(values, data)?,
        (Feature::Integers(values), TensorData::U32(data)) => push_integers(values, data)?,
        (Feature::Integers(values), TensorData::U8(data)) => push_integers(values, data)?,
        (Feature::Empty, _) => {}
        _ => return None,
    }
    Some(())
}

fn push_integers<T: TryFrom<i64>>(values: &[i64], data: &mut Vec<T>) -> Option<()> {
    for &value in values {
        data.push(value.try_into().ok()?);
    }
    Some(())
}

/// Returns `shape` with its varying extent replaced, so that it has `count` elements; `None` if there is no such shape.
fn concrete_shape(shape: &[Option<usize>], count: usize) -> Option<Vec<usize>> {
    let fixed = shape.iter().flatten().try_fold(1_usize, |product, &extent| product.checked_mul(extent))?;
    let varying = match shape.iter().filter(|extent| extent.is_none()).count() {
        0 if fixed == count => 1,
        1 if fixed > 0 && count.is_multiple_of(fixed) => count / fixed,
        _ => return None,
    };
    Some(shape.iter().map(|extent| extent.unwrap_or(varying)).collect())
}

impl Dataset for TfRecordDataset {
    fn len(&self) -> u64 {
        self.shards.len()
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        self.specs.clone()
    }

    fn get(&self, index: u64) -> Result<Sample> {
        get_new(self, index)
    }

    fn get_into(&self, index: u64, sample: &mut Sample) -> Result<()> {
        check_index(index, self.len())?;
        let (tensors, record) = sample.prepare_with_record(&self.specs);
        let (shard, number, numbers) = self.shards.locate(index);
        let (offset, length) = (numbers[0], numbers[1] as usize);
        let bad = |at: u64, problem| DataError::BadRecord {
            path: self.shards.files.path(shard).to_owned(),
            record: format!("record {number}"),
            offset_bytes: offset + at,
            problem,
        };
        record.clear();
        self.shards.files.read(shard, offset, length + FOOTER_BYTES, record)?;
        let (contents, crc) = record.split_at(length);
        let crc = u32::from_le_bytes(std::array::from_fn(|byte| crc[byte]));
        let expected = masked_crc(contents);
        if crc != expected {
            return Err(bad(
                0,
                format!("the checksum of its bytes is {expected:#010x}, but the file says {crc:#010x}"),
            ));
        }
        let example = Example::parse(contents).map_err(|problem| {
            bad(problem.offset_bytes, format!("it is not a tf.Example: {}", problem.problem))
        })?;
        for (field, tensor) in self.fields.iter().zip(tensors) {
            decode(field, &example, tensor).map_err(|problem| bad(0, problem))?;
        }
        Ok(())
    }
}
