//! One entry of an index: a run of sectors and where its bytes lie.
//!
//! ```text
//!  word 0   63 ........ 50 | 49 ........................ 0      little-endian
//!           length (14)    | logical sector (50)
//!  word 1   63 ... 56 | 55 | 54 ........................ 0
//!           tag (8)   | Z  | sector in the data file (55)       Z: zeroes, no data
//! ```
//! Source: `format_spec.md` and `index.h` of containerd/overlaybd. The tag is 0 on disk; in memory it is the layer's
//! place in its stack.

use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a sector, the unit of every offset and length in an index.
pub const SECTOR: u64 = 512;

/// The longest run one mapping can describe, in sectors (14 bits).
pub const MAX_MAPPING_SECTORS: u64 = (1 << 14) - 1;

/// The run that writers use for long ranges: the largest that keeps 4 KiB alignment.
pub(crate) const RUN_SECTORS: u64 = MAX_MAPPING_SECTORS / 8 * 8;

/// The logical sector that marks an entry as padding.
const PADDING_OFFSET: u64 = (1 << 50) - 1;
const OFFSET_MASK: u64 = (1 << 50) - 1;
const PLACE_MASK: u64 = (1 << 55) - 1;
const ZERO_BIT: u64 = 1 << 55;

/// A run of sectors `start..end` that is either zeroes or stored at `place` in its layer's data file.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Mapping {
    run: U64,
    map: U64,
}

impl Mapping {
    /// `len` sectors from logical sector `start` are stored from sector `place` of the data file on.
    /// The arguments are cut to their bit widths; callers keep `len` within [`MAX_MAPPING_SECTORS`].
    pub fn data(start: u64, len: u64, place: u64) -> Self {
        debug_assert!(len <= MAX_MAPPING_SECTORS && start <= OFFSET_MASK && place <= PLACE_MASK);
        Self { run: U64::new(start & OFFSET_MASK | len << 50), map: U64::new(place & PLACE_MASK) }
    }

    /// `len` sectors from logical sector `start` read as zeroes. `place` is where data would have been appended:
    /// upstream's loader checks that it lies in the data section.
    pub fn zero(start: u64, len: u64, place: u64) -> Self {
        debug_assert!(len <= MAX_MAPPING_SECTORS && start <= OFFSET_MASK && place <= PLACE_MASK);
        Self { run: U64::new(start & OFFSET_MASK | len << 50), map: U64::new(place & PLACE_MASK | ZERO_BIT) }
    }

    /// An entry that readers skip; `payload` (55 bits) is ours to use, upstream ignores it.
    pub(crate) fn padding(payload: u64) -> Self {
        Self { run: U64::new(PADDING_OFFSET), map: U64::new(payload & PLACE_MASK) }
    }

    pub(crate) fn is_padding(self) -> bool {
        self.start() == PADDING_OFFSET
    }

    /// First logical sector.
    pub fn start(self) -> u64 {
        self.run.get() & OFFSET_MASK
    }

    /// Length in sectors.
    pub fn sectors(self) -> u64 {
        self.run.get() >> 50
    }

    /// One past the last logical sector.
    pub fn end(self) -> u64 {
        self.start() + self.sectors()
    }

    /// First sector in the data file; meaningless to readers when [`is_zero`](Self::is_zero).
    pub fn place(self) -> u64 {
        self.map.get() & PLACE_MASK
    }

    /// One past the last sector used in the data file.
    pub(crate) fn place_end(self) -> u64 {
        if self.is_zero() { self.place() } else { self.place() + self.sectors() }
    }

    /// Whether the run reads as zeroes.
    pub fn is_zero(self) -> bool {
        self.map.get() & ZERO_BIT != 0
    }

    /// The layer's place in its stack (0 is the bottom); 0 in a single layer.
    pub fn tag(self) -> u8 {
        self.map.get().to_le_bytes()[7]
    }

    pub(crate) fn with_tag(self, tag: u8) -> Self {
        Self { run: self.run, map: U64::new(self.map.get() & (PLACE_MASK | ZERO_BIT) | u64::from(tag) << 56) }
    }

    /// The part before logical sector `end`, which lies inside the run.
    pub(crate) fn head_to(self, end: u64) -> Self {
        debug_assert!(self.start() < end && end <= self.end());
        Self { run: U64::new(self.start() | (end - self.start()) << 50), map: self.map }
    }

    /// The part from logical sector `start` on, which lies inside the run.
    pub(crate) fn tail_from(self, start: u64) -> Self {
        debug_assert!(self.start() <= start && start < self.end());
        let skipped = start - self.start();
        let place = if self.is_zero() { self.place() } else { self.place() + skipped };
        Self {
            run: U64::new(start | (self.sectors() - skipped) << 50),
            map: U64::new(self.map.get() & !PLACE_MASK | place),
        }
    }

    /// The part inside `start..end`, which overlaps the run.
    pub(crate) fn clip(self, start: u64, end: u64) -> Self {
        let tail = if start > self.start() { self.tail_from(start) } else { self };
        if end < tail.end() { tail.head_to(end) } else { tail }
    }

    /// `self` and `next` as one run, when `next` continues it in both spaces.
    pub(crate) fn joined(self, next: Self) -> Option<Self> {
        let sectors = self.sectors() + next.sectors();
        let continues = self.end() == next.start()
            && self.is_zero() == next.is_zero()
            && self.tag() == next.tag()
            && (self.is_zero() || self.place_end() == next.place())
            && sectors <= MAX_MAPPING_SECTORS;
        continues.then(|| Self { run: U64::new(self.start() | sectors << 50), map: self.map })
    }
}

impl std::fmt::Debug for Mapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "[{}+{}", self.start(), self.sectors())?;
        if self.is_zero() {
            write!(f, " zero")?
        } else {
            write!(f, " at {}", self.place())?
        }
        write!(f, " tag {}]", self.tag())
    }
}

/// Appends `next`, joining it with the last entry where it continues that.
pub(crate) fn push_joined(entries: &mut Vec<Mapping>, next: Mapping) {
    if let Some(last) = entries.last_mut()
        && let Some(joined) = last.joined(next)
    {
        *last = joined;
    } else {
        entries.push(next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bits_lie_where_upstream_puts_them() {
        let mapping = Mapping::data(0x1234, 0x15, 0xabcdef);
        assert_eq!(hex::encode(mapping.as_bytes()), "3412000000005400efcdab0000000000");
        assert_eq!(hex::encode(Mapping::zero(1, 1, 8).as_bytes()), "01000000000004000800000000008000");
        assert_eq!(hex::encode(Mapping::padding(0).as_bytes()), "ffffffffffff03000000000000000000");
    }

    #[test]
    fn a_clipped_run_keeps_its_bytes_in_step() {
        let clipped = Mapping::data(100, 50, 1000).with_tag(7).clip(110, 120);
        assert_eq!((clipped.start(), clipped.sectors(), clipped.place(), clipped.tag()), (110, 10, 1010, 7));
        let zero = Mapping::zero(100, 50, 1000).clip(110, 500);
        assert_eq!((zero.start(), zero.end(), zero.place()), (110, 150, 1000));
    }

    #[test]
    fn runs_join_only_when_both_spaces_continue() {
        let first = Mapping::data(0, 8, 8);
        assert!(first.joined(Mapping::data(8, 8, 16)).is_some());
        assert!(first.joined(Mapping::data(8, 8, 17)).is_none());
        assert!(first.joined(Mapping::zero(8, 8, 16)).is_none());
        assert!(
            Mapping::data(0, MAX_MAPPING_SECTORS, 8)
                .joined(Mapping::data(MAX_MAPPING_SECTORS, 1, 8 + MAX_MAPPING_SECTORS))
                .is_none()
        );
    }
}
