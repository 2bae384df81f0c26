//! Who has which index: the bookkeeping of slots, pure.
//!
//! ```text
//!  free ──build──▶ (building) ──▶ ready ──▶ live ──▶ (leaving) ──torn down──▶ free
//!    ▲                  │ failed    ▲────────┘ ▲         │ failed
//!    ├──────────────────┘           │          │ adopt   ▼
//!    └────────reap─────────────────────────── leftover ◀─┘
//! ```
//! An *index* is in exactly one of these states. A *generation* is one passage of an index from building to leaving,
//! and gives the names. `leftover` is what a former process left, or what could not be torn down; an index may be left
//! over under several names. An index at or above the bound, left by a process with a higher one, never becomes free.

use std::collections::{BTreeMap, HashMap, VecDeque};

/// A built slot.
#[derive(Debug)]
pub(crate) struct Held<P> {
    pub(crate) index: u32,
    pub(crate) generation: u64,
    pub(crate) part: P,
}

/// What someone who wants a slot is to do.
#[derive(Debug)]
pub(crate) enum Next<P> {
    /// Take this one.
    Ready(Held<P>),
    /// Build this index, and report how it went.
    Build(u32),
    /// One may become free soon.
    Wait,
    /// All are in use.
    Exhausted,
    /// No more slots are given out.
    Closed,
}

#[derive(Debug)]
pub(crate) struct Ledger<P> {
    slots: u32,
    /// Oldest first: an index rests as long as possible, while others' late packets die away.
    free: VecDeque<u32>,
    ready: VecDeque<Held<P>>,
    live: HashMap<u32, Held<P>>,
    leftover: BTreeMap<String, u32>,
    building: usize,
    leaving: usize,
    closed: bool,
}

impl<P> Ledger<P> {
    pub(crate) fn new(slots: u32, leftover: BTreeMap<String, u32>) -> Self {
        let used: Vec<u32> = leftover.values().copied().collect();
        let free = (0..slots).filter(|index| !used.contains(index)).collect();
        let (ready, live) = (VecDeque::new(), HashMap::new());
        Self { slots, free, ready, live, leftover, building: 0, leaving: 0, closed: false }
    }

    /// For someone who wants a slot now.
    pub(crate) fn next(&mut self) -> Next<P> {
        if self.closed {
            return Next::Closed;
        }
        if let Some(held) = self.ready.pop_front() {
            return Next::Ready(held);
        }
        match self.free.pop_front() {
            Some(index) => {
                self.building += 1;
                Next::Build(index)
            }
            None if self.building + self.leaving > 0 => Next::Wait,
            None => Next::Exhausted,
        }
    }

    /// An index to build for the pool, if it has fewer than `prepared`.
    pub(crate) fn wanted_in_stock(&mut self, prepared: usize) -> Option<u32> {
        let short = !self.closed && self.ready.len() + self.building < prepared;
        let index = short.then(|| self.free.pop_front()).flatten()?;
        self.building += 1;
        Some(index)
    }

    pub(crate) fn build_failed(&mut self, index: u32) {
        self.building -= 1;
        self.give_back(index);
    }

    /// A build went to someone who asked for it, or is about to leave again.
    pub(crate) fn build_handed_over(&mut self) {
        self.building -= 1;
    }

    /// A build went into the pool, unless that is closed: then it comes back.
    pub(crate) fn stock(&mut self, held: Held<P>) -> Option<Held<P>> {
        self.building -= 1;
        if self.closed {
            return Some(held);
        }
        self.ready.push_back(held);
        None
    }

    pub(crate) fn go_live(&mut self, held: Held<P>) {
        self.live.insert(held.index, held);
    }

    /// A live slot, if it still is of that generation.
    pub(crate) fn live(&self, index: u32, generation: u64) -> Option<&P> {
        self.live.get(&index).filter(|held| held.generation == generation).map(|held| &held.part)
    }

    /// Takes a slot out of use; it is to leave.
    pub(crate) fn retire(&mut self, index: u32, generation: u64) -> Option<Held<P>> {
        self.live(index, generation)?;
        self.live.remove(&index)
    }

    /// Something begins to be torn down.
    pub(crate) fn leave(&mut self) {
        self.leaving += 1;
    }

    /// It is gone.
    pub(crate) fn left(&mut self, index: u32) {
        self.leaving -= 1;
        self.give_back(index);
    }

    /// It could not be torn down.
    pub(crate) fn stuck(&mut self, name: String, index: u32) {
        self.leaving -= 1;
        self.leftover.insert(name, index);
    }

    /// Takes a leftover for adoption or removal.
    pub(crate) fn take_leftover(&mut self, name: &str) -> Option<u32> {
        self.leftover.remove(name)
    }

    /// It could not be adopted.
    pub(crate) fn return_leftover(&mut self, name: String, index: u32) {
        self.leftover.insert(name, index);
    }

    /// Takes all leftovers; each begins to leave.
    pub(crate) fn condemn_leftovers(&mut self) -> BTreeMap<String, u32> {
        let all = std::mem::take(&mut self.leftover);
        self.leaving += all.len();
        all
    }

    /// Gives out no more slots. What was in the pool is to leave.
    pub(crate) fn close(&mut self) -> Vec<Held<P>> {
        self.closed = true;
        self.ready.drain(..).collect()
    }

    pub(crate) fn ready(&self) -> usize {
        self.ready.len()
    }

    /// Whether the pool has what it can have.
    pub(crate) fn is_full(&self, prepared: usize) -> bool {
        self.ready.len() >= prepared || (self.free.is_empty() && self.building == 0)
    }

    /// Whether nothing is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.building + self.leaving == 0
    }

    /// Whether no slot exists that anybody may still want.
    pub(crate) fn is_empty(&self) -> bool {
        self.live.is_empty() && self.leftover.is_empty()
    }

    fn give_back(&mut self, index: u32) {
        let elsewhere = self.leftover.values().any(|other| *other == index);
        if index < self.slots && !elsewhere {
            self.free.push_back(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SLOTS: u32 = 6;

    /// Follows the states that the ledger only counts.
    struct World {
        ledger: Ledger<()>,
        building: Vec<u32>,
        stocking: Vec<u32>,
        leaving: Vec<(String, u32)>,
        generation: u64,
    }

    impl World {
        fn held(&mut self, index: u32) -> Held<()> {
            self.generation += 1;
            Held { index, generation: self.generation, part: () }
        }

        fn leave(&mut self, held: &Held<()>) {
            self.ledger.leave();
            self.leaving.push((format!("{}-{}", held.index, held.generation), held.index));
        }

        fn step(&mut self, operation: u8, pick: usize) {
            let choose = |list: &[u32]| (!list.is_empty()).then(|| pick % list.len());
            match operation {
                0 => match self.ledger.next() {
                    Next::Ready(held) => self.ledger.go_live(held),
                    Next::Build(index) => self.building.push(index),
                    Next::Wait | Next::Exhausted | Next::Closed => {}
                },
                1 => self.stocking.extend(self.ledger.wanted_in_stock(2)),
                2 => {
                    if let Some(n) = choose(&self.building) {
                        let index = self.building.swap_remove(n);
                        let held = self.held(index);
                        self.ledger.build_handed_over();
                        self.ledger.go_live(held);
                    }
                }
                3 => {
                    if let Some(n) = choose(&self.stocking) {
                        let index = self.stocking.swap_remove(n);
                        let held = self.held(index);
                        if let Some(back) = self.ledger.stock(held) {
                            self.leave(&back);
                        }
                    }
                }
                4 => {
                    if let Some(n) = choose(&self.building) {
                        let index = self.building.swap_remove(n);
                        self.ledger.build_failed(index);
                    }
                }
                5 => {
                    let live: Vec<(u32, u64)> =
                        self.ledger.live.values().map(|h| (h.index, h.generation)).collect();
                    if !live.is_empty() {
                        let (index, generation) = live[pick % live.len()];
                        assert!(self.ledger.retire(index, generation + 1).is_none());
                        let held = self.ledger.retire(index, generation).unwrap();
                        assert!(self.ledger.retire(index, generation).is_none());
                        self.leave(&held);
                    }
                }
                6 | 7 => {
                    if !self.leaving.is_empty() {
                        let n = pick % self.leaving.len();
                        let (name, index) = self.leaving.swap_remove(n);
                        if operation == 6 { self.ledger.left(index) } else { self.ledger.stuck(name, index) }
                    }
                }
                8 => self.leaving.extend(self.ledger.condemn_leftovers()),
                9 => {
                    let name = self.ledger.leftover.keys().nth(pick % SLOTS as usize).cloned();
                    if let Some((name, index)) =
                        name.and_then(|n| Some((n.clone(), self.ledger.take_leftover(&n)?)))
                    {
                        if pick.is_multiple_of(2) && !self.places().contains(&index) {
                            let held = self.held(index);
                            self.ledger.go_live(held);
                        } else {
                            self.ledger.return_leftover(name, index);
                        }
                    }
                }
                _ => {
                    for held in self.ledger.close() {
                        self.leave(&held);
                    }
                }
            }
        }

        /// Every index, once for each place where it is.
        fn places(&self) -> Vec<u32> {
            let l = &self.ledger;
            let mut all: Vec<u32> = l.free.iter().copied().collect();
            all.extend(l.ready.iter().map(|h| h.index));
            all.extend(l.live.keys());
            all.extend(l.leftover.values());
            all.extend(self.building.iter().chain(&self.stocking));
            all.extend(self.leaving.iter().map(|(_, index)| *index));
            all.sort_unstable();
            all
        }
    }

    proptest! {
        #[test]
        fn an_index_is_always_in_exactly_one_place(
            operations in prop::collection::vec((0u8..=10, any::<usize>()), 0..200), closes: bool,
        ) {
            let leftover = BTreeMap::from([("1-0".to_owned(), 1), ("99-0".to_owned(), 99)]);
            let ledger = Ledger::new(SLOTS, leftover);
            let mut world = World { ledger, building: vec![], stocking: vec![], leaving: vec![], generation: 0 };
            for (operation, pick) in operations {
                // Closing ends everything, so only some runs do it.
                world.step(if operation == 10 && !closes { 0 } else { operation }, pick);
                let places: Vec<u32> = world.places().into_iter().filter(|i| *i < SLOTS).collect();
                prop_assert_eq!(&places, &(0..SLOTS).collect::<Vec<_>>());
                prop_assert_eq!(world.ledger.building, world.building.len() + world.stocking.len());
                prop_assert_eq!(world.ledger.leaving, world.leaving.len());
            }
            // When all is released and torn down, all is free again, and nothing beyond the bound.
            world.leaving.extend(world.ledger.condemn_leftovers());
            for _ in 0..100 {
                for operation in [2, 3, 5, 6] {
                    world.step(operation, 0);
                }
            }
            for held in world.ledger.close() {
                world.leave(&held);
            }
            while !world.leaving.is_empty() {
                world.step(6, 0);
            }
            prop_assert!(world.ledger.is_idle() && world.ledger.is_empty());
            let mut free: Vec<u32> = world.ledger.free.iter().copied().collect();
            free.sort_unstable();
            prop_assert_eq!(free, (0..SLOTS).collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_last_slot_is_waited_for_only_while_one_is_on_its_way() {
        let mut ledger: Ledger<()> = Ledger::new(1, BTreeMap::new());
        let Next::Build(index) = ledger.next() else { panic!() };
        assert!(matches!(ledger.next(), Next::Wait));
        ledger.build_handed_over();
        ledger.go_live(Held { index, generation: 1, part: () });
        assert!(matches!(ledger.next(), Next::Exhausted));
        assert!(ledger.retire(index, 1).is_some());
        ledger.leave();
        assert!(matches!(ledger.next(), Next::Wait));
        ledger.left(index);
        assert!(matches!(ledger.next(), Next::Build(0)));
        assert!(ledger.close().is_empty());
        assert!(matches!(ledger.next(), Next::Closed));
    }
}
