//! The files of a writable upper in their directory, and how one is replaced by the next.
//!
//! ```text
//!   upper.lock     held locked while some process has the upper open
//!   upper.data     ┐ the upper in use
//!   upper.index    ┘
//!   next.data      ┐ the upper that takes over at the end of a seal, empty
//!   next.index     ┘
//!   sealed-<uuid>.index   the log of a layer sealed without a sync, until a flush has made the layer durable
//! ```
//! A seal runs in this order, and a crash after each step is repaired by the next [`UpperDir::lock`]:
//!
//! | Step | Files after a crash here | What it does |
//! |---|---|---|
//! | 1. write `next.*` | upper.* as before | goes on with upper.*, removes next.* |
//! | 2. append index and trailer to upper.data | upper.* with unused bytes at the end | the same |
//! | 3. rename upper.data to the layer's path: **the seal has happened** | no upper.data | goes to 4 |
//! | 4. rename upper.index to sealed-….index | no upper.* | goes to 5 |
//! | 5. rename next.data, then next.index to upper.* | next.index alone is left | renames it |
//!
//! After step 3 the new upper names the layer as its parent, so opening it on a stack without that layer is
//! refused: a caller that never saw the answer can't lose the layer by accident.
//!
//! Steps 4 and 5 can't undo step 3: when one fails, the process goes on with the files it has open and tries again
//! at the next flush or seal.
//!
//! With `durable`, layer and next upper are synced before step 3, and the directories after step 5, where the stash
//! of step 4 is dropped at once. Without it, a power loss may take the end of the layer's file. What was flushed
//! before the seal is still there: in the layer's data and in the stashed log, from which the trailer is written
//! again.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aenv_overlaybd::{Error, HEADER_LEN, Header, Layer, Role, Upper, UpperOptions};
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, RenameFlags, flock, renameat_with};
use uuid::Uuid;

use crate::spec::{LayerKind, LayerSpec};

/// Why the upper of a writable export could not be used.
#[derive(Debug, thiserror::Error)]
pub enum UpperError {
    /// Another process or export has it.
    #[error("{0} is in use by another export; close that first")]
    InUse(PathBuf),
    /// A file operation failed.
    #[error("{what} {path}: {source}")]
    Io {
        /// What was being done.
        what: &'static str,
        /// To which file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The files are damaged, or don't fit each other or the stack.
    #[error("upper in {dir}: {source}")]
    Format {
        /// The directory.
        dir: PathBuf,
        /// The cause.
        source: Error,
    },
    /// Files that no crash of ours leaves behind.
    #[error("{dir} holds {what}; move its files away to start with an empty upper")]
    Strange {
        /// The directory.
        dir: PathBuf,
        /// What was found.
        what: String,
    },
    /// The stack lacks a layer that was sealed from here.
    #[error("layer {uuid} was sealed from {dir} and is not in the stack; add it as the top layer")]
    SealedAway {
        /// The directory.
        dir: PathBuf,
        /// The layer.
        uuid: Uuid,
    },
}

/// An open upper directory; one process at a time.
pub struct UpperDir {
    path: PathBuf,
    /// Directories whose entries the next flush has to sync, and logs it may then remove.
    owed: Mutex<Owed>,
    _lock: File,
}

#[derive(Default)]
struct Owed {
    /// Steps 4 and 5 of a seal are still to be done.
    promotion: bool,
    directories: Vec<PathBuf>,
    stashed: Vec<PathBuf>,
}

impl UpperDir {
    /// Takes the directory, making it when missing, and repairs what a crash left: an interrupted seal is finished,
    /// layers of the stack whose trailer a power loss took are mended. So this comes before opening the layers.
    pub fn lock(path: &Path, layers: &[LayerSpec]) -> Result<Self, UpperError> {
        let io = |what, path: &Path| {
            let path = path.to_owned();
            move |source| UpperError::Io { what, path, source }
        };
        fs::create_dir_all(path).map_err(io("making", path))?;
        let lock_path = path.join("upper.lock");
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&lock_path)
            .map_err(io("opening", &lock_path))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(UpperError::InUse(path.to_owned())),
            Err(errno) => return Err(io("locking", &lock_path)(errno.into())),
        }
        let dir = Self { path: path.to_owned(), owed: Mutex::default(), _lock: lock };
        dir.finish_seal()?;
        dir.mend_layers(layers)?;
        dir.owed.lock().directories.push(path.to_owned());
        Ok(dir)
    }

    /// The upper that is there, or an empty one on the layer `parent` (nil when that has no id).
    pub fn open_upper(&self, parent: Uuid, virtual_size: u64) -> Result<Upper, UpperError> {
        if self.file("upper.data").exists() {
            self.discard_next();
            let (data, index) = (self.open_file("upper.data")?, self.open_file("upper.index")?);
            return Upper::open(data, index).map_err(|source| self.format(source));
        }
        let upper = self.prepare_next(parent, virtual_size)?;
        self.promote_next()?;
        Ok(upper)
    }

    /// Step 1: an empty upper in `next.*` that lies on layer `parent`.
    pub fn prepare_next(&self, parent: Uuid, virtual_size: u64) -> Result<Upper, UpperError> {
        self.promote()?;
        let options = UpperOptions { virtual_size, uuid: Uuid::new_v4(), parent };
        let (data, index) = (self.new_file("next.data")?, self.new_file("next.index")?);
        Upper::create(data, index, options).map_err(|source| self.format(source))
    }

    /// Undoes step 1 when the seal doesn't happen.
    pub fn discard_next(&self) {
        for name in ["next.data", "next.index"] {
            let path = self.file(name);
            if let Err(error) = fs::remove_file(&path)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(%error, path = %path.display(), "could not remove an unused upper");
            }
        }
    }

    /// Steps 3 to 5; only step 3 can fail. `to` must be on the same file system and free; its directory must exist.
    /// What makes it durable is left to [`flush`](Self::flush), but for the next upper's own files.
    pub fn commit_seal(&self, to: &Path, durable: bool) -> io::Result<()> {
        if durable {
            for name in ["next.data", "next.index"] {
                File::open(self.file(name))?.sync_all()?;
            }
        }
        rename_new(&self.file("upper.data"), to)?;
        let mut owed = self.owed.lock();
        owed.directories.extend(to.parent().map(Path::to_owned));
        owed.promotion = true;
        drop(owed);
        if let Err(error) = self.promote() {
            tracing::error!(%error, "a seal is done but for its last renames; trying again at the next flush");
        }
        Ok(())
    }

    /// What a flush has to do after the data is safe: directory entries, and the logs no longer needed.
    pub fn flush(&self) -> io::Result<()> {
        self.promote().map_err(io::Error::other)?;
        let mut owed = self.owed.lock();
        while let Some(directory) = owed.directories.last() {
            File::open(directory)?.sync_all()?;
            owed.directories.pop();
        }
        while let Some(log) = owed.stashed.last() {
            match fs::remove_file(log) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => owed.stashed.pop(),
            };
        }
        Ok(())
    }

    /// Steps 4 and 5, where they are still to be done.
    fn promote(&self) -> Result<(), UpperError> {
        if !self.owed.lock().promotion {
            return Ok(());
        }
        self.finish_seal()?;
        let mut owed = self.owed.lock();
        owed.promotion = false;
        owed.directories.push(self.path.clone());
        Ok(())
    }

    /// Carries on with an interrupted seal from step 4 or 5, and with an interrupted first creation.
    fn finish_seal(&self) -> Result<(), UpperError> {
        let data = self.identity("upper.data", DATA)?;
        let index = self.identity("upper.index", INDEX)?;
        let next_data = self.identity("next.data", DATA).ok().flatten();
        let next_index = self.identity("next.index", INDEX).ok().flatten();
        let strange = |what: &str| Err(UpperError::Strange { dir: self.path.clone(), what: what.to_owned() });
        match (data, index, next_data, next_index) {
            (Some(data), Some(index), _, _) if data == index => Ok(()),
            (None, None, Some(data), Some(index)) if data == index => self.promote_next(),
            (None, None, ..) => {
                self.discard_next();
                Ok(())
            }
            (None, Some(sealed), Some(data), Some(index)) if data == index => {
                self.stash_log(sealed)?;
                self.promote_next()
            }
            (Some(data), Some(sealed), _, Some(index)) if data == index => {
                self.stash_log(sealed)?;
                self.rename("next.index", &self.file("upper.index"))
            }
            (Some(data), None, _, Some(index)) if data == index => {
                self.rename("next.index", &self.file("upper.index"))
            }
            (None, Some(_), ..) => strange("an index log without its data file"),
            (Some(_), None, ..) => strange("a data file without its index log"),
            (Some(_), Some(_), ..) => strange("a data file and an index log of different uppers"),
        }
    }

    /// Every stashed log must belong to a layer of the stack; where a power loss took that layer's trailer, it is
    /// written again from the log.
    fn mend_layers(&self, layers: &[LayerSpec]) -> Result<(), UpperError> {
        let entries = fs::read_dir(&self.path).map_err(|source| self.io("listing", &self.path, source))?;
        for entry in entries {
            let log = entry.map_err(|source| self.io("listing", &self.path, source))?.path();
            let name = log.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            let uuid = name.strip_prefix("sealed-").and_then(|n| n.strip_suffix(".index"));
            let Some(uuid) = uuid.and_then(|text| Uuid::try_parse(text).ok()) else { continue };
            let layer = layers
                .iter()
                .filter(|layer| layer.kind == LayerKind::Lsmt)
                .find(|layer| identity(&layer.path, DATA).ok().flatten() == Some(uuid))
                .ok_or_else(|| UpperError::SealedAway { dir: self.path.clone(), uuid })?;
            let file = self.open_path(&layer.path)?;
            if Layer::open(file.clone()).is_err() {
                tracing::warn!(layer = %layer.path.display(), "writing the trailer of a sealed layer again");
                let upper = Upper::open(file.clone(), self.open_path(&log)?);
                upper.and_then(|upper| upper.finish(true)).map_err(|source| self.format(source))?;
            }
            // Only after this sync may the log go.
            file.sync_all().map_err(|source| self.io("syncing", &layer.path, source))?;
            let mut owed = self.owed.lock();
            owed.directories.extend(layer.path.parent().map(Path::to_owned));
            owed.stashed.push(log);
        }
        Ok(())
    }

    fn promote_next(&self) -> Result<(), UpperError> {
        self.rename("next.data", &self.file("upper.data"))?;
        self.rename("next.index", &self.file("upper.index"))
    }

    fn rename(&self, from: &str, to: &Path) -> Result<(), UpperError> {
        fs::rename(self.file(from), to).map_err(|source| self.io("renaming to", to, source))
    }

    fn stash_log(&self, sealed: Uuid) -> Result<(), UpperError> {
        let stash = self.path.join(format!("sealed-{sealed}.index"));
        self.rename("upper.index", &stash)?;
        self.owed.lock().stashed.push(stash);
        Ok(())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    fn identity(&self, name: &str, role: Role) -> Result<Option<Uuid>, UpperError> {
        identity(&self.file(name), role)
    }

    fn new_file(&self, name: &str) -> Result<Arc<File>, UpperError> {
        let path = self.file(name);
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path);
        file.map(Arc::new).map_err(|source| self.io("making", &path, source))
    }

    fn open_file(&self, name: &str) -> Result<Arc<File>, UpperError> {
        self.open_path(&self.file(name))
    }

    fn open_path(&self, path: &Path) -> Result<Arc<File>, UpperError> {
        let file = OpenOptions::new().read(true).write(true).open(path);
        file.map(Arc::new).map_err(|source| self.io("opening", path, source))
    }

    fn io(&self, what: &'static str, path: &Path, source: io::Error) -> UpperError {
        UpperError::Io { what, path: path.to_owned(), source }
    }

    fn format(&self, source: Error) -> UpperError {
        UpperError::Format { dir: self.path.clone(), source }
    }
}

const DATA: Role = Role::DataHeader { sealed: false };
const INDEX: Role = Role::IndexHeader;

/// The id in a file's header; `None` when there is no such file.
fn identity(path: &Path, role: Role) -> Result<Option<Uuid>, UpperError> {
    let read = || -> io::Result<Option<Uuid>> {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let mut header = vec![0; usize::try_from(HEADER_LEN).expect("4096")];
        aenv_overlaybd::ReadAt::read_at(&file, &mut header, 0)?;
        Ok(Some(Header::decode(&header, role)?.uuid))
    };
    read().map_err(|source| UpperError::Io { what: "reading the header of", path: path.to_owned(), source })
}

/// Renames without ever replacing something.
fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    renameat_with(rustix::fs::CWD, from, rustix::fs::CWD, to, RenameFlags::NOREPLACE).map_err(|errno| {
        let hint = match errno {
            rustix::io::Errno::XDEV => "must be on the same file system as the upper's directory",
            rustix::io::Errno::EXIST => "exists already",
            rustix::io::Errno::NOENT => "lies in a directory that doesn't exist",
            _ => "could not be made",
        };
        io::Error::new(io::Error::from(errno).kind(), format!("{} {hint}", to.display()))
    })
}
