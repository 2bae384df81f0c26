//! What is in a directory, with all metadata, for comparing.

use aenv_overlaybd::{Layer, Stack};
use sha2::{Digest as _, Sha256};
use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs,
    os::unix::{
        ffi::OsStrExt as _,
        fs::{FileExt as _, FileTypeExt as _, MetadataExt as _},
    },
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) kind: char,
    pub(crate) mode: u32,
    pub(crate) owner: (u32, u32),
    /// `None` for directories whose time no archive says.
    pub(crate) time: Option<(i64, i64)>,
    pub(crate) size: u64,
    /// Hash of the content, or a link's target.
    pub(crate) content: Vec<u8>,
    pub(crate) device: u64,
    pub(crate) links: u64,
    /// The first of all names of the same file.
    pub(crate) same_as: PathBuf,
    pub(crate) attributes: BTreeMap<Vec<u8>, Vec<u8>>,
}

pub(crate) type Tree = BTreeMap<PathBuf, Node>;

/// Reads everything below `root`; times of directories not in `dated` are left out.
pub(crate) fn read_tree(root: &Path, dated: &dyn Fn(&Path) -> bool) -> Tree {
    let mut tree = Tree::new();
    let mut first: BTreeMap<u64, PathBuf> = BTreeMap::new();
    let mut todo = vec![root.to_owned()];
    let mut all = Vec::new();
    while let Some(path) = todo.pop() {
        if fs::symlink_metadata(&path).unwrap().is_dir() {
            todo.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
        all.push(path);
    }
    all.sort();
    for path in all {
        let name = path.strip_prefix(root).unwrap().to_owned();
        if name == Path::new("lost+found") {
            continue;
        }
        let meta = fs::symlink_metadata(&path).unwrap();
        let kind = meta.file_type();
        let (kind, content, size) = if kind.is_dir() {
            ('d', Vec::new(), 0)
        } else if kind.is_symlink() {
            ('l', fs::read_link(&path).unwrap().as_os_str().as_bytes().to_vec(), meta.size())
        } else if kind.is_char_device() {
            ('c', Vec::new(), 0)
        } else if kind.is_block_device() {
            ('b', Vec::new(), 0)
        } else if kind.is_fifo() {
            ('p', Vec::new(), 0)
        } else {
            ('f', Sha256::digest(fs::read(&path).unwrap()).to_vec(), meta.size())
        };
        let names: Vec<_> = xattr::list(&path).map(Iterator::collect).unwrap_or_default();
        let value = |name: &OsStr| xattr::get(&path, name).unwrap().unwrap_or_default();
        let attributes = names.iter().map(|name| (name.as_bytes().to_vec(), value(name))).collect();
        let same_as = first.entry(meta.ino()).or_insert_with(|| name.clone()).clone();
        let timed = kind != 'd' || dated(&name);
        let node = Node {
            kind,
            mode: meta.mode() & 0o7777,
            owner: (meta.uid(), meta.gid()),
            time: timed.then(|| (meta.mtime(), meta.mtime_nsec())),
            size,
            content,
            device: meta.rdev(),
            links: if kind == 'd' { 0 } else { meta.nlink() },
            same_as,
            attributes,
        };
        tree.insert(name, node);
    }
    tree
}

/// Says how two trees differ, at most ten lines.
pub(crate) fn difference(ours: &Tree, theirs: &Tree) -> String {
    let names: std::collections::BTreeSet<_> = ours.keys().chain(theirs.keys()).collect();
    names
        .into_iter()
        .filter(|name| ours.get(*name) != theirs.get(*name))
        .take(10)
        .map(|name| format!("{name:?}\n  ours:   {:?}\n  theirs: {:?}\n", ours.get(name), theirs.get(name)))
        .collect()
}

/// A stack of layer files as a sparse raw file.
pub(crate) fn export(layers: &[PathBuf], size: u64, to: &Path) {
    let open = |path: &PathBuf| Layer::open(Arc::new(fs::File::open(path).unwrap())).unwrap();
    let stack = Stack::new(layers.iter().map(open).collect(), size).unwrap();
    let file = fs::File::create(to).unwrap();
    file.set_len(size).unwrap();
    let mut at = 0;
    while let Some(start) = stack.next_data(at) {
        let end = stack.next_hole(start);
        at = start;
        while at < end {
            let mut buf = vec![0; usize::try_from((end - at).min(1 << 20)).unwrap()];
            stack.read_at(&mut buf, at).unwrap();
            file.write_all_at(&buf, at).unwrap();
            at += buf.len() as u64;
        }
    }
}

/// e2fsck finds nothing.
pub(crate) fn assert_clean(disk: &Path) {
    let out = Command::new("e2fsck").args(["-f", "-n"]).arg(disk).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{text}");
}

/// A mounted disk.
pub(crate) struct Mounted {
    pub(crate) at: tempfile::TempDir,
}

impl Mounted {
    pub(crate) fn new(disk: &Path, options: &str) -> Self {
        let at = tempfile::tempdir().unwrap();
        let out = Command::new("mount").args(["-o", options]).arg(disk).arg(at.path()).output().unwrap();
        assert!(out.status.success(), "mount: {}", String::from_utf8_lossy(&out.stderr));
        Self { at }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.at.path()).status();
    }
}
