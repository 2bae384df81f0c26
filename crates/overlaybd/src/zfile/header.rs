//! The 512-byte header and trailer of a ZFile.
//!
//! ```text
//!    0  magic          8   "ZFile\0\1\0"
//!    8  magic         16   74756a69-2e79-7966-4041-6c6962616261 (as bytes)
//!   24  size           4   96
//!   28  digest         4   checksum of these 512 bytes with this field 0; when flag 4 is set
//!   32  flags          8   bit 0 header, 1 data file, 2 sealed, 3 header filled in, 4 digests, 5 compressed table
//!   40  index_offset   8   bytes
//!   48  index_size     8   entries of the jump table
//!   56  original_size  8   bytes
//!   64  index_crc      4   checksum of the jump table; when flag 4 is set
//!   72  block_size     4   bytes
//!   76  algorithm      1   1 lz4, 2 zstd
//!   77  level          1
//!   78  use_dict       1
//!   84  dict_size      4
//!   88  verify         1   a checksum follows each block
//!   89  zeroes to 512
//! ```
//! Little-endian.

use super::codec::Algorithm;
use super::{MAX_BLOCK, MIN_BLOCK, checksum};
use crate::Error;

/// Bytes taken by a header or trailer.
pub const ZFILE_HEADER_LEN: u64 = 512;

const SPACE: usize = 512;
const MAGIC: [u8; 24] = *b"ZFile\0\x01\0tuji.yyf@Alibaba";
const STRUCT_SIZE: u32 = 96;

const FLAG_HEADER: u64 = 1;
const FLAG_DATA: u64 = 1 << 1;
const FLAG_SEALED: u64 = 1 << 2;
const FLAG_FILLED: u64 = 1 << 3;
const FLAG_DIGEST: u64 = 1 << 4;
const FLAG_INDEX_COMPRESSED: u64 = 1 << 5;
const KNOWN_FLAGS: u64 = (1 << 6) - 1;

/// Which of the two it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ZFilePart {
    /// The first 512 bytes; `filled` when they also say where the jump table is.
    Header {
        /// Whether the fields after the flags count.
        filled: bool,
    },
    /// The last 512 bytes.
    Trailer,
}

/// The meaning of a header or trailer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZFileHeader {
    /// Which of the two it is.
    pub part: ZFilePart,
    /// Where the jump table starts, in bytes.
    pub index_offset: u64,
    /// Entries of the jump table, which is blocks of the file.
    pub blocks: u64,
    /// Bytes of the file before compression.
    pub original_size: u64,
    /// Checksum of the jump table; `None` in files without digests.
    pub index_crc: Option<u32>,
    /// Bytes of a block before compression, a power of two from 4096 to 65536.
    pub block_size: u32,
    /// How blocks are compressed.
    pub algorithm: Algorithm,
    /// Whether a checksum follows each block.
    pub checksums: bool,
}

impl ZFileHeader {
    /// Whether `bytes` begin as a ZFile does.
    pub fn recognises(bytes: &[u8]) -> bool {
        bytes.starts_with(&MAGIC)
    }

    /// The 512 bytes on disk, with digests.
    pub fn encode(&self) -> [u8; 512] {
        let mut out = [0u8; SPACE];
        let flags = FLAG_DATA
            | FLAG_DIGEST
            | match self.part {
                ZFilePart::Header { filled: false } => FLAG_HEADER,
                ZFilePart::Header { filled: true } => FLAG_HEADER | FLAG_FILLED,
                ZFilePart::Trailer => FLAG_SEALED,
            };
        out[..24].copy_from_slice(&MAGIC);
        out[24..28].copy_from_slice(&STRUCT_SIZE.to_le_bytes());
        out[32..40].copy_from_slice(&flags.to_le_bytes());
        out[40..48].copy_from_slice(&self.index_offset.to_le_bytes());
        out[48..56].copy_from_slice(&self.blocks.to_le_bytes());
        out[56..64].copy_from_slice(&self.original_size.to_le_bytes());
        out[64..68].copy_from_slice(&self.index_crc.unwrap_or_default().to_le_bytes());
        out[72..76].copy_from_slice(&self.block_size.to_le_bytes());
        out[76] = self.algorithm.number();
        out[88] = u8::from(self.checksums);
        let digest = checksum(0, &out);
        out[28..32].copy_from_slice(&digest.to_le_bytes());
        out
    }

    /// Reads and checks the 512 bytes at byte `at` of the file, which should be its trailer or else its header.
    /// The numbers are checked against each other and our bounds; against the file's length by who knows it.
    pub fn decode(bytes: &[u8; 512], at: u64, trailer: bool) -> Result<Self, Error> {
        let place = if trailer { "trailer" } else { "header" };
        let bad = |field: u64, what: String| {
            Err(Error::BadZFile { offset: at + field, what: format!("the {place} {what}") })
        };
        if !Self::recognises(bytes) {
            return bad(0, "does not start with ZFile's magic bytes".into());
        }
        let size = le32(bytes, 24);
        if !(STRUCT_SIZE..=512).contains(&size) {
            return bad(24, format!("says it is {size} bytes, it takes from {STRUCT_SIZE} to 512"));
        }
        let flags = le64(bytes, 32);
        let digests = flags & FLAG_DIGEST != 0;
        if digests {
            let expected = le32(bytes, 28);
            let mut copy = *bytes;
            copy[28..32].fill(0);
            let got = checksum(0, &copy);
            if got != expected {
                return bad(28, format!("is damaged: its digest is {got:08x}, recorded is {expected:08x}"));
            }
        }
        if flags & !KNOWN_FLAGS != 0 {
            return bad(32, format!("has flags {flags:#x} of a later version"));
        }
        if flags & FLAG_DATA == 0 || (flags & FLAG_HEADER != 0) == trailer {
            return bad(32, format!("has flags {flags:#x}, which don't make it the {place} of a data file"));
        }
        if trailer && flags & FLAG_SEALED == 0 {
            return bad(32, "is not sealed: its writer did not finish".into());
        }
        let part =
            if trailer { ZFilePart::Trailer } else { ZFilePart::Header { filled: flags & FLAG_FILLED != 0 } };
        if flags & FLAG_INDEX_COMPRESSED != 0 {
            return bad(32, "says the jump table is compressed, which is not supported".into());
        }
        let block_size = le32(bytes, 72);
        if !block_size.is_power_of_two() || !(MIN_BLOCK..=MAX_BLOCK).contains(&block_size) {
            return bad(
                72,
                format!(
                    "has blocks of {block_size} bytes, not a power of two from {MIN_BLOCK} to {MAX_BLOCK}"
                ),
            );
        }
        let Some(algorithm) = Algorithm::of_number(bytes[76]) else {
            return bad(
                76,
                format!("names compression algorithm {}, 1 (lz4) and 2 (zstd) are known", bytes[76]),
            );
        };
        if bytes[78] != 0 || le32(bytes, 84) != 0 {
            return bad(78, "asks for a dictionary, which is not supported".into());
        }
        let header = Self {
            part,
            index_offset: le64(bytes, 40),
            blocks: le64(bytes, 48),
            original_size: le64(bytes, 56),
            index_crc: digests.then(|| le32(bytes, 64)),
            block_size,
            algorithm,
            checksums: bytes[88] != 0,
        };
        let needed = header.original_size.div_ceil(u64::from(block_size));
        if part != (ZFilePart::Header { filled: false }) && header.blocks != needed {
            return bad(
                48,
                format!(
                    "counts {} blocks, {} bytes in blocks of {block_size} are {needed}",
                    header.blocks, header.original_size
                ),
            );
        }
        Ok(header)
    }
}

fn le32(bytes: &[u8; 512], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn le64(bytes: &[u8; 512], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trailer() -> ZFileHeader {
        ZFileHeader {
            part: ZFilePart::Trailer,
            index_offset: 0x0102_0304,
            blocks: 3,
            original_size: 9000,
            index_crc: Some(0xaabb_ccdd),
            block_size: 4096,
            algorithm: Algorithm::Zstd,
            checksums: true,
        }
    }

    /// `value` at `at`, with the digest made right again, so that what is said of the field itself is seen.
    fn refusal(at: usize, value: &[u8]) -> String {
        let mut bytes = trailer().encode();
        bytes[at..at + value.len()].copy_from_slice(value);
        if at != 28 {
            bytes[28..32].fill(0);
            let digest = checksum(0, &bytes);
            bytes[28..32].copy_from_slice(&digest.to_le_bytes());
        }
        ZFileHeader::decode(&bytes, 1000, true).unwrap_err().to_string()
    }

    #[test]
    fn a_trailer_has_exactly_these_bytes() {
        let bytes = trailer().encode();
        assert_eq!(
            hex::encode(&bytes[..28]),
            "5a46696c65000100".to_owned() + "74756a692e79796640416c6962616261" + "60000000"
        );
        assert_eq!(
            hex::encode(&bytes[32..96]),
            concat!(
                "1600000000000000",
                "0403020100000000",
                "0300000000000000",
                "2823000000000000",
                "ddccbbaa00000000",
                "00100000",
                "02000000000000000000000001000000",
                "00000000",
            )
        );
        assert!(bytes[96..].iter().all(|&b| b == 0));
        assert_eq!(ZFileHeader::decode(&bytes, 0, true).unwrap(), trailer());
    }

    #[test]
    fn hostile_trailers_are_refused_with_place_and_reason() {
        assert!(refusal(0, b"X").contains("magic"));
        assert!(refusal(24, &[9]).contains("9 bytes"));
        assert!(refusal(28, &[1]).contains("digest"));
        assert!(refusal(32, &[0x17]).contains("flags"));
        assert!(refusal(32, &[0x12]).contains("not sealed"));
        assert!(refusal(32, &[0x36]).contains("compressed"));
        assert!(refusal(33, &[1]).contains("later version"));
        assert!(refusal(48, &[4]).contains("counts 4 blocks"));
        assert!(refusal(56, &[0xff; 8]).contains("counts 3 blocks"));
        assert!(refusal(72, &[0, 2]).contains("blocks of 512"));
        assert!(refusal(72, &[1]).contains("power of two"));
        assert!(refusal(72, &[0, 0, 2]).contains("blocks of 131072"));
        let algorithm = refusal(76, &[7]);
        assert!(algorithm.contains("algorithm 7") && algorithm.contains("1076"), "{algorithm}");
        assert!(refusal(78, &[1]).contains("dictionary"));
        assert!(refusal(84, &[1]).contains("dictionary"));
    }
}
