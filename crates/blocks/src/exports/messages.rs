//! What callers say and hear.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::device::TrafficStat;
use crate::spec::{Mode, StackSpec};

/// Asks for an export.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpenRequest {
    /// The export's name: 1 to 128 of `a-z A-Z 0-9 . _ -`, not starting with a dot.
    pub name: String,
    /// What it shows.
    pub stack: StackSpec,
    /// Whether it can be written.
    pub mode: Mode,
    /// Who wants it; closing needs the same word. One export lives until its last holder closed it.
    pub holder: String,
}

/// An export that can be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opened {
    /// What to give to a VMM.
    pub path: PathBuf,
    /// Bytes of the device.
    pub size: u64,
}

/// The layer that a seal made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealedLayer {
    /// The file, now the top layer of the export's stack.
    pub path: PathBuf,
    /// Its id.
    pub uuid: uuid::Uuid,
    /// Bytes of the file.
    pub bytes: u64,
    /// 512-byte blocks of the device that it stores.
    pub blocks: u64,
}

/// An export as [`Exports::list`](super::Exports::list) and [`Exports::stat`](super::Exports::stat) show it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportInfo {
    /// Its name.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
    /// What it shows now: layers sealed since it was opened are on top.
    pub stack: StackSpec,
    /// Whether it can be written.
    pub mode: Mode,
    /// Who holds it.
    pub holders: Vec<String>,
    /// Handles that are open on it.
    pub handles: u32,
    /// Bytes of the upper's data file; 0 without an upper.
    pub upper_bytes: u64,
    /// What went through it.
    pub traffic: TrafficStat,
}
