//! Watchers that are asked now and then.

use std::sync::{Arc, Mutex, PoisonError};

use aenv_envd_proto::filesystem::{EventType, FilesystemEvent};
use tokio::task::JoinHandle;

use super::watch::{Watch, WatchError};

/// Events one watcher may hold before somebody must have asked for them.
const MAX_EVENTS: usize = 65_536;

/// A watcher that is polled. A task empties the kernel's queue so that it can't overflow while nobody asks.
pub(super) struct Polled {
    state: Arc<Mutex<PolledState>>,
    task: JoinHandle<()>,
}

struct PolledState {
    watch: Watch,
    events: Vec<FilesystemEvent>,
    failed: Option<WatchError>,
}

impl Drop for Polled {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl PolledState {
    fn collect(&mut self) {
        if self.failed.is_some() {
            return;
        }
        match self.watch.take() {
            Ok(events) => {
                for event in events {
                    // A file that is written piece by piece is one change to who looks now and then.
                    let repeated = self.events.last().is_some_and(|last| {
                        last.r#type == EventType::Write
                            && last.r#type == event.r#type
                            && last.name == event.name
                    });
                    if repeated {
                        self.events.pop();
                    }
                    self.events.push(event);
                }
                if self.events.len() > MAX_EVENTS {
                    self.events.clear();
                    self.failed = Some(WatchError::Overflow);
                }
            }
            Err(err) => self.failed = Some(err),
        }
    }
}

impl Polled {
    /// Must be called inside the runtime.
    pub(super) fn start(watch: Watch) -> Self {
        let state = Arc::new(Mutex::new(PolledState { watch, events: Vec::new(), failed: None }));
        let task = tokio::spawn(empty_when_ready(Arc::clone(&state)));
        Self { state, task }
    }

    /// Everything since the last call, up to this moment.
    pub(super) fn take(&self) -> Result<Vec<FilesystemEvent>, WatchError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.collect();
        match &state.failed {
            Some(err) => Err(err.clone()),
            None => Ok(std::mem::take(&mut state.events)),
        }
    }
}

async fn empty_when_ready(state: Arc<Mutex<PolledState>>) {
    loop {
        let ready = std::future::poll_fn(|cx| {
            let state = state.lock().unwrap_or_else(PoisonError::into_inner);
            state.watch.poll_ready(cx)
        });
        if ready.await.is_err() {
            return;
        }
        state.lock().unwrap_or_else(PoisonError::into_inner).collect();
    }
}
