//! Making a device a path that a VMM can open.

pub mod fuse;
pub mod ublk;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::device::Device;

/// Gives devices paths. FUSE everywhere; ublk where the kernel has it comes next.
pub trait Exporter: Send + Sync {
    /// Makes `device` openable under `name`, which must be free.
    fn publish(&self, name: &str, device: Arc<dyn Device>) -> Result<PathBuf, ExportError>;

    /// Refuses new opens of `name` and waits until every open handle is gone, at most `patience`. On
    /// [`ExportError::Busy`] it can be opened again, as if nothing had been asked.
    fn drain(&self, name: &str, patience: Duration) -> Result<(), ExportError>;

    /// Takes the name away. Handles that are still open keep working until they are closed. Unknown names are fine.
    fn withdraw(&self, name: &str);

    /// Open handles of `name`.
    fn handles(&self, name: &str) -> u32;

    /// Open handles of all names, withdrawn ones too.
    fn all_handles(&self) -> u32;
}

/// Why an export could not be made or ended.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The name is taken.
    #[error("an export named {0} exists already")]
    Exists(String),
    /// The name is unknown.
    #[error("there is no export named {0}")]
    Unknown(String),
    /// Someone still has it open.
    #[error("export {name} is still open ({handles} handles); end the VM that uses it first")]
    Busy {
        /// The export.
        name: String,
        /// Open handles.
        handles: u32,
    },
    /// The system refused.
    #[error("export {name} could not be made: {source}")]
    Failed {
        /// The export.
        name: String,
        /// The cause.
        source: std::io::Error,
    },
}
