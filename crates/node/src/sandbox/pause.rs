//! Capturing a sandbox and freeing its machine.
//!
//! ```text
//!   written (Pausing) ─► stop ─► device state ─► memory ─► disk sealed ─► manifest ─► written (Paused) ─► machine ended
//! ```
//! - Until the manifest is in place the pause before this one stays valid, and any failure lets the machine run on
//!   ([`Outcome::Undone`]): half-made files go, and a disk layer that was sealed stays part of the running disk.
//! - From the manifest on the sandbox is paused, whatever happens to its machine.
//! - A crash before the manifest leaves a stopped machine that adoption lets run on; one after it a machine that
//!   adoption ends.
//! - Without memory the guest first writes its caches to the disk; there is no device state and no memory layer.

use super::{Finished, file_ref, home, manifest_of, write_manifest};
use crate::{
    lifecycle::Outcome,
    machine::{Machine, remove_files},
    model::State,
    node::Inner,
    records::{Record, Saved, SavedMemory},
    seams::Layer,
    steps::{Clock, Named, StepError, guest, within},
};
use jiff::Timestamp;
use std::{collections::HashSet, path::PathBuf, sync::Arc};
use tokio_util::sync::CancellationToken;

pub(crate) async fn pause(
    inner: Arc<Inner>,
    mut record: Record,
    machine: Machine,
    memory: bool,
    cancel: CancellationToken,
) -> Finished {
    let mut clock = Clock::start();
    let before = record.saved.clone();
    record.sandbox.state = State::Pausing;
    record.sequence += 1;
    let error = match save(&inner, &mut record, &machine, memory, &mut clock, &cancel).await {
        Ok(()) => return settle(&inner, record, machine, before, clock).await,
        Err(error) => error,
    };
    record.saved = before;
    record.sandbox.state = State::Running;
    record.sandbox.phases = clock.finish();
    remove_files(half_made(&record).into_iter().map(|path| inner.at(&path))).await;
    let exit = machine.vm.exit().borrow().clone();
    if exit.is_none()
        && let Err(resume) = go_on(&inner, &machine).await
    {
        tracing::error!(sandbox = %record.sandbox.id, %error, %resume, "neither pausing nor going on works");
    }
    let exit = exit.or_else(|| machine.vm.exit().borrow().clone());
    if let Err(error) = inner.db.save(&record).await {
        tracing::error!(sandbox = %record.sandbox.id, %error, "a failed pause could not be written down");
    }
    let outcome = if exit.is_some() { Outcome::Lost } else { Outcome::Undone };
    Finished { record, machine: Some(machine), outcome, error: Some(error), exit }
}

async fn go_on(inner: &Arc<Inner>, machine: &Machine) -> Result<(), StepError> {
    let vm = Arc::clone(&machine.vm);
    let work = async move { vm.resume().await.step("continuing the machine") };
    within("continuing the machine", inner.deadlines.machine, work).await
}

/// Everything up to the manifest.
async fn save(
    inner: &Arc<Inner>,
    record: &mut Record,
    machine: &Machine,
    memory: bool,
    clock: &mut Clock,
    cancel: &CancellationToken,
) -> Result<(), StepError> {
    inner.db.save(record).await.step("writing the record")?;
    if !memory {
        let mut exit = machine.vm.exit();
        let work = inner.parts.guests.sync(&machine.record.slot, &record.guest.init_secret);
        let limit = inner.deadlines.agent;
        clock.time("sync", guest("writing the guest's caches out", limit, &mut exit, cancel, work)).await?;
    }
    let vm = Arc::clone(&machine.vm);
    let work = async move { vm.pause().await.step("stopping the machine") };
    clock.time("stop", within("stopping the machine", inner.deadlines.machine, work)).await?;
    let memory = if memory { Some(save_memory(inner, record, machine, clock).await?) } else { None };

    let layer = disk_file(record);
    let (storage, export, to) =
        (Arc::clone(&inner.parts.storage), machine.record.disk_export.clone(), inner.at(&layer));
    let work = async move { storage.seal(&export, &to).await.step("sealing the disk") };
    clock.time("disk", within("sealing the disk", inner.deadlines.storage, work)).await?;
    // From here on this layer is part of the disk, whether the pause succeeds or not.
    record.disk.push(Layer::lsmt(layer));

    record.saved = Some(Saved { sequence: record.sequence, disk: record.disk.clone(), memory });
    let manifest = manifest_of(inner, record).await?;
    let path = inner.at(&home(&record.sandbox.id)).join("snapshot.json");
    clock.time("manifest", write_manifest(manifest, path)).await
}

async fn save_memory(
    inner: &Arc<Inner>,
    record: &Record,
    machine: &Machine,
    clock: &mut Clock,
) -> Result<SavedMemory, StepError> {
    let state = state_file(record);
    let (vm, path) = (Arc::clone(&machine.vm), inner.at(&state));
    let work = async move { vm.save_state(&path).await.step("saving the device state") };
    clock.time("state", within("saving the device state", inner.deadlines.machine, work)).await?;
    // An empty state restores to nothing: better found now than when it is needed.
    if file_ref(inner, state.clone())?.len == 0 {
        return Err(StepError::failed("saving the device state", "the monitor wrote an empty file"));
    }

    let mut layers = machine.record.memory_layers.clone();
    let parts = inner.parts.clone();
    let image = machine.record.memory_image.clone();
    if machine.record.vm.restored {
        let layer = memory_file(record);
        let (vm, to) = (Arc::clone(&machine.vm), inner.at(&layer));
        let size = u64::from(record.sandbox.memory_mib) << 20;
        let work = async move { parts.layers.capture(vm, size, &image, &to).await.step("capturing memory") };
        let found = clock.time("memory", within("capturing memory", inner.deadlines.capture, work)).await?;
        tracing::debug!(sandbox = %record.sandbox.id, ?found, "captured memory");
        layers.push(Layer::lsmt(layer));
    } else {
        // Booted, not restored: its memory is a file already.
        let work = async move { parts.layers.finish_image(&image).await.step("writing memory out") };
        clock.time("memory", within("writing memory out", inner.deadlines.capture, work)).await?;
    }
    Ok(SavedMemory { made_by: inner.parts.vmm.compatibility(), state, layers })
}

/// The manifest is in place: the sandbox is paused.
async fn settle(
    inner: &Arc<Inner>,
    mut record: Record,
    machine: Machine,
    before: Option<Saved>,
    mut clock: Clock,
) -> Finished {
    let booted = (!machine.record.vm.restored).then(|| machine.record.memory_layers.clone());
    record.sandbox.state = State::Paused;
    record.sandbox.end_at = Timestamp::now();
    record.machine = None;
    // What the pause before and the machine used and this pause doesn't.
    let mut unused: HashSet<PathBuf> = record.garbage.drain(..).collect();
    unused
        .extend(before.iter().flat_map(files).chain(booted.iter().flatten().map(|layer| layer.path.clone())));
    let home = home(&record.sandbox.id);
    let used: HashSet<PathBuf> = record.saved.iter().flat_map(files).collect();
    unused.retain(|path| path.starts_with(&home) && !used.contains(path));
    if let Err(error) = clock.time("record", inner.db.save_durably(&record)).await {
        // The manifest says it; a later start of the server will find it.
        tracing::error!(sandbox = %record.sandbox.id, %error, "a finished pause could not be written down");
    }
    clock.time("free", inner.end_machine(machine)).await;
    remove_files(unused.into_iter().map(|path| inner.at(&path))).await;
    record.sandbox.phases = clock.finish();
    Finished { record, machine: None, outcome: Outcome::Done, error: None, exit: None }
}

/// Files of a pause, template's included.
fn files(saved: &Saved) -> impl Iterator<Item = PathBuf> + '_ {
    let memory = saved.memory.iter();
    saved
        .disk
        .iter()
        .map(|layer| layer.path.clone())
        .chain(memory.clone().map(|memory| memory.state.clone()))
        .chain(memory.flat_map(|memory| memory.layers.iter().map(|layer| layer.path.clone())))
}

fn state_file(record: &Record) -> PathBuf {
    home(&record.sandbox.id).join(format!("state-{}", record.sequence))
}

fn memory_file(record: &Record) -> PathBuf {
    home(&record.sandbox.id).join(format!("memory-{}.layer", record.sequence))
}

/// Where the pause of this sequence number seals the disk to.
pub(crate) fn disk_file(record: &Record) -> PathBuf {
    home(&record.sandbox.id).join(format!("disk-{}.layer", record.sequence))
}

/// Files of a pause that didn't succeed; a sealed disk layer is not among them.
pub(crate) fn half_made(record: &Record) -> [PathBuf; 2] {
    [state_file(record), memory_file(record)]
}
