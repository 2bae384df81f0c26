//! Virtual machine monitors behind one trait.
//!
//! A [`Vmm`] starts machines, cold ([`Vmm::boot`]) or from a snapshot ([`Vmm::restore`]), and finds again those
//! that outlived the server ([`Vmm::adopt`]). A [`Vm`] is one running machine.
//!
//! ```text
//!            boot / restore
//!   (none) ───────────────► Running ◄──────► Paused ── save_state ──► Paused
//!                              │   resume/pause │
//!                              └──── kill, guest end, crash ───► Exited(cause)
//! ```
//!
//! Failure paths: a start that fails leaves no process and no socket behind. A monitor that dies is noticed through
//! its pidfd, whether it is our child or was adopted, and its [`Exit`] is published once. What survives a crash of
//! the server: the monitor itself (own session), its control socket, its console file; [`VmRecord`] finds them.
//!
//! This crate knows no HTTP, images or networks: drives are paths, the network is a namespace path and a tap name.

mod cgroup;
mod compatibility;
mod console;
pub mod fake;
pub mod host;
mod kernel_log;
mod machine;
mod maps;
mod process;
pub mod qemu;
mod tsc;

pub use machine::{
    Backend, BootSource, Compatibility, Drive, Exit, ExitCause, MachineSpec, MemoryRegion, NetDevice,
    RestoreSource, VmRecord,
};

use async_trait::async_trait;
use std::{path::Path, sync::Arc, time::Duration};
use tokio::sync::watch;

/// Why an operation on a machine failed. Messages say what to do next.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The monitor program is missing or unusable on this host.
    #[error("{backend} can't be used here: {reason}; run `aenv doctor` for the remedy")]
    Unavailable {
        /// Which backend.
        backend: Backend,
        /// What is missing.
        reason: String,
    },
    /// A snapshot was made by something this host can't restore.
    #[error("this snapshot can't be restored here: {0}")]
    Incompatible(String),
    /// The machine is gone.
    #[error("the machine has ended: {0}")]
    Exited(Exit),
    /// The monitor refused a command.
    #[error("the monitor refused `{command}`: {reason}")]
    Refused {
        /// The command as named by the monitor's protocol.
        command: String,
        /// Its own words.
        reason: String,
    },
    /// A step took longer than its deadline; the machine was killed if it was being started.
    #[error("{step} did not finish within {limit:?}")]
    Deadline {
        /// What was being done.
        step: &'static str,
        /// The bound.
        limit: Duration,
    },
    /// The operating system refused something.
    #[error("{context}: {source}")]
    Io {
        /// What was being done, with the path concerned.
        context: String,
        /// The cause.
        source: std::io::Error,
    },
}

/// Shorthand for this crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A kind of virtual machine monitor, ready to start machines.
#[async_trait]
pub trait Vmm: Send + Sync + 'static {
    /// What a snapshot taken now by this monitor on this host records, and what a restore is checked against.
    fn compatibility(&self) -> Compatibility;

    /// Boots a kernel into a new machine whose memory is the (created) file named in `boot`, shared.
    /// Returns as soon as the virtual CPU runs; readiness is the guest agent's to tell.
    async fn boot(&self, spec: &MachineSpec, boot: &BootSource) -> Result<Arc<dyn Vm>>;

    /// Restores a machine from saved device state over a private mapping of a memory image. The machine runs when
    /// this returns. Refuses what [`Compatibility`] doesn't allow with [`Error::Incompatible`], before it starts anything.
    async fn restore(&self, spec: &MachineSpec, from: &RestoreSource) -> Result<Arc<dyn Vm>>;

    /// Takes over a machine that a former server process started. `None` when that process is gone (or its pid now
    /// belongs to something else).
    async fn adopt(&self, record: &VmRecord) -> Result<Option<Arc<dyn Vm>>>;
}

/// One machine. Dropping the handle leaves the machine alone: machines outlive the server.
#[async_trait]
pub trait Vm: Send + Sync + 'static {
    /// What must be written down to find this machine again.
    fn record(&self) -> VmRecord;

    /// Stops the virtual CPUs and drains disk I/O: afterwards drives and memory are still.
    async fn pause(&self) -> Result<()>;

    /// Lets the virtual CPUs run on.
    async fn resume(&self) -> Result<()>;

    /// Writes the device state, without memory, of a paused machine to `path` (created or replaced). It stays resumable.
    async fn save_state(&self, path: &Path) -> Result<()>;

    /// Where guest memory lies in the monitor's address space, by guest-image offset. Anonymous pages in these
    /// regions are exactly what the guest changed since a restore.
    async fn memory(&self) -> Result<Vec<MemoryRegion>>;

    /// Watch for the end of the machine: `None` while it lives, then its exit, for ever.
    fn exit(&self) -> watch::Receiver<Option<Exit>>;

    /// Ends the machine, whatever its state, and returns when the process is gone. Never needs the guest.
    async fn kill(&self) -> Result<Exit>;
}
