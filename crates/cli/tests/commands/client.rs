//! Runs `aenv` and looks at what it did.

use crate::fake::{Fake, KEY};
use std::{
    io::Write as _,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// Set in the child: it is the client.
pub const UNDER_TEST: &str = "AENV_CLI_UNDER_TEST";

/// What a run left.
#[derive(Debug)]
pub struct Run {
    pub code: i32,
    pub out: Vec<u8>,
    pub err: String,
}

impl Run {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.out).expect("text")
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.out).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// The run, which must have ended with this code.
    #[track_caller]
    pub fn with_code(self, code: i32) -> Self {
        assert_eq!(self.code, code, "{}\n{}", String::from_utf8_lossy(&self.out), self.err);
        self
    }
}

/// The command, not started yet, with nothing of this machine's own settings.
pub fn command(fake: &Fake, args: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a path"));
    command
        .args(args)
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("HOME", fake.home())
        .env(UNDER_TEST, "1")
        .env("E2B_API_URL", fake.url())
        .env("E2B_API_KEY", KEY)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

pub fn aenv(fake: &Fake, args: &[&str]) -> Run {
    aenv_with(fake, args, b"")
}

pub fn aenv_with(fake: &Fake, args: &[&str], input: &[u8]) -> Run {
    let mut child = command(fake, args).stdin(Stdio::piped()).spawn().expect("starts");
    let mut stdin = child.stdin.take().expect("piped");
    let input = input.to_vec();
    // A client that doesn't read its input closes it; that is its right.
    let writer = std::thread::spawn(move || drop(stdin.write_all(&input)));
    let output = child.wait_with_output().expect("ends");
    writer.join().expect("no panic");
    Run {
        code: output.status.code().unwrap_or(-1),
        out: output.stdout,
        err: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Waits for something another process does.
#[track_caller]
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
