//! RoPE settings of the Llama-like families: one for all layers, or one for layers with a sliding window and one for the
//! others (Gemma 3).

use serde_json::{Map, Value, json};

use super::family::LlamaFamily;
use super::reader::Reader;
use super::rope::{PART_KEY, Rope, RopeScaling, RopeSource, Yarn};

/// Key of form 4: theta of the layers with a sliding window.
const LOCAL_THETA: &str = "rope_local_base_freq";
/// Key at the top level: the context of the training before RoPE was changed.
const ORIGINAL_CONTEXT: &str = "original_max_position_embeddings";
/// Keys of form 5: tables of the layers without and with a sliding window.
const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

/// RoPE settings of a model.
#[derive(Debug, Clone)]
pub(crate) struct FamilyRopes {
    pub(super) rope: Rope,
    /// Fraction of each head's elements that rotate.
    pub(super) rotary_fraction: f64,
    /// Settings of the layers with a sliding window, if they differ.
    pub(super) local: Option<Rope>,
}

impl FamilyRopes {
    /// Reads both of transformers' forms; absent values have the family's defaults.
    pub(super) fn read(reader: &mut Reader<'_>, family: LlamaFamily, positions: usize) -> Self {
        if family == LlamaFamily::Gemma3 {
            return read_two(reader, family, positions);
        }
        let part = (family == LlamaFamily::Phi3).then_some((PART_KEY, 1.0));
        if part.is_none() {
            reader.fixed(super::keys::FIXED_FOR_ROPE);
        }
        let tables = RopeSource::usual_tables(reader);
        let has_tables = tables.iter().any(|(.., table)| table.is_some());
        let theta = ("rope_theta", family.traits().rope_theta);
        // Phi-3 has it at the top level as well, where it precedes that of the table.
        let is_phi3 = family == LlamaFamily::Phi3;
        let original = is_phi3.then(|| reader.optional_size(ORIGINAL_CONTEXT).given()).flatten();
        let source = RopeSource { theta, part, original, tables: tables.into() };
        let (mut rope, rotary_fraction) = source.read(reader, positions);
        if family == LlamaFamily::GptOss && !has_tables {
            rope.scaling = RopeScaling::Yarn(Yarn {
                factor: 32.0,
                beta_fast: 32.0,
                beta_slow: 1.0,
                original_max_position_embeddings: 4096,
                truncate: false,
                attention_factor: None,
                mscale: None,
                mscale_all_dim: None,
            });
        }
        Self { rope, rotary_fraction, local: None }
    }

    /// Adds the keys of form 4, and the tables of form 5 as far as form 4 has no keys for them.
    pub(super) fn write_form_4(&self, family: LlamaFamily, table: &mut Map<String, Value>) {
        self.rope.write_form_4("rope_theta", table);
        if let Some(local) = &self.local {
            table.insert(LOCAL_THETA.into(), json!(local.theta));
        }
        if family == LlamaFamily::Phi3 {
            table.insert(PART_KEY.into(), json!(self.rotary_fraction));
            if let Some(original) = self.rope.short_context() {
                table.insert(ORIGINAL_CONTEXT.into(), json!(original));
            }
        }
        if family == LlamaFamily::GptOss && self.rope.scaling == RopeScaling::Default {
            // Without a table transformers would scale.
            table.insert("rope_scaling".into(), json!({ "rope_type": "default" }));
        }
    }

    /// Adds the keys of form 5.
    pub(crate) fn write_form_5(&self, table: &mut Map<String, Value>) {
        self.rope.write_form_5(table);
        let Some(parameters) = table.get_mut("rope_parameters") else { return };
        if let Some(local) = &self.local {
            let mut of_local = Map::new();
            local.write_form_5(&mut of_local);
            *parameters = json!({ FULL: parameters.take(), SLIDING: of_local.remove("rope_parameters").unwrap_or_default() });
        } else if self.rotary_fraction != 1.0 {
            parameters[PART_KEY] = json!(self.rotary_fraction);
        }
    }
}

/// Reads the settings of a family whose layers with a sliding window have a theta of their own.
fn read_two(reader: &mut Reader<'_>, family: LlamaFamily, positions: usize) -> FamilyRopes {
    reader.fixed(super::keys::FIXED_FOR_ROPE);
    let scaling = reader.table("rope_scaling");
    let (mut full, mut sliding) = (reader.table("rope_parameters"), None);
    if let Some(both) = full.filter(|table| table.contains_key(FULL) || table.contains_key(SLIDING)) {
        let mut inner = Reader::new(both, "rope_parameters.");
        (full, sliding) = (inner.table(FULL), inner.table(SLIDING));
        reader.absorb(inner.finish());
    }
    let of_full = RopeSource {
        theta: ("rope_theta", family.traits().rope_theta),
        part: None,
        original: None,
        tables: vec![
            ("rope_scaling", "rope_scaling.", scaling),
            ("rope_parameters", "rope_parameters.full_attention.", full),
        ],
    };
    let of_sliding = RopeSource {
        theta: (LOCAL_THETA, 10_000.0),
        part: None,
        original: None,
        tables: vec![("rope_parameters", "rope_parameters.sliding_attention.", sliding)],
    };
    let (rope, rotary_fraction) = of_full.read(reader, positions);
    let (local, _) = of_sliding.read(reader, positions);
    if local.scaling != RopeScaling::Default {
        reader.unsupported("rope_parameters", "\"default\" as the type of layers with a sliding window");
    }
    FamilyRopes { rope, rotary_fraction, local: Some(local) }
}
