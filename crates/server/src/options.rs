//! What an operator may set.

use std::{net::SocketAddr, time::Duration};

/// Settings of a [`crate::Server`]. Every bound has a default that suits one machine.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where to listen. Port 0 takes a free one; see [`crate::Server::local_addr`].
    pub listen: SocketAddr,
    /// Base domain of guest traffic: Hosts of the form `{port}-{id}.{domain}` are guest traffic, and create and connect
    /// return it. `None` serves guest traffic by header only.
    pub domain: Option<String>,
    /// This node's name, told as `clientID` and `nodeID`.
    pub node_name: String,
    /// Open connections; further ones wait in the kernel's queue.
    pub max_connections: usize,
    /// From the first byte (or the end of the last response) to the end of the next request's headers. This also is how
    /// long an idle connection is kept.
    pub header_timeout: Duration,
    /// All header names and values of a request together, bytes; more is 431.
    pub max_header_bytes: usize,
    /// Path and query, bytes; more is 414.
    pub max_uri_bytes: usize,
    /// Body of a control-plane request, bytes; more is 413. Guest traffic has no such limit: it streams.
    pub max_body_bytes: usize,
    /// For a control-plane body to arrive; then 408.
    pub body_timeout: Duration,
    /// For a guest to accept a connection.
    pub dial_timeout: Duration,
    /// For a paused sandbox to resume because of traffic.
    pub wake_timeout: Duration,
    /// Requests and tunnels of one sandbox at a time; further ones are 429.
    pub max_in_flight_per_sandbox: usize,
    /// Idle guest connections kept per sandbox and port.
    pub max_idle_per_port: usize,
    /// From the shutdown signal until connections that are still busy are cut.
    pub drain: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8000)),
            domain: None,
            node_name: "local".to_owned(),
            max_connections: 16_384,
            header_timeout: Duration::from_secs(75),
            max_header_bytes: 32 << 10,
            max_uri_bytes: 16 << 10,
            max_body_bytes: 1 << 20,
            body_timeout: Duration::from_secs(30),
            dial_timeout: Duration::from_secs(5),
            wake_timeout: Duration::from_secs(60),
            max_in_flight_per_sandbox: 1024,
            max_idle_per_port: 32,
            drain: Duration::from_secs(10),
        }
    }
}
