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

/// Name of the constant that holds the inverse frequencies of sequences beyond the original context, where they differ (LongRoPE).
pub(crate) const LONG_INVERSE_FREQUENCIES: &str = "long_inverse_frequencies";

/// Name of the constant that holds the inverse frequencies of layers with a sliding window, where they differ.
pub(crate) const LOCAL_INVERSE_FREQUENCIES: &str = "local_inverse_frequencies";

/// Settings of rotary position embedding: element pair `i` of a head rotates by the angle
/// `position * inverse_frequencies(head_dim)[i]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// Change of the frequencies for longer contexts.
    pub scaling: RopeScaling,
}

/// A change of RoPE's frequencies.
#[derive(Debug, Clone, PartialEq)]
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
    /// Each frequency divided by a factor of its own, another one in sequences beyond the original context (LongRoPE: Ding et al.
    /// 2024, section 3.3).
    LongRope(LongRope),
}

impl RopeScaling {
    /// Returns the context length in tokens of the training before the change; `None` if the settings do not tell.
    pub fn original_context(&self) -> Option<usize> {
        match self {
            Self::Default | Self::Linear { .. } => None,
            Self::Llama3 { original_max_position_embeddings, .. } => Some(*original_max_position_embeddings),
            Self::Yarn(yarn) => Some(yarn.original_max_position_embeddings),
            Self::LongRope(long) => Some(long.original_max_position_embeddings),
        }
    }
}

/// Settings of LongRoPE.
#[derive(Debug, Clone, PartialEq)]
pub struct LongRope {
    /// Divisors of the frequencies in sequences up to the original context, one for each pair.
    pub short_factor: Vec<f64>,
    /// Divisors of the frequencies in longer sequences.
    pub long_factor: Vec<f64>,
    /// Ratio of the extended context to the original one.
    pub factor: f64,
    /// Context length in tokens of the training before the change.
    pub original_max_position_embeddings: usize,
    /// Factor on cosines and sines; `None` derives it from `factor`.
    pub attention_factor: Option<f64>,
}

impl LongRope {
    /// Returns the factor on cosines and sines.
    fn amplitude(&self) -> f64 {
        let derived = || Self::derived_amplitude(self.factor, self.original_max_position_embeddings as f64);
        self.attention_factor.unwrap_or_else(derived)
    }

    /// Returns the factor on cosines and sines of a context that is `factor` times as long as the `original` one, in tokens.
    pub fn derived_amplitude(factor: f64, original: f64) -> f64 {
        if factor <= 1.0 { 1.0 } else { libm::sqrt(1.0 + libm::log(factor) / libm::log(original)) }
    }

    fn read(reader: &mut Reader<'_>, max_position_embeddings: usize, original: Option<usize>) -> Self {
        let of_table = reader.size("original_max_position_embeddings", max_position_embeddings);
        let original = original.unwrap_or(of_table);
        let ratio = max_position_embeddings as f64 / original.max(1) as f64;
        Self {
            short_factor: reader.required_numbers("short_factor"),
            long_factor: reader.required_numbers("long_factor"),
            factor: reader.optional_number("factor").unwrap_or(ratio),
            original_max_position_embeddings: original,
            attention_factor: reader.optional_number("attention_factor"),
        }
    }

    fn table(&self) -> Value {
        let mut table = json!({
            "rope_type": "longrope",
            "short_factor": self.short_factor,
            "long_factor": self.long_factor,
            "factor": self.factor,
            "original_max_position_embeddings": self.original_max_position_embeddings,
        });
        if let Some(factor) = self.attention_factor {
            table["attention_factor"] = json!(factor);
        }
        table
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
        self.map_wavelengths(head_dim, |pair, inverse| match &self.scaling {
            RopeScaling::Yarn(yarn) => yarn.apply(inverse, yarn.kept(pair, head_dim, self.theta)),
            RopeScaling::LongRope(long) => divided(inverse, &long.short_factor, pair),
            scaling => scaling.apply(1.0 / inverse),
        })
    }

    /// Returns the inverse frequencies of sequences beyond the original context, as [`Rope::inverse_frequencies`]; `None` if they are
    /// the same.
    pub fn long_inverse_frequencies(&self, head_dim: usize) -> Option<Vec<f32>> {
        let RopeScaling::LongRope(long) = &self.scaling else { return None };
        let divided = |pair, inverse| divided(inverse, &long.long_factor, pair);
        Some(self.map_wavelengths(head_dim, divided))
    }

    /// Returns what `map` makes of each pair and the inverse of its frequency before any change.
    fn map_wavelengths(&self, head_dim: usize, map: impl Fn(usize, f32) -> f32) -> Vec<f32> {
        let inverse = |pair: usize| {
            let exponent = (2 * pair) as f32 / head_dim as f32;
            libm::pow(self.theta, f64::from(exponent)) as f32
        };
        (0..head_dim / 2).map(|pair| map(pair, inverse(pair))).collect()
    }

    /// Returns the factor on cosines and sines that goes into the scale of attention's scores: of YaRN.
    pub fn attention_factor(&self) -> f64 {
        match &self.scaling {
            RopeScaling::Yarn(yarn) => yarn.attention_factor(),
            _ => 1.0,
        }
    }

    /// Returns the factor on cosines and sines that is applied to rotated elements alone: of LongRoPE, whose models may rotate a part
    /// of a head.
    pub fn amplitude(&self) -> f64 {
        match &self.scaling {
            RopeScaling::LongRope(long) => long.amplitude(),
            _ => 1.0,
        }
    }

    /// Returns the longest sequence, in tokens, that has [`Rope::inverse_frequencies`]; `None` if all have.
    pub fn short_context(&self) -> Option<usize> {
        match &self.scaling {
            RopeScaling::LongRope(long) => Some(long.original_max_position_embeddings),
            _ => None,
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
        let source = RopeSource { theta: (theta_key, 10_000.0), part, original: None, tables };
        let (rope, part) = source.read(reader, max_position_embeddings);
        if matches!(rope.scaling, RopeScaling::LongRope(_)) {
            reader
                .unsupported("rope_scaling", "\"default\", \"linear\", \"llama3\", \"yarn\" in this family");
        }
        (rope, part)
    }

    /// Writes form 4: theta under `theta_key`, and `rope_scaling`.
    pub(super) fn write_form_4(&self, theta_key: &str, out: &mut Map<String, Value>) {
        out.insert(theta_key.into(), json!(self.theta));
        let scaling = match &self.scaling {
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

    /// Returns the lists of LongRoPE that have not a factor for each of `pairs` pairs.
    pub(super) fn problems_of_pairs(&self, pairs: usize) -> Vec<ConfigProblem> {
        let RopeScaling::LongRope(long) = &self.scaling else { return Vec::new() };
        let lists = [("short_factor", long.short_factor.len()), ("long_factor", long.long_factor.len())];
        let odd = lists.into_iter().filter(|(_, factors)| *factors != pairs);
        let problem = |(key, factors): (&str, usize)| ConfigProblem::OutOfRange {
            key: key.into(),
            value: format!("a list of {factors}"),
            allowed: format!("a list of {pairs} numbers, one for each pair of elements that rotates"),
        };
        odd.map(problem).collect()
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
        match &self.scaling {
            RopeScaling::Default => {}
            &RopeScaling::Linear { factor } => {
                check("factor", factor, finite_from(factor, 1.0), "a finite number from 1");
            }
            RopeScaling::LongRope(long) => {
                let original = long.original_max_position_embeddings as f64;
                check("original_max_position_embeddings", original, original >= 2.0, "a whole number from 2");
                check("factor", long.factor, finite_from(long.factor, 0.0), "a finite number from 0");
                for (key, factors) in
                    [("short_factor", &long.short_factor), ("long_factor", &long.long_factor)]
                {
                    let odd = factors.iter().find(|factor| !factor.is_finite() || **factor <= 0.0);
                    check(key, odd.copied().unwrap_or(1.0), odd.is_none(), "finite numbers above 0");
                }
                if let Some(factor) = long.attention_factor {
                    let is_positive = factor.is_finite() && factor > 0.0;
                    check("attention_factor", factor, is_positive, "a finite number above 0");
                }
            }
            &RopeScaling::Llama3 {
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
    /// Context before the change, from the top level, which precedes that of LongRoPE's tables.
    pub(super) original: Option<usize>,
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
        let Self { theta: (theta_key, default_theta), part, original, tables } = self;
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
            match RopeScaling::read(&mut inner, max_position_embeddings, original) {
                Some(scaling) => {
                    scalings.push((key, scaling));
                    reader.absorb(inner.finish());
                }
                // With an unknown type all other keys would be unknown as well; one message is enough.
                None => reader.absorb(inner.problems()),
            }
        }
        if let [(first, a), .., (last, b)] = &scalings[..]
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
            scaling: scalings.into_iter().next().map_or(RopeScaling::Default, |(_, scaling)| scaling),
        };
        (rope, parts.first().copied().or(part).map_or(1.0, |(_, fraction)| fraction))
    }
}

/// Returns the frequency of a pair, whose inverse is `inverse`, divided by its factor.
fn divided(inverse: f32, factors: &[f64], pair: usize) -> f32 {
    // A list of another length is refused.
    1.0 / (factors.get(pair).copied().unwrap_or(1.0) as f32 * inverse)
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
    fn apply(&self, plain: f32) -> f32 {
        match *self {
            Self::Default | Self::Yarn(_) | Self::LongRope(_) => plain,
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
    fn read(
        reader: &mut Reader<'_>,
        max_position_embeddings: usize,
        original: Option<usize>,
    ) -> Option<Self> {
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
            // Older files of Phi-3 call it "su".
            "longrope" | "su" => {
                Some(Self::LongRope(LongRope::read(reader, max_position_embeddings, original)))
            }
            _ => {
                reader.unsupported(key, "\"default\", \"linear\", \"llama3\", \"yarn\", \"longrope\"");
                None
            }
        }
    }

    fn table(&self) -> Map<String, Value> {
        let value = match self {
            Self::Default => json!({ "rope_type": "default" }),
            Self::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
            Self::Yarn(yarn) => yarn.table(),
            Self::LongRope(long) => long.table(),
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
