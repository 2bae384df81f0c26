//! Reading what a stopped machine changed in its memory.
//!
//! The machine must be paused for the whole capture: pages are looked up first and read after.

use crate::{PAGE, pagemap, zeros::is_zero};
use aenv_vmm::MemoryRegion;
use std::{fs::File, io, os::unix::fs::FileExt};

/// Where changed pages go, in rising order of offset. Offsets and lengths are multiples of [`PAGE`].
pub trait Sink {
    /// These bytes lie at `offset` of the memory image.
    fn data(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// `len` bytes from `offset` are zero now.
    fn zero(&mut self, offset: u64, len: u64) -> io::Result<()>;
}

/// What a capture found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Report {
    /// Pages that are no longer the image's own.
    pub pages: u64,
    /// Of these, all zero.
    pub zero: u64,
    /// Of these, equal to the image after all: left out.
    pub same: u64,
}

/// A run of changed pages.
#[derive(Debug, Clone, Copy)]
struct Run {
    pid: i32,
    addr: u64,
    offset: u64,
    len: u64,
}

/// Bytes read from the machine at a time: large enough that the call costs nothing, small enough for the cache.
const BATCH: u64 = 1 << 20;
/// `IOV_MAX` of Linux.
const MAX_VECTORS: usize = 1024;

/// Hands every page that the machine changed since its restore to `sink`. With `parent`, the image it was restored
/// from, pages whose content is the image's are left out.
pub fn capture(regions: &[MemoryRegion], parent: Option<&File>, sink: &mut dyn Sink) -> io::Result<Report> {
    let mut regions = regions.to_vec();
    regions.sort_by_key(|region| region.image_offset);
    let mut report = Report::default();
    let mut batch = Batch::default();
    for region in &regions {
        for range in pagemap::anonymous(region.pid, region.host_addr..region.host_addr + region.len)? {
            let mut run = Run {
                pid: region.pid,
                addr: range.start,
                offset: region.image_offset + (range.start - region.host_addr),
                len: range.end - range.start,
            };
            while run.len > 0 {
                let room = BATCH - batch.bytes;
                let take = run.len.min(room);
                batch.runs.push(Run { len: take, ..run });
                batch.bytes += take;
                run.addr += take;
                run.offset += take;
                run.len -= take;
                if batch.bytes == BATCH || batch.runs.len() == MAX_VECTORS {
                    batch.process(parent, sink, &mut report)?;
                }
            }
        }
        batch.process(parent, sink, &mut report)?;
    }
    Ok(report)
}

/// Runs of one process that are read by one call.
#[derive(Default)]
struct Batch {
    runs: Vec<Run>,
    bytes: u64,
    buffer: Vec<u8>,
    parent: Vec<u8>,
}

impl Batch {
    fn process(&mut self, parent: Option<&File>, sink: &mut dyn Sink, report: &mut Report) -> io::Result<()> {
        if self.runs.is_empty() {
            return Ok(());
        }
        let len = size(self.bytes)?;
        self.buffer.resize(size(BATCH)?, 0);
        read_process(&self.runs, &mut self.buffer[..len])?;
        let mut at = 0;
        for run in &self.runs {
            let bytes = &self.buffer[at..at + size(run.len)?];
            at += bytes.len();
            let parent = match parent {
                Some(file) => {
                    self.parent.resize(size(BATCH)?, 0);
                    let parent = &mut self.parent[..bytes.len()];
                    file.read_exact_at(parent, run.offset)?;
                    Some(&*parent)
                }
                None => None,
            };
            emit(run.offset, bytes, parent, sink, report)?;
        }
        self.runs.clear();
        self.bytes = 0;
        Ok(())
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Data,
    Zero,
    Same,
}

/// Splits a run into stretches of one kind and hands them on.
fn emit(
    offset: u64,
    bytes: &[u8],
    parent: Option<&[u8]>,
    sink: &mut dyn Sink,
    report: &mut Report,
) -> io::Result<()> {
    let page = size(PAGE)?;
    let kind_of = |at: usize| {
        let content = &bytes[at..at + page];
        if parent.is_some_and(|parent| parent[at..at + page] == *content) {
            Kind::Same
        } else if is_zero(content) {
            Kind::Zero
        } else {
            Kind::Data
        }
    };
    let mut from = 0;
    while from < bytes.len() {
        let kind = kind_of(from);
        let mut to = from + page;
        while to < bytes.len() && kind_of(to) == kind {
            to += page;
        }
        let pages = (to - from) as u64 / PAGE;
        report.pages += pages;
        let at = offset + from as u64;
        match kind {
            Kind::Data => sink.data(at, &bytes[from..to])?,
            Kind::Zero => {
                report.zero += pages;
                sink.zero(at, pages * PAGE)?;
            }
            Kind::Same => report.same += pages,
        }
        from = to;
    }
    Ok(())
}

/// Fills `buffer` with the bytes of all runs (of one process), one after the other.
fn read_process(runs: &[Run], buffer: &mut [u8]) -> io::Result<()> {
    let Some(first) = runs.first() else { return Ok(()) };
    let remote: Vec<libc::iovec> = runs
        .iter()
        .map(|run| Ok(libc::iovec { iov_base: run.addr as *mut libc::c_void, iov_len: size(run.len)? }))
        .collect::<io::Result<_>>()?;
    let local = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: `local` is `buffer`, borrowed for the call; remote addresses are only read, in another process, and a
    // bad one makes the call fail or come short.
    let read = unsafe {
        libc::process_vm_readv(
            first.pid,
            &raw const local,
            1,
            remote.as_ptr(),
            remote.len() as libc::c_ulong,
            0,
        )
    };
    match usize::try_from(read) {
        Err(_) => Err(io::Error::last_os_error()),
        Ok(read) if read < buffer.len() => {
            Err(io::Error::other(format!("read {read} of {} bytes of the machine's memory", buffer.len())))
        }
        Ok(_) => Ok(()),
    }
}

fn size(bytes: u64) -> io::Result<usize> {
    usize::try_from(bytes).map_err(io::Error::other)
}

#[cfg(test)]
mod tests;
