//! The fake's machine, and the side of it that a test plays.

use crate::{Exit, ExitCause, MemoryRegion, VmRecord};
use parking_lot::Mutex;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::{
    fs::File,
    io::{self, Write},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
    ptr,
    sync::Arc,
};
use tokio::sync::watch;

/// A machine of the fake.
pub(super) struct Machine {
    pub(super) record: VmRecord,
    state: Mutex<State>,
    exit: watch::Sender<Option<Exit>>,
}

struct State {
    paused: bool,
    /// Gone once the machine has ended, as a process's memory is.
    memory: Option<Memory>,
}

impl Machine {
    pub(super) fn new(record: VmRecord, memory: Memory) -> Self {
        let state = Mutex::new(State { paused: false, memory: Some(memory) });
        Self { record, state, exit: watch::Sender::new(None) }
    }

    pub(super) fn exit(&self) -> watch::Receiver<Option<Exit>> {
        self.exit.subscribe()
    }

    pub(super) fn ended(&self) -> Option<Exit> {
        self.exit.borrow().clone()
    }

    /// Ends it, once: a second end finds the first's cause.
    pub(super) fn end(&self, cause: ExitCause, detail: String) -> Exit {
        self.state.lock().memory = None;
        self.exit.send_if_modified(|exit| {
            let first = exit.is_none();
            if first {
                *exit = Some(Exit { cause, detail: detail.clone() });
            }
            first
        });
        self.ended().unwrap_or(Exit { cause, detail })
    }

    pub(super) fn paused(&self) -> bool {
        self.state.lock().paused
    }

    pub(super) fn set_paused(&self, paused: bool) {
        self.state.lock().paused = paused;
    }

    pub(super) fn region(&self) -> Option<MemoryRegion> {
        let state = self.state.lock();
        let memory = state.memory.as_ref()?;
        Some(MemoryRegion {
            pid: self.record.pid,
            host_addr: memory.start as u64,
            image_offset: 0,
            len: memory.len as u64,
        })
    }
}

/// The guest of a fake machine, as a test plays it.
#[derive(Clone)]
pub struct Guest {
    machine: Arc<Machine>,
}

impl Guest {
    pub(super) fn of(machine: Arc<Machine>) -> Self {
        Self { machine }
    }

    /// Whether its virtual CPUs stand.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.machine.paused()
    }

    /// Writes guest memory at a byte offset of the image.
    ///
    /// # Errors
    /// When the guest is paused or has ended, or the range lies outside of its memory.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.machine.state.lock();
        if state.paused {
            return Err(io::Error::other("a paused guest writes nothing"));
        }
        let memory = state.memory.as_mut().ok_or_else(gone)?;
        let at = memory.at(offset, bytes.len())?;
        // SAFETY: `at` is the start of `bytes.len()` bytes within the live mapping, and the lock makes us its only writer.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
        Ok(())
    }

    /// Reads `length` bytes of guest memory at a byte offset of the image.
    ///
    /// # Errors
    /// When the guest has ended or the range lies outside of its memory.
    pub fn read(&self, offset: usize, length: usize) -> io::Result<Vec<u8>> {
        let state = self.machine.state.lock();
        let memory = state.memory.as_ref().ok_or_else(gone)?;
        let at = memory.at(offset, length)?;
        let mut bytes = vec![0; length];
        // SAFETY: `at` is the start of `length` bytes within the live mapping, and the lock keeps writers away.
        unsafe { ptr::copy_nonoverlapping(at, bytes.as_mut_ptr(), length) };
        Ok(bytes)
    }

    /// Writes a line on its console, `console.log` in the machine's directory.
    ///
    /// # Errors
    /// What appending to the file gave.
    pub fn print(&self, line: &str) -> io::Result<()> {
        let path = self.machine.record.dir.join("console.log");
        writeln!(File::options().create(true).append(true).open(path)?, "{line}")
    }

    /// Ends the machine for this cause; nothing happens when it has ended.
    pub fn end(&self, cause: ExitCause, detail: &str) {
        self.machine.end(cause, detail.to_owned());
    }
}

fn gone() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "the machine has ended")
}

/// A mapping of a memory file.
pub(super) struct Memory {
    start: usize,
    len: usize,
}

impl Memory {
    /// Makes the file, sparse, and maps it shared.
    pub(super) fn create(path: &Path, bytes: u64) -> io::Result<Self> {
        let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        file.set_len(bytes)?;
        Self::map(&file, bytes, MapFlags::SHARED)
    }

    /// Maps an image of exactly this size, private.
    pub(super) fn view(path: &Path, bytes: u64) -> io::Result<Self> {
        let file = File::open(path)?;
        let size = file.metadata()?.len();
        if size != bytes {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("it has {size} bytes, not {bytes}"),
            ));
        }
        // Reading once tells of an unreadable image now rather than by SIGBUS later.
        file.read_at(&mut [0; 1], 0)?;
        Self::map(&file, bytes, MapFlags::PRIVATE | MapFlags::NORESERVE)
    }

    fn map(file: &File, bytes: u64, flags: MapFlags) -> io::Result<Self> {
        let len = usize::try_from(bytes).map_err(io::Error::other)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice; it is only reached through `at`.
        let start =
            unsafe { mmap(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags, file, 0) }?;
        Ok(Self { start: start as usize, len })
    }

    fn at(&self, offset: usize, length: usize) -> io::Result<*mut u8> {
        match offset.checked_add(length) {
            Some(end) if end <= self.len => Ok((self.start + offset) as *mut u8),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{length} bytes at {offset} lie outside of {} bytes of guest memory", self.len),
            )),
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: exactly the range mapped in `map`, to which no reference remains: reads and writes copy.
        if let Err(error) = unsafe { munmap(self.start as *mut _, self.len) } {
            tracing::error!(%error, "unmapping a fake's memory failed");
        }
    }
}
