//! Models by name: the cache of `huggingface_hub` on disk, and downloads into it.
//!
//! [`ModelName`] parses `hf://org/name@revision/file.gguf` and its short forms. [`Hub::find`] returns the path of such a model:
//! the snapshot in the cache if it has all files that are needed, without any traffic, else a download. [`Hub::update`] asks the
//! hub for the newest commit. Layout, names and locks of the cache are those of the Python package, so both share downloads.
//!
//! ```text
//! models--org--name/refs/main                        the commit of a branch
//! models--org--name/snapshots/COMMIT/config.json ->  ../../blobs/ETAG
//! models--org--name/blobs/ETAG                       contents; ETAG.incomplete while they arrive
//! .locks/models--org--name/ETAG.lock                 one process downloads a blob, the others wait
//! ```
//!
//! Nothing that a server says is trusted: names, sizes, redirects and hashes are checked before they are used.

mod blob;
mod cache;
mod client;
mod error;
mod hub;
mod listing;
mod lock;
mod name;
mod progress;
mod settings;
mod tls;
mod url;

pub use error::{ErrorKind, HubError};
pub use hub::Hub;
pub use listing::Need;
pub use name::ModelName;
pub use progress::{Progress, Silent};
pub use settings::{Settings, Token};
