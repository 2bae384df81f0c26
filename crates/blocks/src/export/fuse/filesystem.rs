//! The kernel's requests.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry,
    ReplyLseek, ReplyOpen, ReplyWrite, Request, TimeOrNow, WriteFlags,
};

use super::tree::{Node, Owner, Tree};

/// An attribute never changes while its inode lives. Names are looked up anew each time: they come and go.
const ATTR_TTL: Duration = Duration::from_secs(3600);
const NAME_TTL: Duration = Duration::ZERO;
const MAX_REQUEST: u32 = 1 << 20;

pub(super) struct FuseFilesystem {
    tree: Arc<Tree>,
    passthrough: bool,
}

thread_local! {
    /// Each FUSE thread answers one request at a time: its buffer is kept.
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl FuseFilesystem {
    pub(super) fn new(tree: Arc<Tree>) -> Self {
        Self { tree, passthrough: false }
    }

    /// Runs a request against an export, logging its first error.
    fn with<T>(
        &self,
        ino: INodeNo,
        what: &'static str,
        f: impl FnOnce(&Node) -> io::Result<T>,
    ) -> Result<T, Errno> {
        let node = self.tree.inode(ino.0).ok_or(Errno::from_i32(libc::ESTALE))?;
        f(&node).map_err(|error| {
            if error.kind() == io::ErrorKind::ReadOnlyFilesystem {
                return Errno::EROFS;
            }
            if node.device.traffic().failed() {
                tracing::error!(%error, inode = ino.0, what, "an export failed; further errors are only counted");
            }
            if error.kind() == io::ErrorKind::StorageFull { Errno::ENOSPC } else { Errno::EIO }
        })
    }
}

fn attributes(ino: u64, size: u64, kind: FileType, owner: Owner) -> FileAttr {
    FileAttr {
        ino: INodeNo(ino),
        size,
        blocks: size.div_ceil(512),
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind,
        perm: owner.mode,
        nlink: 1,
        uid: owner.uid,
        gid: owner.gid,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

/// Names are no secret, contents are: a jailed VMM must be able to reach the file it was given.
fn root() -> FileAttr {
    attributes(INodeNo::ROOT.0, 0, FileType::Directory, Owner { uid: 0, gid: 0, mode: 0o711 })
}

fn file(node: &Node) -> FileAttr {
    attributes(node.ino, node.device.size(), FileType::RegularFile, *node.owner.lock())
}

impl Filesystem for FuseFilesystem {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = InitFlags::FUSE_ASYNC_DIO | InitFlags::FUSE_PARALLEL_DIROPS;
        if let Err(missing) = config.add_capabilities(wanted) {
            tracing::debug!(?missing, "this kernel's FUSE lacks something");
        }
        let _previous = config.set_max_write(MAX_REQUEST);
        let _previous = config.set_max_background(64);
        // Passthrough needs a stacking depth; the files behind it lie on plain file systems.
        self.passthrough = config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).is_ok()
            && config.set_max_stack_depth(1).is_ok();
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let node =
            (parent == INodeNo::ROOT).then(|| name.to_str()).flatten().and_then(|n| self.tree.named(n));
        match node {
            Some(node) => {
                reply.entry_with_ttls(&ATTR_TTL, &NAME_TTL, &file(&node), Generation(0));
            }
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        if ino == INodeNo::ROOT {
            return reply.attr(&NAME_TTL, &root());
        }
        match self.tree.inode(ino.0) {
            Some(node) => reply.attr(&ATTR_TTL, &file(&node)),
            None => reply.error(Errno::from_i32(libc::ESTALE)),
        }
    }

    /// Owner and mode can be changed, by the kernel's usual rules; a size can't; times are let pass.
    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        match self.tree.inode(ino.0) {
            None => reply.error(Errno::from_i32(libc::ESTALE)),
            Some(node) if size.is_some_and(|size| size != node.device.size()) => reply.error(Errno::EPERM),
            Some(node) => {
                let mut owner = node.owner.lock();
                owner.uid = uid.unwrap_or(owner.uid);
                owner.gid = gid.unwrap_or(owner.gid);
                let asked = mode.and_then(|mode| u16::try_from(mode & 0o777).ok());
                owner.mode = asked.unwrap_or(owner.mode);
                drop(owner);
                reply.attr(&ATTR_TTL, &file(&node));
            }
        }
    }

    /// Read-only exports may be opened for writing: QEMU does so to punch holes, which is answered below.
    fn open(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let Some(node) = self.tree.inode(ino.0) else {
            return reply.error(Errno::from_i32(libc::ESTALE));
        };
        let make_backing = || {
            let file = node.device.local_file().filter(|_| self.passthrough)?;
            reply
                .open_backing(file)
                .inspect_err(|error| tracing::debug!(%error, "no passthrough for this file"))
                .ok()
        };
        match node.open(make_backing) {
            None => reply.error(Errno::from_i32(libc::ESTALE)),
            Some(Some(id)) => reply.opened_passthrough(FileHandle(0), FopenFlags::FOPEN_NOFLUSH, &id),
            Some(None) => {
                let flags = FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH;
                reply.opened(FileHandle(0), flags);
            }
        }
    }

    fn release(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        // Answered first: the handle is gone for its owner when the reply arrives, and closing may free a device.
        reply.ok();
        self.tree.close(ino.0);
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        BUFFER.with_borrow_mut(|buffer| {
            let done = self.with(ino, "read", |node| {
                let left = node.device.size().saturating_sub(offset);
                let wanted = u64::from(size).min(left);
                let len = usize::try_from(wanted).expect("a request's size");
                if buffer.len() < len {
                    buffer.resize(len, 0);
                }
                node.device.read_at(&mut buffer[..len], offset)?;
                node.device.traffic().read(wanted);
                Ok(len)
            });
            match done {
                Ok(len) => reply.data(&buffer[..len]),
                Err(errno) => reply.error(errno),
            }
        });
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let Ok(len) = u32::try_from(data.len()) else { return reply.error(Errno::EINVAL) };
        if self.tree.inode(ino.0).is_some_and(|node| offset.saturating_add(len.into()) > node.device.size()) {
            return reply.error(Errno::ENOSPC);
        }
        let done = self.with(ino, "write", |node| {
            node.device.write_at(data, offset)?;
            node.device.traffic().wrote(len.into());
            Ok(())
        });
        match done {
            Ok(()) => reply.written(len),
            Err(errno) => reply.error(errno),
        }
    }

    fn fsync(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        match self.with(ino, "flush", |node| node.device.flush()) {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    fn fallocate(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let punch = mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) != 0;
        let other =
            mode & !(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE);
        if other != 0 {
            return reply.error(Errno::EOPNOTSUPP);
        }
        let done = self.with(ino, "zero", |node| {
            let size = node.device.size();
            let length = length.min(size.saturating_sub(offset));
            // Plain allocation inside the device needs nothing; on a read-only export see the module's head.
            if !punch || !node.device.is_writable() || length == 0 {
                return Ok(());
            }
            node.device.write_zeroes(offset, length)
        });
        match done {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    fn lseek(&self, _: &Request, ino: INodeNo, _: FileHandle, offset: i64, whence: i32, reply: ReplyLseek) {
        let found = self.with(ino, "seek", |node| {
            let from = u64::try_from(offset).unwrap_or(u64::MAX);
            if from >= node.device.size() {
                return Ok(None);
            }
            Ok(match whence {
                libc::SEEK_DATA => node.device.next_data(from),
                libc::SEEK_HOLE => Some(node.device.next_hole(from)),
                _ => None,
            })
        });
        match found.map(|at| at.and_then(|at| i64::try_from(at).ok())) {
            Ok(Some(at)) => reply.offset(at),
            Ok(None) => reply.error(Errno::ENXIO),
            Err(errno) => reply.error(errno),
        }
    }

    fn readdir(&self, _: &Request, ino: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        if ino != INodeNo::ROOT {
            return reply.error(Errno::ENOTDIR);
        }
        let dots = [".", ".."].map(|name| (name.to_owned(), INodeNo::ROOT.0, FileType::Directory));
        let files = self.tree.list().into_iter().map(|(name, ino)| (name, ino, FileType::RegularFile));
        let skip = usize::try_from(offset).unwrap_or(usize::MAX);
        for (next, (name, ino, kind)) in (1u64..).zip(dots.into_iter().chain(files)).skip(skip) {
            if reply.add(INodeNo(ino), next, kind, name) {
                break;
            }
        }
        reply.ok();
    }
}
