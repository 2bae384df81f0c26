//! Which block goes when a slot is needed: S3-FIFO (Yang et al., SOSP 2023), over slot numbers.
//!
//! New blocks enter a small queue, a tenth of the cache. Who is used again before its turn comes moves to the main
//! queue; who isn't leaves, and is remembered for a while: coming back, it enters the main queue at once. A scan passes
//! through the small queue alone.
//!
//! A use counts once in [`BURST`] visits: the 32 reads of 4 KiB that a sequential reader makes of a block are one use.

use std::collections::{HashSet, VecDeque};

/// Visits of blocks between two uses of the same that count as two.
const BURST: u32 = 256;
/// In small caches: two sequential readers side by side.
const LEAST_BURST: u32 = 64;
const MOST: u8 = 3;

#[derive(Default)]
pub(crate) struct Policy {
    small: VecDeque<u32>,
    main: VecDeque<u32>,
    uses: Vec<Use>,
    ghosts: VecDeque<u64>,
    remembered: HashSet<u64>,
    clock: u32,
}

#[derive(Clone, Copy, Default)]
struct Use {
    count: u8,
    last: u32,
    /// Of the block, for the ghosts.
    hash: u64,
}

impl Policy {
    /// A block came into `slot`; `hash` tells blocks apart.
    pub(crate) fn insert(&mut self, slot: u32, hash: u64) {
        let at = slot as usize;
        if at >= self.uses.len() {
            self.uses.resize(at + 1, Use::default());
        }
        self.uses[at] = Use { count: 0, last: self.clock, hash };
        if self.remembered.remove(&hash) {
            self.main.push_back(slot);
        } else {
            self.small.push_back(slot);
        }
    }

    /// A block that a former process had used.
    pub(crate) fn restore(&mut self, slot: u32, hash: u64) {
        self.remembered.insert(hash);
        self.insert(slot, hash);
    }

    pub(crate) fn touch(&mut self, slot: u32) {
        self.clock = self.clock.wrapping_add(1);
        let slots = self.small.len() + self.main.len();
        let burst = u32::try_from(slots / 4).unwrap_or(BURST).clamp(LEAST_BURST, BURST);
        if let Some(known) = self.uses.get_mut(slot as usize)
            && self.clock.wrapping_sub(known.last) > burst
        {
            *known = Use { count: (known.count + 1).min(MOST), last: self.clock, ..*known };
        }
    }

    /// Takes out the slot whose block should go.
    pub(crate) fn evict(&mut self) -> Option<u32> {
        loop {
            let slots = self.small.len() + self.main.len();
            if self.small.len() * 10 >= slots || self.main.is_empty() {
                let slot = self.small.pop_front()?;
                let known = &mut self.uses[slot as usize];
                if known.count > 0 {
                    known.count = 0;
                    self.main.push_back(slot);
                    continue;
                }
                let hash = known.hash;
                self.remember(hash, slots);
                return Some(slot);
            }
            let slot = self.main.pop_front()?;
            let known = &mut self.uses[slot as usize];
            if known.count == 0 {
                return Some(slot);
            }
            known.count -= 1;
            self.main.push_back(slot);
        }
    }

    /// Forgets slots whose blocks are gone for another reason.
    pub(crate) fn remove(&mut self, gone: &HashSet<u32>) {
        self.small.retain(|slot| !gone.contains(slot));
        self.main.retain(|slot| !gone.contains(slot));
    }

    fn remember(&mut self, hash: u64, most: usize) {
        if self.remembered.insert(hash) {
            self.ghosts.push_back(hash);
        }
        while self.ghosts.len() > most {
            if let Some(oldest) = self.ghosts.pop_front() {
                self.remembered.remove(&oldest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache of `slots` slots that is asked for blocks.
    struct Model {
        policy: Policy,
        slots: u32,
        held: std::collections::HashMap<u64, u32>,
    }

    impl Model {
        fn ask(&mut self, block: u64) -> bool {
            if let Some(&slot) = self.held.get(&block) {
                self.policy.touch(slot);
                return true;
            }
            let used = u32::try_from(self.held.len()).unwrap();
            let slot = if used < self.slots {
                used
            } else {
                let slot = self.policy.evict().unwrap();
                self.held.retain(|_, held| *held != slot);
                slot
            };
            self.held.insert(block, slot);
            self.policy.insert(slot, block);
            false
        }
    }

    #[test]
    fn a_scan_does_not_flush_what_is_used_again_and_again() {
        let mut cache = Model { policy: Policy::default(), slots: 100, held: Default::default() };
        for _ in 0..20 {
            (0..50).for_each(|block| _ = cache.ask(block));
        }
        // Ten times the cache, each block read in 32 pieces.
        for block in 1000..2000 {
            (0..32).for_each(|_| _ = cache.ask(block));
        }
        let kept = (0..50).filter(|block| cache.held.contains_key(block)).count();
        assert!(kept >= 45, "{kept} of 50 hot blocks are left");
    }

    #[test]
    fn what_comes_back_soon_stays() {
        let mut cache = Model { policy: Policy::default(), slots: 10, held: Default::default() };
        (0..12).for_each(|block| _ = cache.ask(block));
        assert!(!cache.ask(0), "it was the first to go");
        (100..130).for_each(|block| _ = cache.ask(block));
        assert!(cache.ask(0), "the second time it was kept");
    }

    #[test]
    fn memory_stays_bounded() {
        let mut cache = Model { policy: Policy::default(), slots: 16, held: Default::default() };
        (0..10_000).for_each(|block| _ = cache.ask(block));
        assert_eq!(cache.held.len(), 16);
        assert!(cache.policy.ghosts.len() <= 16 && cache.policy.remembered.len() <= 17);
        assert_eq!(cache.policy.small.len() + cache.policy.main.len(), 16);
    }
}
