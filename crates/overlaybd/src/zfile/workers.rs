//! The threads that compress.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use super::block_crc;
use super::codec::Encoder;
use super::writer::ZFileOptions;

/// Batches given to one worker and not yet written.
pub(super) const DEPTH: usize = 2;

/// One batch, compressed: the bytes for the file and each block's length in them.
pub(super) struct Compressed {
    pub(super) bytes: Vec<u8>,
    pub(super) lengths: Vec<u32>,
}

/// What a thread needs to compress.
pub(super) struct Work {
    encoder: Encoder,
    block_size: usize,
    checksums: bool,
}

impl Work {
    fn new(options: ZFileOptions) -> io::Result<Self> {
        Ok(Self {
            encoder: Encoder::new(options.algorithm, options.block_size)?,
            block_size: usize::try_from(options.block_size).expect("at most 64 KiB"),
            checksums: options.checksums,
        })
    }

    pub(super) fn batch(&mut self, batch: &[u8]) -> io::Result<Compressed> {
        let mut done = Compressed { bytes: Vec::with_capacity(batch.len()), lengths: Vec::new() };
        for block in batch.chunks(self.block_size) {
            let before = done.bytes.len();
            let compressed = self.encoder.encode(block)?;
            done.bytes.extend_from_slice(compressed);
            if self.checksums {
                done.bytes.extend_from_slice(&block_crc(compressed).to_le_bytes());
            }
            done.lengths.push(u32::try_from(done.bytes.len() - before).expect("about a block's length"));
        }
        Ok(done)
    }
}

pub(super) enum Workers {
    Caller(Box<Work>),
    Threads(Vec<Worker>),
}

impl Workers {
    pub(super) fn start(options: ZFileOptions) -> io::Result<Self> {
        if options.workers == 1 {
            return Ok(Self::Caller(Box::new(Work::new(options)?)));
        }
        (0..options.workers)
            .map(|_| Worker::start(Work::new(options)?))
            .collect::<Result<_, _>>()
            .map(Self::Threads)
    }
}

/// A thread with room for [`DEPTH`] batches on either side, so that neither end of it ever waits for the other.
pub(super) struct Worker {
    batches: Option<SyncSender<Vec<u8>>>,
    results: Receiver<io::Result<Compressed>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    fn start(mut work: Work) -> io::Result<Self> {
        let (batches, given) = sync_channel::<Vec<u8>>(DEPTH);
        let (done, results) = sync_channel(DEPTH);
        let thread = std::thread::Builder::new().name("zfile-compress".into()).spawn(move || {
            while let Ok(batch) = given.recv() {
                if done.send(work.batch(&batch)).is_err() {
                    break;
                }
            }
        })?;
        Ok(Self { batches: Some(batches), results, thread: Some(thread) })
    }

    pub(super) fn send(&self, batch: Vec<u8>) -> io::Result<()> {
        let gone = || io::Error::other("a thread that compresses has ended");
        self.batches.as_ref().ok_or_else(gone)?.send(batch).map_err(|_| gone())
    }

    pub(super) fn receive(&self) -> io::Result<Compressed> {
        self.results.recv().unwrap_or_else(|_| Err(io::Error::other("a thread that compresses has ended")))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.batches = None;
        if let Some(thread) = self.thread.take() {
            // Its results fit their channel, so it sees at once that no more batches come.
            let _panicked = thread.join();
        }
    }
}
