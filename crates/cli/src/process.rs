//! A process in a sandbox, watched to its end across broken connections.
//!
//! ```text
//! start ──► attached ──output…──► ended(code)
//!    │          │ stream breaks
//!    │          ▼
//!    └────► reattaching ──Connect(pid or tag) at the next offset──► attached
//!                 │ 60 s without success, or the process is unknown
//!                 ▼
//!               lost (an error that says what became of the sandbox)
//! ```
//! A tag of our own is sent with the start, so that a stream that breaks before it told the process id can be taken
//! up too. Leaving (detach, crash of this client) never ends the process.

use crate::{
    error::{Error, Result},
    guest::{Guest, Messages},
    wire::{Ended, ProcessMessage},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use serde_json::{Value, json};
use std::{collections::BTreeMap, time::Duration};
use tokio::time::Instant;

/// How long a broken stream is tried again.
const REATTACH_FOR: Duration = Duration::from_secs(60);
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Largest piece of input in one call.
pub const INPUT_PIECE: usize = 64 << 10;

/// Size of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Columns.
    pub cols: u16,
    /// Rows.
    pub rows: u16,
}

impl Size {
    fn json(self) -> Value {
        json!({ "size": { "cols": self.cols, "rows": self.rows } })
    }
}

/// What to run.
#[derive(Debug, Clone, Default)]
pub struct Spec {
    /// Program.
    pub cmd: String,
    /// Arguments.
    pub args: Vec<String>,
    /// Environment on top of the sandbox's.
    pub envs: BTreeMap<String, String>,
    /// Working directory.
    pub cwd: Option<String>,
    /// With a terminal of this size.
    pub pty: Option<Size>,
    /// Keep its input open.
    pub stdin: bool,
}

/// What a process tells.
#[derive(Debug)]
pub enum Event {
    /// The agent named its process id; comes again after a broken stream.
    Began,
    /// Output.
    Stdout(Bytes),
    /// Output of the other kind.
    Stderr(Bytes),
    /// Output of a terminal.
    Pty(Bytes),
    /// Output that came while nobody listened and was more than the guest keeps.
    Lost(u64),
    /// The last event.
    Ended(Ended),
}

/// The signals the agent delivers.
#[derive(Debug, Clone, Copy)]
pub enum Signal {
    /// Please.
    Term,
    /// Now.
    Kill,
}

/// A process under watch.
pub struct Process {
    guest: Guest,
    messages: Option<Messages>,
    pid: Option<u32>,
    tag: String,
    offset: u64,
    ended: bool,
    /// Set while the stream is broken: since when, and how long to wait before the next attempt.
    broken: Option<(Instant, Duration)>,
}

impl Process {
    /// Starts a process and waits until the agent has confirmed it.
    ///
    /// # Errors
    /// What the agent says: no such program, user or directory, sandbox not running.
    pub async fn start(guest: &Guest, spec: &Spec) -> Result<Self> {
        let tag = format!("aenv-{}", uuid::Uuid::new_v4().simple());
        let mut config = json!({ "cmd": spec.cmd, "args": spec.args, "envs": spec.envs });
        if let Some(cwd) = &spec.cwd {
            config["cwd"] = json!(cwd);
        }
        let mut request = json!({ "process": config, "tag": tag, "stdin": spec.stdin });
        if let Some(size) = spec.pty {
            request["pty"] = size.json();
        }
        let mut process = Self {
            guest: guest.clone(),
            messages: None,
            pid: None,
            tag,
            offset: 0,
            ended: false,
            broken: None,
        };
        match guest.stream("process.Process/Start", &request, 0).await {
            Ok(messages) => process.messages = Some(messages),
            // It may run or not; the tag finds out. Starting it a second time could do harm.
            Err(Error::Dropped(_)) => {}
            Err(other) => return Err(other),
        }
        process.confirm().await?;
        Ok(process)
    }

    /// Watches a process that runs already, from the first byte of output that is still kept.
    ///
    /// # Errors
    /// No such process.
    pub async fn attach(guest: &Guest, pid: u32) -> Result<Self> {
        let mut process = Self {
            guest: guest.clone(),
            messages: None,
            pid: Some(pid),
            tag: String::new(),
            offset: 0,
            ended: false,
            broken: None,
        };
        let request = json!({ "process": { "pid": pid } });
        process.messages = Some(guest.stream("process.Process/Connect", &request, 0).await?);
        Ok(process)
    }

    async fn confirm(&mut self) -> Result<()> {
        match self.next().await? {
            Some(Event::Began) => Ok(()),
            other => {
                Err(Error::Failed(format!("the guest began a process with {other:?} instead of its id")))
            }
        }
    }

    /// Process id in the guest.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// A handle for input and signals that can be used beside [`Process::next`].
    #[must_use]
    pub fn control(&self) -> Handle {
        let selector = match self.pid {
            Some(pid) => json!({ "pid": pid }),
            None => json!({ "tag": self.tag }),
        };
        Handle { guest: self.guest.clone(), selector }
    }

    /// The next event; `None` after the end.
    ///
    /// # Errors
    /// The process or the sandbox is lost.
    pub async fn next(&mut self) -> Result<Option<Event>> {
        if self.ended {
            return Ok(None);
        }
        loop {
            let next = match &mut self.messages {
                Some(messages) => messages.next::<ProcessMessage>().await,
                None => Err(Error::Dropped("not attached".to_owned())),
            };
            match next {
                Ok(Some(message)) => {
                    self.broken = None;
                    if let Some(event) = self.take(message) {
                        return Ok(Some(event));
                    }
                }
                Ok(None) => {
                    return Err(Error::Failed("the guest ended the stream without an exit code".to_owned()));
                }
                Err(Error::Dropped(why)) => self.reattach(why).await?,
                Err(Error::NotFound(words)) if self.broken.is_some() => return Err(self.lost(&words)),
                Err(other) => return Err(other),
            }
        }
    }

    fn take(&mut self, message: ProcessMessage) -> Option<Event> {
        let event = message.event;
        if let Some(start) = event.start {
            self.pid = Some(start.pid);
            if let Some(offset) = start.offset {
                self.offset = offset;
            }
            return Some(start.dropped.filter(|n| *n > 0).map_or(Event::Began, Event::Lost));
        }
        if let Some(data) = event.data {
            let (bytes, kind): (Bytes, fn(Bytes) -> Event) = match (data.stdout, data.stderr, data.pty) {
                (Some(bytes), _, _) => (bytes, Event::Stdout),
                (_, Some(bytes), _) => (bytes, Event::Stderr),
                (_, _, Some(bytes)) => (bytes, Event::Pty),
                _ => return None,
            };
            let length = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
            self.offset = data.offset.unwrap_or(self.offset).saturating_add(length);
            return Some(kind(bytes));
        }
        if let Some(end) = event.end {
            self.ended = true;
            return Some(Event::Ended(end));
        }
        None
    }

    async fn reattach(&mut self, mut why: String) -> Result<()> {
        self.messages = None;
        loop {
            // Kept over successful attempts that break before their first message: those are no success.
            let (since, pause) = self.broken.unwrap_or((Instant::now(), FIRST_PAUSE));
            self.broken = Some((since, (pause * 2).min(LONGEST_PAUSE)));
            if since.elapsed() > REATTACH_FOR {
                return Err(self.lost(&why));
            }
            tokio::time::sleep(pause).await;
            let selector = match self.pid {
                Some(pid) => json!({ "process": { "pid": pid } }),
                None => json!({ "process": { "tag": self.tag } }),
            };
            match self.guest.stream("process.Process/Connect", &selector, self.offset).await {
                Ok(messages) => {
                    self.messages = Some(messages);
                    return Ok(());
                }
                Err(Error::Dropped(words) | Error::Unreachable { detail: words, .. }) => why = words,
                Err(Error::NotFound(words)) => return Err(self.lost(&words)),
                Err(other) => return Err(other),
            }
        }
    }

    fn lost(&self, why: &str) -> Error {
        Error::Failed(format!(
            "the stream broke and could not be taken up again ({why}); `aenv info {}` says what became of the sandbox",
            self.guest.id()
        ))
    }
}

/// Input and signals for a process.
#[derive(Clone)]
pub struct Handle {
    guest: Guest,
    selector: Value,
}

impl Handle {
    /// Sends input, at most [`INPUT_PIECE`] bytes at a time, in order.
    ///
    /// # Errors
    /// The process is gone, or has no open input. A call that may have arrived is never sent twice.
    pub async fn input(&self, bytes: &[u8], pty: bool) -> Result<()> {
        for piece in bytes.chunks(INPUT_PIECE) {
            let kind = if pty { "pty" } else { "stdin" };
            let request = json!({ "process": self.selector, "input": { kind: STANDARD.encode(piece) } });
            self.guest.unary::<Value>("process.Process/SendInput", &request).await?;
        }
        Ok(())
    }

    /// Ends the input.
    ///
    /// # Errors
    /// The process is gone.
    pub async fn close_input(&self) -> Result<()> {
        self.guest
            .unary::<Value>("process.Process/CloseStdin", &json!({ "process": self.selector }))
            .await
            .map(drop)
    }

    /// Tells the terminal its size.
    ///
    /// # Errors
    /// The process is gone.
    pub async fn resize(&self, size: Size) -> Result<()> {
        let request = json!({ "process": self.selector, "pty": size.json() });
        self.guest.unary::<Value>("process.Process/Update", &request).await.map(drop)
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// The process is gone.
    pub async fn signal(&self, signal: Signal) -> Result<()> {
        let name = match signal {
            Signal::Term => "SIGNAL_SIGTERM",
            Signal::Kill => "SIGNAL_SIGKILL",
        };
        let request = json!({ "process": self.selector, "signal": name });
        self.guest.unary::<Value>("process.Process/SendSignal", &request).await.map(drop)
    }
}

/// The exit code a shell would give: the process's own, or 128 + the signal that ended it.
#[must_use]
pub fn shell_code(end: &Ended) -> u8 {
    if let Ok(code) = u8::try_from(end.exit_code) {
        return code;
    }
    const SIGNALS: [(&str, u8); 13] = [
        ("hangup", 1),
        ("interrupt", 2),
        ("quit", 3),
        ("illegal", 4),
        ("trap", 5),
        ("abort", 6),
        ("bus", 7),
        ("floating", 8),
        ("killed", 9),
        ("segmentation", 11),
        ("broken pipe", 13),
        ("alarm", 14),
        ("terminated", 15),
    ];
    let status = end.status.to_lowercase();
    let named = SIGNALS.iter().find(|(name, _)| status.contains(name)).map(|(_, number)| 128 + number);
    let numbered = || {
        let digits: String =
            status.chars().skip_while(|c| !c.is_ascii_digit()).take_while(char::is_ascii_digit).collect();
        digits.parse::<u8>().ok().and_then(|n| 128_u8.checked_add(n))
    };
    named.or_else(numbered).unwrap_or(255)
}

/// Runs a command to its end and collects its output, at most `limit` bytes of each kind.
///
/// # Errors
/// As [`Process::start`]; output beyond the limit is an error too.
pub async fn collect(guest: &Guest, spec: &Spec, limit: usize) -> Result<(Ended, Vec<u8>, Vec<u8>)> {
    let mut process = Process::start(guest, spec).await?;
    let (mut out, mut err) = (Vec::new(), Vec::new());
    while let Some(event) = process.next().await? {
        match event {
            Event::Stdout(bytes) | Event::Pty(bytes) => out.extend_from_slice(&bytes),
            Event::Stderr(bytes) => err.extend_from_slice(&bytes),
            Event::Began => {}
            Event::Lost(count) => return Err(Error::Failed(format!("{count} bytes of output were lost"))),
            Event::Ended(end) => return Ok((end, out, err)),
        }
        if out.len().max(err.len()) > limit {
            return Err(Error::Failed(format!("{} wrote more than {limit} bytes", spec.cmd)));
        }
    }
    Err(Error::Failed("the process ended without an exit code".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(exit_code: i32, status: &str) -> Ended {
        Ended { exit_code, exited: exit_code >= 0, status: status.to_owned(), error: None }
    }

    #[test]
    fn exit_codes_are_those_a_shell_gives() {
        assert_eq!(shell_code(&ended(0, "exit status 0")), 0);
        assert_eq!(shell_code(&ended(42, "exit status 42")), 42);
        assert_eq!(shell_code(&ended(-1, "signal: killed")), 137);
        assert_eq!(shell_code(&ended(-1, "signal: terminated")), 143);
        assert_eq!(shell_code(&ended(-1, "signal: segmentation fault (core dumped)")), 139);
        assert_eq!(shell_code(&ended(-1, "signal 31")), 159);
        assert_eq!(shell_code(&ended(-1, "")), 255);
        assert_eq!(shell_code(&ended(1000, "?")), 255);
    }
}
