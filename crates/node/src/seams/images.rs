//! Images as root file systems.

use super::Result;
use async_trait::async_trait;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

/// What is asked for.
#[derive(Debug, Clone)]
pub struct ImageRequest {
    /// Registry reference, `oci:DIR[:tag]`, `oci-archive:FILE`, `docker-archive:FILE`.
    pub reference: String,
    /// Size of the disk, MiB.
    pub disk_mib: u32,
    /// Registry user and password.
    pub credentials: Option<(String, String)>,
}

/// An image made ready.
#[derive(Debug, Clone)]
pub struct Image {
    /// Digest of its manifest, `sha256:…`.
    pub digest: String,
    /// The layer file of its root file system; shared by every template of this digest and size.
    pub disk: PathBuf,
    /// Size of the disk, bytes.
    pub disk_size: u64,
    /// Environment.
    pub env: BTreeMap<String, String>,
    /// User, when the image names one.
    pub user: Option<String>,
    /// Working directory, when the image names one.
    pub workdir: Option<String>,
    /// Program and first arguments the image would run; empty when there is none.
    pub entrypoint: Vec<String>,
    /// Default arguments, or the program where there is no entrypoint.
    pub cmd: Vec<String>,
    /// Users of its `/etc/passwd`.
    pub users: Vec<String>,
}

/// Turns references into disks.
#[async_trait]
pub trait Images: Send + Sync + 'static {
    /// Whether `reference` could be prepared at all: its form, and whether this server allows its kind. No I/O.
    fn check(&self, reference: &str) -> Result<()>;

    /// Fetches and converts an image below `dir`, or finds what an earlier call left there. Safe to run at the same
    /// time for different images; `note` is told each step for the build log.
    async fn prepare(
        &self,
        request: &ImageRequest,
        dir: &Path,
        note: Arc<dyn Fn(String) + Send + Sync>,
    ) -> Result<Image>;
}
