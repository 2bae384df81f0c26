//! Starting a program with the least a kernel can be asked for.
//!
//! `fork` would copy the agent's page tables for every command, which is what an emulated CPU is slowest at. So the
//! child is made the way `posix_spawn` makes it: it shares our memory and we stand still (`CLONE_VM | CLONE_VFORK`)
//! until it has become another program or given up. Unlike `posix_spawn` we can be born into a cgroup, change users
//! and say which step failed. Between clone and exec the child only makes system calls: no allocation, no locks.

use std::{
    ffi::{CStr, CString},
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use crate::users::User;

#[cfg(not(target_arch = "x86_64"))]
compile_error!("spawn's few lines of assembly are written for x86_64 only");

/// What to run.
pub(crate) struct Program<'a> {
    /// Files to try in turn, each with the name the program is called by (its `argv[0]`).
    pub(crate) candidates: Vec<(CString, CString)>,
    /// Arguments after `argv[0]`.
    pub(crate) args: Vec<CString>,
    /// `KEY=value`.
    pub(crate) env: Vec<CString>,
    pub(crate) dir: CString,
    pub(crate) user: &'a User,
    pub(crate) stdio: [BorrowedFd<'a>; 3],
    /// Make stdin the controlling terminal.
    pub(crate) terminal: bool,
    pub(crate) cgroup: Option<BorrowedFd<'a>>,
}

#[derive(Debug, thiserror::Error)]
#[error("{step}: {source}")]
pub(crate) struct SpawnError {
    step: &'static str,
    pub(crate) source: io::Error,
}

const STEPS: [&str; 8] = [
    "cannot make a process",
    "cannot start a session",
    "cannot attach input and output",
    "cannot take the terminal",
    "cannot set the groups",
    "cannot become the user",
    "cannot enter the working directory",
    "cannot execute",
];

/// Enough for a debug build's frames; untouched pages cost nothing.
const STACK: usize = 128 << 10;

struct Child {
    argv: *mut *const libc::c_char,
    envp: *const *const libc::c_char,
    candidates: *const (CString, CString),
    candidate_count: usize,
    dir: *const libc::c_char,
    groups: *const u32,
    group_count: usize,
    uid: u32,
    gid: u32,
    stdio: [i32; 3],
    terminal: bool,
    failed_step: usize,
    errno: i32,
}

/// Runs `program` in a session and process group of its own and returns its pid.
pub(crate) fn spawn(program: &Program<'_>) -> Result<i32, SpawnError> {
    let mut argv = vec![std::ptr::null()];
    argv.extend(program.args.iter().map(|arg| arg.as_ptr()));
    argv.push(std::ptr::null());
    let mut envp: Vec<*const libc::c_char> = program.env.iter().map(|var| var.as_ptr()).collect();
    envp.push(std::ptr::null());
    let mut child = Child {
        argv: argv.as_mut_ptr(),
        envp: envp.as_ptr(),
        candidates: program.candidates.as_ptr(),
        candidate_count: program.candidates.len(),
        dir: program.dir.as_ptr(),
        groups: program.user.groups.as_ptr(),
        group_count: program.user.groups.len(),
        uid: program.user.uid,
        gid: program.user.gid,
        stdio: program.stdio.map(|fd| fd.as_raw_fd()),
        terminal: program.terminal,
        failed_step: 0,
        errno: 0,
    };
    let mut stack: Vec<u128> = Vec::with_capacity(STACK / size_of::<u128>());
    let pid = {
        let _quiet = SignalsBlocked::new();
        let mut made = clone_vfork(&mut child, &mut stack, program.cgroup);
        let no_cgroup = made.as_ref().is_err_and(|err| {
            matches!(err.raw_os_error(), Some(libc::ENODEV | libc::ENOENT | libc::EBUSY | libc::EOPNOTSUPP))
        });
        if no_cgroup {
            // A guest may have removed its cgroup or made it unusable: a process outside it is better than none. But
            // one that is refused by the cgroup's own limits stays refused.
            made = clone_vfork(&mut child, &mut stack, None);
        }
        made.map_err(|source| SpawnError { step: STEPS[0], source })?
    };
    // SAFETY: `child` was written by the other process in our memory while we stood still; it is gone or has its own
    // memory by now.
    let (step, errno) = unsafe {
        (
            std::ptr::read_volatile(&raw const child.failed_step),
            std::ptr::read_volatile(&raw const child.errno),
        )
    };
    if step == 0 {
        return Ok(pid);
    }
    // It has exited; unless the reaper was faster, take its remains.
    // SAFETY: a null status pointer is allowed.
    unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::WNOHANG) };
    Err(SpawnError {
        step: STEPS.get(step).copied().unwrap_or(STEPS[0]),
        source: io::Error::from_raw_os_error(errno),
    })
}

/// All signals blocked while it lives: a handler must not run in the child, in our memory.
struct SignalsBlocked(libc::sigset_t);

impl SignalsBlocked {
    fn new() -> Self {
        // SAFETY: sigset_t is plain data and both calls only write into the sets given.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            Self(before)
        }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: restores the mask that `new` stored.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut()) };
    }
}

/// clone3(2). The child starts on its own stack in `in_child`, which never returns, so the two never share a frame.
fn clone_vfork(child: &mut Child, stack: &mut Vec<u128>, cgroup: Option<BorrowedFd<'_>>) -> io::Result<i32> {
    // SAFETY: clone_args is plain data; all zeros asks for nothing.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = (libc::CLONE_VM | libc::CLONE_VFORK).cast_unsigned().into();
    args.exit_signal = libc::SIGCHLD.cast_unsigned().into();
    args.stack = stack.as_mut_ptr() as u64;
    args.stack_size = STACK as u64;
    if let Some(cgroup) = cgroup {
        const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = u64::from(cgroup.as_raw_fd().cast_unsigned());
    }
    let result: i64;
    // SAFETY: the system call gets a valid structure and its size. In the child (result 0) the stack pointer is the
    // top of `stack`, 16-byte aligned and ours alone; it calls `in_child` with `child`, which outlives it because we
    // stand still until it is gone. rcx and r11 are what `syscall` clobbers; r12 and r13 keep their values across it.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r13",
            "call r12",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone3 => result,
            in("rdi") &raw const args,
            in("rsi") size_of::<libc::clone_args>(),
            in("r12") in_child as extern "C" fn(*mut Child) -> !,
            in("r13") std::ptr::from_mut(child),
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    match i32::try_from(result) {
        Ok(pid) if pid > 0 => Ok(pid),
        Ok(errno) => Err(io::Error::from_raw_os_error(-errno)),
        Err(_) => Err(io::ErrorKind::Unsupported.into()),
    }
}

/// The child's whole life before it is another program.
extern "C" fn in_child(child: *mut Child) -> ! {
    // SAFETY: the parent stands still and `child` points into its stack: nobody else touches what we read and write.
    // Only system calls and their thin wrappers are used.
    unsafe {
        let step = prepare_and_exec(child);
        let errno = *libc::__errno_location();
        std::ptr::write_volatile(&raw mut (*child).errno, errno);
        std::ptr::write_volatile(&raw mut (*child).failed_step, step);
        libc::_exit(127)
    }
}

/// Returns the step that failed.
///
/// # Safety
/// `child` is valid and the pointers in it are too, and nobody else runs in this memory.
unsafe fn prepare_and_exec(child: *mut Child) -> usize {
    // SAFETY: see above.
    let child = unsafe { &*child };
    // SAFETY: system calls on values the parent prepared. The raw numbers are used for the user change because the
    // C library's wrappers would try to change every thread of a process that is not ours.
    unsafe {
        if libc::setsid() == -1 {
            return 1;
        }
        for (target, fd) in (0..).zip(child.stdio) {
            if libc::dup2(fd, target) == -1 {
                return 2;
            }
        }
        if child.terminal && libc::ioctl(0, libc::TIOCSCTTY, 0) == -1 {
            return 3;
        }
        set_oom_score();
        if libc::geteuid() == 0 {
            if libc::syscall(libc::SYS_setgroups, child.group_count, child.groups) == -1 {
                return 4;
            }
            let (uid, gid) = (child.uid, child.gid);
            if libc::syscall(libc::SYS_setresgid, gid, gid, gid) == -1
                || libc::syscall(libc::SYS_setresuid, uid, uid, uid) == -1
            {
                return 5;
            }
        }
        if libc::chdir(child.dir) == -1 {
            return 6;
        }
        libc::umask(0o022);
        // Rust ignores SIGPIPE, and what is ignored stays so in the new program.
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        let mut denied = false;
        for index in 0..child.candidate_count {
            let (path, name) = &*child.candidates.add(index);
            *child.argv = name.as_ptr();
            libc::execve(path.as_ptr(), child.argv, child.envp);
            match *libc::__errno_location() {
                libc::ENOENT | libc::ENOTDIR => {}
                libc::EACCES => denied = true,
                _ => return 7,
            }
        }
        if denied {
            *libc::__errno_location() = libc::EACCES;
        }
        7
    }
}

/// The agent is exempt from the out-of-memory killer; what it starts is the first to go.
///
/// # Safety
/// Only system calls; callable between clone and exec.
unsafe fn set_oom_score() {
    const PATH: &CStr = c"/proc/self/oom_score_adj";
    const SCORE: &[u8] = b"100";
    // SAFETY: constants with known lengths.
    unsafe {
        let fd = libc::open(PATH.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if fd >= 0 {
            libc::write(fd, SCORE.as_ptr().cast(), SCORE.len());
            libc::close(fd);
        }
    }
}
