//! The seams to the world outside: each a trait with one real implementation and a fake that injects faults.

mod agent;
mod files;
mod guests;
mod images;
mod layers;
mod oci;
mod processes;
mod storage;
mod storaged;

pub use agent::HttpGuests;

/// envd version the guests advertise.
pub const ENVD_VERSION: &str = "0.6.13";
pub use files::LayerFiles;
pub use guests::{Guests, Init};
pub use images::{Image, ImageRequest, Images};
pub use layers::{Captured, Layers};
pub use oci::OciImages;
pub use processes::{ProcProcesses, Processes};
pub use storage::{Export, Layer, LayerKind, Mode, Stack, Storage};
pub use storaged::Storaged;

/// Why a call through a seam failed, in words that say what to do next.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub struct Fault(pub String);

impl Fault {
    /// A fault with this text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

/// Shorthand for results of seams.
pub type Result<T, E = Fault> = std::result::Result<T, E>;
