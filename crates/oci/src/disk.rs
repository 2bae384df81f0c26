//! From a tree of files to a raw ext4 disk, by `mke2fs -d`.
//!
//! The feature list is spelled out, so that the result doesn't depend on the host's mke2fs.conf. Inode tables are
//! marked as zeroed: they are holes in a fresh sparse file, and a guest that zeroes them in the background would dirty
//! its disk for nothing. The journal isn't written either, for the same reason.

use crate::{
    Error,
    command::{Context, Tool},
    error::During as _,
};
use std::{
    collections::HashSet,
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

const BLOCK: u64 = 4096;
const INODE: u64 = 256;
/// One inode for this much free space, mke2fs's usual ratio.
const BYTES_PER_INODE: u64 = 16 << 10;
const JOURNAL_MIB: u64 = 16;
const LABEL: &str = "aenv-root";
const FEATURES: &str = "none,has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,flex_bg,sparse_super,\
                        large_file,huge_file,dir_nlink,extra_isize,metadata_csum";
const DEADLINE: Duration = Duration::from_secs(900);

/// What a tree holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Content {
    /// Blocks of 4 KiB for data and directories.
    pub(crate) blocks: u64,
    pub(crate) inodes: u64,
}

/// Counts a tree as ext4 will store it. Blocking.
pub(crate) fn measure(tree: &Path) -> Result<Content, Error> {
    let mut content = Content::default();
    let mut linked = HashSet::new();
    let mut todo: Vec<PathBuf> = vec![tree.to_owned()];
    while let Some(directory) = todo.pop() {
        let step = || format!("read the unpacked directory {}", directory.display());
        content.inodes += 1;
        let mut names = 0;
        for entry in fs::read_dir(&directory).during(step)? {
            let entry = entry.during(step)?;
            names += 8 + (entry.file_name().len() as u64).next_multiple_of(4);
            let meta = entry.metadata().during(step)?;
            if meta.is_dir() {
                todo.push(entry.path());
                continue;
            }
            if meta.nlink() > 1 && !linked.insert(meta.ino()) {
                continue;
            }
            content.inodes += 1;
            // Short symbolic links live in the inode. A sparse file's holes stay holes.
            let stored = if meta.is_file() { meta.len().min(meta.blocks() * 512 + BLOCK) } else { 0 };
            let long_link = u64::from(meta.is_symlink() && meta.len() >= 60);
            content.blocks += stored.div_ceil(BLOCK) + long_link;
        }
        content.blocks += names.div_ceil(BLOCK).max(1);
    }
    Ok(content)
}

/// How large a file system is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// Whole MiB.
    pub(crate) bytes: u64,
    pub(crate) inodes: u64,
}

impl Geometry {
    /// For `content` and at least `free_mib` MiB beyond it.
    pub(crate) fn new(content: Content, free_mib: u64) -> Self {
        let free = free_mib << 20;
        let inodes = content.inodes + content.inodes / 8 + free / BYTES_PER_INODE + 1024;
        // An eighth for extent trees and attribute blocks of the content; 2 % for bitmaps, descriptors and backups.
        let data = (content.blocks + content.inodes / 4) * BLOCK;
        let sum = data + data / 8 + free + inodes * INODE + (JOURNAL_MIB << 20) + (8 << 20);
        Self { bytes: (sum + sum / 50).next_multiple_of(1 << 20), inodes }
    }
}

/// Makes the disk `raw` of the files in `tree`.
pub(crate) async fn make(
    tree: &Path,
    raw: &Path,
    geometry: Geometry,
    context: &Context,
) -> Result<(), Error> {
    let file = fs::File::create_new(raw).during(|| format!("create {}", raw.display()))?;
    file.set_len(geometry.bytes).during(|| format!("size {} to {} bytes", raw.display(), geometry.bytes))?;
    let tool = Tool::new("mke2fs", "e2fsprogs", DEADLINE).command(|command| {
        // Debian has it in sbin, which isn't in everybody's path.
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
        command.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-m", "0", "-L", LABEL]);
        command.args([
            "-O",
            FEATURES,
            "-E",
            "root_owner=0:0,lazy_itable_init=0,lazy_journal_init=1,nodiscard",
        ]);
        command.args(["-J", &format!("size={JOURNAL_MIB}"), "-N", &geometry.inodes.to_string()]);
        command.arg("-d").arg(tree).arg(raw);
    });
    tool.run(context, |_| None).await?.check()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn hard_links_count_once_and_links_and_directories_as_ext4_stores_them() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("data"), vec![1; 10_000]).unwrap();
        fs::hard_link(at("data"), at("again")).unwrap();
        std::os::unix::fs::symlink("short", at("short")).unwrap();
        std::os::unix::fs::symlink("x".repeat(100), at("long")).unwrap();
        fs::create_dir(at("sub")).unwrap();
        fs::write(at("sub/empty"), "").unwrap();
        fs::File::create(at("sub/hole")).unwrap().set_len(1 << 30).unwrap();
        assert_eq!(measure(dir.path()).unwrap(), Content { blocks: 3 + 1 + 2 + 1, inodes: 7 });
    }

    proptest! {
        #[test]
        fn a_disk_is_larger_than_content_and_free_space_but_not_by_much(
            blocks in 0u64..10_000_000, inodes in 1u64..2_000_000, free in 64u64..100_000,
        ) {
            let geometry = Geometry::new(Content { blocks, inodes }, free);
            let least = blocks * BLOCK + (free << 20) + geometry.inodes * INODE;
            prop_assert!(geometry.bytes > least);
            prop_assert!(geometry.bytes < least + least / 4 + inodes * BLOCK + (64 << 20));
            prop_assert!(geometry.inodes > inodes);
            prop_assert_eq!(geometry.bytes % (1 << 20), 0);
        }
    }
}
