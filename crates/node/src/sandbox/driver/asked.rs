//! What a driver is asked, and what it answers.

use super::Merged;
use crate::{
    control::{self, Route},
    lifecycle::Request,
    model::{Connected, OnTimeout, Sandbox},
};
use std::time::Duration;
use tokio::sync::oneshot;

/// A request with its values.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Ask {
    Create,
    Kill,
    Pause { memory: bool },
    Connect { ttl: Duration },
    Resume { ttl: Duration, on_timeout: Option<OnTimeout> },
    Wake { ttl: Duration },
    SetTimeout { ttl: Duration },
    Refresh { ttl: Duration },
}

impl Ask {
    pub(super) fn request(self) -> Request {
        match self {
            Self::Create => Request::Create,
            Self::Kill => Request::Kill,
            Self::Pause { memory } => Request::Pause { memory },
            Self::Connect { .. } => Request::Connect,
            Self::Resume { .. } => Request::Resume,
            Self::Wake { .. } => Request::Wake,
            Self::SetTimeout { .. } => Request::SetTimeout,
            Self::Refresh { .. } => Request::Refresh,
        }
    }
}

/// What came of it.
#[derive(Debug, Clone)]
pub(crate) enum Answer {
    Done,
    Sandbox(Box<Sandbox>),
    Connected(Box<Connected>),
    Route(Box<Route>),
}

pub(crate) type Reply = oneshot::Sender<control::Result<Answer>>;

/// What a driver is told.
pub(crate) enum Message {
    Ask(Ask, Reply),
    Merged(Option<Merged>),
}

pub(super) struct Waiter {
    pub(super) ask: Ask,
    pub(super) reply: Reply,
}

/// A tombstone as half a sentence.
pub(crate) fn in_words(tombstone: &crate::model::Tombstone) -> String {
    let cause =
        serde_json::to_value(tombstone.cause).ok().and_then(|value| value.as_str().map(str::to_owned));
    format!("{} at {}: {}", cause.unwrap_or_default(), tombstone.at, tombstone.detail)
}
