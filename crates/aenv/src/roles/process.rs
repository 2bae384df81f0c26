//! Processes of this program that run in the background: their pid files, whether they live, and their end.

use anyhow::{Context, Result, bail};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use std::{
    os::fd::OwnedFd,
    path::Path,
    time::{Duration, Instant},
};

/// A live background process, held by its pidfd: the number can't come to mean another process.
pub(crate) struct Background {
    pid: i32,
    handle: OwnedFd,
    arguments: Vec<String>,
}

impl Background {
    /// The process a pid file names, if it lives and is `aenv <role>`. A stale file means no process.
    pub(crate) fn find(pid_file: &Path, role: &str) -> Result<Option<Self>> {
        let text = match std::fs::read_to_string(pid_file) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).with_context(|| format!("can't read {}", pid_file.display())),
        };
        let number: i32 =
            text.trim().parse().with_context(|| format!("{} holds no pid; remove it", pid_file.display()))?;
        let Some(pid) = Pid::from_raw(number) else {
            bail!("{} holds no pid; remove it", pid_file.display())
        };
        let Ok(handle) = pidfd_open(pid, PidfdFlags::empty()) else { return Ok(None) };
        // Read after the pidfd was taken: if it still is our role, the pidfd is too.
        let Ok(cmdline) = std::fs::read(format!("/proc/{number}/cmdline")) else { return Ok(None) };
        let arguments: Vec<_> =
            cmdline.split(|b| *b == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
        let is_role = arguments.get(1).is_some_and(|word| word == role);
        Ok(is_role.then_some(Self { pid: number, handle, arguments }))
    }

    /// The value it was started with for `--flag`.
    pub(crate) fn argument(&self, flag: &str) -> Option<&str> {
        let at = self.arguments.iter().position(|word| word == flag)?;
        self.arguments.get(at + 1).map(String::as_str)
    }

    /// Its pid.
    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    /// Asks it to end and waits; kills it after `patience`. Returns whether it ended by itself.
    pub(crate) fn end(&self, patience: Duration) -> Result<bool> {
        self.signal(Signal::TERM)?;
        if self.wait(patience)? {
            return Ok(true);
        }
        self.signal(Signal::KILL)?;
        if self.wait(Duration::from_secs(10))? {
            return Ok(false);
        }
        bail!(
            "process {} does not end even when killed; it may hang in the kernel: see /proc/{}/stack",
            self.pid,
            self.pid
        )
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        match pidfd_send_signal(&self.handle, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error).with_context(|| format!("can't signal process {}", self.pid)),
        }
    }

    fn wait(&self, patience: Duration) -> Result<bool> {
        let until = Instant::now() + patience;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let timeout = Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            match poll(&mut [PollFd::new(&self.handle, PollFlags::IN)], Some(&timeout)) {
                Ok(0) => return Ok(false),
                Ok(_) => return Ok(true),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error).context("can't wait for a process"),
            }
        }
    }
}

/// Writes this process's pid file and removes it when dropped.
pub(crate) struct PidFile(std::path::PathBuf);

impl PidFile {
    /// Writes the file, replacing a stale one. The caller holds the lock that makes the role single.
    pub(crate) fn write(path: &Path) -> Result<Self> {
        std::fs::write(path, format!("{}\n", std::process::id()))
            .with_context(|| format!("can't write {}", path.display()))?;
        Ok(Self(path.to_owned()))
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.0) {
            tracing::warn!(path = %self.0.display(), %error, "could not remove the pid file");
        }
    }
}
