//! The KVM lab: a machine with a real ublk driver and a real /dev/kvm, whatever this host has.
//!
//! ```text
//!   host                                                      lab (QEMU, TCG, q35, AMD with SVM)
//!   cargo xtask lab ──► root.cpio: this program as /init,  ──► inside::run: mounts, modules, network
//!                       programs, their libraries, modules      │
//!        stdout  ◄───────────── virtio-serial "lab.output" ◄────┤ the command's output, as it comes
//!        "up", "exit N" ◄────── virtio-serial "lab.control" ◄───┘ then the machine ends
//!        console.log ◄───────── serial port (kernel messages)
//! ```
//! Failure paths: no answer before the deadline, QEMU's own end without "exit", a panic: each ends with the last
//! lines of the console and this program's failure. Only its own QEMU is ended, also when this program is killed.
//!
//! Nothing is mounted on the host and nothing needs root. Everything is in memory unless `--disk` asks for a scratch
//! disk, which appears at /data.

mod inside;
mod machine;
mod modules;
mod root;
mod suites;

use crate::run;
use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::time::{Duration, Instant};

pub(crate) use inside::run as run_as_init;

/// What `cargo xtask lab` takes.
#[derive(clap::Args)]
#[group(id = "what", multiple = false)]
pub(crate) struct What {
    /// Build a suite of tests and run it inside.
    #[arg(long, value_enum)]
    test: Option<suites::Suite>,
    /// An interactive shell inside; leave it to end the machine.
    #[arg(long)]
    shell: bool,
    /// Run this with `sh -c` inside.
    #[arg(long, value_name = "TEXT")]
    command: Option<String>,
}

/// What `cargo xtask lab` takes.
#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    what: What,
    /// Take this program along, with its libraries; by name or path, any number of times.
    #[arg(long, value_name = "PROGRAM")]
    with: Vec<String>,
    /// Take this file or folder along as /lab/NAME, any number of times.
    #[arg(long, value_name = "PATH")]
    file: Vec<PathBuf>,
    /// Memory in MiB. What is taken along counts twice while the machine starts.
    #[arg(long, default_value_t = 2048)]
    memory: u32,
    /// Processors.
    #[arg(long, default_value_t = 2)]
    cpus: u32,
    /// Size in MiB of an empty ext4 disk at /data; sparse, deleted at the end.
    #[arg(long, value_name = "MIB")]
    disk: Option<u32>,
    /// A network card behind QEMU's user network (10.0.2.15, gateway and DNS 10.0.2.2 and .3).
    #[arg(long)]
    net: bool,
    /// Lead a TCP port of the host's loopback into the machine: HOST:INSIDE. Implies --net.
    #[arg(long, value_name = "PORTS")]
    forward: Vec<String>,
    /// Seconds after which the machine is ended.
    #[arg(long, default_value_t = 600)]
    deadline: u64,
    /// Keep the working directory (root, console log, disk) and say where it is.
    #[arg(long)]
    keep: bool,
}

/// Runs the lab and returns the command's exit code.
pub(crate) fn run(options: &Options) -> Result<u8> {
    let started = Instant::now();
    let qemu = machine::find()?;
    let workspace = run::workspace()?;
    let mut load = root::Load::default();
    let command = match (&options.what, options.what.test) {
        (_, Some(suite)) => suites::prepare(suite, &workspace, &mut load)?,
        (What { shell: true, .. }, _) => inside::Command::shell(),
        (What { command: Some(text), .. }, _) => inside::Command::text(text),
        _ => bail!("say what the lab shall do: --test SUITE, --command TEXT or --shell"),
    };
    for program in root::ALWAYS.iter().copied().chain(options.with.iter().map(String::as_str)) {
        load.program(program)?;
    }
    for path in &options.file {
        load.path(path)?;
    }
    let kernel = modules::obtain(&workspace)?;
    let target = workspace.join("target");
    let work =
        tempfile::Builder::new().prefix("lab-").tempdir_in(&target).context("making a working directory")?;
    let archive = load.archive(&kernel, &command)?;
    let size = archive.len();
    std::fs::write(work.path().join("root.cpio"), archive)
        .context("writing the lab's root; is the disk full?")?;
    run::say(&format!(
        "lab: Linux {}, root {} MB, made in {:.1} s",
        kernel.release,
        size / 1_000_000,
        started.elapsed().as_secs_f64()
    ));

    let plan = machine::Plan {
        qemu,
        kernel: kernel.vmlinux,
        work: work.path().to_owned(),
        memory: options.memory,
        cpus: options.cpus,
        disk: options.disk.or(options.what.test.and_then(suites::Suite::disk)),
        net: options.net || !options.forward.is_empty(),
        forward: options.forward.clone(),
        interactive: options.what.shell,
        deadline: Duration::from_secs(options.deadline),
    };
    let ended = machine::run(&plan);
    if options.keep {
        run::say(&format!("lab: kept {}", work.keep().display()));
    }
    let code = ended?;
    run::say(&format!("lab: exit {code} after {:.1} s", started.elapsed().as_secs_f64()));
    Ok(code)
}
