//! A control group for each monitor, where the host lets us make one. It bounds what a monitor can take beyond its
//! guest's memory; a machine without one runs all the same.
//!
//! Version 2 is one tree; version 1 (still found in containers and old hosts) is one tree a controller, of which memory
//! and pids are used.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

/// Memory a monitor may need besides its guest's: translated code, its own heap, page tables charged to it.
const OVERHEAD: u64 = 640 << 20;
/// Threads: virtual CPUs (at most 64), I/O workers (at most 64 a drive) and the rest.
const THREADS: u32 = 1024;

/// Where cgroups for machines are made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Parents(Vec<PathBuf>);

impl Parents {
    /// The directories `aenv` under this host's hierarchies, made if need be; none where we may not.
    pub(crate) fn detect(root: &Path) -> Self {
        let controllers = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
        let candidates = if controllers.split_whitespace().any(|name| name == "memory") {
            vec![root.join("aenv")]
        } else {
            ["memory", "pids"].map(|name| root.join(name).join("aenv")).to_vec()
        };
        Self(candidates.into_iter().filter(|dir| Self::prepare(dir).is_ok()).collect())
    }

    /// One directory chosen by the operator.
    pub(crate) fn at(dir: &Path) -> io::Result<Self> {
        Self::prepare(dir)?;
        Ok(Self(vec![dir.to_owned()]))
    }

    fn prepare(dir: &Path) -> io::Result<()> {
        let above = dir.parent().unwrap_or(dir);
        // Only a directory of a cgroup file system has this file.
        if !above.join("cgroup.procs").exists() {
            return Err(io::Error::new(io::ErrorKind::NotFound, format!("{} is no cgroup", above.display())));
        }
        if !dir.exists() {
            fs::create_dir(dir)?;
        }
        // On version 2 children get the controllers that their parents pass on. Some may be refused one by one.
        for name in ["+memory", "+pids", "+cpu"] {
            for level in [above, dir] {
                let _ = fs::write(level.join("cgroup.subtree_control"), name);
            }
        }
        Ok(())
    }

    /// The cgroups a machine of this id would have.
    pub(crate) fn for_machine(&self, id: &str) -> Vec<PathBuf> {
        self.0.iter().map(|parent| parent.join(id)).collect()
    }
}

/// Makes the cgroups, bounds them and puts the process in. Blocks for up to some 10 ms. What the host refuses is left out.
pub(crate) fn enter(cgroups: &[PathBuf], pid: i32, memory_mib: u32) {
    let memory = (u64::from(memory_mib) << 20) + OVERHEAD;
    for dir in cgroups {
        let made = match fs::create_dir(dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        };
        // The limits that exist depend on version and controller; the others' files aren't there.
        for (file, value) in [
            ("memory.max", memory.to_string()),
            ("memory.limit_in_bytes", memory.to_string()),
            ("pids.max", THREADS.to_string()),
        ] {
            let path = dir.join(file);
            if path.exists()
                && let Err(error) = fs::write(&path, value)
            {
                tracing::warn!(path = %path.display(), %error, "a monitor's bound was not set");
            }
        }
        if let Err(error) = made.and_then(|()| fs::write(dir.join("cgroup.procs"), pid.to_string())) {
            tracing::warn!(cgroup = %dir.display(), %error, "a monitor runs outside of its cgroup");
        }
    }
}

/// Removes the cgroups of a process that has ended. Blocks for up to 100 ms.
pub(crate) fn remove(cgroups: &[PathBuf]) {
    for dir in cgroups {
        for attempt in 0..5 {
            match fs::remove_dir(dir) {
                // The kernel counts threads that are still on their way out.
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy && attempt < 4 => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(cgroup = %dir.display(), %error, "a machine's cgroup stays behind");
                    break;
                }
                _ => break,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_directory_is_no_cgroup() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Parents::detect(dir.path()), Parents::default());
        assert_eq!(Parents::at(&dir.path().join("x")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn version_2_is_preferred_and_version_1_has_two_trees() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["memory", "pids"] {
            fs::create_dir(dir.path().join(name)).unwrap();
            fs::write(dir.path().join(name).join("cgroup.procs"), "").unwrap();
        }
        let one = Parents::detect(dir.path()).for_machine("m");
        assert_eq!(one, [dir.path().join("memory/aenv/m"), dir.path().join("pids/aenv/m")]);
        fs::write(dir.path().join("cgroup.procs"), "").unwrap();
        fs::write(dir.path().join("cgroup.controllers"), "cpu memory pids\n").unwrap();
        assert_eq!(Parents::detect(dir.path()).for_machine("m"), [dir.path().join("aenv/m")]);
    }
}
