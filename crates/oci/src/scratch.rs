//! Temporary directories that don't outlive their makers for long.
//!
//! A scratch directory `pull-X` has a sibling `pull-X.lock` that its maker holds locked, and that every tool it starts
//! inherits as standard input: the lock is free only when all of them are gone. Dropping a scratch removes both. After
//! kill -9, [`sweep`] finds the lock free and removes the directory. The lock exists before the directory, so a
//! directory without a lock is left over, too.

use crate::error::{During as _, Error};
use std::{
    fs::{self, File, TryLockError},
    io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

const PREFIX: &str = "pull-";
const LOCK: &str = ".lock";

/// A directory of one's own.
#[derive(Debug)]
pub(crate) struct Scratch {
    path: PathBuf,
    lock: File,
}

impl Scratch {
    /// Makes one in `work_dir`, which is made too. Blocking.
    pub(crate) fn new(work_dir: &Path) -> Result<Self, Error> {
        let step = || format!("make a temporary directory in {}", work_dir.display());
        fs::create_dir_all(work_dir).during(step)?;
        let work_dir = work_dir.canonicalize().during(step)?;
        loop {
            let file =
                tempfile::Builder::new().prefix(PREFIX).suffix(LOCK).tempfile_in(&work_dir).during(step)?;
            let (lock, name) = file.keep().map_err(|e| e.error).during(step)?;
            lock.try_lock().map_err(io::Error::from).during(step)?;
            // A sweep may have taken the lock for an abandoned one in the moment before it was locked.
            if !fs::metadata(&name)
                .is_ok_and(|there| lock.metadata().is_ok_and(|here| here.ino() == there.ino()))
            {
                continue;
            }
            let path = name.with_extension("");
            // An image's setuid programs must not be reachable for other accounts of this machine.
            fs::DirBuilder::new().mode(0o700).create(&path).during(step)?;
            return Ok(Self { path, lock });
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// A descriptor for a tool's standard input, which is empty and holds the lock.
    pub(crate) fn stdin(&self) -> Result<std::process::Stdio, Error> {
        Ok(self.lock.try_clone().during(|| "share a temporary directory's lock".to_owned())?.into())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let path = std::mem::take(&mut self.path);
        let clean = move || {
            if let Err(e) = remove(&path) {
                tracing::warn!(path = %path.display(), error = %e, "a temporary directory could not be removed; the next start tries again");
            }
        };
        // Thousands of files: not on an async worker.
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(clean)),
            Err(_) => clean(),
        }
    }
}

fn remove(directory: &Path) -> io::Result<()> {
    remove_tree(directory)?;
    match fs::remove_file(lock_of(directory)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Removes a directory, unless something is mounted in it: then removing would reach out of it.
pub(crate) fn remove_tree(directory: &Path) -> io::Result<()> {
    let mounts = fs::read_to_string("/proc/thread-self/mountinfo")?;
    let inside = mounts
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .find(|at| Path::new(at).starts_with(directory));
    if let Some(at) = inside {
        return Err(io::Error::other(format!("{at} is a mount point; unmount it first")));
    }
    match fs::remove_dir_all(directory) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

fn lock_of(directory: &Path) -> PathBuf {
    let mut name = directory.as_os_str().to_owned();
    name.push(LOCK);
    name.into()
}

/// Removes what killed processes left in `work_dir`, and returns how many directories. Blocking; at start.
///
/// # Errors
/// The first file operation that failed; the rest was tried nevertheless.
pub fn sweep(work_dir: &Path) -> io::Result<usize> {
    let entries = match fs::read_dir(work_dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(e) => return Err(e),
    };
    let mut names: Vec<String> = Vec::new();
    for entry in entries {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.starts_with(PREFIX) {
            names.push(name.strip_suffix(LOCK).unwrap_or(&name).to_owned());
        }
    }
    names.sort();
    names.dedup();
    let (mut removed, mut failure) = (0, None);
    for name in names {
        match sweep_one(&work_dir.join(name)) {
            Ok(true) => removed += 1,
            Ok(false) => {}
            Err(e) => failure = failure.or(Some(e)),
        }
    }
    failure.map_or(Ok(removed), Err)
}

fn sweep_one(directory: &Path) -> io::Result<bool> {
    let lock = match File::options().read(true).write(true).open(lock_of(directory)) {
        Ok(lock) => Some(lock),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(e),
    };
    match lock.as_ref().map(File::try_lock) {
        Some(Err(TryLockError::WouldBlock)) => return Ok(false),
        Some(Err(TryLockError::Error(e))) => return Err(e),
        Some(Ok(())) | None => {}
    }
    let existed = directory.exists();
    remove(directory)?;
    Ok(existed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_use_stays_and_what_is_abandoned_goes() {
        let work = tempfile::tempdir().unwrap();
        let used = Scratch::new(work.path()).unwrap();
        let dropped = Scratch::new(work.path()).unwrap().path().to_owned();
        assert!(!dropped.exists());
        fs::create_dir_all(work.path().join("pull-abandoned/tree")).unwrap();
        fs::write(work.path().join("pull-abandoned.lock"), "").unwrap();
        fs::create_dir(work.path().join("pull-lockless")).unwrap();
        fs::create_dir(work.path().join("other")).unwrap();
        assert_eq!(sweep(work.path()).unwrap(), 2);
        assert_eq!(sweep(work.path()).unwrap(), 0);
        assert!(used.path().exists() && work.path().join("other").exists());
        drop(used);
        assert_eq!(fs::read_dir(work.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_directory_stays_while_a_tool_that_outlived_its_maker_runs() {
        let work = tempfile::tempdir().unwrap();
        // As `Scratch` does it, but without its drop, which kill -9 doesn't run.
        let lock = File::create(work.path().join("pull-x.lock")).unwrap();
        lock.try_lock().unwrap();
        fs::create_dir(work.path().join("pull-x")).unwrap();
        let mut tool =
            std::process::Command::new("sleep").arg("60").stdin(lock.try_clone().unwrap()).spawn().unwrap();
        drop(lock);
        assert_eq!(sweep(work.path()).unwrap(), 0);
        assert!(work.path().join("pull-x").exists());
        tool.kill().unwrap();
        tool.wait().unwrap();
        assert_eq!(sweep(work.path()).unwrap(), 1);
    }
}
