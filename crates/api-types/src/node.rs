//! The node itself, and what only AgentENV tells about a sandbox.

use crate::SandboxDetail;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// `GET /health`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Health {
    /// `ok`.
    pub status: String,
    /// Version of the server.
    pub version: String,
}

/// An item of `GET /teams`. Keys are stored hashed, so unlike E2B's this carries none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Team {
    /// Its id: the name.
    #[serde(rename = "teamID")]
    pub team_id: String,
    /// Name.
    pub name: String,
    /// The team this key belongs to.
    pub is_default: bool,
    /// Always empty. Clients insist on the field.
    pub api_key: String,
}

/// An item of `GET /nodes`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeSummary {
    /// The node's name.
    #[serde(rename = "nodeID")]
    pub node_id: String,
    /// `ready` or `unhealthy`.
    pub status: String,
    /// Version of the server.
    pub version: String,
    /// Sandboxes that have a machine.
    pub sandbox_count: u64,
    /// Of these, the ones being started.
    pub sandbox_starting_count: u64,
}

/// `GET /aenv/v1/node`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeStats {
    /// The node's name.
    #[serde(rename = "nodeID")]
    pub node_id: String,
    /// Version of the server.
    pub version: String,
    /// Sandboxes by state.
    pub sandboxes: BTreeMap<String, u64>,
    /// Sandboxes that ended since the node started, by cause.
    pub ended: BTreeMap<String, u64>,
    /// Machines waiting warm, by template.
    pub warm: BTreeMap<String, u64>,
    /// Memory promised to running sandboxes, MiB.
    #[serde(rename = "memoryPromisedMB")]
    pub memory_promised_mb: u64,
    /// Memory this node admits, MiB.
    #[serde(rename = "memoryLimitMB")]
    pub memory_limit_mb: u64,
    /// What operations spent their time on.
    pub phases: Vec<PhaseTotal>,
}

/// All observations of one phase of one operation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PhaseTotal {
    /// `create`, `resume`, `pause`, …
    pub operation: String,
    /// `queued`, `restore`, `agent`, …
    pub phase: String,
    /// Observations.
    pub count: u64,
    /// Their sum, seconds.
    pub sum_seconds: f64,
}

/// `GET /aenv/v1/sandboxes/{sandboxID}`: a sandbox, also after its end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct InspectedSandbox {
    /// What E2B's API tells. Its `state` of an ended sandbox is `paused`; see `lifecycleState`.
    #[serde(flatten)]
    pub sandbox: SandboxDetail,
    /// The node's own state name: `creating`, `running`, `pausing`, `paused`, `resuming`, …, `dead`.
    pub lifecycle_state: String,
    /// Build it was made from.
    #[serde(rename = "buildID")]
    pub build_id: String,
    /// `ENTRYPOINT` of its image: told, not run.
    #[serde(default)]
    pub image_entrypoint: Vec<String>,
    /// `CMD` of its image: told, not run.
    #[serde(default)]
    pub image_cmd: Vec<String>,
    /// Steps of its latest operation.
    pub phases: Vec<PhaseTiming>,
    /// Set once it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tombstone: Option<Tombstone>,
}

/// A measured step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PhaseTiming {
    /// `queued`, `image`, `network`, `restore`, `agent`, `capture`, …
    pub name: String,
    /// Microseconds it took.
    pub micros: u64,
}

/// What is left of a sandbox, readable for a day.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Tombstone {
    /// `killed`, `ttl`, `start_failed`, `guest_shutdown`, `guest_oom`, `host_oom`, `guest_panic`, `vmm_crash`,
    /// `node_lost`, `evicted`.
    pub cause: String,
    /// One line of evidence.
    pub detail: String,
    /// When.
    #[schema(value_type = String, format = DateTime)]
    pub at: Timestamp,
    /// The state it was in.
    pub last_state: String,
}
