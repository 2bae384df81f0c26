//! A ZFile read as what it was before compression.

use std::io;
use std::sync::Arc;

use super::block_cache::BlockCache;
use super::codec::Decoder;
use super::header::{ZFILE_HEADER_LEN, ZFileHeader, ZFilePart};
use super::jump_table::JumpTable;
use super::{CRC_LEN, block_crc};
use crate::Error;
use crate::io::ReadAt;

/// Compressed bytes fetched in one read, about: long reads become few requests without unbounded buffers.
const FETCH: usize = 256 << 10;
/// Decoded bytes kept for a file that shares no cache.
const OWN_CACHE: usize = 1 << 20;

/// The original bytes of a ZFile. Every block's checksum is checked before it is decoded; a damaged block is
/// distrusted and read once more, then `InvalidData` naming block and offset; nothing of it is kept.
pub struct ZFileReader {
    source: Arc<dyn ReadAt>,
    header: ZFileHeader,
    table: JumpTable,
    decoder: Decoder,
    cache: Arc<BlockCache>,
    /// This file's number in the cache.
    file: u64,
    block_size: usize,
}

impl ZFileReader {
    /// Opens a ZFile. Nothing in it is trusted: magic, digests, kind and every size are checked against the file's
    /// length and our bounds before memory is taken for them.
    pub fn open(source: Arc<dyn ReadAt>) -> Result<Self, Error> {
        Self::open_with(source, Arc::new(BlockCache::new(OWN_CACHE)))
    }

    /// Like [`open`](Self::open), with a cache of decoded blocks that other files may share.
    pub fn open_with(source: Arc<dyn ReadAt>, cache: Arc<BlockCache>) -> Result<Self, Error> {
        match Self::try_open(source.clone(), cache.clone()) {
            Err(Error::BadZFile { .. }) => {
                source.distrust(0, u64::MAX);
                Self::try_open(source, cache)
            }
            opened => opened,
        }
    }

    fn try_open(source: Arc<dyn ReadAt>, cache: Arc<BlockCache>) -> Result<Self, Error> {
        let size = source.size().map_err(Error::io("reading the ZFile's size"))?;
        let bad = |offset: u64, what: String| Error::BadZFile { offset, what };
        if size < ZFILE_HEADER_LEN {
            return Err(bad(0, format!("{size} bytes are too few for a header")));
        }
        let mut header = Self::read_header(&*source, 0, false)?;
        let mut end = size;
        if header.part == (ZFilePart::Header { filled: false }) {
            if size < 2 * ZFILE_HEADER_LEN {
                return Err(bad(size, format!("{size} bytes are too few for a header and a trailer")));
            }
            end = size - ZFILE_HEADER_LEN;
            header = Self::read_header(&*source, end, true)?;
        }
        let table = JumpTable::load(&*source, &header, end)?;
        let block_size = usize::try_from(header.block_size).expect("at most 64 KiB");
        Ok(Self {
            source,
            table,
            decoder: Decoder::new(header.algorithm),
            file: cache.join(),
            cache,
            block_size,
            header,
        })
    }

    /// What the file says of itself.
    pub fn header(&self) -> &ZFileHeader {
        &self.header
    }

    /// Bytes before compression.
    pub fn original_size(&self) -> u64 {
        self.header.original_size
    }

    fn read_header(source: &dyn ReadAt, at: u64, trailer: bool) -> Result<ZFileHeader, Error> {
        let mut bytes = [0u8; 512];
        source.read_at(&mut bytes, at).map_err(Error::io("reading a ZFile's header or trailer"))?;
        ZFileHeader::decode(&bytes, at, trailer)
    }

    /// Bytes of `block` before compression.
    fn original_len(&self, block: usize) -> usize {
        let start = u64::try_from(block).unwrap_or(u64::MAX) * u64::from(self.header.block_size);
        usize::try_from(self.header.original_size - start).unwrap_or(usize::MAX).min(self.block_size)
    }

    /// Like [`decode`](Self::decode), with a second try on bytes fetched anew.
    fn decode_or_refetch(&self, block: usize, place: u64, stored: &[u8], out: &mut [u8]) -> io::Result<()> {
        if self.decode(block, place, stored, out).is_ok() {
            return Ok(());
        }
        self.source.distrust(place, u64::try_from(stored.len()).expect("a slice's length"));
        let mut again = vec![0; stored.len()];
        self.source.read_at(&mut again, place)?;
        self.decode(block, place, &again, out)
    }

    /// Checks and decodes one block's bytes as they are at `place` in the file into `out`, which it fills.
    fn decode(&self, block: usize, place: u64, stored: &[u8], out: &mut [u8]) -> io::Result<()> {
        let damaged = |what: String| io::Error::from(Error::BadZFile { offset: place, what });
        let mut compressed = stored;
        if self.header.checksums {
            let (data, crc) = stored.split_at(stored.len() - CRC_LEN);
            let expected = u32::from_le_bytes(crc.try_into().expect("four bytes"));
            let got = block_crc(data);
            if got != expected {
                return Err(damaged(format!(
                    "block {block} is damaged: its checksum is {got:08x}, recorded is {expected:08x}"
                )));
            }
            compressed = data;
        }
        self.decoder
            .decode(compressed, out)
            .map_err(|why| damaged(format!("block {block} can't be decompressed: {why}")))
    }

    /// One block or a part of it: by way of the cache.
    fn read_part(&self, block: usize, from: usize, out: &mut [u8]) -> io::Result<()> {
        if let Some(bytes) = self.cache.get(self.file, block) {
            out.copy_from_slice(&bytes[from..from + out.len()]);
            return Ok(());
        }
        let (place, len) = self.table.locate(block);
        let mut stored = vec![0; len];
        self.source.read_at(&mut stored, place)?;
        let mut bytes = vec![0; self.original_len(block)];
        self.decode_or_refetch(block, place, &stored, &mut bytes)?;
        out.copy_from_slice(&bytes[from..from + out.len()]);
        self.cache.put(self.file, block, bytes.into());
        Ok(())
    }

    /// Whole blocks from `first` on, as many as fill `out`: straight into it.
    fn read_whole(&self, first: usize, mut out: &mut [u8]) -> io::Result<()> {
        let mut block = first;
        let mut stored = Vec::new();
        while !out.is_empty() {
            let (mut place, mut len) = self.table.locate(block);
            let mut covered = self.original_len(block);
            let mut next = block + 1;
            while covered < out.len() && len + self.table.length(next) <= FETCH {
                len += self.table.length(next);
                covered += self.original_len(next);
                next += 1;
            }
            stored.resize(len, 0);
            self.source.read_at(&mut stored, place)?;
            let mut rest = &stored[..];
            while block < next {
                let (one, behind) = rest.split_at(self.table.length(block));
                let (into, left) = std::mem::take(&mut out).split_at_mut(self.original_len(block));
                self.decode_or_refetch(block, place, one, into)?;
                place += u64::try_from(one.len()).expect("a slice's length");
                (rest, out, block) = (behind, left, block + 1);
            }
        }
        Ok(())
    }
}

impl ReadAt for ZFileReader {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let len = u64::try_from(buf.len()).unwrap_or(u64::MAX);
        if offset.checked_add(len).is_none_or(|end| end > self.header.original_size) {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!(
                    "{len} bytes at {offset} reach past the {} bytes in a ZFile",
                    self.header.original_size
                ),
            ));
        }
        let size = u64::from(self.header.block_size);
        let mut block = usize::try_from(offset / size).expect("below the number of blocks");
        let mut from = usize::try_from(offset % size).expect("below 64 KiB");
        let long = buf.len() > self.block_size;
        let mut rest = buf;
        while !rest.is_empty() {
            debug_assert!(block < self.table.len());
            let here = self.original_len(block);
            // A read of one block at most may well come again; of a longer one only the edges do.
            if from == 0 && rest.len() >= here && long {
                // All whole blocks; the last of the file may be a short one.
                let to_end = offset + len == self.header.original_size;
                let whole = if to_end { rest.len() } else { rest.len() / self.block_size * self.block_size };
                let (into, left) = rest.split_at_mut(whole);
                self.read_whole(block, into)?;
                block += whole.div_ceil(self.block_size);
                rest = left;
            } else {
                let (into, left) = rest.split_at_mut((here - from).min(rest.len()));
                self.read_part(block, from, into)?;
                (block, from, rest) = (block + 1, 0, left);
            }
        }
        Ok(())
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.header.original_size)
    }
}
