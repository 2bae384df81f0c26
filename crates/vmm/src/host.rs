//! Examines this machine for `aenv doctor`: what is here, what works when it is really tried, and what to do about the
//! rest.
//!
//! Nothing is believed because a device file exists: KVM runs instructions in a throwaway machine, namespaces and taps are
//! made (in a thread that ends with them), system calls are called.

mod devices;
mod kvm;
mod resources;
mod tools;

use crate::{Backend, Error, Result, qemu};
use serde::Serialize;
use std::path::Path;

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As it should be.
    Ok,
    /// Works, but not as well as it could.
    Warn,
    /// Something that is needed is missing.
    Fail,
}

/// One thing looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Short and stable, such as `kvm`.
    pub name: String,
    /// How it came out.
    pub status: Status,
    /// What was found, in one line.
    pub found: String,
    /// What to do about it; absent when all is well or nothing can be done.
    pub remedy: Option<String>,
}

impl Check {
    pub(crate) fn ok(name: &str, found: impl Into<String>) -> Self {
        Self { name: name.to_owned(), status: Status::Ok, found: found.into(), remedy: None }
    }

    pub(crate) fn warn(name: &str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { status: Status::Warn, remedy: Some(remedy.into()), ..Self::ok(name, found) }
    }

    pub(crate) fn fail(name: &str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { status: Status::Fail, remedy: Some(remedy.into()), ..Self::ok(name, found) }
    }

    /// Something that is good to have: its absence is told, with what it would bring.
    pub(crate) fn optional(name: &str, outcome: std::io::Result<String>, brings: &str) -> Self {
        match outcome {
            Ok(found) => Self::ok(name, found),
            Err(error) => Self::warn(name, format!("not usable: {error}"), brings),
        }
    }
}

/// All that was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// In the order a person reads them: from the hardware up.
    pub checks: Vec<Check>,
    /// The backend to use here; absent when none can run.
    pub recommended: Option<Backend>,
    /// Why this one, in one sentence.
    pub reason: String,
}

/// Examines this machine; free disk is looked at where `data_dir` is or will be. Takes up to some seconds, because KVM is
/// given time to show whether it runs.
///
/// # Errors
/// When an examining thread could not be run; what is missing on the machine is part of the report.
pub async fn probe(data_dir: &Path) -> Result<Report> {
    let data_dir = data_dir.to_owned();
    let blocking = tokio::task::spawn_blocking(move || {
        let virtualisation = kvm::examine();
        let mut checks = resources::machine();
        checks.push(virtualisation.check());
        checks.extend(devices::examine());
        checks.extend(resources::room(&data_dir));
        (virtualisation, checks)
    });
    let (blocking, emulator, tools) = tokio::join!(blocking, qemu::probe::find(None), tools::examine());
    let (virtualisation, mut checks) = blocking.map_err(|error| Error::Io {
        context: "examining the host".to_owned(),
        source: std::io::Error::other(error),
    })?;
    checks.extend(qemu_checks(&emulator));
    checks.extend(tools);
    let (recommended, reason) = recommend(&virtualisation, emulator.is_ok());
    Ok(Report { checks, recommended, reason })
}

fn qemu_checks(found: &Result<qemu::probe::Found, String>) -> Vec<Check> {
    match found {
        Ok(found) => {
            let program = format!("{} {}", found.binary.display(), found.version);
            let version = if found.numbers >= (10, 0) {
                Check::ok("qemu", program)
            } else {
                let better = "QEMU 10.0 is measured best (bookworm-backports has it); snapshots don't move between versions";
                Check::warn("qemu", program, better)
            };
            vec![
                version,
                Check::ok("qemu-firmware", found.firmware.display().to_string()),
                Check::ok("tcg", "built in"),
            ]
        }
        Err(reason) => vec![Check::fail("qemu", reason.clone(), "apt-get install qemu-system-x86")],
    }
}

/// The choice, and its reason. QEMU's emulator is the one backend of this version: it needs no KVM at all.
fn recommend(kvm: &kvm::Kvm, qemu: bool) -> (Option<Backend>, String) {
    let about_kvm = match kvm.usable() {
        true => "KVM runs stock kernels here, which QEMU's emulator doesn't need and doesn't use",
        false => "KVM can't run a stock kernel here, so guests are emulated",
    };
    if qemu {
        (Some(Backend::Qemu), about_kvm.to_owned())
    } else {
        (None, "no backend can run: QEMU is missing; apt-get install qemu-system-x86".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[tokio::test]
    async fn a_report_names_each_thing_once_and_gives_a_remedy_for_what_fails() {
        let report = probe(Path::new("/nonexistent/data")).await.unwrap();
        let mut names: Vec<_> = report.checks.iter().map(|check| &check.name).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all, "{:?}", report.checks);
        for expected in
            ["kernel", "kvm", "fuse", "ublk", "tun", "netns", "nft", "io_uring", "userfaultfd", "mke2fs"]
        {
            assert!(names.iter().any(|name| *name == expected), "{expected} was not looked at");
        }
        for check in &report.checks {
            // Shown when the test is run for a look at the host (--no-capture).
            let _ = writeln!(std::io::stderr(), "{:?} {}: {}", check.status, check.name, check.found);
            assert!(!check.found.is_empty(), "{check:?}");
            assert!(check.status == Status::Ok || check.remedy.is_some(), "{check:?}");
        }
        assert!(serde_json::to_string(&report).unwrap().contains("\"status\":\"ok\""));
    }

    #[test]
    fn without_qemu_nothing_is_recommended() {
        assert_eq!(recommend(&kvm::Kvm::absent(), false).0, None);
        assert_eq!(recommend(&kvm::Kvm::absent(), true).0, Some(Backend::Qemu));
    }
}
