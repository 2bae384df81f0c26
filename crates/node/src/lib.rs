//! A node: sandboxes, their state machine and drivers, templates, pools, adoption. Knows no HTTP server.

pub mod control;
pub mod model;
