//! ublk: one kernel block device an export, served by this process over io_uring.
//!
//! ```text
//!   <dir>/<name> ──symbolic link──► /dev/ublkb<id>      the link is the name: it survives us and leads the next
//!                                                       process to the device it has to take over
//!   publish:   ADD_DEV ► SET_PARAMS ► open /dev/ublkc<id>, start queues ► START_DEV ► link
//!   drain:     unlink ► wait for no handles ► (still some: link again, Busy)
//!   withdraw:  unlink ► no handles: STOP_DEV ► queues end ► DEL_DEV
//!                      else the same by the reaper when the last handle is closed
//!   kill -9:   LIVE ──driver──► QUIESCED: I/O of open handles waits, no error
//!              ► recover: START_USER_RECOVERY ► open, start queues ► END_USER_RECOVERY: LIVE, what had been taken
//!                is given again
//! ```
//! What a crash leaves: after ADD_DEV a dead device without a link, after START_DEV a quiesced one without a link
//! (nobody can have it open): [`UblkExporter::delete_stale`] removes both. Before the unlink of a withdrawal the export
//! is recovered with the rest. Devices carry a stamp of their directory, so exporters don't touch each other's.
//!
//! Choices:
//! - **Our own queue loop**, not libublk's: device calls block, so requests have to leave the queue thread, and then
//!   an executor on that thread is only in the way.
//! - **Data by pread and pwrite** on the character device (`USER_COPY`): buffers belong to workers, a few an export,
//!   not to each of a queue's tags.
//! - **New opens can't be refused by the driver**; what is taken away is the name. A process that keeps the number of
//!   the device in a node of its own can open it until it is gone.
//! - **Zero copy** is reported by [`available`] and not used: it takes 6.15, and a device of one file.

mod abi;
mod control;
mod handles;
mod queue;
mod served;

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use self::abi::CONTROL;
use self::control::Control;
use self::served::Served;
use super::{ExportError, Exporter};
use crate::device::Device;

/// How often a wait for the last handle looks again: the kernel tells nobody of a close.
const LOOK: Duration = Duration::from_millis(100);

/// How a device is served. All bounds.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Hardware queues of a device, 1 to 16. The kernel makes no more than it has processors.
    pub queues: u16,
    /// Requests a queue holds at once, 1 to 4096.
    pub depth: u16,
    /// Threads a queue that read and write the device.
    pub workers: usize,
    /// Largest request in bytes, a multiple of 4096 up to 1 MiB.
    pub max_io_bytes: u32,
    /// Logical block size, 512 or 4096. A size that is no multiple of it can't be exported.
    pub block_bytes: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self { queues: 1, depth: 64, workers: 4, max_io_bytes: 512 << 10, block_bytes: 512 }
    }
}

/// What the kernel's ublk driver can.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Features {
    /// `UBLK_F_*` of `linux/ublk_cmd.h`.
    pub bits: u64,
    /// Requests' pages can be handed to another file (6.15). Not used yet.
    pub zero_copy: bool,
}

/// Why ublk can't be used here.
#[derive(Debug, thiserror::Error)]
pub enum Unavailable {
    /// No control device.
    #[error(
        "{CONTROL} can't be opened ({0}); load the module ublk_drv (Linux 6.5 or newer, CONFIG_BLK_DEV_UBLK) and run as root"
    )]
    NoDriver(io::Error),
    /// io_uring is forbidden, or the driver is from before 6.5.
    #[error(
        "the ublk driver can't be asked for its features ({0}); it takes Linux 6.5 and io_uring allowed (kernel.io_uring_disabled=0)"
    )]
    NoAnswer(io::Error),
    /// The driver is too old.
    #[error(
        "the ublk driver lacks user recovery or user copy (features {0:#x}); use Linux 6.5 or newer, or FUSE"
    )]
    TooOld(u64),
}

/// Whether exports can be ublk devices here, and what the driver can.
pub fn available() -> Result<Features, Unavailable> {
    let control = Control::open().map_err(Unavailable::NoDriver)?;
    let bits = control.features().map_err(Unavailable::NoAnswer)?;
    if bits & served::FLAGS != served::FLAGS {
        return Err(Unavailable::TooOld(bits));
    }
    Ok(Features { bits, zero_copy: bits & abi::F_ZERO_COPY != 0 })
}

/// Exports as ublk devices.
pub struct UblkExporter {
    inner: Arc<Inner>,
}

struct Inner {
    dir: PathBuf,
    options: Options,
    control: Control,
    exports: Mutex<HashMap<String, Arc<Served>>>,
    /// Withdrawn while open.
    withdrawn: Mutex<Vec<Arc<Served>>>,
    ending: Condvar,
    /// Held while handles are counted: looking opens the device for a moment, which another look would count.
    looking: Mutex<()>,
}

impl UblkExporter {
    /// Exports appear as links in `dir`, which is made. Devices of an earlier process wait until they are recovered
    /// ([`Self::left_behind`], [`Self::recover`]) or deleted ([`Self::delete_stale`]).
    pub fn new(dir: &Path, options: Options) -> io::Result<Self> {
        let Options { queues, depth, max_io_bytes, block_bytes, .. } = options;
        let sane = (1..=16).contains(&queues)
            && (1..=abi::MAX_DEPTH).contains(&depth)
            && (4096..=1 << 20).contains(&max_io_bytes)
            && max_io_bytes.is_multiple_of(4096)
            && [512, 4096].contains(&block_bytes);
        if !sane {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{options:?} is out of bounds")));
        }
        fs::create_dir_all(dir)?;
        let inner = Arc::new(Inner {
            dir: dir.canonicalize()?,
            options,
            control: Control::open()?,
            exports: Mutex::default(),
            withdrawn: Mutex::default(),
            ending: Condvar::new(),
            looking: Mutex::new(()),
        });
        let seen = Arc::downgrade(&inner);
        std::thread::Builder::new().name("ublk-reaper".into()).spawn(move || reap(&seen))?;
        Ok(Self { inner })
    }

    /// The kernel's number of an export, for a journal.
    pub fn device_id(&self, name: &str) -> Option<u32> {
        self.inner.exports.lock().get(name).map(|served| served.id)
    }

    /// Names and device numbers that an earlier process left in the directory and nobody has recovered.
    pub fn left_behind(&self) -> io::Result<Vec<(String, u32)>> {
        let exports = self.inner.exports.lock();
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.inner.dir)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            let id = fs::read_link(entry.path()).ok().and_then(|target| served::id_of(&target));
            if let Some(id) = id
                && !exports.contains_key(&name)
            {
                found.push((name, id));
            }
        }
        Ok(found)
    }

    /// Serves the device `id` of a dead process again, under `name`. `device` must hold what was acknowledged. I/O
    /// that waited goes on; what the dead process had taken is done again.
    pub fn recover(&self, name: &str, id: u32, device: &Arc<dyn Device>) -> Result<PathBuf, ExportError> {
        self.add(name, |inner| Served::recover(&inner.control, &inner.dir, inner.options, name, id, device))
    }

    /// Stops and deletes every device that a dead process made for this directory and that is not served now, and
    /// its link. Returns their numbers. Handles still open on them get errors: recover first.
    pub fn delete_stale(&self) -> io::Result<Vec<u32>> {
        let inner = &self.inner;
        let exports = inner.exports.lock();
        let withdrawn = inner.withdrawn.lock();
        let ours: Vec<u32> = exports.values().chain(withdrawn.iter()).map(|served| served.id).collect();
        let mut deleted = Vec::new();
        for id in served::stamped(&inner.control, &inner.dir)? {
            if ours.contains(&id) {
                continue;
            }
            served::remove(&inner.control, id)?;
            deleted.push(id);
        }
        for entry in fs::read_dir(&inner.dir)?.flatten() {
            let target = fs::read_link(entry.path()).ok().and_then(|target| served::id_of(&target));
            if target.is_some_and(|id| !ours.contains(&id)) {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(deleted)
    }

    fn add(
        &self,
        name: &str,
        make: impl FnOnce(&Inner) -> io::Result<Served>,
    ) -> Result<PathBuf, ExportError> {
        let inner = &self.inner;
        let mut exports = inner.exports.lock();
        if exports.contains_key(name) {
            return Err(ExportError::Exists(name.into()));
        }
        let failed = |source| ExportError::Failed { name: name.into(), source };
        let served = make(inner).map_err(failed)?;
        if let Err(error) = inner.link(name, &served) {
            served.end(&inner.control);
            return Err(failed(error));
        }
        exports.insert(name.into(), Arc::new(served));
        Ok(inner.dir.join(name))
    }
}

impl Inner {
    fn handles(&self, served: &Served) -> u32 {
        let _alone = self.looking.lock();
        handles::count(&served.node())
    }

    /// Replaces what an earlier process left.
    fn link(&self, name: &str, served: &Served) -> io::Result<()> {
        let (link, fresh) = (self.dir.join(name), self.dir.join(format!(".{name}.new")));
        let _left_by_a_crash = fs::remove_file(&fresh);
        symlink(served.node(), &fresh)?;
        fs::rename(fresh, link)
    }

    fn unlink(&self, name: &str) {
        if let Err(error) = fs::remove_file(self.dir.join(name))
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, export = name, "could not take the name of an export away");
        }
    }
}

impl Exporter for UblkExporter {
    fn publish(&self, name: &str, device: Arc<dyn Device>) -> Result<PathBuf, ExportError> {
        self.add(name, |inner| Served::start(&inner.control, &inner.dir, inner.options, name, &device))
    }

    fn drain(&self, name: &str, patience: Duration) -> Result<(), ExportError> {
        let served = self.inner.exports.lock().get(name).cloned();
        let served = served.ok_or_else(|| ExportError::Unknown(name.into()))?;
        self.inner.unlink(name);
        let deadline = Instant::now() + patience;
        loop {
            let handles = self.inner.handles(&served);
            if handles == 0 {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                if let Err(source) = self.inner.link(name, &served) {
                    return Err(ExportError::Failed { name: name.into(), source });
                }
                return Err(ExportError::Busy { name: name.into(), handles });
            }
            std::thread::sleep(left.min(LOOK));
        }
    }

    fn withdraw(&self, name: &str) {
        let Some(served) = self.inner.exports.lock().remove(name) else { return };
        self.inner.unlink(name);
        if self.inner.handles(&served) == 0 {
            served.end(&self.inner.control);
        } else {
            self.inner.withdrawn.lock().push(served);
            self.inner.ending.notify_all();
        }
    }

    fn handles(&self, name: &str) -> u32 {
        let served = self.inner.exports.lock().get(name).cloned();
        served.map_or(0, |served| self.inner.handles(&served))
    }

    fn all_handles(&self) -> u32 {
        let mut all: Vec<_> = self.inner.exports.lock().values().cloned().collect();
        all.extend(self.inner.withdrawn.lock().iter().cloned());
        all.iter().map(|served| self.inner.handles(served)).sum()
    }
}

impl Drop for UblkExporter {
    /// Ends what nobody has open. What is open stays served until this process ends, then it waits to be recovered.
    fn drop(&mut self) {
        self.inner.ending.notify_all();
        for (name, served) in self.inner.exports.lock().drain() {
            if self.inner.handles(&served) == 0 {
                self.inner.unlink(&name);
                served.end(&self.inner.control);
            } else {
                tracing::warn!(export = name, "a ublk export is still open; it waits for the next storaged");
            }
        }
    }
}

/// Ends withdrawn devices when they are closed; itself when the exporter is gone.
fn reap(exporter: &Weak<Inner>) {
    while let Some(inner) = exporter.upgrade() {
        let mut withdrawn = inner.withdrawn.lock();
        if withdrawn.is_empty() {
            inner.ending.wait_for(&mut withdrawn, Duration::from_secs(1));
        }
        // They stay in the list while they are looked at: they count as open until they are not.
        let all = withdrawn.clone();
        drop(withdrawn);
        let closed: Vec<_> = all.iter().filter(|served| inner.handles(served) == 0).collect();
        closed.iter().for_each(|served| served.end(&inner.control));
        let waiting = closed.is_empty() && !all.is_empty();
        inner.withdrawn.lock().retain(|served| !closed.iter().any(|closed| closed.id == served.id));
        drop(inner);
        if waiting {
            std::thread::sleep(LOOK);
        }
    }
}
