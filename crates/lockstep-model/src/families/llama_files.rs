//! The tensors of the Llama-like families' checkpoints, where they are not those of the parameters.
//!
//! Phi-3 and latent attention store several parameters in one tensor. Experts have a tensor each, but for gpt-oss, which
//! stacks them, transposed, with gates and linear halves in alternate columns.

use lockstep_plan::ParameterRecord;

use super::experts::unstacked;
use super::latent::latent_part;
use crate::config::{LlamaConfig, LlamaFamily};
use crate::hf_tensor::{HfContent, HfPlace, HfTensor};
use crate::hf_transform::HfTransform;

impl LlamaConfig {
    /// Returns the tensors of a checkpoint in the order of their first parameters.
    pub(super) fn stored_tensors(&self, records: &[ParameterRecord]) -> Vec<HfTensor> {
        let mut tensors: Vec<HfTensor> = Vec::new();
        for record in records.iter().filter(|record| record.tie.is_none()) {
            let Some(place) = self.place_of(record) else {
                tensors.extend(unstacked(record));
                continue;
            };
            match tensors.iter_mut().find(|tensor| tensor.name == place.tensor) {
                Some(HfTensor { content: HfContent::Parameters(places), .. }) => places.push(place),
                _ => tensors.push(HfTensor::single(place)),
            }
        }
        tensors
    }

    /// Returns the place of a parameter that has no tensor of its name and layout; `None` for all others.
    fn place_of(&self, record: &ParameterRecord) -> Option<HfPlace> {
        if self.family == LlamaFamily::GptOss {
            return stacked(record);
        }
        let part = match &self.latent {
            Some(latent) => latent_part(self, latent, &record.name),
            None if self.family == LlamaFamily::Phi3 => self.fused_part(&record.name),
            None => None,
        };
        let (name, transform) = part?;
        let rows = match transform {
            HfTransform::Rows { of, blocks, .. } => of * blocks,
            _ => record.shape[0],
        };
        Some(HfPlace::new(record, name, vec![rows, record.shape[1]], transform))
    }

    /// Returns the tensor and the layout of a parameter of Phi-3 that shares a tensor with others.
    fn fused_part(&self, parameter: &str) -> Option<(String, HfTransform)> {
        let (queries, inner) = (self.num_attention_heads * self.head_dim, self.intermediate_size);
        let keys = self.num_key_value_heads * self.head_dim;
        let of_attention = queries + 2 * keys;
        // (suffix of the parameter, suffix of the tensor, first row, rows, rows of the tensor)
        let parts = [
            ("self_attn.q_proj", "self_attn.qkv_proj", 0, queries, of_attention),
            ("self_attn.k_proj", "self_attn.qkv_proj", queries, keys, of_attention),
            ("self_attn.v_proj", "self_attn.qkv_proj", queries + keys, keys, of_attention),
            ("mlp.gate_proj", "mlp.gate_up_proj", 0, inner, 2 * inner),
            ("mlp.up_proj", "mlp.gate_up_proj", inner, inner, 2 * inner),
        ];
        let module = parameter.strip_suffix(".weight")?;
        parts.into_iter().find_map(|(own, stored, first, len, of)| {
            let before = module.strip_suffix(own)?;
            let transform = HfTransform::Rows { rows: first..first + len, of, blocks: 1 };
            Some((format!("{before}{stored}.weight"), transform))
        })
    }
}

/// Returns the place of a parameter of gpt-oss's experts: weights `[experts, out, in]` are stored `[experts, in, out]`,
/// and the columns of gates and linear halves alternate.
fn stacked(record: &ParameterRecord) -> Option<HfPlace> {
    let (before, own) = record.name.split_once(".experts.")?;
    let (module, kind) = own.split_once('.')?;
    let (stored, first, step) = match module {
        "gate_proj" => ("gate_up_proj", 0, 2),
        "up_proj" => ("gate_up_proj", 1, 2),
        _ => ("down_proj", 0, 1),
    };
    let (end, experts) = (if kind == "bias" { "_bias" } else { "" }, record.shape[0]);
    let columns = step * record.shape[1];
    let shape = [experts].into_iter().chain(record.shape.get(2).copied()).chain([columns]).collect();
    let transform = HfTransform::StackedColumns { first, step, stored_columns: columns, blocks: experts };
    Some(HfPlace::new(record, format!("{before}.experts.{stored}{end}"), shape, transform))
}
