//! Layers of this machine's files, and of everywhere else through the cache.

use std::io;
use std::sync::Arc;

use super::{LocalFiles, Source, Sources};
use crate::cache::Cache;
use crate::remote::{LazySource, Opener, RangeSource, Remote};
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
        let layer = self.cache.layer(self.lazy(remote))?;
        Ok(Source { bytes: Arc::new(layer), local: None })
    }

    fn open_stack(&self, specs: &[LayerSpec]) -> Result<Vec<Source>, (usize, io::Error)> {
        let remote = |(n, spec): (usize, &LayerSpec)| Some((n, self.lazy(spec.remote.as_ref()?)));
        let (places, sources): (Vec<_>, Vec<_>) = specs.iter().enumerate().filter_map(remote).unzip();
        let layers = self.cache.stack(sources).map_err(|(n, error)| (places[n], error.into()))?;
        let mut layers = layers.into_iter();
        let open = |(n, spec): (usize, &LayerSpec)| match spec.remote {
            None => LocalFiles.open(spec).map_err(|error| (n, error)),
            Some(_) => {
                let layer = layers.next().expect("one for each remote layer");
                Ok(Source { bytes: Arc::new(layer), local: None })
            }
        };
        specs.iter().enumerate().map(open).collect()
    }
}

impl CachedSources {
    fn lazy(&self, remote: &Remote) -> Arc<dyn RangeSource> {
        Arc::new(LazySource::new(remote.clone(), self.opener.clone()))
    }
}
