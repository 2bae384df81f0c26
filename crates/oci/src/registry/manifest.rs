//! What a registry has under a tag or digest, and which of it is for this machine.

use super::Error;
use super::documents::Fetched;
use oci_spec::image::{Descriptor, ImageIndex, ImageManifest};
use serde::{Deserialize, de::IgnoredAny};
use tokio_util::bytes::Bytes;

/// OCI's and Docker's, both kinds of both.
pub(crate) const ACCEPT: &str = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, \
     application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.docker.distribution.manifest.v2+json";
/// Distribution-spec asks registries to take 4 MiB at least; more is never needed.
pub(crate) const MAX_MANIFEST: usize = 4 << 20;
pub(crate) const MAX_CONFIG: usize = 8 << 20;
/// Indexes within indexes.
pub(crate) const MAX_DEPTH: usize = 4;
const MAX_LAYERS: usize = 512;

/// An image's manifest for this machine, checked against its digest.
#[derive(Debug, Clone)]
pub struct Manifest {
    /// Of `bytes`: `sha256:` and 64 hex digits.
    pub digest: String,
    /// Of the index that led to it, when the tag or digest named one.
    pub index: Option<String>,
    /// As the registry has it.
    pub bytes: Bytes,
    /// Like `application/vnd.oci.image.manifest.v1+json`.
    pub media_type: String,
    /// What they say.
    pub manifest: ImageManifest,
}

/// What a document is.
pub(crate) enum Read {
    Index(Box<ImageIndex>),
    Image(Box<Manifest>),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Shape {
    schema_version: Option<u64>,
    media_type: Option<String>,
    manifests: Option<IgnoredAny>,
    layers: Option<IgnoredAny>,
    fs_layers: Option<IgnoredAny>,
}

/// Reads a manifest or an index. What it says it is, what its header says and what is in it must agree, or two readers
/// could see two images under one digest.
pub(crate) fn read(fetched: &Fetched, what: &str) -> Result<Read, Error> {
    let bad = |reason: &dyn std::fmt::Display| Error::protocol(&fetched.place, what, reason);
    let shape: Shape =
        serde_json::from_slice(&fetched.bytes).map_err(|e| bad(&format!("it is no manifest: {e}")))?;
    if shape.fs_layers.is_some() || shape.schema_version == Some(1) {
        return Err(bad(
            &"it is in Docker's first format, which is obsolete; push the image anew with a current tool",
        ));
    }
    let is_index = match (shape.manifests.is_some(), shape.layers.is_some()) {
        (true, false) => true,
        (false, true) => false,
        (true, true) => return Err(bad(&"it is a manifest and an index at once")),
        (false, false) => return Err(bad(&"it is neither a manifest nor an index")),
    };
    let said = shape.media_type.filter(|said| !said.is_empty());
    for kind in [said.as_deref(), Some(fetched.media_type.as_str())].into_iter().flatten() {
        let claims_index = match kind {
            "application/vnd.oci.image.index.v1+json"
            | "application/vnd.docker.distribution.manifest.list.v2+json" => true,
            "application/vnd.oci.image.manifest.v1+json"
            | "application/vnd.docker.distribution.manifest.v2+json" => false,
            // A static file server knows no better.
            _ => continue,
        };
        if claims_index != is_index {
            return Err(bad(&format!("it says it is {kind}, and is not")));
        }
    }
    if is_index {
        return ImageIndex::from_reader(&fetched.bytes[..])
            .map(|index| Read::Index(Box::new(index)))
            .map_err(|e| bad(&e));
    }
    let manifest = ImageManifest::from_reader(&fetched.bytes[..]).map_err(|e| bad(&e))?;
    if manifest.layers().len() > MAX_LAYERS {
        return Err(bad(&format!("it has more than {MAX_LAYERS} layers")));
    }
    let media_type = said.unwrap_or_else(|| fetched.media_type.clone());
    Ok(Read::Image(Box::new(Manifest {
        digest: fetched.digest.clone(),
        index: None,
        bytes: fetched.bytes.clone(),
        media_type,
        manifest,
    })))
}

/// The entry for linux and `architecture`, or `None`.
///
/// Without a variant it runs on every machine of the architecture, so it comes first; `v1` of amd64 and `v8` of arm64
/// say the same. A guest's processor may be older than its host's, so of the rest the lowest variant is next. An entry
/// without a platform may be anything and comes last.
pub(crate) fn choose<'a>(manifests: &'a [Descriptor], architecture: &str) -> Option<&'a Descriptor> {
    let rank = |descriptor: &Descriptor| -> Option<u32> {
        // Provenance and the like, which builders add to an index, runs nowhere.
        let annotations = descriptor.annotations().as_ref();
        if annotations.is_some_and(|all| all.contains_key("vnd.docker.reference.type")) {
            return None;
        }
        let Some(platform) = descriptor.platform() else { return Some(u32::MAX) };
        if platform.os().to_string() != "linux" || platform.architecture().to_string() != architecture {
            return None;
        }
        match (architecture, platform.variant().as_deref().unwrap_or_default()) {
            (_, "") | ("amd64", "v1") | ("arm64", "v8") => Some(0),
            (_, variant) => Some(version(variant)),
        }
    };
    let ranked = manifests.iter().filter_map(|descriptor| rank(descriptor).map(|rank| (rank, descriptor)));
    ranked.min_by_key(|(rank, _)| *rank).map(|(_, descriptor)| descriptor)
}

/// `v9.2` as 9002; what can't be read comes after all that can.
fn version(variant: &str) -> u32 {
    let read = || {
        let (major, minor) = variant.strip_prefix('v')?.split_once('.').unwrap_or((variant.get(1..)?, "0"));
        major.parse::<u32>().ok()?.checked_mul(1000)?.checked_add(minor.parse().ok()?)
    };
    read().unwrap_or(u32::MAX - 1)
}

/// What there is instead, for messages.
pub(crate) fn platforms(manifests: &[Descriptor]) -> String {
    let name = |descriptor: &Descriptor| {
        let platform = descriptor.platform().as_ref()?;
        let variant = platform.variant().as_ref().map(|v| format!("/{v}")).unwrap_or_default();
        Some(super::error::words(&format!("{}/{}{variant}", platform.os(), platform.architecture())))
    };
    let names: Vec<_> = manifests.iter().filter_map(name).take(12).collect();
    if names.is_empty() { "nothing".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::{Place, documents::digest_of};
    use std::sync::Arc;

    fn index(platforms: &[&str]) -> ImageIndex {
        let entry = |(n, platform): (usize, &&str)| {
            let mut parts = platform.split('/');
            let mut entry = serde_json::json!({
                "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": format!("sha256:{n:064x}"), "size": 1,
            });
            if let (Some(os), Some(architecture)) = (parts.next(), parts.next()) {
                entry["platform"] = serde_json::json!({ "os": os, "architecture": architecture });
                if let Some(variant) = parts.next() {
                    entry["platform"]["variant"] = variant.into();
                }
            }
            entry
        };
        let manifests: Vec<_> = platforms.iter().enumerate().map(entry).collect();
        let json = serde_json::json!({ "schemaVersion": 2, "manifests": manifests });
        ImageIndex::from_reader(json.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn the_variant_that_runs_everywhere_is_chosen() {
        let chosen = |platforms: &[&str], architecture: &str| {
            let index = index(platforms);
            choose(index.manifests(), architecture)
                .map(|d| usize::from_str_radix(d.digest().digest(), 16).unwrap())
        };
        assert_eq!(chosen(&["windows/amd64", "linux/arm64", "linux/amd64"], "amd64"), Some(2));
        assert_eq!(chosen(&["linux/amd64/v3", "linux/amd64/v2", "linux/amd64"], "amd64"), Some(2));
        assert_eq!(chosen(&["linux/amd64/v3", "linux/amd64/v1"], "amd64"), Some(1));
        assert_eq!(chosen(&["linux/amd64/v4", "linux/amd64/v3", "linux/amd64/odd"], "amd64"), Some(1));
        assert_eq!(chosen(&["linux/arm64/v9", "linux/arm64/v8"], "arm64"), Some(1));
        assert_eq!(chosen(&["linux/arm/v7", "unknown/unknown"], "amd64"), None);
        assert_eq!(chosen(&["", "linux/amd64/v3"], "amd64"), Some(1));
        assert_eq!(chosen(&["linux/arm64", ""], "amd64"), Some(1));
        assert_eq!(chosen(&[], "amd64"), None);
        assert_eq!(
            platforms(index(&["linux/arm/v7", "windows/amd64"]).manifests()),
            "linux/arm/v7, windows/amd64"
        );
    }

    #[test]
    fn a_document_that_is_two_things_or_an_obsolete_one_is_refused() {
        let place = Arc::new(Place { host: "r.example".to_owned(), repository: "x".to_owned() });
        let fail = |json: &str, media_type: &str| {
            let bytes = Bytes::copy_from_slice(json.as_bytes());
            let fetched = Fetched {
                digest: digest_of(&bytes),
                bytes,
                media_type: media_type.to_owned(),
                link: None,
                place: Arc::clone(&place),
            };
            read(&fetched, "manifest 1").err().map(|e| e.to_string()).unwrap_or_default()
        };
        let oci_index = "application/vnd.oci.image.index.v1+json";
        assert!(fail(r#"{"schemaVersion":2,"manifests":[],"layers":[]}"#, "").contains("at once"));
        assert!(fail(r#"{"schemaVersion":1,"fsLayers":[]}"#, "").contains("obsolete"));
        assert!(fail(r#"{"schemaVersion":2}"#, "").contains("neither"));
        assert!(fail(r#"{"schemaVersion":2,"layers":[]}"#, oci_index).contains("and is not"));
        let confused = format!(r#"{{"schemaVersion":2,"mediaType":"{oci_index}","layers":[]}}"#);
        assert!(fail(&confused, "application/json").contains("and is not"));
        assert!(fail("<html>", "text/html").contains("no manifest"));
        assert_eq!(fail(r#"{"schemaVersion":2,"manifests":[]}"#, oci_index), "");
        // 100,000 arrays within each other.
        assert!(fail(&format!(r#"{{"manifests":{}"#, "[".repeat(100_000)), "").contains("no manifest"));
    }
}
