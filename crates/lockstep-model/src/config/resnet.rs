//! The configuration of ResNet, in the keys of transformers' `ResNetConfig`, with the number of classes and the size of images.

use serde_json::{Map, Value, json};

use super::limits::{Checks, LAYERS, WIDTH};
use super::reader::Reader;
use crate::error::ConfigProblem;

/// A residual network of convolutions for images.
#[derive(Debug, Clone, PartialEq)]
pub struct ResNetConfig {
    /// Rows and columns of the images.
    pub image_size: usize,
    /// Channels of the images.
    pub num_channels: usize,
    /// Number of classes.
    pub num_labels: usize,
    /// Channels of the stem.
    pub embedding_size: usize,
    /// Channels that each stage puts out.
    pub hidden_sizes: Vec<usize>,
    /// Number of blocks of each stage.
    pub depths: Vec<usize>,
    /// Kind of the blocks.
    pub layer_type: ResNetLayer,
    /// First layers (`stem`, an extension).
    pub stem: ResNetStem,
    /// True if the batch norms of data-parallel ranks share their statistics (`sync_batch_norm`, an extension).
    pub sync_batch_norm: bool,
    /// Share of the target that all classes have alike (`label_smoothing`, an extension).
    pub label_smoothing: f64,
}

/// Kind of a ResNet's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResNetLayer {
    /// Two convolutions of 3 × 3: ResNet-18 and ResNet-34 ("basic").
    Basic,
    /// 1 × 1, 3 × 3, 1 × 1, with a quarter of the channels inside: ResNet-50 and larger ("bottleneck").
    Bottleneck,
}

/// First layers of a ResNet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResNetStem {
    /// A convolution of 7 × 7 with stride 2, and a maximum over 3 × 3 with stride 2 ("imagenet").
    ImageNet,
    /// A convolution of 3 × 3 with stride 1, for images of 32 × 32 ("cifar").
    Cifar,
}

/// Most stages of a network.
const STAGES: usize = 8;
/// Most rows and columns of an image.
const IMAGE: usize = 1 << 14;

impl ResNetConfig {
    pub(crate) fn read(table: &Map<String, Value>) -> (Self, Vec<ConfigProblem>) {
        let mut reader = Reader::new(table, "");
        let config = Self {
            image_size: reader.size("image_size", 224),
            num_channels: reader.size("num_channels", 3),
            num_labels: reader.size("num_labels", 1000),
            embedding_size: reader.size("embedding_size", 64),
            hidden_sizes: list(&mut reader, "hidden_sizes", [256, 512, 1024, 2048]),
            depths: list(&mut reader, "depths", [3, 4, 6, 3]),
            layer_type: match reader.text("layer_type") {
                None | Some("bottleneck") => ResNetLayer::Bottleneck,
                Some("basic") => ResNetLayer::Basic,
                Some(_) => {
                    reader.unsupported("layer_type", "\"basic\", \"bottleneck\"");
                    ResNetLayer::Basic
                }
            },
            stem: match reader.text("stem") {
                None | Some("imagenet") => ResNetStem::ImageNet,
                Some("cifar") => ResNetStem::Cifar,
                Some(_) => {
                    reader.unsupported("stem", "\"imagenet\", \"cifar\"");
                    ResNetStem::ImageNet
                }
            },
            sync_batch_norm: reader.flag("sync_batch_norm", false),
            label_smoothing: reader.number("label_smoothing", 0.0),
        };
        (config, reader.finish())
    }

    /// Returns the keys of `config.json`.
    pub(crate) fn keys(&self) -> Map<String, Value> {
        let layer_type = match self.layer_type {
            ResNetLayer::Basic => "basic",
            ResNetLayer::Bottleneck => "bottleneck",
        };
        let stem = match self.stem {
            ResNetStem::ImageNet => "imagenet",
            ResNetStem::Cifar => "cifar",
        };
        let keys = [
            ("image_size", json!(self.image_size)),
            ("num_channels", json!(self.num_channels)),
            ("num_labels", json!(self.num_labels)),
            ("embedding_size", json!(self.embedding_size)),
            ("hidden_sizes", json!(self.hidden_sizes)),
            ("depths", json!(self.depths)),
            ("layer_type", json!(layer_type)),
            ("stem", json!(stem)),
            ("sync_batch_norm", json!(self.sync_batch_norm)),
            ("label_smoothing", json!(self.label_smoothing)),
        ];
        keys.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
    }

    pub(crate) fn checked(&self) -> Vec<ConfigProblem> {
        let mut checks = Checks::default();
        checks.size("image_size", self.image_size, IMAGE);
        checks.size("num_channels", self.num_channels, WIDTH);
        checks.size("num_labels", self.num_labels, WIDTH);
        checks.size("embedding_size", self.embedding_size, WIDTH);
        self.hidden_sizes.iter().for_each(|size| checks.size("hidden_sizes", *size, WIDTH));
        self.depths.iter().for_each(|depth| checks.size("depths", *depth, LAYERS));
        let (stages, depths) = (self.hidden_sizes.len(), self.depths.len());
        if stages != depths || !(1..=STAGES).contains(&stages) {
            checks.conflict(format!(
                "`hidden_sizes` has {stages} entries and `depths` {depths}: one for each of 1 to {STAGES} stages"
            ));
        }
        if self.layer_type == ResNetLayer::Bottleneck {
            self.hidden_sizes
                .iter()
                .for_each(|size| checks.divides(("a bottleneck's 4", 4), ("hidden_sizes", *size)));
        }
        checks.fraction("label_smoothing", self.label_smoothing);
        checks.problems
    }
}

/// Reads a list of whole numbers, or returns `default` if it is absent.
fn list(reader: &mut Reader<'_>, key: &'static str, default: [usize; 4]) -> Vec<usize> {
    let given = reader.sizes(key);
    if given.is_empty() { default.to_vec() } else { given }
}
