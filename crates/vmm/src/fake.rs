//! A monitor without a machine, for tests of everything above: same trait, faults on demand.
//!
//! Its memory is real: a mapping of the memory file (shared when booted, private when restored) in this very process,
//! so that capture by page map works on it unchanged. Its guest does nothing by itself; a test plays it through
//! [`Guest`]. Machines live in the [`Fake`] value, so dropping a handle leaves them alone and [`Vmm::adopt`] finds them
//! as long as some clone of that value lives.

mod guest;
mod plan;
mod vm;

pub use guest::Guest;
pub use plan::{Fault, Operation};

use crate::{
    Backend, BootSource, Compatibility, Error, MachineSpec, RestoreSource, Result, Vm, VmRecord, Vmm, process,
};
use async_trait::async_trait;
use guest::{Machine, Memory};
use parking_lot::{Mutex, MutexGuard};
use plan::Plan;
use std::{collections::HashMap, fs, io, path::Path, sync::Arc};
use vm::Handle;

/// What the fake writes as device state; refused when it reads anything else.
const STATE_MAGIC: &str = "aenv fake device state 1";

/// The fake; clones share machines and faults.
#[derive(Clone)]
pub struct Fake {
    shared: Arc<Shared>,
}

struct Shared {
    machines: Mutex<HashMap<String, Arc<Machine>>>,
    plan: Plan,
    compatibility: Compatibility,
}

impl Default for Fake {
    fn default() -> Self {
        Self::new()
    }
}

impl Fake {
    /// A fake without faults.
    #[must_use]
    pub fn new() -> Self {
        Self::like(Compatibility {
            backend: Backend::Fake,
            version: "1".to_owned(),
            cpu: "none".to_owned(),
            accel: "none".to_owned(),
            tsc_khz: 0,
        })
    }

    /// A fake that makes and accepts snapshots like this host.
    #[must_use]
    pub fn like(compatibility: Compatibility) -> Self {
        Self { shared: Arc::new(Shared { machines: Mutex::default(), plan: Plan::default(), compatibility }) }
    }

    /// Lets the `nth` coming `operation` (1 is the next) meet `fault`, whichever machine it is for.
    pub fn inject(&self, operation: Operation, nth: u32, fault: Fault) {
        self.shared.plan.add(operation, nth, fault);
    }

    /// How often an operation was asked for so far, faults included.
    #[must_use]
    pub fn count(&self, operation: Operation) -> u32 {
        self.shared.plan.count(operation)
    }

    /// The guest of a machine that lives.
    #[must_use]
    pub fn guest(&self, id: &str) -> Option<Guest> {
        self.shared.living().get(id).cloned().map(Guest::of)
    }

    /// Ids of the machines that live, sorted.
    #[must_use]
    pub fn living(&self) -> Vec<String> {
        let mut ids: Vec<_> = self.shared.living().keys().cloned().collect();
        ids.sort_unstable();
        ids
    }

    fn start(&self, spec: &MachineSpec, memory: Memory, restored: bool) -> Result<Arc<dyn Vm>> {
        let pid = i32::try_from(std::process::id()).unwrap_or(i32::MAX);
        let record = VmRecord {
            backend: Backend::Fake,
            id: spec.id.clone(),
            pid,
            start_time: process::start_time(pid).unwrap_or(0),
            dir: spec.dir.clone(),
            memory_mib: spec.memory_mib,
            restored,
        };
        let machine = Arc::new(Machine::new(record, memory));
        let mut machines = self.shared.living();
        if machines.contains_key(&spec.id) {
            return Err(refused("start", format!("a machine {} lives already", spec.id)));
        }
        machines.insert(spec.id.clone(), Arc::clone(&machine));
        Ok(Arc::new(Handle { machine, shared: Arc::clone(&self.shared) }))
    }
}

impl Shared {
    /// The machines, those that have ended taken out.
    fn living(&self) -> MutexGuard<'_, HashMap<String, Arc<Machine>>> {
        let mut machines = self.machines.lock();
        machines.retain(|_, machine| machine.ended().is_none());
        machines
    }
}

#[async_trait]
impl Vmm for Fake {
    fn compatibility(&self) -> Compatibility {
        self.shared.compatibility.clone()
    }

    async fn boot(&self, spec: &MachineSpec, boot: &BootSource) -> Result<Arc<dyn Vm>> {
        self.shared.plan.meet(Operation::Boot, None).await?;
        let bytes = u64::from(spec.memory_mib) << 20;
        let memory = Memory::create(&boot.memory_file, bytes)
            .map_err(at("creating the memory file", &boot.memory_file))?;
        self.start(spec, memory, false)
    }

    async fn restore(&self, spec: &MachineSpec, from: &RestoreSource) -> Result<Arc<dyn Vm>> {
        self.shared.compatibility.accepts(&from.made_by).map_err(Error::Incompatible)?;
        self.shared.plan.meet(Operation::Restore, None).await?;
        let state = fs::read_to_string(&from.state).map_err(at("reading the device state", &from.state))?;
        if !state.starts_with(STATE_MAGIC) {
            return Err(refused(
                "restore",
                format!("{} is no device state of the fake", from.state.display()),
            ));
        }
        let bytes = u64::from(spec.memory_mib) << 20;
        let memory = Memory::view(&from.memory_image, bytes)
            .map_err(at("mapping the memory image", &from.memory_image))?;
        self.start(spec, memory, true)
    }

    async fn adopt(&self, record: &VmRecord) -> Result<Option<Arc<dyn Vm>>> {
        self.shared.plan.meet(Operation::Adopt, None).await?;
        let machine = self.shared.living().get(&record.id).cloned();
        Ok(machine
            .filter(|machine| machine.record == *record)
            .map(|machine| Arc::new(Handle { machine, shared: Arc::clone(&self.shared) }) as Arc<dyn Vm>))
    }
}

fn refused(command: &str, reason: String) -> Error {
    Error::Refused { command: command.to_owned(), reason }
}

fn at<'a>(what: &'a str, path: &'a Path) -> impl Fn(io::Error) -> Error + 'a {
    move |source| Error::Io { context: format!("{what} {}", path.display()), source }
}
