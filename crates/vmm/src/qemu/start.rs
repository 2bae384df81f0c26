//! Starting a machine: the guarded steps of [`super`]'s table.

use super::{
    Inner,
    arguments::{self, Shape, Start},
    files::{Files, Kept, remove},
    kernel_words,
    vm::{self, Machine},
};
use crate::{BootSource, Error, MachineSpec, RestoreSource, Result, cgroup, process::Launch};
use std::{
    fs::{self, File},
    io,
    os::unix::fs::{FileTypeExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

/// Boots a kernel; the virtual CPU runs when this returns.
pub(super) async fn boot(qemu: &Arc<Inner>, spec: &MachineSpec, boot: &BootSource) -> Result<Machine> {
    let words = kernel_words::line(qemu.compatibility.tsc_khz, &boot.cmdline);
    if words.len() > kernel_words::LONGEST {
        return Err(refused(
            "boot",
            format!(
                "the kernel command line has {} bytes, {} fit: shorten BootSource::cmdline",
                words.len(),
                kernel_words::LONGEST
            ),
        ));
    }
    let plan = Plan::new(qemu, spec)?;
    let boot = boot.clone();
    let undo = Arc::clone(qemu);
    launch(plan, move |plan| {
        readable(&boot.kernel)?;
        readable(&boot.initramfs)?;
        create_memory(&boot.memory_file, plan.memory_bytes())?;
        let start = Start::Boot {
            kernel: &boot.kernel,
            initramfs: &boot.initramfs,
            words: &words,
            memory: &boot.memory_file,
        };
        let started = plan.start(&undo, start, &boot.memory_file, false);
        if started.is_err() {
            undone(&boot.memory_file, remove(&boot.memory_file));
        }
        started
    })
    .await
}

/// Restores device state over a private view of a memory image; the virtual CPUs run when this returns.
pub(super) async fn restore(qemu: &Arc<Inner>, spec: &MachineSpec, from: &RestoreSource) -> Result<Machine> {
    let plan = Plan::new(qemu, spec)?;
    let (state, image) = (from.state.clone(), from.memory_image.clone());
    let qemu = Arc::clone(qemu);
    launch(plan, move |plan| {
        readable(&state)?;
        let size = fs::metadata(&image).map_err(at("reading the memory image", &image))?.len();
        if size != plan.memory_bytes() {
            return Err(Error::Incompatible(format!(
                "its memory image {} has {size} bytes, the machine {} MiB",
                image.display(),
                plan.spec.memory_mib
            )));
        }
        plan.start(&qemu, Start::Restore { state: &state, memory: &image }, &image, true)
    })
    .await
}

/// Runs the blocking steps off the async workers, then waits for the virtual CPUs.
async fn launch(
    plan: Plan,
    steps: impl FnOnce(&Plan) -> Result<Started> + Send + 'static,
) -> Result<Machine> {
    let started = tokio::task::spawn_blocking(move || steps(&plan)).await.map_err(|error| Error::Io {
        context: "starting QEMU".to_owned(),
        source: io::Error::other(error),
    })??;
    let machine = started.watched()?;
    machine.wait_until_running().await?;
    Ok(machine)
}

struct Plan {
    spec: MachineSpec,
    files: Files,
    cgroups: Vec<PathBuf>,
}

/// A process nobody watches yet. Dropped, because its caller has gone away, it is ended.
struct Started(Option<(i32, Kept, Files)>);

impl Started {
    fn watched(mut self) -> Result<Machine> {
        let (pid, kept, files) =
            self.0.take().ok_or_else(|| refused("start", "the process was given away before".to_owned()))?;
        Machine::of(kept, files, pid)
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Some((pid, kept, files)) = self.0.take() {
            vm::discard(pid, &files, &kept);
        }
    }
}

impl Plan {
    fn new(qemu: &Inner, spec: &MachineSpec) -> Result<Self> {
        let refuse = |reason: String| Err(refused("machine spec", reason));
        if !(1..=64).contains(&spec.vcpus) {
            return refuse(format!("{} virtual CPUs; 1 to 64 are possible", spec.vcpus));
        }
        if !(64..=1 << 20).contains(&spec.memory_mib) {
            return refuse(format!("{} MiB of memory; 64 to 1048576 are possible", spec.memory_mib));
        }
        if spec.drives.len() > arguments::MOST_DRIVES {
            return refuse(format!("{} drives; {} are possible", spec.drives.len(), arguments::MOST_DRIVES));
        }
        let id_fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if spec.id.is_empty()
            || spec.id.starts_with('.')
            || spec.id.len() > 64
            || !spec.id.chars().all(id_fits)
        {
            return refuse(format!(
                "the id {:?}; 1 to 64 of letters, digits, `-`, `_` and `.` are possible",
                spec.id
            ));
        }
        for path in spec.drives.iter().map(|drive| &drive.path).chain([&spec.dir]) {
            if !path.is_absolute() || path.to_str().is_none() {
                return refuse(format!("the path {}; it must be absolute and UTF-8", path.display()));
            }
        }
        Ok(Self {
            spec: spec.clone(),
            files: Files::new(&spec.dir),
            cgroups: qemu.cgroups.for_machine(&spec.id),
        })
    }

    fn memory_bytes(&self) -> u64 {
        u64::from(self.spec.memory_mib) << 20
    }

    /// Makes the machine's files and its process. On failure nothing of them is left but QEMU's log.
    fn start(&self, qemu: &Inner, start: Start<'_>, memory: &Path, restored: bool) -> Result<Started> {
        let kept = Kept {
            id: self.spec.id.clone(),
            memory: memory.to_owned(),
            memory_mib: self.spec.memory_mib,
            restored,
            cgroups: self.cgroups.clone(),
        };
        let pid =
            self.spawn(qemu, start, &kept).inspect_err(|_| undone(self.files.dir(), self.files.clear()))?;
        // After the start, while QEMU loads: entering a cgroup can take the kernel some milliseconds.
        cgroup::enter(&self.cgroups, pid, self.spec.memory_mib);
        // Short of memory the host should lose a sandbox rather than the server that runs them all.
        if let Err(error) = fs::write(format!("/proc/{pid}/oom_score_adj"), "500") {
            tracing::debug!(pid, %error, "a monitor's OOM score was not raised");
        }
        Ok(Started(Some((pid, kept, self.files.clone()))))
    }

    fn spawn(&self, qemu: &Inner, start: Start<'_>, kept: &Kept) -> Result<i32> {
        let dir = self.files.dir();
        self.files.write(kept).map_err(at("writing qemu.json in", dir))?;
        let log = self.files.open_log().map_err(at("opening qemu.log in", dir))?;
        let mut pass = vec![self.files.listen().map_err(at("making the control socket in", dir))?];
        if let Start::Restore { state, .. } = start
            && !arguments::takes_file(qemu.version)
        {
            pass.push(File::open(state).map_err(at("opening the device state", state))?.into());
        }
        let netns = match &self.spec.net {
            Some(net) => {
                Some(File::open(&net.netns).map_err(at("opening the network namespace", &net.netns))?.into())
            }
            None => None,
        };
        let console = self.files.console();
        let block_devices = self.block_devices()?;
        let shape = Shape {
            version: qemu.version,
            cpu: &qemu.compatibility.cpu,
            sandbox: qemu.sandbox,
            console: &console,
            block_devices: &block_devices,
        };
        let arguments = arguments::build(&self.spec, &shape, start);
        tracing::debug!(id = %self.spec.id, ?arguments, "starting QEMU");
        Launch { program: qemu.binary.clone(), arguments, netns, log, pass }
            .start()
            .map_err(at("starting", &qemu.binary))
    }

    fn block_devices(&self) -> Result<Vec<bool>> {
        let kind = |path: &PathBuf| {
            Ok(fs::metadata(path).map_err(at("reading the drive", path))?.file_type().is_block_device())
        };
        self.spec.drives.iter().map(|drive| kind(&drive.path)).collect()
    }
}

/// A sparse file; one that exists is refused, because another machine may have it mapped.
fn create_memory(path: &Path, bytes: u64) -> Result<()> {
    let create = || {
        let file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
        file.set_len(bytes).inspect_err(|_| undone(path, remove(path)))
    };
    create().map_err(at("creating the memory file", path))
}

fn readable(path: &Path) -> Result<()> {
    File::open(path).map(drop).map_err(at("opening", path))
}

fn undone(path: &Path, result: io::Result<()>) {
    if let Err(error) = result {
        tracing::warn!(path = %path.display(), %error, "a failed start left this behind");
    }
}

fn refused(command: &str, reason: String) -> Error {
    Error::Refused { command: command.to_owned(), reason }
}

fn at<'a>(what: &'a str, path: &'a Path) -> impl Fn(io::Error) -> Error + 'a {
    move |source| Error::Io { context: format!("{what} {}", path.display()), source }
}
