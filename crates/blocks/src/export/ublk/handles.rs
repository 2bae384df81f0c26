//! Who has a block device open.
//!
//! The kernel keeps no count that can be read. As root every process's descriptors and mappings can be looked
//! through; mounts and other holders inside of the kernel show by an exclusive open that is refused.

use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Open handles of the block device at `node`: descriptors, processes that map it without one, kernel holders.
pub(super) fn count(node: &Path) -> u32 {
    let Ok(metadata) = fs::metadata(node) else { return 0 };
    if !metadata.file_type().is_block_device() {
        return 0;
    }
    let (number, mut found) = (metadata.rdev(), 0);
    let mapped = format!(" {}\n", node.display());
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        if !process.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit) {
            continue;
        }
        let handles = descriptors(&process.path())
            .filter(|fd| {
                fs::metadata(fd).is_ok_and(|m| m.file_type().is_block_device() && m.rdev() == number)
            })
            .count();
        let handles = u32::try_from(handles).unwrap_or(u32::MAX);
        let maps =
            || fs::read_to_string(process.path().join("maps")).is_ok_and(|maps| maps.contains(&mapped));
        found += if handles == 0 { u32::from(maps()) } else { handles };
    }
    found + u32::from(held_by_the_kernel(node))
}

fn descriptors(process: &Path) -> impl Iterator<Item = PathBuf> {
    // A process that ended meanwhile has none.
    fs::read_dir(process.join("fd")).into_iter().flatten().flatten().map(|entry| entry.path())
}

fn held_by_the_kernel(node: &Path) -> bool {
    let exclusive = File::options().read(true).custom_flags(libc::O_EXCL | libc::O_NONBLOCK).open(node);
    exclusive.is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY))
}
