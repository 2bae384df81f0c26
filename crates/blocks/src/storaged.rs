//! The storage process: it exports stacks and outlives the server that asks it to.
//!
//! ```text
//!   start ─► lock <run>/storaged.lock ─► clear a stale mount of ours ─► mount <run>/fuse ─► listen ─► serving
//!                  │ held by another                │ someone else's mount
//!                  └► AlreadyRunning                └► Mount
//!   serving ─Shutdown request, nothing open─► flush, unmount, exit
//!   serving ─signal─► draining (no new exports, I/O goes on) ─last handle closed─► flush, unmount, exit
//!                                                            └─after `drain`─────► flush, detach, StillBusy
//! ```
//! A request to shut down is refused while a device is open, since that would kill the VMs behind it. A signal is
//! the word of whoever owns the machine: it is obeyed after waiting for them, and what they wrote is safe by then.
//!
//! kill -9: acknowledged writes are in the kernel's page cache already and are found at the next open; open handles
//! answer `ENOTCONN` from then on. Bringing those back is the storage issue's work: the seam is that `Exports` is
//! built from requests, which can be replayed, and that `Exporter` owns the mount. A prototype on kernel 6.18 survived 600
//! kills without an error to anybody, and says what it takes: a keeper holds *every* cloned FUSE descriptor (requests belong
//! to the clone they were read from, and end with its last holder), close-on-exec; the next worker asks for what was under
//! way by `FUSE_NOTIFY_RESEND` (6.9), resent requests have bit 63 of `unique` set; passthrough's backing ids live in the
//! connection and are used again, never made anew for an open inode; where the kernel can't resend, the keeper aborts the
//! connection, or clients hang. fuser can't take over a connection that is set up: the wire format must be spoken here.

use std::fs::{self, File, OpenOptions};
use std::future::Future;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use tokio::sync::mpsc;

use crate::control::{Server, ShutdownRequest};
use crate::export::Exporter;
use crate::export::fuse::{FuseExporter, clear_stale_mount};
use crate::exports::Exports;
use crate::source::LocalFiles;

/// How to run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where lock and mount live; made with mode 0700 when missing.
    pub run_dir: PathBuf,
    /// The control socket.
    pub socket: PathBuf,
    /// FUSE threads.
    pub threads: usize,
    /// How long a signal waits for open devices.
    pub drain: Duration,
}

impl Options {
    /// The usual places below `run_dir`, as many threads as cores but at least four, 30 s of draining.
    pub fn in_run_dir(run_dir: impl Into<PathBuf>) -> Self {
        let run_dir = run_dir.into();
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let socket = run_dir.join("storaged.sock");
        Self { run_dir, socket, threads: cores.max(4), drain: Duration::from_secs(30) }
    }
}

/// Why the process ended, or could not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another one has the run directory.
    #[error("another storaged uses {0}; stop it or choose another run directory")]
    AlreadyRunning(PathBuf),
    /// A directory, lock or socket could not be made.
    #[error("{what} {path}: {source}")]
    Io {
        /// What was being done.
        what: &'static str,
        /// To what.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// FUSE doesn't work here.
    #[error("mounting FUSE at {path}: {source}; it needs root and /dev/fuse (modprobe fuse)")]
    Mount {
        /// Where.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Some data may not be on stable storage.
    #[error(transparent)]
    Flush(#[from] crate::exports::Error),
    /// Ended with devices open: their users get errors from now on.
    #[error("ended while {0} handles were still open")]
    StillBusy(u32),
}

/// Runs until a shutdown request is granted or `signal` resolves; see the module's head.
pub async fn run(options: Options, signal: impl Future<Output = ()>) -> Result<(), Error> {
    run_announced(options, || (), signal).await
}

/// Like [`run`], and calls `ready` once requests are answered.
pub async fn run_announced(
    options: Options,
    ready: impl FnOnce(),
    signal: impl Future<Output = ()>,
) -> Result<(), Error> {
    let drain = options.drain;
    let start = tokio::task::spawn_blocking(move || Started::new(options));
    let started = start.await.expect("starting doesn't panic")?;
    let (asked, mut asks) = mpsc::channel(1);
    let io = |what, path: &Path| {
        let path = path.to_owned();
        move |source| Error::Io { what, path, source }
    };
    let server = Server::bind(&started.socket, started.exports.clone(), asked)
        .map_err(io("listening on", &started.socket))?;
    tracing::info!(socket = %started.socket.display(), "storaged is serving");
    ready();
    let serving = tokio::spawn(server.serve());
    let signalled = tokio::select! {
        () = signal => true,
        request = asks.recv() => {
            let ShutdownRequest = request.expect("the server holds the other end");
            false
        }
    };
    started.exports.end();
    if signalled {
        started.wait_until_idle(drain).await;
    }
    serving.abort();
    tokio::task::spawn_blocking(move || started.stop()).await.expect("stopping doesn't panic")
}

struct Started {
    socket: PathBuf,
    exporter: Arc<FuseExporter>,
    exports: Arc<Exports>,
    _lock: File,
}

impl Started {
    fn new(options: Options) -> Result<Self, Error> {
        let io = |what, path: &Path| {
            let path = path.to_owned();
            move |source| Error::Io { what, path, source }
        };
        let run_dir = &options.run_dir;
        let mut private = fs::DirBuilder::new();
        private.recursive(true).mode(0o700);
        private.create(run_dir).map_err(io("making", run_dir))?;
        let run_dir = &run_dir.canonicalize().map_err(io("resolving", run_dir))?;
        let lock_path = run_dir.join("storaged.lock");
        let lock = OpenOptions::new().create(true).truncate(false).write(true).open(&lock_path);
        let lock = lock.map_err(io("opening", &lock_path))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(Error::AlreadyRunning(run_dir.clone())),
            Err(errno) => return Err(io("locking", &lock_path)(errno.into())),
        }
        let mount_point = run_dir.join("fuse");
        let mount_error = |source| Error::Mount { path: mount_point.clone(), source };
        clear_stale_mount(&mount_point).map_err(mount_error)?;
        private.create(&mount_point).map_err(io("making", &mount_point))?;
        fs::set_permissions(&mount_point, fs::Permissions::from_mode(0o700))
            .map_err(io("protecting", &mount_point))?;
        let exporter = FuseExporter::mount(&mount_point, options.threads).map_err(mount_error)?;
        let exporter = Arc::new(exporter);
        let exports = Arc::new(Exports::new(Arc::new(LocalFiles), exporter.clone()));
        Ok(Self { socket: options.socket, exporter, exports, _lock: lock })
    }

    /// Waits for the last handle, at most `patience`. Handles close without telling this task: it looks.
    async fn wait_until_idle(&self, patience: Duration) {
        let idle = async {
            while self.exporter.all_handles() > 0 {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        if self.exporter.all_handles() > 0 {
            tracing::warn!(busy = ?self.exports.busy(), ?patience, "asked to end, waiting for open devices");
        }
        let _timed_out = tokio::time::timeout(patience, idle).await;
    }

    fn stop(self) -> Result<(), Error> {
        if let Err(error) = fs::remove_file(&self.socket) {
            tracing::warn!(%error, socket = %self.socket.display(), "could not remove the socket");
        }
        let flushed = self.exports.flush_all();
        let handles = self.exporter.all_handles();
        let unmounted = if handles == 0 { self.exporter.unmount() } else { self.exporter.detach() };
        if let Err(error) = unmounted {
            tracing::warn!(%error, "could not unmount");
        }
        flushed?;
        if handles > 0 { Err(Error::StillBusy(handles)) } else { Ok(()) }
    }
}
