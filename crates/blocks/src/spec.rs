//! How a caller describes a stack.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::remote::{ObjectBlob, RegistryBlob, Remote, SharedFile};

/// A device as layers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StackSpec {
    /// Bytes of the device, a multiple of 512. What no layer maps reads as zeroes.
    pub virtual_size: u64,
    /// Bottom first, at most 255 (254 below a writable upper).
    pub layers: Vec<LayerSpec>,
}

/// One layer of a stack: a file of this machine, or a blob elsewhere that is read through the cache.
///
/// In JSON `{"kind": …}` with exactly one of `"path"`, `"registry"`, `"object"` and `"shared"`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Wire", into = "Wire")]
pub struct LayerSpec {
    /// How its bytes are to be read.
    pub kind: LayerKind,
    /// The file, as an absolute path; empty where the layer lies elsewhere.
    pub path: PathBuf,
    /// Where else it lies.
    pub remote: Option<Remote>,
}

impl LayerSpec {
    /// A flat file that stands for itself.
    pub fn raw(path: impl Into<PathBuf>) -> Self {
        Self { kind: LayerKind::Raw, path: path.into(), remote: None }
    }

    /// A sealed LSMT layer.
    pub fn lsmt(path: impl Into<PathBuf>) -> Self {
        Self { kind: LayerKind::Lsmt, path: path.into(), remote: None }
    }

    /// A layer that lies elsewhere.
    pub fn remote(kind: LayerKind, remote: Remote) -> Self {
        Self { kind, path: PathBuf::new(), remote: Some(remote) }
    }

    /// For messages: the path, or place and digest.
    pub fn name(&self) -> String {
        match &self.remote {
            None => self.path.display().to_string(),
            Some(remote) => format!("{} of {}", remote.digest(), remote.place()),
        }
    }
}

/// [`LayerSpec`] as JSON.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wire {
    kind: LayerKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    path: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    registry: Option<RegistryBlob>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    object: Option<ObjectBlob>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    shared: Option<SharedFile>,
}

impl TryFrom<Wire> for LayerSpec {
    type Error = &'static str;

    fn try_from(wire: Wire) -> Result<Self, Self::Error> {
        let kind = wire.kind;
        match (wire.path, wire.registry, wire.object, wire.shared) {
            (Some(path), None, None, None) => Ok(Self { kind, path, remote: None }),
            (None, Some(blob), None, None) => Ok(Self::remote(kind, Remote::Registry(blob))),
            (None, None, Some(blob), None) => Ok(Self::remote(kind, Remote::Object(blob))),
            (None, None, None, Some(file)) => Ok(Self::remote(kind, Remote::Shared(file))),
            _ => Err("a layer has exactly one of path, registry, object and shared"),
        }
    }
}

impl From<LayerSpec> for Wire {
    fn from(spec: LayerSpec) -> Self {
        let mut wire = Self { kind: spec.kind, path: None, registry: None, object: None, shared: None };
        match spec.remote {
            None => wire.path = Some(spec.path),
            Some(Remote::Registry(blob)) => wire.registry = Some(blob),
            Some(Remote::Object(blob)) => wire.object = Some(blob),
            Some(Remote::Shared(file)) => wire.shared = Some(file),
        }
        wire
    }
}

/// How a layer's bytes are to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerKind {
    /// A flat file: byte n of the file is byte n of the device.
    Raw,
    /// A sealed overlaybd LSMT file.
    Lsmt,
}

/// Whether a stack can be written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Mode {
    /// Shared by any number of holders.
    ReadOnly,
    /// With an upper whose files live in `dir`, which belongs to this export alone.
    Writable {
        /// Absolute path; made when missing, an upper found there is gone on with.
        dir: PathBuf,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<LayerSpec, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    #[test]
    fn plain_paths_are_read_and_written_as_ever() {
        let text = r#"{"kind":"lsmt","path":"/x/layer"}"#;
        assert_eq!(read(text).unwrap(), LayerSpec::lsmt("/x/layer"));
        assert_eq!(serde_json::to_string(&LayerSpec::lsmt("/x/layer")).unwrap(), text);
    }

    #[test]
    fn a_layer_elsewhere_keeps_all_it_says() {
        let digest = crate::remote::Digest::of(b"layer");
        let file = "/share/l".into();
        let blob = RegistryBlob {
            host: "localhost:5000".into(),
            repository: "a/b".into(),
            digest,
            size: 7,
            media_type: "application/vnd.oci.image.layer.v1.tar".into(),
        };
        for remote in [
            Remote::Registry(blob),
            Remote::Object(ObjectBlob { url: "s3://bucket/key".into(), digest, size: 7 }),
            Remote::Shared(SharedFile { file, digest, size: 7 }),
        ] {
            let spec = LayerSpec::remote(LayerKind::Lsmt, remote);
            assert_eq!(read(&serde_json::to_string(&spec).unwrap()).unwrap(), spec);
        }
    }

    #[test]
    fn a_layer_that_is_nowhere_in_two_places_or_misspelt_is_refused() {
        let object = r#"{"url":"s3://b/k","digest":"sha256:00","size":1}"#;
        for (text, word) in [
            (r#"{"kind":"raw"}"#.to_owned(), "exactly one"),
            (format!(r#"{{"kind":"raw","path":"/x","object":{object}}}"#), "no digest"),
            (r#"{"kind":"raw","path":"/x","remote":1}"#.to_owned(), "unknown field"),
        ] {
            let error = read(&text).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }
}
