//! The machine around the agent: its figures, its clock and random pool, and what `/init` and its siblings do to them.

pub(crate) mod init;
pub(crate) mod metrics;
