//! The base image: Debian (or Ubuntu) packages as an OCI layout, for machines that reach no registry.
//!
//! mmdebstrap makes a tar file from the host's own package sources; that file is the image's only layer, uncompressed,
//! because it is unpacked on the machine that made it. The result is an ordinary layout: `oci:DIR:base` is prepared
//! like any image, and `skopeo copy oci:DIR:base docker-daemon:NAME:TAG` hands it to Docker.
//!
//! As far as packages allow it, the same sources on the same day give the same bytes: file times are clamped to
//! midnight UTC, and logs, caches and machine identities are removed.

use crate::{
    Error, Progress,
    command::{Context, Tool},
    error::{During as _, blocking},
    fetch::architecture,
    scratch::Scratch,
    sources,
};
use sha2::{Digest as _, Sha256};
use std::{
    fs::{self, File},
    io::{self, Read as _},
    path::{Path, PathBuf},
    sync::Mutex,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio_util::sync::CancellationToken;

/// What the image is called in its layout.
pub const TAG: &str = "base";

const PACKAGES: [&str; 9] =
    ["bash", "ca-certificates", "coreutils", "curl", "git", "iproute2", "procps", "python3", "sudo"];
const DEADLINE: Duration = Duration::from_secs(1200);
const DAY: u64 = 24 * 3600;
/// Documentation and translations; licences stay.
const LEFT_OUT: [&str; 6] = [
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/lintian/*",
];
/// Run by mmdebstrap with the new root as `$1`. The account's password is locked; sudo asks for none.
const FINISH: &str = r#"set -eu
chroot "$1" useradd --uid 1000 --user-group --create-home --shell /bin/bash user
printf 'user ALL=(ALL:ALL) NOPASSWD: ALL\n' > "$1/etc/sudoers.d/user"
chmod 0440 "$1/etc/sudoers.d/user"
find "$1/var/log" "$1/var/cache/ldconfig" "$1/var/cache/debconf" -type f -delete
rm -f "$1/etc/hostname" "$1/etc/resolv.conf" "$1"/etc/*- "$1"/var/lib/dpkg/*-old
: > "$1/etc/machine-id"
printf '127.0.0.1\tlocalhost\n' > "$1/etc/hosts"
# bash knows its user: asking `id` would cost every login shell, so every command of the SDKs, a second process.
sed -i 's/$(id -u)/${EUID:-$(id -u)}/' "$1/etc/profile"
"#;

/// A base image that was built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Built {
    /// Of the manifest.
    pub digest: String,
    /// Bytes of the layer.
    pub size: u64,
}

/// Whether `directory` holds a base image already.
pub fn exists(directory: &Path) -> bool {
    crate::layout::open(directory, Some(TAG)).is_ok()
}

/// Builds the base image into the layout `directory`, replacing an earlier one in it; one to three minutes. Needs root,
/// mmdebstrap and package sources for the host's release. Temporary files are beside the directory.
///
/// # Errors
/// See [`Error`]. An earlier image stays when the new one fails.
pub async fn build(directory: &Path, progress: Progress, cancel: CancellationToken) -> Result<Built, Error> {
    if !rustix::process::geteuid().is_root() {
        return Err(Error::Host("building the base image needs root".to_owned()));
    }
    let (Some(parent), Some(_)) = (directory.parent(), directory.file_name()) else {
        return Err(Error::Host(format!(
            "{} can't hold a base image; name a new directory",
            directory.display()
        )));
    };
    check_replaceable(directory)?;
    let parent = if parent.as_os_str().is_empty() { PathBuf::from(".") } else { parent.to_owned() };
    let scratch = blocking(move || Scratch::new(&parent)).await?;
    let context = Context { scratch, progress, cancel };
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let release = sources::release(&release).ok_or_else(|| {
        Error::Host("/etc/os-release names no release; a base image is built on Debian or Ubuntu".to_owned())
    })?;
    let mirrors = write_sources(release, context.scratch.path())?;
    let settings = apt_settings(&context).await?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let epoch = now - now % DAY;
    let tar = context.scratch.path().join("base.tar");
    let tool = Tool::new("mmdebstrap", "mmdebstrap", DEADLINE).command(|command| {
        command.env("SOURCE_DATE_EPOCH", epoch.to_string()).env("DEBIAN_FRONTEND", "noninteractive");
        command.args(["--mode=root", "--variant=minbase", "--format=tar", "--verbose"]);
        command.arg(format!("--include={}", PACKAGES.join(",")));
        command
            .arg("--aptopt=APT::Install-Recommends \"false\"")
            .args(settings.iter().map(|s| format!("--aptopt={s}")));
        command.args(LEFT_OUT.iter().map(|rule| format!("--dpkgopt={rule}")));
        command.arg(format!("--customize-hook={FINISH}")).arg(release).arg(&tar).args(mirrors);
    });
    context.progress.say(&format!("building a base image from {release} packages"));
    tool.run(&context, words).await?.check()?;
    context.progress.say("writing the image");
    let (layout, target) = (context.scratch.path().join("layout"), directory.to_owned());
    let built = blocking(move || {
        let built = write_layout(&tar, &layout, epoch)?;
        replace(&layout, &target)?;
        Ok(built)
    })
    .await?;
    tracing::info!(directory = %directory.display(), digest = built.digest, bytes = built.size, "built the base image");
    Ok(built)
}

/// What of mmdebstrap's and apt's words shows that something goes on.
fn words(line: &str) -> Option<String> {
    let line = line.trim();
    if let Some(step) = line.strip_prefix("I: ") {
        // Names of temporary directories tell nobody anything.
        return (!step.contains("tempdir")).then(|| step.to_owned());
    }
    if let Some(download) = line.strip_prefix("Get:") {
        let mut words = download.split(' ');
        return Some(format!("downloading {}: {}", words.next()?, words.nth(3)?));
    }
    line.starts_with("Setting up ").then(|| line.trim_end_matches(" ...").to_owned())
}

fn check_replaceable(directory: &Path) -> Result<(), Error> {
    let occupied = match fs::read_dir(directory) {
        Ok(mut entries) => entries.next().is_some(),
        Err(e) if e.kind() == io::ErrorKind::NotFound => false,
        Err(e) => return Err(e).during(|| format!("read {}", directory.display())),
    };
    if occupied && !directory.join("oci-layout").exists() {
        let reason = "is not empty and holds no image layout; name another directory";
        return Err(Error::Host(format!("{} {reason}", directory.display())));
    }
    Ok(())
}

/// Writes the sources that count into files for mmdebstrap and returns their paths.
fn write_sources(release: &str, scratch: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    files.extend(
        fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten().map(|entry| entry.path()),
    );
    files.sort();
    let (mut lines, mut stanzas) = (Vec::new(), Vec::new());
    for file in files {
        let text = fs::read_to_string(&file).unwrap_or_default();
        match file.extension().and_then(|e| e.to_str()) {
            Some("list") => lines.extend(sources::from_list(&text, release)),
            Some("sources") => stanzas.extend(sources::from_deb822(&text, release)),
            _ => {}
        }
    }
    let mut written = Vec::new();
    for (name, text) in [("host.list", lines.join("\n")), ("host.sources", stanzas.join("\n"))] {
        if !text.is_empty() {
            let path = scratch.join(name);
            fs::write(&path, text + "\n").during(|| format!("write {}", path.display()))?;
            written.push(path);
        }
    }
    if written.is_empty() {
        let reason = format!("/etc/apt names no package source for {release} main; add one and try again");
        return Err(Error::Host(reason));
    }
    Ok(written)
}

async fn apt_settings(context: &Context) -> Result<Vec<String>, Error> {
    let dump = Mutex::new(String::new());
    let collect = |line: &str| {
        let mut dump = dump.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        dump.push_str(line);
        dump.push('\n');
        None
    };
    let tool = Tool::new("apt-config", "apt", Duration::from_secs(30)).command(|c| {
        c.arg("dump");
    });
    tool.run(context, collect).await?.check()?;
    let dump = dump.into_inner().unwrap_or_default();
    Ok(sources::apt_settings(&dump).lines().map(|line| line.trim_end_matches(';').to_owned()).collect())
}

/// Makes the layout out of the tar file, which becomes a blob in it.
fn write_layout(tar: &Path, layout: &Path, epoch: u64) -> Result<Built, Error> {
    let step = || format!("write the image layout {}", layout.display());
    let blobs = layout.join("blobs/sha256");
    fs::create_dir_all(&blobs).during(step)?;
    let (hash, size) = hash_file(tar).during(step)?;
    fs::rename(tar, blobs.join(&hash)).during(step)?;
    let blob = |json: &serde_json::Value| -> Result<(String, usize), Error> {
        let bytes = json.to_string();
        let hash = hex::encode(Sha256::digest(&bytes));
        fs::write(blobs.join(&hash), &bytes).during(step)?;
        Ok((format!("sha256:{hash}"), bytes.len()))
    };
    let created =
        i64::try_from(epoch).ok().and_then(|s| jiff::Timestamp::from_second(s).ok()).unwrap_or_default();
    let layer = format!("sha256:{hash}");
    let (config, config_size) = blob(&serde_json::json!({
        "created": created.to_string(),
        "architecture": architecture(),
        "os": "linux",
        "config": {
            "User": "user",
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8"],
            "WorkingDir": "/home/user",
            "Cmd": ["/bin/bash"],
        },
        "rootfs": { "type": "layers", "diff_ids": [layer] },
        "history": [{ "created": created.to_string(), "created_by": "aenv base image" }],
    }))?;
    let (manifest, manifest_size) = blob(&serde_json::json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": { "mediaType": "application/vnd.oci.image.config.v1+json", "digest": config, "size": config_size },
        "layers": [{ "mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": layer, "size": size }],
    }))?;
    let index = serde_json::json!({
        "schemaVersion": 2,
        "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": manifest,
            "size": manifest_size,
            "platform": { "architecture": architecture(), "os": "linux" },
            "annotations": { "org.opencontainers.image.ref.name": TAG },
        }],
    });
    fs::write(layout.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).during(step)?;
    fs::write(layout.join("index.json"), index.to_string()).during(step)?;
    Ok(Built { digest: manifest, size })
}

fn hash_file(path: &Path) -> io::Result<(String, u64)> {
    let mut file = File::open(path)?;
    let (mut hash, mut size) = (Sha256::new(), 0);
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok((hex::encode(hash.finalize()), size)),
            len => {
                hash.update(&buffer[..len]);
                size += len as u64;
            }
        }
    }
}

/// Puts `layout` in the place of `target`; what was there goes with the scratch directory.
fn replace(layout: &Path, target: &Path) -> Result<(), Error> {
    let step = || format!("move the image to {}", target.display());
    match fs::rename(target, layout.with_extension("old")) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e).during(step),
        _ => {}
    }
    fs::rename(layout, target).during(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_tells_packages_and_steps_and_keeps_quiet_about_the_rest() {
        let said = |line: &str| words(line);
        assert_eq!(said("I: installing packages..."), Some("installing packages...".to_owned()));
        assert_eq!(said("I: using /x/mmdebstrap.y as tempdir"), None);
        assert_eq!(
            said("Get:17 http://mirror trixie/main amd64 libc6 amd64 2.36-9 [2757 kB]"),
            Some("downloading 17: libc6".to_owned())
        );
        assert_eq!(said("Setting up git (1:2) ..."), Some("Setting up git (1:2)".to_owned()));
        assert_eq!(said("Selecting previously unselected package x."), None);
    }

    #[test]
    fn a_layout_made_of_a_tar_file_reads_back_and_replaces_only_its_own_kind() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("x.tar"), vec![0; 10_240]).unwrap();
        let built = write_layout(&at("x.tar"), &at("layout"), 1_800_000_000).unwrap();
        assert_eq!(built.size, 10_240);
        replace(&at("layout"), &at("target")).unwrap();
        assert!(exists(&at("target")) && !exists(&at("layout")));
        let image = crate::layout::open(&at("target"), Some(TAG)).unwrap();
        assert_eq!(image.digest, built.digest);
        assert_eq!((image.config.user.as_str(), image.config.working_dir.as_str()), ("user", "/home/user"));
        assert!(check_replaceable(&at("target")).is_ok());
        fs::create_dir(at("precious")).unwrap();
        assert!(check_replaceable(&at("precious")).is_ok());
        fs::write(at("precious/file"), "").unwrap();
        assert!(check_replaceable(&at("precious")).unwrap_err().to_string().contains("not empty"));
    }
}
