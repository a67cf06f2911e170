//! Mixtures of experts whose routers always decide with a clear margin.
//!
//! A plan adds numbers in another order than one rank. If a token's scores for two experts are nearly equal, the
//! difference can send it to the other expert, and no tolerance would hold. So a tiny mixture starts from weights in
//! which the token id decides. Some elements of its embedding are a code: large for each expert that the token must
//! choose and negative for the others. Blocks add nothing to these elements, and each router reads them. A small part
//! of the router's random weights is kept, so that no two tokens have the same scores.

use std::error::Error;
use std::fs;
use std::path::Path;

use lockstep_model::{ExpertsConfig, ModelConfig};
use lockstep_plan::random::mix;
use serde_json::Value;

/// Magnitude of a code's elements. It exceeds that of embeddings, because one norm scales all elements.
const CODE: f32 = 2.0;
/// Weight that a router gives to the code element of each expert.
const WEIGHT_OF_CODE: f32 = 1.5;
/// Factor by which a router's random weights are scaled.
const LEFT: f32 = 0.05;

/// Tensor of a file, as rows.
struct Tensor<'a> {
    name: &'a str,
    columns: usize,
    elements: &'a mut [[u8; 4]],
}

/// Changes the weights in the Hugging Face directory `dir`, which holds f32 in one file.
///
/// # Errors
/// If a file cannot be read or written, the model has no experts, or the layout is unsupported.
pub(crate) fn decide(dir: &Path) -> Result<(), Box<dyn Error + Send + Sync>> {
    let config = ModelConfig::from_file(&dir.join("config.json"))?;
    let experts = config.experts().ok_or("a model without experts")?;
    let path = dir.join("model.safetensors");
    let mut bytes = fs::read(&path)?;
    let len = bytes.first_chunk().map_or(0, |len| u64::from_le_bytes(*len) as usize);
    let (head, data) = bytes.split_at_mut(8 + len);
    let header: serde_json::Map<String, Value> = serde_json::from_slice(&head[8..])?;
    for (name, entry) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        let number = |key: &str, index: usize| entry[key][index].as_u64().map(|number| number as usize);
        let (from, to) = number("data_offsets", 0).zip(number("data_offsets", 1)).ok_or("no offsets")?;
        let elements = data[from..to].as_chunks_mut().0;
        let columns = number("shape", 2).or(number("shape", 1)).unwrap_or(1);
        change(Tensor { name, columns, elements }, experts, config.hidden_size());
    }
    fs::write(path, bytes)?;
    Ok(())
}

fn change(tensor: Tensor<'_>, experts: &ExpertsConfig, hidden: usize) {
    let Tensor { name, columns, elements } = tensor;
    let first = hidden - experts.count;
    let ends_with = |ends: &[&str]| ends.iter().any(|end| name.ends_with(end));
    let is_last_of_block = ends_with(&["o_proj.weight", "o_proj.bias", "down_proj.weight", "w2.weight"]);
    // gpt-oss stacks its experts, with the elements of the residual stream in columns.
    let is_last_by_columns = ends_with(&["experts.down_proj", "experts.down_proj_bias"]);
    for (row, elements) in elements.chunks_mut(columns).enumerate() {
        if name.ends_with("embed_tokens.weight") {
            let chosen = chosen_by(row, experts);
            for (expert, element) in elements[first..].iter_mut().enumerate() {
                *element = (if chosen.contains(&expert) { CODE } else { -CODE }).to_le_bytes();
            }
        } else if is_last_of_block && row >= first {
            elements.fill([0; 4]);
        } else if is_last_by_columns {
            elements[first..].fill([0; 4]);
        } else if ends_with(&[".gate.weight", ".router.weight"]) {
            elements
                .iter_mut()
                .for_each(|element| *element = (LEFT * f32::from_le_bytes(*element)).to_le_bytes());
            let code = &mut elements[first + of_layer(row, layer_of(name), experts)];
            *code = (WEIGHT_OF_CODE + f32::from_le_bytes(*code)).to_le_bytes();
        }
    }
}

/// Returns the experts that a token must choose, spread over as many groups as it may use.
fn chosen_by(token: usize, experts: &ExpertsConfig) -> Vec<usize> {
    let (groups, kept) = experts.groups.map_or((1, 1), |groups| (groups.count, groups.kept));
    let (size, random) = (experts.count / groups, mix(token as u64));
    let (first_group, first) = (random as usize % groups, (random >> 32) as usize % size);
    let all = (0..kept * size).map(|i| ((first_group + i / size) % groups, (first + i) % size));
    all.map(|(group, member)| group * size + member).take(experts.per_token).collect()
}

/// Returns the code element that an expert of a layer reads. Layers differ, and groups stay together.
fn of_layer(expert: usize, layer: usize, experts: &ExpertsConfig) -> usize {
    let size = experts.groups.map_or(1, |groups| experts.count / groups.count);
    (expert + layer * size) % experts.count
}

/// Returns the number in `model.layers.NUMBER.`.
fn layer_of(name: &str) -> usize {
    name.split('.').find_map(|part| part.parse().ok()).unwrap_or(0)
}
