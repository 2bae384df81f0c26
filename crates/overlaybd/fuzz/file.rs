//! A file in memory.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aenv_overlaybd::{ReadAt, WriteAt};

/// Most bytes that a target may make it.
const MAX: usize = 64 << 20;

/// Bytes in memory that can be read, written and cut.
pub struct Memory(Mutex<Vec<u8>>);

impl Memory {
    /// A file of these bytes.
    pub fn holding(bytes: &[u8]) -> Arc<Self> {
        Arc::new(Self(Mutex::new(bytes.to_vec())))
    }

    /// Its bytes.
    pub fn bytes(&self) -> Vec<u8> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn end(offset: u64, len: usize, max: usize) -> io::Result<(usize, usize)> {
    let start = usize::try_from(offset).map_err(|_| io::ErrorKind::UnexpectedEof)?;
    match start.checked_add(len) {
        Some(end) if end <= max => Ok((start, end)),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

impl ReadAt for Memory {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let bytes = self.lock();
        let (start, end) = end(offset, buf.len(), bytes.len())?;
        buf.copy_from_slice(&bytes[start..end]);
        Ok(())
    }

    fn size(&self) -> io::Result<u64> {
        Ok(u64::try_from(self.lock().len()).unwrap_or(u64::MAX))
    }
}

impl WriteAt for Memory {
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        let mut bytes = self.lock();
        let (start, end) = end(offset, buf.len(), MAX)?;
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        bytes[start..end].copy_from_slice(buf);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        let (_, size) = end(size, 0, MAX)?;
        self.lock().resize(size, 0);
        Ok(())
    }
}
