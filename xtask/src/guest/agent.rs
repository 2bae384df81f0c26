//! Builds the agent that is every guest's PID 1, and makes sure that it needs nothing but the kernel.

use crate::run;
use anyhow::{Context, Result, ensure};
use std::{fs, path::Path, process::Command};

const TARGET: &str = "x86_64-unknown-linux-gnu";
const PT_INTERP: u32 = 3;

/// Builds guest/agent with the `guest` profile and returns the program.
pub(super) fn build(root: &Path) -> Result<Vec<u8>> {
    // Naming the target keeps crt-static away from build scripts and proc macros; its own directory keeps this build
    // from throwing away the workspace's artefacts, whose flags differ.
    let dir = root.join("target/guest-build");
    run::say("building the guest agent (static)");
    run::visibly(
        Command::new("cargo")
            .args([
                "build",
                "--quiet",
                "--locked",
                "--profile",
                "guest",
                "--package",
                "aenv-agent",
                "--target",
                TARGET,
            ])
            .arg("--target-dir")
            .arg(&dir)
            .env("RUSTFLAGS", "-C target-feature=+crt-static")
            .env_remove("CARGO_ENCODED_RUSTFLAGS")
            .current_dir(root),
    )?;
    verified(&dir.join(TARGET).join("guest/aenv-agent"))
}

/// Reads a program and refuses one that would look for a dynamic loader, which no initramfs of ours has.
pub(super) fn verified(path: &Path) -> Result<Vec<u8>> {
    let program = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    let headers =
        program_headers(&program).with_context(|| format!("{} is no ELF64 program", path.display()))?;
    ensure!(
        !headers.contains(&PT_INTERP),
        "{} is linked dynamically; PID 1 of a guest must be static (-C target-feature=+crt-static)",
        path.display()
    );
    Ok(program)
}

/// The types of an ELF64 file's program headers.
fn program_headers(elf: &[u8]) -> Option<Vec<u32>> {
    if !elf.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let start = usize::try_from(u64::from_le_bytes(elf.get(0x20..0x28)?.try_into().ok()?)).ok()?;
    let size = usize::from(u16::from_le_bytes(elf.get(0x36..0x38)?.try_into().ok()?));
    let count = usize::from(u16::from_le_bytes(elf.get(0x38..0x3a)?.try_into().ok()?));
    (0..count)
        .map(|index| {
            let at = start.checked_add(index.checked_mul(size)?)?;
            Some(u32::from_le_bytes(elf.get(at..at.checked_add(4)?)?.try_into().ok()?))
        })
        .collect()
}
