//! Processes that callers start, and what stays of them.
//!
//! ```text
//!   Start ──launch──▶ running ──exit──▶ draining ──end of output, or quiet──▶ ended ──▶ forgotten
//!             │          │ deadline: SIGKILL to the group ▲                      (after [`ENDED_KEPT`] younger ones)
//!             └ fails: the error is the answer, nothing stays
//! ```
//! - *running*: listed; its output goes to a [`spool`], whoever listens.
//! - *draining*: the process is gone but something may still hold its output open (a child in the background). What
//!   comes within [`launch::QUIET`] of the last byte still counts.
//! - *ended*: not listed; `Connect` by pid or tag still yields what nobody has heard, and the exit.
//!
//! Leaving a stream changes nothing here. All of it is memory: it survives pause, resume and fork, and is lost with
//! the guest.

mod cgroup;
mod launch;
pub(crate) mod listen;
mod pty;
mod reaper;
mod rehearsal;
pub(crate) mod service;
mod spawn;
mod spool;

use std::{
    collections::{HashMap, VecDeque},
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use aenv_envd_proto::process::ProcessConfig;
use connectrpc::ConnectError;
use tokio::{net::unix::pipe, sync::Mutex as AsyncMutex};

use crate::guest::Guest;
use pty::Terminal;
use reaper::Reaper;
use spool::{Budget, Spool};

/// How many ended processes can still be asked about. At one command a second that is over an hour.
const ENDED_KEPT: usize = 4096;

/// Memory for the output of all processes: 64 MiB, less in a guest that has little.
fn output_budget() -> usize {
    let eighth = usize::try_from(crate::system::metrics::total_memory() / 8).unwrap_or(usize::MAX);
    eighth.clamp(8 << 20, 64 << 20)
}

/// Where input goes.
enum Input {
    Pipe(pipe::Sender),
    Closed,
}

struct Process {
    pid: u32,
    tag: Option<String>,
    config: ProcessConfig,
    terminal: Option<Terminal>,
    /// An asynchronous lock, because input must stay in order while a full pipe is waited for.
    input: AsyncMutex<Input>,
    spool: Arc<Spool>,
}

impl Process {
    /// Signals the process and what it started in its group.
    fn signal(&self, signal: i32) -> io::Result<()> {
        let pid = i32::try_from(self.pid).map_err(io::Error::other)?;
        // SAFETY: kill has no memory effects.
        match unsafe { libc::kill(-pid, signal) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

struct Ended {
    pid: u32,
    tag: Option<String>,
    spool: Arc<Spool>,
}

/// The processes of this guest.
pub(crate) struct Processes {
    guest: Arc<Guest>,
    reaper: Arc<Reaper>,
    cgroup: cgroup::UserCgroup,
    budget: Arc<Budget>,
    table: Mutex<Table>,
    rehearsal_armed: AtomicBool,
    /// With one processor a rehearsal would only stand in the way.
    can_rehearse: bool,
}

#[derive(Default)]
struct Table {
    running: HashMap<u32, Arc<Process>>,
    ended: VecDeque<Ended>,
}

/// A process as a request names it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Selector {
    Pid(u32),
    Tag(String),
}

impl Selector {
    fn matches(&self, pid: u32, tag: Option<&str>) -> bool {
        match self {
            Self::Pid(wanted) => *wanted == pid,
            Self::Tag(wanted) => tag == Some(wanted),
        }
    }

    fn not_found(&self) -> ConnectError {
        ConnectError::not_found(match self {
            Self::Pid(pid) => format!("process with pid {pid} not found"),
            Self::Tag(tag) => format!("process with tag {tag} not found"),
        })
    }
}

impl Processes {
    /// Must be called inside the runtime.
    pub(crate) fn start(guest: Arc<Guest>) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            guest,
            reaper: Reaper::start()?,
            cgroup: cgroup::UserCgroup::default(),
            budget: Budget::new(output_budget()),
            table: Mutex::default(),
            rehearsal_armed: AtomicBool::new(false),
            can_rehearse: std::thread::available_parallelism().is_ok_and(|found| found.get() > 1),
        }))
    }

    /// The next connection will be the first after a restore.
    pub(crate) fn arm_rehearsal(&self) {
        self.rehearsal_armed.store(true, Ordering::Relaxed);
    }

    /// Runs a shell that does nothing, as nobody's process, while the caller goes on: after a restore under emulation
    /// the kernel's and the shell's code has to be translated anew, which is most of a first command's time. With one
    /// processor it would only stand in the way. It reads no file of a user and no randomness that matters.
    pub(crate) fn rehearse_if_armed(self: &Arc<Self>) {
        if self.rehearsal_armed.swap(false, Ordering::Relaxed) && self.can_rehearse {
            let processes = Arc::clone(self);
            // Nobody waits for it, and an image without a shell has nothing to rehearse.
            drop(tokio::task::spawn_blocking(move || rehearsal::run(&processes)));
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running(&self, selector: &Selector) -> Result<Arc<Process>, ConnectError> {
        let table = self.table();
        let found = match selector {
            Selector::Pid(pid) => table.running.get(pid),
            Selector::Tag(_) => {
                table.running.values().find(|process| selector.matches(process.pid, process.tag.as_deref()))
            }
        };
        found.cloned().ok_or_else(|| selector.not_found())
    }

    /// Pid and output of a process, running or ended.
    fn output_of(&self, selector: &Selector) -> Result<(u32, Arc<Spool>), ConnectError> {
        if let Ok(process) = self.running(selector) {
            return Ok((process.pid, Arc::clone(&process.spool)));
        }
        let table = self.table();
        let newest_first = table.ended.iter().rev();
        newest_first
            .filter(|ended| selector.matches(ended.pid, ended.tag.as_deref()))
            .map(|ended| (ended.pid, Arc::clone(&ended.spool)))
            .next()
            .ok_or_else(|| selector.not_found())
    }

    fn add(&self, process: &Arc<Process>) {
        self.table().running.insert(process.pid, Arc::clone(process));
    }

    fn retire(&self, process: &Arc<Process>) {
        let mut table = self.table();
        // The pid may have been given to a younger process by now.
        if table.running.get(&process.pid).is_some_and(|known| Arc::ptr_eq(known, process)) {
            table.running.remove(&process.pid);
        }
        if table.ended.len() >= ENDED_KEPT {
            table.ended.pop_front();
        }
        table.ended.push_back(Ended {
            pid: process.pid,
            tag: process.tag.clone(),
            spool: Arc::clone(&process.spool),
        });
    }
}
