//! What `blocks.index` says about one slot of `blocks.data`.
//!
//! ```text
//!   blocks.index = head, 4096 bytes: "AENVBC01", u32 block size, zeroes
//!                  then 256 bytes for each slot, all zero when it holds nothing:
//!     0  u32  0x4243_4541       4  u32  crc32c of bytes 8..256
//!     8  sha256 of the layer   40  u64  bytes of the layer
//!    48  u32  block number     52  u32  bytes of the block
//!    56  u64  sequence number of the fill
//!    64  u32 × 32              crc32c of each 4 KiB of the block (the last may be shorter)
//!   192  u32  1: part of a layer whose sha256 was right     196 zeroes
//! ```
//! Little-endian. Entries don't straddle disk sectors.

use crate::remote::Digest;

/// Bytes of a block.
pub const BLOCK: usize = 128 << 10;
/// Bytes under one checksum.
pub(crate) const PIECE: usize = 4096;
const PIECES: usize = BLOCK / PIECE;
pub(crate) const ENTRY: usize = 256;
pub(crate) const HEAD: usize = 4096;
const MAGIC: u32 = 0x4243_4541;

/// Checksums of a block, by piece.
pub(crate) type Sums = [u32; PIECES];

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) layer: Digest,
    pub(crate) size: u64,
    pub(crate) block: u32,
    pub(crate) len: u32,
    pub(crate) sequence: u64,
    pub(crate) sums: Sums,
    pub(crate) verified: bool,
}

pub(crate) fn head() -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..8].copy_from_slice(b"AENVBC01");
    head[8..12].copy_from_slice(&u32::try_from(BLOCK).unwrap_or(0).to_le_bytes());
    head
}

pub(crate) fn sums(block: &[u8]) -> Sums {
    let mut sums = [0; PIECES];
    for (sum, piece) in sums.iter_mut().zip(block.chunks(PIECE)) {
        *sum = crc32c::crc32c(piece);
    }
    sums
}

impl Entry {
    pub(crate) fn encode(&self) -> [u8; ENTRY] {
        let mut out = [0; ENTRY];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC.to_le_bytes());
        put(8, &self.layer.0);
        put(40, &self.size.to_le_bytes());
        put(48, &self.block.to_le_bytes());
        put(52, &self.len.to_le_bytes());
        put(56, &self.sequence.to_le_bytes());
        for (n, sum) in self.sums.iter().enumerate() {
            put(64 + 4 * n, &sum.to_le_bytes());
        }
        put(192, &u32::from(self.verified).to_le_bytes());
        let sum = crc32c::crc32c(&out[8..]);
        out[4..8].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// `None` for a slot without a block, and for one whose entry is damaged or makes no sense.
    pub(crate) fn decode(bytes: &[u8; ENTRY]) -> Option<Self> {
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if u32_at(0) != MAGIC || u32_at(4) != crc32c::crc32c(&bytes[8..]) {
            return None;
        }
        let mut sums = [0; PIECES];
        for (n, sum) in sums.iter_mut().enumerate() {
            *sum = u32_at(64 + 4 * n);
        }
        let layer = Digest(bytes[8..40].try_into().expect("32 bytes"));
        let entry = Self {
            layer,
            size: u64_at(40),
            block: u32_at(48),
            len: u32_at(52),
            sequence: u64_at(56),
            sums,
            verified: u32_at(192) == 1,
        };
        (block_len(entry.size, entry.block) == Some(entry.len)).then_some(entry)
    }
}

/// Bytes of block `block` of a layer of `size` bytes, if there is such a block.
pub(crate) fn block_len(size: u64, block: u32) -> Option<u32> {
    let start = u64::from(block) * BLOCK as u64;
    let left = size.checked_sub(start).filter(|left| *left > 0)?;
    u32::try_from(left.min(BLOCK as u64)).ok()
}

/// Blocks of a layer of `size` bytes; `None` for more than can be numbered.
pub(crate) fn block_count(size: u64) -> Option<u32> {
    u32::try_from(size.div_ceil(BLOCK as u64)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_read_back_and_no_flipped_bit_of_it_is() {
        let block: Vec<u8> = (0..5000u32).map(|n| n.to_le_bytes()[0]).collect();
        let entry = Entry {
            layer: Digest::of(b"x"),
            size: BLOCK as u64 + 5000,
            block: 1,
            len: 5000,
            sequence: 7,
            sums: sums(&block),
            verified: true,
        };
        let bytes = entry.encode();
        assert_eq!(Entry::decode(&bytes), Some(entry));
        for bit in 0..ENTRY * 8 {
            let mut bytes = bytes;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Entry::decode(&bytes), None, "bit {bit}");
        }
        assert_eq!(Entry::decode(&[0; ENTRY]), None);
    }
}
