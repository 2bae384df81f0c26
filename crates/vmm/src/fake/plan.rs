//! Which operation meets which fault. Deterministic: faults are counted, not drawn.

use super::{guest::Machine, refused};
use crate::{Error, ExitCause, Result};
use parking_lot::Mutex;
use std::{collections::HashMap, time::Duration};

/// What can go wrong: each is a method of [`crate::Vmm`] or [`crate::Vm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// [`crate::Vmm::boot`].
    Boot,
    /// [`crate::Vmm::restore`].
    Restore,
    /// [`crate::Vmm::adopt`].
    Adopt,
    /// [`crate::Vm::pause`].
    Pause,
    /// [`crate::Vm::resume`].
    Resume,
    /// [`crate::Vm::save_state`].
    SaveState,
    /// [`crate::Vm::memory`].
    Memory,
    /// [`crate::Vm::kill`].
    Kill,
}

/// How an operation goes wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// It is refused with this reason.
    Fail(String),
    /// It never returns; callers need their own deadline.
    Hang,
    /// It takes this long, then works.
    Delay(Duration),
    /// The machine ends with this cause before the operation happens, which then finds it gone. At boot, restore and
    /// adopt, where there is no machine yet, the start is refused.
    Exit(ExitCause),
}

#[derive(Default)]
pub(super) struct Plan {
    counts: Mutex<HashMap<Operation, u32>>,
    faults: Mutex<Vec<(Operation, u32, Fault)>>,
}

impl Plan {
    /// The `nth` operation from now on.
    pub(super) fn add(&self, operation: Operation, nth: u32, fault: Fault) {
        let at = self.count(operation).saturating_add(nth);
        self.faults.lock().push((operation, at, fault));
    }

    pub(super) fn count(&self, operation: Operation) -> u32 {
        self.counts.lock().get(&operation).copied().unwrap_or(0)
    }

    /// Counts an operation and lets it meet its fault.
    pub(super) async fn meet(&self, operation: Operation, machine: Option<&Machine>) -> Result<()> {
        let Some(fault) = self.next(operation) else { return Ok(()) };
        match (fault, machine) {
            (Fault::Fail(reason), _) => Err(refused(operation.name(), reason)),
            (Fault::Hang, _) => std::future::pending().await,
            (Fault::Delay(time), _) => {
                tokio::time::sleep(time).await;
                Ok(())
            }
            (Fault::Exit(cause), Some(machine)) => {
                Err(Error::Exited(machine.end(cause, "as planned".to_owned())))
            }
            (Fault::Exit(cause), None) => {
                Err(refused(operation.name(), format!("it ended at once: {cause:?}")))
            }
        }
    }

    fn next(&self, operation: Operation) -> Option<Fault> {
        let mut counts = self.counts.lock();
        let count = counts.entry(operation).or_insert(0);
        *count += 1;
        let mut faults = self.faults.lock();
        let due = faults.iter().position(|(which, at, _)| *which == operation && at == count)?;
        Some(faults.swap_remove(due).2)
    }
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Self::Boot => "boot",
            Self::Restore => "restore",
            Self::Adopt => "adopt",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::SaveState => "save_state",
            Self::Memory => "memory",
            Self::Kill => "kill",
        }
    }
}
