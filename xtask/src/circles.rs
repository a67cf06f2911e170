//! `cargo xtask circles`: circles of imports between the files of a crate. File A imports file B if A names an item that B defines,
//! in a `use` or in a path; a re-export stands for the file that it leads to, and is no import itself. Test modules do not count.
//! Sources are read as tokens, so text in comments and strings is never taken for code.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// Module path below the crate's root; the root itself is empty.
type Module = Vec<String>;

/// Chains of re-exports that are followed before a path is given up.
const MAX_REEXPORTS: usize = 16;

/// Sources of one crate, by module.
#[derive(Default)]
struct Sources {
    files: BTreeMap<Module, PathBuf>,
    /// Paths that each file names, absolute below the crate's root.
    named: BTreeMap<Module, BTreeSet<Module>>,
    /// Re-exports: the public path and the path it stands for.
    reexports: BTreeMap<Module, Module>,
    /// Modules that only tests compile.
    tests: Vec<Module>,
}

/// Files that a file imports, each with the items that it names there.
type Imports<'a> = BTreeMap<&'a Module, BTreeMap<&'a Module, BTreeSet<&'a str>>>;

/// Fails with the groups of files that import each other.
///
/// # Errors
/// If there is a circle, or a source cannot be read.
pub(crate) fn check() -> Result<(), String> {
    let mut found = Vec::new();
    let mut crates = entries(Path::new("crates"))?;
    crates.push(PathBuf::from("xtask"));
    let mut files = 0;
    for path in crates {
        let sources = Sources::read(&path.join("src"))?;
        files += sources.files.len();
        let imports = sources.imports();
        found.extend(circles(&imports).iter().map(|circle| sources.describe(circle, &imports)));
    }
    if found.is_empty() {
        println!("{files} files, no circle of imports");
        return Ok(());
    }
    Err(format!(
        "{} circles of imports; move the items that both files need into a file below them:\n{}",
        found.len(),
        found.join("\n")
    ))
}

impl Sources {
    /// Reads all files below `src`.
    fn read(src: &Path) -> Result<Self, String> {
        let mut sources = Self::default();
        sources.collect(src, &[])?;
        for (module, path) in sources.files.clone() {
            let text = fs::read_to_string(&path)
                .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
            let tokens = text.parse().map_err(|error| format!("{} is not Rust: {error}", path.display()))?;
            sources.scan(&module, &module, tokens);
        }
        let tests = std::mem::take(&mut sources.tests);
        sources.files.retain(|module, _| !tests.iter().any(|test| module.starts_with(test)));
        Ok(sources)
    }

    /// Lists the files of a folder; `lib.rs`, `main.rs` and `mod.rs` are the folder's own module.
    fn collect(&mut self, folder: &Path, module: &[String]) -> Result<(), String> {
        for path in entries(folder)? {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let inner = || [module, std::slice::from_ref(&name)].concat();
            if path.is_dir() {
                self.collect(&path, &inner())?;
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let own = ["lib", "main", "mod"].contains(&name.as_str());
                self.files.insert(if own { module.to_vec() } else { inner() }, path);
            }
        }
        Ok(())
    }

    /// Adds what the tokens of `file` name; `module` is the module that they stand in, an inline one included.
    fn scan(&mut self, file: &Module, module: &Module, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut index = 0;
        let mut public = false;
        while index < tokens.len() {
            let word = word(&tokens[index]);
            if is_test_attribute(&tokens, index) {
                let end = end_of_item(&tokens, index);
                self.note_test_module(module, &tokens[index..end]);
                index = end;
            } else if word.as_deref() == Some("use") {
                let end = end_of_item(&tokens, index);
                for (path, name) in use_tree(&tokens[index + 1..end - 1], &[]) {
                    self.note_use(file, module, &path, name, public);
                }
                index = end;
            } else if word.as_deref() == Some("mod")
                && matches!(tokens.get(index + 2), Some(TokenTree::Group(_)))
            {
                let inner = [module.as_slice(), &[tokens[index + 1].to_string()]].concat();
                let TokenTree::Group(body) = &tokens[index + 2] else { return };
                self.scan(file, &inner, body.stream());
                index += 3;
            } else if let TokenTree::Group(group) = &tokens[index] {
                self.scan(file, module, group.stream());
                // `pub(crate) use`: the parentheses belong to the visibility.
                public &= group.delimiter() == Delimiter::Parenthesis;
                index += 1;
            } else {
                let (path, next) = path_at(&tokens, index);
                let joined = index > 0
                    && matches!(&tokens[index - 1], TokenTree::Punct(mark) if mark.as_char() == ':');
                if path.len() > 1 && !joined {
                    let path = self.absolute(module, &path);
                    self.named.entry(file.clone()).or_default().extend(path);
                }
                public = word.as_deref() == Some("pub");
                index = next;
            }
        }
    }

    fn note_test_module(&mut self, module: &Module, item: &[TokenTree]) {
        let name = item.windows(2).find(|pair| word(&pair[0]).as_deref() == Some("mod"));
        self.tests.extend(name.map(|pair| [module.as_slice(), &[pair[1].to_string()]].concat()));
    }

    fn note_use(&mut self, file: &Module, module: &Module, path: &[String], name: String, public: bool) {
        let Some(path) = self.absolute(module, path) else { return };
        if public {
            self.reexports.insert([module.as_slice(), &[name]].concat(), path);
        } else {
            self.named.entry(file.clone()).or_default().insert(path);
        }
    }

    /// Returns `path` below the crate's root, or `None` for a path of another crate or of a type.
    fn absolute(&self, module: &Module, path: &[String]) -> Option<Module> {
        let supers = path.iter().take_while(|word| *word == "super").count();
        match path.first()?.as_str() {
            "crate" => Some(path[1..].to_vec()),
            "self" => Some([module.as_slice(), &path[1..]].concat()),
            "super" => Some([&module[..module.len().checked_sub(supers)?], &path[supers..]].concat()),
            child => {
                let inner = [module.as_slice(), &[child.to_owned()]].concat();
                self.files.contains_key(&inner).then(|| [module.as_slice(), path].concat())
            }
        }
    }

    /// Returns the file that defines the item at `path`.
    fn definition(&self, path: &Module) -> Option<&Module> {
        let mut path = path.clone();
        for _ in 0..MAX_REEXPORTS {
            let reexport =
                (0..=path.len()).rev().find_map(|end| Some((end, self.reexports.get(&path[..end])?)));
            let Some((end, target)) = reexport else { break };
            path = [target.as_slice(), &path[end..]].concat();
        }
        (0..=path.len()).rev().find_map(|end| Some(self.files.get_key_value(&path[..end])?.0))
    }

    fn imports(&self) -> Imports<'_> {
        let mut imports = Imports::new();
        for file in self.files.keys() {
            let of_file = imports.entry(file).or_default();
            for path in self.named.get(file).into_iter().flatten() {
                let Some(other) = self.definition(path).filter(|other| *other != file) else { continue };
                of_file.entry(other).or_default().extend(path.last().map(String::as_str));
            }
        }
        imports
    }

    /// Lists the imports between the files of a circle.
    fn describe(&self, circle: &BTreeSet<&Module>, imports: &Imports<'_>) -> String {
        let mut text = String::new();
        for file in circle {
            text += &format!("{}\n", self.files[*file].display());
            for (other, items) in imports[file].iter().filter(|(other, _)| circle.contains(*other)) {
                let items: Vec<_> = items.iter().copied().collect();
                text += &format!("    -> {}: {}\n", self.files[*other].display(), items.join(", "));
            }
        }
        text
    }
}

/// Returns the groups of files each of which imports every other one, if need be through others of its group.
fn circles<'a>(imports: &Imports<'a>) -> BTreeSet<BTreeSet<&'a Module>> {
    let reached: BTreeMap<_, _> = imports.keys().map(|file| (*file, reached_from(file, imports))).collect();
    let circle = |file: &'a Module| -> BTreeSet<_> {
        reached[file].iter().copied().filter(|other| reached[other].contains(file)).collect()
    };
    imports.keys().copied().map(circle).filter(|circle| !circle.is_empty()).collect()
}

/// Returns the files that `file` imports, directly or through others; itself if a circle leads back to it.
fn reached_from<'a>(file: &'a Module, imports: &Imports<'a>) -> BTreeSet<&'a Module> {
    let mut reached = BTreeSet::new();
    let mut open = vec![file];
    while let Some(file) = open.pop() {
        open.extend(imports[file].keys().copied().filter(|other| reached.insert(*other)));
    }
    reached
}

/// Returns the entries of a folder in order of their names.
fn entries(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let failed = |error: std::io::Error| format!("cannot read {}: {error}", folder.display());
    let mut paths: Vec<_> = fs::read_dir(folder)
        .map_err(failed)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<_, _>>()
        .map_err(failed)?;
    paths.sort();
    Ok(paths)
}

fn word(token: &TokenTree) -> Option<String> {
    match token {
        TokenTree::Ident(word) => Some(word.to_string()),
        _ => None,
    }
}

/// Returns true at the `#` of `#[cfg(test)]` and of conditions that contain `test`, negated ones excepted.
fn is_test_attribute(tokens: &[TokenTree], index: usize) -> bool {
    let (Some(TokenTree::Punct(mark)), Some(TokenTree::Group(group))) =
        (tokens.get(index), tokens.get(index + 1))
    else {
        return false;
    };
    let text = group.stream().to_string();
    let mut words = text.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
    mark.as_char() == '#'
        && text.starts_with("cfg")
        && !text.contains("not")
        && words.any(|word| word == "test")
}

/// Returns the index after the item at `index`: after its semicolon or its braces.
fn end_of_item(tokens: &[TokenTree], index: usize) -> usize {
    let in_use = word(&tokens[index]).as_deref() == Some("use");
    let ends = |token: &TokenTree| match token {
        TokenTree::Punct(mark) => mark.as_char() == ';',
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace && !in_use,
        _ => false,
    };
    // The braces of `#[cfg(test)] use a::{b, c};` are no end either.
    let in_use = |at: usize| tokens[index..at].iter().any(|token| word(token).as_deref() == Some("use"));
    (index..tokens.len())
        .find(|at| ends(&tokens[*at]) && (matches!(tokens[*at], TokenTree::Punct(_)) || !in_use(*at)))
        .map_or(tokens.len(), |end| end + 1)
}

/// Returns the path that begins at `index`, `a::b::c`, and the index after it; an empty path at any other token.
fn path_at(tokens: &[TokenTree], mut index: usize) -> (Module, usize) {
    let mut path = Module::new();
    while let Some(name) = tokens.get(index).and_then(word) {
        path.push(name);
        index += 1;
        let colon =
            |at: usize| matches!(tokens.get(at), Some(TokenTree::Punct(mark)) if mark.as_char() == ':');
        if !(colon(index) && colon(index + 1) && tokens.get(index + 2).and_then(word).is_some()) {
            return (path, index);
        }
        index += 2;
    }
    (path, index + 1)
}

/// Returns the paths of a `use` tree and the names that they get.
fn use_tree(tokens: &[TokenTree], prefix: &[String]) -> Vec<(Module, String)> {
    let comma = |token: &TokenTree| matches!(token, TokenTree::Punct(mark) if mark.as_char() == ',');
    let mut uses = Vec::new();
    for tree in tokens.split(comma).filter(|tree| !tree.is_empty()) {
        let mut path = prefix.to_vec();
        let mut name = None;
        let mut group = None;
        for (index, token) in tree.iter().enumerate() {
            match token {
                TokenTree::Ident(word) if word == "as" => {
                    name = tree.get(index + 1).map(ToString::to_string);
                    break;
                }
                TokenTree::Ident(word) if word != "self" || path.is_empty() => path.push(word.to_string()),
                TokenTree::Group(inner) => group = Some(inner.stream().into_iter().collect::<Vec<_>>()),
                _ => {}
            }
        }
        match group {
            Some(inner) => uses.extend(use_tree(&inner, &path)),
            None => {
                let name = name.or_else(|| path.last().cloned()).unwrap_or_default();
                uses.push((path, name));
            }
        }
    }
    uses
}

#[cfg(test)]
mod tests {
    use super::*;

    fn circles_of(files: &[(&str, &str)]) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let sources = Sources::read(folder.path()).unwrap();
        let name = |module: &&Module| if module.is_empty() { "root".to_owned() } else { module.join("/") };
        circles(&sources.imports())
            .iter()
            .map(|circle| circle.iter().map(name).collect::<Vec<_>>().join(" "))
            .collect()
    }

    #[test]
    fn a_circle_is_found_through_uses_paths_and_reexports() {
        let root = "mod a; mod b; mod c; pub use b::B;";
        let b = ("b/mod.rs", "pub struct B; fn f() { super::c::g::<u8>() }");
        let c = "pub fn g() {}";
        assert_eq!(circles_of(&[("lib.rs", root), ("a.rs", "use crate::B;"), b, ("c.rs", c)]), [""; 0]);
        let back = "use crate::{a::{self, A}, B as Other}; pub fn g() {}";
        assert_eq!(
            circles_of(&[("lib.rs", root), ("a.rs", "pub struct A; use crate::B;"), b, ("c.rs", back)]),
            ["a b c"]
        );
    }

    #[test]
    fn a_parent_that_only_declares_and_reexports_is_in_no_circle() {
        let child = ("a/b.rs", "use super::c::C; pub struct B;");
        let other = ("a/c.rs", "pub struct C;");
        assert_eq!(
            circles_of(&[("a/mod.rs", "mod b; mod c; pub(crate) use b::B; pub use c::C;"), child, other]),
            [""; 0]
        );
        let own = "mod b; mod c; pub struct Own; fn f() { b::B; }";
        assert_eq!(
            circles_of(&[("a/mod.rs", own), ("a/b.rs", "use super::Own; pub struct B;"), other]),
            ["a a/b"]
        );
    }

    #[test]
    fn tests_comments_and_strings_are_no_imports() {
        let a = "//! See [`crate::b`].\npub const A: &str = \"crate::b::B\"; // crate::b::B\n#[cfg(test)]\nmod tests { use crate::b::B; }\n\
                 #[cfg(test)] use crate::b::{B, C};\n#[cfg(test)] mod more;";
        let files = [
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", a),
            ("a/more.rs", "use crate::b::B;"),
            ("b.rs", "use crate::a::A;"),
        ];
        assert_eq!(circles_of(&files), [""; 0]);
    }
}
