//! Layer stacks as block devices: where their bytes come from, how they are exported, and the process that does it.
//!
//! ```text
//!   control::Client ──Unix socket, JSON frames──► control::Server      (the server's process │ storaged's process)
//!                                                       │
//!                                                   Exports            one entry a name: spec, holders, device
//!                                        ┌──────────────┼───────────┐
//!                                     Sources        Device      Exporter
//!                                  (local files;   (read-only,   (FUSE, ublk)
//!                                  registry, …)    writable)
//! ```
//! Seams: [`Sources`](source::Sources) turns a layer's description into bytes, [`Device`](device::Device) is what a
//! guest reads and writes, [`Exporter`](export::Exporter) makes a device a path that a VMM can open. This crate
//! doesn't know what a sandbox is: names and holders are the caller's.

pub mod cache;
pub mod control;
pub mod device;
pub mod export;
pub mod exports;
pub mod remote;
pub mod source;
pub mod spec;
pub mod storaged;
pub mod upper_dir;
