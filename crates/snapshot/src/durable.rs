//! Files that are whole or absent, whatever happens.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    path::Path,
};

/// Replaces `path` with `content`: a temporary file beside it, synced, renamed, the directory synced.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let dir = path
        .parent()
        .ok_or_else(|| io::Error::other(format!("{} has no directory to be written in", path.display())))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = dir.join(format!(".{name}.tmp"));
    let written = (|| {
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).open(&temporary)?;
        file.write_all(content)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)
    })();
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written?;
    sync_dir(dir)
}

/// Makes the names in a directory durable.
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replacement_that_fails_leaves_the_old_content_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        replace(&path, b"one").unwrap();
        // A directory in the way of the temporary file makes the write fail.
        std::fs::create_dir(dir.path().join(".m.tmp")).unwrap();
        replace(&path, b"two").unwrap_err();
        assert_eq!(std::fs::read(&path).unwrap(), b"one");
        std::fs::remove_dir(dir.path().join(".m.tmp")).unwrap();
        replace(&path, b"two").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
