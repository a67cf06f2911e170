//! The operations of this crate, one file each: its struct, its recording with the rules of shapes and placements, its
//! facts, the kernel calls of its forward and its two backwards, and its work. Nothing else in the crate lists them. An
//! operation of another crate differs only in that its recording method is a function that is given a
//! [`Recorder`](crate::Recorder).

mod accuracy;
mod activation;
mod add;
pub(crate) mod attention;
pub(crate) mod batch_norm;
mod class_loss;
mod combine;
mod context_collective;
pub(crate) mod convolution;
mod dispatch;
mod dropout;
mod embedding;
pub(crate) mod expert_rows;
mod flatten;
mod gate_rows;
mod gated;
mod gelu;
mod grouped_linear;
mod head_product;
mod heads;
mod image_tokens;
mod layer_norm;
pub(crate) mod linear;
mod output_logits;
mod output_loss;
mod pool;
mod redistribute;
mod reshape;
mod ring;
mod rms_norm;
pub(crate) mod rope;
pub(crate) mod route;
mod scale;
pub(crate) mod sequence_token;
mod sharded_cache;
mod summa_linear;
mod whole_columns;
