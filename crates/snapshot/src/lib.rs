//! Snapshots: what a machine's memory changed ([`capture`]) and the file that says what belongs together ([`manifest`]).
//!
//! A snapshot is a set of immutable files (layers, device state) and one small manifest written last. Whoever finds a
//! valid manifest may rely on all it names; whoever finds none may delete the rest.
//!
//! Everything here blocks: call it from a blocking thread.

pub mod capture;
pub mod durable;
pub mod manifest;
pub mod pagemap;
pub mod zeros;

/// Bytes of a guest memory page.
pub const PAGE: u64 = 4096;
