//! Finds a kernel package, fetches it without installing it, and keeps what the guest needs of it.
//!
//! ```text
//!   target/guest-cache/
//!     debs/*.deb                        as fetched
//!     <release>_<version>.kit2/         what was taken out: vmlinux, modules/*.ko, kernel.json
//! ```
//!
//! A kit directory appears by rename, whole or not at all.

use super::{kernel, modules};
use crate::run;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Raised when what is kept of a package changes.
const KIT: &str = "kit2";

/// What was taken out of a kernel package.
#[derive(Serialize, Deserialize)]
pub(super) struct Kernel {
    /// As `uname -r` says it.
    pub(super) release: String,
    /// Package name.
    pub(super) package: String,
    /// Package version.
    pub(super) package_version: String,
    /// Module names in load order.
    pub(super) modules: Vec<String>,
    #[serde(skip)]
    dir: PathBuf,
}

impl Kernel {
    /// Path of the uncompressed kernel.
    pub(super) fn vmlinux(&self) -> PathBuf {
        self.dir.join("vmlinux")
    }

    /// Path of one of its modules.
    pub(super) fn module(&self, name: &str) -> PathBuf {
        self.dir.join("modules").join(format!("{name}.ko"))
    }

    fn load(dir: &Path) -> Result<Self> {
        let text = fs::read(dir.join("kernel.json"))?;
        Ok(Self { dir: dir.to_owned(), ..serde_json::from_slice(&text)? })
    }
}

/// The kernel to use: the given package, else the newest cached, else the distribution's newest.
pub(super) fn obtain(cache: &Path, deb: Option<&Path>, refresh: bool) -> Result<Kernel> {
    ensure!(
        cfg!(target_arch = "x86_64"),
        "guest kernels are made for x86_64 only; build the kit on such a machine and copy it"
    );
    fs::create_dir_all(cache.join("debs")).with_context(|| format!("creating {}", cache.display()))?;
    if let Some(deb) = deb {
        return unpack(cache, &[deb.to_owned()]);
    }
    if !refresh && let Some(kernel) = newest_cached(cache)? {
        run::say(&format!("kernel {} from the cache (--refresh asks for a newer one)", kernel.release));
        return Ok(kernel);
    }
    let names = choose()?;
    run::say(&format!("taking {}", names.join(", ")));
    let fetch = |name: &String| match fetched(cache, name) {
        Some(deb) if !refresh => Ok(deb),
        _ => download(cache, name),
    };
    let debs = names.iter().map(fetch).collect::<Result<Vec<_>>>()?;
    unpack(cache, &debs)
}

fn newest_cached(cache: &Path) -> Result<Option<Kernel>> {
    let mut kernels = Vec::new();
    for entry in fs::read_dir(cache)? {
        let dir = entry?.path();
        if dir.extension().is_some_and(|word| word == KIT) {
            // A kit that can't be read any more is made anew.
            kernels.extend(Kernel::load(&dir));
        }
    }
    Ok(kernels.into_iter().max_by_key(|kernel| numbers(&kernel.release)))
}

/// The packages that together hold kernel and modules.
fn choose() -> Result<Vec<String>> {
    let debian = newest(&search(r"^linux-image-[0-9].*-cloud-amd64$")?, |name| {
        // 6.12 is what the figures were taken with, and the newest with long support on bookworm and trixie.
        name.starts_with("linux-image-6.12")
    });
    if let Some(name) = debian {
        return Ok(vec![name]);
    }
    // Ubuntu keeps the kernel and its modules apart, and names no cloud flavour of its generic kernel.
    let ubuntu = newest(&search(r"^linux-image-[0-9].*-generic$")?, |_| true);
    if let Some(name) = ubuntu {
        let modules = name.replacen("linux-image-", "linux-modules-", 1);
        return Ok(vec![name, modules]);
    }
    bail!(
        "apt knows no kernel package (linux-image-*-cloud-amd64 on Debian, linux-image-*-generic on Ubuntu). Run \
         `apt-get update` first, or fetch a package by other means and pass it with --kernel-deb FILE"
    )
}

fn search(pattern: &str) -> Result<Vec<String>> {
    let found = run::output(Command::new("apt-cache").args(["search", "--names-only", pattern]))?;
    Ok(found.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect())
}

/// The highest version among real packages, the preferred ones first. A metapackage (`linux-image-6.12-cloud-amd64`)
/// has fewer than three numbers in its name and holds no kernel.
fn newest(names: &[String], preferred: impl Fn(&str) -> bool) -> Option<String> {
    names
        .iter()
        .filter(|name| numbers(name.trim_start_matches("linux-image-")).len() > 3)
        .max_by_key(|name| (preferred(name), numbers(name)))
        .cloned()
}

/// The numbers in a version, so that 6.12.117 comes after 6.12.95. The `64` of amd64 is among them and harmless.
fn numbers(version: &str) -> Vec<u64> {
    version.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse().ok()).collect()
}

/// A package of this name that an earlier run left, when only what is kept of it has changed since.
fn fetched(cache: &Path, name: &str) -> Option<PathBuf> {
    let prefix = format!("{name}_");
    let entries = fs::read_dir(cache.join("debs")).ok()?;
    entries
        .flatten()
        .find(|entry| entry.file_name().to_string_lossy().starts_with(&prefix))
        .map(|entry| entry.path())
}

fn download(cache: &Path, name: &str) -> Result<PathBuf> {
    let dir = tempfile::tempdir_in(cache)?;
    // As root apt would drop to the user `_apt`, who can't write here, and complain about it.
    let mut apt = Command::new("apt-get");
    apt.args(["-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=3", "download", name]);
    run::output(apt.current_dir(dir.path())).with_context(|| {
        format!("fetching {name}: check the network and `apt-get update`, or pass a package with --kernel-deb FILE")
    })?;
    let entry =
        fs::read_dir(dir.path())?.next().context("apt-get download reported success but left no file")??;
    let deb = cache.join("debs").join(entry.file_name());
    fs::rename(entry.path(), &deb)?;
    Ok(deb)
}

/// Takes kernel and modules out of the packages (the first one names the kit).
fn unpack(cache: &Path, debs: &[PathBuf]) -> Result<Kernel> {
    let first = debs.first().context("no kernel package was given")?;
    let (package, version) = (field(first, "Package")?, field(first, "Version")?);
    // Beside the kits, so that the rename below stays on one file system.
    let work = tempfile::tempdir_in(cache)?;
    let tree = work.path().join("tree");
    for deb in debs {
        run::output(Command::new("dpkg-deb").arg("--extract").arg(deb).arg(&tree))?;
    }
    let release = release(&tree)
        .with_context(|| format!("{package} {version} holds no kernel with modules (a metapackage?)"))?;
    let kit = cache.join(format!("{release}_{}.{KIT}", version.replace(['/', ':'], "_")));
    if let Ok(kernel) = Kernel::load(&kit) {
        return Ok(kernel);
    }

    run::say(&format!("unpacking {package} {version}"));
    let image = fs::read(tree.join(format!("boot/vmlinuz-{release}")))
        .with_context(|| format!("reading the kernel image of {package}"))?;
    let found = modules::collect(&module_tree(&tree, &release))?;
    let made = work.path().join("kit");
    fs::create_dir_all(made.join("modules"))?;
    fs::write(made.join("vmlinux"), kernel::extract(&image)?)?;
    let mut names = Vec::new();
    for module in found {
        fs::write(made.join("modules").join(format!("{}.ko", module.name)), &module.content)?;
        names.push(module.name);
    }
    let kernel = Kernel { release, package, package_version: version, modules: names, dir: PathBuf::new() };
    fs::write(made.join("kernel.json"), serde_json::to_vec_pretty(&kernel)?)?;
    if kit.exists() {
        fs::remove_dir_all(&kit).with_context(|| format!("removing the damaged {}", kit.display()))?;
    }
    fs::rename(&made, &kit)?;
    Kernel::load(&kit)
}

/// Names and files of modules, in load order.
type Modules = Vec<(String, PathBuf)>;

/// Release, uncompressed kernel, and other modules of the kernel that guests have, in load order. They are kept in the
/// cache under `kit`, a name that changes with the lists.
pub(crate) fn with_modules(
    cache: &Path,
    kit: &str,
    required: &[&str],
    optional: &[&str],
) -> Result<(String, PathBuf, Modules)> {
    let kernel = obtain(cache, None, false)?;
    let version = kernel.package_version.replace(['/', ':'], "_");
    let dir = cache.join(format!("{}_{version}.{kit}", kernel.release));
    if !dir.join("order.json").exists() {
        let deb = match fetched(cache, &kernel.package) {
            Some(deb) => deb,
            None => download(cache, &kernel.package)?,
        };
        let work = tempfile::tempdir_in(cache)?;
        let (tree, made) = (work.path().join("tree"), work.path().join("kit"));
        run::output(Command::new("dpkg-deb").arg("--extract").arg(deb).arg(&tree))?;
        fs::create_dir(&made)?;
        let mut order = Vec::new();
        for module in modules::chosen(&module_tree(&tree, &kernel.release), required, optional)? {
            fs::write(made.join(format!("{}.ko", module.name)), &module.content)?;
            order.push(module.name);
        }
        fs::write(made.join("order.json"), serde_json::to_vec(&order)?)?;
        fs::rename(&made, &dir)
            .with_context(|| format!("placing {}; remove what is there", dir.display()))?;
    }
    let order: Vec<String> = serde_json::from_slice(&fs::read(dir.join("order.json"))?)?;
    let files = order.into_iter().map(|name| (name.clone(), dir.join(format!("{name}.ko")))).collect();
    Ok((kernel.release.clone(), kernel.vmlinux(), files))
}

fn field(deb: &Path, name: &str) -> Result<String> {
    let value = run::output(Command::new("dpkg-deb").arg("--field").arg(deb).arg(name))?;
    Ok(value.trim().to_owned())
}

/// The one release under lib/modules.
fn release(tree: &Path) -> Option<String> {
    ["lib/modules", "usr/lib/modules"].iter().find_map(|dir| {
        let mut entries = fs::read_dir(tree.join(dir)).ok()?;
        Some(entries.next()?.ok()?.file_name().to_string_lossy().into_owned())
    })
}

fn module_tree(tree: &Path, release: &str) -> PathBuf {
    let old = tree.join("lib/modules").join(release);
    if old.is_dir() { old } else { tree.join("usr/lib/modules").join(release) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_real_package_wins() {
        let names = [
            "linux-image-6.1.0-57-cloud-amd64",
            "linux-image-6.12-cloud-amd64",
            "linux-image-6.12.95+deb12-cloud-amd64",
            "linux-image-6.12.117+deb12-cloud-amd64",
            "linux-image-6.17.8+deb14-cloud-amd64",
        ]
        .map(str::to_owned);
        let prefer = |name: &str| name.starts_with("linux-image-6.12");
        assert_eq!(newest(&names, prefer).as_deref(), Some("linux-image-6.12.117+deb12-cloud-amd64"));
        assert_eq!(newest(&names[..1], prefer).as_deref(), Some("linux-image-6.1.0-57-cloud-amd64"));
        assert_eq!(newest(&names[1..2], prefer), None);
    }
}
