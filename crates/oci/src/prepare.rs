//! From a reference to a disk.
//!
//! Steps, each in one scratch directory that vanishes with its owner: fetch → view → unpack → measure → mke2fs. A
//! layout on this machine is read in place. On any error, cancellation or drop the scratch goes; after kill -9,
//! [`sweep`](crate::sweep) removes it.

use crate::{
    Auth, Error, ImageConfig, Progress, Reference,
    command::{Context, Tool},
    disk::{self, Geometry},
    error::{During as _, blocking},
    fetch::{self, TAG},
    layout, scratch,
    scratch::Scratch,
};
use async_trait::async_trait;
use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use tokio_util::sync::CancellationToken;

/// Free space that a disk gets when nobody says otherwise.
pub const DEFAULT_DISK_MIB: u64 = 5120;
/// Largest free space: 16 TiB is ext4's bound with 4 KiB blocks and 32-bit block numbers in old tools.
const MAX_DISK_MIB: u64 = 8 << 20;
const UNPACK_DEADLINE: Duration = Duration::from_secs(1800);

/// How an image is prepared.
#[derive(Debug, Clone)]
pub struct Options {
    /// Holds temporary files, twice the unpacked image at most. Must be on a file system that takes sparse files,
    /// device nodes and extended attributes, so not on NFS.
    pub work_dir: PathBuf,
    /// Free space beyond the image's content, in MiB. The disk is sparse: it costs only what is written.
    pub disk_mib: u64,
    /// For the registry.
    pub auth: Auth,
    /// For the whole fetch.
    pub fetch_deadline: Duration,
    /// Told about every step.
    pub progress: Progress,
    /// Ends it early, within seconds.
    pub cancel: CancellationToken,
}

impl Options {
    /// [`DEFAULT_DISK_MIB`], anonymous, an hour for fetching, nobody listening.
    pub fn new(work_dir: impl Into<PathBuf>) -> Self {
        Self {
            work_dir: work_dir.into(),
            disk_mib: DEFAULT_DISK_MIB,
            auth: Auth::Anonymous,
            fetch_deadline: Duration::from_secs(3600),
            progress: Progress::none(),
            cancel: CancellationToken::new(),
        }
    }
}

/// An image as a disk. Dropping it removes the disk; take its content first.
#[derive(Debug)]
pub struct Prepared {
    /// What the image says about running it.
    pub config: ImageConfig,
    /// Of the manifest for this machine: `sha256:` and 64 hex digits. A Docker manifest is converted to OCI's form
    /// first, so it may differ from the registry's digest of the same image.
    pub digest: String,
    /// A sparse file holding an ext4 file system labelled `aenv-root`, without partitions.
    pub raw_disk: PathBuf,
    /// Its virtual size in bytes, whole MiB.
    pub size: u64,
    /// Bytes of file content in it, in blocks of 4 KiB.
    pub content: u64,
    _scratch: Scratch,
}

/// Where disks come from. The seam at which converting layers directly replaces [`Tools`].
#[async_trait]
pub trait Images: Send + Sync + 'static {
    /// Makes a disk of an image.
    async fn prepare(&self, reference: &Reference, options: Options) -> Result<Prepared, Error>;
}

/// skopeo, umoci and mke2fs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tools;

#[async_trait]
impl Images for Tools {
    async fn prepare(&self, reference: &Reference, options: Options) -> Result<Prepared, Error> {
        prepare(reference, options).await
    }
}

/// Makes a disk of an image. Needs root: files keep their owners, devices and attributes.
///
/// # Errors
/// See [`Error`]. No file is left.
pub async fn prepare(reference: &Reference, options: Options) -> Result<Prepared, Error> {
    if !rustix::process::geteuid().is_root() {
        return Err(Error::Host("unpacking an image needs root, for owners and device nodes".to_owned()));
    }
    if !(1..=MAX_DISK_MIB).contains(&options.disk_mib) {
        return Err(Error::Host(format!(
            "the free disk space must be 1 to {MAX_DISK_MIB} MiB, not {}",
            options.disk_mib
        )));
    }
    let Options { work_dir, disk_mib, auth, fetch_deadline, progress, cancel } = options;
    let scratch = blocking(move || Scratch::new(&work_dir)).await?;
    let context = Context { scratch, progress, cancel };
    let began = Instant::now();
    let (layout, tag) = match reference {
        Reference::Layout { path, tag } => (path.clone(), tag.clone()),
        other => (fetch::fetch(other, &auth, fetch_deadline, &context).await?, Some(TAG.to_owned())),
    };
    let fetched = began.elapsed();
    let view = context.scratch.path().join("view");
    let image = {
        let view = view.clone();
        blocking(move || {
            let image = layout::open(&layout, tag.as_deref())?;
            image.view(&view)?;
            Ok(image)
        })
        .await?
    };
    let tree = context.scratch.path().join("tree");
    context.progress.say("unpacking");
    unpack(&tree, &context).await?;
    let unpacked = began.elapsed();
    let content = {
        let tree = tree.clone();
        blocking(move || disk::measure(&tree)).await?
    };
    let geometry = Geometry::new(content, disk_mib);
    context.progress.say(&format!(
        "making a disk of {} files, {} MiB",
        content.inodes,
        (content.blocks * 4096) >> 20
    ));
    let raw_disk = context.scratch.path().join("disk.raw");
    disk::make(&tree, &raw_disk, geometry, &context).await?;
    let fetched_dir = context.scratch.path().join("fetched");
    blocking(move || {
        for done in [tree, view, fetched_dir] {
            scratch::remove_tree(&done).during(|| format!("remove {}", done.display()))?;
        }
        Ok(())
    })
    .await?;
    tracing::info!(
        image = %reference,
        digest = image.digest,
        files = content.inodes,
        fetch_ms = millis(fetched),
        unpack_ms = millis(unpacked.saturating_sub(fetched)),
        disk_ms = millis(began.elapsed().saturating_sub(unpacked)),
        "prepared an image"
    );
    Ok(Prepared {
        config: image.config,
        digest: image.digest,
        raw_disk,
        size: geometry.bytes,
        content: content.blocks * 4096,
        _scratch: context.scratch,
    })
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Unpacks the view's layers with owners, devices, attributes and whiteouts.
async fn unpack(tree: &Path, context: &Context) -> Result<(), Error> {
    let tool = Tool::new("umoci", "umoci", UNPACK_DEADLINE).command(|command| {
        // The raw command writes no manifest of file hashes, which would cost as much as the unpacking.
        command.args(["raw", "unpack", "--image", &format!("view:{TAG}")]).arg(tree);
    });
    tool.run(context, |line| line.contains("unpack layer").then(|| line.trim().to_owned())).await?.check()
}
