//! The end of the machine: processes are asked to stop, then made to, the disk is brought to rest, the VM is reset.

use std::{process::ExitCode, time::Duration};

use rustix::{
    mount::{MountFlags, mount_remount},
    system::{RebootCommand, reboot},
};

/// How long processes have between SIGTERM and SIGKILL.
pub(crate) const GRACE: Duration = Duration::from_secs(2);
/// How long the kernel may take to end them after SIGKILL.
pub(crate) const DEATH: Duration = Duration::from_secs(1);

/// Signals every process but ourselves.
pub(crate) fn signal_all(signal: i32) {
    // SAFETY: kill has no memory effects. As PID 1, -1 means every process but ourselves.
    unsafe { libc::kill(-1, signal) };
}

/// Whether anything that was started still runs: every orphan is a child of PID 1. (Asking kill(2) would count the
/// kernel's own threads.)
pub(crate) fn anyone_left() -> bool {
    // SAFETY: siginfo_t is plain data, and waitid writes only into it. WNOWAIT leaves what it finds to the reaper.
    let result = unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        libc::waitid(libc::P_ALL, 0, &raw mut info, libc::WEXITED | libc::WNOHANG | libc::WNOWAIT)
    };
    result == 0
}

/// Brings the disk to rest and resets the machine; the VMM (`-no-reboot`, Firecracker) takes a reset for a clean end.
pub(crate) fn reset() -> ExitCode {
    if std::process::id() != 1 {
        return ExitCode::FAILURE;
    }
    rustix::fs::sync();
    // Busy files keep the root from being unmounted; read-only is as good for the journal.
    let _ = mount_remount("/", MountFlags::RDONLY, "");
    rustix::fs::sync();
    let _ = reboot(RebootCommand::Restart);
    ExitCode::FAILURE
}
