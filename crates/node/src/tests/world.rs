//! A world in memory for the node to act on: machines, slots, exports and guests that behave as the seams promise,
//! fail at a chosen step, or stop existing for the node at one, as a crash of the server would have it.
//!
//! Every effect is a numbered step. A *fault* makes one step return an error without effect. A *crash* at a step, before
//! or after its effect, freezes the world: no call returns any more. The test then drops the node with its runtime and
//! starts a new one over the same world and directory.

use crate::{
    model::GuestMetrics,
    options::{Kit, Limits, Options, Parts, Pool},
    seams::{
        Captured, Export, Fault, Guests, Image, ImageRequest, Images, Init, Layers, Mode, Processes, Stack,
        Storage,
    },
};
use aenv_network::{Egress, Network, Slot};
use aenv_vmm::{
    Backend, BootSource, Compatibility, Exit, ExitCause, MachineSpec, MemoryRegion, RestoreSource, Vm,
    VmRecord, Vmm,
};
use async_trait::async_trait;
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::{
    net::TcpStream,
    sync::{Notify, watch},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plan {
    Nothing,
    Fail(usize),
    CrashBefore(usize),
    CrashAfter(usize),
}

#[derive(Clone)]
pub(crate) struct World {
    held: Arc<Mutex<Held>>,
    changed: Arc<Notify>,
    crashed: Arc<watch::Sender<bool>>,
}

struct Held {
    plan: Plan,
    steps: Vec<String>,
    machines: BTreeMap<String, Machine>,
    slots: BTreeMap<u32, Slot>,
    egress: BTreeMap<u32, Egress>,
    claimed: BTreeSet<u32>,
    next_slot: u32,
    exports: BTreeMap<String, Mode>,
    identities: BTreeMap<u32, Init>,
    /// Steps that wait until released.
    gates: HashSet<String>,
    /// Steps that fail as long as they are listed.
    broken: HashSet<String>,
}

struct Machine {
    record: VmRecord,
    paused: bool,
    drive: String,
    exit: watch::Sender<Option<Exit>>,
}

impl World {
    pub(crate) fn new() -> Self {
        let held = Held {
            plan: Plan::Nothing,
            steps: Vec::new(),
            machines: BTreeMap::new(),
            slots: BTreeMap::new(),
            egress: BTreeMap::new(),
            claimed: BTreeSet::new(),
            next_slot: 0,
            exports: BTreeMap::new(),
            identities: BTreeMap::new(),
            gates: HashSet::new(),
            broken: HashSet::new(),
        };
        Self {
            held: Arc::new(Mutex::new(held)),
            changed: Arc::default(),
            crashed: Arc::new(watch::channel(false).0),
        }
    }

    pub(crate) fn options(&self, dir: &Path) -> Options {
        let this = || Arc::new(self.clone());
        let parts = Parts {
            vmm: this(),
            network: this(),
            storage: this(),
            images: this(),
            guests: this(),
            layers: this(),
            processes: this(),
        };
        let kit = Kit { kernel: "kernel".into(), initramfs: "initramfs".into() };
        let mut options = Options::new(dir.join("data"), dir.join("run"), kit, parts);
        options.pool = Pool { size: 0, ..Pool::default() };
        options.limits = Limits { memory_limit_mib: Some(64 << 10), ..Limits::default() };
        options
    }

    /// From now on steps are counted anew and this happens.
    pub(crate) fn plan(&self, plan: Plan) {
        let mut held = self.held.lock();
        held.plan = plan;
        held.steps.clear();
    }

    /// A new server process: what the old one claimed is claimed no more.
    pub(crate) fn restart(&self) {
        self.plan(Plan::Nothing);
        self.held.lock().claimed.clear();
        self.crashed.send_replace(false);
    }

    pub(crate) async fn crash(&self) {
        let mut crashed = self.crashed.subscribe();
        let _ = crashed.wait_for(|crashed| *crashed).await;
    }

    pub(crate) fn steps(&self) -> Vec<String> {
        self.held.lock().steps.clone()
    }

    pub(crate) fn count(&self, name: &str) -> usize {
        self.held.lock().steps.iter().filter(|step| *step == name).count()
    }

    /// Waits until this step was taken so often.
    pub(crate) async fn until(&self, name: &str, count: usize) {
        self.until_true(|world| world.count(name) >= count).await;
    }

    pub(crate) async fn until_true(&self, condition: impl Fn(&Self) -> bool) {
        let wait = async {
            loop {
                let changed = self.changed.notified();
                tokio::pin!(changed);
                changed.as_mut().enable();
                if condition(self) {
                    return;
                }
                changed.await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), wait).await.expect("the world never came to it");
    }

    pub(crate) fn hold(&self, name: &str) {
        self.held.lock().gates.insert(name.to_owned());
    }

    pub(crate) fn release_all(&self) {
        self.held.lock().gates.clear();
        self.changed.notify_waiters();
    }

    pub(crate) fn break_(&self, name: &str) {
        self.held.lock().broken.insert(name.to_owned());
    }

    pub(crate) fn mend(&self) {
        self.held.lock().broken.clear();
    }

    /// The guest or monitor of a machine ends by itself.
    pub(crate) fn end_machine(&self, id: &str, cause: ExitCause) {
        let machine = self.held.lock().machines.remove(id).expect("a living machine");
        machine.exit.send_replace(Some(Exit { cause, detail: "in a test".into() }));
    }

    pub(crate) fn machines(&self) -> Vec<String> {
        self.held.lock().machines.keys().cloned().collect()
    }

    pub(crate) fn paused_machines(&self) -> usize {
        self.held.lock().machines.values().filter(|machine| machine.paused).count()
    }

    pub(crate) fn exports(&self) -> Vec<String> {
        self.held.lock().exports.keys().cloned().collect()
    }

    pub(crate) fn slots(&self) -> usize {
        self.held.lock().slots.len()
    }

    pub(crate) fn egress_of(&self, slot: &Slot) -> Option<Egress> {
        self.held.lock().egress.get(&slot.index).copied()
    }

    pub(crate) fn identity(&self, slot: &Slot) -> Option<Init> {
        self.held.lock().identities.get(&slot.index).cloned()
    }

    /// One effect.
    async fn step<T>(
        &self,
        name: &str,
        effect: impl FnOnce(&mut Held) -> Result<T, String>,
    ) -> Result<T, String> {
        tokio::task::yield_now().await;
        loop {
            let changed = self.changed.notified();
            if !self.held.lock().gates.contains(name) {
                break;
            }
            changed.await;
        }
        let result = {
            let mut held = self.held.lock();
            held.steps.push(name.to_owned());
            let number = held.steps.len();
            let plan = held.plan;
            if *self.crashed.borrow() || plan == Plan::CrashBefore(number) {
                self.crashed.send_replace(true);
                None
            } else if plan == Plan::Fail(number) || held.broken.contains(name) {
                Some(Err(format!("injected into {name}")))
            } else {
                let result = effect(&mut held);
                if plan == Plan::CrashAfter(number) {
                    self.crashed.send_replace(true);
                    None
                } else {
                    Some(result)
                }
            }
        };
        self.changed.notify_waiters();
        match result {
            Some(result) => result,
            // The server is dead: nothing ever returns to it.
            None => std::future::pending().await,
        }
    }

    /// Waits until so many steps were taken: the next one stands at its gate.
    pub(crate) async fn at_gate(&self, steps: usize) {
        self.until_true(|world| world.held.lock().steps.len() >= steps).await;
    }

    async fn seam<T>(
        &self,
        name: &str,
        effect: impl FnOnce(&mut Held) -> Result<T, String>,
    ) -> Result<T, Fault> {
        self.step(name, effect).await.map_err(Fault::new)
    }

    async fn vmm<T>(
        &self,
        name: &str,
        effect: impl FnOnce(&mut Held) -> Result<T, String>,
    ) -> aenv_vmm::Result<T> {
        self.step(name, effect)
            .await
            .map_err(|reason| aenv_vmm::Error::Refused { command: name.to_owned(), reason })
    }

    async fn start(
        &self,
        name: &str,
        spec: &MachineSpec,
        restored: bool,
        memory: &Path,
    ) -> aenv_vmm::Result<Arc<dyn Vm>> {
        let record = VmRecord {
            backend: Backend::Fake,
            id: spec.id.clone(),
            pid: 1,
            start_time: 1,
            dir: spec.dir.clone(),
            memory_mib: spec.memory_mib,
            restored,
        };
        let drive = spec.drives[0].path.display().to_string();
        let made = record.clone();
        let memory = memory.to_owned();
        self.vmm(name, move |held| {
            if held.machines.contains_key(&record.id) {
                return Err(format!("machine id {} is used twice", record.id));
            }
            if !held.exports.contains_key(&drive) {
                return Err(format!("drive {drive} is not open"));
            }
            if restored {
                let exported = memory.to_str().is_some_and(|name| held.exports.contains_key(name));
                if !exported && !memory.exists() {
                    return Err(format!("memory image {} does not exist", memory.display()));
                }
            } else {
                std::fs::write(&memory, b"memory").map_err(|error| error.to_string())?;
            }
            let exit = watch::channel(None).0;
            held.machines.insert(record.id.clone(), Machine { record, paused: false, drive, exit });
            Ok(())
        })
        .await?;
        Ok(self.vm(&made))
    }

    fn vm(&self, record: &VmRecord) -> Arc<dyn Vm> {
        let exit = self.held.lock().machines.get(&record.id).map(|machine| machine.exit.subscribe());
        let exit = exit.unwrap_or_else(|| watch::channel(None).1);
        Arc::new(FakeVm { world: self.clone(), record: record.clone(), exit })
    }
}

struct FakeVm {
    world: World,
    record: VmRecord,
    exit: watch::Receiver<Option<Exit>>,
}

impl FakeVm {
    async fn set_paused(&self, name: &str, paused: bool) -> aenv_vmm::Result<()> {
        let id = self.record.id.clone();
        self.world
            .vmm(name, move |held| {
                held.machines.get_mut(&id).ok_or("the machine is gone")?.paused = paused;
                Ok(())
            })
            .await
    }
}

#[async_trait]
impl Vm for FakeVm {
    fn record(&self) -> VmRecord {
        self.record.clone()
    }
    async fn pause(&self) -> aenv_vmm::Result<()> {
        self.set_paused("vm.pause", true).await
    }
    async fn resume(&self) -> aenv_vmm::Result<()> {
        self.set_paused("vm.resume", false).await
    }
    async fn save_state(&self, path: &Path) -> aenv_vmm::Result<()> {
        let (id, path) = (self.record.id.clone(), path.to_owned());
        self.world
            .vmm("vm.save_state", move |held| {
                let machine = held.machines.get(&id).ok_or("the machine is gone")?;
                if !machine.paused {
                    return Err("the machine runs".into());
                }
                std::fs::write(path, b"state").map_err(|error| error.to_string())
            })
            .await
    }
    async fn memory(&self) -> aenv_vmm::Result<Vec<MemoryRegion>> {
        Ok(Vec::new())
    }
    fn exit(&self) -> watch::Receiver<Option<Exit>> {
        self.exit.clone()
    }
    async fn kill(&self) -> aenv_vmm::Result<Exit> {
        let id = self.record.id.clone();
        let exit = Exit { cause: ExitCause::Killed, detail: "killed".into() };
        let told = exit.clone();
        self.world
            .vmm("vm.kill", move |held| {
                if let Some(machine) = held.machines.remove(&id) {
                    machine.exit.send_replace(Some(told));
                }
                Ok(())
            })
            .await?;
        Ok(exit)
    }
}

#[async_trait]
impl Vmm for World {
    fn compatibility(&self) -> Compatibility {
        Compatibility {
            backend: Backend::Fake,
            version: "1".into(),
            cpu: "none".into(),
            accel: "none".into(),
            tsc_khz: 0,
        }
    }
    async fn boot(&self, spec: &MachineSpec, boot: &BootSource) -> aenv_vmm::Result<Arc<dyn Vm>> {
        self.start("vmm.boot", spec, false, &boot.memory_file).await
    }
    async fn restore(&self, spec: &MachineSpec, from: &RestoreSource) -> aenv_vmm::Result<Arc<dyn Vm>> {
        assert!(from.state.exists(), "restored from a state that doesn't exist: {}", from.state.display());
        self.start("vmm.restore", spec, true, &from.memory_image).await
    }
    async fn adopt(&self, record: &VmRecord) -> aenv_vmm::Result<Option<Arc<dyn Vm>>> {
        let id = record.id.clone();
        let lives = self.vmm("vmm.adopt", move |held| Ok(held.machines.contains_key(&id))).await?;
        Ok(lives.then(|| self.vm(record)))
    }
}

#[async_trait]
impl Network for World {
    async fn acquire(&self, egress: Egress) -> Result<Slot, aenv_network::Error> {
        let take = |held: &mut Held| {
            held.next_slot += 1;
            let index = held.next_slot;
            let slot = Slot { index, generation: 1, netns: PathBuf::from(format!("netns-{index}")) };
            held.slots.insert(index, slot.clone());
            held.egress.insert(index, egress);
            held.claimed.insert(index);
            Ok(slot)
        };
        let step = |reason| aenv_network::Error::Step { step: "acquiring", reason };
        self.step("network.acquire", take).await.map_err(step)
    }
    async fn set_egress(&self, slot: &Slot, egress: Egress) -> Result<(), aenv_network::Error> {
        let index = slot.index;
        let set = move |held: &mut Held| {
            held.egress.insert(index, egress);
            Ok(())
        };
        let step = |reason| aenv_network::Error::Step { step: "egress", reason };
        self.step("network.set_egress", set).await.map_err(step)
    }
    async fn adopt(&self, slot: &Slot) -> Result<bool, aenv_network::Error> {
        let index = slot.index;
        let claim = move |held: &mut Held| {
            let found = held.slots.contains_key(&index);
            if found {
                held.claimed.insert(index);
            }
            Ok(found)
        };
        let step = |reason| aenv_network::Error::Step { step: "adopting", reason };
        self.step("network.adopt", claim).await.map_err(step)
    }
    async fn release(&self, slot: &Slot) {
        let index = slot.index;
        let release = move |held: &mut Held| {
            held.slots.remove(&index);
            held.egress.remove(&index);
            held.identities.remove(&index);
            Ok(())
        };
        // The real one can't fail for its caller either.
        if self.step("network.release", release).await.is_err() {
            release_now(&mut self.held.lock(), index);
        }
    }
    async fn reap(&self) -> Result<usize, aenv_network::Error> {
        let reap = |held: &mut Held| {
            let before = held.slots.len();
            let claimed = held.claimed.clone();
            held.slots.retain(|index, _| claimed.contains(index));
            Ok(before - held.slots.len())
        };
        let step = |reason| aenv_network::Error::Step { step: "reaping", reason };
        self.step("network.reap", reap).await.map_err(step)
    }
    async fn connect(&self, _: &Slot, _: u16) -> std::io::Result<TcpStream> {
        Err(std::io::Error::other("there is nobody in this world to connect to"))
    }
}

fn release_now(held: &mut Held, index: u32) {
    held.slots.remove(&index);
    held.identities.remove(&index);
}

#[async_trait]
impl Storage for World {
    async fn open(&self, name: &str, stack: &Stack, mode: &Mode) -> Result<Export, Fault> {
        let (name, stack, mode) = (name.to_owned(), stack.clone(), mode.clone());
        self.seam("storage.open", move |held| {
            if let Some(layer) = stack.layers.iter().find(|layer| !layer.path.exists()) {
                return Err(format!("layer {} does not exist", layer.path.display()));
            }
            held.exports.insert(name.clone(), mode);
            Ok(Export { path: PathBuf::from(name), size: stack.virtual_size })
        })
        .await
    }
    async fn seal(&self, name: &str, to: &Path) -> Result<(), Fault> {
        let (name, to) = (name.to_owned(), to.to_owned());
        self.seam("storage.seal", move |held| {
            let user = held.machines.values().find(|machine| machine.drive == name);
            if user.is_none_or(|machine| !machine.paused) {
                return Err("sealed under a machine that isn't paused".into());
            }
            if to.exists() {
                return Err(format!("{} exists", to.display()));
            }
            std::fs::write(to, b"disk").map_err(|error| error.to_string())
        })
        .await
    }
    async fn close(&self, name: &str) -> Result<(), Fault> {
        let name = name.to_owned();
        self.seam("storage.close", move |held| {
            if let Some(user) = held.machines.values().find(|machine| machine.drive == name) {
                return Err(format!("closed under machine {}", user.record.id));
            }
            held.exports.remove(&name);
            Ok(())
        })
        .await
    }
    async fn list(&self) -> Result<Vec<String>, Fault> {
        self.seam("storage.list", |held| Ok(held.exports.keys().cloned().collect())).await
    }
}

#[async_trait]
impl Images for World {
    fn check(&self, _reference: &str) -> Result<(), Fault> {
        Ok(())
    }

    async fn prepare(
        &self,
        request: &ImageRequest,
        dir: &Path,
        note: Arc<dyn Fn(String) + Send + Sync>,
    ) -> Result<Image, Fault> {
        note(format!("fetching {}", request.reference));
        let disk = dir.join("sha256-1").join("disk.layer");
        let size = u64::from(request.disk_mib) << 20;
        let made = disk.clone();
        self.seam("images.prepare", move |_| {
            std::fs::create_dir_all(made.parent().ok_or("no directory")?)
                .map_err(|error| error.to_string())?;
            std::fs::write(made, b"image").map_err(|error| error.to_string())
        })
        .await?;
        Ok(Image {
            digest: "sha256:1".into(),
            disk,
            disk_size: size,
            env: BTreeMap::from([("FROM_IMAGE".into(), "1".into()), ("BOTH".into(), "image".into())]),
            user: None,
            workdir: Some("/app".into()),
            entrypoint: vec!["/entry".into()],
            cmd: vec!["serve".into()],
            users: vec!["root".into(), "user".into()],
        })
    }
}

#[async_trait]
impl Guests for World {
    async fn reach(&self, _: &Slot) -> Result<(), Fault> {
        Ok(())
    }
    async fn init(&self, slot: &Slot, init: &Init) -> Result<(), Fault> {
        let (index, init) = (slot.index, init.clone());
        self.seam("guest.init", move |held| {
            held.identities.insert(index, init);
            Ok(())
        })
        .await
    }
    async fn sync(&self, _: &Slot, _: &str) -> Result<(), Fault> {
        self.seam("guest.sync", |_| Ok(())).await
    }
    async fn run(&self, _: &Slot, _: &str, _: &str, _: &[&str], _: Duration) -> Result<i32, Fault> {
        self.seam("guest.run", |_| Ok(0)).await
    }
    async fn metrics(&self, _: &Slot, _: Option<&str>) -> Result<GuestMetrics, Fault> {
        Err(Fault::new("this world has no clocks"))
    }
}

#[async_trait]
impl Layers for World {
    async fn capture(&self, vm: Arc<dyn Vm>, _: u64, _: &Path, to: &Path) -> Result<Captured, Fault> {
        let (id, to) = (vm.record().id, to.to_owned());
        self.seam("layers.capture", move |held| {
            if held.machines.get(&id).is_none_or(|machine| !machine.paused) {
                return Err("captured a machine that isn't paused".into());
            }
            std::fs::write(to, b"memory").map_err(|error| error.to_string())?;
            Ok(Captured::default())
        })
        .await
    }
    async fn merge(&self, layers: &[PathBuf], to: &Path) -> Result<(), Fault> {
        let (layers, to) = (layers.to_vec(), to.to_owned());
        self.seam("layers.merge", move |_| {
            if let Some(layer) = layers.iter().find(|layer| !layer.exists()) {
                return Err(format!("{} does not exist", layer.display()));
            }
            std::fs::write(to, b"merged").map_err(|error| error.to_string())
        })
        .await
    }
    async fn finish_image(&self, _: &Path) -> Result<u64, Fault> {
        self.seam("layers.finish_image", |_| Ok(1 << 20)).await
    }
}

#[async_trait]
impl Processes for World {
    async fn reap(&self, _: &Path, keep: &HashSet<String>) -> Result<Vec<String>, Fault> {
        let keep = keep.clone();
        self.seam("processes.reap", move |held| {
            let lost: Vec<String> = held.machines.keys().filter(|id| !keep.contains(*id)).cloned().collect();
            for id in &lost {
                held.machines.remove(id);
            }
            Ok(lost)
        })
        .await
    }
}
