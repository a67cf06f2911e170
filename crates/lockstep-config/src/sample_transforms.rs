//! The transforms of images that RUN.toml can name: a list of tables such as `{ kind = "random_crop", size = 32, padding = 4 }`.

use serde::Serialize;
use serde_json::{Map, Value};
use strsim::normalized_damerau_levenshtein;

use crate::value::{InvalidValue, Readable, ValueType, shortened, wrong_type};

/// Largest size of an image, in pixels.
const MAX_PIXELS: u64 = 1 << 14;

/// Least similarity at which a word counts as a misspelling of another.
const LEAST_LIKENESS: f64 = 0.6;

/// Size of an image in pixels, as a transform takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum ImageSize {
    /// One number: the side of a square; for `resize` the shorter side.
    Side(usize),
    /// Height and width.
    Exact([usize; 2]),
}

impl ImageSize {
    /// Returns height and width; those of a square for one number.
    pub fn height_and_width(self) -> [usize; 2] {
        match self {
            Self::Side(side) => [side, side],
            Self::Exact(size) => size,
        }
    }
}

/// One entry of `data.transforms`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum SampleTransform {
    /// Resizes to a shorter side, or to a height and width.
    Resize {
        /// Size of the result.
        size: ImageSize,
    },
    /// Crops the center.
    CenterCrop {
        /// Size of the result.
        size: ImageSize,
    },
    /// Crops at a random position, after padding with zeros.
    RandomCrop {
        /// Size of the result.
        size: ImageSize,
        /// Pixels of padding on each side.
        padding: usize,
    },
    /// Crops a random area and aspect ratio, and resizes it.
    RandomResizedCrop {
        /// Size of the result.
        size: ImageSize,
    },
    /// Mirrors one image in two.
    HorizontalFlip,
    /// Subtracts a mean and divides by a standard deviation, by channel; bytes count as numbers in [0, 1].
    Normalize {
        /// Mean of each channel.
        mean: Vec<f64>,
        /// Standard deviation of each channel.
        std: Vec<f64>,
    },
}

/// Kinds of transforms, each with its keys.
const KINDS: [(&str, &[&str]); 6] = [
    ("resize", &["size"]),
    ("center_crop", &["size"]),
    ("random_crop", &["size", "padding"]),
    ("random_resized_crop", &["size"]),
    ("horizontal_flip", &[]),
    ("normalize", &["mean", "std"]),
];

impl SampleTransform {
    /// Returns the transform without chance that stands for this one in an evaluation: a random crop becomes a crop of the
    /// center, a flip nothing.
    pub fn for_evaluation(&self) -> Vec<Self> {
        match self {
            Self::HorizontalFlip => Vec::new(),
            Self::RandomCrop { size, .. } => vec![Self::CenterCrop { size: *size }],
            Self::RandomResizedCrop { size } => {
                let [height, width] = size.height_and_width();
                vec![
                    Self::Resize { size: ImageSize::Side(height.max(width)) },
                    Self::CenterCrop { size: *size },
                ]
            }
            other => vec![other.clone()],
        }
    }

    /// Reads one entry; the error lists everything that is wrong with it.
    fn read_entry(value: &Value) -> Result<Self, Vec<String>> {
        let Value::Object(table) = value else {
            return Err(vec![wrong_type::<Vec<Self>>(value).what]);
        };
        let Some(Value::String(kind)) = table.get("kind") else {
            return Err(vec!["has no kind".to_owned()]);
        };
        let Some((_, keys)) = KINDS.iter().find(|(known, _)| known == kind) else {
            let hint = nearest(kind, KINDS.iter().map(|(known, _)| *known));
            return Err(vec![format!("has the unknown kind \"{}\"{hint}", shortened(kind))]);
        };
        let mut entry = Entry { table, problems: Vec::new() };
        let unknown = table.keys().filter(|key| *key != "kind" && !keys.contains(&key.as_str()));
        for key in unknown {
            let hint = nearest(key, keys.iter().copied());
            entry
                .problems
                .push(format!("has the key \"{}\", which {kind} does not take{hint}", shortened(key)));
        }
        let read = match kind.as_str() {
            "resize" => Self::Resize { size: entry.size() },
            "center_crop" => Self::CenterCrop { size: entry.size() },
            "random_crop" => Self::RandomCrop { size: entry.size(), padding: entry.padding() },
            "random_resized_crop" => Self::RandomResizedCrop { size: entry.size() },
            "normalize" => entry.normalize(),
            _ => Self::HorizontalFlip,
        };
        if entry.problems.is_empty() { Ok(read) } else { Err(entry.problems) }
    }
}

/// Returns a hint at the known word that is most similar to an unknown one; empty if none is similar.
fn nearest<'w>(written: &str, known: impl Iterator<Item = &'w str>) -> String {
    let likeness = |word: &str| normalized_damerau_levenshtein(written, word);
    let best = known.max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    best.filter(|word| likeness(word) >= LEAST_LIKENESS)
        .map_or(String::new(), |word| format!(" (did you mean \"{word}\"?)"))
}

/// An entry that is being read, and what is wrong with it.
struct Entry<'v> {
    table: &'v Map<String, Value>,
    problems: Vec<String>,
}

impl Entry<'_> {
    /// Reads the size of a result; the smallest one if it is missing or does not fit.
    fn size(&mut self) -> ImageSize {
        let pixels = |value: &Value| {
            value.as_u64().filter(|pixels| (1..=MAX_PIXELS).contains(pixels)).map(|pixels| pixels as usize)
        };
        let found = self.table.get("size");
        let size = found.and_then(|size| match size {
            Value::Array(pair) => match &pair[..] {
                [height, width] => Some(ImageSize::Exact([pixels(height)?, pixels(width)?])),
                _ => None,
            },
            side => pixels(side).map(ImageSize::Side),
        });
        size.unwrap_or_else(|| {
            let what = found.map_or("no size".to_owned(), |size| format!("the size {size}"));
            self.problems
                .push(format!("has {what}, not pixels from 1 to {MAX_PIXELS}: 32 or [height, width]"));
            ImageSize::Side(1)
        })
    }

    /// Reads `padding`; 0 if it is absent.
    fn padding(&mut self) -> usize {
        let Some(found) = self.table.get("padding") else { return 0 };
        found.as_u64().filter(|padding| *padding <= MAX_PIXELS).map_or_else(
            || {
                self.problems.push(format!("has the padding {found}, not pixels from 0 to {MAX_PIXELS}"));
                0
            },
            |padding| padding as usize,
        )
    }

    /// Reads the lists of a normalization.
    fn normalize(&mut self) -> SampleTransform {
        let mean = self.numbers("mean", f64::is_finite, "numbers");
        let std = self.numbers("std", |std| std.is_finite() && std > 0.0, "numbers above 0");
        if !mean.is_empty() && !std.is_empty() && mean.len() != std.len() {
            let (means, stds) = (mean.len(), std.len());
            self.problems.push(format!(
                "has {means} means and {stds} standard deviations, not one of each per channel"
            ));
        }
        SampleTransform::Normalize { mean, std }
    }

    /// Reads a list of numbers; empty if it does not fit.
    fn numbers(&mut self, key: &str, fits: impl Fn(f64) -> bool, allowed: &str) -> Vec<f64> {
        let found = self.table.get(key);
        let one = |value: &Value| value.as_f64().filter(|number| fits(*number));
        let list = match found {
            Some(Value::Array(items)) if !items.is_empty() => items.iter().map(one).collect(),
            _ => None,
        };
        list.unwrap_or_else(|| {
            let what = found.map_or(format!("no {key}"), |found| format!("the {key} {found}"));
            self.problems.push(format!("has {what}, not a list of {allowed}, one for each channel"));
            Vec::new()
        })
    }
}

impl Readable for Vec<SampleTransform> {
    const TYPE: ValueType = ValueType::TransformList;

    fn read(value: &Value) -> Result<Self, InvalidValue> {
        let Value::Array(items) = value else { return Err(wrong_type::<Self>(value)) };
        let (mut transforms, mut problems) = (Vec::new(), Vec::new());
        for (at, item) in items.iter().enumerate() {
            match SampleTransform::read_entry(item) {
                Ok(transform) => transforms.push(transform),
                Err(found) => problems.extend(found.iter().map(|what| format!("entry {} {what}", at + 1))),
            }
        }
        if problems.is_empty() {
            return Ok(transforms);
        }
        let kinds: Vec<String> = KINDS.iter().map(|(kind, keys)| described(kind, keys)).collect();
        Err(InvalidValue { what: problems.join("; "), allowed: format!("a list of {}", kinds.join(", ")) })
    }
}

/// Returns a kind with its keys, such as `normalize (mean, std)`.
fn described(kind: &str, keys: &[&str]) -> String {
    if keys.is_empty() { kind.to_owned() } else { format!("{kind} ({})", keys.join(", ")) }
}

/// Returns the kinds of transforms, for the schema.
pub(crate) fn kinds() -> impl Iterator<Item = (&'static str, &'static [&'static str])> {
    KINDS.into_iter()
}
