//! The node itself: what all its parts share, its start and its end.

use crate::{
    admission::{Admission, Room, host_memory_mib},
    adoption,
    catalog::Catalog,
    control::{self, Route},
    journal::Journal,
    machine::remove_dirs,
    model::{EndCause, Phase, Principal, Sandbox, SandboxId, State},
    options::{Deadlines, Kit, Limits, Options, Parts},
    pool::{self, Pool},
    records::{Db, Record},
    sandbox::{Begin, Driver, Message},
    steps::StepError,
    telemetry,
};
use aenv_network::Slot;
use parking_lot::{Mutex, RwLock};
use rustix::fs::{FlockOperation, flock};
use sha2::{Digest, Sha256};
use std::{
    collections::HashMap,
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Why a node didn't start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// Another server uses the data directory.
    #[error("{0} is in use by another aenv server; stop that one or give this one its own --data-dir")]
    InUse(PathBuf),
    /// A directory or file can't be used.
    #[error("{path}: {source}")]
    Io {
        /// Which.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The records can't be used.
    #[error("{0}")]
    Records(String),
    /// What a former server left can't be compared with the records.
    #[error("{0}")]
    Adoption(String),
}

/// How long [`Node::shutdown`] waits for operations under way.
const SHUTDOWN: Duration = Duration::from_secs(20);

/// A node. Cheap to share; see [`Control`](crate::control::Control) for what it does.
pub struct Node {
    pub(crate) inner: Arc<Inner>,
}

/// A sandbox as everybody but its driver sees it.
pub(crate) struct View {
    pub(crate) sandbox: Sandbox,
    pub(crate) route: Route,
    /// Original time to live.
    pub(crate) ttl: Duration,
    /// Directory of its machine's console, when it has a machine.
    pub(crate) machine_dir: Option<PathBuf>,
}

/// What the node's parts share.
pub(crate) struct Inner {
    data_dir: PathBuf,
    run_dir: PathBuf,
    pub(crate) kit: Kit,
    pub(crate) parts: Parts,
    pub(crate) limits: Limits,
    pub(crate) deadlines: Deadlines,
    pub(crate) db: Db,
    pub(crate) views: RwLock<HashMap<SandboxId, Arc<View>>>,
    drivers: Mutex<HashMap<SandboxId, mpsc::Sender<Message>>>,
    /// Sandboxes by team and idempotency key.
    pub(crate) idempotent: Mutex<HashMap<(String, String), SandboxId>>,
    pub(crate) keys: RwLock<HashMap<[u8; 32], String>>,
    pub(crate) catalog: Catalog,
    pub(crate) admission: Admission,
    pub(crate) image_turns: Arc<Semaphore>,
    pub(crate) build_turns: Arc<Semaphore>,
    /// Builds under way and how to stop them.
    pub(crate) building: Mutex<HashMap<crate::model::BuildId, CancellationToken>>,
    /// Told when any build has ended, well or not.
    pub(crate) build_ended: Notify,
    /// Held while a start from an image looks for a build or begins one.
    pub(crate) image_starts: tokio::sync::Mutex<()>,
    pub(crate) pool: Pool,
    pub(crate) journal: Journal,
    /// Cancelled when the server stops.
    pub(crate) stop: CancellationToken,
    pub(crate) tasks: TaskTracker,
    /// Held as long as the node lives.
    _lease: Lease,
}

impl Node {
    /// Takes the data directory, makes every sandbox in the records what it truly is, removes what nobody knows, and
    /// begins to serve.
    pub async fn start(options: Options) -> Result<Arc<Self>, StartError> {
        let Options { lease, data_dir, run_dir, kit, parts, limits, pool, deadlines } = options;
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| StartError::Io { path, source }
        };
        let machines = run_dir.join("machines");
        let lease = lease.map_or_else(|| Lease::take(&data_dir), Ok)?;
        for dir in [&run_dir, &machines] {
            tokio::fs::create_dir_all(dir).await.map_err(io(dir))?;
        }
        let db = Db::open(&data_dir.join("node.db"))
            .await
            .map_err(|error| StartError::Records(error.to_string()))?;
        let inner = Arc::new(Inner {
            admission: Admission::new(&limits, host_memory_mib()),
            image_turns: Arc::new(Semaphore::new(limits.max_images.max(1))),
            build_turns: Arc::new(Semaphore::new(limits.max_builds.max(1))),
            building: Mutex::default(),
            build_ended: Notify::new(),
            image_starts: tokio::sync::Mutex::default(),
            pool: Pool::new(pool),
            data_dir,
            run_dir,
            kit,
            parts,
            limits,
            deadlines,
            db,
            views: RwLock::default(),
            drivers: Mutex::default(),
            idempotent: Mutex::default(),
            keys: RwLock::default(),
            catalog: Catalog::default(),
            journal: Journal::default(),
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
            _lease: lease,
        });
        let adopted = adoption::reconcile(&inner).await?;
        for (record, begin) in adopted {
            inner.drive(record, begin);
        }
        inner.expect_use();
        inner.tasks.spawn(pool::keep(Arc::clone(&inner)));
        inner.tasks.spawn(telemetry::sample(Arc::clone(&inner)));
        inner.tasks.spawn(telemetry::purge(Arc::clone(&inner)));
        Ok(Arc::new(Self { inner }))
    }

    /// A key as clients expect one; valid for nobody until it is added.
    #[must_use]
    pub fn new_key() -> String {
        format!("e2b_{}", hex::encode(rand::random::<[u8; 20]>()))
    }

    /// Makes a given key valid for a team. Adding a key that is valid for the team already changes nothing.
    pub async fn add_key(&self, key: &str, team: &str, name: &str) -> Result<(), control::Error> {
        let sha256: [u8; 32] = Sha256::digest(key).into();
        match self.inner.keys.read().get(&sha256) {
            Some(owner) if owner == team => return Ok(()),
            Some(owner) => {
                return Err(control::Error::Conflict(format!("this key belongs to team '{owner}'")));
            }
            None => {}
        }
        let added = self.inner.db.add_key(sha256, team, name).await;
        added.map_err(|error| control::Error::Internal(error.to_string()))?;
        self.inner.keys.write().insert(sha256, team.to_owned());
        Ok(())
    }

    /// Whether any API key exists.
    #[must_use]
    pub fn has_keys(&self) -> bool {
        !self.inner.keys.read().is_empty()
    }

    /// Stops serving: operations under way are waited for, sandboxes go on running, warm machines are ended, records
    /// are closed. The next start adopts what runs.
    pub async fn shutdown(&self) {
        let inner = &self.inner;
        inner.stop.cancel();
        for cancel in inner.building.lock().values() {
            cancel.cancel();
        }
        inner.tasks.close();
        if tokio::time::timeout(SHUTDOWN, inner.tasks.wait()).await.is_err() {
            tracing::warn!(waited = ?SHUTDOWN, "operations are still under way; the next start takes them up");
        }
        inner.db.close().await;
    }
}

/// The right to use a data directory, held until dropped. Taken before anything that is named after the directory, like
/// network slots: a second server must find out before it touches what is the first one's.
pub struct Lease {
    _lock: File,
}

impl Lease {
    /// Takes it; the directory is made when missing.
    ///
    /// # Errors
    /// [`StartError::InUse`] when another server has it.
    pub fn take(data_dir: &Path) -> Result<Self, StartError> {
        let path = data_dir.join("node.lock");
        let io = |source| StartError::Io { path: path.clone(), source };
        std::fs::create_dir_all(data_dir).map_err(io)?;
        let file = File::options().create(true).truncate(false).write(true).open(&path).map_err(io)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self { _lock: file }),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(StartError::InUse(data_dir.to_owned())),
            Err(error) => Err(io(error.into())),
        }
    }
}

impl Inner {
    /// A path of a record as an absolute one.
    pub(crate) fn at(&self, relative: &Path) -> PathBuf {
        self.data_dir.join(relative)
    }

    /// A path below the data directory as records have it.
    pub(crate) fn relative(&self, path: &Path) -> Option<PathBuf> {
        path.strip_prefix(&self.data_dir).ok().map(Path::to_owned)
    }

    pub(crate) fn data_dir(&self) -> &Path {
        &self.data_dir
    }

    /// Where machines have their directories.
    pub(crate) fn machines(&self) -> PathBuf {
        self.run_dir.join("machines")
    }

    /// Room for a machine; waiting ones give way.
    pub(crate) async fn admit(self: &Arc<Self>, mib: u32) -> Result<Room, StepError> {
        match self.admission.admit(mib) {
            Err(StepError::Full { .. }) => {
                self.pool.shrink(self).await;
                self.admission.admit(mib)
            }
            admitted => admitted,
        }
    }

    /// Templates that were in use when the former server stopped are expected to be used again.
    fn expect_use(&self) {
        for ready in self.catalog.used_within(self.pool.recent()) {
            self.pool.expect(&ready);
        }
    }

    /// Starts a sandbox's driver.
    pub(crate) fn drive(self: &Arc<Self>, record: Record, begin: Begin) -> mpsc::Sender<Message> {
        let id = record.sandbox.id.clone();
        // Under the lock: a driver that ends at once must find itself in the map to take itself out.
        let mut drivers = self.drivers.lock();
        let mailbox = Driver::spawn(self, record, begin);
        drivers.insert(id, mailbox.clone());
        mailbox
    }

    pub(crate) fn mailbox(&self, id: &SandboxId) -> Option<mpsc::Sender<Message>> {
        self.drivers.lock().get(id).cloned()
    }

    /// A driver ends: its sandbox is dead.
    pub(crate) fn retire(self: &Arc<Self>, id: &SandboxId) {
        self.drivers.lock().remove(id);
        self.journal.retire(id);
        let template = self.views.read().get(id).map(|view| view.sandbox.template.clone());
        if let Some(template) = template {
            let inner = Arc::clone(self);
            self.tasks.spawn(async move { crate::builds::collect(&inner, &template).await });
        }
    }

    /// Shows a record to the outside.
    pub(crate) fn publish(&self, record: &Record, slot: Option<&Slot>) {
        let sandbox = record.sandbox.clone();
        let running = matches!(sandbox.state, State::Running | State::Snapshotting | State::Forking);
        let route = Route {
            id: sandbox.id.clone(),
            generation: record.generation,
            running,
            auto_resume: sandbox.auto_resume,
            envd_token: sandbox.envd_token.clone(),
            traffic_token: sandbox.traffic_token.clone(),
            mask_request_host: record.mask_request_host.clone(),
            slot: if running { slot.cloned() } else { None },
        };
        let view = View {
            ttl: Duration::from_secs(record.ttl),
            machine_dir: record.machine.as_ref().map(|machine| machine.vm.dir.clone()),
            sandbox,
            route,
        };
        self.views.write().insert(record.sandbox.id.clone(), Arc::new(view));
    }

    pub(crate) fn view(&self, id: &SandboxId) -> Option<Arc<View>> {
        self.views.read().get(id).cloned()
    }

    pub(crate) fn route_of(&self, id: &SandboxId) -> Option<Route> {
        self.view(id).map(|view| view.route.clone())
    }

    /// The view of a sandbox of this team.
    pub(crate) fn owned(&self, who: &Principal, id: &SandboxId) -> control::Result<Arc<View>> {
        self.view(id)
            .filter(|view| view.sandbox.team == who.team)
            .ok_or_else(|| control::Error::SandboxNotFound(id.to_string()))
    }

    pub(crate) fn note(&self, id: &SandboxId, level: &str, message: &str) {
        self.journal.note(id, level, message);
    }

    pub(crate) fn observe(&self, operation: &'static str, phases: &[Phase]) {
        self.journal.observe(operation, phases);
    }

    pub(crate) fn ended(&self, cause: EndCause) {
        self.journal.ended(cause);
    }

    /// Removes what a sandbox that never came to be left on disk.
    pub(crate) async fn remove_home(&self, id: &SandboxId) {
        remove_dirs(vec![self.at(&crate::sandbox::home(id))]).await;
    }
}
