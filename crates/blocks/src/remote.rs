//! Bytes that lie elsewhere: how such a layer is named, and what reads ranges of it.
//!
//! This crate speaks no network protocol. Whoever starts storaged hands it an [`Opener`]; that turns a [`Remote`] into
//! a [`RangeSource`] over a registry, an object store or a peer. Identity is the blob's digest alone, so a block may
//! come from whichever source has it: a peer is one more `Opener`, tried before the origin's.
//!
//! A range can't be checked against a blob's digest. What it can be checked for is done by the cache: its length, and
//! the digest once the whole blob is there; layers bring checksums of their own.

mod digest;
mod error;
mod file;
mod lazy;

use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

pub use self::digest::{BadDigest, Digest};
pub use self::error::FetchError;
pub use self::file::{FileOpener, FileSource};
pub use self::lazy::LazySource;

/// An immutable blob of known size, read by range. Reads may run at the same time.
#[async_trait::async_trait]
pub trait RangeSource: Send + Sync {
    /// Of the whole blob.
    fn id(&self) -> Digest;

    /// Of the whole blob, in bytes.
    fn size(&self) -> u64;

    /// Who is asked, for messages and for the bound on fetches from one place: a host, a bucket, a directory.
    fn place(&self) -> String;

    /// Exactly `len` bytes from byte `offset`. Anything else than `len` bytes is taken for a truncated body.
    async fn read(&self, offset: u64, len: usize) -> Result<Bytes, FetchError>;
}

/// Makes sources of what callers name.
#[async_trait::async_trait]
pub trait Opener: Send + Sync {
    /// A source of `remote`'s bytes. May ask the network; its failures are not remembered.
    async fn open(&self, remote: &Remote) -> Result<Arc<dyn RangeSource>, FetchError>;
}

/// Where a blob lies that is not a file of this machine.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Remote {
    /// In a registry.
    Registry(RegistryBlob),
    /// In an object store.
    Object(ObjectBlob),
    /// A file on a directory that machines share: read through the cache, so that a slow share is asked once.
    Shared(SharedFile),
}

/// A blob of a registry's repository.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegistryBlob {
    /// Host with optional port, as references name it.
    pub host: String,
    /// Like `library/debian`.
    pub repository: String,
    /// Of the blob.
    pub digest: Digest,
    /// In bytes.
    pub size: u64,
    /// The descriptor's.
    pub media_type: String,
}

/// An object with its URL.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ObjectBlob {
    /// Like `s3://bucket/key` or `file:///directory/key`.
    pub url: String,
    /// Of the object's bytes.
    pub digest: Digest,
    /// In bytes.
    pub size: u64,
}

/// A file that never changes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedFile {
    /// Absolute.
    pub file: PathBuf,
    /// Of its bytes.
    pub digest: Digest,
    /// In bytes.
    pub size: u64,
}

impl Remote {
    /// Of the whole blob.
    pub fn digest(&self) -> Digest {
        match self {
            Self::Registry(blob) => blob.digest,
            Self::Object(blob) => blob.digest,
            Self::Shared(file) => file.digest,
        }
    }

    /// Of the whole blob, in bytes.
    pub fn size(&self) -> u64 {
        match self {
            Self::Registry(blob) => blob.size,
            Self::Object(blob) => blob.size,
            Self::Shared(file) => file.size,
        }
    }

    /// Who has it.
    pub fn place(&self) -> String {
        match self {
            Self::Registry(blob) => blob.host.clone(),
            Self::Object(blob) => {
                let (scheme, rest) = blob.url.split_once("://").unwrap_or(("", &blob.url));
                format!("{scheme}://{}", rest.split('/').next().unwrap_or_default())
            }
            Self::Shared(shared) => {
                shared.file.parent().map_or_else(String::new, |parent| parent.display().to_string())
            }
        }
    }
}
