//! Fuzz targets of data sets beyond text: image files, arrays, and shards of records.

use std::io::Write;

use lockstep_data::DataError;
use lockstep_data::samples::{
    Channels, Cifar, CifarKind, Dataset, Example, Feature, Field, OnBadSample, Sample, ShardOptions,
    TensorData, TfRecordDataset, WebDataset, decode_image, masked_crc, parse_idx, read_npy,
};
use lockstep_plan::DType;

use crate::Verdict;

/// Size of a block of a tar file, and the place of the checksum in a header.
const BLOCK_BYTES: usize = 512;
const CHECKSUM: std::ops::Range<usize> = 148..156;

/// Decodes an image file. An accepted image must have the pixels that its shape says.
///
/// # Panics
/// If the number of pixels differs.
pub fn image_file(bytes: &[u8]) -> Verdict {
    let mut pixels = vec![7];
    let decoded = decode_image(bytes, Channels::Rgb, &mut pixels);
    if let Ok(shape) = &decoded {
        assert_eq!(shape.iter().product::<usize>(), pixels.len(), "{shape:?}");
        assert_eq!(shape[2], 3);
    }
    let _ = decode_image(bytes, Channels::Gray, &mut pixels);
    (&decoded).into()
}

/// Parses an idx file. An accepted file must have the elements that its shape says, and no byte more.
///
/// # Panics
/// If the number of elements differs, or a problem lies beyond the file.
pub fn idx_file(bytes: &[u8]) -> Verdict {
    let array = parse_idx(bytes);
    match &array {
        Ok(array) => assert_eq!(array.shape.iter().product::<usize>(), array.data.len(), "{:?}", array.shape),
        Err(problem) => assert!(problem.offset_bytes <= bytes.len() as u64, "{problem:?}"),
    }
    (&array).into()
}

/// Parses a `.npy` file as each dtype that samples hold. An accepted file must have the elements that its shape says.
///
/// # Panics
/// If the number of elements differs.
pub fn npy_file(bytes: &[u8]) -> Verdict {
    let mut verdict = Verdict::Refused;
    for dtype in [DType::U8, DType::I32, DType::U32, DType::F32] {
        let Some(mut data) = TensorData::empty(dtype) else { continue };
        if let Ok(shape) = read_npy(bytes, &mut data) {
            assert_eq!(shape.iter().product::<usize>(), data.len(), "{shape:?}");
            verdict = Verdict::Accepted;
        }
    }
    verdict
}

/// Parses a `tf.Example`. Its values must not be more than its bytes allow.
///
/// # Panics
/// If there are more, or a problem lies beyond the message.
pub fn tf_example(bytes: &[u8]) -> Verdict {
    let example = Example::parse(bytes);
    match &example {
        Ok(example) => {
            for name in example.names() {
                let values = match example.feature(&name) {
                    Some(Feature::Bytes(values)) => values.len(),
                    Some(Feature::Floats(values)) => values.len(),
                    Some(Feature::Integers(values)) => values.len(),
                    Some(Feature::Empty) | None => 0,
                };
                assert!(values <= bytes.len(), "{values} values in {} bytes", bytes.len());
            }
        }
        Err(problem) => assert!(problem.offset_bytes <= bytes.len() as u64, "{problem:?}"),
    }
    (&example).into()
}

/// Reads a file of CIFAR-10. Each label of an accepted sample must be a class.
///
/// # Panics
/// If a label is none.
pub fn cifar_file(bytes: &[u8]) -> Verdict {
    with_file(bytes, |path| {
        let data = Cifar::from_files(vec![path.into()], CifarKind::Cifar10)?;
        read_all(&data, |sample| {
            let label = sample.tensor("label").and_then(|label| label.data.as_i32()?.first().copied());
            assert!(label.is_some_and(|label| (0..10).contains(&label)), "{label:?}");
        })
    })
}

/// Reads a tar shard of a WebDataset, as it is and with corrected checksums of its headers.
///
/// # Panics
/// If a class is out of range, or an error message is too long.
pub fn tar_shard(bytes: &[u8]) -> Verdict {
    let read = |bytes: &[u8]| {
        with_file(bytes, |path| {
            let fields = || vec![Field::class("label", "cls", Some(20)), Field::bytes("text", "txt;json")];
            // Damaged shards are read up to the damage.
            let options = ShardOptions { on_damage: OnBadSample::Skip, ..ShardOptions::default() };
            let kept = WebDataset::open(path, fields(), options);
            let _ = kept.and_then(|data| read_all(&data, |_| {}));
            let data = WebDataset::open(path, fields(), ShardOptions::default())?;
            read_all(&data, |sample| {
                let label = sample.tensor("label").and_then(|label| label.data.as_i32()?.first().copied());
                assert!(label.is_some_and(|label| (0..20).contains(&label)), "{label:?}");
            })
        })
    };
    let _ = read(bytes);
    let mut bytes = bytes.to_vec();
    for block in bytes.chunks_exact_mut(BLOCK_BYTES).filter(|block| block[257..].starts_with(b"ustar")) {
        block[CHECKSUM].fill(b' ');
        let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
        block[CHECKSUM].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
    read(&bytes)
}

/// Reads a TFRecord file, as it is and with corrected checksums.
///
/// # Panics
/// If an error message is too long.
pub fn tf_record(bytes: &[u8]) -> Verdict {
    let read = |bytes: &[u8]| {
        with_file(bytes, |path| {
            let fields = || vec![Field::class("label", "label", None), Field::bytes("name", "name")];
            let options = ShardOptions { on_damage: OnBadSample::Skip, ..ShardOptions::default() };
            let kept = TfRecordDataset::open(path, fields(), options);
            let _ = kept.and_then(|data| read_all(&data, |_| {}));
            let data = TfRecordDataset::open(path, fields(), ShardOptions::default())?;
            read_all(&data, |_| {})
        })
    };
    let _ = read(bytes);
    let mut bytes = bytes.to_vec();
    seal_records(&mut bytes);
    read(&bytes)
}

/// Corrects the checksums of all records that lie within the file.
fn seal_records(bytes: &mut [u8]) {
    let mut rest = bytes;
    while let Some((length, crc_and_rest)) = rest.split_first_chunk_mut::<8>() {
        let Some((crc, contents)) = crc_and_rest.split_first_chunk_mut::<4>() else { return };
        *crc = masked_crc(length).to_le_bytes();
        let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
        let Some((contents, after)) = contents.split_at_mut_checked(length) else { return };
        let Some((crc, after)) = after.split_first_chunk_mut::<4>() else { return };
        *crc = masked_crc(contents).to_le_bytes();
        rest = after;
    }
}

/// Writes `bytes` to a file and reads it.
fn with_file(bytes: &[u8], read: impl FnOnce(&str) -> Result<(), DataError>) -> Verdict {
    let Ok(mut file) = tempfile::NamedTempFile::new() else { return Verdict::Refused };
    let Some(path) = file.path().to_str().map(str::to_owned) else { return Verdict::Refused };
    if file.write_all(bytes).is_err() {
        return Verdict::Refused;
    }
    let result = read(&path);
    if let Err(error) = &result {
        assert!(error.to_string().len() < 4096 + 8 * bytes.len(), "a message without end");
    }
    (&result).into()
}

/// Reads all samples, also after an error, and returns the first error.
fn read_all(data: &dyn Dataset, check: impl Fn(&Sample)) -> Result<(), DataError> {
    let mut first = Ok(());
    let mut sample = Sample::default();
    for index in 0..data.len() {
        match data.get_into(index, &mut sample) {
            Ok(()) => check(&sample),
            Err(error) => first = first.and(Err(error)),
        }
    }
    first
}
