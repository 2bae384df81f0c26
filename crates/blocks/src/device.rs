//! What a guest reads and writes, whatever exports it.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aenv_overlaybd::{Sealed, Stack, Upper, WritableStack};

/// A block device. Calls block; an exporter's threads make them, many at a time.
pub trait Device: Send + Sync {
    /// Bytes.
    fn size(&self) -> u64;

    /// Whether it can be written.
    fn is_writable(&self) -> bool;

    /// Fills `buf` from byte `offset`.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;

    /// Writes all of `buf` at byte `offset`.
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()>;

    /// Makes a range read as zeroes.
    fn write_zeroes(&self, offset: u64, len: u64) -> io::Result<()>;

    /// Makes all acknowledged writes durable.
    fn flush(&self) -> io::Result<()>;

    /// The first stored byte at or after `offset`.
    fn next_data(&self, offset: u64) -> Option<u64>;

    /// The first byte at or after `offset` that is not stored, or the size.
    fn next_hole(&self, offset: u64) -> u64;

    /// The one local file that is this device byte for byte, when there is one.
    fn local_file(&self) -> Option<&File>;

    /// What went through it.
    fn traffic(&self) -> &Traffic;
}

/// Counters of a device. Reads and writes that the kernel answers from its cache are not seen here.
#[derive(Debug, Default)]
pub struct Traffic {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
    errors: AtomicU64,
}

/// [`Traffic`] at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct TrafficStat {
    /// Read requests.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Write requests.
    pub writes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Requests answered with an I/O error.
    pub errors: u64,
}

impl Traffic {
    /// Counts a read.
    pub fn read(&self, bytes: u64) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.read_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts a write.
    pub fn wrote(&self, bytes: u64) {
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.written_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts an error; true for the first one, which is the one worth logging.
    pub fn failed(&self) -> bool {
        self.errors.fetch_add(1, Ordering::Relaxed) == 0
    }

    /// The counters now.
    pub fn stat(&self) -> TrafficStat {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        TrafficStat {
            reads: get(&self.reads),
            read_bytes: get(&self.read_bytes),
            writes: get(&self.writes),
            written_bytes: get(&self.written_bytes),
            errors: get(&self.errors),
        }
    }
}

/// A stack without an upper.
pub struct ReadOnlyDevice {
    stack: Stack,
    local: Option<Arc<File>>,
    traffic: Traffic,
}

impl ReadOnlyDevice {
    /// `local` is the file that is the stack byte for byte, if there is one.
    pub fn new(stack: Stack, local: Option<Arc<File>>) -> Self {
        Self { stack, local, traffic: Traffic::default() }
    }
}

impl Device for ReadOnlyDevice {
    fn size(&self) -> u64 {
        self.stack.virtual_size()
    }

    fn is_writable(&self) -> bool {
        false
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.stack.read_at(buf, offset)
    }

    fn write_at(&self, _: &[u8], _: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn write_zeroes(&self, _: u64, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn next_data(&self, offset: u64) -> Option<u64> {
        self.stack.next_data(offset)
    }

    fn next_hole(&self, offset: u64) -> u64 {
        self.stack.next_hole(offset)
    }

    fn local_file(&self) -> Option<&File> {
        self.local.as_deref()
    }

    fn traffic(&self) -> &Traffic {
        &self.traffic
    }
}

/// A stack with an upper.
pub struct WritableDevice {
    stack: WritableStack,
    traffic: Traffic,
}

impl WritableDevice {
    /// A device over `stack`.
    pub fn new(stack: WritableStack) -> Self {
        Self { stack, traffic: Traffic::default() }
    }

    /// Bytes of the upper's data file.
    pub fn upper_bytes(&self) -> u64 {
        self.stack.upper_bytes()
    }

    /// Id of the upper, which the next one names as its parent.
    pub fn upper_uuid(&self) -> uuid::Uuid {
        self.stack.upper_info().uuid
    }

    /// See [`WritableStack::seal`].
    pub fn seal(
        &self,
        next: Upper,
        sync: bool,
        commit: impl FnOnce() -> io::Result<()>,
    ) -> Result<Sealed, aenv_overlaybd::Error> {
        self.stack.seal(next, sync, commit)
    }
}

impl Device for WritableDevice {
    fn size(&self) -> u64 {
        self.stack.virtual_size()
    }

    fn is_writable(&self) -> bool {
        true
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.stack.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        self.stack.write_at(buf, offset)
    }

    fn write_zeroes(&self, offset: u64, len: u64) -> io::Result<()> {
        self.stack.write_zeroes(offset, len)
    }

    fn flush(&self) -> io::Result<()> {
        self.stack.flush()
    }

    fn next_data(&self, offset: u64) -> Option<u64> {
        self.stack.next_data(offset)
    }

    fn next_hole(&self, offset: u64) -> u64 {
        self.stack.next_hole(offset)
    }

    fn local_file(&self) -> Option<&File> {
        None
    }

    fn traffic(&self) -> &Traffic {
        &self.traffic
    }
}
