//! Monitor processes that no record names: left by a server that died between starting one and writing it down.

use super::{Fault, Result};
use async_trait::async_trait;
use std::{
    collections::HashSet,
    path::{Path, PathBuf},
};

/// Finds and ends forgotten machines.
#[async_trait]
pub trait Processes: Send + Sync + 'static {
    /// Ends every monitor whose machine directory lies in `machines` and whose id is not in `keep`.
    /// Returns the ids of those that were ended, once they are gone.
    async fn reap(&self, machines: &Path, keep: &HashSet<String>) -> Result<Vec<String>>;
}

/// Looks through `/proc`: a monitor names files of its machine directory on its command line.
#[derive(Debug, Default)]
pub struct ProcProcesses;

#[async_trait]
impl Processes for ProcProcesses {
    async fn reap(&self, machines: &Path, keep: &HashSet<String>) -> Result<Vec<String>> {
        let (machines, keep) = (machines.to_owned(), keep.clone());
        tokio::task::spawn_blocking(move || reap(&machines, &keep))
            .await
            .map_err(|error| Fault::new(format!("looking for forgotten machines: {error}")))?
    }
}

fn reap(machines: &Path, keep: &HashSet<String>) -> Result<Vec<String>> {
    let mut ended = Vec::new();
    let mut waiting = Vec::new();
    let entries =
        std::fs::read_dir("/proc").map_err(|error| Fault::new(format!("reading /proc: {error}")))?;
    for entry in entries.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let Some(id) = machine_of(&entry.path().join("cmdline"), machines) else { continue };
        if keep.contains(&id) {
            continue;
        }
        let Some(pid) = rustix::process::Pid::from_raw(pid) else { continue };
        // The pidfd first, then the check again: the pid can't be someone else's any more.
        let Ok(fd) = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) else { continue };
        if machine_of(&entry.path().join("cmdline"), machines).as_deref() != Some(id.as_str()) {
            continue;
        }
        tracing::warn!(machine = %id, pid = pid.as_raw_nonzero(), "ending a machine that no record names");
        let _ = rustix::process::pidfd_send_signal(&fd, rustix::process::Signal::KILL);
        waiting.push(fd);
        ended.push(id);
    }
    for fd in waiting {
        let mut fds = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
        let limit = rustix::event::Timespec { tv_sec: 5, tv_nsec: 0 };
        let _ = rustix::event::poll(&mut fds, Some(&limit));
    }
    Ok(ended)
}

/// The machine id in a command line that mentions `<machines>/<id>/…` or `<machines>/<id>`.
fn machine_of(cmdline: &Path, machines: &Path) -> Option<String> {
    let text = std::fs::read(cmdline).ok()?;
    let mut prefix = PathBuf::from(machines).into_os_string().into_encoded_bytes();
    prefix.push(b'/');
    let at = text.windows(prefix.len()).position(|window| window == prefix)? + prefix.len();
    let id: Vec<u8> = text[at..].iter().copied().take_while(u8::is_ascii_alphanumeric).collect();
    (!id.is_empty()).then(|| String::from_utf8(id).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[tokio::test]
    async fn a_process_that_names_a_forgotten_machine_is_ended_and_a_kept_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let spawn = |id: &str| {
            Command::new("sleep")
                .args(["60", &format!("{}", 0)])
                .env_clear()
                .arg0(format!("monitor {}/{id}/console.log", dir.path().display()))
                .stdin(Stdio::null())
                .spawn()
                .unwrap()
        };
        use std::os::unix::process::CommandExt;
        let mut lost = spawn("lost1");
        let mut kept = spawn("kept2");
        let keep = HashSet::from(["kept2".to_owned()]);
        // The child may not have reached exec yet; the command line appears with it.
        let mut ended = Vec::new();
        for _ in 0..200 {
            ended.extend(ProcProcesses.reap(dir.path(), &keep).await.unwrap());
            if !ended.is_empty() {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        assert_eq!(ended.first().map(String::as_str), Some("lost1"));
        assert!(!lost.wait().unwrap().success());
        assert!(kept.try_wait().unwrap().is_none(), "a kept machine was ended");
        kept.kill().unwrap();
        kept.wait().unwrap();
    }
}
