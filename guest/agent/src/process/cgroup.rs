//! The cgroup all started processes live in, so that their memory has a limit below the guest's and the agent always
//! has room to answer.

use std::{
    fs,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::OnceLock,
};

use rustix::fs::{Mode, OFlags};

use crate::{console::say, guest::Machine, system::metrics::total_memory};

const ROOT: &str = "/sys/fs/cgroup";
const USER: &str = "/sys/fs/cgroup/user";

/// Memory that processes can't take: an agent and kernel that still answer are worth a few percent.
const RESERVE: u64 = 24 << 20;

/// Made when the first process starts.
#[derive(Default)]
pub(crate) struct UserCgroup(OnceLock<Option<OwnedFd>>);

impl UserCgroup {
    /// None where the machine isn't ours or has no cgroups; processes then stay in the agent's.
    pub(crate) fn get(&self, machine: Machine) -> Option<BorrowedFd<'_>> {
        self.0.get_or_init(|| (machine == Machine::Ours).then(make).flatten()).as_ref().map(AsFd::as_fd)
    }
}

fn make() -> Option<OwnedFd> {
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    let _ = fs::write(format!("{ROOT}/cgroup.subtree_control"), "+memory +pids +cpu");
    if let Err(err) = fs::create_dir_all(USER) {
        say(&format!("cgroup {USER}: {err}; processes run without one"));
        return None;
    }
    let total = total_memory();
    let limit = total.saturating_sub(RESERVE.max(total / 32)).max(total / 2);
    let _ = fs::write(format!("{USER}/memory.max"), limit.to_string());
    // A fork bomb must leave room for the threads of the agent and the kernel.
    let threads = fs::read_to_string("/proc/sys/kernel/threads-max").unwrap_or_default();
    let threads: u64 = threads.trim().parse().unwrap_or(4096);
    let _ = fs::write(format!("{USER}/pids.max"), (threads / 4 * 3).to_string());
    rustix::fs::open(USER, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).ok()
}
