//! QEMU with the lab in it: started, listened to, ended.

use crate::run;
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

const PROGRAM: &str = "qemu-system-x86_64";
/// Time for the kernel and /init; 5 to 15 s are usual.
const BOOT: Duration = Duration::from_secs(120);
/// Lines of the console shown after a failure.
const LAST_LINES: usize = 25;

/// A machine to be run once.
pub(super) struct Plan {
    pub(super) qemu: PathBuf,
    pub(super) kernel: PathBuf,
    /// Holds root.cpio; console log, socket and disk are made in it.
    pub(super) work: PathBuf,
    pub(super) memory: u32,
    pub(super) cpus: u32,
    pub(super) disk: Option<u32>,
    pub(super) net: bool,
    pub(super) forward: Vec<String>,
    pub(super) interactive: bool,
    pub(super) deadline: Duration,
}

enum Event {
    Up,
    Exit(u8),
    /// The command's output ended, which it does with QEMU.
    Ended,
}

/// The emulator, or what to install.
pub(super) fn find() -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|directory| directory.join(PROGRAM))
        .find(|path| path.is_file())
        .with_context(|| {
            format!(
                "`{PROGRAM}` is not installed; on Debian and Ubuntu it comes with the package qemu-system-x86"
            )
        })
}

/// Runs it to its end; the command's exit code.
pub(super) fn run(plan: &Plan) -> Result<u8> {
    enough_memory(plan.memory)?;
    let started = Instant::now();
    let control = UnixListener::bind(plan.work.join("control")).context("making the lab's control socket")?;
    let mut command = Command::new(&plan.qemu);
    command.args(arguments(plan)?).stderr(Stdio::piped());
    if plan.interactive {
        command.stdin(Stdio::inherit()).stdout(Stdio::inherit());
    } else {
        // Held open to the end: at the end of its input QEMU closes the output's port, and writers inside would wait.
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
    }
    // SAFETY: one system call that takes no lock and allocates nothing.
    unsafe {
        command.pre_exec(|| {
            // However this program ends, its machine ends too.
            Ok(rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?)
        });
    }
    let mut child = command.spawn().with_context(|| format!("starting {}", plan.qemu.display()))?;
    let (events, incoming) = channel();
    forward_output(&mut child, &events);
    let mut complaints = child.stderr.take();
    listen(control, events);

    let ended = follow(&incoming, started, plan.deadline, plan.interactive);
    // It ends by itself after "exit"; otherwise there is nothing more to wait for.
    if ended.is_err() {
        let _ended_already = child.kill();
    }
    child.wait().context("waiting for QEMU")?;
    ended.map_err(|error| {
        let mut words = String::new();
        if let Some(complaints) = &mut complaints {
            let _best_effort = complaints.take(4096).read_to_string(&mut words);
        }
        let console = fs::read(plan.work.join("console.log")).unwrap_or_default();
        let console = String::from_utf8_lossy(&console);
        let lines: Vec<&str> = console.lines().collect();
        let last = lines[lines.len().saturating_sub(LAST_LINES)..].join("\n");
        error.context(format!("the lab failed. QEMU says: {}\nThe console's end:\n{last}\n", words.trim()))
    })
}

fn follow(incoming: &Receiver<Event>, started: Instant, patience: Duration, interactive: bool) -> Result<u8> {
    let (mut up, mut code, mut deadline) = (false, None, started + BOOT.min(patience));
    loop {
        match incoming.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(Event::Up) => {
                run::say(&format!("lab: up after {:.1} s", started.elapsed().as_secs_f64()));
                (up, deadline) = (true, started + patience);
            }
            Ok(Event::Exit(number)) => code = Some(number),
            Ok(Event::Ended) => return code.context("the machine ended before the command did"),
            // Both senders are gone: QEMU closed the control channel too.
            Err(RecvTimeoutError::Disconnected) => {
                return code.context("the machine ended before the command did");
            }
            Err(RecvTimeoutError::Timeout) if !up => {
                bail!("the machine was not up after {} s", BOOT.as_secs())
            }
            Err(RecvTimeoutError::Timeout) if interactive => deadline += patience,
            Err(RecvTimeoutError::Timeout) => {
                bail!("the command did not end within {} s; --deadline allows more", patience.as_secs())
            }
        }
    }
}

fn forward_output(child: &mut Child, events: &Sender<Event>) {
    let Some(mut output) = child.stdout.take() else { return };
    let events = events.clone();
    std::thread::spawn(move || {
        let mut buffer = [0; 16 << 10];
        let mut to = std::io::stdout();
        while let Ok(many @ 1..) = output.read(&mut buffer) {
            // A closed stdout is no reason to end the tests.
            let _closed = to.write_all(&buffer[..many]).and_then(|()| to.flush());
        }
        let _nobody_waits = events.send(Event::Ended);
    });
}

/// Turns what /init says into events. Ends with QEMU, or never connects when QEMU did not start.
fn listen(control: UnixListener, events: Sender<Event>) {
    std::thread::spawn(move || {
        let Ok((stream, _)) = control.accept() else { return };
        for line in BufReader::new(stream).lines() {
            let Ok(line) = line else { break };
            let event = match line.split_once(' ') {
                _ if line == "up" => Event::Up,
                Some(("exit", code)) => Event::Exit(code.parse().unwrap_or(u8::MAX)),
                _ => continue,
            };
            if events.send(event).is_err() {
                break;
            }
        }
    });
}

fn arguments(plan: &Plan) -> Result<Vec<String>> {
    let file = |name: &str| plan.work.join(name).display().to_string();
    let mut words: Vec<String> = [
        "-nodefaults -no-user-config -display none -no-reboot",
        "-M q35 -accel tcg,thread=multi -cpu max,+svm,+npt",
        "-device virtio-rng-pci -device virtio-serial-pci",
        "-chardev stdio,id=output,signal=off",
        if plan.interactive {
            "-device virtconsole,chardev=output"
        } else {
            "-device virtserialport,chardev=output,name=lab.output"
        },
        "-device virtserialport,chardev=control,name=lab.control",
    ]
    .join(" ")
    .split(' ')
    .map(str::to_owned)
    .collect();
    let mut add = |option: &str, value: String| words.extend([option.to_owned(), value]);
    add("-m", format!("{}M", plan.memory));
    add("-smp", plan.cpus.to_string());
    add("-kernel", plan.kernel.display().to_string());
    add("-initrd", file("root.cpio"));
    add("-append", CMDLINE.to_owned());
    add("-serial", format!("file:{}", file("console.log")));
    add("-chardev", format!("socket,id=control,path={}", file("control")));
    if let Some(mib) = plan.disk {
        let disk = plan.work.join("disk");
        fs::File::create(&disk)?.set_len(u64::from(mib) << 20).context("making the scratch disk")?;
        run::output(Command::new("mke2fs").args(["-q", "-t", "ext4", "-F"]).arg(&disk))
            .context("formatting the scratch disk (mke2fs comes with e2fsprogs)")?;
        add(
            "-drive",
            format!("file={},format=raw,if=none,id=disk,cache=unsafe,discard=unmap", disk.display()),
        );
        add("-device", "virtio-blk-pci,drive=disk".into());
    }
    if plan.net {
        let mut net = "user,id=net".to_owned();
        for ports in &plan.forward {
            let pair = ports
                .split_once(':')
                .and_then(|(a, b)| Some((a.parse::<u16>().ok()?, b.parse::<u16>().ok()?)));
            let (host, inside) =
                pair.with_context(|| format!("--forward {ports}: write HOST:INSIDE, two ports"))?;
            net += &format!(",hostfwd=tcp:127.0.0.1:{host}-:{inside}");
        }
        add("-netdev", net);
        add("-device", "virtio-net-pci,netdev=net".into());
    }
    Ok(words)
}

/// Self-tests, mitigations and console output cost an emulated machine seconds.
const CMDLINE: &str = "console=ttyS0 quiet panic=-1 reboot=t tsc=reliable mitigations=off norandmaps nokaslr \
    cryptomgr.notests random.trust_cpu=on audit=0 lsm=capability no_timer_check nowatchdog nosoftlockup \
    module.sig_enforce=0";

fn enough_memory(mib: u32) -> Result<()> {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let available = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:")?.split_whitespace().next()?.parse::<u64>().ok());
    if let Some(kib) = available {
        ensure!(
            kib >> 10 > u64::from(mib),
            "the lab wants {mib} MiB of memory and {} MiB are available; end something or pass --memory",
            kib >> 10
        );
    }
    Ok(())
}
