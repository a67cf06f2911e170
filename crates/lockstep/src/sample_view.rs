//! `lockstep data show` of a run whose data are samples: their number, their tensors, and the first of them.

use lockstep_config::{ResolvedModel, RunConfig, human};
use lockstep_data::samples::{Dataset, NamedTensor, Sample, TensorData};
use lockstep_train::{SampleCorpus, SampleSet, described};
use serde_json::{Value, json};

use crate::exit::Failure;
use crate::output::say;

/// Columns and rows of an image in characters, which are twice as high as wide.
const VIEW: [usize; 2] = [32, 16];
/// Characters by brightness, the darkest first.
const SHADES: &[u8] = b" .:-=+*#%@";

/// Shows the samples of a run; with `verifies`, reads all of them first.
pub(crate) fn show(
    config: &RunConfig,
    model: &ResolvedModel,
    verifies: bool,
    as_json: bool,
) -> Result<(), Failure> {
    let corpus = SampleCorpus::open(config, model)?;
    let sets = [("train", Some(&corpus.train)), ("valid", corpus.valid.as_ref())];
    let mut shown = json!({ "format": config.data.format.word(), "damages": corpus.damages });
    for (name, set) in sets {
        let Some(set) = set else {
            shown[name] = Value::Null;
            continue;
        };
        if verifies {
            verify(&*set.dataset)?;
        }
        let first = set.dataset.get(0)?;
        let tensors: Vec<String> = set.dataset.tensors().iter().map(described).collect();
        let of_model: Vec<String> =
            set.transforms.output(set.dataset.tensors())?.iter().map(described).collect();
        let label = first.tensors.iter().find(|tensor| tensor.shape.is_empty()).and_then(number);
        if !as_json {
            print(name, set, &first, &tensors.join(", "), &of_model.join(", "));
        }
        shown[name] = json!({
            "samples": set.dataset.len(), "tensors": tensors, "transformed": of_model, "first_label": label,
        });
    }
    if as_json {
        say!("{shown}");
        return Ok(());
    }
    let samples = config.train.steps as f64 * config.train.global_batch as f64;
    say!("in this run  {:.2} epochs", samples / corpus.train.dataset.len() as f64);
    corpus.damages.iter().for_each(|damage| say!("damaged      {damage}"));
    Ok(())
}

/// Reads every sample.
fn verify(dataset: &dyn Dataset) -> Result<(), Failure> {
    let mut sample = Sample::default();
    for index in 0..dataset.len() {
        dataset.get_into(index, &mut sample)?;
    }
    Ok(())
}

fn print(name: &str, set: &SampleSet, first: &Sample, tensors: &str, of_model: &str) {
    say!("{name}  {} samples", human::thousands(set.dataset.len()));
    say!("  on disk    {tensors}");
    say!("  the model  {of_model}");
    for tensor in &first.tensors {
        if let Some(value) = number(tensor) {
            say!("  first      {} {value}", tensor.name);
        } else if let Some(lines) = view(tensor).filter(|_| name == "train") {
            lines.iter().for_each(|line| say!("  |{line}|"));
        }
    }
}

/// Returns the value of a tensor without dimensions.
fn number(tensor: &NamedTensor) -> Option<f64> {
    match &tensor.data {
        TensorData::U8(values) => values.first().map(|value| f64::from(*value)),
        TensorData::I32(values) => values.first().map(|value| f64::from(*value)),
        TensorData::U32(values) => values.first().map(|value| f64::from(*value)),
        TensorData::F32(values) => values.first().map(|value| f64::from(*value)),
    }
    .filter(|_| tensor.shape.is_empty())
}

/// Returns an image as lines of characters by brightness, from the darkest to the brightest pixel; `None` if it is no image of
/// bytes.
fn view(tensor: &NamedTensor) -> Option<Vec<String>> {
    let ([height, width, channels], TensorData::U8(pixels)) = (&tensor.shape[..], &tensor.data) else {
        return None;
    };
    let (height, width, channels) = (*height, *width, *channels);
    let [columns, rows] = [width.min(VIEW[0]), height.min(VIEW[1])];
    // The mean over the pixels that a character stands for.
    let brightness = |row: usize, column: usize| {
        let (top, bottom) = (row * height / rows, (row + 1) * height / rows);
        let (left, right) = (column * width / columns, (column + 1) * width / columns);
        let lines =
            (top..bottom).map(|y| &pixels[(y * width + left) * channels..(y * width + right) * channels]);
        let sum: u64 = lines.flatten().map(|byte| u64::from(*byte)).sum();
        sum / ((bottom - top) * (right - left) * channels).max(1) as u64
    };
    let means: Vec<Vec<u64>> =
        (0..rows).map(|row| (0..columns).map(|column| brightness(row, column)).collect()).collect();
    let all = || means.iter().flatten().copied();
    let (darkest, brightest) = (all().min()?, all().max()?);
    let shade = |mean: &u64| {
        let at = (mean - darkest) * (SHADES.len() as u64 - 1) / (brightest - darkest).max(1);
        char::from(SHADES[at as usize])
    };
    Some(means.iter().map(|row| row.iter().map(shade).collect()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_drawn_from_its_darkest_to_its_brightest_pixel() {
        let image =
            |pixels: Vec<u8>, shape: &[usize]| NamedTensor::new("image", shape, TensorData::U8(pixels));
        assert_eq!(view(&image(vec![10, 110, 60, 10], &[2, 2, 1])).unwrap(), [" @", "= "]);
        let lines = view(&image(vec![7; 100 * 64 * 3], &[100, 64, 3])).unwrap();
        assert_eq!((lines.len(), lines[0].len()), (VIEW[1], VIEW[0]));
        assert!(lines.iter().all(|line| line.trim().is_empty()), "an even image has no contrast: {lines:?}");
        assert!(view(&image(vec![], &[0, 5, 3])).is_none() && view(&image(vec![1], &[1])).is_none());
    }
}
