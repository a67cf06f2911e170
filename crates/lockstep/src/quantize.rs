//! `lockstep quantize`: writes a model with quantized weights as a directory that transformers loads.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum, ValueHint};
use lockstep_checkpoint::{Checkpoint, ModelDirectory, WeightQuantization, WeightType, hf::check_vacant};
use lockstep_config::{find_weights, human};
use serde_json::json;

use crate::calibration::{Calibrated, CalibrationReport, CalibrationText};
use crate::exit::Failure;
use crate::output::{note, say};
use crate::thread_count::threads;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// A Hugging Face directory, a GGUF file, a checkpoint of a run, or a repository of Hugging Face (org/name)
    #[arg(long, value_name = "MODEL")]
    model: String,
    /// Type of the weights of linear layers in blocks; embeddings, the head, norms and routers keep theirs
    #[arg(long, value_name = "TYPE", value_enum)]
    to: QuantizedType,
    /// Neighbours that share a scale [default: 128 for int8, 64 for int4; nf4 has 64]
    #[arg(long, value_name = "N", value_parser = PossibleValuesParser::new(["32", "64", "128"]))]
    group_size: Option<String>,
    /// A text on which scales of the input channels are chosen, so that the outputs of layers lose least (AWQ); without one, weights are
    /// rounded to the nearest
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    calibration: Option<PathBuf>,
    /// Tokens of the calibration text that are read, in windows of 512 or the model's maximum
    #[arg(long, value_name = "N", default_value_t = 8192, requires = "calibration")]
    calibration_tokens: usize,
    /// Compute threads of the calibration [default: all cores]
    #[arg(long, requires = "calibration")]
    threads: Option<usize>,
    /// The directory to write; it must not exist or be empty
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    out: PathBuf,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Types of quantized weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum QuantizedType {
    /// Integers of 8 bits
    Int8,
    /// Integers of 4 bits
    Int4,
    /// Quantiles of the normal distribution, 4 bits
    Nf4,
}

impl From<QuantizedType> for WeightType {
    fn from(quantized: QuantizedType) -> Self {
        match quantized {
            QuantizedType::Int8 => Self::Int8,
            QuantizedType::Int4 => Self::Int4,
            QuantizedType::Nf4 => Self::Nf4,
        }
    }
}

impl QuantizedType {
    /// Returns the quantization in groups of the default size.
    pub(crate) fn quantization(self) -> WeightQuantization {
        WeightQuantization { to: self.into(), group_size: None }
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let group_size = arguments.group_size.as_deref().and_then(|size| size.parse().ok());
    if arguments.to == QuantizedType::Nf4 && group_size.is_some_and(|size| size != 64) {
        return Err(Failure::configuration("--group-size: nf4 has groups of 64"));
    }
    let path = find_weights(&arguments.model)?;
    if path.join("manifest.json").is_file() {
        Checkpoint::open(&path)?.verify()?;
    }
    let mut model = ModelDirectory::open(&path)?;
    let quantization = WeightQuantization { to: arguments.to.into(), group_size };
    // A directory that cannot be written is refused before the work rather than after it.
    check_vacant(&arguments.out)?;
    let calibrated = match &arguments.calibration {
        None => None,
        Some(text) => {
            let threads = threads(arguments.threads)?;
            let text = CalibrationText { path: text, tokens: arguments.calibration_tokens };
            let Calibrated { scales, report } = text.calibrate(&model, quantization, threads)?;
            model = model.with_scales(scales);
            Some(report)
        }
    };
    let done = model.quantize(quantization, &arguments.out)?;
    if arguments.json {
        let mut document = json!({
            "out": arguments.out, "matrices": done.matrices, "group_size": done.group_size, "kept": done.kept,
            "bytes": done.bytes,
        });
        if let Some(report) = &calibrated {
            document["calibration"] = report.to_json();
        }
        say!("{document}");
        return Ok(ExitCode::SUCCESS);
    }
    for line in calibrated.iter().flat_map(CalibrationReport::lines) {
        say!("{line}");
    }
    say!(
        "wrote {}: {} matrices in groups of {}, {}",
        arguments.out.display(),
        done.matrices,
        done.group_size,
        human::bytes(done.bytes)
    );
    if !done.kept.is_empty() {
        note!("note: {} keep their type: their rows are no whole groups", done.kept.join(", "));
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints how a quantized model is used, if it is one and some of its matrices are decoded.
pub(crate) fn note_decoded(directory: &ModelDirectory, name: &Path) {
    let Some(summary) = directory.quantization() else { return };
    for (reason, matrices) in &summary.decoded {
        note!(
            "note: {} {} of {} are decoded in memory: {reason}",
            matrices,
            if *matrices == 1 { "tensor" } else { "tensors" },
            name.display()
        );
    }
}
