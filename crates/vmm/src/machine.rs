//! What a machine is made of, and how it is found again. Plain data, no I/O.

use serde::{Deserialize, Serialize};
use std::{fmt, path::PathBuf};

/// The kinds of monitor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Backend {
    /// QEMU `microvm`, with TCG where KVM can't run a stock kernel.
    Qemu,
    /// Firecracker on KVM.
    Firecracker,
    /// The in-process fake used to inject faults in tests.
    Fake,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Qemu => "qemu",
            Self::Firecracker => "firecracker",
            Self::Fake => "fake",
        })
    }
}

/// The parts of a machine that a snapshot's device state depends on (in this order) and where its files go.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MachineSpec {
    /// Unique on this node for the life of the process; names sockets and log lines.
    pub id: String,
    /// Virtual CPUs, 1–64.
    pub vcpus: u8,
    /// Guest memory in MiB.
    pub memory_mib: u32,
    /// Block devices, in order: the first is `/dev/vda`.
    pub drives: Vec<Drive>,
    /// The one network device, when there is one.
    pub net: Option<NetDevice>,
    /// Directory of this machine's sockets and console log; exists, belongs to this machine alone.
    pub dir: PathBuf,
}

/// A raw block device backed by a file or an export.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Drive {
    /// Path of a file or block device holding the raw disk.
    pub path: PathBuf,
    /// Refuse writes.
    pub read_only: bool,
}

/// A tap inside a network namespace.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NetDevice {
    /// Path of a network namespace (bind mount or /proc/…/ns/net); the monitor runs inside.
    pub netns: PathBuf,
    /// Name of an existing tap device in it.
    pub tap: String,
    /// Guest hardware address, `aa:bb:cc:dd:ee:ff`.
    pub mac: String,
}

/// What a cold boot starts from.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BootSource {
    /// Uncompressed ELF kernel.
    pub kernel: PathBuf,
    /// initramfs holding the agent.
    pub initramfs: PathBuf,
    /// Words appended to the backend's own kernel command line.
    pub cmdline: Vec<String>,
    /// Guest memory file; created sparse with the size of guest memory, mapped shared. Becomes the memory image.
    pub memory_file: PathBuf,
}

/// What a restore starts from.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RestoreSource {
    /// Device state written by [`crate::Vm::save_state`].
    pub state: PathBuf,
    /// Memory image of exactly the guest's memory size; mapped private, never written.
    pub memory_image: PathBuf,
    /// What the snapshot recorded.
    pub made_by: Compatibility,
}

/// What must agree between the maker of a snapshot and the host that restores it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compatibility {
    /// Monitor kind.
    pub backend: Backend,
    /// Monitor version, as the program prints it.
    pub version: String,
    /// CPU model or template exposed to the guest.
    pub cpu: String,
    /// `kvm`, `pvm` or `tcg`.
    pub accel: String,
    /// Host TSC frequency in kHz the guest was told; 0 when it was told none.
    pub tsc_khz: u64,
}

/// A run of guest memory in the monitor's address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryRegion {
    /// Process whose address space it is.
    pub pid: i32,
    /// Host virtual address.
    pub host_addr: u64,
    /// Offset in the memory image.
    pub image_offset: u64,
    /// Bytes.
    pub len: u64,
}

/// How to find a machine again after a restart of the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmRecord {
    /// Monitor kind.
    pub backend: Backend,
    /// Machine id, as in [`MachineSpec::id`].
    pub id: String,
    /// Process id of the monitor.
    pub pid: i32,
    /// Start time of that process in clock ticks since boot (field 22 of `/proc/<pid>/stat`): pid plus this is unique.
    pub start_time: u64,
    /// Directory given in [`MachineSpec::dir`].
    pub dir: PathBuf,
    /// Guest memory in MiB.
    pub memory_mib: u32,
    /// Whether memory is a private mapping (restored) or the shared file (booted).
    pub restored: bool,
}

/// How a machine ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// The cause as far as it can be told.
    pub cause: ExitCause,
    /// One line of evidence: exit status, signal, monitor's words or the console's last.
    pub detail: String,
}

/// Causes of an end, in the words of tombstones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ExitCause {
    /// We killed it.
    Killed,
    /// The guest powered itself off or rebooted.
    GuestShutdown,
    /// The guest kernel panicked.
    GuestPanic,
    /// The guest ran out of memory in a way that ended it.
    GuestOom,
    /// The host's kernel killed the monitor for memory.
    HostOom,
    /// The monitor died by itself or by a foreign signal.
    VmmCrash,
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.cause, self.detail)
    }
}
