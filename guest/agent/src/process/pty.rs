//! Pseudo-terminals.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use bytes::BytesMut;
use rustix::{
    fs::{Mode, OFlags, Uid},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Winsize, tcsetwinsize},
};
use tokio::io::{Interest, unix::AsyncFd};

/// The side of a pseudo-terminal that we hold.
#[derive(Clone)]
pub(super) struct Terminal(Arc<AsyncFd<OwnedFd>>);

/// Columns and rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) cols: u16,
    pub(super) rows: u16,
}

impl Size {
    fn window(self) -> Winsize {
        Winsize { ws_row: self.rows, ws_col: self.cols, ws_xpixel: 0, ws_ypixel: 0 }
    }
}

impl Terminal {
    /// A new terminal and the side for the process, which will belong to `owner`. Must be called inside the runtime.
    pub(super) fn open(size: Size, owner: u32) -> io::Result<(Self, OwnedFd)> {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&master)?;
        unlockpt(&master)?;
        let name = ptsname(&master, Vec::new())?;
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let slave = rustix::fs::open(name.as_c_str(), flags, Mode::empty())?;
        // As root in a guest; on a host we may be the owner already.
        let _ = rustix::fs::fchown(&slave, Some(Uid::from_raw(owner)), None);
        tcsetwinsize(&master, size.window())?;
        rustix::io::ioctl_fionbio(&master, true)?;
        // SAFETY: an `OwnedFd` is open and stays the same for as long as it is owned, which here is to the end.
        let master = unsafe { AsyncFd::register(master) }?;
        Ok((Self(Arc::new(master)), slave))
    }

    pub(super) fn resize(&self, size: Size) -> io::Result<()> {
        Ok(tcsetwinsize(self.0.get_ref().as_fd(), size.window())?)
    }

    /// Reads into `buffer`; 0 when every program has closed its side.
    pub(super) async fn read(&self, buffer: &mut BytesMut) -> io::Result<usize> {
        let mut space = [0; 4096];
        let read = self.0.async_io(Interest::READABLE, |fd| Ok(rustix::io::read(fd, &mut space)?)).await;
        match read {
            // How Linux says that the other side is closed.
            Err(err) if err.raw_os_error() == Some(libc::EIO) => Ok(0),
            Ok(size) => {
                buffer.extend_from_slice(space.get(..size).unwrap_or_default());
                Ok(size)
            }
            Err(err) => Err(err),
        }
    }

    pub(super) async fn write_all(&self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            let written = self.0.async_io(Interest::WRITABLE, |fd| Ok(rustix::io::write(fd, data)?)).await?;
            data = &data[written..];
        }
        Ok(())
    }
}
