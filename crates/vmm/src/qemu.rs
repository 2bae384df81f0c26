//! The backend for machines without a usable KVM: QEMU's `microvm` under its TCG emulator.
//!
//! ```text
//!   boot:    memory file ◄─shared─ QEMU ◄─ kernel, initramfs        restore: image ◄─private─ QEMU ◄─ device state
//! ```
//!
//! Steps of a start, and what undoes them:
//!
//! | Step | Undone by |
//! |---|---|
//! | refuse what can't work: bad spec, foreign snapshot | nothing was done |
//! | memory file (boot only) | removed |
//! | `qemu.json`, listening control socket | removed |
//! | process in its namespace, cgroup | killed by pidfd; its watcher removes socket and cgroup |
//! | control connection, virtual CPUs running | the same |
//!
//! A server that dies anywhere in between leaves at most a running process whose command line names its directory:
//! [`Qemu::survivors`] finds it.

mod arguments;
mod end;
mod files;
mod kernel_words;
pub(crate) mod probe;
mod qmp;
mod start;
mod survivors;
mod vm;

use crate::{
    Backend, BootSource, Compatibility, Error, Exit, MachineSpec, RestoreSource, Result, Vm, VmRecord, Vmm,
    cgroup, tsc,
};
use async_trait::async_trait;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// The CPU a guest is shown unless [`Options::cpu`] says otherwise: old enough to have no AVX, which is slow to
/// emulate, and with the host's random generator.
pub const DEFAULT_CPU: &str = "Nehalem-v1,+rdrand";

/// How to find and run QEMU.
#[derive(Debug, Clone)]
pub struct Options {
    /// The program; `None` looks for `qemu-system-x86_64` in PATH.
    pub qemu_binary: Option<PathBuf>,
    /// Value of `-cpu`; snapshots restore only where it is the same. `None` is [`DEFAULT_CPU`].
    pub cpu: Option<String>,
    /// Cgroup directory under which each machine gets its own; `None` uses `aenv` under the host's hierarchies where
    /// they are writable.
    pub cgroup: Option<PathBuf>,
    /// Confine QEMU with its own seccomp filters.
    pub sandbox: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { qemu_binary: None, cpu: None, cgroup: None, sandbox: true }
    }
}

/// QEMU on this host.
#[derive(Debug, Clone)]
pub struct Qemu {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    binary: PathBuf,
    version: (u32, u32),
    firmware: PathBuf,
    sandbox: bool,
    cgroups: cgroup::Parents,
    compatibility: Compatibility,
}

impl Qemu {
    /// Looks for QEMU and measures what guests have to be told. Takes some 50 ms.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with what is missing.
    pub async fn probe(options: Options) -> Result<Self> {
        let unavailable = |reason| Error::Unavailable { backend: Backend::Qemu, reason };
        let found = probe::find(options.qemu_binary.as_deref()).await.map_err(unavailable)?;
        let (tsc_khz, cgroups) = tokio::task::spawn_blocking(move || {
            let cgroups = match &options.cgroup {
                Some(dir) => cgroup::Parents::at(dir).map_err(|source| Error::Io {
                    context: format!("using cgroup {}", dir.display()),
                    source,
                })?,
                None => cgroup::Parents::detect(Path::new("/sys/fs/cgroup")),
            };
            Ok::<_, Error>((tsc::khz(), cgroups))
        })
        .await
        .map_err(|error| unavailable(format!("probing failed: {error}")))??;
        let compatibility = Compatibility {
            backend: Backend::Qemu,
            version: found.version,
            cpu: options.cpu.unwrap_or_else(|| DEFAULT_CPU.to_owned()),
            accel: "tcg".to_owned(),
            tsc_khz,
        };
        tracing::info!(binary = %found.binary.display(), ?compatibility, "QEMU found");
        Ok(Self {
            inner: Arc::new(Inner {
                binary: found.binary,
                version: found.numbers,
                firmware: found.firmware,
                sandbox: options.sandbox,
                cgroups,
                compatibility,
            }),
        })
    }

    /// The program in use.
    #[must_use]
    pub fn binary(&self) -> &Path {
        &self.inner.binary
    }

    /// The firmware in use; it belongs to the program's version.
    #[must_use]
    pub fn firmware(&self) -> &Path {
        &self.inner.firmware
    }

    /// Machines of this backend that live and whose directory lies under `root`, whether or not anybody wrote down a
    /// record: a server that was killed in the middle of a start finds what it left. Blocks for milliseconds.
    ///
    /// # Errors
    /// When /proc can't be listed.
    pub fn survivors(&self, root: &Path) -> Result<Vec<VmRecord>> {
        survivors::find(root)
            .map_err(|source| Error::Io { context: "looking for machines in /proc".to_owned(), source })
    }

    /// How a machine ended that [`Vmm::adopt`] found gone, as far as console, log and the host kernel's log tell. Blocks
    /// for milliseconds.
    #[must_use]
    pub fn post_mortem(record: &VmRecord) -> Exit {
        vm::post_mortem(record)
    }
}

#[async_trait]
impl Vmm for Qemu {
    fn compatibility(&self) -> Compatibility {
        self.inner.compatibility.clone()
    }

    async fn boot(&self, spec: &MachineSpec, boot: &BootSource) -> Result<Arc<dyn Vm>> {
        Ok(Arc::new(start::boot(&self.inner, spec, boot).await?))
    }

    async fn restore(&self, spec: &MachineSpec, from: &RestoreSource) -> Result<Arc<dyn Vm>> {
        self.inner.compatibility.accepts(&from.made_by).map_err(Error::Incompatible)?;
        Ok(Arc::new(start::restore(&self.inner, spec, from).await?))
    }

    async fn adopt(&self, record: &VmRecord) -> Result<Option<Arc<dyn Vm>>> {
        Ok(vm::Machine::adopt(record).await?.map(|machine| Arc::new(machine) as Arc<dyn Vm>))
    }
}
