//! The node's nouns: ids, sandboxes, templates, builds. Plain data, no I/O.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt, str::FromStr, time::Duration};

/// Why a text is not an id.
#[derive(Debug, Clone, thiserror::Error)]
#[error("'{text}' is not a valid {kind}: expected {expected}")]
pub struct IdError {
    kind: &'static str,
    text: String,
    expected: &'static str,
}

macro_rules! short_id {
    ($(#[$doc:meta])* $name:ident, $kind:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// A fresh random id: 20 characters of `a-z0-9`, about 103 bits.
            #[must_use]
            pub fn random() -> Self {
                const ALPHABET: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
                Self((0..20).map(|_| char::from(ALPHABET[rand::random_range(0..36)])).collect())
            }

            /// The text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = IdError;

            fn from_str(text: &str) -> Result<Self, IdError> {
                let ok = text.len() == 20 && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
                if ok {
                    Ok(Self(text.to_owned()))
                } else {
                    let text = text.chars().take(64).collect();
                    Err(IdError { kind: $kind, text, expected: "20 lower-case letters and digits" })
                }
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;
            fn try_from(text: String) -> Result<Self, IdError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

short_id!(
    /// Names a sandbox for its whole life, pauses included.
    SandboxId,
    "sandbox id"
);
short_id!(
    /// Names a template over all its builds.
    TemplateId,
    "template id"
);

/// Names one build of a template (UUIDv7).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BuildId(pub uuid::Uuid);

impl fmt::Display for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Who asks: an authenticated team.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Principal {
    /// Team name; owns sandboxes and templates.
    pub team: String,
}

/// Where a sandbox is in its life. The transitions are in `lifecycle`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Being made.
    Creating,
    /// Its machine runs and its agent answers.
    Running,
    /// Being captured.
    Pausing,
    /// Captured; it has no machine.
    Paused,
    /// Being restored.
    Resuming,
    /// A live snapshot is being taken.
    Snapshotting,
    /// Children are being made.
    Forking,
    /// Being ended.
    Killing,
    /// Ended; only its tombstone is left.
    Dead,
}

/// What the end of life does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnTimeout {
    /// Keep it, paused (the default).
    Pause,
    /// End it.
    Kill,
}

/// Why a sandbox ended, in the words of the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum EndCause {
    /// Asked for.
    Killed,
    /// End of life with [`OnTimeout::Kill`].
    Ttl,
    /// Its start failed.
    StartFailed,
    /// The guest powered off.
    GuestShutdown,
    /// Guest out of memory.
    GuestOom,
    /// Host out of memory.
    HostOom,
    /// Guest kernel panic.
    GuestPanic,
    /// The monitor died.
    VmmCrash,
    /// The machine it ran on was lost.
    NodeLost,
    /// Removed to make room.
    Evicted,
}

/// What is left of a sandbox that ended, readable for a day.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tombstone {
    /// Cause.
    pub cause: EndCause,
    /// One line of evidence.
    pub detail: String,
    /// When.
    pub at: Timestamp,
    /// State it was in when it ended.
    pub last_state: State,
}

/// A measured step of the latest start, resume or pause.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Phase {
    /// `queued`, `image`, `network`, `restore`, `agent`, `capture`, …
    pub name: String,
    /// Microseconds it took.
    pub micros: u64,
}

/// A sandbox as seen from outside.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Sandbox {
    /// Id.
    pub id: SandboxId,
    /// Owner.
    pub team: String,
    /// Template it was made from.
    pub template: TemplateId,
    /// Build of that template.
    pub build: BuildId,
    /// Name by which the template was asked for, when it has one.
    pub alias: Option<String>,
    /// State.
    pub state: State,
    /// First start.
    pub started_at: Timestamp,
    /// End of life as it stands; of a paused sandbox the time it was paused.
    pub end_at: Timestamp,
    /// What the end of life does.
    pub on_timeout: OnTimeout,
    /// Traffic resumes it when paused.
    pub auto_resume: bool,
    /// Free-form labels.
    pub metadata: BTreeMap<String, String>,
    /// Virtual CPUs.
    pub vcpus: u8,
    /// Memory, MiB.
    pub memory_mib: u32,
    /// Virtual disk size, MiB.
    pub disk_mib: u32,
    /// envd version the guest advertises.
    pub envd_version: String,
    /// Token for envd, when secured.
    pub envd_token: Option<String>,
    /// Token for the other ports, when traffic isn't public.
    pub traffic_token: Option<String>,
    /// Whether it may reach the internet.
    pub allow_internet_access: bool,
    /// What its image would run by itself: `ENTRYPOINT`, then `CMD`.
    #[serde(default)]
    pub image_command: ImageCommand,
    /// Steps of the latest operation.
    pub phases: Vec<Phase>,
    /// Set once it ended.
    pub tombstone: Option<Tombstone>,
}

/// What an image would run by itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageCommand {
    /// `ENTRYPOINT`: program and first arguments; empty when there is none.
    pub entrypoint: Vec<String>,
    /// `CMD`: default arguments, or the program where there is no entrypoint.
    pub cmd: Vec<String>,
}

/// Virtual CPUs of a machine whose maker names no number.
pub const DEFAULT_VCPUS: u8 = 2;
/// Its memory, MiB.
pub const DEFAULT_MEMORY_MIB: u32 = 512;
/// Its disk, MiB.
pub const DEFAULT_DISK_MIB: u32 = 10_240;

/// A request to start a sandbox. The server has checked shapes; the node checks ranges and existence.
#[derive(Debug, Clone)]
pub struct CreateSandbox {
    /// Template id, alias, `name:tag` or `ns/name`, or an image reference with its registry or transport.
    pub template: String,
    /// Virtual CPUs other than the template's.
    pub vcpus: Option<u8>,
    /// Memory other than the template's, MiB.
    pub memory_mib: Option<u32>,
    /// Virtual disk size other than the template's, MiB.
    pub disk_mib: Option<u32>,
    /// Time to live from the moment it runs; more than zero.
    pub ttl: Duration,
    /// What the end of life does.
    pub on_timeout: OnTimeout,
    /// Traffic resumes it when paused.
    pub auto_resume: bool,
    /// Guard envd with a token.
    pub secure: bool,
    /// Restore a machine for it although one may be waiting warm: what a benchmark of cold starts needs.
    pub cold: bool,
    /// Whether it may reach the internet.
    pub allow_internet_access: bool,
    /// Whether ports but envd's are open to anyone who knows the id; `false` makes a traffic token.
    pub allow_public_traffic: bool,
    /// Replacement of the Host header towards the guest.
    pub mask_request_host: Option<String>,
    /// Free-form labels.
    pub metadata: BTreeMap<String, String>,
    /// Environment of every command.
    pub env_vars: BTreeMap<String, String>,
    /// Client's key for a safe retry.
    pub idempotency_key: Option<String>,
}

/// Outcome of a connect.
#[derive(Debug, Clone)]
pub struct Connected {
    /// The running sandbox.
    pub sandbox: Sandbox,
    /// Whether it had to be resumed.
    pub resumed: bool,
}

/// Filter and page of a sandbox list.
#[derive(Debug, Clone, Default)]
pub struct SandboxQuery {
    /// All of these labels must match.
    pub metadata: BTreeMap<String, String>,
    /// Any of these states; empty means running and paused.
    pub states: Vec<State>,
    /// Started at or after.
    pub started_after: Option<Timestamp>,
    /// Template id or alias.
    pub template: Option<String>,
    /// Oldest first instead of newest first.
    pub ascending: bool,
    /// Page size, 1–100.
    pub limit: usize,
    /// Where the last page ended.
    pub token: Option<String>,
}

/// A page of a list.
#[derive(Debug, Clone)]
pub struct Page<T> {
    /// Items.
    pub items: Vec<T>,
    /// Token of the next page; `None` on the last.
    pub next: Option<String>,
}

/// A resource sample of a guest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GuestMetrics {
    /// When.
    pub at: Timestamp,
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

/// Filter of a log read.
#[derive(Debug, Clone, Default)]
pub struct LogQuery {
    /// At or after this time.
    pub from: Option<Timestamp>,
    /// Where the last page ended.
    pub cursor: Option<String>,
    /// Newest first.
    pub descending: bool,
    /// At least this level (`debug`, `info`, `warn`, `error`).
    pub level: Option<String>,
    /// Only messages containing this.
    pub search: Option<String>,
    /// At most, 1–1000.
    pub limit: usize,
}

/// A log line.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LogEntry {
    /// When.
    pub at: Timestamp,
    /// `debug`, `info`, `warn`, `error`.
    pub level: String,
    /// Text.
    pub message: String,
    /// Further fields.
    pub fields: BTreeMap<String, String>,
}

/// A page of log lines.
#[derive(Debug, Clone)]
pub struct LogPage {
    /// Lines.
    pub entries: Vec<LogEntry>,
    /// Cursor of the next page.
    pub next: Option<String>,
}

/// A request to make a template from an image.
#[derive(Debug, Clone)]
pub struct PullTemplate {
    /// Image reference: registry, `oci:DIR[:tag]`, `oci-archive:FILE`, `docker-archive:FILE`.
    pub image: String,
    /// Name under which sandboxes are made from it.
    pub name: String,
    /// Virtual CPUs.
    pub vcpus: u8,
    /// Memory, MiB.
    pub memory_mib: u32,
    /// Virtual disk size, MiB.
    pub disk_mib: u32,
    /// Make it anew although the same image was pulled under this name before.
    pub force: bool,
    /// Registry user and password.
    pub credentials: Option<(String, String)>,
}

/// Where a build is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BuildStatus {
    /// Accepted.
    Waiting,
    /// Under way.
    Building,
    /// Usable.
    Ready,
    /// Failed; `reason` says why.
    Error,
}

/// A build of a template.
#[derive(Debug, Clone)]
pub struct Build {
    /// Template.
    pub template: TemplateId,
    /// Build.
    pub id: BuildId,
    /// State.
    pub status: BuildStatus,
    /// Log from the asked offset.
    pub log: Vec<LogEntry>,
    /// Why it failed.
    pub reason: Option<String>,
    /// Begun.
    pub created_at: Timestamp,
    /// Ended, well or not.
    pub finished_at: Option<Timestamp>,
}

/// A template.
#[derive(Debug, Clone)]
pub struct Template {
    /// Id.
    pub id: TemplateId,
    /// Owner.
    pub team: String,
    /// Names, without team.
    pub names: Vec<String>,
    /// Build used by new sandboxes, once one is ready.
    pub build: Option<BuildId>,
    /// State of the newest build.
    pub status: BuildStatus,
    /// Virtual CPUs.
    pub vcpus: u8,
    /// Memory, MiB.
    pub memory_mib: u32,
    /// Virtual disk size, MiB.
    pub disk_mib: u32,
    /// Begun.
    pub created_at: Timestamp,
    /// Last changed.
    pub updated_at: Timestamp,
    /// Sandboxes started from it.
    pub spawn_count: u64,
    /// Last start.
    pub last_spawned_at: Option<Timestamp>,
    /// Builds so far.
    pub build_count: u32,
    /// envd version.
    pub envd_version: String,
    /// Image it came from.
    pub image: String,
}

/// Nothing to say but that it went well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ack;
