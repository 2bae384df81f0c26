//! Asks the host kernel's log whether it killed a process for memory (Documentation/ABI/testing/dev-kmsg).

use std::{
    fs::File,
    io::{ErrorKind, Read},
    os::unix::fs::OpenOptionsExt,
};

/// A record is at most this long, by the interface's own promise.
const RECORD: usize = 8192;
/// Records looked at; the ring holds fewer unless it was made very large.
const MOST: usize = 100_000;

/// The kernel's line about killing `pid` for memory, when the log is readable and still has it. Blocks for
/// milliseconds.
pub(crate) fn memory_kill(pid: i32) -> Option<String> {
    let mut log = File::options().read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg").ok()?;
    let mut record = [0; RECORD];
    let mut found = None;
    for _ in 0..MOST {
        match log.read(&mut record) {
            Ok(0) => break,
            Ok(length) => {
                let text = String::from_utf8_lossy(&record[..length]);
                if let Some(line) = matching(&text, pid) {
                    found = Some(line.to_owned());
                }
            }
            // Overwritten while we read: the next read goes on behind the gap.
            Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    found
}

fn matching(record: &str, pid: i32) -> Option<&str> {
    let (_, message) = record.split_once(';')?;
    let line = message.lines().next()?;
    // "Out of memory: Killed process N (…" of the system, "Memory cgroup out of memory: Killed process N (…" of a cgroup.
    let (before, after) = line.split_once("Killed process ")?;
    let number = after.split(|c: char| !c.is_ascii_digit()).next()?;
    (before.to_ascii_lowercase().contains("out of memory") && number.parse() == Ok(pid)).then_some(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_process_that_was_killed_is_found() {
        let record = "3,1,2,-;Out of memory: Killed process 4711 (qemu-system-x86) total-vm:1kB, anon-rss:2kB\n SUBSYSTEM=x";
        assert!(matching(record, 4711).unwrap().ends_with("anon-rss:2kB"));
        assert_eq!(matching(record, 471), None);
        assert!(matching(&record.replace("Out of", "Memory cgroup out of"), 4711).is_some());
        assert_eq!(matching("6,1,2,-;something else", 4711), None);
    }
}
