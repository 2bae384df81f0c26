//! Where the agent's few words go: the kernel log in a guest, stderr on a host. A serial console costs the guest an
//! exit per character, so only what an operator must see is written.

use std::{
    fs::OpenOptions,
    io::{Write, stderr},
};

/// Writes one line. In a guest it goes to the kernel log at level "error", which a `quiet` console still shows.
pub(crate) fn say(line: &str) {
    let written = std::process::id() == 1
        && OpenOptions::new()
            .write(true)
            .open("/dev/kmsg")
            // One write is one record.
            .and_then(|mut log| log.write_all(format!("<3>aenv-agent: {line}\n").as_bytes()))
            .is_ok();
    if !written {
        // A closed stderr is the caller's wish not to hear us.
        let _ = writeln!(stderr(), "aenv-agent: {line}");
    }
}
