//! From the first instruction in the initramfs to a served port.
//!
//! Order, and what a failure means:
//! 1. `/proc`, `/sys`, `/dev` in the initramfs; kernel command line; modules. A module that fails is reported and
//!    passed over: it may be built in, and if it was needed the next step says so.
//! 2. The root device appears (awaited through the kernel's device events, at most [`DEVICE_WAIT`]) and is mounted.
//!    Failure here is final: the reason goes to the console, then the machine is reset, which the VMM reports.
//! 3. The root is entered by moving the mounts, and the remaining mounts, the host name and the network are set up.
//!    Each of these is reported and passed over: a guest without them can still be reached or looked into.
//! 4. The port is served. Only then comes what nobody waits for: freeing the initramfs, `/etc` files, limits.
//!
//! Nothing here survives a crash: PID 1 that dies is a kernel panic, and the VMM's exit cause says so.

mod cmdline;
mod devices;
pub(crate) mod etc;
mod grow;
mod modules;
mod mounts;
mod network;
pub(crate) mod shutdown;

use std::{
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    process::ExitCode,
    time::{Duration, Instant},
};

use crate::{
    console::say,
    guest::{Guest, Machine},
    server,
};

pub(crate) use cmdline::CommandLine;

/// How long a device named on the command line may take to appear.
const DEVICE_WAIT: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
enum BootError {
    #[error("cannot {what}: {source}")]
    Step { what: String, source: std::io::Error },
    #[error("{device} did not appear within {} s: is the drive attached and its driver in /etc/aenv/modules?", DEVICE_WAIT.as_secs())]
    NoDevice { device: String },
}

impl BootError {
    fn step(what: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        Self::Step { what: what.into(), source: source.into() }
    }
}

/// Runs the machine until it is shut down.
pub(crate) fn as_init(started: Instant) -> ExitCode {
    match boot(started) {
        Ok(mut booted) => {
            let phases = std::mem::replace(&mut booted.phases, Phases::from(started));
            let any4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, aenv_envd_proto::PORT));
            let any6 = SocketAddr::from((Ipv6Addr::UNSPECIFIED, aenv_envd_proto::PORT));
            let guest = Guest::new(Machine::Ours, booted.line.init_sha256.clone());
            if let Err(err) = server::run(guest, &[any6, any4], &phases, move || booted.settle()) {
                say(&format!("cannot serve: {err}"));
            }
        }
        Err(err) => say(&format!("boot failed: {err}")),
    }
    shutdown::reset()
}

/// What the time until the port was open went into.
pub(crate) struct Phases {
    started: Instant,
    last: Instant,
    done: Vec<(&'static str, u128)>,
}

impl From<Instant> for Phases {
    fn from(started: Instant) -> Self {
        Self { started, last: started, done: Vec::new() }
    }
}

impl Phases {
    fn end(&mut self, phase: &'static str) {
        let now = Instant::now();
        self.done.push((phase, now.duration_since(self.last).as_millis()));
        self.last = now;
    }

    /// `12 ms`, followed by the phases where there were some.
    pub(crate) fn describe(&self) -> String {
        let total = format!("{} ms", self.started.elapsed().as_millis());
        if self.done.is_empty() {
            return total;
        }
        let phases: Vec<_> = self.done.iter().map(|(phase, millis)| format!("{phase} {millis}")).collect();
        format!("{total} ({})", phases.join(", "))
    }
}

struct Booted {
    phases: Phases,
    line: CommandLine,
    initramfs: Option<mounts::Initramfs>,
}

fn boot(started: Instant) -> Result<Booted, BootError> {
    let mut phases = Phases::from(started);
    mounts::early()?;
    let line = CommandLine::read().map_err(|err| BootError::step("read /proc/cmdline", err))?;
    etc::raise_limits();
    let events = devices::Events::subscribe();
    phases.end("mounts");
    modules::load_listed();
    phases.end("modules");
    devices::wait_for(&events, &line.root, DEVICE_WAIT)?;
    let initramfs = mounts::enter_root(&line.root)?;
    mounts::standard();
    match grow::grow_root(&line.root) {
        Ok(None) => {}
        Ok(Some(blocks)) => say(&format!("the root file system has {blocks} blocks now")),
        Err(err) => say(&format!("grow the root file system: {err}")),
    }
    phases.end("root");
    if let Some(name) = &line.hostname {
        etc::set_hostname(name);
    }
    if let Err(err) = network::up(&line, &events) {
        say(&format!("network: {err}"));
    }
    phases.end("network");
    Ok(Booted { phases, line, initramfs })
}

impl Booted {
    /// What can wait until the port is open.
    fn settle(self) {
        etc::write_files(&self.line);
        if let Some(initramfs) = self.initramfs {
            initramfs.free();
        }
    }
}
