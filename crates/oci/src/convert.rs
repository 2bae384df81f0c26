//! Standard images to layers: tar archives, compressed or not, become the block differences of one ext4 file system.
//!
//! Nothing is unpacked to this machine's file system and no program is started. Layer N+1 needs layers 1 to N as they
//! were converted, not their archives. The same parents and archive give the same bytes on every machine, so a
//! converted layer may be kept under its chain id (image-spec, config.md) in a shared directory or bucket.
//!
//! ```text
//! LayerSource ─ 4 at a time → spool (unnamed file) ─ thread: blob digest, decompress, diff id → tar → ext4 → layer
//!                                                      one layer after another, bottom first; starts with the first bytes
//! ```
//!
//! | what goes wrong | then |
//! |---|---|
//! | a download, a digest, the archive, a limit, the disk | the layer's directory is removed; layers below it stay, they are whole |
//! | the process is killed | a `tmp-` directory stays until [`Store::sweep`]; spools have no name and vanish |
//! | two convert the same layer | both succeed; the later one finds the name taken and throws its own away |
//! | the future is dropped | the threads notice at their next piece and end |
//!
//! Archives are not trusted: see `apply` for names and links, `tar` for sizes, [`ConvertOptions`] for bombs.

mod apply;
mod build;
mod pax;
mod source;
mod spool;
mod store;
mod tar;

pub use source::{LayerBytes, LayerRef, LayerSource, LayoutSource, RegistrySource, SourceError, layers_of};
pub use store::{ConvertedLayer, SharedLayers, Store};

use crate::{CancellationToken, command::Progress};
use futures_util::{StreamExt as _, stream};
use sha2::{Digest as _, Sha256};
use spool::Spool;
use std::{io, path::PathBuf, sync::Arc, time::Duration};

/// Why an image can't be converted.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// The bytes did not come.
    #[error("layer {digest} can't be had: {source}")]
    Source {
        /// The blob.
        digest: String,
        /// What its source says.
        source: SourceError,
    },
    /// The blob or its content is not what the manifest or the configuration say.
    #[error("layer {digest} is not what the image says: {reason}; the image or its mirror is damaged")]
    Digest {
        /// The blob.
        digest: String,
        /// Which digest differs.
        reason: String,
    },
    /// The archive can't be a root file system, or not within the limits.
    #[error("layer {digest} can't be converted: {reason}")]
    Layer {
        /// The blob.
        digest: String,
        /// What is wrong and where.
        reason: String,
    },
    /// Manifest and configuration contradict each other.
    #[error("the image is invalid: {0}")]
    Image(String),
    /// The store of converted layers.
    #[error("{step}: {source}")]
    Io {
        /// What was tried.
        step: String,
        /// Why it failed.
        source: io::Error,
    },
    /// The shared store.
    #[error("the shared store of converted layers: {0}")]
    Shared(SourceError),
    /// Not done in time.
    #[error("the conversion is not done after {0:?}; give it a longer deadline")]
    TimedOut(Duration),
    /// The caller's token.
    #[error("cancelled")]
    Cancelled,
}

/// Bounds of a conversion, and who watches it.
#[derive(Clone)]
pub struct ConvertOptions {
    /// Bytes of the whole file system.
    pub max_fs_bytes: u64,
    /// Bytes that one layer may unpack to, its archive's headers counted.
    pub max_layer_bytes: u64,
    /// Files of the whole file system.
    pub max_files: u64,
    /// Bytes of directories and inodes held in memory.
    pub max_memory: u64,
    /// Downloads at a time.
    pub parallel: usize,
    /// For everything.
    pub deadline: Duration,
    /// Ends it early.
    pub cancel: CancellationToken,
    /// Told what happens.
    pub progress: Progress,
    /// Where finished layers are looked for and put, besides the store.
    pub shared: Option<Arc<dyn SharedLayers>>,
}

impl Default for ConvertOptions {
    /// 256 GiB, 4 million files, 1 GiB of memory, four downloads, an hour.
    fn default() -> Self {
        Self {
            max_fs_bytes: 256 << 30,
            max_layer_bytes: 256 << 30,
            max_files: 4 << 20,
            max_memory: 1 << 30,
            parallel: 4,
            deadline: Duration::from_secs(3600),
            cancel: CancellationToken::new(),
            progress: Progress::none(),
            shared: None,
        }
    }
}

/// What an image became.
#[derive(Debug, Clone)]
pub struct ConvertedImage {
    /// Bottom first: the stack.
    pub layers: Vec<ConvertedLayer>,
    /// Bytes of the device that the file system fills; a stack may be larger, and the guest's kernel then grows it.
    pub fs_size: u64,
    /// Bytes of it in use.
    pub used: u64,
}

impl ConvertedImage {
    /// The layers' files, bottom first.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.layers.iter().map(|layer| layer.path.clone()).collect()
    }
}

/// An archive without entries: what an image without layers stands on.
const EMPTY_DIFF: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

/// Converts what is not in `store` yet of `layers`, bottom first.
///
/// # Errors
/// See [`ConvertError`]. Layers finished before an error stay in the store and are not converted again.
pub async fn convert_image(
    source: Arc<dyn LayerSource>,
    layers: &[LayerRef],
    store: &Store,
    options: &ConvertOptions,
) -> Result<ConvertedImage, ConvertError> {
    let work = convert(source, layers, store, options);
    tokio::select! {
        result = tokio::time::timeout(options.deadline, work) => {
            result.unwrap_or(Err(ConvertError::TimedOut(options.deadline)))
        }
        () = options.cancel.cancelled() => Err(ConvertError::Cancelled),
    }
}

async fn convert(
    source: Arc<dyn LayerSource>,
    layers: &[LayerRef],
    store: &Store,
    options: &ConvertOptions,
) -> Result<ConvertedImage, ConvertError> {
    if layers.len() > aenv_overlaybd::MAX_LAYERS - 1 {
        return Err(ConvertError::Image(format!("it has {} layers; 254 can be stacked", layers.len())));
    }
    let empty = [LayerRef { digest: EMPTY_DIFF.into(), size: 0, diff_id: EMPTY_DIFF.into() }];
    let (layers, source): (&[LayerRef], Arc<dyn LayerSource>) =
        if layers.is_empty() { (&empty, Arc::new(source::Nothing)) } else { (layers, source) };
    for layer in layers {
        layer.check()?;
    }
    let chains = chain_ids(layers);
    let mut done = Vec::new();
    for chain in &chains {
        match store.find(chain, options.shared.as_deref()).await? {
            Some(layer) => done.push(layer),
            None => break,
        }
    }
    let known = done.len();
    if known < layers.len() {
        options.progress.say(&format!("converting {} of {} layers", layers.len() - known, layers.len()));
        done = convert_missing(source, layers, &chains, done, store, options).await?;
        if let Some(shared) = &options.shared {
            for layer in &done[known..] {
                shared.put(layer).await.map_err(ConvertError::Shared)?;
            }
        }
    }
    let top = done.last().expect("an image has a layer");
    Ok(ConvertedImage { fs_size: top.fs_size, used: top.used, layers: done })
}

async fn convert_missing(
    source: Arc<dyn LayerSource>,
    layers: &[LayerRef],
    chains: &[String],
    done: Vec<ConvertedLayer>,
    store: &Store,
    options: &ConvertOptions,
) -> Result<Vec<ConvertedLayer>, ConvertError> {
    let known = done.len();
    let stop = CancellationToken::new();
    let _stopped_when_dropped = stop.clone().drop_guard();
    let mut jobs = Vec::new();
    for layer in &layers[known..] {
        jobs.push((layer.clone(), Arc::new(store.spool(stop.clone())?)));
    }
    let downloads =
        stream::iter(jobs.clone()).for_each_concurrent(options.parallel.max(1), |(layer, spool)| {
            let source = Arc::clone(&source);
            async move { fill(&*source, &layer, &spool).await }
        });
    let builder = build::Builder { store: store.clone(), options: options.clone(), stop };
    let chains = chains.to_vec();
    let mut building = tokio::task::spawn_blocking(move || {
        let mut done = done;
        for (n, (layer, spool)) in jobs.into_iter().enumerate() {
            let parent = (known + n).checked_sub(1).map(|below| chains[below].as_str());
            let built = builder.build(&layer, &chains[known + n], parent, &done, &spool)?;
            builder.options.progress.say(&format!(
                "converted layer {}: {} KiB",
                layer.digest,
                built.size / 1024
            ));
            done.push(built);
        }
        Ok(done)
    });
    let result = tokio::select! {
        result = &mut building => result,
        () = downloads => building.await,
    };
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

/// A blob into its spool, whose reader learns of the end or the error.
async fn fill(source: &dyn LayerSource, layer: &LayerRef, spool: &Spool) {
    let result = async {
        let mut bytes = source.open(layer).await?;
        let mut got = 0u64;
        while let Some(piece) = bytes.next().await {
            let piece = piece?;
            got += piece.len() as u64;
            if got > layer.size {
                return Err(format!("it is longer than the {} bytes of its manifest", layer.size).into());
            }
            spool.append(&piece).await?;
        }
        Ok(())
    };
    spool.end(result.await);
}

/// The chain id of each layer: what identifies it together with all that lies below.
fn chain_ids(layers: &[LayerRef]) -> Vec<String> {
    let mut chains: Vec<String> = Vec::new();
    for layer in layers {
        let chain = match chains.last() {
            None => layer.diff_id.clone(),
            Some(below) => {
                format!("sha256:{}", hex::encode(Sha256::digest(format!("{below} {}", layer.diff_id))))
            }
        };
        chains.push(chain);
    }
    chains
}
