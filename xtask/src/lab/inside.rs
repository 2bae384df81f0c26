//! This program as the lab's /init: makes a usable system, runs the command, ends the machine.

use anyhow::{Context, Result};
use rustix::mount::{MountFlags, mount};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// Where [`Plan`] lies inside.
pub(super) const PLAN: &str = "/etc/lab.json";
/// Answered when the lab itself, not the command, failed.
const LAB_FAILED: u8 = 125;

/// What is run inside.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Command {
    pub(super) argv: Vec<String>,
    pub(super) env: Vec<(String, String)>,
    /// Whether it gets the terminal of the person outside.
    pub(super) terminal: bool,
}

impl Command {
    pub(super) fn shell() -> Self {
        Self { argv: vec!["/bin/sh".into(), "-i".into()], env: Vec::new(), terminal: true }
    }

    pub(super) fn text(text: &str) -> Self {
        Self { argv: vec!["/bin/sh".into(), "-c".into(), text.into()], env: Vec::new(), terminal: false }
    }
}

/// What /init is told.
#[derive(Serialize, Deserialize)]
pub(super) struct Plan {
    pub(super) command: Command,
    pub(super) modules: Vec<String>,
}

/// Never returns: PID 1 has nowhere to return to.
pub(crate) fn run() -> ! {
    let code = match work() {
        Ok(code) => code,
        Err(error) => {
            // The console: the one place that is there from the start.
            crate::run::say(&format!("lab: {error:#}"));
            LAB_FAILED
        }
    };
    if let Ok(mut control) = port("lab.control") {
        let _machine_ends_anyway = writeln!(control, "exit {code}");
    }
    rustix::fs::sync();
    let _returns_only_when_refused = rustix::system::reboot(rustix::system::RebootCommand::Restart);
    std::process::exit(i32::from(code))
}

fn work() -> Result<u8> {
    for (source, target, kind) in [
        ("proc", "/proc", "proc"),
        ("sysfs", "/sys", "sysfs"),
        ("devtmpfs", "/dev", "devtmpfs"),
        ("tmpfs", "/tmp", "tmpfs"),
        ("tmpfs", "/run", "tmpfs"),
        ("cgroup2", "/sys/fs/cgroup", "cgroup2"),
        ("devpts", "/dev/pts", "devpts"),
        ("tmpfs", "/dev/shm", "tmpfs"),
    ] {
        fs::create_dir_all(target)?;
        mount(source, target, kind, MountFlags::empty(), None)
            .with_context(|| format!("mounting {target}"))?;
    }
    let plan: Plan = serde_json::from_slice(&fs::read(PLAN)?)?;
    for name in &plan.modules {
        let module = fs::read(format!("/modules/{name}.ko"))?;
        if let Err(error) = rustix::system::init_module(&module, c"") {
            crate::run::say(&format!("lab: module {name}: {error}"));
        }
    }
    if Path::new("/dev/vda").exists() {
        mount("/dev/vda", "/data", "ext4", MountFlags::NOATIME, None).context("mounting the scratch disk")?;
    }
    network();
    writeln!(port("lab.control")?, "up")?;
    let code = execute(&plan.command)?;
    // What it wrote is out only when the host has read it; closing waits for that.
    Ok(code)
}

fn execute(command: &Command) -> Result<u8> {
    let (program, arguments) = command.argv.split_first().context("the command is empty")?;
    let mut child = std::process::Command::new(program);
    child.args(arguments).current_dir("/tmp").env_clear();
    child.env("PATH", "/usr/bin:/usr/sbin:/bin:/sbin").env("HOME", "/root").env("TERM", "linux");
    child.envs(command.env.iter().map(|(name, value)| (name, value)));
    let output = if command.terminal {
        File::options().read(true).write(true).open("/dev/hvc0")?
    } else {
        port("lab.output")?
    };
    if command.terminal {
        child.stdin(output.try_clone()?);
        let terminal = output.try_clone()?;
        // SAFETY: two system calls that take no lock and allocate nothing.
        unsafe {
            child.pre_exec(move || {
                rustix::process::setsid()?;
                Ok(rustix::process::ioctl_tiocsctty(&terminal)?)
            });
        }
    } else {
        child.stdin(Stdio::null());
    }
    let mut child = child
        .stdout(output.try_clone()?)
        .stderr(output)
        .spawn()
        .with_context(|| format!("starting {program}"))?;
    let status = child.wait()?;
    let signalled = status.signal().map(|signal| 128 + signal);
    Ok(u8::try_from(status.code().or(signalled).unwrap_or(255)).unwrap_or(255))
}

/// A virtio-serial port by the name the host gave it.
fn port(name: &str) -> Result<File> {
    let ports = fs::read_dir("/sys/class/virtio-ports").context("the machine has no virtio-serial ports")?;
    for entry in ports.flatten() {
        if fs::read_to_string(entry.path().join("name")).is_ok_and(|text| text.trim() == name) {
            let node = PathBuf::from("/dev").join(entry.file_name());
            return File::options()
                .write(true)
                .open(&node)
                .with_context(|| format!("opening {}", node.display()));
        }
    }
    anyhow::bail!("the machine has no port named {name}")
}

/// Best effort: tests that use the network say what they miss.
fn network() {
    let mut lines = vec!["link set lo up"];
    if Path::new("/sys/class/net/eth0").exists() {
        lines.extend([
            "addr add 10.0.2.15/24 dev eth0",
            "link set eth0 up",
            "route add default via 10.0.2.2",
        ]);
        let _offline_then = fs::write("/etc/resolv.conf", "nameserver 10.0.2.3\n");
    }
    for line in lines {
        let status = std::process::Command::new("/usr/bin/ip").args(line.split(' ')).status();
        if !status.is_ok_and(|status| status.success()) {
            crate::run::say(&format!("lab: `ip {line}` failed"));
        }
    }
}
