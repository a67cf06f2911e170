//! Data sets beyond text: samples of named tensors, from files of images and records to stacked batches.
//!
//! ```text
//! Dataset (files, index) -> SampleSequence (order) -> Transforms -> Loader (threads) -> Batch
//! ```
//!
//! - A [`Dataset`] reads a [`Sample`] by its index: [`Cifar`], MNIST's idx ([`open_idx`]), [`ImageFolder`],
//!   [`WebDataset`], [`TfRecordDataset`], arrays in memory ([`TensorDataset`]), or a user's own. An
//!   [`IterableDataset`] becomes one as a [`StreamDataset`].
//! - A [`SampleSequence`] maps the global sample number to (epoch, index), as for text. The number of samples consumed is
//!   the whole state of a run.
//! - [`Transforms`] are functions of (seed, sample number, epoch).
//! - A [`Loader`] reads, transforms and stacks on its threads. Its batches do not depend on the number of threads or
//!   ranks.
//!
//! Images are u8 `[height, width, channels]`, batches of them `[samples, height, width, channels]` (NHWC).

mod bad_samples;
mod batch;
mod brace;
mod cifar;
mod crops;
mod dataset;
mod field;
mod file_pool;
mod idx;
mod image_file;
mod image_folder;
mod iterable;
mod jpeg;
mod loader;
mod npy;
mod pixels;
mod reader;
mod record_index;
mod renamed;
mod resize;
mod sample_batches;
mod sequence;
mod shards;
mod synthetic_cifar;
mod tar_index;
mod tensor;
mod tf_example;
mod tf_record;
mod transform;
mod web_dataset;

pub use bad_samples::OnBadSample;
pub use batch::Batch;
pub use brace::{expand_paths, expand_shards};
pub use cifar::{Cifar, CifarKind, Split};
pub use crops::{CenterCrop, RandomCrop, RandomHorizontalFlip};
pub use dataset::{Dataset, TensorDataset};
pub use field::{Field, FieldKind};
pub use idx::{IdxArray, IdxProblem, open_idx, parse_idx, read_idx};
pub use image_file::{Channels, IMAGE_EXTENSIONS, MOST_PIXELS, decode_image};
pub use image_folder::ImageFolder;
pub use iterable::{IterableDataset, SampleIter, StreamDataset};
pub use loader::{Loader, LoaderOptions};
pub use lockstep_tensor::{NamedTensor, TensorData};
pub use npy::read_npy;
pub use pixels::{Normalize, ToFloat};
pub use renamed::RenamedTensors;
pub use resize::{RandomResizedCrop, Resize};
pub use sample_batches::{ReadOptions, SampleBatches};
pub use sequence::{EpochEnd, SamplePlace, SampleSequence, Shuffle, one_epoch};
pub use shards::ShardOptions;
pub use synthetic_cifar::write_synthetic_cifar10;
pub use tensor::{Sample, Spares, TensorSpec};
pub use tf_example::{Example, ExampleProblem, Feature};
pub use tf_record::{TfRecordDataset, masked_crc, write_record};
pub use transform::{SampleRandom, Transform, Transforms};
pub use web_dataset::WebDataset;
