//! Where archives come from.

use super::ConvertError;
use crate::{reference::Remote, registry::Client};
use async_trait::async_trait;
use futures_util::{StreamExt as _, TryStreamExt as _, stream, stream::BoxStream};
use oci_spec::image::ImageManifest;
use std::{path::PathBuf, time::Duration};
use tokio_util::{bytes::Bytes, io::ReaderStream};

/// What a source says went wrong.
pub type SourceError = Box<dyn std::error::Error + Send + Sync>;

/// A blob's bytes in order.
pub type LayerBytes = BoxStream<'static, Result<Bytes, SourceError>>;

/// One layer of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerRef {
    /// Of the blob as it is stored, `sha256:…`.
    pub digest: String,
    /// Bytes of the blob.
    pub size: u64,
    /// Of the archive in it, uncompressed, `sha256:…`.
    pub diff_id: String,
}

impl LayerRef {
    pub(super) fn check(&self) -> Result<(), ConvertError> {
        for digest in [&self.digest, &self.diff_id] {
            let hex = digest.strip_prefix("sha256:").unwrap_or_default();
            let good =
                hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
            if !good {
                return Err(ConvertError::Image(format!("{digest:?} is no sha256 digest")));
            }
        }
        Ok(())
    }
}

/// The layers of an image, bottom first, from its manifest and its configuration's bytes.
///
/// # Errors
/// [`ConvertError::Image`] when they have different numbers of layers or the configuration names none.
pub fn layers_of(manifest: &ImageManifest, config: &[u8]) -> Result<Vec<LayerRef>, ConvertError> {
    #[derive(serde::Deserialize)]
    struct Config {
        rootfs: RootFs,
    }
    #[derive(serde::Deserialize)]
    struct RootFs {
        #[serde(default)]
        diff_ids: Vec<String>,
    }
    let config: Config = serde_json::from_slice(config)
        .map_err(|e| ConvertError::Image(format!("its configuration names no layers: {e}")))?;
    let ids = config.rootfs.diff_ids;
    if ids.len() != manifest.layers().len() {
        return Err(ConvertError::Image(format!(
            "its manifest has {} layers and its configuration {}",
            manifest.layers().len(),
            ids.len()
        )));
    }
    let refs = manifest.layers().iter().zip(ids);
    Ok(refs
        .map(|(layer, diff_id)| LayerRef { digest: layer.digest().to_string(), size: layer.size(), diff_id })
        .collect())
}

/// Something that gives layers' blobs. Their digests are checked by who reads them.
#[async_trait]
pub trait LayerSource: Send + Sync {
    /// The blob from its first byte on.
    async fn open(&self, layer: &LayerRef) -> Result<LayerBytes, SourceError>;
}

/// The blobs of an OCI layout's directory.
#[derive(Debug, Clone)]
pub struct LayoutSource {
    /// The directory with `index.json` in it.
    pub layout: PathBuf,
}

#[async_trait]
impl LayerSource for LayoutSource {
    async fn open(&self, layer: &LayerRef) -> Result<LayerBytes, SourceError> {
        let hex = layer.digest.strip_prefix("sha256:").unwrap_or(&layer.digest);
        let file = tokio::fs::File::open(self.layout.join("blobs/sha256").join(hex)).await?;
        Ok(ReaderStream::with_capacity(file, 256 << 10).map_err(SourceError::from).boxed())
    }
}

/// A repository of a registry.
#[derive(Debug, Clone)]
pub struct RegistrySource {
    /// Talks to the registry.
    pub client: Client,
    /// The image.
    pub remote: Remote,
    /// For each blob.
    pub deadline: Duration,
}

#[async_trait]
impl LayerSource for RegistrySource {
    async fn open(&self, layer: &LayerRef) -> Result<LayerBytes, SourceError> {
        let blob = self.client.stream(&self.remote, &layer.digest, layer.size, self.deadline)?;
        Ok(blob.into_stream().map_err(SourceError::from).boxed())
    }
}

/// The source of an image without layers.
pub(super) struct Nothing;

#[async_trait]
impl LayerSource for Nothing {
    async fn open(&self, _: &LayerRef) -> Result<LayerBytes, SourceError> {
        Ok(stream::empty().boxed())
    }
}
