//! A directory with one directory of images per class, as torchvision's `ImageFolder`.

use std::{
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
};

use lockstep_plan::DType;
use lockstep_tensor::TensorData;

use super::{
    dataset::{Dataset, check_index, get_new},
    image_file::{Channels, IMAGE_EXTENSIONS, decode_image},
    tensor::{Sample, TensorSpec},
};
use crate::{
    error::{DataError, Result},
    sources::files_below,
};

/// Images below `root/class/`: tensors `image` (u8 `[height, width, channels]`) and `label` (i32).
///
/// The classes are the directories of `root`, numbered in the order of their names. The samples are the image files
/// below each, class by class in the order of their paths.
#[derive(Debug)]
pub struct ImageFolder {
    classes: Vec<String>,
    /// Image files with their class.
    files: Vec<(PathBuf, i32)>,
    channels: Channels,
    specs: [TensorSpec; 2],
}

impl ImageFolder {
    /// Lists the images below `root`.
    ///
    /// # Errors
    /// If a directory cannot be read, there is no class, or a class has no image.
    pub fn open(root: &Path, channels: Channels) -> Result<Self> {
        let classes = class_names(root)?;
        let is_image = |path: &Path| {
            let extension = path.extension().map(|extension| extension.to_string_lossy().to_lowercase());
            extension.is_some_and(|extension| IMAGE_EXTENSIONS.contains(&extension.as_str()))
        };
        let mut files = Vec::new();
        for (label, class) in classes.iter().enumerate() {
            let directory = root.join(class);
            let found = files_below(&directory, &is_image)?;
            if found.is_empty() {
                let problem = format!("this class has no image; allowed: {}", IMAGE_EXTENSIONS.join(", "));
                return Err(DataError::NoSamples { path: directory, problem });
            }
            files.extend(found.into_iter().map(|path| (path, label as i32)));
        }
        if files.is_empty() {
            let problem = "it has no directories; images are expected in one directory per class".to_owned();
            return Err(DataError::NoSamples { path: root.to_owned(), problem });
        }
        let image = TensorSpec::new("image", DType::U8, &[None, None, Some(channels.count())]);
        let specs = [image, TensorSpec::fixed("label", DType::I32, &[])];
        Ok(Self { classes, files, channels, specs })
    }

    /// Returns the names of the classes; a label is an index into them.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// Returns the file of sample `index`.
    ///
    /// # Panics
    /// If `index` is not below the number of samples.
    pub fn path(&self, index: u64) -> &Path {
        &self.files[index as usize].0
    }
}

/// Returns the names of the directories in `root`, sorted; hidden ones excepted.
fn class_names(root: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(root).map_err(DataError::io("read directory", root))? {
        let path = entry.map_err(DataError::io("read directory", root))?.path();
        let Some(name) = path.file_name().filter(|_| path.is_dir()) else { continue };
        let Some(name) = name.to_str() else {
            let problem = "the name of this class is not UTF-8".to_owned();
            return Err(DataError::NoSamples { path, problem });
        };
        if !name.starts_with('.') {
            names.push(name.to_owned());
        }
    }
    names.sort_unstable();
    Ok(names)
}

impl Dataset for ImageFolder {
    fn len(&self) -> u64 {
        self.files.len() as u64
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        self.specs.to_vec()
    }

    fn get(&self, index: u64) -> Result<Sample> {
        get_new(self, index)
    }

    fn get_into(&self, index: u64, sample: &mut Sample) -> Result<()> {
        check_index(index, self.len())?;
        let (path, class) = &self.files[index as usize];
        let (tensors, record) = sample.prepare_with_record(&self.specs);
        let [image, label] = tensors else { return Ok(()) };
        record.clear();
        let read = File::open(path).and_then(|mut file| file.read_to_end(record));
        read.map_err(DataError::io("read", path))?;
        if let (TensorData::U8(pixels), TensorData::I32(labels)) = (&mut image.data, &mut label.data) {
            let shape =
                decode_image(record, self.channels, pixels).map_err(|problem| DataError::BadRecord {
                    path: path.clone(),
                    record: "the image".to_owned(),
                    offset_bytes: 0,
                    problem,
                })?;
            image.shape.extend(shape);
            labels.push(*class);
        }
        Ok(())
    }
}
