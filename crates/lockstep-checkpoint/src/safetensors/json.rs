//! JSON parser of safetensors headers that rejects duplicate keys.
//!
//! JSON parsers commonly let the last of two equal keys win, so different parsers could see different tensors in one
//! file. Here a duplicate key is an error.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashSet, btree_map},
    fmt,
};

use ::safetensors::Dtype;
use serde::{
    Deserialize, Deserializer,
    de::{self, DeserializeSeed, IntoDeserializer, MapAccess, Visitor, value},
};

/// Tensor entry of the header; only the JSON types are checked.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Tensor entry with a known type; ranges and sizes are not checked yet.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    pub(super) begin: u64,
    pub(super) end: u64,
}

/// Tensor entries in header order, and the strings of `__metadata__`.
pub(super) type Entries = (Vec<Entry>, BTreeMap<String, String>);

/// Parses the whole header. serde appends a position to errors, so an error of our own is stored aside and returned
/// afterwards.
pub(super) fn parse_entries(text: &str) -> Result<Entries, String> {
    let failure = RefCell::new(None);
    let mut deserializer = serde_json::Deserializer::from_str(text);
    (HeaderSeed { failure: &failure })
        .deserialize(&mut deserializer)
        .and_then(|entries| deserializer.end().map(|()| entries))
        .map_err(|error| failure.take().unwrap_or_else(|| format!("its header is not valid JSON: {error}")))
}

/// Parses a JSON object of strings with unique keys.
pub(crate) fn deserialize_unique_strings<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, String>, D::Error> {
    struct UniqueStrings;

    impl<'de> Visitor<'de> for UniqueStrings {
        type Value = BTreeMap<String, String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object that maps strings to strings")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut strings = BTreeMap::new();
            while let Some((key, value)) = map.next_entry::<String, String>()? {
                match strings.entry(key) {
                    btree_map::Entry::Vacant(vacant) => vacant.insert(value),
                    btree_map::Entry::Occupied(occupied) => {
                        return Err(de::Error::custom(format!("`{}` stands twice", occupied.key())));
                    }
                };
            }
            Ok(strings)
        }
    }

    deserializer.deserialize_map(UniqueStrings)
}

struct HeaderSeed<'a> {
    failure: &'a RefCell<Option<String>>,
}

impl HeaderSeed<'_> {
    fn fail<E: de::Error>(&self, rule: String) -> E {
        let error = E::custom(&rule);
        self.failure.replace(Some(rule));
        error
    }
}

impl<'de> DeserializeSeed<'de> for HeaderSeed<'_> {
    type Value = Entries;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Entries, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderSeed<'_> {
    type Value = Entries;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object that maps tensor names to {dtype, shape, data_offsets}")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
        let mut entries: Vec<Entry> = Vec::new();
        let mut names = HashSet::new();
        let mut metadata = BTreeMap::new();
        while let Some(name) = map.next_key::<String>()? {
            if !names.insert(name.clone()) {
                return Err(self.fail(format!("`{name}` stands twice in its header")));
            }
            if name == "__metadata__" {
                let strings = map.next_value::<UniqueStringMap>().map_err(|error| {
                    let rule = format!("its `__metadata__` must map strings to strings: {error}");
                    self.fail::<A::Error>(rule)
                });
                metadata = strings?.0;
                continue;
            }
            let raw: RawEntry = map
                .next_value()
                .map_err(|error: A::Error| self.fail::<A::Error>(format!("tensor `{name}`: {error}")))?;
            let deserializer: value::StrDeserializer<'_, value::Error> =
                raw.dtype.as_str().into_deserializer();
            let Ok(dtype) = Dtype::deserialize(deserializer) else {
                return Err(self.fail(format!("tensor `{name}` has the unknown type `{}`", raw.dtype)));
            };
            let (begin, end) = raw.data_offsets;
            entries.push(Entry { name, dtype, shape: raw.shape, begin, end });
        }
        Ok((entries, metadata))
    }
}

#[derive(Deserialize)]
#[serde(transparent)]
struct UniqueStringMap(#[serde(deserialize_with = "deserialize_unique_strings")] BTreeMap<String, String>);
