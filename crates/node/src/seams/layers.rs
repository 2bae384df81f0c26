//! Memory images and layers as files.

use super::Result;
use async_trait::async_trait;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// What a capture found and wrote.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Captured {
    /// Pages the guest changed.
    pub pages: u64,
    /// Of these, all zero: stored as holes.
    pub zero: u64,
    /// Of these, equal to the parent's content: left out.
    pub same: u64,
    /// Bytes of the layer file.
    pub bytes: u64,
}

/// Captures and merges. Files are durable (synced) when these return; a failed call leaves no file.
#[async_trait]
pub trait Layers: Send + Sync + 'static {
    /// Writes what a stopped, restored machine changed in its memory since the restore as a layer at `to`.
    /// `parent` is the memory image it was restored from.
    async fn capture(
        &self,
        vm: Arc<dyn aenv_vmm::Vm>,
        size: u64,
        parent: &Path,
        to: &Path,
    ) -> Result<Captured>;
    /// Makes one layer of several, lowest first.
    async fn merge(&self, layers: &[PathBuf], to: &Path) -> Result<()>;
    /// Turns the zero pages of a flat memory image into holes and syncs it. Returns the bytes that remain.
    async fn finish_image(&self, image: &Path) -> Result<u64>;
}
