//! The writable upper: an append-only data file and the log of its index.
//!
//! ```text
//!  data file    header | bytes in the order they were written …            (sealed: … index | trailer)
//!  index log    header | mapping mapping … marker mapping …                 16 bytes each, later ones win
//! ```
//! That is upstream's format. Two things are ours and invisible to it:
//! - A write that falls wholly into a run this upper already stores goes in place, as on any disk, so that a file
//!   system journal does not grow the upper for ever. Sealed layers are never written.
//! - After each flush comes a *marker*: an entry upstream skips as padding, with a checksum of the whole log as far
//!   as that flush covered it. It is written when that is on stable storage, so what a marker covers must read back;
//!   anything after the last one may have been lost.
//!
//! What survives:
//! - kill -9: every acknowledged write, since both files were written before the answer.
//! - power loss: every write flushed before it. Flush syncs the data, then the log, so an entry that a flush covered
//!   never points at bytes that are not there.
//! - A torn tail (half an entry, zeroes, an entry pointing past the data) is cut off at open when no marker covers
//!   it. The same below a marker, or a marker that doesn't match, is damage: `BadUpper`, never a silent loss.
//! - A failed sync: the kernel may have dropped the pages, so every later flush fails too until the upper is opened
//!   anew.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};
use uuid::Uuid;
use zerocopy::IntoBytes;

use crate::Error;
use crate::header::{HEADER_LEN, Header, Role};
use crate::index_log::IndexLog;
use crate::io::WriteAt;
use crate::layer::LayerInfo;
use crate::log_index::LogIndex;
use crate::mapping::{Mapping, SECTOR};
use crate::stack::check_size;

/// What the headers of a new upper say.
#[derive(Debug, Clone, Copy)]
pub struct UpperOptions {
    /// Bytes of the device, a multiple of 512.
    pub virtual_size: u64,
    /// Id of the layer it will become.
    pub uuid: Uuid,
    /// Id of the layer it lies on; nil when that has none.
    pub parent: Uuid,
}

/// The two files of an upper with its index in memory.
pub struct Upper {
    pub(crate) info: LayerInfo,
    pub(crate) data: Arc<dyn WriteAt>,
    pub(crate) index: RwLock<LogIndex>,
    log: Mutex<IndexLog>,
    /// Where the next bytes go.
    end: AtomicU64,
    dirty: AtomicBool,
    failed: AtomicBool,
    flushing: Mutex<()>,
}

impl Upper {
    /// Writes the headers of a new upper into two empty files.
    pub fn create(
        data: Arc<dyn WriteAt>,
        index: Arc<dyn WriteAt>,
        options: UpperOptions,
    ) -> Result<Self, Error> {
        check_size(options.virtual_size)?;
        let mut header = Header {
            role: Role::DataHeader { sealed: false },
            index_offset: 0,
            index_size: 0,
            virtual_size: options.virtual_size,
            uuid: options.uuid,
            parent: options.parent,
            tag: String::new(),
        };
        data.write_at(&header.encode(), 0).map_err(Error::io("writing the upper's data header"))?;
        header.role = Role::IndexHeader;
        header.index_offset = HEADER_LEN;
        index.write_at(&header.encode(), 0).map_err(Error::io("writing the upper's index header"))?;
        let log = IndexLog::new(index);
        Ok(Self::assemble(header, data, HEADER_LEN, log, LogIndex::default()))
    }

    /// Opens the files of an upper that was not sealed, replaying its log.
    pub fn open(data: Arc<dyn WriteAt>, index: Arc<dyn WriteAt>) -> Result<Self, Error> {
        let data_header = read_header(&*data, Role::DataHeader { sealed: false })?;
        let header = read_header(&*index, Role::IndexHeader)?;
        if matches!(data_header.role, Role::DataHeader { sealed: true }) {
            return Err(Error::BadUpper("the data file is a finished layer, not an upper".into()));
        }
        if header.uuid != data_header.uuid {
            return Err(Error::BadUpper(format!(
                "the data file is {}, the index log belongs to {}",
                data_header.uuid, header.uuid
            )));
        }
        if header.index_offset != HEADER_LEN {
            return Err(Error::BadUpper(format!("the index log starts at byte {}", header.index_offset)));
        }
        let data_size = data.size().map_err(Error::io("reading the upper's size"))?;
        let (log, map) = IndexLog::replay(index, data_size.div_ceil(SECTOR))?;
        let end = data_size.next_multiple_of(HEADER_LEN);
        let upper = Self::assemble(header, data, end, log, map);
        // What was written before may never have been synced.
        upper.dirty.store(true, Ordering::Relaxed);
        Ok(upper)
    }

    fn assemble(header: Header, data: Arc<dyn WriteAt>, end: u64, log: IndexLog, index: LogIndex) -> Self {
        let info = LayerInfo {
            uuid: header.uuid,
            parent: header.parent,
            virtual_size: header.virtual_size,
            tag: header.tag,
        };
        Self {
            info,
            data,
            index: RwLock::new(index),
            log: Mutex::new(log),
            end: AtomicU64::new(end),
            dirty: AtomicBool::new(true),
            failed: AtomicBool::new(false),
            flushing: Mutex::new(()),
        }
    }

    /// Ids and size from its headers.
    pub fn info(&self) -> &LayerInfo {
        &self.info
    }

    /// Bytes of its data file, garbage included.
    pub fn file_bytes(&self) -> u64 {
        self.end.load(Ordering::Relaxed)
    }

    /// Whether nothing was ever written to it.
    pub fn is_empty(&self) -> bool {
        self.index.read().len() == 0
    }

    /// Makes the data file a layer by appending index and trailer, with nothing put in its place: for an upper that
    /// nothing uses. With `sync` returns once that is on stable storage. Answers the layer's size in bytes.
    pub fn finish(&self, sync: bool) -> Result<u64, Error> {
        self.write_trailer(&self.index.read().entries(), self.info.virtual_size, sync)
    }

    /// Takes `len` bytes at the end of the data file. Pieces of a block or more start on a block, so that the host's
    /// page cache never has to read before it writes.
    pub(crate) fn reserve(&self, len: u64) -> u64 {
        let align = if len >= HEADER_LEN { HEADER_LEN } else { SECTOR };
        let take = |end: u64| Some(end.next_multiple_of(align) + len.next_multiple_of(SECTOR));
        let before = self
            .end
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
            .expect("the closure always gives a value");
        before.next_multiple_of(align)
    }

    /// The data file's end in sectors: the place a zero mapping carries.
    pub(crate) fn end_sector(&self) -> u64 {
        self.end.load(Ordering::Relaxed).div_ceil(SECTOR)
    }

    pub(crate) fn mark_dirty(&self) {
        self.dirty.store(true, Ordering::Release);
    }

    /// Makes `mappings` part of the index, in the log first.
    pub(crate) fn commit(&self, mappings: &[Mapping]) -> io::Result<()> {
        let mut log = self.log.lock();
        log.append_mappings(mappings)?;
        let mut index = self.index.write();
        mappings.iter().for_each(|&m| index.insert(m));
        drop(index);
        drop(log);
        self.mark_dirty();
        Ok(())
    }

    /// Returns once all that was acknowledged before the call is on stable storage.
    pub(crate) fn flush(&self) -> io::Result<()> {
        let _one_at_a_time = self.flushing.lock();
        if self.failed.load(Ordering::Relaxed) {
            return Err(io::Error::other("an earlier flush failed: what reached the disk is unknown"));
        }
        if !self.dirty.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        self.sync_both().inspect_err(|_| self.failed.store(true, Ordering::Relaxed))
    }

    fn sync_both(&self) -> io::Result<()> {
        let covered = self.log.lock().begin_flush();
        self.data.sync()?;
        let Some(covered) = covered else { return Ok(()) };
        covered.file.sync()?;
        self.log.lock().end_flush(&covered);
        Ok(())
    }

    /// Appends index and trailer, which makes the data file a layer. Nothing may write meanwhile.
    /// The file goes on being a good upper afterwards: the log is untouched and new data goes behind the trailer.
    pub(crate) fn write_trailer(
        &self,
        entries: &[Mapping],
        virtual_size: u64,
        sync: bool,
    ) -> Result<u64, Error> {
        let index_offset = self.end_sector() * SECTOR;
        let trailer = Header {
            role: Role::DataTrailer,
            index_offset,
            index_size: u64::try_from(entries.len()).unwrap_or(u64::MAX),
            virtual_size,
            uuid: self.info.uuid,
            parent: self.info.parent,
            tag: self.info.tag.clone(),
        };
        // The index can be large: it goes out from where it lies, its padding with the trailer.
        let index = entries.as_bytes();
        let mut rest = vec![0; index.len().next_multiple_of(512) - index.len()];
        rest.extend_from_slice(&trailer.encode());
        let rest_offset = index_offset + u64::try_from(index.len()).expect("a slice's length");
        let total = rest_offset + u64::try_from(rest.len()).expect("a buffer's length");
        self.end.store(total, Ordering::Relaxed);
        self.data
            .write_at(index, index_offset)
            .and_then(|()| self.data.write_at(&rest, rest_offset))
            .map_err(Error::io("writing the sealed layer's index"))?;
        self.data.set_size(total).map_err(Error::io("ending the sealed layer"))?;
        if sync {
            self.data.sync().map_err(Error::io("syncing the sealed layer"))?;
        }
        Ok(total)
    }
}

fn read_header(file: &dyn WriteAt, role: Role) -> Result<Header, Error> {
    let mut bytes = [0u8; 4096];
    file.read_at(&mut bytes, 0).map_err(Error::io("reading an upper's header"))?;
    Header::decode(&bytes, role).map_err(|e| Error::BadUpper(e.to_string()))
}
