//! Helpers of the tests: fixtures, temporary files, tar and TFRecord shards.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use lockstep_data::{
    DataError, ErrorKind,
    samples::{Dataset, NamedTensor, Sample, TensorData, read_npy, write_record},
};

/// Returns a file of `tests/fixtures/images`.
pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/images")).join(name)
}

/// Returns shape and bytes of a `.npy` fixture.
pub(crate) fn pixels(name: &str) -> (Vec<usize>, Vec<u8>) {
    let mut data = TensorData::U8(Vec::new());
    let shape = read_npy(&fs::read(fixture(name)).unwrap(), &mut data).unwrap();
    (shape, data.as_u8().unwrap().to_vec())
}

/// Checks that an error is of bad input and that its message contains each of `parts`.
#[track_caller]
pub(crate) fn assert_says<T: std::fmt::Debug>(result: Result<T, DataError>, kind: ErrorKind, parts: &[&str]) {
    let error = result.unwrap_err();
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "\"{part}\" is not in: {message}");
    }
    assert_eq!(error.kind(), kind, "{message}");
}

/// Writes a file below `dir` and returns its path.
pub(crate) fn write(dir: &Path, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
    let path = dir.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, bytes).unwrap();
    path
}

/// Returns the bytes of a tar file with these members.
pub(crate) fn tar(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, contents) in members {
        let mut header = tar::Header::new_gnu();
        header.set_size(contents.len() as u64);
        header.set_mode(0o444);
        builder.append_data(&mut header, name, *contents).unwrap();
    }
    builder.into_inner().unwrap()
}

/// Returns the bytes of a `tf.Example`: a map of names to a list of kind 1 (bytes), 2 (floats) or 3 (integers), given as
/// the bytes of its field 1.
pub(crate) fn example(features: &[(&str, u8, Vec<u8>)]) -> Vec<u8> {
    fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
        let length = bytes.len();
        let mut out = vec![number << 3 | 2];
        if length < 128 {
            out.push(length as u8);
        } else {
            out.extend([length as u8 | 0x80, (length >> 7) as u8]);
        }
        out.extend(bytes);
        out
    }
    let entries: Vec<u8> = features
        .iter()
        .flat_map(|(name, kind, values)| {
            let feature = field(*kind, &field(1, values));
            field(1, &[field(1, name.as_bytes()), field(2, &feature)].concat())
        })
        .collect();
    field(1, &entries)
}

/// Returns the bytes of a TFRecord file with these records.
pub(crate) fn records(contents: &[Vec<u8>]) -> Vec<u8> {
    let mut out = Vec::new();
    contents.iter().for_each(|contents| write_record(contents, &mut out));
    out
}

/// Returns the only element of an i32 tensor.
pub(crate) fn scalar(sample: &Sample, name: &str) -> i32 {
    sample.tensor(name).unwrap().data.as_i32().unwrap()[0]
}

/// Data set of the numbers `0..n`, where those of `bad` are damaged; number `panics` panics.
#[derive(Debug)]
pub(crate) struct Numbers {
    pub(crate) n: u64,
    pub(crate) bad: Vec<u64>,
    pub(crate) panics: Option<u64>,
}

impl Numbers {
    pub(crate) fn sound(n: u64) -> Arc<Self> {
        Arc::new(Self { n, bad: Vec::new(), panics: None })
    }
}

impl Dataset for Numbers {
    fn len(&self) -> u64 {
        self.n
    }

    fn tensors(&self) -> Vec<lockstep_data::samples::TensorSpec> {
        let spec = |name| lockstep_data::samples::TensorSpec::fixed(name, lockstep_plan::DType::I32, &[]);
        vec![spec("n")]
    }

    fn get(&self, index: u64) -> Result<Sample, DataError> {
        assert_ne!(self.panics, Some(index), "this sample panics");
        if self.bad.contains(&index) {
            return Err(DataError::BadSample { index, problem: "it is damaged".to_owned() });
        }
        // Uneven work, so that threads overtake each other.
        std::thread::sleep(std::time::Duration::from_micros(index * 7919 % 300));
        Ok(Sample::new(vec![NamedTensor::new("n", &[], TensorData::I32(vec![index as i32]))]))
    }
}
