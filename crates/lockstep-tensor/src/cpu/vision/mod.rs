//! Kernels of vision models and encoders other than convolutions.

mod activation;
mod batch_norm;
mod depthwise;
mod loss;
mod pool;
mod rows;
mod windows;

pub(super) use activation::{activation, activation_backward};
pub(super) use depthwise::{depthwise, depthwise_backward_input, depthwise_backward_weight, is_depthwise};
pub(super) use loss::{correct, cross_entropy_smoothed, squared_error};
pub(super) use rows::{
    Selection, prepend_row, prepend_row_backward_input, prepend_row_backward_row, select_row,
    select_row_backward,
};
