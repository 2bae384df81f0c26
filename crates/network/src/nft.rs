//! The two ways to nf_tables: whole rulesets as text through one `nft` process (6 ms, off the hot path), and one set
//! element by raw netlink (tens of microseconds, on it).

use crate::{
    GUEST_IP,
    netlink::{ACK, Attrs, CREATE, DUMP, Message, REQUEST, Socket, attributes},
    rules::{OPEN_SET, SLOT_TABLE},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    process::{Pid, PidfdFlags},
};
use std::{
    io::{self, Read as _, Write as _},
    process::{Command, Stdio},
    time::Duration,
};

const DEADLINE: Duration = Duration::from_secs(20);
/// Far above any ruleset's listing that we ask for; the rest is not read.
const OUTPUT_LIMIT: u64 = 8 << 20;

/// Applies a script as one transaction, in the calling thread's namespace (a child inherits it).
pub(crate) fn apply(script: &str) -> io::Result<()> {
    run(Command::new("nft").args(["-f", "-"]), script).map(drop)
}

/// Runs a short-lived command with a deadline and returns its output. An error carries what it wrote to stderr.
pub(crate) fn run(command: &mut Command, input: &str) -> io::Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(|e| {
            match e.kind() {
                io::ErrorKind::NotFound => {
                    io::Error::other(format!("{name} is missing; install the package nftables"))
                }
                _ => io::Error::other(format!("{name}: {e}")),
            }
        })?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    // Scripts are smaller than a pipe's 64 KiB, so writing can't wait for the reader. An early exit shows below.
    if let Some(mut stdin) = child.stdin.take() {
        let _ = stdin.write_all(input.as_bytes());
    }
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        if let Some(stdout) = stdout {
            let _ = stdout.take(OUTPUT_LIMIT).read_to_string(&mut text);
        }
        text
    });
    let ended = wait(&child, DEADLINE);
    if !matches!(ended, Ok(true)) {
        let _ = child.kill();
    }
    let status = child.wait()?;
    let output = reader.join().unwrap_or_default();
    if !ended? {
        return Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("{name} did not end within {DEADLINE:?}"),
        ));
    }
    if status.success() {
        return Ok(output);
    }
    let mut text = String::new();
    if let Some(stderr) = stderr {
        let _ = stderr.take(4096).read_to_string(&mut text);
    }
    Err(io::Error::other(format!("{name} failed ({status}): {}", text.trim())))
}

/// Whether the child ended within the deadline.
fn wait(child: &std::process::Child, deadline: Duration) -> io::Result<bool> {
    let pid = Pid::from_child(child);
    let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
    let timeout = Timespec::try_from(deadline).map_err(io::Error::other)?;
    loop {
        match rustix::event::poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&timeout)) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

const SUBSYSTEM: u16 = 10 << 8;
const BATCH_BEGIN: u16 = 16;
const BATCH_END: u16 = 17;
const NEW_ELEMENT: u16 = SUBSYSTEM | 12;
const GET_ELEMENT: u16 = SUBSYSTEM | 13;
const DEL_ELEMENT: u16 = SUBSYSTEM | 14;
const LIST_TABLE: u16 = 1;
const LIST_SET: u16 = 2;
const LIST_ELEMENTS: u16 = 3;
/// `struct nfgenmsg` of the inet family; for a batch marker the last two bytes name the subsystem.
const INET: [u8; 4] = [1, 0, 0, 0];
const FOR_NFTABLES: [u8; 4] = [0, 0, 0, 10];

fn in_open_set(message: Message) -> Message {
    let name = |text: &str| [text.as_bytes(), &[0]].concat();
    message.attr(LIST_TABLE, &name(SLOT_TABLE)).attr(LIST_SET, &name(OPEN_SET))
}

/// Lets the guest of the calling thread's namespace out, or stops it, in one transaction.
pub(crate) fn set_open(open: bool) -> io::Result<()> {
    let key = Attrs::default().attr(1, &GUEST_IP.octets());
    let element = Attrs::default().nest(1, &key);
    let list = Attrs::default().nest(1, &element);
    let (kind, flags) = if open { (NEW_ELEMENT, CREATE) } else { (DEL_ELEMENT, 0) };
    let change = in_open_set(Message::new(kind, REQUEST | ACK | flags, &INET));
    let outcome = Socket::netfilter()?.transaction([
        Message::new(BATCH_BEGIN, REQUEST, &FOR_NFTABLES),
        change.attr(LIST_ELEMENTS | 0x8000, list.bytes()),
        Message::new(BATCH_END, REQUEST, &FOR_NFTABLES),
    ]);
    match outcome {
        // It already was closed.
        Err(e) if !open && e.raw_os_error() == Some(libc::ENOENT) && is_open()? == Some(false) => Ok(()),
        other => other,
    }
}

/// Whether the guest of the calling thread's namespace is let out; `None` when the namespace has no such rules.
pub(crate) fn is_open() -> io::Result<Option<bool>> {
    let mut elements = false;
    let asked = in_open_set(Message::new(GET_ELEMENT, REQUEST | DUMP, &INET));
    let outcome = Socket::netfilter()?.dump(asked, |kind, body| {
        let list = body.get(4..).and_then(|rest| attributes(rest).find(|(kind, _)| *kind == LIST_ELEMENTS));
        elements |= kind == NEW_ELEMENT && list.is_some_and(|(_, list)| attributes(list).next().is_some());
    });
    match outcome {
        Ok(()) => Ok(Some(elements)),
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(e) => Err(e),
    }
}
