//! A blob on its way: written by a download, read from its beginning by the conversion while it still grows.
//!
//! The file has no name, so nothing is left of it whatever is killed. Its size is bounded by the manifest's.

use super::SourceError;
use crate::CancellationToken;
use parking_lot::{Condvar, Mutex};
use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::FileExt as _,
    sync::Arc,
    time::Duration,
};

/// How long a reader waits before it looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(100);

pub(super) struct Spool {
    file: Arc<File>,
    state: Mutex<State>,
    changed: Condvar,
    stop: CancellationToken,
}

#[derive(Default)]
struct State {
    written: u64,
    ended: bool,
    error: Option<SourceError>,
}

impl Spool {
    pub(super) fn new(file: File, stop: CancellationToken) -> Self {
        Self { file: Arc::new(file), state: Mutex::default(), changed: Condvar::new(), stop }
    }

    pub(super) async fn append(&self, bytes: &tokio_util::bytes::Bytes) -> io::Result<()> {
        let (file, bytes, at) = (Arc::clone(&self.file), bytes.clone(), self.state.lock().written);
        let len = bytes.len() as u64;
        tokio::task::spawn_blocking(move || file.write_all_at(&bytes, at))
            .await
            .map_err(io::Error::other)??;
        self.state.lock().written += len;
        self.changed.notify_all();
        Ok(())
    }

    pub(super) fn end(&self, result: Result<(), SourceError>) {
        let mut state = self.state.lock();
        state.ended = true;
        state.error = result.err();
        self.changed.notify_all();
    }

    /// What the download failed with.
    pub(super) fn take_error(&self) -> Option<SourceError> {
        self.state.lock().error.take()
    }

    pub(super) fn reader(&self) -> SpoolReader<'_> {
        SpoolReader { spool: self, at: 0 }
    }
}

pub(super) struct SpoolReader<'a> {
    spool: &'a Spool,
    at: u64,
}

impl Read for SpoolReader<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let mut state = self.spool.state.lock();
        while state.written == self.at && !state.ended {
            if self.spool.stop.is_cancelled() {
                return Err(io::Error::other("nobody wants the layer any more"));
            }
            self.spool.changed.wait_for(&mut state, LOOK);
        }
        if state.error.is_some() {
            return Err(io::Error::other("its download failed"));
        }
        let there = usize::try_from(state.written - self.at).unwrap_or(usize::MAX).min(buf.len());
        drop(state);
        let got = self.spool.file.read_at(&mut buf[..there], self.at)?;
        self.at += got as u64;
        Ok(got)
    }
}
