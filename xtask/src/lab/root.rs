//! The lab's root: programs with the libraries they are linked to, put into one archive.

use super::inside::{Command, PLAN, Plan};
use super::modules::Kernel;
use crate::guest::cpio::Archive;
use crate::run;
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// What a shell and most tests want.
pub(super) const ALWAYS: &[&str] = &["sh", "mount", "umount", "ls", "cat", "ip"];
/// Beyond it the machine's memory would have to be very large.
const LARGEST: u64 = 2 << 30;

/// Files by their path inside.
#[derive(Default)]
pub(super) struct Load {
    files: BTreeMap<String, (u32, PathBuf)>,
}

impl Load {
    /// A program of the host by name or path, under its name in /usr/bin.
    pub(super) fn program(&mut self, program: &str) -> Result<()> {
        let path = if program.contains('/') { PathBuf::from(program) } else { found(program)? };
        let name = path.file_name().context("a program needs a name")?.to_string_lossy().into_owned();
        if name == "sh" {
            self.executable(&path, "/bin/sh")?;
        }
        self.executable(&path, &format!("/usr/bin/{name}"))
    }

    /// A program with the libraries it is linked to.
    pub(super) fn executable(&mut self, path: &Path, inside: &str) -> Result<()> {
        self.files.insert(inside.to_owned(), (0o755, path.to_owned()));
        // A static program makes ldd fail; a script too. Neither has libraries.
        let output = std::process::Command::new("ldd").arg(path).output().context("starting ldd")?;
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            if line.contains("not found") {
                bail!("{} lacks a library: {}", path.display(), line.trim());
            }
            if let Some(library) = line.split_whitespace().find(|word| word.starts_with('/')) {
                self.files.insert(library.to_owned(), (0o755, PathBuf::from(library)));
            }
        }
        Ok(())
    }

    /// A file or a folder, as /lab/NAME.
    pub(super) fn path(&mut self, path: &Path) -> Result<()> {
        let name = path.file_name().with_context(|| format!("{} has no name", path.display()))?;
        let base = format!("/lab/{}", name.to_string_lossy());
        for entry in walkdir::WalkDir::new(path) {
            let entry = entry.with_context(|| format!("reading {}", path.display()))?;
            if entry.file_type().is_file() {
                let below = entry.path().strip_prefix(path)?.to_string_lossy();
                let inside = if below.is_empty() { base.clone() } else { format!("{base}/{below}") };
                let mode = entry.metadata()?.permissions().mode() & 0o777;
                self.files.insert(inside, (mode, entry.path().to_owned()));
            }
        }
        Ok(())
    }

    /// The archive that the kernel unpacks as its root.
    pub(super) fn archive(mut self, kernel: &Kernel, command: &Command) -> Result<Vec<u8>> {
        let own = std::env::current_exe().context("finding this program")?;
        self.executable(&own, "/init")?;
        let mut directories: Vec<String> =
            ["dev", "proc", "sys", "tmp", "run", "etc", "data", "root", "modules"].map(str::to_owned).into();
        for path in self.files.keys() {
            for parent in Path::new(path).ancestors().skip(1) {
                let parent = parent.to_string_lossy().trim_start_matches('/').to_owned();
                if !parent.is_empty() {
                    directories.push(parent);
                }
            }
        }
        directories.sort();
        directories.dedup();

        let mut archive = Archive::default();
        for directory in &directories {
            archive.directory(directory);
        }
        // Without it the kernel can give PID 1 no stdin, stdout and stderr.
        archive.character_device("dev/console", 0o600, 5, 1);
        let mut total = 0;
        for (inside, (mode, path)) in &self.files {
            let content = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
            total += content.len() as u64;
            if total > LARGEST {
                bail!("the lab's root would be over {} MiB; take less along, or use --disk", LARGEST >> 20);
            }
            archive.file(inside.trim_start_matches('/'), *mode, &content)?;
        }
        let mut modules = Vec::new();
        for (name, path) in &kernel.modules {
            let content = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
            archive.file(&format!("modules/{name}.ko"), 0o644, &content)?;
            modules.push(name.clone());
        }
        archive.file("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n")?;
        archive.file("etc/group", 0o644, b"root:x:0:\n")?;
        let plan = Plan { command: command.clone(), modules };
        archive.file(PLAN.trim_start_matches('/'), 0o644, &serde_json::to_vec(&plan)?)?;
        Ok(archive.finish())
    }
}

fn found(program: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut directories: Vec<_> = std::env::split_paths(&path).collect();
    directories.extend(["/usr/sbin", "/sbin"].map(PathBuf::from));
    directories.iter().map(|directory| directory.join(program)).find(|path| path.is_file()).with_context(
        || {
            run::say("lab: the packages e2fsprogs, iproute2 and mount hold what its suites use");
            format!("`{program}` is not installed here, so it can't be taken into the lab")
        },
    )
}
