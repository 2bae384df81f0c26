//! Layers of this machine's files, and of everywhere else through the cache.

use std::io;
use std::sync::Arc;

use super::{LocalFiles, Source, Sources};
use crate::cache::Cache;
use crate::remote::{LazySource, Opener};
use crate::spec::LayerSpec;

/// Files are opened, remote layers read through the cache. Nothing remote is asked before a block is missing, so what
/// is cached starts while its registry is down.
pub struct CachedSources {
    cache: Cache,
    opener: Arc<dyn Opener>,
}

impl CachedSources {
    /// Remote layers are opened by `opener`.
    pub fn new(cache: Cache, opener: Arc<dyn Opener>) -> Self {
        Self { cache, opener }
    }

    /// The cache behind it.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }
}

impl Sources for CachedSources {
    fn open(&self, spec: &LayerSpec) -> io::Result<Source> {
        let Some(remote) = &spec.remote else { return LocalFiles.open(spec) };
        let source = LazySource::new(remote.clone(), self.opener.clone());
        let layer = self.cache.layer(Arc::new(source))?;
        Ok(Source { bytes: Arc::new(layer), local: None })
    }
}
