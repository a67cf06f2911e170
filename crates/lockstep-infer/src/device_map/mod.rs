//! Device maps: the device of every module of a model, as Hugging Face Accelerate reads and writes them.
//!
//! A map is a JSON object. Its keys are paths of modules (`model.layers.0`), which together cover every tensor; the empty
//! path is the whole model. Its values are a number (a GPU), `"cpu"` or `"disk"`. A tensor is on the device of its longest
//! listed prefix.
//!
//! - [`modules`]: the modules of a model, their tensors and sizes.
//! - [`placement`]: the solver, a function of sizes and a limit alone.
//! - [`limits`]: the argument of `--max-memory`.
//! - [`check`]: comparison of a map with a model.

mod check;
mod limits;
mod modules;
mod placement;

use std::fmt;

use serde_json::{Map, Value};

pub(crate) use check::{no_gpu, residences};
pub use limits::MemoryLimits;
pub use modules::Module;
pub(crate) use modules::{ModelParts, WeightPlace};
pub(crate) use placement::{Item, Order, Placement, Role, least_bytes, place};

/// A device of a device map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Device {
    /// A GPU, by its number.
    Gpu(usize),
    /// Main memory.
    Cpu,
    /// The model's files or the offload directory; read in each pass.
    Disk,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu(number) => write!(f, "gpu:{number}"),
            Self::Cpu => f.write_str("cpu"),
            Self::Disk => f.write_str("disk"),
        }
    }
}

impl Device {
    fn to_json(self) -> Value {
        match self {
            Self::Gpu(number) => number.into(),
            Self::Cpu => "cpu".into(),
            Self::Disk => "disk".into(),
        }
    }

    /// Reads a device of a map: `0`, `"cuda:0"`, `"cpu"` or `"disk"`.
    fn from_json(value: &Value) -> Option<Self> {
        if let Some(number) = value.as_u64() {
            return usize::try_from(number).ok().map(Self::Gpu);
        }
        Self::from_name(value.as_str()?)
    }

    /// Reads a name: `cpu`, `disk`, `gpu:0`, `cuda:0`, `xpu:0` or `0`.
    fn from_name(name: &str) -> Option<Self> {
        match name {
            "cpu" => Some(Self::Cpu),
            "disk" => Some(Self::Disk),
            "gpu" | "cuda" => Some(Self::Gpu(0)),
            _ => {
                let number = ["gpu:", "cuda:", "xpu:"].iter().find_map(|start| name.strip_prefix(start));
                number.unwrap_or(name).parse().ok().map(Self::Gpu)
            }
        }
    }
}

/// The device of every module of a model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceMap {
    /// Paths of modules with their devices, in the model's order.
    entries: Vec<(String, Device)>,
}

impl DeviceMap {
    /// Returns the map of these modules.
    pub fn new(entries: impl IntoIterator<Item = (String, Device)>) -> Self {
        Self { entries: entries.into_iter().collect() }
    }

    /// Reads a JSON object.
    ///
    /// # Errors
    /// If the text is not a JSON object, or values are no devices; the error lists every such value.
    pub fn parse(text: &str) -> Result<Self, Vec<String>> {
        let table: Map<String, Value> =
            serde_json::from_str(text).map_err(|error| vec![format!("it is no JSON object: {error}")])?;
        let (mut entries, mut problems) = (Vec::new(), Vec::new());
        for (module, value) in table {
            match Device::from_json(&value) {
                Some(device) => entries.push((module, device)),
                None => problems.push(format!(
                    "`{module}` is on {value}; a device is \"cpu\", \"disk\" or the number of a GPU"
                )),
            }
        }
        if problems.is_empty() { Ok(Self { entries }) } else { Err(problems) }
    }

    /// Returns the JSON object that Accelerate calls `hf_device_map`.
    pub fn to_json(&self) -> Value {
        let entries = self.entries.iter().map(|(module, device)| (module.clone(), device.to_json()));
        Value::Object(entries.collect())
    }

    /// Returns the paths of modules with their devices.
    pub fn entries(&self) -> &[(String, Device)] {
        &self.entries
    }

    /// Returns the device of a tensor: that of its longest listed prefix.
    pub fn device_of(&self, tensor: &str) -> Option<Device> {
        let covering = self.entries.iter().filter(|(module, _)| covers(module, tensor));
        covering.max_by_key(|(module, _)| module.len()).map(|&(_, device)| device)
    }
}

/// Returns true if a tensor or module is, or is within, the module `module`.
fn covers(module: &str, path: &str) -> bool {
    let rest = path.strip_prefix(module);
    module.is_empty() || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_of_accelerate_is_read_and_written_alike() {
        let text =
            r#"{"model.embed_tokens":0,"model.layers.0":"cpu","model.layers.1":"disk","lm_head":"cuda:1"}"#;
        let map = DeviceMap::parse(text).expect("a map");
        let devices =
            ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.1.a", "lm_head"]
                .map(|tensor| map.device_of(tensor));
        assert_eq!(
            devices,
            [Some(Device::Gpu(0)), Some(Device::Cpu), Some(Device::Disk), Some(Device::Gpu(1))]
        );
        assert_eq!(map.device_of("model.layers.10.a"), None, "layers.1 is no prefix of layers.10");
        let written = map.to_json();
        assert_eq!(written["model.embed_tokens"], 0);
        assert_eq!(written["model.layers.1"], "disk");
        assert_eq!(DeviceMap::parse(&written.to_string()).map(|map| map.entries.len()), Ok(4));
    }

    #[test]
    fn the_longest_prefix_decides_and_the_empty_one_is_the_whole_model() {
        let map =
            DeviceMap::parse(r#"{"": "disk", "model": "cpu", "model.layers.1.mlp": "disk"}"#).expect("a map");
        assert_eq!(map.device_of("lm_head.weight"), Some(Device::Disk));
        assert_eq!(map.device_of("model.layers.1.self_attn.q_proj.weight"), Some(Device::Cpu));
        assert_eq!(map.device_of("model.layers.1.mlp.up_proj.weight"), Some(Device::Disk));
    }

    #[test]
    fn every_value_that_is_no_device_is_named() {
        let problems = DeviceMap::parse(r#"{"a": "tape", "b": -1, "c": "cpu"}"#).expect_err("no devices");
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[0].contains("\"tape\"") && problems[1].contains("-1"), "{problems:?}");
        assert!(DeviceMap::parse("[1]").expect_err("no object")[0].contains("no JSON object"));
    }
}
