//! NumPy's `.npy` format: a magic number, a version, a header that is a Python literal, and the elements.

use lockstep_plan::DType;

use super::tensor::TensorData;

const MAGIC: &[u8] = b"\x93NUMPY";

/// Maximum length of the header; NumPy itself reads 10,000 characters.
const MOST_HEADER_BYTES: usize = 10_000;

/// Element types that are read, with the dtype they become.
const DESCRIPTIONS: [(&str, usize, DType); 8] = [
    ("|u1", 1, DType::U8),
    ("|b1", 1, DType::U8),
    ("|i1", 1, DType::I32),
    ("<i2", 2, DType::I32),
    ("<i4", 4, DType::I32),
    ("<u4", 4, DType::U32),
    ("<i8", 8, DType::I32),
    ("<f4", 4, DType::F32),
];

/// Appends the elements of a `.npy` file to `data`, which has the dtype that they become, and returns their shape. i8,
/// i16 and i64 become i32, bool becomes u8.
///
/// # Errors
/// If the file is not of version 1 to 3, row-major and little endian with a known element type, has too few or too many
/// bytes, the elements have another dtype than `data`, or an i64 is beyond i32.
pub fn read_npy(bytes: &[u8], data: &mut TensorData) -> Result<Vec<usize>, String> {
    let (header, elements) = split_header(bytes)?;
    let description = value_of(header, "descr")?.trim_matches(['\'', '"']);
    if value_of(header, "fortran_order")? != "False" {
        return Err("its elements are column-major (fortran_order); allowed: row-major".to_owned());
    }
    let shape = parse_shape(value_of(header, "shape")?)?;
    let Some(&(_, size, dtype)) = DESCRIPTIONS.iter().find(|(name, ..)| *name == description) else {
        let allowed: Vec<&str> = DESCRIPTIONS.iter().map(|(name, ..)| *name).collect();
        return Err(format!("its elements are {description:?}; allowed: {}", allowed.join(", ")));
    };
    if dtype != data.dtype() {
        return Err(format!(
            "its elements are {description:?}, which become {dtype}; allowed: {}",
            data.dtype()
        ));
    }
    let count = shape.iter().try_fold(size, |bytes, &extent| bytes.checked_mul(extent));
    if count != Some(elements.len()) {
        return Err(format!(
            "its shape {shape:?} of {description:?} does not fit its {} bytes",
            elements.len()
        ));
    }
    match data {
        TensorData::U8(values) => values.extend_from_slice(elements),
        TensorData::U32(values) => {
            values.extend(elements.as_chunks().0.iter().map(|c| u32::from_le_bytes(*c)))
        }
        TensorData::F32(values) => {
            values.extend(elements.as_chunks().0.iter().map(|c| f32::from_le_bytes(*c)))
        }
        TensorData::I32(values) => match size {
            1 => values.extend(elements.iter().map(|&byte| i32::from(byte as i8))),
            2 => values.extend(elements.as_chunks().0.iter().map(|c| i32::from(i16::from_le_bytes(*c)))),
            4 => values.extend(elements.as_chunks().0.iter().map(|c| i32::from_le_bytes(*c))),
            _ => {
                for chunk in elements.as_chunks().0 {
                    let value = i64::from_le_bytes(*chunk);
                    values.push(
                        i32::try_from(value).map_err(|_| format!("its element {value} is beyond i32"))?,
                    );
                }
            }
        },
    }
    Ok(shape)
}

/// Splits a file into the text of its header and its elements.
fn split_header(bytes: &[u8]) -> Result<(&str, &[u8]), String> {
    let rest = bytes.strip_prefix(MAGIC).ok_or("it does not start with the magic bytes of .npy")?;
    let cut = || "it ends within its header".to_owned();
    let (length, rest) = match rest {
        [1, _, low, high, rest @ ..] => (usize::from(u16::from_le_bytes([*low, *high])), rest),
        [2 | 3, _, a, b, c, d, rest @ ..] => (u32::from_le_bytes([*a, *b, *c, *d]) as usize, rest),
        [1..=3, ..] | [] => return Err(cut()),
        [version, ..] => return Err(format!("it is of version {version}; allowed: 1 to 3")),
    };
    if length > MOST_HEADER_BYTES {
        return Err(format!("its header has {length} bytes; allowed: up to {MOST_HEADER_BYTES}"));
    }
    let (header, elements) = rest.split_at_checked(length).ok_or_else(cut)?;
    Ok((str::from_utf8(header).map_err(|_| "its header is not UTF-8")?, elements))
}

/// Returns the text of the value of `key` in the header, a Python dictionary.
fn value_of<'a>(header: &'a str, key: &str) -> Result<&'a str, String> {
    let missing = || format!("its header has no \"{key}\"");
    let quoted = [format!("'{key}'"), format!("\"{key}\"")];
    let at = quoted.iter().find_map(|quoted| Some(header.find(quoted)? + quoted.len()));
    let rest =
        header[at.ok_or_else(missing)?..].trim_start().strip_prefix(':').ok_or_else(missing)?.trim_start();
    let end = if rest.starts_with('(') { rest.find(')').map(|at| at + 1) } else { rest.find([',', '}']) };
    Ok(rest[..end.ok_or_else(missing)?].trim_end())
}

/// Parses `()`, `(3,)` or `(2, 3)`.
fn parse_shape(text: &str) -> Result<Vec<usize>, String> {
    let bad = || format!("its shape is {text:?}; allowed: a tuple of numbers");
    let inner = text.strip_prefix('(').and_then(|text| text.strip_suffix(')')).ok_or_else(bad)?;
    let parts = inner.split(',').map(str::trim).filter(|part| !part.is_empty());
    parts.map(|part| part.parse().map_err(|_| bad())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn npy(header: &str, data: &[u8]) -> Vec<u8> {
        let mut bytes = b"\x93NUMPY\x01\0".to_vec();
        bytes.extend((header.len() as u16).to_le_bytes());
        bytes.extend(header.as_bytes());
        bytes.extend(data);
        bytes
    }

    fn read(bytes: &[u8], dtype: DType) -> Result<(Vec<usize>, TensorData), String> {
        let mut data = TensorData::empty(dtype).unwrap();
        read_npy(bytes, &mut data).map(|shape| (shape, data))
    }

    #[test]
    fn arrays_keep_shape_and_elements() {
        let header = "{'descr': '<i8', 'fortran_order': False, 'shape': (2,), }          \n";
        let data = [3_i64.to_le_bytes(), (-1_i64).to_le_bytes()].concat();
        assert_eq!(read(&npy(header, &data), DType::I32).unwrap(), (vec![2], TensorData::I32(vec![3, -1])));
        let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (), }\n";
        let scalar = read(&npy(header, &1.5_f32.to_le_bytes()), DType::F32).unwrap();
        assert_eq!(scalar, (vec![], TensorData::F32(vec![1.5])));
        let header = "{'descr': '|u1', 'fortran_order': False, 'shape': (1, 3), }\n";
        assert_eq!(
            read(&npy(header, &[1, 2, 3]), DType::U8).unwrap(),
            (vec![1, 3], TensorData::U8(vec![1, 2, 3]))
        );
    }

    #[test]
    fn broken_arrays_are_refused() {
        let header = |descr: &str, order: &str, shape: &str| {
            format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}\n")
        };
        for (bytes, part) in [
            (b"PNG".to_vec(), "magic bytes"),
            (b"\x93NUMPY".to_vec(), "ends within its header"),
            (b"\x93NUMPY\x09\0\0\0".to_vec(), "version 9; allowed: 1 to 3"),
            (b"\x93NUMPY\x01\0\xFF\0{".to_vec(), "ends within its header"),
            (npy(&header("<f4", "True", "(1,)"), &[0; 4]), "column-major"),
            (npy(&header("<f8", "False", "(1,)"), &[0; 8]), "\"<f8\"; allowed: |u1"),
            (npy(&header("|O", "False", "(1,)"), &[0; 8]), "\"|O\"; allowed: |u1"),
            (npy(&header("<i4", "False", "(1,)"), &[0; 4]), "become i32; allowed: f32"),
            (npy(&header("<f4", "False", "(2,)"), &[0; 4]), "does not fit its 4 bytes"),
            (npy(&header("<f4", "False", "(18446744073709551615, 2)"), &[0; 4]), "does not fit"),
            (npy(&header("<f4", "False", "(x)"), &[0; 4]), "a tuple of numbers"),
            (npy("{'descr': '<f4'", &[]), "no \"descr\""),
        ] {
            let problem = read(&bytes, DType::F32).unwrap_err();
            assert!(problem.contains(part), "{problem}");
        }
        let large = npy(&header("<i8", "False", "(1,)"), &(1_i64 << 40).to_le_bytes());
        assert!(read(&large, DType::I32).unwrap_err().contains("beyond i32"));
    }
}
