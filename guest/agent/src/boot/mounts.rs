//! Mounts: those of the initramfs, the move into the root, and the ones every program expects.

use std::{
    ffi::CStr,
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::Path,
};

use rustix::{
    fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags},
    mount::{MountFlags, mount, mount_move},
};

use super::BootError;
use crate::console::say;

const NEW_ROOT: &str = "/newroot";
const QUIET: MountFlags = MountFlags::NOSUID.union(MountFlags::NOEXEC).union(MountFlags::NODEV);

/// What has to be there before anything can be read or found.
pub(super) fn early() -> Result<(), BootError> {
    for (kind, target, flags) in [
        ("proc", "/proc", QUIET),
        ("sysfs", "/sys", QUIET),
        ("devtmpfs", "/dev", MountFlags::NOSUID | MountFlags::NOEXEC),
    ] {
        make_dir(target);
        match mount(kind, target, kind, flags, None) {
            // The kernel may have mounted devtmpfs itself.
            Ok(()) | Err(rustix::io::Errno::BUSY) => {}
            Err(err) => return Err(BootError::step(format!("mount {target}"), err)),
        }
    }
    Ok(())
}

/// The initramfs after it was left, to be emptied: it is memory.
pub(super) struct Initramfs(rustix::fd::OwnedFd);

/// Mounts `device`, moves the mounts of [`early`] into it and makes it the root. None when the old root was not a
/// memory filesystem, which must not be emptied.
pub(super) fn enter_root(device: &str) -> Result<Option<Initramfs>, BootError> {
    make_dir(NEW_ROOT);
    mount(device, NEW_ROOT, "ext4", MountFlags::NOATIME, None)
        .map_err(|err| BootError::step(format!("mount {device} (ext4, read-write)"), err))?;
    let old = rustix::fs::open("/", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|err| BootError::step("open the initramfs", err))?;
    for target in ["/dev", "/proc", "/sys"] {
        let inside = format!("{NEW_ROOT}{target}");
        make_dir(&inside);
        mount_move(target, &inside).map_err(|err| BootError::step(format!("move {target}"), err))?;
    }
    rustix::process::chdir(NEW_ROOT).map_err(|err| BootError::step("enter the root", err))?;
    mount_move(".", "/").map_err(|err| BootError::step("move the root", err))?;
    rustix::process::chroot(".").map_err(|err| BootError::step("change the root", err))?;
    rustix::process::chdir("/").map_err(|err| BootError::step("enter the root", err))?;
    const RAMFS: i64 = 0x8584_58f6;
    const TMPFS: i64 = 0x0102_1994;
    let in_memory = rustix::fs::fstatfs(&old).is_ok_and(|fs| matches!(fs.f_type, RAMFS | TMPFS));
    Ok(in_memory.then_some(Initramfs(old)))
}

impl Initramfs {
    /// Removes its files. The running binary keeps its own pages until it ends.
    pub(super) fn free(self) {
        if let Ok(device) = rustix::fs::fstat(&self.0).map(|stat| stat.st_dev) {
            empty(&self.0, device, 16);
        }
    }
}

/// Removes what is below `dir` on the same device. Errors are passed over: what stays only costs memory.
fn empty(dir: &rustix::fd::OwnedFd, device: u64, depth: u8) {
    let Ok(entries) = Dir::read_from(dir) else { return };
    for entry in entries.flatten() {
        let name: &CStr = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        if entry.file_type() != FileType::Directory {
            let _ = rustix::fs::unlinkat(dir, name, AtFlags::empty());
            continue;
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Ok(child) = rustix::fs::openat(dir, name, flags, Mode::empty()) else { continue };
        let same = rustix::fs::fstat(&child).is_ok_and(|stat| stat.st_dev == device);
        if same && depth > 0 {
            empty(&child, device, depth - 1);
            let _ = rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR);
        }
    }
}

/// The mounts of a running system. `/tmp` stays the image's own directory: hiding what an image put there would break
/// it, and a memory filesystem would charge its files to the guest's memory.
pub(super) fn standard() {
    for (kind, target, flags, data) in [
        ("devpts", "/dev/pts", MountFlags::NOSUID | MountFlags::NOEXEC, c"gid=5,mode=620,ptmxmode=666"),
        ("tmpfs", "/dev/shm", MountFlags::NOSUID | MountFlags::NODEV, c"mode=1777"),
        ("tmpfs", "/run", MountFlags::NOSUID | MountFlags::NODEV, c"mode=755"),
        ("cgroup2", "/sys/fs/cgroup", QUIET, c"nsdelegate"),
    ] {
        make_dir(target);
        if let Err(err) = mount(kind, target, kind, flags, data) {
            say(&format!("mount {target}: {err}"));
        }
    }
    for (target, link) in [
        ("/proc/self/fd", "/dev/fd"),
        ("/proc/self/fd/0", "/dev/stdin"),
        ("/proc/self/fd/1", "/dev/stdout"),
        ("/proc/self/fd/2", "/dev/stderr"),
    ] {
        let _ = symlink(target, link);
    }
    make_dir("/tmp");
    if fs::metadata("/tmp").is_ok_and(|tmp| tmp.mode() & 0o7777 != 0o1777) {
        let _ = fs::set_permissions("/tmp", fs::Permissions::from_mode(0o1777));
    }
    let _ = rustix::fs::mkdirat(CWD, "/run/lock", Mode::from_raw_mode(0o1777));
}

fn make_dir(path: &str) {
    if !Path::new(path).is_dir() {
        let _ = fs::create_dir_all(path);
    }
}
