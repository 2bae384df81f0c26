//! Resource samples of guests.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// One sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxMetric {
    /// When.
    #[schema(value_type = String, format = DateTime)]
    pub timestamp: Timestamp,
    /// When, in seconds since 1970.
    pub timestamp_unix: i64,
    /// CPUs.
    pub cpu_count: u32,
    /// Percent of all CPUs in use.
    pub cpu_used_pct: f64,
    /// Bytes in use.
    pub mem_used: u64,
    /// Bytes in all.
    pub mem_total: u64,
    /// Bytes of page cache.
    pub mem_cache: u64,
    /// Bytes in use on the root file system.
    pub disk_used: u64,
    /// Bytes of the root file system.
    pub disk_total: u64,
}

/// `GET /sandboxes/metrics`: the latest sample of each sandbox that has one.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = SandboxesWithMetrics)]
pub struct MetricsBatch {
    /// By sandbox id.
    pub sandboxes: BTreeMap<String, SandboxMetric>,
}
