//! `lockstep checkpoint list|show|verify|export|import`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Subcommand, ValueEnum};
use lockstep_checkpoint::{
    BaseModel, Checkpoint, DType, ModelDirectory, Region, SaveRequest, TensorKind, TensorSlice,
    gguf::StoredElements, list, save,
};
use lockstep_config::{find_weights, human};
use lockstep_model::parameter_records;
use lockstep_plan::BlockFormat;
use serde_json::json;

use crate::exit::Failure;
use crate::output::{self, note, say};

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// List the checkpoints in a directory
    List {
        /// The directory that holds step-NNNNNNNN directories
        dir: PathBuf,
        /// Print one JSON document
        #[arg(long)]
        json: bool,
    },
    /// Describe the contents of a checkpoint
    Show {
        /// A step-NNNNNNNN directory
        checkpoint: PathBuf,
        /// Print the manifest as JSON
        #[arg(long)]
        json: bool,
    },
    /// Read every byte of a checkpoint and compare the hashes
    Verify {
        /// A step-NNNNNNNN directory, or a directory of several, all of which are verified
        checkpoint: PathBuf,
    },
    /// Write a directory that transformers loads, with --adapter one that peft loads, with --gguf a file that llama.cpp loads
    Export {
        /// A step-NNNNNNNN directory; with --gguf also a Hugging Face directory or a GGUF file
        #[arg(value_name = "CHECKPOINT")]
        checkpoint: String,
        /// The directory to write; it must not exist or be empty
        #[arg(long, required_unless_present = "gguf")]
        hf: Option<PathBuf>,
        /// The GGUF file to write
        #[arg(long, value_name = "FILE", conflicts_with_all = ["hf", "adapter", "dtype"])]
        gguf: Option<PathBuf>,
        /// Type of the matrices in the GGUF file; vectors and routers are f32. mxfp4 is the type of experts, if there are any, and
        /// other matrices are q8_0
        #[arg(long = "type", value_name = "TYPE", value_enum, requires = "gguf", default_value_t = GgufType::Q8_0)]
        kind: GgufType,
        /// Write the adapter that the run has trained and not the whole model
        #[arg(long)]
        adapter: bool,
        /// Type of the weights
        #[arg(long, value_enum, default_value_t = Precision::F32)]
        dtype: Precision,
    },
    /// Make a checkpoint (step 0, weights only) from a Hugging Face directory
    Import {
        /// The Hugging Face directory
        hf: PathBuf,
        /// The directory in which step-00000000 is made
        #[arg(long)]
        out: PathBuf,
    },
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Precision {
    F32,
    Bf16,
    F16,
}

impl From<Precision> for DType {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::F32 => Self::F32,
            Precision::Bf16 => Self::BF16,
            Precision::F16 => Self::F16,
        }
    }
}

/// Types of the matrices in a GGUF file.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum GgufType {
    #[value(name = "q8_0")]
    Q8_0,
    #[value(name = "q4_0")]
    Q4_0,
    #[value(name = "q4_1")]
    Q4_1,
    #[value(name = "q4_k")]
    Q4K,
    #[value(name = "q5_k")]
    Q5K,
    #[value(name = "q6_k")]
    Q6K,
    Mxfp4,
    F32,
    Bf16,
    F16,
}

impl From<GgufType> for StoredElements {
    fn from(kind: GgufType) -> Self {
        match kind {
            GgufType::Q8_0 => Self::Blocks(BlockFormat::Q8_0),
            GgufType::Q4_0 => Self::Blocks(BlockFormat::Q4_0),
            GgufType::Q4_1 => Self::Blocks(BlockFormat::Q4_1),
            GgufType::Q4K => Self::Blocks(BlockFormat::Q4K),
            GgufType::Q5K => Self::Blocks(BlockFormat::Q5K),
            GgufType::Q6K => Self::Blocks(BlockFormat::Q6K),
            GgufType::Mxfp4 => Self::Blocks(BlockFormat::Mxfp4),
            GgufType::F32 => Self::Dense(DType::F32),
            GgufType::Bf16 => Self::Dense(DType::BF16),
            GgufType::F16 => Self::Dense(DType::F16),
        }
    }
}

pub(crate) fn run(command: &Command) -> Result<ExitCode, Failure> {
    match command {
        Command::List { dir, json } => print_list(dir, *json)?,
        Command::Show { checkpoint, json } => show(checkpoint, *json)?,
        Command::Verify { checkpoint } => verify(checkpoint)?,
        Command::Export { checkpoint, gguf: Some(gguf), kind, .. } => export_gguf(checkpoint, *kind, gguf)?,
        Command::Export { checkpoint, hf, adapter, dtype, .. } => {
            export_hf(
                Path::new(checkpoint),
                hf.as_deref().unwrap_or(Path::new("")),
                *adapter,
                (*dtype).into(),
            )?;
        }
        Command::Import { hf, out } => import(hf, out)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes a checkpoint, or with `adapter` what its run has trained, as a directory of Hugging Face.
fn export_hf(checkpoint: &Path, hf: &Path, adapter: bool, dtype: DType) -> Result<(), Failure> {
    let checkpoint = Checkpoint::open(checkpoint)?;
    checkpoint.verify()?;
    let base = BaseModel::of(&checkpoint)?.map(|base| base.path);
    let model = ModelDirectory::of_checkpoint(checkpoint)?;
    if adapter {
        model.export_adapter(dtype, hf)?;
    } else {
        model.export_hf(dtype, hf)?;
    }
    say!("wrote {}", hf.display());
    if model.has_values_of_blocks() && adapter {
        note!(
            "note: the adapter was trained over quantized matrices: load its base model quantized alike (fine_tune.quantize says how), \
             or export without --adapter"
        );
    } else if model.has_values_of_blocks() {
        note!(
            "note: the adapter is merged into the values of the quantized matrices that the run trained with, as peft merges it"
        );
    }
    match base.filter(|base| adapter && !base.join("config.json").exists()) {
        Some(base) => note!(
            "note: peft looks for the base model in {}, a checkpoint of Lockstep's; export it with `lockstep checkpoint export {} \
             --hf DIR`, and write DIR into adapter_config.json (base_model_name_or_path)",
            base.display(),
            base.display()
        ),
        None if !adapter && model.tokenizer().is_none_or(|name| name == "bytes") => {
            note!(
                "note: there is no tokenizer in it: the model reads bytes, and the id of a byte is its value"
            );
        }
        None => {}
    }
    Ok(())
}

/// Writes a model as a GGUF file.
fn export_gguf(model: &str, kind: GgufType, gguf: &Path) -> Result<(), Failure> {
    let path = find_weights(model)?;
    if path.join("manifest.json").is_file() {
        Checkpoint::open(&path)?.verify()?;
    }
    let notes = ModelDirectory::open(&path)?.export_gguf(kind.into(), gguf)?;
    say!("wrote {}", gguf.display());
    for (kind, matrices) in notes.other_types {
        note!(
            "note: {matrices} matrices are {kind}: their rows are no whole blocks of the type that was asked for"
        );
    }
    if notes.lacks_tokenizer {
        note!("note: there is no tokenizer in it: the model has none beside its weights");
    }
    Ok(())
}

/// Verifies every byte of a checkpoint, or of each in a directory of several.
fn verify(path: &Path) -> Result<(), Failure> {
    let is_one = !path.is_dir() || path.join("manifest.json").exists();
    let listed = if is_one { Vec::new() } else { list(path)? };
    let mut failure = None;
    let paths: Vec<&Path> = match listed.is_empty() {
        true => vec![path],
        false => listed.iter().map(|listed| listed.path.as_path()).collect(),
    };
    for path in paths {
        match Checkpoint::open(path).and_then(|checkpoint| checkpoint.verify()) {
            Ok(()) => say!("{}: every byte is as it was written", path.display()),
            // The last failure of several is returned; earlier ones are printed here.
            Err(error) => {
                if let Some(Failure { message, .. }) = failure.replace(Failure::from(error)) {
                    output::error(&message);
                }
            }
        }
    }
    failure.map_or(Ok(()), Err)
}

fn print_list(dir: &Path, as_json: bool) -> Result<(), Failure> {
    if !dir.is_dir() {
        let message = format!("{} is not a directory; give the one that holds step-NNNNNNNN", dir.display());
        return Err(Failure::configuration(message));
    }
    let found = list(dir)?;
    if as_json {
        let rows: Vec<_> =
            found.iter().map(|entry| json!({ "step": entry.step, "path": entry.path })).collect();
        say!("{}", json!(rows));
        return Ok(());
    }
    if found.is_empty() {
        note!("no checkpoints in {}: it holds no step-NNNNNNNN", dir.display());
    }
    for entry in found {
        say!("{:>10}  {}", entry.step, entry.path.display());
    }
    Ok(())
}

fn show(path: &Path, as_json: bool) -> Result<(), Failure> {
    let checkpoint = Checkpoint::open(path)?;
    let manifest = checkpoint.manifest();
    if as_json {
        let text = serde_json::to_string_pretty(manifest)
            .map_err(|error| Failure { message: error.to_string(), code: crate::exit::FAILED })?;
        say!("{text}");
        return Ok(());
    }
    let parameters: usize = manifest
        .tensors
        .iter()
        .filter(|entry| entry.kind == TensorKind::Parameter)
        .map(|entry| entry.shape.iter().product::<usize>())
        .sum();
    let bytes: u64 = manifest.files.values().map(|file| file.bytes).sum();
    say!("step              {}", manifest.step);
    say!("samples consumed  {}", manifest.samples_consumed);
    say!("seed              {}", manifest.seed);
    if let Some(kernels) = &manifest.kernels {
        say!("kernels           {kernels}");
    }
    say!("parameters        {}", human::count(parameters as f64));
    say!(
        "tensors           {} in {} file(s), {}",
        manifest.tensors.len(),
        manifest.files.len(),
        human::bytes(bytes)
    );
    if let Some(base) = BaseModel::of(&checkpoint)? {
        say!("trained part of   {}", base.path.display());
    }
    if let Some(model) = manifest.config.get("model").and_then(|model| model.get("model_type")) {
        say!("model             {}", model.as_str().unwrap_or("?"));
    }
    Ok(())
}

fn import(hf: &Path, out: &Path) -> Result<(), Failure> {
    let directory = ModelDirectory::open(hf)?;
    let records = parameter_records(directory.config());
    let mut weights: Vec<(String, Vec<f32>)> = Vec::new();
    directory.for_each_parameter(|name, values| -> Result<(), Failure> {
        weights.push((name.to_owned(), values.to_vec()));
        Ok(())
    })?;
    let slices: Vec<TensorSlice<'_>> = weights
        .iter()
        .filter_map(|(name, values)| {
            let record = records.iter().find(|record| record.name == *name)?;
            Some(TensorSlice {
                name,
                kind: TensorKind::Parameter,
                dtype: DType::F32,
                global_shape: &record.shape,
                region: Region::Whole,
                bytes: bytemuck::cast_slice::<f32, u8>(values).into(),
            })
        })
        .collect();
    let request = SaveRequest {
        config: json!({
            "model": directory.config().to_json(DType::F32),
            "tokenizer": directory.tokenizer(),
        }),
        parameters: &records,
        ..SaveRequest::default()
    };
    say!("wrote {}", save(out, &request, &slices)?.display());
    Ok(())
}
