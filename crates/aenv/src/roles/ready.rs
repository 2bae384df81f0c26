//! How a role says that it serves: the `READY=1` datagram of systemd's notify protocol.
//!
//! The same message serves a systemd unit of `Type=notify` and `aenv up --detach`, which binds a socket of its own
//! and waits for whichever comes first: the message, the end of the child, or the deadline.

use anyhow::{Context, Result, bail};
use std::{
    ffi::OsString,
    fs::{File, OpenOptions},
    io::{Read, Seek, SeekFrom},
    os::unix::net::UnixDatagram as StdDatagram,
    path::Path,
    process::Stdio,
    time::Duration,
};
use tokio::{net::UnixDatagram, process::Command};

/// Tells whoever started this process that it serves now. Without a listener this does nothing.
pub(crate) fn announce() -> Result<()> {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(()) };
    let socket = StdDatagram::unbound()?;
    socket
        .send_to(b"READY=1", &path)
        .with_context(|| format!("can't announce readiness to {}", path.display()))?;
    Ok(())
}

/// Starts this program again with `arguments` in a session of its own, its output appended to `log`, and returns its
/// pid once it announced itself. A child that ends first fails this with the end of its log.
pub(crate) async fn start_detached(
    arguments: &[OsString],
    log: &Path,
    run_dir: &Path,
    deadline: Duration,
) -> Result<u32> {
    let role = arguments.first().map(|word| word.to_string_lossy().into_owned()).unwrap_or_default();
    let output = OpenOptions::new()
        .create(true)
        .append(true)
        .open(log)
        .with_context(|| format!("can't open the log {}", log.display()))?;
    let begin = output.metadata()?.len();
    let address = run_dir.join(format!("{role}-ready.{}.sock", std::process::id()));
    let socket = UnixDatagram::bind(&address).with_context(|| format!("can't bind {}", address.display()))?;
    let unlink = Unlink(&address);
    let mut child = Command::new(std::env::current_exe().context("can't find this program's own file")?)
        .args(arguments)
        .arg("--own-session")
        .env("NOTIFY_SOCKET", &address)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output)
        .kill_on_drop(false)
        .spawn()
        .with_context(|| format!("can't start `aenv {role}`"))?;
    let pid = child.id().context("the child has no pid")?;
    let mut message = [0_u8; 64];
    let outcome = tokio::select! {
        got = socket.recv(&mut message) => got.map(|n| message[..n].starts_with(b"READY=1")).map_err(Into::into),
        status = child.wait() => Err(anyhow::anyhow!("`aenv {role}` ended with {} before it served", status?)),
        () = tokio::time::sleep(deadline) => Err(anyhow::anyhow!("`aenv {role}` did not serve within {deadline:?}")),
    };
    drop(unlink);
    match outcome {
        Ok(true) => Ok(pid),
        Ok(false) => bail!("`aenv {role}` announced something else than readiness"),
        Err(error) => {
            if child.try_wait()?.is_none() {
                child.kill().await?;
            }
            bail!("{error}\n{}\n(all of it: {})", since(log, begin)?, log.display())
        }
    }
}

struct Unlink<'a>(&'a Path);

impl Drop for Unlink<'_> {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(self.0) {
            tracing::debug!(path = %self.0.display(), %error, "readiness socket was gone already");
        }
    }
}

/// The last lines a child wrote after `begin`, at most 4 KiB.
fn since(log: &Path, begin: u64) -> Result<String> {
    let mut file = File::open(log)?;
    let end = file.metadata()?.len();
    file.seek(SeekFrom::Start(begin.max(end.saturating_sub(4096))))?;
    let mut text = Vec::new();
    file.take(4096).read_to_end(&mut text)?;
    Ok(String::from_utf8_lossy(&text).trim_end().to_owned())
}
