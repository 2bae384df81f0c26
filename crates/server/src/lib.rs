//! The server of a node: control-plane API and guest proxy on one listener, over [`aenv_node::control::Control`].
//!
//! It holds no state of its own: a restart loses nothing but connections. What it keeps in memory is bounded and can
//! be thrown away at any time: pooled guest connections, a cache of accepted keys, counters.
//!
//! ```text
//!  listener ── connection (h1 / h2c, deadlines, limits)
//!     └─ plane::decide ── guest ──► proxy ── Control::{route, wake, dial} ──► guest
//!                      └─ control ► api (axum) ── Control::{create, …}
//! ```
//!
//! Failure: a connection that breaks the limits is closed; a request that breaks a rule gets a 4xx in the error body
//! of its plane; a fault of the node is a 500 with the request id under which the log tells more.

#![forbid(unsafe_code)]

mod api;
mod auth;
mod connection;
mod error;
mod metrics;
mod options;
mod plane;
mod proxy;
mod request_id;
mod server;

pub use options::Options;
pub use server::{BindError, Server, listen};

/// The OpenAPI document of the control plane, as served at `/openapi.json`.
#[must_use]
pub fn openapi() -> utoipa::openapi::OpenApi {
    api::openapi::document()
}
