//! The index log of an upper: mappings as they were made, with markers that vouch for what was flushed.
//! What is believed of it after a crash stands at the head of [`upper`](crate::upper).

use std::io;
use std::sync::Arc;

use zerocopy::{FromBytes, IntoBytes};

use crate::Error;
use crate::header::HEADER_LEN;
use crate::io::WriteAt;
use crate::log_index::LogIndex;
use crate::mapping::{Mapping, SECTOR};

/// Upstream's bound on the log, in entries (2 GiB).
const MAX_LOG_ENTRIES: u64 = 128_000_000;
/// How many entries may follow the ones a marker covers before the marker itself.
const MAX_LAG: u64 = 1 << 16;
const MARKER_BIT: u64 = 1 << 54;

/// The open log. Its header is the upper's business.
pub(crate) struct IndexLog {
    file: Arc<dyn WriteAt>,
    entries: u64,
    crc: u32,
    /// Mappings were appended since the last flush began.
    unsynced: bool,
}

/// What a flush under way will vouch for.
pub(crate) struct Covered {
    pub(crate) file: Arc<dyn WriteAt>,
    entries: u64,
    crc: u32,
}

impl IndexLog {
    /// A log without entries.
    pub(crate) fn new(file: Arc<dyn WriteAt>) -> Self {
        Self { file, entries: 0, crc: 0, unsynced: true }
    }

    /// Adds mappings, which the next flush has to sync.
    pub(crate) fn append_mappings(&mut self, mappings: &[Mapping]) -> io::Result<()> {
        self.append(mappings)?;
        self.unsynced = true;
        Ok(())
    }

    /// What there is to sync now, if anything. The data file must be synced between this and syncing the log.
    pub(crate) fn begin_flush(&mut self) -> Option<Covered> {
        std::mem::take(&mut self.unsynced).then(|| Covered {
            file: self.file.clone(),
            entries: self.entries,
            crc: self.crc,
        })
    }

    /// Writes the marker for what has been synced.
    pub(crate) fn end_flush(&mut self, covered: &Covered) {
        let lag = self.entries - covered.entries;
        if lag < MAX_LAG {
            // Without it a later open checks less: no reason to fail a flush that is done.
            let marker = Mapping::padding(MARKER_BIT | lag << 32 | u64::from(covered.crc));
            let _full = self.append(&[marker]);
        }
    }

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
    pub(crate) fn replay(file: Arc<dyn WriteAt>, data_sectors: u64) -> Result<(Self, LogIndex), Error> {
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
            file.read_at(bytes, HEADER_LEN + done * 16).map_err(Error::io("reading the index log"))?;
            for entry in bytes.chunks_exact(16) {
                replay.take(Mapping::read_from_bytes(entry).expect("sixteen bytes"));
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
