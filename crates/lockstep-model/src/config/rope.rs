//! Rotary position embedding: its settings in both of transformers' forms, and the inverse frequencies.
//!
//! Form 4 has `rope_theta` and `rope_scaling` at the top level, form 5 one table `rope_parameters`. A file
//! may hold both, as long as they agree.

use serde_json::{Map, Value, json};

use super::reader::Reader;
use crate::error::ConfigProblem;

/// How positions are turned into angles: element pair `i` of a head turns by
/// `position * inverse_frequencies(head_dim)[i]`. Cosines and sines are not scaled (the attention factor
/// of every supported form is 1).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// The base of the geometric series of wavelengths.
    pub theta: f64,
    /// How the frequencies are changed for longer contexts.
    pub scaling: RopeScaling,
}

/// A change of RoPE's frequencies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// None (`rope_type` "default").
    Default,
    /// All frequencies divided by a factor: positions are interpolated (Chen et al. 2023, section 3.2).
    Linear {
        /// At least 1.
        factor: f64,
    },
    /// Long wavelengths divided by a factor, short ones kept, those between blended (Llama 3.1).
    Llama3 {
        /// Divisor of the lowest frequencies, at least 1.
        factor: f64,
        /// Wavelengths above `original_max_position_embeddings / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position_embeddings / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length of the training before the change.
        original_max_position_embeddings: usize,
    },
}

impl Rope {
    /// Plain RoPE with base `theta`.
    pub const fn new(theta: f64) -> Self {
        Self { theta, scaling: RopeScaling::Default }
    }

    /// Radians per position of each pair of elements, `[head_dim / 2]`; pair `i` are the elements `i` and
    /// `i + head_dim / 2`.
    ///
    /// Follows transformers' order of roundings to f32, with the power taken in f64 by `libm`: the same bits
    /// on every CPU, and within one unit in the last place of transformers'.
    pub fn inverse_frequencies(&self, head_dim: usize) -> Vec<f32> {
        (0..head_dim / 2)
            .map(|pair| {
                let exponent = (2 * pair) as f32 / head_dim as f32;
                let plain = 1.0 / libm::pow(self.theta, f64::from(exponent)) as f32;
                self.scaling.apply(plain)
            })
            .collect()
    }

    /// Reads either form; what is not given has transformers' defaults (theta 10,000, no scaling).
    pub(super) fn read(reader: &mut Reader<'_>, max_position_embeddings: usize) -> Self {
        let mut thetas = Vec::new();
        if let Some(theta) = reader.optional_number("rope_theta") {
            thetas.push(("rope_theta", theta));
        }
        let mut scalings = Vec::new();
        for (key, prefix) in [("rope_scaling", "rope_scaling."), ("rope_parameters", "rope_parameters.")] {
            let Some(table) = reader.table(key).filter(|table| !table.is_empty()) else {
                continue;
            };
            let mut inner = Reader::new(table, prefix);
            if let Some(theta) = inner.optional_number("rope_theta") {
                thetas.push((key, theta));
            }
            match RopeScaling::read(&mut inner, max_position_embeddings) {
                Some(scaling) => {
                    scalings.push((key, scaling));
                    reader.absorb(inner.finish());
                }
                // Of an unknown type the other keys are unknown as well; one message is enough.
                None => reader.absorb(inner.problems()),
            }
        }
        if let [(first, a), .., (last, b)] = scalings[..]
            && a != b
        {
            reader.conflict(format!("`{first}` and `{last}` describe different RoPE scalings"));
        }
        for pair in thetas.windows(2) {
            let [(first, a), (second, b)] = [pair[0], pair[1]];
            if a != b {
                reader.conflict(format!("RoPE's theta is {a} by `{first}` and {b} by `{second}`"));
            }
        }
        Self {
            theta: thetas.first().map_or(10_000.0, |&(_, theta)| theta),
            scaling: scalings.first().map_or(RopeScaling::Default, |&(_, scaling)| scaling),
        }
    }

    /// Form 4: `rope_theta` and `rope_scaling`.
    pub(super) fn write_form_4(&self, out: &mut Map<String, Value>) {
        out.insert("rope_theta".into(), json!(self.theta));
        let scaling = match self.scaling {
            RopeScaling::Default => Value::Null,
            scaling => Value::Object(scaling.table()),
        };
        out.insert("rope_scaling".into(), scaling);
    }

    /// Form 5: `rope_parameters`.
    pub(super) fn write_form_5(&self, out: &mut Map<String, Value>) {
        let mut table = self.scaling.table();
        table.insert("rope_theta".into(), json!(self.theta));
        out.insert("rope_parameters".into(), Value::Object(table));
    }

    /// Values outside their limits.
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
        }
        problems
    }
}

impl RopeScaling {
    /// Changes one inverse frequency; every step rounds to f32, as in transformers.
    fn apply(self, plain: f32) -> f32 {
        match self {
            Self::Default => plain,
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

    /// Reads the type and what belongs to it; `None` after a type that is not supported.
    fn read(reader: &mut Reader<'_>, max_position_embeddings: usize) -> Option<Self> {
        reader.fixed(super::keys::FIXED_FOR_ROPE);
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
            _ => {
                reader.unsupported(key, "\"default\", \"linear\", \"llama3\"");
                None
            }
        }
    }

    fn table(self) -> Map<String, Value> {
        let value = match self {
            Self::Default => json!({ "rope_type": "default" }),
            Self::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
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
