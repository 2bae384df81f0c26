//! What a client is told.

use super::Credentials;
use std::{collections::BTreeMap, path::PathBuf, time::Duration};

/// How a host is spoken to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Transport {
    /// Plain HTTP on this machine's loopback addresses, HTTPS elsewhere.
    #[default]
    Auto,
    /// HTTPS even on a loopback address.
    Https,
    /// Plain HTTP: anybody on the way can read and change what is sent. For test networks only.
    Http,
}

/// A host asked before the registry.
#[derive(Debug, Clone, Default)]
pub struct Mirror {
    /// `host`, `host:port` or either with a path that goes before each repository, like `mirror.example/hub`.
    pub location: String,
    /// How it is spoken to.
    pub transport: Transport,
    /// Further hosts whose token service may get this mirror's credentials.
    pub token_hosts: Vec<String>,
}

/// What is special about one registry.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// How it is spoken to.
    pub transport: Transport,
    /// Asked first, in this order.
    pub mirrors: Vec<Mirror>,
    /// Further hosts whose token service may get the registry's credentials, like `gitlab.example` for
    /// `registry.example`. Its own host always may, and for well-known registries theirs.
    pub token_hosts: Vec<String>,
}

/// What a client is told. The defaults suit public registries.
#[derive(Debug, Clone)]
pub struct Options {
    /// Who asks.
    pub credentials: Credentials,
    /// By the name that references use, like `docker.io` or `localhost:5000`.
    pub registries: BTreeMap<String, Settings>,
    /// Certificates in PEM that are trusted beside the system's.
    pub ca_bundle: Option<PathBuf>,
    /// For one document or byte range, retries and all. Streams have their own.
    pub deadline: Duration,
    /// Rounds through mirrors and registry, at least 1.
    pub attempts: u32,
    /// For a connection with its TLS handshake.
    pub connect_timeout: Duration,
    /// Until an answer's head is there.
    pub head_timeout: Duration,
    /// Between two pieces of a body.
    pub idle_timeout: Duration,
    /// Open requests at a time; more wait within their deadline.
    pub connections: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            credentials: Credentials::default(),
            registries: BTreeMap::new(),
            ca_bundle: None,
            deadline: Duration::from_secs(60),
            attempts: 5,
            connect_timeout: Duration::from_secs(5),
            head_timeout: Duration::from_secs(15),
            idle_timeout: Duration::from_secs(15),
            connections: 32,
        }
    }
}
