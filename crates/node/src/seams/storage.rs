//! Layer stacks as disks, served by a process that outlives the server.

use super::Result;
use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// How a layer's bytes are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LayerKind {
    /// A flat image.
    Raw,
    /// An overlaybd LSMT layer.
    Lsmt,
}

/// A layer by path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// Its layout.
    pub kind: LayerKind,
    /// Its file.
    pub path: PathBuf,
}

impl Layer {
    /// An LSMT layer.
    #[must_use]
    pub fn lsmt(path: PathBuf) -> Self {
        Self { kind: LayerKind::Lsmt, path }
    }

    /// A flat image.
    #[must_use]
    pub fn raw(path: PathBuf) -> Self {
        Self { kind: LayerKind::Raw, path }
    }
}

/// Layers from the lowest to the highest and the size of what they make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stack {
    /// Bytes.
    pub virtual_size: u64,
    /// Lowest first.
    pub layers: Vec<Layer>,
}

/// How a stack is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mode {
    /// Nobody writes.
    ReadOnly,
    /// Writes go to an upper whose files live in `dir`.
    Writable {
        /// Belongs to this export alone.
        dir: PathBuf,
    },
}

/// An open stack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Export {
    /// A file or block device with the content.
    pub path: PathBuf,
    /// Bytes.
    pub size: u64,
}

/// Exports by name. Opening an open name with the same stack and closing an unknown one both succeed.
#[async_trait]
pub trait Storage: Send + Sync + 'static {
    /// Opens a stack under a name.
    async fn open(&self, name: &str, stack: &Stack, mode: &Mode) -> Result<Export>;
    /// Makes everything written so far the newest read-only layer, at `to`; the export stays writable above it.
    async fn seal(&self, name: &str, to: &Path) -> Result<()>;
    /// Closes an export. Its upper's files stay.
    async fn close(&self, name: &str) -> Result<()>;
    /// Names of open exports.
    async fn list(&self) -> Result<Vec<String>>;
}
