//! What QEMU this host has, asked of the program itself.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};
use tokio::{process::Command, time::timeout};

const LIMIT: Duration = Duration::from_secs(10);
const NAMES: &[&str] = &["qemu-system-x86_64"];

/// A usable QEMU.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    pub(crate) binary: PathBuf,
    /// `10.0.2`.
    pub(crate) version: String,
    pub(crate) numbers: (u32, u32),
    pub(crate) firmware: PathBuf,
}

/// Looks for the program (or takes the given one) and checks that it can run our machine.
///
/// # Errors
/// What is missing, with the remedy.
pub(crate) async fn find(given: Option<&Path>) -> Result<Found, String> {
    let binary = match given {
        Some(path) => path
            .canonicalize()
            .map_err(|error| format!("{}: {error}; name the QEMU program to use", path.display()))?,
        None => in_path().ok_or("no qemu-system-x86_64 in PATH; install the package qemu-system-x86")?,
    };
    let told = |arguments: &'static [&'static str]| ask(&binary, arguments);
    let (version, machines, accelerators, dirs) = tokio::try_join!(
        told(&["--version"]),
        told(&["-machine", "help"]),
        told(&["-accel", "help"]),
        told(&["-L", "help"]),
    )?;
    let version = parse_version(&version)
        .ok_or_else(|| format!("{} is no QEMU: it says {:?}", binary.display(), version.lines().next()))?;
    let numbers = numbers(&version);
    if numbers < (7, 2) {
        return Err(format!("QEMU {version} is too old; 7.2 or newer is needed, 10.0 is best"));
    }
    if !machines.lines().any(|line| line.starts_with("microvm ")) {
        return Err(format!(
            "{} was built without the machine microvm; use Debian's qemu-system-x86",
            binary.display()
        ));
    }
    if !accelerators.lines().any(|line| line.trim() == "tcg") {
        return Err(format!(
            "{} was built without the TCG emulator; use qemu-system-x86_64 of the package qemu-system-x86",
            binary.display()
        ));
    }
    let firmware = dirs
        .lines()
        .map(|dir| Path::new(dir.trim()).join("qboot.rom"))
        .find(|path| path.is_file())
        .ok_or("QEMU's firmware qboot.rom is missing; install the package qemu-system-data")?;
    Ok(Found { binary, version, numbers, firmware })
}

fn in_path() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&path)
        .find_map(|dir| NAMES.iter().map(|name| dir.join(name)).find(|p| p.is_file()))?;
    found.canonicalize().ok()
}

async fn ask(binary: &Path, arguments: &[&str]) -> Result<String, String> {
    let run = Command::new(binary).args(arguments).stdin(Stdio::null()).kill_on_drop(true).output();
    match timeout(LIMIT, run).await {
        Err(_) => Err(format!("{} {} did not end within {LIMIT:?}", binary.display(), arguments.join(" "))),
        Ok(Err(error)) => Err(format!("{} can't be started: {error}", binary.display())),
        Ok(Ok(output)) => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
    }
}

/// From `QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)` the upstream version: rebuilds of one version by a
/// distribution keep the device state's format.
fn parse_version(text: &str) -> Option<String> {
    let words = text.lines().next()?.strip_prefix("QEMU emulator version ")?;
    let version: String = words.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
    (!version.is_empty()).then_some(version)
}

fn numbers(version: &str) -> (u32, u32) {
    let mut words = version.split('.').map(|word| word.parse().unwrap_or(0));
    (words.next().unwrap_or(0), words.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_upstreams() {
        let text = "QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2+deb13u1~bpo12+1)\nCopyright";
        assert_eq!(parse_version(text).as_deref(), Some("10.0.2"));
        assert_eq!(numbers("10.0.2"), (10, 0));
        assert_eq!(parse_version("bash 5.2"), None);
    }

    #[tokio::test]
    async fn a_program_that_is_no_qemu_is_refused_by_name() {
        let error = find(Some(Path::new("/bin/true"))).await.unwrap_err();
        assert!(error.contains("is no QEMU"), "{error}");
        let error = find(Some(Path::new("/nonexistent/qemu"))).await.unwrap_err();
        assert!(error.contains("/nonexistent/qemu"), "{error}");
    }
}
