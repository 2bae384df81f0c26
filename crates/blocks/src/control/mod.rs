//! storaged's Unix socket: one request at a time on a connection, any number of connections up to a bound.

mod client;
mod server;
pub mod wire;

pub use client::{Client, ClientError};
pub(crate) use server::{Server, ShutdownRequest};
