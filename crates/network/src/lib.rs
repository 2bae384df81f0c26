//! Address plan, namespaces, taps, firewall rules and DNS of sandboxes.
//!
//! Every sandbox owns a *slot*: a network namespace holding one tap for its guest and one end of a veth pair to the
//! host. Inside, addresses are the same for all slots, because they are part of a snapshot; outside, the slot's index
//! gives unique ones. The node talks to a guest through sockets made inside the namespace ([`Network::connect`]):
//! there is no route from the host, or from another guest, to a guest.

//!
//! Inside out: [`plan`], `rules` and `ledger` are pure (addresses, firewall text, who has which slot); `netlink`, `link`, `nft` and
//! `namespace` each know one kernel interface; `threads` is the only place where a thread enters a namespace; `slot`
//! builds and tears down one slot; `pool` keeps them coming and going; `host` holds what is done once per node; `dns`
//! forwards queries; `service` is [`NetnsNetwork`].

mod dns;
mod host;
mod ledger;
mod link;
mod namespace;
mod netlink;
mod nft;
pub mod plan;
mod pool;
mod rules;
mod service;
mod slot;
mod threads;

pub use dns::Upstreams;
pub use service::{NetnsNetwork, Options};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use tokio::net::TcpStream;

/// Guest address on the tap link, the same in every slot.
pub const GUEST_IP: std::net::Ipv4Addr = std::net::Ipv4Addr::new(169, 254, 0, 21);
/// The namespace's address on that link: the guest's gateway and resolver.
pub const GATEWAY_IP: std::net::Ipv4Addr = std::net::Ipv4Addr::new(169, 254, 0, 22);
/// Prefix length of that link.
pub const LINK_PREFIX: u8 = 30;
/// Hardware address of every guest's network device (locally administered).
pub const GUEST_MAC: &str = "02:ae:00:00:00:15";
/// Name of the tap in every slot.
pub const TAP: &str = "tap0";

/// Why a network operation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// All slots are in use.
    #[error("all {0} network slots are in use; end some sandboxes or raise network.slots")]
    Exhausted(u32),
    /// The options don't make an address plan.
    #[error(transparent)]
    Plan(#[from] plan::Error),
    /// A step failed; what it made was undone.
    #[error("{step}: {reason}")]
    Step {
        /// What was being done.
        step: &'static str,
        /// The cause in words.
        reason: String,
    },
}

impl Error {
    fn step(step: &'static str, reason: impl std::fmt::Display) -> Self {
        Self::Step { step, reason: reason.to_string() }
    }
}

/// Names the step an error came from.
trait During<T> {
    fn during(self, step: &'static str) -> Result<T, Error>;
}

impl<T, E: std::fmt::Display> During<T> for Result<T, E> {
    fn during(self, step: &'static str) -> Result<T, Error> {
        self.map_err(|e| Error::step(step, e))
    }
}

/// A slot in use. Plain data: it can be written down and adopted by a later process.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Slot {
    /// Position in the address plan; unique among live slots of this node.
    pub index: u32,
    /// Distinguishes uses of the same index: names are never reused.
    pub generation: u64,
    /// Path of the namespace (a bind mount).
    pub netns: PathBuf,
}

/// What a guest may reach. Private, link-local and host ranges are refused whatever this says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Egress {
    /// Public addresses.
    Internet,
    /// Nothing at all, DNS included.
    Nothing,
}

/// Slots as the node needs them. Real: `NetnsNetwork`. The fake of the node's tests injects faults.
#[async_trait]
pub trait Network: Send + Sync + 'static {
    /// Takes a prepared slot (or makes one) and applies `egress`.
    async fn acquire(&self, egress: Egress) -> Result<Slot, Error>;

    /// Changes what a live slot's guest may reach, atomically.
    async fn set_egress(&self, slot: &Slot, egress: Egress) -> Result<(), Error>;

    /// Claims a slot that a former process left in use. `false` when it no longer exists.
    async fn adopt(&self, slot: &Slot) -> Result<bool, Error>;

    /// Gives a slot back: it is torn down in the background and its names are never used again. Idempotent.
    async fn release(&self, slot: &Slot);

    /// Removes every slot of this node that was neither acquired nor adopted since start. Returns how many.
    async fn reap(&self) -> Result<usize, Error>;

    /// Connects to a TCP port of the slot's guest from inside its namespace. No deadline of its own.
    async fn connect(&self, slot: &Slot, port: u16) -> std::io::Result<TcpStream>;
}
