//! Log lines of sandboxes and builds.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// A line as the first log API has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = SandboxLog)]
pub struct LogLine {
    /// When.
    #[schema(value_type = String, format = DateTime)]
    pub timestamp: Timestamp,
    /// Text.
    pub line: String,
}

/// A structured line. `level` is one of `debug`, `info`, `warn`, `error`: the SDKs refuse others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = SandboxLogEntry)]
pub struct LogEntry {
    /// When.
    #[schema(value_type = String, format = DateTime)]
    pub timestamp: Timestamp,
    /// Level.
    pub level: String,
    /// Text.
    pub message: String,
    /// Further fields.
    #[serde(default)]
    pub fields: BTreeMap<String, String>,
}

/// `GET /sandboxes/{sandboxID}/logs`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = SandboxLogs)]
pub struct LogsV1 {
    /// Lines.
    pub logs: Vec<LogLine>,
    /// The same, structured.
    pub log_entries: Vec<LogEntry>,
}

/// `GET /v2/sandboxes/{sandboxID}/logs`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = SandboxLogsV2)]
pub struct LogsV2 {
    /// Lines.
    pub logs: Vec<LogEntry>,
    /// Where the next page begins (an addition of ours; the SDKs page by time).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// A line of a build's log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BuildLogEntry {
    /// When.
    #[schema(value_type = String, format = DateTime)]
    pub timestamp: Timestamp,
    /// Text.
    pub message: String,
    /// `debug`, `info`, `warn` or `error`.
    pub level: String,
    /// Build step it belongs to: `base`, `1`…, `finalize`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
}
