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

/// Looks through `/proc`: a monitor leads a session of its own and names files of its machine directory on its command
/// line. Someone who merely reads such a file from a shell doesn't lead a session and is left alone.
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
        if keep.contains(&id) || !leads_session(&entry.path(), pid) {
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

/// Whether a process leads its session: field 6 of its `stat` is its own pid.
fn leads_session(process: &Path, pid: i32) -> bool {
    let Ok(stat) = std::fs::read_to_string(process.join("stat")) else { return false };
    // The name in field 2 may hold anything; the last ')' ends it.
    let Some((_, rest)) = stat.rsplit_once(')') else { return false };
    rest.split_ascii_whitespace().nth(3).and_then(|session| session.parse().ok()) == Some(pid)
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

    fn monitor(program: &str, machines: &Path, id: &str) -> std::process::Child {
        let dir = machines.join(id);
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("console.log"), b"").unwrap();
        let mut words: Vec<String> = program.split(' ').map(str::to_owned).collect();
        words.push(dir.join("console.log").display().to_string());
        Command::new(&words[0]).args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap()
    }

    #[tokio::test]
    async fn a_forgotten_monitor_is_ended_but_neither_a_kept_one_nor_a_reader_of_its_console() {
        let dir = tempfile::tempdir().unwrap();
        let mut lost = monitor("setsid tail -f", dir.path(), "lost1");
        let mut kept = monitor("setsid tail -f", dir.path(), "kept2");
        let mut reader = monitor("tail -f", dir.path(), "lost1");
        let keep = HashSet::from(["kept2".to_owned()]);
        // The child may not lead its session yet.
        let mut ended = Vec::new();
        for _ in 0..400 {
            ended.extend(ProcProcesses.reap(dir.path(), &keep).await.unwrap());
            if !ended.is_empty() {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        assert_eq!(ended, ["lost1"]);
        assert!(!lost.wait().unwrap().success());
        for (who, child) in [("kept", &mut kept), ("reader", &mut reader)] {
            assert!(child.try_wait().unwrap().is_none(), "the {who} one was ended");
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}
