//! From the evidence a monitor leaves to the cause of its end. Pure.

use crate::{Exit, ExitCause, process::Status};

/// All that is known of an end.
#[derive(Debug, Clone)]
pub(super) struct Evidence<'a> {
    /// What the parent was told.
    pub(super) status: Status,
    /// Whether we sent the signal.
    pub(super) killed: bool,
    /// Reason of QEMU's SHUTDOWN event.
    pub(super) shutdown: Option<&'a str>,
    /// End of the guest's console.
    pub(super) console: &'a str,
    /// End of QEMU's own log.
    pub(super) log: &'a str,
    /// The host kernel's line about killing this process for memory.
    pub(super) host_oom: Option<&'a str>,
}

/// Decides. What the guest did is believed before what we did: a guest may end while it is being killed.
pub(super) fn decide(evidence: &Evidence<'_>) -> Exit {
    let exit = |cause, detail: String| Exit { cause, detail };
    let panic = last_line_with(evidence.console, "Kernel panic - not syncing");
    // A panic ends in a reset. QEMU then leaves with 0; an adopted one tells no status, and may have told no reason
    // either. A signal is nothing a guest can bring about, whatever it writes on its console.
    let unexplained = evidence.shutdown.is_none()
        && !evidence.killed
        && matches!(evidence.status, Status::Exited(0) | Status::Untold);
    match (evidence.shutdown, panic) {
        (Some("guest-shutdown"), _) | (Some("guest-reset"), None) => {
            return exit(ExitCause::GuestShutdown, evidence.shutdown.unwrap_or_default().to_owned());
        }
        (reason, Some(line)) if unexplained || matches!(reason, Some("guest-reset" | "guest-panic")) => {
            let oom = ran_out_of_memory(evidence.console, line);
            return exit(if oom { ExitCause::GuestOom } else { ExitCause::GuestPanic }, line.to_owned());
        }
        _ => {}
    }
    // Printed at the highest level, so also on a quiet console. Only asked for when QEMU's own word was missed.
    if unexplained
        && let Some(line) = evidence.console.lines().rev().take(3).find(|line| is_orderly_end(line))
    {
        return exit(ExitCause::GuestShutdown, line.trim().to_owned());
    }
    if let Some(line) = evidence.host_oom {
        return exit(ExitCause::HostOom, line.to_owned());
    }
    if evidence.killed {
        return exit(ExitCause::Killed, "killed by its node".to_owned());
    }
    let mut detail = format!("QEMU ended by itself: {}", evidence.status);
    if let Some(reason) = evidence.shutdown {
        detail = format!("{detail}, {reason}");
    }
    if let Some(words) = evidence.log.lines().rfind(|line| !line.trim().is_empty()) {
        detail = format!("{detail}: {}", words.trim());
    }
    exit(ExitCause::VmmCrash, detail)
}

fn is_orderly_end(line: &str) -> bool {
    ["reboot: Power down", "reboot: Restarting system", "reboot: System halted"]
        .iter()
        .any(|words| line.contains(words))
}

/// A panic whose reason is memory: the kernel says so itself, or it lost PID 1 to the OOM killer just before.
fn ran_out_of_memory(console: &str, panic: &str) -> bool {
    let panic = panic.to_ascii_lowercase();
    panic.contains("out of memory")
        || panic.contains("deadlocked on memory")
        || (panic.contains("attempted to kill init") && console.contains("Out of memory: Killed process 1 "))
}

fn last_line_with<'a>(text: &'a str, words: &str) -> Option<&'a str> {
    text.lines().rfind(|line| line.contains(words)).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PANIC: &str =
        "[  1.2] Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000100\n[ 1.3] CPU: 0";

    fn evidence() -> Evidence<'static> {
        Evidence {
            status: Status::Exited(0),
            killed: false,
            shutdown: None,
            console: "",
            log: "",
            host_oom: None,
        }
    }

    #[test]
    fn each_cause_is_told_from_its_evidence() {
        let signalled = Status::Signalled(9);
        let oom = format!("Out of memory: Killed process 1 (init)\n{PANIC}");
        for (evidence, cause) in [
            (Evidence { shutdown: Some("guest-shutdown"), ..evidence() }, ExitCause::GuestShutdown),
            (Evidence { shutdown: Some("guest-reset"), ..evidence() }, ExitCause::GuestShutdown),
            (Evidence { shutdown: Some("guest-reset"), console: PANIC, ..evidence() }, ExitCause::GuestPanic),
            (Evidence { shutdown: Some("guest-reset"), console: &oom, ..evidence() }, ExitCause::GuestOom),
            (Evidence { killed: true, status: signalled, ..evidence() }, ExitCause::Killed),
            (Evidence { status: signalled, ..evidence() }, ExitCause::VmmCrash),
            (Evidence { status: signalled, host_oom: Some("oom"), ..evidence() }, ExitCause::HostOom),
            (Evidence { status: Status::Exited(1), ..evidence() }, ExitCause::VmmCrash),
            (Evidence { status: signalled, console: PANIC, ..evidence() }, ExitCause::VmmCrash),
            (
                Evidence { shutdown: Some("guest-shutdown"), console: PANIC, ..evidence() },
                ExitCause::GuestShutdown,
            ),
            // Adopted, the event missed: the console still tells.
            (Evidence { status: Status::Untold, console: PANIC, ..evidence() }, ExitCause::GuestPanic),
        ] {
            assert_eq!(decide(&evidence).cause, cause, "{evidence:?}");
        }
    }

    #[test]
    fn an_end_that_nobody_watched_is_read_off_the_console() {
        let untold =
            Evidence { status: Status::Untold, console: "hello\n[ 9.1] reboot: Power down\n", ..evidence() };
        assert_eq!(decide(&untold).cause, ExitCause::GuestShutdown);
        let long_ago = format!("[ 9.1] reboot: Power down\n{}", "and on\n".repeat(5));
        assert_eq!(decide(&Evidence { console: &long_ago, ..untold }).cause, ExitCause::VmmCrash);
    }

    #[test]
    fn a_guest_that_ends_while_it_is_killed_ended_by_itself() {
        let both = Evidence { killed: true, shutdown: Some("guest-shutdown"), ..evidence() };
        assert_eq!(decide(&both).cause, ExitCause::GuestShutdown);
    }

    #[test]
    fn an_old_panic_line_does_not_turn_a_kill_into_a_panic() {
        let faked = Evidence { killed: true, status: Status::Signalled(9), console: PANIC, ..evidence() };
        assert_eq!(decide(&faked).cause, ExitCause::Killed);
    }

    #[test]
    fn a_crash_carries_the_last_words() {
        let crash =
            Evidence { status: Status::Exited(1), log: "a\nqemu: could not open disk\n\n", ..evidence() };
        assert_eq!(decide(&crash).detail, "QEMU ended by itself: exit status 1: qemu: could not open disk");
    }
}
