//! Mixtures of experts whose routers are never in doubt.
//!
//! A plan adds up in another order than one rank. Where a token likes two experts as much, that is enough to send it to the other one,
//! and no tolerance would hold. So a tiny mixture begins with weights in which a token's id decides: some elements of its embedding
//! are its code, large for each expert that it shall choose and as far below zero for the others; blocks add nothing to these elements, and
//! each router reads them. Of its random weights a little is left, so that no two tokens have the same scores.

use std::error::Error;
use std::fs;
use std::path::Path;

use lockstep_model::{ExpertsConfig, ModelConfig};
use lockstep_plan::random::mix;
use serde_json::Value;

/// Elements of a code, without their sign: larger than those of embeddings, for all of them are divided by a common norm.
const CODE: f32 = 2.0;
/// What a router makes of the code of its experts.
const WEIGHT_OF_CODE: f32 = 1.5;
/// What is left of a router's random weights.
const LEFT: f32 = 0.05;

/// A tensor of a file, as rows.
struct Tensor<'a> {
    name: &'a str,
    columns: usize,
    elements: &'a mut [[u8; 4]],
}

/// Changes the weights of the Hugging Face directory `dir`, f32 in one file.
///
/// # Errors
/// What the system says; a model without experts, or of another layout.
pub(crate) fn decide(dir: &Path) -> Result<(), Box<dyn Error + Send + Sync>> {
    let ModelConfig::Llama(config) = ModelConfig::from_file(&dir.join("config.json"))? else {
        return Err("a model without experts".into());
    };
    let experts = config.experts.ok_or("a model without experts")?;
    let path = dir.join("model.safetensors");
    let mut bytes = fs::read(&path)?;
    let len = bytes.first_chunk().map_or(0, |len| u64::from_le_bytes(*len) as usize);
    let (head, data) = bytes.split_at_mut(8 + len);
    let header: serde_json::Map<String, Value> = serde_json::from_slice(&head[8..])?;
    for (name, entry) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        let number = |key: &str, index: usize| entry[key][index].as_u64().map(|number| number as usize);
        let (from, to) = number("data_offsets", 0).zip(number("data_offsets", 1)).ok_or("no offsets")?;
        let elements = data[from..to].as_chunks_mut().0;
        let columns = number("shape", 1).unwrap_or(1);
        change(Tensor { name, columns, elements }, &experts, config.hidden_size);
    }
    fs::write(path, bytes)?;
    Ok(())
}

fn change(tensor: Tensor<'_>, experts: &ExpertsConfig, hidden: usize) {
    let Tensor { name, columns, elements } = tensor;
    let first = hidden - experts.count;
    let is_last_of_block =
        ["o_proj.weight", "down_proj.weight", "w2.weight"].iter().any(|end| name.ends_with(end));
    for (row, elements) in elements.chunks_mut(columns).enumerate() {
        if name.ends_with("embed_tokens.weight") {
            let chosen = chosen_by(row, experts);
            for (expert, element) in elements[first..].iter_mut().enumerate() {
                *element = (if chosen.contains(&expert) { CODE } else { -CODE }).to_le_bytes();
            }
        } else if is_last_of_block && row >= first {
            elements.fill([0; 4]);
        } else if name.ends_with(".gate.weight") {
            elements
                .iter_mut()
                .for_each(|element| *element = (LEFT * f32::from_le_bytes(*element)).to_le_bytes());
            let code = &mut elements[first + of_layer(row, layer_of(name), experts)];
            *code = (WEIGHT_OF_CODE + f32::from_le_bytes(*code)).to_le_bytes();
        }
    }
}

/// The experts that a token shall choose: of as many groups as it may use.
fn chosen_by(token: usize, experts: &ExpertsConfig) -> Vec<usize> {
    let (groups, kept) = experts.groups.map_or((1, 1), |groups| (groups.count, groups.kept));
    let (size, random) = (experts.count / groups, mix(token as u64));
    let (first_group, first) = (random as usize % groups, (random >> 32) as usize % size);
    let all = (0..kept * size).map(|i| ((first_group + i / size) % groups, (first + i) % size));
    all.map(|(group, member)| group * size + member).take(experts.per_token).collect()
}

/// The element of the code that an expert of a layer reads: layers differ, and groups stay together.
fn of_layer(expert: usize, layer: usize, experts: &ExpertsConfig) -> usize {
    let size = experts.groups.map_or(1, |groups| experts.count / groups.count);
    (expert + layer * size) % experts.count
}

/// The number in `model.layers.NUMBER.`.
fn layer_of(name: &str) -> usize {
    name.split('.').find_map(|part| part.parse().ok()).unwrap_or(0)
}
