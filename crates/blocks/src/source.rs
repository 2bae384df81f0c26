//! Where the bytes of layers come from.

mod cached;

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use aenv_overlaybd::{Layer, ReadAt};

use crate::spec::{LayerKind, LayerSpec};

pub use self::cached::CachedSources;

/// Turns a layer's description into bytes that can be read.
pub trait Sources: Send + Sync {
    /// Opens a layer's bytes. May block.
    fn open(&self, spec: &LayerSpec) -> io::Result<Source>;

    /// Opens all layers of a stack, bottom first; a failure comes with its layer's place. May block.
    fn open_stack(&self, specs: &[LayerSpec]) -> Result<Vec<Source>, (usize, io::Error)> {
        let opened = specs.iter().enumerate();
        opened.map(|(n, spec)| self.open(spec).map_err(|error| (n, error))).collect()
    }
}

/// The bytes of one layer.
pub struct Source {
    /// How to read them.
    pub bytes: Arc<dyn ReadAt>,
    /// The local file that holds exactly these bytes, when there is one: the kernel can then read it by itself.
    pub local: Option<Arc<File>>,
}

/// Layers in files on this machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct LocalFiles;

impl Sources for LocalFiles {
    fn open(&self, spec: &LayerSpec) -> io::Result<Source> {
        if spec.remote.is_some() {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "it lies elsewhere and this storaged has no cache; configure one",
            ));
        }
        if !spec.path.is_absolute() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a layer's path must be absolute"));
        }
        let file = File::open(&spec.path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a layer must be a regular file"));
        }
        let file = Arc::new(file);
        Ok(Source { bytes: file.clone(), local: Some(file) })
    }
}

/// Why a layer could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    /// Its bytes are not to be had.
    #[error("layer {path}: {source}")]
    Bytes {
        /// The layer: its path, or where else it lies.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Its bytes are not a layer.
    #[error("layer {path}: {source}")]
    Format {
        /// The layer: its path, or where else it lies.
        path: PathBuf,
        /// The cause.
        source: aenv_overlaybd::Error,
    },
}

/// The layers of a stack, bottom first, and the file behind each where it is local.
pub struct OpenedLayers {
    /// As the format sees them.
    pub layers: Vec<Layer>,
    /// As the kernel could.
    pub local: Vec<Option<Arc<File>>>,
}

/// Opens all layers of a stack.
pub fn open_layers(sources: &dyn Sources, specs: &[LayerSpec]) -> Result<OpenedLayers, LayerError> {
    let mut opened = OpenedLayers { layers: Vec::new(), local: Vec::new() };
    let found = sources
        .open_stack(specs)
        .map_err(|(n, source)| LayerError::Bytes { path: specs[n].name().into(), source })?;
    for (spec, source) in specs.iter().zip(found) {
        let layer = match spec.kind {
            LayerKind::Raw => Layer::raw(source.bytes),
            LayerKind::Lsmt => Layer::open(source.bytes),
        };
        opened.layers.push(layer.map_err(|source| LayerError::Format { path: spec.name().into(), source })?);
        opened.local.push(source.local);
    }
    Ok(opened)
}
