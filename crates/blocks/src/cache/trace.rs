//! Start-up traces: which blocks a stack's first seconds read, in order, so that the next start has them fetched ahead.
//!
//! ```text
//!   traces/<sha256 of the stack's digests> =
//!     "AENVTR01"   u32 crc32c of the rest   then for each record: u8 layer (bottom first), u32 block; little-endian
//! ```
//! A trace is written whole beside its place and renamed into it; a damaged one is ignored. A stack is recorded again
//! at each start, so that the trace follows its use. Ended early, a start leaves the older trace.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::Inner;
use super::fetch::{Origin, want};
use crate::remote::Digest;

const MAGIC: &[u8; 8] = b"AENVTR01";
/// 512 MiB of blocks.
const MAX_RECORDS: usize = 4096;
const RECORD: usize = 5;
/// Records that are sorted and fetched together.
const BATCH: usize = 64;

type Record = (u8, u32);

/// Bytes of disk that traces may take of a cache of `capacity`.
pub(crate) fn budget(capacity: u64) -> u64 {
    (capacity / 64).min(16 << 20)
}

/// What one start has read so far.
#[derive(Default)]
pub(crate) struct Recorder {
    ended: AtomicBool,
    seen: Mutex<(Vec<Record>, HashSet<Record>)>,
}

impl Recorder {
    pub(crate) fn note(&self, layer: u8, blocks: std::ops::RangeInclusive<u32>) {
        if self.ended.load(Ordering::Relaxed) {
            return;
        }
        let (order, set) = &mut *self.seen.lock();
        for block in blocks {
            if order.len() < MAX_RECORDS && set.insert((layer, block)) {
                order.push((layer, block));
            }
        }
    }

    fn end(&self) -> Vec<Record> {
        self.ended.store(true, Ordering::Relaxed);
        let (order, set) = &mut *self.seen.lock();
        *set = HashSet::new();
        std::mem::take(order)
    }
}

/// A stack's trace file.
pub(crate) fn path(dir: &Path, layers: &[Digest]) -> PathBuf {
    let bytes: Vec<u8> = layers.iter().flat_map(|layer| layer.0).collect();
    dir.join("traces").join(Digest::of(&bytes).hex())
}

/// The records of a trace, none when there is no usable one. `blocks` are the layers' counts.
pub(crate) fn load(path: &Path, blocks: &[u32]) -> Vec<Record> {
    let Ok(bytes) = fs::read(path) else { return vec![] };
    let Some((sum, body)) = bytes.strip_prefix(MAGIC).and_then(|rest| rest.split_first_chunk::<4>()) else {
        return vec![];
    };
    if u32::from_le_bytes(*sum) != crc32c::crc32c(body) || body.len() > MAX_RECORDS * RECORD {
        return vec![];
    }
    let records = body
        .chunks_exact(RECORD)
        .map(|record| (record[0], u32::from_le_bytes(record[1..].try_into().expect("four bytes"))));
    records
        .filter(|(layer, block)| blocks.get(usize::from(*layer)).is_some_and(|count| block < count))
        .collect()
}

fn save(path: &Path, records: &[Record], budget: u64) -> io::Result<()> {
    let body: Vec<u8> = records
        .iter()
        .flat_map(|(layer, block)| std::iter::once(*layer).chain(block.to_le_bytes()))
        .collect();
    let bytes = [&MAGIC[..], &crc32c::crc32c(&body).to_le_bytes(), &body].concat();
    let dir = path.parent().expect("below the cache's directory");
    fs::create_dir_all(dir)?;
    // No file is larger than its bytes rounded up to the file system's blocks.
    make_room(dir, budget.saturating_sub(bytes.len() as u64 + 8192))?;
    let partial = path.with_extension("part");
    fs::write(&partial, bytes)?;
    fs::rename(partial, path)
}

/// Removes the oldest traces until those left take at most `budget` bytes.
fn make_room(dir: &Path, budget: u64) -> io::Result<()> {
    let mut known = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        known.push((metadata.modified()?, metadata.blocks() * 512, entry.path()));
    }
    let mut total: u64 = known.iter().map(|(_, bytes, _)| bytes).sum();
    known.sort();
    for (_, bytes, path) in known {
        if total <= budget {
            break;
        }
        fs::remove_file(path)?;
        total -= bytes;
    }
    Ok(())
}

/// Fetches what the last start read, in its order, in the background; a source in trouble ends it.
pub(crate) fn replay(cache: &Arc<Inner>, origins: Vec<Origin>, records: Vec<Record>) {
    if records.is_empty() {
        return;
    }
    let cache = cache.clone();
    let runtime = cache.runtime.clone();
    runtime.spawn(async move {
        let turn = cache.replays.acquire().await.expect("never closed");
        let replaying = cache.clone();
        let batches = move || {
            for batch in records.chunks(BATCH) {
                let mut batch = batch.to_vec();
                batch.sort_unstable();
                let mut flights = Vec::new();
                for layer in batch.chunk_by(|a, b| a.0 == b.0) {
                    let blocks: Vec<_> = layer.iter().map(|(_, block)| *block).collect();
                    flights.extend(want(&replaying, &origins[usize::from(layer[0].0)], &blocks, true));
                }
                if flights.into_iter().any(|(_, flight)| flight.wait().is_err()) {
                    return;
                }
            }
        };
        let _panicked = tokio::task::spawn_blocking(batches).await;
        drop(turn);
    });
}

/// Ends the recording after the cache's trace window and writes it down. Holds no cache meanwhile.
pub(crate) fn save_later(cache: &Arc<Inner>, recorder: Arc<Recorder>, path: PathBuf) {
    let (window, budget) = (cache.options.trace_window, budget(cache.options.capacity));
    let weak = Arc::downgrade(cache);
    cache.runtime.spawn(async move {
        tokio::time::sleep(window).await;
        let records = recorder.end();
        // A cache that is gone has left its directory to others.
        let Some(cache) = weak.upgrade().filter(|_| !records.is_empty()) else { return };
        let write = move || {
            let _one_at_a_time = cache.traces.lock();
            if let Err(error) = save(&path, &records, budget) {
                tracing::warn!(%error, path = %path.display(), "a start-up trace could not be written");
            }
        };
        let _panicked = tokio::task::spawn_blocking(write).await;
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_read_back_and_a_damaged_one_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let path = path(dir.path(), &[Digest::of(b"a"), Digest::of(b"b")]);
        let records = vec![(1, 7), (0, 3), (1, 8)];
        save(&path, &records, 1 << 20).unwrap();
        assert_eq!(load(&path, &[10, 10]), records);
        assert_eq!(load(&path, &[10, 8]), records[..2], "blocks that aren't there are left out");
        let good = fs::read(&path).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            fs::write(&path, bad).unwrap();
            assert_eq!(load(&path, &[10, 10]), vec![], "byte {at}");
        }
    }

    #[test]
    fn the_oldest_traces_go_when_there_are_too_many() {
        let dir = tempfile::tempdir().unwrap();
        for n in 0..40u8 {
            save(&path(dir.path(), &[Digest::of(&[n])]), &[(0, 1)], 64 << 10).unwrap();
        }
        let left = fs::read_dir(dir.path().join("traces")).unwrap().count();
        assert!((8..=16).contains(&left), "{left}");
        assert!(path(dir.path(), &[Digest::of(&[39])]).exists());
    }

    #[test]
    fn a_recorder_notes_first_uses_in_order_up_to_a_bound() {
        let recorder = Recorder::default();
        recorder.note(1, 5..=6);
        recorder.note(0, 5..=5);
        recorder.note(1, 6..=7);
        recorder.note(2, 0..=9999);
        let noted = recorder.end();
        assert_eq!(noted[..5], [(1, 5), (1, 6), (0, 5), (1, 7), (2, 0)]);
        assert_eq!(noted.len(), MAX_RECORDS);
        recorder.note(3, 1..=1);
        assert!(recorder.end().is_empty());
    }
}
