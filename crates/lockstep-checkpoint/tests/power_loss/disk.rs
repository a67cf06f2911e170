//! Model of a disk with a cache: files and names are durable once they are synced; before that each may be lost or
//! kept.
//!
//! Only POSIX guarantees are assumed. Syncing a file does not persist its name. Syncing a directory persists the names
//! in it, but no contents. Unsynced changes reach the disk in any order. A rename is atomic: it is kept or lost as a
//! whole.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use super::record::Call;

type Inode = usize;

/// Bytes that a disk writes atomically.
const PAGE: usize = 4096;

/// Part of the unsynced changes that a power loss discards.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Forgets {
    /// Loses everything unsynced.
    Everything,
    /// Loses nothing: the process was killed.
    Nothing,
    /// Loses unsynced file contents: files are truncated to their last synced contents. Keeps all names.
    Contents,
    /// Loses unsynced data, but keeps the sizes of files, filled with zeros.
    ContentsToZeros,
    /// Loses unsynced names, but keeps all contents.
    Names,
    /// Loses everything unsynced but renames.
    AllButRenames,
    /// Loses unsynced renames only.
    Renames,
    /// Loses each unsynced name, and each unsynced page of a file, with a probability of one half.
    AtRandom(u64),
}

impl Forgets {
    pub(crate) fn all(seeds: u64) -> impl Iterator<Item = Self> {
        [
            Self::Everything,
            Self::Nothing,
            Self::Contents,
            Self::ContentsToZeros,
            Self::Names,
            Self::AllButRenames,
            Self::Renames,
        ]
        .into_iter()
        .chain((0..seeds).map(Self::AtRandom))
    }
}

/// Change of the names in one directory.
#[derive(Debug, Clone)]
enum Change {
    Link(String, Inode),
    Unlink(String),
    /// Old name and new name.
    Rename(String, String, Inode),
    Exchange([(String, Inode); 2]),
}

impl Change {
    fn apply(&self, names: &mut BTreeMap<String, Inode>) {
        match self {
            Self::Link(name, inode) => drop(names.insert(name.clone(), *inode)),
            Self::Unlink(name) => drop(names.remove(name)),
            Self::Rename(from, to, inode) => {
                if names.get(from) == Some(inode) {
                    names.remove(from);
                }
                names.insert(to.clone(), *inode);
            }
            Self::Exchange(pairs) => {
                for (name, inode) in pairs {
                    names.insert(name.clone(), *inode);
                }
            }
        }
    }

    fn is_rename(&self) -> bool {
        matches!(self, Self::Rename(..) | Self::Exchange(_))
    }
}

#[derive(Debug, Default)]
struct Node {
    is_directory: bool,
    /// Contents as the process sees them, and `synced_bytes` as of the last sync.
    bytes: Vec<u8>,
    synced_bytes: Vec<u8>,
    names: BTreeMap<String, Inode>,
    synced_names: BTreeMap<String, Inode>,
    changes: Vec<Change>,
}

/// Directories and files by path; the contents of a directory are `None`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct Tree(BTreeMap<String, Option<Vec<u8>>>);

impl Tree {
    pub(crate) fn write(&self, root: &Path) {
        std::fs::create_dir(root).unwrap();
        for (path, bytes) in &self.0 {
            match bytes {
                Some(bytes) => std::fs::write(root.join(path), bytes).unwrap(),
                None => std::fs::create_dir(root.join(path)).unwrap(),
            }
        }
    }

    pub(crate) fn read(root: &Path) -> Self {
        fn visit(tree: &mut Tree, dir: &Path, above: &str) {
            for entry in std::fs::read_dir(dir).unwrap() {
                let entry = entry.unwrap();
                let name = format!("{above}{}", entry.file_name().into_string().unwrap());
                if entry.path().is_dir() {
                    tree.0.insert(name.clone(), None);
                    visit(tree, &entry.path(), &format!("{name}/"));
                } else {
                    tree.0.insert(name, Some(std::fs::read(entry.path()).unwrap()));
                }
            }
        }
        let mut tree = Self::default();
        visit(&mut tree, root, "");
        tree
    }
}

pub(crate) struct Disk {
    root: String,
    nodes: Vec<Node>,
    /// Open files, with the offset of the next write.
    open: HashMap<i64, (Inode, usize)>,
    syncs: usize,
}

impl Disk {
    /// Creates an empty disk, which the process sees below `root`.
    pub(crate) fn new(root: &Path) -> Self {
        let top = Node { is_directory: true, ..Node::default() };
        let root = root.to_str().unwrap().to_owned();
        Self { root, nodes: vec![top], open: HashMap::new(), syncs: 0 }
    }

    pub(crate) fn syncs(&self) -> usize {
        self.syncs
    }

    /// Applies a call. Returns true if it changes something on this disk.
    ///
    /// # Panics
    /// If the model does not implement the call.
    pub(crate) fn apply(&mut self, call: &Call) -> bool {
        match call.name.as_str() {
            "open" | "openat" | "creat" => self.opened(call),
            "close" => self.open.remove(&call.number(0).unwrap()).map(|_| false).unwrap_or(false),
            "write" => {
                let Some((inode, at)) = self.open.get_mut(&call.number(0).unwrap()) else { return false };
                let written = &call.bytes()[..call.result as usize];
                let bytes = &mut self.nodes[*inode].bytes;
                bytes.resize(bytes.len().max(*at + written.len()), 0);
                bytes[*at..*at + written.len()].copy_from_slice(written);
                *at += written.len();
                true
            }
            "fallocate" => {
                let Some((inode, _)) = self.open.get(&call.number(0).unwrap()) else { return false };
                assert_eq!(call.text(1), "0", "{call}");
                let end = (call.number(2).unwrap() + call.number(3).unwrap()) as usize;
                let bytes = &mut self.nodes[*inode].bytes;
                bytes.resize(bytes.len().max(end), 0);
                true
            }
            "fsync" | "fdatasync" => {
                let Some((inode, _)) = self.open.get(&call.number(0).unwrap()) else { return false };
                let node = &mut self.nodes[*inode];
                node.synced_bytes.clone_from(&node.bytes);
                node.synced_names.clone_from(&node.names);
                node.changes.clear();
                self.syncs += 1;
                true
            }
            "mkdir" | "mkdirat" => self.with_place(call, 0, |disk, dir, name| {
                let inode = disk.add(true);
                disk.change(dir, Change::Link(name, inode));
            }),
            "unlink" | "unlinkat" | "rmdir" => {
                self.with_place(call, 0, |disk, dir, name| disk.change(dir, Change::Unlink(name)))
            }
            "rename" | "renameat" | "renameat2" => self.renamed(call),
            "statx" | "newfstatat" | "stat" | "lstat" => false,
            _ => {
                let is_here = call.paths().any(|path| path.contains(&self.root))
                    || call.number(0).is_some_and(|number| self.open.contains_key(&number));
                assert!(!is_here, "a call that the model of the disk does not know: {call}");
                false
            }
        }
    }

    fn opened(&mut self, call: &Call) -> bool {
        let flags = call.arguments.iter().map(|argument| format!("{argument:?}")).collect::<String>();
        let Some((dir, name)) = self.place(call, 0) else { return false };
        let (inode, is_new) = match self.nodes[dir].names.get(&name) {
            _ if name.is_empty() => (dir, false),
            Some(inode) => (*inode, false),
            None => {
                assert!(flags.contains("O_CREAT"), "{call}: {name} is not there");
                let inode = self.add(false);
                self.change(dir, Change::Link(name, inode));
                (inode, true)
            }
        };
        let is_cut = flags.contains("O_TRUNC") && !self.nodes[inode].bytes.is_empty();
        if is_cut {
            self.nodes[inode].bytes.clear();
        }
        assert!(!flags.contains("O_APPEND"), "{call}");
        self.open.insert(call.result, (inode, 0));
        is_new || is_cut
    }

    fn renamed(&mut self, call: &Call) -> bool {
        let (Some((dir, from)), Some((to_dir, to))) = (self.place(call, 0), self.place(call, 1)) else {
            return false;
        };
        let inode = self.nodes[dir].names[&from];
        let other = self.nodes[to_dir].names.get(&to).copied();
        let is_exchange =
            call.arguments.iter().any(|argument| format!("{argument:?}").contains("RENAME_EXCHANGE"));
        match (is_exchange, other) {
            (true, Some(other)) if dir == to_dir => {
                self.change(dir, Change::Exchange([(from, other), (to, inode)]));
            }
            (true, _) => panic!("{call}: exchanges names of two directories"),
            (false, _) if dir == to_dir => self.change(dir, Change::Rename(from, to, inode)),
            (false, _) => {
                // A rename between directories may keep both names or neither.
                self.change(to_dir, Change::Link(to, inode));
                self.change(dir, Change::Unlink(from));
            }
        }
        true
    }

    fn add(&mut self, is_directory: bool) -> Inode {
        self.nodes.push(Node { is_directory, ..Node::default() });
        self.nodes.len() - 1
    }

    fn change(&mut self, dir: Inode, change: Change) {
        let node = &mut self.nodes[dir];
        change.apply(&mut node.names);
        node.changes.push(change);
    }

    fn with_place(&mut self, call: &Call, which: usize, work: impl FnOnce(&mut Self, Inode, String)) -> bool {
        let place = self.place(call, which);
        let is_here = place.is_some();
        if let Some((dir, name)) = place {
            work(self, dir, name);
        }
        is_here
    }

    /// Returns the directory and the name that path number `which` of a call refers to; `None` if it is not on this
    /// disk.
    fn place(&self, call: &Call, which: usize) -> Option<(Inode, String)> {
        let path = call.paths().nth(which)?;
        let (mut dir, relative) = if path.starts_with('/') {
            (0, path.strip_prefix(&self.root)?.trim_start_matches('/'))
        } else {
            // The path is relative to a directory descriptor, the argument before it.
            (self.open.get(&call.number(2 * which)?)?.0, path)
        };
        let mut parts = relative.split('/').peekable();
        while let Some(part) = parts.next() {
            if parts.peek().is_none() {
                return Some((dir, part.to_owned()));
            }
            dir = *self.nodes[dir].names.get(part)?;
        }
        None
    }

    /// Returns the files as the process sees them.
    pub(crate) fn as_seen(&self) -> Tree {
        self.after_loss(Forgets::Nothing)
    }

    /// Returns the files that exist after a power loss.
    pub(crate) fn after_loss(&self, forgets: Forgets) -> Tree {
        let mut random = Random(match forgets {
            Forgets::AtRandom(seed) => seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            _ => 1,
        });
        let mut tree = Tree::default();
        self.visit(0, "", forgets, &mut random, &mut tree);
        tree
    }

    fn visit(&self, dir: Inode, above: &str, forgets: Forgets, random: &mut Random, tree: &mut Tree) {
        let node = &self.nodes[dir];
        let mut names = node.synced_names.clone();
        for change in &node.changes {
            let is_kept = match forgets {
                Forgets::Everything | Forgets::Names => false,
                Forgets::Nothing | Forgets::Contents | Forgets::ContentsToZeros => true,
                Forgets::AllButRenames => change.is_rename(),
                Forgets::Renames => !change.is_rename(),
                Forgets::AtRandom(_) => random.flips(),
            };
            if is_kept {
                change.apply(&mut names);
            }
        }
        for (name, inode) in names {
            let path = format!("{above}{name}");
            // Directories form no cycle, because no directory is moved into itself.
            if self.nodes[inode].is_directory {
                tree.0.insert(path.clone(), None);
                self.visit(inode, &format!("{path}/"), forgets, random, tree);
            } else {
                tree.0.insert(path, Some(self.contents(inode, forgets, random)));
            }
        }
    }

    fn contents(&self, file: Inode, forgets: Forgets, random: &mut Random) -> Vec<u8> {
        let Node { bytes, synced_bytes, .. } = &self.nodes[file];
        match forgets {
            Forgets::Nothing | Forgets::Names => bytes.clone(),
            Forgets::Everything | Forgets::Contents | Forgets::AllButRenames | Forgets::Renames => {
                synced_bytes.clone()
            }
            Forgets::ContentsToZeros => {
                let mut found = synced_bytes.clone();
                found.resize(bytes.len(), 0);
                found
            }
            Forgets::AtRandom(_) => {
                let mut found = synced_bytes.clone();
                found.resize(if random.flips() { bytes.len() } else { found.len() }, 0);
                for (index, page) in found.chunks_mut(PAGE).enumerate() {
                    let new = bytes.get(index * PAGE..).unwrap_or_default();
                    if random.flips() {
                        let len = page.len().min(new.len());
                        page[..len].copy_from_slice(&new[..len]);
                    }
                }
                found
            }
        }
    }
}

/// The xorshift64 random number generator.
struct Random(u64);

impl Random {
    fn flips(&mut self) -> bool {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 & 1 == 1
    }
}
