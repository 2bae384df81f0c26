//! A device of one file, which can be made to hang or to fail.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use aenv_blocks::device::{Device, Traffic};
use parking_lot::{Condvar, Mutex};

pub(crate) struct FileDevice {
    file: File,
    size: u64,
    pub(crate) writable: bool,
    pub(crate) flushes: AtomicU64,
    pub(crate) broken: AtomicBool,
    gate: Mutex<Option<(u64, Arc<Gate>)>>,
    traffic: Traffic,
}

/// Where reads wait.
#[derive(Default)]
pub(crate) struct Gate {
    /// Waiting reads, and whether they may go.
    state: Mutex<(u32, bool)>,
    changed: Condvar,
}

impl Gate {
    fn pass(&self) {
        let mut state = self.state.lock();
        state.0 += 1;
        self.changed.notify_all();
        self.changed.wait_while(&mut state, |state| !state.1);
    }

    pub(crate) fn wait_until_stuck(&self, patience: Duration) {
        let mut state = self.state.lock();
        let late = self.changed.wait_while_for(&mut state, |state| state.0 == 0, patience);
        assert!(!late.timed_out(), "no read came");
    }

    pub(crate) fn open(&self) {
        self.state.lock().1 = true;
        self.changed.notify_all();
    }
}

impl FileDevice {
    /// Keeps what the file has.
    pub(crate) fn make(path: &Path, size: u64) -> Self {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap();
        file.set_len(size).unwrap();
        Self {
            file,
            size,
            writable: true,
            flushes: AtomicU64::new(0),
            broken: AtomicBool::new(false),
            gate: Mutex::new(None),
            traffic: Traffic::default(),
        }
    }

    pub(crate) fn block_reads_from(&self, offset: u64) -> Arc<Gate> {
        let gate = Arc::<Gate>::default();
        *self.gate.lock() = Some((offset, gate.clone()));
        gate
    }
}

impl Device for FileDevice {
    fn size(&self) -> u64 {
        self.size
    }

    fn is_writable(&self) -> bool {
        self.writable
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        if self.broken.load(Ordering::SeqCst) {
            return Err(io::Error::other("broken on purpose"));
        }
        let gate = self.gate.lock().clone();
        if let Some((from, gate)) = gate
            && offset + buf.len() as u64 > from
        {
            gate.pass();
        }
        self.file.read_exact_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        if !self.writable {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        self.file.write_all_at(buf, offset)
    }

    fn write_zeroes(&self, offset: u64, len: u64) -> io::Result<()> {
        let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.file, punch, offset, len)?)
    }

    fn flush(&self) -> io::Result<()> {
        self.flushes.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn next_data(&self, offset: u64) -> Option<u64> {
        (offset < self.size).then_some(offset)
    }

    fn next_hole(&self, _: u64) -> u64 {
        self.size
    }

    fn local_file(&self) -> Option<&File> {
        None
    }

    fn traffic(&self) -> &Traffic {
        &self.traffic
    }
}
