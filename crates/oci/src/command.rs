//! Running the tools: with a deadline, a way to cancel, and their lines as progress.
//!
//! A tool gets a process group of its own. However the call ends, also when its future is dropped, the group is gone
//! afterwards: asked by SIGTERM when there is time, killed when there is none.

use crate::{Error, error::During as _, scratch::Scratch};
use futures_util::StreamExt as _;
use rustix::process::{Pid, Signal, kill_process_group};
use std::{collections::VecDeque, process::Stdio, sync::Arc, time::Duration};
use tokio::{
    io::AsyncRead,
    process::{Child, Command},
    time::timeout,
};
use tokio_util::{
    bytes::{Buf as _, BytesMut},
    codec::{Decoder, FramedRead},
    sync::CancellationToken,
};

/// Lines of a failed tool that its error quotes, and where a line is cut.
const TAIL: usize = 12;
const LINE: usize = 2000;
/// For a tool to clean up after SIGTERM.
const GRACE: Duration = Duration::from_secs(10);

/// Receives one line of words for people at a time, from any thread; must not block.
#[derive(Clone)]
pub struct Progress(Arc<dyn Fn(&str) + Send + Sync>);

impl Progress {
    /// Calls `each` with every line.
    pub fn new(each: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self(Arc::new(each))
    }

    /// Nobody listens.
    pub fn none() -> Self {
        Self::new(|_| {})
    }

    pub(crate) fn say(&self, line: &str) {
        (self.0)(line);
    }
}

impl std::fmt::Debug for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Progress")
    }
}

/// What every step needs.
pub(crate) struct Context {
    pub(crate) scratch: Scratch,
    pub(crate) progress: Progress,
    pub(crate) cancel: CancellationToken,
}

/// One run of a tool.
pub(crate) struct Tool {
    command: Command,
    name: &'static str,
    package: &'static str,
    deadline: Duration,
}

impl Tool {
    /// `package` is the Debian package that has it.
    pub(crate) fn new(name: &'static str, package: &'static str, deadline: Duration) -> Self {
        Self { command: Command::new(name), name, package, deadline }
    }

    pub(crate) fn command(mut self, fill: impl FnOnce(&mut Command)) -> Self {
        fill(&mut self.command);
        self
    }

    /// Runs it in the scratch directory (which also takes its temporary files) and hands its lines, as `show` words
    /// them, to the progress. Returns how it ended; its failure is not an error here.
    pub(crate) async fn run(
        mut self,
        context: &Context,
        show: impl Fn(&str) -> Option<String>,
    ) -> Result<Ended, Error> {
        let directory = context.scratch.path();
        self.command
            .current_dir(directory)
            .env("TMPDIR", directory)
            .env("LC_ALL", "C.UTF-8")
            .stdin(context.scratch.stdin()?)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true);
        let child = self.command.spawn().map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => {
                Error::Missing { tool: self.name.to_owned(), package: self.package }
            }
            _ => Error::Io { step: format!("start {}", self.name), source: e },
        })?;
        let mut group = Group::new(child);
        let (stdout, stderr) = (group.child.stdout.take(), group.child.stderr.take());
        let mut tail = VecDeque::new();
        let read = async {
            let mut lines = futures_util::stream::select(lines(stdout), lines(stderr));
            while let Some(line) = lines.next().await {
                if let Some(words) = show(&line) {
                    context.progress.say(&words);
                }
                if tail.len() == TAIL {
                    tail.pop_front();
                }
                tail.push_back(line);
            }
        };
        let ended = async {
            read.await;
            group.child.wait().await
        };
        let outcome = tokio::select! {
            () = context.cancel.cancelled() => Err(Error::Cancelled),
            ended = timeout(self.deadline, ended) => match ended {
                Ok(status) => status.during(|| format!("wait for {}", self.name)),
                Err(_) => Err(Error::TimedOut { step: self.name.to_owned(), after: self.deadline }),
            },
        };
        match outcome {
            Ok(status) => {
                // Whatever the tool left running in its group ends here, by the drop.
                drop(group);
                Ok(Ended { tool: self.name, status, tail: tail.into() })
            }
            Err(e) => {
                group.stop().await;
                Err(e)
            }
        }
    }
}

/// How a tool ended.
pub(crate) struct Ended {
    tool: &'static str,
    status: std::process::ExitStatus,
    tail: Vec<String>,
}

impl Ended {
    pub(crate) fn success(&self) -> bool {
        self.status.success()
    }

    /// Its last lines.
    pub(crate) fn words(&self) -> String {
        self.tail.join("\n")
    }

    /// Turns a failure into an error that quotes the tool.
    pub(crate) fn check(self) -> Result<(), Error> {
        if self.success() {
            return Ok(());
        }
        let reason = self.words();
        Err(Error::Tool { tool: self.tool.to_owned(), status: self.status.to_string(), reason })
    }
}

/// A child and its process group.
struct Group {
    child: Child,
    id: Option<Pid>,
}

impl Group {
    fn new(child: Child) -> Self {
        let id = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        Self { child, id }
    }

    fn signal(&self, signal: Signal) {
        // Gone already: fine.
        let _ = self.id.map(|id| kill_process_group(id, signal));
    }

    async fn stop(mut self) {
        self.signal(Signal::TERM);
        let _ = timeout(GRACE, self.child.wait()).await;
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}

fn lines(stream: Option<impl AsyncRead + Unpin>) -> impl futures_util::Stream<Item = String> + Unpin {
    let framed = stream.map(|stream| FramedRead::new(stream, Lines));
    // A broken pipe ends it.
    let lines = futures_util::stream::iter(framed).flatten().filter_map(|line| std::future::ready(line.ok()));
    Box::pin(lines)
}

/// Lines ended by a newline or a carriage return, overlong ones in pieces. Unlike the library's codec it has no error
/// for those: the reading must go on, or the tool would wait for it for ever.
struct Lines;

impl Decoder for Lines {
    type Item = String;
    type Error = std::io::Error;

    fn decode(&mut self, buffer: &mut BytesMut) -> Result<Option<String>, Self::Error> {
        let end = buffer.iter().take(LINE).position(|b| matches!(b, b'\n' | b'\r'));
        let line = match end {
            Some(end) => {
                let line = buffer.split_to(end);
                buffer.advance(1);
                line
            }
            None if buffer.len() >= LINE => buffer.split_to(LINE),
            None => return Ok(None),
        };
        Ok(Some(String::from_utf8_lossy(&line).into_owned()))
    }

    fn decode_eof(&mut self, buffer: &mut BytesMut) -> Result<Option<String>, Self::Error> {
        let line = self.decode(buffer)?;
        if line.is_none() && !buffer.is_empty() {
            let rest = buffer.split();
            return Ok(Some(String::from_utf8_lossy(&rest).into_owned()));
        }
        Ok(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking::Said;

    mod parking {
        use std::sync::{Arc, Mutex};

        /// Collects progress.
        #[derive(Clone, Default)]
        pub(super) struct Said(pub(super) Arc<Mutex<Vec<String>>>);
    }

    fn context(work: &std::path::Path) -> (Context, Said) {
        let said = Said::default();
        let lines = said.clone();
        let progress = Progress::new(move |line| lines.0.lock().unwrap().push(line.to_owned()));
        (Context { scratch: Scratch::new(work).unwrap(), progress, cancel: CancellationToken::new() }, said)
    }

    fn shell(script: &str, deadline: Duration) -> Tool {
        Tool::new("sh", "dash", deadline).command(|c| {
            c.args(["-c", script]);
        })
    }

    #[tokio::test]
    async fn lines_of_both_streams_are_progress_and_the_last_explain_a_failure() {
        let work = tempfile::tempdir().unwrap();
        let (context, said) = context(work.path());
        let script =
            "echo one; echo two >&2; head -c 100000 /dev/zero | tr '\\0' x; echo; echo three; exit 3";
        let ended = shell(script, GRACE).run(&context, |line| Some(line.to_owned())).await.unwrap();
        let mut lines = said.0.lock().unwrap().clone();
        lines.sort();
        lines.dedup();
        assert_eq!(lines, ["", "one", "three", "two", &"x".repeat(LINE)]);
        let error = ended.check().unwrap_err().to_string();
        assert!(error.contains("exit status: 3") && error.contains("three"), "{error}");
    }

    #[tokio::test]
    async fn a_tool_that_takes_too_long_or_is_cancelled_is_gone_with_its_children() {
        let work = tempfile::tempdir().unwrap();
        let (context, _) = context(work.path());
        let alive = |pid: &str| {
            std::path::Path::new("/proc").join(pid.trim()).join("cmdline").metadata().is_ok()
                && !std::fs::read(format!("/proc/{}/cmdline", pid.trim())).unwrap_or_default().is_empty()
        };
        let script = "sleep 61 & echo $! > child; wait";
        let late = shell(script, Duration::from_millis(300)).run(&context, |_| None).await;
        assert!(matches!(late, Err(Error::TimedOut { .. })));
        let child = std::fs::read_to_string(context.scratch.path().join("child")).unwrap();
        assert!(!alive(&child));
        let cancel = context.cancel.clone();
        let running = tokio::spawn(async move {
            let outcome = shell("echo started; sleep 62 & wait", GRACE).run(&context, |_| None).await;
            (outcome.err(), context)
        });
        cancel.cancel();
        let (outcome, _context) = running.await.unwrap();
        assert!(matches!(outcome, Some(Error::Cancelled)));
    }

    #[tokio::test]
    async fn a_missing_tool_names_its_package() {
        let work = tempfile::tempdir().unwrap();
        let (context, _) = context(work.path());
        let outcome = Tool::new("no-such-tool", "some-package", GRACE).run(&context, |_| None).await;
        let error = outcome.err().unwrap().to_string();
        assert!(error.contains("no-such-tool") && error.contains("some-package"), "{error}");
    }
}
