//! Collecting what ended. As PID 1 the agent inherits every orphan, so it waits for all children at once and hands the
//! exit of those it started to who asked; the rest are only laid to rest.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::oneshot,
};

use super::spawn::{Program, SpawnError, spawn};

/// Raw wait status of a child.
pub(crate) type WaitStatus = i32;

#[derive(Default)]
pub(crate) struct Reaper(Mutex<Children>);

#[derive(Default)]
struct Children {
    awaited: HashMap<i32, oneshot::Sender<WaitStatus>>,
    /// Spawns under way: their children may end before they are registered.
    starting: usize,
    /// Ends seen meanwhile that nobody has claimed; emptied when no spawn is under way, so a pid that comes round
    /// again never meets an old status.
    unclaimed: HashMap<i32, WaitStatus>,
}

impl Reaper {
    /// Starts collecting. Must be called inside the runtime, before the first child.
    pub(crate) fn start() -> std::io::Result<Arc<Self>> {
        let reaper = Arc::new(Self::default());
        let child_ended = signal(SignalKind::child())?;
        tokio::spawn(Arc::clone(&reaper).collect(child_ended));
        Ok(reaper)
    }

    async fn collect(self: Arc<Self>, mut child_ended: Signal) {
        while child_ended.recv().await.is_some() {
            self.collect_ready();
        }
    }

    fn children(&self) -> MutexGuard<'_, Children> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn collect_ready(&self) {
        loop {
            let mut status = 0;
            // SAFETY: `status` is a valid place for the result.
            let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
            if pid <= 0 {
                return;
            }
            let mut children = self.children();
            match children.awaited.remove(&pid) {
                // Who waited may have gone.
                Some(waiter) => drop(waiter.send(status)),
                None if children.starting > 0 => {
                    children.unclaimed.insert(pid, status);
                }
                None => {}
            }
        }
    }

    /// Starts `program`; the receiver gets its wait status. Blocks until it runs or failed to.
    pub(crate) fn spawn(
        &self,
        program: &Program<'_>,
    ) -> Result<(i32, oneshot::Receiver<WaitStatus>), SpawnError> {
        self.children().starting += 1;
        let spawned = spawn(program);
        let mut children = self.children();
        children.starting -= 1;
        let result = spawned.map(|pid| {
            let (waiter, ended) = oneshot::channel();
            match children.unclaimed.remove(&pid) {
                Some(status) => drop(waiter.send(status)),
                None => {
                    children.awaited.insert(pid, waiter);
                }
            }
            (pid, ended)
        });
        if children.starting == 0 {
            children.unclaimed.clear();
        }
        result
    }
}
