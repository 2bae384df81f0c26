//! A sandbox asked for: checked, admitted, written down, its driver begun.

use super::{ended, send, unexpected};
use crate::{
    catalog::Ready,
    control::{Error, Result},
    image_start,
    model::{CreateSandbox, ImageCommand, Principal, Sandbox, SandboxId, State},
    node::Inner,
    records::Record,
    sandbox::{Answer, Ask, Begin, Source},
};
use jiff::Timestamp;
use std::{collections::BTreeMap, sync::Arc};

/// Labels, variables and their sizes: bounded, because every record holds them.
fn check(inner: &Inner, request: &CreateSandbox) -> Result<()> {
    let invalid = |text: String| Err(Error::Invalid(text));
    if request.ttl.is_zero() || request.ttl > inner.limits.max_ttl {
        return invalid(format!(
            "a time to live of {:?}: more than 0 and at most {:?}",
            request.ttl, inner.limits.max_ttl
        ));
    }
    let size = |map: &BTreeMap<String, String>| {
        map.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>()
    };
    if size(&request.metadata) > 64 << 10 {
        return invalid("metadata may be 64 KiB in all".to_owned());
    }
    if size(&request.env_vars) > 256 << 10 {
        return invalid("environment variables may be 256 KiB in all".to_owned());
    }
    if let Some(name) = request.env_vars.keys().find(|name| name.is_empty() || name.contains(['=', '\0'])) {
        let name: String = name.chars().take(64).collect();
        return invalid(format!("'{name}' is not the name of an environment variable"));
    }
    if request.env_vars.values().any(|value| value.contains('\0')) {
        return invalid("environment variables can't hold a NUL character".to_owned());
    }
    Ok(())
}

pub(super) async fn create(inner: &Arc<Inner>, who: &Principal, request: CreateSandbox) -> Result<Sandbox> {
    check(inner, &request)?;
    let key = request.idempotency_key.clone().map(|key| (who.team.clone(), key));
    // Known before anything is taken or made, so that a repeated request costs nothing.
    if let Some(key) = &key
        && let Some(made) = repeated(inner, key).await
    {
        return made;
    }
    let template = image_start::template_for(inner, who, &request).await?;
    let ready = inner.catalog.resolve(&who.team, &template, |ready, _| Arc::clone(ready))?;
    let warm = if request.cold { None } else { inner.pool.take(&ready) };
    let (id, source) = match warm {
        Some(warm) => (warm.id, Source::Warm(warm.machine)),
        None => {
            let room = inner.admit(ready.memory_mib).await.map_err(|error| error.answer("(new)"))?;
            (SandboxId::random(), Source::Template { memory: ready.memory.clone(), room })
        }
    };
    // The claim and the first showing are one step to whoever collects builds.
    let claimed = inner.catalog.resolve(&who.team, &template, |current, name| {
        let same = current.build == ready.build;
        let name =
            if image_start::is_image(&request.template) { Some(request.template.clone()) } else { name };
        let record = record(who, &request, id.clone(), &ready, name, &source);
        if same {
            inner.publish(&record, None);
        }
        same.then_some(record)
    });
    let record = match claimed {
        Ok(Some(record)) => record,
        other => {
            abandon(inner, &id, source).await;
            return Err(match other {
                Err(error) => error,
                Ok(_) => Error::Unavailable(format!("template '{template}' was just built anew; try again")),
            });
        }
    };
    // The key is taken by whoever comes first.
    if let Some(key) = &key {
        let first = {
            let mut idempotent = inner.idempotent.lock();
            let taken = idempotent.contains_key(key);
            if !taken {
                idempotent.insert(key.clone(), id.clone());
            }
            !taken
        };
        if !first {
            inner.views.write().remove(&id);
            abandon(inner, &id, source).await;
            return repeated(inner, key).await.unwrap_or_else(|| {
                Err(Error::Conflict(
                    "another request with this Idempotency-Key is under way; try again".to_owned(),
                ))
            });
        }
    }
    if let Err(error) = inner.db.save(&record).await {
        inner.views.write().remove(&id);
        if let Some(key) = &key {
            inner.idempotent.lock().remove(key);
        }
        abandon(inner, &id, source).await;
        return Err(Error::Internal(error.to_string()));
    }
    let mailbox = inner.drive(record, Begin::Create(source));
    let (answered, ()) = tokio::join!(send(&mailbox, Ask::Create), count(inner, &ready));
    match answered {
        Some(Ok(Answer::Sandbox(sandbox))) => Ok(*sandbox),
        Some(Ok(other)) => Err(unexpected(&other)),
        Some(Err(error)) => Err(error),
        None => Err(Error::SandboxNotFound(id.to_string())),
    }
}

/// Gives back what was taken for a sandbox that is not to be.
async fn abandon(inner: &Arc<Inner>, id: &SandboxId, source: Source) {
    if let Source::Warm(machine) = source {
        inner.end_machine(machine).await;
        inner.remove_home(id).await;
    }
}

async fn count(inner: &Arc<Inner>, ready: &Ready) {
    if let Some(template) = inner.catalog.spawned(&ready.template)
        && let Err(error) = inner.db.touch_template(&template).await
    {
        tracing::debug!(%error, "a use of a template is not counted");
    }
}

/// What a create with this key made before.
async fn repeated(inner: &Arc<Inner>, key: &(String, String)) -> Option<Result<Sandbox>> {
    let id = inner.idempotent.lock().get(key).cloned()?;
    if let Some(mailbox) = inner.mailbox(&id)
        && let Some(answer) = send(&mailbox, Ask::Create).await
    {
        return Some(match answer {
            Ok(Answer::Sandbox(sandbox)) => Ok(*sandbox),
            Ok(other) => Err(unexpected(&other)),
            Err(error) => Err(error),
        });
    }
    // It has ended: said so, rather than made again.
    inner.view(&id).map(|view| Err(ended(&view)))
}

fn record(
    who: &Principal,
    request: &CreateSandbox,
    id: SandboxId,
    ready: &Ready,
    alias: Option<String>,
    source: &Source,
) -> Record {
    let token = || hex::encode(rand::random::<[u8; 32]>());
    let now = Timestamp::now();
    Record {
        sandbox: Sandbox {
            id,
            team: who.team.clone(),
            template: ready.template.clone(),
            build: ready.build,
            alias,
            state: State::Creating,
            started_at: now,
            end_at: now.checked_add(request.ttl).unwrap_or(Timestamp::MAX),
            on_timeout: request.on_timeout,
            auto_resume: request.auto_resume,
            metadata: request.metadata.clone(),
            vcpus: ready.vcpus,
            memory_mib: ready.memory_mib,
            disk_mib: ready.disk_mib,
            envd_version: crate::seams::ENVD_VERSION.to_owned(),
            envd_token: request.secure.then(token),
            traffic_token: (!request.allow_public_traffic).then(token),
            allow_internet_access: request.allow_internet_access,
            image_command: ImageCommand {
                entrypoint: ready.guest.entrypoint.clone(),
                cmd: ready.guest.cmd.clone(),
            },
            phases: Vec::new(),
            tombstone: None,
        },
        ttl: request.ttl.as_secs().max(1),
        env_vars: request.env_vars.clone(),
        mask_request_host: request.mask_request_host.clone(),
        idempotency_key: request.idempotency_key.clone(),
        generation: 1,
        sequence: 0,
        guest: ready.guest.clone(),
        disk_size: ready.disk_size,
        disk: ready.disk.clone(),
        saved: None,
        machine: match source {
            Source::Warm(machine) => Some(machine.record.clone()),
            Source::Template { .. } => None,
        },
        garbage: Vec::new(),
    }
}
