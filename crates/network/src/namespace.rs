//! Named network namespaces: files under one directory onto which a namespace is mounted.
//!
//! The directory is a private mount of its own, so that the mounts made in it aren't copied into other mount
//! namespaces, where they would keep dead namespaces alive.

use rustix::{
    io::Errno,
    mount::{MountPropagationFlags, UnmountFlags},
};
use std::{
    fs::{self, File},
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

/// File system type of a mounted namespace, from linux/magic.h.
const NSFS_MAGIC: i64 = 0x6e73_6673;

/// Makes `directory` and mounts it on itself, private, unless it already is a mount point.
pub(crate) fn prepare(directory: &Path) -> io::Result<PathBuf> {
    fs::create_dir_all(directory)?;
    let directory = directory.canonicalize()?;
    if !is_mount_point(&directory)? {
        rustix::mount::mount_bind(&directory, &directory)?;
    }
    rustix::mount::mount_change(&directory, MountPropagationFlags::PRIVATE)?;
    Ok(directory)
}

/// Undoes [`prepare`] when no namespace is left in the directory, also none of another node.
pub(crate) fn dismantle(directory: &Path) -> io::Result<()> {
    if fs::read_dir(directory)?.next().is_some() {
        return Ok(());
    }
    match rustix::mount::unmount(directory, UnmountFlags::DETACH) {
        Ok(()) | Err(Errno::INVAL) => {}
        Err(e) => return Err(e.into()),
    }
    fs::remove_dir(directory)
}

fn is_mount_point(path: &Path) -> io::Result<bool> {
    let wanted = path.to_string_lossy();
    // Field 5 is the mount point, with blanks, tabs, newlines and backslashes as octal escapes: proc(5).
    let escaped: String = wanted
        .chars()
        .map(|c| match c {
            ' ' | '\t' | '\n' | '\\' => format!("\\{:03o}", u32::from(c)),
            c => c.to_string(),
        })
        .collect();
    let mounts = fs::read_to_string("/proc/thread-self/mountinfo")?;
    Ok(mounts.lines().any(|line| line.split(' ').nth(4) == Some(escaped.as_str())))
}

/// Gives the calling thread's network namespace the name `path`.
pub(crate) fn name_current(path: &Path) -> io::Result<()> {
    File::create_new(path)?;
    rustix::mount::mount_bind("/proc/thread-self/ns/net", path)
        .inspect_err(|_| {
            let _ = fs::remove_file(path);
        })
        .map_err(io::Error::from)
}

/// The namespace called `path`, or `None` when there is no such name or nothing is mounted on it.
pub(crate) fn open(path: &Path) -> io::Result<Option<OwnedFd>> {
    let file = match File::open(path) {
        Ok(file) => OwnedFd::from(file),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e),
    };
    // The field's type differs between architectures.
    #[allow(clippy::useless_conversion)]
    let magic = i64::try_from(rustix::fs::fstatfs(&file)?.f_type).unwrap_or(-1);
    Ok((magic == NSFS_MAGIC).then_some(file))
}

/// Takes the name away; the namespace ends with its last process, socket and mount. A missing name is fine.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match rustix::mount::unmount(path, UnmountFlags::DETACH) {
        // Invalid: nothing is mounted there, the maker was killed in between.
        Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
        Err(e) => return Err(e.into()),
    }
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// All names in the directory.
pub(crate) fn names(directory: &Path) -> io::Result<Vec<String>> {
    let entries = fs::read_dir(directory)?;
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}
