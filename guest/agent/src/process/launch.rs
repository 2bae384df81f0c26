//! From a request to a running process, and the tasks that see it to its end.

use std::{
    collections::BTreeMap,
    ffi::CString,
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use aenv_envd_proto::process::ProcessConfig;
use bytes::{Bytes, BytesMut};
use connectrpc::ConnectError;
use rustix::{
    fs::{Mode, OFlags},
    pipe::{PipeFlags, pipe_with},
};
use tokio::{io::AsyncReadExt, net::unix::pipe, sync::Mutex as AsyncMutex, sync::oneshot, task::JoinSet};

use super::{
    Input, Process, Processes,
    pty::{Size, Terminal},
    reaper::WaitStatus,
    spawn::Program,
    spool::{End, Listener, Spool, Stream},
};
use crate::users::User;

/// Where programs are looked for when the environment has no PATH.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// After the exit: output may still come from what the process left behind, until there was none for this long.
pub(super) const QUIET: Duration = Duration::from_millis(300);
/// And never longer than this, except while a listener is being waited for.
const DRAIN: Duration = Duration::from_secs(5);

const READ: usize = 32 << 10;

/// A process to be started.
pub(super) struct Launch {
    pub(super) config: ProcessConfig,
    pub(super) tag: Option<String>,
    pub(super) terminal: Option<Size>,
    pub(super) stdin: bool,
    pub(super) user: User,
    /// When it is killed.
    pub(super) deadline: Option<Instant>,
}

/// The sides of pipes or a terminal that stay with us.
struct Ends {
    terminal: Option<Terminal>,
    stdin: Option<OwnedFd>,
    outputs: Vec<(Stream, OwnedFd)>,
}

impl Launch {
    /// Starts it, attached. Blocks while the program is loaded: call it on a blocking thread, inside the runtime.
    pub(super) fn run(self, processes: &Arc<Processes>) -> Result<(u32, Listener), ConnectError> {
        let invalid = |why: String| ConnectError::invalid_argument(why);
        let dir = self.directory(processes)?;
        let env = self.environment(&processes.guest.env());
        let candidates = candidates(&self.config.cmd, env.get("PATH").map_or(PATH, String::as_str))
            .map_err(|err| invalid(err.to_string()))?;
        let (ends, stdio) = self.open_ends().map_err(|err| {
            ConnectError::resource_exhausted(format!("cannot open input and output of the process: {err}"))
        })?;
        let nul = |what: &str| invalid(format!("{what} contains a NUL byte"));
        let program = Program {
            candidates,
            args: c_strings(self.config.args.iter().cloned()).map_err(|()| nul("an argument"))?,
            env: c_strings(env.iter().map(|(key, value)| format!("{key}={value}")))
                .map_err(|()| nul("an environment variable"))?,
            dir: CString::new(dir.into_os_string().into_encoded_bytes()).map_err(|_| nul("cwd"))?,
            user: &self.user,
            stdio: [stdio[0].as_fd(), stdio[1].as_fd(), stdio[2].as_fd()],
            terminal: ends.terminal.is_some(),
            cgroup: processes.cgroup.get(processes.guest.machine),
        };
        let (pid, ended) = processes.reaper.spawn(&program).map_err(|err| {
            let message = format!("error starting process '{}': {err}", self.config.cmd);
            match err.source.raw_os_error() {
                Some(libc::EAGAIN | libc::ENOMEM) => ConnectError::resource_exhausted(message),
                _ => invalid(message),
            }
        })?;
        drop(program);
        // The process's sides must be closed here, or its output would never end.
        drop(stdio);
        let pid = u32::try_from(pid).map_err(|err| ConnectError::internal(err.to_string()))?;
        let spool = Spool::new(Arc::clone(&processes.budget));
        let listener = spool.listen(Some(0));
        let input = ends.stdin.and_then(|fd| pipe::Sender::from_owned_fd(fd).ok());
        let process = Arc::new(Process {
            pid,
            tag: self.tag,
            config: self.config,
            terminal: ends.terminal,
            input: AsyncMutex::new(input.map_or(Input::Closed, Input::Pipe)),
            spool,
        });
        processes.add(&process);
        let pumps = start_pumps(&process, ends.outputs);
        tokio::spawn(see_to_end(Arc::clone(processes), process, pumps, ended, self.deadline));
        Ok((pid, listener))
    }

    fn directory(&self, processes: &Processes) -> Result<std::path::PathBuf, ConnectError> {
        let asked = self.config.cwd.as_deref().unwrap_or_default();
        let dir = processes
            .guest
            .resolve(asked, &self.user)
            .map_err(|err| ConnectError::invalid_argument(format!("cwd: {err}")))?;
        match std::fs::metadata(&dir) {
            Ok(meta) if meta.is_dir() => Ok(dir),
            Ok(_) => {
                Err(ConnectError::invalid_argument(format!("cwd '{}' is not a directory", dir.display())))
            }
            // A user without a home is no reason to run nothing when nobody asked for that directory.
            Err(_) if asked.is_empty() => Ok("/".into()),
            Err(_) => Err(ConnectError::invalid_argument(format!("cwd '{}' does not exist", dir.display()))),
        }
    }

    /// Later ones win: the user's own, the sandbox's, the request's.
    fn environment(&self, sandbox: &BTreeMap<String, String>) -> BTreeMap<String, String> {
        let home = self.user.home.display().to_string();
        let own = [("PATH", PATH), ("HOME", &home), ("USER", &self.user.name), ("LOGNAME", &self.user.name)];
        let mut env: BTreeMap<_, _> = own.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let asked = self.config.envs.iter().map(|(key, value)| (key.clone(), value.clone()));
        env.extend(sandbox.clone().into_iter().chain(asked));
        env
    }

    fn open_ends(&self) -> io::Result<(Ends, [OwnedFd; 3])> {
        if let Some(size) = self.terminal {
            let (terminal, slave) = Terminal::open(size, self.user.uid)?;
            let stdio = [slave.try_clone()?, slave.try_clone()?, slave];
            return Ok((Ends { terminal: Some(terminal), stdin: None, outputs: Vec::new() }, stdio));
        }
        let (stdout, child_stdout) = pipe_with(PipeFlags::CLOEXEC)?;
        let (stderr, child_stderr) = pipe_with(PipeFlags::CLOEXEC)?;
        let (stdin, child_stdin) = if self.stdin {
            let (child, ours) = pipe_with(PipeFlags::CLOEXEC)?;
            (Some(ours), child)
        } else {
            (None, rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
        };
        let outputs = vec![(Stream::Stdout, stdout), (Stream::Stderr, stderr)];
        Ok((Ends { terminal: None, stdin, outputs }, [child_stdin, child_stdout, child_stderr]))
    }
}

fn c_strings(strings: impl Iterator<Item = String>) -> Result<Vec<CString>, ()> {
    strings.map(|string| CString::new(string).map_err(|_| ())).collect()
}

#[derive(Debug, thiserror::Error)]
pub(super) enum CommandError {
    #[error("process.cmd is empty: name a program")]
    Empty,
    #[error("process.cmd contains a NUL byte")]
    Nul,
}

/// The files that `cmd` may mean, in order, each with the name it is called by. E2B's clients always run `/bin/bash`,
/// which a small image may not have: then `sh` takes its place, which understands the same `-l -c COMMAND`.
pub(super) fn candidates(cmd: &str, path: &str) -> Result<Vec<(CString, CString)>, CommandError> {
    if cmd.is_empty() {
        return Err(CommandError::Empty);
    }
    let called = CString::new(cmd).map_err(|_| CommandError::Nul)?;
    let mut found = Vec::new();
    if cmd.contains('/') {
        found.push((called.clone(), called.clone()));
    } else {
        for dir in path.split(':') {
            let dir = if dir.is_empty() { "." } else { dir };
            let file = Path::new(dir).join(cmd).into_os_string().into_encoded_bytes();
            found.push((CString::new(file).map_err(|_| CommandError::Nul)?, called.clone()));
        }
    }
    if matches!(cmd, "/bin/bash" | "bash") {
        found.push((c"/usr/bin/bash".into(), called));
        found.push((c"/bin/sh".into(), c"/bin/sh".into()));
    }
    Ok(found)
}

fn start_pumps(process: &Arc<Process>, outputs: Vec<(Stream, OwnedFd)>) -> JoinSet<()> {
    let mut pumps = JoinSet::new();
    if let Some(terminal) = process.terminal.clone() {
        pumps.spawn(pump_terminal(terminal, Arc::clone(&process.spool)));
    }
    for (stream, fd) in outputs {
        if let Ok(output) = pipe::Receiver::from_owned_fd(fd) {
            pumps.spawn(pump_pipe(output, stream, Arc::clone(&process.spool)));
        }
    }
    pumps
}

/// One buffer serves many small reads: what was read is split off and shared, not copied.
fn with_space(mut buffer: BytesMut) -> BytesMut {
    if buffer.capacity() - buffer.len() < READ / 8 {
        buffer = BytesMut::with_capacity(READ);
    }
    buffer
}

async fn pump_pipe(mut output: pipe::Receiver, stream: Stream, spool: Arc<Spool>) {
    let mut buffer = BytesMut::new();
    loop {
        spool.room().await;
        buffer = with_space(buffer);
        match output.read_buf(&mut buffer).await {
            Ok(0) | Err(_) => return,
            Ok(_) => spool.append(stream, taken(&mut buffer)),
        }
    }
}

async fn pump_terminal(terminal: Terminal, spool: Arc<Spool>) {
    let mut buffer = BytesMut::new();
    loop {
        spool.room().await;
        buffer = with_space(buffer);
        match terminal.read(&mut buffer).await {
            Ok(0) | Err(_) => return,
            Ok(_) => spool.append(Stream::Pty, taken(&mut buffer)),
        }
    }
}

fn taken(buffer: &mut BytesMut) -> Bytes {
    buffer.split().freeze()
}

async fn see_to_end(
    processes: Arc<Processes>,
    process: Arc<Process>,
    mut pumps: JoinSet<()>,
    mut ended: oneshot::Receiver<WaitStatus>,
    deadline: Option<Instant>,
) {
    let status = match deadline {
        None => (&mut ended).await,
        Some(deadline) => match tokio::time::timeout_at(deadline.into(), &mut ended).await {
            Ok(status) => status,
            Err(_) => {
                // Gone already is as good as killed.
                let _ = process.signal(libc::SIGKILL);
                ended.await
            }
        },
    };
    drain(&process.spool, &mut pumps).await;
    processes.retire(&process);
    process.spool.finish(describe(status.unwrap_or_default()));
    *process.input.lock().await = Input::Closed;
    // Something in the background may still write: reading on spares it a SIGPIPE.
    pumps.detach_all();
}

/// Waits for the last of the output.
async fn drain(spool: &Spool, pumps: &mut JoinSet<()>) {
    let started = Instant::now();
    let mut seen = spool.end_offset();
    loop {
        let all_closed = async { while pumps.join_next().await.is_some() {} };
        if tokio::time::timeout(QUIET, all_closed).await.is_ok() {
            return;
        }
        let now = spool.end_offset();
        if !spool.is_held() && (now == seen || started.elapsed() > DRAIN) {
            return;
        }
        seen = now;
    }
}

fn describe(status: WaitStatus) -> End {
    if libc::WIFSIGNALED(status) {
        let name = signal_name(libc::WTERMSIG(status));
        let core = if libc::WCOREDUMP(status) { " (core dumped)" } else { "" };
        let status = format!("signal: {name}{core}");
        return End { exit_code: -1, exited: false, error: Some(status.clone()), status };
    }
    let exit_code = libc::WEXITSTATUS(status);
    let status = format!("exit status {exit_code}");
    End { exit_code, exited: true, error: (exit_code != 0).then(|| status.clone()), status }
}

/// The words Go has for signals, which E2B's clients pass on.
fn signal_name(signal: i32) -> String {
    let name = match signal {
        libc::SIGHUP => "hangup",
        libc::SIGINT => "interrupt",
        libc::SIGQUIT => "quit",
        libc::SIGILL => "illegal instruction",
        libc::SIGTRAP => "trace/breakpoint trap",
        libc::SIGABRT => "aborted",
        libc::SIGBUS => "bus error",
        libc::SIGFPE => "floating point exception",
        libc::SIGKILL => "killed",
        libc::SIGUSR1 => "user defined signal 1",
        libc::SIGSEGV => "segmentation fault",
        libc::SIGUSR2 => "user defined signal 2",
        libc::SIGPIPE => "broken pipe",
        libc::SIGALRM => "alarm clock",
        libc::SIGTERM => "terminated",
        other => return format!("signal {other}"),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(cmd: &str, path: &str) -> Vec<String> {
        let found = candidates(cmd, path).expect("a usable command");
        found.into_iter().map(|(file, _)| file.to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn a_bare_name_is_looked_for_in_the_path_of_the_process() {
        assert_eq!(files("ls", "/a:/b"), ["/a/ls", "/b/ls"]);
        assert_eq!(files("./ls", "/a"), ["./ls"]);
    }

    #[test]
    fn bash_may_be_sh_in_a_small_image() {
        assert_eq!(files("/bin/bash", "/a"), ["/bin/bash", "/usr/bin/bash", "/bin/sh"]);
    }

    #[test]
    fn an_end_reads_as_e2b_clients_know_it() {
        assert_eq!(describe(0).error, None);
        assert_eq!(describe(3 << 8).status, "exit status 3");
        assert_eq!(describe(libc::SIGKILL).status, "signal: killed");
        assert_eq!(describe(libc::SIGKILL).exit_code, -1);
    }
}
