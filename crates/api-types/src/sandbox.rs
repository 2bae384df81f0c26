//! Sandboxes: requests of their life and what is told about them.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// `POST /sandboxes` and `POST /v2/sandboxes`. An absent field differs from `false`: the server's default applies.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NewSandbox {
    /// Template id, alias, `name:tag` or `ns/name`; or an image reference with its registry, like
    /// `docker.io/org/task:tag`, which needs no template to be made before.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Virtual CPUs, 1–32, other than the template's. The first such start boots the template's image in that size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_count: Option<i64>,
    /// Memory in MiB, even, from 128 on, other than the template's.
    #[serde(default, rename = "memoryMB", skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<i64>,
    /// Virtual disk size in MiB, 256–1048576, other than the template's.
    #[serde(default, rename = "diskSizeMB", skip_serializing_if = "Option::is_none")]
    pub disk_size_mb: Option<i64>,
    /// Seconds to live, 1–86400. Default 15 (v1) or 300 (v2).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
    /// `false` ends the sandbox at its end of life; absent or `true` pauses it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_pause: Option<bool>,
    /// Whether that pause keeps the memory. Only `true` is available.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_pause_memory: Option<bool>,
    /// Whether traffic resumes the sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::object::optional")]
    pub auto_resume: Option<AutoResume>,
    /// Guard the guest agent with a token. Default true; v2 ignores it and always does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secure: Option<bool>,
    /// Whether the guest reaches the internet. Default true. (The SDKs spell this one in snake case.)
    #[serde(default, rename = "allow_internet_access", skip_serializing_if = "Option::is_none")]
    pub allow_internet_access: Option<bool>,
    /// Network policy.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::object::optional")]
    pub network: Option<NetworkConfig>,
    /// Free-form labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// Environment of every command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_vars: Option<BTreeMap<String, String>>,
    /// MCP servers; not available yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub mcp: Option<serde_json::Map<String, serde_json::Value>>,
    /// Workload identity; not available yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub iam: Option<serde_json::Map<String, serde_json::Value>>,
    /// Volumes; not available yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_mounts: Option<Vec<VolumeMount>>,
}

/// Whether traffic resumes a paused sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AutoResume {
    /// It does.
    pub enabled: bool,
}

/// Network policy of a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NetworkConfig {
    /// `false` demands the traffic token on every port but the agent's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_public_traffic: Option<bool>,
    /// Addresses, CIDRs or domains the guest may reach.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_out: Option<Vec<String>>,
    /// Addresses or CIDRs the guest may not reach.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deny_out: Option<Vec<String>>,
    /// Resolvers of the guest; not available yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dns_servers: Option<Vec<String>>,
    /// Replaces the Host header towards the guest; `${PORT}` stands for the port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask_request_host: Option<String>,
    /// Ports the guest serves with TLS; not available yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub https_ports: Option<Vec<u16>>,
    /// Egress proxy; not available yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub egress_proxy: Option<serde_json::Map<String, serde_json::Value>>,
    /// Header rules by host; not available yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub rules: Option<serde_json::Map<String, serde_json::Value>>,
}

/// A volume in a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeMount {
    /// Volume name.
    pub name: String,
    /// Where in the guest.
    pub path: String,
}

/// Answer to create, connect and resume: all a client needs to talk to the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Sandbox {
    /// Template it was made from.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Its id.
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// The node it is on. Old clients insist on the field.
    #[serde(rename = "clientID")]
    pub client_id: String,
    /// Version the guest agent advertises.
    pub envd_version: String,
    /// Name the template was asked for by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// `X-Access-Token` for the guest agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envd_access_token: Option<String>,
    /// `E2b-Traffic-Access-Token` for the other ports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic_access_token: Option<String>,
    /// Base domain of guest traffic, when one is configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
}

/// The two states a client sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum SandboxState {
    /// It has a machine, or is about to.
    Running,
    /// It is captured.
    Paused,
}

/// What the end of life does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = SandboxOnTimeout)]
pub enum OnTimeout {
    /// End it.
    Kill,
    /// Keep it, paused.
    Pause,
}

/// Lifecycle policy as it stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = SandboxLifecycle)]
pub struct Lifecycle {
    /// Traffic resumes it.
    pub auto_resume: bool,
    /// What its end of life does.
    pub on_timeout: OnTimeout,
}

/// `GET /sandboxes/{sandboxID}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxDetail {
    /// Template it was made from.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Its id.
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// The node it is on.
    #[serde(rename = "clientID")]
    pub client_id: String,
    /// First start.
    #[schema(value_type = String, format = DateTime)]
    pub started_at: Timestamp,
    /// End of life; of a paused sandbox the time it was paused.
    #[schema(value_type = String, format = DateTime)]
    pub end_at: Timestamp,
    /// Version the guest agent advertises.
    pub envd_version: String,
    /// Virtual CPUs.
    pub cpu_count: u32,
    /// Memory, MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u32,
    /// Virtual disk, MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u32,
    /// Running or paused.
    pub state: SandboxState,
    /// Name the template was asked for by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// `X-Access-Token` for the guest agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envd_access_token: Option<String>,
    /// Whether the guest reaches the internet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_internet_access: Option<bool>,
    /// Base domain of guest traffic.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// Labels.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// Network policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkConfig>,
    /// Lifecycle policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifecycle: Option<Lifecycle>,
    /// Volumes.
    #[serde(default)]
    pub volume_mounts: Vec<VolumeMount>,
}

/// An item of `GET /sandboxes` and `GET /v2/sandboxes`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ListedSandbox {
    /// Template it was made from.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Its id.
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// The node it is on.
    #[serde(rename = "clientID")]
    pub client_id: String,
    /// First start.
    #[schema(value_type = String, format = DateTime)]
    pub started_at: Timestamp,
    /// End of life; of a paused sandbox the time it was paused.
    #[schema(value_type = String, format = DateTime)]
    pub end_at: Timestamp,
    /// Virtual CPUs.
    pub cpu_count: u32,
    /// Memory, MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u32,
    /// Virtual disk, MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u32,
    /// Running or paused.
    pub state: SandboxState,
    /// Version the guest agent advertises.
    pub envd_version: String,
    /// Name the template was asked for by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// Labels.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// Volumes.
    #[serde(default)]
    pub volume_mounts: Vec<VolumeMount>,
}

/// `POST /sandboxes/{sandboxID}/connect` and its v2.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConnectSandbox {
    /// Seconds to live from now, 1–86400. v1 requires it; v2 defaults to 300.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
    /// `false` boots a paused sandbox from its disk; not available yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<bool>,
}

/// `POST /sandboxes/{sandboxID}/resume`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResumeSandbox {
    /// Seconds to live from now, 1–86400. Default 15.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
    /// Replaces what the end of life does; absent keeps it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_pause: Option<bool>,
    /// `false` boots it from its disk; not available yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<bool>,
}

/// `POST /sandboxes/{sandboxID}/pause`. The body may be missing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PauseSandbox {
    /// `false` keeps only the disk. Default true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<bool>,
    /// Refuse to pause a sandbox whose agent does not answer. Default false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub require_healthy_guest: Option<bool>,
}

/// `POST /sandboxes/{sandboxID}/timeout`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SetTimeout {
    /// Seconds from now, 0–86400; 0 ends its life now.
    pub timeout: i64,
}

/// `POST /sandboxes/{sandboxID}/refreshes`. The body may be missing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RefreshSandbox {
    /// Seconds from now, 0–3600; only ever extends. Default 15.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration: Option<i64>,
}
