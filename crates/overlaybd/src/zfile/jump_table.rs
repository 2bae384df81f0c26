//! Where each compressed block lies.

use super::codec::Algorithm;
use super::header::{ZFILE_HEADER_LEN, ZFileHeader};
use super::{CRC_LEN, MAX_BLOCKS, checksum};
use crate::Error;
use crate::io::ReadAt;

/// The table is read in parts, so that a length that lies costs no memory before its bytes have arrived.
const PART: usize = 1 << 20;
/// One absolute offset is kept for so many blocks; the others are summed up.
const GROUP: usize = 16;

/// Lengths of all blocks and an absolute offset of every 16th: 4.5 bytes a block.
#[derive(Debug)]
pub(super) struct JumpTable {
    lengths: Vec<u32>,
    starts: Vec<u64>,
}

impl JumpTable {
    /// Reads and checks the table that `header` describes; everything has to lie before byte `end` of the file.
    pub(super) fn load(source: &dyn ReadAt, header: &ZFileHeader, end: u64) -> Result<Self, Error> {
        let at = header.index_offset;
        let bad = |offset: u64, what: String| Error::BadZFile { offset, what };
        if header.blocks > MAX_BLOCKS {
            return Err(Error::IndexTooLarge { got: header.blocks, max: MAX_BLOCKS });
        }
        let bytes = header.blocks * 4;
        if at < ZFILE_HEADER_LEN || at.checked_add(bytes).is_none_or(|table_end| table_end > end) {
            return Err(bad(
                at,
                format!(
                    "a jump table of {} blocks at byte {at} does not fit before byte {end}",
                    header.blocks
                ),
            ));
        }
        let shortest = if header.checksums { u32::try_from(CRC_LEN).expect("4") } else { 0 };
        let longest = Algorithm::longest(header.block_size) + shortest;
        let mut table = Self { lengths: Vec::new(), starts: Vec::new() };
        let mut place = ZFILE_HEADER_LEN;
        let mut crc = 0;
        let mut part = Vec::new();
        let mut done = 0;
        while done < bytes {
            let len = usize::try_from(bytes - done).unwrap_or(PART).min(PART);
            part.resize(len, 0);
            source.read_at(&mut part, at + done).map_err(Error::io("reading a ZFile's jump table"))?;
            crc = checksum(crc, &part);
            for word in part.chunks_exact(4) {
                let length = u32::from_le_bytes(word.try_into().expect("four bytes"));
                let block = table.lengths.len();
                if length <= shortest || length > longest {
                    return Err(bad(
                        at + done,
                        format!(
                            "block {block} takes {length} bytes by the jump table, it can take {} to {longest}",
                            shortest + 1
                        ),
                    ));
                }
                if block.is_multiple_of(GROUP) {
                    table.starts.push(place);
                }
                table.lengths.push(length);
                place += u64::from(length);
            }
            done += u64::try_from(len).expect("at most one MiB");
        }
        if header.index_crc.is_some_and(|expected| expected != crc) {
            return Err(bad(at, "the jump table is damaged: its checksum is not the recorded one".into()));
        }
        if place > at {
            return Err(bad(at, format!("the blocks reach to byte {place}, into the jump table")));
        }
        Ok(table)
    }

    pub(super) fn len(&self) -> usize {
        self.lengths.len()
    }

    /// First byte of `block` and its bytes, checksum included. `block` is below [`len`](Self::len).
    pub(super) fn locate(&self, block: usize) -> (u64, usize) {
        let group = block / GROUP;
        let before: u64 = self.lengths[group * GROUP..block].iter().map(|&len| u64::from(len)).sum();
        (self.starts[group] + before, self.length(block))
    }

    /// Bytes of `block`, checksum included.
    pub(super) fn length(&self, block: usize) -> usize {
        usize::try_from(self.lengths[block]).expect("at most 66 KB")
    }
}
