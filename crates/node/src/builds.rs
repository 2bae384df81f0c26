//! Templates from images.
//!
//! ```text
//!   written (Waiting) ─► turn ─► image ─► cold boot ─► agent ─► exercise ─► sync ─► stop ─► device state ─► memory
//!        ─► disk sealed ─► machine ended ─► manifest ─► written (Ready), the name moves here
//! ```
//! A step that fails ends the machine and removes the build's directory; the build stays readable as `error` with its
//! log. So does a crash (adoption does the removing). The image's disk layer is shared by all builds of the same digest
//! and size, and goes with the last of them.

use crate::{
    catalog::{Ready, build_home},
    control::{self, Error},
    machine::{Machine, Plan, Start, remove_dirs},
    model::{Build, BuildId, BuildStatus, Principal, PullTemplate, TemplateId},
    node::Inner,
    pool::exercise,
    records::{BuildRecord, SavedMemory, TemplateRecord},
    sandbox::{file_ref, write_manifest},
    seams::{Image, ImageRequest, Init, Layer},
    steps::{Clock, Named, StepError, guest, within},
};
use aenv_network::Egress;
use aenv_snapshot::manifest::{FileRef, Guest, LayerRef, Manifest, Memory};
use jiff::Timestamp;
use std::{path::PathBuf, sync::Arc, time::Duration};
use tokio_util::sync::CancellationToken;

/// Step whose failures are the image's or its name's.
pub(crate) const PREPARING: &str = "preparing the image";

/// Begins a build, or returns the one that is ready when the same was pulled before.
pub(crate) async fn pull(
    inner: &Arc<Inner>,
    who: &Principal,
    request: PullTemplate,
) -> control::Result<Build> {
    check(&request)?;
    inner.parts.images.check(&request.image).map_err(|fault| Error::Invalid(format!("image: {fault}")))?;
    let internal = |error: crate::records::DbError| Error::Internal(error.to_string());
    let existing = inner.catalog.named(&who.team, &request.name);
    if let Some(template) = &existing {
        let newest = inner.catalog.builds_of(&template.id).into_iter().next();
        match newest {
            Some(build) if matches!(build.status, BuildStatus::Waiting | BuildStatus::Building) => {
                let (name, id) = (&request.name, build.id);
                return Err(Error::Conflict(format!(
                    "build {id} of '{name}' is under way; wait for it to end"
                )));
            }
            Some(build) if build.status == BuildStatus::Ready && !request.force && same(&build, &request) => {
                return Ok(view(&build, 0, 0));
            }
            _ => {}
        }
    }
    let waiting = inner.building.lock().len();
    if waiting >= inner.limits.max_builds + inner.limits.max_queued_builds {
        let message =
            format!("{waiting} builds are under way or in line, the most this node takes; try again later");
        return Err(Error::Full { message, retry_after: Duration::from_secs(30) });
    }
    let now = Timestamp::now();
    let template = existing.unwrap_or_else(|| TemplateRecord {
        id: TemplateId::random(),
        team: who.team.clone(),
        names: vec![request.name.clone()],
        current: None,
        created_at: now,
        updated_at: now,
        spawn_count: 0,
        last_spawned_at: None,
        build_count: 0,
        deleted: false,
    });
    let template = TemplateRecord { build_count: template.build_count + 1, updated_at: now, ..template };
    let build = BuildRecord {
        id: BuildId(uuid::Uuid::now_v7()),
        template: template.id.clone(),
        status: BuildStatus::Waiting,
        reason: None,
        created_at: now,
        finished_at: None,
        image: request.image.clone(),
        digest: None,
        vcpus: request.vcpus,
        memory_mib: request.memory_mib,
        disk_mib: request.disk_mib,
        log: Vec::new(),
    };
    inner.db.save_template(&template).await.map_err(internal)?;
    inner.db.save_build(&build).await.map_err(internal)?;
    inner.catalog.put_template(template);
    inner.catalog.put_build(build.clone());
    let cancel = CancellationToken::new();
    inner.building.lock().insert(build.id, cancel.clone());
    inner.tasks.spawn(run(Arc::clone(inner), build.clone(), request, cancel));
    Ok(view(&build, 0, 0))
}

fn check(request: &PullTemplate) -> control::Result<()> {
    let invalid = |text: String| Err(Error::Invalid(text));
    let name_ok = |part: &str| {
        let bytes = part.as_bytes();
        (1..=63).contains(&bytes.len())
            && bytes[0].is_ascii_alphanumeric()
            && bytes.iter().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._-".contains(b))
    };
    if request.name.split('/').count() > 2 || !request.name.split('/').all(name_ok) {
        let name: String = request.name.chars().take(80).collect();
        return invalid(format!(
            "'{name}' is not a template name: 1 to 63 of a-z, 0-9, '.', '_', '-', with at most one '/'"
        ));
    }
    if request.image.is_empty() || request.image.len() > 1024 || request.image.chars().any(char::is_control) {
        return invalid("the image reference must be 1 to 1024 printable characters".to_owned());
    }
    if !(1..=64).contains(&request.vcpus) {
        return invalid(format!("{} virtual CPUs: 1 to 64 are possible", request.vcpus));
    }
    if !(128..=1 << 20).contains(&request.memory_mib) || !request.memory_mib.is_multiple_of(2) {
        return invalid(format!(
            "{} MiB of memory: an even number from 128 on is possible",
            request.memory_mib
        ));
    }
    if !(64..=1 << 20).contains(&request.disk_mib) {
        return invalid(format!("{} MiB of disk: 64 to 1048576 are possible", request.disk_mib));
    }
    Ok(())
}

fn same(build: &BuildRecord, request: &PullTemplate) -> bool {
    build.image == request.image
        && (build.vcpus, build.memory_mib, build.disk_mib)
            == (request.vcpus, request.memory_mib, request.disk_mib)
}

/// A build as the outside sees it, with log lines from `offset`.
pub(crate) fn view(build: &BuildRecord, offset: usize, limit: usize) -> Build {
    Build {
        template: build.template.clone(),
        id: build.id,
        status: build.status,
        log: build.log.iter().skip(offset).take(limit).cloned().collect(),
        reason: build.reason.clone(),
        created_at: build.created_at,
        finished_at: build.finished_at,
    }
}

/// Takes a template's names away, stops its builds and removes what no sandbox uses.
pub(crate) async fn remove(inner: &Arc<Inner>, id: &TemplateId) -> control::Result<()> {
    let gone = inner.catalog.change_template(id, |template| {
        template.deleted = true;
        template.names.clear();
    });
    let Some(gone) = gone else { return Ok(()) };
    inner.db.save_template(&gone).await.map_err(|error| Error::Internal(error.to_string()))?;
    for build in inner.catalog.builds_of(id) {
        if let Some(cancel) = inner.building.lock().get(&build.id) {
            cancel.cancel();
        }
    }
    inner.pool.review();
    let (inner, id) = (Arc::clone(inner), id.clone());
    // In a task of its own: a caller that goes away must not stop it half-way.
    let task = inner.tasks.clone().spawn(async move { collect(&inner, &id).await });
    task.await.map_err(|error| Error::Internal(format!("removing a template: {error}")))
}

/// One build under way: what its steps need to know.
struct Work {
    inner: Arc<Inner>,
    build: BuildRecord,
    request: PullTemplate,
    home: PathBuf,
    cancel: CancellationToken,
    clock: Clock,
}

async fn run(inner: Arc<Inner>, build: BuildRecord, request: PullTemplate, cancel: CancellationToken) {
    let (id, template) = (build.id, build.template.clone());
    let home = build_home(&template, &id);
    let mut work =
        Work { inner: Arc::clone(&inner), build, request, home: home.clone(), cancel, clock: Clock::start() };
    let made = work.make().await;
    inner.observe("build", &work.clock.finish());
    match made {
        Ok(ready) => publish(&inner, ready).await,
        Err(error) => {
            remove_dirs(vec![inner.at(&home)]).await;
            inner.catalog.log(&id, "error", &error.to_string(), "finalize");
            tracing::warn!(%template, build = %id, %error, "a build failed");
            close(&inner, &id, BuildStatus::Error, Some(error.to_string())).await;
        }
    }
    inner.building.lock().remove(&id);
    inner.build_ended.notify_waiters();
    inner.pool.review();
    collect(&inner, &template).await;
}

/// Writes down how a build ended, then shows it.
async fn close(inner: &Arc<Inner>, id: &BuildId, status: BuildStatus, reason: Option<String>) {
    let Some(build) = inner.catalog.build(id) else { return };
    let ended = BuildRecord { status, reason, finished_at: Some(Timestamp::now()), ..build };
    if let Err(error) = inner.db.save_build(&ended).await {
        tracing::error!(build = %id, %error, "the end of a build could not be written down");
    }
    let _ = inner.catalog.change_build(id, |build| *build = ended);
}

/// Makes a build the one that new sandboxes are made from. First written down, then the name moves, then it is called
/// ready: whoever sees it ready can use it. A crash in between leaves a ready build that the next start moves the
/// name to.
async fn publish(inner: &Arc<Inner>, ready: Ready) {
    let (id, template) = (ready.build, ready.template.clone());
    inner.catalog.log(&id, "info", "ready", "finalize");
    if let Some(build) = inner.catalog.build(&id) {
        let written =
            BuildRecord { status: BuildStatus::Ready, finished_at: Some(Timestamp::now()), ..build };
        if let Err(error) = inner.db.save_build(&written).await {
            tracing::error!(build = %id, %error, "a finished build could not be written down");
        }
    }
    let ready = Arc::new(ready);
    inner.catalog.put_ready(Arc::clone(&ready));
    let moved = inner.catalog.change_template(&template, |template| template.current = Some(id));
    if let Some(moved) = moved
        && let Err(error) = inner.db.save_template(&moved).await
    {
        tracing::error!(%template, %error, "the newest build of a template could not be written down");
    }
    close(inner, &id, BuildStatus::Ready, None).await;
    inner.pool.expect(&ready);
}

impl Work {
    fn say(&self, step: &str, text: &str) {
        self.inner.catalog.log(&self.build.id, "info", text, step);
    }

    async fn make(&mut self) -> Result<Ready, StepError> {
        let inner = Arc::clone(&self.inner);
        let _turn = tokio::select! {
            turn = Arc::clone(&inner.build_turns).acquire_owned() => {
                turn.map_err(|error| StepError::failed("waiting for a turn", error))?
            }
            () = self.cancel.cancelled() => return Err(StepError::Cancelled),
        };
        let building =
            inner.catalog.change_build(&self.build.id, |build| build.status = BuildStatus::Building);
        let building = building.ok_or(StepError::Cancelled)?;
        inner.db.save_build(&building).await.step("writing the record")?;

        let image = self.image().await?;
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
        Ok(_) | Err(StepError::Failed { .. }) => Ok(()),
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

/// Removes builds of a template that nothing uses any more.
pub(crate) async fn collect(inner: &Arc<Inner>, template: &TemplateId) {
    collect_unless(inner, template, |_| false).await;
}

/// [`collect`] for when the sandboxes aren't all shown yet.
pub(crate) async fn collect_unless(
    inner: &Arc<Inner>,
    template: &TemplateId,
    used: impl Fn(&BuildId) -> bool,
) {
    let (gone, empty) = inner.catalog.collect(template, |build| {
        let views = inner.views.read();
        used(build)
            || views.values().any(|view| view.sandbox.build == *build && view.sandbox.tombstone.is_none())
    });
    for build in &gone {
        remove_dirs(vec![inner.at(&build_home(template, &build.id))]).await;
        if let Err(error) = inner.db.forget_build(&build.id).await {
            tracing::warn!(build = %build.id, %error, "a build stays in the records until the next start");
        }
        tracing::info!(%template, build = %build.id, "removed a build that nothing uses");
    }
    if let Some(template) = &empty {
        remove_dirs(vec![inner.at(&PathBuf::from("templates").join(template.id.as_str()))]).await;
        if let Err(error) = inner.db.forget_template(&template.id).await {
            tracing::warn!(template = %template.id, %error, "a template stays in the records until the next start");
        }
    }
    if !gone.is_empty() && !inner.catalog.building() {
        remove_images(inner).await;
    }
}

/// Removes the disks of images that no build is made of.
pub(crate) async fn remove_images(inner: &Arc<Inner>) {
    let used = inner.catalog.layers_in_use();
    let images = PathBuf::from("images");
    let Ok(mut entries) = tokio::fs::read_dir(inner.at(&images)).await else { return };
    let mut unused = Vec::new();
    while let Ok(Some(entry)) = entries.next_entry().await {
        let dir = images.join(entry.file_name());
        if !used.iter().any(|path| path.starts_with(&dir)) {
            unused.push(entry.path());
        }
    }
    remove_dirs(unused).await;
}
