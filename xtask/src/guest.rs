//! The guest kit: what every microVM boots.
//!
//! ```text
//!   distribution's kernel package ──► vmlinux          (ELF taken out of the bzImage)
//!                                 └─► *.ko ──┐
//!   guest/agent, built static ──► /init ─────┴► initramfs.cpio
//!                                               manifest.json (versions and sha256 of the above)
//! ```
//!
//! The package is fetched once and never installed; what is taken from it is cached by package version in
//! `target/guest-cache`, so a second run needs no network. Files appear under their final names only when whole.

mod agent;
pub(crate) mod cpio;
mod kernel;
mod modules;
mod package;

pub(crate) use package::with_modules as kernel_with;

use crate::run;
use anyhow::{Context, Result};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

/// What `cargo xtask guest` takes.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Where the kit goes; created when missing.
    #[arg(long, value_name = "DIR", default_value = "target/guest")]
    out: PathBuf,
    /// Use this kernel package instead of the distribution's newest.
    #[arg(long, value_name = "FILE")]
    kernel_deb: Option<PathBuf>,
    /// Ask the distribution for a newer kernel even when one is cached.
    #[arg(long)]
    refresh: bool,
    /// Use this static program as /init instead of building guest/agent.
    #[arg(long, value_name = "FILE")]
    agent: Option<PathBuf>,
}

/// What the kit is made of, for whoever boots it: a snapshot depends on each of these.
#[derive(Serialize)]
struct Manifest {
    /// As `uname -r` says it in the guest.
    kernel_version: String,
    /// Name and version of the package it came from.
    kernel_package: String,
    package_version: String,
    agent_version: String,
    /// Module names in load order.
    modules: Vec<String>,
    /// Hex sha256 by file name.
    sha256: BTreeMap<&'static str, String>,
}

/// Makes the kit in `options.out`.
pub(crate) fn make(options: &Options) -> Result<()> {
    let root = run::workspace()?;
    let cache = root.join("target/guest-cache");
    let kernel = package::obtain(&cache, options.kernel_deb.as_deref(), options.refresh)?;
    let agent = match &options.agent {
        Some(path) => agent::verified(path)?,
        None => agent::build(&root)?,
    };

    let archive = initramfs(&kernel, &agent)?;
    let out = root.join(&options.out);
    fs::create_dir_all(&out).with_context(|| format!("creating {}", out.display()))?;
    let vmlinux = fs::read(kernel.vmlinux())?;
    let manifest = Manifest {
        kernel_version: kernel.release.clone(),
        kernel_package: kernel.package.clone(),
        package_version: kernel.package_version.clone(),
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        modules: kernel.modules.clone(),
        sha256: BTreeMap::from([
            ("agent", digest(&agent)),
            ("initramfs.cpio", digest(&archive)),
            ("vmlinux", digest(&vmlinux)),
        ]),
    };
    // The manifest last: whoever finds it finds files that match it.
    replace(&out.join("vmlinux"), &vmlinux)?;
    replace(&out.join("initramfs.cpio"), &archive)?;
    replace(&out.join("manifest.json"), &serde_json::to_vec_pretty(&manifest)?)?;
    run::say(&format!(
        "{}: Linux {}, vmlinux {:.1} MB, initramfs {:.1} MB of which the agent {:.1} MB",
        out.display(),
        manifest.kernel_version,
        megabytes(vmlinux.len()),
        megabytes(archive.len()),
        megabytes(agent.len())
    ));
    Ok(())
}

/// The archive the kernel unpacks as its first root.
fn initramfs(kernel: &package::Kernel, agent: &[u8]) -> Result<Vec<u8>> {
    let mut archive = cpio::Archive::default();
    for dir in ["dev", "proc", "sys", "etc", "etc/aenv", "lib", "lib/modules"] {
        archive.directory(dir);
    }
    // Without it the kernel can give PID 1 no stdin, stdout and stderr.
    archive.character_device("dev/console", 0o600, 5, 1);
    archive.file("init", 0o755, agent)?;
    let mut order = String::new();
    for name in &kernel.modules {
        let file = format!("{name}.ko");
        archive.file(&format!("lib/modules/{file}"), 0o644, &fs::read(kernel.module(name))?)?;
        order.push_str(&file);
        order.push('\n');
    }
    archive.file("etc/aenv/modules", 0o644, order.as_bytes())?;
    Ok(archive.finish())
}

fn digest(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// Writes beside the target and renames, unless the content is there already.
fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    let dir = path.parent().context("a file needs a directory")?;
    let temporary = tempfile::NamedTempFile::new_in(dir)?;
    fs::write(temporary.path(), bytes).with_context(|| format!("writing {}", path.display()))?;
    // A temporary file is its maker's alone; the kit is for whoever starts guests.
    fs::set_permissions(temporary.path(), fs::Permissions::from_mode(0o644))?;
    temporary.persist(path).with_context(|| format!("placing {}", path.display()))?;
    Ok(())
}

#[allow(clippy::cast_precision_loss, reason = "shown with one decimal")]
fn megabytes(bytes: usize) -> f64 {
    bytes as f64 / 1e6
}
