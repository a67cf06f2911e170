//! Tests of safetensors files: each rule of the format is enforced by name, and written files are readable by others.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

use std::{collections::BTreeMap, fs};

use lockstep_checkpoint::{
    CheckpointError,
    safetensors::{
        MAX_HEADER_BYTES, SafetensorsFile, SafetensorsWriter, StoredDtype, TensorSpec, parse_header,
    },
};
use proptest::prelude::*;

fn file(header: &str, data_bytes: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + data_bytes, 7);
    file
}

const GOOD: &str = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[3],"data_offsets":[8,14]}}"#;

/// Returns broken files as (name, bytes, expected part of the message).
fn broken_files() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let with = |from: &str, to: &str| {
        assert!(GOOD.contains(from), "{from} is not in the good header");
        file(&GOOD.replacen(from, to, 1), 14)
    };
    let length = |declared: u64| {
        let mut bytes = file(GOOD, 14);
        bytes[..8].copy_from_slice(&declared.to_le_bytes());
        bytes
    };
    let mut not_utf8 = file(GOOD, 14);
    not_utf8[10] = 0xff;
    vec![
        ("empty file", vec![], "fewer than the 8"),
        ("seven bytes", vec![0; 7], "fewer than the 8"),
        ("header length zero", vec![0; 8], "does not start with `{`"),
        ("header longer than the file", length(200), "claims 200 bytes"),
        ("header over the limit", length(MAX_HEADER_BYTES + 1), "the limit is 100000000"),
        ("header length near 2^64", length(u64::MAX), "the limit is 100000000"),
        ("not UTF-8", not_utf8, "not UTF-8 at byte 2"),
        ("leading space", file(&format!(" {GOOD}"), 14), "does not start with `{`"),
        ("an array", file("[]", 0), "does not start with `{`"),
        ("JSON cut off", file(&GOOD[..GOOD.len() - 1], 14), "not valid JSON"),
        ("text after the JSON", file(&format!("{GOOD}{{}}"), 14), "not valid JSON"),
        ("deep nesting", file(&format!(r#"{{"a":{}"#, "[".repeat(100_000)), 0), "tensor `a`"),
        ("file cut off", file(GOOD, 13), "ends at byte 14 of the data, which has 13"),
        ("trailing byte", file(GOOD, 15), "1 bytes follow its last tensor"),
        ("data without tensors", file("{}", 4), "4 bytes follow its last tensor"),
        ("same tensor twice", with(r#""b""#, r#""a""#), "`a` stands twice"),
        ("same tensor twice, escaped", with(r#""b""#, r#""\u0061""#), "`a` stands twice"),
        ("field twice", with(r#""shape":[2]"#, r#""shape":[2],"shape":[2]"#), "tensor `a`: duplicate field"),
        ("field missing", with(r#""shape":[2],"#, ""), "tensor `a`: missing field"),
        ("field unknown", with(r#""shape":[2]"#, r#""shape":[2],"x":1"#), "tensor `a`: unknown field"),
        ("unknown type", with("F32", "F33"), "tensor `a` has the unknown type `F33`"),
        ("type in lower case", with("BF16", "bf16"), "tensor `b` has the unknown type `bf16`"),
        ("negative dimension", with("[2]", "[-2]"), "tensor `a`: invalid value"),
        ("fractional dimension", with("[2]", "[2.0]"), "tensor `a`: invalid type"),
        ("negative offset", with("[0,8]", "[-1,8]"), "tensor `a`: invalid value"),
        ("three offsets", with("[0,8]", "[0,8,8]"), "tensor `a`"),
        ("offset above 2^64", with("[8,14]", "[8,99999999999999999999]"), "tensor `b`"),
        ("reversed range", with("[8,14]", "[14,8]"), "tensor `b` begins at 14 and ends before"),
        ("out of range", with("[8,14]", "[8,16]"), "tensor `b` ends at byte 16"),
        ("hole at the start", with("[0,8]", "[1,8]"), "tensor `a` begins at 1, leaving a hole from 0"),
        ("hole between", with("[8,14]", "[10,14]"), "tensor `b` begins at 10, leaving a hole from 8"),
        ("overlap", with("[8,14]", "[6,14]"), "tensor `b` begins at 6, inside another"),
        ("same bytes twice", with("[8,14]", "[0,8]"), "inside another"),
        ("shape too small", with("[3]", "[2]"), "needs 4 bytes, its range has 6"),
        ("shape too large", with("[3]", "[3,2]"), "needs 12 bytes, its range has 6"),
        ("scalar with a vector's bytes", with("[3]", "[]"), "needs 2 bytes, its range has 6"),
        ("elements overflow", with("[3]", "[4294967296,4294967296,3]"), "whose size overflows"),
        ("bytes overflow", with("[3]", "[9223372036854775807]"), "whose size overflows"),
        ("half a byte", with(r#""BF16","shape":[3]"#, r#""F4","shape":[11]"#), "does not fill whole bytes"),
        ("metadata not strings", with(r#"{"a""#, r#"{"__metadata__":{"x":1},"a""#), "`__metadata__`"),
        ("metadata not an object", with(r#"{"a""#, r#"{"__metadata__":"x","a""#), "`__metadata__`"),
        (
            "metadata key twice",
            with(r#"{"a""#, r#"{"__metadata__":{"x":"1","x":"2"},"a""#),
            "`x` stands twice",
        ),
        (
            "metadata twice",
            with(r#"{"a""#, r#"{"__metadata__":{},"__metadata__":{},"a""#),
            "`__metadata__` stands twice",
        ),
    ]
}

#[test]
fn every_broken_file_is_refused_with_the_file_and_the_rule() {
    parse_header(&file(GOOD, 14)).unwrap();
    let dir = tempfile::tempdir().unwrap();
    for (number, (what, bytes, expected)) in broken_files().into_iter().enumerate() {
        let path = dir.path().join(format!("broken-{number}.safetensors"));
        fs::write(&path, bytes).unwrap();
        let error = SafetensorsFile::open(&path).err().unwrap_or_else(|| panic!("{what} was accepted"));
        assert!(error.is_corrupt(), "{what}: {error}");
        let message = error.to_string();
        assert!(message.contains(expected), "{what}: {message}");
        assert!(message.contains(&format!("broken-{number}.safetensors")), "{what}: {message}");
    }
}

#[test]
fn a_directory_and_a_missing_file_are_errors_and_not_waits() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(SafetensorsFile::open(dir.path()), Err(CheckpointError::NotAFile { .. })));
    let missing = SafetensorsFile::open(&dir.path().join("missing.safetensors")).unwrap_err();
    assert!(missing.to_string().contains("missing.safetensors"), "{missing}");
    assert!(!missing.is_corrupt());
}

#[test]
fn empty_tensors_scalars_padding_and_foreign_types_are_accepted() {
    let header = r#"{"s":{"dtype":"I64","shape":[],"data_offsets":[0,8]},"e":{"dtype":"F32","shape":[0,5],"data_offsets":[8,8]},"m":{"dtype":"BOOL","shape":[2],"data_offsets":[8,10]},"__metadata__":{"format":"pt"}}   "#;
    let header = parse_header(&file(header, 10)).unwrap();
    let names: Vec<_> = header.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["s", "e", "m"]);
    assert_eq!(header.metadata()["format"], "pt");
    assert_eq!(header.tensor("e").unwrap().shape, [0, 5]);
}

fn spec(name: &str, dtype: StoredDtype, shape: &[usize]) -> TensorSpec {
    TensorSpec { name: name.to_owned(), dtype, shape: shape.to_vec() }
}

/// Writes each tensor filled with the bytes 0, 1, 2, ..., in pieces of `piece` bytes.
fn written(specs: Vec<TensorSpec>, piece: usize) -> Vec<u8> {
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    let mut writer = SafetensorsWriter::new(Vec::new(), "out".as_ref(), specs, &metadata).unwrap();
    while let Some(spec) = writer.next_tensor().cloned() {
        let bytes: Vec<u8> = (0..spec.bytes().unwrap()).map(|i| i as u8).collect();
        for piece in bytes.chunks(piece) {
            writer.write(&spec.name, piece).unwrap();
        }
    }
    let expected = writer.file_bytes();
    let bytes = writer.finish().unwrap();
    assert_eq!(bytes.len() as u64, expected);
    bytes
}

#[test]
fn what_is_written_is_aligned_ordered_and_read_by_the_reference_implementation() {
    let specs = vec![
        spec("z", StoredDtype::U8, &[5]),
        spec("b", StoredDtype::F32, &[3, 7]),
        spec("empty", StoredDtype::F32, &[0, 2]),
        spec("a", StoredDtype::F32, &[]),
        spec("h", StoredDtype::BF16, &[9]),
    ];
    let bytes = written(specs.clone(), 3);
    let mut reversed = specs.clone();
    reversed.reverse();
    assert_eq!(written(reversed, 1000), bytes, "the order of the specs must not matter");

    let header = parse_header(&bytes).unwrap();
    let names: Vec<_> = header.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["a", "b", "empty", "h", "z"]);
    assert_eq!(header.tensors()[0].offset % 64, 0);
    let reference = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(reference.len(), specs.len());
    for spec in &specs {
        let tensor = reference.tensor(&spec.name).unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (spec.dtype, &spec.shape[..]));
        assert!(tensor.data().iter().enumerate().all(|(i, &byte)| byte == i as u8), "{}", spec.name);
    }
}

#[test]
fn the_writer_refuses_wrong_names_too_many_bytes_and_an_early_end() {
    let start = || {
        let specs = vec![spec("a", StoredDtype::F32, &[2]), spec("b", StoredDtype::F32, &[1])];
        SafetensorsWriter::new(Vec::new(), "out".as_ref(), specs, &BTreeMap::new()).unwrap()
    };
    assert!(matches!(start().write("b", &[0; 4]), Err(CheckpointError::OutOfOrder { .. })));
    assert!(matches!(
        start().write("a", &[0; 9]),
        Err(CheckpointError::ByteCount { expected: 8, found: 9, .. })
    ));
    let mut writer = start();
    writer.write("a", &[0; 8]).unwrap();
    assert!(matches!(writer.finish(), Err(CheckpointError::ByteCount { expected: 4, found: 0, .. })));
    let twice = vec![spec("a", StoredDtype::F32, &[2]), spec("a", StoredDtype::F32, &[1])];
    let twice = SafetensorsWriter::new(Vec::new(), "out".as_ref(), twice, &BTreeMap::new());
    assert!(matches!(twice, Err(CheckpointError::DuplicateTensor { .. })));
    let reserved = vec![spec("__metadata__", StoredDtype::F32, &[2])];
    let reserved = SafetensorsWriter::new(Vec::new(), "out".as_ref(), reserved, &BTreeMap::new());
    assert!(matches!(reserved, Err(CheckpointError::ReservedName { .. })));
}

#[test]
fn values_read_as_f32_from_each_float_type_and_from_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let specs = vec![
        spec("f32", StoredDtype::F32, &[2]),
        spec("f16", StoredDtype::F16, &[2]),
        spec("bf16", StoredDtype::BF16, &[2]),
        spec("i64", StoredDtype::I64, &[1]),
    ];
    let mut writer = SafetensorsWriter::new(Vec::new(), &path, specs, &BTreeMap::new()).unwrap();
    writer.write("i64", &1i64.to_le_bytes()).unwrap();
    writer.write("f32", bytemuck::cast_slice(&[1.5f32, -2.0])).unwrap();
    writer.write("bf16", bytemuck::cast_slice(&[0x3fc0u16, 0xc000])).unwrap();
    writer.write("f16", bytemuck::cast_slice(&[0x3e00u16, 0xc000])).unwrap();
    fs::write(&path, writer.finish().unwrap()).unwrap();
    let file = SafetensorsFile::open(&path).unwrap();
    for name in ["f32", "f16", "bf16"] {
        let mut values = [0.0; 2];
        file.read_f32_at(name, 0, &mut values).unwrap();
        assert_eq!(values, [1.5, -2.0], "{name}");
        file.read_f32_at(name, 1, &mut values[..1]).unwrap();
        assert_eq!(values[0], -2.0, "{name}");
        let past_the_end = file.read_f32_at(name, 1, &mut values);
        assert!(matches!(past_the_end, Err(CheckpointError::Range { .. })), "{name}");
    }
    let integer = file.read_f32_at("i64", 0, &mut [0.0]).unwrap_err().to_string();
    assert!(integer.contains("`i64`") && integer.contains("is I64; f32, bf16 or f16"), "{integer}");
}

proptest! {
    /// For any bytes: no panic, and nothing is accepted that the reference implementation rejects.
    #[test]
    fn arbitrary_bytes_are_refused_or_valid(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if parse_header(&bytes).is_ok() {
            prop_assert!(safetensors::SafeTensors::deserialize(&bytes).is_ok());
        }
    }

    /// Valid files with a few bytes changed, which get past the first checks: no panic, and none is accepted that the
    /// reference implementation rejects.
    #[test]
    fn damaged_files_are_refused_or_valid(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in 0usize..4,
    ) {
        let mut bytes = file(GOOD, 14);
        for (place, byte) in edits {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        bytes.truncate(bytes.len() - cut);
        match parse_header(&bytes) {
            Ok(header) => {
                let reference = safetensors::SafeTensors::deserialize(&bytes).unwrap();
                prop_assert_eq!(header.tensors().len(), reference.len());
            }
            Err(problem) => prop_assert!(!problem.to_string().is_empty()),
        }
    }

    #[test]
    fn any_set_of_tensors_reads_back(
        shapes in prop::collection::btree_map("[a-z.\"\\\\\u{e9}]{1,8}", (0usize..6, prop::collection::vec(0usize..5, 0..4)), 0..8),
        piece in 1usize..100,
    ) {
        let types =
            [StoredDtype::F32, StoredDtype::BF16, StoredDtype::F16, StoredDtype::U8, StoredDtype::I32, StoredDtype::U32];
        let specs: Vec<_> = shapes.iter().map(|(name, (kind, shape))| spec(name, types[*kind], shape)).collect();
        let bytes = written(specs.clone(), piece);
        let header = parse_header(&bytes).unwrap();
        prop_assert_eq!(header.tensors().len(), specs.len());
        for spec in specs {
            let tensor = header.tensor(&spec.name).unwrap();
            prop_assert_eq!((tensor.dtype, &tensor.shape), (spec.dtype, &spec.shape));
            let data = &bytes[tensor.offset..tensor.offset + tensor.bytes];
            prop_assert!(data.iter().enumerate().all(|(i, &byte)| byte == i as u8));
        }
    }
}
