//! What a node offers to whoever speaks HTTP for it: one trait, in the node's own words.
//!
//! The server maps these to the wire and back and holds no state of its own. Real: [`crate::Node`]. The server's own
//! tests use a fake that injects faults.

use crate::model::{
    Ack, Build, BuildId, Connected, CreateSandbox, GuestMetrics, LogPage, LogQuery, Page, Principal,
    PullTemplate, Sandbox, SandboxId, SandboxQuery, Template, TemplateId,
};
use async_trait::async_trait;
use jiff::Timestamp;
use std::time::Duration;
use tokio::net::TcpStream;

/// Why the node refused or failed. The server's one mapping file gives each its status and `error_code`.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No such sandbox for this team: never existed, or its tombstone has expired.
    #[error("sandbox {0} was not found")]
    SandboxNotFound(String),
    /// The sandbox has ended; its tombstone says why.
    #[error("sandbox {id} has ended: {cause}")]
    SandboxEnded {
        /// Its id.
        id: String,
        /// Cause and time in words.
        cause: String,
    },
    /// No such template, or none that is ready.
    #[error(
        "template '{0}' does not exist or is not ready; make one with `aenv pull IMAGE --name NAME`, or name an image \
         with its registry, like docker.io/library/python:3.12"
    )]
    TemplateNotFound(String),
    /// The template or alias belongs to another team.
    #[error("template '{0}' belongs to another team")]
    TemplateForbidden(String),
    /// No such build.
    #[error("build {0} was not found")]
    BuildNotFound(String),
    /// The state table refuses this request in the present state.
    #[error("{0}")]
    Conflict(String),
    /// A value is out of range or malformed; the message names it and says what is accepted.
    #[error("{0}")]
    Invalid(String),
    /// The node has no room. `retry_after` is a hint.
    #[error("{message}")]
    Full {
        /// Which bound was met.
        message: String,
        /// When to try again.
        retry_after: Duration,
    },
    /// The sandbox exists but can't serve this now (paused without auto-resume, still starting, agent gone).
    #[error("{0}")]
    Unavailable(String),
    /// A step took longer than its deadline.
    #[error("{0}")]
    Timeout(String),
    /// A fault on this node. The message is for the operator; details are in the log under the same id.
    #[error("{0}")]
    Internal(String),
}

/// Shorthand for this module's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The operations of a node. A caller that goes away cancels nothing that was begun.
#[async_trait]
pub trait Control: Send + Sync + 'static {
    // --- who asks ---

    /// The team an API key (by the SHA-256 of its full text) belongs to.
    async fn authenticate(&self, key_sha256: [u8; 32]) -> Result<Option<Principal>>;

    // --- sandboxes ---

    /// Starts a sandbox and returns once it is running and its agent answers.
    /// With an idempotency key seen before from this team, returns the sandbox made then.
    async fn create(&self, who: &Principal, request: CreateSandbox) -> Result<Sandbox>;

    /// One sandbox of the team, tombstones included ([`crate::model::State::Dead`]).
    async fn get(&self, who: &Principal, id: &SandboxId) -> Result<Sandbox>;

    /// Sandboxes of the team, newest first.
    async fn list(&self, who: &Principal, query: SandboxQuery) -> Result<Page<Sandbox>>;

    /// Ends a sandbox, running or paused. Wins over every other operation and never needs a working guest.
    async fn kill(&self, who: &Principal, id: &SandboxId) -> Result<()>;

    /// Captures a running sandbox and frees its machine. `memory: false` keeps only the disk.
    async fn pause(&self, who: &Principal, id: &SandboxId, memory: bool) -> Result<()>;

    /// Makes a sandbox running: resumes a paused one, extends (never shortens) the life of a running one.
    async fn connect(&self, who: &Principal, id: &SandboxId, ttl: Duration) -> Result<Connected>;

    /// Resumes a paused sandbox; [`Error::Conflict`] when it runs. `on_timeout` replaces the stored choice when given.
    async fn resume(
        &self,
        who: &Principal,
        id: &SandboxId,
        ttl: Duration,
        on_timeout: Option<crate::model::OnTimeout>,
    ) -> Result<Sandbox>;

    /// Sets the end of life to now + `ttl`; zero ends it now.
    async fn set_timeout(&self, who: &Principal, id: &SandboxId, ttl: Duration) -> Result<()>;

    /// Moves the end of life to now + `ttl` if that is later.
    async fn refresh(&self, who: &Principal, id: &SandboxId, ttl: Duration) -> Result<()>;

    /// Resource samples of a sandbox between two times, oldest first, at most 1000.
    async fn metrics(
        &self,
        who: &Principal,
        id: &SandboxId,
        from: Option<Timestamp>,
        to: Option<Timestamp>,
    ) -> Result<Vec<GuestMetrics>>;

    /// Log lines of a sandbox: lifecycle events and the machine's console.
    async fn logs(&self, who: &Principal, id: &SandboxId, query: LogQuery) -> Result<LogPage>;

    // --- guest plane ---

    /// What the proxy needs to judge and route traffic for a sandbox. Cheap: no I/O, called for every request.
    /// A paused sandbox that may resume on traffic is *not* resumed by this; see [`Control::wake`].
    fn route(&self, id: &SandboxId) -> Result<Route>;

    /// Resumes a paused sandbox because of traffic, when it asked for that; else [`Error::Unavailable`].
    async fn wake(&self, id: &SandboxId) -> Result<Route>;

    /// Connects to a port of the guest of this generation. `ConnectionRefused` means the port is closed.
    async fn dial(&self, route: &Route, port: u16) -> std::io::Result<TcpStream>;

    /// Live sandboxes whose envd token could have signed a file URL: `(id, token)`.
    fn envd_tokens(&self) -> Vec<(SandboxId, String)>;

    // --- templates ---

    /// Begins to make a template from an image; follow it with [`Control::build`].
    async fn pull(&self, who: &Principal, request: PullTemplate) -> Result<Build>;

    /// State and log of a build, log lines from `offset`, at most `limit`.
    async fn build(
        &self,
        who: &Principal,
        template: &TemplateId,
        build: &BuildId,
        offset: usize,
        limit: usize,
    ) -> Result<Build>;

    /// Templates of the team, newest first.
    async fn templates(&self, who: &Principal, limit: usize, token: Option<String>)
    -> Result<Page<Template>>;

    /// A template by id, alias, `name:tag` or `ns/name`.
    async fn template(&self, who: &Principal, reference: &str) -> Result<Template>;

    /// Deletes a template and its files once no sandbox uses them. Running sandboxes are not disturbed.
    async fn delete_template(&self, who: &Principal, reference: &str) -> Result<()>;

    // --- the node itself ---

    /// Counters and gauges for `/metrics`.
    fn stats(&self) -> Stats;

    /// Whether the node can serve: storage reachable, monitor usable.
    async fn health(&self) -> Result<Ack>;
}

/// A running (or wakeable) sandbox as the proxy sees it.
#[derive(Debug, Clone)]
pub struct Route {
    /// The sandbox.
    pub id: SandboxId,
    /// Changes with every restore: pooled connections of another generation must not be used.
    pub generation: u64,
    /// Running now; `false` means paused.
    pub running: bool,
    /// Traffic may wake it.
    pub auto_resume: bool,
    /// Token that `X-Access-Token` on envd must equal, when secured. Checked by envd; known here for signed URLs.
    pub envd_token: Option<String>,
    /// Token that `E2b-Traffic-Access-Token` must equal on every port but envd's, when traffic isn't public.
    pub traffic_token: Option<String>,
    /// Replacement of the Host header (`${PORT}` stands for the port).
    pub mask_request_host: Option<String>,
    /// Where to dial.
    pub slot: Option<aenv_network::Slot>,
}

/// Counters and gauges of a node. Durations are histograms the node keeps itself.
#[derive(Debug, Clone, Default)]
pub struct Stats {
    /// Sandboxes by state name.
    pub sandboxes: Vec<(&'static str, u64)>,
    /// Tombstones written since start, by cause.
    pub ended: Vec<(String, u64)>,
    /// Machines waiting warm, by template alias.
    pub warm: Vec<(String, u64)>,
    /// `(operation, phase, upper bounds in seconds with cumulative counts, sum in seconds, count)`.
    pub phases: Vec<PhaseHistogram>,
    /// Guest memory promised to running sandboxes, MiB.
    pub memory_promised_mib: u64,
    /// Guest memory this node admits, MiB.
    pub memory_limit_mib: u64,
}

/// A histogram of one phase of one operation.
#[derive(Debug, Clone)]
pub struct PhaseHistogram {
    /// `create`, `resume`, `pause`, …
    pub operation: &'static str,
    /// `queued`, `slot`, `restore`, `agent`, …
    pub phase: &'static str,
    /// `(upper bound in seconds, cumulative count)`.
    pub buckets: Vec<(f64, u64)>,
    /// Sum of all observations in seconds.
    pub sum: f64,
    /// Number of observations.
    pub count: u64,
}
