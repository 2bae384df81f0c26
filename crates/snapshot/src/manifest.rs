//! The file that makes a snapshot: written last, read first.
//!
//! ```text
//! aenv-snapshot 1 <sha256 of the rest, 64 hex>\n
//! { JSON }
//! ```
//! A line of magic, format version and checksum, then one JSON object. Readers refuse files above [`MAX_BYTES`], another
//! magic, a version they don't know, and a checksum that doesn't match. Paths inside are relative to the node's data
//! directory, so that a directory can move as a whole.

use aenv_vmm::Compatibility;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read},
    path::{Component, Path, PathBuf},
};

/// Largest manifest that is read.
pub const MAX_BYTES: u64 = 1 << 20;
/// Format version written.
pub const VERSION: u32 = 1;
const MAGIC: &str = "aenv-snapshot";

/// Why a manifest can't be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is none.
    #[error("{0} does not exist: the snapshot was never finished")]
    Missing(PathBuf),
    /// It can't be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The manifest.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// It isn't one, or was damaged.
    #[error("{path} is not a usable snapshot manifest: {reason}")]
    Damaged {
        /// The manifest.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A later version of this program wrote it.
    #[error("{path} has format version {found}, this program reads up to {VERSION}: update this node")]
    TooNew {
        /// The manifest.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
}

/// A file of a snapshot, by path relative to the data directory, with its length to notice a truncated one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRef {
    /// Relative path without `..`.
    pub path: PathBuf,
    /// Bytes.
    pub len: u64,
}

/// A layer of a stack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerRef {
    /// `raw` or `lsmt`.
    pub kind: String,
    /// Its file.
    pub file: FileRef,
}

/// The memory half of a snapshot; absent when only the disk was kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// What can restore it.
    pub made_by: Compatibility,
    /// Device state.
    pub state: FileRef,
    /// Layers of guest memory, lowest first; one raw file is handed over as it is.
    pub layers: Vec<LayerRef>,
}

/// How the guest is addressed and what its commands start with.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Guest {
    /// Secret of the agent's `/init`; its SHA-256 is on the guest's kernel command line.
    pub init_secret: String,
    /// Environment of the image.
    pub env: BTreeMap<String, String>,
    /// User of commands that name none.
    pub user: String,
    /// Working directory of commands that name none.
    pub workdir: Option<String>,
    /// What the image would run: its `ENTRYPOINT`. Told to whoever asks, never run by itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub entrypoint: Vec<String>,
    /// Its `CMD`, likewise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cmd: Vec<String>,
}

/// A snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Sandbox or build it was taken of.
    pub subject: String,
    /// Counts the snapshots of the subject.
    pub sequence: u64,
    /// When.
    pub taken_at: Timestamp,
    /// Virtual CPUs.
    pub vcpus: u8,
    /// Guest memory, MiB.
    pub memory_mib: u32,
    /// Disk, bytes.
    pub disk_size: u64,
    /// Layers of the disk, lowest first.
    pub disk: Vec<LayerRef>,
    /// Memory, when kept.
    pub memory: Option<Memory>,
    /// The guest.
    pub guest: Guest,
}

impl Manifest {
    /// Writes it so that it is found whole or not at all.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        let io = |source| Error::Io { path: path.to_owned(), source };
        let body = serde_json::to_vec_pretty(self).map_err(|error| io(io::Error::other(error)))?;
        let mut content = format!("{MAGIC} {VERSION} {}\n", hex::encode(Sha256::digest(&body))).into_bytes();
        content.extend(body);
        if u64::try_from(content.len()).unwrap_or(u64::MAX) > MAX_BYTES {
            return Err(io(io::Error::other(format!("would be larger than {MAX_BYTES} bytes"))));
        }
        crate::durable::replace(path, &content).map_err(io)
    }

    /// Reads and checks one.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let damaged = |reason: String| Error::Damaged { path: path.to_owned(), reason };
        let mut content = Vec::new();
        match File::open(path) {
            Ok(file) => {
                file.take(MAX_BYTES + 1)
                    .read_to_end(&mut content)
                    .map_err(|source| Error::Io { path: path.to_owned(), source })?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Error::Missing(path.to_owned()));
            }
            Err(source) => return Err(Error::Io { path: path.to_owned(), source }),
        }
        if u64::try_from(content.len()).unwrap_or(u64::MAX) > MAX_BYTES {
            return Err(damaged(format!("larger than {MAX_BYTES} bytes")));
        }
        let end =
            content.iter().position(|byte| *byte == b'\n').ok_or_else(|| damaged("no first line".into()))?;
        let head =
            std::str::from_utf8(&content[..end]).map_err(|_| damaged("first line is not text".into()))?;
        let words: Vec<&str> = head.split(' ').collect();
        let [magic, version, sum] = words[..] else {
            return Err(damaged("first line is not 'aenv-snapshot VERSION SHA256'".into()));
        };
        if magic != MAGIC {
            return Err(damaged(format!("starts with '{}'", magic.chars().take(20).collect::<String>())));
        }
        let version: u32 = version.parse().map_err(|_| damaged("version is not a number".into()))?;
        if version > VERSION {
            return Err(Error::TooNew { path: path.to_owned(), found: version });
        }
        let body = &content[end + 1..];
        if hex::encode(Sha256::digest(body)) != sum {
            return Err(damaged("checksum does not match".into()));
        }
        let manifest: Self = serde_json::from_slice(body).map_err(|error| damaged(error.to_string()))?;
        for file in manifest.files() {
            let plain = file.path.components().all(|part| matches!(part, Component::Normal(_)));
            if !plain || file.path.as_os_str().is_empty() {
                return Err(damaged(format!("'{}' leads out of the data directory", file.path.display())));
            }
        }
        Ok(manifest)
    }

    /// Every file it names.
    pub fn files(&self) -> impl Iterator<Item = &FileRef> {
        let memory = self.memory.iter();
        self.disk
            .iter()
            .map(|layer| &layer.file)
            .chain(memory.clone().map(|memory| &memory.state))
            .chain(memory.flat_map(|memory| memory.layers.iter().map(|layer| &layer.file)))
    }

    /// Checks that every file it names is there with its length.
    pub fn check_files(&self, data_dir: &Path) -> Result<(), Error> {
        for file in self.files() {
            let path = data_dir.join(&file.path);
            match std::fs::metadata(&path) {
                Ok(found) if found.len() == file.len => {}
                Ok(found) => {
                    let reason = format!("{} bytes long, {} expected", found.len(), file.len);
                    return Err(Error::Damaged { path, reason });
                }
                Err(source) => return Err(Error::Io { path, source }),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
