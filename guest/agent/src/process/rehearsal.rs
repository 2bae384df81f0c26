//! A shell that does nothing; see [`Processes::rehearse`].

use std::{ffi::CString, fs::OpenOptions, os::fd::AsFd};

use super::{Processes, launch::candidates, spawn::Program};
use crate::users::User;

/// Same shell as the SDKs', without its login files: those are a user's.
const SHELL: [&str; 2] = ["/bin/bash", "/bin/sh"];

pub(super) fn run(processes: &Processes) {
    let Ok(null) = OpenOptions::new().read(true).write(true).open("/dev/null") else { return };
    let nobody =
        User { name: "nobody".to_owned(), uid: 65534, gid: 65534, home: "/".into(), groups: Vec::new() };
    let words = |text: &str| CString::new(text).unwrap_or_default();
    let program = Program {
        candidates: SHELL.iter().filter_map(|shell| candidates(shell, "").ok()).flatten().collect(),
        // A fork inside, because commands fork.
        args: ["-c", "(:) ; :"].map(words).into(),
        env: vec![words("PATH=/usr/bin:/bin")],
        dir: words("/"),
        user: &nobody,
        stdio: [null.as_fd(), null.as_fd(), null.as_fd()],
        terminal: false,
        cgroup: processes.cgroup.get(processes.guest.machine),
    };
    // It is reaped like any orphan; how it ends doesn't matter.
    drop(processes.reaper.spawn(&program));
}
