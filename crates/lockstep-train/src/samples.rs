//! The samples of a run: data sets of named tensors with their transforms, from the files that `[data]` names or from a program.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use lockstep_config::{
    DataFormat, DataOrder, ImageSize, Problems, ResolvedModel, RunConfig, SampleTransform, image_input,
};
use lockstep_data::samples::{
    CenterCrop, Channels, Cifar, CifarKind, Dataset, EpochEnd, Field, IMAGE_EXTENSIONS, ImageFolder,
    Normalize, OnBadSample, RandomCrop, RandomHorizontalFlip, RandomResizedCrop, ReadOptions, RenamedTensors,
    Resize, SampleBatches, SampleSequence, ShardOptions, Split, TensorSpec, TfRecordDataset, ToFloat,
    Transforms, WebDataset, expand_paths, open_idx,
};
use lockstep_data::{BatchSource, DataError, SampleOrder};
use lockstep_model::{InputDeclaration, ModelConfig};
use lockstep_plan::DType;
use lockstep_tensor::{LABELS, is_name_of};

use crate::Error;

/// A data set with its transforms.
#[derive(Debug)]
pub struct SampleSet {
    /// The samples as they are on disk.
    pub dataset: Arc<dyn Dataset>,
    /// Transforms of each sample.
    pub transforms: Transforms,
}

/// The training and validation samples of a run.
#[derive(Debug)]
pub struct SampleCorpus {
    /// Samples to train on.
    pub train: SampleSet,
    /// Samples to evaluate on; `None` if there are none.
    pub valid: Option<SampleSet>,
    /// Identity of the training samples, which a run that resumes compares.
    pub digest: String,
    /// Messages about shards that end early, where damaged samples are skipped.
    pub damages: Vec<String>,
}

/// The part of a run that reads samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Train,
    Valid,
}

impl SampleCorpus {
    /// Opens the samples that `config` names.
    ///
    /// # Errors
    /// If files are missing or damaged, or the samples do not fit the model's inputs.
    pub fn open(config: &RunConfig, model: &ResolvedModel) -> Result<Self, Error> {
        let opening = Opening { config, model: &model.config, inputs: model.config.model().inputs() };
        let train = opening.set(Part::Train)?;
        let valid = (!config.data.valid.is_empty()).then(|| opening.set(Part::Valid)).transpose()?;
        if let Some(valid) = &valid {
            opening.check_classes(&train, valid)?;
        }
        let digest = digest(config.data.format, &train);
        let damages =
            [Some(&train), valid.as_ref()].into_iter().flatten().flat_map(|set| set.damages.clone());
        let damages = damages.collect();
        Ok(Self { train: train.set, valid: valid.map(|valid| valid.set), digest, damages })
    }
}

/// An opened data set with what is known about its files.
struct Opened {
    set: SampleSet,
    files: Vec<PathBuf>,
    /// Names of the classes, where directories name them.
    classes: Option<Vec<String>>,
    damages: Vec<String>,
}

/// A data set before its transforms.
struct Found {
    dataset: Arc<dyn Dataset>,
    files: Vec<PathBuf>,
    classes: Option<Vec<String>>,
    damages: Vec<String>,
}

impl Found {
    fn of(dataset: impl Dataset + 'static, files: Vec<PathBuf>) -> Self {
        Self { dataset: Arc::new(dataset), files, classes: None, damages: Vec::new() }
    }
}

/// The opening of a run's samples.
struct Opening<'a> {
    config: &'a RunConfig,
    model: &'a ModelConfig,
    inputs: Vec<InputDeclaration>,
}

impl Opening<'_> {
    fn set(&self, part: Part) -> Result<Opened, Error> {
        let Found { dataset, files, classes, damages } = self.dataset(part)?;
        let dataset = self.renamed(dataset)?;
        let transforms = self.transforms(&*dataset, part)?;
        let set = SampleSet { dataset, transforms };
        check_inputs(self.model, &set).map_err(|error| match error {
            Error::Input { input, found } => {
                let what = format!("leads to {found}, and the model reads {input}");
                let allowed =
                    "transforms that end in this size, such as { kind = \"resize\", size = [HEIGHT, WIDTH] }";
                let problem = self.config.problem(key_of_transforms(part), what, allowed);
                Problems::from(problem).into()
            }
            error => error,
        })?;
        Ok(Opened { set, files, classes, damages })
    }

    /// Returns the paths of a part, expanded.
    fn paths(&self, part: Part) -> Result<Vec<PathBuf>, DataError> {
        let data = &self.config.data;
        let patterns: Vec<&str> = match part {
            Part::Train => data.train.iter().map(lockstep_config::DataSource::path).collect(),
            Part::Valid => data.valid.iter().map(String::as_str).collect(),
        };
        expand_paths(&patterns)
    }

    fn dataset(&self, part: Part) -> Result<Found, Error> {
        let paths = self.paths(part)?;
        match self.config.data.format {
            DataFormat::Cifar10 => cifar(paths, CifarKind::Cifar10, part),
            DataFormat::Cifar100 => cifar(paths, CifarKind::Cifar100, part),
            DataFormat::Idx => self.idx(paths, part),
            DataFormat::ImageFolder => self.image_folder(paths),
            DataFormat::WebDataset => {
                let files = shards(paths, ".tar")?;
                let dataset = WebDataset::from_files(
                    files.clone(),
                    self.fields(),
                    self.shard_options(&self.config.cache_dir()),
                )?;
                let damages = dataset.damages().iter().map(ToString::to_string).collect();
                Ok(Found { damages, ..Found::of(dataset, files) })
            }
            _ => {
                let files = shards(paths, ".tfrecord")?;
                let dataset = TfRecordDataset::from_files(
                    files.clone(),
                    self.fields(),
                    self.shard_options(&self.config.cache_dir()),
                )?;
                let damages = dataset.damages().iter().map(ToString::to_string).collect();
                Ok(Found { damages, ..Found::of(dataset, files) })
            }
        }
    }

    fn idx(&self, paths: Vec<PathBuf>, part: Part) -> Result<Found, Error> {
        let data = &self.config.data;
        let labels = match part {
            Part::Train => data.labels.as_deref(),
            Part::Valid => data.valid_labels.as_deref(),
        };
        // The configuration's check has found both.
        let (images, labels) = (paths.first().cloned().unwrap_or_default(), labels.unwrap_or(Path::new("")));
        let classes = self.classes();
        Ok(Found::of(open_idx(&images, labels, classes)?, vec![images, labels.to_owned()]))
    }

    fn image_folder(&self, paths: Vec<PathBuf>) -> Result<Found, Error> {
        let root = paths.into_iter().next().unwrap_or_default();
        let dataset = ImageFolder::open(&root, self.channels())?;
        let (found, of_model) = (dataset.classes().len(), self.model.model().sizes().classes);
        if of_model > 0 && found > of_model {
            let what = format!("has {found} classes (directories), and the model {of_model}");
            let problem = self.config.problem("data.train", what, format!("with model.num_labels = {found}"));
            return Err(Problems::from(problem).into());
        }
        let below = |index| dataset.path(index).strip_prefix(&root).unwrap_or(&root).to_owned();
        let files = (0..dataset.len()).map(below).collect();
        let classes = Some(dataset.classes().to_vec());
        Ok(Found { classes, ..Found::of(dataset, files) })
    }

    /// Returns the number of classes against which labels are checked.
    fn classes(&self) -> Option<u32> {
        u32::try_from(self.model.model().sizes().classes).ok().filter(|classes| *classes > 0)
    }

    fn channels(&self) -> Channels {
        match image_input(&self.inputs).map(|input| &input.shape[..]) {
            Some([_, _, 1]) => Channels::Gray,
            _ => Channels::Rgb,
        }
    }

    fn shard_options<'d>(&self, cache_dir: &'d Path) -> ShardOptions<'d> {
        ShardOptions { cache_dir: Some(cache_dir), on_damage: on_bad_sample(self.config) }
    }

    /// Returns the part of a record that each input of the model is decoded from.
    fn fields(&self) -> Vec<Field> {
        let is_tar = self.config.data.format == DataFormat::WebDataset;
        let image = image_input(&self.inputs).map(|input| &input.name);
        let field = |input: &InputDeclaration| {
            let InputDeclaration { name, dtype, shape, .. } = input;
            let is_image = image == Some(name);
            let usual = || match (is_tar, is_image, name == LABELS) {
                (true, true, _) => IMAGE_EXTENSIONS.join(";"),
                (true, _, true) => "cls".to_owned(),
                (true, ..) => format!("{name}.npy"),
                (_, true, _) => "image/encoded;image".to_owned(),
                (_, _, true) => "image/class/label;label".to_owned(),
                _ => name.clone(),
            };
            let keys = self.config.data.columns.get(name).cloned().unwrap_or_else(usual);
            if is_image && !keys.ends_with("npy") {
                Field::image(name, &keys, self.channels())
            } else if *dtype == DType::I32 && shape.is_empty() {
                Field::class(name, &keys, self.classes().filter(|_| name == LABELS))
            } else {
                let shape: Vec<Option<usize>> = shape.iter().copied().map(Some).collect();
                Field::array(name, &keys, *dtype, &shape)
            }
        };
        self.inputs.iter().map(field).collect()
    }

    /// Gives the tensors of a data set the names of the model's inputs that `data.columns` maps to them.
    fn renamed(&self, dataset: Arc<dyn Dataset>) -> Result<Arc<dyn Dataset>, Error> {
        let is_decoded = matches!(self.config.data.format, DataFormat::WebDataset | DataFormat::TfRecord);
        let columns = &self.config.data.columns;
        if is_decoded || columns.is_empty() {
            return Ok(dataset);
        }
        let names = columns.iter().map(|(input, tensor)| (input.as_str(), tensor.as_str()));
        match RenamedTensors::new(dataset, names) {
            Ok(renamed) => Ok(Arc::new(renamed)),
            Err(error) => {
                let problem = self.config.problem("data.columns", error.to_string(), "");
                Err(Problems::from(problem).into())
            }
        }
    }

    /// Returns the transforms of a part, completed so that images fit the model.
    fn transforms(&self, dataset: &dyn Dataset, part: Part) -> Result<Transforms, Error> {
        let Some(input) = image_input(&self.inputs) else { return Ok(Transforms::new()) };
        let tensors = dataset.tensors();
        let Some(image) = tensor_of(&tensors, &input.name) else { return Ok(Transforms::new()) };
        let data = &self.config.data;
        let of_training = || data.transforms.as_ref();
        let without_chance =
            |list: &Vec<SampleTransform>| list.iter().flat_map(SampleTransform::for_evaluation).collect();
        let list = match part {
            Part::Train => of_training().cloned(),
            Part::Valid => data.valid_transforms.clone().or_else(|| of_training().map(without_chance)),
        };
        let [height, width] = [input.shape[0], input.shape[1]];
        let is_other_size = image.shape.get(..2) != Some(&[Some(height), Some(width)]);
        let usual = || match is_other_size {
            true => vec![SampleTransform::Resize { size: ImageSize::Exact([height, width]) }],
            false => Vec::new(),
        };
        let transforms = built(&list.unwrap_or_else(usual), image, input.dtype)?;
        transforms.output(tensors).map_err(|error| {
            let problem = self.config.problem(key_of_transforms(part), error.to_string(), "");
            Problems::from(problem)
        })?;
        Ok(transforms)
    }

    /// Checks that the directories of a validation set name the classes of the training set.
    fn check_classes(&self, train: &Opened, valid: &Opened) -> Result<(), Error> {
        if train.classes == valid.classes {
            return Ok(());
        }
        let names = |opened: &Opened| {
            let names = opened.classes.clone().unwrap_or_default();
            let shown = names.iter().take(4).cloned().collect::<Vec<_>>().join(", ");
            format!("{} ({shown}{})", names.len(), if names.len() > 4 { ", ..." } else { "" })
        };
        let what = format!(
            "has other classes than data.train, so that their numbers differ: {}, and {} there",
            names(valid),
            names(train)
        );
        let problem = self.config.problem("data.valid", what, "the same directories in both");
        Err(Problems::from(problem).into())
    }
}

/// Returns the key that a part's transforms come from.
fn key_of_transforms(part: Part) -> &'static str {
    match part {
        Part::Train => "data.transforms",
        Part::Valid => "data.valid_transforms",
    }
}

fn cifar(paths: Vec<PathBuf>, kind: CifarKind, part: Part) -> Result<Found, Error> {
    let split = if part == Part::Train { Split::Train } else { Split::Test };
    let files: Vec<PathBuf> = paths
        .into_iter()
        .flat_map(|path| if path.is_dir() { kind.files_in(&path, split) } else { vec![path] })
        .collect();
    Ok(Found::of(Cifar::from_files(files.clone(), kind)?, files))
}

/// Returns the shards among `paths`: files as they are, of a directory those whose names contain `mark`.
fn shards(paths: Vec<PathBuf>, mark: &str) -> Result<Vec<PathBuf>, DataError> {
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() {
            files.extend(expand_paths(&[format!("{}/**/*{mark}*", path.display())])?);
        } else {
            files.push(path);
        }
    }
    Ok(files)
}

fn on_bad_sample(config: &RunConfig) -> OnBadSample {
    if config.data.skip_bad_samples { OnBadSample::Skip } else { OnBadSample::Fail }
}

/// Returns the transforms of a list, applied to `image`. Bytes become floats where a normalization or the model needs them.
fn built(list: &[SampleTransform], image: &TensorSpec, dtype: DType) -> Result<Transforms, DataError> {
    let name = &*image.name;
    let mut is_bytes = image.dtype == DType::U8;
    let mut transforms = Transforms::new();
    for transform in list {
        transforms = match transform {
            SampleTransform::Resize { size: ImageSize::Side(side) } => {
                transforms.then(name, Resize::ShorterSide(*side))
            }
            SampleTransform::Resize { size: ImageSize::Exact([height, width]) } => {
                transforms.then(name, Resize::Exact { height: *height, width: *width })
            }
            SampleTransform::CenterCrop { size } => {
                let [height, width] = size.height_and_width();
                transforms.then(name, CenterCrop { height, width })
            }
            SampleTransform::RandomCrop { size, padding } => {
                let [height, width] = size.height_and_width();
                transforms.then(name, RandomCrop { height, width, padding: *padding })
            }
            SampleTransform::RandomResizedCrop { size } => {
                let [height, width] = size.height_and_width();
                transforms.then(name, RandomResizedCrop { height, width })
            }
            SampleTransform::HorizontalFlip => transforms.then(name, RandomHorizontalFlip),
            SampleTransform::Normalize { mean, std } => {
                if std::mem::take(&mut is_bytes) {
                    transforms = transforms.then(name, ToFloat);
                }
                let narrowed =
                    |numbers: &[f64]| numbers.iter().map(|number| *number as f32).collect::<Vec<_>>();
                transforms.then(name, Normalize::new(&narrowed(mean), &narrowed(std))?)
            }
        };
    }
    Ok(if is_bytes && dtype == DType::F32 { transforms.then(name, ToFloat) } else { transforms })
}

/// Returns the digest of a data set: its format, its samples and its files.
fn digest(format: DataFormat, opened: &Opened) -> String {
    let dataset = &opened.set.dataset;
    let mut hasher = blake3::Hasher::new();
    hasher.update(format!("{} {} {:?}\n", format.word(), dataset.len(), dataset.tensors()).as_bytes());
    for file in &opened.files {
        // Images are too many to be looked at; their names have been listed.
        let bytes = match format {
            DataFormat::ImageFolder => 0,
            _ => std::fs::metadata(file).map_or(0, |found| found.len()),
        };
        let name = match format {
            DataFormat::ImageFolder => file.as_os_str(),
            _ => file.file_name().unwrap_or_default(),
        };
        hasher.update(name.as_encoded_bytes());
        hasher.update(format!(" {bytes}\n").as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

/// Returns the tensor that a model's input is read from: of its name, else of the name that data sets usually have for it.
fn tensor_of<'t>(tensors: &'t [TensorSpec], input: &str) -> Option<&'t TensorSpec> {
    let exact = tensors.iter().find(|tensor| &*tensor.name == input);
    exact.or_else(|| tensors.iter().find(|tensor| is_name_of(&tensor.name, input)))
}

/// Checks that transformed samples have the inputs of the model.
pub(crate) fn check_inputs(model: &ModelConfig, set: &SampleSet) -> Result<(), Error> {
    let tensors = set.transforms.output(set.dataset.tensors())?;
    for declared in model.model().inputs() {
        let found = tensor_of(&tensors, &declared.name);
        let shape = &declared.shape;
        let is_of_shape = |extents: &[Option<usize>]| {
            extents.len() == shape.len()
                && extents.iter().zip(shape).all(|(extent, size)| *extent == Some(*size))
        };
        // The length of sequences is checked when a micro-batch is read.
        let fits = |tensor: &TensorSpec| match (declared.is_per_token, tensor.shape.split_first()) {
            (false, _) => is_of_shape(&tensor.shape),
            (true, first) => first.is_some_and(|(_, of_token)| is_of_shape(of_token)),
        };
        if found.is_none_or(|tensor| tensor.dtype != declared.dtype || !fits(tensor)) {
            let found = tensors.iter().map(described).collect::<Vec<_>>().join(", ");
            let InputDeclaration { name, dtype, shape, .. } = declared;
            return Err(Error::Input { input: format!("{name} {dtype} {shape:?}"), found });
        }
    }
    Ok(())
}

/// Describes a tensor of samples: `image u8 [32, 32, 3]`, with `?` for an extent that varies.
pub fn described(tensor: &TensorSpec) -> String {
    let extent = |extent: &Option<usize>| extent.map_or("?".to_owned(), |extent| extent.to_string());
    let shape = tensor.shape.iter().map(extent).collect::<Vec<_>>().join(", ");
    format!("{} {} [{shape}]", tensor.name, tensor.dtype)
}

/// Returns a set as the source of a run's micro-batches, in the order of a part.
pub(crate) fn batches(
    config: &RunConfig,
    set: SampleSet,
    order: SampleOrder,
) -> Result<Arc<dyn BatchSource>, Error> {
    let sequence = SampleSequence::new(order, set.dataset.len(), EpochEnd::Continue)?;
    let options = ReadOptions {
        seed: config.train.seed,
        workers: config.data.workers,
        on_bad_sample: on_bad_sample(config),
    };
    Ok(Arc::new(SampleBatches::new(set.dataset, set.transforms, sequence, options)?))
}

/// Returns the order of the training samples.
pub(crate) fn training_order(config: &RunConfig) -> SampleOrder {
    match config.data.order {
        DataOrder::Sequential => SampleOrder::Sequential,
        DataOrder::Shuffle => SampleOrder::Shuffle { seed: config.train.seed },
    }
}
