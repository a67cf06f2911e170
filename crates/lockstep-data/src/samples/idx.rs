//! The idx format of MNIST, also compressed by gzip.
//!
//! A file is big endian: two zero bytes, a type code, the number of dimensions, a u32 for each, and the elements.
//! MNIST's images are u8 `[samples, 28, 28]` (magic number 0x803), its labels u8 `[samples]` (0x801).

use std::{
    fs::File,
    io::{BufReader, Read},
    path::Path,
};

use lockstep_tensor::{NamedTensor, TensorData};

use super::dataset::{TensorDataset, is_class, label_problem};
use crate::error::{DataError, Result};

/// Bytes of the fixed part of the header.
const MAGIC_BYTES: usize = 4;

/// Maximum number of dimensions; the format allows 255.
const MOST_DIMENSIONS: usize = 8;

/// First bytes of a gzip file.
const GZIP_MAGIC: [u8; 2] = [0x1F, 0x8B];

/// Rule of the idx format that a file breaks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdxProblem {
    /// Offset of the damage in the uncompressed contents, in bytes.
    pub offset_bytes: u64,
    /// Description of the problem, with the allowed values.
    pub problem: String,
}

/// Header of an idx file.
struct Header {
    /// Type code of the elements.
    code: u8,
    shape: Vec<usize>,
}

impl Header {
    /// Number of bytes of the elements; `None` beyond the address space.
    fn data_bytes(&self) -> Option<u64> {
        let elements =
            self.shape.iter().try_fold(1_u64, |elements, &extent| elements.checked_mul(extent as u64))?;
        elements.checked_mul(element_bytes(self.code) as u64).filter(|&bytes| bytes < isize::MAX as u64)
    }

    fn bytes(&self) -> u64 {
        (MAGIC_BYTES + 4 * self.shape.len()) as u64
    }
}

/// Returns the bytes of an element; 0 for an unknown code.
fn element_bytes(code: u8) -> usize {
    match code {
        0x08 | 0x09 => 1,
        0x0B => 2,
        0x0C | 0x0D => 4,
        0x0E => 8,
        _ => 0,
    }
}

/// Contents of an idx file.
#[derive(Debug, Clone, PartialEq)]
pub struct IdxArray {
    /// Extent of each dimension.
    pub shape: Vec<usize>,
    /// Elements; i8, i16 and i32 become i32, f64 becomes f32.
    pub data: TensorData,
    /// Bytes of an element in the file.
    element_bytes: usize,
}

/// Reads an idx file from its uncompressed bytes.
///
/// # Errors
/// If the header is none of the format, or the elements are fewer or more than it says.
pub fn parse_idx(mut reader: impl Read) -> Result<IdxArray, IdxProblem> {
    let header = read_header(&mut reader)?;
    let problem = |offset_bytes, problem| IdxProblem { offset_bytes, problem };
    let expected = header.data_bytes().ok_or_else(|| {
        problem(MAGIC_BYTES as u64, format!("its shape {:?} is beyond the address space", header.shape))
    })?;
    // The length in the header is not trusted: memory grows with what is really there.
    let mut bytes = Vec::new();
    let read = reader.by_ref().take(expected.saturating_add(1)).read_to_end(&mut bytes);
    let end = header.bytes() + bytes.len() as u64;
    read.map_err(|error| problem(end, format!("it cannot be read further: {error}")))?;
    if bytes.len() as u64 != expected {
        let is_short = (bytes.len() as u64) < expected;
        let found = if is_short { format!("only {}", bytes.len()) } else { "more".to_owned() };
        let problem =
            format!("its shape {:?} needs {expected} bytes of elements, and {found} follow", header.shape);
        return Err(IdxProblem { offset_bytes: end.min(header.bytes() + expected), problem });
    }
    let element_bytes = element_bytes(header.code);
    Ok(IdxArray { data: elements(header.code, bytes), shape: header.shape, element_bytes })
}

fn read_header(reader: &mut impl Read) -> Result<Header, IdxProblem> {
    let mut magic = [0; MAGIC_BYTES];
    let problem = |offset_bytes, problem| IdxProblem { offset_bytes, problem };
    let short = |error: std::io::Error| problem(0, format!("its header cannot be read: {error}"));
    reader.read_exact(&mut magic).map_err(short)?;
    let [zero, zero_too, code, dimensions] = magic;
    if [zero, zero_too] != [0, 0] || element_bytes(code) == 0 {
        return Err(problem(
            0,
            format!(
                "its magic number is {:#010x}; allowed: 0x00000803 for images, 0x00000801 for labels, in general two \
                 zero bytes, a type (08 u8, 09 i8, 0b i16, 0c i32, 0d f32, 0e f64) and the number of dimensions",
                u32::from_be_bytes(magic)
            ),
        ));
    }
    if !(1..=MOST_DIMENSIONS).contains(&usize::from(dimensions)) {
        return Err(problem(3, format!("it has {dimensions} dimensions; allowed: 1 to {MOST_DIMENSIONS}")));
    }
    let mut shape = Vec::new();
    for _ in 0..dimensions {
        let mut extent = [0; 4];
        reader.read_exact(&mut extent).map_err(short)?;
        shape.push(u32::from_be_bytes(extent) as usize);
    }
    Ok(Header { code, shape })
}

/// Converts elements; `bytes` is a whole number of them.
fn elements(code: u8, bytes: Vec<u8>) -> TensorData {
    match code {
        0x08 => TensorData::U8(bytes),
        0x09 => TensorData::I32(bytes.iter().map(|&byte| i32::from(byte as i8)).collect()),
        0x0B => TensorData::I32(bytes.as_chunks().0.iter().map(|c| i16::from_be_bytes(*c).into()).collect()),
        0x0C => TensorData::I32(bytes.as_chunks().0.iter().map(|c| i32::from_be_bytes(*c)).collect()),
        0x0D => TensorData::F32(bytes.as_chunks().0.iter().map(|c| f32::from_be_bytes(*c)).collect()),
        _ => TensorData::F32(bytes.as_chunks().0.iter().map(|c| f64::from_be_bytes(*c) as f32).collect()),
    }
}

/// Reads an idx file; contents that begin as gzip are decompressed.
///
/// # Errors
/// If the file cannot be opened or is not a sound idx file.
pub fn read_idx(path: &Path) -> Result<IdxArray> {
    let mut file = File::open(path).map_err(DataError::io("open", path))?;
    let mut start = Vec::new();
    file.by_ref().take(2).read_to_end(&mut start).map_err(DataError::io("read", path))?;
    let is_gzip = start == GZIP_MAGIC;
    let contents = BufReader::new(start.as_slice().chain(file));
    let parsed =
        if is_gzip { parse_idx(flate2::bufread::GzDecoder::new(contents)) } else { parse_idx(contents) };
    parsed.map_err(|IdxProblem { offset_bytes, problem }| {
        bad(path, "the file".to_owned(), offset_bytes, problem)
    })
}

fn bad(path: &Path, record: String, offset_bytes: u64, problem: String) -> DataError {
    DataError::BadRecord { path: path.to_owned(), record, offset_bytes, problem }
}

/// Reads images and labels in the format of MNIST into memory: tensors `image` (`[height, width, 1]` for images without
/// channels) and `label` (i32). With `num_classes`, labels are checked.
///
/// # Errors
/// If a file is damaged, the images are not `[samples, height, width]` or `[samples, height, width, channels]`, the
/// labels are not `[samples]` of integers, their numbers differ, or a label is beyond the classes.
pub fn open_idx(images: &Path, labels: &Path, num_classes: Option<u32>) -> Result<TensorDataset> {
    let IdxArray { mut shape, data: pixels, .. } = read_idx(images)?;
    if !(3..=4).contains(&shape.len()) {
        let problem = format!(
            "its shape is {shape:?}; images are [samples, height, width] or [samples, height, width, channels], as in \
             train-images-idx3-ubyte"
        );
        return Err(bad(images, "the header".to_owned(), 3, problem));
    }
    let values = read_labels(labels, num_classes)?;
    let samples = values.len();
    if samples != shape[0] {
        let problem = format!("it has {samples} labels for the {} images of {}", shape[0], images.display());
        return Err(bad(labels, "the header".to_owned(), MAGIC_BYTES as u64, problem));
    }
    if shape.len() == 3 {
        shape.push(1);
    }
    TensorDataset::new(vec![
        NamedTensor::new("image", &shape, pixels),
        NamedTensor::new("label", &[samples], TensorData::I32(values)),
    ])
}

fn read_labels(path: &Path, num_classes: Option<u32>) -> Result<Vec<i32>> {
    let IdxArray { shape, data, element_bytes } = read_idx(path)?;
    if shape.len() != 1 {
        let problem = format!("its shape is {shape:?}; labels are [samples], as in train-labels-idx1-ubyte");
        return Err(bad(path, "the header".to_owned(), 3, problem));
    }
    let values: Vec<i32> = match data {
        TensorData::U8(values) => values.into_iter().map(i32::from).collect(),
        TensorData::I32(values) => values,
        TensorData::U32(_) | TensorData::F32(_) => {
            return Err(bad(
                path,
                "the header".to_owned(),
                2,
                "its labels are floats; allowed: integers".to_owned(),
            ));
        }
    };
    let Some(num_classes) = num_classes else { return Ok(values) };
    match values.iter().position(|&label| !is_class(label.into(), num_classes)) {
        None => Ok(values),
        Some(at) => {
            let offset = (MAGIC_BYTES + 4 + at * element_bytes) as u64;
            Err(bad(path, format!("label {at}"), offset, label_problem(&values[at], num_classes)))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn idx(code: u8, shape: &[u32], data: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0, 0, code, shape.len() as u8];
        bytes.extend(shape.iter().flat_map(|extent| extent.to_be_bytes()));
        bytes.extend(data);
        bytes
    }

    #[test]
    fn every_element_type_is_read() {
        for (code, data, expected) in [
            (0x08, &[0, 255][..], TensorData::U8(vec![0, 255])),
            (0x09, &[0x80, 0x7F], TensorData::I32(vec![-128, 127])),
            (0x0B, &[0xFF, 0xFE, 1, 0], TensorData::I32(vec![-2, 256])),
            (0x0C, &[0, 0, 0, 1, 0xFF, 0xFF, 0xFF, 0xFF], TensorData::I32(vec![1, -1])),
            (0x0D, &[0x3F, 0x80, 0, 0, 0xC0, 0, 0, 0], TensorData::F32(vec![1.0, -2.0])),
            (0x0E, &[0x3F, 0xF0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], TensorData::F32(vec![1.0, 0.0])),
        ] {
            let array = parse_idx(idx(code, &[1, 2], data).as_slice()).unwrap();
            assert_eq!((array.shape, array.data), (vec![1, 2], expected));
        }
    }

    #[test]
    fn a_broken_file_is_refused_at_its_offset() {
        let sound = idx(0x08, &[2, 3], &[0; 6]);
        let longer = [sound.as_slice(), &[0]].concat();
        for (bytes, offset, part) in [
            (&b""[..], 0, "header cannot be read"),
            (&sound[..7], 0, "header cannot be read"),
            (&sound[..14], 14, "needs 6 bytes of elements, and only 2 follow"),
            (&longer, 18, "needs 6 bytes of elements, and more follow"),
            (b"\x89PNG1234", 0, "magic number is 0x89504e47; allowed: 0x00000803"),
            (&idx(0x0A, &[1], &[0]), 0, "magic number is 0x00000a01"),
            (&idx(0x08, &[], &[]), 3, "0 dimensions; allowed: 1 to 8"),
            (&idx(0x0E, &[u32::MAX, u32::MAX], &[]), 4, "beyond the address space"),
            (&idx(0x08, &[u32::MAX], &[1, 2]), 10, "only 2 follow"),
        ] {
            let problem = parse_idx(bytes).unwrap_err();
            assert!(problem.problem.contains(part), "{problem:?}");
            assert_eq!(problem.offset_bytes, offset, "{problem:?}");
        }
    }

    #[test]
    fn images_and_labels_are_checked_against_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        let images = idx(0x08, &[2, 1, 3], &[1, 2, 3, 4, 5, 6]);
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&images).unwrap();
        let compressed = gzip.finish().unwrap();
        let labels = write("labels", &idx(0x0B, &[2], &[0, 7, 0, 9]));
        for bytes in [&images, &compressed] {
            let data = open_idx(&write("images.gz", bytes), &labels, Some(10)).unwrap();
            assert_eq!(data.arrays()[0].shape, [2, 1, 3, 1]);
            assert_eq!(data.arrays()[0].data, TensorData::U8(vec![1, 2, 3, 4, 5, 6]));
            assert_eq!(data.arrays()[1].data, TensorData::I32(vec![7, 9]));
        }
        let images = write("images", &images);
        let message =
            |images: &Path, labels: &Path| open_idx(images, labels, Some(9)).unwrap_err().to_string();
        let text = message(&images, &labels);
        assert!(
            text.contains("labels, label 1 at byte 10: its label is 9, but there are 9 classes: 0 to 8"),
            "{text}"
        );
        let text = message(&images, &write("three", &idx(0x08, &[3], &[0, 0, 0])));
        assert!(text.contains("three, the header at byte 4: it has 3 labels for the 2 images"), "{text}");
        let text = message(&labels, &labels);
        assert!(text.contains("its shape is [2]; images are [samples, height, width]"), "{text}");
        let text = message(&write("cut.gz", &compressed[..compressed.len() - 12]), &labels);
        assert!(text.contains("cut.gz, the file at byte"), "{text}");
    }
}
