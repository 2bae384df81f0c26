//! FUSE: one mount a process, one file an export.
//!
//! ```text
//!   <mount>/            root, inode 1
//!   <mount>/<name>      an export; its inode number is never used again
//!
//!   published ──withdraw──► withdrawn ──last handle closed──► gone
//!       ▲  │drain                │
//!       │  ▼                     └─ open, stat: ESTALE; read, write by open handles: go on
//!       └ draining (no new opens)
//! ```
//! Choices, each for a reason:
//! - **Page cache kept** (`FOPEN_KEEP_CACHE`) and no writeback cache. Every byte of an export changes only through
//!   its own inode, so the kernel's cache is always right; reads of a running VM and of its clones cost no request
//!   the second time, and a private mapping works without further flags. A write is in our hands when it is
//!   acknowledged. A VMM that wants none of it opens with `O_DIRECT`.
//! - **A hole punched into a read-only export succeeds and does nothing.** QEMU's balloon discards guest memory by
//!   punching the backing file and dropping its private pages: the pages go, the shared base stays.
//! - **Passthrough** where the device is one local file and the kernel can (6.9): it reads and maps the file itself.
//!   All handles of an inode then share one backing id, which the kernel demands.
//! - **Owned by root**, mode 0600, checked by the kernel; `chown` gives an export to a jailed VMM's user.
//! - **An error is `EIO`** (`ENOSPC` when the disk is full), logged for the first one of an export, counted for all.

mod filesystem;
mod tree;

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use fuser::{BackgroundSession, Config, MountOption, Session, SessionACL};
use parking_lot::Mutex;
use rustix::mount::{UnmountFlags, unmount};

use self::filesystem::FuseFilesystem;
use self::tree::Tree;
use super::{ExportError, Exporter};
use crate::device::Device;

/// The name a mount of ours has in the mount table.
const FS_NAME: &str = "aenv-storaged";
/// How far the kernel reads ahead, around a page fault too. Measured on 5000 random pages of a mapped 512 MiB image
/// that is served (not passed through): 128 KiB 457 ms, 256 KiB 344 ms, 512 KiB 328 ms, 1 MiB 754 ms.
const READ_AHEAD_KIB: u32 = 512;

/// The mounted file system.
pub struct FuseExporter {
    mount_point: PathBuf,
    tree: Arc<Tree>,
    session: Mutex<Option<BackgroundSession>>,
}

impl FuseExporter {
    /// Mounts at `mount_point`, an existing directory, served by `threads` threads. Needs root and /dev/fuse.
    pub fn mount(mount_point: &Path, threads: usize) -> io::Result<Self> {
        let tree = Arc::new(Tree::default());
        let mut config = Config::default();
        config.mount_options = vec![
            MountOption::FSName(FS_NAME.into()),
            MountOption::NoDev,
            MountOption::NoSuid,
            MountOption::NoExec,
            MountOption::NoAtime,
        ];
        // A jailed VMM runs under its own uid: the kernel checks owner and mode, which `chown` changes.
        config.mount_options.push(MountOption::DefaultPermissions);
        config.acl = SessionACL::All;
        config.n_threads = Some(threads.max(1));
        config.clone_fd = true;
        let session = Session::new(FuseFilesystem::new(tree.clone()), mount_point, &config)?.spawn()?;
        widen_read_ahead(mount_point);
        Ok(Self { mount_point: mount_point.to_owned(), tree, session: Mutex::new(Some(session)) })
    }

    /// Unmounts and waits for the FUSE threads, when nothing is open. `Err` and no longer in the tree otherwise.
    pub fn unmount(&self) -> io::Result<()> {
        let Some(session) = self.session.lock().take() else { return Ok(()) };
        session.umount_and_join().inspect_err(|_| {
            let _gone_already = unmount(&self.mount_point, UnmountFlags::DETACH);
        })
    }

    /// Takes the mount out of the tree though handles are open; they work until this process ends.
    pub fn detach(&self) -> io::Result<()> {
        unmount(&self.mount_point, UnmountFlags::DETACH)?;
        // Dropping the session would unmount again, and wait.
        if let Some(session) = self.session.lock().take() {
            std::mem::forget(session);
        }
        Ok(())
    }
}

impl Drop for FuseExporter {
    fn drop(&mut self) {
        if self.session.lock().is_some()
            && let Err(error) = self.unmount()
        {
            tracing::warn!(%error, mount_point = %self.mount_point.display(), "could not unmount");
        }
    }
}

impl Exporter for FuseExporter {
    fn publish(&self, name: &str, device: Arc<dyn Device>) -> Result<PathBuf, ExportError> {
        self.tree.publish(name, device)?;
        Ok(self.mount_point.join(name))
    }

    fn drain(&self, name: &str, patience: Duration) -> Result<(), ExportError> {
        let node = self.tree.named(name).ok_or_else(|| ExportError::Unknown(name.into()))?;
        node.drain(patience).map_err(|handles| ExportError::Busy { name: name.into(), handles })
    }

    fn withdraw(&self, name: &str) {
        self.tree.withdraw(name);
    }

    fn handles(&self, name: &str) -> u32 {
        self.tree.named(name).map_or(0, |node| node.handles())
    }

    fn all_handles(&self) -> u32 {
        self.tree.all_handles()
    }
}

/// Takes away a mount that an earlier process of ours left at `mount_point` when it was killed. Handles that are
/// still open on it are dead already. `Err` when something else is mounted there.
pub fn clear_stale_mount(mount_point: &Path) -> io::Result<()> {
    let table = fs::read_to_string("/proc/self/mountinfo")?;
    let wanted = mount_point.to_string_lossy();
    for line in table.lines().rev() {
        let fields: Vec<_> = line.split(' ').collect();
        let separator = fields.iter().position(|&f| f == "-").unwrap_or(fields.len());
        let (Some(&at), Some(&source)) = (fields.get(4), fields.get(separator + 2)) else { continue };
        if at != wanted {
            continue;
        }
        if source != FS_NAME {
            return Err(io::Error::new(
                io::ErrorKind::ResourceBusy,
                format!("{source} is mounted at {wanted}; unmount it or choose another run directory"),
            ));
        }
        tracing::warn!(mount_point = %wanted, "taking away the mount of a storaged that died");
        unmount(mount_point, UnmountFlags::DETACH)?;
    }
    Ok(())
}

/// Best effort: without it reads are slower, not wrong.
fn widen_read_ahead(mount_point: &Path) {
    let set = || -> io::Result<()> {
        let device = fs::metadata(mount_point)?.dev();
        let knob = format!(
            "/sys/class/bdi/{}:{}/read_ahead_kb",
            rustix::fs::major(device),
            rustix::fs::minor(device)
        );
        fs::write(knob, READ_AHEAD_KIB.to_string())
    };
    if let Err(error) = set() {
        tracing::warn!(%error, "could not widen the read-ahead of the FUSE mount");
    }
}
