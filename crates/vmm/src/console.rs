//! A guest's serial console: a file the monitor appends to, kept small by punching out what is old.
//!
//! A hostile guest can write without end. Holes in front keep offsets true for readers, lose nothing of the tail and
//! need no co-operation of the monitor. While no server runs, nothing is punched.

use rustix::fs::FallocateFlags;
use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::MetadataExt,
    path::Path,
};

/// Bytes that stay readable.
pub(crate) const KEPT: u64 = 256 << 10;
/// Allocated bytes that make it worth a system call.
const TRIGGER: u64 = 1 << 20;

/// Punches out all but the last [`KEPT`] bytes when the file occupies more than 1 MiB. Blocks on the file system.
pub(crate) fn bound(path: &Path) -> io::Result<()> {
    let metadata = path.metadata()?;
    if metadata.blocks() * 512 <= TRIGGER {
        return Ok(());
    }
    let file = File::options().write(true).open(path)?;
    let old = metadata.len().saturating_sub(KEPT) / 4096 * 4096;
    match rustix::fs::fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, old) {
        // A file system without holes: start afresh, the monitor appends at the new end.
        Err(rustix::io::Errno::OPNOTSUPP) => file.set_len(0),
        done => Ok(done?),
    }
}

/// The last `bytes` of a text file, whole lines where there are any; empty when it can't be read.
pub(crate) fn tail(path: &Path, bytes: u64) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let start = file.metadata()?.len().saturating_sub(bytes);
        file.seek(SeekFrom::Start(start))?;
        let mut end = Vec::new();
        file.take(bytes).read_to_end(&mut end)?;
        Ok(end)
    };
    String::from_utf8_lossy(&read().unwrap_or_default()).replace(['\0', '\r'], "")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_flood_is_cut_to_its_tail_and_writing_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let mut writer = File::options().create(true).append(true).open(&path).unwrap();
        writer.write_all(&vec![b'x'; 3 << 20]).unwrap();
        writer.write_all(b"\nlast words\n").unwrap();
        writer.sync_all().unwrap();
        bound(&path).unwrap();
        assert!(path.metadata().unwrap().blocks() * 512 <= KEPT + 8192);
        writer.write_all(b"and more\n").unwrap();
        assert!(tail(&path, 64).ends_with("\nlast words\nand more\n"));
    }

    #[test]
    fn a_missing_file_has_no_tail() {
        assert_eq!(tail(Path::new("/nonexistent"), 10), "");
    }
}
