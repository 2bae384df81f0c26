//! The files of one machine, all in [`crate::MachineSpec::dir`]:
//!
//! ```text
//!   qemu.json     what a later server must know besides the record (written before QEMU is started)
//!   qmp.sock      control socket, removed when the process has ended
//!   console.log   the guest's serial console, its last 256 KiB
//!   qemu.log      what QEMU itself said
//! ```

use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io::{self, Write},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{
            fs::{OpenOptionsExt, PermissionsExt},
            net::UnixListener,
        },
    },
    path::{Path, PathBuf},
};

/// Paths of one machine's files.
#[derive(Debug, Clone)]
pub(super) struct Files {
    dir: PathBuf,
}

/// What `qemu.json` holds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Kept {
    /// Machine id.
    pub(super) id: String,
    /// File that guest memory maps.
    pub(super) memory: PathBuf,
    /// Guest memory in MiB.
    pub(super) memory_mib: u32,
    /// Whether memory is a private mapping.
    pub(super) restored: bool,
    /// Cgroups made for this machine alone.
    pub(super) cgroups: Vec<PathBuf>,
}

impl Files {
    pub(super) fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.dir.join("qmp.sock")
    }

    pub(super) fn console(&self) -> PathBuf {
        self.dir.join("console.log")
    }

    pub(super) fn log(&self) -> PathBuf {
        self.dir.join("qemu.log")
    }

    fn kept(&self) -> PathBuf {
        self.dir.join("qemu.json")
    }

    /// Makes the control socket, listening, so that a client can connect before QEMU is up.
    pub(super) fn listen(&self) -> io::Result<OwnedFd> {
        let path = self.socket();
        remove(&path)?;
        let listener = if path.as_os_str().len() <= 107 {
            UnixListener::bind(&path)?
        } else {
            let (_handle, short) = short_socket_path(&path)?;
            UnixListener::bind(short)?
        };
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        Ok(listener.into())
    }

    /// An empty log for QEMU's own words.
    pub(super) fn open_log(&self) -> io::Result<File> {
        remove(&self.console())?;
        File::options().create(true).append(true).truncate(false).mode(0o600).open(self.log())
    }

    pub(super) fn write(&self, kept: &Kept) -> io::Result<()> {
        let temporary = self.dir.join("qemu.json.part");
        let mut file =
            File::options().create(true).write(true).truncate(true).mode(0o600).open(&temporary)?;
        file.write_all(&serde_json::to_vec(kept)?)?;
        fs::rename(temporary, self.kept())
    }

    /// What was kept, `None` when nothing readable is there.
    pub(super) fn read(&self) -> Option<Kept> {
        serde_json::from_slice(&fs::read(self.kept()).ok()?).ok()
    }

    /// Removes what only a living process needs; the logs stay as evidence.
    pub(super) fn clear(&self) -> io::Result<()> {
        remove(&self.socket())?;
        remove(&self.kept())
    }
}

/// Removes a file; one that isn't there is as good as removed.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// A name under 108 bytes (`sun_path`, unix(7)) for a socket whose path is longer, good while the handle is held.
pub(super) fn short_socket_path(path: &Path) -> io::Result<(File, PathBuf)> {
    let (dir, name) = path
        .parent()
        .zip(path.file_name())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "a socket's path needs a directory"))?;
    let handle = File::open(dir)?;
    let short = Path::new("/proc/self/fd").join(handle.as_raw_fd().to_string()).join(name);
    Ok((handle, short))
}
