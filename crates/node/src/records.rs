//! What the node writes down: sandboxes, templates, builds, keys. See [`Db`] for how.
//!
//! Paths in records are relative to the data directory.

mod db;

pub(crate) use db::{Db, DbError};

use crate::{
    model::{BuildId, BuildStatus, LogEntry, Sandbox, TemplateId},
    seams::Layer,
};
use aenv_network::Slot;
use aenv_snapshot::manifest::Guest;
use aenv_vmm::{Compatibility, VmRecord};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, path::PathBuf};

/// All that is known of a sandbox.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Record {
    /// What the outside sees.
    pub(crate) sandbox: Sandbox,
    /// Time to live it was made with, seconds; traffic that wakes it gives it this again.
    pub(crate) ttl: u64,
    /// Environment given at create.
    pub(crate) env_vars: BTreeMap<String, String>,
    pub(crate) mask_request_host: Option<String>,
    pub(crate) idempotency_key: Option<String>,
    /// Counts machines; part of a machine's id and of every route.
    pub(crate) generation: u64,
    /// Counts pauses, failed ones included; part of the names of their files.
    pub(crate) sequence: u64,
    pub(crate) guest: Guest,
    /// Disk, bytes.
    pub(crate) disk_size: u64,
    /// Layers below the writable one, template's first.
    pub(crate) disk: Vec<Layer>,
    /// The latest complete pause. Resuming doesn't consume it.
    pub(crate) saved: Option<Saved>,
    /// The machine, when there is one.
    pub(crate) machine: Option<MachineRecord>,
    /// Files that nothing refers to once the present machine is gone.
    pub(crate) garbage: Vec<PathBuf>,
}

/// A complete pause.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Saved {
    pub(crate) sequence: u64,
    /// All disk layers.
    pub(crate) disk: Vec<Layer>,
    /// Absent when only the disk was kept.
    pub(crate) memory: Option<SavedMemory>,
}

/// The memory half of a pause or of a template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedMemory {
    pub(crate) made_by: Compatibility,
    pub(crate) state: PathBuf,
    /// Lowest first; one raw layer is used as it is.
    pub(crate) layers: Vec<Layer>,
}

/// How to find a machine and what it holds again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MachineRecord {
    pub(crate) vm: VmRecord,
    pub(crate) slot: Slot,
    pub(crate) disk_export: String,
    pub(crate) memory_export: Option<String>,
    /// Absolute: the image its memory is a private mapping of, or its own shared file.
    pub(crate) memory_image: PathBuf,
    /// The layers of that image (relative paths).
    pub(crate) memory_layers: Vec<Layer>,
    /// Directory of the writable layer.
    pub(crate) upper: PathBuf,
}

/// A template over its builds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct TemplateRecord {
    pub(crate) id: TemplateId,
    pub(crate) team: String,
    pub(crate) names: Vec<String>,
    /// The newest ready build.
    pub(crate) current: Option<BuildId>,
    pub(crate) created_at: Timestamp,
    pub(crate) updated_at: Timestamp,
    pub(crate) spawn_count: u64,
    pub(crate) last_spawned_at: Option<Timestamp>,
    pub(crate) build_count: u32,
    /// No new sandboxes; gone when the last one that uses it is.
    pub(crate) deleted: bool,
}

/// A build.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct BuildRecord {
    pub(crate) id: BuildId,
    pub(crate) template: TemplateId,
    pub(crate) status: BuildStatus,
    pub(crate) reason: Option<String>,
    pub(crate) created_at: Timestamp,
    pub(crate) finished_at: Option<Timestamp>,
    pub(crate) image: String,
    /// Digest of the image, once known.
    pub(crate) digest: Option<String>,
    pub(crate) vcpus: u8,
    pub(crate) memory_mib: u32,
    pub(crate) disk_mib: u32,
    pub(crate) log: Vec<LogEntry>,
}
