//! The seam to whatever holds the bytes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes that can be read at any position: a local file, or a cache in front of a registry or object store.
///
/// Reads block the calling thread; callers are worker threads of an export, never async tasks.
pub trait ReadAt: Send + Sync {
    /// Fills `buf` from byte `offset` on. A short source is `UnexpectedEof`; `buf` is then unspecified.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;

    /// Length in bytes now.
    fn size(&self) -> io::Result<u64>;

    /// Told that what was read of these bytes failed a checksum inside the file. A cache drops its copy, so that the
    /// next read fetches anew: ranges of a blob have no digest, so nobody else can notice. Others do nothing.
    fn distrust(&self, offset: u64, len: u64) {
        let _nothing_is_kept = (offset, len);
    }
}

/// A [`ReadAt`] that can also be written: what the upper of a stack and the builders write to.
pub trait WriteAt: ReadAt {
    /// Writes all of `buf` at byte `offset`, growing the file where needed.
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()>;

    /// Returns once everything written before the call is on stable storage (`fdatasync`).
    fn sync(&self) -> io::Result<()>;

    /// Cuts or grows the file to `size` bytes.
    fn set_size(&self, size: u64) -> io::Result<()>;
}

impl ReadAt for File {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_exact_at(buf, offset)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }
}

impl WriteAt for File {
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(buf, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        self.set_len(size)
    }
}

macro_rules! through_pointer {
    ($($pointer:ty),*) => {$(
        impl<T: ReadAt + ?Sized> ReadAt for $pointer {
            fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
                (**self).read_at(buf, offset)
            }

            fn size(&self) -> io::Result<u64> {
                (**self).size()
            }

            fn distrust(&self, offset: u64, len: u64) {
                (**self).distrust(offset, len);
            }
        }

        impl<T: WriteAt + ?Sized> WriteAt for $pointer {
            fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
                (**self).write_at(buf, offset)
            }

            fn sync(&self) -> io::Result<()> {
                (**self).sync()
            }

            fn set_size(&self, size: u64) -> io::Result<()> {
                (**self).set_size(size)
            }
        }
    )*};
}

through_pointer!(&T, std::sync::Arc<T>);
