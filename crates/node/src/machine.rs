//! A machine with all it holds: network slot, exports, directories, room. Made whole or not at all.
//!
//! ```text
//!   slot ∥ disk ∥ memory image  ──►  restore or boot  ──►  Machine  ──►  kill  ──►  close exports ∥ release slot
//! ```
//! A step that fails undoes those before it. Names of exports and directories follow from the machine's id, which no
//! two machines of a node share, so that what a crash leaves behind is found by name.

use crate::{
    admission::Room,
    node::Inner,
    records::{MachineRecord, SavedMemory},
    seams::{Layer, LayerKind, Mode, Stack},
    steps::{Clock, Named, StepError, Undo, bounded, timed, within},
};
use aenv_network::{Egress, Slot};
use aenv_vmm::{BootSource, Drive, Exit, MachineSpec, NetDevice, RestoreSource, Vm};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

/// What a machine is made of. Paths are relative to the data directory.
pub(crate) struct Plan {
    /// Letters and digits, never used before on this node.
    pub(crate) id: String,
    pub(crate) vcpus: u8,
    pub(crate) memory_mib: u32,
    pub(crate) disk: Vec<Layer>,
    pub(crate) disk_size: u64,
    /// Directory of the writable layer; made here.
    pub(crate) upper: PathBuf,
    pub(crate) egress: Egress,
    pub(crate) start: Start,
}

/// How it comes to life.
pub(crate) enum Start {
    /// From saved device state and memory.
    Restore(SavedMemory),
    /// From the kernel of the kit.
    Boot {
        /// Secret of the agent's `/init`.
        secret: String,
        /// Where guest memory goes.
        memory_file: PathBuf,
    },
}

/// A machine and what it holds. Dropping it leaves all of it alone, as machines outlive the server; only its room is
/// given back.
pub(crate) struct Machine {
    pub(crate) vm: Arc<dyn Vm>,
    pub(crate) record: MachineRecord,
    pub(crate) room: Option<Room>,
}

/// An opened memory image: its path, and the export behind it if there is one.
struct MemoryImage {
    path: PathBuf,
    export: Option<String>,
}

impl Inner {
    /// Makes a machine. It runs when this returns.
    pub(crate) async fn launch(
        self: &Arc<Self>,
        plan: Plan,
        room: Option<Room>,
        clock: &mut Clock,
    ) -> Result<Machine, StepError> {
        let run_dir = self.machines().join(&plan.id);
        let upper = self.at(&plan.upper);
        make_dirs(&[run_dir.clone(), upper.clone()]).await?;
        let (slot, disk, memory) = tokio::join!(
            timed(self.acquire_slot(plan.egress)),
            timed(self.open_disk(&plan, &upper)),
            timed(self.open_memory(&plan)),
        );
        clock.add("network", slot.1);
        clock.add("storage", disk.1);
        if matches!(plan.start, Start::Restore(_)) {
            clock.add("memory", memory.1);
        }
        let mut undo = Undo::default();
        undo.push(remove_dirs(vec![run_dir.clone(), upper]));
        if let Ok(slot) = &slot.0 {
            let (inner, slot) = (Arc::clone(self), slot.clone());
            undo.push(async move { inner.parts.network.release(&slot).await });
        }
        let disk_export = disk_export(&plan.id);
        if disk.0.is_ok() {
            undo.push(Arc::clone(self).close_export(disk_export.clone()));
        }
        if let Ok(MemoryImage { export: Some(name), .. }) = &memory.0 {
            undo.push(Arc::clone(self).close_export(name.clone()));
        }
        let begun = match (slot.0, disk.0, memory.0) {
            (Ok(slot), Ok(disk), Ok(memory)) => {
                let started =
                    clock.time(plan.start.phase(), self.start_vm(&plan, &slot, disk, &memory, run_dir)).await;
                started.map(|vm| (vm, slot, memory))
            }
            (Err(error), _, _) | (_, Err(error), _) | (_, _, Err(error)) => Err(error),
        };
        match begun {
            Ok((vm, slot, memory)) => {
                undo.done();
                let memory_layers = match &plan.start {
                    Start::Restore(saved) => saved.layers.clone(),
                    Start::Boot { memory_file, .. } => vec![Layer::raw(memory_file.clone())],
                };
                let record = MachineRecord {
                    vm: vm.record(),
                    slot,
                    disk_export,
                    memory_export: memory.export,
                    memory_image: memory.path,
                    memory_layers,
                    upper: plan.upper,
                };
                Ok(Machine { vm, record, room })
            }
            Err(error) => {
                undo.run().await;
                Err(error)
            }
        }
    }

    async fn acquire_slot(self: &Arc<Self>, egress: Egress) -> Result<Slot, StepError> {
        let (network, late) = (Arc::clone(&self.parts.network), Arc::clone(&self.parts.network));
        bounded(
            "taking a network slot",
            self.deadlines.network,
            async move { network.acquire(egress).await.step("taking a network slot") },
            move |slot| Box::pin(async move { late.release(&slot).await }),
        )
        .await
    }

    async fn open_disk(self: &Arc<Self>, plan: &Plan, upper: &Path) -> Result<PathBuf, StepError> {
        let mode = Mode::Writable { dir: upper.to_owned() };
        self.open_export(
            disk_export(&plan.id),
            self.stack(&plan.disk, plan.disk_size),
            mode,
            "opening the disk",
        )
        .await
    }

    async fn open_memory(self: &Arc<Self>, plan: &Plan) -> Result<MemoryImage, StepError> {
        match &plan.start {
            Start::Boot { memory_file, .. } => Ok(MemoryImage { path: self.at(memory_file), export: None }),
            Start::Restore(saved) => match saved.layers.as_slice() {
                // One flat local file is handed over as it is: the fastest there is.
                [Layer { kind: LayerKind::Raw, path }] => {
                    Ok(MemoryImage { path: self.at(path), export: None })
                }
                layers => {
                    let name = memory_export(&plan.id);
                    let stack = self.stack(layers, u64::from(plan.memory_mib) << 20);
                    let path = self
                        .open_export(name.clone(), stack, Mode::ReadOnly, "opening the memory image")
                        .await?;
                    Ok(MemoryImage { path, export: Some(name) })
                }
            },
        }
    }

    async fn open_export(
        self: &Arc<Self>,
        name: String,
        stack: Stack,
        mode: Mode,
        step: &'static str,
    ) -> Result<PathBuf, StepError> {
        let (storage, late, late_name) = (Arc::clone(&self.parts.storage), Arc::clone(self), name.clone());
        bounded(
            step,
            self.deadlines.storage,
            async move { Ok(storage.open(&name, &stack, &mode).await.step(step)?.path) },
            move |_| Box::pin(late.close_export(late_name)),
        )
        .await
    }

    async fn start_vm(
        self: &Arc<Self>,
        plan: &Plan,
        slot: &Slot,
        disk: PathBuf,
        memory: &MemoryImage,
        dir: PathBuf,
    ) -> Result<Arc<dyn Vm>, StepError> {
        let spec = MachineSpec {
            id: plan.id.clone(),
            vcpus: plan.vcpus,
            memory_mib: plan.memory_mib,
            drives: vec![Drive { path: disk, read_only: false }],
            net: Some(NetDevice {
                netns: slot.netns.clone(),
                tap: aenv_network::TAP.to_owned(),
                mac: aenv_network::GUEST_MAC.to_owned(),
            }),
            dir,
        };
        let vmm = Arc::clone(&self.parts.vmm);
        let kill = |vm: Arc<dyn Vm>| -> futures_util::future::BoxFuture<'static, ()> {
            Box::pin(async move {
                let _ = vm.kill().await;
            })
        };
        match &plan.start {
            Start::Restore(saved) => {
                let from = RestoreSource {
                    state: self.at(&saved.state),
                    memory_image: memory.path.clone(),
                    made_by: saved.made_by.clone(),
                };
                let work = async move { vmm.restore(&spec, &from).await.step("restoring the machine") };
                bounded("restoring the machine", self.deadlines.restore, work, kill).await
            }
            Start::Boot { secret, .. } => {
                let from = BootSource {
                    kernel: self.kit.kernel.clone(),
                    initramfs: self.kit.initramfs.clone(),
                    cmdline: cmdline(secret),
                    memory_file: memory.path.clone(),
                };
                let work = async move { vmm.boot(&spec, &from).await.step("booting the machine") };
                bounded("booting the machine", self.deadlines.restore, work, kill).await
            }
        }
    }

    /// Layers with absolute paths.
    fn stack(&self, layers: &[Layer], virtual_size: u64) -> Stack {
        let layers =
            layers.iter().map(|layer| Layer { kind: layer.kind, path: self.at(&layer.path) }).collect();
        Stack { virtual_size, layers }
    }

    /// Ends a machine and gives back all it held. The directory of its writable layer goes too.
    /// Never fails: what can't be ended now is tried again in the background, and on the next start.
    pub(crate) async fn end_machine(self: &Arc<Self>, machine: Machine) -> Option<Exit> {
        let exit = self.kill_vm(&machine.vm).await;
        if exit.is_some() {
            self.release_machine(&machine.record).await;
            drop(machine.room);
        } else {
            let inner = Arc::clone(self);
            self.tasks.spawn(async move { inner.end_stubborn(machine).await });
        }
        exit
    }

    async fn kill_vm(&self, vm: &Arc<dyn Vm>) -> Option<Exit> {
        let id = vm.record().id;
        // Twice at once: what goes wrong is most often a matter of the moment.
        for _ in 0..2 {
            let vm = Arc::clone(vm);
            let work = async move { vm.kill().await.step("ending the machine") };
            match within("ending the machine", self.deadlines.kill, work).await {
                Ok(exit) => return Some(exit),
                // It had ended by itself.
                Err(StepError::Exited { exit, .. }) => return Some(exit),
                Err(error) => {
                    tracing::error!(machine = %id, %error, "a machine could not be ended; trying again");
                }
            }
        }
        None
    }

    /// Tries a few times more. Its disk must not be closed under it, so nothing is released before it is gone.
    async fn end_stubborn(self: Arc<Self>, machine: Machine) {
        for attempt in 1..=5u32 {
            tokio::select! {
                () = tokio::time::sleep(Duration::from_secs(1 << attempt)) => {}
                () = self.stop.cancelled() => return,
            }
            if self.kill_vm(&machine.vm).await.is_some() {
                self.release_machine(&machine.record).await;
                return;
            }
        }
        tracing::error!(machine = %machine.record.vm.id, "gave up ending a machine; the next start of the server tries again");
    }

    /// Gives back what a machine that is gone held.
    pub(crate) async fn release_machine(self: &Arc<Self>, record: &MachineRecord) {
        let memory = async {
            if let Some(name) = &record.memory_export {
                Arc::clone(self).close_export(name.clone()).await;
            }
        };
        tokio::join!(
            Arc::clone(self).close_export(record.disk_export.clone()),
            memory,
            self.parts.network.release(&record.slot),
        );
        remove_dirs(vec![self.at(&record.upper), record.vm.dir.clone()]).await;
    }

    pub(crate) async fn close_export(self: Arc<Self>, name: String) {
        let mut left = 3;
        loop {
            let (storage, closing) = (Arc::clone(&self.parts.storage), name.clone());
            let work = async move { storage.close(&closing).await.step("closing an export") };
            match within("closing an export", self.deadlines.storage, work).await {
                Ok(()) => return,
                Err(error) if left == 0 => {
                    tracing::error!(export = %name, %error, "an export stays open until the next start of the server");
                    return;
                }
                Err(error) => {
                    tracing::warn!(export = %name, %error, "an export could not be closed; trying again")
                }
            }
            left -= 1;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

impl Start {
    fn phase(&self) -> &'static str {
        match self {
            Self::Restore(_) => "restore",
            Self::Boot { .. } => "boot",
        }
    }
}

/// Name of a machine's disk export.
pub(crate) fn disk_export(machine: &str) -> String {
    format!("disk-{machine}")
}

/// Name of a machine's memory export.
pub(crate) fn memory_export(machine: &str) -> String {
    format!("mem-{machine}")
}

/// Words for the guest's kernel command line; the agent reads them.
fn cmdline(secret: &str) -> Vec<String> {
    use aenv_network::{GATEWAY_IP, GUEST_IP, LINK_PREFIX};
    use sha2::{Digest, Sha256};
    vec![
        "aenv.root=/dev/vda".to_owned(),
        format!("aenv.ip={GUEST_IP}/{LINK_PREFIX}"),
        format!("aenv.gw={GATEWAY_IP}"),
        format!("aenv.dns={GATEWAY_IP}"),
        format!("aenv.init={}", hex::encode(Sha256::digest(secret))),
    ]
}

async fn make_dirs(dirs: &[PathBuf]) -> Result<(), StepError> {
    for dir in dirs {
        tokio::fs::create_dir_all(dir).await.map_err(|error| {
            StepError::failed("making directories", format!("{}: {error}", dir.display()))
        })?;
    }
    Ok(())
}

/// Removes directories with all in them; missing ones are fine.
pub(crate) async fn remove_dirs(dirs: Vec<PathBuf>) {
    for dir in dirs {
        match tokio::fs::remove_dir_all(&dir).await {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(dir = %dir.display(), %error, "a directory stays until the next start of the server");
            }
            _ => {}
        }
    }
}

/// Removes files; missing ones are fine.
pub(crate) async fn remove_files(files: impl IntoIterator<Item = PathBuf>) {
    for file in files {
        match tokio::fs::remove_file(&file).await {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(file = %file.display(), %error, "a file stays that nothing needs");
            }
            _ => {}
        }
    }
}
