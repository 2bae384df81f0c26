//! Building, handing out and tearing down, around the pure [`Ledger`].
//!
//! - A build runs in a task of its own: who asked for it may go away. A built slot that doesn't arrive is torn down.
//! - A build that fails gives its index back. The refill then waits, longer each time; an acquire gets the error.
//! - A tear-down that fails makes a leftover, which the next reap tries again.

use crate::{
    During as _, Egress, Error, Slot, dns,
    host::{self, Memory},
    ledger::{Held, Ledger, Next},
    nft,
    slot::{Blueprint, Parts},
    threads::{HostNamespace, Threads},
};
use parking_lot::Mutex;
use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{
    runtime::Handle,
    sync::{Notify, oneshot},
    time::{Instant, timeout_at},
};

/// How long an acquire waits for slots on their way when no other is free.
const WAIT: Duration = Duration::from_secs(10);
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LAST_PAUSE: Duration = Duration::from_secs(30);

pub(crate) struct Pool {
    pub(crate) blueprint: Arc<Blueprint>,
    pub(crate) slots: u32,
    pub(crate) prepared: usize,
    pub(crate) runtime: Handle,
    pub(crate) memory: Mutex<Memory>,
    pub(crate) ledger: Mutex<Ledger<Open>>,
    /// Told of every change of `ledger`.
    pub(crate) changed: Notify,
    /// For what takes microseconds: sockets and single set elements.
    pub(crate) quick: Threads,
    pub(crate) builders: Threads,
    pub(crate) wreckers: Threads,
    pub(crate) resolver: Arc<dns::Resolver>,
}

/// What this process holds of a slot.
pub(crate) struct Open {
    pub(crate) namespace: Arc<OwnedFd>,
    /// Whether the resolver answers.
    pub(crate) resolves: Arc<AtomicBool>,
    _forwarder: Option<dns::Forwarder>,
}

/// A slot on its way to somebody; torn down when it doesn't arrive.
pub(crate) struct Claim {
    pool: Arc<Pool>,
    held: Option<Held<Open>>,
}

impl Claim {
    pub(crate) fn open(&self) -> Option<(Arc<OwnedFd>, Arc<AtomicBool>)> {
        self.held.as_ref().map(|held| (Arc::clone(&held.part.namespace), Arc::clone(&held.part.resolves)))
    }

    pub(crate) fn keep(mut self) -> Option<Held<Open>> {
        self.held.take()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(held) = self.held.take() {
            self.pool.discard(held);
        }
    }
}

impl Pool {
    /// Waits for `condition`, asked again after every change; `false` at the deadline.
    pub(crate) async fn until(&self, deadline: Instant, condition: impl Fn(&Ledger<Open>) -> bool) -> bool {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            // Registered before the condition is read, so that no change in between is missed.
            changed.as_mut().enable();
            if condition(&self.ledger.lock()) {
                return true;
            }
            if timeout_at(deadline, changed).await.is_err() {
                return condition(&self.ledger.lock());
            }
        }
    }

    pub(crate) async fn claim(self: &Arc<Self>) -> Result<Claim, Error> {
        let deadline = Instant::now() + WAIT;
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let next = self.ledger.lock().next();
            match next {
                Next::Ready(held) => {
                    self.changed.notify_waiters();
                    return Ok(Claim { pool: Arc::clone(self), held: Some(held) });
                }
                Next::Build(index) => {
                    let (hand_over, handed) = oneshot::channel();
                    let pool = Arc::clone(self);
                    self.runtime.spawn(async move {
                        let claim = pool.build(index).await;
                        if claim.is_ok() {
                            pool.ledger.lock().build_handed_over();
                            pool.changed.notify_waiters();
                        }
                        // Nobody there: the claim's drop tears the slot down.
                        let _ = hand_over.send(claim);
                    });
                    return handed.await.map_err(|_| "the build was cut off").during("build a slot")?;
                }
                Next::Wait if timeout_at(deadline, changed).await.is_ok() => {}
                Next::Wait | Next::Exhausted => return Err(Error::Exhausted(self.slots)),
                Next::Closed => return Err(Error::step("take a network slot", "the network is shut down")),
            }
        }
    }

    /// Builds an index that the ledger counts as building. On success it still does, so that whoever hands the slot on
    /// can end that in the same step; on failure it doesn't.
    async fn build(self: &Arc<Self>, index: u32) -> Result<Claim, Error> {
        let pool = Arc::clone(self);
        let build = move |host: &HostNamespace| {
            let generation = pool.memory.lock().generation()?;
            let parts = pool.blueprint.build(host, index, generation)?;
            Ok((generation, parts))
        };
        let failure = match self.builders.run(build).await.flatten() {
            Ok((generation, parts)) => match self.open(parts) {
                Ok(part) => {
                    return Ok(Claim {
                        pool: Arc::clone(self),
                        held: Some(Held { index, generation, part }),
                    });
                }
                Err(e) => {
                    self.demolish(index, generation);
                    self.ledger.lock().build_handed_over();
                    e
                }
            },
            Err(e) => {
                self.ledger.lock().build_failed(index);
                e
            }
        };
        self.changed.notify_waiters();
        Err(failure)
    }

    fn open(&self, parts: Parts) -> Result<Open, Error> {
        let resolves = Arc::new(AtomicBool::new(parts.open));
        let _runtime = self.runtime.enter();
        let serve = |sockets| dns::serve(sockets, &self.resolver, &resolves);
        let forwarder = parts.resolver.map(serve).transpose().during("serve the slot's resolver")?;
        Ok(Open { namespace: Arc::new(parts.namespace), resolves, _forwarder: forwarder })
    }

    /// Tears a slot down in the background and gives its index back.
    pub(crate) fn discard(self: &Arc<Self>, held: Held<Open>) {
        let (index, generation) = (held.index, held.generation);
        drop(held);
        self.demolish(index, generation);
    }

    pub(crate) fn demolish(self: &Arc<Self>, index: u32, generation: u64) {
        self.ledger.lock().leave();
        let pool = Arc::clone(self);
        let name = self.blueprint.name(index, generation);
        self.runtime.spawn(async move {
            if let Err(e) = pool.tear_down(name.clone(), index).await {
                tracing::warn!(slot = name, error = %e, "a network slot could not be removed; the next reap tries again");
            }
        });
    }

    /// Tears down what the ledger counts as leaving.
    async fn tear_down(&self, name: String, index: u32) -> Result<(), Error> {
        let (blueprint, doomed) = (Arc::clone(&self.blueprint), name.clone());
        let outcome = self.wreckers.run(move |_| blueprint.tear_down(&doomed)).await.flatten();
        match outcome {
            Ok(()) => self.ledger.lock().left(index),
            Err(_) => self.ledger.lock().stuck(name, index),
        }
        self.changed.notify_waiters();
        outcome
    }

    /// Removes all leftovers; how many, or the last error.
    pub(crate) async fn reap(self: &Arc<Self>) -> Result<usize, Error> {
        let doomed = self.ledger.lock().condemn_leftovers();
        let count = doomed.len();
        let mut tasks = Vec::new();
        for (name, index) in doomed {
            let pool = Arc::clone(self);
            // Dropping the handle detaches: each task keeps the books, also when the caller goes away.
            tasks.push(self.runtime.spawn(async move { pool.tear_down(name, index).await }));
        }
        let mut failure = None;
        for task in tasks {
            if let Err(e) = task.await.during("reap network slots").flatten() {
                failure = Some(e);
            }
        }
        failure.map_or(Ok(count), Err)
    }

    pub(crate) async fn adopt(&self, slot: &Slot) -> Result<bool, Error> {
        if self.live(slot).is_some() {
            return Ok(true);
        }
        let name = self.blueprint.name(slot.index, slot.generation);
        let Some(index) = self.ledger.lock().take_leftover(&name) else { return Ok(false) };
        let (blueprint, wanted) = (Arc::clone(&self.blueprint), name.clone());
        let adopted = self.builders.run(move |host| blueprint.adopt(host, &wanted)).await.flatten();
        let opened = adopted.and_then(|parts| parts.map(|parts| self.open(parts)).transpose());
        let mut ledger = self.ledger.lock();
        match opened {
            Ok(Some(part)) => {
                ledger.go_live(Held { index, generation: slot.generation, part });
                Ok(true)
            }
            // Incomplete or in trouble: for the reaper.
            Ok(None) => {
                ledger.return_leftover(name, index);
                Ok(false)
            }
            Err(e) => {
                ledger.return_leftover(name, index);
                Err(e)
            }
        }
    }

    /// Runs `work` in a live slot's namespace.
    pub(crate) async fn in_slot<R: Send + 'static>(
        &self,
        namespace: Arc<OwnedFd>,
        work: impl FnOnce() -> io::Result<R> + Send + 'static,
    ) -> Result<io::Result<R>, Error> {
        self.quick.run(move |host| host.within(&namespace, work).flatten()).await
    }

    pub(crate) async fn apply(
        &self,
        (namespace, resolves): (Arc<OwnedFd>, Arc<AtomicBool>),
        egress: Egress,
    ) -> Result<(), Error> {
        let open = egress == Egress::Internet;
        if !open {
            resolves.store(false, Ordering::Release);
        }
        self.in_slot(namespace, move || nft::set_open(open)).await?.during("switch the slot's egress")?;
        resolves.store(open, Ordering::Release);
        Ok(())
    }

    pub(crate) fn live(&self, slot: &Slot) -> Option<(Arc<OwnedFd>, Arc<AtomicBool>)> {
        let ledger = self.ledger.lock();
        let open = ledger.live(slot.index, slot.generation)?;
        Some((Arc::clone(&open.namespace), Arc::clone(&open.resolves)))
    }

    pub(crate) async fn mend(&self) -> Result<(), Error> {
        let blueprint = Arc::clone(&self.blueprint);
        self.wreckers.run(move |_| host::mend(&blueprint.node, blueprint.plan.supernet())).await?
    }

    /// Keeps the pool full until it is aborted. Several run at once.
    pub(crate) async fn refill(self: Arc<Self>) {
        let mut pause = FIRST_PAUSE;
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let wanted = self.ledger.lock().wanted_in_stock(self.prepared);
            let Some(index) = wanted else {
                changed.await;
                continue;
            };
            // In a task of its own, because this one may be aborted at any await.
            let pool = Arc::clone(&self);
            match self.runtime.spawn(async move { pool.stock(index).await }).await {
                Ok(Ok(())) => pause = FIRST_PAUSE,
                Ok(Err(e)) => {
                    tracing::warn!(error = %e, "a network slot could not be prepared");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(LAST_PAUSE);
                }
                Err(_) => return,
            }
        }
    }

    async fn stock(self: &Arc<Self>, index: u32) -> Result<(), Error> {
        let built = self.build(index).await?.keep();
        let refused = built.and_then(|held| self.ledger.lock().stock(held));
        if let Some(held) = refused {
            self.discard(held);
        }
        self.changed.notify_waiters();
        Ok(())
    }
}
