//! A node: sandboxes, their state machine and drivers, templates, pools, adoption. Knows no HTTP server.
//!
//! ```text
//!  Control (trait) ── Node ──┬── drivers: one task per sandbox, fed through bounded mailboxes
//!                            │      lifecycle (pure table) decides, steps run effects with undo
//!                            ├── pool: machines restored, exercised and stopped ahead of need
//!                            ├── builds: templates from images
//!                            ├── records: SQLite, written before effects
//!                            └── seams: Vmm, Network, Storage, Images, Guests, Layers, Processes
//! ```
//! What survives a crash: records, layers and manifests in the data directory, machines (they outlive the server),
//! network slots and exports. [`Node::start`] compares them all and makes each sandbox what it truly is.

mod admission;
mod adoption;
mod builds;
mod catalog;
pub mod control;
mod image_start;
mod journal;
pub mod lifecycle;
mod machine;
pub mod model;
mod node;
pub mod options;
mod pool;
mod records;
mod sandbox;
pub mod seams;
mod serve;
mod steps;
mod telemetry;
#[cfg(test)]
mod tests;

pub use node::{Lease, Node, StartError};
pub use options::Options;
