//! Convolution of images `[batch, height, width, channels]` with weights in PyTorch's layout.

use lockstep_comm::CommError;
use lockstep_plan::Initializer;
use lockstep_tensor::{Conv2d, View, Window2d};

use crate::{
    block::{Bias, ParameterIndex, Value},
    facts::Facts,
    op::Op,
    placement::Placement,
    recorder::Recorder,
    replay::{InputGradients, Run, rows_of},
    work_context::{Work, WorkContext},
};

/// A convolution with parameters `NAME.weight [out, in / groups, kernel_height, kernel_width]` and `NAME.bias [out]`.
#[derive(Debug, Clone, Copy)]
pub struct Convolution<'a> {
    /// Name of the module within its unit.
    pub name: &'a str,
    /// Number of output channels.
    pub out_channels: usize,
    /// Kernel, stride, padding and dilation.
    pub window: Window2d,
    /// Groups of channels that are convolved apart; 1 for an ordinary convolution.
    pub groups: usize,
    /// Presence of a bias.
    pub bias: Bias,
    /// Initializer of the weight; `None` is PyTorch's default, uniform up to `1 / √fan_in`.
    pub initializer: Option<Initializer>,
}

impl Recorder {
    /// Records a convolution of `x [height, width, channels]`.
    ///
    /// # Panics
    /// If `x` is no image, or the window or the groups do not fit it.
    #[track_caller]
    pub fn conv2d(&mut self, x: Value, convolution: Convolution<'_>) -> Value {
        let Convolution { name, out_channels, window, groups, bias, initializer } = convolution;
        let conv = Conv2d::new(self.image(x, name), out_channels, window, groups);
        let conv = conv.unwrap_or_else(|why| panic!("{name}: a convolution of {}: {why}", self.describe(x)));
        let shape = conv.weight_shape();
        let fan_in: usize = shape.dims()[1..].iter().product();
        let default = Initializer::Uniform { bound: (fan_in as f32).sqrt().recip() };
        let share = self.whole_share(Placement::Replicate);
        let weight =
            self.parameter(format!("{name}.weight"), shape.dims(), initializer.unwrap_or(default), share);
        let bias = self.bias(bias, name, out_channels, share);
        let y = self.image_like(x, conv.output(), out_channels);
        self.push(ConvolutionOperation { conv, x, weight, bias, y });
        y
    }
}

#[derive(Debug)]
struct ConvolutionOperation {
    conv: Conv2d,
    x: Value,
    weight: ParameterIndex,
    bias: Option<ParameterIndex>,
    y: Value,
}

impl ConvolutionOperation {
    fn x<'r>(&self, run: &Run<'r>) -> View<'r> {
        run.value(self.x).reshape(self.conv.input_shape())
    }

    fn weight<'r>(&self, run: &Run<'r>) -> View<'r> {
        run.weight(self.weight).reshape(self.conv.weight_shape())
    }
}

impl Op for ConvolutionOperation {
    fn facts(&self) -> Facts {
        let Self { x, weight, bias, y, .. } = *self;
        Facts {
            weights: vec![weight],
            bias,
            saved_for_weights: vec![x],
            accumulates: true,
            is_long: true,
            ..Facts::of("convolution", [x], [y])
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let bias = self.bias.map(|bias| run.weight(bias));
        let y = run.value(self.y).reshape(self.conv.output_shape());
        run.queue().conv2d(self.conv, self.x(run), self.weight(run), bias, y);
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        let (dy, target) =
            (dy.reshape(self.conv.output_shape()), dx.view(0).reshape(self.conv.input_shape()));
        run.queue().conv2d_backward_input(self.conv, dy, self.weight(run), target, dx.write(0));
        Ok(())
    }

    fn backward_weights(&self, run: &Run<'_>, dy: View<'_>) -> Result<(), CommError> {
        if run.trains(self.weight) {
            let dweight = run.gradient_of_weight(self.weight).reshape(self.conv.weight_shape());
            let dy = dy.reshape(self.conv.output_shape());
            run.queue().conv2d_backward_weight(self.conv, dy, self.x(run), dweight);
        }
        if let Some(bias) = self.bias.filter(|bias| run.trains(*bias)) {
            run.queue().sum_rows(rows_of(dy, self.conv.out_channels()), run.gradient_of_weight(bias));
        }
        Ok(())
    }

    /// A convolution counts as the products that it computes by: one for each group.
    fn work(&self, context: &WorkContext<'_>) -> Vec<Work> {
        let groups = self.conv.groups();
        let [height, width] = self.conv.output();
        let rows = (self.conv.batch() * height * width) as u64;
        let inner = (self.conv.in_channels() / groups * self.conv.window().taps()) as u64;
        let columns = (self.conv.out_channels() / groups) as u64;
        vec![context.products([rows, inner, columns], groups as u64)]
    }
}
