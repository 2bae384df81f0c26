//! Templates from images.
//!
//! ```text
//!   written (Waiting) ─► turn ─► image ─► cold boot ─► agent ─► exercise ─► sync ─► stop ─► device state ─► memory
//!        ─► disk sealed ─► machine ended ─► manifest ─► written (Ready), the name moves here
//! ```
//! A step that fails ends the machine and removes the build's directory; the build stays readable as `error` with its
//! log. So does a crash (adoption does the removing). The image's disk layer is shared by all builds of the same digest
//! and size, and goes with the last of them.

mod collect;
mod make;

pub(crate) use collect::{collect, collect_unless, remove_images};
pub(crate) use make::nobody;

use self::make::Work;
use crate::{
    catalog::{Ready, build_home},
    control::{self, Error},
    machine::remove_dirs,
    model::{Build, BuildId, BuildStatus, Principal, PullTemplate, TemplateId},
    node::Inner,
    records::{BuildRecord, TemplateRecord},
    steps::Clock,
};
use jiff::Timestamp;
use std::{sync::Arc, time::Duration};
use tokio_util::sync::CancellationToken;

/// Step whose failures are the image's or its name's.
pub(crate) const PREPARING: &str = "preparing the image";

/// Begins a build, or returns the one that is ready when the same was pulled before.
pub(crate) async fn pull(
    inner: &Arc<Inner>,
    who: &Principal,
    request: PullTemplate,
) -> control::Result<Build> {
    check(inner, &request)?;
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
    if waiting >= inner.limits.max_images + inner.limits.max_queued_builds {
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

/// Whether a build of this could be begun at all, ever.
pub(crate) fn check(inner: &Inner, request: &PullTemplate) -> control::Result<()> {
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
    let most = inner.limits.max_vcpus;
    if !(1..=most).contains(&request.vcpus) {
        return invalid(format!("{} virtual CPUs: 1 to {most} are possible on this node", request.vcpus));
    }
    if !(128..=1 << 20).contains(&request.memory_mib) || !request.memory_mib.is_multiple_of(2) {
        return invalid(format!(
            "{} MiB of memory: an even number from 128 on is possible",
            request.memory_mib
        ));
    }
    let (_, limit) = inner.admission.promised();
    if u64::from(request.memory_mib) > limit {
        return invalid(format!(
            "{} MiB of memory: this node gives its machines {limit} MiB in all",
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
