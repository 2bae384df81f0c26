//! One sandbox: its driver and the operations it runs.

mod create;
mod driver;
mod end;
mod merge;
mod pause;
mod resume;

pub(crate) use create::Source;
pub(crate) use driver::in_words;
pub(crate) use driver::{Answer, Ask, Begin, Driver, Message};
pub(crate) use end::{erase, tombstone};
pub(crate) use pause::{disk_file, half_made};

use crate::{
    lifecycle::Outcome,
    machine::Machine,
    node::Inner,
    records::Record,
    seams::{Init, LayerKind},
    steps::{Clock, StepError, guest},
};
use aenv_snapshot::manifest::{FileRef, LayerRef, Manifest, Memory};
use aenv_vmm::Exit;
use jiff::Timestamp;
use std::{path::PathBuf, sync::Arc, time::Duration};
use tokio_util::sync::CancellationToken;

/// What an operation hands back to its driver. The record says the state it settled in and has been written.
pub(crate) struct Finished {
    pub(crate) record: Record,
    pub(crate) machine: Option<Machine>,
    pub(crate) outcome: Outcome,
    pub(crate) error: Option<StepError>,
    /// The exit that made it [`Outcome::Lost`].
    pub(crate) exit: Option<Exit>,
}

/// Directory of a sandbox, relative.
pub(crate) fn home(id: &crate::model::SandboxId) -> PathBuf {
    PathBuf::from("sandboxes").join(id.as_str())
}

/// Id of the machine of a generation: letters and digits.
pub(crate) fn machine_id(id: &crate::model::SandboxId, generation: u64) -> String {
    format!("{id}g{generation}")
}

/// The time so long from now.
pub(crate) fn after(ttl: Duration) -> Timestamp {
    Timestamp::now().checked_add(ttl).unwrap_or(Timestamp::MAX)
}

/// What the guest is told.
fn init_of(record: &Record) -> Init {
    let mut env = record.guest.env.clone();
    env.extend(record.env_vars.clone());
    Init {
        secret: record.guest.init_secret.clone(),
        sandbox: record.sandbox.id.to_string(),
        template: record.sandbox.template.to_string(),
        env,
        access_token: record.sandbox.envd_token.clone(),
        default_user: record.guest.user.clone(),
        default_workdir: record.guest.workdir.clone(),
        generation: record.generation,
    }
}

/// Waits for the agent of a running machine and gives the guest its identity.
async fn introduce(
    inner: &Arc<Inner>,
    record: &Record,
    machine: &Machine,
    limit: Duration,
    clock: &mut Clock,
    cancel: &CancellationToken,
) -> Result<(), StepError> {
    let init = init_of(record);
    let mut exit = machine.vm.exit();
    let work = inner.parts.guests.init(&machine.record.slot, &init);
    clock.time("agent", guest("waiting for the guest agent", limit, &mut exit, cancel, work)).await
}

/// The manifest of what a record has saved.
pub(crate) async fn manifest_of(inner: &Arc<Inner>, record: &Record) -> Result<Manifest, StepError> {
    const STEP: &str = "describing the snapshot";
    let saved = record.saved.as_ref().ok_or_else(|| StepError::failed(STEP, "nothing was saved"))?;
    let layer = |layer: &crate::seams::Layer| {
        let kind = match layer.kind {
            LayerKind::Raw => "raw",
            LayerKind::Lsmt => "lsmt",
        };
        file_ref(inner, layer.path.clone()).map(|file| LayerRef { kind: kind.to_owned(), file })
    };
    let disk = saved.disk.iter().map(layer).collect::<Result<_, _>>()?;
    let memory = match &saved.memory {
        Some(memory) => Some(Memory {
            made_by: memory.made_by.clone(),
            state: file_ref(inner, memory.state.clone())?,
            layers: memory.layers.iter().map(layer).collect::<Result<_, _>>()?,
        }),
        None => None,
    };
    Ok(Manifest {
        subject: record.sandbox.id.to_string(),
        sequence: saved.sequence,
        taken_at: Timestamp::now(),
        vcpus: record.sandbox.vcpus,
        memory_mib: record.sandbox.memory_mib,
        disk_size: record.disk_size,
        disk,
        memory,
        guest: record.guest.clone(),
    })
}

/// A file with its present length. A stat of a file that was just written: too short to leave the async worker for.
pub(crate) fn file_ref(inner: &Inner, path: PathBuf) -> Result<FileRef, StepError> {
    let absolute = inner.at(&path);
    let found = std::fs::metadata(&absolute).map_err(|error| {
        StepError::failed("describing the snapshot", format!("{}: {error}", absolute.display()))
    })?;
    Ok(FileRef { path, len: found.len() })
}

/// Writes a manifest off the async workers.
pub(crate) async fn write_manifest(manifest: Manifest, path: PathBuf) -> Result<(), StepError> {
    const STEP: &str = "writing the snapshot manifest";
    tokio::task::spawn_blocking(move || manifest.write(&path))
        .await
        .map_err(|error| StepError::failed(STEP, error))?
        .map_err(|error| StepError::failed(STEP, error))
}
