//! One running QEMU.
//!
//! A watcher task waits for the process to end, tells the cause once and clears away what only a living process needs.
//! It and the control connection belong to the handle: dropping the handle ends both and leaves the machine alone.

use super::{
    end::{self, Evidence},
    files::{Files, Kept},
    qmp::{self, Client, Told},
};
use crate::{
    Backend, Error, Exit, MemoryRegion, Result, Vm, VmRecord, cgroup, console, kernel_log, maps,
    process::{Process, Status},
};
use async_trait::async_trait;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::{
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{MissedTickBehavior, interval, timeout},
};

/// Generous, because on a host with forty emulated guests a core everything takes its time.
const CONNECT: Duration = Duration::from_secs(20);
const START: Duration = Duration::from_secs(60);
const COMMAND: Duration = Duration::from_secs(10);
/// Stopping drains and flushes the drives, which may hang on remote storage.
const STOP: Duration = Duration::from_secs(30);
const SAVE: Duration = Duration::from_secs(30);
/// From SIGKILL to the end: the kernel gives back gigabytes and finishes I/O under way.
const KILL: Duration = Duration::from_secs(30);
/// How long an ended process's last words may still be under way.
const LAST_WORDS: Duration = Duration::from_secs(1);
const CONSOLE_CHECK: Duration = Duration::from_secs(5);
/// Bytes of console and log that are looked at for a cause.
const TAIL: u64 = 16 << 10;

/// A machine that was started or adopted.
pub(super) struct Machine {
    record: VmRecord,
    kept: Kept,
    files: Files,
    process: Arc<Process>,
    /// The control connection, remade when it was lost.
    control: tokio::sync::Mutex<Option<Arc<Client>>>,
    signs: Arc<Signs>,
    exit: watch::Receiver<Option<Exit>>,
    watcher: JoinHandle<()>,
}

/// What the watcher must know of the handle's doings.
#[derive(Default)]
struct Signs {
    killed: AtomicBool,
    told: Mutex<Option<watch::Receiver<Told>>>,
}

impl Machine {
    /// Takes hold of the process just started.
    pub(super) fn of(kept: Kept, files: Files, pid: i32) -> Result<Self> {
        let opened = Process::open(pid, None).and_then(|process| {
            // Even one that ended at once is our child and there as a zombie; but its start time can't be told any more.
            process.ok_or_else(|| io::Error::other(format!("it ended at once: {}", log_tail(&files))))
        });
        match opened {
            Ok(process) => Ok(Self::new(kept, files, process)),
            Err(source) => {
                // Nobody can watch this process, so it must not live.
                discard(pid, &files, &kept);
                Err(Error::Io { context: format!("starting QEMU for {}", kept.id), source })
            }
        }
    }

    /// Takes over a process that another server started.
    pub(super) async fn adopt(record: &VmRecord) -> Result<Option<Self>> {
        let files = Files::new(&record.dir);
        let kept = files.read();
        let process = Process::open(record.pid, Some(record.start_time))
            .map_err(|source| Error::Io { context: format!("looking for process {}", record.pid), source })?;
        let Some(process) = process else {
            // What its watcher would have cleared had it lived to see the end.
            if let Some(kept) = kept {
                let _ = tokio::task::spawn_blocking(move || clear(&files, &kept)).await;
            }
            return Ok(None);
        };
        let Some(kept) = kept else {
            return Err(Error::Io {
                context: format!(
                    "process {} of {} lives, but {} has no readable qemu.json: kill the process",
                    record.pid,
                    record.id,
                    record.dir.display()
                ),
                source: io::ErrorKind::NotFound.into(),
            });
        };
        let machine = Self::new(kept, files, process);
        // Answering is not a condition: one that hangs can still be watched and killed.
        if let Err(error) = machine.control().await {
            tracing::warn!(id = %record.id, %error, "an adopted machine doesn't answer on its control socket");
        }
        Ok(Some(machine))
    }

    fn new(kept: Kept, files: Files, process: Process) -> Self {
        let record = VmRecord {
            backend: Backend::Qemu,
            id: kept.id.clone(),
            pid: process.pid(),
            start_time: process.start_time(),
            dir: files.dir().to_owned(),
            memory_mib: kept.memory_mib,
            restored: kept.restored,
        };
        let (publish, exit) = watch::channel(None);
        let process = Arc::new(process);
        let signs = Arc::new(Signs::default());
        let watcher = Watcher {
            process: Arc::clone(&process),
            signs: Arc::clone(&signs),
            files: files.clone(),
            kept: kept.clone(),
        };
        let watcher = tokio::spawn(watcher.run(publish));
        Self { record, kept, files, process, control: tokio::sync::Mutex::default(), signs, exit, watcher }
    }

    /// Waits for the virtual CPUs of a machine just started. On failure its process is killed.
    pub(super) async fn wait_until_running(&self) -> Result<()> {
        let guard = KillUnlessRunning(Some(&self.process));
        let mut exit = self.exit.clone();
        let running = tokio::select! {
            running = timeout(START, self.running()) => {
                running.unwrap_or(Err(Error::Deadline { step: "starting the virtual CPUs", limit: START }))
            }
            _ = exit.wait_for(Option::is_some) => Err(self.did_not_start()),
        };
        match running {
            Ok(()) => {
                guard.keep();
                Ok(())
            }
            Err(error) => {
                drop(guard);
                // So that nothing is left when the error arrives. It was killed: this is short.
                let _ = timeout(KILL, self.ended()).await;
                Err(match error {
                    Error::Exited(_) => self.did_not_start(),
                    other => other,
                })
            }
        }
    }

    async fn running(&self) -> Result<()> {
        let control = self.control().await?;
        let mut told = control.told();
        let status = self.ask(&control, "query-status", json!({}), COMMAND).await?;
        if status["running"] == true {
            return Ok(());
        }
        let resumed =
            told.wait_for(|told| told.resumed > 0 || told.closed).await.is_ok_and(|told| told.resumed > 0);
        if resumed { Ok(()) } else { Err(self.gone("query-status").await) }
    }

    fn did_not_start(&self) -> Error {
        let words = log_tail(&self.files);
        let reason = if words.is_empty() { "it ended without a word".to_owned() } else { words };
        Error::Refused { command: "start".to_owned(), reason }
    }

    async fn control(&self) -> Result<Arc<Client>> {
        let mut slot = self.control.lock().await;
        if let Some(client) = slot.as_ref().filter(|client| client.is_open()) {
            return Ok(Arc::clone(client));
        }
        if let Some(exit) = self.exit.borrow().clone() {
            return Err(Error::Exited(exit));
        }
        match Client::connect(&self.files.socket(), CONNECT).await {
            Ok(client) => {
                let client = Arc::new(client);
                *self.signs.told.lock() = Some(client.told());
                *slot = Some(Arc::clone(&client));
                Ok(client)
            }
            Err(error) => Err(self.explain(error).await),
        }
    }

    async fn command(&self, command: &'static str, arguments: Value, limit: Duration) -> Result<Value> {
        let control = self.control().await?;
        self.ask(&control, command, arguments, limit).await
    }

    async fn ask(
        &self,
        control: &Client,
        command: &'static str,
        arguments: Value,
        limit: Duration,
    ) -> Result<Value> {
        match control.execute(command, arguments, limit).await {
            Ok(value) => Ok(value),
            Err(error) => Err(self.explain(error).await),
        }
    }

    async fn explain(&self, error: qmp::Error) -> Error {
        match error {
            qmp::Error::Refused { command, reason } => Error::Refused { command: command.to_owned(), reason },
            qmp::Error::Deadline { command, limit } => Error::Deadline { step: command, limit },
            qmp::Error::Closed => self.gone("control connection").await,
            qmp::Error::Connect(source) => match self.gone("connect").await {
                Error::Exited(exit) => Error::Exited(exit),
                _ => {
                    Error::Io { context: format!("connecting to {}", self.files.socket().display()), source }
                }
            },
        }
    }

    /// A connection that was lost mostly means an end that the watcher is about to tell.
    async fn gone(&self, command: &str) -> Error {
        match timeout(LAST_WORDS * 2, self.ended()).await {
            Ok(Some(exit)) => Error::Exited(exit),
            _ => Error::Refused {
                command: command.to_owned(),
                reason: "QEMU closed its control connection but its process lives".to_owned(),
            },
        }
    }

    async fn ended(&self) -> Option<Exit> {
        self.exit.clone().wait_for(Option::is_some).await.ok()?.clone()
    }
}

#[async_trait]
impl Vm for Machine {
    fn record(&self) -> VmRecord {
        self.record.clone()
    }

    async fn pause(&self) -> Result<()> {
        // QEMU answers when its virtual CPUs stand and its drives are drained and flushed.
        self.command("stop", json!({}), STOP).await.map(drop)
    }

    async fn resume(&self) -> Result<()> {
        self.command("cont", json!({}), COMMAND).await.map(drop)
    }

    async fn save_state(&self, path: &Path) -> Result<()> {
        let refused =
            |reason: String| Error::Refused { command: "xen-save-devices-state".to_owned(), reason };
        let status = self.command("query-status", json!({}), COMMAND).await?;
        if status["running"] == true {
            return Err(refused("the machine runs: pause it first".to_owned()));
        }
        let mut part = path.as_os_str().to_owned();
        part.push(".part");
        let (part, path) = (std::path::PathBuf::from(part), path.to_owned());
        let Some(name) = part.to_str().filter(|_| path.is_absolute()) else {
            return Err(refused(format!("{} must be an absolute UTF-8 path", path.display())));
        };
        // Never its counterpart xen-load-devices-state, which aborts QEMU. live=false keeps the machine resumable.
        let saved =
            self.command("xen-save-devices-state", json!({ "filename": name, "live": false }), SAVE).await;
        let placed = match &saved {
            Ok(_) => tokio::fs::rename(&part, &path).await,
            Err(_) => tokio::fs::remove_file(&part).await,
        };
        saved?;
        placed.map_err(|source| Error::Io { context: format!("placing {}", path.display()), source })
    }

    async fn memory(&self) -> Result<Vec<MemoryRegion>> {
        let (pid, file, bytes) =
            (self.record.pid, self.kept.memory.clone(), u64::from(self.kept.memory_mib) << 20);
        let found = tokio::task::spawn_blocking(move || maps::find(pid, &file, bytes)).await;
        match found.map_err(io::Error::other).and_then(|found| found) {
            Ok(regions) => Ok(regions),
            Err(source) => match self.exit.borrow().clone() {
                Some(exit) => Err(Error::Exited(exit)),
                None => {
                    Err(Error::Io { context: format!("finding the memory of {}", self.record.id), source })
                }
            },
        }
    }

    fn exit(&self) -> watch::Receiver<Option<Exit>> {
        self.exit.clone()
    }

    async fn kill(&self) -> Result<Exit> {
        self.signs.killed.store(true, Ordering::Release);
        self.process.kill().map_err(|source| Error::Io {
            context: format!("killing process {}", self.record.pid),
            source,
        })?;
        match timeout(KILL, self.ended()).await {
            Ok(Some(exit)) => Ok(exit),
            _ => Err(Error::Deadline { step: "ending the killed process", limit: KILL }),
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.watcher.abort();
    }
}

/// Kills the process when a start is given up, by its error or because nobody waits for it any more.
struct KillUnlessRunning<'a>(Option<&'a Process>);

impl KillUnlessRunning<'_> {
    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for KillUnlessRunning<'_> {
    fn drop(&mut self) {
        if let Some(process) = self.0
            && let Err(error) = process.kill()
        {
            tracing::error!(pid = process.pid(), %error, "a machine whose start failed could not be killed");
        }
    }
}

struct Watcher {
    process: Arc<Process>,
    signs: Arc<Signs>,
    files: Files,
    kept: Kept,
}

impl Watcher {
    async fn run(self, publish: watch::Sender<Option<Exit>>) {
        let status = self.wait().await;
        let shutdown = self.last_words().await;
        let killed = self.signs.killed.load(Ordering::Acquire);
        let judged = tokio::task::spawn_blocking(move || {
            let exit = self.judge(status, killed, shutdown.as_deref());
            clear(&self.files, &self.kept);
            (self.kept.id, exit)
        })
        .await;
        match judged {
            Ok((id, exit)) => {
                tracing::info!(%id, %exit, "machine ended");
                publish.send_replace(Some(exit));
            }
            Err(error) => tracing::error!(%error, "judging a machine's end failed"),
        }
    }

    /// Waits for the end, and keeps the console bounded until then.
    async fn wait(&self) -> Status {
        let mut check = interval(CONSOLE_CHECK);
        check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let ended = self.process.ended();
        tokio::pin!(ended);
        loop {
            tokio::select! {
                status = &mut ended => return status,
                _ = check.tick() => {
                    let path = self.files.console();
                    let bounded = tokio::task::spawn_blocking(move || console::bound(&path)).await;
                    match bounded.map_err(io::Error::other).and_then(|done| done) {
                        Err(error) if error.kind() != io::ErrorKind::NotFound => {
                            tracing::warn!(id = %self.kept.id, %error, "a console was not kept bounded");
                        }
                        _ => {}
                    }
                }
            }
        }
    }

    /// The reason of the shutdown, once all that QEMU sent has been read.
    async fn last_words(&self) -> Option<String> {
        let mut told = self.signs.told.lock().clone()?;
        let _ = timeout(LAST_WORDS, told.wait_for(|told| told.closed)).await;
        told.borrow().shutdown.clone()
    }

    fn judge(&self, status: Status, killed: bool, shutdown: Option<&str>) -> Exit {
        let untimely = !killed && matches!(status, Status::Signalled(libc::SIGKILL) | Status::Untold);
        let host_oom = untimely.then(|| kernel_log::memory_kill(self.process.pid())).flatten();
        end::decide(&Evidence {
            status,
            killed,
            shutdown,
            console: &console::tail(&self.files.console(), TAIL),
            log: &console::tail(&self.files.log(), TAIL),
            host_oom: host_oom.as_deref(),
        })
    }
}

/// The cause of an end that no server watched, from what the machine left in its directory. Blocks.
pub(super) fn post_mortem(record: &VmRecord) -> Exit {
    let files = Files::new(&record.dir);
    end::decide(&Evidence {
        status: Status::Untold,
        killed: false,
        shutdown: None,
        console: &console::tail(&files.console(), TAIL),
        log: &console::tail(&files.log(), TAIL),
        host_oom: kernel_log::memory_kill(record.pid).as_deref(),
    })
}

/// Ends a child that has no [`Process`] yet and removes what it had. Blocks until the kernel has ended it.
pub(super) fn discard(child: i32, files: &Files, kept: &Kept) {
    if let Some(pid) = rustix::process::Pid::from_raw(child) {
        // Errors here say that it has ended and was reaped.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
    }
    clear(files, kept);
}

/// Removes what only a living process needs. Blocks.
fn clear(files: &Files, kept: &Kept) {
    if let Err(error) = files.clear() {
        tracing::warn!(dir = %files.dir().display(), %error, "an ended machine's files stay behind");
    }
    cgroup::remove(&kept.cgroups);
}

/// QEMU's last words, warnings left out unless there is nothing else.
fn log_tail(files: &Files) -> String {
    let log = console::tail(&files.log(), TAIL);
    let lines = || log.lines().map(str::trim).filter(|line| !line.is_empty());
    lines()
        .rfind(|line| !line.contains("warning:"))
        .or_else(|| lines().next_back())
        .unwrap_or_default()
        .to_owned()
}
