//! `tf.Example`: the protobuf message in records of TensorFlow, a map of names to lists.
//!
//! ```text
//! Example   1: Features
//! Features  1: map entry { 1: name, 2: Feature }, repeated
//! Feature   1: BytesList | 2: FloatList | 3: Int64List, each with repeated field 1, packed or not
//! ```

/// Rule of the format that a message breaks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExampleProblem {
    /// Offset of the damage in the message, in bytes.
    pub offset_bytes: u64,
    /// Description of the problem.
    pub problem: &'static str,
}

/// List of values of one feature.
#[derive(Debug, Clone, PartialEq)]
pub enum Feature<'a> {
    /// Feature without a list.
    Empty,
    /// List of byte strings.
    Bytes(Vec<&'a [u8]>),
    /// List of floats.
    Floats(Vec<f32>),
    /// List of integers.
    Integers(Vec<i64>),
}

/// Features of an example in the order of the message; names may repeat.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Example<'a> {
    features: Vec<(&'a [u8], Feature<'a>)>,
}

type Parsed<T> = Result<T, ExampleProblem>;

impl<'a> Example<'a> {
    /// Parses a message. Unknown fields are skipped, as protobuf demands.
    ///
    /// # Errors
    /// If a field exceeds its message or has another wire type than the format says.
    pub fn parse(message: &'a [u8]) -> Parsed<Self> {
        let mut features = Vec::new();
        Fields::of(message, 0).each(1, |list, at| {
            Fields::of(list, at).each(1, |entry, at| {
                features.push(parse_entry(entry, at)?);
                Ok(())
            })
        })?;
        Ok(Self { features })
    }

    /// Returns the feature with this name; the last one if the map repeats it, as protobuf demands.
    pub fn feature(&self, name: &str) -> Option<&Feature<'a>> {
        self.features.iter().rev().find(|(other, _)| *other == name.as_bytes()).map(|(_, feature)| feature)
    }

    /// Returns the names of all features.
    pub fn names(&self) -> impl Iterator<Item = String> {
        self.features.iter().map(|(name, _)| String::from_utf8_lossy(name).into_owned())
    }
}

fn parse_entry(entry: &[u8], at: u64) -> Parsed<(&[u8], Feature<'_>)> {
    let (mut name, mut feature) = (&[][..], Feature::Empty);
    let mut fields = Fields::of(entry, at);
    while let Some((number, value, at)) = fields.next()? {
        match (number, value) {
            (1, Value::Bytes(bytes)) => name = bytes,
            (2, Value::Bytes(bytes)) => feature = parse_feature(bytes, at)?,
            (1 | 2, _) => return Err(wire_type(at)),
            _ => {}
        }
    }
    Ok((name, feature))
}

fn parse_feature(message: &[u8], at: u64) -> Parsed<Feature<'_>> {
    let mut feature = Feature::Empty;
    let mut fields = Fields::of(message, at);
    while let Some((number, value, at)) = fields.next()? {
        let Value::Bytes(list) = value else {
            if (1..=3).contains(&number) {
                return Err(wire_type(at));
            }
            continue;
        };
        match number {
            1 => {
                let mut values = Vec::new();
                Fields::of(list, at).each(1, |bytes, _| {
                    values.push(bytes);
                    Ok(())
                })?;
                feature = Feature::Bytes(values);
            }
            2 => feature = Feature::Floats(parse_floats(list, at)?),
            3 => feature = Feature::Integers(parse_integers(list, at)?),
            _ => {}
        }
    }
    Ok(feature)
}

fn parse_floats(list: &[u8], at: u64) -> Parsed<Vec<f32>> {
    let mut values = Vec::new();
    let mut fields = Fields::of(list, at);
    while let Some((number, value, at)) = fields.next()? {
        match (number, value) {
            (1, Value::Four(bits)) => values.push(f32::from_bits(bits)),
            (1, Value::Bytes(packed)) => {
                let (chunks, rest) = packed.as_chunks();
                if !rest.is_empty() {
                    return Err(ExampleProblem { offset_bytes: at, problem: "packed floats are cut off" });
                }
                values.extend(chunks.iter().map(|chunk| f32::from_le_bytes(*chunk)));
            }
            (1, _) => return Err(wire_type(at)),
            _ => {}
        }
    }
    Ok(values)
}

fn parse_integers(list: &[u8], at: u64) -> Parsed<Vec<i64>> {
    let mut values = Vec::new();
    let mut fields = Fields::of(list, at);
    while let Some((number, value, at)) = fields.next()? {
        match (number, value) {
            (1, Value::Varint(value)) => values.push(value as i64),
            (1, Value::Bytes(packed)) => {
                let mut packed = Fields::of(packed, at);
                while !packed.rest.is_empty() {
                    values.push(packed.varint()? as i64);
                }
            }
            (1, _) => return Err(wire_type(at)),
            _ => {}
        }
    }
    Ok(values)
}

fn wire_type(offset_bytes: u64) -> ExampleProblem {
    ExampleProblem { offset_bytes, problem: "a field has another wire type than in a tf.Example" }
}

/// Value of a field of a protobuf message.
enum Value<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
    Four(u32),
    /// Eight bytes, which no field of the format has.
    Eight,
}

/// Fields of a message that are not read yet.
struct Fields<'a> {
    rest: &'a [u8],
    /// Offset of the end in the whole message.
    end: u64,
}

impl<'a> Fields<'a> {
    fn of(message: &'a [u8], start: u64) -> Self {
        Self { rest: message, end: start + message.len() as u64 }
    }

    fn at(&self) -> u64 {
        self.end - self.rest.len() as u64
    }

    fn problem(&self, problem: &'static str) -> ExampleProblem {
        ExampleProblem { offset_bytes: self.at(), problem }
    }

    /// Calls `each` with every value of field `number`, which must be bytes, and its offset.
    fn each(&mut self, number: u64, mut each: impl FnMut(&'a [u8], u64) -> Parsed<()>) -> Parsed<()> {
        while let Some((found, value, at)) = self.next()? {
            match value {
                Value::Bytes(bytes) if found == number => each(bytes, at)?,
                _ if found == number => return Err(wire_type(at)),
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns number, value and offset of the next field.
    fn next(&mut self) -> Parsed<Option<(u64, Value<'a>, u64)>> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let tag = self.varint()?;
        let value = match tag & 7 {
            0 => Value::Varint(self.varint()?),
            1 => {
                self.bytes(8)?;
                Value::Eight
            }
            2 => {
                let length = self.varint()?;
                Value::Bytes(self.bytes(length)?)
            }
            5 => {
                let bytes = self.bytes(4)?;
                Value::Four(bytes.iter().rev().fold(0, |bits, &byte| bits << 8 | u32::from(byte)))
            }
            _ => return Err(self.problem("a field has a wire type that is none; allowed: 0, 1, 2, 5")),
        };
        let length = if let Value::Bytes(bytes) = value { bytes.len() as u64 } else { 0 };
        Ok(Some((tag >> 3, value, self.at() - length)))
    }

    fn bytes(&mut self, length: u64) -> Parsed<&'a [u8]> {
        let length = usize::try_from(length).ok().filter(|&length| length <= self.rest.len());
        let Some(length) = length else { return Err(self.problem("a field is longer than its message")) };
        let (bytes, rest) = self.rest.split_at(length);
        self.rest = rest;
        Ok(bytes)
    }

    fn varint(&mut self) -> Parsed<u64> {
        let mut value = 0;
        for shift in 0..10 {
            let Some((&byte, rest)) = self.rest.split_first() else {
                return Err(self.problem("a varint is cut off"));
            };
            self.rest = rest;
            value |= u64::from(byte & 0x7F) << (7 * shift);
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(self.problem("a varint has more than 10 bytes"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn varint(mut value: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        while value >= 0x80 {
            bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        bytes.push(value as u8);
        bytes
    }

    fn field(number: u64, bytes: &[u8]) -> Vec<u8> {
        [varint(number << 3 | 2), varint(bytes.len() as u64), bytes.to_vec()].concat()
    }

    fn entry(name: &str, kind: u64, list: &[u8]) -> Vec<u8> {
        field(1, &[field(1, name.as_bytes()), field(2, &field(kind, list))].concat())
    }

    fn encode(features: &[(&str, Feature<'_>)], packed: bool) -> Vec<u8> {
        let mut entries = Vec::new();
        for (name, feature) in features {
            entries.extend(match feature {
                Feature::Empty => field(1, &field(1, name.as_bytes())),
                Feature::Bytes(values) => {
                    entry(name, 1, &values.iter().flat_map(|value| field(1, value)).collect::<Vec<_>>())
                }
                Feature::Floats(values) if packed => entry(
                    name,
                    2,
                    &field(1, &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>()),
                ),
                Feature::Floats(values) => {
                    let one = |value: &f32| [vec![1 << 3 | 5], value.to_le_bytes().to_vec()].concat();
                    entry(name, 2, &values.iter().flat_map(one).collect::<Vec<_>>())
                }
                Feature::Integers(values) if packed => entry(
                    name,
                    3,
                    &field(1, &values.iter().flat_map(|&v| varint(v as u64)).collect::<Vec<_>>()),
                ),
                Feature::Integers(values) => {
                    let one = |&value: &i64| [vec![1 << 3], varint(value as u64)].concat();
                    entry(name, 3, &values.iter().flat_map(one).collect::<Vec<_>>())
                }
            });
        }
        field(1, &entries)
    }

    proptest! {
        #[test]
        fn packed_and_unpacked_lists_read_as_they_were_written(
            floats in prop::collection::vec(any::<i32>(), 1..20), integers in prop::collection::vec(any::<i64>(), 1..20),
            bytes in prop::collection::vec(any::<u8>(), 0..20), packed: bool
        ) {
            let features = [
                ("f", Feature::Floats(floats.iter().map(|&value| value as f32).collect())),
                ("i", Feature::Integers(integers)),
                ("image/encoded", Feature::Bytes(vec![&bytes, b"second"])),
                ("none", Feature::Empty),
            ];
            let message = encode(&features, packed);
            let example = Example::parse(&message).unwrap();
            for (name, feature) in &features {
                prop_assert_eq!(example.feature(name), Some(feature));
            }
            prop_assert_eq!(example.feature("missing"), None);
            prop_assert_eq!(example.names().count(), 4);
        }

        #[test]
        fn any_bytes_are_a_message_or_an_error_within_them(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            if let Err(problem) = Example::parse(&bytes) {
                prop_assert!(problem.offset_bytes <= bytes.len() as u64, "{:?}", problem);
            }
        }
    }

    #[test]
    fn unknown_fields_are_skipped_and_the_last_of_two_features_counts() {
        let unknown = [field(9, b"?"), vec![8 << 3, 1], vec![7 << 3 | 1, 0, 0, 0, 0, 0, 0, 0, 0]].concat();
        let two = [entry("a", 3, &[1 << 3, 1]), entry("a", 3, &[1 << 3, 2]), unknown.clone()].concat();
        let message = [unknown, field(1, &two)].concat();
        assert_eq!(Example::parse(&message).unwrap().feature("a"), Some(&Feature::Integers(vec![2])));
    }

    #[test]
    fn broken_messages_name_the_offset() {
        let message = encode(&[("a", Feature::Integers(vec![300]))], false);
        for (bytes, offset, part) in [
            (&message[..1], 1, "varint is cut off"),
            (&message[..5], 2, "longer than its message"),
            (&[1 << 3, 1], 2, "another wire type"),
            (&[1 << 3 | 3], 1, "a wire type that is none"),
            (&[0xFF; 11], 10, "more than 10 bytes"),
        ] {
            let problem = Example::parse(bytes).unwrap_err();
            assert!(problem.problem.contains(part), "{problem:?}");
            assert_eq!(problem.offset_bytes, offset, "{problem:?}");
        }
    }
}
