//! Named model presets: published architectures, and a few small byte-level ones. The data is in `presets.toml`, next to this file.

use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::config::ModelConfig;
use crate::error::{ModelError, nearest};

/// A named architecture.
#[derive(Debug, Deserialize)]
pub struct Preset {
    /// Name, as in `model.preset`.
    pub name: String,
    /// Name of the base preset, whose keys apply where this preset sets none.
    like: Option<String>,
    /// A short description; `None` inherits that of the base preset.
    about: Option<String>,
    /// Keys of the model's `config.json`.
    #[serde(flatten)]
    keys: Map<String, Value>,
}

/// Contents of `presets.toml`.
#[derive(Debug, Deserialize)]
struct PresetFile {
    preset: Vec<Preset>,
}

/// Returns every preset, family by family, small ones first.
pub fn presets() -> &'static [Preset] {
    static PRESETS: LazyLock<Vec<Preset>> = LazyLock::new(|| {
        // The tests check that the file parses.
        toml::from_str(include_str!("presets.toml"))
            .map_or_else(|_| Vec::new(), |file: PresetFile| file.preset)
    });
    &PRESETS
}

/// Returns the preset called `name`.
fn find(name: &str) -> Option<&'static Preset> {
    presets().iter().find(|preset| preset.name == name)
}

impl Preset {
    /// Returns a short description.
    pub fn about(&self) -> &str {
        match (&self.about, self.base()) {
            (Some(about), _) => about,
            (None, Some(base)) => base.about(),
            (None, None) => "",
        }
    }

    /// Returns the configuration.
    ///
    /// # Errors
    /// If the preset's keys are invalid, which the tests rule out.
    pub fn config(&self) -> Result<ModelConfig, ModelError> {
        ModelConfig::from_table(&self.table(), &format!("the preset {}", self.name))
    }

    fn base(&self) -> Option<&'static Self> {
        self.like.as_deref().and_then(find)
    }

    fn table(&self) -> Map<String, Value> {
        let mut table = self.base().map(Self::table).unwrap_or_default();
        table.extend(self.keys.iter().map(|(key, value)| (key.clone(), value.clone())));
        table
    }
}

impl ModelConfig {
    /// Returns the configuration of the preset called `name`, one of [`presets`].
    ///
    /// # Errors
    /// If no preset has this name; the error suggests the nearest one.
    pub fn preset(name: &str) -> Result<Self, ModelError> {
        let names = || presets().iter().map(|preset| preset.name.as_str());
        let unknown = || ModelError::UnknownPreset { name: name.to_owned(), nearest: nearest(name, names()) };
        find(name).ok_or_else(unknown)?.config()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(name: &str) -> u64 {
        ModelConfig::preset(name).expect(name).parameter_count()
    }

    #[test]
    fn parameter_counts_are_the_published_ones() {
        let published = [
            ("baby-gpt", 10_818_432_u64),
            ("llama-15m", 15_047_040),
            ("llama-60m", 59_134_464),
            ("llama-110m", 109_529_856),
            ("gpt2-124m", 124_439_808),
            ("gpt2-355m", 354_823_168),
            ("gpt2-774m", 774_030_080),
            ("gpt2-1558m", 1_557_611_200),
            ("gpt3-125m", 125_226_240),
            ("llama-7b", 6_738_415_616),
            ("llama-13b", 13_015_864_320),
            ("llama2-7b", 6_738_415_616),
            ("llama2-13b", 13_015_864_320),
            ("llama3.2-1b", 1_235_814_400),
            ("llama3-8b", 8_030_261_248),
            ("llama3-70b", 70_553_706_496),
            ("llama3-405b", 405_853_388_800),
            ("mistral-7b", 7_241_732_096),
            ("qwen3-0.6b", 596_049_920),
            ("mixtral-20m", 20_135_168),
            ("qwen3-30b-a3b", 30_532_122_624),
            ("mixtral-8x7b", 46_702_792_704),
            ("pythia-14m", 14_067_712),
            ("pythia-70m", 70_426_624),
            ("pythia-160m", 162_322_944),
            ("pythia-410m", 405_334_016),
            ("pythia-1b", 1_011_781_632),
            ("pythia-1.4b", 1_414_647_808),
            ("pythia-2.8b", 2_775_208_960),
            ("pythia-6.9b", 6_857_302_016),
            ("pythia-12b", 11_846_072_320),
            ("falcon-7b", 6_921_720_704),
            ("opt-125m", 125_239_296),
            ("opt-350m", 331_196_416),
            ("bloom-560m", 559_214_592),
            ("bloom-1b1", 1_065_314_304),
            ("bloom-1b7", 1_722_408_960),
            ("bloom-3b", 3_002_557_440),
            ("bloom-7b1", 7_069_016_064),
            ("bloom-176b", 176_247_271_424),
        ];
        for (name, count) in published {
            assert_eq!(parameters(name), count, "{name}");
        }
    }

    /// Published totals in billions, to the published number of digits.
    #[test]
    fn larger_models_have_the_published_billions() {
        let published = [
            ("gpt3-1.3b", "1.3"),
            ("gpt3-6.7b", "6.7"),
            ("gpt3-13b", "12.9"),
            ("gpt3-175b", "174.60"),
            ("llama-33b", "32.529"),
            ("llama-65b", "65.286"),
            ("llama2-70b", "68.977"),
            ("llama3.2-3b", "3.213"),
            ("llama3.3-70b", "70.554"),
            ("mistral-7b-v0.3", "7.248"),
            ("mixtral-8x22b", "140.630"),
            ("qwen2.5-0.5b", "0.494"),
            ("qwen2.5-1.5b", "1.544"),
            ("qwen2.5-3b", "3.086"),
            ("qwen2.5-7b", "7.616"),
            ("qwen2.5-14b", "14.770"),
            ("qwen2.5-32b", "32.764"),
            ("qwen2.5-72b", "72.706"),
            ("qwen3-1.7b", "1.721"),
            ("qwen3-4b", "4.022"),
            ("qwen3-8b", "8.191"),
            ("qwen3-14b", "14.768"),
            ("qwen3-32b", "32.762"),
            ("qwen3-235b-a22b", "235.094"),
            ("falcon3-7b", "7.456"),
            ("falcon3-10b", "10.306"),
            ("phi-3-mini", "3.821"),
            ("phi-4", "14.66"),
            ("phi-4-mini", "3.836"),
            ("gemma-2b", "2.506"),
            ("gemma-7b", "8.538"),
            ("gemma2-2b", "2.614"),
            ("gemma2-9b", "9.242"),
            ("gemma2-27b", "27.227"),
            ("gemma3-1b", "1.000"),
            ("gemma3-4b", "3.880"),
            ("gemma3-12b", "11.766"),
            ("gemma3-27b", "27.009"),
            ("olmo2-1b", "1.485"),
            ("olmo2-7b", "7.299"),
            ("olmo2-13b", "13.716"),
            ("olmo2-32b", "32.234"),
            ("gpt-oss-20b", "20.915"),
            ("gpt-oss-120b", "116.829"),
            ("deepseek-v3", "671.026"),
            ("kimi-k2", "1026.408"),
            ("pythia-31m", "0.030"),
            ("gpt-neox-20b", "20.555"),
            ("falcon-40b", "41.3"),
            ("falcon-180b", "178.6"),
            ("opt-1.3b", "1.316"),
            ("opt-2.7b", "2.65"),
            ("opt-6.7b", "6.658"),
            ("opt-13b", "12.85"),
            ("opt-30b", "29.975"),
            ("opt-66b", "65.72"),
            ("opt-175b", "174.60"),
        ];
        for (name, billions) in published {
            let digits = billions.split_once('.').map_or(0, |(_, digits)| digits.len());
            assert_eq!(format!("{:.digits$}", parameters(name) as f64 / 1e9), billions, "{name}");
        }
    }

    #[test]
    fn every_preset_is_valid_and_says_what_it_is() {
        assert_eq!(presets().len(), 106);
        for preset in presets() {
            let named = |other: &&Preset| other.name == preset.name;
            assert_eq!(presets().iter().filter(named).count(), 1, "{}", preset.name);
            preset.config().and_then(|config| config.validate()).expect(&preset.name);
            assert!(!preset.about().is_empty(), "{}", preset.name);
            assert_eq!(preset.like.is_some(), preset.base().is_some(), "{}", preset.name);
        }
    }

    #[test]
    fn an_unknown_preset_names_the_nearest() {
        let message = ModelConfig::preset("llama3-7b").expect_err("no such preset").to_string();
        for part in ["did you mean `llama3", "lockstep models"] {
            assert!(message.contains(part), "{message}");
        }
    }
}
