//! Removing a tree of any shape. A hostile tree can be deeper than a stack or the descriptor limit allows, and the
//! agent must not die of it: below [`DEPTH`] levels a directory is moved up to the top and dealt with in a later pass.

use std::{ffi::CStr, io, path::Path};

use rustix::{
    fd::OwnedFd,
    fs::{AtFlags, Dir, FileType, Mode, OFlags, open, openat, renameat, unlinkat},
    io::Errno,
};

const DEPTH: usize = 64;

/// Each pass takes [`DEPTH`] levels. Somebody who keeps adding faster than this removes gets an error.
const PASSES: usize = 4096;

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Removes the directory `path` and everything below it. Links are removed, not followed.
pub(super) fn remove_tree(path: &Path) -> io::Result<()> {
    let top = open(path, DIRECTORY, Mode::empty())?;
    let mut moved = 0;
    for _ in 0..PASSES {
        let before = moved;
        empty(&top, &top, 0, &mut moved)?;
        if moved == before {
            match std::fs::remove_dir(path) {
                // Something was added behind us.
                Err(err) if err.raw_os_error() == Some(libc::ENOTEMPTY) => {}
                done => return done,
            }
        }
    }
    Err(io::Error::from_raw_os_error(libc::ENOTEMPTY))
}

fn empty(dir: &OwnedFd, top: &OwnedFd, depth: usize, moved: &mut u64) -> io::Result<()> {
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        let removed = match entry.file_type() {
            FileType::Directory => remove_dir(dir, name, top, depth, moved),
            _ => match unlinkat(dir, name, AtFlags::empty()) {
                // A filesystem that does not tell the type, or one that has just changed.
                Err(Errno::ISDIR | Errno::PERM) => remove_dir(dir, name, top, depth, moved),
                other => other.map_err(Into::into),
            },
        };
        match removed {
            Err(err) if err.kind() != io::ErrorKind::NotFound => return Err(err),
            _ => {}
        }
    }
    Ok(())
}

fn remove_dir(dir: &OwnedFd, name: &CStr, top: &OwnedFd, depth: usize, moved: &mut u64) -> io::Result<()> {
    if depth == DEPTH {
        *moved += 1;
        return Ok(renameat(dir, name, top, format!(".aenv-removed-{moved}"))?);
    }
    let child = openat(dir, name, DIRECTORY, Mode::empty())?;
    empty(&child, top, depth + 1, moved)?;
    match unlinkat(dir, name, AtFlags::REMOVEDIR) {
        // Something was added behind us: the next pass will find it.
        Err(Errno::NOTEMPTY | Errno::EXIST) => {
            *moved += 1;
            Ok(())
        }
        other => Ok(other?),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_tree_deeper_than_any_stack_goes_away() {
        let base = tempfile::tempdir().expect("a directory");
        let root = base.path().join("root");
        fs::create_dir(&root).expect("made");
        let mut dir = open(&root, DIRECTORY, Mode::empty()).expect("opened");
        for level in 0..3000 {
            let _ = rustix::fs::mkdirat(&dir, format!("file-{level}"), Mode::RWXU);
            rustix::fs::mkdirat(&dir, "d", Mode::RWXU).expect("made");
            dir = openat(&dir, "d", DIRECTORY, Mode::empty()).expect("opened");
        }
        let outside = base.path().join("outside");
        fs::write(&outside, "stays").expect("written");
        rustix::fs::symlinkat(&outside, &dir, "link").expect("linked");
        remove_tree(&root).expect("removed");
        assert!(!root.exists() && outside.exists());
    }
}
