//! [`NetnsNetwork`]: what a node sees of its slots.
//!
//! kill -9: kernel objects stay under names that the next start lists as leftovers. It adopts those that records name
//! and reaps the rest. Guests keep running meanwhile; only their resolver is silent until adoption. A lock file keeps two
//! processes of one node apart; `start` waits a little for it, because an earlier instance in the same process may still
//! be finishing.

use crate::{
    During as _, Egress, Error, GUEST_IP, Network, Slot, Upstreams, dns,
    host::{self, Memory},
    ledger::Ledger,
    link, namespace,
    netlink::Socket,
    plan::{Ipv4Net, NodePrefix, Plan},
    pool::Pool,
    slot::Blueprint,
    threads::{HostNamespace, Threads},
};
use async_trait::async_trait;
use parking_lot::Mutex;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use std::{collections::BTreeMap, io, path::Path, path::PathBuf, sync::Arc, time::Duration};
use tokio::{
    net::{TcpSocket, TcpStream},
    runtime::Handle,
    sync::Notify,
    task::AbortHandle,
    time::Instant,
};

/// Builds at once: more only queue for the kernel's network lock.
const BUILDERS: usize = 2;
const WRECKERS: usize = 2;
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
    pool: Arc<Pool>,
    background: Vec<AbortHandle>,
}

impl NetnsNetwork {
    /// Prepares the host and starts filling the pool. Needs root, `nft` and `/dev/net/tun`.
    ///
    /// # Errors
    /// A step that failed, saying what to do; nothing but the run directory and the claimed range is left behind.
    pub async fn start(options: Options) -> Result<Arc<Self>, Error> {
        let runtime = Handle::current();
        let follow_host = options.dns == Upstreams::Host;
        let pool = tokio::task::spawn_blocking(move || open(&options, runtime)).await;
        let pool = Arc::new(pool.during("start the network")??);
        let mut background = vec![tokio::spawn(housekeeping(Arc::clone(&pool), follow_host)).abort_handle()];
        background.extend((0..BUILDERS).map(|_| tokio::spawn(Arc::clone(&pool).refill()).abort_handle()));
        Ok(Arc::new(Self { pool, background }))
    }

    /// The range in use.
    pub fn supernet(&self) -> Ipv4Net {
        self.pool.blueprint.plan.supernet()
    }

    /// Number of slots that an acquire would get without building.
    pub fn ready(&self) -> usize {
        self.pool.ledger.lock().ready()
    }

    /// Waits until the pool is full or `deadline` has passed; `true` when full.
    pub async fn filled(&self, deadline: Duration) -> bool {
        self.pool.until(Instant::now() + deadline, |ledger| ledger.is_full(self.pool.prepared)).await
    }

    /// Puts back host rules that another firewall's (re)start took away. Done by itself twice a minute; this does it now.
    ///
    /// # Errors
    /// The firewall's tools failed.
    pub async fn mend(&self) -> Result<(), Error> {
        self.pool.mend().await
    }

    /// Ends the pool and waits for slots being torn down. When no slot is live and nothing is left over, everything
    /// on the host is removed too, except net.ipv4.ip_forward; otherwise it stays for the process that adopts.
    ///
    /// # Errors
    /// A step that failed, or slots that were not gone after a minute.
    pub async fn shutdown(&self) -> Result<(), Error> {
        self.background.iter().for_each(AbortHandle::abort);
        let unused = self.pool.ledger.lock().close();
        unused.into_iter().for_each(|held| self.pool.discard(held));
        if !self.pool.until(Instant::now() + SHUTDOWN, Ledger::is_idle).await {
            return Err(Error::step(
                "shut the network down",
                "slots were still being torn down after a minute",
            ));
        }
        if !self.pool.ledger.lock().is_empty() {
            return Ok(());
        }
        let blueprint = Arc::clone(&self.pool.blueprint);
        let clear = move |_: &HostNamespace| {
            host::clear(&blueprint.node, blueprint.plan.supernet())?;
            namespace::dismantle(&blueprint.directory).during("remove the namespaces' directory")
        };
        self.pool.wreckers.run(clear).await?
    }
}

impl Drop for NetnsNetwork {
    fn drop(&mut self) {
        self.background.iter().for_each(AbortHandle::abort);
        // The pool's slots are nobody's from now on, and a build under way ends in a tear-down.
        let unused = self.pool.ledger.lock().close();
        unused.into_iter().for_each(|held| self.pool.discard(held));
    }
}

/// Everything of [`NetnsNetwork::start`] that blocks.
fn open(options: &Options, runtime: Handle) -> Result<Pool, Error> {
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
    Ok(Pool {
        slots: options.slots,
        prepared: options.prepared,
        runtime,
        memory: Mutex::new(memory),
        ledger: Mutex::new(Ledger::new(options.slots, leftover)),
        changed: Notify::new(),
        quick: threads("net-quick", 1)?,
        builders: threads("net-build", BUILDERS)?,
        wreckers: threads("net-wreck", WRECKERS)?,
        resolver: Arc::new(resolver),
        blueprint: Arc::new(Blueprint { node, plan, directory, resolver: options.dns != Upstreams::Off }),
    })
}

/// Names of this node that exist in the kernel, in use or not: namespaces and host ends of veth pairs.
fn leftovers(node: &NodePrefix, directory: &Path) -> Result<BTreeMap<String, u32>, Error> {
    let mut names = namespace::names(directory).during("list the namespaces' directory")?;
    names.extend(Socket::route().and_then(|mut s| link::names(&mut s)).during("list the host's links")?);
    Ok(names.into_iter().filter_map(|name| node.parse(&name).map(|(index, _)| (name, index))).collect())
}

/// Follows changes of the host: its nameservers, and firewalls that were reloaded over our rules.
async fn housekeeping(pool: Arc<Pool>, follow_host: bool) {
    let mut ticks = tokio::time::interval(HOUSEKEEPING);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    ticks.tick().await;
    let mut turn = 0_u8;
    loop {
        ticks.tick().await;
        if follow_host && let Ok(found) = tokio::task::spawn_blocking(dns::host_upstreams).await {
            pool.resolver.replace(found);
        }
        turn = (turn + 1) % 3;
        if turn == 0
            && let Err(e) = pool.mend().await
        {
            tracing::warn!(error = %e, "the host's firewall rules for sandboxes could not be checked or restored");
        }
    }
}

#[async_trait]
impl Network for NetnsNetwork {
    async fn acquire(&self, egress: Egress) -> Result<Slot, Error> {
        let claim = self.pool.claim().await?;
        // A built slot is closed, so only opening needs work.
        if let (Egress::Internet, Some(open)) = (egress, claim.open()) {
            self.pool.apply(open, egress).await?;
        }
        let held = claim.keep().ok_or("it was lost").during("take a network slot")?;
        let (index, generation) = (held.index, held.generation);
        let netns = self.pool.blueprint.path(&self.pool.blueprint.name(index, generation));
        self.pool.ledger.lock().go_live(held);
        Ok(Slot { index, generation, netns })
    }

    async fn set_egress(&self, slot: &Slot, egress: Egress) -> Result<(), Error> {
        let open = self.pool.live(slot).ok_or_else(|| not_in_use(slot)).during("find the network slot")?;
        self.pool.apply(open, egress).await
    }

    async fn adopt(&self, slot: &Slot) -> Result<bool, Error> {
        // In a task of its own: a caller that goes away must not lose the slot half-way.
        let (pool, slot) = (Arc::clone(&self.pool), slot.clone());
        let adoption = self.pool.runtime.spawn(async move { pool.adopt(&slot).await });
        adoption.await.during("adopt a network slot")?
    }

    async fn release(&self, slot: &Slot) {
        let name = self.pool.blueprint.name(slot.index, slot.generation);
        let (live, leftover) = {
            let mut ledger = self.pool.ledger.lock();
            (ledger.retire(slot.index, slot.generation), ledger.take_leftover(&name))
        };
        if let Some(held) = live {
            self.pool.discard(held);
        } else if leftover.is_some() {
            self.pool.demolish(slot.index, slot.generation);
        }
    }

    async fn reap(&self) -> Result<usize, Error> {
        self.pool.reap().await
    }

    async fn connect(&self, slot: &Slot, port: u16) -> io::Result<TcpStream> {
        let gone = || io::Error::new(io::ErrorKind::NotFound, not_in_use(slot));
        let (namespace, _) = self.pool.live(slot).ok_or_else(gone)?;
        let open = || {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
            sockopt::set_tcp_nodelay(&socket, true)?;
            Ok(socket)
        };
        let socket = self.pool.in_slot(namespace, open).await.map_err(io::Error::other)??;
        TcpSocket::from_std_stream(socket.into()).connect((GUEST_IP, port).into()).await
    }
}

fn not_in_use(slot: &Slot) -> String {
    format!("slot {} of generation {} is not in use", slot.index, slot.generation)
}
