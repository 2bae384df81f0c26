//! Writes a layer in one go: images, memory differences, merged stacks.
//!
//! The file grows strictly forward in large writes: short pieces are gathered, long ones go straight from the
//! caller's memory. Whole zero blocks of 4 KiB are recorded in the index and take no space. The bytes are those that
//! upstream's `commit` would write: sealed header, data, index padded to 4096, trailer.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::{SeekFrom, seek};
use uuid::Uuid;
use zerocopy::IntoBytes;

use crate::Error;
use crate::header::{HEADER_LEN, Header, Role};
use crate::index::MAX_INDEX_ENTRIES;
use crate::io::WriteAt;
use crate::log_index::LogIndex;
use crate::mapping::{Mapping, RUN_SECTORS, SECTOR, push_joined};
use crate::stack::check_size;

/// Zeroes are looked for in blocks of this size, aligned in the device.
pub(crate) const BLOCK: u64 = 4096;
const ZERO_BLOCK: [u8; 4096] = [0; 4096];
const GATHER: usize = 1 << 20;
const DIRECT: usize = 128 << 10;
const ENTRIES_PER_PAGE: usize = 256;

/// What the header of a new layer says.
#[derive(Debug, Clone)]
pub struct BuildOptions {
    /// Bytes of the device, a multiple of 512.
    pub virtual_size: u64,
    /// The new layer's id; random by default.
    pub uuid: Uuid,
    /// The layer it belongs on; nil to put it on anything.
    pub parent: Uuid,
    /// Free text, at most 256 bytes.
    pub tag: String,
    /// Record zero blocks so that they hide what lies below. Off for a layer that has nothing below it.
    pub keep_zeroes: bool,
}

impl BuildOptions {
    /// A layer for a device of `virtual_size` bytes, with a random id and no parent, that records zeroes.
    pub fn new(virtual_size: u64) -> Self {
        Self {
            virtual_size,
            uuid: Uuid::new_v4(),
            parent: Uuid::nil(),
            tag: String::new(),
            keep_zeroes: true,
        }
    }
}

/// What came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BuiltLayer {
    /// Its id.
    pub uuid: Uuid,
    /// Bytes of the file.
    pub file_bytes: u64,
    /// Bytes of the device that it stores.
    pub stored_bytes: u64,
    /// Entries of its index.
    pub entries: u64,
}

/// Takes `(offset, bytes)` pieces, fastest in ascending order, later ones winning, and writes a layer.
pub struct LayerBuilder<W: WriteAt> {
    out: W,
    options: BuildOptions,
    gathered: Vec<u8>,
    gathered_at: u64,
    ordered: Vec<Mapping>,
    /// Used from the first piece on that comes out of order.
    disordered: Option<LogIndex>,
}

impl<W: WriteAt> LayerBuilder<W> {
    /// Starts a layer in the empty file `out`.
    pub fn new(out: W, options: BuildOptions) -> Result<Self, Error> {
        check_size(options.virtual_size)?;
        let header = Header {
            role: Role::DataHeader { sealed: true },
            index_offset: 0,
            index_size: 0,
            virtual_size: options.virtual_size,
            uuid: options.uuid,
            parent: options.parent,
            tag: options.tag.clone(),
        };
        let mut gathered = Vec::with_capacity(GATHER + DIRECT);
        gathered.extend_from_slice(&header.encode());
        Ok(Self { out, options, gathered, gathered_at: 0, ordered: Vec::new(), disordered: None })
    }

    /// Adds `bytes` at byte `offset` of the device; both in whole sectors.
    pub fn append(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.check(offset, u64::try_from(bytes.len()).unwrap_or(u64::MAX))?;
        let mut at = offset;
        for (zero, run) in runs(bytes, offset) {
            let len = u64::try_from(run.len()).expect("checked above");
            if zero {
                self.record_zero(at, len);
            } else {
                self.store(at, run)?;
            }
            at += len;
        }
        Ok(())
    }

    /// Adds `len` zero bytes at byte `offset` of the device; both in whole sectors.
    pub fn append_zeroes(&mut self, offset: u64, len: u64) -> Result<(), Error> {
        self.check(offset, len)?;
        self.record_zero(offset, len);
        Ok(())
    }

    /// Writes index and trailer; with `sync` returns once all is on stable storage.
    pub fn finish(self, sync: bool) -> Result<BuiltLayer, Error> {
        self.finish_with(sync).map(|(_, built)| built)
    }

    /// Like [`finish`](Self::finish), and gives the file back.
    pub fn finish_with(mut self, sync: bool) -> Result<(W, BuiltLayer), Error> {
        let mut entries = match self.disordered.take() {
            None => std::mem::take(&mut self.ordered),
            Some(index) => index.entries(),
        };
        let used = entries.len();
        entries.resize(used.next_multiple_of(ENTRIES_PER_PAGE), Mapping::padding(0));
        let index_size = u64::try_from(entries.len()).unwrap_or(u64::MAX);
        if index_size > MAX_INDEX_ENTRIES {
            return Err(Error::IndexTooLarge { got: index_size, max: MAX_INDEX_ENTRIES });
        }
        let trailer = Header {
            role: Role::DataTrailer,
            index_offset: self.position(),
            index_size,
            virtual_size: self.options.virtual_size,
            uuid: self.options.uuid,
            parent: self.options.parent,
            tag: self.options.tag.clone(),
        };
        self.gathered.extend_from_slice(entries.as_bytes());
        self.gathered.extend_from_slice(&trailer.encode());
        self.flush()?;
        if sync {
            self.out.sync().map_err(Error::io("syncing the new layer"))?;
        }
        let stored = entries[..used].iter().filter(|m| !m.is_zero()).map(|m| m.sectors()).sum::<u64>();
        let built = BuiltLayer {
            uuid: self.options.uuid,
            file_bytes: self.position(),
            stored_bytes: stored * SECTOR,
            entries: u64::try_from(used).unwrap_or(u64::MAX),
        };
        Ok((self.out, built))
    }

    fn check(&self, offset: u64, len: u64) -> Result<(), Error> {
        let aligned = offset.is_multiple_of(SECTOR) && len.is_multiple_of(SECTOR);
        if aligned && offset.checked_add(len).is_some_and(|end| end <= self.options.virtual_size) {
            return Ok(());
        }
        Err(Error::BadRange(format!(
            "{len} bytes at {offset} are not whole sectors inside a device of {} bytes",
            self.options.virtual_size
        )))
    }

    fn position(&self) -> u64 {
        self.gathered_at + u64::try_from(self.gathered.len()).expect("a buffer's length")
    }

    fn store(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let place = self.position() / SECTOR;
        if bytes.len() >= DIRECT {
            self.flush()?;
            self.out.write_at(bytes, self.gathered_at).map_err(Error::io("writing layer data"))?;
            self.gathered_at += u64::try_from(bytes.len()).expect("a slice's length");
        } else {
            self.gathered.extend_from_slice(bytes);
            if self.gathered.len() >= GATHER {
                self.flush()?;
            }
        }
        let len = u64::try_from(bytes.len()).expect("a slice's length") / SECTOR;
        chunked(offset / SECTOR, len, |start, part| {
            self.record(Mapping::data(start, part, place + (start - offset / SECTOR)));
        });
        Ok(())
    }

    fn record_zero(&mut self, offset: u64, len: u64) {
        if !self.options.keep_zeroes && self.disordered.is_none() {
            let start = offset / SECTOR;
            if self.ordered.last().is_none_or(|last| last.end() <= start) {
                return;
            }
        }
        let place = self.position() / SECTOR;
        chunked(offset / SECTOR, len / SECTOR, |start, part| self.record(Mapping::zero(start, part, place)));
    }

    fn record(&mut self, mapping: Mapping) {
        if let Some(index) = &mut self.disordered {
            index.insert(mapping);
        } else if self.ordered.last().is_none_or(|last| last.end() <= mapping.start()) {
            push_joined(&mut self.ordered, mapping);
        } else {
            let mut index = LogIndex::default();
            self.ordered.drain(..).for_each(|m| index.insert(m));
            index.insert(mapping);
            self.disordered = Some(index);
        }
    }

    fn flush(&mut self) -> Result<(), Error> {
        self.out.write_at(&self.gathered, self.gathered_at).map_err(Error::io("writing layer data"))?;
        self.gathered_at = self.position();
        self.gathered.clear();
        Ok(())
    }
}

/// Builds a layer from a flat file, reading only what it stores: holes are skipped, zero blocks left out. A last
/// partial sector is padded with zeroes.
pub fn build_from_file<W: WriteAt>(
    source: &File,
    out: W,
    options: BuildOptions,
    sync: bool,
) -> Result<BuiltLayer, Error> {
    const CHUNK: u64 = 1 << 20;
    let size = source.metadata().map_err(Error::io("reading the image's size"))?.len();
    let mut builder = LayerBuilder::new(out, options)?;
    let mut chunk = vec![0; usize::try_from(CHUNK).expect("one MiB")];
    let mut at = 0;
    while let Some((start, end)) = next_extent(source, at, size).map_err(Error::io("looking for data"))? {
        at = start;
        while at < end {
            let len = CHUNK.min(end - at);
            let padded = len.next_multiple_of(SECTOR);
            let part = &mut chunk[..usize::try_from(padded).expect("at most one MiB")];
            let (filled, padding) = part.split_at_mut(usize::try_from(len).expect("at most one MiB"));
            source.read_exact_at(filled, at).map_err(Error::io("reading the image"))?;
            padding.fill(0);
            builder.append(at, part)?;
            at += len;
        }
    }
    builder.finish(sync)
}

/// The next stretch of data at or after `from`, widened to whole blocks.
fn next_extent(file: &File, from: u64, size: u64) -> io::Result<Option<(u64, u64)>> {
    if from >= size {
        return Ok(None);
    }
    let start = match seek(file, SeekFrom::Data(from)) {
        Ok(start) => start,
        Err(rustix::io::Errno::NXIO) => return Ok(None),
        // The file system can't tell: everything is data.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => return Ok(Some((from, size))),
        Err(errno) => return Err(errno.into()),
    };
    let end = seek(file, SeekFrom::Hole(start)).map_err(io::Error::from)?;
    Ok(Some(((start / BLOCK * BLOCK).max(from), end.next_multiple_of(BLOCK).min(size))))
}

/// Splits `bytes`, which lie at byte `offset` of a device, into runs of zero blocks and of anything else.
pub(crate) fn runs(bytes: &[u8], offset: u64) -> impl Iterator<Item = (bool, &[u8])> {
    let mut rest = bytes;
    let mut at = offset;
    std::iter::from_fn(move || {
        let (first, zero) = next_block(rest, at)?;
        let mut len = first;
        while let Some((more, same)) =
            next_block(&rest[len..], at + u64::try_from(len).expect("a slice's length"))
            && same == zero
        {
            len += more;
        }
        let (run, tail) = rest.split_at(len);
        rest = tail;
        at += u64::try_from(len).expect("a slice's length");
        Some((zero, run))
    })
}

/// Length of the next block's part in `bytes` and whether it is a whole block of zeroes.
fn next_block(bytes: &[u8], offset: u64) -> Option<(usize, bool)> {
    if bytes.is_empty() {
        return None;
    }
    let to_boundary = usize::try_from(BLOCK - offset % BLOCK).expect("at most one block");
    let block = &bytes[..to_boundary.min(bytes.len())];
    Some((block.len(), block == ZERO_BLOCK))
}

/// Calls `f` with pieces of `len` sectors from `start` that fit a mapping each.
pub(crate) fn chunked(start: u64, len: u64, mut f: impl FnMut(u64, u64)) {
    let end = start + len;
    let mut at = start;
    while at < end {
        let part = RUN_SECTORS.min(end - at);
        f(at, part);
        at += part;
    }
}

const _: () = assert!(HEADER_LEN == BLOCK);
