//! `exec`: output, codes, input, broken streams, signals.

use crate::{
    client::{aenv, aenv_with, command, eventually},
    fake::{BOX, Fake},
};
use std::sync::atomic::Ordering;

pub const TESTS: &[(&str, fn())] = &[
    ("exec_keeps_outputs_apart_and_passes_the_code", || {
        let fake = Fake::start();
        let run =
            aenv(&fake, &["exec", BOX, "--", "sh", "-c", "echo out; echo err >&2; exit 42"]).with_code(42);
        assert_eq!((run.text(), run.err.as_str()), ("out\n", "err\n"));
    }),
    ("exec_gives_the_code_a_shell_gives_for_a_signal", || {
        let fake = Fake::start();
        aenv(&fake, &["exec", BOX, "--", "sh", "-c", "kill -9 $$"]).with_code(137);
    }),
    ("exec_forwards_binary_input_and_its_end", || {
        let fake = Fake::start();
        let data: Vec<u8> = (0..300_000_u32).map(|n| n.to_le_bytes()[0] ^ n.to_le_bytes()[1]).collect();
        let run = aenv_with(&fake, &["exec", "-i", BOX, "--", "cat"], &data).with_code(0);
        assert_eq!(run.out, data);
    }),
    ("exec_leaves_input_alone_unless_asked", || {
        let fake = Fake::start();
        assert_eq!(aenv_with(&fake, &["exec", BOX, "--", "cat"], b"not for it").with_code(0).out, b"");
    }),
    ("exec_takes_environment_and_directory", || {
        let fake = Fake::start();
        let args = ["exec", "-w", "/", "-e", "A=x y", BOX, "--", "sh", "-c", "pwd; printf %s \"$A\""];
        assert_eq!(aenv(&fake, &args).with_code(0).text(), "/\nx y");
    }),
    ("exec_quotes_nothing_and_expands_nothing", || {
        let fake = Fake::start();
        let run = aenv(&fake, &["exec", BOX, "--", "printf", "%s|", "a b", "$HOME", "*"]).with_code(0);
        assert_eq!(run.text(), "a b|$HOME|*|");
    }),
    ("a_stream_that_breaks_is_taken_up_where_it_broke", || {
        let fake = Fake::start();
        // Before the process id, after it, and twice in the middle.
        *fake.state.cuts.lock().expect("lock") = vec![0, 1, 2, 3];
        let script = "for i in 1 2 3 4 5 6; do echo line $i; echo err $i >&2; sleep 0.05; done; exit 7";
        let run = aenv(&fake, &["exec", BOX, "--", "sh", "-c", script]).with_code(7);
        assert_eq!(run.text(), (1..=6).map(|i| format!("line {i}\n")).collect::<String>());
        assert_eq!(run.err, (1..=6).map(|i| format!("err {i}\n")).collect::<String>());
        assert!(fake.seen("/process.Process/Connect"));
    }),
    ("a_process_that_can_not_be_found_again_is_told", || {
        let fake = Fake::start();
        *fake.state.cuts.lock().expect("lock") = vec![1];
        fake.state.forgetful.store(true, Ordering::Relaxed);
        let run = aenv(&fake, &["exec", BOX, "--", "sleep", "1"]).with_code(1);
        assert!(run.err.contains("aenv info"), "{}", run.err);
    }),
    ("a_detached_command_is_watched_later", || {
        let fake = Fake::start();
        let run = aenv(&fake, &["exec", "-d", BOX, "--", "sh", "-c", "echo late; exit 9"]).with_code(0);
        let pid = run.json()["pid"].to_string();
        let run = aenv(&fake, &["exec", BOX, "--attach", &pid]).with_code(9);
        assert_eq!(run.text(), "late\n");
    }),
    ("a_paused_sandbox_is_woken_and_that_is_said", || {
        let fake = Fake::start();
        fake.add("pausedpausedpausedpa", "paused", &[]);
        let run = aenv(&fake, &["exec", "pausedpausedpausedpa", "--", "echo", "awake"]).with_code(0);
        assert_eq!(run.text(), "awake\n");
        assert!(run.err.contains("resumed"), "{}", run.err);
    }),
    ("what_the_guest_refuses_has_its_own_codes", || {
        let fake = Fake::start();
        let run = aenv(&fake, &["exec", "-u", "ghost", BOX, "--", "true"]).with_code(4);
        assert!(run.err.contains("ghost"), "{}", run.err);
        aenv(&fake, &["exec", "-w", "/no/such", BOX, "--", "true"]).with_code(2);
        aenv(&fake, &["exec", "nosuchnosuchnosuchno", "--", "true"]).with_code(3);
        aenv(&fake, &["exec", BOX]).with_code(2);
        aenv(&fake, &["exec", "-t", BOX, "--", "true"]).with_code(2);
    }),
    ("control_c_ends_the_remote_command_first", || {
        let fake = Fake::start();
        let child = command(&fake, &["exec", BOX, "--", "sleep", "600"]).spawn().expect("starts");
        eventually("the process runs", || !fake.state.processes.lock().expect("lock").is_empty());
        // The client listens for signals once it has seen the process begin.
        eventually("the client has its process", || {
            std::fs::read_to_string(format!("/proc/{}/status", child.id()))
                .is_ok_and(|s| catches_interrupt(&s))
        });
        interrupt(child.id());
        let output = child.wait_with_output().expect("ends");
        assert_eq!(output.status.code(), Some(143), "{}", String::from_utf8_lossy(&output.stderr));
    }),
    ("a_command_that_ignores_the_first_control_c_is_killed_by_the_second", || {
        let fake = Fake::start();
        let script = "trap '' TERM; echo armed; while true; do sleep 0.05; done";
        let child = command(&fake, &["exec", BOX, "--", "sh", "-c", script]).spawn().expect("starts");
        eventually("the trap is set", || {
            fake.state
                .processes
                .lock()
                .expect("lock")
                .values()
                .any(|p| !p.output.lock().expect("lock").is_empty())
        });
        eventually("the client has its process", || {
            std::fs::read_to_string(format!("/proc/{}/status", child.id()))
                .is_ok_and(|s| catches_interrupt(&s))
        });
        interrupt(child.id());
        eventually("the first is delivered", || fake.seen("SendSignal"));
        interrupt(child.id());
        let output = child.wait_with_output().expect("ends");
        assert_eq!(output.status.code(), Some(137), "{}", String::from_utf8_lossy(&output.stderr));
    }),
    ("a_reader_that_leaves_early_ends_the_command", || {
        let fake = Fake::start();
        let mut child = command(&fake, &["exec", BOX, "--", "sh", "-c", "while true; do echo y; done"])
            .spawn()
            .expect("starts");
        drop(child.stdout.take());
        assert_eq!(child.wait().expect("ends").code(), Some(141));
    }),
];

/// Bit 1 (SIGINT) of the mask of caught signals.
fn catches_interrupt(status: &str) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap_or_default();
    u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & 0b10 != 0)
}

fn interrupt(pid: u32) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).expect("a pid")).expect("a pid");
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("sent");
}
