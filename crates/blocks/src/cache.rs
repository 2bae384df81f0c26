//! The node's cache of remote layers: blocks of 128 KiB in one directory, one fetch per block for any number of readers.
//!
//! ```text
//!   CachedLayer (ReadAt) ──hit──► Slab ── pread, checksum ──► reader
//!        │ miss                     ▲ put (blocking pool)
//!        ▼                          │
//!     Flights: one per block ──► fetch task: places → attempts with back-off → RangeSource
//! ```
//! **A block**: absent → in flight (bytes in memory, readers wait for it) → cached → evicted. A failed flight leaves
//! nothing behind but its error, which all its readers get. The fetch is a task of its own: readers that give up don't
//! cancel it. 128 KiB is what 1 Gbit/s moves in a millisecond: below that the round trip dominates, above it a 4 KiB
//! read of a cold image fetches mostly what nobody asked for. Neighbours that are missing together are fetched by one
//! request of up to 1 MiB.
//!
//! **On disk** (see [`entry`]): `blocks.data` holds slots, `blocks.index` says what is in each, with a checksum per
//! 4 KiB. A slot that changes hands is struck from the index first, then filled, then entered. So kill -9 at any point
//! leaves old block, no block or new block; after a power loss, where writes may be reordered, checksums tell. Every
//! read checks what it serves; a damaged block is fetched again. Nothing is synced: what is lost is fetched again.
//!
//! **Full disk**: the block is served without being cached, the cache gives a sixteenth of its blocks back and grows
//! again after half a minute. **Bound**: all files together never exceed the capacity. **Owner**: `lock` is held.
//!
//! **Digest**: when all blocks of a layer are here, its sha256 is checked in the background. If it is another, the
//! layer's blocks are dropped and its open handles fail from then on: what they served before can't be trusted.

mod entry;
mod fetch;
mod layer;
mod places;
mod policy;
mod prune;
mod read_ahead;
mod retry;
mod slab;
mod trace;
mod verify;

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use crate::remote::{Digest, FetchError, RangeSource};

pub use self::entry::BLOCK;
pub use self::layer::CachedLayer;
pub use self::prune::{LayerUsage, Prune, Pruned};

use self::fetch::Flight;
use self::layer::Shared;
use self::places::Places;
use self::slab::Slab;

/// How to run a cache.
#[derive(Debug, Clone)]
pub struct Options {
    /// Its directory; made with mode 0700 when missing.
    pub dir: PathBuf,
    /// Bytes of disk, all files together. At least 2 MiB.
    pub capacity: u64,
    /// Fetches under way at a time. Half of them are kept for readers who wait.
    pub fetches: usize,
    /// Of those, from one place.
    pub fetches_per_place: usize,
    /// Fetches that wait for their turn; more are refused.
    pub queue: usize,
    /// Times a source is asked for the same bytes.
    pub attempts: u32,
    /// For one answer of a source.
    pub attempt_timeout: Duration,
    /// For a fetch, waiting and attempts and all.
    pub deadline: Duration,
    /// How long the reads of a stack that was opened are recorded, to be fetched ahead at its next start.
    pub trace_window: Duration,
}

impl Options {
    /// 32 fetches, 16 from one place, 1024 waiting; 4 attempts of 20 s within 60 s; traces of 10 s.
    pub fn new(dir: impl Into<PathBuf>, capacity: u64) -> Self {
        Self {
            dir: dir.into(),
            capacity,
            fetches: 32,
            fetches_per_place: 16,
            queue: 1024,
            attempts: 4,
            attempt_timeout: Duration::from_secs(20),
            deadline: Duration::from_secs(60),
            trace_window: Duration::from_secs(10),
        }
    }
}

/// Why a cache can't be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another process has it.
    #[error("another process uses the cache in {0}; stop it or choose another directory")]
    InUse(PathBuf),
    /// Too small to be one.
    #[error("a cache of {0} bytes is too small; allow at least 2 MiB")]
    TooSmall(u64),
    /// A file can't be used.
    #[error("{what} {path}: {source}")]
    Io {
        /// What was being done.
        what: &'static str,
        /// To what.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// Counters since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Stat {
    /// Bytes that may be used.
    pub capacity: u64,
    /// Bytes of cached blocks.
    pub bytes: u64,
    /// Blocks read from the cache.
    pub hits: u64,
    /// Blocks that a reader had to wait for.
    pub misses: u64,
    /// Bytes that sources delivered.
    pub fetched_bytes: u64,
    /// Fetches that failed for good.
    pub failed: u64,
    /// Cached blocks that were not what they had been.
    pub damaged: u64,
    /// Blocks served without being cached, for want of disk space or because of an I/O error.
    pub not_stored: u64,
}

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) hits: AtomicU64,
    pub(crate) misses: AtomicU64,
    pub(crate) fetched_bytes: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) damaged: AtomicU64,
    pub(crate) not_stored: AtomicU64,
}

/// The cache in one directory. Cheap to clone; the directory is given up with the last clone, layer and fetch.
#[derive(Clone)]
pub struct Cache {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) options: Options,
    pub(crate) runtime: Handle,
    pub(crate) slab: Slab,
    pub(crate) counters: Counters,
    pub(crate) places: Places,
    /// Taken before the slab's own lock.
    pub(crate) flights: Mutex<HashMap<(u32, u32), Arc<Flight>>>,
    pub(crate) open: Mutex<HashMap<Digest, Weak<Shared>>>,
    /// Hashing a layer takes a core: one at a time.
    pub(crate) hashing: Semaphore,
    /// A replay keeps a thread waiting: a few at a time.
    pub(crate) replays: Semaphore,
    /// Held while the traces' directory is changed.
    pub(crate) traces: Mutex<()>,
}

impl Cache {
    /// Takes the directory and finds again what is cached in it. Blocks. Fetches run on `runtime`.
    ///
    /// # Errors
    /// When another process has it, or it can't be used. A cache of another version or damaged is emptied.
    pub fn open(options: Options, runtime: Handle) -> Result<Self, Error> {
        let slab = Slab::open(&options.dir, options.capacity, trace::budget(options.capacity))?;
        let places = Places::new(&options);
        Ok(Self {
            inner: Arc::new(Inner {
                options,
                runtime,
                slab,
                counters: Counters::default(),
                places,
                flights: Mutex::default(),
                open: Mutex::default(),
                hashing: Semaphore::new(1),
                replays: Semaphore::new(4),
                traces: Mutex::default(),
            }),
        })
    }

    /// `source` seen through the cache. Nothing is fetched yet.
    ///
    /// # Errors
    /// When the same digest is cached with another size, or the layer is larger than 512 TiB.
    pub fn layer(&self, source: Arc<dyn RangeSource>) -> Result<CachedLayer, FetchError> {
        CachedLayer::new(&self.inner, source)
    }

    /// The layers of a stack, bottom first, as [`layer`](Self::layer) opens them. What the last start of the same
    /// stack read is fetched ahead, and what this one reads is recorded. Blocks on the disk.
    ///
    /// # Errors
    /// As [`layer`](Self::layer)'s, with the layer's place in `sources`.
    pub fn stack(&self, sources: Vec<Arc<dyn RangeSource>>) -> Result<Vec<CachedLayer>, (usize, FetchError)> {
        let opened = sources.into_iter().enumerate();
        let opened = opened.map(|(n, source)| self.layer(source).map_err(|error| (n, error)));
        let mut layers = opened.collect::<Result<Vec<_>, _>>()?;
        // A stack has at most 255 layers: a place is one byte.
        if layers.is_empty() || layers.len() > 255 {
            return Ok(layers);
        }
        let digests: Vec<_> = layers.iter().map(CachedLayer::digest).collect();
        let counts: Vec<_> = layers.iter().map(CachedLayer::blocks).collect();
        let path = trace::path(&self.inner.options.dir, &digests);
        let records = trace::load(&path, &counts);
        let recorder = Arc::new(trace::Recorder::default());
        for (n, layer) in (0u8..).zip(&mut layers) {
            layer.record(recorder.clone(), n);
        }
        trace::replay(&self.inner, layers.iter().map(CachedLayer::origin).collect(), records);
        trace::save_later(&self.inner, recorder, path);
        Ok(layers)
    }

    /// The counters now.
    pub fn stat(&self) -> Stat {
        let inner = &self.inner;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &inner.counters;
        Stat {
            capacity: inner.options.capacity,
            bytes: inner.slab.bytes(),
            hits: get(&counters.hits),
            misses: get(&counters.misses),
            fetched_bytes: get(&counters.fetched_bytes),
            failed: get(&counters.failed),
            damaged: get(&counters.damaged),
            not_stored: get(&counters.not_stored),
        }
    }
}
