//! Directories, up and down, as one tar where the guest has `tar`, else file by file.
//!
//! The tar goes through a file in the guest's /tmp rather than through a process's input and output: file transfers
//! are raw bytes with back-pressure, process streams are base64 in JSON. The file is removed whichever way it ends.

use super::copy::{fetch, missing, safe_name, set_mode};
use crate::{
    error::{Error, Result},
    guest::{Guest, next_piece},
    output,
    process::{Spec, collect, shell_code},
};
use std::{
    io::{Read, Write},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// Pieces in flight between the thread that packs or unpacks and the connection.
const IN_FLIGHT: usize = 16;
const PIECE: usize = 256 << 10;
/// Deepest tree copied file by file.
const DEEPEST: u32 = 64;

pub(super) async fn up(guest: &Guest, local: &Path, remote: &str) -> Result<u64> {
    guest.make_dir(remote).await?;
    if !has_tar(guest).await? {
        output::say("the sandbox has no tar; copying file by file");
        return up_by_file(guest, local, remote).await;
    }
    let archive = temporary_name();
    let outcome = up_by_tar(guest, local, remote, &archive).await;
    let removed = guest.remove(&archive).await;
    let count = outcome?;
    removed?;
    Ok(count)
}

async fn up_by_tar(guest: &Guest, local: &Path, remote: &str, archive: &str) -> Result<u64> {
    let (sender, receiver) = mpsc::channel::<std::io::Result<Vec<u8>>>(IN_FLIGHT);
    let folder = local.to_owned();
    let packing = tokio::task::spawn_blocking(move || pack(&folder, sender));
    guest.upload(archive, reqwest::Body::wrap_stream(ReceiverStream::new(receiver)), None).await?;
    let count = packing.await.map_err(|e| Error::Failed(e.to_string()))??;
    let args = ["-xpf", archive, "-C", remote, "--no-same-owner"];
    tar(guest, &args).await?;
    Ok(count)
}

pub(super) async fn down(guest: &Guest, remote: &str, local: &Path) -> Result<u64> {
    tokio::fs::create_dir_all(local).await.map_err(|e| missing(local, &e))?;
    if !has_tar(guest).await? {
        output::say("the sandbox has no tar; copying file by file");
        return down_by_file(guest, remote, local).await;
    }
    let archive = temporary_name();
    let outcome = down_by_tar(guest, remote, local, &archive).await;
    let removed = guest.remove(&archive).await;
    let count = outcome?;
    removed?;
    Ok(count)
}

async fn down_by_tar(guest: &Guest, remote: &str, local: &Path, archive: &str) -> Result<u64> {
    tar(guest, &["-cf", archive, "-C", remote, "."]).await?;
    let mut response = guest.download(archive).await?;
    let (sender, receiver) = mpsc::channel::<Vec<u8>>(IN_FLIGHT);
    let folder = local.to_owned();
    let unpacking = tokio::task::spawn_blocking(move || unpack(&folder, receiver));
    let mut count = 0;
    let mut broken = None;
    loop {
        match next_piece(&mut response).await {
            Ok(Some(piece)) => {
                count += u64::try_from(piece.len()).unwrap_or(0);
                // Refused when unpacking failed; its error is the one to tell.
                if sender.send(piece.to_vec()).await.is_err() {
                    break;
                }
            }
            Ok(None) => break,
            Err(error) => {
                broken = Some(error);
                break;
            }
        }
    }
    drop(sender);
    let unpacked = unpacking.await.map_err(|e| Error::Failed(e.to_string()))?;
    match broken {
        Some(error) => Err(error),
        None => unpacked.map(|()| count),
    }
}

async fn has_tar(guest: &Guest) -> Result<bool> {
    match collect(guest, &tar_spec(&["--version"]), 64 << 10).await {
        Ok((end, _, _)) => Ok(shell_code(&end) == 0),
        // No such program, in the words of whichever agent.
        Err(Error::NotFound(_) | Error::Usage(_) | Error::Failed(_)) => Ok(false),
        Err(other) => Err(other),
    }
}

fn tar_spec(args: &[&str]) -> Spec {
    Spec { cmd: "tar".to_owned(), args: args.iter().map(|a| (*a).to_owned()).collect(), ..Spec::default() }
}

async fn tar(guest: &Guest, args: &[&str]) -> Result<()> {
    let (end, _, err) = collect(guest, &tar_spec(args), 1 << 20).await?;
    if shell_code(&end) == 0 {
        return Ok(());
    }
    let words: String = String::from_utf8_lossy(&err).trim().chars().take(500).collect();
    Err(Error::Failed(format!("tar in the sandbox failed: {}", output::printable(&words))))
}

fn temporary_name() -> String {
    format!("/tmp/.aenv-cp-{}.tar", uuid::Uuid::new_v4().simple())
}

/// Packs a directory's content. Links are kept as links: what they point at is not ours to send.
fn pack(folder: &Path, sender: mpsc::Sender<std::io::Result<Vec<u8>>>) -> Result<u64> {
    let mut builder = tar::Builder::new(PieceWriter { sender, piece: Vec::with_capacity(PIECE), count: 0 });
    builder.follow_symlinks(false);
    let outcome =
        builder.append_dir_all(".", folder).and_then(|()| builder.into_inner()).and_then(|mut writer| {
            writer.flush()?;
            Ok(writer.count)
        });
    outcome.map_err(|e| missing(folder, &e))
}

struct PieceWriter {
    sender: mpsc::Sender<std::io::Result<Vec<u8>>>,
    piece: Vec<u8>,
    count: u64,
}

impl Write for PieceWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.piece.extend_from_slice(bytes);
        if self.piece.len() >= PIECE {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        if self.piece.is_empty() {
            return Ok(());
        }
        let piece = std::mem::replace(&mut self.piece, Vec::with_capacity(PIECE));
        self.count += u64::try_from(piece.len()).unwrap_or(0);
        self.sender.blocking_send(Ok(piece)).map_err(|_| std::io::ErrorKind::BrokenPipe.into())
    }
}

/// Unpacks what a guest sent. The guest is hostile: `tar` refuses paths and links that lead out of the folder, set-id
/// bits are dropped, and devices are not made.
fn unpack(folder: &Path, receiver: mpsc::Receiver<Vec<u8>>) -> Result<()> {
    let mut archive = tar::Archive::new(PieceReader { receiver, piece: Vec::new(), at: 0 });
    archive.set_preserve_permissions(false);
    archive.set_unpack_xattrs(false);
    let entries = archive.entries().map_err(|e| missing(folder, &e))?;
    // Directories come last, deepest first, so that one without write permission can still be filled.
    let mut directories = Vec::new();
    for entry in entries {
        let mut entry = entry.map_err(|e| missing(folder, &e))?;
        let kind = entry.header().entry_type();
        if kind.is_dir() {
            directories.push(entry);
            continue;
        }
        if !(kind.is_file()
            || kind.is_symlink()
            || kind.is_hard_link()
            || kind.is_contiguous()
            || kind.is_gnu_sparse())
        {
            let path = entry.path().map(|p| p.display().to_string()).unwrap_or_default();
            output::say(&format!(
                "warning: {} is no file, directory or link; left out",
                output::printable(&path)
            ));
            continue;
        }
        let inside = entry.unpack_in(folder).map_err(|e| missing(folder, &e))?;
        if !inside {
            return Err(Error::Failed(
                "the sandbox sent a path that leads out of the destination".to_owned(),
            ));
        }
    }
    directories.sort_by(|a, b| b.path_bytes().cmp(&a.path_bytes()));
    for mut directory in directories {
        directory.unpack_in(folder).map_err(|e| missing(folder, &e))?;
    }
    Ok(())
}

struct PieceReader {
    receiver: mpsc::Receiver<Vec<u8>>,
    piece: Vec<u8>,
    at: usize,
}

impl Read for PieceReader {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        if self.at == self.piece.len() {
            match self.receiver.blocking_recv() {
                Some(piece) => (self.piece, self.at) = (piece, 0),
                None => return Ok(0),
            }
        }
        let count = out.len().min(self.piece.len() - self.at);
        out[..count].copy_from_slice(&self.piece[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

async fn up_by_file(guest: &Guest, local: &Path, remote: &str) -> Result<u64> {
    let mut count = 0;
    for entry in walkdir::WalkDir::new(local).min_depth(1) {
        let entry = entry.map_err(|e| Error::Failed(e.to_string()))?;
        let inner = entry.path().strip_prefix(local).map_err(|e| Error::Failed(e.to_string()))?;
        let inner =
            inner.to_str().ok_or_else(|| Error::Usage(format!("{} is no UTF-8", entry.path().display())))?;
        let target = format!("{}/{inner}", remote.trim_end_matches('/'));
        if entry.file_type().is_dir() {
            guest.make_dir(&target).await?;
        } else if entry.file_type().is_file() {
            let file = tokio::fs::File::open(entry.path()).await.map_err(|e| missing(entry.path(), &e))?;
            let length = file.metadata().await?.len();
            let body = reqwest::Body::wrap_stream(tokio_util::io::ReaderStream::with_capacity(file, PIECE));
            guest.upload(&target, body, Some(length)).await?;
            let mode = entry.metadata().map_err(|e| Error::Failed(e.to_string()))?.permissions().mode();
            set_mode(guest, &target, mode & 0o777).await?;
            count += length;
        } else {
            output::say(&format!("warning: {} is no file or directory; left out", entry.path().display()));
        }
    }
    Ok(count)
}

async fn down_by_file(guest: &Guest, remote: &str, local: &Path) -> Result<u64> {
    let mut count = 0;
    let mut open = vec![(remote.to_owned(), local.to_owned(), 0)];
    while let Some((folder, target, depth)) = open.pop() {
        if depth > DEEPEST {
            return Err(Error::Failed(format!("{folder} is more than {DEEPEST} levels deep")));
        }
        tokio::fs::create_dir_all(&target).await.map_err(|e| missing(&target, &e))?;
        for entry in guest.list(&folder, 1).await? {
            let place: PathBuf = target.join(safe_name(&entry.name)?);
            // A link to a directory could lead round in circles.
            if entry.is_directory() && entry.symlink_target.is_none() {
                open.push((entry.path, place, depth + 1));
            } else if !entry.is_directory() {
                count += fetch(guest, &entry.path, &place, entry.mode).await?;
            }
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn through(source: &Path, target: &Path) -> Result<()> {
        let (sender, mut packed) = mpsc::channel(IN_FLIGHT);
        let source = source.to_owned();
        let packing = std::thread::spawn(move || pack(&source, sender));
        let (to, from) = mpsc::channel(IN_FLIGHT);
        let target = target.to_owned();
        let unpacking = std::thread::spawn(move || unpack(&target, from));
        while let Some(piece) = packed.blocking_recv() {
            let _ = to.blocking_send(piece.expect("no error"));
        }
        drop(to);
        packing.join().expect("no panic")?;
        unpacking.join().expect("no panic")
    }

    #[test]
    fn a_tree_arrives_with_modes_links_and_names() {
        let (from, to) = (tempfile::tempdir().expect("dir"), tempfile::tempdir().expect("dir"));
        std::fs::create_dir_all(from.path().join("a/ü b")).expect("dir");
        let long = "n".repeat(180);
        std::fs::write(from.path().join("a/ü b").join(&long), vec![7_u8; 700_000]).expect("file");
        let script = from.path().join("run.sh");
        std::fs::write(&script, "#!/bin/sh\n").expect("file");
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o750)).expect("mode");
        std::os::unix::fs::symlink("run.sh", from.path().join("link")).expect("link");

        through(from.path(), to.path()).expect("copied");

        assert_eq!(std::fs::read(to.path().join("a/ü b").join(&long)).expect("there"), vec![7_u8; 700_000]);
        assert_eq!(
            std::fs::metadata(to.path().join("run.sh")).expect("there").permissions().mode() & 0o777,
            0o750
        );
        assert_eq!(std::fs::read_link(to.path().join("link")).expect("there"), PathBuf::from("run.sh"));
    }

    #[test]
    fn an_archive_cant_write_outside_its_folder() {
        let home = tempfile::tempdir().expect("dir");
        let inside = home.path().join("inside");
        std::fs::create_dir(&inside).expect("dir");
        // A link out of the folder, then a file through it.
        let mut builder = tar::Builder::new(Vec::new());
        let mut link = tar::Header::new_gnu();
        link.set_entry_type(tar::EntryType::Symlink);
        link.set_size(0);
        builder.append_link(&mut link, "door", home.path()).expect("appended");
        let mut file = tar::Header::new_gnu();
        file.set_size(4);
        file.set_mode(0o644);
        builder.append_data(&mut file, "door/evil", &b"evil"[..]).expect("appended");
        let bytes = builder.into_inner().expect("finished");
        let (sender, receiver) = mpsc::channel(1);
        sender.blocking_send(bytes).expect("room");
        drop(sender);
        assert!(unpack(&inside, receiver).is_err());
        assert!(!home.path().join("evil").exists());
    }
}
