//! Bodies and headers of the agent's plain HTTP routes. Field names are those of E2B's envd where it has them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Header with the sandbox's access token.
pub const ACCESS_TOKEN: &str = "x-access-token";
/// Header with the node's secret for the routes that only a node may call; see [`InitRequest`].
pub const INIT_SECRET: &str = "x-aenv-init";
/// Request header of `Start` and `Connect`: read on from this offset of the process's combined output, and send
/// offsets in the events.
pub const OFFSET: &str = "x-aenv-offset";

/// Body of `POST /init`: what a guest is told after boot and after each restore. Every field is optional; an absent
/// one leaves things as they are. Answered with 204.
///
/// Needs the header [`INIT_SECRET`], whose sha256 the kernel command line holds as `aenv.init=<hex>`, or the current
/// access token in [`ACCESS_TOKEN`]. Without a hash on the command line (tests on a host) it is open until a token
/// has been set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InitRequest {
    /// Environment of every process from now on; replaces what an earlier call set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_vars: Option<BTreeMap<String, String>>,
    /// Token that every later request must carry; the empty string removes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_token: Option<String>,
    /// Sets the clock; RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timestamp: Option<String>,
    /// User of requests that name none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_user: Option<String>,
    /// Directory that empty paths mean and that processes start in when they name none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_workdir: Option<String>,
    /// Volumes. Accepted and kept; mounting them is the volume issue's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volume_mounts: Vec<VolumeMount>,
    /// Base64 of random bytes, at most [`MAX_ENTROPY`]: added to the kernel's pool, then the pool is reseeded, so
    /// that clones of one snapshot draw different numbers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entropy: Option<String>,
    /// Host name of the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// Value of `E2B_SANDBOX_ID` in processes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_id: Option<String>,
    /// Value of `E2B_TEMPLATE_ID` in processes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template_id: Option<String>,
    /// Counts the restores of this sandbox. When it differs from the last one, streams and connections from before
    /// the snapshot are ended (their peers are gone or have another identity); processes go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
}

/// Largest `entropy` of [`InitRequest`], in bytes before base64.
pub const MAX_ENTROPY: usize = 4096;

/// One volume of [`InitRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeMount {
    /// Server address.
    pub nfs_target: String,
    /// Where in the guest.
    pub path: String,
}

/// Answer of `GET /metrics`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    /// Guest time, seconds since the epoch.
    pub ts: i64,
    /// Processors online.
    pub cpu_count: u32,
    /// Busy share of all processors since the previous call, 0 to 100, two decimals.
    pub cpu_used_pct: f32,
    /// Bytes of memory.
    pub mem_total: u64,
    /// Bytes neither free nor reclaimable.
    pub mem_used: u64,
    /// Bytes of page cache.
    pub mem_cache: u64,
    /// `mem_total` in MiB, for old callers.
    pub mem_total_mib: u64,
    /// `mem_used` in MiB, for old callers.
    pub mem_used_mib: u64,
    /// Bytes of the root filesystem that a user can't write to any more.
    pub disk_used: u64,
    /// Bytes of the root filesystem.
    pub disk_total: u64,
}

/// Body of every plain HTTP error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// The HTTP status again.
    pub code: u16,
    /// What was wrong and what to do.
    pub message: String,
}

/// One uploaded or composed file, as `POST /files` (a list) and `POST /files/compose` answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UploadedFile {
    /// Absolute path.
    pub path: String,
    /// Last component of `path`.
    pub name: String,
    /// Always `file`.
    pub r#type: String,
    /// What the `X-Metadata-*` headers stored.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
}

/// Body of `POST /files/compose`: join files into one and delete them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComposeRequest {
    /// In the order they are joined.
    pub source_paths: Vec<String>,
    /// Where to.
    pub destination: String,
    /// Owner and base of relative paths; the default user when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub username: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_field_stays_absent_on_the_wire() {
        let json = serde_json::to_string(&InitRequest { generation: Some(2), ..InitRequest::default() });
        assert_eq!(json.ok().as_deref(), Some(r#"{"generation":2}"#));
    }

    #[test]
    fn fields_that_only_e2b_sends_are_tolerated() {
        let body = r#"{"hyperloopIP":"10.0.0.1","lifecycleID":"x","envVars":{"A":"1"},"defaultUser":"user"}"#;
        let init: InitRequest = serde_json::from_str(body).expect("E2B's own body is accepted");
        assert_eq!(init.env_vars.map(|vars| vars.len()), Some(1));
        assert_eq!(init.default_user.as_deref(), Some("user"));
    }
}
