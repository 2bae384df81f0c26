//! Watching directories with inotify.
//!
//! A watch holds one inotify queue. Recursive ones hold a kernel watch per directory below; a directory that appears
//! is added and what is already in it is reported as created, because it may have got there before the kernel looked.
//! When the kernel's queue overflows, or a tree is too large, the watch fails for good and says so: a watcher that
//! silently misses changes is worse than none.

use std::{
    collections::HashMap,
    ffi::OsStr,
    io,
    mem::MaybeUninit,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
};

use aenv_envd_proto::filesystem::{EventType, FilesystemEvent};
use connectrpc::ConnectError;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use tokio::io::unix::AsyncFd;

use super::entry;
use crate::users::Names;

/// Directories one recursive watch may hold.
const MAX_DIRS: usize = 8192;

pub(super) struct Watch {
    queue: AsyncFd<OwnedFd>,
    root: PathBuf,
    recursive: bool,
    include_entry: bool,
    /// Kernel watch → directory, relative to `root`.
    dirs: HashMap<i32, PathBuf>,
}

#[derive(Debug, Clone, thiserror::Error)]
pub(super) enum WatchError {
    #[error("cannot watch {path}: {why}")]
    Add { path: String, why: String },
    #[error("{0} holds more than {MAX_DIRS} directories: watch a smaller tree, or not recursively")]
    TooLarge(String),
    #[error(
        "changes came faster than they were read and some are lost: list the directory and watch it again"
    )]
    Overflow,
}

impl From<WatchError> for ConnectError {
    fn from(err: WatchError) -> Self {
        let message = err.to_string();
        match err {
            WatchError::Add { .. } | WatchError::TooLarge(_) => Self::resource_exhausted(message),
            WatchError::Overflow => Self::data_loss(message),
        }
    }
}

fn interest(recursive_child: bool) -> WatchFlags {
    let inside = WatchFlags::CREATE
        | WatchFlags::MOVED_TO
        | WatchFlags::MOVED_FROM
        | WatchFlags::MODIFY
        | WatchFlags::ATTRIB
        | WatchFlags::DELETE
        | WatchFlags::ONLYDIR;
    // The end of a child is already its parent's event.
    if recursive_child { inside } else { inside | WatchFlags::DELETE_SELF | WatchFlags::MOVE_SELF }
}

impl Watch {
    /// Must be called inside the runtime; blocks for as long as the tree takes to walk.
    pub(super) fn new(root: PathBuf, recursive: bool, include_entry: bool) -> Result<Self, WatchError> {
        let add_error =
            |err: io::Error| WatchError::Add { path: root.display().to_string(), why: err.to_string() };
        let queue = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)
            .map_err(io::Error::from)
            // SAFETY: an `OwnedFd` is open and stays the same for as long as it is owned, which here is to the end.
            .and_then(|fd| unsafe { AsyncFd::register(fd) }.map_err(io::Error::from))
            .map_err(add_error)?;
        let mut watch = Self { queue, root, recursive, include_entry, dirs: HashMap::new() };
        watch.add(PathBuf::new(), &mut Vec::new())?;
        Ok(watch)
    }

    /// Adds `dir` and, if recursive, all below it; what it finds below goes to `found`.
    fn add(&mut self, dir: PathBuf, found: &mut Vec<PathBuf>) -> Result<(), WatchError> {
        let mut left = vec![dir];
        while let Some(dir) = left.pop() {
            if self.dirs.len() >= MAX_DIRS {
                return Err(WatchError::TooLarge(self.root.display().to_string()));
            }
            let path = self.root.join(&dir);
            let is_root = dir.as_os_str().is_empty();
            match inotify::add_watch(self.queue.get_ref(), &path, interest(!is_root)) {
                Ok(id) => drop(self.dirs.insert(id, dir.clone())),
                // Gone again, or no directory: nothing to watch, unless it is what was asked for.
                Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) if !is_root => continue,
                Err(err) => {
                    return Err(WatchError::Add { path: path.display().to_string(), why: err.to_string() });
                }
            }
            if !self.recursive {
                continue;
            }
            for entry in std::fs::read_dir(&path).into_iter().flatten().flatten() {
                let child = dir.join(entry.file_name());
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    left.push(child.clone());
                }
                found.push(child);
            }
        }
        Ok(())
    }

    /// Waits until there is something to take.
    pub(super) async fn ready(&self) -> io::Result<()> {
        let mut guard = self.queue.readable().await?;
        // Whether it is really so only a read can tell, and the reader may be somebody else.
        guard.clear_ready();
        Ok(())
    }

    /// The same for who must not hold on to the watch while waiting.
    pub(super) fn poll_ready(&self, cx: &mut std::task::Context<'_>) -> std::task::Poll<io::Result<()>> {
        self.queue.poll_read_ready(cx).map_ok(|mut guard| guard.clear_ready())
    }

    /// Everything that has happened so far.
    pub(super) fn take(&mut self) -> Result<Vec<FilesystemEvent>, WatchError> {
        let mut raw = Vec::new();
        let mut buffer = [MaybeUninit::uninit(); 8192];
        let mut reader = inotify::Reader::new(self.queue.get_ref(), &mut buffer);
        while let Ok(event) = reader.next() {
            let name = event.file_name().map(|name| OsStr::from_bytes(name.to_bytes()).to_owned());
            raw.push((event.wd(), event.events(), name));
        }
        let mut events = Vec::new();
        for (id, flags, name) in raw {
            if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
                return Err(WatchError::Overflow);
            }
            if flags.contains(ReadFlags::IGNORED) {
                self.dirs.remove(&id);
                continue;
            }
            let Some(dir) = self.dirs.get(&id) else { continue };
            let path = name.map_or_else(|| dir.clone(), |name| dir.join(name));
            for kind in kinds(flags) {
                events.push(self.event(&path, kind));
            }
            let new_dir =
                flags.contains(ReadFlags::ISDIR) && flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO);
            if new_dir && self.recursive {
                let mut found = Vec::new();
                self.add(path, &mut found)?;
                events.extend(found.iter().map(|path| self.event(path, EventType::Create)));
            }
        }
        Ok(events)
    }

    fn event(&self, path: &Path, kind: EventType) -> FilesystemEvent {
        let is_there = matches!(kind, EventType::Create | EventType::Chmod | EventType::Write);
        let entry = (self.include_entry && is_there)
            .then(|| entry::describe(&self.root.join(path), &Names::read()).ok())
            .flatten();
        let name = if path.as_os_str().is_empty() { ".".into() } else { path.to_string_lossy().into_owned() };
        FilesystemEvent { name, r#type: kind.into(), entry: entry.into(), ..Default::default() }
    }
}

/// One kernel event may be several of ours; their order is E2B's.
fn kinds(flags: ReadFlags) -> impl Iterator<Item = EventType> {
    [
        (ReadFlags::CREATE | ReadFlags::MOVED_TO, EventType::Create),
        (ReadFlags::MOVED_FROM | ReadFlags::MOVE_SELF, EventType::Rename),
        (ReadFlags::ATTRIB, EventType::Chmod),
        (ReadFlags::MODIFY, EventType::Write),
        (ReadFlags::DELETE | ReadFlags::DELETE_SELF, EventType::Remove),
    ]
    .into_iter()
    .filter(move |(any, _)| flags.intersects(*any))
    .map(|(_, kind)| kind)
}

/// Filesystems whose changes may come from elsewhere, which inotify does not see: NFS, SMB, CIFS, FUSE.
pub(super) fn is_remote(path: &Path) -> bool {
    const REMOTE: [i64; 5] = [0x6969, 0x517b, 0xff53_4d42, 0xfe53_4d42, 0x6573_5546];
    rustix::fs::statfs(path).is_ok_and(|fs| REMOTE.contains(&fs.f_type))
}
