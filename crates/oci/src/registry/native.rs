//! Images whose layers are overlaybd layers already.
//!
//! containerd/accelerated-container-image converts images and pushes them under a tag of their own or as referrers of
//! the original. Their layers keep the media type of a tar, and are told by annotations: the blob's own digest and size,
//! the file system in it, a version. "Turbo" images hold only an index over the original's gzip layers; they need the
//! original and another reader, so they are told apart here and not used.

use oci_spec::image::{Descriptor, ImageManifest};

const PREFIX: &str = "containerd.io/snapshot/overlaybd/";
/// Of referrers that hold overlaybd layers, in the order of preference: upstream's converter, Azure's registry.
pub(crate) const ARTIFACTS: [&str; 2] =
    ["application/vnd.containerd.overlaybd.native.v1+json", "application/vnd.azure.artifact.streaming.v1"];
const TURBO_ARTIFACT: &str = "application/vnd.containerd.overlaybd.turbo.v1+json";
/// The upper bound of a stack (upstream's `MAX_STACK_LAYERS`).
const MAX_STACK: usize = 255;

/// What an image's layers are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Format {
    /// Tar archives, to be converted.
    Standard,
    /// overlaybd layers, the lowest first, to be read as they are.
    Native(Vec<NativeLayer>),
    /// An index over another image's layers.
    Turbo,
}

/// One overlaybd layer in a registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NativeLayer {
    /// Of the blob, `sha256:` and 64 hex digits.
    pub digest: String,
    /// Of the blob, in bytes.
    pub size: u64,
    /// The blob's. A tar's means that a tar header of 512 bytes may stand before the layer: its magic decides.
    pub media_type: String,
    /// Like `ext4`, which it is when the image says nothing.
    pub fs_type: String,
}

/// Tells what an image's layers are.
///
/// # Errors
/// In words: some layers are of one kind and some of another, or annotations contradict their descriptor.
pub fn classify(manifest: &ImageManifest) -> Result<Format, String> {
    let artifact = manifest.artifact_type().as_ref().map(ToString::to_string);
    let turbo = |layer: &Descriptor| {
        annotation(layer, "version").is_some_and(|version| version.contains("turbo"))
            || layer.annotations().iter().flatten().any(|(name, _)| {
                name.strip_prefix(PREFIX)
                    .is_some_and(|rest| rest.starts_with("turbo-oci/") || rest.starts_with("fastoci/"))
            })
    };
    if artifact.as_deref() == Some(TURBO_ARTIFACT) || manifest.layers().iter().any(turbo) {
        return Ok(Format::Turbo);
    }
    let layers = manifest.layers().iter().map(native).collect::<Result<Vec<_>, _>>()?;
    let found = layers.iter().flatten().count();
    match found {
        0 => Ok(Format::Standard),
        _ if found > MAX_STACK => {
            Err(format!("it has {found} overlaybd layers, and a stack holds {MAX_STACK}"))
        }
        _ if found == layers.len() => Ok(Format::Native(layers.into_iter().flatten().collect())),
        _ => {
            Err(format!("{found} of its {} layers are overlaybd layers and the others are not", layers.len()))
        }
    }
}

fn annotation<'a>(layer: &'a Descriptor, name: &str) -> Option<&'a str> {
    layer.annotations().as_ref()?.get(&format!("{PREFIX}{name}")).map(String::as_str)
}

fn native(layer: &Descriptor) -> Result<Option<NativeLayer>, String> {
    let media_type = layer.media_type().to_string();
    let digest = layer.digest().to_string();
    let said = annotation(layer, "blob-digest");
    if said.is_none() && !media_type.contains("overlaybd") {
        return Ok(None);
    }
    if let Some(said) = said.filter(|said| *said != digest) {
        return Err(format!("layer {digest} says that its blob is {}", super::error::words(said)));
    }
    let size = layer.size();
    if let Some(said) = annotation(layer, "blob-size").filter(|said| said.parse() != Ok(size)) {
        return Err(format!(
            "layer {digest} of {size} bytes says that its blob has {}",
            super::error::words(said)
        ));
    }
    let fs_type = annotation(layer, "blob-fs-type").unwrap_or("ext4").to_owned();
    Ok(Some(NativeLayer { digest, size, media_type, fs_type }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TAR: &str = "application/vnd.oci.image.layer.v1.tar";

    /// A media type, and annotations without their prefix.
    type Described<'a> = (&'a str, &'a [(&'a str, &'a str)]);

    fn manifest(artifact: Option<&str>, layers: &[Described<'_>]) -> ImageManifest {
        let layer = |(n, (media_type, annotations)): (usize, &Described<'_>)| {
            let annotations: serde_json::Map<_, _> = annotations
                .iter()
                .map(|(name, value)| (format!("{PREFIX}{name}"), (*value).into()))
                .collect();
            serde_json::json!({
                "mediaType": media_type, "digest": format!("sha256:{n:064x}"), "size": 4096, "annotations": annotations,
            })
        };
        let mut json = serde_json::json!({
            "schemaVersion": 2,
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": format!("sha256:{:064x}", 99), "size": 2,
            },
            "layers": layers.iter().enumerate().map(layer).collect::<Vec<_>>(),
        });
        if let Some(artifact) = artifact {
            json["artifactType"] = artifact.into();
        }
        ImageManifest::from_reader(json.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn layers_are_told_by_annotations_and_media_types() {
        let digest = |n: usize| format!("sha256:{n:064x}");
        let (first, second) = (digest(0), digest(1));
        let annotated = manifest(
            None,
            &[
                (TAR, &[("blob-digest", &first), ("blob-size", "4096"), ("version", "0.1.0")]),
                (TAR, &[("blob-digest", &second), ("blob-fs-type", "erofs")]),
            ],
        );
        let Ok(Format::Native(layers)) = classify(&annotated) else { panic!("{:?}", classify(&annotated)) };
        let read: Vec<_> = layers.iter().map(|l| (l.digest.as_str(), l.size, l.fs_type.as_str())).collect();
        assert_eq!(read, [(first.as_str(), 4096, "ext4"), (second.as_str(), 4096, "erofs")]);
        let typed = manifest(None, &[("application/vnd.containerd.overlaybd.image.layer.v1.zfile", &[])]);
        assert!(matches!(classify(&typed), Ok(Format::Native(_))));
        assert_eq!(classify(&manifest(None, &[(TAR, &[]), (TAR, &[])])), Ok(Format::Standard));
        assert_eq!(classify(&manifest(None, &[])), Ok(Format::Standard));
        assert_eq!(classify(&manifest(Some(TURBO_ARTIFACT), &[(TAR, &[])])), Ok(Format::Turbo));
        let turbo = [("blob-digest", first.as_str()), ("version", "0.1.0-turbo.ociv1")];
        assert_eq!(classify(&manifest(None, &[(TAR, &turbo)])), Ok(Format::Turbo));
        assert_eq!(
            classify(&manifest(None, &[(TAR, &[("turbo-oci/target-digest", &first)])])),
            Ok(Format::Turbo)
        );
    }

    #[test]
    fn contradictions_are_refused() {
        let first = format!("sha256:{:064x}", 0);
        let other = format!("sha256:{:064x}", 7);
        let fail = |layers: &[Described<'_>]| classify(&manifest(None, layers)).unwrap_err();
        assert!(fail(&[(TAR, &[("blob-digest", &other)])]).contains("says that its blob is"));
        assert!(fail(&[(TAR, &[("blob-digest", &first), ("blob-size", "1")])]).contains("4096"));
        assert!(fail(&[(TAR, &[("blob-digest", &first)]), (TAR, &[])]).contains("1 of its 2"));
        let many: Vec<Described<'_>> = vec![("application/vnd.x.overlaybd", &[]); 256];
        assert!(fail(&many).contains("255"));
    }
}
