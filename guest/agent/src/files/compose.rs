//! `POST /files/compose`: several uploaded parts become one file.

use std::{
    fs::{self, File, OpenOptions},
    os::unix::fs::{OpenOptionsExt, fchown},
    path::{Path, PathBuf},
    sync::Arc,
};

use aenv_envd_proto::http::ComposeRequest;
use http::StatusCode;

use super::{blocking, failed, resolve, upload::uploaded, user};
use crate::{
    filesystem::ensure_dirs,
    guest::Guest,
    server::answer::{Answer, Refusal, json},
    users::User,
};

/// Parts one file may be made of.
const MAX_PARTS: usize = 10_000;

pub(crate) async fn compose(guest: &Arc<Guest>, body: &[u8]) -> Result<Answer, Refusal> {
    let request: ComposeRequest =
        serde_json::from_slice(body).map_err(|err| Refusal::bad_request(format!("the body: {err}")))?;
    if request.source_paths.is_empty() || request.source_paths.len() > MAX_PARTS {
        return Err(Refusal::bad_request(format!("source_paths must name 1 to {MAX_PARTS} files")));
    }
    if request.destination.is_empty() {
        return Err(Refusal::bad_request("destination is empty"));
    }
    let user = user(guest, request.username.as_deref())?;
    let destination = resolve(guest, &request.destination, &user)?;
    let sources =
        request.source_paths.iter().map(|path| resolve(guest, path, &user)).collect::<Result<Vec<_>, _>>()?;
    let file = blocking(move || {
        join(&sources, &destination, &user)?;
        Ok(uploaded(&destination, std::collections::BTreeMap::new()))
    })
    .await?;
    Ok(json(StatusCode::OK, &file))
}

/// The parts are joined beside the destination and moved into place when all is well, so that a failure leaves
/// everything as it was and the destination may be one of the parts.
fn join(sources: &[PathBuf], destination: &Path, user: &User) -> Result<(), Refusal> {
    if destination.is_dir() {
        return Err(Refusal::bad_request(format!("path is a directory: {}", destination.display())));
    }
    for source in sources {
        let meta = fs::metadata(source).map_err(|err| failed("error looking at", source, &err))?;
        if !meta.is_file() {
            return Err(Refusal::bad_request(format!("path '{}' is not a regular file", source.display())));
        }
    }
    let parent = destination.parent().unwrap_or(Path::new("/"));
    ensure_dirs(parent, user).map_err(|err| failed("error making directory", parent, &err))?;
    let beside = parent.join(format!(".aenv-compose-{:016x}", unique()));
    let joined = write(sources, &beside, user).and_then(|()| {
        fs::rename(&beside, destination).map_err(|err| failed("error moving into place", destination, &err))
    });
    if joined.is_err() {
        let _ = fs::remove_file(&beside);
        return joined;
    }
    for source in sources.iter().filter(|source| source.as_path() != destination) {
        match fs::remove_file(source) {
            // A part may have been named twice.
            Err(err) if err.kind() != std::io::ErrorKind::NotFound => {
                return Err(failed("composed, but error removing", source, &err));
            }
            _ => {}
        }
    }
    Ok(())
}

fn write(sources: &[PathBuf], beside: &Path, user: &User) -> Result<(), Refusal> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o644)
        .open(beside)
        .map_err(|err| failed("error opening file", beside, &err))?;
    fchown(&file, Some(user.uid), Some(user.gid))
        .map_err(|err| failed("error changing owner of", beside, &err))?;
    for source in sources {
        let mut part = File::open(source).map_err(|err| failed("error opening file", source, &err))?;
        // Within the kernel, and without moving data where the filesystem can share it.
        std::io::copy(&mut part, &mut file).map_err(|err| failed("error writing file", beside, &err))?;
    }
    Ok(())
}

/// A name nobody else has chosen.
fn unique() -> u64 {
    let mut bytes = [0; 8];
    // Never short and never failing once the pool is up, and `create_new` would notice a repeated name.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u64::from_ne_bytes(bytes)
}
