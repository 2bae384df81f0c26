//! A stack that can be written and sealed.
//!
//! Locks, in the order they are taken:
//! 1. `traffic`: shared by every write, exclusive for a seal and for a write that isn't whole sectors (which reads
//!    the sectors at its edges first). Reads take no part in it.
//! 2. the upper's log, held while an entry is appended and becomes visible, so that log and memory agree in order.
//! 3. `state` and the upper's index: held only to look up or insert, never over I/O.
//!
//! A read copies the mappings it needs and reads after letting go: data once mapped is never moved, so a read that
//! races a write sees the old bytes or the new ones.

use std::io;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use uuid::Uuid;

use crate::Error;
use crate::builder::{chunked, runs};
use crate::index::{Index, MAX_INDEX_ENTRIES};
use crate::io::WriteAt;
use crate::layer::{Layer, LayerInfo};
use crate::mapping::{Mapping, SECTOR};
use crate::stack::{Filler, MAX_LAYERS, Stack, sector_range};
use crate::upper::Upper;

/// The tag of mappings that lie in the upper.
const UPPER: u8 = u8::MAX;
/// Log entries written at once when a huge range is zeroed.
const ZERO_BATCH: usize = 4096;

/// Layers with a writable upper on top.
pub struct WritableStack {
    state: RwLock<State>,
    traffic: RwLock<()>,
    /// Layers sealed without a sync: the next flush owes it to them.
    unsynced: Mutex<Unsynced>,
    virtual_size: u64,
}

#[derive(Default)]
struct Unsynced {
    layers: Vec<Arc<dyn WriteAt>>,
    /// A sync failed. The kernel reports that once and may have dropped the pages: no later flush can be believed.
    failed: bool,
}

#[derive(Clone)]
struct State {
    lower: Arc<Stack>,
    upper: Arc<Upper>,
}

/// A layer that was the upper until now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sealed {
    /// Its ids and size.
    pub info: LayerInfo,
    /// Bytes of its file.
    pub file_bytes: u64,
    /// Sectors of the device that it stores.
    pub stored_sectors: u64,
    /// Entries of its index.
    pub entries: u64,
}

impl WritableStack {
    /// Puts `upper` on `lower`. Refuses an upper that was written on another layer than the stack's top one: the
    /// guest would see a mixture of two disks. The device has the size of `lower`, which may have grown.
    pub fn new(lower: Stack, upper: Upper) -> Result<Self, Error> {
        if lower.layers().len() >= MAX_LAYERS {
            return Err(Error::TooManyLayers { got: lower.layers().len() + 1, max: MAX_LAYERS });
        }
        let below = lower.layers().last().map_or(Uuid::nil(), |top| top.uuid);
        if upper.info.parent != below {
            return Err(Error::OutOfOrder(format!(
                "the upper was written on layer {}, but the stack's top layer is {below}",
                upper.info.parent
            )));
        }
        let virtual_size = lower.virtual_size();
        let state = State { lower: Arc::new(lower), upper: Arc::new(upper) };
        Ok(Self {
            state: RwLock::new(state),
            traffic: RwLock::new(()),
            unsynced: Mutex::default(),
            virtual_size,
        })
    }

    /// Bytes of the device.
    pub fn virtual_size(&self) -> u64 {
        self.virtual_size
    }

    /// What the layers below the upper say of themselves, bottom first.
    pub fn layers(&self) -> Vec<LayerInfo> {
        self.state.read().lower.layers().to_vec()
    }

    /// Id of the upper: of the layer that the next seal makes.
    pub fn upper_info(&self) -> LayerInfo {
        self.state.read().upper.info.clone()
    }

    /// Bytes of the upper's data file, garbage included.
    pub fn upper_bytes(&self) -> u64 {
        self.state.read().upper.file_bytes()
    }

    /// Fills `buf` from byte `offset` of the device. Beyond its end is `UnexpectedEof`.
    pub fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let (start, end) = sector_range(buf.len(), offset, self.virtual_size)?;
        let (State { lower, upper }, mappings) = self.look_up(start, end);
        let mut filler = Filler::new(buf, offset);
        for mapping in mappings {
            match mapping.tag() {
                UPPER => filler.put(mapping, &*upper.data)?,
                tag => filler.put(mapping, lower.source(tag))?,
            }
        }
        filler.finish();
        Ok(())
    }

    /// Writes all of `buf` at byte `offset` of the device. Whole sectors are fast; others read their edges first.
    /// Whole zero blocks of 4 KiB take no space. Durable after the next [`flush`](Self::flush).
    pub fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        let (start, end) = sector_range(buf.len(), offset, self.virtual_size)?;
        if buf.is_empty() {
            return Ok(());
        }
        let last = offset + u64::try_from(buf.len()).unwrap_or(u64::MAX);
        if offset.is_multiple_of(SECTOR) && last.is_multiple_of(SECTOR) {
            let _shared = self.traffic.read();
            return self.write_sectors(buf, start);
        }
        let _alone = self.traffic.write();
        let mut whole = vec![0; usize::try_from((end - start) * SECTOR).expect("a little more than buf")];
        let sector = usize::try_from(SECTOR).expect("512");
        let len = whole.len();
        self.read_at(&mut whole[..sector], start * SECTOR)?;
        self.read_at(&mut whole[len - sector..], (end - 1) * SECTOR)?;
        let skip = usize::try_from(offset - start * SECTOR).expect("below 512");
        whole[skip..skip + buf.len()].copy_from_slice(buf);
        self.write_sectors(&whole, start)
    }

    /// Makes `len` bytes from `offset` read as zeroes without storing them: discard, write-zeroes, hole punching.
    pub fn write_zeroes(&self, offset: u64, len: u64) -> io::Result<()> {
        let size = usize::try_from(len).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        sector_range(size, offset, self.virtual_size)?;
        let (start, end) = (offset.div_ceil(SECTOR), (offset + len) / SECTOR);
        if start >= end {
            return self.write_at(&vec![0; size], offset);
        }
        let edge = |from: u64, to: u64| {
            let zeroes = [0u8; 512];
            self.write_at(&zeroes[..usize::try_from(to - from).expect("below 512")], from)
        };
        edge(offset, start * SECTOR)?;
        edge(end * SECTOR, offset + len)?;
        let _shared = self.traffic.read();
        let upper = self.state.read().upper.clone();
        let place = upper.end_sector();
        let mut mappings = Vec::new();
        chunked(start, end - start, |at, part| mappings.push(Mapping::zero(at, part, place)));
        mappings.chunks(ZERO_BATCH).try_for_each(|batch| upper.commit(batch))
    }

    /// Returns once every write acknowledged before the call is on stable storage, in layers sealed since the last
    /// flush too.
    pub fn flush(&self) -> io::Result<()> {
        {
            let mut unsynced = self.unsynced.lock();
            while let Some(layer) = unsynced.layers.last().filter(|_| !unsynced.failed) {
                if let Err(error) = layer.sync() {
                    unsynced.failed = true;
                    return Err(error);
                }
                unsynced.layers.pop();
            }
            if unsynced.failed {
                return Err(io::Error::other(
                    "syncing a sealed layer failed: what reached the disk is unknown",
                ));
            }
        }
        let upper = self.state.read().upper.clone();
        upper.flush()
    }

    /// The first byte at or after `offset` that is stored; `None` when only zeroes follow.
    pub fn next_data(&self, offset: u64) -> Option<u64> {
        self.scan(offset, |mappings, _, _| mappings.iter().find(|m| !m.is_zero()).map(|m| m.start() * SECTOR))
            .map(|found| found.max(offset))
    }

    /// The first byte at or after `offset` that is not stored; the device's size when everything is.
    pub fn next_hole(&self, offset: u64) -> u64 {
        let found = self.scan(offset, |mappings, start, end| {
            let mut at = start;
            for m in mappings.iter().filter(|m| !m.is_zero()) {
                if m.start() > at {
                    break;
                }
                at = m.end();
            }
            (at < end).then_some(at * SECTOR)
        });
        found.map_or(self.virtual_size, |found| found.max(offset).min(self.virtual_size))
    }

    /// Makes the upper the newest layer, in time that depends on its index alone, and goes on with `next`, an
    /// empty upper written on it (its parent is this upper's id).
    ///
    /// `commit` is called when the data file is a complete layer and before anything changes here: it moves the
    /// files into place. If it fails, or anything before it, the old upper goes on unharmed. With `sync` the layer is
    /// on stable storage before `commit` is called. Reads go on throughout, writes wait.
    pub fn seal(
        &self,
        next: Upper,
        sync: bool,
        commit: impl FnOnce() -> io::Result<()>,
    ) -> Result<Sealed, Error> {
        let _alone = self.traffic.write();
        let State { lower, upper } = self.state.read().clone();
        if next.info.parent != upper.info.uuid || !next.is_empty() {
            return Err(Error::OutOfOrder(format!(
                "the next upper must be empty and lie on {}",
                upper.info.uuid
            )));
        }
        if lower.layers().len() + 1 >= MAX_LAYERS {
            return Err(Error::TooManyLayers { got: lower.layers().len() + 2, max: MAX_LAYERS });
        }
        let entries = upper.index.read().entries();
        let count = u64::try_from(entries.len()).unwrap_or(u64::MAX);
        if count > MAX_INDEX_ENTRIES {
            return Err(Error::IndexTooLarge { got: count, max: MAX_INDEX_ENTRIES });
        }
        let file_bytes = upper.write_trailer(&entries, self.virtual_size, sync)?;
        let info = LayerInfo { virtual_size: self.virtual_size, ..upper.info.clone() };
        let index = Index::trusted(entries);
        let stored_sectors = index.stored_sectors();
        let grown = lower.with_layer(Layer::sealed(upper.data.clone(), index, info.clone()))?;
        commit().map_err(Error::Commit)?;
        if !sync {
            self.unsynced.lock().layers.push(upper.data.clone());
        }
        let fresh = State { lower: Arc::new(grown), upper: Arc::new(next) };
        let old = std::mem::replace(&mut *self.state.write(), fresh);
        free_elsewhere((old, lower, upper), count);
        Ok(Sealed { info, file_bytes, stored_sectors, entries: count })
    }

    fn look_up(&self, start: u64, end: u64) -> (State, Vec<Mapping>) {
        let state = self.state.read().clone();
        let mut found = Vec::with_capacity(8);
        let mut at = start;
        let index = state.upper.index.read();
        index.visit(start, end, |m| {
            state.lower.index().visit(at, m.start(), |below| found.push(below));
            found.push(m.with_tag(UPPER));
            at = m.end();
        });
        drop(index);
        state.lower.index().visit(at, end, |below| found.push(below));
        (state, found)
    }

    fn write_sectors(&self, buf: &[u8], start: u64) -> io::Result<()> {
        let upper = self.state.read().upper.clone();
        let len = u64::try_from(buf.len()).unwrap_or(u64::MAX);
        let in_place = upper.index.read().stored_at(start, start + len / SECTOR);
        let mut pieces = Vec::with_capacity(1);
        pieces.extend(runs(buf, start * SECTOR));
        if let (Some(place), true) = (in_place, pieces.iter().any(|(zero, _)| !zero)) {
            upper.data.write_at(buf, place * SECTOR)?;
            upper.mark_dirty();
            return Ok(());
        }
        let stored = pieces.iter().filter(|(zero, _)| !zero).map(|(_, run)| run.len()).sum::<usize>();
        let mut place = upper.reserve(u64::try_from(stored).unwrap_or(u64::MAX));
        let mut at = start;
        let mut mappings = Vec::with_capacity(pieces.len());
        for (zero, run) in pieces {
            let sectors = u64::try_from(run.len()).unwrap_or(u64::MAX) / SECTOR;
            if zero {
                chunked(at, sectors, |from, part| mappings.push(Mapping::zero(from, part, place / SECTOR)));
            } else {
                upper.data.write_at(run, place)?;
                chunked(at, sectors, |from, part| {
                    mappings.push(Mapping::data(from, part, place / SECTOR + (from - at)));
                });
                place += sectors * SECTOR;
            }
            at += sectors;
        }
        upper.commit(&mappings)
    }

    /// Looks at the device in windows from `offset` on until `f(mappings, start, end)` finds something.
    fn scan(&self, offset: u64, f: impl Fn(&[Mapping], u64, u64) -> Option<u64>) -> Option<u64> {
        const WINDOW: u64 = (64 << 20) / SECTOR;
        let last = self.virtual_size.div_ceil(SECTOR);
        let mut at = offset / SECTOR;
        while at < last {
            let end = (at + WINDOW).min(last);
            if let Some(found) = f(&self.look_up(at, end).1, at, end) {
                return Some(found);
            }
            at = end;
        }
        None
    }
}

/// Freeing a large index takes as long as sealing it did, and a paused VM waits for the seal.
fn free_elsewhere(what: impl Send + 'static, entries: u64) {
    if entries > 10_000 {
        let freed = std::thread::Builder::new().name("seal-free".into()).spawn(move || drop(what));
        // When no thread can be had, the closure and what it holds are freed right here.
        drop(freed);
    }
}
