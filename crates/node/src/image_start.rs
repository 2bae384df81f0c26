//! Starting from an image that nobody made a template of.
//!
//! ```text
//!   create docker.io/org/task:tag ─► reference + machine size = a template's name
//!        ready ─► as from any template      under way ─► joined      neither ─► pulled, then joined
//! ```
//! So an image's first sandbox costs a cold boot and every later one a restore. What a tag meant then is kept until
//! it is pulled anew, as container engines do. These templates are ordinary ones, in lists and for deletion, but nobody
//! answers for them: beyond [`MOST`] a team's longest unused ones go, which disturbs no sandbox. A failed build
//! is told to all who waited for it, and the next request tries again.

use crate::{
    builds,
    control::{Error, Result},
    model::{
        BuildId, BuildStatus, CreateSandbox, DEFAULT_DISK_MIB, DEFAULT_MEMORY_MIB, DEFAULT_VCPUS, Principal,
        PullTemplate, TemplateId,
    },
    node::Inner,
};
use sha2::{Digest, Sha256};
use std::sync::Arc;

/// First part of such a template's name.
const SPACE: &str = "image/";
/// How many a team keeps.
const MOST: usize = 512;
/// How many that could not be made it keeps, for their logs.
const MOST_FAILED: usize = 32;
/// Virtual CPUs, memory and disk, both MiB.
type Size = (u8, u32, u32);

/// The name of the template to start from, which is ready when this returns.
pub(crate) async fn template_for(
    inner: &Arc<Inner>,
    who: &Principal,
    request: &CreateSandbox,
) -> Result<String> {
    let asked = |(vcpus, memory_mib, disk_mib): Size| {
        (
            request.vcpus.unwrap_or(vcpus),
            request.memory_mib.unwrap_or(memory_mib),
            request.disk_mib.unwrap_or(disk_mib),
        )
    };
    let (image, size) = match inner.catalog.resolve(&who.team, &request.template, |ready, _| ready.build) {
        // The usual start, which must not pay for what follows.
        Ok(_) if (request.vcpus, request.memory_mib, request.disk_mib) == (None, None, None) => {
            return Ok(request.template.clone());
        }
        Ok(build) => {
            let build = inner
                .catalog
                .build(&build)
                .ok_or_else(|| Error::TemplateNotFound(request.template.clone()))?;
            // What its maker asked for: a disk may have come out larger than that.
            let made = (build.vcpus, build.memory_mib, build.disk_mib);
            if asked(made) == made {
                return Ok(request.template.clone());
            }
            // A snapshot's machine can't change its size: the same image is started in another.
            (build.image, asked(made))
        }
        Err(Error::TemplateNotFound(_)) if is_image(&request.template) => {
            (request.template.clone(), asked((DEFAULT_VCPUS, DEFAULT_MEMORY_MIB, DEFAULT_DISK_MIB)))
        }
        Err(error) => return Err(error),
    };
    let (vcpus, memory_mib, disk_mib) = size;
    let name = name_of(&image, size);
    let pull = PullTemplate {
        image,
        name: name.clone(),
        vcpus,
        memory_mib,
        disk_mib,
        force: false,
        credentials: None,
    };
    let Some((template, build)) = begin(inner, who, pull).await? else { return Ok(name) };
    joined(inner, &request.template, &template, &build).await?;
    Ok(name)
}

/// Whether a reference can only be an image's: it names a registry's host, or a transport.
pub(crate) fn is_image(reference: &str) -> bool {
    let Some((first, rest)) = reference.split_once('/') else { return false };
    !rest.is_empty()
        && first.starts_with(|c: char| c.is_ascii_alphanumeric())
        && (first.contains(['.', ':']) || first == "localhost")
}

/// Long enough that no two meet, and a template's name by its letters.
fn name_of(image: &str, (vcpus, memory_mib, disk_mib): Size) -> String {
    let key = Sha256::digest(format!("{image}\n{vcpus} {memory_mib} {disk_mib}"));
    format!("{SPACE}{}", hex::encode(key.get(..16).unwrap_or(&key)))
}

/// The build to wait for; `None` when the template is ready.
async fn begin(
    inner: &Arc<Inner>,
    who: &Principal,
    pull: PullTemplate,
) -> Result<Option<(TemplateId, BuildId)>> {
    // One at a time: the second of two requests for one image must find the first one's build.
    let _turn = inner.image_starts.lock().await;
    if let Some(template) = inner.catalog.named(&who.team, &pull.name) {
        if template.current.is_some_and(|build| inner.catalog.ready(&build).is_some()) {
            return Ok(None);
        }
        let newest = inner.catalog.builds_of(&template.id).into_iter().next();
        if let Some(build) = newest
            && matches!(build.status, BuildStatus::Waiting | BuildStatus::Building)
        {
            return Ok(Some((template.id, build.id)));
        }
    } else {
        make_room(inner, who).await;
    }
    builds::check(inner, &pull)?;
    // Told now rather than after the image was made; the room is taken when the machine starts.
    let room = inner.admission.admit(pull.memory_mib);
    drop(room.map_err(|full| full.answer(&pull.name))?);
    let build = builds::pull(inner, who, pull).await?;
    Ok(Some((build.template, build.id)))
}

/// Waits for a build's end. The build's own deadlines bound it.
async fn joined(inner: &Arc<Inner>, asked: &str, template: &TemplateId, id: &BuildId) -> Result<()> {
    loop {
        let ended = inner.build_ended.notified();
        tokio::pin!(ended);
        // Listening begins before looking: an end in between is not missed.
        ended.as_mut().enable();
        let Some(build) = inner.catalog.build(id) else {
            return Err(Error::Conflict(format!(
                "template {template} of '{asked}' was deleted while it was made"
            )));
        };
        match build.status {
            BuildStatus::Ready => return Ok(()),
            BuildStatus::Error => {
                let reason = build.reason.unwrap_or_default();
                let words = format!("'{asked}' can't be started: {reason}");
                // What the image or its name is to blame for is the caller's to mend.
                return Err(match reason.starts_with(builds::PREPARING) {
                    true => Error::Invalid(words),
                    false => Error::Internal(words),
                });
            }
            BuildStatus::Waiting | BuildStatus::Building => {}
        }
        tokio::select! {
            () = ended => {}
            () = inner.stop.cancelled() => {
                return Err(Error::Unavailable("the server is stopping".to_owned()));
            }
        }
    }
}

/// Deletes a team's longest unused image templates until one more fits, and of those that could not be made all but the
/// latest few.
async fn make_room(inner: &Arc<Inner>, who: &Principal) {
    let mut kept: Vec<_> = inner
        .catalog
        .templates(&who.team)
        .into_iter()
        .filter(|template| template.names.iter().any(|name| name.starts_with(SPACE)))
        .collect();
    kept.sort_by_key(|template| std::cmp::Reverse(template.last_spawned_at.unwrap_or(template.created_at)));
    let newest = |id: &TemplateId| inner.catalog.builds_of(id).into_iter().next().map(|build| build.status);
    let (usable, rest): (Vec<_>, Vec<_>) = kept.into_iter().partition(|template| template.current.is_some());
    let failed = rest.into_iter().filter(|template| newest(&template.id) == Some(BuildStatus::Error));
    for template in usable.into_iter().skip(MOST - 1).chain(failed.skip(MOST_FAILED)) {
        if let Err(error) = builds::remove(inner, &template.id).await {
            tracing::warn!(template = %template.id, %error, "an unused image's template was not removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_told_from_a_template_by_its_first_part() {
        for image in [
            "docker.io/library/python:3.12",
            "localhost/x",
            "localhost:5000/a/b@sha256:00",
            "ghcr.io/org/task",
            "oci:/srv/image:base",
        ] {
            assert!(is_image(image), "{image}");
        }
        for name in
            ["base", "base:v1", "team/base", "team/base:v1", "python3.12", "a.b/", "../base", "./base"]
        {
            assert!(!is_image(name), "{name}");
        }
    }

    #[test]
    fn each_size_of_an_image_has_a_name_of_its_own() {
        let name = name_of("docker.io/a", (2, 512, 10_240));
        assert_eq!(name, name_of("docker.io/a", (2, 512, 10_240)));
        for other in [(1, 512, 10_240), (2, 1024, 10_240), (2, 512, 20_480)] {
            assert_ne!(name, name_of("docker.io/a", other));
        }
        assert_ne!(name, name_of("docker.io/b", (2, 512, 10_240)));
    }
}
