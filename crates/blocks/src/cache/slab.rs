//! The files of a cache and what is in them. All calls may block on the disk, none on the network.
//!
//! A slot is free, being filled by one caller (in no table), or holds a block (in the map and the policy). Reading
//! takes no hold of a slot: the slot's generation, raised when its block goes, tells afterwards whether the bytes were
//! still its own.

use std::collections::{HashMap, HashSet};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};

use super::Error;
use super::entry::{BLOCK, ENTRY, Entry, HEAD, PIECE, Sums, head, sums};
use super::policy::Policy;
use crate::remote::Digest;

/// After a full disk, how long the cache stays at its size.
const CAUTION: Duration = Duration::from_secs(30);

pub(crate) struct Slab {
    data: File,
    index: File,
    state: Mutex<State>,
    generations: Box<[AtomicU32]>,
    bytes: AtomicU64,
    most: u32,
    _lock: File,
}

pub(crate) struct State {
    pub(crate) rows: HashMap<u32, Row>,
    by_digest: HashMap<Digest, u32>,
    next_row: u32,
    map: HashMap<(u32, u32), u32>,
    slots: Vec<Option<Held>>,
    free: Vec<u32>,
    policy: Policy,
    used: u32,
    limit: u32,
    full_at: Option<Instant>,
    sequence: u64,
}

/// A layer that is open or has blocks here.
pub(crate) struct Row {
    pub(crate) digest: Digest,
    pub(crate) size: u64,
    pub(crate) present: u32,
    pub(crate) verified: u32,
    pub(crate) bytes: u64,
    pub(crate) handles: u32,
}

#[derive(Clone)]
struct Held {
    row: u32,
    block: u32,
    len: u32,
    sequence: u64,
    sums: Sums,
    verified: bool,
}

/// What looking for a block came to.
pub(crate) enum Look {
    Hit,
    Miss,
    /// It was here, but not as it had been written; now it isn't here.
    Damaged,
}

fn index_at(slot: u32) -> u64 {
    HEAD as u64 + u64::from(slot) * ENTRY as u64
}

fn data_at(slot: u32) -> u64 {
    u64::from(slot) * BLOCK as u64
}

fn ghost(digest: &Digest, block: u32) -> u64 {
    let head = u64::from_le_bytes(digest.0[..8].try_into().expect("eight bytes"));
    head ^ u64::from(block).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl Slab {
    pub(crate) fn open(dir: &Path, capacity: u64, others: u64) -> Result<Self, Error> {
        let io = |what, path: &Path| {
            let path = path.to_owned();
            move |source| Error::Io { what, path, source }
        };
        // Beside the slots: traces, the index's head, and ends of files that fill no file system block.
        let slots = capacity.saturating_sub(others + HEAD as u64 + 16_384) / (BLOCK + ENTRY) as u64;
        let most = u32::try_from(slots.min(u64::from(u32::MAX / 2))).unwrap_or(0);
        if capacity < 2 << 20 {
            return Err(Error::TooSmall(capacity));
        }
        DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(io("making", dir))?;
        let open = |name: &str| {
            let path = dir.join(name);
            let file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path);
            file.map_err(io("opening", &path))
        };
        let lock = open("lock")?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(Error::InUse(dir.to_owned())),
            Err(errno) => return Err(io("locking", dir)(errno.into())),
        }
        let slab = Self {
            data: open("blocks.data")?,
            index: open("blocks.index")?,
            state: Mutex::new(State {
                rows: HashMap::new(),
                by_digest: HashMap::new(),
                next_row: 0,
                map: HashMap::new(),
                slots: Vec::new(),
                free: Vec::new(),
                policy: Policy::default(),
                used: 0,
                limit: most,
                full_at: None,
                sequence: 1,
            }),
            generations: (0..most).map(|_| AtomicU32::new(0)).collect(),
            bytes: AtomicU64::new(0),
            most,
            _lock: lock,
        };
        slab.load().map_err(io("reading the cache in", dir))?;
        Ok(slab)
    }

    /// Finds what is there. A foreign or damaged index is emptied.
    fn load(&self) -> io::Result<()> {
        let mut found = [0; HEAD];
        let fits = self.index.read_exact_at(&mut found, 0).is_ok() && found == head();
        if !fits {
            self.index.set_len(0)?;
            self.data.set_len(0)?;
            self.index.write_all_at(&head(), 0)?;
        }
        // A cache made smaller loses its end.
        let (index_end, data_end) = (index_at(self.most), data_at(self.most));
        if self.index.metadata()?.len() > index_end {
            self.index.set_len(index_end)?;
        }
        if self.data.metadata()?.len() > data_end {
            self.data.set_len(data_end)?;
        }
        let stored = (self.index.metadata()?.len() - HEAD as u64) / ENTRY as u64;
        let mut entries = Vec::new();
        let mut chunk = vec![0; ENTRY * 4096];
        for first in (0..stored).step_by(4096) {
            let many = usize::try_from((stored - first).min(4096)).unwrap_or(0);
            let chunk = &mut chunk[..many * ENTRY];
            self.index.read_exact_at(chunk, HEAD as u64 + first * ENTRY as u64)?;
            for (slot, bytes) in (first..).zip(chunk.chunks_exact(ENTRY)) {
                let entry = Entry::decode(bytes.try_into().expect("an entry's length"));
                entries.push((u32::try_from(slot).expect("below most"), entry));
            }
        }
        let mut state = self.state.lock();
        state.slots = vec![None; entries.len()];
        let (mut full, empty): (Vec<_>, Vec<_>) = entries.into_iter().partition(|(_, e)| e.is_some());
        state.free = empty.into_iter().map(|(slot, _)| slot).collect();
        full.sort_by_key(|(_, entry)| entry.as_ref().map(|entry| entry.sequence));
        for (slot, entry) in full {
            let Some(entry) = entry else { continue };
            let row = state.row(entry.layer, entry.size);
            let same_size = state.rows[&row].size == entry.size;
            if !same_size || state.map.contains_key(&(row, entry.block)) {
                state.free.push(slot);
                continue;
            }
            state.sequence = state.sequence.max(entry.sequence + 1);
            state.policy.restore(slot, ghost(&entry.layer, entry.block));
            let held = Held {
                row,
                block: entry.block,
                len: entry.len,
                sequence: entry.sequence,
                sums: entry.sums,
                verified: entry.verified,
            };
            state.used += 1;
            self.enter(&mut state, slot, held);
        }
        Ok(())
    }

    /// Where a layer's blocks are entered; it stays while handles or blocks are there.
    pub(crate) fn acquire(&self, digest: Digest, size: u64) -> Result<u32, u64> {
        let mut state = self.state.lock();
        let id = state.row(digest, size);
        let row = state.rows.get_mut(&id).expect("just made");
        if row.size != size {
            return Err(row.size);
        }
        row.handles += 1;
        Ok(id)
    }

    pub(crate) fn release(&self, id: u32) {
        let mut state = self.state.lock();
        if let Some(row) = state.rows.get_mut(&id) {
            row.handles -= 1;
        }
        state.drop_idle(id);
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn contains(&self, row: u32, block: u32) -> bool {
        self.state.lock().map.contains_key(&(row, block))
    }

    pub(crate) fn with_rows<T>(&self, look: impl FnOnce(&HashMap<u32, Row>) -> T) -> T {
        look(&self.state.lock().rows)
    }

    /// Fills `buf` from byte `from` of a block. `visit`: count it as a use.
    pub(crate) fn read(&self, row: u32, block: u32, from: usize, buf: &mut [u8], visit: bool) -> Look {
        loop {
            let (slot, len, sums, generation) = {
                let mut state = self.state.lock();
                let Some(&slot) = state.map.get(&(row, block)) else { return Look::Miss };
                if visit {
                    state.policy.touch(slot);
                }
                let held = state.slots[slot as usize].as_ref().expect("mapped slots hold a block");
                let (len, sums) = (held.len as usize, held.sums);
                (slot, len, sums, self.generations[slot as usize].load(Ordering::Acquire))
            };
            let sound = self.read_slot(slot, len, &sums, from, buf);
            if self.generations[slot as usize].load(Ordering::Acquire) != generation {
                continue;
            }
            if sound {
                return Look::Hit;
            }
            tracing::warn!(slot, block, "a cached block is damaged on disk; it is fetched again");
            self.forget(|_, held| held.row == row && held.block == block);
            return Look::Damaged;
        }
    }

    fn read_slot(&self, slot: u32, len: usize, sums: &Sums, from: usize, buf: &mut [u8]) -> bool {
        let to = from + buf.len();
        let (first, end) = (from - from % PIECE, to.next_multiple_of(PIECE).min(len));
        let check = |bytes: &[u8]| {
            bytes.chunks(PIECE).zip(&sums[first / PIECE..]).all(|(piece, sum)| crc32c::crc32c(piece) == *sum)
        };
        if to > len {
            return false;
        }
        let at = data_at(slot) + first as u64;
        if (first, end) == (from, to) {
            return self.data.read_exact_at(buf, at).is_ok() && check(buf);
        }
        let mut pieces = vec![0; end - first];
        if self.data.read_exact_at(&mut pieces, at).is_err() || !check(&pieces) {
            return false;
        }
        buf.copy_from_slice(&pieces[from - first..to - first]);
        true
    }

    /// Stores a block. When that fails nothing is stored, and after a full disk the cache is smaller.
    pub(crate) fn put(&self, row: u32, block: u32, bytes: &[u8]) -> io::Result<()> {
        let (slot, old, mut entry) = {
            let mut state = self.state.lock();
            if state.map.contains_key(&(row, block)) {
                return Ok(());
            }
            let Some(known) = state.rows.get(&row) else { return Ok(()) };
            let (layer, size) = (known.digest, known.size);
            let Some((slot, old)) = self.take_slot(&mut state) else {
                return Err(io::ErrorKind::StorageFull.into());
            };
            state.sequence += 1;
            let sequence = state.sequence;
            let len = u32::try_from(bytes.len()).map_err(io::Error::other)?;
            (slot, old, Entry { layer, size, block, len, sequence, sums: [0; 32], verified: false })
        };
        entry.sums = sums(bytes);
        let written = || {
            if old {
                self.index.write_all_at(&[0; ENTRY], index_at(slot))?;
            }
            self.data.write_all_at(bytes, data_at(slot))?;
            self.index.write_all_at(&entry.encode(), index_at(slot))
        };
        if let Err(error) = written() {
            self.give_back(slot, error.kind() == io::ErrorKind::StorageFull);
            return Err(error);
        }
        let mut state = self.state.lock();
        if state.map.contains_key(&(row, block)) || !state.rows.contains_key(&row) {
            drop(state);
            self.give_back(slot, false);
            return Ok(());
        }
        state.policy.insert(slot, ghost(&entry.layer, block));
        let Entry { len, sequence, sums, .. } = entry;
        self.enter(&mut state, slot, Held { row, block, len, sequence, sums, verified: false });
        Ok(())
    }

    /// A slot that is in no table, and whether the index may still say something of it.
    fn take_slot(&self, state: &mut State) -> Option<(u32, bool)> {
        if state.full_at.is_some_and(|at| at.elapsed() > CAUTION) {
            state.full_at = None;
            state.limit = (state.limit + (self.most / 16).max(1)).min(self.most);
        }
        if state.used < state.limit {
            state.used += 1;
            if let Some(slot) = state.free.pop() {
                return Some((slot, true));
            }
            let slot = u32::try_from(state.slots.len()).ok()?;
            state.slots.push(None);
            return Some((slot, true));
        }
        let slot = state.policy.evict()?;
        self.leave(state, slot);
        Some((slot, true))
    }

    fn give_back(&self, slot: u32, full: bool) {
        self.clear(slot);
        let mut gone = Vec::new();
        {
            let mut state = self.state.lock();
            state.used -= 1;
            if full {
                state.full_at = Some(Instant::now());
                let keep = state.used - (state.used / 16).max(1).min(state.used);
                while state.used > keep {
                    let Some(slot) = state.policy.evict() else { break };
                    self.leave(&mut state, slot);
                    state.used -= 1;
                    gone.push(slot);
                }
                state.limit = state.used;
                tracing::warn!(blocks = state.limit, "the cache's disk is full; the cache shrinks");
            }
        }
        gone.iter().for_each(|slot| self.clear(*slot));
        let mut state = self.state.lock();
        state.free.push(slot);
        state.free.extend(gone);
    }

    /// Empties slots whose block is to go, gives their space back, and says how many blocks and bytes that were.
    pub(crate) fn forget(&self, mut goes: impl FnMut(&HashMap<u32, Row>, &Chosen) -> bool) -> (u64, u64) {
        let mut gone = HashSet::new();
        let mut bytes = 0;
        {
            let mut state = self.state.lock();
            let state = &mut *state;
            for (slot, held) in (0u32..).zip(&state.slots) {
                let Some(held) = held else { continue };
                let chosen = Chosen { row: held.row, block: held.block };
                if goes(&state.rows, &chosen) {
                    gone.insert(slot);
                    bytes += u64::from(held.len);
                }
            }
            state.policy.remove(&gone);
            for &slot in &gone {
                self.leave(state, slot);
            }
        }
        gone.iter().for_each(|slot| self.clear(*slot));
        let mut state = self.state.lock();
        state.used -= u32::try_from(gone.len()).unwrap_or(0);
        state.free.extend(&gone);
        (gone.len() as u64, bytes)
    }

    /// Empties the slots that are worth least until at most `target` bytes are cached.
    pub(crate) fn shrink_to(&self, target: u64) -> (u64, u64) {
        let before = self.bytes();
        let mut gone = Vec::new();
        {
            let mut state = self.state.lock();
            while self.bytes() > target {
                let Some(slot) = state.policy.evict() else { break };
                self.leave(&mut state, slot);
                gone.push(slot);
            }
        }
        let bytes = before.saturating_sub(self.bytes());
        gone.iter().for_each(|slot| self.clear(*slot));
        let mut state = self.state.lock();
        state.used -= u32::try_from(gone.len()).unwrap_or(0);
        state.free.extend(&gone);
        (gone.len() as u64, bytes)
    }

    /// Marks a layer's blocks as those of a whole whose sha256 was right, if they are still those of `sequences`.
    pub(crate) fn mark_verified(&self, row: u32, before: u64) -> io::Result<()> {
        let mut state = self.state.lock();
        let state = &mut *state;
        let Some(known) = state.rows.get_mut(&row) else { return Ok(()) };
        for (slot, held) in (0u32..).zip(&mut state.slots) {
            let Some(held) = held.as_mut().filter(|held| held.row == row && !held.verified) else { continue };
            if held.sequence > before {
                continue;
            }
            held.verified = true;
            known.verified += 1;
            let entry = Entry {
                layer: known.digest,
                size: known.size,
                block: held.block,
                len: held.len,
                sequence: held.sequence,
                sums: held.sums,
                verified: true,
            };
            // Under the lock, so that no other entry of this slot is overtaken: 256 bytes into the page cache.
            self.index.write_all_at(&entry.encode(), index_at(slot))?;
        }
        Ok(())
    }

    /// The number of the newest fill.
    pub(crate) fn sequence(&self) -> u64 {
        self.state.lock().sequence
    }

    fn enter(&self, state: &mut State, slot: u32, held: Held) {
        let row = state.rows.get_mut(&held.row).expect("blocks belong to a layer");
        row.present += 1;
        row.verified += u32::from(held.verified);
        row.bytes += u64::from(held.len);
        self.bytes.fetch_add(u64::from(held.len), Ordering::Relaxed);
        state.map.insert((held.row, held.block), slot);
        state.slots[slot as usize] = Some(held);
    }

    fn leave(&self, state: &mut State, slot: u32) {
        let Some(held) = state.slots[slot as usize].take() else { return };
        self.generations[slot as usize].fetch_add(1, Ordering::AcqRel);
        state.map.remove(&(held.row, held.block));
        self.bytes.fetch_sub(u64::from(held.len), Ordering::Relaxed);
        if let Some(row) = state.rows.get_mut(&held.row) {
            row.present -= 1;
            row.verified -= u32::from(held.verified);
            row.bytes -= u64::from(held.len);
        }
        state.drop_idle(held.row);
    }

    /// Strikes a slot from the index and gives its space back, as far as the file system can.
    fn clear(&self, slot: u32) {
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let struck = self.index.write_all_at(&[0; ENTRY], index_at(slot));
        let punched = fallocate(&self.data, punch, data_at(slot), BLOCK as u64);
        if let Some(error) = struck.err().or(punched.err().map(io::Error::from)) {
            tracing::debug!(%error, slot, "a slot's space could not be given back; it is used again");
        }
    }
}

/// A block that may be forgotten.
pub(crate) struct Chosen {
    pub(crate) row: u32,
    pub(crate) block: u32,
}

impl State {
    fn row(&mut self, digest: Digest, size: u64) -> u32 {
        if let Some(&id) = self.by_digest.get(&digest) {
            return id;
        }
        // Numbers come round only after 2^32 layers; a layer that is still here keeps its own.
        while self.rows.contains_key(&self.next_row) {
            self.next_row = self.next_row.wrapping_add(1);
        }
        let id = self.next_row;
        self.next_row = self.next_row.wrapping_add(1);
        self.by_digest.insert(digest, id);
        self.rows.insert(id, Row { digest, size, present: 0, verified: 0, bytes: 0, handles: 0 });
        id
    }

    fn drop_idle(&mut self, id: u32) {
        if let Some(row) = self.rows.get(&id)
            && row.handles == 0
            && row.present == 0
        {
            self.by_digest.remove(&row.digest);
            self.rows.remove(&id);
        }
    }
}
