//! Talking to registries: manifests, configurations, blobs by byte range or whole, referrers.
//!
//! Source: opencontainers/distribution-spec and Docker's token authentication. A [`Client`] is cheap to clone and owns
//! its connections, tokens and what it learnt about each registry; nothing is global.
//!
//! One question goes through these layers, outermost first:
//!
//! ```text
//! route      deadline → rounds with back-off → mirrors in order, then the registry itself
//! exchange   a challenge is answered once, a refused token refreshed once → redirects, each judged by the guard
//! transport  bound on open requests → connect, head and idle time-outs → body counted byte by byte
//! ```
//!
//! What fails where, and what then:
//!
//! | failure | then |
//! |---|---|
//! | a mirror, whatever it says | the next; one that is down is left alone for a while |
//! | no connection, time-out, broken body, 408, 429, 5xx of the registry | again after a pause with jitter, or after `Retry-After`, within the deadline |
//! | 401 | the challenge is answered, or the token refreshed, once; then [`Error::Unauthorized`] |
//! | 403, 404, wrong digest, too large, refused redirect | the caller hears of it at once |
//! | a cached redirect that is refused | forgotten, and the registry asked for another, once |
//! | a stream's connection breaks | it goes on where it broke; bytes already handed over stay counted and hashed |
//!
//! A registry is not trusted: documents, tokens, pages, redirects and bodies are bounded, credentials go to its own host
//! or a token service named for it and nowhere else, and no redirect leads to this machine, a link-local address or
//! another scheme than HTTP. What a *range* holds can't be checked against the blob's digest; layers bring checksums.

mod auth;
mod blob;
mod challenge;
mod client;
mod credentials;
mod documents;
mod endpoint;
mod error;
mod exchange;
mod guard;
mod manifest;
mod native;
mod options;
pub(crate) mod pull;
mod referrers;
mod retry;
mod route;
mod stream;
mod transport;

pub use blob::{BlobReader, MAX_READ};
pub use client::Client;
pub use credentials::Credentials;
pub use error::{Error, Kind, Place};
pub use manifest::Manifest;
pub use native::{Format, NativeLayer, classify};
pub use options::{Mirror, Options, Settings, Transport};
pub use stream::BlobStream;
