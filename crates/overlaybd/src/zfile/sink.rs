//! A ZFile as the file that a [`LayerBuilder`](crate::LayerBuilder) writes.

use std::io;

use parking_lot::Mutex;

use super::writer::{ZFileOptions, ZFileSummary, ZFileWriter};
use crate::Error;
use crate::io::{ReadAt, WriteAt};

/// Takes the writes of a layer's builder, which come front to back, and compresses them on the way: no uncompressed
/// copy of the layer ever exists. Finish the builder without sync first, then this.
pub struct ZFileSink<W: WriteAt> {
    writer: Mutex<State<W>>,
}

struct State<W: WriteAt> {
    writer: ZFileWriter<W>,
    position: u64,
}

impl<W: WriteAt> ZFileSink<W> {
    /// Starts a ZFile in the empty file `out`.
    pub fn new(out: W, options: ZFileOptions) -> Result<Self, Error> {
        Ok(Self { writer: Mutex::new(State { writer: ZFileWriter::new(out, options)?, position: 0 }) })
    }

    /// Writes what is left, jump table and trailer; with `sync` returns once all is on stable storage.
    pub fn finish(self, sync: bool) -> Result<(W, ZFileSummary), Error> {
        self.writer.into_inner().writer.finish(sync)
    }
}

impl<W: WriteAt> ReadAt for ZFileSink<W> {
    fn read_at(&self, _: &mut [u8], _: u64) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "a ZFile can't be read while it is written"))
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.writer.lock().position)
    }
}

impl<W: WriteAt> WriteAt for ZFileSink<W> {
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        let mut state = self.writer.lock();
        if offset != state.position {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!("a ZFile is written front to back: byte {} comes next, not {offset}", state.position),
            ));
        }
        state.writer.write(buf)?;
        state.position += u64::try_from(buf.len()).expect("a slice's length");
        Ok(())
    }

    /// Nothing is on stable storage before [`finish`](ZFileSink::finish), so this refuses.
    fn sync(&self) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "a ZFile can be synced only by finishing it"))
    }

    fn set_size(&self, _: u64) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "a ZFile's size can't be set"))
    }
}
