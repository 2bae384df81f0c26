//! The handle of a fake machine.

use super::{Operation, STATE_MAGIC, Shared, at, guest::Machine, refused};
use crate::{Error, Exit, ExitCause, MemoryRegion, Result, Vm, VmRecord};
use async_trait::async_trait;
use std::{path::Path, sync::Arc};
use tokio::sync::watch;

pub(super) struct Handle {
    pub(super) machine: Arc<Machine>,
    pub(super) shared: Arc<Shared>,
}

impl Handle {
    async fn meet(&self, operation: Operation) -> Result<()> {
        let met = self.shared.plan.meet(operation, Some(&self.machine)).await;
        // Ended by the plan just now, or by its guest before.
        if let Some(exit) = self.machine.ended() {
            return Err(Error::Exited(exit));
        }
        met
    }
}

#[async_trait]
impl Vm for Handle {
    fn record(&self) -> VmRecord {
        self.machine.record.clone()
    }

    async fn pause(&self) -> Result<()> {
        self.meet(Operation::Pause).await?;
        self.machine.set_paused(true);
        Ok(())
    }

    async fn resume(&self) -> Result<()> {
        self.meet(Operation::Resume).await?;
        self.machine.set_paused(false);
        Ok(())
    }

    async fn save_state(&self, path: &Path) -> Result<()> {
        self.meet(Operation::SaveState).await?;
        if !self.machine.paused() {
            return Err(refused("save_state", "the machine runs: pause it first".to_owned()));
        }
        let state = format!("{STATE_MAGIC}\n{}\n", self.machine.record.id);
        tokio::fs::write(path, state).await.map_err(at("writing", path))
    }

    async fn memory(&self) -> Result<Vec<MemoryRegion>> {
        self.meet(Operation::Memory).await?;
        match (self.machine.region(), self.machine.ended()) {
            (Some(region), _) => Ok(vec![region]),
            (None, Some(exit)) => Err(Error::Exited(exit)),
            (None, None) => Err(refused("memory", "the machine is ending".to_owned())),
        }
    }

    fn exit(&self) -> watch::Receiver<Option<Exit>> {
        self.machine.exit()
    }

    async fn kill(&self) -> Result<Exit> {
        match self.meet(Operation::Kill).await {
            Ok(()) | Err(Error::Exited(_)) => {}
            Err(error) => return Err(error),
        }
        Ok(self.machine.end(ExitCause::Killed, "killed by its node".to_owned()))
    }
}
