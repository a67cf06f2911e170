//! Comparison of a map with a model: every problem is found before anything is loaded.

use std::ops::Range;

use lockstep_plan::ParameterId;

use super::{Device, DeviceMap, ModelParts, covers};

/// Modules of transformers that have no tensors in a checkpoint; maps of Accelerate list them.
const WITHOUT_TENSORS: [&str; 8] =
    ["rotary_emb", "rotary_pos_emb", "drop", "dropout", "emb_dropout", "embed_dropout", "act_fn", "act"];

/// Returns, for each parameter, whether `map` keeps it in memory on a rank that has the units of `stage`. A weight that is tied to one of
/// another stage has the device of its own module.
///
/// # Errors
/// If a listed module does not exist, a tensor is not covered, a device does not exist, or weights that are one in memory
/// are on two devices. The error lists every problem.
pub(crate) fn residences(
    map: &DeviceMap,
    parts: &ModelParts,
    stage: &Range<usize>,
) -> Result<Vec<bool>, Vec<String>> {
    let mut problems = unknown_modules(map, parts);
    let mut gpus: Vec<usize> = map.entries().iter().filter_map(|&(_, device)| gpu(device)).collect();
    gpus.sort_unstable();
    gpus.dedup();
    problems.extend(gpus.into_iter().map(no_gpu));
    let (mut devices, mut uncovered) = (Vec::new(), Vec::new());
    for (tensors, record) in parts.tensors.iter().zip(&parts.records) {
        let mut found = tensors.iter().map(|tensor| (tensor, map.device_of(tensor)));
        // A map may leave out tensors that are tied to others.
        if record.tie.is_none() {
            let without = found.clone().filter(|(_, device)| device.is_none());
            uncovered.extend(without.map(|(tensor, _)| tensor.as_str()));
        }
        let first = found.next().and_then(|(_, device)| device);
        if let Some((tensor, Some(other))) = found.find(|&(_, device)| device.is_some() && device != first) {
            let (one, first) = (&tensors[0], first.unwrap_or(Device::Cpu));
            problems
                .push(format!("{one} is on {first} and {tensor} on {other}, but they are one weight here"));
        }
        devices.push(first);
    }
    problems.extend(list_of_uncovered(&uncovered));
    for (id, record) in parts.records.iter().enumerate() {
        let Some(ParameterId(owner)) = record.tie else { continue };
        let is_here = |id: usize| stage.contains(&parts.records[id].unit);
        if is_here(id) && !is_here(owner) {
            devices[owner] = devices[id].or(devices[owner]);
        }
        if let (Some(own), Some(other)) = (devices[id], devices[owner])
            && is_here(id)
            && own != other
        {
            let [own_name, other_name] = [id, owner].map(|id| &parts.tensors[id][0]);
            problems.push(format!("{own_name} is on {own} and {other_name} on {other}, but they are tied"));
        }
    }
    if problems.is_empty() {
        Ok(devices.into_iter().map(|device| device == Some(Device::Cpu)).collect())
    } else {
        Err(problems)
    }
}

/// Describes a GPU that does not exist.
pub(crate) fn no_gpu(number: usize) -> String {
    format!("there is no GPU {number}; the devices here are cpu and disk")
}

fn gpu(device: Device) -> Option<usize> {
    match device {
        Device::Gpu(number) => Some(number),
        Device::Cpu | Device::Disk => None,
    }
}

fn unknown_modules(map: &DeviceMap, parts: &ModelParts) -> Vec<String> {
    let tensors = || parts.tensors.iter().flatten();
    let exists = |module: &str| tensors().any(|tensor| covers(module, tensor));
    let has_no_tensors = |module: &str| {
        let (parent, last) = module.rsplit_once('.').unwrap_or(("", module));
        WITHOUT_TENSORS.contains(&last) && exists(parent)
    };
    let names = map.entries().iter().map(|(module, _)| module.as_str());
    let unknown: Vec<&str> = names.filter(|module| !exists(module) && !has_no_tensors(module)).collect();
    if unknown.is_empty() {
        return Vec::new();
    }
    let names: Vec<&str> = parts.modules.iter().map(|module| module.name.as_str()).collect();
    let known = match names.as_slice() {
        [first, second, .., last] if names.len() > 6 => {
            let block = names[names.len() / 2];
            format!("{first}, {second}, ..., {block}, ..., {last}")
        }
        all => all.join(", "),
    };
    vec![format!("the model has no module {}; its modules are {known}", some_of(&unknown))]
}

fn list_of_uncovered(uncovered: &[&str]) -> Option<String> {
    (!uncovered.is_empty()).then(|| format!("no entry covers {}", some_of(uncovered)))
}

/// Lists the first names, and the number of the others.
fn some_of(names: &[&str]) -> String {
    const SHOWN: usize = 4;
    let more = names.len().saturating_sub(SHOWN);
    let shown = names[..names.len() - more].join(", ");
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}
