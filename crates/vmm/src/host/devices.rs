//! Devices, namespaces and system calls, each tried.

use super::Check;
use rustix::thread::UnshareFlags;
use std::{fs::File, io};

const TUNSETIFF: u64 = 0x4004_54ca;
const IFF_TAP_NO_PI: u16 = 0x1002;
/// Only faults of user mode: what an unprivileged process may have.
const UFFD_USER_MODE_ONLY: i32 = 1;

/// Tries them all. Blocks for milliseconds.
pub(super) fn examine() -> Vec<Check> {
    vec![
        required("fuse", open("/dev/fuse"), "modprobe fuse; in a container pass --device /dev/fuse"),
        required(
            "netns",
            apart(|| Ok("can be made".to_owned())),
            "run as root (CAP_SYS_ADMIN and CAP_NET_ADMIN)",
        ),
        required("tun", apart(tap), "modprobe tun; in a container pass --device /dev/net/tun; run as root"),
        Check::optional(
            "ublk",
            open("/dev/ublk-control"),
            "FUSE is used instead. For faster disks: a kernel of 6.0 or newer with ublk_drv (modprobe ublk_drv)",
        ),
        Check::optional(
            "userfaultfd",
            userfaultfd(),
            "not needed now; sysctl vm.unprivileged_userfaultfd=1 or run as root",
        ),
        Check::optional(
            "io_uring",
            io_uring(),
            "threads are used instead; sysctl kernel.io_uring_disabled=0",
        ),
    ]
}

fn required(name: &str, outcome: io::Result<String>, remedy: &str) -> Check {
    match outcome {
        Ok(found) => Check::ok(name, found),
        Err(error) => Check::fail(name, format!("not usable: {error}"), remedy),
    }
}

fn open(path: &str) -> io::Result<String> {
    File::options().read(true).write(true).open(path).map(|_| path.to_owned())
}

/// Runs a step in a network namespace of its own, which ends with its thread.
fn apart(step: fn() -> io::Result<String>) -> io::Result<String> {
    std::thread::Builder::new()
        .name("doctor-netns".into())
        .spawn(move || {
            // SAFETY: only this thread's network namespace changes, which Rust code has no assumptions about.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }?;
            step()
        })?
        .join()
        .map_err(|_| io::Error::other("the examining thread panicked"))?
}

fn tap() -> io::Result<String> {
    use std::os::fd::AsRawFd;
    let device = File::options().read(true).write(true).open("/dev/net/tun")?;
    let mut request = [0_u8; 40]; // struct ifreq: a name of 16 bytes, then the flags
    request[..4].copy_from_slice(b"aenv");
    request[16..18].copy_from_slice(&IFF_TAP_NO_PI.to_ne_bytes());
    // SAFETY: TUNSETIFF reads and writes one struct ifreq, which is 40 bytes.
    match unsafe { libc::ioctl(device.as_raw_fd(), TUNSETIFF, request.as_mut_ptr()) } {
        0 => Ok("taps can be made".to_owned()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn userfaultfd() -> io::Result<String> {
    // SAFETY: takes flags only; the descriptor it returns is closed below.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | UFFD_USER_MODE_ONLY) };
    closed(fd).map(|()| "works".to_owned())
}

fn io_uring() -> io::Result<String> {
    let mut parameters = [0_u8; 120]; // struct io_uring_params
    // SAFETY: reads and writes one struct io_uring_params; the descriptor it returns is closed below.
    let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
    closed(fd).map(|()| "works".to_owned())
}

fn closed(fd: i64) -> io::Result<()> {
    match i32::try_from(fd) {
        Ok(fd) if fd >= 0 => {
            // SAFETY: just returned by the kernel and owned by nobody else.
            unsafe { libc::close(fd) };
            Ok(())
        }
        _ => Err(io::Error::last_os_error()),
    }
}
