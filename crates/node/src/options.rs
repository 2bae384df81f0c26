//! Everything a node is told at start.

use crate::seams::{Guests, Images, Layers, Processes, Storage};
use std::{path::PathBuf, sync::Arc, time::Duration};

/// Settings and parts of a node. Made with [`Options::new`], then adjusted field by field.
pub struct Options {
    /// The right to the data directory, when it was taken already; otherwise the node takes it.
    pub lease: Option<crate::node::Lease>,
    /// State that outlives reboots: records, images, templates, sandboxes. Created when missing.
    /// One server at a time: a lock file in it refuses a second.
    pub data_dir: PathBuf,
    /// Sockets and console files of machines; may be emptied by a reboot. Created when missing.
    pub run_dir: PathBuf,
    /// Kernel and initramfs for cold boots.
    pub kit: Kit,
    /// The world outside: monitors, networks, storage, images, guests.
    pub parts: Parts,
    /// What this node admits.
    pub limits: Limits,
    /// Machines kept waiting.
    pub pool: Pool,
    /// How long each step may take.
    pub deadlines: Deadlines,
}

impl Options {
    /// Options with the default limits over these directories and parts.
    #[must_use]
    pub fn new(data_dir: PathBuf, run_dir: PathBuf, kit: Kit, parts: Parts) -> Self {
        Self {
            lease: None,
            data_dir,
            run_dir,
            kit,
            parts,
            limits: Limits::default(),
            pool: Pool::default(),
            deadlines: Deadlines::default(),
        }
    }
}

/// The files a cold boot needs.
#[derive(Debug, Clone)]
pub struct Kit {
    /// Uncompressed ELF kernel.
    pub kernel: PathBuf,
    /// initramfs holding the guest agent as init.
    pub initramfs: PathBuf,
}

/// What the node works with; each is a trait with one real implementation and a fake that injects faults.
#[derive(Clone)]
pub struct Parts {
    /// Starts and finds machines.
    pub vmm: Arc<dyn aenv_vmm::Vmm>,
    /// Gives network slots.
    pub network: Arc<dyn aenv_network::Network>,
    /// Opens layer stacks as disks.
    pub storage: Arc<dyn Storage>,
    /// Turns image references into root file systems.
    pub images: Arc<dyn Images>,
    /// Talks to guest agents.
    pub guests: Arc<dyn Guests>,
    /// Captures memory and merges layers.
    pub layers: Arc<dyn Layers>,
    /// Finds monitor processes that nobody remembers.
    pub processes: Arc<dyn Processes>,
}

/// What a node admits.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Host memory kept for the host itself, MiB.
    pub memory_reserve_mib: u64,
    /// Promised guest memory may be this many times the rest: clones share most of theirs.
    pub memory_overcommit: f64,
    /// Guest memory to promise, MiB, instead of computing it from the host's.
    pub memory_limit_mib: Option<u64>,
    /// Sandboxes with a machine at once.
    pub max_sandboxes: usize,
    /// Starts and resumes under way at once.
    pub max_starts: usize,
    /// Starts and resumes waiting for one of those; more are refused.
    pub max_queued: usize,
    /// Virtual CPUs of one machine. More than the host has only slow a machine down.
    pub max_vcpus: u8,
    /// Images fetched and converted at once. Apart from builds: a registry that hangs must hold up no other image.
    pub max_images: usize,
    /// Template machines booted at once.
    pub max_builds: usize,
    /// Builds waiting; more are refused.
    pub max_queued_builds: usize,
    /// Age at which a tombstone is forgotten.
    pub tombstone_age: Duration,
    /// Tombstones kept; the oldest go first.
    pub max_tombstones: usize,
    /// The longest time to live a request may ask for.
    pub max_ttl: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        Self {
            memory_reserve_mib: 1024,
            memory_overcommit: 1.5,
            memory_limit_mib: None,
            max_sandboxes: 1000,
            max_starts: (cores * 2).max(4),
            max_queued: 512,
            max_vcpus: u8::try_from(cores.clamp(2, 64)).unwrap_or(64),
            max_images: 8,
            max_builds: 1,
            max_queued_builds: 32,
            tombstone_age: Duration::from_secs(24 * 3600),
            max_tombstones: 10_000,
            max_ttl: Duration::from_secs(30 * 24 * 3600),
        }
    }
}

/// Machines restored, exercised and stopped ahead of need.
#[derive(Debug, Clone)]
pub struct Pool {
    /// Waiting machines per template in use; 0 turns the pool off.
    pub size: usize,
    /// A template counts as in use for this long after a start.
    pub recent: Duration,
    /// Guest memory of all waiting machines together, MiB.
    pub max_memory_mib: u64,
}

impl Default for Pool {
    fn default() -> Self {
        Self { size: 2, recent: Duration::from_secs(600), max_memory_mib: 4096 }
    }
}

/// Bounds of single steps. Generous: they catch what hangs, not what is slow.
#[derive(Debug, Clone)]
pub struct Deadlines {
    /// Acquiring a network slot.
    pub network: Duration,
    /// Opening, flushing, sealing or closing an export.
    pub storage: Duration,
    /// Starting a monitor up to a running machine.
    pub restore: Duration,
    /// From a restored machine to its agent's answer, `/init` included.
    pub agent: Duration,
    /// From a booted kernel to the agent's answer.
    pub boot: Duration,
    /// Stopping or continuing virtual CPUs, saving device state.
    pub machine: Duration,
    /// Writing a memory image.
    pub capture: Duration,
    /// Ending a machine.
    pub kill: Duration,
    /// One command of a warm-up.
    pub exercise: Duration,
    /// Fetching and unpacking an image.
    pub image: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        let s = Duration::from_secs;
        Self {
            network: s(10),
            storage: s(30),
            restore: s(30),
            agent: s(30),
            boot: s(120),
            machine: s(20),
            capture: s(120),
            kill: s(10),
            exercise: s(60),
            image: s(1800),
        }
    }
}
