//! Writes `error.json` in torchelastic's format to the path in `TORCHELASTIC_ERROR_FILE`; torchrun, Kubeflow and TorchX show its
//! content.
//!
//! ```text
//! {"message": {"message": "Type: text", "extraInfo": {"py_callstack": "...", "timestamp": "1700000000"}, "errorCode": 1}}
//! ```
//!
//! A rank that fails writes the file. The launcher copies that of the first failure and adds `errorCode`, negative for a signal.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use lockstep_launch::ERROR_FILE_VARIABLE;
use serde_json::{Value, json};

use crate::exit::{self, Failure};

/// True once this process has written its file.
static IS_WRITTEN: AtomicBool = AtomicBool::new(false);

/// Returns the path of the file that this process is asked to write.
pub(crate) fn path() -> Option<PathBuf> {
    std::env::var_os(ERROR_FILE_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// Writes the file of this process, if it is asked to and has not done so yet.
pub(crate) fn write(failure: &Failure) {
    write_document(&document(failure));
}

/// Writes the launcher's own file: the one of the rank that failed first, at `of_rank`, or else `failure`, with the exit code of
/// that rank.
pub(crate) fn pass_on(of_rank: Option<&Path>, failure: &Failure, code: i32) {
    if path().is_none() {
        return;
    }
    let written = of_rank.and_then(|path| serde_json::from_slice(&std::fs::read(path).ok()?).ok());
    let mut written: Value = written.unwrap_or_else(|| document(failure));
    if let Some(message) = written["message"].as_object_mut() {
        message.insert("errorCode".to_owned(), code.into());
    }
    write_document(&written);
}

fn write_document(document: &Value) {
    let Some(path) = path() else { return };
    if !IS_WRITTEN.swap(true, Ordering::Relaxed)
        && let Err(error) = std::fs::write(&path, document.to_string())
    {
        crate::output::warning(&format!("cannot write {}: {error}", path.display()));
    }
}

fn document(failure: &Failure) -> Value {
    let text = format!("{}: {}", kind(failure.code), failure.message);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    // There is no Python stack, but readers expect the key.
    let extra = json!({ "py_callstack": text, "timestamp": now.to_string() });
    json!({ "message": { "message": text, "extraInfo": extra } })
}

/// Returns the text in place of a Python exception type.
fn kind(code: u8) -> &'static str {
    match code {
        exit::CONFIGURATION => "ConfigurationError",
        exit::MISSING => "DeviceMissingError",
        exit::CORRUPT_INPUT => "CorruptInputError",
        exit::PEER_LOST => "RankLostError",
        _ => "RunFailedError",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_has_torchelastics_form() {
        let failure = Failure { message: "rank 1 was lost".to_owned(), code: exit::PEER_LOST };
        let found = document(&failure);
        assert_eq!(found["message"]["message"], "RankLostError: rank 1 was lost");
        let extra = found["message"]["extraInfo"].as_object().unwrap();
        assert_eq!(extra.keys().collect::<Vec<_>>(), ["py_callstack", "timestamp"]);
        assert!(extra["timestamp"].as_str().unwrap().parse::<u64>().unwrap() > 1_700_000_000);
    }
}
