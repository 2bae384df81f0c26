//! What a start does with what a former server left.
//!
//! Compared are records, machines, network slots, exports and directories. Afterwards each sandbox is what it truly is
//! and nothing is left that no record names:
//!
//! | Record says | Found | Becomes |
//! |---|---|---|
//! | Creating | – | tombstone `start_failed`; whatever was made is reaped |
//! | Running, Snapshotting, Forking | machine, slot and disk export | running, adopted |
//! | | any of them missing | tombstone with the machine's cause; the rest is reaped |
//! | Pausing | the manifest of this pause | paused; its machine is ended |
//! | | no manifest, machine alive | running: the machine is continued, half-made files removed |
//! | | no manifest, no machine | tombstone |
//! | Paused | its manifest and files | paused |
//! | Resuming | – | paused as before; the half-made machine is reaped |
//! | Killing | – | the end is finished |
//! | Dead | – | tombstone |
//! | build waiting or building | – | error; files removed |
//!
//! Machines go first, because exports and slots must not be taken from under one that lives.

use crate::{
    catalog::{Ready, build_home, layers, saved_memory},
    machine::{Machine, remove_dirs, remove_files},
    model::{BuildStatus, EndCause, State},
    node::{Inner, StartError},
    records::{Record, Saved},
    sandbox::{Begin, disk_file, erase, half_made, home, tombstone},
    seams::Layer,
    steps::{Named, StepError, within},
};
use aenv_snapshot::manifest::Manifest;
use aenv_vmm::Vm;
use jiff::Timestamp;
use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    sync::Arc,
};

/// What becomes of one record.
enum Fate {
    Lives(Box<Begin>),
    Ends(EndCause, String),
    /// It is dead already.
    Dead,
}

/// Compares and repairs everything; returns the sandboxes that live on and how their drivers begin.
pub(crate) async fn reconcile(inner: &Arc<Inner>) -> Result<Vec<(Record, Begin)>, StartError> {
    let records_error = |error: crate::records::DbError| StartError::Records(error.to_string());
    let adoption_error = |error: StepError| StartError::Adoption(error.to_string());
    let keys = inner.db.keys().await.map_err(records_error)?;
    inner.keys.write().extend(keys);
    load_catalog(inner).await.map_err(records_error)?;
    let records = inner.db.sandboxes().await.map_err(records_error)?;
    let storage = Arc::clone(&inner.parts.storage);
    let list = async move { storage.list().await.step("listing exports") };
    let exports: HashSet<String> = within("listing exports", inner.deadlines.storage, list)
        .await
        .map_err(adoption_error)?
        .into_iter()
        .collect();

    let mut living = Vec::new();
    let mut ending = Vec::new();
    let mut kept = Kept::default();
    for mut record in records {
        if let Some(key) = &record.idempotency_key {
            let key = (record.sandbox.team.clone(), key.clone());
            inner.idempotent.lock().insert(key, record.sandbox.id.clone());
        }
        let state = record.sandbox.state;
        match fate(inner, &mut record, &exports).await {
            Fate::Dead => inner.publish(&record, None),
            Fate::Ends(cause, detail) => {
                tracing::warn!(sandbox = %record.sandbox.id, ?state, ?cause, %detail, "ended while the server was away");
                if record.sandbox.tombstone.is_none() {
                    record.sandbox.tombstone = Some(tombstone(cause, detail, state));
                }
                ending.push(record);
            }
            Fate::Lives(begin) => {
                tracing::info!(sandbox = %record.sandbox.id, before = ?state, now = ?record.sandbox.state, "adopted");
                if let Begin::Running(machine) = &*begin {
                    kept.add(&machine.record);
                }
                kept.homes.insert(record.sandbox.id.to_string());
                if record.sandbox.state != state {
                    inner.db.save_durably(&record).await.map_err(records_error)?;
                }
                living.push((record, *begin));
            }
        }
    }
    reap(inner, &kept, &exports).await?;
    for mut record in ending {
        erase(inner, &mut record).await;
        if let Some(tombstone) = &record.sandbox.tombstone {
            inner.ended(tombstone.cause);
        }
        inner.publish(&record, None);
    }
    for id in inner.catalog.ids() {
        let used: HashSet<_> = living.iter().map(|(record, _)| record.sandbox.build).collect();
        crate::builds::collect_unless(inner, &id, |build| used.contains(build)).await;
    }
    // Disks of builds that failed, and half-written ones.
    crate::builds::remove_images(inner).await;
    Ok(living)
}

#[derive(Default)]
struct Kept {
    machines: HashSet<String>,
    exports: HashSet<String>,
    homes: HashSet<String>,
}

impl Kept {
    fn add(&mut self, machine: &crate::records::MachineRecord) {
        self.machines.insert(machine.vm.id.clone());
        self.exports.insert(machine.disk_export.clone());
        self.exports.extend(machine.memory_export.clone());
    }
}

async fn fate(inner: &Arc<Inner>, record: &mut Record, exports: &HashSet<String>) -> Fate {
    match record.sandbox.state {
        State::Dead => Fate::Dead,
        State::Creating => {
            Fate::Ends(EndCause::StartFailed, "the server stopped while it was being started".to_owned())
        }
        State::Killing => Fate::Ends(EndCause::Killed, "asked for".to_owned()),
        State::Running | State::Snapshotting | State::Forking => match adopt(inner, record, exports).await {
            Ok(machine) => {
                record.sandbox.state = State::Running;
                Fate::Lives(Box::new(Begin::Running(machine)))
            }
            Err(why) => Fate::Ends(EndCause::VmmCrash, why),
        },
        State::Pausing => interrupted_pause(inner, record, exports).await,
        State::Paused => paused(inner, record),
        State::Resuming => {
            record.machine = None;
            record.sandbox.state = State::Paused;
            paused(inner, record)
        }
    }
}

/// A sandbox that should be paused is so if its files are there.
fn paused(inner: &Arc<Inner>, record: &mut Record) -> Fate {
    let path = inner.at(&home(&record.sandbox.id)).join("snapshot.json");
    let checked = Manifest::read(&path).and_then(|manifest| manifest.check_files(inner.data_dir()));
    match (checked, &record.saved) {
        (Ok(()), Some(_)) => Fate::Lives(Box::new(Begin::Paused)),
        (Ok(()), None) => Fate::Ends(EndCause::NodeLost, "its record doesn't know what was saved".to_owned()),
        (Err(error), _) => Fate::Ends(EndCause::NodeLost, error.to_string()),
    }
}

async fn interrupted_pause(inner: &Arc<Inner>, record: &mut Record, exports: &HashSet<String>) -> Fate {
    let path = inner.at(&home(&record.sandbox.id)).join("snapshot.json");
    let manifest = Manifest::read(&path)
        .and_then(|manifest| manifest.check_files(inner.data_dir()).map(|()| manifest))
        .ok()
        .filter(|manifest| manifest.sequence == record.sequence);
    if let Some(manifest) = manifest {
        let disk = layers(&manifest.disk);
        record.saved =
            Some(Saved { sequence: manifest.sequence, disk: disk.clone(), memory: saved_memory(&manifest) });
        record.disk = disk;
        record.sandbox.state = State::Paused;
        record.sandbox.end_at = manifest.taken_at;
        // Not kept, so it is reaped with what it holds.
        record.machine = None;
        return Fate::Lives(Box::new(Begin::Paused));
    }
    match adopt(inner, record, exports).await {
        Ok(machine) => {
            let vm = Arc::clone(&machine.vm);
            let go_on = async move { vm.resume().await.step("continuing the machine") };
            if let Err(error) = within("continuing the machine", inner.deadlines.machine, go_on).await {
                return Fate::Ends(
                    EndCause::VmmCrash,
                    format!("stopped during an interrupted pause; {error}"),
                );
            }
            remove_files(half_made(record).into_iter().map(|path| inner.at(&path))).await;
            // Sealing puts its file in place when it is done: then the layer is part of the running disk.
            let sealed = disk_file(record);
            if inner.at(&sealed).exists() && record.disk.last().is_none_or(|layer| layer.path != sealed) {
                record.disk.push(Layer::lsmt(sealed));
            }
            record.sandbox.state = State::Running;
            Fate::Lives(Box::new(Begin::Running(machine)))
        }
        Err(why) => Fate::Ends(EndCause::VmmCrash, format!("during a pause: {why}")),
    }
}

/// Takes over a machine with all it holds, or says what is missing.
async fn adopt(inner: &Arc<Inner>, record: &Record, exports: &HashSet<String>) -> Result<Machine, String> {
    let Some(machine) = record.machine.clone() else { return Err("its record names no machine".to_owned()) };
    let (vmm, wanted) = (Arc::clone(&inner.parts.vmm), machine.vm.clone());
    let find = async move { vmm.adopt(&wanted).await.step("adopting the machine") };
    let vm = within("adopting the machine", inner.deadlines.machine, find)
        .await
        .map_err(|error| error.to_string())?
        .ok_or("the machine ended while the server was away")?;
    let gone = |what: &str| format!("the machine was ended because {what} is gone");
    if let Some(name) =
        machine.memory_export.iter().chain([&machine.disk_export]).find(|name| !exports.contains(*name))
    {
        end(&vm).await;
        return Err(gone(&format!("its export {name}")));
    }
    let (network, slot) = (Arc::clone(&inner.parts.network), machine.slot.clone());
    let claim = async move { network.adopt(&slot).await.step("adopting the network slot") };
    match within("adopting the network slot", inner.deadlines.network, claim).await {
        Ok(true) => {
            let room = Some(inner.admission.adopt(record.sandbox.memory_mib));
            Ok(Machine { vm, record: machine, room })
        }
        Ok(false) => {
            end(&vm).await;
            Err(gone("its network slot"))
        }
        Err(error) => {
            end(&vm).await;
            Err(error.to_string())
        }
    }
}

async fn end(vm: &Arc<dyn Vm>) {
    if let Err(error) = vm.kill().await {
        tracing::warn!(machine = %vm.record().id, %error, "ending a machine that can't be adopted");
    }
}

/// Removes everything that no living sandbox uses.
async fn reap(inner: &Arc<Inner>, kept: &Kept, exports: &HashSet<String>) -> Result<(), StartError> {
    let fail = |what: &str, error: &dyn std::fmt::Display| StartError::Adoption(format!("{what}: {error}"));
    let machines = inner.machines();
    let reaped = inner.parts.processes.reap(&machines, &kept.machines).await;
    let reaped = reaped.map_err(|error| fail("ending forgotten machines", &error))?;
    let mut closed = 0;
    for name in exports.iter().filter(|name| ours(name) && !kept.exports.contains(*name)) {
        Arc::clone(inner).close_export(name.clone()).await;
        closed += 1;
    }
    let slots =
        inner.parts.network.reap().await.map_err(|error| fail("removing forgotten network slots", &error))?;
    let mut dirs = strays(&machines, |name| kept.machines.contains(name));
    dirs.extend(strays(&inner.at(Path::new("sandboxes")), |name| kept.homes.contains(name)));
    let templates = inner.at(Path::new("templates"));
    let known: HashSet<String> = inner.catalog.ids().iter().map(ToString::to_string).collect();
    dirs.extend(strays(&templates, |name| known.contains(name)));
    for id in inner.catalog.ids() {
        let ready: HashSet<String> = inner
            .catalog
            .builds_of(&id)
            .into_iter()
            .filter(|build| inner.catalog.ready(&build.id).is_some())
            .map(|build| build.id.to_string())
            .collect();
        dirs.extend(strays(&templates.join(id.as_str()), |name| ready.contains(name)));
    }
    if !reaped.is_empty() || closed + slots + dirs.len() > 0 {
        tracing::info!(
            machines = reaped.len(),
            exports = closed,
            slots,
            dirs = dirs.len(),
            "removed what nobody uses"
        );
    }
    remove_dirs(dirs).await;
    Ok(())
}

/// Exports that this node names.
fn ours(name: &str) -> bool {
    name.starts_with("disk-") || name.starts_with("mem-")
}

/// Entries of a directory that `keep` doesn't want. A missing directory has none.
fn strays(dir: &Path, keep: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    entries
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .filter(|entry| entry.file_name().to_str().is_none_or(|name| !keep(name)))
        .map(|entry| entry.path())
        .collect()
}

async fn load_catalog(inner: &Arc<Inner>) -> Result<(), crate::records::DbError> {
    for template in inner.db.templates().await? {
        inner.catalog.put_template(template);
    }
    for mut build in inner.db.builds().await? {
        let home = inner.at(&build_home(&build.template, &build.id));
        let usable = || {
            let manifest = Manifest::read(&home.join("snapshot.json")).map_err(|error| error.to_string())?;
            manifest.check_files(inner.data_dir()).map_err(|error| error.to_string())?;
            Ready::new(&build, &manifest).ok_or_else(|| "its snapshot has no memory".to_owned())
        };
        let reason = match build.status {
            BuildStatus::Ready => match usable() {
                Ok(ready) => {
                    inner.catalog.put_ready(Arc::new(ready));
                    None
                }
                Err(reason) => Some(reason),
            },
            BuildStatus::Error => None,
            BuildStatus::Waiting | BuildStatus::Building => {
                Some("the server stopped during the build; pull the image again".to_owned())
            }
        };
        if let Some(reason) = reason {
            tracing::warn!(template = %build.template, build = %build.id, %reason, "a build is not usable");
            build.status = BuildStatus::Error;
            build.reason = Some(reason);
            build.finished_at.get_or_insert_with(Timestamp::now);
            inner.db.save_build(&build).await?;
        }
        inner.catalog.put_build(build);
    }
    // A build may have become ready just before the name could move to it, and a usable one may be damaged now.
    for id in inner.catalog.ids() {
        let newest = inner
            .catalog
            .builds_of(&id)
            .into_iter()
            .map(|build| build.id)
            .find(|build| inner.catalog.ready(build).is_some());
        if inner.catalog.current(&id) != newest
            && let Some(moved) = inner.catalog.change_template(&id, |template| template.current = newest)
        {
            inner.db.save_template(&moved).await?;
        }
    }
    Ok(())
}
