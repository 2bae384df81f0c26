//! What the node asks of the agent in a guest.

use super::Result;
use crate::model::GuestMetrics;
use aenv_network::Slot;
use async_trait::async_trait;
use std::{collections::BTreeMap, time::Duration};

/// What a guest is told when it is given to a sandbox.
#[derive(Clone)]
pub struct Init {
    /// Proves to the agent that the node speaks; its SHA-256 is on the kernel command line.
    pub secret: String,
    /// Sandbox.
    pub sandbox: String,
    /// Template.
    pub template: String,
    /// Environment of every command; replaces what was set before.
    pub env: BTreeMap<String, String>,
    /// Token that guest traffic must show; `None` takes an earlier one away.
    pub access_token: Option<String>,
    /// User of commands that name none.
    pub default_user: String,
    /// Working directory of commands that name none.
    pub default_workdir: Option<String>,
    /// Grows with every restore.
    pub generation: u64,
}

impl std::fmt::Debug for Init {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Secrets and environments stay out of logs.
        f.debug_struct("Init").field("sandbox", &self.sandbox).field("generation", &self.generation).finish()
    }
}

/// Agents by network slot. No deadline of its own unless given one: callers bound every call.
#[async_trait]
pub trait Guests: Send + Sync + 'static {
    /// Waits until the agent accepts a connection. Returns an error only for what can't pass by waiting.
    async fn reach(&self, slot: &Slot) -> Result<()>;
    /// Gives the guest identity, environment, clock and fresh entropy.
    async fn init(&self, slot: &Slot, init: &Init) -> Result<()>;
    /// Writes everything the guest has cached to its disk.
    async fn sync(&self, slot: &Slot, secret: &str) -> Result<()>;
    /// Runs a command as a user and returns its exit code.
    async fn run(&self, slot: &Slot, user: &str, cmd: &str, args: &[&str], limit: Duration) -> Result<i32>;
    /// A resource sample. `token` when the guest is secured.
    async fn metrics(&self, slot: &Slot, token: Option<&str>) -> Result<GuestMetrics>;
}
