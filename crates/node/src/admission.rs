//! How much fits: guest memory promised, machines, starts under way.

use crate::{options::Limits, steps::StepError};
use parking_lot::Mutex;
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

/// The node's bounds and what is taken of them.
pub(crate) struct Admission {
    limit_mib: u64,
    max_machines: usize,
    taken: Arc<Mutex<Taken>>,
    starts: Arc<Semaphore>,
    waiting: AtomicUsize,
    max_waiting: usize,
    max_starts: usize,
    ended: Arc<Notify>,
}

/// The right to start a machine, until dropped.
pub(crate) struct Turn {
    permit: Option<OwnedSemaphorePermit>,
    ended: Arc<Notify>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        // The permit first: whoever is woken looks at it.
        self.permit = None;
        self.ended.notify_one();
    }
}

#[derive(Default)]
struct Taken {
    mib: u64,
    machines: usize,
}

/// Room for one machine, given back when dropped.
pub(crate) struct Room {
    mib: u64,
    taken: Arc<Mutex<Taken>>,
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut taken = self.taken.lock();
        taken.mib -= self.mib;
        taken.machines -= 1;
    }
}

impl Admission {
    pub(crate) fn new(limits: &Limits, host_mib: u64) -> Self {
        let rest = host_mib.saturating_sub(limits.memory_reserve_mib);
        // Whole MiB of a host's memory are far below 2^52: the float is exact and the product can't go out of range.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        let computed = (rest as f64 * limits.memory_overcommit.max(0.0)) as u64;
        Self {
            limit_mib: limits.memory_limit_mib.unwrap_or(computed),
            max_machines: limits.max_sandboxes,
            taken: Arc::default(),
            starts: Arc::new(Semaphore::new(limits.max_starts.max(1))),
            waiting: AtomicUsize::new(0),
            max_waiting: limits.max_queued,
            max_starts: limits.max_starts.max(1),
            ended: Arc::default(),
        }
    }

    /// Takes room for a sandbox's machine, or says which bound was met.
    pub(crate) fn admit(&self, mib: u32) -> Result<Room, StepError> {
        let mib = u64::from(mib);
        let mut taken = self.taken.lock();
        let message = if taken.machines >= self.max_machines {
            format!("this node runs its maximum number of concurrent sandboxes ({})", self.max_machines)
        } else if taken.mib + mib > self.limit_mib {
            format!(
                "this node runs the maximum number of concurrent sandboxes its memory allows: {} of {} MiB are promised \
                 and this one asks for {mib}",
                taken.mib, self.limit_mib
            )
        } else {
            taken.mib += mib;
            taken.machines += 1;
            return Ok(Room { mib, taken: Arc::clone(&self.taken) });
        };
        Err(StepError::Full { message, retry_after: Duration::from_secs(5) })
    }

    /// Takes room for a machine that runs already, bound or not.
    pub(crate) fn adopt(&self, mib: u32) -> Room {
        let mut taken = self.taken.lock();
        taken.mib += u64::from(mib);
        taken.machines += 1;
        Room { mib: u64::from(mib), taken: Arc::clone(&self.taken) }
    }

    /// MiB promised and the bound.
    pub(crate) fn promised(&self) -> (u64, u64) {
        (self.taken.lock().mib, self.limit_mib)
    }

    /// Waits for a turn to start a machine. Refused at once when too many wait.
    pub(crate) async fn turn(&self, cancel: &CancellationToken) -> Result<Turn, StepError> {
        if let Ok(permit) = Arc::clone(&self.starts).try_acquire_owned() {
            return Ok(self.begun(permit));
        }
        let _waiting = Waiting::new(&self.waiting);
        let position = self.waiting.load(Ordering::Relaxed);
        if position > self.max_waiting {
            return Err(StepError::Full {
                message: format!(
                    "{} starts wait already, which is the maximum number of concurrent starts in line; try again",
                    self.max_waiting
                ),
                retry_after: Duration::from_secs(2),
            });
        }
        tokio::select! {
            permit = Arc::clone(&self.starts).acquire_owned() => {
                permit.map(|permit| self.begun(permit)).map_err(|error| StepError::failed("waiting for a turn", error))
            }
            () = cancel.cancelled() => Err(StepError::Cancelled),
        }
    }

    /// A turn if nobody has or wants one: for work that must not delay anyone.
    pub(crate) fn idle_turn(&self) -> Option<Turn> {
        if self.waiting.load(Ordering::Relaxed) > 0 || self.starts.available_permits() < self.max_starts {
            return None;
        }
        Arc::clone(&self.starts).try_acquire_owned().ok().map(|permit| self.begun(permit))
    }

    /// Waits until a turn has ended since the last time someone waited here.
    pub(crate) async fn turn_ended(&self) {
        self.ended.notified().await;
    }

    fn begun(&self, permit: OwnedSemaphorePermit) -> Turn {
        Turn { permit: Some(permit), ended: Arc::clone(&self.ended) }
    }
}

struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Memory of this host, MiB.
pub(crate) fn host_memory_mib() -> u64 {
    let info = rustix::system::sysinfo();
    let unit = u64::from(info.mem_unit.max(1));
    #[allow(clippy::useless_conversion)]
    let total = u64::from(info.totalram);
    total.saturating_mul(unit) >> 20
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits { max_starts: 1, max_queued: 1, ..Limits::default() }
    }

    #[test]
    fn forty_sandboxes_of_half_a_gibibyte_fit_on_24_gib_by_default() {
        let admission = Admission::new(&Limits::default(), 23_900);
        let rooms: Vec<_> = (0..40).map(|_| admission.admit(512).unwrap()).collect();
        assert_eq!(admission.promised().0, 40 * 512);
        drop(rooms);
        assert_eq!(admission.promised().0, 0);
    }

    #[test]
    fn a_full_node_says_so_in_the_words_clients_look_for() {
        let by_memory = Admission::new(&Limits { memory_limit_mib: Some(1000), ..limits() }, 0);
        let _room = by_memory.admit(512).unwrap();
        let by_count = Admission::new(&Limits { max_sandboxes: 0, ..limits() }, 4000);
        for error in [by_memory.admit(512), by_count.admit(1)].map(|room| room.err().unwrap()) {
            assert!(error.to_string().contains("maximum number of concurrent"), "{error}");
        }
    }

    #[tokio::test]
    async fn one_more_than_may_wait_is_refused_at_once() {
        let admission = Arc::new(Admission::new(&limits(), 4000));
        let cancel = CancellationToken::new();
        let turn = admission.turn(&cancel).await.unwrap();
        assert!(admission.idle_turn().is_none());
        let second = tokio::spawn({
            let (admission, cancel) = (Arc::clone(&admission), cancel.clone());
            async move { admission.turn(&cancel).await.map(drop) }
        });
        while admission.waiting.load(Ordering::Relaxed) == 0 {
            tokio::task::yield_now().await;
        }
        let third = admission.turn(&cancel).await;
        assert!(matches!(third, Err(StepError::Full { .. })));
        drop(turn);
        second.await.unwrap().unwrap();
        assert!(admission.idle_turn().is_some());
    }

    #[tokio::test]
    async fn whoever_is_killed_in_line_leaves_it() {
        let admission = Admission::new(&limits(), 4000);
        let cancel = CancellationToken::new();
        let _turn = admission.turn(&cancel).await.unwrap();
        cancel.cancel();
        assert!(matches!(admission.turn(&cancel).await, Err(StepError::Cancelled)));
        assert_eq!(admission.waiting.load(Ordering::Relaxed), 0);
    }
}
