//! Rules between `[data]` and the model: a model of tokens reads text, a model of images reads samples.

use lockstep_graph::InputDeclaration;
use lockstep_model::ModelConfig;
use lockstep_tensor::LABELS;

use crate::choices::DataFormat;
use crate::{Problem, RunConfig};

/// Returns each key of `[data]` whose value does not fit the model.
pub fn data_problems(config: &RunConfig, model: &ModelConfig) -> Vec<Problem> {
    let format = config.data.format;
    let vocabulary = model.model().sizes().vocab;
    let has_tokens = vocabulary > 0;
    if format.is_of_samples() == has_tokens {
        let model_type = model.model().model_type();
        let what = match has_tokens {
            true => format!(
                "\"{}\" holds samples, and {model_type} reads tokens of a vocabulary of {vocabulary}",
                format.word()
            ),
            false => {
                let inputs: Vec<String> =
                    model.model().inputs().into_iter().map(|input| input.name).collect();
                format!("\"{}\" holds text, and {model_type} reads {}", format.word(), inputs.join(" and "))
            }
        };
        let words: Vec<String> =
            DataFormat::all_of(!has_tokens).map(|format| format!("\"{}\"", format.word())).collect();
        return vec![config.problem("data.format", what, words.join(", "))];
    }
    if has_tokens { Vec::new() } else { problems_of_samples(config, model) }
}

/// Returns the input of images, `[height, width, channels]`; `None` if the model has none.
pub fn image_input(inputs: &[InputDeclaration]) -> Option<&InputDeclaration> {
    inputs.iter().find(|input| matches!(input.shape[..], [_, _, 1 | 3]))
}

fn problems_of_samples(config: &RunConfig, model: &ModelConfig) -> Vec<Problem> {
    let (inputs, classes) = (model.model().inputs(), model.model().sizes().classes);
    let mut problems = Vec::new();
    let names: Vec<&str> = inputs.iter().map(|input| input.name.as_str()).collect();
    for unknown in config.data.columns.keys().filter(|name| !names.contains(&name.as_str())) {
        let what = format!("names \"{unknown}\", which is no input of {}", model.model().model_type());
        problems.push(config.problem("data.columns", what, names.join(", ")));
    }
    let (format, word) = (config.data.format, config.data.format.word());
    let of_data = match format {
        DataFormat::Cifar10 => 10,
        DataFormat::Cifar100
            if config.data.columns.get(LABELS).is_some_and(|name| name == "coarse_label") =>
        {
            20
        }
        DataFormat::Cifar100 => 100,
        _ => 0,
    };
    if classes > 0 && of_data > classes {
        let what = format!("\"{word}\" has {of_data} classes, and the model {classes}");
        problems.push(config.problem("data.format", what, format!("with model.num_labels = {of_data}")));
    }
    let is_of_images = matches!(
        format,
        DataFormat::Cifar10 | DataFormat::Cifar100 | DataFormat::Idx | DataFormat::ImageFolder
    );
    if image_input(&inputs).is_none() {
        if is_of_images {
            let what =
                format!("\"{word}\" holds images, and the model has no input [height, width, channels]");
            let allowed = [DataFormat::WebDataset, DataFormat::TfRecord].map(DataFormat::word).join(", ");
            problems.push(config.problem("data.format", what, allowed));
        }
        for (key, given) in [
            ("data.transforms", config.data.transforms.is_some()),
            ("data.valid_transforms", config.data.valid_transforms.is_some()),
        ] {
            if given {
                let what = "is for images, and the model has no input [height, width, channels]";
                problems.push(config.problem(key, what, "leave it out"));
            }
        }
    }
    problems
}
