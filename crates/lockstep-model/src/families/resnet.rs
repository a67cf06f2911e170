//! ResNet (He et al., 2016), with the names and layouts of torchvision's state dicts and the configuration keys of
//! transformers. A unit is a block; the stem is the first unit, the classifier the last.

use lockstep_graph::{
    BatchNormOptions, Bias, Convolution, InputDeclaration, Recorder, Synchronization, Value,
};
use lockstep_plan::{DType, Initializer};
use lockstep_tensor::{LABELS, Window2d};
use serde_json::{Map, Value as Json};

use crate::config::{ResNetConfig, ResNetLayer, ResNetStem};
use crate::error::ConfigProblem;
use crate::model::{Model, Sizes, Unit};

/// Name of the input of images, `[height, width, channels]`.
const PIXELS: &str = "pixel_values";
/// Output channels of a bottleneck for each of its inner ones.
const EXPANSION: usize = 4;

impl ResNetConfig {
    /// Returns (stage, index in the stage) of each block.
    fn blocks(&self) -> impl Iterator<Item = (usize, usize)> {
        self.depths.iter().enumerate().flat_map(|(stage, depth)| (0..*depth).map(move |block| (stage, block)))
    }

    /// Records a convolution without bias, its batch norm, and with `relu` the activation.
    fn conv(
        &self,
        g: &mut Recorder,
        x: Value,
        [conv, norm]: [&str; 2],
        to: usize,
        window: Window2d,
    ) -> Value {
        let [height, width] = window.kernel;
        // Kaiming's initialization by the fan of the outputs, as in torchvision.
        let std = (2.0 / (to * height * width) as f32).sqrt();
        let y = g.conv2d(
            x,
            Convolution {
                name: conv,
                out_channels: to,
                window,
                groups: 1,
                bias: Bias::Without,
                initializer: Some(Initializer::Normal { std }),
            },
        );
        let synchronization = match self.sync_batch_norm {
            true => Synchronization::DataParallel,
            false => Synchronization::Off,
        };
        g.batch_norm(y, norm, BatchNormOptions { synchronization, ..BatchNormOptions::default() })
    }

    fn stem(&self, g: &mut Recorder) -> Value {
        let x = g.data(PIXELS);
        let window = match self.stem {
            ResNetStem::ImageNet => Window2d::square(7, 2, 3),
            ResNetStem::Cifar => Window2d::square(3, 1, 1),
        };
        let x = self.conv(g, x, ["conv1", "bn1"], self.embedding_size, window);
        let x = g.relu(x);
        match self.stem {
            ResNetStem::ImageNet => g.max_pool2d(x, Window2d::square(3, 2, 1)),
            ResNetStem::Cifar => x,
        }
    }

    /// Rows and columns of the images that a stage reads.
    fn image_of(&self, stage: usize) -> usize {
        let halved = |size: usize, times: usize| (0..times).fold(size, |size, _| size.div_ceil(2));
        let of_stem = match self.stem {
            ResNetStem::ImageNet => halved(self.image_size, 2),
            ResNetStem::Cifar => self.image_size,
        };
        halved(of_stem, stage.saturating_sub(1))
    }

    /// Channels that a stage puts out.
    fn channels_of(&self, stage: usize) -> usize {
        self.hidden_sizes[stage]
    }

    fn block(&self, g: &mut Recorder, (stage, block): (usize, usize)) -> Value {
        let to = self.channels_of(stage);
        let (from, image, stride) = match (stage, block) {
            (0, 0) => (self.embedding_size, self.image_of(0), 1),
            (stage, 0) => (self.channels_of(stage - 1), self.image_of(stage), 2),
            (stage, _) => (to, self.image_of(stage + 1), 1),
        };
        let x = g.input_of(&[image, image, from]);
        let y = match self.layer_type {
            ResNetLayer::Basic => {
                let y = self.conv(g, x, ["conv1", "bn1"], to, Window2d::square(3, stride, 1));
                let y = g.relu(y);
                self.conv(g, y, ["conv2", "bn2"], to, Window2d::square(3, 1, 1))
            }
            ResNetLayer::Bottleneck => {
                let inner = to / EXPANSION;
                let y = self.conv(g, x, ["conv1", "bn1"], inner, Window2d::square(1, 1, 0));
                let y = g.relu(y);
                let y = self.conv(g, y, ["conv2", "bn2"], inner, Window2d::square(3, stride, 1));
                let y = g.relu(y);
                self.conv(g, y, ["conv3", "bn3"], to, Window2d::square(1, 1, 0))
            }
        };
        let x = if stride == 1 && from == to {
            x
        } else {
            self.conv(g, x, ["downsample.0", "downsample.1"], to, Window2d::square(1, stride, 0))
        };
        let sum = g.add(x, y);
        g.relu(sum)
    }

    fn classifier(&self, g: &mut Recorder) -> Value {
        let last = self.depths.len() - 1;
        let (image, channels) = (self.image_of(last + 1), self.channels_of(last));
        let x = g.input_of(&[image, image, channels]);
        let x = g.global_avg_pool2d(x);
        let logits = g.dense(x, "fc", self.num_labels);
        g.accuracy(logits);
        g.cross_entropy(logits, self.label_smoothing as f32)
    }
}

impl Model for ResNetConfig {
    fn model_type(&self) -> &str {
        "resnet"
    }

    fn units(&self) -> Vec<Unit> {
        let outside = |kind| Unit { prefix: String::new(), kind, layer: None };
        let blocks = self.blocks().enumerate().map(|(layer, (stage, block))| Unit {
            prefix: format!("layer{}.{block}.", stage + 1),
            kind: 2 + 2 * stage + block.min(1),
            layer: Some(layer),
        });
        [outside(0)].into_iter().chain(blocks).chain([outside(1)]).collect()
    }

    fn record(&self, unit: usize, g: &mut Recorder) -> Value {
        match unit.checked_sub(1).map(|layer| self.blocks().nth(layer)) {
            None => self.stem(g),
            Some(Some(block)) => self.block(g, block),
            Some(None) => self.classifier(g),
        }
    }

    fn inputs(&self) -> Vec<InputDeclaration> {
        let Self { image_size, num_channels, .. } = *self;
        vec![
            InputDeclaration::new(PIXELS, DType::F32, &[image_size, image_size, num_channels]),
            InputDeclaration::new(LABELS, DType::I32, &[]),
        ]
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            layers: self.depths.iter().sum(),
            classes: self.num_labels,
            positions: 1,
            fixed_seq_len: Some(1),
            ..Sizes::default()
        }
    }

    fn table(&self) -> Map<String, Json> {
        self.keys()
    }

    fn problems(&self) -> Vec<ConfigProblem> {
        self.checked()
    }
}
