//! The terminal: raw while a session runs, and as it was whichever way the session ends.

use crate::{
    client::{command, eventually},
    fake::{BOX, Fake},
};
use rustix::termios::{LocalModes, Termios, tcgetattr};
use std::{
    io::{Read as _, Write as _},
    process::Child,
    time::{Duration, Instant},
};

/// The client on a terminal of its own.
struct Session {
    terminal: pty_process::blocking::Pty,
    child: Child,
    before: Termios,
}

impl Session {
    fn begin(fake: &Fake, args: &[&str]) -> Self {
        let (terminal, side) = pty_process::blocking::open().expect("a terminal");
        terminal.resize(pty_process::Size::new(24, 80)).expect("resized");
        let before = tcgetattr(&terminal).expect("its modes");
        let plain = command(fake, args);
        let mut command = pty_process::blocking::Command::new(plain.get_program()).args(args).env_clear();
        for (key, value) in plain.get_envs() {
            if let Some(value) = value {
                command = command.env(key, value);
            }
        }
        let child = command.spawn(side).expect("starts");
        Self { terminal, child, before }
    }

    fn raw(&self) -> bool {
        !tcgetattr(&self.terminal).expect("its modes").local_modes.contains(LocalModes::ICANON)
    }

    /// Ready when the far side's prompt is on the screen.
    fn ready(&mut self) {
        self.shows("ready$");
        assert!(self.raw(), "a session needs raw mode");
    }

    fn shows(&mut self, wanted: &str) {
        let (mut seen, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(20));
        let mut piece = [0; 4096];
        while !String::from_utf8_lossy(&seen).contains(wanted) {
            assert!(Instant::now() < deadline, "{wanted:?} is not in {:?}", String::from_utf8_lossy(&seen));
            match self.terminal.read(&mut piece) {
                Ok(count) => seen.extend_from_slice(&piece[..count]),
                Err(e) => panic!("{e}; {:?}", String::from_utf8_lossy(&seen)),
            }
        }
    }

    fn types(&mut self, keys: &str) {
        self.terminal.write_all(keys.as_bytes()).expect("typed");
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid =
            i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw).expect("a pid");
        rustix::process::kill_process(pid, signal).expect("sent");
    }

    /// Waits for the client's end and sees the terminal as it was.
    #[track_caller]
    fn ends(mut self, code: i32) {
        let mut status = None;
        eventually("the client ends", || {
            status = self.child.try_wait().expect("asked");
            status.is_some()
        });
        assert_eq!(status.and_then(|s| s.code()), Some(code));
        let after = tcgetattr(&self.terminal).expect("its modes");
        assert_eq!(after.local_modes, self.before.local_modes, "local modes were not put back");
        assert_eq!(after.input_modes, self.before.input_modes, "input modes were not put back");
        assert_eq!(after.output_modes, self.before.output_modes, "output modes were not put back");
    }
}

pub const TESTS: &[(&str, fn())] = &[
    ("a_shell_ends_with_its_code_and_the_terminal_is_put_back", || {
        let fake = Fake::start();
        let mut session = Session::begin(&fake, &["connect", BOX]);
        session.ready();
        session.types("hello\r");
        session.shows("hello");
        session.types("exit\r");
        session.ends(5);
    }),
    ("tilde_dot_leaves_and_the_terminal_is_put_back", || {
        let fake = Fake::start();
        let mut session = Session::begin(&fake, &["connect", BOX]);
        session.ready();
        session.types("\r~.");
        session.ends(0);
        assert_eq!(fake.state.processes.lock().expect("lock").len(), 1, "the shell goes on");
    }),
    ("a_terminated_client_puts_the_terminal_back", || {
        for signal in [rustix::process::Signal::TERM, rustix::process::Signal::HUP] {
            let fake = Fake::start();
            let mut session = Session::begin(&fake, &["connect", BOX]);
            session.ready();
            session.signal(signal);
            session.ends(143);
        }
    }),
    ("a_session_that_can_not_begin_puts_the_terminal_back", || {
        let fake = Fake::start();
        Session::begin(&fake, &["connect", "-u", "ghost", BOX]).ends(4);
        Session::begin(&fake, &["exec", "-t", "-w", "/no/such", BOX, "--", "sh"]).ends(2);
    }),
    ("a_session_survives_a_broken_stream", || {
        let fake = Fake::start();
        *fake.state.cuts.lock().expect("lock") = vec![2, 2];
        let mut session = Session::begin(&fake, &["connect", BOX]);
        session.ready();
        session.types("again\r");
        session.shows("again");
        session.types("exit\r");
        session.ends(5);
    }),
    ("the_far_side_learns_the_size_and_its_changes", || {
        let fake = Fake::start();
        let mut session = Session::begin(&fake, &["connect", BOX]);
        session.ready();
        session.terminal.resize(pty_process::Size::new(41, 123)).expect("resized");
        eventually("the change arrives", || {
            fake.state.sizes.lock().expect("lock").contains(&serde_json::json!({ "cols": 123, "rows": 41 }))
        });
        session.types("exit\r");
        session.ends(5);
    }),
];
