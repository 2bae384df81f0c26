//! The control plane: routes, extraction and checks of requests, translation to and from the node's words.

mod check;
mod extract;
mod handlers;
pub(crate) mod openapi;
mod table;
mod wire;

pub(crate) use table::router;

use crate::{auth::Keys, metrics::Metrics, options::Options, proxy::Proxy};
use aenv_node::control::Control;
use std::sync::Arc;

/// What handlers share. Cheap to clone.
pub(crate) type State = Arc<Shared>;

/// Everything a request may need.
pub(crate) struct Shared {
    pub(crate) control: Arc<dyn Control>,
    pub(crate) keys: Keys,
    pub(crate) options: Options,
    pub(crate) proxy: Proxy,
    pub(crate) metrics: Arc<Metrics>,
}
