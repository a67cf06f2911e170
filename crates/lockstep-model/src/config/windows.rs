//! Sliding windows of the Llama-like families, and the layers that have them.

use serde_json::{Value, json};

use super::family::{LlamaFamily, Windows};
use super::reader::{Entry, Reader};

/// Types of a layer in `layer_types`.
const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

/// The sliding window of a model's layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LayerWindows {
    /// Number of positions that a position sees in a layer with a window; `None` means all before it.
    pub(super) window: Option<usize>,
    /// Period of the layers without a window: the last of every `full_every`.
    pub(super) full_every: Option<usize>,
}

impl LayerWindows {
    /// Reads the windows. Patterns other than a period, and windows that families do not have, are problems.
    pub(super) fn read(reader: &mut Reader<'_>, family: LlamaFamily, layers: usize) -> Self {
        match family.traits().windows {
            Windows::InMostLayers { default, every } => read_periodic(reader, default, every, layers),
            windows => Self { window: read_uniform(reader, family, windows, layers), full_every: None },
        }
    }
}

/// Returns `layer_types` of a model whose last layer of every `full_every` has no window.
pub(super) fn layer_types(full_every: Option<usize>, layers: usize) -> Value {
    let is_full = |layer: usize| full_every.is_some_and(|every| (layer + 1).is_multiple_of(every));
    json!((0..layers).map(|layer| if is_full(layer) { FULL } else { SLIDING }).collect::<Vec<_>>())
}

fn read_periodic(reader: &mut Reader<'_>, default: usize, every: usize, layers: usize) -> LayerWindows {
    let window = match reader.optional_size("sliding_window") {
        Entry::Absent => Some(default),
        entry => entry.given(),
    };
    // Gemma 3 had the period as a number before it had a list.
    let every = reader.size("sliding_window_pattern", every);
    if every == 0 {
        reader.unsupported("sliding_window_pattern", "a whole number from 1");
    }
    let full_every = match reader.value("layer_types") {
        None => Some(every.max(1)),
        Some(types) => {
            let names = types.as_array().map(Vec::as_slice).unwrap_or_default();
            let first = names.iter().position(|name| name == FULL).map(|index| index + 1);
            if names.len() != layers || *types != layer_types(first, layers) {
                let supported = format!(
                    "{layers} entries \"{SLIDING}\", but for \"{FULL}\" as the last of every so many"
                );
                reader.unsupported("layer_types", supported);
            }
            first
        }
    };
    LayerWindows { window, full_every }
}

/// Reads the window of all layers. Qwen can restrict windows to the upper layers; that is supported only if it amounts
/// to all layers or none.
fn read_uniform(
    reader: &mut Reader<'_>,
    family: LlamaFamily,
    windows: Windows,
    layers: usize,
) -> Option<usize> {
    let mut window = match reader.optional_size("sliding_window") {
        Entry::Absent => match windows {
            Windows::InAllLayers { default } => default,
            Windows::InUpperLayers => Some(4096),
            Windows::Never | Windows::InMostLayers { .. } => None,
        },
        // transformers writes 0 for Qwen2-MoE without windows.
        Entry::Given(0) if family == LlamaFamily::Qwen2Moe => None,
        entry => entry.given(),
    };
    let is_qwen = windows == Windows::InUpperLayers;
    let mut layers_before_first_window = 0;
    if is_qwen {
        layers_before_first_window = reader.size("max_window_layers", 28);
        if !reader.flag("use_sliding_window", false) {
            window = None;
        }
    }
    if windows == Windows::Never && window.is_some() {
        reader.unsupported("sliding_window", "null (this family sees all positions; Mistral has windows)");
        return None;
    }
    match read_layer_types(reader, layers) {
        // Explicit layer types take precedence; Mistral's attention reads `sliding_window` alone.
        Some(LayerTypes::Full) if is_qwen => return None,
        Some(LayerTypes::Full) if window.is_some() => {
            reader.unsupported(
                "layer_types",
                "\"sliding_attention\" in all layers where there is a sliding window",
            );
        }
        Some(LayerTypes::Sliding) if window.is_none() => {
            reader.unsupported(
                "layer_types",
                "\"full_attention\" in all layers where there is no sliding window",
            );
        }
        Some(LayerTypes::Full | LayerTypes::Sliding) => {}
        None if layers_before_first_window >= layers => return None,
        None if window.is_some() && layers_before_first_window > 0 => {
            let supported = format!("0 (windows in all layers) or at least {layers} (in none)");
            reader.unsupported("max_window_layers", supported);
        }
        None => {}
    }
    window
}

/// Layer types of a model whose layers are all of one type.
enum LayerTypes {
    Full,
    Sliding,
}

fn read_layer_types(reader: &mut Reader<'_>, layers: usize) -> Option<LayerTypes> {
    let types = reader.value("layer_types")?;
    let all = |name: &str| {
        types.as_array().is_some_and(|list| list.len() == layers && list.iter().all(|entry| entry == name))
    };
    if all(FULL) {
        return Some(LayerTypes::Full);
    }
    if all(SLIDING) {
        return Some(LayerTypes::Sliding);
    }
    reader.unsupported(
        "layer_types",
        format!("{layers} entries that are all \"full_attention\" or all \"sliding_attention\""),
    );
    None
}
