//! Where the tests act: directories, storaged, a network, a node, and helpers to ask guests.

use aenv_blocks::{control::Client, storaged};
use aenv_network::{NetnsNetwork, Network};
use aenv_node::{
    Node, Options,
    control::Control,
    model::{BuildStatus, CreateSandbox, OnTimeout, Principal, PullTemplate, Sandbox, SandboxId},
    options::{Kit, Parts},
    seams::{Guests, HttpGuests, LayerFiles, OciImages, ProcProcesses, Storaged},
};
use aenv_vmm::qemu::{Options as QemuOptions, Qemu};
use std::{
    future::Future,
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{runtime::Runtime, sync::oneshot, task::JoinHandle};

/// Set in the child that is killed: the directory it works in.
pub(crate) const CHILD: &str = "AENV_NODE_TEST_CHILD";
pub(crate) const TTL: Duration = Duration::from_secs(600);

pub(crate) struct Stage {
    pub(crate) dir: tempfile::TempDir,
    runtime: Runtime,
    /// storaged lives on its own threads, as it is its own process.
    storage: Runtime,
    signal: Option<oneshot::Sender<()>>,
    storaged: Option<JoinHandle<Result<(), storaged::Error>>>,
}

pub(crate) type Act<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

/// A node with what it stands on.
pub(crate) struct Cast {
    pub(crate) node: Arc<Node>,
    pub(crate) network: Arc<NetnsNetwork>,
    pub(crate) guests: HttpGuests,
}

impl Stage {
    pub(crate) fn new() -> Result<Self, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("needs root".into());
        }
        for needed in ["/dev/fuse", "/dev/net/tun"] {
            if !Path::new(needed).exists() {
                return Err(format!("needs {needed}"));
            }
        }
        kit()?;
        image()?;
        let runtime = Runtime::new().map_err(|error| error.to_string())?;
        runtime.block_on(Qemu::probe(QemuOptions::default())).map_err(|error| error.to_string())?;
        let storage = Runtime::new().map_err(|error| error.to_string())?;
        let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
        let mut options = storaged::Options::in_run_dir(dir.path().join("storaged"));
        options.drain = Duration::from_secs(2);
        let (signal, signalled) = oneshot::channel();
        let (ready, announced) = std::sync::mpsc::channel();
        let storaged = storage.spawn(storaged::run_announced(
            options,
            move || {
                let _receiver_gone = ready.send(());
            },
            async {
                let _dropped = signalled.await;
            },
        ));
        announced
            .recv_timeout(Duration::from_secs(10))
            .map_err(|_| "storaged doesn't start here".to_owned())?;
        Ok(Self { dir, runtime, storage, signal: Some(signal), storaged: Some(storaged) })
    }

    /// One test. A node is started for it and stopped after it.
    pub(crate) fn act(&self, name: &str, play: for<'a> fn(&'a Cast) -> Act<'a>) {
        if skipped(name) {
            return;
        }
        let began = Instant::now();
        self.runtime.block_on(async {
            let cast = cast(self.dir.path(), 0).await;
            play(&cast).await;
            for sandbox in living(&cast.node).await {
                cast.node.kill(&team(), &sandbox.id).await.expect("every sandbox can be ended");
            }
            cast.end().await;
        });
        self.nothing_left();
        eprintln!("ok: {name} ({:.1} s)", began.elapsed().as_secs_f64());
    }

    /// One test that starts its nodes itself.
    pub(crate) fn alone(&self, name: &str, play: for<'a> fn(&'a Path) -> Act<'a>) {
        if skipped(name) {
            return;
        }
        let began = Instant::now();
        self.runtime.block_on(play(self.dir.path()));
        self.nothing_left();
        eprintln!("ok: {name} ({:.1} s)", began.elapsed().as_secs_f64());
    }

    /// No process, namespace, export or directory of ours.
    fn nothing_left(&self) {
        let dir = self.dir.path();
        let machines = dir.join("run/machines");
        let name = machines.display().to_string();
        let ours = |entry: std::fs::DirEntry| {
            let cmdline = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&cmdline).contains(&name)
        };
        let processes = std::fs::read_dir("/proc")
            .expect("/proc is readable")
            .flatten()
            .filter(|entry| entry.file_name().to_str().is_some_and(|name| name.parse::<u32>().is_ok()));
        assert_eq!(processes.filter_map(|entry| ours(entry).then_some(())).count(), 0, "machines are left");
        for dir in [machines, dir.join("data/sandboxes")] {
            let left: Vec<_> = std::fs::read_dir(&dir).map(|d| d.flatten().collect()).unwrap_or_default();
            assert!(left.is_empty(), "{left:?} is left");
        }
        let client = Client::new(self.dir.path().join("storaged/storaged.sock"));
        let exports = self.storage.block_on(client.list()).expect("storaged answers");
        assert!(exports.is_empty(), "exports are left: {exports:?}");
    }

    pub(crate) fn end(mut self) {
        drop(self.signal.take());
        if let Some(storaged) = self.storaged.take() {
            self.storage.block_on(storaged).expect("storaged doesn't panic").expect("storaged ends well");
        }
    }
}

impl Cast {
    /// Stops the node and removes its network.
    pub(crate) async fn end(self) {
        self.node.shutdown().await;
        drop(self.node);
        self.network.shutdown().await.expect("the network is removed");
    }

    /// Runs a shell command as `user` in the guest and returns its exit code.
    pub(crate) async fn run(&self, id: &SandboxId, command: &str) -> i32 {
        self.run_as(id, "user", command).await
    }

    pub(crate) async fn run_as(&self, id: &SandboxId, user: &str, command: &str) -> i32 {
        let route = self.node.route(id).expect("a route");
        let slot = route.slot.expect("a running sandbox has a slot");
        let args = ["-l", "-c", command];
        let ran = self.guests.run(&slot, user, "/bin/bash", &args, Duration::from_secs(60)).await;
        ran.unwrap_or_else(|error| panic!("{command}: {error}"))
    }

    pub(crate) async fn check(&self, id: &SandboxId, command: &str) {
        assert_eq!(self.run(id, command).await, 0, "{command}");
    }
}

pub(crate) async fn cast(dir: &Path, warm: usize) -> Cast {
    let mut network = aenv_network::Options::new(dir.join("network"), "nqt");
    network.prepared = 2;
    let network = NetnsNetwork::start(network).await.expect("a network");
    let shared: Arc<dyn Network> = network.clone();
    let client = Client::new(dir.join("storaged/storaged.sock"));
    let parts = Parts {
        vmm: Arc::new(Qemu::probe(QemuOptions::default()).await.expect("QEMU")),
        network: Arc::clone(&shared),
        storage: Arc::new(Storaged::new(client)),
        images: Arc::new(OciImages::new(dir.join("image-work"), true).expect("a work directory")),
        guests: Arc::new(HttpGuests::new(Arc::clone(&shared))),
        layers: Arc::new(LayerFiles),
        processes: Arc::new(ProcProcesses),
    };
    let mut options = Options::new(dir.join("data"), dir.join("run"), kit().expect("a guest kit"), parts);
    options.pool.size = warm;
    let node = Node::start(options).await.expect("a node");
    Cast { node, network, guests: HttpGuests::new(shared) }
}

/// `AENV_NODE_ONLY` chooses tests by a part of their name; the template is made in any case.
fn skipped(name: &str) -> bool {
    let only = std::env::var("AENV_NODE_ONLY").unwrap_or_default();
    !name.contains(&only) && !name.contains("template is made")
}

pub(crate) fn team() -> Principal {
    Principal { team: "t".into() }
}

pub(crate) async fn living(node: &Node) -> Vec<Sandbox> {
    let query = aenv_node::model::SandboxQuery { limit: 100, ..Default::default() };
    node.list(&team(), query).await.expect("a list").items
}

pub(crate) fn request() -> CreateSandbox {
    CreateSandbox {
        vcpus: None,
        memory_mib: None,
        disk_mib: None,
        template: "base".into(),
        ttl: TTL,
        on_timeout: OnTimeout::Kill,
        auto_resume: false,
        secure: false,
        allow_internet_access: false,
        cold: false,
        allow_public_traffic: true,
        mask_request_host: None,
        metadata: Default::default(),
        env_vars: [("GIVEN".to_owned(), "a b".to_owned())].into(),
        idempotency_key: None,
    }
}

pub(crate) async fn start(cast: &Cast) -> SandboxId {
    cast.node.create(&team(), request()).await.expect("a sandbox").id
}

/// Pulls the base image and prints the build's log.
pub(crate) async fn pull(node: &Node) {
    let image = image().expect("a base image");
    let request = PullTemplate {
        image: format!("oci:{}:base", image.display()),
        name: "base".into(),
        vcpus: 1,
        memory_mib: 512,
        disk_mib: 1024,
        force: false,
        credentials: None,
    };
    let begun = node.pull(&team(), request).await.expect("a build");
    let mut seen = 0;
    loop {
        let build = node.build(&team(), &begun.template, &begun.id, seen, 100).await.expect("a build");
        seen += build.log.len();
        for line in &build.log {
            eprintln!("    {} {}", line.at, line.message);
        }
        match build.status {
            BuildStatus::Ready => return,
            BuildStatus::Error => panic!("the build failed: {:?}", build.reason),
            _ => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

fn beside_target(variable: &str, name: &str) -> PathBuf {
    std::env::var_os(variable)
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target").join(name), PathBuf::from)
}

fn kit() -> Result<Kit, String> {
    let dir = beside_target("AENV_GUEST_DIR", "guest");
    let kit = Kit { kernel: dir.join("vmlinux"), initramfs: dir.join("initramfs.cpio") };
    match kit.kernel.exists() && kit.initramfs.exists() {
        true => Ok(kit),
        false => Err("needs the guest kit: cargo xtask guest".into()),
    }
}

fn image() -> Result<PathBuf, String> {
    let dir = beside_target("AENV_BASE_IMAGE", "base-image");
    match dir.join("index.json").exists() {
        true => dir.canonicalize().map_err(|error| error.to_string()),
        false => Err("needs a base image: aenv base-image --out target/base-image".into()),
    }
}

/// The life of the child that is killed: does what its arguments say, then waits for its end.
pub(crate) fn child() {
    let dir = PathBuf::from(std::env::var_os(CHILD).expect("a directory"));
    let what = std::env::args().nth(1).expect("what to do");
    Runtime::new().expect("a runtime").block_on(crate::adoption::child(&dir, &what));
}
