//! What is cached, and making room.

use serde::{Deserialize, Serialize};

use super::Cache;
use super::entry::block_count;
use crate::remote::Digest;

/// A layer in the cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerUsage {
    /// Which.
    pub digest: Digest,
    /// Of the whole layer, in bytes.
    pub size: u64,
    /// Of its cached blocks.
    pub cached: u64,
    /// Whether it is whole and its sha256 was found right.
    pub verified: bool,
    /// Whether some export reads it.
    pub open: bool,
}

/// What is to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Prune {
    /// Everything.
    All,
    /// What is worth least, until this many bytes are left.
    To(u64),
    /// One layer.
    Layer(Digest),
}

/// What went.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pruned {
    /// Blocks.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Cache {
    /// Layers of which something is cached or that are open, by digest.
    pub fn list(&self) -> Vec<LayerUsage> {
        let mut layers = self.inner.slab.with_rows(|rows| {
            let usage = rows.values().map(|row| LayerUsage {
                digest: row.digest,
                size: row.size,
                cached: row.bytes,
                verified: Some(row.verified) == block_count(row.size),
                open: row.handles > 0,
            });
            usage.collect::<Vec<_>>()
        });
        layers.sort_by_key(|layer| layer.digest);
        layers
    }

    /// Drops cached blocks and gives their space back. Open layers go on and fetch what they need again. Blocks.
    pub fn prune(&self, what: Prune) -> Pruned {
        let slab = &self.inner.slab;
        let (blocks, bytes) = match what {
            Prune::All => slab.forget(|_, _| true),
            Prune::To(target) => slab.shrink_to(target),
            Prune::Layer(digest) => {
                slab.forget(|rows, chosen| rows.get(&chosen.row).is_some_and(|row| row.digest == digest))
            }
        };
        Pruned { blocks, bytes }
    }
}
