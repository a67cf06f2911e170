//! Rotary position embedding (RoPE): its settings in both of transformers' forms, and the inverse frequencies.
//!
//! In form 4 (transformers 4) `rope_theta` and `rope_scaling` are at the top level; in form 5 they are one table
//! `rope_parameters`. A file may have both, if they agree.

use serde_json::{Map, Value, json};

use super::reader::Reader;
use crate::error::ConfigProblem;

/// Key of a RoPE table: the fraction of each head's elements that rotate.
pub(super) const PART_KEY: &str = "partial_rotary_factor";

/// Name of the constant that holds the inverse frequencies.
pub(crate) const INVERSE_FREQUENCIES: &str = "inverse_frequencies";

/// Name of the constant that holds the inverse frequencies of layers with a sliding window, where they differ.
pub(crate) const LOCAL_INVERSE_FREQUENCIES: &str = "local_inverse_frequencies";

/// Settings of rotary position embedding: element pair `i` of a head rotates by the angle
/// `position * inverse_frequencies(head_dim)[i]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// Change of the frequencies for longer contexts.
    pub scaling: RopeScaling,
}

/// A change of RoPE's frequencies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// No change (`rope_type` "default").
    Default,
    /// All frequencies divided by a factor: positions are interpolated (Chen et al. 2023, section 3.2).
    Linear {
        /// Divisor of the frequencies, at least 1.
        factor: f64,
    },
    /// Frequencies of long wavelengths divided by a factor, those of short ones kept, those between interpolated (Llama 3.1).
    Llama3 {
        /// Divisor of the lowest frequencies, at least 1.
        factor: f64,
        /// Frequencies with wavelengths above `original_max_position_embeddings / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Frequencies with wavelengths below `original_max_position_embeddings / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length in tokens of the training before the change.
        original_max_position_embeddings: usize,
    },
    /// Frequencies of long wavelengths divided by a factor, those of short ones kept, those between interpolated, and
    /// attention sharpened (YaRN: Peng et al., 2023, sections 3.2 and 3.4).
    Yarn(Yarn),
}

impl RopeScaling {
    /// Returns the context length in tokens of the training before the change; `None` if the settings do not tell.
    pub fn original_context(&self) -> Option<usize> {
        match self {
            Self::Default | Self::Linear { .. } => None,
            Self::Llama3 { original_max_position_embeddings, .. } => Some(*original_max_position_embeddings),
            Self::Yarn(yarn) => Some(yarn.original_max_position_embeddings),
        }
    }
}

/// Settings of YaRN.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// Ratio of the extended context to the original one.
    pub factor: f64,
    /// Frequencies with at least this many rotations within the original context are kept.
    pub beta_fast: f64,
    /// Frequencies with at most this many rotations within the original context are divided.
    pub beta_slow: f64,
    /// Context length in tokens of the training before the change.
    pub original_max_position_embeddings: usize,
    /// True if the pairs at the ends of the interpolated band are rounded outwards.
    pub truncate: bool,
    /// Factor on cosines and sines; `None` derives it from `factor`, `mscale` and `mscale_all_dim`.
    pub attention_factor: Option<f64>,
    /// Weight of the logarithm of `factor` in the growth of rotated elements.
    pub mscale: Option<f64>,
    /// Weight of the logarithm of `factor` in the growth of all elements, for families that scale these (DeepSeek).
    pub mscale_all_dim: Option<f64>,
}

impl Rope {
    /// Returns plain RoPE with base `theta`.
    pub const fn new(theta: f64) -> Self {
        Self { theta, scaling: RopeScaling::Default }
    }

    /// Returns the radians per position of each pair of elements, f32 `[head_dim / 2]`; pair `i` consists of the
    /// elements `i` and `i + head_dim / 2`.
    ///
    /// Follows transformers' order of roundings to f32, with the power taken in f64 by `libm`. So the bits are the
    /// same on every CPU, and within one unit in the last place of transformers'.
    pub fn inverse_frequencies(&self, head_dim: usize) -> Vec<f32> {
        (0..head_dim / 2)
            .map(|pair| {
                let exponent = (2 * pair) as f32 / head_dim as f32;
                let inverse = libm::pow(self.theta, f64::from(exponent)) as f32;
                match self.scaling {
                    RopeScaling::Yarn(yarn) => yarn.apply(inverse, yarn.kept(pair, head_dim, self.theta)),
                    scaling => scaling.apply(1.0 / inverse),
                }
            })
            .collect()
    }

    /// Returns the factor on cosines and sines, which scales rotated queries and keys alike.
    pub fn attention_factor(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn(yarn) => yarn.attention_factor(),
            _ => 1.0,
        }
    }

    /// Returns the factor on the scores of latent attention, where only some elements are rotated.
    pub fn latent_score_factor(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn(Yarn { factor, mscale_all_dim: Some(scale), .. }) if scale != 0.0 => {
                let scale = growth(factor, scale);
                scale * scale
            }
            _ => 1.0,
        }
    }

    /// Reads either form; absent values get transformers' defaults (theta 10,000, no scaling).
    pub(super) fn read(reader: &mut Reader<'_>, max_position_embeddings: usize) -> Self {
        Self::read_with(reader, max_position_embeddings, "rope_theta", None).0
    }

    /// Reads either form, with `theta_key` for theta at the top level, and with the fraction of each head's elements
    /// that rotate. `part` is the fraction's key at the top level and its default; without it, all elements rotate.
    pub(super) fn read_with(
        reader: &mut Reader<'_>,
        max_position_embeddings: usize,
        theta_key: &'static str,
        part: Option<(&'static str, f64)>,
    ) -> (Self, f64) {
        let tables = RopeSource::usual_tables(reader).into();
        let source = RopeSource { theta: (theta_key, 10_000.0), part, tables };
        source.read(reader, max_position_embeddings)
    }

    /// Writes form 4: theta under `theta_key`, and `rope_scaling`.
    pub(super) fn write_form_4(&self, theta_key: &str, out: &mut Map<String, Value>) {
        out.insert(theta_key.into(), json!(self.theta));
        let scaling = match self.scaling {
            RopeScaling::Default => Value::Null,
            scaling => Value::Object(scaling.table()),
        };
        out.insert("rope_scaling".into(), scaling);
    }

    /// Writes form 5: `rope_parameters`.
    pub(crate) fn write_form_5(&self, out: &mut Map<String, Value>) {
        let mut table = self.scaling.table();
        table.insert("rope_theta".into(), json!(self.theta));
        out.insert("rope_parameters".into(), Value::Object(table));
    }

    /// Returns the values that are out of range.
    pub(super) fn problems(&self) -> Vec<ConfigProblem> {
        let mut problems = Vec::new();
        let mut check = |key: &str, value: f64, ok: bool, allowed: &str| {
            if !ok {
                problems.push(ConfigProblem::OutOfRange {
                    key: key.into(),
                    value: value.to_string(),
                    allowed: allowed.into(),
                });
            }
        };
        let finite_from = |value: f64, least: f64| value.is_finite() && value >= least;
        check("rope_theta", self.theta, finite_from(self.theta, 1.0), "a finite number from 1");
        match self.scaling {
            RopeScaling::Default => {}
            RopeScaling::Linear { factor } => {
                check("factor", factor, finite_from(factor, 1.0), "a finite number from 1");
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let original = original_max_position_embeddings as f64;
                check("original_max_position_embeddings", original, original >= 1.0, "a whole number from 1");
                check("factor", factor, finite_from(factor, 1.0), "a finite number from 1");
                let low = low_freq_factor;
                check("low_freq_factor", low, low.is_finite() && low > 0.0, "a finite number above 0");
                let high = high_freq_factor;
                let allowed = format!("a finite number above low_freq_factor = {low}");
                check("high_freq_factor", high, high.is_finite() && high > low, &allowed);
            }
            RopeScaling::Yarn(yarn) => {
                let original = yarn.original_max_position_embeddings as f64;
                check("original_max_position_embeddings", original, original >= 1.0, "a whole number from 1");
                check("rope_theta", self.theta, self.theta > 1.0, "a finite number above 1 with \"yarn\"");
                check("factor", yarn.factor, finite_from(yarn.factor, 1.0), "a finite number from 1");
                let slow = yarn.beta_slow;
                check("beta_slow", slow, slow.is_finite() && slow > 0.0, "a finite number above 0");
                let allowed = format!("a finite number above beta_slow = {slow}");
                check(
                    "beta_fast",
                    yarn.beta_fast,
                    yarn.beta_fast.is_finite() && yarn.beta_fast > slow,
                    &allowed,
                );
                let factors = [("mscale", yarn.mscale), ("mscale_all_dim", yarn.mscale_all_dim)];
                for (key, value) in factors.into_iter().filter_map(|(key, value)| Some((key, value?))) {
                    check(key, value, finite_from(value, 0.0), "a finite number from 0");
                }
                if let Some(factor) = yarn.attention_factor {
                    check(
                        "attention_factor",
                        factor,
                        factor.is_finite() && factor > 0.0,
                        "a finite number above 0",
                    );
                }
            }
        }
        problems
    }
}

/// A table of RoPE settings: its key, the prefix of its keys in messages, and its contents.
pub(super) type RopeTable<'a> = (&'static str, &'static str, Option<&'a Map<String, Value>>);

/// The places of RoPE settings in a configuration.
pub(super) struct RopeSource<'a> {
    /// Key of theta at the top level, and its default.
    pub(super) theta: (&'static str, f64),
    /// Key at the top level of the fraction of each head that rotates, and its default; without it, all elements rotate.
    pub(super) part: Option<(&'static str, f64)>,
    /// Tables of settings, which must agree.
    pub(super) tables: Vec<RopeTable<'a>>,
}

impl<'a> RopeSource<'a> {
    /// Returns the tables of both of transformers' forms.
    pub(super) fn usual_tables(reader: &mut Reader<'a>) -> [RopeTable<'a>; 2] {
        [("rope_scaling", "rope_scaling."), ("rope_parameters", "rope_parameters.")]
            .map(|(key, prefix)| (key, prefix, reader.table(key)))
    }

    /// Reads the settings, and the fraction of each head that rotates.
    pub(super) fn read(self, reader: &mut Reader<'_>, max_position_embeddings: usize) -> (Rope, f64) {
        let Self { theta: (theta_key, default_theta), part, tables } = self;
        let mut thetas = Vec::new();
        if let Some(theta) = reader.optional_number(theta_key) {
            thetas.push((theta_key, theta));
        }
        let mut parts = Vec::new();
        if let Some((key, _)) = part
            && let Some(fraction) = reader.optional_number(key)
        {
            parts.push((key, fraction));
        }
        let mut scalings = Vec::new();
        for (key, prefix, table) in tables {
            let Some(table) = table.filter(|table| !table.is_empty()) else { continue };
            let mut inner = Reader::new(table, prefix);
            if let Some(theta) = inner.optional_number("rope_theta") {
                thetas.push((key, theta));
            }
            match part {
                None => inner.fixed(super::keys::FIXED_FOR_ROPE),
                Some(_) => parts.extend(inner.optional_number(PART_KEY).map(|fraction| (key, fraction))),
            }
            match RopeScaling::read(&mut inner, max_position_embeddings) {
                Some(scaling) => {
                    scalings.push((key, scaling));
                    reader.absorb(inner.finish());
                }
                // With an unknown type all other keys would be unknown as well; one message is enough.
                None => reader.absorb(inner.problems()),
            }
        }
        if let [(first, a), .., (last, b)] = scalings[..]
            && a != b
        {
            reader.conflict(format!("`{first}` and `{last}` describe different RoPE scalings"));
        }
        for (what, values) in [("theta", &thetas), ("part of a head", &parts)] {
            for pair in values.windows(2) {
                let [(first, a), (second, b)] = [pair[0], pair[1]];
                if a != b {
                    reader.conflict(format!("RoPE's {what} is {a} by `{first}` and {b} by `{second}`"));
                }
            }
        }
        let rope = Rope {
            theta: thetas.first().map_or(default_theta, |&(_, theta)| theta),
            scaling: scalings.first().map_or(RopeScaling::Default, |&(_, scaling)| scaling),
        };
        (rope, parts.first().copied().or(part).map_or(1.0, |(_, fraction)| fraction))
    }
}

/// Returns the growth of attention for a context that is `factor` times longer (Peng et al., 2023, equation 22).
fn growth(factor: f64, scale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * scale * libm::log(factor) + 1.0 }
}

impl Yarn {
    fn attention_factor(&self) -> f64 {
        let given = |scale: Option<f64>| scale.filter(|scale| *scale != 0.0);
        match (self.attention_factor, given(self.mscale).zip(given(self.mscale_all_dim))) {
            (Some(factor), _) => factor,
            (None, Some((own, all))) => growth(self.factor, own) / growth(self.factor, all),
            (None, None) => growth(self.factor, 1.0),
        }
    }

    /// Returns the part of a pair's frequency that is kept, in 0..=1: 1 if it rotates often within the original
    /// context, 0 if it rotates seldom.
    fn kept(&self, pair: usize, head_dim: usize, theta: f64) -> f32 {
        let original = self.original_max_position_embeddings as f64;
        // The (fractional) index of the pair that rotates this often.
        let pair_of = |turns: f64| {
            head_dim as f64 * libm::log(original / (turns * std::f64::consts::TAU)) / (2.0 * libm::log(theta))
        };
        let (mut first, mut last) = (pair_of(self.beta_fast), pair_of(self.beta_slow));
        if self.truncate {
            (first, last) = (first.floor(), last.ceil());
        }
        let first = first.max(0.0);
        let mut last = last.min(head_dim as f64 - 1.0);
        if first == last {
            last += 0.001;
        }
        let divided = (pair as f32 - first as f32) / (last - first) as f32;
        1.0 - divided.clamp(0.0, 1.0)
    }

    /// Returns the scaled inverse frequency; every step rounds to f32, as in transformers.
    fn apply(&self, inverse: f32, kept: f32) -> f32 {
        (1.0 / (self.factor as f32 * inverse)) * (1.0 - kept) + 1.0 / inverse * kept
    }

    fn read(reader: &mut Reader<'_>, max_position_embeddings: usize) -> Self {
        let original = reader.size("original_max_position_embeddings", max_position_embeddings);
        // Zero counts as absent.
        let mut beta =
            |key, default| Some(reader.number(key, default)).filter(|beta| *beta != 0.0).unwrap_or(default);
        let (beta_fast, beta_slow) = (beta("beta_fast", 32.0), beta("beta_slow", 1.0));
        let ratio = max_position_embeddings as f64 / original.max(1) as f64;
        Self {
            factor: reader.optional_number("factor").unwrap_or(ratio),
            beta_fast,
            beta_slow,
            original_max_position_embeddings: original,
            truncate: reader.flag("truncate", true),
            attention_factor: reader.optional_number("attention_factor"),
            mscale: reader.optional_number("mscale"),
            mscale_all_dim: reader.optional_number("mscale_all_dim"),
        }
    }

    fn table(&self) -> Value {
        let mut table = json!({
            "rope_type": "yarn",
            "factor": self.factor,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "original_max_position_embeddings": self.original_max_position_embeddings,
        });
        if !self.truncate {
            table["truncate"] = json!(false);
        }
        let optional = [
            ("attention_factor", self.attention_factor),
            ("mscale", self.mscale),
            ("mscale_all_dim", self.mscale_all_dim),
        ];
        for (key, value) in optional.into_iter().filter_map(|(key, value)| Some((key, value?))) {
            table[key] = json!(value);
        }
        table
    }
}

impl RopeScaling {
    /// Returns the scaled inverse frequency; every step rounds to f32, as in transformers.
    fn apply(self, plain: f32) -> f32 {
        match self {
            Self::Default | Self::Yarn(_) => plain,
            Self::Linear { factor } => plain / factor as f32,
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                let original = original_max_position_embeddings as f64;
                let wavelength = std::f64::consts::TAU as f32 / plain;
                if wavelength < (original / high_freq_factor) as f32 {
                    return plain;
                }
                if wavelength > (original / low_freq_factor) as f32 {
                    return plain / factor as f32;
                }
                let band = (high_freq_factor - low_freq_factor) as f32;
                let kept = (original as f32 / wavelength - low_freq_factor as f32) / band;
                (1.0 - kept) * plain / factor as f32 + kept * plain
            }
        }
    }

    /// Reads the type and its settings; returns `None` for an unsupported type.
    fn read(reader: &mut Reader<'_>, max_position_embeddings: usize) -> Option<Self> {
        let (new, old) = (reader.text("rope_type"), reader.text("type"));
        if let (Some(new), Some(old)) = (new, old)
            && new != old
        {
            reader.conflict(format!("RoPE's `rope_type` is \"{new}\" and its `type` is \"{old}\""));
        }
        let key = if new.is_some() { "rope_type" } else { "type" };
        match new.or(old).unwrap_or("default") {
            "default" => Some(Self::Default),
            "linear" => Some(Self::Linear { factor: reader.required_number("factor") }),
            "llama3" => Some(Self::Llama3 {
                factor: reader.required_number("factor"),
                low_freq_factor: reader.required_number("low_freq_factor"),
                high_freq_factor: reader.required_number("high_freq_factor"),
                original_max_position_embeddings: reader
                    .size("original_max_position_embeddings", max_position_embeddings),
            }),
            "yarn" => Some(Self::Yarn(Yarn::read(reader, max_position_embeddings))),
            _ => {
                reader.unsupported(key, "\"default\", \"linear\", \"llama3\", \"yarn\"");
                None
            }
        }
    }

    fn table(self) -> Map<String, Value> {
        let value = match self {
            Self::Default => json!({ "rope_type": "default" }),
            Self::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
            Self::Yarn(yarn) => yarn.table(),
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                json!({
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": low_freq_factor,
                    "high_freq_factor": high_freq_factor,
                    "original_max_position_embeddings": original_max_position_embeddings,
                })
            }
        };
        match value {
            Value::Object(table) => table,
            _ => unreachable!("each arm is a table"),
        }
    }
}
