//! A monitor's process: started so that it owes nothing to the server, found again by pid and start time, watched
//! through a pidfd whether it is our child or not.
//!
//! `posix_spawn` is used rather than fork, because it costs the same however much memory the server has (glibc clones
//! with `CLONE_VM|CLONE_VFORK`). The network namespace is inherited from a thread made for the purpose: a namespace
//! change can't be undone safely on a thread that others use.

use rustix::{
    fd::{AsFd, AsRawFd, OwnedFd},
    io::Errno,
    process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid},
};
use std::{
    ffi::{CString, OsString},
    fs::File,
    io,
    os::unix::ffi::OsStringExt,
    path::PathBuf,
    ptr,
};
use tokio::io::{Interest, unix::AsyncFd};

/// The first descriptor that [`Launch::pass`] becomes in the new process.
pub(crate) const FIRST_PASSED_FD: i32 = 3;

/// What to start.
pub(crate) struct Launch {
    /// Absolute path of the program.
    pub(crate) program: PathBuf,
    /// Its arguments after the program's name.
    pub(crate) arguments: Vec<OsString>,
    /// Network namespace to start in; `None` for the server's own.
    pub(crate) netns: Option<OwnedFd>,
    /// Where its stdout and stderr go. stdin is /dev/null.
    pub(crate) log: File,
    /// Descriptors it gets, as 3, 4 and so on. It gets no others.
    pub(crate) pass: Vec<OwnedFd>,
}

impl Launch {
    /// Starts the program in a session of its own and returns its pid. Blocks for about a millisecond.
    ///
    /// # Errors
    /// What `setns`, `posix_spawn` or the exec inside it gave.
    pub(crate) fn start(self) -> io::Result<i32> {
        if self.netns.is_none() {
            return self.spawn();
        }
        std::thread::Builder::new()
            .name("vmm-launch".into())
            .spawn(move || {
                if let Some(netns) = &self.netns {
                    rustix::thread::move_into_link_name_space(
                        netns.as_fd(),
                        Some(rustix::thread::LinkNameSpaceType::Network),
                    )?;
                }
                self.spawn()
            })?
            .join()
            .map_err(|_| io::Error::other("the launching thread panicked"))?
    }

    fn spawn(&self) -> io::Result<i32> {
        let null = File::options().read(true).open("/dev/null")?;
        // Sources moved out of the way of the numbers they are copied to.
        let away = |fd: &dyn AsFd| rustix::io::fcntl_dupfd_cloexec(fd.as_fd(), 64);
        let mut sources = vec![away(&null)?, away(&self.log)?, away(&self.log)?];
        for fd in &self.pass {
            sources.push(away(fd)?);
        }

        let program = terminated(self.program.clone().into_os_string())?;
        let mut arguments = vec![program.clone()];
        for argument in &self.arguments {
            arguments.push(terminated(argument.clone())?);
        }
        let argv: Vec<_> =
            arguments.iter().map(|word| word.as_ptr().cast_mut()).chain([ptr::null_mut()]).collect();
        // Nothing of the server's environment, which may hold secrets.
        let path = c"PATH=/usr/sbin:/usr/bin:/sbin:/bin";
        let environment = [path.as_ptr().cast_mut(), ptr::null_mut()];

        let mut actions = Actions::new()?;
        for (number, source) in (0..).zip(&sources) {
            actions.copy(source, number)?;
        }
        actions.close_from(i32::try_from(sources.len()).unwrap_or(i32::MAX))?;
        actions.work_in(c"/")?;
        let attributes = Attributes::new_session()?;
        let mut pid = 0;
        // SAFETY: every pointer is to a live, NUL-terminated string or an initialised object, and both arrays end with a
        // null pointer; posix_spawn doesn't write through argv and envp.
        check(unsafe {
            libc::posix_spawn(
                &raw mut pid,
                program.as_ptr(),
                &raw const actions.0,
                &raw const attributes.0,
                argv.as_ptr(),
                environment.as_ptr(),
            )
        })?;
        Ok(pid)
    }
}

fn terminated(word: OsString) -> io::Result<CString> {
    CString::new(word.into_vec())
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "an argument holds a NUL byte"))
}

fn check(code: i32) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(code)) }
}

struct Actions(libc::posix_spawn_file_actions_t);

impl Actions {
    fn new() -> io::Result<Self> {
        let mut actions = std::mem::MaybeUninit::uninit();
        // SAFETY: the object is initialised by this call and only taken when it succeeded.
        check(unsafe { libc::posix_spawn_file_actions_init(actions.as_mut_ptr()) })?;
        // SAFETY: initialised just above.
        Ok(Self(unsafe { actions.assume_init() }))
    }

    fn copy(&mut self, from: &OwnedFd, to: i32) -> io::Result<()> {
        // SAFETY: self.0 is initialised.
        check(unsafe { libc::posix_spawn_file_actions_adddup2(&raw mut self.0, from.as_raw_fd(), to) })
    }

    fn close_from(&mut self, first: i32) -> io::Result<()> {
        // SAFETY: self.0 is initialised.
        check(unsafe { libc::posix_spawn_file_actions_addclosefrom_np(&raw mut self.0, first) })
    }

    fn work_in(&mut self, dir: &std::ffi::CStr) -> io::Result<()> {
        // SAFETY: self.0 is initialised; the path is copied.
        check(unsafe { libc::posix_spawn_file_actions_addchdir_np(&raw mut self.0, dir.as_ptr()) })
    }
}

impl Drop for Actions {
    fn drop(&mut self) {
        // SAFETY: self.0 is initialised and not used again.
        unsafe { libc::posix_spawn_file_actions_destroy(&raw mut self.0) };
    }
}

struct Attributes(libc::posix_spawnattr_t);

impl Attributes {
    /// A session of its own, no signal blocked, none ignored.
    fn new_session() -> io::Result<Self> {
        let mut attributes = std::mem::MaybeUninit::uninit();
        // SAFETY: the object is initialised by this call and only taken when it succeeded.
        check(unsafe { libc::posix_spawnattr_init(attributes.as_mut_ptr()) })?;
        // SAFETY: initialised just above.
        let mut this = Self(unsafe { attributes.assume_init() });
        let flags =
            i32::from(libc::POSIX_SPAWN_SETSID) | libc::POSIX_SPAWN_SETSIGMASK | libc::POSIX_SPAWN_SETSIGDEF;
        let flags = i16::try_from(flags).unwrap_or(i16::MAX);
        let mut set = std::mem::MaybeUninit::uninit();
        // SAFETY: the sets are initialised by sigemptyset and sigaddset before they are read, and copied by the setters;
        // this.0 is initialised.
        unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            check(libc::posix_spawnattr_setsigmask(&raw mut this.0, set.as_ptr()))?;
            // Rust programs ignore it, and what is ignored would stay so across exec.
            libc::sigaddset(set.as_mut_ptr(), libc::SIGPIPE);
            check(libc::posix_spawnattr_setsigdefault(&raw mut this.0, set.as_ptr()))?;
            check(libc::posix_spawnattr_setflags(&raw mut this.0, flags))?;
        }
        Ok(this)
    }
}

impl Drop for Attributes {
    fn drop(&mut self) {
        // SAFETY: self.0 is initialised and not used again.
        unsafe { libc::posix_spawnattr_destroy(&raw mut self.0) };
    }
}

/// How a process ended, as far as its parent was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    /// It returned this code.
    Exited(i32),
    /// It was ended by this signal.
    Signalled(i32),
    /// It was not our child, so nobody tells us.
    Untold,
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "exit status {code}"),
            Self::Signalled(signal) => write!(f, "signal {signal}"),
            Self::Untold => f.write_str("exit status unknown, it was not our child"),
        }
    }
}

/// A living or just ended process that can't be mistaken for another.
pub(crate) struct Process {
    pid: i32,
    start_time: u64,
    handle: AsyncFd<OwnedFd>,
}

impl Process {
    /// Takes hold of a process; `None` when there is none of this pid or, given `started`, it is another one.
    ///
    /// # Errors
    /// When the kernel has no pidfds (before 5.3) or descriptors ran out. Must be called on a tokio runtime.
    pub(crate) fn open(pid: i32, started: Option<u64>) -> io::Result<Option<Self>> {
        // from_raw panics on negative numbers, and the number may come from a damaged record.
        let Some(number) = (pid > 0).then(|| Pid::from_raw(pid)).flatten() else { return Ok(None) };
        let handle = match pidfd_open(number, PidfdFlags::NONBLOCK) {
            Ok(handle) => handle,
            Err(Errno::SRCH) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        // Read after the handle was taken: from now on the pid can't be given to another process unnoticed.
        let Some(start_time) = start_time(pid) else {
            // A zombie. If it is our child, whose handle was dropped before its end, nobody else will reap it.
            let _ = waitid(WaitId::PidFd(handle.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
            return Ok(None);
        };
        if started.is_some_and(|started| started != start_time) {
            return Ok(None);
        }
        // SAFETY: an OwnedFd always names the same open descriptor, and AsyncFd owns it from here on.
        let handle = unsafe { AsyncFd::register_with_interest(handle, Interest::READABLE) }
            .map_err(io::Error::from)?;
        Ok(Some(Self { pid, start_time, handle }))
    }

    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    pub(crate) fn start_time(&self) -> u64 {
        self.start_time
    }

    /// Sends SIGKILL. Nothing to do when it has ended.
    pub(crate) fn kill(&self) -> io::Result<()> {
        match pidfd_send_signal(self.handle.get_ref(), Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits for the end, and reaps it if it is our child.
    pub(crate) async fn ended(&self) -> Status {
        // An error here would be one of epoll itself; the process is then asked directly, which blocks nobody for
        // longer than it lives.
        if let Err(error) = self.handle.readable().await {
            tracing::error!(pid = self.pid, %error, "waiting for a monitor's end failed");
        }
        match waitid(
            WaitId::PidFd(self.handle.get_ref().as_fd()),
            WaitIdOptions::EXITED | WaitIdOptions::NOHANG,
        ) {
            Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => Status::Exited(code),
                (_, Some(signal)) => Status::Signalled(signal),
                _ => Status::Untold,
            },
            Ok(None) | Err(_) => Status::Untold,
        }
    }
}

/// Field 22 of `/proc/<pid>/stat`, in clock ticks since boot; `None` when there is no such process or it is a zombie.
pub(crate) fn start_time(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    parse_start_time(&stat)
}

fn parse_start_time(stat: &str) -> Option<u64> {
    // The name in field 2 may hold anything, parentheses and spaces included; what follows it can't.
    let (_, after) = stat.rsplit_once(')')?;
    let mut fields = after.split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hostile_process_name_does_not_move_the_start_time() {
        let fields = |state: &str| format!("12 (a) R 1) {state} {} 4711 8 9", "0 ".repeat(18).trim());
        assert_eq!(parse_start_time(&fields("S")), Some(4711));
        assert_eq!(parse_start_time(&fields("Z")), None);
        assert_eq!(parse_start_time("12 (a"), None);
    }

    #[tokio::test]
    async fn a_program_starts_in_its_own_session_and_its_status_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let log = File::create(dir.path().join("log")).unwrap();
        // The child waits on its end of this, so that it lives until it is watched.
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        // A descriptor that a careless library left without its close-on-exec flag.
        let careless = rustix::io::dup(&reader).unwrap();
        let script = "read -r pid a b c d session rest < /proc/$$/stat; echo $pid $session; \
                      for n in 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do [ -e /proc/$$/fd/$n ] && echo fd $n; done; \
                      read -r go <&3; exit 7";
        let launch = Launch {
            program: "/bin/sh".into(),
            arguments: vec!["-c".into(), script.into()],
            netns: None,
            log,
            pass: vec![reader],
        };
        let pid = tokio::task::spawn_blocking(|| launch.start()).await.unwrap().unwrap();
        let process = Process::open(pid, None).unwrap().unwrap();
        rustix::io::write(&writer, b"go\n").unwrap();
        assert_eq!(process.ended().await, Status::Exited(7));
        drop(careless);
        let said = std::fs::read_to_string(dir.path().join("log")).unwrap();
        assert_eq!(said, format!("{pid} {pid}\nfd 3\n"));
    }

    #[tokio::test]
    async fn a_missing_program_is_an_error_of_the_start() {
        let dir = tempfile::tempdir().unwrap();
        let launch = Launch {
            program: "/nonexistent".into(),
            arguments: vec![],
            netns: None,
            log: File::create(dir.path().join("log")).unwrap(),
            pass: vec![],
        };
        assert_eq!(launch.start().unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[tokio::test]
    async fn a_pid_with_another_start_time_is_another_process() {
        let own = i32::try_from(std::process::id()).unwrap();
        let started = start_time(own).unwrap();
        assert!(Process::open(own, Some(started)).unwrap().is_some());
        assert!(Process::open(own, Some(started + 1)).unwrap().is_none());
        assert!(Process::open(-1, None).unwrap().is_none());
    }
}
