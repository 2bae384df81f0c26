//! The index of the upper: mappings that later ones overwrite.

use std::collections::BTreeMap;

use crate::mapping::{Mapping, push_joined};

/// Disjoint mappings by their first sector; an inserted one displaces what it overlaps.
#[derive(Debug, Default)]
pub(crate) struct LogIndex {
    map: BTreeMap<u64, Mapping>,
}

impl LogIndex {
    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    /// All mappings in order, neighbours that continue each other joined.
    pub(crate) fn entries(&self) -> Vec<Mapping> {
        let mut entries = Vec::with_capacity(self.map.len());
        self.map.values().for_each(|&m| push_joined(&mut entries, m));
        entries
    }

    pub(crate) fn insert(&mut self, mapping: Mapping) {
        let (start, end) = (mapping.start(), mapping.end());
        let mut inserted = mapping;
        if let Some((&key, &before)) = self.map.range(..start).next_back() {
            if before.end() > end {
                self.map.insert(end, before.tail_from(end));
            }
            if before.end() >= start {
                let head = before.head_to(start);
                // A sequential writer grows one run instead of adding one entry per request.
                if let Some(joined) = head.joined(mapping) {
                    self.map.remove(&key);
                    inserted = joined;
                } else {
                    self.map.insert(key, head);
                }
            }
        }
        while let Some((&key, &covered)) = self.map.range(start..end).next() {
            self.map.remove(&key);
            if covered.end() > end {
                self.map.insert(end, covered.tail_from(end));
            }
        }
        self.map.insert(inserted.start(), inserted);
    }

    /// Calls `f` with each mapping that overlaps the sectors `start..end`, clipped to them, in order.
    pub(crate) fn visit(&self, start: u64, end: u64, mut f: impl FnMut(Mapping)) {
        if start >= end {
            return;
        }
        if let Some((_, &before)) = self.map.range(..start).next_back()
            && before.end() > start
        {
            f(before.clip(start, end));
        }
        for (_, &mapping) in self.map.range(start..end) {
            f(mapping.clip(start, end));
        }
    }

    /// The place of `start..end` in the data file when this index holds it as one stored run.
    pub(crate) fn stored_at(&self, start: u64, end: u64) -> Option<u64> {
        let (_, &mapping) = self.map.range(..=start).next_back()?;
        (!mapping.is_zero() && mapping.end() >= end).then(|| mapping.place() + (start - mapping.start()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_into_the_middle_splits_what_was_there() {
        let mut index = LogIndex::default();
        index.insert(Mapping::data(0, 100, 8));
        index.insert(Mapping::data(40, 20, 500));
        index.insert(Mapping::zero(90, 20, 600));
        let seen: Vec<_> = index.entries().iter().map(|m| (m.start(), m.end(), m.place())).collect();
        assert_eq!(seen, [(0, 40, 8), (40, 60, 500), (60, 90, 68), (90, 110, 600)]);
        assert_eq!(index.stored_at(60, 90), Some(68));
        assert_eq!(index.stored_at(70, 80), Some(78));
        assert_eq!(index.stored_at(59, 61), None);
        assert_eq!(index.stored_at(95, 96), None);
    }

    #[test]
    fn sequential_writes_become_one_run() {
        let mut index = LogIndex::default();
        (0..10).for_each(|i| index.insert(Mapping::data(i * 8, 8, 8 + i * 8)));
        assert_eq!(index.len(), 1);
    }
}
