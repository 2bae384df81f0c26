//! How a caller describes a stack.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A device as layers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StackSpec {
    /// Bytes of the device, a multiple of 512. What no layer maps reads as zeroes.
    pub virtual_size: u64,
    /// Bottom first, at most 255 (254 below a writable upper).
    pub layers: Vec<LayerSpec>,
}

/// One layer of a stack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerSpec {
    /// How its bytes are to be read.
    pub kind: LayerKind,
    /// The file, as an absolute path.
    pub path: PathBuf,
}

impl LayerSpec {
    /// A flat file that stands for itself.
    pub fn raw(path: impl Into<PathBuf>) -> Self {
        Self { kind: LayerKind::Raw, path: path.into() }
    }

    /// A sealed LSMT layer.
    pub fn lsmt(path: impl Into<PathBuf>) -> Self {
        Self { kind: LayerKind::Lsmt, path: path.into() }
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
