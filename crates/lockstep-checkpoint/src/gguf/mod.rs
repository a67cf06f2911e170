//! GGUF, the file format of llama.cpp (ggml: `docs/gguf.md`): one file with configuration, tokenizer and weights, which may be quantized
//! in blocks.
//!
//! [`parse_gguf`] checks the layout of a file and reads no data. `names`, `architecture` and `experts` translate tensor names and metadata to those of
//! Hugging Face, `foreign` repacks blocks that no kernel reads, `tokenizer` makes a `tokenizer.json`, and `model` has the weights of a whole model. `writer` writes a file.

pub(crate) mod architecture;
mod cursor;
pub(crate) mod experts;
mod foreign;
mod header;
mod keys;
mod metadata;
pub(crate) mod model;
pub(crate) mod names;
pub(crate) mod rope;
pub(crate) mod tokenizer;
pub(crate) mod tokenizer_export;
pub(crate) mod writer;

pub use foreign::ForeignFormat;
pub use header::{GgufError, GgufHeader, GgufTensor, StoredElements, TensorType, parse_gguf};
pub use metadata::{GgufMetadata, GgufValue};
pub use tokenizer::EmbeddedTokenizer;
