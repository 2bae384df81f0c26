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
use crate::io::WriteAt;
use crate::layer::{LayerInfo, read_entries};
use crate::log_index::LogIndex;
use crate::mapping::{Mapping, SECTOR};
use crate::stack::check_size;

/// Upstream's bound on the log, in entries (2 GiB).
const MAX_LOG_ENTRIES: u64 = 128_000_000;
/// How many entries may follow the ones a marker covers before the marker itself.
const MAX_LAG: u64 = 1 << 16;
const MARKER_BIT: u64 = 1 << 54;

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
    log: Mutex<Log>,
    /// Where the next bytes go.
    end: AtomicU64,
    dirty: AtomicBool,
    failed: AtomicBool,
    flushing: Mutex<()>,
}

struct Log {
    file: Arc<dyn WriteAt>,
    entries: u64,
    crc: u32,
    /// Mappings were appended since the last flush began.
    unsynced: bool,
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
        let log = Log { file: index, entries: 0, crc: 0, unsynced: true };
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
        let (log, map) = Log::replay(index, data_size.div_ceil(SECTOR))?;
        let end = data_size.next_multiple_of(HEADER_LEN);
        let upper = Self::assemble(header, data, end, log, map);
        // What was written before may never have been synced.
        upper.dirty.store(true, Ordering::Relaxed);
        Ok(upper)
    }

    fn assemble(header: Header, data: Arc<dyn WriteAt>, end: u64, log: Log, index: LogIndex) -> Self {
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
        log.append(mappings)?;
        log.unsynced = true;
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
        let (covered, crc, file) = {
            let mut log = self.log.lock();
            let unsynced = std::mem::take(&mut log.unsynced);
            (log.entries, log.crc, unsynced.then(|| log.file.clone()))
        };
        self.data.sync()?;
        let Some(file) = file else { return Ok(()) };
        file.sync()?;
        let mut log = self.log.lock();
        let lag = log.entries - covered;
        if lag < MAX_LAG {
            // Without it a later open checks less: no reason to fail a flush that is done.
            let _full = log.append(&[Mapping::padding(MARKER_BIT | lag << 32 | u64::from(crc))]);
        }
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

impl Log {
    fn append(&mut self, entries: &[Mapping]) -> io::Result<()> {
        let count = u64::try_from(entries.len()).unwrap_or(u64::MAX);
        if self.entries + count > MAX_LOG_ENTRIES {
            return Err(io::Error::new(
                io::ErrorKind::StorageFull,
                "the upper's index log is full: seal the upper to go on",
            ));
        }
        self.file.write_at(entries.as_bytes(), HEADER_LEN + self.entries * 16)?;
        self.entries += count;
        self.crc = crc32c::crc32c_append(self.crc, entries.as_bytes());
        Ok(())
    }

    /// Rebuilds the index; see the module's head for what is believed. `data_sectors` bounds the places.
    fn replay(file: Arc<dyn WriteAt>, data_sectors: u64) -> Result<(Self, LogIndex), Error> {
        let size = file.size().map_err(Error::io("reading the index log's size"))?;
        let total = size.saturating_sub(HEADER_LEN) / 16;
        if total > MAX_LOG_ENTRIES {
            return Err(Error::IndexTooLarge { got: total, max: MAX_LOG_ENTRIES });
        }
        let mut replay = Replay::new(data_sectors);
        let mut chunk = vec![0u8; 1 << 20];
        let mut done = 0;
        while done < total {
            let count = (total - done).min(1 << 16);
            let bytes = &mut chunk[..usize::try_from(count * 16).expect("at most one MiB")];
            for entry in read_entries(&*file, HEADER_LEN + done * 16, bytes)? {
                replay.take(entry);
            }
            done += count;
        }
        let (entries, crc) = replay.end()?;
        if size != HEADER_LEN + entries * 16 {
            file.set_size(HEADER_LEN + entries * 16)
                .map_err(Error::io("cutting the index log's torn tail"))?;
        }
        Ok((Self { file, entries, crc, unsynced: true }, replay.index))
    }
}

/// The state of reading a log from its start.
struct Replay {
    index: LogIndex,
    data_sectors: u64,
    position: u64,
    crc: u32,
    /// The checksum before each of the last `MAX_LAG` entries.
    recent: Vec<u32>,
    /// Entries that some marker vouches for.
    covered: u64,
    mismatch: bool,
    /// The first entry that can't be right and the checksum before it.
    stopped: Option<(u64, u32)>,
}

impl Replay {
    fn new(data_sectors: u64) -> Self {
        let recent = vec![0; usize::try_from(MAX_LAG).expect("64 Ki")];
        Self {
            index: LogIndex::default(),
            data_sectors,
            position: 0,
            crc: 0,
            recent,
            covered: 0,
            mismatch: false,
            stopped: None,
        }
    }

    fn take(&mut self, entry: Mapping) {
        let slot = |at: u64| usize::try_from(at % MAX_LAG).expect("below 64 Ki");
        self.recent[slot(self.position)] = self.crc;
        if entry.is_padding() {
            let payload = entry.place();
            if payload & MARKER_BIT != 0 {
                let lag = payload >> 32 & (MAX_LAG - 1);
                let covered = self.position.checked_sub(lag);
                match covered.filter(|&at| u64::from(self.recent[slot(at)]) == payload & 0xffff_ffff) {
                    Some(covered) => self.covered = covered,
                    None => self.mismatch = true,
                }
            }
        } else if self.stopped.is_none() {
            let inside = entry.place() >= HEADER_LEN / SECTOR
                && (entry.is_zero() || entry.place_end() <= self.data_sectors)
                && entry.sectors() > 0;
            if inside {
                self.index.insert(entry.with_tag(0));
            } else {
                self.stopped = Some((self.position, self.crc));
            }
        }
        self.crc = crc32c::crc32c_append(self.crc, entry.as_bytes());
        self.position += 1;
    }

    /// Entries to keep and the checksum over them.
    fn end(&self) -> Result<(u64, u32), Error> {
        let (kept, crc) = self.stopped.unwrap_or((self.position, self.crc));
        if kept < self.covered || self.mismatch {
            return Err(Error::BadUpper(format!(
                "the index log is damaged inside what was flushed (entry {kept} of {}, {} known to be good); restore \
                 the disk from its last snapshot",
                self.position, self.covered
            )));
        }
        Ok((kept, crc))
    }
}

fn read_header(file: &dyn WriteAt, role: Role) -> Result<Header, Error> {
    let mut bytes = [0u8; 4096];
    file.read_at(&mut bytes, 0).map_err(Error::io("reading an upper's header"))?;
    Header::decode(&bytes, role).map_err(|e| Error::BadUpper(e.to_string()))
}
