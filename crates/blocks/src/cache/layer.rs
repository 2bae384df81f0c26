//! A remote layer as bytes that threads can read.

use std::io;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use aenv_overlaybd::ReadAt;
use parking_lot::Mutex;

use super::entry::{BLOCK, block_count};
use super::fetch::{Origin, want};
use super::read_ahead::ReadAhead;
use super::slab::Look;
use super::trace::Recorder;
use super::{Inner, verify};
use crate::remote::{Digest, FetchError, RangeSource};

/// Times a block may be evicted between its arrival and its reader's copy.
const ROUNDS: usize = 4;

/// What the handles of one layer share.
pub(crate) struct Shared {
    pub(crate) cache: Arc<Inner>,
    pub(crate) row: u32,
    pub(crate) digest: Digest,
    pub(crate) size: u64,
    pub(crate) blocks: u32,
    /// Set when the whole turned out to be something else.
    pub(crate) damaged: OnceLock<FetchError>,
    pub(crate) verifying: AtomicBool,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.cache.slab.release(self.row);
    }
}

/// A remote layer seen through the cache. Reads block: make them on threads that may, never on an async worker.
pub struct CachedLayer {
    origin: Origin,
    ahead: Mutex<ReadAhead>,
    recorder: Option<(Arc<Recorder>, u8)>,
}

impl CachedLayer {
    pub(crate) fn new(cache: &Arc<Inner>, source: Arc<dyn RangeSource>) -> Result<Self, FetchError> {
        let (digest, size) = (source.id(), source.size());
        let blocks = block_count(size)
            .ok_or_else(|| FetchError::Invalid(format!("{digest} is too large: {size} bytes")))?;
        let layer = {
            let mut open = cache.open.lock();
            open.retain(|_, layer| layer.strong_count() > 0);
            let known = open.get(&digest).and_then(std::sync::Weak::upgrade);
            match known {
                Some(layer) if layer.size == size => layer,
                Some(layer) => return Err(other_size(digest, layer.size, size)),
                None => {
                    let row =
                        cache.slab.acquire(digest, size).map_err(|known| other_size(digest, known, size))?;
                    let layer = Arc::new(Shared {
                        cache: cache.clone(),
                        row,
                        digest,
                        size,
                        blocks,
                        damaged: OnceLock::new(),
                        verifying: AtomicBool::new(false),
                    });
                    open.insert(digest, Arc::downgrade(&layer));
                    layer
                }
            }
        };
        verify::when_whole(cache, &layer);
        let place = cache.places.place(source.place());
        Ok(Self { origin: Origin { layer, source, place }, ahead: Mutex::default(), recorder: None })
    }

    /// Tells `recorder` what is read, as of layer `place` of its stack.
    pub(crate) fn record(&mut self, recorder: Arc<Recorder>, place: u8) {
        self.recorder = Some((recorder, place));
    }

    pub(crate) fn origin(&self) -> Origin {
        self.origin.clone()
    }

    pub(crate) fn blocks(&self) -> u32 {
        self.origin.layer.blocks
    }

    /// Of the whole layer.
    pub fn digest(&self) -> Digest {
        self.origin.layer.digest
    }

    /// Whether all of it is cached and its sha256 was found right.
    pub fn is_verified(&self) -> bool {
        let layer = &self.origin.layer;
        layer
            .cache
            .slab
            .with_rows(|rows| rows.get(&layer.row).is_some_and(|row| row.verified == layer.blocks))
    }

    /// Has these blocks fetched in the background, as far as they aren't cached.
    pub fn prefetch(&self, blocks: &[u32]) {
        want(&self.origin.layer.cache, &self.origin, blocks, true);
    }

    fn read(&self, buf: &mut [u8], offset: u64) -> Result<(), FetchError> {
        let layer = &self.origin.layer;
        let cache = &layer.cache;
        if let Some(error) = layer.damaged.get() {
            return Err(error.clone());
        }
        let block_of = |at: u64| u32::try_from(at / BLOCK as u64).expect("inside the layer");
        let (first, last) = (block_of(offset), block_of(offset + buf.len() as u64 - 1));
        // Under contention the guess is skipped, not waited for.
        let step = self.ahead.try_lock().map(|mut ahead| ahead.step(first, last, layer.blocks));
        let visit = step.as_ref().is_none_or(|step| step.visit);
        if let Some((recorder, place)) = self.recorder.as_ref().filter(|_| visit) {
            recorder.note(*place, first..=last);
        }
        let mut missing: Vec<(u32, usize, &mut [u8])> = Vec::new();
        let (mut rest, mut from) = (buf, usize::try_from(offset % BLOCK as u64).expect("below a block"));
        for block in first..=last {
            let (piece, after) = rest.split_at_mut(rest.len().min(BLOCK - from));
            match cache.slab.read(layer.row, block, from, piece, visit) {
                Look::Hit => _ = cache.counters.hits.fetch_add(1, Ordering::Relaxed),
                look => {
                    let damaged = u64::from(matches!(look, Look::Damaged));
                    cache.counters.damaged.fetch_add(damaged, Ordering::Relaxed);
                    cache.counters.misses.fetch_add(1, Ordering::Relaxed);
                    missing.push((block, from, piece));
                }
            }
            (rest, from) = (after, 0);
        }
        for round in 0.. {
            let blocks: Vec<_> = missing.iter().map(|(block, ..)| *block).collect();
            let flights = if blocks.is_empty() { vec![] } else { want(cache, &self.origin, &blocks, false) };
            if round == 0
                && let Some(step) = step.as_ref().filter(|step| !step.ahead.is_empty())
            {
                self.prefetch(&step.ahead.clone().collect::<Vec<_>>());
            }
            for (block, flight) in flights {
                let bytes = match flight.wait() {
                    Ok(bytes) => bytes,
                    // It may have been a fetch in the background, for which there was no room.
                    Err(FetchError::Busy(_)) if round < ROUNDS => continue,
                    Err(error) => return Err(error),
                };
                if let Some(at) = missing.iter().position(|(missing, ..)| *missing == block) {
                    let (_, from, piece) = missing.swap_remove(at);
                    piece.copy_from_slice(&bytes[from..from + piece.len()]);
                }
            }
            // Those that were stored between the look and the wish.
            missing.retain_mut(|(block, from, piece)| {
                !matches!(cache.slab.read(layer.row, *block, *from, piece, false), Look::Hit)
            });
            missing.sort_by_key(|(block, ..)| *block);
            if missing.is_empty() {
                return Ok(());
            }
            if round > ROUNDS {
                break;
            }
        }
        Err(FetchError::Retryable(format!(
            "blocks of {} are evicted before they are read; the cache is too small",
            layer.digest
        )))
    }
}

impl ReadAt for CachedLayer {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let size = self.origin.layer.size;
        if offset.checked_add(buf.len() as u64).is_none_or(|end| end > size) {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("{} bytes at {offset} reach past the end of a layer of {size} bytes", buf.len()),
            ));
        }
        if buf.is_empty() {
            return Ok(());
        }
        Ok(self.read(buf, offset)?)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.origin.layer.size)
    }
}

fn other_size(digest: Digest, known: u64, size: u64) -> FetchError {
    FetchError::Invalid(format!(
        "{digest} has {known} bytes here and {size} there; one is wrong: prune it from the cache if it is ours"
    ))
}
