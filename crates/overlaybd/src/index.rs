//! The read-only index: mappings in order, searched in two steps.
//!
//! A sample of every 64th start stays in cache (128 KiB for a million entries), so a look-up costs one search there
//! and one among 64 neighbours, whether the index came from one layer or was merged from a hundred.

use crate::mapping::{Mapping, push_joined};

/// Most entries an index may have here: 256 MiB of memory.
pub const MAX_INDEX_ENTRIES: u64 = 16 << 20;

/// Most entries that upstream's own tools accept in a sealed layer.
pub const UPSTREAM_MAX_INDEX_ENTRIES: u64 = 1_000_000;

const SAMPLE: usize = 64;

/// Mappings in ascending order that don't overlap.
#[derive(Debug, Clone, Default)]
pub struct Index {
    entries: Vec<Mapping>,
    samples: Vec<u64>,
    stored: u64,
}

impl Index {
    /// Takes mappings that are in order and disjoint; `Err` names the first pair that is not.
    pub fn new(entries: Vec<Mapping>) -> Result<Self, (Mapping, Mapping)> {
        match entries.windows(2).find(|pair| pair[0].end() > pair[1].start()) {
            Some(pair) => Err((pair[0], pair[1])),
            None => Ok(Self::trusted(entries)),
        }
    }

    pub(crate) fn trusted(entries: Vec<Mapping>) -> Self {
        let samples = entries.iter().step_by(SAMPLE).map(|m| m.start()).collect();
        let stored = entries.iter().filter(|m| !m.is_zero()).map(|m| m.sectors()).sum();
        Self { entries, samples, stored }
    }

    /// All mappings in order.
    pub fn entries(&self) -> &[Mapping] {
        &self.entries
    }

    /// Sectors that hold data.
    pub fn stored_sectors(&self) -> u64 {
        self.stored
    }

    /// Calls `f` with each mapping that overlaps the sectors `start..end`, clipped to them, in order.
    pub fn visit(&self, start: u64, end: u64, mut f: impl FnMut(Mapping)) {
        if start >= end {
            return;
        }
        for mapping in self.entries_from(start) {
            if mapping.start() >= end {
                break;
            }
            f(mapping.clip(start, end));
        }
    }

    /// The mappings that end behind `sector`, in order.
    pub(crate) fn entries_from(&self, sector: u64) -> &[Mapping] {
        &self.entries[self.first_ending_after(sector)..]
    }

    fn first_ending_after(&self, sector: u64) -> usize {
        let block = self.samples.partition_point(|&start| start <= sector).saturating_sub(1) * SAMPLE;
        let upper = (block + SAMPLE).min(self.entries.len());
        block + self.entries[block..upper].partition_point(|m| m.end() <= sector)
    }

    /// `top` laid over `bottom`: where both map a sector, `top` counts.
    pub fn merge(top: impl ExactSizeIterator<Item = Mapping>, bottom: &[Mapping]) -> Vec<Mapping> {
        let mut out = Vec::with_capacity(top.len() + bottom.len());
        let mut rest = bottom.iter().copied();
        let mut below = rest.next();
        for over in top {
            while let Some(under) = below {
                if under.end() <= over.start() {
                    push_joined(&mut out, under);
                    below = rest.next();
                } else if under.start() < over.start() {
                    push_joined(&mut out, under.head_to(over.start()));
                    below = Some(under.tail_from(over.start()));
                } else if under.end() <= over.end() {
                    below = rest.next();
                } else {
                    if under.start() < over.end() {
                        below = Some(under.tail_from(over.end()));
                    }
                    break;
                }
            }
            push_joined(&mut out, over);
        }
        below.into_iter().chain(rest).for_each(|under| push_joined(&mut out, under));
        out
    }

    /// All `levels` (bottom first) as one, by halves: log₂(levels) passes over the entries.
    pub(crate) fn merge_all(mut levels: Vec<Vec<Mapping>>) -> Vec<Mapping> {
        while levels.len() > 1 {
            levels = levels
                .chunks(2)
                .map(|pair| match pair {
                    [bottom, top] => Self::merge(top.iter().copied(), bottom),
                    [single] => single.clone(),
                    _ => unreachable!("chunks of two"),
                })
                .collect();
        }
        levels.pop().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn visited(index: &Index, start: u64, end: u64) -> Vec<(u64, u64)> {
        let mut out = Vec::new();
        index.visit(start, end, |m| out.push((m.start(), m.end())));
        out
    }

    #[test]
    fn a_look_up_finds_what_overlaps_and_nothing_else() {
        let index = Index::new((0..1000).map(|i| Mapping::data(i * 10, 5, 8 + i * 5)).collect()).unwrap();
        assert_eq!(visited(&index, 0, 5), [(0, 5)]);
        assert_eq!(visited(&index, 5, 10), []);
        assert_eq!(visited(&index, 3, 12), [(3, 5), (10, 12)]);
        assert_eq!(visited(&index, 6404, 6411), [(6404, 6405), (6410, 6411)]);
        assert_eq!(visited(&index, 9994, 20000), [(9994, 9995)]);
        assert_eq!(visited(&index, 20000, 30000), []);
        assert_eq!(visited(&Index::default(), 0, 100), []);
    }

    #[test]
    fn overlapping_or_disordered_entries_are_refused() {
        assert!(Index::new(vec![Mapping::data(0, 10, 8), Mapping::data(9, 1, 30)]).is_err());
        assert!(Index::new(vec![Mapping::data(20, 1, 8), Mapping::data(9, 1, 30)]).is_err());
    }

    #[test]
    fn the_upper_of_two_merged_indexes_wins() {
        let bottom = [Mapping::data(0, 100, 8), Mapping::data(200, 100, 108)];
        let top = [Mapping::zero(10, 10, 8).with_tag(1), Mapping::data(90, 150, 50).with_tag(1)];
        let merged = Index::merge(top.into_iter(), &bottom);
        let seen: Vec<_> = merged.iter().map(|m| (m.start(), m.end(), m.place(), m.tag())).collect();
        assert_eq!(
            seen,
            [(0, 10, 8, 0), (10, 20, 8, 1), (20, 90, 28, 0), (90, 240, 50, 1), (240, 300, 148, 0)]
        );
    }
}
