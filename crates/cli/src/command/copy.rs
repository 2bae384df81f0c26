//! `aenv cp`: files and trees, up and down.

use super::{Context, tree};
use crate::{
    error::{Error, Result},
    guest::{Guest, next_piece},
    output,
    process::{Spec, collect, shell_code},
};
use futures_util::TryStreamExt as _;
use indicatif::{ProgressBar, ProgressStyle};
use std::{
    io::IsTerminal as _,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};
use tokio::io::AsyncWriteExt as _;
use tokio_util::io::ReaderStream;

const PIECE: usize = 256 << 10;

/// Copy files into or out of a sandbox.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What: a path here, ID:PATH in a sandbox, or - for standard input
    source: String,
    /// Where to: a path here, ID:PATH in a sandbox, or - for standard output. An existing directory receives the source
    /// under its own name
    destination: String,
    /// As this user in the sandbox
    #[arg(long, short)]
    user: Option<String>,
}

/// One side of a copy.
#[derive(Debug, PartialEq, Eq)]
enum Side {
    Local(PathBuf),
    Stdio,
    Guest { id: String, path: String },
}

/// `ID:path` is a sandbox when what stands before the colon can be an id; `./a:b` is always local.
fn side(text: &str) -> Side {
    if text == "-" {
        return Side::Stdio;
    }
    match text.split_once(':') {
        Some((id, path))
            if !id.is_empty()
                && id.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-') =>
        {
            // An empty path is the home directory, as in scp.
            let path = if path.is_empty() { "." } else { path };
            Side::Guest { id: id.to_owned(), path: path.to_owned() }
        }
        _ => Side::Local(PathBuf::from(text)),
    }
}

pub(super) async fn run(context: &Context, args: Args) -> Result<u8> {
    let reach = |id: String| {
        let user = args.user.clone();
        async move { Guest::reach(&context.settings, &context.control, &id, user).await }
    };
    let moved = match (side(&args.source), side(&args.destination)) {
        (Side::Guest { id, path }, Side::Local(local)) => down(&reach(id).await?, &path, &local).await?,
        (Side::Guest { id, path }, Side::Stdio) => down_to_stdout(&reach(id).await?, &path).await?,
        (Side::Local(local), Side::Guest { id, path }) => up(&reach(id).await?, &local, &path).await?,
        (Side::Stdio, Side::Guest { id, path }) => {
            let body = reqwest::Body::wrap_stream(ReaderStream::with_capacity(tokio::io::stdin(), PIECE));
            reach(id).await?.upload(&path, body, None).await?;
            None
        }
        (Side::Guest { .. }, Side::Guest { .. }) => {
            return Err(Error::Usage(
                "both sides are sandboxes; copy through here: aenv cp A:PATH - | aenv cp - B:PATH".to_owned(),
            ));
        }
        _ => {
            return Err(Error::Usage("one side must be in a sandbox: ID:PATH".to_owned()));
        }
    };
    if let Some(count) = moved {
        output::say(&format!("copied {}", output::bytes(count)));
    }
    Ok(0)
}

async fn up(guest: &Guest, local: &Path, remote: &str) -> Result<Option<u64>> {
    let found = tokio::fs::metadata(local).await.map_err(|e| missing(local, &e))?;
    let remote = place_in_guest(guest, local, remote).await?;
    if found.is_dir() {
        return tree::up(guest, local, &remote).await.map(Some);
    }
    if !found.is_file() {
        return Err(Error::Usage(format!("{} is neither a file nor a directory", local.display())));
    }
    let file = tokio::fs::File::open(local).await.map_err(|e| missing(local, &e))?;
    let bar = progress(found.len());
    let counting = bar.clone();
    let pieces = ReaderStream::with_capacity(file, PIECE)
        .inspect_ok(move |piece| counting.inc(u64::try_from(piece.len()).unwrap_or(0)));
    let body = reqwest::Body::wrap_stream(pieces);
    guest.upload(&remote, body, Some(found.len())).await?;
    bar.finish_and_clear();
    set_mode(guest, &remote, found.permissions().mode() & 0o777).await?;
    Ok(Some(found.len()))
}

/// `cp FILE dir` puts FILE into dir, here as anywhere.
async fn place_in_guest(guest: &Guest, local: &Path, remote: &str) -> Result<String> {
    let into = match guest.stat(remote).await {
        Ok(entry) if entry.is_directory() => Some(entry.path),
        Ok(_) | Err(Error::NotFound(_)) if remote.ends_with('/') => {
            Some(remote.trim_end_matches('/').to_owned())
        }
        Ok(_) | Err(Error::NotFound(_)) => None,
        Err(other) => return Err(other),
    };
    match into {
        None => Ok(remote.to_owned()),
        Some(folder) => {
            let absolute = std::path::absolute(local)?;
            let name = absolute.file_name().and_then(|n| n.to_str()).ok_or_else(|| {
                Error::Usage(format!("{} has no name to give it in the sandbox", local.display()))
            })?;
            Ok(format!("{}/{name}", folder.trim_end_matches('/')))
        }
    }
}

/// The file route has no mode; `chmod` is in every image that has a shell, and without it the file is there all the
/// same.
pub(super) async fn set_mode(guest: &Guest, path: &str, mode: u32) -> Result<()> {
    if guest.stat(path).await?.mode & 0o777 == mode {
        return Ok(());
    }
    let spec = Spec {
        cmd: "chmod".to_owned(),
        args: vec![format!("{mode:o}"), "--".to_owned(), path.to_owned()],
        ..Spec::default()
    };
    match collect(guest, &spec, 64 << 10).await {
        Ok((end, _, _)) if shell_code(&end) == 0 => {}
        Ok((_, _, err)) => {
            let words = String::from_utf8_lossy(&err).trim().to_owned();
            output::say(&format!(
                "warning: the mode of {path} could not be set: {}",
                output::printable(&words)
            ));
        }
        Err(error) => output::say(&format!("warning: the mode of {path} could not be set: {error}")),
    }
    Ok(())
}

async fn down(guest: &Guest, remote: &str, local: &Path) -> Result<Option<u64>> {
    let entry = guest.stat(remote).await?;
    let target = if local.is_dir() { local.join(safe_name(&entry.name)?) } else { local.to_owned() };
    if entry.is_directory() {
        return tree::down(guest, &entry.path, &target).await.map(Some);
    }
    fetch(guest, &entry.path, &target, entry.mode).await.map(Some)
}

/// A name a guest gave, fit to be made here: one path component and no more.
pub(super) fn safe_name(name: &str) -> Result<&str> {
    if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']) {
        return Err(Error::Failed(format!("the sandbox named a file '{}'", output::printable(name))));
    }
    Ok(name)
}

/// One file down: written beside its place and renamed, so that a broken transfer never leaves half a file.
pub(super) async fn fetch(guest: &Guest, remote: &str, local: &Path, mode: u32) -> Result<u64> {
    let mut response = guest.download(remote).await?;
    let folder = match local.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    let announced = response.content_length();
    let temporary = tempfile::NamedTempFile::new_in(&folder).map_err(|e| missing(&folder, &e))?;
    let mut file = tokio::fs::File::from_std(temporary.reopen()?);
    let bar = progress(announced.unwrap_or(0));
    let mut count = 0_u64;
    while let Some(piece) = next_piece(&mut response).await? {
        file.write_all(&piece).await.map_err(|e| missing(local, &e))?;
        count += u64::try_from(piece.len()).unwrap_or(0);
        bar.set_position(count);
    }
    file.flush().await?;
    bar.finish_and_clear();
    if announced.is_some_and(|announced| announced != count) {
        return Err(Error::Dropped(format!("{remote} ended after {count} bytes")));
    }
    file.set_permissions(std::fs::Permissions::from_mode(mode & 0o777)).await?;
    temporary.persist(local).map_err(|e| missing(local, &e.error))?;
    Ok(count)
}

async fn down_to_stdout(guest: &Guest, remote: &str) -> Result<Option<u64>> {
    let mut response = guest.download(remote).await?;
    let mut out = tokio::io::stdout();
    while let Some(piece) = next_piece(&mut response).await? {
        out.write_all(&piece).await?;
    }
    out.flush().await?;
    Ok(None)
}

fn progress(length: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(length);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta}") {
        bar.set_style(style);
    }
    bar
}

/// An error of this machine's file system, with the path it is about.
pub(super) fn missing(path: &Path, error: &std::io::Error) -> Error {
    let text = format!("{}: {error}", path.display());
    if error.kind() == std::io::ErrorKind::NotFound { Error::NotFound(text) } else { Error::Failed(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_are_told_apart() {
        let guest = |id: &str, path: &str| Side::Guest { id: id.into(), path: path.into() };
        assert_eq!(side("abc123:/tmp/x"), guest("abc123", "/tmp/x"));
        assert_eq!(side("abc123:"), guest("abc123", "."));
        assert_eq!(side("abc123:a:b"), guest("abc123", "a:b"));
        assert_eq!(side("-"), Side::Stdio);
        assert_eq!(side("./a:b"), Side::Local("./a:b".into()));
        assert_eq!(side("/a:b"), Side::Local("/a:b".into()));
        assert_eq!(side("C:x"), Side::Local("C:x".into()));
    }

    #[test]
    fn a_sandbox_cant_name_a_file_out_of_its_place() {
        for bad in ["", ".", "..", "a/b", "/etc/passwd", "a\0b"] {
            assert!(safe_name(bad).is_err(), "{bad:?}");
        }
        assert_eq!(safe_name("ünï .txt").expect("fine"), "ünï .txt");
    }
}
