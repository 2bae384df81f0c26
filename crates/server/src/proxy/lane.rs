//! Lanes: what goes through to one generation of one sandbox.
//!
//! A lane bounds the requests in flight, keeps connections for reuse, and can be cut as a whole. A sandbox that is
//! restored has a new generation and so a new lane: no connection of the old machine is ever used for the new one.
//!
//! A connection goes back into the pool as soon as the guest's response has begun and is taken again once it is ready,
//! that is when the response has been read to its end. If the client gives up half way, hyper closes it and the pool
//! drops it.

use aenv_node::model::SandboxId;
use axum::body::Body;
use hyper::client::conn::http1::SendRequest;
use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;
use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

/// Guests' own servers commonly close idle connections after 5 to 75 s; being first avoids most lost races.
const MAX_IDLE_AGE: Duration = Duration::from_secs(30);

/// All lanes of a server.
pub(super) struct Lanes {
    by_sandbox: Mutex<HashMap<SandboxId, Arc<Lane>>>,
    max_in_flight: usize,
    max_idle: usize,
    active: Gauge,
}

/// One generation of one sandbox.
pub(super) struct Lane {
    generation: u64,
    cut: CancellationToken,
    slots: Arc<Semaphore>,
    max_in_flight: usize,
    max_idle: usize,
    pool: Mutex<HashMap<u16, VecDeque<Pooled>>>,
}

struct Pooled {
    sender: SendRequest<Body>,
    since: Instant,
}

/// A place in a lane, held until the last byte of the response is out.
pub(super) struct Ticket {
    lane: Arc<Lane>,
    _slot: OwnedSemaphorePermit,
    active: Gauge,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.active.dec();
    }
}

impl Lanes {
    pub(super) fn new(max_in_flight: usize, max_idle: usize, active: Gauge) -> Self {
        Self { by_sandbox: Mutex::default(), max_in_flight, max_idle, active }
    }

    /// A place in the lane of this generation; `Err` is the bound that was met.
    pub(super) fn enter(&self, id: &SandboxId, generation: u64) -> Result<Ticket, usize> {
        let lane = {
            let mut lanes = self.by_sandbox.lock();
            match lanes.get(id) {
                Some(lane) if lane.generation == generation => Arc::clone(lane),
                there => {
                    let newer = there.is_some_and(|lane| lane.generation > generation);
                    let lane = Arc::new(Lane::new(generation, self.max_in_flight, self.max_idle));
                    // A request that was slow to get here must not tear down the lane of the present machine; it gets
                    // one of its own, in which dialling will find out.
                    if !newer && let Some(old) = lanes.insert(id.clone(), Arc::clone(&lane)) {
                        old.cut();
                    }
                    lane
                }
            }
        };
        match Arc::clone(&lane.slots).try_acquire_owned() {
            Ok(slot) => {
                self.active.inc();
                Ok(Ticket { lane, _slot: slot, active: self.active.clone() })
            }
            Err(_) => Err(lane.max_in_flight),
        }
    }

    /// Cuts the lane of a sandbox.
    pub(super) fn sever(&self, id: &SandboxId) {
        if let Some(lane) = self.by_sandbox.lock().remove(id) {
            lane.cut();
        }
    }

    /// Cuts all lanes.
    pub(super) fn sever_all(&self) {
        for (_, lane) in self.by_sandbox.lock().drain() {
            lane.cut();
        }
    }

    /// Cuts lanes for which `alive` is false, closes aged connections, forgets empty lanes.
    pub(super) fn sweep(&self, alive: impl Fn(&SandboxId, u64) -> bool) {
        let lanes: Vec<_> =
            self.by_sandbox.lock().iter().map(|(id, lane)| (id.clone(), Arc::clone(lane))).collect();
        for (id, lane) in lanes {
            let keep = alive(&id, lane.generation);
            if !keep {
                lane.cut();
            }
            lane.age();
            if !keep || lane.is_empty() {
                let mut lanes = self.by_sandbox.lock();
                // Someone may have entered meanwhile, or a newer lane taken its place. Two references are the map's
                // and ours.
                let same = lanes.get(&id).is_some_and(|there| Arc::ptr_eq(there, &lane));
                if same && (!keep || Arc::strong_count(&lane) == 2) {
                    lanes.remove(&id);
                }
            }
        }
    }
}

impl Lane {
    fn new(generation: u64, max_in_flight: usize, max_idle: usize) -> Self {
        Self {
            generation,
            cut: CancellationToken::new(),
            slots: Arc::new(Semaphore::new(max_in_flight)),
            max_in_flight,
            max_idle,
            pool: Mutex::default(),
        }
    }

    fn cut(&self) {
        self.cut.cancel();
        self.pool.lock().clear();
    }

    fn is_empty(&self) -> bool {
        self.slots.available_permits() == self.max_in_flight && self.pool.lock().is_empty()
    }

    fn age(&self) {
        self.pool.lock().retain(|_, pooled| {
            pooled.retain(|one| {
                let aged = one.sender.is_ready() && one.since.elapsed() > MAX_IDLE_AGE;
                !(aged || one.sender.is_closed())
            });
            !pooled.is_empty()
        });
    }
}

impl Ticket {
    pub(super) fn generation(&self) -> u64 {
        self.lane.generation
    }

    /// Cancelled when the machine is gone.
    pub(super) fn cut(&self) -> &CancellationToken {
        &self.lane.cut
    }

    /// A connection to this port that is ready for a request.
    pub(super) fn take(&self, port: u16) -> Option<SendRequest<Body>> {
        let mut pool = self.lane.pool.lock();
        let pooled = pool.get_mut(&port)?;
        pooled.retain(|one| !one.sender.is_closed());
        // The most recently used first: the others may age out.
        let at = pooled.iter().rposition(|one| one.sender.is_ready())?;
        pooled.remove(at).map(|one| one.sender)
    }

    /// Keeps a connection, though its response may still be under way. Beyond the bound it closes after it.
    pub(super) fn put(&self, port: u16, sender: SendRequest<Body>) {
        if self.lane.cut.is_cancelled() {
            return;
        }
        let mut pool = self.lane.pool.lock();
        let pooled = pool.entry(port).or_default();
        if pooled.len() < self.lane.max_idle {
            pooled.push_back(Pooled { sender, since: Instant::now() });
        }
    }
}
