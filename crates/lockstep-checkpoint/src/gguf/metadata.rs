//! Metadata of a GGUF file: values by key. Arrays are checked when the file is opened, but read only on request, from their place in the
//! file.

use std::{collections::BTreeMap, ops::Range};

use super::cursor::Cursor;

/// Deepest nesting of arrays.
const MAX_DEPTH: usize = 4;

/// Metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum GgufValue {
    /// Integer of any size and sign.
    Integer(i128),
    /// f32 or f64.
    Float(f64),
    /// Truth value.
    Bool(bool),
    /// Text.
    String(String),
    /// Array of values of one type.
    Array(GgufArray),
}

/// Array in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GgufArray {
    kind: Kind,
    /// Number of values.
    pub len: u64,
    /// Bytes of the values in the file.
    bytes: Range<usize>,
}

/// Type of a value, by its number in files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl Kind {
    const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::String,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    fn read(cursor: &mut Cursor<'_>, key: &str) -> Result<Self, String> {
        let number = cursor.u32("the type of a value")?;
        let kind = Self::ALL.get(number as usize).copied();
        kind.ok_or_else(|| format!("`{key}` has a value of type {number}; allowed are 0 to 12"))
    }

    /// Returns the bytes of a value; `None` for strings and arrays.
    fn bytes(self) -> Option<u64> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::String | Self::Array => None,
        }
    }

    /// Reads a value of a type that has a size.
    fn scalar(self, bytes: &[u8]) -> Option<GgufValue> {
        macro_rules! number {
            ($T:ty) => {
                <$T>::from_le_bytes(bytes.try_into().ok()?)
            };
        }
        Some(match self {
            Self::U8 => GgufValue::Integer(number!(u8).into()),
            Self::I8 => GgufValue::Integer(number!(i8).into()),
            Self::U16 => GgufValue::Integer(number!(u16).into()),
            Self::I16 => GgufValue::Integer(number!(i16).into()),
            Self::U32 => GgufValue::Integer(number!(u32).into()),
            Self::I32 => GgufValue::Integer(number!(i32).into()),
            Self::U64 => GgufValue::Integer(number!(u64).into()),
            Self::I64 => GgufValue::Integer(number!(i64).into()),
            Self::F32 => GgufValue::Float(shortest(number!(f32))),
            Self::F64 => GgufValue::Float(number!(f64)),
            Self::Bool => GgufValue::Bool(number!(u8) != 0),
            Self::String | Self::Array => return None,
        })
    }
}

/// Returns the number whose shortest decimal form is that of an f32: configurations say 1e-5, and files store the nearest f32.
fn shortest(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}

/// Metadata of a file, by key.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GgufMetadata(BTreeMap<String, GgufValue>);

impl GgufMetadata {
    /// Reads `pairs` pairs of a key and a value.
    pub(super) fn read(cursor: &mut Cursor<'_>, pairs: u64) -> Result<Self, String> {
        let mut values = BTreeMap::new();
        for _ in 0..pairs {
            let key = cursor.string("a key")?;
            let value = read_value(cursor, key)?;
            if values.insert(key.to_owned(), value).is_some() {
                return Err(format!("`{key}` occurs twice"));
            }
        }
        Ok(Self(values))
    }

    /// Returns the value of a key.
    pub fn get(&self, key: &str) -> Option<&GgufValue> {
        self.0.get(key)
    }

    /// Returns the keys, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// Returns the text of a key.
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.get(key)? {
            GgufValue::String(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the number of a key.
    pub fn number(&self, key: &str) -> Option<f64> {
        match self.get(key)? {
            GgufValue::Float(number) => Some(*number),
            GgufValue::Integer(number) => Some(*number as f64),
            _ => None,
        }
    }

    /// Returns the nonnegative integer of a key.
    pub fn integer(&self, key: &str) -> Option<u64> {
        match self.get(key)? {
            GgufValue::Integer(number) => u64::try_from(*number).ok(),
            _ => None,
        }
    }

    /// Returns the truth value of a key.
    pub fn flag(&self, key: &str) -> Option<bool> {
        match self.get(key)? {
            GgufValue::Bool(flag) => Some(*flag),
            _ => None,
        }
    }

    /// Returns the strings of an array in the file `bytes`; `None` if the key is no array of strings.
    ///
    /// # Errors
    /// If a string is not UTF-8.
    pub fn strings<'a>(&self, key: &str, bytes: &'a [u8]) -> Option<Result<Vec<&'a str>, String>> {
        let GgufValue::Array(GgufArray { kind: Kind::String, len, bytes: range }) = self.get(key)? else {
            return None;
        };
        let mut cursor = Cursor::new(&bytes[..range.end], range.start);
        Some((0..*len).map(|_| cursor.string(&format!("a string of `{key}`"))).collect())
    }

    /// Returns the numbers of an array in the file `bytes`; `None` if the key is no array of numbers.
    pub fn numbers(&self, key: &str, bytes: &[u8]) -> Option<Vec<f64>> {
        let GgufValue::Array(GgufArray { kind, bytes: range, .. }) = self.get(key)? else { return None };
        let size = usize::try_from(kind.bytes()?).ok()?;
        let number = |bytes: &[u8]| match kind.scalar(bytes)? {
            GgufValue::Float(number) => Some(number),
            GgufValue::Integer(number) => Some(number as f64),
            _ => None,
        };
        bytes[range.clone()].chunks_exact(size).map(number).collect()
    }
}

fn read_value(cursor: &mut Cursor<'_>, key: &str) -> Result<GgufValue, String> {
    let kind = Kind::read(cursor, key)?;
    let what = format!("the value of `{key}`");
    match kind {
        Kind::String => cursor.string(&what).map(|text| GgufValue::String(text.to_owned())),
        Kind::Array => read_array(cursor, key, MAX_DEPTH).map(GgufValue::Array),
        _ => {
            let bytes = cursor.take(kind.bytes().unwrap_or(0), &what)?;
            kind.scalar(bytes).ok_or_else(|| format!("{what} is no number"))
        }
    }
}

/// Skips an array, and checks that all of it is there.
fn read_array(cursor: &mut Cursor<'_>, key: &str, depth: usize) -> Result<GgufArray, String> {
    if depth == 0 {
        return Err(format!("the arrays of `{key}` are nested more than {MAX_DEPTH} deep"));
    }
    let kind = Kind::read(cursor, key)?;
    let what = format!("the array `{key}`");
    let len = cursor.u64(&what)?;
    let start = cursor.position();
    match kind.bytes() {
        Some(size) => {
            let bytes = len.checked_mul(size).ok_or_else(|| format!("{what} claims {len} values"))?;
            cursor.take(bytes, &what)?;
        }
        None => {
            // Each string or array has a length of 8 bytes at least.
            if len > cursor.left() as u64 / 8 {
                return Err(format!("{what} claims {len} values, but only {} bytes follow", cursor.left()));
            }
            for _ in 0..len {
                match kind {
                    Kind::String => cursor.skip_string(&what)?,
                    _ => {
                        read_array(cursor, key, depth - 1)?;
                    }
                }
            }
        }
    }
    Ok(GgufArray { kind, len, bytes: start..cursor.position() })
}
