//! Writes a ZFile front to back, compressing in parallel.
//!
//! The caller's thread cuts the bytes into batches and gives them to the workers in turn; it takes the results in
//! the same order and writes them. At most two batches a worker are under way, which bounds memory at
//! `workers × 4 × 256 KiB` and slows down a caller that is faster than the compression. Dropping the writer ends its
//! workers; a file that was not finished has no trailer, and readers refuse it.

use std::collections::VecDeque;

use super::codec::Algorithm;
use super::header::{ZFILE_HEADER_LEN, ZFileHeader, ZFilePart};
use super::workers::{Compressed, DEPTH, Workers};
use super::{MAX_BLOCK, MAX_BLOCKS, MIN_BLOCK, checksum};
use crate::Error;
use crate::io::{ReadAt, WriteAt};

/// Original bytes in one piece of work.
const BATCH: usize = 256 << 10;
const MAX_WORKERS: usize = 64;

/// How a ZFile is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZFileOptions {
    /// How blocks are compressed.
    pub algorithm: Algorithm,
    /// Bytes of a block, a power of two from 4096 to 65536. Upstream reads incompressible data up to 32768.
    pub block_size: u32,
    /// Put a checksum behind each block.
    pub checksums: bool,
    /// Fill in the header too at the end, so that readers need no trailer.
    pub fill_header: bool,
    /// Threads that compress, at most 64; with 1 the caller's does.
    pub workers: usize,
}

impl Default for ZFileOptions {
    /// As upstream's tool writes: lz4, 4 KiB, checksums, described by the trailer. Compressed by all processors,
    /// at most 8.
    fn default() -> Self {
        Self {
            algorithm: Algorithm::Lz4,
            block_size: MIN_BLOCK,
            checksums: true,
            fill_header: false,
            workers: std::thread::available_parallelism().map_or(1, usize::from).min(8),
        }
    }
}

/// What came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZFileSummary {
    /// Bytes before compression.
    pub original_bytes: u64,
    /// Bytes of the file.
    pub file_bytes: u64,
    /// Its blocks.
    pub blocks: u64,
}

/// Takes bytes in order and writes a ZFile.
pub struct ZFileWriter<W: WriteAt> {
    out: W,
    options: ZFileOptions,
    header: ZFileHeader,
    gathered: Vec<u8>,
    workers: Workers,
    /// Workers that have batches, in the order of the file.
    under_way: VecDeque<usize>,
    next: usize,
    position: u64,
    table: Vec<u8>,
}

impl<W: WriteAt> ZFileWriter<W> {
    /// Starts a ZFile in the empty file `out`.
    pub fn new(out: W, options: ZFileOptions) -> Result<Self, Error> {
        if !options.block_size.is_power_of_two() || !(MIN_BLOCK..=MAX_BLOCK).contains(&options.block_size) {
            return Err(Error::BadRange(format!(
                "a ZFile can't have blocks of {} bytes: give a power of two from {MIN_BLOCK} to {MAX_BLOCK}",
                options.block_size
            )));
        }
        if !(1..=MAX_WORKERS).contains(&options.workers) {
            return Err(Error::BadRange(format!(
                "{} threads can't compress: give 1 to {MAX_WORKERS}",
                options.workers
            )));
        }
        let header = ZFileHeader {
            part: ZFilePart::Header { filled: false },
            index_offset: 0,
            blocks: 0,
            original_size: 0,
            index_crc: None,
            block_size: options.block_size,
            algorithm: options.algorithm,
            checksums: options.checksums,
        };
        out.write_at(&header.encode(), 0).map_err(Error::io("writing a ZFile's header"))?;
        Ok(Self {
            out,
            options,
            header,
            gathered: Vec::with_capacity(BATCH),
            workers: Workers::start(options).map_err(Error::io("starting to compress"))?,
            under_way: VecDeque::new(),
            next: 0,
            position: ZFILE_HEADER_LEN,
            table: Vec::new(),
        })
    }

    /// Adds bytes.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        self.header.original_size += u64::try_from(bytes.len()).expect("a slice's length");
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at((BATCH - self.gathered.len()).min(bytes.len()));
            self.gathered.extend_from_slice(now);
            bytes = later;
            if self.gathered.len() == BATCH {
                let batch = std::mem::replace(&mut self.gathered, Vec::with_capacity(BATCH));
                self.give(batch)?;
            }
        }
        Ok(())
    }

    /// Writes what is left, jump table and trailer; with `sync` returns once all is on stable storage.
    pub fn finish(mut self, sync: bool) -> Result<(W, ZFileSummary), Error> {
        if !self.gathered.is_empty() {
            let batch = std::mem::take(&mut self.gathered);
            self.give(batch)?;
        }
        while !self.under_way.is_empty() {
            self.take_oldest()?;
        }
        let io = || Error::io("writing a ZFile's jump table and trailer");
        self.header.index_offset = self.position;
        self.header.blocks = u64::try_from(self.table.len() / 4).expect("a vector's length");
        self.header.index_crc = Some(checksum(0, &self.table));
        self.out.write_at(&self.table, self.position).map_err(io())?;
        self.position += u64::try_from(self.table.len()).expect("a vector's length");
        let trailer = ZFileHeader { part: ZFilePart::Trailer, ..self.header };
        self.out.write_at(&trailer.encode(), self.position).map_err(io())?;
        if self.options.fill_header {
            let header = ZFileHeader { part: ZFilePart::Header { filled: true }, ..self.header };
            self.out.write_at(&header.encode(), 0).map_err(io())?;
        }
        if sync {
            self.out.sync().map_err(Error::io("syncing the new ZFile"))?;
        }
        let summary = ZFileSummary {
            original_bytes: self.header.original_size,
            file_bytes: self.position + ZFILE_HEADER_LEN,
            blocks: self.header.blocks,
        };
        Ok((self.out, summary))
    }

    fn give(&mut self, batch: Vec<u8>) -> Result<(), Error> {
        match &mut self.workers {
            Workers::Caller(work) => {
                let compressed = work.batch(&batch).map_err(Error::io("compressing"))?;
                self.put(&compressed)
            }
            Workers::Threads(threads) => {
                let count = threads.len();
                if self.under_way.len() == count * DEPTH {
                    self.take_oldest()?;
                }
                let Workers::Threads(threads) = &self.workers else { unreachable!("they don't change") };
                threads[self.next].send(batch).map_err(Error::io("compressing"))?;
                self.under_way.push_back(self.next);
                self.next = (self.next + 1) % count;
                Ok(())
            }
        }
    }

    fn take_oldest(&mut self) -> Result<(), Error> {
        if let (Workers::Threads(threads), Some(oldest)) = (&self.workers, self.under_way.pop_front()) {
            let compressed = threads[oldest].receive().map_err(Error::io("compressing"))?;
            self.put(&compressed)?;
        }
        Ok(())
    }

    fn put(&mut self, compressed: &Compressed) -> Result<(), Error> {
        let blocks = u64::try_from(self.table.len() / 4 + compressed.lengths.len()).unwrap_or(u64::MAX);
        if blocks > MAX_BLOCKS {
            return Err(Error::IndexTooLarge { got: blocks, max: MAX_BLOCKS });
        }
        self.out.write_at(&compressed.bytes, self.position).map_err(Error::io("writing ZFile blocks"))?;
        self.position += u64::try_from(compressed.bytes.len()).expect("a vector's length");
        compressed.lengths.iter().for_each(|len| self.table.extend_from_slice(&len.to_le_bytes()));
        Ok(())
    }
}

/// Compresses all of `source` into the empty file `out`.
pub fn compress_to_zfile<W: WriteAt>(
    source: &dyn ReadAt,
    out: W,
    options: ZFileOptions,
    sync: bool,
) -> Result<ZFileSummary, Error> {
    const CHUNK: u64 = 1 << 20;
    let size = source.size().map_err(Error::io("reading the size of what to compress"))?;
    let mut writer = ZFileWriter::new(out, options)?;
    let mut chunk = vec![0; usize::try_from(CHUNK).expect("one MiB")];
    let mut at = 0;
    while at < size {
        let part = &mut chunk[..usize::try_from(CHUNK.min(size - at)).expect("at most one MiB")];
        source.read_at(part, at).map_err(Error::io("reading what to compress"))?;
        writer.write(part)?;
        at += CHUNK.min(size - at);
    }
    writer.finish(sync).map(|(_, summary)| summary)
}
