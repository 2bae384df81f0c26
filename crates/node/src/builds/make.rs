//! One build, step by step.

use super::PREPARING;
use crate::{
    catalog::Ready,
    machine::{Machine, Plan, Start},
    model::{BuildStatus, PullTemplate, TemplateId},
    node::Inner,
    pool::exercise,
    records::{BuildRecord, SavedMemory},
    sandbox::{file_ref, write_manifest},
    seams::{Image, ImageRequest, Init, Layer},
    steps::{Clock, Named, StepError, guest, within},
};
use aenv_network::Egress;
use aenv_snapshot::manifest::{FileRef, Guest, LayerRef, Manifest, Memory};
use jiff::Timestamp;
use std::{path::PathBuf, sync::Arc};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

/// One build under way: what its steps need to know.
pub(super) struct Work {
    pub(super) inner: Arc<Inner>,
    pub(super) build: BuildRecord,
    pub(super) request: PullTemplate,
    pub(super) home: PathBuf,
    pub(super) cancel: CancellationToken,
    pub(super) clock: Clock,
}

impl Work {
    fn say(&self, step: &str, text: &str) {
        self.inner.catalog.log(&self.build.id, "info", text, step);
    }

    pub(super) async fn make(&mut self) -> Result<Ready, StepError> {
        let inner = Arc::clone(&self.inner);
        let turn = self.turn(&inner.image_turns).await?;
        let building =
            inner.catalog.change_build(&self.build.id, |build| build.status = BuildStatus::Building);
        let building = building.ok_or(StepError::Cancelled)?;
        inner.db.save_build(&building).await.step("writing the record")?;

        let image = self.image().await?;
        drop(turn);
        let _turn = self.turn(&inner.build_turns).await?;
        let disk = inner
            .relative(&image.disk)
            .ok_or_else(|| StepError::failed(PREPARING, "its disk lies outside the data directory"))?;
        let _ = inner.catalog.change_build(&self.build.id, |build| build.digest = Some(image.digest.clone()));

        let user = match &image.user {
            Some(user) if !user.is_empty() => user.clone(),
            _ if image.users.iter().any(|user| user == "user") => "user".to_owned(),
            _ => "root".to_owned(),
        };
        let guest = Guest {
            init_secret: hex::encode(rand::random::<[u8; 32]>()),
            env: image.env.clone(),
            user,
            workdir: image.workdir.clone(),
            entrypoint: image.entrypoint.clone(),
            cmd: image.cmd.clone(),
        };
        let room = inner.admit(self.request.memory_mib).await?;
        let memory_file = self.home.join("memory.raw");
        let plan = Plan {
            id: format!("b{}", self.build.id.0.simple()),
            vcpus: self.request.vcpus,
            memory_mib: self.request.memory_mib,
            disk: vec![Layer::lsmt(disk)],
            disk_size: image.disk_size,
            upper: self.home.join("upper"),
            egress: Egress::Nothing,
            start: Start::Boot { secret: guest.init_secret.clone(), memory_file: memory_file.clone() },
        };
        let disk_layers = plan.disk.clone();
        let machine = inner.launch(plan, Some(room), &mut self.clock).await?;
        self.say("boot", "the machine runs");
        let captured = self.capture(&machine, &guest, &memory_file).await;
        // Its memory is in a file and its disk is sealed, or it failed: either way it has served.
        inner.end_machine(machine).await;
        let memory = captured?;
        let mut disk_layers = disk_layers;
        disk_layers.push(Layer::lsmt(self.home.join("disk.layer")));
        let manifest = self.manifest(&guest, &disk_layers, &memory, image.disk_size)?;
        let ready = Ready::new(&self.build, &manifest)
            .ok_or_else(|| StepError::failed("describing the snapshot", "it has no memory"))?;
        write_manifest(manifest, inner.at(&self.home).join("snapshot.json")).await?;
        Ok(ready)
    }

    async fn turn(&self, turns: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, StepError> {
        tokio::select! {
            turn = Arc::clone(turns).acquire_owned() => {
                turn.map_err(|error| StepError::failed("waiting for a turn", error))
            }
            () = self.cancel.cancelled() => Err(StepError::Cancelled),
        }
    }

    async fn image(&mut self) -> Result<Image, StepError> {
        self.say("base", &format!("preparing {}", self.request.image));
        let request = ImageRequest {
            reference: self.request.image.clone(),
            disk_mib: self.request.disk_mib,
            credentials: self.request.credentials.clone(),
        };
        let inner = Arc::clone(&self.inner);
        let (id, dir) = (self.build.id, inner.at(&PathBuf::from("images")));
        let noting = Arc::clone(&inner);
        let prepare = async move {
            let note = Arc::new(move |text: String| noting.catalog.log(&id, "info", &text, "base"));
            inner.parts.images.prepare(&request, &dir, note).await.step(PREPARING)
        };
        let limit = self.inner.deadlines.image;
        let cancel = self.cancel.clone();
        let image = self.clock.time("image", async {
            tokio::select! {
                image = within(PREPARING, limit, prepare) => image,
                () = cancel.cancelled() => Err(StepError::Cancelled),
            }
        });
        let image = image.await?;
        self.say("base", &format!("image {} is ready", image.digest));
        Ok(image)
    }

    /// From a booted machine to its state, memory and disk in files.
    async fn capture(
        &mut self,
        machine: &Machine,
        told: &Guest,
        memory_file: &std::path::Path,
    ) -> Result<SavedMemory, StepError> {
        let inner = Arc::clone(&self.inner);
        let deadlines = &inner.deadlines;
        let init = nobody(told, &self.build.template);
        let slot = &machine.record.slot;
        let mut exit = machine.vm.exit();
        let cancel = self.cancel.clone();
        let answer = guest(
            "waiting for the guest agent",
            deadlines.boot,
            &mut exit,
            &cancel,
            inner.parts.guests.init(slot, &init),
        );
        self.clock.time("agent", answer).await.map_err(|error| with_console(error, machine))?;
        self.say("boot", "the guest agent answers");

        let exercised = exercise_all(&inner, machine, &told.user, &cancel);
        self.clock.time("exercise", exercised).await?;
        let sync = inner.parts.guests.sync(slot, &told.init_secret);
        let sync = guest("writing the guest's caches out", deadlines.agent, &mut exit, &cancel, sync);
        self.clock.time("sync", sync).await?;
        self.say("snapshot", "stopping the machine");

        let vm = Arc::clone(&machine.vm);
        let stop = async move { vm.pause().await.step("stopping the machine") };
        self.clock.time("stop", within("stopping the machine", deadlines.machine, stop)).await?;
        let state = self.home.join("state");
        let (vm, path) = (Arc::clone(&machine.vm), inner.at(&state));
        let save = async move { vm.save_state(&path).await.step("saving the device state") };
        self.clock.time("state", within("saving the device state", deadlines.machine, save)).await?;
        let (layers, image) = (Arc::clone(&inner.parts.layers), inner.at(memory_file));
        let finish = async move { layers.finish_image(&image).await.step("writing memory out") };
        let kept = self.clock.time("memory", within("writing memory out", deadlines.capture, finish)).await?;
        self.say("snapshot", &format!("memory: {} MiB in use", kept >> 20));
        let (storage, export) = (Arc::clone(&inner.parts.storage), machine.record.disk_export.clone());
        let to = inner.at(&self.home.join("disk.layer"));
        let seal = async move { storage.seal(&export, &to).await.step("sealing the disk") };
        self.clock.time("disk", within("sealing the disk", deadlines.storage, seal)).await?;
        let made_by = inner.parts.vmm.compatibility();
        Ok(SavedMemory { made_by, state, layers: vec![Layer::raw(memory_file.to_owned())] })
    }

    fn manifest(
        &self,
        guest: &Guest,
        disk: &[Layer],
        memory: &SavedMemory,
        disk_size: u64,
    ) -> Result<Manifest, StepError> {
        let file = |path: &PathBuf| -> Result<FileRef, StepError> { file_ref(&self.inner, path.clone()) };
        let layer =
            |kind: &str, layer: &Layer| Ok(LayerRef { kind: kind.to_owned(), file: file(&layer.path)? });
        Ok(Manifest {
            subject: self.build.id.to_string(),
            sequence: 1,
            taken_at: Timestamp::now(),
            vcpus: self.request.vcpus,
            memory_mib: self.request.memory_mib,
            disk_size,
            disk: disk.iter().map(|one| layer("lsmt", one)).collect::<Result<_, StepError>>()?,
            memory: Some(Memory {
                made_by: memory.made_by.clone(),
                state: file(&memory.state)?,
                layers: memory
                    .layers
                    .iter()
                    .map(|one| layer("raw", one))
                    .collect::<Result<_, StepError>>()?,
            }),
            guest: guest.clone(),
        })
    }
}

/// The identity of a guest that is no sandbox yet.
pub(crate) fn nobody(told: &Guest, template: &TemplateId) -> Init {
    Init {
        secret: told.init_secret.clone(),
        sandbox: "template".to_owned(),
        template: template.to_string(),
        env: told.env.clone(),
        access_token: None,
        default_user: told.user.clone(),
        default_workdir: told.workdir.clone(),
        generation: 0,
    }
}

/// Fills the guest's page cache with what most commands need.
async fn exercise_all(
    inner: &Arc<Inner>,
    machine: &Machine,
    user: &str,
    cancel: &CancellationToken,
) -> Result<(), StepError> {
    // Twice: the second one finds warm what the first one made.
    for _ in 0..2 {
        exercise(inner, machine, user, cancel).await?;
    }
    const PYTHON: &str = "if command -v python3 >/dev/null 2>&1; then python3 -c pass; fi";
    let limit = inner.deadlines.exercise;
    let mut exit = machine.vm.exit();
    let python = inner.parts.guests.run(&machine.record.slot, user, "/bin/sh", &["-c", PYTHON], limit);
    match guest("running python", limit, &mut exit, cancel, python).await {
        // Not every image has a shell.
        Ok(_) | Err(StepError::Guest { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

/// A guest that didn't come up has said why on its console, if at all.
fn with_console(error: StepError, machine: &Machine) -> StepError {
    let tail = crate::serve::console_tail(&machine.record.vm.dir, 5);
    match error {
        StepError::Cancelled => StepError::Cancelled,
        error if tail.is_empty() => error,
        error => StepError::failed(
            "starting the guest",
            format!("{error}; its console ends: {}", tail.join(" | ")),
        ),
    }
}
