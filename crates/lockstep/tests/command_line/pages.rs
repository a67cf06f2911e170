//! The pages of the book: README, `docs/` and `recipes/README.md`, and their fenced blocks.

use std::path::{Path, PathBuf};

/// A page of the book.
pub(crate) struct Page {
    /// Path of the page, such as `README.md` or `docs/data.md`.
    pub(crate) name: String,
    pub(crate) text: String,
}

/// A fenced block of a page.
pub(crate) struct Block {
    /// Info string of its fence: `toml`, `sh`, `console`, or empty.
    pub(crate) kind: String,
    pub(crate) text: String,
}

/// Returns the root of the repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns all pages, ordered by name.
pub(crate) fn pages() -> Vec<Page> {
    let root = root();
    let docs = std::fs::read_dir(root.join("docs")).expect("the book is there");
    let mut names: Vec<String> = docs
        .filter_map(|entry| entry.expect("readable").file_name().into_string().ok())
        .filter(|name| name.ends_with(".md"))
        .map(|name| format!("docs/{name}"))
        .collect();
    names.extend(["README.md".to_owned(), "recipes/README.md".to_owned()]);
    names.sort();
    let page = |name: String| {
        let text = std::fs::read_to_string(root.join(&name)).expect("text");
        Page { name, text }
    };
    names.into_iter().map(page).collect()
}

impl Page {
    /// Returns the fenced blocks in order.
    pub(crate) fn blocks(&self) -> Vec<Block> {
        let mut blocks: Vec<Block> = Vec::new();
        let mut is_inside = false;
        for line in self.text.lines() {
            match (line.strip_prefix("```"), blocks.last_mut()) {
                (Some(kind), _) if !is_inside => {
                    blocks.push(Block { kind: kind.to_owned(), text: String::new() });
                    is_inside = true;
                }
                (Some(_), _) => is_inside = false,
                (None, Some(block)) if is_inside => block.text += &format!("{line}\n"),
                (None, _) => {}
            }
        }
        assert!(!is_inside, "{}: a block does not end", self.name);
        blocks
    }
}
