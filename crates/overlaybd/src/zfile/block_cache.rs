//! Decoded blocks, kept so that small reads of one block don't decode it again and again.
//!
//! Long reads are decoded straight into the reader's buffer and never come here: they would push out what small ones
//! come back to, and what they read stays in the page cache above.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::MAX_BLOCK;

/// Bytes of one set; readers of different sets don't wait for each other.
const SET_BYTES: usize = 2 * MAX_BLOCK as usize;

/// A bounded cache of decoded blocks that any number of ZFiles and threads can share. A block can be in one set
/// only; in a set the one unused for longest goes first. A block that fails its checksum never gets in.
pub struct BlockCache {
    sets: Box<[Mutex<Set>]>,
    files: AtomicU64,
}

#[derive(Default)]
struct Set {
    /// Last used last.
    entries: Vec<(Key, Arc<[u8]>)>,
    bytes: usize,
}

type Key = (u64, usize);

impl BlockCache {
    /// A cache of at most `bytes`, rounded down to whole sets of 128 KiB, at least one. Memory is taken as it fills.
    pub fn new(bytes: usize) -> Self {
        let sets = (bytes / SET_BYTES).max(1);
        Self { sets: (0..sets).map(|_| Mutex::default()).collect(), files: AtomicU64::new(0) }
    }

    /// A number that no other file in this cache has.
    pub(super) fn join(&self) -> u64 {
        self.files.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn get(&self, file: u64, block: usize) -> Option<Arc<[u8]>> {
        let mut set = self.set(file, block).lock();
        let place = set.entries.iter().rposition(|(key, _)| *key == (file, block))?;
        set.entries[place..].rotate_left(1);
        set.entries.last().map(|(_, bytes)| bytes.clone())
    }

    pub(super) fn put(&self, file: u64, block: usize, bytes: Arc<[u8]>) {
        let mut set = self.set(file, block).lock();
        // Two readers may have decoded it at the same time.
        if set.entries.iter().any(|(key, _)| *key == (file, block)) {
            return;
        }
        while set.bytes + bytes.len() > SET_BYTES && !set.entries.is_empty() {
            let (_, gone) = set.entries.remove(0);
            set.bytes -= gone.len();
        }
        set.bytes += bytes.len();
        set.entries.push(((file, block), bytes));
    }

    fn set(&self, file: u64, block: usize) -> &Mutex<Set> {
        let spread = usize::try_from(file.wrapping_mul(0x9e37) & 0xffff_ffff).unwrap_or_default();
        &self.sets[spread.wrapping_add(block) % self.sets.len()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_unused_for_longest_goes_first_and_the_bound_holds() {
        let cache = BlockCache::new(SET_BYTES);
        let block = |fill: u8| Arc::<[u8]>::from(vec![fill; SET_BYTES / 4]);
        let file = cache.join();
        (0..4).for_each(|i| cache.put(file, usize::from(i), block(i)));
        assert!(cache.get(file, 0).is_some_and(|bytes| bytes[0] == 0));
        cache.put(file, 4, block(4));
        assert!(cache.get(file, 1).is_none() && cache.get(file, 0).is_some());
        assert!(cache.get(cache.join(), 0).is_none(), "blocks of one file are not another's");
        assert_eq!(cache.sets[0].lock().bytes, SET_BYTES);
        assert_eq!(cache.sets[0].lock().entries.len(), 4);
    }
}
