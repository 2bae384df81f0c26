//! [`NetnsNetwork`]: the life of all slots of a node.
//!
//! ```text
//!  free ──build──▶ ready ──acquire──▶ live ──release──▶ leaving ──torn down──▶ free
//!    ▲                                 ▲                   │ failed
//!    └──────────reap───── leftover ────┘ adopt             ▼
//!                            ▲─────────────────────────────┘
//! ```
//! An *index* moves through these states; a *generation* is one passage and gives the names. `leftover` is what a
//! former process left, or what could not be torn down.
//!
//! - A build that fails returns its index to `free`. The refill then waits, longer each time; an acquire gets the error.
//! - A caller that goes away during `acquire` loses nothing: a claimed slot that isn't handed over is torn down.
//! - kill -9: kernel objects stay under names that the next start lists as leftovers. It adopts those that records
//!   name and reaps the rest. Guests keep running meanwhile; only their resolver is silent until adoption.
//! - The lock file keeps two processes of one node apart. `start` waits a little for it, because an earlier instance
//!   in the same process may still be finishing.

use crate::{
    During as _, Egress, Error, GUEST_IP, Network, Slot, Upstreams, dns,
    host::{self, Memory},
    link, namespace,
    netlink::Socket,
    nft,
    plan::{Ipv4Net, NodePrefix, Plan},
    slot::{Blueprint, Parts},
    threads::{HostNamespace, Threads},
};
use async_trait::async_trait;
use parking_lot::Mutex;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    io,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{
    net::{TcpSocket, TcpStream},
    runtime::Handle,
    sync::{Notify, oneshot},
    task::{AbortHandle, JoinSet},
    time::{Instant, timeout_at},
};

/// Builds at once: more only queue for the kernel's network lock.
const BUILDERS: usize = 2;
const WRECKERS: usize = 2;
/// How long an acquire waits for slots that are being torn down when no other is free.
const WAIT: Duration = Duration::from_secs(10);
const SHUTDOWN: Duration = Duration::from_secs(60);
const HOUSEKEEPING: Duration = Duration::from_secs(10);

/// How a node's network is made.
#[derive(Debug, Clone)]
pub struct Options {
    /// Holds namespaces, the lock and the node's memory; several nodes may share it. Should be lost at reboot, like
    /// `/run/aenv`.
    pub run_dir: PathBuf,
    /// 1 to 4 characters of a-z and 0-9, unique per data directory: part of every link's and table's name.
    pub node_prefix: String,
    /// The range that is cut into slots. `None`: the first /16 from 10.231.0.0 on that the host doesn't use. A given
    /// range that collides with a route or a nameserver of the host is an error.
    pub supernet: Option<Ipv4Net>,
    /// Most slots at once, prepared ones included.
    pub slots: u32,
    /// Slots kept ready.
    pub prepared: usize,
    /// Where guests' DNS queries go.
    pub dns: Upstreams,
}

impl Options {
    /// 4096 slots, 8 prepared, the host's nameservers, an automatic range.
    pub fn new(run_dir: impl Into<PathBuf>, node_prefix: impl Into<String>) -> Self {
        Self {
            run_dir: run_dir.into(),
            node_prefix: node_prefix.into(),
            supernet: None,
            slots: 4096,
            prepared: 8,
            dns: Upstreams::Host,
        }
    }
}

/// Slots made of network namespaces. Dropping it leaves live slots in place for a later process to adopt;
/// [`shutdown`](Self::shutdown) cleans up.
pub struct NetnsNetwork {
    shared: Arc<Shared>,
    background: Vec<AbortHandle>,
}

struct Shared {
    blueprint: Arc<Blueprint>,
    slots: u32,
    prepared: usize,
    runtime: Handle,
    memory: Mutex<Memory>,
    state: Mutex<State>,
    /// Told of every change of `state`.
    changed: Notify,
    /// For what takes microseconds: sockets and single set elements.
    quick: Threads,
    builders: Threads,
    wreckers: Threads,
    resolver: Arc<dns::Resolver>,
}

#[derive(Default)]
struct State {
    free: VecDeque<u32>,
    ready: VecDeque<Passage>,
    live: HashMap<u32, Passage>,
    /// Name to index.
    leftover: BTreeMap<String, u32>,
    building: usize,
    leaving: usize,
    closed: bool,
}

/// A built slot: one generation of an index.
struct Passage {
    index: u32,
    generation: u64,
    namespace: Arc<OwnedFd>,
    /// Whether the resolver answers.
    open: Arc<AtomicBool>,
    _forwarder: Option<dns::Forwarder>,
}

/// A slot on its way to somebody; torn down when it doesn't arrive.
struct Claim {
    shared: Arc<Shared>,
    passage: Option<Passage>,
}

impl Claim {
    fn keep(mut self) -> Option<Passage> {
        self.passage.take()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(passage) = self.passage.take() {
            self.shared.discard(passage);
        }
    }
}

enum Next {
    Ready(Passage),
    Build(u32),
    Wait,
    Exhausted,
    Closed,
}

impl State {
    fn next(&mut self) -> Next {
        if self.closed {
            Next::Closed
        } else if let Some(passage) = self.ready.pop_front() {
            Next::Ready(passage)
        } else if let Some(index) = self.free.pop_front() {
            self.building += 1;
            Next::Build(index)
        } else if self.building + self.leaving > 0 {
            Next::Wait
        } else {
            Next::Exhausted
        }
    }
}

impl NetnsNetwork {
    /// Prepares the host and starts filling the pool. Needs root, `nft` and `/dev/net/tun`.
    ///
    /// # Errors
    /// A step that failed, saying what to do; nothing but the run directory and the claimed range is left behind.
    pub async fn start(options: Options) -> Result<Arc<Self>, Error> {
        let runtime = Handle::current();
        let follow_host = options.dns == Upstreams::Host;
        let shared = tokio::task::spawn_blocking(move || Shared::open(&options, runtime)).await;
        let shared = Arc::new(shared.during("start the network")??);
        let mut background = Vec::new();
        for _ in 0..BUILDERS {
            background.push(tokio::spawn(refill(Arc::clone(&shared))).abort_handle());
        }
        background.push(tokio::spawn(housekeeping(Arc::clone(&shared), follow_host)).abort_handle());
        Ok(Arc::new(Self { shared, background }))
    }

    /// The range in use.
    pub fn supernet(&self) -> Ipv4Net {
        self.shared.blueprint.plan.supernet()
    }

    /// Number of slots that an acquire would get without building.
    pub fn ready(&self) -> usize {
        self.shared.state.lock().ready.len()
    }

    /// Waits until the pool is full or `deadline` has passed; `true` when full.
    pub async fn filled(&self, deadline: Duration) -> bool {
        let full = || {
            let state = self.shared.state.lock();
            state.ready.len() >= self.shared.prepared || (state.free.is_empty() && state.building == 0)
        };
        self.shared.until(Instant::now() + deadline, full).await
    }

    /// Puts back host rules that another firewall's (re)start took away. Done by itself twice a minute; this does it now.
    ///
    /// # Errors
    /// The firewall's tools failed.
    pub async fn mend(&self) -> Result<(), Error> {
        self.shared.mend().await
    }

    /// Ends the pool and waits for slots being torn down. When no slot is live and nothing is left over, everything
    /// on the host is removed too, except net.ipv4.ip_forward; otherwise it stays for the process that adopts.
    ///
    /// # Errors
    /// A step that failed, or slots that were not gone after a minute.
    pub async fn shutdown(&self) -> Result<(), Error> {
        self.background.iter().for_each(AbortHandle::abort);
        let ready: Vec<Passage> = {
            let mut state = self.shared.state.lock();
            state.closed = true;
            state.ready.drain(..).collect()
        };
        for passage in ready {
            self.shared.discard(passage);
        }
        let idle = || {
            let state = self.shared.state.lock();
            state.building + state.leaving == 0
        };
        if !self.shared.until(Instant::now() + SHUTDOWN, idle).await {
            return Err(Error::step(
                "shut the network down",
                "slots were still being torn down after a minute",
            ));
        }
        let empty = {
            let state = self.shared.state.lock();
            state.live.is_empty() && state.leftover.is_empty()
        };
        if !empty {
            return Ok(());
        }
        let blueprint = Arc::clone(&self.shared.blueprint);
        let clear = move |_: &HostNamespace| {
            host::clear(&blueprint.node, blueprint.plan.supernet())?;
            namespace::dismantle(&blueprint.directory).during("remove the namespaces' directory")
        };
        self.shared.wreckers.run(clear).await?
    }
}

impl Drop for NetnsNetwork {
    fn drop(&mut self) {
        self.background.iter().for_each(AbortHandle::abort);
        // A build under way then ends in a tear-down.
        self.shared.state.lock().closed = true;
    }
}

impl Shared {
    fn open(options: &Options, runtime: Handle) -> Result<Self, Error> {
        let node = NodePrefix::new(&options.node_prefix)?;
        let directory = namespace::prepare(&options.run_dir.join("netns"))
            .during("make the namespaces' directory (is this root?)")?;
        let upstreams = match &options.dns {
            Upstreams::Host => dns::host_upstreams(),
            Upstreams::Fixed(list) => list.clone(),
            Upstreams::Off => Vec::new(),
        };
        let lock = host::lock(&options.run_dir, &node)?;
        let leftover = leftovers(&node, &directory)?;
        let memory =
            Memory::open(lock, &options.run_dir, &node, options.supernet, !leftover.is_empty(), &upstreams)?;
        let plan = Plan::new(memory.supernet(), options.slots)?;
        host::set_up(&node, plan.supernet())?;
        let host = Arc::new(HostNamespace::of_this_thread().during("open the host's network namespace")?);
        let threads = |name, count| Threads::start(name, count, &host).during("start the network threads");
        let resolver = dns::Resolver::default();
        resolver.replace(upstreams);
        if !leftover.is_empty() {
            tracing::info!(
                count = leftover.len(),
                "an earlier process left network slots; they wait for adoption or reaping"
            );
        }
        let used: Vec<u32> = leftover.values().copied().collect();
        let free = (0..options.slots).filter(|index| !used.contains(index)).collect();
        Ok(Self {
            slots: options.slots,
            prepared: options.prepared,
            runtime,
            memory: Mutex::new(memory),
            state: Mutex::new(State { free, leftover, ..State::default() }),
            changed: Notify::new(),
            quick: threads("net-quick", 1)?,
            builders: threads("net-build", BUILDERS)?,
            wreckers: threads("net-wreck", WRECKERS)?,
            resolver: Arc::new(resolver),
            blueprint: Arc::new(Blueprint { node, plan, directory, resolver: options.dns != Upstreams::Off }),
        })
    }

    /// Waits for `condition`, asked again after every change; `false` at the deadline.
    async fn until(&self, deadline: Instant, condition: impl Fn() -> bool) -> bool {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            // Registered before the condition is read, so that no change in between is missed.
            changed.as_mut().enable();
            if condition() {
                return true;
            }
            if timeout_at(deadline, changed).await.is_err() {
                return condition();
            }
        }
    }

    async fn claim(self: &Arc<Self>) -> Result<Claim, Error> {
        let deadline = Instant::now() + WAIT;
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let next = self.state.lock().next();
            match next {
                Next::Ready(passage) => {
                    self.changed.notify_waiters();
                    return Ok(Claim { shared: Arc::clone(self), passage: Some(passage) });
                }
                Next::Build(index) => {
                    // In a task of its own: a caller that goes away must not stop a build half-way.
                    let (hand_over, handed) = oneshot::channel();
                    let shared = Arc::clone(self);
                    self.runtime.spawn(async move {
                        let claim = shared.build(index).await;
                        if claim.is_ok() {
                            shared.state.lock().building -= 1;
                            shared.changed.notify_waiters();
                        }
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

    /// Builds the slot `index`, which [`State::next`] or the refill has counted as building. On success it still
    /// counts, so that whoever hands the slot on can uncount it in the same step; on failure it doesn't.
    async fn build(self: &Arc<Self>, index: u32) -> Result<Claim, Error> {
        let shared = Arc::clone(self);
        let build = move |host: &HostNamespace| {
            let generation = shared.memory.lock().generation()?;
            let parts = shared.blueprint.build(host, index, generation)?;
            Ok((generation, parts))
        };
        let failure = match self.builders.run(build).await.flatten() {
            Ok((generation, parts)) => match self.passage(index, generation, parts) {
                Ok(passage) => return Ok(Claim { shared: Arc::clone(self), passage: Some(passage) }),
                Err(e) => {
                    self.demolish(index, generation);
                    self.state.lock().building -= 1;
                    e
                }
            },
            Err(e) => {
                let mut state = self.state.lock();
                state.building -= 1;
                state.free.push_back(index);
                e
            }
        };
        self.changed.notify_waiters();
        Err(failure)
    }

    fn passage(&self, index: u32, generation: u64, parts: Parts) -> Result<Passage, Error> {
        let open = Arc::new(AtomicBool::new(parts.open));
        let _runtime = self.runtime.enter();
        let serve = |sockets| dns::serve(sockets, &self.resolver, &open);
        let forwarder = parts.resolver.map(serve).transpose().during("serve the slot's resolver")?;
        Ok(Passage { index, generation, namespace: Arc::new(parts.namespace), open, _forwarder: forwarder })
    }

    fn discard(self: &Arc<Self>, passage: Passage) {
        let (index, generation) = (passage.index, passage.generation);
        drop(passage);
        self.demolish(index, generation);
    }

    /// Tears a generation down in the background and gives its index back.
    fn demolish(self: &Arc<Self>, index: u32, generation: u64) {
        self.state.lock().leaving += 1;
        let shared = Arc::clone(self);
        let name = self.blueprint.name(index, generation);
        self.runtime.spawn(async move {
            let torn_down = shared.tear_down(name.clone()).await;
            let mut state = shared.state.lock();
            state.leaving -= 1;
            match torn_down {
                Ok(()) => state.give_back(index, shared.slots),
                Err(e) => {
                    tracing::warn!(slot = name, error = %e, "a network slot could not be removed; the next reap tries again");
                    state.leftover.insert(name, index);
                }
            }
            drop(state);
            shared.changed.notify_waiters();
        });
    }

    async fn tear_down(&self, name: String) -> Result<(), Error> {
        let blueprint = Arc::clone(&self.blueprint);
        self.wreckers.run(move |_| blueprint.tear_down(&name)).await?
    }

    async fn mend(&self) -> Result<(), Error> {
        let blueprint = Arc::clone(&self.blueprint);
        self.wreckers.run(move |_| host::mend(&blueprint.node, blueprint.plan.supernet())).await?
    }

    /// Runs `work` in a live slot's namespace.
    async fn in_slot<R: Send + 'static>(
        &self,
        namespace: Arc<OwnedFd>,
        work: impl FnOnce() -> io::Result<R> + Send + 'static,
    ) -> Result<io::Result<R>, Error> {
        self.quick.run(move |host| host.within(&namespace, work).flatten()).await
    }

    async fn apply(
        &self,
        namespace: Arc<OwnedFd>,
        resolves: Arc<AtomicBool>,
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

    fn live(&self, slot: &Slot) -> Option<(Arc<OwnedFd>, Arc<AtomicBool>)> {
        let state = self.state.lock();
        let passage = state.live.get(&slot.index).filter(|p| p.generation == slot.generation)?;
        Some((Arc::clone(&passage.namespace), Arc::clone(&passage.open)))
    }
}

impl State {
    fn give_back(&mut self, index: u32, slots: u32) {
        let taken = self.leftover.values().any(|other| *other == index) || self.free.contains(&index);
        // An index beyond the bound belonged to a process with more slots.
        if index < slots && !taken {
            self.free.push_back(index);
        }
    }
}

/// Names of this node that exist in the kernel, in use or not: namespaces and host ends of veth pairs.
fn leftovers(node: &NodePrefix, directory: &std::path::Path) -> Result<BTreeMap<String, u32>, Error> {
    let mut names = namespace::names(directory).during("list the namespaces' directory")?;
    names.extend(Socket::route().and_then(|mut s| link::names(&mut s)).during("list the host's links")?);
    Ok(names.into_iter().filter_map(|name| node.parse(&name).map(|(index, _)| (name, index))).collect())
}

/// Keeps the pool full. Several run at once.
async fn refill(shared: Arc<Shared>) {
    let mut pause = Duration::from_millis(500);
    loop {
        let mut changed = std::pin::pin!(shared.changed.notified());
        changed.as_mut().enable();
        let wanted = {
            let mut state = shared.state.lock();
            let short = !state.closed && state.ready.len() + state.building < shared.prepared;
            let index = short.then(|| state.free.pop_front()).flatten();
            state.building += usize::from(index.is_some());
            index
        };
        let Some(index) = wanted else {
            changed.await;
            continue;
        };
        // In a task of its own, because this one may be aborted at any await.
        let building = {
            let shared = Arc::clone(&shared);
            shared.clone().runtime.spawn(async move { shared.stock(index).await })
        };
        match building.await {
            Ok(Ok(())) => pause = Duration::from_millis(500),
            Ok(Err(e)) => {
                tracing::warn!(error = %e, "a network slot could not be prepared");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_secs(30));
            }
            Err(_) => return,
        }
    }
}

impl Shared {
    /// Builds a slot for the pool.
    async fn stock(self: &Arc<Self>, index: u32) -> Result<(), Error> {
        let claim = self.build(index).await?;
        {
            let mut state = self.state.lock();
            state.building -= 1;
            if state.closed {
                drop(state);
                drop(claim);
            } else {
                state.ready.extend(claim.keep());
            }
        }
        self.changed.notify_waiters();
        Ok(())
    }
}

/// Follows changes of the host: its nameservers, and firewalls that were reloaded over our rules.
async fn housekeeping(shared: Arc<Shared>, follow_host: bool) {
    let mut ticks = tokio::time::interval(HOUSEKEEPING);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    ticks.tick().await;
    let mut turn = 0_u8;
    loop {
        ticks.tick().await;
        if follow_host && let Ok(found) = tokio::task::spawn_blocking(dns::host_upstreams).await {
            shared.resolver.replace(found);
        }
        turn = (turn + 1) % 3;
        if turn == 0
            && let Err(e) = shared.mend().await
        {
            tracing::warn!(error = %e, "the host's firewall rules for sandboxes could not be checked or restored");
        }
    }
}

#[async_trait]
impl Network for NetnsNetwork {
    async fn acquire(&self, egress: Egress) -> Result<Slot, Error> {
        let claim = self.shared.claim().await?;
        if let (Egress::Internet, Some(passage)) = (egress, &claim.passage) {
            let (namespace, open) = (Arc::clone(&passage.namespace), Arc::clone(&passage.open));
            self.shared.apply(namespace, open, egress).await?;
        }
        let passage = claim.keep().ok_or("it was lost").during("take a network slot")?;
        let (index, generation) = (passage.index, passage.generation);
        let netns = self.shared.blueprint.path(&self.shared.blueprint.name(index, generation));
        self.shared.state.lock().live.insert(index, passage);
        Ok(Slot { index, generation, netns })
    }

    async fn set_egress(&self, slot: &Slot, egress: Egress) -> Result<(), Error> {
        let (namespace, open) =
            self.shared.live(slot).ok_or_else(|| not_in_use(slot)).during("find the network slot")?;
        self.shared.apply(namespace, open, egress).await
    }

    async fn adopt(&self, slot: &Slot) -> Result<bool, Error> {
        let shared = &self.shared;
        if self.shared.live(slot).is_some() {
            return Ok(true);
        }
        let name = shared.blueprint.name(slot.index, slot.generation);
        let Some(index) = shared.state.lock().leftover.remove(&name) else { return Ok(false) };
        let (blueprint, wanted) = (Arc::clone(&shared.blueprint), name.clone());
        let adopted = shared.builders.run(move |host| blueprint.adopt(host, &wanted)).await.flatten();
        let passage = adopted
            .and_then(|parts| parts.map(|parts| shared.passage(index, slot.generation, parts)).transpose());
        let mut state = shared.state.lock();
        match passage {
            Ok(Some(passage)) => {
                state.live.insert(index, passage);
                Ok(true)
            }
            // Incomplete or in trouble: for the reaper.
            Ok(None) => {
                state.leftover.insert(name, index);
                Ok(false)
            }
            Err(e) => {
                state.leftover.insert(name, index);
                Err(e)
            }
        }
    }

    async fn release(&self, slot: &Slot) {
        let shared = &self.shared;
        let live = {
            let mut state = shared.state.lock();
            let current = state.live.get(&slot.index).is_some_and(|p| p.generation == slot.generation);
            if current { state.live.remove(&slot.index) } else { None }
        };
        if let Some(passage) = live {
            shared.discard(passage);
        } else if shared
            .state
            .lock()
            .leftover
            .remove(&shared.blueprint.name(slot.index, slot.generation))
            .is_some()
        {
            shared.demolish(slot.index, slot.generation);
        }
    }

    async fn reap(&self) -> Result<usize, Error> {
        let doomed = std::mem::take(&mut self.shared.state.lock().leftover);
        let count = doomed.len();
        let mut tasks = JoinSet::new();
        for (name, index) in doomed {
            let shared = Arc::clone(&self.shared);
            shared.state.lock().leaving += 1;
            tasks.spawn(async move {
                let outcome = shared.tear_down(name.clone()).await;
                let mut state = shared.state.lock();
                state.leaving -= 1;
                match &outcome {
                    Ok(()) => state.give_back(index, shared.slots),
                    Err(_) => drop(state.leftover.insert(name, index)),
                }
                drop(state);
                shared.changed.notify_waiters();
                outcome
            });
        }
        // Detached on purpose when the caller goes away: each task keeps the books.
        let mut failure = None;
        while let Some(outcome) = tasks.join_next().await {
            if let Err(e) = outcome.during("reap network slots").flatten() {
                failure = Some(e);
            }
        }
        failure.map_or(Ok(count), Err)
    }

    async fn connect(&self, slot: &Slot, port: u16) -> io::Result<TcpStream> {
        let (namespace, _) = self
            .shared
            .live(slot)
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, not_in_use(slot)))?;
        let open = || {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
            sockopt::set_tcp_nodelay(&socket, true)?;
            Ok(socket)
        };
        let socket = self.shared.in_slot(namespace, open).await.map_err(io::Error::other)??;
        TcpSocket::from_std_stream(socket.into()).connect((GUEST_IP, port).into()).await
    }
}

fn not_in_use(slot: &Slot) -> String {
    format!("slot {} of generation {} is not in use", slot.index, slot.generation)
}
