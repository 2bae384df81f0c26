//! A whole image into an OCI layout, for those who read it from files.
//!
//! Blobs are fetched side by side, each into a file of its own that gets its name when its digest is proven, so a layout
//! never holds a blob that isn't what its name says. The index comes last: a layout without one is unfinished.

use super::{BlobStream, Client, Error};
use crate::reference::Remote;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use std::{collections::BTreeSet, io, path::Path, time::Duration};
use tokio::{fs, io::AsyncWriteExt as _, time::Instant};

const PARALLEL: usize = 4;
const REF_NAME: &str = "org.opencontainers.image.ref.name";
const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// Why an image isn't in a layout.
#[derive(Debug)]
pub(crate) enum Failure {
    Registry(Error),
    /// The step and its cause.
    File(String, io::Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Registry(error)
    }
}

/// Fetches the image for this machine into `directory`, which is made, and calls it `tag` there.
pub(crate) async fn pull(
    client: &Client,
    remote: &Remote,
    directory: &Path,
    tag: &str,
    deadline: Duration,
    say: &(dyn Fn(&str) + Sync),
) -> Result<(), Failure> {
    let end = Instant::now() + deadline;
    let image = client.manifest(remote).await?;
    let blobs = directory.join("blobs/sha256");
    let step = || format!("make a layout in {}", directory.display());
    fs::create_dir_all(&blobs).await.map_err(|e| Failure::File(step(), e))?;
    let config = client.config(remote, &image).await?;
    write(&blobs, image.manifest.config().digest().as_ref(), &config).await?;
    // An image may have a layer twice.
    let layers: BTreeSet<_> =
        image.manifest.layers().iter().map(|l| (l.digest().to_string(), l.size())).collect();
    let count = layers.len();
    let fetch = |(n, (digest, size)): (usize, (String, u64))| {
        let blobs = &blobs;
        async move {
            say(&format!("Copying layer {} of {count}: {digest}, {} KiB", n + 1, size.div_ceil(1024)));
            let left = || end.saturating_duration_since(Instant::now());
            match save(blobs, &digest, client.stream(remote, &digest, size, left())?).await {
                Err(Failure::Registry(error @ Error::Digest { .. })) => {
                    // A mirror may be damaged; the registry has the last word.
                    say(&error.to_string());
                    save(blobs, &digest, client.stream_from_registry(remote, &digest, size, left())?).await
                }
                other => other,
            }
        }
    };
    stream::iter(layers.into_iter().enumerate())
        .map(fetch)
        .buffer_unordered(PARALLEL)
        .try_collect::<()>()
        .await?;
    let bytes = as_oci(&image.bytes);
    let digest = super::documents::digest_of(&bytes);
    write(&blobs, &digest, &bytes).await?;
    let index = serde_json::json!({
        "schemaVersion": 2,
        "manifests": [{
            "mediaType": OCI_MANIFEST,
            "digest": digest,
            "size": bytes.len(),
            "annotations": { REF_NAME: tag },
        }],
    });
    let layout = br#"{"imageLayoutVersion":"1.0.0"}"#;
    fs::write(directory.join("oci-layout"), layout).await.map_err(|e| Failure::File(step(), e))?;
    fs::write(directory.join("index.json"), index.to_string()).await.map_err(|e| Failure::File(step(), e))
}

fn hex_of(digest: &str) -> &str {
    digest.strip_prefix("sha256:").unwrap_or(digest)
}

async fn write(blobs: &Path, digest: &str, bytes: &[u8]) -> Result<(), Failure> {
    let path = blobs.join(hex_of(digest));
    fs::write(&path, bytes).await.map_err(|e| Failure::File(format!("write {}", path.display()), e))
}

async fn save(blobs: &Path, digest: &str, mut blob: BlobStream) -> Result<(), Failure> {
    let path = blobs.join(hex_of(digest));
    let partial = path.with_extension("part");
    let failed = |e| Failure::File(format!("write {}", partial.display()), e);
    let mut file = fs::File::create(&partial).await.map_err(failed)?;
    while let Some(piece) = blob.chunk().await? {
        file.write_all(&piece).await.map_err(failed)?;
    }
    file.flush().await.map_err(failed)?;
    fs::rename(&partial, &path).await.map_err(failed)
}

/// A Docker manifest in OCI's terms, which is all that the unpacker knows. Others stay as they are, byte by byte.
fn as_oci(bytes: &[u8]) -> Vec<u8> {
    const DOCKER: &str = "application/vnd.docker.";
    let Ok(mut manifest) = serde_json::from_slice::<serde_json::Value>(bytes) else { return bytes.to_vec() };
    let mut changed = false;
    let mut translate = |value: &mut serde_json::Value| {
        let known = value.as_str().and_then(|kind| kind.strip_prefix(DOCKER)).map(|kind| match kind {
            "distribution.manifest.v2+json" => OCI_MANIFEST,
            "container.image.v1+json" => "application/vnd.oci.image.config.v1+json",
            "image.rootfs.diff.tar" => "application/vnd.oci.image.layer.v1.tar",
            "image.rootfs.diff.tar.zstd" => "application/vnd.oci.image.layer.v1.tar+zstd",
            "image.rootfs.foreign.diff.tar" => "application/vnd.oci.image.layer.nondistributable.v1.tar",
            "image.rootfs.foreign.diff.tar.gzip" => {
                "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"
            }
            "image.rootfs.diff.tar.gzip" => "application/vnd.oci.image.layer.v1.tar+gzip",
            _ => "",
        });
        if let Some(kind) = known.filter(|kind| !kind.is_empty()) {
            *value = kind.into();
            changed = true;
        }
    };
    translate(&mut manifest["mediaType"]);
    translate(&mut manifest["config"]["mediaType"]);
    for layer in manifest["layers"].as_array_mut().into_iter().flatten() {
        translate(&mut layer["mediaType"]);
    }
    if changed { manifest.to_string().into_bytes() } else { bytes.to_vec() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn docker_manifests_are_translated_and_others_left_alone() {
        let oci = br#"{ "schemaVersion": 2, "layers": [] , "config": {"mediaType": "application/vnd.oci.image.config.v1+json"}}"#;
        assert_eq!(as_oci(oci), oci);
        let docker = br#"{"mediaType":"application/vnd.docker.distribution.manifest.v2+json","config":{"mediaType":"application/vnd.docker.container.image.v1+json"},
            "layers":[{"mediaType":"application/vnd.docker.image.rootfs.diff.tar.gzip","digest":"x"},{"mediaType":"application/vnd.docker.image.rootfs.diff.tar.odd"}]}"#;
        let read: serde_json::Value = serde_json::from_slice(&as_oci(docker)).unwrap();
        assert_eq!(read["mediaType"], OCI_MANIFEST);
        assert_eq!(read["config"]["mediaType"], "application/vnd.oci.image.config.v1+json");
        assert_eq!(read["layers"][0]["mediaType"], "application/vnd.oci.image.layer.v1.tar+gzip");
        assert_eq!(read["layers"][0]["digest"], "x");
        // An unknown kind stays, for the reader of the layout to refuse.
        assert_eq!(read["layers"][1]["mediaType"], "application/vnd.docker.image.rootfs.diff.tar.odd");
    }
}
