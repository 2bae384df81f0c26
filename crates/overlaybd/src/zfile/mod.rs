//! ZFile: a file compressed in blocks, readable at any position. Layers in registries are usually LSMT inside it.
//!
//! ```text
//!   header 512 B | block 0 [crc] | block 1 [crc] | … | jump table | trailer 512 B
//!                                                     u32 per block: its bytes in the file, checksum included
//! ```
//! Each block holds `block_size` bytes (the last one the rest), compressed by itself with LZ4's block format or as
//! one zstd frame. With `verify` set, a checksum of the *compressed* bytes follows each block. Header, trailer and jump
//! table carry checksums when flag 4 is set; files of old writers have none.
//!
//! All of them are CRC-32C's register as it is: it starts from 0 (for blocks from 100007) instead of all ones and is
//! not inverted at the end, so they differ from what a library calls CRC-32C.
//!
//! A header that was written before the data has only its flags filled in (flag 3 is off): such a file is described
//! by its trailer. Source: `zfile/format_spec.md` and `zfile.cpp` of containerd/overlaybd.
//!
//! What upstream's format has room for and its code never writes is refused by name: a dictionary, a compressed
//! jump table, lzo. An incompressible block is stored expanded; upstream's reader can't read one that grows past
//! 64 KiB, so files for it should have blocks of at most 32 KiB.

mod block_cache;
mod codec;
mod header;
mod jump_table;
mod reader;
mod sink;
mod workers;
mod writer;

pub use block_cache::BlockCache;
pub use codec::Algorithm;
pub use header::{ZFILE_HEADER_LEN, ZFileHeader, ZFilePart};
pub use reader::ZFileReader;
pub use sink::ZFileSink;
pub use writer::{ZFileOptions, ZFileSummary, ZFileWriter, compress_to_zfile};

/// Smallest block that is read or written, in bytes.
pub const MIN_BLOCK: u32 = 4096;

/// Largest block that is read or written, in bytes.
pub const MAX_BLOCK: u32 = 65536;

/// Most blocks we read or write: 1 TiB in blocks of 64 KiB, 64 GiB in blocks of 4 KiB; 76 MB of memory.
const MAX_BLOCKS: u64 = 16 << 20;

/// Bytes of a block's checksum.
const CRC_LEN: usize = 4;

/// What a block's checksum starts from.
const CRC_SEED: u32 = 100_007;

/// The checksum that follows a compressed block.
fn block_crc(compressed: &[u8]) -> u32 {
    checksum(CRC_SEED, compressed)
}

/// `crc` continued over `bytes`, without the inversions at start and end that CRC-32C usually has.
fn checksum(crc: u32, bytes: &[u8]) -> u32 {
    !crc32c::crc32c_append(!crc, bytes)
}
