//! The real [`Images`]: OCI images as layer files.
//!
//! ```text
//!   images/<digest>-<disk MiB>/disk.layer    root file system
//!   images/<digest>-<disk MiB>/image.json    what the image says, written last
//! ```
//! A directory is made beside its place and renamed: it is whole or absent. The flat disk in between is temporary.

use super::{Fault, Image, ImageRequest, Images, Result};
use aenv_oci::{Auth, ImageConfig, Options, Prepared, Progress, Reference};
use aenv_overlaybd::{BuildOptions, build_from_file};
use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
    time::Duration,
};
use tokio::{io::AsyncReadExt, process::Command};

/// Largest `/etc/passwd` that is looked at.
const MAX_PASSWD: u64 = 1 << 20;
const PASSWD_DEADLINE: Duration = Duration::from_secs(30);

/// OCI images through this machine's tools.
pub struct OciImages {
    work: PathBuf,
    local: bool,
}

impl OciImages {
    /// Temporary files go to `work`, which this makes and sweeps first. `local` allows references to files of this
    /// machine.
    ///
    /// # Errors
    /// The directory can't be made or swept.
    pub fn new(work: PathBuf, local: bool) -> std::io::Result<Self> {
        std::fs::create_dir_all(&work)?;
        let swept = aenv_oci::sweep(&work)?;
        if swept > 0 {
            tracing::info!(swept, "removed temporary files of interrupted image conversions");
        }
        Ok(Self { work, local })
    }

    fn reference(&self, text: &str) -> Result<Reference> {
        let reference: Reference = text.parse().map_err(|error: aenv_oci::reference::Error| fault(&error))?;
        let local = match &reference {
            Reference::Registry(remote) => remote.is_loopback(),
            _ => true,
        };
        if !self.local && local {
            return Err(Fault::new(format!(
                "'{text}' names a file or a registry of the server's own machine, which this server doesn't allow; push \
                 the image to a registry elsewhere, or set local_images = true"
            )));
        }
        Ok(reference)
    }
}

/// `image.json`.
#[derive(Serialize, Deserialize)]
struct Described {
    digest: String,
    disk_size: u64,
    config: ImageConfig,
    users: Vec<User>,
}

/// An entry of the image's `/etc/passwd`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct User {
    name: String,
    uid: u32,
}

#[async_trait]
impl Images for OciImages {
    fn check(&self, reference: &str) -> Result<()> {
        self.reference(reference).map(drop)
    }

    async fn prepare(
        &self,
        request: &ImageRequest,
        dir: &Path,
        note: Arc<dyn Fn(String) + Send + Sync>,
    ) -> Result<Image> {
        let reference = self.reference(&request.reference)?;
        let options = Options {
            disk_mib: u64::from(request.disk_mib),
            auth: match &request.credentials {
                Some((username, password)) => {
                    Auth::Password { username: username.clone(), password: password.clone() }
                }
                None => Auth::Anonymous,
            },
            progress: Progress::new({
                let note = Arc::clone(&note);
                move |line| note(line.to_owned())
            }),
            ..Options::new(&self.work)
        };
        let prepared = aenv_oci::prepare(&reference, options).await.map_err(|error| fault(&error))?;
        let name = format!("{}-{}", prepared.digest.replace(':', "-"), request.disk_mib);
        let home = dir.join(&name);
        let described = match described(&home).await {
            Some(described) => {
                note("its disk is here already".to_owned());
                described
            }
            None => {
                note("writing the disk as a layer".to_owned());
                let users = users(&prepared.raw_disk).await?;
                write(prepared, users, home.clone(), dir.join(format!(".{name}.new"))).await?
            }
        };
        Ok(image(&described, home.join("disk.layer")))
    }
}

fn image(described: &Described, disk: PathBuf) -> Image {
    let config = &described.config;
    // `user:group` or numbers; the group follows from the user.
    let user =
        config.user.split(':').next().filter(|user| !user.is_empty()).map(|user| match user.parse::<u32>() {
            Ok(uid) => {
                let named = described.users.iter().find(|known| known.uid == uid);
                named.map_or_else(|| "root".to_owned(), |known| known.name.clone())
            }
            Err(_) => user.to_owned(),
        });
    Image {
        digest: described.digest.clone(),
        disk,
        disk_size: described.disk_size,
        env: config.env.iter().cloned().collect(),
        user,
        // The root directory is what an image has that says nothing.
        workdir: Some(config.working_dir.clone()).filter(|dir| dir != "/" && !dir.is_empty()),
        entrypoint: config.entrypoint.clone(),
        cmd: config.cmd.clone(),
        users: described.users.iter().map(|user| user.name.clone()).collect(),
    }
}

async fn described(home: &Path) -> Option<Described> {
    let text = tokio::fs::read(home.join("image.json")).await.ok()?;
    serde_json::from_slice(&text).ok()
}

async fn write(prepared: Prepared, users: Vec<User>, home: PathBuf, new: PathBuf) -> Result<Described> {
    blocking(move || {
        let result = (|| {
            match std::fs::remove_dir_all(&new) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(at(&new, &error)),
                _ => {}
            }
            std::fs::create_dir_all(&new).map_err(|error| at(&new, &error))?;
            let source = File::open(&prepared.raw_disk).map_err(|error| at(&prepared.raw_disk, &error))?;
            let layer = new.join("disk.layer");
            let out = File::options().read(true).write(true).create_new(true).open(&layer);
            let out = out.map_err(|error| at(&layer, &error))?;
            build_from_file(&source, out, BuildOptions::new(prepared.size), true)
                .map_err(|error| at(&layer, &error))?;
            let described = Described {
                digest: prepared.digest.clone(),
                disk_size: prepared.size,
                config: prepared.config.clone(),
                users,
            };
            let text = serde_json::to_vec_pretty(&described).map_err(|error| fault(&error))?;
            aenv_snapshot::durable::replace(&new.join("image.json"), &text)
                .map_err(|error| at(&new, &error))?;
            match std::fs::rename(&new, &home) {
                Ok(()) => {}
                // Another build of the same image was quicker; its disk is as good.
                Err(_) if home.join("image.json").exists() => {}
                Err(error) => return Err(at(&home, &error)),
            }
            if let Some(parent) = home.parent() {
                aenv_snapshot::durable::sync_dir(parent).map_err(|error| at(parent, &error))?;
            }
            Ok(described)
        })();
        // Nothing to remove once it was renamed.
        let _ = std::fs::remove_dir_all(&new);
        result
    })
    .await
}

/// Users of the file system on a flat disk. An image without `/etc/passwd` has none.
async fn users(disk: &Path) -> Result<Vec<User>> {
    let mut child = Command::new("debugfs")
        .args(["-R", "cat /etc/passwd"])
        .arg(disk)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| Fault::new(format!("debugfs: {error}; install the package e2fsprogs")))?;
    let mut text = Vec::new();
    let read = async {
        if let Some(out) = child.stdout.take() {
            out.take(MAX_PASSWD).read_to_end(&mut text).await?;
        }
        child.wait().await
    };
    tokio::time::timeout(PASSWD_DEADLINE, read)
        .await
        .map_err(|_| Fault::new("reading the image's /etc/passwd took too long"))?
        .map_err(|error| Fault::new(format!("reading the image's /etc/passwd: {error}")))?;
    Ok(parse_passwd(&String::from_utf8_lossy(&text)))
}

fn parse_passwd(text: &str) -> Vec<User> {
    text.lines()
        .filter_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next().filter(|name| !name.is_empty())?;
            let uid = fields.nth(1)?.parse().ok()?;
            Some(User { name: name.to_owned(), uid })
        })
        .collect()
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(|error| fault(&error))?
}

fn fault(error: &dyn std::fmt::Display) -> Fault {
    Fault::new(error.to_string())
}

fn at(path: &Path, error: &dyn std::fmt::Display) -> Fault {
    Fault::new(format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(user: &str, workdir: &str) -> Described {
        let text = "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/bash\n\nbroken\nx:y\n";
        let config = ImageConfig { user: user.into(), working_dir: workdir.into(), ..ImageConfig::default() };
        Described { digest: "sha256:0".into(), disk_size: 1, config, users: parse_passwd(text) }
    }

    #[test]
    fn a_user_is_named_whichever_way_the_image_names_it() {
        let cases = [
            ("", None),
            ("user", Some("user")),
            ("user:staff", Some("user")),
            ("1000:1000", Some("user")),
            ("0", Some("root")),
            ("4711", Some("root")),
            (":100", None),
        ];
        for (given, expected) in cases {
            let image = image(&described(given, "/"), "disk".into());
            assert_eq!(image.user.as_deref(), expected, "'{given}'");
            assert_eq!(image.users, ["root", "user"]);
        }
    }

    #[test]
    fn the_root_directory_is_nobodys_choice() {
        assert_eq!(image(&described("", "/"), "disk".into()).workdir, None);
        assert_eq!(image(&described("", "/app"), "disk".into()).workdir.as_deref(), Some("/app"));
    }
}
