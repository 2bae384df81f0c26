//! Wire types and error codes of the control plane: the JSON an E2B SDK sends and parses, plus AgentENV's own routes.
//!
//! Serves both sides, so every type serialises and deserialises. Wrong types are errors; unknown fields are ignored,
//! because the SDKs add some with every release. Field names are the SDKs' (`sandboxID`, `memoryMB`, …); the golden
//! files under `tests/` were captured from them. No I/O here.

#![forbid(unsafe_code)]

mod error;
mod logs;
mod metrics;
mod node;
mod object;
mod sandbox;
mod template;

pub use error::{ErrorBody, ErrorCode, GuestErrorBody};
pub use logs::{BuildLogEntry, LogEntry, LogLine, LogsV1, LogsV2};
pub use metrics::{MetricsBatch, SandboxMetric};
pub use node::{Health, InspectedSandbox, NodeStats, NodeSummary, PhaseTiming, PhaseTotal, Team, Tombstone};
pub use sandbox::{
    AutoResume, ConnectSandbox, Lifecycle, ListedSandbox, NetworkConfig, NewSandbox, OnTimeout, PauseSandbox,
    RefreshSandbox, ResumeSandbox, Sandbox, SandboxDetail, SandboxState, SetTimeout, VolumeMount,
};
pub use template::{
    BuildInfo, BuildLogs, BuildReason, BuildStatus, PullAccepted, PullTemplate, Template, TemplateAlias,
    TemplateBuild, TemplateDetail,
};

/// Response header that carries the token of the next page; empty on the last page.
pub const NEXT_TOKEN_HEADER: &str = "x-next-token";
/// Request header with the team's key.
pub const API_KEY_HEADER: &str = "x-api-key";
/// Request header that makes a retried create safe.
pub const IDEMPOTENCY_KEY_HEADER: &str = "idempotency-key";
/// Request header of a create: `cold` asks for a restored machine instead of one that waits warm.
pub const START_HEADER: &str = "x-aenv-start";
/// Request header that names the sandbox of guest traffic.
pub const SANDBOX_ID_HEADER: &str = "e2b-sandbox-id";
/// Request header that names the port of guest traffic; without it, [`ENVD_PORT`].
pub const SANDBOX_PORT_HEADER: &str = "e2b-sandbox-port";
/// Request header with the token of a sandbox whose traffic isn't public.
pub const TRAFFIC_TOKEN_HEADER: &str = "e2b-traffic-access-token";
/// Port of the guest agent.
pub const ENVD_PORT: u16 = 49983;
